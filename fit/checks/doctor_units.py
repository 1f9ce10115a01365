"""What the doctor asks of the units and conventions of N, D, C and the loss.

Special here: a unit is seldom written into a table, so most of it is read off the numbers: FLOPs against 6ND, tokens
against parameters, losses against the logarithm of the vocabulary, against the published law, and against each other.

Besiroglu et al. 2024 (arXiv:2404.10102) for that law; Porian et al. 2024 (arXiv:2406.19146) for what it does to the
exponent to count N without embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import Array
from ..formatting import scientific
from ..table import RunTable
from .diagnosis import Warning, named, numbers, texts

BITS = 1 / np.log(2)  # bits in a nat
ABSURD = 100.0  # FLOPs this many times off 6ND are in another unit, not under another convention
EMBEDDING_SHARE = 0.1
SAME_TOKENS = 1.02  # held-out sets of other lengths move the bytes per token by less


def units(t: RunTable) -> Iterator[Warning]:
    """Quantities so far from what they should be that another unit is the likely reason."""
    asked = []
    if t.N.max() < 1000 or (t.N.max() < 1e4 and (t.N % 1 > 0).any()):
        asked.append(f"the largest N is {t.N.max():.4g} (is it in millions or billions?)")
    if t.D.max() < 1e4:
        asked.append(f"the largest D is {t.D.max():.4g} (is it in millions or billions?)")
    per_parameter = float(np.median(t.D / t.N))
    if not asked and not 1e-2 < per_parameter < 1e6:
        asked.append(f"there are {per_parameter:.3g} tokens per parameter (are N and D in the same unit?)")
    off = float(np.median(t.flops / (6 * t.N * t.D)))
    if not 1 / ABSURD < off < ABSURD:
        asked.append(f"FLOPs are {scientific(off)} times 6ND (are they in units of 1e15 or 1e18, or in PF-days?)")
    asked += _loss_unit(t)
    if asked:
        yield Warning(
            "units",
            f"Please check the units: {'; '.join(asked)}. N, D and C are counted in ones and the loss in nats per "
            "token; another unit shifts the constants, and N*, D* and every comparison with them.",
        )


def _loss_unit(t: RunTable) -> Iterator[str]:
    said = {unit for unit in texts(t, "loss_unit") if unit}
    if len(said) == 1 and not any("nat" in unit for unit in said):
        yield f"the loss is said to be in {said.pop()}"
        return
    vocabulary = numbers(t, "vocabulary")
    above = np.flatnonzero(t.loss > np.log(vocabulary))
    if above.size:
        i = above[np.argmax(t.loss[above])]
        yield (
            f"{above.size} losses, as {t.loss[i]:.4g} of run {t.run_id[i]}, are above ln {vocabulary[i]:.0f} = "
            f"{np.log(vocabulary[i]):.4g}, what knowing nothing costs (are they in bits, or diverged?)"
        )
    elif t.loss.max() > 15:
        yield f"the highest loss is {t.loss.max():.4g} (is it in nats per token?)"
    elif not said and _as_in_bits(t):
        yield (
            "the losses lie about 1.44 = 1/ln 2 times above those of Hoffmann et al.'s models of these N and D (are "
            "they in bits, or on text unlike the training data?)"
        )


def _as_in_bits(t: RunTable) -> bool:
    """Whether the losses of models of ordinary size lie along the published law, 1/ln 2 times above it.

    Published tables of English text lie at 0.88 to 1.22 times that law.
    """
    ordinary = (t.N >= 1e7) & (t.D >= 1e8)
    if ordinary.sum() < max(5, 0.5 * len(t)):
        return False
    law = 1.8172 + 482.01 / t.N[ordinary] ** 0.3478 + 2085.43 / t.D[ordinary] ** 0.3658  # Besiroglu et al. 2024
    low, middle, high = np.quantile(np.log(t.loss[ordinary] / law / BITS), [0.1, 0.5, 0.9])
    return bool(abs(middle) < 0.08 and high - low < 0.1)


def mixed_units(t: RunTable) -> Iterator[Warning]:
    """Nats with bits in one column of losses."""
    named_units = sorted({unit for unit in texts(t, "loss_unit") if unit})
    bits = _bits_by_bytes(t)
    if not bits.size:
        bits = _bits_among_nats(t)
    if len(named_units) > 1:
        said = f"units {', '.join(named_units)} are named"
    elif bits.size:
        said = f"{bits.size} of {len(t)} losses ({named(t, bits, 3)}) lie 1.44 = 1/ln 2 times above the others"
    else:
        return
    yield Warning(
        "loss_units_mixed",
        f"The losses seem to be in nats in some rows and in bits in others: {said}. No law fits both, and the step "
        "between them enters the exponents; multiply bits by 0.6931.",
    )


def mixed_tokenizers(t: RunTable) -> Iterator[Warning]:
    """Losses per token of different tokens."""
    names = [{word for word in texts(t, role) if word} for role in ("tokenizer", "vocabulary")]
    per_byte = _per_byte(t)
    known = per_byte[np.isfinite(per_byte)]
    kinds = max(map(len, names))
    if kinds > 1:
        said = f"the runs name {kinds} tokenizers or vocabularies"
    elif known.size and known.max() > SAME_TOKENS * known.min() and not _bits_by_bytes(t).size:
        said = f"a bit per byte is worth {known.min():.3g} in the loss of one run and {known.max():.3g} in another's"
    else:
        return
    yield Warning(
        "tokenizers_mixed",
        f"The losses are per token of different tokenizers ({said}) and cannot be compared, so that the law fits the "
        "choice of tokenizer too; fit bits per byte, or one tokenizer at a time.",
    )


def mixed_recipes(t: RunTable) -> Iterator[Warning]:
    """Runs that were trained on different text."""
    recipes = sorted({recipe or "raw" for recipe in texts(t, "recipe")})
    if len(recipes) > 1:
        yield Warning(
            "recipes_mixed",
            f"The runs were trained on {len(recipes)} data recipes ({', '.join(recipes)}); one law through them fits "
            "the choice of recipe as noise, so fit one recipe at a time (`fit.by_recipe`).",
        )


def _per_byte(t: RunTable) -> Array:
    """The loss of each run over its bits per byte: ln 2 times the bytes of a token, if the loss is in nats."""
    return t.loss / numbers(t, "bits_per_byte")


def _bits_by_bytes(t: RunTable) -> np.ndarray:
    """Rows whose loss over bits per byte is 1/ln 2 times that of all others; none where there are other differences."""
    per_byte = _per_byte(t)
    lifted = np.log(per_byte / np.nanmin(per_byte)) / np.log(BITS) if np.isfinite(per_byte).any() else per_byte
    known = lifted[np.isfinite(lifted)]
    two = np.minimum(np.abs(known), np.abs(known - 1)).max(initial=0) < np.log(SAME_TOKENS)
    return np.flatnonzero(lifted > 0.5) if two else np.empty(0, dtype=int)


def _bits_among_nats(t: RunTable) -> np.ndarray:
    """Rows whose loss lies 1/ln 2 times above a smooth surface through the others; none unless that explains the table.

    A quadratic surface in (log N, log D) and a set of rows lifted by log(1/ln 2) are fitted in turn, from many first
    guesses. Where several sets do as well, as a step between four budgets does, the one with the flattest surface wins.
    """
    n, lift, nobody = len(t), np.log(BITS), np.empty(0, dtype=int)
    if n < 12:
        return nobody
    y, x = np.log(t.loss), np.stack([np.log(t.N), np.log(t.D)])
    x = (x - x.mean(1, keepdims=True)) / np.maximum(x.std(1, keepdims=True), 1e-9)
    plane = np.stack([np.ones(n), *x], 1)
    surface = np.column_stack([plane, x[0] ** 2, x[1] ** 2, x[0] * x[1]]) if n >= 20 else plane
    lifted = np.array([*_splits(t), *(_off(surface, y) > level * lift for level in (-0.5, 0.0, 0.5))])
    for _ in range(10):
        nats = y - lift * lifted
        lifted = y - (nats - _off(surface, nats)) > 0.5 * lift
    nats = y - lift * lifted
    spread = np.linalg.norm(_off(surface, nats), axis=1)
    flat = np.where(spread <= 1.2 * spread.min(), np.linalg.norm(_off(plane, nats), axis=1), np.inf)
    best = lifted[np.argmin(flat)]
    moved = _off(surface, best.astype(np.float64))
    if not 2 <= best.sum() <= n - 2 or spread.min() > np.linalg.norm(_off(surface, y)) / 3 or moved @ moved < 0.1:
        return nobody
    free = float(moved @ y / (moved @ moved))  # the step that the losses themselves want
    return np.flatnonzero(best) if abs(free / lift - 1) < 0.1 else nobody


def _splits(t: RunTable) -> Iterator[np.ndarray]:
    """First guesses (n,): the table cut in two by its own order, as tables are joined, by C, by N and by D."""
    n = len(t)
    for key in (np.arange(n), t.flops, t.N, t.D):
        rank = np.argsort(np.argsort(key, kind="stable"))
        for cut in np.unique(np.linspace(2, n - 2, min(n - 3, 24)).round()):
            yield rank < cut
            yield rank >= cut


def _off(columns: Array, values: Array) -> Array:
    """What of values (..., n) no combination of columns (n, k) explains."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    basis = u[:, s > 1e-6 * s[0]]
    return values - values @ basis @ basis.T


def embeddings(t: RunTable) -> Iterator[Warning]:
    """N without embeddings where these are much of the model, and N counted both ways."""
    total, bare = numbers(t, "N_total"), numbers(t, "N_non_embedding")
    tables = numbers(t, "vocabulary") * numbers(t, "width")
    whole, part = np.isclose(t.N, total, rtol=1e-9), np.isclose(t.N, bare, rtol=1e-9)
    if (whole & ~part).any() and (part & ~whole).any():
        yield Warning(
            "N_mixed",
            f"N counts embeddings in {int((whole & ~part).sum())} runs and leaves them out in "
            f"{int((part & ~whole).sum())}; no exponent of N means anything then, so count one way.",
        )
        return
    larger = np.where(total > t.N, total, t.N + tables)
    # An N smaller than one embedding table cannot contain it, whatever its column is called.
    larger[~(part | (tables > t.N))] = np.nan
    share = (1 - t.N / larger)[np.isfinite(larger)]
    if share.max(initial=0) > EMBEDDING_SHARE:
        yield Warning(
            "non_embedding_N",
            f"N leaves out the embeddings, which are {share.min():.0%} to {share.max():.0%} of the models. "
            "The exponent of N*(C) is then higher (0.84 against 0.71 on the same runs in Porian et al. 2024) and N* is "
            "no count that compares with others; fit N_total too, and say which you report.",
        )


def flop_convention(t: RunTable) -> Iterator[Warning]:
    """FLOPs that are not 6ND, where approaches stand side by side."""
    ratio = t.flops / (6.0 * t.N * t.D)
    low, high = float(ratio.min()), float(ratio.max())
    if (low > 0.8 and high < 1.25) or not 1 / ABSURD < np.median(ratio) < ABSURD:
        return
    said = f"{high:.2f}" if high < 1.05 * low else f"between {low:.2f} and {high:.2f}"
    yield Warning(
        "flop_convention",
        f"FLOPs are {said} times 6ND; the report allocates under the table's FLOPs, while law.optimal and the "
        "published laws allocate under 6ND: N* differs by convention alone, and its exponent where the factor changes "
        "with N.",
    )
