"""Detection of this process's rank from the launcher's environment variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_RANKS = 10**6  # more is a mistake, and lists of them would fill the memory
LOCAL = ("GLOBALID", "NTASKS", "LOCALID", "NTASKS")  # on one node


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1  # ranks of the job
    local_rank: int = 0
    local_size: int = 1  # ranks on this node
    host: str = "localhost"  # name of the node, from SLURM where it is set
    source: str = "alone"  # alone | slurm | local | torchrun: the launcher
    attempt: str = "0"  # name of this attempt of the job


def detect(environment: Mapping[str, str] | None = None) -> Ranks:
    """Detect this process's rank from submitit's or torchrun's variables. Without either the job is one process.

    SLURM's variables count only in a task that submitit started; torchrun's inside such a task have priority.
    """
    env = os.environ if environment is None else environment
    host = socket.gethostname()
    executor = env.get("SUBMITIT_EXECUTOR")
    try:
        if all(name in env for name in TORCHRUN) and ("TORCHELASTIC_RUN_ID" in env or executor is None):
            numbers, source = [int(env[name]) for name in TORCHRUN[:4]], "torchrun"
            attempt = f"{env.get('TORCHELASTIC_RUN_ID', 'none')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        elif executor == "slurm":
            # The step's numbers, because the job may have more tasks than this step uses.
            tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"])
            count, source = env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"], "slurm"
            here = tasks[int(env["SLURM_NODEID"])]
            numbers = [int(env["SLURM_PROCID"]), int(count), int(env["SLURM_LOCALID"]), here]
            host = env.get("SLURMD_NODENAME") or host
            attempt = f"{env['SLURM_JOB_ID']}-{env.get('SLURM_RESTART_COUNT') or '0'}"
        elif executor == "local":
            numbers, source = [int(env[f"SUBMITIT_LOCAL_{name}"]) for name in LOCAL], "local"
            attempt = env["SUBMITIT_LOCAL_JOB_ID"]
        else:
            return Ranks(host=host)
        rank, size, local_rank, local_size = numbers
        if not (0 <= rank < size <= MOST_RANKS and 0 <= local_rank < local_size <= size):
            raise ValueError("the rank is not below the number of ranks")
        if source == "torchrun" and not 0 < int(env["MASTER_PORT"]) < 2**16:
            raise ValueError("no port")
    except (KeyError, ValueError, IndexError) as error:
        launcher_name = re.compile("|".join(TORCHRUN) + "|SUBMITIT_.*|SLURM_.*(ID|TASKS.*)")
        shown = ", ".join(f"{name}={env[name]}" for name in sorted(env) if launcher_name.fullmatch(name))
        raise UserError(
            f"the launcher's environment variables give no valid rank ({shown[:400]}); start the job with submitit or "
            "torchrun"
        ) from error
    return Ranks(rank, size, local_rank, local_size, host, source, attempt)


def _tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's tasks per node: `2(x3),1` gives [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} tasks per node")
        if len(tasks) + (nodes := int(match[2] or 1)) > MOST_RANKS:
            raise ValueError(f"{text!r} tasks per node")
        tasks += [int(match[1])] * nodes
    return tasks
