"""Checks of a table of runs before any fit, as plain warnings.

Each warning states the problem, its effect on a fit and the remedy. A check whose columns are absent gives none.

Hoffmann et al. 2022 (arXiv:2203.15556), appendix B; Besiroglu et al. 2024 (arXiv:2404.10102); Porian et al. 2024
(arXiv:2406.19146); Haegele et al. 2024 (arXiv:2405.18392); Muennighoff et al. 2023 (arXiv:2305.16264); Li et al. 2025
(arXiv:2503.04715).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from shlex import quote

import numpy as np
import scipy  # its parts are imported at first use: scipy.special takes 0.2 s
from numpy.typing import ArrayLike

from ..approaches.isoflop import METHODS, budget_levels
from ..errors import SPREAD, Array, InputError, enough, floats, identifiable, positive
from ..files import read_constants
from ..formatting import count, scientific, times
from ..table import Runs, RunTable, as_table

FEW_SIZES = 5
LEAST_SIZES = METHODS["parabola"][1]  # fewer sizes give a budget no profile at all
CONSTANTS = 5  # constants of the parametric law
FEW_RUNS = 10
EXTRAPOLATION = 100.0
BITS = 1 / np.log(2)  # bits in a nat
ORDINARY = (0.2, 1e5)  # median tokens per parameter; chosen by hand
UNEVEN_FLOPS = 1.5  # factor in FLOPs that N and D must explain; shapes of one size differ by less (chosen by hand)
ABSURD = 100.0  # FLOPs this many times off 6ND are in another unit, not under another convention
EMBEDDING_SHARE = 0.1
# Log loss is concave in log compute if it is so with this confidence, and the exponent grows by this much at least.
CONCAVE, GROWN = 0.975, 0.01
SAME_TOKENS = 1.02  # ratio of bytes per token; held-out sets of different lengths differ by less
CONSTANT = ("constant", "const", "constant_with_warmup", "stable", "none", "false")
STABLE_FIRST = ("wsd", "warmup_stable_decay", "trapezoid", "trapezoidal")
UNMATCHED = 1.25  # a schedule this many times D costs visibly (Hoffmann et al. 2022, figure A1)
LONG_WARMUP = 0.2
UNEVEN = 0.05  # p-value below which excess losses differ by more than their noise
WARMUP_BEYOND_N = 0.1  # a warm-up of more than N tokens is long if it takes a larger share of the run
MANY_EPOCHS = 4.0  # repetition up to here is nearly as good as new data (Muennighoff et al. 2023)
EVEN_CHECKPOINTS = 6  # rows of one size at this many equally spaced D look like checkpoints of one run ...
MANY_CHECKPOINTS = 20  # ... and so do rows at this many D with a falling loss
MOST_VALUES = 30  # distinct values of a column that may name experiments
OVERLAP = 0.2  # share of such a column's variance that N and D must leave unexplained
# A column names experiments if it explains this share of the residual variance, in steps of this log loss, and if
# chance would show as much with this probability (per table).
EXPLAINED, VISIBLE, CHANCE = 0.2, 0.005, 1e-4
# Two groups of losses are experiments if their step explains this share of the residual variance: of 100 simulated
# tables of 24 runs without groups one does, and of 30 runs none. Smaller groups than LEAST_GROUP are outliers.
GROUPED, LEAST_GROUP, GROUPED_RUNS = 0.85, 0.2, 24
CHECKPOINT_NAME = re.compile(r"(^|[^a-z])(step|ckpt|checkpoint|iter|iteration)[^a-z0-9]*\d+[km]?([^a-z0-9].*)?$", re.I)

COLUMNS: dict[str, list[str]] = read_constants("columns")  # role -> accepted column names
MAY_BE_ZERO = ("excess", "decay_share", "warmup_share", "warmup_tokens", "warmup_steps")


@dataclass(frozen=True)
class Warning:
    """A warning: a stable `code` for programs and a `message` for the user."""

    code: str
    message: str


Warnings = Iterator[Warning]


def examine(table: Runs, targets: Sequence[float] = ()) -> tuple[Warning, ...]:
    """Check a table and `targets` (FLOP budgets) without a fit. Returns warnings, worst first."""
    table = as_table(table)
    warnings = [warning for check in CHECKS for warning in check(table)]
    if not any(w.code == "experiments_pooled" or w.code.endswith("_mixed") for w in warnings):
        warnings = [*grouped_losses(table), *warnings]
    return (*warnings, *extrapolation(float(table.flops.max()), positive("target", targets) if len(targets) else ()))


def examine_plan(
    N: ArrayLike, D: ArrayLike, flops: ArrayLike, budget: ArrayLike, epochs: ArrayLike
) -> tuple[Warning, ...]:
    """Return the warnings that planned runs (n,) will cause; `budget` and `epochs` are NaN if unknown."""
    n, unknown = len(floats(N)), np.full(len(floats(N)), np.nan)
    names, rows = np.arange(n).astype(str), np.arange(n)
    table = RunTable(
        *(floats(N), floats(D), unknown, unknown, floats(flops), floats(budget), names, names, np.ones(n)),
        frame=None,  # type: ignore[arg-type]  # these checks read the columns above alone
        rows=rows,
        notes=(),
        source="the plan",
    )
    warnings = [warning for check in (few_runs, few_sizes, narrow_span) for warning in check(table)]
    try:
        enough(np.unique(np.stack([table.N, table.D]), axis=1).shape[1], CONSTANTS, "the parametric law")
        identifiable(table.N, table.D)
    except InputError as error:
        warnings.insert(0, Warning("no_parametric", f"Approach 3 has no answer: {error}"))
    return (*warnings, *repeated(floats(epochs)))


def numbers(table: RunTable, role: str) -> Array:
    """Return a table's column by its key in COLUMNS as numbers (n,), NaN where absent or impossible."""
    values = table.column(_column(table, role))
    possible = np.isfinite(values) & ((values > 0) | ((values == 0) & (role in MAY_BE_ZERO)))
    return np.where(possible, values, np.nan)


def texts(table: RunTable, role: str) -> list[str]:
    """Return a table's column by its key in COLUMNS as lower-case text, empty where absent."""
    name = _column(table, role)
    if not name:
        return [""] * len(table)
    values = table.frame[name].iloc[table.rows]
    return ["" if lost else str(v).strip().lower() for v, lost in zip(values, values.isna(), strict=True)]


def _column(table: RunTable, role: str) -> str:
    """Return a column's name in the table by its key in COLUMNS, ignoring case and separators; "" if absent."""
    exist = {re.sub("[ -]", "_", str(name).strip().lower()): name for name in reversed(list(table.frame.columns))}
    return next((exist[name.lower()] for name in COLUMNS[role] if name.lower() in exist), "")


def first_finite(*columns: Array) -> Array:
    return reduce(lambda first, other: np.where(np.isnan(first), other, first), columns)


def run_names(table: RunTable, rows: np.ndarray) -> str:
    return first_few(table.run_id[rows])


def first_few(items: Sequence[str], limit: int = 3) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def _alike(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (n,), equal for rows equal in all columns, and the indices of rows that repeat an earlier one."""
    values = np.stack([np.unique(column, return_inverse=True)[1].ravel() for column in columns])
    _, first, point = np.unique(values, axis=1, return_index=True, return_inverse=True)
    return point.ravel(), np.setdiff1d(np.arange(len(columns[0])), first)


def units(t: RunTable) -> Warnings:
    questions = []
    if t.N.max() < 1000 or (t.N.max() < 1e4 and (t.N % 1 > 0).any()):
        questions.append(f"the largest N is {t.N.max():.4g} (is it in millions or billions, or a logarithm?)")
    if t.D.max() < 1e4:
        questions.append(f"the largest D is {t.D.max():.4g} (is it in millions or billions?)")
    per_parameter = float(np.median(t.D / t.N))
    if not questions and not ORDINARY[0] < per_parameter < ORDINARY[1]:
        questions.append(
            f"the median run has {per_parameter:.3g} tokens per parameter (are N and D swapped, or in different units?)"
        )
    off = float(np.median(t.flops / (6 * t.N * t.D)))
    if not 1 / ABSURD < off < ABSURD:
        of_a_token = np.ptp(np.log(t.flops / t.N)) < 0.5 * np.ptp(np.log(t.D))
        what = "per token instead of per run" if of_a_token else "in units of 1e15 or 1e18, or in PF-days"
        questions.append(f"FLOPs are {scientific(off)} times 6ND (are they {what}? `--column flops=6nd` uses 6ND)")
    questions += _loss_unit(t)
    if questions:
        yield Warning(
            "units",
            f"Please check the units: {'; '.join(questions)}. N is expected in parameters, D in tokens, C in FLOPs and "
            "the loss in nats per token; another unit of N, D or C makes N* and D* wrong, and one of the loss makes "
            "the constants, the predicted losses and their intervals wrong (multiply a loss in bits by 0.6931).",
        )


def _loss_unit(t: RunTable) -> Iterator[str]:
    named_units, vocabulary = set(texts(t, "loss_unit")) - {""}, numbers(t, "vocabulary")
    above = np.flatnonzero(t.loss > np.log(vocabulary))
    if len(named_units) == 1 and not any("nat" in unit for unit in named_units):
        yield f"the table gives the unit of the loss as {named_units.pop()}"
    elif above.size:
        i = above[np.argmax(t.loss[above])]
        yield (
            f"{above.size} losses, such as {t.loss[i]:.4g} of run {t.run_id[i]}, are above ln {vocabulary[i]:.0f} = "
            f"{np.log(vocabulary[i]):.4g}, the loss of a uniform guess (are they in bits, or did the runs diverge?)"
        )
    elif t.loss.max() > 15:
        yield f"the highest loss is {t.loss.max():.4g} (is it in nats per token?)"
    elif not named_units and _as_in_bits(t):
        yield (
            "the losses are about 1.44 = 1/ln 2 times those of Hoffmann et al.'s models of these N and D (are they in "
            "bits, or on text unlike the training data?)"
        )


def _as_in_bits(t: RunTable) -> bool:
    """Return whether losses are about 1/ln 2 times a published law's (in nats, English is at 0.88 to 1.22)."""
    ordinary = (t.N >= 1e7) & (t.D >= 1e8)
    if ordinary.sum() < max(5, 0.5 * len(t)):
        return False
    law = 1.8172 + 482.01 / t.N[ordinary] ** 0.3478 + 2085.43 / t.D[ordinary] ** 0.3658  # Besiroglu et al. 2024
    low, middle, high = np.quantile(np.log(t.loss[ordinary] / law / BITS), [0.1, 0.5, 0.9])
    return bool(abs(middle) < 0.08 and high - low < 0.1)


def mixed_units(t: RunTable) -> Warnings:
    named_units = sorted({*texts(t, "loss_unit")} - {""})
    bits = _bits_by_bytes(t)
    if not bits.size:
        bits = _bits_among_nats(t)
    if len(named_units) > 1:
        evidence = f"the table names the units {', '.join(named_units)}"
    elif bits.size:
        evidence = f"{bits.size} of {len(t)} losses ({run_names(t, bits)}) are 1.44 = 1/ln 2 times those of the others"
    else:
        return
    yield Warning(
        "loss_units_mixed",
        f"The losses seem to be in nats in some rows and in bits in others: {evidence}. No law fits both, and the step "
        "between them distorts the exponents; multiply losses in bits by 0.6931.",
    )


def mixed_tokenizers(t: RunTable) -> Warnings:
    kinds = max(len(set(texts(t, role)) - {""}) for role in ("tokenizer", "vocabulary"))
    per_byte = t.loss / numbers(t, "bits_per_byte")
    finite = per_byte[np.isfinite(per_byte)]
    if kinds > 1:
        evidence = f"the runs name {kinds} tokenizers or vocabularies"
    elif finite.size and finite.max() > SAME_TOKENS * finite.min() and not _bits_by_bytes(t).size:
        evidence = (
            f"one bit per byte equals a loss of {finite.min():.3g} in one run and of {finite.max():.3g} in another"
        )
    else:
        return
    yield Warning(
        "tokenizers_mixed",
        f"The losses are per token of different tokenizers ({evidence}) and cannot be compared, so a law would "
        "also fit the choice of tokenizer; fit bits per byte, or one tokenizer at a time.",
    )


def mixed_recipes(t: RunTable) -> Warnings:
    recipes = sorted({recipe or "raw" for recipe in texts(t, "recipe")})
    if len(recipes) > 1:
        yield Warning(
            "recipes_mixed",
            f"The runs were trained on {len(recipes)} data recipes ({', '.join(recipes)}); one law for all of them "
            "treats the choice of recipe as noise, so fit one recipe at a time (`fit.by_recipe`).",
        )


def pooled_experiments(t: RunTable) -> Warnings:
    n, candidates, reserved = len(t), [], {_column(t, role) for role in COLUMNS} | {"run_id", "group", "trunk"}
    surface = _surface(t, 3 if n >= 60 else 2)
    rest = _off(surface, np.log(t.loss))
    for name in t.frame.columns:
        values = t.frame[name].iloc[t.rows].map(str).to_numpy(dtype=str)
        free = n - surface.shape[1] - len(levels := np.unique(values)) + 1
        if name in reserved or not 2 <= len(levels) <= MOST_VALUES or free < n / 2:
            continue
        flags = (levels[:, None] == values).astype(np.float64)
        unexplained, sizes = _off(surface, flags), [len(np.unique(t.N[flag > 0])) for flag in flags]
        if np.median(sizes) < 3 or (unexplained**2).sum() < OVERLAP * n * flags.var(axis=1).sum():
            continue  # determined by N and D, like a width
        left = _off(unexplained.T, rest)
        share, step = 1 - (left @ left) / (rest @ rest), float(np.std(rest - left))
        ratio = share / (len(flags) - 1) / ((1 - share) / free)
        is_large = share > EXPLAINED and step > VISIBLE
        if is_large and scipy.special.fdtrc(len(flags) - 1, free, ratio) * len(t.frame.columns) < CHANCE:
            candidates.append((share, step, str(name)))
    if candidates:
        share, step, name = max(candidates)
        yield Warning(
            "experiments_pooled",
            f"The column {name} explains {share:.0%} of the variance of the losses that N and D do not explain, in "
            f"steps of {step:.1%}: these are different experiments, and one law for all describes none of them; fit "
            f"one at a time, or one law for each with `--column {quote(f'recipe={name}')}`.",
        )


def grouped_losses(t: RunTable) -> Warnings:
    """Warn if the losses lie on two surfaces in (log N, log D), one a step above the other."""
    n, y = len(t), np.log(t.loss)
    surface = _surface(t, 3 if n >= 60 else 2)
    rest = _off(surface, y)
    if n < GROUPED_RUNS or np.ptp(rest) < VISIBLE:
        return
    starts = (rest > level for level in np.quantile(rest, [0.25, 0.5, 0.75]))
    share, step, higher = max((_step(surface, y, start) for start in starts), key=lambda result: result[0])
    if share > GROUPED and step > VISIBLE and LEAST_GROUP <= higher.mean() <= 1 - LEAST_GROUP:
        yield Warning(
            "experiments_pooled",
            f"{higher.sum()} of {n} losses ({run_names(t, np.flatnonzero(higher))}) lie {step:.1%} above those of the "
            "other runs, with few between: these seem to be two experiments, and one law for both describes neither; "
            "name the experiment of each run in a column, and fit one law for each with `--column recipe=NAME`.",
        )


def _step(surface: Array, y: Array, higher: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Find the rows that lie a step higher in y above `surface`, starting from the mask `higher` (n,).

    Returns the explained share of the residual variance (0 if the surface nearly explains the step), the step's size,
    and the mask of the rows.
    """
    rest = _off(surface, y)
    for _ in range(10):
        unexplained = _off(surface, higher.astype(np.float64))
        if (free := float(unexplained @ unexplained)) <= OVERLAP * len(y) * higher.var():
            return 0.0, 0.0, higher
        step = float(unexplained @ y) / free
        lower = y - step * higher
        share, moved = step**2 * free / float(rest @ rest), y - lower + _off(surface, lower) > step / 2
        if (moved == higher).all():
            break
        higher = moved
    return share, step, higher


def _bits_by_bytes(t: RunTable) -> np.ndarray:
    """Return the indices of rows in bits: their ratio of loss to bits per byte is 1/ln 2 times that of all others."""
    per_byte = t.loss / numbers(t, "bits_per_byte")
    lifted = np.log(per_byte / np.nanmin(per_byte)) / np.log(BITS) if np.isfinite(per_byte).any() else per_byte
    finite = lifted[np.isfinite(lifted)]
    two = np.minimum(np.abs(finite), np.abs(finite - 1)).max(initial=0) < np.log(SAME_TOKENS)
    return np.flatnonzero(lifted > 0.5) if two else np.empty(0, dtype=int)


def _bits_among_nats(t: RunTable) -> np.ndarray:
    """Return the indices of rows in bits: losses 1/ln 2 times a surface in (log N, log D) through all others."""
    n, lift, no_rows = len(t), np.log(BITS), np.empty(0, dtype=int)
    if n < 12:
        return no_rows
    y, plane = np.log(t.loss), _surface(t, 1)
    surface = _surface(t, 2) if n >= 20 else plane
    # Initial guesses: the table cut in two by row order (two tables may have been joined), by C, by N and by D.
    guesses = []
    for key in (np.arange(n), t.flops, t.N, t.D):
        rank = np.argsort(np.argsort(key, kind="stable"))
        for cut in np.unique(np.linspace(2, n - 2, min(n - 3, 24)).round()):
            guesses += [rank < cut, rank >= cut]
    lifted = np.array([*guesses, *(_off(surface, y) > level * lift for level in (-0.5, 0.0, 0.5))])
    for _ in range(10):
        nats = y - lift * lifted
        lifted = y - (nats - _off(surface, nats)) > 0.5 * lift
    nats = y - lift * lifted
    spread = np.linalg.norm(_off(surface, nats), axis=1)
    flat = np.where(spread <= 1.2 * spread.min(), np.linalg.norm(_off(plane, nats), axis=1), np.inf)
    best = lifted[np.argmin(flat)]
    moved = _off(surface, best.astype(np.float64))
    if not 2 <= best.sum() <= n - 2 or spread.min() > np.linalg.norm(_off(surface, y)) / 3 or moved @ moved < 0.1:
        return no_rows
    free = float(moved @ y / (moved @ moved))  # the step that fits the losses best
    return np.flatnonzero(best) if abs(free / lift - 1) < 0.1 else no_rows


def _surface(t: RunTable, degree: int) -> Array:
    """Return the monomials of log N and log D up to this degree, (n, terms)."""
    x = np.log(np.stack([t.N, t.D]))
    x = (x - x.mean(1, keepdims=True)) / np.maximum(x.std(1, keepdims=True), 1e-9)
    return np.stack([x[0] ** i * x[1] ** j for i in range(degree + 1) for j in range(degree + 1 - i)], 1)


def _off(columns: Array, values: Array) -> Array:
    """Subtract from values (..., n) their projection onto columns (n, k)."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    basis = u[:, s > 1e-6 * s[0]]
    return values - values @ basis @ basis.T


def embeddings(t: RunTable) -> Warnings:
    total, bare = numbers(t, "N_total"), numbers(t, "N_non_embedding")
    tables = numbers(t, "vocabulary") * numbers(t, "width")
    whole, part = np.isclose(t.N, total, rtol=1e-9), np.isclose(t.N, bare, rtol=1e-9)
    if (whole & ~part).any() and (part & ~whole).any():
        yield Warning(
            "N_mixed",
            f"N counts embeddings in {int((whole & ~part).sum())} runs and leaves them out in "
            f"{int((part & ~whole).sum())}; an exponent of N then has no meaning, so count N in one way.",
        )
        return
    larger = np.where(total > t.N, total, t.N + tables)
    # An N smaller than one embedding table cannot include it, even if its column claims so.
    larger[~(part | (tables > t.N))] = np.nan
    share = (1 - t.N / larger)[np.isfinite(larger)]
    if share.max(initial=0) > EMBEDDING_SHARE or (part.all() and not share.size):
        shares = f", {share.min():.0%} to {share.max():.0%} of the models" if share.size else ""
        yield Warning(
            "non_embedding_N",
            f"N leaves out the embeddings{shares}. "
            "The exponent of N*(C) is then higher (0.84 against 0.71 on the same runs in Porian et al. 2024), and N* "
            "cannot be compared with other counts; fit N_total too, and state which of the two you report.",
        )


def active_parameters(t: RunTable) -> Warnings:
    active, every = numbers(t, "N_active"), numbers(t, "N_all")
    every = np.where(np.isfinite(every), every, t.N)
    share = (active / every)[active < 0.99 * every]
    if share.size:
        counts = "all experts" if np.isclose(t.N, every).all() else "the parameters that a token uses"
        yield Warning(
            "active_parameters",
            f"N counts {counts}, and a token uses {share.min():.0%} to {share.max():.0%} of all parameters. FLOPs and "
            "published laws of dense models depend on the parameters used, and memory on all of them; state which N "
            "you report.",
        )


def flop_convention(t: RunTable) -> Warnings:
    ratio = t.flops / (6.0 * t.N * t.D)
    low, high = float(ratio.min()), float(ratio.max())
    if (low > 0.8 and high < 1.25) or not 1 / ABSURD < np.median(ratio) < ABSURD:
        return
    factor = f"{high:.2f}" if high < 1.05 * low else f"between {low:.2f} and {high:.2f}"
    unexplained = _off(_surface(t, 2), np.log(ratio))
    if np.ptp(unexplained) > np.log(UNEVEN_FLOPS) and not np.isfinite(numbers(t, "N_active")).any():
        ends = " and ".join(f"{ratio[i]:.2f} in run {t.run_id[i]}" for i in np.argsort(unexplained)[[0, -1]])
        yield Warning(
            "flops_inconsistent",
            f"FLOPs are {factor} times 6ND ({ends}), and N and D do not explain the difference, so rows seem to be "
            "counted in different ways. Budgets, profiles and N* are then wrong; count all rows alike, or use "
            "`--column flops=6nd`.",
        )
        return
    yield Warning(
        "flop_convention",
        f"FLOPs are {factor} times 6ND. All answers count FLOPs as the table does, and published laws count 6ND (use "
        "--convention 6nd to compare): the convention alone changes N*, and also its exponent if the factor changes "
        "with N.",
    )


def mixed_schedules(t: RunTable) -> Warnings:
    decayed = _decayed(t)
    constant, fallen = np.flatnonzero(decayed == 0), np.flatnonzero(decayed == 1)
    if constant.size and fallen.size:
        yield Warning(
            "schedules_mixed",
            f"{constant.size} runs ({run_names(t, constant)}) end at a constant learning rate and {fallen.size} after "
            "a decay. Without a decay the loss stays well above its decayed value (Haegele et al. 2024), and the step "
            "between the two distorts the exponents; decay all runs, or fit each kind alone.",
        )


def _decayed(t: RunTable) -> Array:
    """Return 1 for runs whose learning rate ends with a decay, 0 for others, NaN where unknown."""
    share = numbers(t, "decay_share")
    decayed = np.full(len(t), np.nan)
    for i, kind in enumerate(texts(t, "schedule")):
        kind = re.sub(r"(_\d+[km]?)+$", "", re.sub(r"[ -]", "_", kind))  # constant_24000
        if kind in CONSTANT:
            decayed[i] = 0.0
        elif (kind in STABLE_FIRST or not kind) and np.isfinite(share[i]):
            decayed[i] = share[i] > 0
        elif kind and not re.fullmatch(r"[-+.\de]+", kind):  # a number is no schedule
            decayed[i] = 1.0
    return decayed


def unmatched_schedules(t: RunTable) -> Warnings:
    ratio = first_finite(numbers(t, "schedule_tokens") / t.D, numbers(t, "schedule_steps") / numbers(t, "steps"))
    ratio[_decayed(t) == 0] = np.nan  # a constant rate has no horizon
    off = np.flatnonzero((ratio > UNMATCHED) | (ratio < 1 / UNMATCHED))
    if off.size:
        yield Warning(
            "schedule_unmatched",
            f"The schedule of {off.size} of {len(t)} runs is laid out for {np.nanmin(ratio[off]):.3g} to "
            f"{np.nanmax(ratio[off]):.3g} times their D. A run that stops before its decay ends has too high a loss, "
            "which makes short runs look bad and the exponent of N*(C) too high (Hoffmann et al. 2022, appendix B); "
            "match the schedule to D, or decay from a checkpoint.",
        )


def long_warmup(t: RunTable) -> Warnings:
    by_tokens, by_steps = numbers(t, "warmup_tokens") / t.D, numbers(t, "warmup_steps") / numbers(t, "steps")
    share = first_finite(numbers(t, "warmup_share"), by_tokens, by_steps)
    beyond = (share * t.D > t.N) & (share > WARMUP_BEYOND_N)
    long = np.flatnonzero(beyond | (share > LONG_WARMUP))
    if long.size:
        worst = long[np.argsort(-share[long])]
        whole = ", never reaching the peak learning rate" if share[worst[0]] >= 1 else ""
        yield Warning(
            "long_warmup",
            f"Warm-up is a large part of the steps of {long.size} of {len(t)} runs, up to {share[worst[0]]:.0%}{whole} "
            f"({run_names(t, worst)}), and of {int(beyond.sum())} of them more tokens than they have parameters. Their "
            "losses are too high, which in Porian et al. 2024 raised the exponent of N*(C) from 0.60 to 0.71; warm up "
            "for at most N tokens, or leave these runs out.",
        )


def untuned(t: RunTable) -> Warnings:
    excess, error = numbers(t, "excess"), numbers(t, "excess_se")
    rows = np.flatnonzero(np.isfinite(excess) & (error > 0))
    if len(rows) < 2:
        return
    rows = rows[np.argsort(excess[rows])]
    middle = np.average(excess[rows], weights=error[rows] ** -2.0)
    if scipy.special.chdtrc(len(rows) - 1, (((excess[rows] - middle) / error[rows]) ** 2).sum()) < UNEVEN:
        ends = [f"{excess[i]:.1%} ± {error[i]:.1%} (N {count(t.N[i])}, D {count(t.D[i])})" for i in rows[[0, -1]]]
        yield Warning(
            "untuned_tilt",
            f"Losses lie above those of the best learning rate and batch by {' to '.join(ends)}. An excess that varies "
            "with N or D tilts the law; find rules for both with `isoflop tune`, and train with them.",
        )


def mixed_losses(t: RunTable) -> Warnings:
    kinds = Counter(filter(None, texts(t, "loss_kind")))
    train, held_out = numbers(t, "train_loss"), numbers(t, "val_loss")
    with np.errstate(invalid="ignore"):
        trained = np.isclose(t.loss, train, rtol=1e-12, atol=0) & (train != held_out)
    if len(kinds) > 1:
        evidence = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    elif trained.any() and not trained[np.isfinite(train)].all():
        evidence = (
            f"{int(trained.sum())} of {len(t)} equal the training loss, such as {run_names(t, np.flatnonzero(trained))}"
        )
    else:
        return
    yield Warning(
        "losses_mixed",
        f"The losses are of different kinds ({evidence}). A training loss is an average over past steps and lower on "
        "repeated data, so the step between the kinds distorts the exponents; use the held-out loss of every run.",
    )


def repeated_data(t: RunTable) -> Warnings:
    yield from repeated(first_finite(numbers(t, "epochs"), t.D / numbers(t, "unique_tokens")))


def repeated(epochs: Array) -> Warnings:
    many = epochs > MANY_EPOCHS
    if many.any():
        yield Warning(
            "repeated_data",
            f"{int(many.sum())} of {len(epochs)} runs see their data more than {MANY_EPOCHS:g} times, up to "
            f"{np.nanmax(epochs):.1f}. Tokens seen again are worth less than this law assumes (Muennighoff "
            "et al. 2023), so leave these runs out or fit a law of repetition.",
        )


def checkpoints(t: RunTable) -> Warnings:
    rows = Counter(run for run, _ in set(zip(t.run_id, t.D, strict=True)))
    several = [run for run, count in rows.items() if count > 1]
    if several and (_decayed(t)[np.isin(t.run_id, several)] != 0).any():
        yield Warning(
            "checkpoints",
            f"{len(several)} runs have rows at several D, up to {max(rows.values())} of one run. The bootstrap keeps "
            "the rows of a run together, but a loss before the end of a decay is higher than that of a run trained for "
            "that D, and long runs count more often; mark the last row of each run in a column `final`, or keep only "
            "runs with a constant learning rate.",
        )
    if several:
        return
    stems: list[Hashable] = [CHECKPOINT_NAME.sub("", str(run)) for run in t.run_id]
    families, how = _families(zip(stems, t.N, strict=True), t.group), "named after steps of one run"
    if not families:
        stems = _curves(t)
        families, how = _families(stems, t.group), "many D of one model, with a falling loss"
    if families:
        texts_of = t.frame.iloc[t.rows].select_dtypes(["object", "string"]).groupby(np.array(stems, dtype=str))
        ever = texts_of.nunique().max()
        owner = next((str(c) for c in ever.index[ever == 1] if t.frame[c].nunique() > 1), "NAME")
        yield Warning(
            "checkpoints",
            f"{sum(families)} rows look like checkpoints of {len(families)} runs ({how}) and count as independent, "
            f"which makes intervals too narrow by up to {np.sqrt(max(families)):.1f} times, and a loss before the end "
            f"of a decay is too high; name the run of each row (`--column {quote(f'run_id={owner}')}`), or keep the "
            "last row of each run (`frame.sort_values('D').groupby('N').tail(1)`).",
        )


def branches(t: RunTable) -> Warnings:
    parents = texts(t, "parent")
    ids = [str(run).lower() for run in t.run_id]
    trunks = (parent or (run if run in parents else None) for run, parent in zip(ids, parents, strict=True))
    families = _families(trunks, t.group)
    if families:
        yield Warning(
            "branches",
            f"{sum(families)} runs belong to {len(families)} trunks, and runs of one trunk have correlated errors; "
            "counted as independent they make intervals too narrow, so name the trunk of each in a column `trunk`.",
        )


def _families(keys: Iterable[Hashable], groups: np.ndarray) -> list[int]:
    """Count the different groups of each key; the key None and keys of one group are left out."""
    members = Counter(key for key, _ in set(zip(keys, groups, strict=True)) if key is not None)
    return [count for count in members.values() if count > 1]


def _curves(t: RunTable) -> list[Hashable]:
    """Return a run label for each row that looks like a checkpoint, else None; all None unless half of the rows do."""
    key, _ = _alike(t.N, *(np.nan_to_num(numbers(t, role)) for role in ("width", "learning_rate", "batch")))
    order = np.lexsort((t.loss, t.D, key))
    curve = np.full(len(t), -1)
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        D, first = np.unique(t.D[rows], return_index=True)
        if len(D) >= EVEN_CHECKPOINTS:
            step = np.diff(D)
            even = (np.abs(step / np.median(step) - 1) <= 0.02).mean() >= 0.5
            falls = len(D) >= MANY_CHECKPOINTS and (np.diff(t.loss[rows[first]]) < 0).mean() >= 0.8
            curve[rows] = key[rows[0]] if even or falls else -1
    half = (curve >= 0).mean() >= 0.5
    return [int(label) if half and label >= 0 else None for label in curve]


def swept(t: RunTable) -> Warnings:
    rate, batch, trials = (numbers(t, role) for role in ("learning_rate", "batch", "trials"))
    point, _ = _alike(t.N, t.D)
    settings = {(p, r, b) for p, r, b in zip(point, rate, np.nan_to_num(batch), strict=True) if np.isfinite(r)}
    tried = Counter(p for p, _, _ in settings)
    several = [p for p, count in tried.items() if count > 1]
    if several:
        gap = np.median([np.median(t.loss[point == p]) / t.loss[point == p].min() - 1 for p in several])
        yield Warning(
            "settings_swept",
            f"{len(several)} of {len(set(point))} pairs (N, D) have several learning rates or batch sizes, up to "
            f"{max(tried.values())}, and their median loss lies {gap:.1%} above the best. The law then runs through "
            "the middle of the sweeps; fit the surface over both settings (Li et al. 2025), or keep the best run of "
            "each pair, whose loss is slightly too low because it is the minimum of noisy losses.",
        )
        return
    best = np.nanmax(trials, initial=1.0)
    if best > 1:
        evidence = f"each row is the best of up to {best:.0f} runs"
    elif _without_a_rule(rate, batch, t):
        evidence = (
            f"the learning rate goes up and down between {np.nanmin(rate):.3g} and {np.nanmax(rate):.3g} without a "
            "rule in N, D and the batch, as if each row were the best of a sweep"
        )
    else:
        return
    yield Warning(
        "best_of_sweep",
        f"{evidence[0].upper()}{evidence[1:]}. The lowest of several noisy losses is too low (by 1.0 standard "
        "deviation for 4, by 1.8 for 16), and more so where more were tried; try equally many everywhere, or rerun "
        "the chosen settings with other seeds.",
    )


def _without_a_rule(rate: Array, batch: Array, t: RunTable) -> bool:
    """Return whether learning rates are neither monotonic in N, D or FLOPs nor a power law in N, D and batch."""
    has_rate = np.isfinite(rate)
    y = np.log(rate[has_rate])
    if len(y) < 6 or np.ptp(y) < 0.01:
        return False
    N, D, C = (np.log(values[has_rate]) for values in (t.N, t.D, t.flops))
    if any(_monotone(x, y) or _monotone(x, -y) for x in (N, D, C)):
        return False
    X = np.stack([np.ones_like(y), N, D, np.log(batch[has_rate]) if (batch[has_rate] > 0).all() else N], 1)
    off = np.abs(y - X @ np.linalg.lstsq(X, y, rcond=None)[0]).max()
    steps = np.diff(np.unique(y))
    return bool(off > max(0.05, 0.75 * steps[steps > 0.02].min(initial=np.inf)))


def _monotone(x: Array, y: Array) -> bool:
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    same = np.diff(x) < 1e-9
    return bool((np.diff(y) >= -1e-9).all() and (np.abs(np.diff(y)[same]) < 1e-9).all())


def _duplicates(t: RunTable) -> Warnings:
    _, again = _alike(t.run_id, t.N, t.D)
    findings = []
    if again.size:
        findings.append(f"{again.size} rows repeat the run id, N and D of another row ({run_names(t, again)})")
    # Losses rounded to four decimals may be equal by chance; with more decimals they are one measurement. Runs with
    # other settings are not compared, because among many at one (N, D) two may have the same loss.
    if np.abs(t.loss - np.round(t.loss, 4)).max() > 1e-9:
        settings = [np.nan_to_num(numbers(t, role)) for role in ("learning_rate", "batch")]
        copied = np.setdiff1d(_alike(t.N, t.D, t.loss, *settings)[1], again)
        if copied.size:
            findings.append(
                f"{copied.size} rows have the N, D and loss of a run of another name ({run_names(t, copied)})"
            )
    if findings:
        yield Warning(
            "duplicate_runs",
            f"{' and '.join(findings)}; each copy counts as one more run, which pulls the law towards it and narrows "
            "the intervals, so keep one of each.",
        )


def few_runs(t: RunTable) -> Warnings:
    pairs = len(t) - len(_alike(t.N, t.D)[1])
    if pairs < FEW_RUNS:
        yield Warning(
            "few_runs",
            f"The table has {pairs} different (N, D) and the parametric law has {CONSTANTS} constants; intervals will "
            "be rough at best.",
        )


def _profiles(t: RunTable) -> Iterator[tuple[float, np.ndarray]]:
    """Yield each FLOP budget and the mask (n,) of its runs; nothing if most runs share no budget."""
    labels, budgets = budget_levels(t.flops, t.N, t.budget)
    if not np.isfinite(t.budget).any() and (labels >= 0).mean() < 0.5:
        return  # a ladder of sizes, where runs share a budget by chance
    for level, C in enumerate(budgets):
        yield C, labels == level


def few_sizes(t: RunTable) -> Warnings:
    counts = [(C, len(np.unique(t.N[rows]))) for C, rows in _profiles(t)]
    if few := [f"{count} at {scientific(C)}" for C, count in counts if count < FEW_SIZES]:
        yield Warning(
            "few_sizes",
            f"At least {FEW_SIZES} sizes per budget are needed, and there are {first_few(few)} FLOPs; with three the "
            "curve passes exactly through each noisy loss, so add sizes near the minimum.",
        )


def _edges(t: RunTable) -> Warnings:
    edges: dict[str, list[str]] = {"smallest": [], "largest": []}
    for C, rows in _profiles(t):
        N, loss = t.N[rows], t.loss[rows]
        sizes = np.unique(N)
        lowest = int(np.argmin([loss[size == N].mean() for size in sizes]))
        if len(sizes) > 2 and lowest in (0, len(sizes) - 1):
            edges["largest" if lowest else "smallest"].append(scientific(C))
    if any(edges.values()):
        places = " and ".join(f"the {end} size at {first_few(at)}" for end, at in edges.items() if at)
        add = " and ".join({"smallest": "smaller", "largest": "larger"}[end] for end, at in edges.items() if at)
        yield Warning(
            "edge_minimum",
            f"The lowest loss is at {places} FLOPs, so the minimum may lie beyond the sizes tried, and these budgets "
            f"bound N* without measuring it; add {add} sizes.",
        )


def early_regime(t: RunTable) -> Warnings:
    """Warn if log loss is concave in log compute: sums of powers are convex, so no law here describes such runs."""
    u, v = (column - column.mean() for column in (np.log(t.N * t.D), np.log(t.N / t.D)))
    terms = np.stack([np.ones_like(u), v, v * v, u * v, u, u * u], 1)
    free = len(t) - terms.shape[1]
    constants, _, rank, _ = np.linalg.lstsq(terms, np.log(t.loss), rcond=None)
    if free < terms.shape[1] or rank < terms.shape[1]:
        return
    error = np.std(np.log(t.loss) - terms @ constants) * np.sqrt(len(t) / free * np.linalg.inv(terms.T @ terms)[-1, -1])
    slope, bend = constants[-2:]
    row_low, row_high = np.argmin(u), np.argmax(u)
    first, last = -slope - 2 * bend * u[row_low], -slope - 2 * bend * u[row_high]
    if last - first > GROWN and bend + scipy.special.stdtrit(free, CONCAVE) * error < 0:
        low, high = float(t.flops[row_low]), float(t.flops[row_high])
        yield Warning(
            "early_regime",
            f"The losses fall ever faster with compute: as C^-{first:.2g} at {scientific(low)} FLOPs and as "
            f"C^-{last:.2g} at {scientific(high)}, where a law falls ever more slowly. Such runs are too early in "
            "training, and forecasts from them are too high; leave out the smallest budgets, or add larger ones.",
        )


def narrow_span(t: RunTable) -> Warnings:
    span = float(t.flops.max()) / float(t.flops.min())
    if span < 10:
        yield Warning(
            "narrow_span",
            f"The runs span a factor of {span:.3g} in compute; an exponent of C needs a factor of 10 at least, because "
            "over a shorter range noise looks like a slope.",
        )


def _provenance(t: RunTable) -> Warnings:
    if t.dropped:
        yield Warning("dropped_worst", f"The {t.dropped} highest losses were dropped at the user's request.")
    if t.earlier:
        yield Warning(
            "logged_steps",
            f"{t.earlier:,} rows are logged steps before the last of each run, whose losses are too high for their D, "
            "and are left out; `--column group=NAME`, with the column that names the run, keeps them.",
        )
    if t.derived_d:
        yield Warning(
            "derived_d",
            "D was not measured but derived as FLOPs / (6N): N too high by 5% makes D too low by 5%, and FLOPs that "
            "count more than 6ND make D too high; use the D of the runs if you have it.",
        )


def extrapolation(high: float, targets: Iterable[float], reach: float | None = None) -> Warnings:
    """Warn of targets (FLOPs) more than `reach` times beyond the largest run, of `high` FLOPs.

    `reach` is the largest factor that a backtest tested; default EXTRAPOLATION.
    """
    far = [C for C in targets if (reach or EXTRAPOLATION) * high * SPREAD < C]  # D is rounded to whole steps
    distances = ", ".join(f"{scientific(C)} FLOPs ({times(C / high)})" for C in far)
    if far and reach:
        yield Warning(
            "backtest_short",
            f"The target {distances} is farther beyond the largest run ({scientific(high)} FLOPs) than the "
            f"{times(reach)} that the backtest covers; train larger runs, or ask about a smaller budget.",
        )
    elif far:
        yield Warning(
            "extrapolation",
            f"The target {distances} is beyond {EXTRAPOLATION:g} times the largest run ({scientific(high)} FLOPs); "
            "the intervals do not cover a law that changes beyond the runs; train larger runs, or ask about a smaller "
            "budget.",
        )


CHECKS = (
    units,
    mixed_units,
    mixed_tokenizers,
    mixed_recipes,
    pooled_experiments,
    mixed_losses,
    mixed_schedules,
    unmatched_schedules,
    long_warmup,
    untuned,
    embeddings,
    active_parameters,
    checkpoints,
    branches,
    _duplicates,
    swept,
    repeated_data,
    few_runs,
    few_sizes,
    _edges,
    early_regime,
    narrow_span,
    flop_convention,
    _provenance,
)
