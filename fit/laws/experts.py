"""Laws of mixtures of experts: the value of unused experts in loss and in dense parameters.

Each term of an equation is the exponential of constants times products of log inputs. E is `experts`, the experts of a
layer over the experts that a token uses: 1 in a dense model. The sparsity S is 1 - 1 / E; E' is the saturated E.

Clark et al. 2022 (arXiv:2202.01169), equations 1, 4 and 11; Krajewski et al. 2024 (arXiv:2402.07871), equation 9;
Ludziejewski et al. 2025 (arXiv:2502.05172), equation 6; Abnar et al. 2025 (arXiv:2501.12370), equation 6.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..allocation.allocation import REACH, Optimum, aligned, answer, lowest, root
from ..errors import SPREAD, Array, Columns, Constants, InputError, Say, floats, unboxed
from ..solver.forms import LogSumTerms
from .chinchilla import VANISHED
from .custom import latin_hypercube
from .law import Law, Problem, amplitude, projected_starts
from .registry import EXPERT_LAWS

FORMS = {  # inputs and equation
    "clark": "N_active experts: 10^d N^a E'^b N^(c log10 E')",
    "krajewski": "N_total D granularity: g G^-gamma N^-alpha + a N^-alpha + b D^-beta + c",
    "ludziejewski": "N_active D experts: a E'^delta N^alpha N^(gamma ln E') + b E'^omega D^beta D^(zeta ln E') + c",
    "abnar": "N_total D experts: a N^-alpha + b D^-beta + c E^lambda + d E^delta N^-gamma + e",
}
FACTOR = re.compile(r"(?:(10|[NDGE])'?\^)?\(?(-?)([a-z]+)(?: (ln|log10) E'\))?")
AXES = {"N_active": "N", "N_total": "N", "D": "D", "granularity": "G", "experts": "E"}
LN10 = float(np.log(10.0))
# Factor of a constant in the exponent -> bounds, and the range of its starts, at the mean log N and log D.
RANGES: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    **dict.fromkeys(("N", "D"), ((-3.0, 0.0), (-0.6, -0.02))),
    **dict.fromkeys(("-N", "-D", "-G"), ((0.0, 3.0), (0.05, 1.0))),
    **dict.fromkeys(("NE", "DE"), ((-3.0, 3.0), (-0.03, 0.03))),
    "E": ((-3.0, 3.0), (-0.5, 0.3)),
    "E_start": ((math.log(0.5), math.log(10.0)), (math.log(1.0), math.log(5.0))),
    "E_max": ((math.log(12.0), math.log(1e6)), (math.log(30.0), math.log(1000.0))),
}
SATURATION = ("E_start", "E_max")
CANDIDATES, STARTS = 1024, 64
CHOICES = 49  # numbers of experts that `optimal` tries, over the range of the runs
FARTHEST = (np.log(1e-3), np.log(1e6))  # range of log leverage that is searched


class ExpertLaw(Law):
    """The loss of a mixture of experts, by one of four published forms.

    E_start is the E' of a dense model, E_max its limit for many experts.

    Parameters
    ----------
    form : {"clark", "krajewski", "ludziejewski", "abnar"}; sets `inputs`. krajewski holds for one number of experts.
    tokens : the D of all runs, optional; the form then has no D, and `optimal` uses this D.
    share : experts' share of the active parameters, optional: N_total = N_active (1 + (experts - 1) share).
    """

    form: str = ""  # type: ignore[misc]
    title = "a law of experts"
    output = "loss"

    def __init__(
        self,
        form: str = "clark",
        tokens: float | None = None,
        share: float | None = None,
        objective: str = "huber",
        delta: float = 1e-3,
    ) -> None:
        super().__init__(objective, delta)
        if form not in EXPERT_LAWS:
            raise InputError(f"form is {form!r}; choose a law of experts: {', '.join(EXPERT_LAWS)}.")
        for name, value in (("tokens", tokens), ("share", share)):
            if value is not None and not 0.0 < value < np.inf:
                raise InputError(f"{name} is {value}; it must be a finite number above zero.")
        self.form, self.tokens, self.share = form, tokens, share
        self.title = f"the law of experts {form}"
        inputs, text = FORMS[form].split(": ")
        self.inputs = tuple(name for name in inputs.split() if tokens is None or name != "D")
        terms = [list(FACTOR.finditer(term)) for term in text.split(" + ")]
        if tokens is not None:  # D is constant, so a term of D alone is part of the constant term
            terms = [[f for f in t if f[1] != "D"] for t in terms if len(t) != 2 or t[1][1] != "D"]
        self._text = " + ".join(" ".join(factor[0] for factor in term) for term in terms)
        self._scale = {f[3]: LN10 if f[1] == "10" else 1.0 / LN10 if f[4] == "log10" else 1.0 for t in terms for f in t}
        # Per term: constant -> its factor in the exponent.
        self._terms = [{f[3]: f[2] + (f[1] or "").strip("10") + "E" * bool(f[4]) for f in term} for term in terms]
        self._amplitudes = [f[3] for term in terms for f in term if f[1] is None]
        self._logged = (*self._amplitudes, *SATURATION)
        self._saturates = "E'" in text
        self.names = (*self._scale, *(SATURATION if self._saturates else ()))

    def evaluate(self, constants: Constants, *inputs: Any) -> Any:  # type: ignore[override]
        logs = {AXES[name]: np.log(v) for name, v in zip(self.inputs, inputs, strict=True)}
        with np.errstate(divide="ignore"):
            v = {k: np.log(constants[k]) if k in self._logged else floats(constants[k]) for k in self.names}
        return sum(np.exp(exponent) for exponent in self._exponents(v, logs))

    def equation(self, say: Say) -> str:
        shown = FACTOR.sub(lambda match: match[0].replace(match[3], say(match[3])), self._text)
        return ", ".join([f"L = {shown}", *(f"{name} = {say(name)}" for name in SATURATION if self._saturates)])

    def effective_parameters(self, N_active: ArrayLike, experts: ArrayLike, constants: Constants | None = None) -> Any:
        """Return the size of a dense model with the loss of a mixture with N_active and `experts` (broadcast together).

        Clark et al. 2022, equation 11.
        """
        self._fitted()
        if self.form != "clark":
            raise InputError(f"form is {self.form!r}; only clark has effective parameters, so use leverage.")
        c = self.constants_ if constants is None else constants
        start = np.log(c["E_start"])
        s = saturated(np.log(floats(experts)), start, np.log(c["E_max"]))
        slope, dense = (c["a"] + c["c"] * at / LN10 for at in (s, start))
        return unboxed(np.exp((slope * np.log(floats(N_active)) + c["b"] * (s - start)) / dense))

    def optimal(
        self, flops: ArrayLike, most_parameters: float | None = None, experts: float | None = None, level: float = 0.95
    ) -> Optimum:
        """Return the N_active, D and experts of lowest loss for C = 6 N_active D, with intervals after `bootstrap`.

        The result's `more` has experts, sparsity and, if the law has a `share`, N_total.

        Parameters
        ----------
        most_parameters
            Upper limit of N_total.
        experts
            By default searched within the range of the runs.
        """
        (C,) = aligned(flops=flops)
        self._can_answer()
        if most_parameters is not None and (self.share is None or not most_parameters > 0):
            raise InputError(
                f"most_parameters is {most_parameters}; it must be above zero, and the law must be made with share=..."
            )
        run_experts = self.data_["experts"]
        choices = np.geomspace(run_experts.min(), run_experts.max(), CHOICES) if experts is None else floats([experts])

        def solve(constants: Constants) -> Columns:
            N, D, loss = np.broadcast_arrays(*self._split(constants, C, choices[:, None, None], most_parameters))
            best = loss.argmin(axis=0)[None]
            N, D, loss = (np.take_along_axis(values, best, axis=0)[0] for values in (N, D, loss))
            E = choices[best[0]]
            total = {} if self.share is None else {"N_total": N * self._expansion(E)}
            return {"flops": C, "N": N, "D": D, "loss": loss, "experts": E, "sparsity": 1.0 - 1.0 / E} | total

        return answer(self, solve, level)

    def leverage(self, flops: float, experts: ArrayLike, constants: Constants | None = None) -> Any:
        """Return how many times `flops` the best dense model needs to match the best model with `experts` at `flops`.

        Infinite above 1e6. The interval is `law.interval_of(lambda c: law.leverage(flops, experts, c))`.
        """
        self._can_answer()
        c = {k: np.atleast_1d(floats(v)) for k, v in (self.constants_ if constants is None else constants).items()}
        C = floats(flops)
        loss = self._split(c, C, floats(experts)[..., None])[2]
        log_ratio = root(lambda x: loss - self._split(c, C * np.exp(x), 1.0)[2], *FARTHEST)
        log_ratio = np.where(log_ratio > FARTHEST[1] - 1e-6, np.inf, np.exp(log_ratio))
        return unboxed(log_ratio[..., 0]) if constants is None else log_ratio

    def _can_answer(self) -> None:
        self._fitted()
        if "experts" not in self.inputs:
            raise InputError(
                f"form is {self.form!r}, which holds for one number of experts; choose clark, ludziejewski or abnar."
            )
        for name, needed in (("tokens", "D" not in self.inputs), ("share", "N_total" in self.inputs)):
            if needed and getattr(self, name) is None:
                raise InputError(f"{name} is missing; for a budget, fit ExpertLaw({self.form!r}, {name}=...).")

    def _expansion(self, experts: Any) -> Any:
        return 1.0 + (experts - 1.0) * (self.share or 0.0)

    def _split(self, constants: Constants, C: Array, experts: Any, max_total: float | None = None) -> tuple[Array, ...]:
        """Return N_active, D and loss of the best run of C FLOPs with N_total up to `max_total` (None: no limit)."""
        bound = np.inf if max_total is None else max_total / self._expansion(experts)

        def loss(N: Array, D: Any) -> Array:
            by_input = {"N_active": N, "N_total": N * self._expansion(experts), "D": D, "experts": floats(experts)}
            return np.asarray(self.evaluate(constants, *(by_input[name] for name in self.inputs)))

        if self.tokens is None:
            middle = 0.5 * np.log(C / 6.0)
            x = lowest(lambda x: loss(np.exp(x), C / 6.0 / np.exp(x)), middle - REACH / 3, middle + REACH / 3)[0]
            N = np.minimum(np.exp(x), bound)  # the loss has one valley in N, so a bound that binds is the best
            return N, C / (6.0 * N), loss(N, C / (6.0 * N))
        N = np.minimum(C / (6.0 * self.tokens), bound)
        return N, floats(self.tokens), loss(N, self.tokens)

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        for name, values in zip(self.inputs, inputs, strict=True):
            low = values.min()
            if values.max() < SPREAD * low or (name == "experts" and low < 1.0):
                raise InputError(
                    f"{name} is at least {low:.4g} and at most {values.max():.4g}; it must vary between runs, and "
                    "experts must be 1 (dense) or more."
                )
        super()._check(inputs, observed)

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        target = np.log(observed)
        logs = {AXES[name]: np.log(v) for name, v in zip(self.inputs, inputs, strict=True)}
        middle = {axis: float(logs[axis].mean()) for axis in logs if axis in "ND"}
        logs |= {axis: logs[axis] - middle[axis] for axis in middle}
        floor, ceiling = float(target.min()) - VANISHED, float(target.max()) + 2.0
        of = {k: f for term in self._terms for k, f in term.items()} | {k: k for k in SATURATION}
        at = {name: i for i, name in enumerate(self.names)}
        wide = {k: (floor / s, ceiling / s) for k, s in self._scale.items() if of[k] == ""}
        # Centring an axis moves each constant times the mean to the constant of its term without this axis.
        moved = [
            (k, o, middle[axis] * (1.0 if f[0] == "-" else -1.0) * self._scale[k] / self._scale[o])
            for term in self._terms for axis in middle for k, f in term.items() for o, g in term.items()
            if axis in f and g == f.strip("-").replace(axis, "")
        ]  # fmt: skip

        def constants(theta: Array) -> Columns:
            v = dict(zip(self.names, theta.T, strict=True))
            by = {other: factor * v[name] for name, other, factor in moved}
            values = {name: v[name] + by.get(name, 0.0) for name in self.names}
            values |= {name: amplitude(v[name], floor, by.get(name, 0.0)) for name in self._amplitudes}
            return values | {name: np.exp(v[name]) for name in self.names if name in SATURATION}

        return Problem(
            form=LogSumTerms(lambda v: self._exponents(v, logs), at, len(target)),
            target=target,
            bounds={name: wide.get(name) or RANGES[of[name]][0] for name in self.names},
            axes=np.stack([*logs.values()]),
            starts=lambda weights, keep: self._starts(of, logs, observed, weights, keep),
            constants=constants,
        )

    def _along(self, name: str, feature: str, logs: Mapping[str, Any]) -> Any:
        """Return the factor of constant `name` in its term's log: for `feature` "NE", log N times log E."""
        scale = -self._scale[name] if feature.startswith("-") else self._scale[name]
        return math.prod((logs[axis] for axis in feature.strip("-")), start=scale)

    def _exponents(self, v: Mapping[str, Any], logs: Mapping[str, Any]) -> list[Any]:
        """Return the log of each of the law's terms, from coordinates `v` and log inputs `logs` ("N", ...) by name."""
        if self._saturates:
            logs = {**logs, "E": saturated(logs["E"], v["E_start"], v["E_max"])}
        return [sum(v[name] * self._along(name, feature, logs) for name, feature in t.items()) for t in self._terms]

    def _starts(self, of: Mapping[str, str], logs: Columns, observed: Array, weights: Array, keep: int | None) -> Array:
        """Return the `keep` best starts, (problems, keep, coordinates): random exponents, amplitudes by least squares.

        of: constant -> `feature` of `_along`, empty for an amplitude.
        """
        drawn = [name for name in self.names if of[name]]
        low, high = floats([RANGES[of[name]][1] for name in drawn]).T
        points = low + latin_hypercube(CANDIDATES, len(drawn), 0) * (high - low)
        v = {name: np.zeros((CANDIDATES, 1)) for name in self.names}
        v |= {name: points[:, i : i + 1] for i, name in enumerate(drawn)}
        basis = np.stack([np.exp(exponent) + 0.0 * observed for exponent in self._exponents(v, logs)], 2)
        scaled = [next(name for name in term if of[name] == "") for term in self._terms]

        def coordinates(log: Array) -> dict[str, Array]:
            values = {name: points[:, i] for i, name in enumerate(drawn)}
            return values | {name: log[..., i] / self._scale[name] for i, name in enumerate(scaled)}

        at = {name: i for i, name in enumerate(self.names)}
        basis, floor = basis / observed[None, :, None], 0.02 * observed.min()
        return projected_starts(at, coordinates, basis, weights, keep or STARTS, floor=floor)


def saturated(log_experts: Any, log_start: Any, log_max: Any) -> Any:
    """Return log E', with E' the saturated number of experts E (Clark et al. 2022, equation 4).

    1 / E' = 1 / (E - 1 + 1 / (1 / E_start - 1 / E_max)) + 1 / E_max, so E' runs from E_start at E = 1 to E_max.
    """
    floor = np.exp(-log_max)
    reach = 1.0 / (np.exp(-log_start) - floor)
    return -np.log(1.0 / (np.expm1(log_experts) + reach) + floor)
