"""Faults for a sweep on the cluster of tests/slurm_cluster.sh: one function each, that picks a victim and strikes it.

Special here:
- the cluster's nodes are this machine, so any of its processes can be killed from here, and a node's name is in its
  processes' environment;
- a fault that needs a victim and finds none returns None, and is tried again later;
- what must be put right again (a node that is down, a full disk) is a `Repair`, which whoever injects carries out when
  it is due, so that faults overlap.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "slurm_cluster.sh"
LONG_LIMIT = 30  # minutes; more than any job of the suite takes


class Refused(Exception):
    """SLURM did not do what a fault, or its repair, asked of it."""


class Away(Refused):
    """Nobody answered, as while a fault has taken the controller away."""


@dataclass(frozen=True)
class Repair:
    """What ends a fault: once `due` says so, and at the latest after `seconds`."""

    seconds: float
    do: Callable[[], object]
    due: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Strike:
    """A fault that has been injected."""

    kind: str
    at: float  # seconds since the epoch
    runs: tuple[str, ...]  # ids of the runs that it struck; none: it struck what serves all of them
    what: str  # for the log
    repair: Repair | None = None


@dataclass(frozen=True)
class Victim:
    """A run that is being trained."""

    run: RunDirectory
    job: str
    process: int
    node: str


@dataclass
class Injector:
    """Strikes one sweep.

    Attributes:
        sweep: whose runs are struck.
        command: the `python sweep.py …` that launched it.
        chance: for every choice.
        disk: where the sweep lies, if that is a file system of its own that may be filled.
    """

    sweep: SweepDirectory
    command: list[str]
    chance: random.Random
    disk: Path | None = None
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def kinds(self) -> list[str]:
        """Faults that can be injected here."""
        return [name for name in FAULTS if name != "full disk" or self.disk is not None]

    def strike(self, kind: str) -> Strike | None:
        """Injects a fault now; None where there is nothing that it could strike."""
        began = time.time()
        with suppress(ProcessLookupError, FileNotFoundError, Refused):  # the victim ended at this very moment
            if (found := FAULTS[kind](self)) is not None:
                runs, what, repair = found
                return Strike(kind, began, runs, what, repair)
        return None

    def victims(self) -> list[Victim]:
        """Runs at work on the cluster, past their first steps."""
        found = []
        for run in self.sweep.runs():
            state = run.state()
            if state.state != "running" or not run.last_metrics().get("step"):
                continue
            with suppress(OSError, IndexError):
                process = int(re.findall(r"process (\d+)$", (run.path / "log.txt").read_text(), re.MULTILINE)[-1])
                settings = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                environment = dict(item.decode().split("=", 1) for item in settings if b"=" in item)
                if state.job_id is not None and (node := environment.get("SLURMD_NODENAME")):
                    found.append(Victim(run, state.job_id, process, node))
        return found

    def victim(self) -> Victim | None:
        victims = self.victims()
        return self.chance.choice(victims) if victims else None

    def on_node(self, node: str) -> tuple[str, ...]:
        return tuple(victim.run.run_id for victim in self.victims() if victim.node == node)


Found = tuple[tuple[str, ...], str, Repair | None] | None


def kill_worker(injector: Injector) -> Found:
    """The process that trains is gone, as when the kernel is short of memory."""
    if (victim := injector.victim()) is None:
        return None
    os.kill(victim.process, signal.SIGKILL)
    return (victim.run.run_id,), f"process {victim.process} of run {victim.run.run_id}", None


def kill_slurmstepd(injector: Injector) -> Found:
    """The daemon that minds a job's step is gone: SLURM takes the job for ended, and its process lives on."""
    if (victim := injector.victim()) is None:
        return None
    process = victim.process
    while process > 1 and Path(f"/proc/{process}/comm").read_text().strip() != "slurmstepd":
        process = int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)[0])
    if process <= 1:
        return None  # killed before, and the run is an orphan
    os.kill(process, signal.SIGKILL)
    return (victim.run.run_id,), f"slurmstepd {process} of job {victim.job}", None


def kill_slurmd(injector: Injector) -> Found:
    """A node's daemon is gone for a while: short of SlurmdTimeout, or so long that SLURM gives the node up."""
    if (victim := injector.victim()) is None:
        return None
    seconds, daemon = injector.chance.choice([2.0, 15.0]), f"slurmd-{victim.node}"
    runs = injector.on_node(victim.node)
    cluster("kill", daemon)
    return runs, f"{daemon} for {seconds:.0f} s", Repair(seconds, lambda: cluster("start", daemon))


def node_down(injector: Injector) -> Found:
    """An administrator declares a node down, though its processes live."""
    if (victim := injector.victim()) is None:
        return None
    seconds, node = injector.chance.uniform(2.0, 8.0), victim.node
    runs = injector.on_node(node)
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=fault")

    def resume() -> None:
        slurm("scontrol", "update", f"nodename={node}", "state=resume")

    return runs, f"{node} for {seconds:.0f} s", Repair(seconds, resume)


def preemption(injector: Injector) -> Found:
    """A job of a higher partition takes the whole node."""
    if (victim := injector.victim()) is None:
        return None
    runs = injector.on_node(victim.node)
    slurm(
        "sbatch", "--partition=main", "--exclusive", f"--nodelist={victim.node}", "--job-name=fault", "--time=1",
        "--output=/dev/null", "--wrap=sleep 2",
    )  # fmt: skip
    return runs, f"all jobs on {victim.node}", None


def time_limit(injector: Injector) -> Found:
    """The job's time is up: SLURM sends the signal that warns of it, within its period of 30 seconds."""
    if (victim := injector.victim()) is None:
        return None
    attempt = victim.run.state().attempt
    slurm("scontrol", "update", f"jobid={victim.job}", "timelimit=1")

    def over() -> bool:
        state = victim.run.state()
        return state.state != "running" or state.attempt != attempt

    def restore() -> None:
        slurm("scontrol", "update", f"jobid={victim.job}", f"timelimit={LONG_LIMIT}")

    return (victim.run.run_id,), f"job {victim.job}", Repair(40.0, restore, over)


def restart_slurmctld(injector: Injector) -> Found:
    """The controller is killed and comes back, with what it had saved."""
    seconds = injector.chance.uniform(0.5, 5.0)
    cluster("kill", "slurmctld")
    return (), f"for {seconds:.1f} s", Repair(seconds, lambda: cluster("start", "slurmctld"))


def full_disk(injector: Injector) -> Found:
    """Every write in the sweep's folder fails for a while."""
    assert injector.disk is not None
    if not injector.victims():
        return None
    seconds, ballast = injector.chance.uniform(1.0, 6.0), injector.disk / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    runs = tuple(victim.run.run_id for victim in injector.victims())
    return runs, f"for {seconds:.1f} s", Repair(seconds, lambda: ballast.unlink(missing_ok=True))


def truncated_checkpoint(injector: Injector) -> Found:
    """The newest checkpoint lost half of a file, and its run must start from it: it has to fall back."""
    for victim in injector.chance.sample(victims := injector.victims(), len(victims)):
        os.kill(victim.process, signal.SIGSTOP)  # what it has not renamed yet is no checkpoint
        checkpoints = sorted(victim.run.path.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
        if len(checkpoints) < 2:
            os.kill(victim.process, signal.SIGCONT)
            continue
        newest = max(
            (path for path in checkpoints[-1].rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )
        os.truncate(newest, newest.stat().st_size // 2)
        os.kill(victim.process, signal.SIGKILL)
        return (victim.run.run_id,), f"{checkpoints[-1].name} of run {victim.run.run_id}", None
    return None


def corrupted_state(injector: Injector) -> Found:
    """A state.json, of a run in whatever state, is half a file, no file, or nonsense."""
    run = injector.chance.choice(injector.sweep.runs())
    path = run.path / "state.json"
    whole = path.read_bytes()
    damaged = injector.chance.choice([whole[: len(whole) // 2], b"", b"\0" * 64, b'{"state": 3, "attempt": "x"}'])
    path.write_bytes(damaged)
    return (run.run_id,), f"of run {run.run_id}, now {damaged[:20]!r}", None


def two_launchers(injector: Injector) -> Found:
    """The command that launched the sweep is given twice more, at the same moment."""
    for _ in range(2):
        injector.launchers.append(
            subprocess.Popen(
                injector.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )
        )  # fmt: skip
    return (), " and ".join(f"process {launcher.pid}" for launcher in injector.launchers[-2:]), None


FAULTS: dict[str, Callable[[Injector], Found]] = {
    "kill -9 of the worker": kill_worker,
    "kill -9 of slurmstepd": kill_slurmstepd,
    "kill -9 of slurmd": kill_slurmd,
    "node down": node_down,
    "preemption": preemption,
    "time limit": time_limit,
    "slurmctld restart": restart_slurmctld,
    "full disk": full_disk,
    "truncated newest checkpoint": truncated_checkpoint,
    "corrupted state.json": corrupted_state,
    "two launchers at once": two_launchers,
}


def resume_nodes() -> None:
    """What an administrator does: puts nodes back that are down, or that SLURM drained because a dead job lives on."""
    for line in slurm("sinfo", "-h", "-N", "-o", "%N %T", patience=60.0).splitlines():
        node, state = line.split()
        if state.rstrip("*") in ("down", "drained", "draining"):
            with suppress(Refused):
                slurm("scontrol", "update", f"nodename={node}", "state=resume")


def cluster(*arguments: str) -> None:
    """tests/slurm_cluster.sh, for the cluster that $SLURM_CONF names.

    Raises:
        Refused: it fails, as where a daemon is to be killed that does not run.
    """
    environment = os.environ | {"ISOFLOP_SLURM_ROOT": str(Path(os.environ["SLURM_CONF"]).parent)}
    try:  # a daemon that it starts keeps its standard streams: none may be a pipe that somebody waits on
        subprocess.run(
            [str(SCRIPT), *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=60,
            check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise Refused(str(error)) from error


def slurm(*command: str, patience: float = 0.0) -> str:
    """What one of SLURM's commands prints; a controller that is away is waited for as long as `patience` seconds.

    Raises:
        Refused: with SLURM's words, as of a job that has ended meanwhile.
        Away: nobody answers.
    """
    deadline = time.monotonic() + patience
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return done.stdout
        said = f"{' '.join(command)}: {done.stderr.strip()}"
        if not re.search("contact|connect|unexpected message", done.stderr, re.IGNORECASE):
            raise Refused(said)
        if time.monotonic() > deadline:
            raise Away(said)
        time.sleep(0.5)
