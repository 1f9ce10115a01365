"""Single power laws, y = k x^p, and with an offset, y = E + k x^p: N*(C), D*(C) and the best loss L*(C).

Special here: a power law can be fitted to *draws* of its points (`fit_draws`), so that the uncertainty of each point,
however it came about, is carried into exponents, coefficients and extrapolations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import Array, InputError, positive, same_length
from .errors import weights as check_weights
from .forms import LogSumExp
from .solver import agreeing, minimise, variable_projection
from .uncertainty import percentile_interval

OFFSET_GRID = np.geomspace(0.01, 1.0, 8)


class PowerLaw:
    """y = k x^p by weighted least squares in log y; with `offset`, y = E + k x^p with E >= 0 and p in [-3, 0].

    After `fit`: k_, p_, E_ (0 without an offset), converged_, starts_ (with an offset). After `bootstrap` or
    `fit_draws`: draws_.
    """

    def __init__(self, offset: bool = False) -> None:
        self.offset = offset
        self.draws_: dict[str, Array] | None = None

    def fit(self, x: ArrayLike, y: ArrayLike, weight: ArrayLike | None = None) -> PowerLaw:
        """x, y (n,) positive; weight (n,) optional. Needs 2 different x, or 4 with an offset, else InputError. Returns
        self.
        """
        x, y = positive("x", x), positive("y", y)
        weight = check_weights(weight, len(x))
        same_length(x=x, y=y, weight=weight)
        needed = 4 if self.offset else 2
        distinct = len(np.unique(np.round(np.log(x[weight > 0]), 6)))
        if distinct < needed:
            form = "y = E + k x^p" if self.offset else "y = k x^p"
            raise InputError(f"{form} needs at least {needed} different x; there are {distinct}.")
        self.x, self.y, self.weight = x, y, weight
        self.x0 = float(np.log(x).mean())
        constants, self.converged_, self.starts_ = self._solve(np.log(y)[None, :], weight[None, :])
        self.k_, self.p_, self.E_ = (float(constants[name][0]) for name in ("k", "p", "E"))
        self.draws_ = None
        return self

    def bootstrap(self, n: int = 1000, seed: int = 0) -> PowerLaw:
        """Residual bootstrap: `n` refits to y = prediction times resampled residuals, inflated for the fitted
        parameters.
        """
        if n < 1:
            raise InputError(f"bootstrap is {n}; a positive number of resamples is needed.")
        parameters = 3 if self.offset else 2
        left = len(self.x) - parameters
        if left < 1:
            raise InputError(
                f"a power law through {len(self.x)} points has no residuals to resample; it needs {parameters + 1}."
            )
        fitted = np.log(np.asarray(self.predict(self.x)))
        residual = (np.log(self.y) - fitted) * np.sqrt(len(self.x) / left)
        picks = np.random.default_rng(seed).integers(len(residual), size=(n, len(residual)))
        return self.fit_draws(np.exp(fitted + (residual - residual.mean())[picks]))

    def fit_draws(self, y: Array, weight: Array | None = None) -> PowerLaw:
        """Refit to draws of the points: y (draws, n), NaN where a draw has no such point; weight (draws, n). Returns
        self.
        """
        weight = np.broadcast_to(self.weight if weight is None else weight, y.shape)
        present = np.isfinite(y) & (y > 0)
        weight = np.where(present, weight, 0.0)
        keep = (weight > 0).sum(axis=1) >= (4 if self.offset else 2)
        log_y = np.log(np.where(present, y, 1.0))
        if not keep.any():
            self.draws_ = {name: np.full(1, np.nan) for name in ("k", "p", "E")}
            return self
        start = np.array([np.log(max(self.k_, 1e-300)) + self.p_ * self.x0, -self.p_, np.log(max(self.E_, 1e-300))])
        self.draws_, _, _ = self._solve(log_y[keep], weight[keep], start if self.offset else None)
        return self

    def predict(self, x: ArrayLike) -> Any:
        """Y at x (any shape); a float for a float."""
        values = np.asarray(x, dtype=np.float64)
        y = self.E_ + np.exp(np.log(self.k_) + self.p_ * np.log(values))
        return float(y) if y.ndim == 0 else y

    def predict_draws(self, x: ArrayLike) -> Array:
        """Y at x (m,) under each draw, of shape (m, draws)."""
        if self.draws_ is None:
            raise InputError("this PowerLaw has no draws yet; call bootstrap(n) or fit_draws(y) first.")
        log_x = np.log(np.atleast_1d(np.asarray(x, dtype=np.float64)))[:, None]
        with np.errstate(over="ignore", divide="ignore"):
            return self.draws_["E"] + np.exp(np.log(self.draws_["k"]) + self.draws_["p"] * log_x)

    def band(self, x: ArrayLike, level: float = 0.95) -> Array:
        """Percentile interval of y at x (m,), of shape (m, 2)."""
        return np.array([percentile_interval(row, level) for row in self.predict_draws(x)])

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Percentile interval of k, p or E."""
        if self.draws_ is None:
            raise InputError("this PowerLaw has no draws yet; call bootstrap(n) or fit_draws(y) first.")
        if name not in self.draws_:
            raise InputError(f"interval of {name!r} is not known; choose one of k, p, E.")
        return percentile_interval(self.draws_[name], level)

    def __repr__(self) -> str:
        if not hasattr(self, "k_"):
            return f"PowerLaw(offset={self.offset})"
        start = f"{self.E_:.4g} + " if self.offset else ""
        interval = "" if self.draws_ is None else " [{:.4f}, {:.4f}]".format(*self.interval("p"))
        return f"y = {start}{self.k_:.4g} x^{self.p_:.4f}{interval}"

    def _solve(
        self, log_y: Array, weight: Array, start: Array | None = None
    ) -> tuple[dict[str, Array], bool, dict[str, int]]:
        u = np.log(self.x) - self.x0
        if self.offset:
            return self._solve_offset(u, log_y, weight, start)
        total = weight.sum(axis=1)
        mean_u, mean_y = weight @ u / total, (weight * log_y).sum(axis=1) / total
        centred = u[None, :] - mean_u[:, None]
        variance = (weight * centred**2).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.where(variance > 0, (weight * centred * log_y).sum(axis=1) / variance, np.nan)
        with np.errstate(over="ignore"):
            k = np.exp(mean_y - p * (mean_u + self.x0))
        return {"k": k, "p": p, "E": np.zeros_like(k)}, True, {"tried": 1, "agreeing": 1}

    def _solve_offset(
        self, u: Array, log_y: Array, weight: Array, start: Array | None
    ) -> tuple[dict[str, Array], bool, dict[str, int]]:
        one = np.ones_like(u)
        form = LogSumExp(3, [((0, 1), np.stack([one, -u], 1)), ((2,), one[:, None])])
        low, high = float(log_y[weight > 0].min()), float(log_y[weight > 0].max())
        box = (np.array([low - 12.0, 0.0, low - 12.0]), np.array([high + 2.0, 3.0, high + 2.0]))
        if start is None:
            basis = np.stack([np.exp(-OFFSET_GRID[:, None] * u), np.ones((len(OFFSET_GRID), len(u)))], 2)
            y = np.exp(log_y[0])
            amplitudes, _ = variable_projection(basis / y[None, :, None], np.ones_like(y), weight)
            log = np.log(np.maximum(amplitudes[0], 0.02 * y.min()))
            starts = np.stack([log[:, 0], OFFSET_GRID, log[:, 1]], 1)
            found = minimise(form, log_y[0], weight, starts, *box, np.inf)
            best, agree = agreeing(found)
            theta, converged = found.theta[best][None, :], bool(found.converged[best])
            counts = {"tried": len(starts), "agreeing": agree}
        else:
            starts = np.broadcast_to(start, (len(log_y), 3))
            found = minimise(form, log_y, weight, starts, *box, np.inf)
            theta, converged = found.theta[found.converged], bool(found.converged.all())
            counts = {"tried": len(starts), "agreeing": int(found.converged.sum())}
        a, q, e = theta.T
        E = np.where(e <= box[0][2], 0.0, np.exp(e))
        return {"k": np.exp(a + q * self.x0), "p": -q, "E": E}, converged, counts
