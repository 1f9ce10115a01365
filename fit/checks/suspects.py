"""Why two approaches may disagree: the usual suspects, each only where these runs give evidence for it.

Special here: a suspect is one small function from approaches and table to sentences, listed in SUSPECTS in the order in
which they are worth looking at; each sentence carries the number that raised it.

Hoffmann et al. 2022 (arXiv:2203.15556) and Besiroglu et al. 2024 (arXiv:2404.10102) for outliers and for optimizers
that stopped early; Porian et al. 2024 (arXiv:2406.19146) and Pearce and Song 2024 (arXiv:2406.12907) for conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..approaches.isoflop_profile import vertex_variance
from ..formatting import percent, scientific, times
from ..uncertainty import excess_scatter
from .outliers import find_outliers

if TYPE_CHECKING:
    from ..approaches.approaches import Approach
    from ..table import RunTable

Approaches = Mapping[str, "Approach"]
CONVENTION = 1.1  # FLOPs over 6ND, largest over smallest or over one, from which conventions differ
FEW_SIZES = 5
LOPSIDED_T, LOPSIDED_SHIFT = 3.5, 0.05
BEND_T = 3.0
NARROW = 10.0
AGREEING = 0.9  # share of starts


def find_suspects(approaches: Approaches, budgets: set[float], table: RunTable) -> tuple[str, ...]:
    """What may explain a disagreement at `budgets`, each a sentence."""
    return tuple(said for suspect in SUSPECTS for said in suspect(approaches, budgets, table))


def _conventions(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    parametric = approaches.get("parametric")
    ratio = table.flops / (6.0 * table.N * table.D)
    far = max(ratio.max(), 1.0) / min(ratio.min(), 1.0)
    if parametric is not None and parametric.flops_per_token is None and far > CONVENTION:
        yield (
            f"FLOPs are {ratio.min():.2f} to {ratio.max():.2f} times 6ND; the parametric approach allocates under "
            "C = 6ND and the others under the table's FLOPs."
        )
    inner = table.column("N_non_embedding")
    share = 1.0 - inner / table.N
    if np.isfinite(share).all() and share.max() - share.min() > 0.1:
        yield (
            f"Embeddings are {percent(share.min())} to {percent(share.max())} of N, so loss is no power law in N: "
            "compare the fits under each convention."
        )


def _outliers(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    parametric = approaches.get("parametric")
    law = None if parametric is None else parametric.law
    if law is None:
        return
    found = find_outliers(law)
    if len(found.rows):
        worst = int(found.rows[0])
        yield (
            f"{len(found.rows)} of {len(table)} runs do not follow the parametric law of the others, first "
            f"{table.run_id[worst]} ({percent(float(np.expm1(found.residual[worst])), signed=True)} in loss)."
        )


def _parametric(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    parametric = approaches.get("parametric")
    law = None if parametric is None else parametric.law
    if law is None:
        return
    if not law.converged_:
        yield "The parametric fit did not converge."
    elif law.starts_["agreeing"] < AGREEING * law.starts_["tried"]:
        yield "Only {agreeing} of {tried} starts agree on the parametric optimum.".format(**law.starts_)
    if law.degenerate_:
        yield f"The parametric fit holds {', '.join(law.degenerate_)} at the end of its range."


def _vertices(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    profiles = None if "isoflop" not in approaches else approaches["isoflop"].profiles
    if profiles is None:
        return
    refused = [p for p in profiles.profiles_ if not p.accepted]
    if refused:
        said = ", ".join(scientific(p.flops) for p in refused)
        yield f"{len(refused)} of {len(profiles.profiles_)} isoFLOP vertices are refused ({said} FLOPs)."
    few = [p for p in profiles.accepted_ if len(np.unique(p.N)) < FEW_SIZES]
    if few:
        said = ", ".join(scientific(p.flops) for p in few)
        yield f"The isoFLOP profiles at {said} FLOPs have fewer than {FEW_SIZES} sizes."
    lopsided = profiles.lopsidedness()
    if profiles.method == "parabola" and lopsided is not None:
        t, shift = lopsided
        if abs(t) > LOPSIDED_T and abs(shift) > LOPSIDED_SHIFT:
            yield (
                f"The isoFLOP profiles are lopsided (t = {t:.1f} for a cubic term, which moves the vertices by "
                f"{percent(float(np.expm1(shift)), signed=True)} in N); a parabola is biased there."
            )


def _bend(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    """A second derivative of log N*(C) among the vertices, against the uncertainty of each."""
    profiles = None if "isoflop" not in approaches else approaches["isoflop"].profiles
    good = [] if profiles is None else [p for p in profiles.accepted_ if p.N_draws is not None]
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


def _envelope(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    envelope = None if "envelope" not in approaches else approaches["envelope"].envelope
    if envelope is None:
        return
    if envelope.edges_:
        yield f"At {envelope.edges_} levels of compute the envelope is won by the smallest or largest size there."
    if len(envelope.N_) < 4:
        yield f"The envelope rests on {len(envelope.N_)} points."


def _span(approaches: Approaches, budgets: set[float], table: RunTable) -> Iterator[str]:
    for name, values in (("N", table.N), ("C", table.flops)):
        reach = float(values.max() / values.min())
        if reach < NARROW:
            yield f"The runs span a factor of {reach:.3g} in {name}, less than a decade."
    largest = float(table.flops.max())
    if min(budgets) > largest:
        far = times(min(budgets) / largest)
        yield f"They agree at the largest run and differ only {far} beyond it, where each extends its own form."


SUSPECTS: tuple[Callable[..., Iterator[str]], ...] = (
    _conventions,
    _outliers,
    _parametric,
    _vertices,
    _bend,
    _envelope,
    _span,
)
