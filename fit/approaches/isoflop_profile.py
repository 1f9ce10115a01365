"""One isoFLOP profile: the runs of a budget, the curve through them, and the vertex or the reason why there is none.

Special here: D at the vertex is read off the runs and not off C = 6ND, so a profile is right under any FLOP convention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError
from ..uncertainty import percentile_interval
from .vertex import METHODS, SAME_SIZE, Curve, Polynomial

NEEDS = {"parabola": ("a parabola", 3), "cubic": ("a cubic", 5), "akima": ("Akima's curve", 3)}


@dataclass(frozen=True)
class IsoflopProfile:
    """One budget: its runs by rising N (N0: their geometric mean), the curve through them, and its vertex.

    `has_curve` is false where there are too few sizes. `reason` is empty when the vertex is accepted. `N_draws`,
    `D_draws` and `loss_draws` (draws,) are bootstrap vertices: NaN where a polynomial had no minimum, the end of the
    sizes where Akima's curve was lowest there.
    """

    method: str
    flops: float
    N: Array
    D: Array
    loss: Array
    loss_se: Array
    weight: Array
    N0: float
    has_curve: bool = False
    N_best: float | None = None
    D_best: float | None = None
    loss_best: float | None = None
    reason: str = ""
    N_draws: Array | None = None
    D_draws: Array | None = None
    loss_draws: Array | None = None

    @property
    def accepted(self) -> bool:
        return not self.reason

    @property
    def shape(self) -> Curve:
        """The curve's method on these sizes, for any losses."""
        return METHODS[self.method](np.log(self.N / self.N0), self.weight)

    def curve(self, N: ArrayLike) -> Array:
        """The curve's loss at sizes N; Akima's is NaN outside of the sizes tried."""
        if not self.has_curve:
            raise InputError(f"the isoFLOP profile at {self.flops:.3g} FLOPs has no curve: {self.reason}.")
        return self.shape.at(self.loss, np.log(np.asarray(N, dtype=np.float64) / self.N0))

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Interval of the vertex's N; a draw without a minimum counts as one at either infinity, a draw of Akima's at
        an end of the sizes as one beyond it. None before a bootstrap.
        """
        if self.N_draws is None:
            return None
        draws = self.N_draws.copy()
        if self.method == "akima":
            edge = 1e-9
            draws[draws <= self.N.min() * (1 + edge)], draws[draws >= self.N.max() * (1 - edge)] = 0.0, np.inf
        lost = np.flatnonzero(np.isnan(draws))
        draws[lost[::2]], draws[lost[1::2]] = 0.0, np.inf
        return percentile_interval(draws, level)


def find_vertex(bare: IsoflopProfile) -> IsoflopProfile:
    """The profile with its vertex, or with the reason why it has none that can be trusted."""
    sizes = len(np.unique(np.round(np.log(bare.N), SAME_SIZE)))
    if bare.method == "cubic" and sizes < NEEDS["cubic"][1]:
        bare = replace(bare, method="parabola")
    what, needed = NEEDS[bare.method]
    if sizes < needed:
        return replace(
            bare, reason=f"only {sizes} size{'s' if sizes > 1 else ''} at this budget, and {what} needs {needed}"
        )
    bare = replace(bare, has_curve=True)
    vertex, lowest = (float(value[0]) for value in bare.shape.minimum(bare.loss[None, :]))
    if np.isnan(vertex):
        bent = "is concave, so it has" if bare.method == "parabola" else "has"
        return replace(bare, reason=f"the {bare.method} {bent} no minimum")
    N_best = bare.N0 * float(np.exp(vertex))
    return replace(
        bare,
        N_best=N_best,
        D_best=float(tokens_at(bare, np.array([N_best]))[0]),
        loss_best=lowest,
        reason=_edge(bare, N_best),
    )


def _edge(profile: IsoflopProfile, N_best: float) -> str:
    """Why a vertex that the sizes do not enclose cannot be trusted; empty where they do."""
    sizes = np.unique(profile.N)
    mean = [np.average(profile.loss[profile.N == N], weights=profile.weight[profile.N == N]) for N in sizes]
    if profile.method != "akima" and not sizes[0] < N_best < sizes[-1]:
        side = "smaller" if N_best <= sizes[0] else "larger"
        return f"the vertex lies outside of the sizes tried; add {side} ones"
    lowest = int(np.argmin(mean))
    if lowest in (0, len(mean) - 1):
        side = "smallest" if lowest == 0 else "largest"
        return f"the lowest measured loss is at the {side} size, an edge of the sizes tried"
    return ""


def tokens_at(profile: IsoflopProfile, N: Array) -> Array:
    """D of this budget at size N: log D is read off a quadratic in log N through the runs, whatever the FLOP
    convention.
    """
    u = np.log(profile.N / profile.N0)
    X = np.stack([np.ones_like(u), u, u**2], 1)
    c = np.linalg.lstsq(X, np.log(profile.D), rcond=None)[0]
    at = np.log(N / profile.N0)
    return np.exp(c[0] + c[1] * at + c[2] * at**2)


def draw_vertices(profile: IsoflopProfile, noise: Array, generator: np.random.Generator) -> IsoflopProfile:
    """The profile with bootstrap vertices: those of its losses with `noise` (draws, n), in nats, times a Gaussian."""
    losses = profile.loss + noise * generator.standard_normal(noise.shape)
    # Noise as large as the loss itself must not make one negative.
    vertex, lowest = profile.shape.minimum(np.maximum(losses, 0.01 * profile.loss.min()))
    N = profile.N0 * np.exp(vertex)
    return replace(profile, N_draws=N, D_draws=tokens_at(profile, N), loss_draws=lowest)


def cubic_term(profile: IsoflopProfile) -> tuple[float, float, int, float] | None:
    """What a cubic adds to the parabola of an accepted profile of 5 sizes or more: its contrast (relative loss, of the
    noise's variance), the squares it leaves over and their degrees of freedom, and log N_cubic - log N_parabola.
    """
    u = np.log(profile.N / profile.N0)
    if len(np.unique(np.round(u, SAME_SIZE))) < NEEDS["cubic"][1] or not profile.accepted:
        return None
    relative = profile.loss / profile.loss.min()
    two, three = (Polynomial(degree, u, profile.weight) for degree in (2, 3))
    rest = float(((three.residual @ relative) ** 2).sum())
    term = np.sqrt(max(float(((two.residual @ relative) ** 2).sum()) - rest, 0.0)) * np.sign(
        three.project[3] @ relative
    )
    shift = three.minimum(relative[None, :])[0][0] - two.minimum(relative[None, :])[0][0]
    return float(term), rest, len(u) - 4, float(shift)


def vertex_variance(profiles: list[IsoflopProfile]) -> Array:
    """Variance of each log vertex, by the quartiles of its draws."""
    quartiles = np.array([np.nanpercentile(np.log(p.N_draws), [25, 75]) for p in profiles])  # type: ignore[arg-type]
    return (np.diff(quartiles, axis=1).ravel() / 1.349) ** 2 + 1e-12
