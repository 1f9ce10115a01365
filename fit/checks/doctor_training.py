"""What the doctor asks of the training behind each run: schedule, warm-up, checkpoints, sweeps, repetition, train loss.

Special here: these are the faults that no residual shows, because each bends the losses smoothly with N or D and so
becomes part of the law. What each did to one exponent, on the same data, was measured by Porian et al. 2024
(arXiv:2406.19146): 0.71 with a warm-up too long for small runs, 0.60 without, 0.57 with decay matched to D, 0.50 tuned.

Hoffmann et al. 2022 (arXiv:2203.15556), appendix B, on schedules longer than D; Haegele et al. 2024 (arXiv:2405.18392)
on constant rates with a decay; Muennighoff et al. 2023 (arXiv:2305.16264) on repetition; Li et al. 2025
(arXiv:2503.04715) on the loss as a surface over learning rate and batch size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

import numpy as np

from ..errors import Array
from ..table import RunTable
from .diagnosis import Warning, named, numbers, sizes_and_tokens, texts

CONSTANT = ("constant", "const", "constant_with_warmup", "stable", "none", "false")
STABLE_FIRST = ("wsd", "warmup_stable_decay", "trapezoid", "trapezoidal")
UNMATCHED = 1.25  # a schedule this many times D costs visibly (Hoffmann et al. 2022, figure A1)
LONG_WARMUP = 0.2
WARMUP_BEYOND_N = 0.1  # share of the run from which a warm-up of more than N tokens is called long
MANY_EPOCHS = 4.0  # repetition up to here is nearly as good as new data (Muennighoff et al. 2023)
EVEN_CHECKPOINTS = 6  # this many equally spaced D of one size are taken for one run's checkpoints
CHECKPOINT_NAME = re.compile(r"(^|[^a-z])(step|ckpt|checkpoint|iter|iteration)[^a-z0-9]*\d+[km]?([^a-z0-9].*)?$", re.I)


def mixed_schedules(t: RunTable) -> Iterator[Warning]:
    """Runs whose learning rate decayed, fitted together with runs whose did not."""
    decayed = _decayed(t)
    constant, fallen = np.flatnonzero(decayed == 0), np.flatnonzero(decayed == 1)
    if constant.size and fallen.size:
        yield Warning(
            "schedules_mixed",
            f"{constant.size} runs ({named(t, constant, 3)}) end at a constant learning rate and {fallen.size} after a "
            "decay. Without one a loss stays well above its decayed value (Haegele et al. 2024), and the step between "
            "the two enters the exponents; decay them all, or fit each kind alone.",
        )


def _decayed(t: RunTable) -> Array:
    """1 where the learning rate fell to the end of the run, 0 where it did not, NaN where the table does not say."""
    share = numbers(t, "decay_share")
    found = np.full(len(t), np.nan)
    for i, kind in enumerate(texts(t, "schedule")):
        kind = re.sub(r"[ -]", "_", kind)
        if kind in CONSTANT:
            found[i] = 0.0
        elif (kind in STABLE_FIRST or not kind) and np.isfinite(share[i]):
            found[i] = share[i] > 0
        elif kind and not _is_number(kind):
            found[i] = 1.0
    return found


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+.\de]+", word) is not None


def unmatched_schedules(t: RunTable) -> Iterator[Warning]:
    """A cosine laid out for another D than the run's."""
    ratio = numbers(t, "schedule_tokens") / t.D
    ratio = np.where(np.isnan(ratio), numbers(t, "schedule_steps") / numbers(t, "steps"), ratio)
    ratio[_decayed(t) == 0] = np.nan  # a constant rate has no horizon
    off = np.flatnonzero((ratio > UNMATCHED) | (ratio < 1 / UNMATCHED))
    if off.size:
        yield Warning(
            "schedule_unmatched",
            f"{off.size} of {len(t)} runs follow a schedule laid out for {np.nanmin(ratio[off]):.3g} to "
            f"{np.nanmax(ratio[off]):.3g} times their D. A run cut short of its decay has too high a loss, which makes "
            "short runs look bad and the exponent of N*(C) too high (Hoffmann et al. 2022, appendix B); match the "
            "schedule to D, or decay from a checkpoint.",
        )


def long_warmup(t: RunTable) -> Iterator[Warning]:
    """A warm-up that takes much of a small run."""
    share = numbers(t, "warmup_share")
    for other in (numbers(t, "warmup_tokens") / t.D, numbers(t, "warmup_steps") / numbers(t, "steps")):
        share = np.where(np.isnan(share), other, share)
    beyond = (share * t.D > t.N) & (share > WARMUP_BEYOND_N)
    long = np.flatnonzero(beyond | (share > LONG_WARMUP))
    if long.size:
        worst = long[np.argsort(-share[long])]
        whole = ", which never reaches its learning rate" if share[worst[0]] >= 1 else ""
        yield Warning(
            "long_warmup",
            f"{long.size} of {len(t)} runs warm up for a large part of their steps, up to {share[worst[0]]:.0%}{whole} "
            f"({named(t, worst, 3)}); {int(beyond.sum())} of them for more tokens than they have parameters. Their "
            "losses are too high, which in Porian et al. 2024 took the exponent of N*(C) from 0.60 to 0.71; warm up "
            "for at most N tokens, or leave these runs out.",
        )


def mixed_losses(t: RunTable) -> Iterator[Warning]:
    """Losses on training data in some rows and on held-out data in others."""
    kinds = Counter(kind for kind in texts(t, "loss_kind") if kind)
    train, held_out = numbers(t, "train_loss"), numbers(t, "val_loss")
    with np.errstate(invalid="ignore"):
        trained = np.isclose(t.loss, train, rtol=1e-12, atol=0) & (train != held_out)
    if len(kinds) > 1:
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    elif trained.any() and not trained[np.isfinite(train)].all():
        said = f"{int(trained.sum())} of {len(t)} equal the training loss, as in {named(t, np.flatnonzero(trained), 3)}"
    else:
        return
    yield Warning(
        "losses_mixed",
        f"The losses are of different kinds ({said}). A training loss is an average over past steps and lower on "
        "repeated data, so the step between the kinds enters the exponents; take the held-out loss of every run.",
    )


def repeated_data(t: RunTable) -> Iterator[Warning]:
    """Tokens seen many times, under a law that counts each as new."""
    epochs = numbers(t, "epochs")
    epochs = np.where(np.isnan(epochs), t.D / numbers(t, "unique_tokens"), epochs)
    many = epochs > MANY_EPOCHS
    if many.any():
        yield Warning(
            "repeated_data",
            f"{int(many.sum())} of {len(t)} runs see their data more than {MANY_EPOCHS:g} times, up to "
            f"{np.nanmax(epochs):.1f}. Tokens seen again are worth less than this law assumes (Muennighoff "
            "et al. 2023), so leave these runs out or fit a law of repetition.",
        )


def checkpoints(t: RunTable) -> Iterator[Warning]:
    """Rows that are not runs of their own: intermediate checkpoints, and branches of one trunk."""
    rows = Counter(run for run, _ in set(zip(t.run_id, t.D, strict=True)))
    several = [run for run, count in rows.items() if count > 1]
    if several and (_decayed(t)[np.isin(t.run_id, several)] != 0).any():
        yield Warning(
            "checkpoints",
            f"{len(several)} runs have rows at several D, up to {max(rows.values())} of one run. The bootstrap keeps "
            "the rows of a run together, but a loss before the end of a decay is higher than that of a run trained for "
            "that D, and long runs count more often; mark the last row of each run in a column `final`, or keep only "
            "runs of a constant learning rate.",
        )
    if several:
        return
    stems = [CHECKPOINT_NAME.sub("", str(run)) for run in t.run_id]
    families, how = _families(zip(stems, t.N, strict=True), t.group), "named after steps of one run"
    if not families:
        families, how = _families(_evenly_spaced(t), t.group), "equally spaced in D at one N"
    if families:
        yield Warning(
            "checkpoints",
            f"{sum(families)} rows look like checkpoints of {len(families)} runs ({how}) and count as independent, "
            f"which makes intervals too narrow by up to {np.sqrt(max(families)):.1f} times; give the rows of a run one "
            "run_id, or keep its last.",
        )


def branches(t: RunTable) -> Iterator[Warning]:
    """Runs that share a trunk and are resampled apart."""
    parents = texts(t, "parent")
    ids = [str(run).lower() for run in t.run_id]
    trunks = [parent or (run if run in parents else None) for run, parent in zip(ids, parents, strict=True)]
    families = _families(trunks, t.group)
    if families:
        yield Warning(
            "branches",
            f"{sum(families)} runs belong to {len(families)} trunks and share their data and their luck; counted as "
            "independent they make intervals too narrow, so name the trunk of each in a column `trunk`.",
        )


def _families(keys: Iterable[Hashable], groups: np.ndarray) -> list[int]:
    """How many groups share each key, where more than one does; None is no key."""
    members: dict[Hashable, set[str]] = {}
    for key, group in zip(keys, groups, strict=True):
        if key is not None:
            members.setdefault(key, set()).add(str(group))
    return [len(found) for found in members.values() if len(found) > 1]


def _evenly_spaced(t: RunTable) -> list[float | None]:
    """N of each row that is one of an arithmetic sequence of D at that N; all None unless that is half of the table."""
    even = []
    for N in np.unique(t.N):
        D = np.unique(t.D[t.N == N])
        if len(D) >= EVEN_CHECKPOINTS and np.ptp(np.diff(D)) <= 0.02 * np.diff(D).mean():
            even.append(N)
    row = np.isin(t.N, even)
    return [float(N) if known else None for N, known in zip(t.N, row & (row.mean() >= 0.5), strict=True)]


def swept(t: RunTable) -> Iterator[Warning]:
    """Learning rates tried at one (N, D), and the best of them kept."""
    rate, batch, trials = (numbers(t, role) for role in ("learning_rate", "batch", "trials"))
    point = sizes_and_tokens(t)
    settings = {(p, r, b) for p, r, b in zip(point, rate, np.nan_to_num(batch), strict=True) if np.isfinite(r)}
    tried = Counter(p for p, _, _ in settings)
    several = [p for p, count in tried.items() if count > 1]
    if several:
        gap = np.median([np.median(t.loss[point == p]) / t.loss[point == p].min() - 1 for p in several])
        yield Warning(
            "settings_swept",
            f"{len(several)} of {len(set(point))} pairs (N, D) have several learning rates or batch sizes, up to "
            f"{max(tried.values())}, and their median loss lies {gap:.1%} above the best. The law then runs through "
            "the middle of the sweeps; fit the surface over both (Li et al. 2025) or keep the best of each, knowing "
            "that a minimum over noisy runs is too low.",
        )
        return
    best = np.nanmax(trials, initial=1.0)
    if best > 1:
        said = f"each row is the best of up to {best:.0f} runs"
    elif _without_a_rule(rate, t):
        said = (
            f"the learning rate goes up and down between {np.nanmin(rate):.3g} and {np.nanmax(rate):.3g} without a "
            "rule in N and D, as it does when each row is the best of a sweep"
        )
    else:
        return
    yield Warning(
        "best_of_sweep",
        f"{said[0].upper()}{said[1:]}. The lowest of several noisy losses is too low (of 4 by 1.0 standard deviation, "
        "of 16 by 1.8), and more so where more were tried; try equally many everywhere, or rerun the choice with "
        "other seeds.",
    )


def _without_a_rule(rate: Array, t: RunTable) -> bool:
    """Whether learning rates (n,) follow neither N, D or C monotonically nor a power law in N and D, rounded to their
    own grid.
    """
    known = np.isfinite(rate)
    y = np.log(rate[known])
    if len(y) < 6 or np.ptp(y) < 0.01:
        return False
    N, D, C = np.log(t.N[known]), np.log(t.D[known]), np.log(t.flops[known])
    if any(_monotone(x, y) or _monotone(x, -y) for x in (N, D, C)):
        return False
    X = np.stack([np.ones_like(y), N, D], 1)
    off = np.abs(y - X @ np.linalg.lstsq(X, y, rcond=None)[0]).max()
    steps = np.diff(np.unique(y))
    return bool(off > max(0.05, 0.75 * steps[steps > 0.02].min(initial=np.inf)))


def _monotone(x: Array, y: Array) -> bool:
    """Whether y never falls as x rises; among equal x it must be one value."""
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    same = np.diff(x) < 1e-9
    return bool((np.diff(y) >= -1e-9).all() and (np.abs(np.diff(y)[same]) < 1e-9).all())
