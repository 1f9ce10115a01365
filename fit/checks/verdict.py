"""The verdict on whether the approaches agree, and possible reasons ("suspects") if they do not.
Hoffmann et al. 2022 (arXiv:2203.15556), Besiroglu et al. 2024 (arXiv:2404.10102), Porian et al. 2024
(arXiv:2406.19146), Pearce and Song 2024 (arXiv:2406.12907).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..approaches.approaches import Approach
from ..formatting import WIDE, amount, count, percent, scientific, times
from ..table import RunTable

AGREE_WITHIN = 3.0  # factor in N; wider intervals overlap even if an approach is wrong (chosen by hand)


@dataclass(frozen=True)
class Clash:
    """Two approaches whose intervals of N* do not overlap at a budget, and their N*."""

    flops: float
    keys: tuple[str, str]
    N: tuple[float, float]

    def __str__(self) -> str:
        (first, second), (low, high) = self.keys, self.N
        return (
            f"{first} asks for {count(low)} parameters and {second} for {count(high)} at {scientific(self.flops)} FLOPs"
        )


@dataclass(frozen=True)
class Verdict:
    """The agreement of the approaches (None: cannot be judged), a sentence on it, and suspects of a disagreement."""

    agree: bool | None
    sentence: str
    suspects: tuple[str, ...] = ()


def clashes(approaches: Mapping[str, Approach], budgets: Sequence[float]) -> list[Clash]:
    pairs = []
    for C in sorted(set(budgets)):
        estimates = {key: approach.at(C) for key, approach in approaches.items() if approach.available}
        for (first, left), (second, right) in combinations(estimates.items(), 2):
            i, j = left.N_ci, right.N_ci
            if i and j and left.N and right.N and (i[1] < j[0] or j[1] < i[0]):
                pairs.append(Clash(C, (first, second), (left.N, right.N)))
    return pairs


def verdict(approaches: Mapping[str, Approach], targets: Sequence[float], table: RunTable) -> Verdict:
    """Judge whether the approaches agree: their intervals of N* must overlap at the largest run and every target."""
    available = {key: approach for key, approach in approaches.items() if approach.available}
    if len(available) < 2:
        return Verdict(None, "Fewer than two approaches have an answer, so there is nothing to compare it with.")
    conflicts = clashes(available, (float(table.flops.max()), *targets))
    if conflicts:
        details = "; ".join(map(str, conflicts))
        suspects = find_suspects(available, {clash.flops for clash in conflicts}, table)
        return Verdict(False, f"The approaches disagree beyond their intervals: {details}.", suspects)
    spans = {key: approach.at(targets[0]).N_ci for key, approach in available.items()}
    with np.errstate(divide="ignore"):
        width = {key: float(np.divide(span[1], span[0])) for key, span in spans.items() if span}
    narrow, at = [key for key, factor in width.items() if factor <= AGREE_WITHIN], f"at {scientific(targets[0])} FLOPs"
    spans_text = dict.fromkeys(available, "no interval")
    spans_text |= {
        key: f"a factor of {amount(f, 2)}" if f < WIDE else "more than five decades" for key, f in width.items()
    }
    if len(narrow) < 2:
        wide = ", ".join(f"{key} has {span}" for key, span in spans_text.items())
        need = f"two intervals of N within a factor of {AGREE_WITHIN:g} are needed"
        return Verdict(None, f"The approaches cannot confirm one another {at}: {need}, and {wide}.")
    for first, second in combinations(narrow, 2):
        i, j = available[first].at(targets[0]), available[second].at(targets[0])
        if not any(e.N_ci[0] <= o.N <= e.N_ci[1] for e, o in ((i, j), (j, i)) if e.N_ci and o.N):
            details = f"the intervals of {first} and {second} overlap, but neither contains the other's"
            return Verdict(
                None,
                f"The approaches neither agree nor clearly disagree {at}: {details} N ({count(j.N)} and {count(i.N)}).",
            )
    subject = "The approaches" if len(narrow) == len(available) else " and ".join(narrow).capitalize()
    rest = "".join(f"; {key} is too uncertain to compare ({spans_text[key]})" for key in available if key not in narrow)
    widest = spans_text[max(narrow, key=lambda key: width[key])]
    return Verdict(True, f"{subject} agree {at} within their intervals, which span up to {widest} in N{rest}.")


def find_suspects(approaches: Mapping[str, Approach], budgets: set[float], table: RunTable) -> tuple[str, ...]:
    """Return sentences with possible reasons for a disagreement at `budgets`, unless other warnings give them."""
    suspects, envelope = [], approaches.get("envelope")
    share = 1.0 - table.column("N_non_embedding") / table.N
    if np.isfinite(share).all() and share.max() - share.min() > 0.1:
        suspects.append(
            f"Embeddings are {percent(share.min())} to {percent(share.max())} of N, so the loss is not a power law in "
            "N; compare the fits under each convention."
        )
    if envelope is not None and envelope.envelope is not None and (edges := envelope.envelope.edges_):
        suspects.append(
            f"At {edges} levels of compute, the best size of the envelope is the smallest or the largest one there."
        )
    if (far := min(budgets) / float(table.flops.max())) > 1:
        suspects.append(
            f"The approaches agree at the largest run and differ only at {times(far)} its compute, where each "
            "extrapolates its own form."
        )
    return tuple(suspects)
