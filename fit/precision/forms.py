"""Laws of N, D and number formats: a format acts as fewer parameters and tokens.

L = base(N e_N, D e_D), with base a law of N and D that all formats share. A format's efficiencies e_N and e_D, relative
to no quantization, are products over the forward and the backward pass (Panferov et al. 2025, arXiv:2505.14669). By
bits, e_N is the product of 1 - exp(-P / gamma) over weights, activations and KV cache of P bits (Kumar et al. 2024,
arXiv:2411.04330, section 4), divided by its value without quantization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Array, Columns, Constants, Say, identifiable
from ..formats import PASSES
from ..laws.chinchilla import ChinchillaLaw
from ..laws.law import Law, Problem
from ..solver.forms import LogSumExp, LogSumTerms

LEAST_EXPONENT = 0.02  # a flatter term is indistinguishable from E, and makes efficiencies overflow
EFFECT = (0.0, 5.0)  # bounds of a format's change of the log of a term: rounding adds no information, so e <= 1
STARTS = 6  # all 64 of the base law led to one optimum on the runs of Panferov et al.
GAMMA_BOUNDS, GAMMA_STARTS = (0.05, 50.0), (0.7, 2.0, 6.0)  # published: 1 to 3


class PrecisionForm(Law):
    """A law of N and D with efficiencies of formats.

    Parameters
    ----------
    base : the law of N and D, a ChinchillaLaw or GammaLaw.
    formats : names of the formats of each pass, the first without quantization.
    both : a pass has efficiencies of N and D; else the forward pass one of N, and the backward pass one of D.
    bits : part -> bits of each forward format; these then set e_N, and the base must be a ChinchillaLaw.
    """

    form, title, output = "precision", "the law of precision", "loss"
    inputs = ("N", "D", *PASSES)
    resample_starts = 0  # other starts led to the same draws
    resampling = "wild"  # draws with replacement would lose formats of few runs

    def __init__(
        self,
        base: ChinchillaLaw,
        formats: Sequence[Sequence[str]],
        both: bool = True,
        bits: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        super().__init__(base.objective, base.delta)
        self.base, self.formats, self.both, self.bits = base, formats, both, bits
        self._bits = {f"gamma {part}": np.asarray(values, dtype=float) for part, values in (bits or {}).items()}
        self._effects = {  # constant -> term of the base law, pass, and number of the format
            f"e_{'ND'[term]} {name} {PASSES[p]}": (term, p, code)
            for p, names in enumerate(formats)
            for term in (0, 1)
            if (both or term == p) and not (bits and p == 0)
            for code, name in enumerate(names[1:], 2)
        }
        self.names = (*base.names, *self._effects, *self._bits)

    def evaluate(self, constants: Constants, *inputs: Any) -> Any:  # type: ignore[override]
        N, D, *codes = inputs
        log_N, log_D = self.log_efficiency(constants, *codes)
        return self.base.evaluate(constants, N * np.exp(log_N), D * np.exp(log_D))

    def log_efficiency(self, constants: Constants, *codes: Any) -> list[Any]:
        """Return log e_N and log e_D of formats given by their numbers in both passes."""
        logs: list[Any] = [0.0, 0.0]
        for name, (term, p, code) in self._effects.items():
            logs[term] = logs[term] + np.log(constants[name]) * (np.asarray(codes[p]) == code)
        for name, bits in self._bits.items():
            logs[0] = logs[0] + _kept(bits, codes[0], 1.0 / constants[name])
        return logs

    def in_format(self, constants: Constants, codes: Sequence[int]) -> Columns:
        """Return the constants of the base law in one format."""
        log_N, log_D = self.log_efficiency(constants, *codes)
        shift = {"A": constants["alpha"] * log_N, "B": constants["beta"] * log_D}
        return {name: constants[name] * np.exp(-shift.get(name, 0.0)) for name in self.base.names}

    def equation(self, say: Say) -> str:
        base = self.base.equation(say).replace(" N^", " (N e_N)^").replace(" D^", " (D e_D)^")
        return ", ".join([base, *(f"{name} = {say(name)}" for name in self.names[len(self.base.names) :])])

    # The law as the solver sees it.

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        super()._check(inputs, observed)
        identifiable(*inputs[:2])

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        base = self.base._problem(inputs[:2], observed)
        assert isinstance(base.form, LogSumExp)
        k, at = len(base.bounds), {n: i for i, n in enumerate([*base.bounds, *self._effects, *self._bits])}
        slopes = at["alpha"], at.get("beta", at["alpha"])
        bounds = dict(base.bounds) | dict.fromkeys(self._effects, EFFECT)
        bounds |= {n: (LEAST_EXPONENT, bounds[n][1]) for n in ("alpha", "beta") if n in bounds}
        bounds |= dict.fromkeys(self._bits, tuple(np.log(GAMMA_BOUNDS)))

        def constants(theta: Array) -> Columns:
            effects = {n: np.exp(-theta[:, at[n]] / theta[:, slopes[term]]) for n, (term, *_) in self._effects.items()}
            return base.constants(theta[:, :k]) | effects | {n: np.exp(theta[:, at[n]]) for n in self._bits}

        def starts(weights: Array, keep: int | None) -> Array:
            if keep == 0:
                return np.empty((1, 0, len(at)))
            plain = base.starts(weights, min(keep or STARTS, STARTS))
            theta = np.concatenate([plain, np.zeros((*plain.shape[:2], len(at) - k))], axis=2)
            theta[..., len(at) - len(self._bits) :] = np.log(np.resize(GAMMA_STARTS, theta.shape[1]))[:, None]
            return theta

        terms = [(list(index), table) for index, table in zip(base.form.index, base.form.tables, strict=True)]
        for name, (term, p, code) in self._effects.items():
            index, table = terms[term]
            terms[term] = [*index, at[name]], np.column_stack([table, 1.0 * (inputs[2 + p] == code)])

        def logs(v: Mapping[str, Any]) -> list[Any]:
            theta = [v[name] for name in at]
            z = [sum(theta[i] * Z for i, Z in zip(index, table.T, strict=True)) for index, table in terms]
            return [z[0] - v["alpha"] * sum(_kept(P, inputs[2], np.exp(-v[n])) for n, P in self._bits.items()), *z[1:]]

        form = LogSumTerms(logs, at, len(observed)) if self._bits else type(base.form)(len(at), terms)
        return Problem(form, base.target, bounds, np.log(np.stack(inputs[:2])), starts, constants)


def _kept(bits: Array, code: Any, inverse: Any) -> Any:
    """Return the log of 1 - exp(-P / gamma) for the bits P of a format, relative to the first; inverse: 1 / gamma."""
    P = bits[np.asarray(code, dtype=int) - 1]
    return np.log(-np.expm1(-(inverse * P))) - np.log(-np.expm1(-(inverse * bits[0])))
