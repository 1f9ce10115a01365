"""Units of several runs: an ensemble in this process, or a process a run on one device. Each run stays its own.

Special here:
- a run that is done is skipped, and so is one that somebody else has, with a line in the job's log; how one ends is
  written when it ends, and costs the others nothing;
- to cancel a member stops the ensemble, for its step is one; the others go on at once from what they saved, without it;
- an ensemble that does not fit into memory goes on as two halves, one after the other, down to runs alone;
- processes that share a GPU do so through CUDA MPS where it can be started, each unit with a daemon of its own; the
  process that started them trains nothing, passes TERM and USR2 on, and says what became of who was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...train.config import RunConfig
from ...train.job.environment import TORCHRUN, Ranks
from ..plan import rates
from ..runs.causes import cause_of, words_for
from ..runs.directory import Busy, RunDirectory
from ..runs.heartbeat import Heartbeat
from ..runs.retries import Policy
from ..slurm import commands as slurm
from .attempt import Ending, Interrupt, conclude, held, prepare, settle, tidy, train_one, train_rank, try_log

BUSY_SECONDS = 20.0  # that a run is waited for which somebody else has: a killed attempt may take a while to go
POLL_SECONDS = 0.1
GPU_DRIVER = Path("/dev/nvidiactl")  # is there where a GPU is
LEFT_OUT = 75  # exit code of a process that found its run taken; EX_TEMPFAIL of sysexits.h
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class _Member:
    """A run of an ensemble that this process holds until `conclude`."""

    run: RunDirectory
    config: RunConfig
    hold: contextlib.ExitStack

    def conclude(self, heart: Heartbeat, ending: Ending) -> None:
        heart.leave(self.run)
        try:
            conclude(self.run, *ending)
        except OSError as error:
            print(f"run {self.run.run_id} is {ending.state}, and that could not be written: {error}")
        self.hold.close()


def train_ensemble(
    runs: Sequence[RunDirectory], interrupt: Interrupt, job: str, policy: Policy
) -> None:  # fmt: skip
    """Trains runs of one shape as one ensemble; how each ended is in its state.

    Args:
        runs: their directories.
        interrupt: tells when to save and stop.
        job: id of the job, as states name it.
        policy: when they count as hung.
    """
    with contextlib.ExitStack() as holds:
        members = _join(runs, job, policy, holds)
        heart = holds.enter_context(interrupt.watching([member.run for member in members], policy))
        # Where memory ran out in a run alone, its micro-batch is smaller than its batch, which no ensemble can do.
        alone = [[member] for member in members if member.run.is_halved()]
        groups = [[member for member in members if not member.run.is_halved()], *alone]
        while groups:
            group = groups.pop(0)
            if interrupt():
                for member in [member for member in group if interrupt.stops(member.run)]:
                    group.remove(member)
                    member.conclude(heart, interrupt.ending(member.run, "before it began"))
            if len(group) == 1:
                (member,) = group
                member.conclude(heart, train_rank(member.run, Ranks(), interrupt))
            elif group:
                left = _train_group(group, interrupt, heart)
                tidy()
                groups = [part for part in left if part] + groups


def _join(
    runs: Sequence[RunDirectory], job: str, policy: Policy, holds: contextlib.ExitStack
) -> list[_Member]:  # fmt: skip
    """Those runs as members that are not done, can begin, and are nobody else's."""
    wanted = [run for run in runs if not run.is_done() and not ended_before(run, job)]
    members = (_member(run, job, policy, 1 / len(wanted), holds) for run in wanted)
    return [member for member in members if member is not None]


def _member(
    run: RunDirectory, job: str, policy: Policy, share: float, holds: contextlib.ExitStack
) -> _Member | None:  # fmt: skip
    hold = holds.enter_context(contextlib.ExitStack())
    try:
        if not hold.enter_context(held(run, job, policy, BUSY_SECONDS, share)):
            hold.close()
            return None
    except (Busy, OSError) as error:  # a disk may be too full to say that a run begins
        print(f"left out: {error}")
        return None
    try:
        prepare(run)
        return _Member(run, run.config(), hold)
    except Exception as error:
        # What keeps one member from beginning is its own affair.
        conclude(run, "failed", words_for(error, run), cause_of(error))
        hold.close()
        return None


def _train_group(members: Sequence[_Member], interrupt: Interrupt, heart: Heartbeat) -> list[list[_Member]]:
    """One ensemble, to its end; returns the smaller ones in which members that have not ended are to go on.

    Those for which there was too little memory together are halved; those that stopped because another member was to
    be cancelled stay together.
    """
    from ...train.ensemble.ensemble import Ended, train_together
    from ...train.hardware import out_of_memory

    left = dict(enumerate(members))
    too_many, stopped = list[_Member](), list[_Member]()

    def on_end(index: int, ended: Ended) -> None:
        member = left.pop(index)
        if ended.error is not None and out_of_memory(ended.error):
            try_log(member.run, f"{ended.reason}; going on in a smaller ensemble, or alone")
            too_many.append(member)
        elif ended.kind == "stopped" and not interrupt.stops(member.run):
            stopped.append(member)
        elif ended.kind == "stopped":
            member.conclude(heart, interrupt.ending(member.run, str(ended.reason)))
        elif ended.error is not None:
            member.conclude(heart, Ending(ended.kind, words_for(ended.error, member.run), cause_of(ended.error)))
        else:
            member.conclude(heart, Ending(ended.kind, ended.reason))

    def report(index: int, line: str) -> None:
        try_log(members[index].run, line)

    names = ", ".join(member.run.run_id for member in members)
    for index in range(len(members)):
        report(index, f"in an ensemble of {len(members)}: {names}")
    try:
        train_together(
            [member.config for member in members], [member.run.path for member in members], interrupt, report, on_end,
            alive=interrupt,
        )  # fmt: skip
    except Exception as error:
        # Whatever an ensemble dies of belongs in the states of all who are left.
        if out_of_memory(error):
            too_many += left.values()
        else:
            for member in left.values():
                member.conclude(heart, Ending("failed", words_for(error, member.run), cause_of(error)))
    return [stopped, too_many[::2], too_many[1::2]]


def ended_before(run: RunDirectory, job: str) -> bool:
    """Whether a run ended badly in an earlier start of this very job; a requeued job goes on with the others."""
    state = run.state()
    return slurm.restarts() > 0 and state.state in ("failed", "diverged") and state.job_id == job


def train_shared(runs: Sequence[RunDirectory], interrupt: Interrupt, job: str, policy: Policy) -> None:
    """Trains each run in a process of its own, all at the same time; how each ended is in its state.

    Args:
        runs: their directories.
        interrupt: tells when all processes are to save and stop.
        job: id of the job, as states name it.
        policy: when one counts as hung.
    """
    waiting = [run for run in runs if not run.is_done() and not ended_before(run, job)]
    if not waiting:
        return
    with multi_process_service() as service:
        environment = lone_environment(os.environ, len(waiting)) | service
        processes = {run: _start(run, job, policy, 1 / len(waiting), environment) for run in waiting}
        try:
            _watch(list(processes.values()), interrupt)
        finally:
            for process in processes.values():
                if process.poll() is None:  # only after an error here: nobody would look after it any more
                    process.kill()
                    process.wait()
    for run, process in processes.items():
        if process.returncode == LEFT_OUT:
            print(f"left out: run {run.run_id} is somebody else's")
            continue
        with contextlib.suppress(Busy, OSError), run.lock(timeout=0.0):
            if process.returncode == -interrupt.number and run.state().state in ("planned", "queued"):
                run.set_state("preempted", job_id=job, reason=f"{interrupt.reason}, before it began")
            else:
                settle(run)


def _start(
    run: RunDirectory, job: str, policy: Policy, share: float, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:  # fmt: skip
    told = {"leader": os.getpid(), "share": share, "policy": asdict(policy)}
    command = [sys.executable, "-m", __spec__.name, str(run.path.resolve()), job, json.dumps(told)]
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL)


def _watch(processes: Sequence[subprocess.Popen[bytes]], interrupt: Interrupt) -> None:
    """Returns when all have ended, which they soon do once this process is told to stop."""
    told = False
    while any(process.poll() is None for process in processes):
        if interrupt() and not told:
            told = True
            for process in processes:
                process.send_signal(interrupt.number)
        time.sleep(POLL_SECONDS)


def lone_environment(environment: Mapping[str, str], sharers: int) -> dict[str, str]:
    """What a process gets that is the only rank of its run, and one of so many on the cores of this one.

    Without the variables of SLURM, submitit and torchrun, which would make it a rank of this process' job, and of
    wandb, whose process would go on holding its run after it is killed.
    """
    prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI", "TORCHELASTIC_", "WANDB_SERVICE")
    kept = {key: value for key, value in environment.items() if not key.startswith(prefixes) and key not in TORCHRUN}
    kept |= {key: environment[key] for key in ("SLURM_RESTART_COUNT",) if key in environment}  # which limits requeues
    given = kept.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else rates.usable_cores()
    return kept | dict.fromkeys(THREADS, str(max(1, threads // sharers)))


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """CUDA MPS for the processes started inside: the variables that they need, none where there is no MPS to be had.

    Without it processes on one GPU take turns; that is slower, and no error.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or not GPU_DRIVER.exists() or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}  # where somebody else has set one up, the processes inherit it
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        refused = _control(control, places, "-d")
        if refused is not None:
            print(f"no CUDA MPS ({refused}); the runs take turns on the GPU")
            yield {}
            return
        try:
            yield places
        finally:
            _control(control, places, words="quit\n")


def _control(control: str, places: Mapping[str, str], *arguments: str, words: str = "") -> str | None:
    """Calls the daemon's control program; returns its complaint where it has one."""
    try:
        subprocess.run(
            [control, *arguments], env=os.environ | dict(places), input=words, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        return " ".join(error.stderr.split()) or f"exit code {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def main(path: str, job: str, told: str) -> int:
    """One of the processes that `train_shared` starts: trains the run in a directory; returns its exit code."""
    words = json.loads(told)
    interrupt = Interrupt(lambda: os.getppid() == words["leader"], "the process that started it is gone")
    try:
        ended, _ = train_one(
            RunDirectory(Path(path)), Ranks(), interrupt, job, Policy(**words["policy"]), words["share"]
        )
    except Busy:
        return LEFT_OUT
    return 0 if ended in ("done", "preempted") else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
