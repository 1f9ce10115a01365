"""The limits and nodes of a SLURM cluster, checked before anything is submitted to it.

A check whose command fails or is slow is skipped. Whether a node can host a run follows from `sinfo`,
the rest (accounts, QOS, features) from `sbatch --test-only`.
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...train.errors import UserError, counted
from ..config import ClusterConfig
from ..runs.forms import JobShape, PlannedRun
from . import commands as slurm
from .submit import needs, raw_keys

TIMEOUT = 10.0  # seconds that a question may take
DEFAULT_MAX_ARRAY = 1001  # SLURM's own
FIT_MINUTES = 60  # that the fit may take
# Words of `sbatch --test-only` that are no refusal of the settings: the queue is full now, or nodes are down.
PASSING = re.compile(r"node configuration is not available|joblimit|job submit limit|nodes? .*(down|drained)", re.I)


@dataclass(frozen=True)
class Limits:
    max_array: int  # tasks of one array
    max_submit: int | None  # jobs and array tasks in the queue at once; None: no limit that SLURM tells


@dataclass(frozen=True)
class Node:
    """A group of identical nodes of a partition."""

    partition: str
    is_default: bool
    count: int
    cpus: int
    memory_mb: int
    gpus: int
    time_minutes: float  # that the partition allows a job

    def __str__(self) -> str:
        return f"{counted(self.count, 'node')} of {_amounts(self.gpus, self.cpus, self.memory_mb / 1024)}"


def limits(cluster: ClusterConfig) -> Limits:
    shown = slurm.ask("scontrol", "show", "config", timeout=TIMEOUT).stdout
    config = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", shown, re.MULTILINE))
    largest = int(config.get("MaxArraySize") or DEFAULT_MAX_ARRAY)
    if tasks := re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        largest = min(largest, int(tasks[1]))
    max_jobs = [] if cluster.max_submit is None else [cluster.max_submit]
    if {"limits", "safe", "all"} & set(config.get("AccountingStorageEnforce", "").lower().split(",")):
        max_jobs += _submit_limits(cluster, config.get("ClusterName", ""))
    return Limits(max(1, largest), min(max_jobs, default=None))


def _submit_limits(cluster: ClusterConfig, name: str) -> Iterator[int]:
    """Yield each limit on queued jobs: of the user, the account and the QOS on SLURM cluster `name`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return
    users = _rows("sacctmgr", "-n", "-P", "show", "user", f"name={user}", "format=defaultaccount")
    account = cluster.account or (users[0][0] if users else "")
    # A limit that an account sets is shown with its users, unless they have their own.
    where = ("where", f"cluster={name}", f"account={account}", "format=user,maxsubmit,grpsubmit,defaultqos")
    qos = cluster.qos
    for owner, *values, default_qos in _rows("sacctmgr", "-n", "-P", "show", "assoc", *where):
        if owner in ("", user):
            yield from (int(value) for value in values if value.isdigit())
            qos = qos or default_qos or None
    fields = "format=name,maxsubmitpu,maxsubmitpa,grpsubmit"
    for _, *values in _rows("sacctmgr", "-n", "-P", "show", "qos", f"name={qos or 'normal'}", fields):
        yield from (int(value) for value in values if value.isdigit())


def check(cluster: ClusterConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise UserError if SLURM reports that the cluster cannot or will not take these runs."""
    raw_keys(cluster)
    if cluster.runs_per_gpu > 1:
        raise UserError(f"cluster.runs_per_gpu is {cluster.runs_per_gpu}; on slurm it must be 1")
    by_shape = {run.shape: run for run in reversed(runs)}  # the first of each shape
    if nodes := _nodes():
        in_partition = _of_partition(nodes, cluster.partition)
        allowed = max(node.time_minutes for node in in_partition)
        if cluster.time_minutes > allowed:
            names = ", ".join(sorted({node.partition for node in in_partition}))
            raise UserError(
                f"cluster.time_minutes is {cluster.time_minutes}, but partition {names} allows {allowed:.0f}; "
                "it must be at most that"
            )
        if cluster.keeper_partition is not None:
            light = _of_partition(nodes, cluster.keeper_partition, "cluster.keeper_partition")
            allowed, minutes = max(node.time_minutes for node in light), min(FIT_MINUTES, cluster.time_minutes)
            if minutes > allowed:
                raise UserError(
                    f"cluster.keeper_partition is {cluster.keeper_partition!r}, which allows a job {allowed:.0f} "
                    f"minutes; it must be one that allows {minutes}, which the fit may take"
                )
        for run in by_shape.values():
            check_fits(run, in_partition)
    for run in by_shape.values():
        answer = _test(cluster, run.shape)
        if answer.returncode == 0 or slurm.is_away(answer):
            continue
        refusal = "; ".join(re.findall(r"^(?:sbatch: error|allocation failure): (.+)$", answer.stderr, re.MULTILINE))
        if refusal and not PASSING.search(refusal):
            raise UserError(
                f"SLURM refuses the job of run {run.run_id} ({refusal}); nothing was submitted, so correct the "
                "cluster.* setting that it names and start the sweep again"
            )


def _of_partition(nodes: Sequence[Node], partition: str | None, setting: str = "cluster.partition") -> list[Node]:
    names = ", ".join(sorted({node.partition for node in nodes}))
    if partition is None:
        if defaults := [node for node in nodes if node.is_default]:
            return defaults
        raise UserError(f"{setting} is null, and SLURM has no default partition; choose one of {names}")
    asked = set(str(partition).split(","))
    if asked - {node.partition for node in nodes}:
        raise UserError(f"{setting} is {partition!r}, which SLURM does not have; choose one of {names}")
    return [node for node in nodes if node.partition in asked]


def check_fits(run: PlannedRun, nodes: Sequence[Node]) -> None:
    """Raise UserError if too few nodes can host a run."""
    shape = run.shape
    ranks = shape.ranks_per_node
    gpus, cpus, memory = ranks * shape.gpus, ranks * shape.cpus, ranks * shape.memory_gb
    able = sum(
        node.count for node in nodes if node.gpus >= gpus and node.cpus >= cpus and node.memory_mb >= memory * 1024
    )
    if able >= shape.nodes:
        return
    needed = _amounts(gpus, cpus, memory)
    names = ", ".join(sorted({node.partition for node in nodes}))
    have = " and ".join(sorted({str(node) for node in nodes}))
    nodes_needed = "a node" if shape.nodes == 1 else f"each of {shape.nodes} nodes"
    raise UserError(
        f"run {run.run_id} ({run.name}) needs {needed} on {nodes_needed}, but partition {names} has {have}; "
        "change cluster.* (resources of a rank, ranks_per_node) or parallel.*, or choose another partition"
    )


def expected_starts(cluster: ClusterConfig, shapes: Sequence[JobShape]) -> dict[JobShape, str]:
    """Map job shapes to the time, as SLURM writes it, at which such a job would start; omit unpredictable ones."""
    starts = {}
    for shape in dict.fromkeys(shapes):
        answer = _test(cluster, shape)
        if start := re.search(r"\bto start at (\S+)", answer.stdout + answer.stderr):
            starts[shape] = start[1]
    return starts


def _test(cluster: ClusterConfig, shape: JobShape) -> subprocess.CompletedProcess[str]:
    flags = needs(cluster, shape) | {"exclude": cluster.exclude} | raw_keys(cluster)
    for about_now in ("hold", "begin", "dependency", "H"):
        flags.pop(about_now, None)
    arguments = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
        for key, value in flags.items()
        if value not in (None, False)
    ]
    with slurm.outside_any_job():
        return slurm.ask("sbatch", "--test-only", *arguments, "--wrap", "true", timeout=TIMEOUT)


def _nodes() -> list[Node]:
    nodes = []
    # %P marks the default with an asterisk; without -e, nodes that differ would be one line with the smallest values.
    for row in _rows("sinfo", "-h", "-e", "-o", "%P|%D|%c|%m|%G|%l"):
        if len(row) != 6 or not (row[1].isdigit() and row[2].isdigit() and row[3].isdigit()):
            continue
        name, count, cpus, memory, resources, time = row
        limit = slurm.seconds(time)
        minutes = float("inf") if limit is None else limit / 60
        # As gpu:8, gpu:h100:8(S:0-1), or several with commas between them.
        gpus = sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", resources))
        nodes.append(Node(name.rstrip("*"), name.endswith("*"), int(count), int(cpus), int(memory), gpus, minutes))
    return nodes


def _rows(*command: str) -> list[list[str]]:
    answer = slurm.ask(*command, timeout=TIMEOUT)
    return [line.split("|") for line in answer.stdout.splitlines()] if answer.returncode == 0 else []


def _amounts(gpus: int, cpus: int, memory_gb: float) -> str:
    parts = [f"{cpus} CPU" + "s" * (cpus != 1), f"{memory_gb:.4g} GB"]
    if gpus:
        parts.insert(0, f"{gpus} GPU" + "s" * (gpus != 1))
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
