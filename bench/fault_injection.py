"""Inject faults into a sweep on the cluster of tests/slurm_cluster.sh.

The cluster's nodes are this machine, so all of its processes can be killed from here. The caller carries out a `Repair`
when it is due, so that faults overlap.
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
from typing import Any, NamedTuple

from ..sweeps.runs.directory import RunDirectory, SweepDirectory

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "slurm_cluster.sh"
LONG_LIMIT = 30  # minutes; more than any job of the suite takes


class Refused(Exception):
    """SLURM did not do what a fault, or its repair, asked for."""


class Away(Refused):
    """The controller did not answer."""


class Repair(NamedTuple):
    """The action that ends a fault, done as soon as `due` returns True, at the latest after `seconds`."""

    seconds: float
    do: Callable[[], object]
    due: Callable[[], bool] = lambda: False


Result = tuple[str, Repair | None] | None  # the text for the log, and the repair


class Strike(NamedTuple):
    """An injected fault, and its text for the log."""

    kind: str
    text: str
    repair: Repair | None = None


class Victim(NamedTuple):
    """A run that is being trained."""

    run: RunDirectory
    job: str
    process: int
    node: str


@dataclass
class Injector:
    """An injector of faults into a sweep that `command` launched; the file system `disk` may be filled."""

    sweep: SweepDirectory
    command: list[str]
    chance: random.Random
    disk: Path | None = None
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def kinds(self) -> list[str]:
        """Return the faults that can be injected here."""
        return [name for name in FAULTS if name != "full disk" or self.disk is not None]

    def strike(self, kind: str) -> Strike | None:
        """Inject a fault of this kind now. Returns None if there is no victim."""
        victims, function = self.victims(), FAULTS[kind]
        with suppress(ProcessLookupError, FileNotFoundError, Refused):  # the victim has just ended
            if kind in WITHOUT_VICTIM:
                result = function(self)
            else:
                result = function(self, self.chance.choice(victims)) if victims else None
            return result and Strike(kind, *result)
        return None

    def victims(self) -> list[Victim]:
        """Return the runs in training on the cluster that are past their first steps."""
        victims = []
        for run in self.sweep.runs():
            state = run.state()
            if state.state != "running" or not run.last_metrics().get("step"):
                continue
            with suppress(OSError, IndexError):
                process = int(re.findall(r"process (\d+)$", (run.path / "log.txt").read_text(), re.MULTILINE)[-1])
                variables = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
                node = next((item.split("=", 1)[1] for item in variables if item.startswith("SLURMD_NODENAME=")), None)
                if state.job_id is not None and node:
                    victims.append(Victim(run, state.job_id, process, node))
        return victims

    def kill_worker(self, victim: Victim) -> Result:
        """Kill the training process, as the kernel does if memory runs out."""
        os.kill(victim.process, signal.SIGKILL)
        return f"process {victim.process} of run {victim.run.run_id}", None

    def kill_slurmstepd(self, victim: Victim) -> Result:
        """Kill the daemon of a job's step: for SLURM the job has ended, but its process lives on."""
        process = victim.process
        while process > 1 and Path(f"/proc/{process}/comm").read_text().strip() != "slurmstepd":
            process = int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)[0])
        if process <= 1:
            return None  # it was killed before, and the run is an orphan
        os.kill(process, signal.SIGKILL)
        return f"slurmstepd {process} of job {victim.job}", None

    def kill_slurmd(self, victim: Victim) -> Result:
        """Kill a node's daemon for a time shorter or longer than SlurmdTimeout, after which SLURM gives up the node."""
        seconds, daemon = self.chance.choice([2.0, 15.0]), f"slurmd-{victim.node}"
        cluster("kill", daemon)
        return f"{daemon} for {seconds:.0f} s", Repair(seconds, lambda: cluster("start", daemon))

    def node_down(self, victim: Victim) -> Result:
        """Declare a node down, while its processes run on."""
        seconds, node = self.chance.uniform(2.0, 8.0), f"nodename={victim.node}"
        slurm("scontrol", "update", node, "state=down", "reason=fault")
        return f"{node} for {seconds:.0f} s", Repair(seconds, lambda: slurm("scontrol", "update", node, "state=resume"))

    def preempt(self, victim: Victim) -> Result:
        """Preempt a node's runs by a job of a higher-priority partition that takes the whole node."""
        job = ["--partition=main", "--exclusive", f"--nodelist={victim.node}", "--job-name=fault", "--time=1"]
        slurm("sbatch", *job, "--output=/dev/null", "--wrap=sleep 2")
        return f"all jobs on {victim.node}", None

    def shorten_limit(self, victim: Victim) -> Result:
        """Shorten a job's time limit, so that SLURM sends the warning signal at its next check, within 30 seconds."""
        attempt, job = victim.run.state().attempt, f"jobid={victim.job}"
        slurm("scontrol", "update", job, "timelimit=1")

        def is_over() -> bool:
            state = victim.run.state()
            return state.state != "running" or state.attempt != attempt

        restore = Repair(40.0, lambda: slurm("scontrol", "update", job, f"timelimit={LONG_LIMIT}"), is_over)
        return f"job {victim.job}", restore

    def truncate_checkpoint(self, _: Victim) -> Result:
        """Halve a file of a run's newest checkpoint and kill the run, which must resume from the checkpoint before."""
        for victim in self.chance.sample(victims := self.victims(), len(victims)):
            os.kill(victim.process, signal.SIGSTOP)  # what it has not renamed yet is no checkpoint
            checkpoints = sorted(victim.run.path.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
            if len(checkpoints) > 1:
                files = [path for path in checkpoints[-1].rglob("*") if path.is_file()]
                largest = max(files, key=lambda path: path.stat().st_size)
                os.truncate(largest, largest.stat().st_size // 2)
                os.kill(victim.process, signal.SIGKILL)
                return f"{checkpoints[-1].name} of run {victim.run.run_id}", None
            os.kill(victim.process, signal.SIGCONT)
        return None

    def fill_disk(self, _: Victim) -> Result:
        """Fill the sweep's file system, so that every write fails for a while."""
        assert self.disk is not None
        seconds, ballast = self.chance.uniform(1.0, 6.0), self.disk / "ballast"
        with ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        return f"for {seconds:.1f} s", Repair(seconds, lambda: ballast.unlink(missing_ok=True))

    def restart_slurmctld(self) -> Result:
        """Kill the controller, and start it again with the state that it had saved."""
        seconds = self.chance.uniform(0.5, 5.0)
        cluster("kill", "slurmctld")
        return f"for {seconds:.1f} s", Repair(seconds, lambda: cluster("start", "slurmctld"))

    def corrupt_state(self) -> Result:
        """Replace the state.json of a run, in any state, by half of it, an empty file, or nonsense."""
        run = self.chance.choice(self.sweep.runs())
        whole = (run.path / "state.json").read_bytes()
        damaged = self.chance.choice([whole[: len(whole) // 2], b"", b"\0" * 64, b'{"state": 3, "attempt": "x"}'])
        (run.path / "state.json").write_bytes(damaged)
        return f"of run {run.run_id}, now {damaged[:20]!r}", None

    def launch_twice(self) -> Result:
        """Start the command that launched the sweep twice more, at the same moment."""
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.launchers += [subprocess.Popen(self.command, cwd=ROOT, text=True, **streams) for _ in range(2)]
        return " and ".join(f"process {launcher.pid}" for launcher in self.launchers[-2:]), None


WITHOUT_VICTIM = ("slurmctld restart", "corrupted state.json", "two launchers at once")
FAULTS: dict[str, Callable[..., Result]] = {
    "kill -9 of the worker": Injector.kill_worker,
    "kill -9 of slurmstepd": Injector.kill_slurmstepd,
    "kill -9 of slurmd": Injector.kill_slurmd,
    "node down": Injector.node_down,
    "preemption": Injector.preempt,
    "time limit": Injector.shorten_limit,
    "slurmctld restart": Injector.restart_slurmctld,
    "full disk": Injector.fill_disk,
    "truncated newest checkpoint": Injector.truncate_checkpoint,
    "corrupted state.json": Injector.corrupt_state,
    "two launchers at once": Injector.launch_twice,
}


def resume_nodes() -> None:
    """Resume nodes that are down, or that SLURM drained because a dead job lives on."""
    for line in slurm("sinfo", "-h", "-N", "-o", "%N %T", patience=60.0).splitlines():
        node, state = line.split()
        if state.rstrip("*") in ("down", "drained", "draining"):
            with suppress(Refused):
                slurm("scontrol", "update", f"nodename={node}", "state=resume")


def cluster(*arguments: str) -> None:
    """Call tests/slurm_cluster.sh for the cluster that $SLURM_CONF names. Raises Refused if it fails."""
    variables = os.environ | {"ISOFLOP_SLURM_ROOT": str(Path(os.environ["SLURM_CONF"]).parent)}
    # A daemon that it starts keeps its standard streams, so none may be a pipe that this process waits on.
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": sys.stderr}
    try:
        subprocess.run([str(SCRIPT), *arguments], env=variables, timeout=60, check=True, **streams)
    except subprocess.CalledProcessError as error:
        raise Refused(str(error)) from error


def slurm(*command: str, patience: float = 0.0) -> str:
    """Run a SLURM command and return its output; wait up to `patience` seconds if the controller does not answer."""
    deadline = time.monotonic() + patience
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return done.stdout
        message = f"{' '.join(command)}: {done.stderr.strip()}"
        if not re.search("contact|connect|unexpected message", done.stderr, re.IGNORECASE):
            raise Refused(message)
        if time.monotonic() > deadline:
            raise Away(message)
        time.sleep(0.5)
