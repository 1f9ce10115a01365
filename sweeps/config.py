"""What a sweep is: a base run, a grid over it, a cluster to run on, how to score, and how to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
)
from ..train.errors import UserError
from ..train.planner import validation

ACCEPTED = validation.ACCEPTED | validation.Accepted.read(Path(__file__).with_name("validation.toml"))


@dataclass
class GridConfig:
    """Common to every grid."""

    kind: str = "product"  # isoflop | ladder | product | points | adaptive
    seeds: list[int] | None = None  # every point once per seed; None: the run's own seed
    recipes: list[list[str]] | None = None  # every point once per data recipe; None: the run's own, data.recipe
    # A run that diverges is tried once more, as a new run, with its learning rate times this; None: it is not.
    diverged_rate_factor: float | None = None


@dataclass
class IsoflopGrid(GridConfig):
    """Several sizes at each of several FLOP budgets (Hoffmann et al. 2022, approach 2).

    Sizes are log-spaced around N = expected_N * (C / expected_flops) ^ expected_exponent, which need only be right
    within the span.
    """

    kind: str = "isoflop"
    budgets: list[float] | None = None  # training FLOPs; None: from the cluster group, or from a probe of this machine
    convention: str = "exact"  # how a budget turns into D: exact | 6nd
    sizes: int = 6  # models per budget
    span: float = 16.0  # largest over smallest N of a budget
    expected_N: float = 22e3  # N_total at expected_flops
    expected_flops: float = 2.5e11
    expected_exponent: float = 0.55
    min_steps: int = 100  # a point with fewer optimizer steps is no training; it is left out


@dataclass
class LadderGrid(GridConfig):
    """Rungs of growing N, each trained on several D."""

    kind: str = "ladder"
    sizes: list[float] = field(default_factory=list)  # wanted N_total; the nearest well-shaped model is taken
    tokens_per_parameter: list[float] | None = None  # D as multiples of N; or
    tokens: list[int] | None = None  # D itself, to the nearest step


@dataclass
class ProductGrid(GridConfig):
    """Every combination of the values of any fields of a run, by dotted name."""

    kind: str = "product"
    # A mapping, e.g. {optimizer.learning_rate: [1e-3, 2e-3], seed: [0, 1]}. Not typed as one, because Hydra would then
    # refuse every key that is not there already.
    axes: Any = None


@dataclass
class PointsGrid(GridConfig):
    """Runs one by one, each as what it changes of the base run: what `isoflop suggest` writes."""

    kind: str = "points"
    # A list of mappings from dotted fields to values, e.g. [{model.width: 64, model.depth: 4, tokens: 1000000}].
    points: Any = None


@dataclass
class AdaptiveGrid(IsoflopGrid):
    """A small isoFLOP grid, then rounds of the runs that `isoflop suggest` finds worth most, each after a fit.

    It costs what the grid of IsoflopGrid's fields would, and no run more than the largest of `budgets`.
    """

    kind: str = "adaptive"
    flops_budget: float | None = None  # training FLOPs, all rounds together; None: what that grid would cost
    target_flops: float | None = None  # budget asked about; None: the largest of fit.targets, else 1000 max_flops
    max_flops: float | None = None  # the most that one run may cost; None: the largest of budgets
    tolerance: float | None = 0.02  # over when the 95 % interval of the loss at the target is narrower than this of it
    size_tolerance: float | None = None  # and that of N* than this of it; None: N* is not asked about
    rounds: int = 3  # of suggested runs, at most
    round_runs: int = 16  # runs of a round, at most
    first_share: float = 0.2  # of the FLOPs, for the first round


@dataclass
class ClusterConfig:
    """Where runs go and what they cost."""

    kind: str = "local"  # local | slurm
    budgets: list[float] | None = None  # what a grid without its own budgets uses; None: probe this machine
    minutes: float = 4.5  # local: how long a probed grid may train, all cores together
    flops_per_second: float | None = None  # matrix-product peak of one core (local) or one rank (slurm); None: probe
    half_speed_width: float = 96.0  # model width at which training reaches half of that peak, for estimates
    # Model width at which launching operations takes half of a step, which is what ensembles save. None: 4 on CPUs, as
    # measured on one; 512 on GPUs, which nobody has measured.
    launch_bound_width: float | None = None
    precision: str = "fp32"  # what a run uses unless `precision` is set
    jobs: int | None = None  # local: runs at a time; None: one per core
    threads_per_job: int | None = None  # local: of one rank; None: its share of the cores
    # What one rank gets; a run of several ranks gets it for each of them.
    gpus_per_job: int = 0
    cpus_per_task: int = 1
    memory_gb: float = 8.0
    ranks_per_node: int | None = None  # slurm: ranks of a run that a node takes; None: all of them
    time_minutes: int = 60  # time limit of one job; a run that needs more goes on in the next
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  # features that a node must have
    exclude: str | None = None  # nodes that must not be used, as SLURM writes them
    container: str | None = None  # image in which jobs run, through pyxis (srun --container-image)
    # Command of the jobs' interpreter, e.g. "apptainer exec --nv image.sif python"; None: the one that runs this.
    python: str | None = None
    array_parallelism: int = 256  # jobs of one array that may run at once
    max_submit: int | None = None  # jobs that may be in the queue at once; None: what SLURM says of the account
    # Runs estimated shorter than this are no array task each: jobs of about this length work through a queue of them.
    queue_minutes: float = 10.0
    setup: list[str] = field(default_factory=list)  # shell lines before the job's command
    additional_parameters: Any = None  # raw #SBATCH keys and values, a mapping (see ProductGrid.axes for its type)
    runs_per_gpu: int = 1  # small runs that share a GPU as processes; on slurm through CUDA MPS where there is one
    max_requeues: int = 20  # attempts after which a run that keeps being preempted is given up
    # What is not the run's own fault (a killed process, a lost node, a hang, a full disk) is tried again.
    retries: int = 3  # so often per run
    sweep_retries: int = 100  # so often all runs together
    backoff_seconds: float = 30.0  # before the first retry of a run, doubled for each further one
    heartbeat_seconds: float = 10.0  # between two signs of life of a run
    hang_minutes: float = 30.0  # without a step, after which a run counts as hung
    keeper_seconds: float = 60.0  # slurm: between two looks of the keeper, a tiny job, at what must be started again
    keeper_partition: str | None = None  # of that job, and of the fit; None: partition
    dollars_per_gpu_hour: float | None = None
    # What `explain=true` reckons with beside the rate: assumptions, until somebody measures them here.
    gpu_memory_gb: float = 80.0  # of one GPU; ranks without one have memory_gb
    memory_gb_per_s: float = 10.0  # a rank's own memory
    node_gb_per_s: float = 5.0  # from a rank to another of its node
    network_gb_per_s: float = 1.0  # from a rank to another node
    latency_us: float = 50.0  # of a message


@dataclass
class EvaluateConfig:
    """How checkpoints are scored. No tasks: no scoring."""

    # Suites of conf/evaluate, lm-eval tasks (name@5: five examples), folders of lm-eval YAML, .jsonl files of question,
    # choices, answer, and text:FOLDER, whose subfolders are domains.
    tasks: list[str] = field(default_factory=list)
    path: str | None = None  # of the suite `custom`: a folder or a file
    allow_code: bool = False  # whether YAML of your own may run Python: `!function`, a metric's script
    limit: int | None = 150  # items per task, a fixed recorded subset; None: all of them
    every: int | None = None  # steps: checkpoints in between are kept and scored too; None: the final one alone
    batch_tokens: int | None = None  # tokens in one forward pass; None: what suits the device
    ngram: int | None = 13  # words in a row that make an item contaminated where the training text has them too; None:
    # not asked


@dataclass
class FitConfig:
    """What is asked of the laws."""

    targets: list[float] = field(default_factory=list)  # FLOP budgets to extrapolate to; none: 10x to 1000x the largest
    bootstrap: int = 1000  # resamples of runs behind every interval
    seed: int = 0
    objective: str = "huber"  # of the parametric law: huber | l1 | squares | se (weights by loss_se)
    delta: float = 1e-3  # where Huber's function turns linear, in log loss
    tied: bool = False  # hold alpha = beta
    E: float | None = None  # fix the irreducible loss


@dataclass
class SweepConfig:
    """Everything `python sweep.py` reads; the first half is the base run that a grid varies."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    tokens: int | None = None  # D, where the grid does not choose it
    precision: str | None = None  # fp32 | bf16 | fp16; None: the cluster's
    seed: int = 0
    log_every: int = 10
    validations: int = 4
    max_loss_rise: float = 3.0
    skip_bad_steps: int = 0

    grid: GridConfig | None = None
    trunks: bool = True  # runs that differ in D alone share the constant-rate part of the longest (schedule wsd)
    ensembles: int = 8  # runs of one shape that are trained together where that pays, at most; 1: every run by itself
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    sweep: str | None = None  # name of the directory under output_root
    sweep_merge: bool = False  # add to the runs that the directory has by another request; one plan, table and fit
    output_root: str = "outputs"
    dry_run: bool = False  # print the plan and its cost, start nothing
    explain: bool = False  # with dry_run: how each shape of the grid is best spread over its ranks, and why
    wait: bool = False  # slurm: wait for the jobs instead of returning at once


@dataclass
class Recorded:
    """A part of a SweepConfig, of any version."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


def base_run(config: SweepConfig) -> RunConfig:
    """The run that the grid varies: the sweep's first half."""
    names = {item.name for item in dataclasses.fields(RunConfig)} & {item.name for item in dataclasses.fields(config)}
    values = {name: getattr(config, name) for name in names}
    values["tokens"] = config.tokens or 0
    values["precision"] = config.precision or config.cluster.precision
    return RunConfig(**values)


OTHER_VERSION = "use the version that wrote it, or sweep into another folder"


def from_mapping(values: Any, source: object, remedy: str = OTHER_VERSION) -> SweepConfig:
    """A configuration from the plain values of sweep.yaml; `source` and `remedy` are for the error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if (kind := values["grid"]["kind"]) not in list(GRIDS):  # it may be a list itself
            raise KeyError(f"grid.kind is {kind!r}, which is none of {', '.join(GRIDS)}")
        base = OmegaConf.structured(SweepConfig(grid=GRIDS[kind]()))
        result = OmegaConf.to_object(OmegaConf.merge(base, values))
    except (OmegaConfBaseException, TypeError, KeyError) as error:
        why = str(error.args[0] if error.args else error).splitlines()[0]
        why = f"{key}: {why}" if (key := getattr(error, "full_key", None)) else why
        raise UserError(f"{source} cannot be read as a configuration ({why}); {remedy}") from error
    assert isinstance(result, SweepConfig)
    return result


def cluster_of(settings: Mapping[str, Any]) -> ClusterConfig:
    """The cluster in a sweep.yaml, whichever version wrote it."""
    return recorded(settings).cluster


def recorded(settings: Mapping[str, Any]) -> Recorded:
    """What the commands on a sweep read of its sweep.yaml, whichever version wrote it."""
    try:
        return msgspec.convert(settings.get("config") or {}, Recorded)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").replace(" - at $", " at config")
        raise UserError(f"sweep.yaml is not what it must be: {reason}; {OTHER_VERSION}") from None


GRIDS: dict[str, type[GridConfig]] = {
    node.kind: node for node in (AdaptiveGrid, PointsGrid, ProductGrid, LadderGrid, IsoflopGrid)
}


def register() -> None:
    """Makes the dataclasses known to Hydra, so that an unknown key or a value of a wrong type is an error."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=SweepConfig)
    for kind, node in GRIDS.items():
        store.store(group="grid", name=f"{kind}_schema", node=node)
