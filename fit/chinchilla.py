"""The parametric law L(N, D) = E + A / N^alpha + B / D^beta and the optimum that follows from it (approach 3).

Special here:
- The fit is the global optimum of the log-Huber objective, from a grid of starts that each solve for E, A and B at
  fixed exponents; `starts_` says how many of them ended at the same optimum, and `converged_` is never true for one
  that did not.
- N and D are centred in the logarithm inside the solver, so that bounds and conditioning do not depend on units.
- Intervals come from a bootstrap over runs; every draw is a full refit, carried through to N*, D*, D/N and loss.

Hoffmann et al. 2022 (arXiv:2203.15556), section 3.3 and appendix D.3; Besiroglu et al. 2024 (arXiv:2404.10102).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import Array, InputError, enough, identifiable, positive, same_length
from .errors import weights as check_weights
from .forms import LogSumExp
from .solver import agreeing, minimise, variable_projection
from .uncertainty import cluster_counts, percentile_interval

NAMES = ("E", "A", "B", "alpha", "beta")
EXPONENT_GRID = np.geomspace(0.03, 1.5, 8)
EXPONENT_BOUNDS = (0.0, 3.0)
VANISHED = 12.0  # a term below exp(-12) of the smallest loss is called zero
FLAT_EXPONENT = 0.01  # over three decades such a term changes by 7 %, so it cannot be told from E
FALLBACK_STARTS = 2  # starts of a resample besides the full fit


@dataclass(frozen=True)
class Optimum:
    """The best split of a budget: arrays over `flops`, each interval of shape (targets, 2), or None before a
    bootstrap.
    """

    flops: Array
    N: Array
    D: Array
    loss: Array
    N_interval: Array | None = None
    D_interval: Array | None = None
    loss_interval: Array | None = None
    ratio_interval: Array | None = None

    @property
    def ratio(self) -> Array:
        """Tokens per parameter, D / N."""
        return self.D / self.N

    def __repr__(self) -> str:
        lines = [
            f"C = {c:.3g}: N = {n:.4g}, D = {d:.4g}, D/N = {d / n:.3g}, loss = {loss:.4f}"
            for c, n, d, loss in zip(self.flops, self.N, self.D, self.loss, strict=True)
        ]
        return "\n".join(lines)


class ChinchillaLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, fitted in log loss under Huber's function.

    Parameters
    ----------
    delta : float
        Where Huber's function turns from quadratic to linear, in log loss. 1e-3 is Hoffmann et al.'s; infinity is
        least squares.

    Notes:
    -----
    After `fit`: E_, A_, B_, alpha_, beta_ (floats; loss in the unit of the input, N and D in parameters and tokens),
    objective_ (the *sum* of the weighted Huber terms), starts_ ({"tried", "agreeing"}), converged_ (bool), degenerate_
    (names of parameters held at a bound: a term that vanished, or an exponent near zero). After `bootstrap`: draws_, a
    dict of name -> (resamples,) arrays.


    """

    form = "chinchilla"

    def __init__(self, delta: float = 1e-3) -> None:
        if not delta > 0:
            raise InputError(f"delta is {delta}; it must be above zero (1e-3 is usual, infinity gives least squares).")
        self.delta = delta
        self.draws_: dict[str, Array] | None = None

    # -- fitting
    # ---------------------------------------------------------------------------------------------------------------

    def fit(self, N: ArrayLike, D: ArrayLike, loss: ArrayLike, weight: ArrayLike | None = None) -> ChinchillaLaw:
        """Fit to n runs: N parameters, D tokens, loss (nats per token), weight (optional, multiplies each run's term),
        all (n,).

        Raises InputError when a value is not a positive finite number, when there are too few different runs, or when N
        and D do not vary separately. Returns self.
        """
        N, D, loss = positive("N", N), positive("D", D), positive("loss", loss)
        weight = check_weights(weight, len(N))
        same_length(N=N, D=D, loss=loss, weight=weight)
        used = weight > 0
        enough(len(np.unique(np.stack([N, D])[:, used], axis=1).T), len(NAMES), "the law E + A/N^alpha + B/D^beta")
        identifiable(N[used], D[used])

        self._data = _Data(N, D, loss, weight)
        starts, _ = self._data.starts(weight[None, :], keep=None)
        lower, upper = self._data.box
        found = minimise(self._data.form, self._data.target, weight[None, :], starts[0], lower, upper, self.delta)
        best, agree = agreeing(found)
        self.draws_ = None
        self._theta = found.theta[best]
        self.starts_ = {"tried": len(found.theta), "agreeing": agree}
        self.objective_ = float(found.objective[best])
        self.converged_ = bool(found.converged[best])
        self.degenerate_ = self._data.degenerate(found.theta[best])
        constants = self._data.constants(found.theta[best][None, :])
        self.E_, self.A_, self.B_, self.alpha_, self.beta_ = (float(constants[name][0]) for name in NAMES)
        return self

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0) -> ChinchillaLaw:
        """Refit `n` resamples of whole groups (`groups` (points,): run ids, so that checkpoints of one run move
        together).

        A resample that cannot identify the law (too few different runs) is drawn again, and one whose fit does not
        converge is left out; `bootstrap_` counts both: {"resamples", "redrawn", "unconverged"}. Returns self.
        """
        self._fitted()
        data = self._data
        groups = np.arange(len(data.N)) if groups is None else np.asarray(groups)
        if len(groups) != len(data.N):
            raise InputError(f"groups has {len(groups)} values and the fit has {len(data.N)} points; each needs one.")
        counts, redrawn = _identifiable_counts(data, groups, n, seed)
        weights = counts * data.weight
        own, _ = data.starts(weights, keep=FALLBACK_STARTS)
        starts = np.concatenate([np.broadcast_to(self._theta, (n, 1, 5)), own], axis=1)
        each = starts.shape[1]
        found = minimise(
            data.form,
            data.target,
            np.repeat(weights, each, axis=0),
            starts.reshape(-1, 5),
            lower=data.box[0],
            upper=data.box[1],
            delta=self.delta,
        )
        objective = np.where(found.converged, found.objective, np.inf).reshape(n, each)
        best = objective.argmin(axis=1)
        keep = np.isfinite(objective.min(axis=1))
        theta = found.theta.reshape(n, each, 5)[np.arange(n), best][keep]
        self.bootstrap_ = {"resamples": int(keep.sum()), "redrawn": redrawn, "unconverged": int((~keep).sum())}
        self.bootstrap_objective_ = objective.min(axis=1)
        self.draws_ = data.constants(theta)
        self._draw_theta = theta
        return self

    # -- reading
    # ---------------------------------------------------------------------------------------------------------------

    def predict(self, N: ArrayLike, D: ArrayLike) -> Any:
        """Loss at N parameters and D tokens (broadcast together); a float for two floats."""
        self._fitted()
        N, D = np.asarray(N, dtype=np.float64), np.asarray(D, dtype=np.float64)
        loss = self.E_ + self.A_ / N**self.alpha_ + self.B_ / D**self.beta_
        return float(loss) if loss.ndim == 0 else loss

    def predict_draws(self, N: float, D: float) -> Array:
        """Loss at one (N, D) under each bootstrap draw, of shape (resamples,)."""
        draws = self._bootstrapped()
        return draws["E"] + draws["A"] / N ** draws["alpha"] + draws["B"] / D ** draws["beta"]

    def optimal(self, flops: ArrayLike, level: float = 0.95) -> Optimum:
        """The N and D that minimise the loss under C = 6 N D, in closed form (Hoffmann et al. 2022, equation 4).

        `flops` is a scalar or (targets,). Intervals are filled in once `bootstrap` has run.
        """
        self._fitted()
        C = np.atleast_1d(positive("flops", np.atleast_1d(np.asarray(flops, dtype=np.float64))))
        N, D, loss = _optimum(C, self.E_, self.A_, self.B_, self.alpha_, self.beta_)
        if self.draws_ is None:
            return Optimum(C, N, D, loss)
        draws = self.optimal_draws(C)
        intervals = [
            np.array([percentile_interval(row, level) for row in draws[key]]) for key in ("N", "D", "loss", "ratio")
        ]
        return Optimum(C, N, D, loss, *intervals)

    def optimal_draws(self, flops: ArrayLike) -> dict[str, Array]:
        """N, D, loss and ratio under each bootstrap draw: arrays of shape (targets, resamples)."""
        draws = self._bootstrapped()
        C = np.atleast_1d(np.asarray(flops, dtype=np.float64))[:, None]
        N, D, loss = _optimum(C, *[draws[name][None, :] for name in NAMES])
        return {"N": N, "D": D, "loss": loss, "ratio": D / N}

    @property
    def exponents_(self) -> tuple[float, float]:
        """(a, b) of N* = G (C/6)^a and D* = (C/6)^b / G: a = beta / (alpha + beta), b = 1 - a."""
        self._fitted()
        a = self.beta_ / (self.alpha_ + self.beta_) if self.alpha_ + self.beta_ > 0 else float("nan")
        return a, 1.0 - a

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Percentile bootstrap interval of a constant: E, A, B, alpha, beta, or `a`, the exponent of N*(C)."""
        draws = self._bootstrapped()
        if name == "a":
            with np.errstate(invalid="ignore"):
                return percentile_interval(draws["beta"] / (draws["alpha"] + draws["beta"]), level)
        if name not in draws:
            raise InputError(f"interval of {name!r} is not known; choose one of {', '.join(NAMES)}, a.")
        return percentile_interval(draws[name], level)

    def residuals(self) -> Array:
        """Log loss observed minus predicted, of shape (n,)."""
        self._fitted()
        return self._data.target - self._data.form.value(self._theta[None, :])[0][0]

    def plot(self, axes: Any = None) -> Any:
        """Loss contours over (N, D) with the runs and the compute-efficient frontier; returns the matplotlib axes."""
        self._fitted()
        from .plots import plot_contours

        return plot_contours(self, self._data.N, self._data.D, self._data.loss, axes)

    def __repr__(self) -> str:
        if not hasattr(self, "_data"):
            return f"ChinchillaLaw(delta={self.delta:g})"

        def say(name: str, digits: str) -> str:
            value = format(getattr(self, name + "_"), digits)
            if self.draws_ is None:
                return value
            low, high = self.interval(name)
            return f"{value} [{low:{digits}}, {high:{digits}}]"

        equation = (
            f"L(N, D) = {say('E', '.4f')} + {say('A', '.4g')} / N^{say('alpha', '.4f')}"
            f" + {say('B', '.4g')} / D^{say('beta', '.4f')}"
        )
        tried, agree = self.starts_["tried"], self.starts_["agreeing"]
        state = f"{agree} of {tried} starts agree" if self.converged_ else "NOT converged"
        return f"{equation}   ({len(self._data.N)} points, {state})"

    def _fitted(self) -> None:
        if not hasattr(self, "_data"):
            raise InputError("this ChinchillaLaw is not fitted; call fit(N, D, loss) first.")

    def _bootstrapped(self) -> dict[str, Array]:
        self._fitted()
        if self.draws_ is None:
            raise InputError("this ChinchillaLaw has no intervals yet; call bootstrap(n, groups=run_id) first.")
        return self.draws_


class _Data:
    """The points in the solver's coordinates: theta = (a, alpha, b, beta, e), terms centred at the mean log N and log
    D.
    """

    def __init__(self, N: Array, D: Array, loss: Array, weight: Array) -> None:
        self.N, self.D, self.loss, self.weight = N, D, loss, weight
        self.target = np.log(loss)
        self.x0, self.y0 = float(np.log(N).mean()), float(np.log(D).mean())
        self.x, self.y = np.log(N) - self.x0, np.log(D) - self.y0
        one = np.ones_like(self.x)
        self.form = LogSumExp(
            5, [((0, 1), np.stack([one, -self.x], 1)), ((2, 3), np.stack([one, -self.y], 1)), ((4,), one[:, None])]
        )
        low, high = float(self.target.min()), float(self.target.max())
        self.floor = low - VANISHED
        floor, ceiling = self.floor, high + 2.0
        self.box = (
            np.array([floor, EXPONENT_BOUNDS[0], floor, EXPONENT_BOUNDS[0], floor]),
            np.array([ceiling, EXPONENT_BOUNDS[1], ceiling, EXPONENT_BOUNDS[1], ceiling]),
        )

    def starts(self, weights: Array, keep: int | None) -> tuple[Array, Array]:
        """Starts (P, G, 5) by variable projection over the grid of exponents; the `keep` best ones, or all."""
        alpha, beta = (grid.ravel() for grid in np.meshgrid(EXPONENT_GRID, EXPONENT_GRID, indexing="ij"))
        terms = [np.exp(-alpha[:, None] * self.x), np.exp(-beta[:, None] * self.y), np.ones((len(alpha), len(self.x)))]
        # Divided by the loss, a residual is one in log loss to first order.
        basis = np.stack(terms, axis=2) / self.loss[None, :, None]
        amplitudes, error = variable_projection(basis, np.ones_like(self.loss), weights)
        # Where least squares wants a negative amplitude the start is a small positive one instead.
        log = np.log(np.maximum(amplitudes, 0.02 * self.loss.min()))
        error = np.where((amplitudes > 0).all(axis=2), error, error * 4.0)
        shape = error.shape
        starts = np.stack(
            [log[..., 0], np.broadcast_to(alpha, shape), log[..., 1], np.broadcast_to(beta, shape), log[..., 2]], axis=2
        )
        if keep is None:
            return starts, error
        order = np.argsort(error, axis=1)[:, :keep, None]
        return np.take_along_axis(starts, order, axis=1), error

    def constants(self, theta: Array) -> dict[str, Array]:
        """(P, 5) solver coordinates to the law's constants; a term that vanished is exactly zero."""
        a, alpha, b, beta, e = theta.T
        with np.errstate(over="ignore"):
            return {
                "E": np.where(e <= self.floor, 0.0, np.exp(e)),
                "A": np.where(a <= self.floor, 0.0, np.exp(a + alpha * self.x0)),
                "B": np.where(b <= self.floor, 0.0, np.exp(b + beta * self.y0)),
                "alpha": alpha.copy(),
                "beta": beta.copy(),
            }

    def degenerate(self, theta: Array) -> list[str]:
        """Names of the parameters that the box holds, and of exponents that make their term all but constant."""
        held = (theta <= self.box[0]) | (theta >= self.box[1])
        held[[1, 3]] |= theta[[1, 3]] < FLAT_EXPONENT
        return [name for name, stuck in zip(("A", "alpha", "B", "beta", "E"), held, strict=True) if stuck]


def _identifiable_counts(data: _Data, groups: Any, n: int, seed: int) -> tuple[Array, int]:
    """Resamples that can identify five constants, and how many were thrown away on the way."""
    _, point = np.unique(np.stack([data.N, data.D]), axis=1, return_inverse=True)
    member = np.zeros((len(data.N), point.max() + 1))
    member[np.arange(len(point)), point.ravel()] = 1.0
    independent = len(np.unique(np.asarray(groups).astype(str)))
    too_few = InputError(
        f"the table has {independent} independent runs, too few to resample 5 parameters; at least 8 are needed."
    )
    if independent <= 5:
        raise too_few
    counts = cluster_counts(groups, n, seed)
    redrawn = 0
    for attempt in range(1, 50):
        distinct = ((counts * data.weight) @ member > 0).sum(axis=1)
        poor = (distinct <= 5) | (_spread(data.x, counts) < 1e-6) | (_spread(data.y, counts) < 1e-6)
        if not poor.any():
            return counts, redrawn
        redrawn += int(poor.sum())
        counts[poor] = cluster_counts(groups, int(poor.sum()), seed + 7919 * attempt)
    raise too_few


def _spread(x: Array, counts: Array) -> Array:
    mean = counts @ x / counts.sum(axis=1)
    return counts @ x**2 / counts.sum(axis=1) - mean**2


def _optimum(C: Any, E: Any, A: Any, B: Any, alpha: Any, beta: Any) -> tuple[Array, Array, Array]:
    """Closed form under C = 6 N D; where a term vanished the optimum runs to zero or infinity, as it should."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_g = (np.log(alpha) + np.log(A) - np.log(beta) - np.log(B)) / (alpha + beta)
        log_n = log_g + beta / (alpha + beta) * np.log(C / 6.0)
        log_d = np.log(C / 6.0) - log_n
        N, D = np.exp(log_n), np.exp(log_d)
        loss = E + A * np.exp(-alpha * log_n) + B * np.exp(-beta * log_d)
    return N, D, np.where(np.isfinite(loss), loss, np.nan)
