"""Configuration of a sweep: the base run, the grid, the cluster, the scoring and the fit."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..fit.laws.registry import DEFAULT, LOSS_LAWS
from ..train.config import ANY, RunConfig, TrackerConfig, Training, drop_removed
from ..train.config import REMOVED as OF_RUNS
from ..train.errors import UserError
from ..train.fields import Count, Count4, Count6, Distinct, Natural, NotNegative, Positive, Precision
from ..train.planner.command import read_sizes
from ..train.planner.validation import check_fields
from .grid.base import GridConfig, grid_kinds
from .grid.tuning import TuningConfig

Duration = Annotated[float, Meta(gt=0, le=1e8)]
Pause = Annotated[float, Meta(ge=0, le=1e8)]


@dataclass
class ClusterConfig:
    """Where runs are trained, and at what price."""

    kind: Annotated[str, ("local", "slurm")] = "local"
    budgets: Distinct[Positive] | None = None  # used by a grid without budgets; None: probe this machine
    minutes: Duration = 4.5  # local: training time of a probed grid on all cores
    flops_per_second: Positive | None = None  # matrix-product peak of one core (local) or one rank (slurm); None: probe
    precision: str = "fp32"  # of runs that do not set `precision`
    jobs: Count6 | None = None  # local: runs at a time; None: one per core
    threads_per_job: Count4 | None = None  # local: threads of one rank; None: its share of the cores
    # Resources of one rank; a run of several ranks gets them for each rank.
    gpus_per_job: Annotated[int, Meta(ge=0, le=10**6)] = 0
    cpus_per_task: Count4 = 1
    memory_gb: Positive = 8.0
    ranks_per_node: Count | None = None  # slurm: ranks of one run on a node; None: all of them
    time_minutes: Annotated[int, Meta(ge=1, le=10**8)] = 60  # limit of one job; a longer run continues in the next job
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  # features that a node must have
    exclude: str | None = None  # nodes that must not be used, as SLURM writes them
    container: str | None = None  # image in which jobs run, through pyxis (srun --container-image)
    # Command of the jobs' interpreter, e.g. "apptainer exec --nv image.sif python"; None: the current interpreter.
    python: str | None = None
    array_parallelism: Count6 = 256  # workers that may run at once
    max_submit: Count | None = None  # jobs in the queue at once; None: the account's limit in SLURM
    queue_minutes: Pause = 10.0  # runs that are shorter than this by estimate share workers; a longer run has its own
    setup: list[str] = field(default_factory=list)  # shell lines before the job's command
    additional_parameters: Any = None  # raw #SBATCH keys and values, a mapping (see ProductGrid.axes for its type)
    runs_per_gpu: Count6 = 1  # local: small runs that share a GPU as processes
    max_requeues: Natural = 20  # attempts after which a run that keeps being preempted is given up
    # Retries after failures that the run did not cause: a killed process, a lost node, a hang, a full disk.
    retries: Natural = 3  # per run
    sweep_retries: Natural = 100  # all runs together
    backoff_seconds: Pause = 30.0  # before a run's first retry; doubled for each further one
    heartbeat_seconds: Duration = 10.0  # between two heartbeats of a run
    hang_minutes: Duration = 30.0  # a run that makes no step for this long counts as hung
    keeper_seconds: Annotated[float, Meta(ge=1, le=1e8)] = 60.0  # slurm: between two passes of the keeper job
    keeper_partition: str | None = None  # of the keeper and of the fit; None: partition
    dollars_per_gpu_hour: NotNegative | None = None
    gpu_memory_gb: Positive = 80.0  # of one GPU; ranks without a GPU have memory_gb
    # Bandwidths for `explain=true`; they are stated, not measured.
    node_gb_per_s: Positive = 5.0  # from a rank to another of its node
    network_gb_per_s: Positive = 1.0  # from a rank to another node


@dataclass
class EvaluateConfig:
    """How checkpoints are scored; without tasks and quantize, none are."""

    # Suites of conf/evaluate, lm-eval tasks (name@5: five examples), folders of lm-eval YAML, .jsonl files of question,
    # choices, answer, and text:FOLDER, whose subfolders are domains.
    tasks: list[str] = field(default_factory=list)
    path: str | None = None  # of the suite `custom`: a folder or a file
    allow_code: bool = False  # user-written YAML may run Python: `!function`, a metric's script
    limit: Count | None = 150  # items per task, a fixed recorded subset; None: all of them
    average: Positive | None = None  # span of the average of the weights to score; None: score the weights
    every: Count | None = None  # steps between intermediate checkpoints that are kept and scored; None: final only
    decode: bool = False  # also measure the time per generated token of the final checkpoint, at batch 1
    ngram: Count | None = 13  # an item that shares this many words in a row with the training text is contaminated
    # Formats and methods in which the final checkpoint's held-out loss is measured too, such as [int4:awq, int8:rtn].
    quantize: list[str] = field(default_factory=list)

    @property
    def scores(self) -> bool:
        """Return whether checkpoints are scored."""
        return bool(self.tasks or self.quantize)


@dataclass
class FitConfig:
    """Which laws are fitted, and the budgets they extrapolate to."""

    targets: Distinct[Positive] = field(default_factory=list)  # FLOPs to extrapolate to; none: 10x to 1000x the largest
    bootstrap: Annotated[int, Meta(ge=0, le=10**5)] = 1000  # resamples of runs behind every interval; 0: no intervals
    intervals: Annotated[str, ("mixture", "noise")] = "mixture"  # from a mixture of forms, or noise under one form
    form: Annotated[str, tuple(LOSS_LAWS)] = DEFAULT  # of the parametric law
    objective: Annotated[str, ("huber", "l1", "squares", "se")] = "huber"  # se: weights by loss_se
    speedup: Any = None  # {format: how many times as fast as unquantized runs it trains}; for Any see ProductGrid.axes


@dataclass
class SweepConfig(Training):
    """Every setting of `python sweep.py`; the inherited fields are the base run that a grid varies."""

    tokens: Count | None = None  # type: ignore[assignment]  # D, if the grid does not choose it
    precision: Precision | None = None  # type: ignore[assignment]  # None: the cluster's

    grid: GridConfig | None = None
    tuning: TuningConfig = field(default_factory=TuningConfig)
    trunks: bool = True  # runs that differ only in D share the constant-rate part of the longest (schedule wsd)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    sweep: str | None = None  # name of the directory under output_root; None: the grid's
    sweep_merge: bool = False  # add to the runs that the directory already has: one plan, table and fit
    output_root: str = "outputs"
    dry_run: bool = False  # print the plan and its cost, start nothing
    preflight: bool = True  # check each new kind of node before its first run
    explain: bool = False  # with dry_run: meshes for each shape of the grid, ranked by estimated time per step
    wait: bool = False  # slurm: wait for the jobs instead of returning at once


@dataclass
class Recorded:
    """The settings that `recorded` reads."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def base_run(config: SweepConfig) -> RunConfig:
    """Return the config of the base run, which the grid varies."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(Training)}
    values["tokens"] = config.tokens or 0
    values["precision"] = config.precision or config.cluster.precision
    if config.trainer.kind == "command":
        config.trainer.folder = config.trainer.folder or os.getcwd()
        config.trainer.sizes = config.trainer.sizes and read_sizes(config.trainer.sizes)  # sweep.yaml records the rows
        values["trainer"] = dataclasses.replace(config.trainer, sizes=None)
        values["model"] = dataclasses.replace(config.model, size=config.trainer.sizes)
    return RunConfig(**values)


NO_RULE = {"k": None, "N": 0.0, "D": 0.0, "batch": 0.0}
# Fields of earlier versions: the values that are still accepted, and what to use instead; see train/config.py.
REMOVED: dict[str, tuple[Any, str]] = {
    **OF_RUNS,
    "ensembles": (ANY, "each run trains in its own process, cluster.jobs of them at a time"),
    "cluster.launch_bound_width": (ANY, "each run trains in its own process"),
    "cluster.latency_us": (ANY, "explain=true leaves out the latency of messages"),
    "cluster.memory_gb_per_s": (ANY, "explain=true leaves out the time of memory access"),
    "cluster.half_speed_width": (ANY, "finished runs give the speed of later ones"),
    "evaluate.batch_tokens": (ANY, "a batch too large for memory is halved; `isoflop evaluate` has --batch-tokens"),
    "fit.seed": (ANY, "use --seed of `isoflop fit`"),
    "fit.delta": (ANY, "use --delta of `isoflop fit`"),
    "fit.tied": (False, "use --tied of `isoflop fit`"),
    "fit.E": (None, "use --fixed-e of `isoflop fit`"),
    "grid.expected_flops": (2.5e11, "give grid.expected_N, the best N at 2.5e11 FLOPs"),
    "grid.expected_exponent": (0.55, "give grid.expected_N, the best N at 2.5e11 FLOPs"),
    "grid.first_share": (ANY, "the first round always gets a fifth of the FLOPs"),
    "grid.size_tolerance": (ANY, "give grid.tolerance, the relative width of the loss's interval"),
    "grid.max_flops": (None, "no run costs more than the largest of grid.budgets"),
    "grid.round_runs": (ANY, "a round has at most 16 runs"),
    "grid.target_flops": (None, "give fit.targets; the largest is used"),
    "tuning.beta2_half_life": (NO_RULE, "give optimizer.beta2"),
    "tuning.eps": (NO_RULE, "give optimizer.eps"),
    "tuning.warmup_tokens": (NO_RULE, "give schedule.warmup_tokens or schedule.warmup_per_parameter"),
}
OTHER_VERSION = "use the version that wrote it, or choose another folder with sweep=NAME"


def from_mapping(values: Any, source: object, remedy: str = OTHER_VERSION) -> SweepConfig:
    """Convert the plain values of a sweep.yaml to a SweepConfig.

    Raises UserError, which names `source` and ends with `remedy`, if the values are invalid.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = drop_removed(values, REMOVED) if isinstance(values, dict) else values
        if (kind := values["grid"]["kind"]) not in list(kinds := grid_kinds()):  # it may be a list itself
            raise KeyError(f"grid.kind is {kind!r}, not one of {', '.join(kinds)}")
        result = pickle.loads(_converted(kind, pickle.dumps(values)))
    except (OmegaConfBaseException, TypeError, KeyError) as error:
        reason = str(error.args[0] if error.args else error).splitlines()[0]
        reason = f"{key}: {reason}" if (key := getattr(error, "full_key", None)) else reason
        raise UserError(f"{source} cannot be read as a configuration ({reason}); {remedy}") from error
    assert isinstance(result, SweepConfig)
    return result


@functools.lru_cache(maxsize=8)  # a launcher reads its sweep's config at every pass, and OmegaConf takes 50 ms
def _converted(kind: str, values: bytes) -> bytes:
    """Convert a sweep's plain values, pickled, to a pickled SweepConfig."""
    from omegaconf import OmegaConf

    base = OmegaConf.structured(SweepConfig(grid=grid_kinds()[kind]()))
    return pickle.dumps(OmegaConf.to_object(OmegaConf.merge(base, pickle.loads(values))))


def cluster_of(settings: Mapping[str, Any]) -> ClusterConfig:
    return recorded(settings).cluster


def grid_class(settings: Mapping[str, Any]) -> type[GridConfig]:
    """Return the class of the grid in a sweep.yaml; `GridConfig` if its kind is unknown."""
    kind = (settings.get("config") or {}).get("grid", {}).get("kind")
    return grid_kinds().get(str(kind), GridConfig)


def recorded(settings: Mapping[str, Any]) -> Recorded:
    """Read the cluster, scoring, fit and tracker settings in sweep.yaml of any version. Raises UserError if invalid."""
    try:
        result = msgspec.convert(settings.get("config") or {}, Recorded)
        check_fields(result, "config.")
        return result
    except (msgspec.ValidationError, UserError) as error:
        reason = str(error).replace("`", "").replace(" - at $", " at config")
        raise UserError(f"sweep.yaml has an invalid value: {reason}; {OTHER_VERSION}") from None


@functools.cache
def register() -> None:
    """Register the dataclasses with Hydra, so that unknown keys and wrong types are errors."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=SweepConfig)
    for kind, node in grid_kinds().items():
        store.store(group="grid", name=f"{kind}_schema", node=node)
