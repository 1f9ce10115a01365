"""The fields of a sweep's files, for writers and readers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, Meta(ge=0, lt=1e60)]
FolderName = Annotated[str, Meta(pattern=r"^\w+\Z")]


@dataclass(frozen=True)
class JobShape:
    """The resources that a job needs; a worker trains runs of one shape."""

    gpus: Count  # for a rank
    cpus: Count  # for a rank
    memory_gb: Amount  # for a rank
    time_minutes: Count
    nodes: Count = 1
    ranks_per_node: Count = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def for_one_process(self) -> JobShape:
        """Return the shape of a job of one process that gets the memory of all ranks of a node."""
        return replace(self, memory_gb=self.memory_gb * self.ranks_per_node, nodes=1, ranks_per_node=1)


@dataclass(frozen=True)
class PlannedRun:
    """A run of a plan: its size, cost and resources."""

    run_id: FolderName
    name: str
    N_total: Count
    N_non_embedding: Count
    N_kaplan: Count
    D: Count
    flops_6nd: Amount
    flops_exact: Amount
    flops_own: Amount  # exact convention, of the steps that the run itself takes
    budget: float | None
    width: Count
    depth: Count
    heads: Count
    steps: Annotated[int, Meta(gt=0, le=2**63 - 1)]
    seed: int
    sequence_length: Count
    precision: str
    shape: JobShape
    mesh: str  # how the run is spread over its ranks, as "tp2 dp4 zero1"; empty for one rank
    estimated_seconds: Amount  # of the steps that the run itself takes, alone
    parent: FolderName | None = None  # the trunk that it branches from
    first_step: Count = 0  # where it does
    recipe: str = ""  # what is done to its text, as tables name it; empty for raw text
    flops_optimizer: Amount = 0.0  # of matrix products in the updates, of all steps; in none of the three above
    variant: str = ""  # what it is called where variants are compared
    mixture: str = ""  # its domains' shares, as "code0.7+prose0.3"; empty for a text that is no mixture
    formats: str = ""  # its simulated number formats, as "int8"; empty for none
    N_active: Count | None = None  # None in a plan from before there were mixtures of experts: N_total


class PlanFile(TypedDict):
    """plan.json, as far as it is read."""

    runs: list[PlannedRun]
    total_flops: NotRequired[Amount]
    rates: NotRequired[dict[str, dict[Annotated[str, Meta(pattern=r"^\d{1,9}\Z")], tuple[Amount, Count]]]]


class Settings(TypedDict, total=False):
    """sweep.yaml."""

    isoflop_version: Any
    recipe: Any
    git_commit: str | None
    git_dirty: bool | None
    host: str
    command: list[str]
    written: Any
    core_flops_per_second: Annotated[float, Meta(gt=0, lt=1e30)] | None
    config: dict[str, Any] | None  # a SweepConfig; `config.recorded` reads it


class Identity(TypedDict):
    """identity.json: a sweep's token and absolute folder."""

    token: str
    folder: str


class Summary(TypedDict, total=False):
    """summary.json, as far as it is read here."""

    step: Count
    D: Count
    N_total: Count
    seconds: Amount
    val_loss: float
    val_loss_se: float | None
    checkpoint: str
    device: str
    ensemble: Count  # above 1 where an earlier version trained so many runs together


NEEDED = ("step", "D", "N_total", "flops_exact", "val_loss", "val_loss_se")  # of a summary, by the table


class Metrics(TypedDict, total=False):
    """A line of metrics.jsonl, as far as it is read here."""

    step: Count
    tokens: Count
    train_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
