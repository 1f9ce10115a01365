"""What a SLURM cluster allows and has, asked before anything is submitted to it.

A command that is missing, refuses or is slow leaves its question open; sbatch then says what it would have said.
Whether a node can host a run is computed from `sinfo`, which names what is short; `sbatch --test-only` is asked about
what only SLURM knows (accounts, QOS, features).
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...train.errors import UserError
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
    max_submit: int | None  # jobs in the queue at once, every array task being one; None: no limit, or nobody to ask


@dataclass(frozen=True)
class Node:
    """Nodes of a partition that are alike."""

    partition: str
    is_default: bool
    count: int
    cpus: int
    memory_mb: int
    gpus: int
    time_minutes: float  # that the partition allows a job

    def __str__(self) -> str:
        plural = "" if self.count == 1 else "s"
        return f"{self.count} node{plural} of {_amounts(self.gpus, self.cpus, self.memory_mb / 1024)}"


def limits(cluster: ClusterConfig) -> Limits:
    shown = slurm.ask("scontrol", "show", "config", timeout=TIMEOUT).stdout
    config = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", shown, re.MULTILINE))
    largest = int(config.get("MaxArraySize") or DEFAULT_MAX_ARRAY)
    if tasks := re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        largest = min(largest, int(tasks[1]))
    found = [] if cluster.max_submit is None else [cluster.max_submit]
    if {"limits", "safe", "all"} & set(config.get("AccountingStorageEnforce", "").lower().split(",")):
        found += _submit_limits(cluster, config.get("ClusterName", ""))
    return Limits(max(1, largest), min(found, default=None))


def _submit_limits(cluster: ClusterConfig, name: str) -> Iterator[int]:
    """Every limit to the jobs in the queue: of the user, the account, the QOS."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return
    known = _rows("sacctmgr", "-n", "-P", "show", "user", f"name={user}", "format=defaultaccount")
    account = cluster.account or (known[0][0] if known else "")
    # A limit that an account sets is shown with its users, unless they have their own.
    where = ("where", f"cluster={name}", f"account={account}", "format=user,maxsubmit,grpsubmit,defaultqos")
    qos = cluster.qos
    for who, *values, default_qos in _rows("sacctmgr", "-n", "-P", "show", "assoc", *where):
        if who in ("", user):
            yield from (int(value) for value in values if value.isdigit())
            qos = qos or default_qos or None
    fields = "format=name,maxsubmitpu,maxsubmitpa,grpsubmit"
    for _, *values in _rows("sacctmgr", "-n", "-P", "show", "qos", f"name={qos or 'normal'}", fields):
        yield from (int(value) for value in values if value.isdigit())


def check(cluster: ClusterConfig, runs: Sequence[PlannedRun]) -> None:
    """UserError where the cluster cannot or will not take these runs, if SLURM says so."""
    raw_keys(cluster)
    if cluster.runs_per_gpu > 1:
        raise UserError(f"cluster.runs_per_gpu is {cluster.runs_per_gpu}; on slurm it must be 1")
    by_shape = {run.shape: run for run in reversed(runs)}  # the first of each shape
    if nodes := _nodes():
        there = _of_partition(nodes, cluster.partition)
        allowed = max(node.time_minutes for node in there)
        if cluster.time_minutes > allowed:
            names = ", ".join(sorted({node.partition for node in there}))
            raise UserError(
                f"cluster.time_minutes is {cluster.time_minutes}, and partition {names} allows {allowed:.0f}; "
                "it must be at most that"
            )
        if cluster.keeper_partition is not None:
            light = _of_partition(nodes, cluster.keeper_partition, "cluster.keeper_partition")
            allowed, wanted = max(node.time_minutes for node in light), min(FIT_MINUTES, cluster.time_minutes)
            if wanted > allowed:
                raise UserError(
                    f"cluster.keeper_partition is {cluster.keeper_partition!r}, which allows a job {allowed:.0f} "
                    f"minutes; it must be one that allows {wanted}, which the fit may take"
                )
        for run in by_shape.values():
            check_fits(run, there)
    for run in by_shape.values():
        answer = _test(cluster, run.shape)
        if answer.returncode == 0 or slurm.is_away(answer):
            continue
        said = "; ".join(re.findall(r"^(?:sbatch: error|allocation failure): (.+)$", answer.stderr, re.MULTILINE))
        if said and not PASSING.search(said):
            raise UserError(
                f"SLURM refuses a job as run {run.run_id} needs it ({said}); nothing was submitted, so mend the "
                "cluster.* setting that it names and sweep again"
            )


def _of_partition(nodes: Sequence[Node], partition: str | None, setting: str = "cluster.partition") -> list[Node]:
    """Nodes of one partition, of several, or of the default one."""
    there = ", ".join(sorted({node.partition for node in nodes}))
    if partition is None:
        if found := [node for node in nodes if node.is_default]:
            return found
        raise UserError(f"{setting} is null, and SLURM has no default partition; it has {there}")
    wanted = set(str(partition).split(","))
    if wanted - {node.partition for node in nodes}:
        raise UserError(f"{setting} is {partition!r}, which SLURM does not have; it has {there}")
    return [node for node in nodes if node.partition in wanted]


def check_fits(run: PlannedRun, nodes: Sequence[Node]) -> None:
    """UserError where too few nodes can host a run."""
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
        f"run {run.run_id} ({run.name}) needs {needed} on {nodes_needed}, and partition {names} has {have}; "
        "change cluster.* (what a rank gets, ranks_per_node) or parallel.*, or choose another partition"
    )


def expected_starts(cluster: ClusterConfig, shapes: Sequence[JobShape]) -> dict[JobShape, str]:
    """When SLURM expects that a job of each shape would start, where it says so."""
    found = {}
    for shape in dict.fromkeys(shapes):
        answer = _test(cluster, shape)
        if start := re.search(r"\bto start at (\S+)", answer.stdout + answer.stderr):
            found[shape] = start[1]
    return found


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
    found = []
    # %P marks the default with an asterisk; without -e, nodes that differ would be one line with the smallest values.
    for row in _rows("sinfo", "-h", "-e", "-o", "%P|%D|%c|%m|%G|%l"):
        if len(row) != 6 or not (row[1].isdigit() and row[2].isdigit() and row[3].isdigit()):
            continue
        name, count, cpus, memory, resources, time = row
        limit = slurm.seconds(time)
        minutes = float("inf") if limit is None else limit / 60
        # As gpu:8, gpu:h100:8(S:0-1), or several with commas between them.
        gpus = sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", resources))
        found.append(Node(name.rstrip("*"), name.endswith("*"), int(count), int(cpus), int(memory), gpus, minutes))
    return found


def _rows(*command: str) -> list[list[str]]:
    answer = slurm.ask(*command, timeout=TIMEOUT)
    return [line.split("|") for line in answer.stdout.splitlines()] if answer.returncode == 0 else []


def _amounts(gpus: int, cpus: int, memory_gb: float) -> str:
    parts = [f"{cpus} CPU" + "s" * (cpus != 1), f"{memory_gb:.4g} GB"]
    if gpus:
        parts.insert(0, f"{gpus} GPU" + "s" * (gpus != 1))
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
