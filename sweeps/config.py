"""What a sweep is: a base run, a grid over it, a cluster to run on, how to score, and how to fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..fit.laws.registry import DEFAULT, LOSS_LAWS
from ..train.config import ANY, RunConfig, TrackerConfig, Training, drop_removed
from ..train.config import REMOVED as OF_RUNS
from ..train.errors import UserError
from ..train.fields import Count, Count4, Count6, Exponent, Fraction, Natural, NotNegative, Positive, Precision
from ..train.planner.validation import check_fields

Duration = Annotated[float, Meta(gt=0, le=1e8)]
Pause = Annotated[float, Meta(ge=0, le=1e8)]


@dataclass
class GridConfig:
    """Common to every grid."""

    kind: str = "product"  # isoflop | ladder | product | points | adaptive | tune
    seeds: list[int] | None = None  # every point once per seed; None: the run's own seed
    recipes: list[list[str]] | None = None  # every point once per data recipe; None: the run's own, data.recipe
    # Every point once as it is, and once per variant: names and overrides, {muon: [optimizer=muon]}, which are recorded
    # as the fields that they change, {muon: {optimizer.kind: muon}}. A mapping, as ProductGrid.axes is.
    variants: Any = None
    # A run that diverges is tried once more, as a new run, with its learning rate times this; None: it is not.
    diverged_rate_factor: Fraction | None = None
    stop_hopeless: bool = False  # tune: ends runs that cannot win any more; no other kind takes it, for a law needs all


@dataclass
class IsoflopGrid(GridConfig):
    """Several sizes at each of several FLOP budgets (Hoffmann et al. 2022, approach 2).

    Sizes are log-spaced around N = expected_N (C / 2.5e11) ^ 0.55, which need only be right within the span.
    """

    kind: str = "isoflop"
    budgets: list[Positive] | None = None  # training FLOPs; None: those of the cluster group, or of a probe here
    convention: Annotated[str, ("exact", "6nd")] = "exact"  # how a budget turns into D
    sizes: Count = 6  # models per budget
    span: Annotated[float, Meta(ge=1)] = 16.0  # largest over smallest N of a budget
    expected_N: Positive = 22e3  # N_total at 2.5e11 FLOPs, on bytes
    min_steps: Count = 100  # a point with fewer optimizer steps is no training; it is left out


@dataclass
class CurvesGrid(IsoflopGrid):
    """The largest budget's run of each size, whose averaged weights say the loss at every smaller D, and cooldowns."""

    kind: str = "curves"
    # Shares of a run's D at which three sizes also cool down: smallest, middle and largest of those warmed up by then.
    cooldowns: list[Fraction] = field(default_factory=lambda: [0.05, 0.2, 0.5])


@dataclass
class LadderGrid(GridConfig):
    """Rungs of growing N, each trained on several D."""

    kind: str = "ladder"
    sizes: list[Positive] = field(default_factory=list)  # wanted N_total; the nearest well-shaped model is taken
    tokens_per_parameter: list[Positive] | None = None  # D as multiples of N; or
    tokens: list[Count] | None = None  # D itself, to the nearest step


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
class CheckGrid(PointsGrid):
    """The runs of `isoflop tune --check`, which are there for no law."""

    kind: str = "check"


@dataclass
class AdaptiveGrid(IsoflopGrid):
    """A small isoFLOP grid, then rounds of the runs that `isoflop suggest` finds worth most, each after a fit.

    It costs what the grid of IsoflopGrid's fields would, and no run more than the largest of `budgets`.
    """

    kind: str = "adaptive"
    flops_budget: Positive | None = None  # training FLOPs, all rounds together; None: what that grid would cost
    target_flops: Positive | None = None  # budget asked about; None: the largest of fit.targets, else 1000 max_flops
    max_flops: Positive | None = None  # the most that one run may cost; None: the largest of budgets
    tolerance: Positive | None = 0.02  # over when the loss's 95 % interval at the target is narrower than this of it
    rounds: Count = 3  # of suggested runs, at most
    round_runs: Count = 16  # runs of a round, at most


@dataclass
class TuneGrid(GridConfig):
    """The runs of `isoflop tune`: settings at a few sizes, in rungs of growing D and fewer runs."""

    kind: str = "tune"
    sizes: list[Positive] = field(default_factory=list)  # wanted N_total
    tokens_per_parameter: list[Positive] = field(default_factory=list)  # of each rung, at least doubling
    flops_budget: Positive | None = None  # training FLOPs, all rungs together; None: the cluster's, or of a probe here
    span: Annotated[float, Meta(ge=1, le=1e4)] = 8.0  # the first rung tries settings so far off the base's
    max_steps: Count = 20_000  # of a run; batches too small for it are not tried


@dataclass
class ClusterConfig:
    """Where runs go and what they cost."""

    kind: Annotated[str, ("local", "slurm")] = "local"
    budgets: list[Positive] | None = None  # what a grid without its own budgets uses; None: probe this machine
    minutes: Duration = 4.5  # local: how long a probed grid may train, all cores together
    flops_per_second: Positive | None = None  # matrix-product peak of one core (local) or one rank (slurm); None: probe
    precision: str = "fp32"  # what a run uses unless `precision` is set
    jobs: Count6 | None = None  # local: runs at a time; None: one per core
    threads_per_job: Count4 | None = None  # local: of one rank; None: its share of the cores
    # What one rank gets; a run of several ranks gets it for each of them.
    gpus_per_job: Annotated[int, Meta(ge=0, le=10**6)] = 0
    cpus_per_task: Count4 = 1
    memory_gb: Positive = 8.0
    ranks_per_node: Count | None = None  # slurm: ranks of a run that a node takes; None: all of them
    time_minutes: Annotated[int, Meta(ge=1, le=10**8)] = (
        60  # limit of one job; a run that needs more goes on in the next
    )
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  # features that a node must have
    exclude: str | None = None  # nodes that must not be used, as SLURM writes them
    container: str | None = None  # image in which jobs run, through pyxis (srun --container-image)
    # Command of the jobs' interpreter, e.g. "apptainer exec --nv image.sif python"; None: the one that runs this.
    python: str | None = None
    array_parallelism: Count6 = 256  # jobs of one array that may run at once
    max_submit: Count | None = None  # jobs that may be in the queue at once; None: what SLURM says of the account
    # Runs estimated shorter than this are no array task each: jobs of about this length work through a queue of them.
    queue_minutes: Pause = 10.0
    setup: list[str] = field(default_factory=list)  # shell lines before the job's command
    additional_parameters: Any = None  # raw #SBATCH keys and values, a mapping (see ProductGrid.axes for its type)
    runs_per_gpu: Count6 = 1  # local: small runs that share a GPU as processes
    max_requeues: Natural = 20  # attempts after which a run that keeps being preempted is given up
    # What is not the run's own fault (a killed process, a lost node, a hang, a full disk) is tried again.
    retries: Natural = 3  # so often per run
    sweep_retries: Natural = 100  # so often all runs together
    backoff_seconds: Pause = 30.0  # before a run's first retry; then doubled
    heartbeat_seconds: Duration = 10.0  # between two signs of life of a run
    hang_minutes: Duration = 30.0  # without a step, after which a run counts as hung
    keeper_seconds: Annotated[float, Meta(ge=1, le=1e8)] = 60.0  # slurm: between two looks of the keeper, a job
    keeper_partition: str | None = None  # of that job, and of the fit; None: partition
    dollars_per_gpu_hour: NotNegative | None = None
    gpu_memory_gb: Positive = 80.0  # of one GPU; ranks without one have memory_gb
    # Bandwidths for `explain=true`; nothing measures them.
    node_gb_per_s: Positive = 5.0  # from a rank to another of its node
    network_gb_per_s: Positive = 1.0  # from a rank to another node


@dataclass
class EvaluateConfig:
    """How checkpoints are scored. No tasks: no scoring."""

    # Suites of conf/evaluate, lm-eval tasks (name@5: five examples), folders of lm-eval YAML, .jsonl files of question,
    # choices, answer, and text:FOLDER, whose subfolders are domains.
    tasks: list[str] = field(default_factory=list)
    path: str | None = None  # of the suite `custom`: a folder or a file
    allow_code: bool = False  # whether YAML of your own may run Python: `!function`, a metric's script
    limit: Count | None = 150  # items per task, a fixed recorded subset; None: all of them
    average: Positive | None = None  # span of the average of the weights that is scored; None: the weights themselves
    every: Count | None = None  # steps: checkpoints in between are kept and scored too; None: the final one alone
    decode: bool = False  # whether the time of a generated token is measured too, at batch 1, of the final checkpoint
    batch_tokens: Count | None = None  # tokens in one forward pass; None: what suits the device
    ngram: Count | None = 13  # words in a row that, if trained on, make an item contaminated; None: not asked


@dataclass
class FitConfig:
    """What is asked of the laws."""

    targets: list[Positive] = field(default_factory=list)  # FLOPs to extrapolate to; none: 10x to 1000x the largest
    bootstrap: Annotated[int, Meta(ge=0, le=10**6)] = 1000  # resamples of runs behind every interval
    intervals: Annotated[str, ("mixture", "noise")] = "mixture"  # of answers: a mixture of forms, or noise under one
    form: Annotated[str, tuple(LOSS_LAWS)] = DEFAULT  # of the parametric law
    objective: Annotated[str, ("huber", "l1", "squares", "se")] = "huber"  # se: weights by loss_se


@dataclass
class PowerRule:
    """k N^a D^b batch^c, of N_total, and of D and the run's own batch in tokens; without a k there is no rule."""

    k: Positive | None = None
    N: Exponent = 0.0
    D: Exponent = 0.0
    batch: Exponent = 0.0


TUNED = (*(f"optimizer.{name}" for name in ("base_depth", "learning_rate", "batch_size", "weight_decay")),)


@dataclass
class TuningConfig:
    """How what a run learns by follows its N and D; where there is no rule, the run's own value stands."""

    file: str | None = None  # constants that `isoflop tune` wrote, for the rules that have none here
    base_depth: Count | None = None  # optimizer.base_depth
    batch_tokens: PowerRule = field(default_factory=PowerRule)  # tokens a step
    learning_rate: PowerRule = field(default_factory=PowerRule)  # at base_width and base_depth
    timescale: PowerRule = field(default_factory=PowerRule)  # of weight decay: batch / (learning rate * decay * D)
    min_steps: Count = 100  # of a run, which a batch that grew may not take away
    horizon: Annotated[str, ("run", "size")] = "run"  # D in the rules: the run's, or that of the longest of its N
    # Fields of a run that rules leave alone; what the command line gives is added.
    keep: list[Annotated[str, TUNED]] = field(default_factory=list)
    dial: bool = False  # width and heads follow from model.depth, where the grid chooses no sizes
    tokens_per_parameter: Positive | None = None  # D, where nothing else says it


@dataclass
class SweepConfig(Training):
    """Everything `python sweep.py` reads; the first half is the base run that a grid varies."""

    tokens: Count | None = None  # type: ignore[assignment]  # D, where the grid does not choose it
    precision: Precision | None = None  # type: ignore[assignment]  # None: the cluster's

    grid: GridConfig | None = None
    tuning: TuningConfig = field(default_factory=TuningConfig)
    trunks: bool = True  # runs that differ in D alone share the constant-rate part of the longest (schedule wsd)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    sweep: str | None = None  # name of the directory under output_root; None: the grid's
    sweep_merge: bool = False  # add to the runs that the directory has by another request; one plan, table and fit
    output_root: str = "outputs"
    dry_run: bool = False  # print the plan and its cost, start nothing
    preflight: bool = True  # look whether a node of a new kind computes what it should, before its first run
    explain: bool = False  # with dry_run: meshes for each shape of the grid, ranked by estimated time per step
    wait: bool = False  # slurm: wait for the jobs instead of returning at once


@dataclass
class Recorded:
    """A part of a SweepConfig, of any version."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


def base_run(config: SweepConfig) -> RunConfig:
    """The run that the grid varies: the sweep's first half."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(Training)}
    values["tokens"] = config.tokens or 0
    values["precision"] = config.precision or config.cluster.precision
    return RunConfig(**values)


NO_RULE = {"k": None, "N": 0.0, "D": 0.0, "batch": 0.0}
# Fields of earlier versions; see `REMOVED` of train/config.py.
REMOVED: dict[str, tuple[Any, str]] = {
    **OF_RUNS,
    "ensembles": (ANY, "runs train one by one, several at a time by cluster.jobs"),
    "cluster.launch_bound_width": (ANY, "runs train one by one"),
    "cluster.latency_us": (ANY, "explain=true reckons without the latency of messages"),
    "cluster.memory_gb_per_s": (ANY, "explain=true reckons without the time that memory takes"),
    "cluster.half_speed_width": (ANY, "runs that are done say how fast the next ones will be"),
    "fit.seed": (ANY, "`isoflop fit` has --seed"),
    "fit.delta": (ANY, "`isoflop fit` has --delta"),
    "fit.tied": (False, "`isoflop fit` has --tied"),
    "fit.E": (None, "`isoflop fit` has --fixed-e"),
    "grid.expected_flops": (2.5e11, "give grid.expected_N, the best N at 2.5e11 FLOPs"),
    "grid.expected_exponent": (0.55, "give grid.expected_N, the best N at 2.5e11 FLOPs"),
    "grid.first_share": (ANY, "the first round has a fifth of the FLOPs"),
    "grid.size_tolerance": (ANY, "give grid.tolerance, of the loss"),
    "tuning.beta2_half_life": (NO_RULE, "give optimizer.beta2"),
    "tuning.eps": (NO_RULE, "give optimizer.eps"),
    "tuning.warmup_tokens": (NO_RULE, "give schedule.warmup_tokens or schedule.warmup_per_parameter"),
}
OTHER_VERSION = "use the version that wrote it, or sweep into another folder"


def from_mapping(values: Any, source: object, remedy: str = OTHER_VERSION) -> SweepConfig:
    """A configuration from the plain values of sweep.yaml; `source` and `remedy` are for the error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = drop_removed(values, REMOVED) if isinstance(values, dict) else values
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
        result = msgspec.convert(settings.get("config") or {}, Recorded)
        check_fields(result, "config.")
        return result
    except (msgspec.ValidationError, UserError) as error:
        reason = str(error).replace("`", "").replace(" - at $", " at config")
        raise UserError(f"sweep.yaml is not what it must be: {reason}; {OTHER_VERSION}") from None


GRIDS: dict[str, type[GridConfig]] = {
    node.kind: node
    for node in (AdaptiveGrid, TuneGrid, CheckGrid, PointsGrid, ProductGrid, CurvesGrid, LadderGrid, IsoflopGrid)
}


@functools.cache
def register() -> None:
    """Makes the dataclasses known to Hydra, so that an unknown key or a value of a wrong type is an error."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=SweepConfig)
    for kind, node in GRIDS.items():
        store.store(group="grid", name=f"{kind}_schema", node=node)
