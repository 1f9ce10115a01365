"""The doctor of a table of runs: what a careful reader would ask before any fit, in plain warnings.

Special here:
- Every check is one small function from a table to warnings. A check is silent about a healthy table, and about one
  that lacks the columns it reads; the thresholds were set on published tables and on simulated healthy ones.
- Each message says what was found, what that does to a fit, and what to do. A code is stable, for programs.
- `checks.py` adds what only a fit can show: outliers, bounds, approaches that disagree.

Columns that are read besides those that are fitted, under any of these names in any case:

  N_total, total_params, N                               parameters with embeddings, where N is something else
  N_non_embedding, N_no_embed, non_embedding_params,     parameters without embeddings, where N is something else
    N_kaplan
  vocab_size, vocabulary; tokenizer                      what a token is
  width, d_model, hidden_size, n_embd                    with the vocabulary: the size of an embedding
  loss_unit                                              nats, bits, ...
  loss_kind, loss_split                                  train, val, ...
  train_loss; val_loss, validation_loss, eval_loss       to tell which of the two `loss` is
  val_bpb, bpb, bits_per_byte                            the same loss in bits per byte
  schedule, lr_schedule, scheduler, decay                constant, cosine, wsd, ...
  decay_share, decay_fraction, cooldown_share,           share of the run in which the learning rate falls
    cooldown_fraction
  schedule_tokens, horizon_tokens                        the D that the schedule is laid out for; or, against `steps`,
  schedule_steps, horizon_steps, max_steps                 its steps
  steps, step                                            optimizer steps of the run
  warmup_share, warmup_fraction, warmup_ratio            warm-up as a share of the run; or
  warmup_tokens; warmup_steps                              in tokens or in steps
  epochs; or unique_tokens, U                            how often the data was seen
  learning_rate, lr, peak_lr, max_lr                     peak learning rate
  batch_tokens, batch_size, global_batch_size, bs        batch size
  trials, sweep_size                                     how many runs the row was chosen from
  recipe                                                 what was done to the training text; empty: nothing
  parent                                                 run_id of the run that this one branches from

Besiroglu et al. 2024 (arXiv:2404.10102); Porian et al. 2024 (arXiv:2406.19146).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..approaches.isoflop import budget_levels
from ..errors import Array, positive
from ..formatting import scientific, times
from ..table import RunTable
from .diagnosis import Warning, named, numbers, sizes_and_tokens
from .doctor_training import (
    branches,
    checkpoints,
    long_warmup,
    mixed_losses,
    mixed_schedules,
    repeated_data,
    swept,
    unmatched_schedules,
)
from .doctor_units import embeddings, flop_convention, mixed_recipes, mixed_tokenizers, mixed_units, units

FEW_SIZES = 5
FEW_RUNS = 10
EXTRAPOLATION = 100.0


def examine(table: RunTable, targets: Sequence[float] = ()) -> tuple[Warning, ...]:
    """Every warning that needs the table alone, worst first; `targets` are FLOP budgets that will be asked about.

    Raises InputError when a target is not a positive number.
    """
    found = [warning for check in CHECKS for warning in check(table)]
    return (*found, *_extrapolation(table, positive("target", targets) if len(targets) else np.empty(0)))


def _duplicates(t: RunTable) -> Iterator[Warning]:
    """Rows that repeat a run, and runs that repeat another's numbers under another name."""
    point = sizes_and_tokens(t)
    again = _repeats(t.run_id, point)
    said = []
    if again.size:
        said.append(f"{again.size} rows repeat the run id, N and D of another row ({named(t, again, 3)})")
    # Rounded losses of different runs may well be equal; to five decimals and more they are one measurement, unless
    # there are so many runs at one (N, D), with other settings, that two must meet.
    if np.abs(t.loss - np.round(t.loss, 4)).max() > 1e-9:
        settings = [np.nan_to_num(numbers(t, role)) for role in ("learning_rate", "batch")]
        copied = np.setdiff1d(_repeats(point, t.loss, *settings), again)
        if copied.size:
            said.append(f"{copied.size} rows have the N, D and loss of a run of another name ({named(t, copied, 3)})")
    if said:
        yield Warning(
            "duplicate_runs",
            f"{' and '.join(said)}; each copy counts as one more run, which pulls the law to it and narrows the "
            "intervals, so keep one of each.",
        )


def _repeats(*columns: np.ndarray) -> np.ndarray:
    """Rows that repeat an earlier row in all columns."""
    labels = np.stack([np.unique(column, return_inverse=True)[1].ravel() for column in columns])
    _, first = np.unique(labels, axis=1, return_index=True)
    return np.setdiff1d(np.arange(labels.shape[1]), first)


def _few_runs(t: RunTable) -> Iterator[Warning]:
    pairs = len(set(sizes_and_tokens(t)))
    if pairs < FEW_RUNS:
        yield Warning(
            "few_runs",
            f"The table has {pairs} different (N, D) and the parametric law 5 constants; intervals are rough at best.",
        )


def _profiles(t: RunTable) -> Iterator[Warning]:
    """Budgets with few sizes, and budgets whose lowest loss is at an end of the sizes."""
    labels, budgets = budget_levels(t.flops, t.N, t.budget)
    if not np.isfinite(t.budget).any() and (labels >= 0).mean() < 0.5:
        return  # a ladder of sizes: what shares a budget does so by chance
    few: list[str] = []
    edges: dict[str, list[str]] = {"smallest": [], "largest": []}
    for level, C in enumerate(budgets):
        N, loss = t.N[labels == level], t.loss[labels == level]
        sizes = np.unique(N)
        if len(sizes) < FEW_SIZES:
            few.append(f"{len(sizes)} at {scientific(C)}")
        lowest = int(np.argmin([loss[size == N].mean() for size in sizes]))
        if len(sizes) > 2 and lowest in (0, len(sizes) - 1):
            edges["largest" if lowest else "smallest"].append(scientific(C))
    if few:
        yield Warning(
            "few_sizes",
            f"A parabola wants at least {FEW_SIZES} sizes per budget, and there are {', '.join(few)} FLOPs; with three "
            "it passes through the noise of each, so add sizes near the minimum.",
        )
    if any(edges.values()):
        said = " and ".join(f"the {end} size at {', '.join(at)}" for end, at in edges.items() if at)
        add = " and ".join({"smallest": "smaller", "largest": "larger"}[end] for end, at in edges.items() if at)
        yield Warning(
            "edge_minimum",
            f"The lowest loss is at {said} FLOPs, so the minimum may lie beyond the sizes tried, and these budgets "
            f"bound N* without measuring it; add {add} sizes.",
        )


def _span(t: RunTable) -> Iterator[Warning]:
    low, high = float(t.flops.min()), float(t.flops.max())
    if high / low < 10:
        yield Warning(
            "narrow_span",
            f"The runs span a factor of {high / low:.3g} in compute; an exponent in C rests on a lever of a decade at "
            "least, and shorter ones turn noise into slope.",
        )


def _provenance(t: RunTable) -> Iterator[Warning]:
    if t.dropped:
        yield Warning("dropped_worst", f"The {t.dropped} highest losses were dropped at the user's request.")
    if t.derived_d:
        yield Warning(
            "derived_d",
            "D was not measured but derived as FLOPs / (6N): an error in N or C enters it, N too high by 5% makes D "
            "too low by 5%, and FLOPs that count more than 6ND make it too high; take D from the runs where you can.",
        )


def _extrapolation(t: RunTable, targets: Array) -> Iterator[Warning]:
    high = float(t.flops.max())
    far = [C for C in targets if EXTRAPOLATION * high < C]
    if far:
        said = ", ".join(f"{scientific(C)} FLOPs ({times(C / high)})" for C in far)
        yield Warning(
            "extrapolation",
            f"The target {said} lies beyond {EXTRAPOLATION:g} times the largest run ({scientific(high)} FLOPs); "
            "the intervals cover the noise of these runs and not a change of law on the way.",
        )


CHECKS: tuple[Callable[[RunTable], Iterator[Warning]], ...] = (
    units,
    mixed_units,
    mixed_tokenizers,
    mixed_recipes,
    mixed_losses,
    mixed_schedules,
    unmatched_schedules,
    long_warmup,
    embeddings,
    checkpoints,
    branches,
    _duplicates,
    swept,
    repeated_data,
    _few_runs,
    _profiles,
    _span,
    flop_convention,
    _provenance,
)
