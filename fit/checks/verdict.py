"""Whether the approaches agree, and if not, why they may: the usual suspects, each only where the runs give evidence.

Each suspect is a sentence with the number that raised it.

Hoffmann et al. 2022 (arXiv:2203.15556), Besiroglu et al. 2024 (arXiv:2404.10102), Porian et al. 2024
(arXiv:2406.19146), Pearce and Song 2024 (arXiv:2406.12907).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..approaches.approaches import Approach, Law
from ..approaches.isoflop import IsoflopProfiles, vertex_variance
from ..formatting import WIDE, amount, count, percent, scientific, times
from ..table import RunTable
from ..uncertainty import excess_scatter
from .outliers import find_outliers

CONVENTION = 1.1  # FLOPs over 6ND, largest over smallest or over one, from which conventions differ
FEW_SIZES = 5
LOPSIDED_T, LOPSIDED_SHIFT = 3.5, 0.05
BEND_T = 3.0
NARROW = 10.0
AGREEING = 0.9  # share of starts
AGREE_WITHIN = 3.0  # in N: wider intervals overlap whatever is true, and confirm nothing


@dataclass(frozen=True)
class Clash:
    """Two approaches whose N* intervals do not overlap at a budget: the sizes that they ask for."""

    flops: float
    keys: tuple[str, str]
    N: tuple[float, float]

    def __str__(self) -> str:
        (one, two), (low, high) = self.keys, self.N
        return f"{one} asks for {count(low)} parameters and {two} for {count(high)} at {scientific(self.flops)} FLOPs"


@dataclass(frozen=True)
class Verdict:
    """Whether the approaches agree (None: cannot be judged), in one sentence; where they do not, the suspects."""

    agree: bool | None
    sentence: str
    suspects: tuple[str, ...] = ()


def clashes(approaches: Mapping[str, Approach], budgets: Sequence[float]) -> list[Clash]:
    found = []
    for C in sorted(set(budgets)):
        estimates = {key: approach.at(C) for key, approach in approaches.items() if approach.available}
        for (one, left), (two, right) in combinations(estimates.items(), 2):
            i, j = left.N_ci, right.N_ci
            if i and j and left.N and right.N and (i[1] < j[0] or j[1] < i[0]):
                found.append(Clash(C, (one, two), (left.N, right.N)))
    return found


def verdict(approaches: Mapping[str, Approach], targets: Sequence[float], table: RunTable) -> Verdict:
    """Judged at the largest budget run and at every target, by the intervals of N*."""
    able = {key: approach for key, approach in approaches.items() if approach.available}
    if len(able) < 2:
        return Verdict(None, "Fewer than two approaches have an answer, so nothing confirms it.")
    found = clashes(able, (float(table.flops.max()), *targets))
    if found:
        said = "; ".join(map(str, found))
        suspects = find_suspects(able, {clash.flops for clash in found}, table)
        return Verdict(False, f"The approaches disagree beyond their intervals: {said}.", suspects)
    spans = {key: approach.at(targets[0]).N_ci for key, approach in able.items()}
    with np.errstate(divide="ignore"):
        width = {key: float(np.divide(span[1], span[0])) for key, span in spans.items() if span}
    narrow, at = [key for key, factor in width.items() if factor <= AGREE_WITHIN], f"at {scientific(targets[0])} FLOPs"
    words = dict.fromkeys(able, "no interval")
    words |= {key: f"a factor of {amount(f, 2)}" if f < WIDE else "over five decades" for key, f in width.items()}
    if len(narrow) < 2:
        wide = ", ".join(f"{key} has {span}" for key, span in words.items())
        need = f"two intervals of N within a factor of {AGREE_WITHIN:g} are needed"
        return Verdict(None, f"Agreement cannot be judged {at}: {need}, and {wide}.")
    who = "The approaches" if len(narrow) == len(able) else " and ".join(narrow).capitalize()
    rest = "".join(f"; {key} cannot tell, with {words[key]}" for key in able if key not in narrow)
    most = words[max(narrow, key=lambda key: width[key])]
    return Verdict(True, f"{who} agree {at} within their intervals, which span up to {most} in N{rest}.")


def find_suspects(approaches: Mapping[str, Approach], budgets: set[float], table: RunTable) -> tuple[str, ...]:
    """What may explain a disagreement at `budgets`, each a sentence."""
    one, two, three = (approaches.get(key, Approach("", "")) for key in ("envelope", "isoflop", "parametric"))
    said = [*_conventions(table, three)]
    if three.law is not None:
        said += _law(table, three.law)
    if two.profiles is not None:
        said += [*_vertices(two.profiles), *_bend(two.profiles)]
    if one.envelope is not None:
        if one.envelope.edges_:
            said.append(
                f"At {one.envelope.edges_} levels of compute the envelope is won by the smallest or largest size there."
            )
        if len(one.envelope.N_) < 4:
            said.append(f"The envelope rests on {len(one.envelope.N_)} points.")
    return (*said, *_span(table, budgets))


def _conventions(table: RunTable, parametric: Approach) -> Iterator[str]:
    ratio = table.flops / (6.0 * table.N * table.D)
    far = max(ratio.max(), 1.0) / min(ratio.min(), 1.0)
    if parametric.law is not None and parametric.flops_per_token is None and far > CONVENTION:
        yield (
            f"FLOPs are {ratio.min():.2f} to {ratio.max():.2f} times 6ND. The parametric approach allocates under "
            "C = 6ND and the others under the table's FLOPs."
        )
    share = 1.0 - table.column("N_non_embedding") / table.N
    if np.isfinite(share).all() and share.max() - share.min() > 0.1:
        yield (
            f"Embeddings are {percent(share.min())} to {percent(share.max())} of N, so loss is no power law in N: "
            "compare the fits under each convention."
        )


def _law(table: RunTable, law: Law) -> Iterator[str]:
    """Runs that the law does not explain, and a solution that is in doubt."""
    found = find_outliers(law)
    if len(found.rows):
        worst = int(found.rows[0])
        yield (
            f"{len(found.rows)} of {len(table)} runs do not follow the parametric law of the others, first "
            f"{table.run_id[worst]} ({percent(float(np.expm1(found.residual[worst])), signed=True)} in loss)."
        )
    if law.starts_["agreeing"] < AGREEING * law.starts_["tried"]:
        yield "Only {agreeing} of {tried} starts agree on the parametric optimum.".format(**law.starts_)
    if law.degenerate_:
        yield f"The parametric fit holds {', '.join(law.degenerate_)} at the end of its range."


def _vertices(profiles: IsoflopProfiles) -> Iterator[str]:
    refused = [scientific(p.flops) for p in profiles.profiles_ if not p.accepted]
    if refused:
        said = ", ".join(refused)
        yield f"{len(refused)} of {len(profiles.profiles_)} isoFLOP vertices are refused ({said} FLOPs)."
    few = ", ".join(scientific(p.flops) for p in profiles.accepted_ if len(np.unique(p.N)) < FEW_SIZES)
    if few:
        yield f"The isoFLOP profiles at {few} FLOPs have fewer than {FEW_SIZES} sizes."
    t, shift = profiles.lopsidedness() or (0.0, 0.0)
    if profiles.method == "parabola" and abs(t) > LOPSIDED_T and abs(shift) > LOPSIDED_SHIFT:
        yield (
            f"The isoFLOP profiles are lopsided (t = {t:.1f} for a cubic term, which moves the vertices by "
            f"{percent(float(np.expm1(shift)), signed=True)} in N); a parabola is biased there."
        )


def _bend(profiles: IsoflopProfiles) -> Iterator[str]:
    """A second derivative of log N*(C) among the vertices, against the uncertainty of each."""
    good = [p for p in profiles.accepted_ if p.N_draws is not None]
    if len(good) < 4:
        return
    x, y = (np.log([getattr(p, name) for p in good]) for name in ("flops", "N_best"))
    variance = vertex_variance(good)
    X = np.vander((x - x.mean()) / np.ptp(x), 3)
    residual = y - X @ np.linalg.lstsq(X, y, rcond=None)[0]
    # The scatter about the bent line, so that a bend is no scatter.
    weight = 1.0 / (variance + excess_scatter(residual**2, variance, len(good) - 3) ** 2)
    covariance = np.linalg.inv((X * weight[:, None]).T @ X)
    bend = float((covariance @ (X * weight[:, None]).T @ y)[0])
    t = bend / float(np.sqrt(covariance[0, 0]))
    if abs(t) > BEND_T:
        way = "steepens" if bend > 0 else "flattens"
        yield f"N*(C) of the isoFLOP vertices {way} with C (t = {t:.1f}), and is no one power law."


def _span(table: RunTable, budgets: set[float]) -> Iterator[str]:
    for name, values in (("N", table.N), ("C", table.flops)):
        reach = float(values.max() / values.min())
        if reach < NARROW:
            yield f"The runs span a factor of {reach:.3g} in {name}, less than a decade."
    far = min(budgets) / float(table.flops.max())
    if far > 1:
        yield f"They agree at the largest run and differ only {times(far)} beyond it, where each extends its own form."
