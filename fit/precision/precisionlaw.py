"""What a number format costs: efficiencies of parameters and tokens, from several laws weighed by hold-outs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..checks.outliers import find_outliers
from ..errors import Array, Columns, InputError, floats, one_of, positive
from ..forecasting.forecaster import GAP, CutOff, Forecaster, cut_offs, half_width, learnt_priors
from ..forecasting.mixture import MAX_DISTANCE
from ..formats import LEAST_RUNS, NONE, PASSES, format_columns, frequent, read_formats
from ..laws.law import Estimator, LossLaw
from ..laws.registry import loss_law
from ..table import RunTable, as_table
from ..uncertainty import check_resampling
from .forms import PrecisionForm
from .rise import RiseLaw

ONE = ", one per pass"
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gamma": ("gamma", {}),
    "gamma, tied": ("gamma", {"tied": True}),
    "gamma, E = 0": ("gamma", {"E": 0.0}),
    "gamma, tied, E = 0": ("gamma", {"tied": True, "E": 0.0}),
    "chinchilla": ("chinchilla", {}),
    "chinchilla, tied": ("chinchilla", {"tied": True}),
}
# One efficiency per pass goes with the law of Panferov et al., which is gamma.
FORMS = (*BASES, *(name + ONE for name, (form, _) in BASES.items() if form == "gamma"), "bits")
DRAWS = 100  # resamples of each form; the ends of intervals are then known to 7 % of the width
FEW_RUNS = 6  # per format; with fewer in a table of bits, only the law by bits is fitted
GAINS, ONE_SD = 10_000, 0.682689  # draws of formats' gains; the level of an interval of one standard deviation
RATIOS = np.geomspace(1.0, 1e6, 151)  # D / N at which turning points are sought


class _Forecaster(Forecaster):
    """A forecaster with hold-outs by N too, that leave out formats of fewer than LEAST_RUNS fitted runs."""

    def _cut_offs(self, data: Columns, reach: Array, labels: np.ndarray, min_runs: int) -> list[CutOff]:
        cuts, codes = [], [data[name] for name in PASSES]
        for cut in cut_offs(data, reach, labels, min_runs) + cut_offs(data, data["N"], labels, min_runs, 2):
            fitted = frequent(codes, cut.fitted)
            tested = cut.tested & np.all([np.isin(code, code[fitted]) for code in codes], axis=0)
            if tested.any() and fitted.sum() > min_runs:
                ends = {name: data[name][fitted].max() for name in "ND"}
                further = _beyond({name: data[name][tested] for name in "ND"}, ends, reach[fitted].max())
                cuts.append(CutOff(cut.reach, fitted, tested, np.maximum(further, np.log(GAP))))
        return cuts

    def _further(self, points: Columns) -> Array:
        return np.maximum(_beyond(points, {name: self.data_[name].max() for name in "ND"}, self.ends_[1]), 0.0)


def _beyond(points: Columns, tops: Mapping[str, float], largest: float) -> Array:
    """Return the log of extrapolation; N and D count twice because both grow as the root of the best models' FLOPs."""
    beyond = [2.0 * np.log(points[name] / top) for name, top in tops.items()]
    return np.maximum.reduce([np.log(6.0 * points["N"] * points["D"] / largest), *beyond])


class PrecisionLaw(Estimator):
    """The loss by N, D and number format.

    forms: names among FORMS; by default all that apply. draws: resamples of each form.
    After `fit`: formats_ (name -> its numbers in both passes; "none" is first), forecaster_, weights_ and errors_ (form
    -> share, and root mean square error of log loss on hold-outs), rise_ (the law of quantization after training, or
    None), notes_ (sentences on runs left out), runs_ and names_ (the other runs and their formats).
    """

    inputs, output = (), "table"

    def __init__(self, forms: Sequence[str] | None = None, draws: int = DRAWS, seed: int = 0) -> None:
        for form in forms or ():
            one_of("form", form, FORMS)
        check_resampling(draws, seed)
        self.forms, self.draws, self.seed = forms, draws, seed

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "formats_")

    def __repr__(self) -> str:
        if not self.__sklearn_is_fitted__():
            return f"PrecisionLaw({'' if self.forms is None else f'forms={self.forms!r}'})"
        shares = ", ".join(f"{form} {share:.0%}" for form, share in self.weights_.items())
        return f"PrecisionLaw of {', '.join(self.formats_)}: {shares}; {len(self.forecaster_.cut_offs_)} hold-outs"

    def fit(self, table: Any) -> Self:
        """Fit to a RunTable, DataFrame, file or sweep directory.

        Columns: N, D, loss; the formats as weights_format, activations_format and gradients_format, or as forward and
        backward (missing: none), or as bits in weights_bits, activations_bits and kv_bits; quantized_loss_<way> of
        unquantized runs; optionally run_id and weight. Left out are formats of fewer than three runs and outliers.
        """
        runs, self.notes_ = as_table(table), list[str]()
        name, passes, bits = read_formats(runs)
        counted, plain = runs.weight > 0, name == NONE
        if not plain.any() or plain.all():
            state = "every run" if plain.all() else "no run"
            others = "runs whose formats are in columns such as weights_format, weights_bits, or forward and backward"
            needs = f"a law of precision compares such runs with {others}"
            raise InputError(f"{state} of the table is without quantization; {needs}.")
        self.rise_ = RiseLaw.fit(runs.where(counted & plain), self.draws, self.seed, self.notes_)
        named = not all(column.endswith("_bits") for column in format_columns(runs.frame).values())
        only_bits = bool(bits) and not named and counted.sum() < FEW_RUNS * len({*name})
        for judged in (False, True):  # outliers may leave a format with too few runs
            keep = counted if only_bits else frequent(passes, counted)
            if (name[keep] == NONE).all():
                raise InputError(f"no format has {LEAST_RUNS} runs or more; add runs in each format.")
            fitted, names = runs.where(keep), [[NONE, *sorted({*labels[keep]} - {NONE})] for labels in passes]
            codes = [np.array([of.index(v) + 1.0 for v in p[keep]]) for of, p in zip(names, passes, strict=True)]
            means = {part: [P[keep][codes[0] == c].mean() for c in np.unique(codes[0])] for part, P in bits.items()}
            laws = {"bits": PrecisionForm(loss_law("chinchilla"), names, bits=means)} if bits else {}
            for (base, (form, options)), suffix in product([] if only_bits else BASES.items(), ("", ONE)):
                laws[base + suffix] = PrecisionForm(loss_law(form, **options), names, both=not suffix)
            columns = {"N": fitted.N, "D": fitted.D, **dict(zip(PASSES, codes, strict=True)), "loss": fitted.loss}
            if not judged:
                with suppress(InputError):  # the runs are too few to judge any
                    flexible = laws["bits" if only_bits else "gamma"].fit(**columns, weight=fitted.weight)
                    outliers = find_outliers(flexible)
                    for row, error in zip(outliers.rows, np.expm1(outliers.residual[outliers.rows]), strict=True):
                        at = f"{name[keep][row]}, N = {fitted.N[row]:.4g} and D = {fitted.D[row]:.4g}"
                        self.notes_.append(f"An outlier is left out: {at}, {error:+.1%} off.")
                    counted[np.flatnonzero(keep)[outliers.rows]] = False
        self.notes_ += [f"{v} is left out: a format needs {LEAST_RUNS} runs or more." for v in {*name} - {*name[keep]}]
        self.laws_ = {form: law for form, law in laws.items() if form in (self.forms or FORMS)}
        if not self.laws_:
            raise InputError(f"forms is {self.forms}, and none applies: bits needs a column such as weights_bits.")
        priors = learnt_priors("precision")
        self.forecaster_ = _Forecaster(self.laws_, draws=self.draws, seed=self.seed, priors=priors)
        self.forecaster_.fit(**columns, weight=fitted.weight, groups=fitted.group)
        self.weights_, self.errors_ = self.forecaster_.weights_, self.forecaster_.errors_
        self.runs_, self.names_, order = fitted, name[keep], [NONE, *sorted({*name[keep]} - {NONE})]
        self.formats_ = {v: tuple(int(code[self.names_ == v][0]) for code in codes) for v in order}
        return self

    # Answers.

    def predict(
        self, N: ArrayLike, D: ArrayLike, format: str = NONE, level: float = 0.95, kind: str = "run"
    ) -> pd.DataFrame:
        """Return the loss in a format, with low and high: the interval of a new run (`kind` "run") or of the law."""
        self._fitted()
        one_of("format", format, self.formats_)
        return self.forecaster_.forecast(N, D, *self.formats_[format], level=level, kind=kind)

    def in_format(self, format: str = NONE, form: str | None = None) -> LossLaw:
        """Return the law of N and D in a format, with draws: by one form, by default that of the largest weight."""
        self._fitted()
        one_of("format", format, self.formats_)
        name = form or max(self.weights_, key=lambda name: self.weights_[name])
        one_of("form", name, self.weights_)
        member, form_law, codes = self.forecaster_._members[name], self.laws_[name], self.formats_[format]
        constants, draws = (form_law.in_format(c, codes) for c in (member.constants, member.draws))
        law = form_law.base.clone()
        law.constants_, law.draws_ = {k: float(v[0]) for k, v in constants.items()}, draws
        return law

    def efficiencies(self, level: float = 0.95) -> pd.DataFrame:
        """Return e_N, e_D and 1 / (e_N e_D) of each format, with intervals.

        N parameters and D tokens in the format are worth e_N N and e_D D without quantization. A format that trains
        more than 1 / (e_N e_D) times as fast, `speedup`, reaches a lower loss in the same time at the best N and D.
        """
        fitted, drawn = (self._log_efficiencies(drawn) for drawn in (False, True))
        weights = replace(self.forecaster_._weights, prior=self.forecaster_.priors["size"])  # not an extrapolation
        columns: Columns = {}
        for k, (name, sign) in enumerate((("N", 1.0), ("D", 1.0), ("speedup", -1.0))):
            variances = weights.variances(fitted[:, k, :, 0], drawn[:, k], np.zeros(len(self.formats_)))
            log, wide = sign * (weights.share @ fitted[:, k, :, 0]), half_width(level, [*variances.values()])
            low, high = np.clip([log - wide, log + wide], *((-np.inf, 0.0) if sign > 0 else (0.0, np.inf)))
            columns |= {name: np.exp(log), f"{name}_low": np.exp(low), f"{name}_high": np.exp(high)}
        return pd.DataFrame(columns, index=pd.Index(self.formats_, name="format"))

    def best(self, flops: ArrayLike, speedup: Mapping[str, float] | None = None, level: float = 0.95) -> pd.DataFrame:
        """Return the best N and D of each format in the time of a budget, the loss, and how probably the format wins.

        flops: 6 N D without quantization, a scalar or (targets,). speedup: format -> how many times as fast it trains.
        """
        self._fitted()
        for name, factor in (speedup or {}).items():
            one_of("format of speedup", name, self.formats_)
            if not 0.0 < factor < np.inf:
                raise InputError(f"speedup of {name} is {factor}; it must be a finite number above zero.")
        C = positive("flops", np.atleast_1d(floats(flops)))
        factors = dict.fromkeys(self.formats_, 1.0) | dict(speedup or {})
        e, share, tables = self.efficiencies(ONE_SD), self.forecaster_._weights.share, []
        noise = np.random.default_rng(self.seed).standard_normal((GAINS, len(e)))
        gain = np.log([*factors.values()] / e["speedup"].to_numpy())
        gain = gain + noise * 0.5 * np.log((e["speedup_high"] / e["speedup_low"]).to_numpy())
        wins = np.bincount(gain.argmax(axis=1), minlength=len(e)) / GAINS
        for k, (name, factor) in enumerate(factors.items()):
            laws = [self.in_format(name, form) for form in self.weights_]
            middle = 0.5 * np.log(C * factor / 6.0)
            with np.errstate(all="ignore"):  # the N of a form without one of its terms is zero or infinite
                logs = np.array([np.log(law.optimum(C * factor, law.constants_)[0]) - middle for law in laws])
            N = np.exp(middle + share @ np.clip(np.nan_to_num(logs), -MAX_DISTANCE, MAX_DISTANCE))
            columns: dict[str, Any] = {"flops": C, "format": name, "speedup": factor, "N": N, "D": C * factor / 6.0 / N}
            loss = self.predict(N, columns["D"], name, level, kind="mean")
            tables.append(pd.concat([pd.DataFrame(columns), loss], axis=1).assign(wins=wins[k]))
        return pd.concat(tables).sort_values(["flops", "loss"], ignore_index=True)

    def turning_points(self, N: ArrayLike, level: float = 0.95) -> pd.DataFrame:
        """Return the D / N from which more tokens make an unquantized run of N parameters worse once it is quantized.

        Rows by way to quantize and N, infinite above 1e6.
        """
        self._fitted()
        if self.rise_ is None:
            raise InputError("the table has too few values in columns quantized_loss_<way>; see notes_.")
        f, rows = self.forecaster_, list[tuple[Any, ...]]()
        chance = np.repeat(f._weights.share / self.draws, self.draws)
        for way, size in product(self.rise_.ways, positive("N", np.atleast_1d(floats(N)))):
            points = f._points((size, size * RATIOS, 1, 1), {})
            rise = self.rise_(way, points["N"], points["D"])
            at = (np.exp(f._log_values(f._drawn, points)) + rise[:, 1:]).argmin(axis=1).ravel()
            order = np.argsort(at)
            ends = at[order][np.searchsorted(np.cumsum(chance[order]), [0.5 - level / 2, 0.5 + level / 2])]
            middle = (f.predict(**points) + rise[:, 0]).argmin()
            rows.append((way, size, *np.append(RATIOS[:-1], np.inf)[[middle, *ends]]))
        return pd.DataFrame(rows, columns=["way", "N", "ratio", "low", "high"])

    def to_dict(self, flops: ArrayLike, speedup: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return all answers as lists and numbers, for JSON."""
        best, after = self.best(flops, speedup).to_dict("records"), None
        if self.rise_ is not None:
            ends = [[c[0], *np.quantile(c[1:], (0.025, 0.975))] for c in self.rise_.constants[:, -2:].T]
            turns = self.turning_points(np.unique(self.rise_.runs["N"])[[0, -1]]).to_dict("records")
            after = {"g_D": ends[0], "g_N": ends[1], "turning_points": turns}
        forms = {name: [share, self.errors_.get(name)] for name, share in self.weights_.items()}
        efficiencies = self.efficiencies().reset_index().to_dict("records")
        return {"efficiencies": efficiencies, "best": best, "forms": forms, "rise": after, "notes": self.notes_}

    def _log_efficiencies(self, drawn: bool) -> Array:
        """Return log e_N, log e_D and their sum, (forms, 3, formats, r), of the fits (r = 1) or of their draws."""
        self._fitted()
        forms, r = [], self.draws if drawn else 1
        for name, member in self.forecaster_._members.items():
            constants = {k: np.resize(v, r) for k, v in (member.draws if drawn else member.constants).items()}
            pairs = [self.laws_[name].log_efficiency(constants, *codes) for codes in self.formats_.values()]
            log = np.array([[np.broadcast_to(v, r) for v in pair] for pair in pairs]).swapaxes(0, 1)
            forms.append([*log, log.sum(axis=0)])
        return np.array(forms)


def by_precision(
    runs: RunTable, bootstrap: int, seed: int, speedup: Mapping[str, float] | None = None
) -> tuple[RunTable, PrecisionLaw | None]:
    """Return the runs without quantization, all if there are none, and the law of formats if the table has several.

    Raises InputError if `speedup` names formats and there is no law of them.
    """
    law, plain, notes = None, np.zeros(len(runs), dtype=bool), runs.notes
    try:
        if format_columns(runs.frame):
            plain = read_formats(runs)[0] == NONE
            law = None if plain.all() else PrecisionLaw(draws=min(bootstrap, DRAWS) or DRAWS, seed=seed).fit(runs)
    except InputError as error:
        notes = (*notes, f"Number formats have no law: {error}")
    if speedup and law is None:
        raise InputError(f"speedup names {', '.join(speedup)}, but the table gives no law of number formats.")
    return replace(runs.where(plain) if plain.any() else runs, notes=notes), law
