"""One process' part in training a unit: a run alone, an ensemble, or a process per run on one device.

Special here:
- TERM and USR2 set a flag; the loop saves a checkpoint and returns, and only then is the job requeued. A file in a
  run's directory cancels that run alone; the others of its ensemble go on;
- an ensemble that does not fit into memory goes on as two halves, one after the other, down to runs alone;
- processes that share a GPU do so through CUDA MPS where it can be started; their parent trains nothing, passes signals
  on, and says what became of who was killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from ...train.config import RunConfig
from ...train.data.recipe.pool import usable_cores
from ...train.errors import UserError
from ...train.job.environment import TORCHRUN, Ranks
from ...train.job.failure import DISK_FULL, cause_of, describe_error
from ..grid import trunks
from ..results import tracking
from ..runs import states
from ..runs.attempts import Policy
from ..runs.directory import Busy, RunDirectory, job_restarts, job_seconds
from ..runs.liveness import Heartbeat
from ..runs.preflight import decided
from ..runs.states import Ending, held

ASK_SECONDS = 1.0  # between two looks at who started this process, and at who wants a run cancelled
BUSY_SECONDS = 20.0  # to wait for a run that somebody else has: a killed attempt may take a while to go
POLL_SECONDS = 0.1
GPU_DRIVER = Path("/dev/nvidiactl")  # is there where a GPU is
LEFT_OUT = 75  # exit code of a process that found its run taken; EX_TEMPFAIL of sysexits.h
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class TrunkNotYet(UserError):
    """The trunk may still come to where its branch begins."""


class Interrupt:
    """Remembers that the job was told to stop, by signal or by the loss of whoever started it."""

    def __init__(self, alive: Callable[[], bool] | None = None, lost: str = "the launcher is gone") -> None:
        self.reason: str | None = None
        self.number = signal.SIGTERM  # what to pass on
        self.cancelled: dict[str, str] = {}  # who has asked to cancel a run, by its id
        self._alive, self._lost = alive, lost
        self._began = self._asked = time.monotonic()
        self._heart: Heartbeat | None = None

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.reason is None:  # a preempted job gets several; the first says why
                self.number = signal.Signals(number)
                self.reason = f"signal {self.number.name}"

        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, on_signal)

    @contextlib.contextmanager
    def watching(self, runs: Sequence[RunDirectory], policy: Policy) -> Iterator[Heartbeat]:
        """Gives signs of life of runs, and looks whether one is to be cancelled."""
        with Heartbeat(runs, policy) as heart:
            self._heart, self.cancelled = heart, {}
            try:
                yield heart
            finally:
                self._heart = None

    def __call__(self) -> bool:
        runs = list[RunDirectory]()
        if self._heart is not None:
            self._heart.progressed()
            runs = self._heart.runs
        if time.monotonic() - self._asked > ASK_SECONDS:
            if self._alive is not None and not self._alive():
                self.reason = self._lost
            for run in runs:
                if (who := run.cancel_asked()) is not None:
                    self.cancelled[run.run_id] = who
            self._asked = time.monotonic()
        return any(self.stops(run) for run in runs) or self.reason is not None

    def stops(self, run: RunDirectory) -> bool:
        """Whether it is this run that is to stop."""
        return self.reason is not None or run.run_id in self.cancelled

    def ending(self, run: RunDirectory, words: str) -> Ending:
        """How a run ends that has stopped; `words` says where."""
        if (who := self.cancelled.get(run.run_id)) is not None:
            return Ending("cancelled", f"cancelled by {who}; {words}")
        over = self.reason is not None and time.monotonic() - self._began > warned_after(os.environ)
        cause = "time_limit" if over else "preempted"
        return Ending("preempted", f"{self.reason or 'another rank was told to stop'}; {words}", cause)


def warned_after(environment: Mapping[str, str]) -> float:
    """Seconds after which a SLURM job that is told to stop is told so for its time limit."""
    seconds = job_seconds(environment)
    # Jobs are warned up to two minutes before their end, and a process may begin as late after its job.
    return seconds - min(240.0, 0.75 * seconds)


def failed(error: Exception, run: RunDirectory) -> Ending:
    """How a run ends that an error has ended."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        words = f"the disk is full ({error.filename or run.path}); free some space and sweep again"
    else:
        words = describe_error(error)
    return Ending("failed", words, "trunk" if isinstance(error, TrunkNotYet) else str(cause_of(error)))


def train_unit(
    how: str, runs: Sequence[RunDirectory], ranks: Ranks, interrupt: Interrupt, job: str, policy: Policy
) -> None:
    """Trains a unit; how each run ended is in its state."""
    if how == "ensemble":
        train_ensemble(runs, interrupt, job, policy)
    elif how == "shared":
        train_shared(runs, interrupt, job, policy)
    else:
        try:
            train_one(runs[0], ranks, interrupt, job, policy)
        except Busy as error:
            print(f"left out: {error}")


def train_one(
    run: RunDirectory, ranks: Ranks, interrupt: Interrupt, job: str, policy: Policy, share: float = 1.0
) -> tuple[str, str | None]:
    """Trains a run as its first rank; returns the state that it ended in and why. Busy: somebody else has it."""
    with held(run, job, policy, share=share) as begun:
        if not begun:
            state = run.state()
            return state.state, state.reason
        halved = run.is_halved()
        with interrupt.watching([run], policy):
            ending = train_rank(run, ranks, interrupt)
        if ending.state == "failed" and ranks.size > 1 and run.is_halved() and not halved:
            # Memory ran out on a rank, and the next start takes a smaller micro-batch.
            ending = Ending("preempted", ending.reason, "memory")
        states.conclude(run, *ending)
    return ending.state, ending.reason


def train_rank(run: RunDirectory, ranks: Ranks, interrupt: Interrupt) -> Ending:
    """One rank's part in a run; whatever it dies of is an answer."""
    from ...train.errors import Diverged, Stopped
    from ...train.loop import train

    report = partial(run.log, rank=ranks.rank)
    try:
        if ranks.rank == 0:
            prepare(run)
        config = decided(run)
        if ranks.rank == 0 and ranks.size > 1:
            report(f"{ranks.size} ranks: {config.parallel.label}")
        train(config, run.path, should_stop=interrupt, report=report, alive=interrupt)
    except Stopped as stopped:
        return interrupt.ending(run, str(stopped))
    except Diverged as diverged:
        return Ending("diverged", str(diverged))
    except Exception as error:
        # Whatever a run dies of belongs in its state, with the traceback in its log; the sweep goes on.
        if not isinstance(error, UserError):
            try_log(run, traceback.format_exc(), ranks.rank)
        return failed(error, run)
    return Ending("done")


def prepare(run: RunDirectory) -> None:
    """What a run's first rank does before it trains."""
    run.reserve()
    config = run.config()
    tracking.note_lineage(run, config)
    if config.parent is None:
        return
    trunk = RunDirectory(run.path.parent / config.parent)
    try:
        if (line := trunks.graft(run, trunk)) is not None:
            run.log(line)
    except trunks.NotThere as error:
        if states.may_go_on(trunk):
            raise TrunkNotYet(str(error)) from error
        raise


def try_log(run: RunDirectory, text: str, rank: int = 0) -> None:
    """Logs, or prints where the log cannot be written."""
    try:
        run.log(text, rank)
    except OSError:
        print(text)


def tidy() -> None:
    """Gives memory back, and forgets what was compiled."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # it keeps 8 shapes of a block at most, and from then on compiles none
    gc.collect()  # models and trainers hold each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Member:
    """A run of an ensemble that this process holds until `conclude`."""

    run: RunDirectory
    config: RunConfig
    hold: contextlib.ExitStack

    def conclude(self, heart: Heartbeat, ending: Ending) -> None:
        heart.leave(self.run)
        try:
            states.conclude(self.run, *ending)
        except OSError as error:
            print(f"run {self.run.run_id} is {ending.state}, and that could not be written: {error}")
        self.hold.close()


def train_ensemble(runs: Sequence[RunDirectory], interrupt: Interrupt, job: str, policy: Policy) -> None:
    """Trains runs of one shape as one ensemble."""
    with contextlib.ExitStack() as holds:
        # Those runs that are not done, can begin, and are nobody else's.
        wanted = [run for run in runs if not _is_over(run, job)]
        members = list(filter(None, (_member(run, job, policy, 1 / len(wanted), holds) for run in wanted)))
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
                group[0].conclude(heart, train_rank(group[0].run, Ranks(), interrupt))
            elif group:
                left = _train_group(group, interrupt, heart)
                tidy()
                groups = [part for part in left if part] + groups


def _member(run: RunDirectory, job: str, policy: Policy, share: float, holds: contextlib.ExitStack) -> _Member | None:
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
        return _Member(run, decided(run), hold)
    except Exception as error:
        # What keeps one member from beginning is its own affair.
        states.conclude(run, *failed(error, run))
        hold.close()
        return None


def _train_group(members: Sequence[_Member], interrupt: Interrupt, heart: Heartbeat) -> list[list[_Member]]:
    """One ensemble, to its end; returns the smaller ones in which members go on that have not ended."""
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
            member.conclude(heart, failed(ended.error, member.run)._replace(state=ended.kind))
        else:
            member.conclude(heart, Ending(ended.kind, ended.reason))

    names = ", ".join(member.run.run_id for member in members)
    for member in members:
        try_log(member.run, f"in an ensemble of {len(members)}: {names}")
    try:
        train_together(
            [member.config for member in members],
            [member.run.path for member in members],
            interrupt,
            lambda index, line: try_log(members[index].run, line),
            on_end,
            alive=interrupt,
        )
    except Exception as error:
        # Whatever an ensemble dies of belongs in the states of all who are left.
        if out_of_memory(error):
            too_many += left.values()
        else:
            for member in left.values():
                member.conclude(heart, failed(error, member.run))
    return [stopped, too_many[::2], too_many[1::2]]


def _is_over(run: RunDirectory, job: str) -> bool:
    """Whether a run is done, or ended badly in an earlier start of this job."""
    state = run.state()
    return run.is_done() or (job_restarts() > 0 and state.state in ("failed", "diverged") and state.job_id == job)


def train_shared(runs: Sequence[RunDirectory], interrupt: Interrupt, job: str, policy: Policy) -> None:
    """Trains each run in a process of its own, all at the same time."""
    waiting = [run for run in runs if not _is_over(run, job)]
    if not waiting:
        return
    with multi_process_service() as service:
        environment = lone_environment(os.environ, len(waiting)) | service
        processes = {run: _start(run, job, policy, 1 / len(waiting), environment) for run in waiting}
        passed_on = False
        try:
            while any(process.poll() is None for process in processes.values()):
                if interrupt() and not passed_on:
                    passed_on = True
                    for process in processes.values():
                        process.send_signal(interrupt.number)
                time.sleep(POLL_SECONDS)
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
            if process.returncode != -interrupt.number or not states.stop_before(run, job, interrupt.reason):
                states.settle_child(run)


def _start(
    run: RunDirectory, job: str, policy: Policy, share: float, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    settings = {"leader": os.getpid(), "share": share, "policy": asdict(policy)}
    command = [sys.executable, "-m", __spec__.name, str(run.path.resolve()), job, json.dumps(settings)]
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL)


def lone_environment(environment: Mapping[str, str], sharers: int) -> dict[str, str]:
    """The environment of a process that is its run's only rank, with its share of this one's cores."""
    prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI", "TORCHELASTIC_", "WANDB_SERVICE")
    kept = {key: value for key, value in environment.items() if not key.startswith(prefixes) and key not in TORCHRUN}
    kept |= {key: environment[key] for key in ("SLURM_RESTART_COUNT",) if key in environment}  # which limits requeues
    given = kept.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else usable_cores()
    return kept | dict.fromkeys(THREADS, str(max(1, threads // sharers)))


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """CUDA MPS for the processes started inside: the variables that they need. Without it they take turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or not GPU_DRIVER.exists() or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}  # where somebody else has set one up, the processes inherit it
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        if (refused := _control(control, places, "-d")) is not None:
            print(f"no CUDA MPS ({refused}); the runs take turns on the GPU")
            yield {}
            return
        try:
            yield places
        finally:
            _control(control, places, words="quit\n")


def _control(control: str, places: Mapping[str, str], *arguments: str, words: str = "") -> str | None:
    """Calls the daemon's control program; returns its complaint."""
    try:
        subprocess.run(
            [control, *arguments],
            env=os.environ | dict(places),
            input=words,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=60,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return " ".join(error.stderr.split()) or f"exit code {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def main(path: str, job: str, settings: str) -> int:
    given, run = json.loads(settings), RunDirectory(Path(path))
    interrupt = Interrupt(lambda: os.getppid() == given["leader"], "the process that started it is gone")
    try:
        ended, _ = train_one(run, Ranks(), interrupt, job, Policy(**given["policy"]), given["share"])
    except Busy:
        return LEFT_OUT
    return 0 if ended in ("done", "preempted") else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
