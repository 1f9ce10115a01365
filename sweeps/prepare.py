"""Plan a sweep from a configuration or from its folder, and write the plan.

Planning from the folder reads only the frozen run configs, so every node makes the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from .. import __version__
from ..evaluate.quantization.settings import parse
from ..train.config import RECIPE, ParallelConfig, RunConfig, flatten, identity, run_id
from ..train.errors import UserError, counted
from ..train.files import read_document, read_json, write_atomic, write_json
from .config import EvaluateConfig, SweepConfig, base_run, from_mapping
from .grid.content import Texts
from .grid.doubts import doubts
from .grid.expand import expand_grid
from .grid.tuning import Tuner, TuningConfig, depends_on_D, family
from .plan import trunks
from .plan.rates import core_flops_per_second, fill_budgets, places, sweep_rates
from .plan.sweep_plan import Plan, plan_remarks, plan_runs
from .runs.directory import RunDirectory, SweepDirectory, yaml_or_empty
from .runs.journal import Planned
from .runs.membership import add_runs, added_runs, allow_growth, members
from .slurm.snapshot import PACKAGE, git_output

SHOWN = 4  # changed settings that a message names


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A planned sweep that has not started."""

    sweep: SweepDirectory
    config: SweepConfig
    runs: list[RunConfig]  # of the plan, with trunks and branches
    plan: Plan
    rate: float  # see `matmul_rate`
    remarks: list[str]  # sentences for the user

    @property
    def directories(self) -> list[RunDirectory]:
        return [self.sweep.run(run.run_id) for run in self.plan.runs]

    @functools.cached_property
    def by_id(self) -> dict[str, RunConfig]:
        return {run_id(run): run for run in self.runs}


def from_config(config: SweepConfig) -> Prepared:
    """Plan the sweep of a configuration, including runs that were added to its folder before."""
    assert config.sweep is not None
    sweep = SweepDirectory(Path(config.output_root) / config.sweep)
    if config.trainer.kind == "command":
        asked = EvaluateConfig() if config.trainer.hf_folder is None else config.evaluate  # the rest does not apply
        config.evaluate = EvaluateConfig(asked.tasks, limit=asked.limit, allow_code=asked.allow_code, ngram=None)
    if config.evaluate.tasks:
        from ..evaluate.tasks.tasks import anchored

        config.evaluate.tasks = anchored(config.evaluate.tasks, print, config.evaluate.allow_code)
    rate = matmul_rate(config, sweep)
    fill_budgets(config.grid, config.cluster, rate)
    runs, remarks = resolve_runs(config)
    for quantization in parse(config.evaluate.quantize):
        for run in runs:
            quantization.groups(run.model)  # raises UserError unless the group divides every matrix
    if config.grid is not None:
        remarks += [*config.grid.notes(runs, Tuner(config.tuning)), *doubts(config, runs)]
    if config.sweep_merge and (sweep.path / "plan.json").exists():
        runs = [*(run.config() for run in sweep.runs()), *runs]  # the new config of a run replaces the old one
    prepared = _prepare(sweep, config, runs, rate)
    prepared.remarks.extend(remarks)
    if (before := _recorded(sweep)) and (changes := _changes(_questions(before), _questions(config))):
        prepared.remarks.append(f"{changes}; finished runs are kept, and scored and fitted with the new settings")
    return prepared


def conflict(prepared: Prepared) -> str | None:
    """Return an error message if plan and folder do not have the same runs and must not be merged, else None."""
    sweep, planned = prepared.sweep, {run.run_id for run in prepared.plan.runs}
    if not (sweep.path / "plan.json").exists():
        return None
    try:
        present = {run.run_id for run in members(sweep)}
    except UserError:  # the plan is damaged
        present = {path.name for path in (sweep.path / "runs").glob("*")}
    if present <= planned and (planned <= present or prepared.config.sweep_merge):
        return None
    changes = remedy = ""
    if before := _recorded(sweep):
        if before.tuning == TuningConfig() != prepared.config.tuning:
            remedy = "continue without tuning rules with tuning=fixed, "
        recipe = sweep.settings().get("recipe")  # of the trainer that its runs belong to
        changes = _changes(_request(before) | {"recipe": recipe}, _request(prepared.config))
    return (
        f"{sweep.path} holds {counted(len(present), 'run')} of a sweep with other settings "
        f"({changes or 'another version planned it'}); {remedy}add to its grid with "
        f"`isoflop extend {sweep.path} grid.FIELD=VALUE`, choose another folder with "
        "sweep=NAME, or merge both into one plan, table and fit with sweep_merge=true"
    )


def _recorded(sweep: SweepDirectory) -> SweepConfig | None:
    with suppress(UserError):
        return configuration(sweep)
    return None


def _request(config: SweepConfig) -> dict[str, Any]:
    """Return the settings that determine the runs, by dotted name."""
    base, grid = base_run(config), {f"grid.{name}": value for name, value in vars(config.grid).items()}
    tuning = {"tuning": dataclasses.asdict(config.tuning)}
    path = base.data.path and os.path.abspath(os.path.expanduser(base.data.path))
    data = {"data": dataclasses.asdict(base.data) | {"cache_dir": None, "path": path}}
    return flatten(identity(base) | data | tuning) | grid


def _questions(config: SweepConfig) -> dict[str, Any]:
    """Return the settings of scoring and fit, which do not change the runs, by dotted name."""
    return flatten({"evaluate": vars(config.evaluate), "fit": vars(config.fit)})


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    changes = [
        f"{name} was {json.dumps(before[name])[:60]} and is {json.dumps(now[name])[:60]}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    return ", ".join(changes[:SHOWN] + ["…"] * (len(changes) > SHOWN))


def from_disk(sweep: SweepDirectory, more: Sequence[RunConfig] = ()) -> Prepared:
    """Plan a sweep from the run configs in its folder, and `more` runs."""
    config = configuration(sweep)
    return _prepare(sweep, config, [*(run.config() for run in sweep.runs()), *more], matmul_rate(config, sweep))


def configuration(sweep: SweepDirectory) -> SweepConfig:
    recorded = sweep.settings().get("config")
    config = from_mapping(recorded, sweep.path / "sweep.yaml")
    if config.tuning.batch_tokens.k is not None and "min_batch" not in (recorded or {}).get("tuning", {}):
        config.tuning.min_batch = config.parallel.dp  # earlier versions chose a multiple of parallel.dp
    folder = Path(os.path.abspath(sweep.path))  # the folder may have been moved, and `.` has no name
    config.output_root, config.sweep = str(folder.parent), folder.name
    return config


def _prepare(sweep: SweepDirectory, config: SweepConfig, runs: list[RunConfig], rate: float) -> Prepared:
    by_id = {run_id(run): run for run in runs}
    for run in added_runs(sweep):
        by_id.setdefault(run_id(run), run)
    runs, remarks = list(by_id.values()), list[str]()
    directories = map(sweep.run, by_id)
    progress = {run.run_id: trunks.progress_of(run, live=run.state().state == "running") for run in directories}
    if config.trunks:
        merged = trunks.merge_runs(runs, progress)
        runs, remarks = merged.runs, merged.remarks
    if config.evaluate.tasks:
        runs = trunks.keep_between(runs, config.evaluate.every)
    room = places(config.cluster, config.parallel.world_size, rate)
    measured = sweep_rates(sweep.path, config.cluster, room.threads)
    planned = plan_runs(runs, config.cluster, room.flops_per_second, room.jobs, room.threads, measured)
    return Prepared(sweep, config, runs, planned, rate, [*remarks, *plan_remarks(planned)])


def matmul_rate(config: SweepConfig, sweep: SweepDirectory) -> float:
    """Return the matmul peak in FLOP/s of one core, or of one rank on slurm.

    A core is probed once per sweep.
    """
    rate = config.cluster.flops_per_second
    if rate is not None:
        return rate
    if config.cluster.kind == "slurm":
        raise UserError("cluster.flops_per_second is null; on slurm give the peak of one GPU, such as 4e14")
    with suppress(UserError):  # sweep.yaml is missing or damaged
        rate = sweep.settings().get("core_flops_per_second")
    return rate or core_flops_per_second()


def resolve_runs(config: SweepConfig) -> tuple[list[RunConfig], list[str]]:
    """Return the grid's run configs, with vocabulary size and corpus fingerprints filled in, and notes for the user.

    Replaces `config.tuning` by the tuning rules completed from `tuning.file`.
    """
    from ..train.data.tokenizers import planned_vocab_size

    assert config.grid is not None
    base = base_run(config)
    config.grid.set_first_text(base)
    Texts().fill(base, fixed=() if base.model.vocab_size is None else ("model.vocab_size",))
    config.tuning, remarks = read_rules(config.tuning, base)
    runs, sizes = expand_grid(config.grid, base, config.tuning), dict[tuple[str, int], int]()
    for run in runs if base.data.corpus != "external" else ():  # whose tokenizer is not known
        key = run.data.tokenizer, run.data.vocab_size
        if run.model.vocab_size != (size := sizes.get(key) or sizes.setdefault(key, planned_vocab_size(run.data))):
            raise UserError(
                f"model.vocab_size is {run.model.vocab_size}; the tokenizer {key[0]!r} has {size} tokens, and both "
                "must be the same (null takes the tokenizer's)"
            )
    if config.grid.tries_settings:
        return runs, remarks
    tuner = Tuner(config.tuning).with_spans(runs)
    if off := sum(map(tuner.misses_batch, runs)):
        remarks.append(
            f"the batch of {off} of {len(runs)} runs is off tuning.batch_tokens by a factor of 1.5 or more, because it "
            f"must be a multiple of tuning.min_batch {config.tuning.min_batch} sequences of data.sequence_length "
            f"{base.data.sequence_length}, and leave at least tuning.min_steps {config.tuning.min_steps} steps"
        )
    if config.tuning.choose_batch and (ones := sum(run.optimizer.batch_size == 1 for run in runs)):
        remarks.append(
            f"the batch of {ones} of {len(runs)} runs is one sequence; tuning.min_batch=4 saves time and costs some "
            "loss, which docs/tune.md measures"
        )
    if config.trunks and depends_on_D(config.tuning):
        horizon = config.tuning.horizon
        other = "size" if horizon == "run" else "run"
        alone = dataclasses.replace(base, parallel=ParallelConfig())  # the mesh may not divide the other batches
        tuned = {
            horizon: runs,
            other: expand_grid(config.grid, alone, dataclasses.replace(config.tuning, horizon=other)),
        }
        cost = {horizon: f"{trunks.trained_flops(tuned[horizon]):.3g}" for horizon in ("run", "size")}
        if cost["run"] != cost["size"]:
            remarks.append(
                f"tuning.horizon is {horizon}; the grid takes {cost['run']} training FLOPs with run, and "
                f"{cost['size']} with size, where runs of one N share a trunk"
            )
    return runs, remarks


@dataclasses.dataclass
class TuningFile:
    """The part of tuning.yaml that a sweep reads."""

    tuning: dict[str, Any]
    family: dict[str, Any]


def read_rules(rules: TuningConfig, base: RunConfig) -> tuple[TuningConfig, list[str]]:
    """Complete tuning rules from `rules.file`; return them and notes for the user.

    Raises UserError if the file was made for another vocabulary size than that of `base`.
    """
    if rules.file is None:
        return rules, []
    path = Path(rules.file).expanduser()
    document = read_document(path, TuningFile, remedy="tuning.file must be a file that `isoflop tune` wrote")
    remedy = "run `isoflop tune` again"
    read = from_mapping({"grid": {"kind": "product"}, "tuning": document.tuning}, path, remedy).tuning
    settings, unset = vars(rules), vars(TuningConfig())
    merged = {name: value if settings[name] == unset[name] else settings[name] for name, value in vars(read).items()}
    here = family(base)
    names = [name for name in here | document.family if here.get(name) != document.family.get(name)]
    if "model.vocab_size" in names:
        raise UserError(
            f"tuning.file is {path}, whose rules were found with model.vocab_size "
            f"{document.family.get('model.vocab_size')}; it must be {base.model.vocab_size} as here, because N and D "
            "mean something else in other tokens"
        )
    differences = ", ".join(f"{name} {document.family.get(name)!r} (here {here.get(name)!r})" for name in names)
    remarks = [f"the rules of {path} were found with {differences}, and may not be the best here"] if names else []
    return TuningConfig(**merged | {"file": None}), remarks


def resolved_base(sweep: SweepDirectory, config: SweepConfig) -> RunConfig:
    """Return the grid's base run, with the corpus and the tokenizer of the runs on disk."""
    if sweep.is_ingested:  # its runs have no config
        return base_run(config)
    runs = sweep.runs()
    if not runs:
        raise UserError(f"{sweep.path / 'plan.json'} has no runs to extend; start a new sweep")
    base = base_run(config)
    text = (base.data.fingerprint, base.data.tokenizer_fingerprint)
    configs = (run.config() for run in runs)  # a merged sweep may have runs on other texts
    first = next((run for run in configs if (run.data.fingerprint, run.data.tokenizer_fingerprint) == text), None)
    first = first or runs[0].config()
    planned, base.data = base.data, first.data
    if planned.domains is not None:  # the runs may have other weights, caps and targets than their base
        read = first.data.domains or {}
        domains = {
            name: dataclasses.replace(domain, path=read[name].path, fingerprint=read[name].fingerprint)
            for name, domain in planned.domains.items()
            if name in read
        }
        own = {"domains": domains, "target": planned.target, "epochs_of": planned.epochs_of}
        base.data = dataclasses.replace(first.data, **own)
    base.model.vocab_size = first.model.vocab_size
    return base


def write_plan(prepared: Prepared, command: list[str] | None = None) -> None:
    """Write plan.json, each run's config.yaml and, if `command` is given, sweep.yaml."""
    sweep, by_id = prepared.sweep, prepared.by_id
    for directory in prepared.directories:
        directory.freeze(by_id[directory.run_id])
        if not (directory.path / "state.json").exists() and not directory.is_done():
            directory.write_event(Planned)
    if command is not None:
        if prepared.config.sweep_merge:
            add_runs(sweep, prepared.runs, "merged", planned=True)
        allow_growth(sweep)
        commit = git_output(PACKAGE, "rev-parse", "HEAD")
        changes = git_output(PACKAGE, "status", "--porcelain", "--untracked-files=no")
        settings = {
            "isoflop_version": __version__,
            "recipe": RECIPE,
            "git_commit": None if commit is None else commit.decode().strip(),
            "git_dirty": None if changes is None else bool(changes),
            "host": platform.node(),
            "command": command,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "core_flops_per_second": prepared.rate if prepared.config.cluster.kind == "local" else None,
            "config": dataclasses.asdict(prepared.config),
        }
        path, text = sweep.path / "sweep.yaml", yaml.safe_dump(settings, sort_keys=False)
        if yaml_or_empty(path) | {"written": settings["written"]} != yaml.safe_load(text):
            write_atomic(path, text)
    path, plan = sweep.path / "plan.json", prepared.plan.to_dict()
    if read_json(path) != json.loads(json.dumps(plan)):  # JSON turns tuples into lists and keys into text
        write_json(path, plan)
