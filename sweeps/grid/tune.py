"""The tune grid: Sobol points over learning rate, batch and weight decay at a few sizes, in rungs of growing D.

A rung has half the previous rung's runs, in half the volume, around the best quarter of them: successive halving
(Jamieson and Talwalkar 2016, arXiv:1502.07943) of a region, because the best settings move with D. The result is
tuning.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import yaml
from msgspec import Meta

from ...train.config import ModelConfig, RunConfig
from ...train.errors import UserError, counted
from ...train.fields import Count, Distinct, Positive, Ratio
from ...train.files import write_atomic
from ...train.flops import count_parameters, flops_exact, training_flops_per_token
from ..config import SweepConfig
from ..plan.rates import SIZES
from ..prepare import configuration, resolved_base
from ..runs.directory import SweepDirectory
from ..runs.membership import add_runs, members
from . import architectures
from .base import GridConfig, unique_tokens
from .expand import run_label
from .tuning import PowerRule, Tuner, decaying_rate, family

LEAST_RUNS, MOST_RUNS = 16, 128  # per size in the first rung
KEPT = 0.25  # best share of a rung's runs, whose mean settings are the centre of the next rung
BATCH_POWER = 0.383  # expected growth of the best batch with D: B ~ D^0.383 (Bergsma et al. 2025)
LEAST_STEPS = 25  # of a run with the largest batch
TIMESCALE = 0.3  # centre of the first rung
VARIED = ("optimizer.learning_rate", "optimizer.batch_size", "optimizer.weight_decay")
FASTEST = 4.0  # shortest averaging time of weight decay, in steps
FILE = "tuning.yaml"
OTHERS = ("base_depth", "min_steps")  # rules that the tune did not vary, copied to its file


class Settings(NamedTuple):
    learning_rate: float
    batch: float  # tokens
    timescale: float  # of weight decay, tau = B / (eta lambda D), eta the rate of matrices


Tried = Mapping[tuple[int, int], Sequence[tuple[Settings, float]]]  # settings and losses by N and D


@dataclass
class TuneGrid(GridConfig):
    """The runs of `isoflop tune`: each rung has longer and fewer runs than the rung before."""

    kind: str = "tune"
    sizes: Distinct[Positive] = field(default_factory=list)  # target N
    tokens_per_parameter: list[Ratio] = field(default_factory=list)  # of each rung, at least doubling
    flops_budget: Positive | None = None  # training FLOPs of all rungs; None: the cluster's, or from a probe
    span: Annotated[float, Meta(ge=1, le=1e4)] = 8.0  # the first rung's settings are within this factor of the base's
    max_steps: Count = 20_000  # of a run; smaller batches are not tried

    grows: ClassVar[bool] = True
    tries_settings: ClassVar[bool] = True

    def fill_budgets(self, budgets: list[float] | None, probed: Callable[[], list[float]]) -> None:
        if self.flops_budget is None:
            self.flops_budget = SIZES * sum(probed()) if budgets is None else sum(budgets)

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        return self.rung_runs(base, tuner, 0, {})

    def rung_runs(self, base: RunConfig, tuner: Tuner, rung: int, tried: Tried) -> Iterator[RunConfig]:
        """Yield a rung's runs, around the base run's settings (rung 0) or the previous rung's best ones in `tried`."""
        from scipy.stats import qmc

        count, half = self._runs_per_size(base) >> rung, math.log(self.span) * 0.5 ** (rung / 3)
        for model in self.models(base):
            N, tokens = count_parameters(model).N_active, self.rung_tokens(base, model, rung)
            middle = np.log([base.optimizer.learning_rate, base.batch_tokens, TIMESCALE])
            if rung:
                before = self.rung_tokens(base, model, rung - 1)
                best = sorted(tried.get((N, before), ()), key=lambda run: run[1])
                if not best:
                    continue  # no run of the previous rung has finished
                middle = np.log([settings for settings, _ in best[: math.ceil(KEPT * len(best))]]).mean(axis=0)
                middle[1] += BATCH_POWER * math.log(tokens / before)
            points = qmc.Sobol(len(middle), seed=base.seed + 7919 * rung + N).random_base2((count - 1).bit_length())
            for rate, batch, timescale in np.exp(middle + half * (2 * points[:count] - 1)).tolist():
                smallest = max(base.data.sequence_length, tokens / self.max_steps)
                batch = max(smallest, min(batch, tokens / LEAST_STEPS))
                rules = replace(
                    tuner.rules,
                    learning_rate=PowerRule(rate),
                    batch_tokens=PowerRule(batch),
                    timescale=PowerRule(max(timescale, FASTEST * batch / tokens)),
                    min_steps=LEAST_STEPS,
                    keep=[name for name in tuner.rules.keep if name not in VARIED],
                    horizon="run",
                )
                yield Tuner(rules).tuned(replace(base, model=model, tokens=tokens, seed=base.seed + rung))

    def models(self, base: RunConfig) -> list[ModelConfig]:
        return [architectures.nearest_model(base.model, size) for size in sorted(self.sizes)]

    def rung_tokens(self, base: RunConfig, model: ModelConfig, rung: int) -> int:
        """Return the tokens per run of a model in a rung: a multiple of every batch that may be tried."""
        first, now = self.tokens_per_parameter[0], self.tokens_per_parameter[rung]
        unit = base.data.sequence_length * 3 * 2 ** math.ceil(math.log2(base.optimizer.batch_size * self.span))
        return max(1, round(first * count_parameters(model).N_active / unit)) * round(now / first) * unit

    def _runs_per_size(self, base: RunConfig) -> int:
        ratios = self.tokens_per_parameter
        if not self.sizes or not ratios or any(longer < 2 * shorter for shorter, longer in pairwise(ratios)):
            raise UserError(
                f"grid.sizes is {self.sizes} and grid.tokens_per_parameter is {ratios}; a tune needs at least one "
                "size, and rungs that each at least double the tokens per parameter"
            )
        assert self.flops_budget is not None
        cost = sum(
            training_flops_per_token(model, base.data.sequence_length) * self.rung_tokens(base, model, rung) / 2**rung
            for model in self.models(base)
            for rung in range(len(self.tokens_per_parameter))
        )
        if self.flops_budget < LEAST_RUNS * cost:
            raise UserError(
                f"grid.flops_budget is {self.flops_budget:.3g}, but this design needs {LEAST_RUNS * cost:.3g} for "
                f"{LEAST_RUNS} runs per size in its first rung; give at least that, or smaller grid.sizes or "
                "grid.tokens_per_parameter"
            )
        return min(MOST_RUNS, int(self.flops_budget / cost))

    def notes(self, runs: Sequence[RunConfig], tuner: Tuner) -> list[str]:
        from ...fit.checks.doctor import MANY_EPOCHS

        ratios = self.tokens_per_parameter
        longest = max(self.rung_tokens(run, run.model, len(ratios) - 1) for run in runs)
        if longest > MANY_EPOCHS * unique_tokens(runs[0]):
            raise UserError(
                f"grid.tokens_per_parameter gives the largest of grid.sizes {longest:.3g} tokens, more than "
                f"{MANY_EPOCHS:g} times the corpus; lower either field, or use more text"
            )
        total = sum(map(flops_exact, runs)) * sum(ratio / ratios[0] / 2**rung for rung, ratio in enumerate(ratios))
        return [f"these are the runs of the first of {len(ratios)} rungs; all rungs take about {total:.3g} FLOPs"]

    def next_round(self, sweep: SweepDirectory, config: SweepConfig) -> bool:
        base, tried = resolved_base(sweep, config), tried_settings(sweep)
        present = [(config.model, config.tokens) for config in (run.config() for run in members(sweep))]
        for rung in range(1, len(self.tokens_per_parameter)):
            runs = list(self.rung_runs(base, Tuner(config.tuning), rung, tried))
            if not all((run.model, run.tokens) in present for run in runs):
                print(f"rung {rung + 1} of {len(self.tokens_per_parameter)}: {counted(len(runs), 'run')}")
                named = [replace(run, name=run_label(run)) for run in runs]
                return bool(add_runs(sweep, named, f"rung {rung + 1} of the tune"))
        return False

    @classmethod
    def results(cls, sweep: SweepDirectory) -> dict[str, Any]:
        return write_tuning(sweep, configuration(sweep))


def settings_of(run: RunConfig) -> Settings:
    """Return a run's learning rate, batch in tokens and timescale of weight decay as a share of D."""
    forgotten = decaying_rate(run.optimizer, run.model.width) * run.optimizer.weight_decay * run.steps
    return Settings(run.optimizer.learning_rate, run.batch_tokens, 1.0 / forgotten)


def tried_settings(sweep: SweepDirectory) -> Tried:
    """Map (N, D) to (settings, loss) of each run; the loss is an expected one if the run was stopped as hopeless."""
    tried: dict[tuple[int, int], list[Any]] = {}
    for run in members(sweep):
        summary = run.summary() if run.is_done() else None
        if (loss := run.given_up() if summary is None else summary["val_loss"]) is not None:
            config = run.config()
            cell = tried.setdefault((count_parameters(config.model).N_active, config.D), [])
            cell.append((settings_of(config), loss))
    return tried


def write_tuning(sweep: SweepDirectory, config: SweepConfig) -> dict[str, Any]:
    """Fit tuning rules and write tuning.yaml. Returns the content of law.json; raises InputError if the fit fails."""
    from ...fit.hyperparameters.tuning import tuning_rules

    tried = tried_settings(sweep).items()
    rows = [(*cell, *settings, loss) for cell, runs in tried for settings, loss in runs]
    columns = dict(zip(("N", "D", *Settings._fields, "loss"), np.array(rows, dtype=float).T, strict=True))
    fitted = tuning_rules(columns, config.fit.bootstrap, seed=0)
    taken, unset = asdict(config.tuning), (None, asdict(PowerRule()))
    others = {name: taken[name] for name in OTHERS if taken[name] not in unset}
    command = sweep.settings().get("command") or ()
    content = {"command": " ".join(command), **fitted, "family": family(sweep.runs()[0].config())}
    content["tuning"] = others | fitted["tuning"]
    write_atomic(sweep.path / FILE, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    rules = yaml.safe_dump(fitted["tuning"], sort_keys=False)
    verdict = f"rules for tuning=law tuning.file={sweep.path / FILE} (intervals are in the file):\n{rules}"
    return {"verdict": verdict, "warnings": fitted["warnings"]}
