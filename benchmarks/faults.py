"""Disturbs a sweep on a SLURM cluster while it runs, and checks that its results are those of an undisturbed one.

    tests/slurm_cluster.sh up; eval "$(tests/slurm_cluster.sh env)"
    python benchmarks/faults.py --faults 50 --seed 0

The same grid is trained on this machine first. Then it goes to the cluster that $SLURM_CONF names, half of it as array
tasks and half through a queue, and faults (fault_injection.py) strike at random times and places until so many have.
When all is over every run must be done, once, with the very losses of the first grid, and `isoflop doctor` must find
nothing. Needs root and the cluster of tests/slurm_cluster.sh, whose daemons it kills. A full disk needs a file system
of the sweep's own: a tmpfs, where root may mount one.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fault_injection  # type: ignore[import-not-found]
from isoflop.sweeps.observe import doctor
from isoflop.sweeps.runs import attempts
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.train.files import read_json_lines

ROOT = Path(__file__).resolve().parent.parent

EXACT = ("val_loss", "val_loss_se", "train_loss")
GRID = [
    "+grid=product", "model.width=16", "model.depth=2", "model.heads=2", "data.sequence_length=64",
    "data.max_bytes=2000000", "data.validation_tokens=16384", "optimizer.batch_size=8", "validations=2",
    "fit.bootstrap=50", "precision=fp32", "tracker=none", "evaluate=none", "parallel.device=cpu", "ensembles=1",
    "trunks=false", "checkpoint.every_seconds=1", "tuning=fixed", "preflight=false",
]  # fmt: skip
SLURM = [
    "cluster=slurm", "cluster.gpus_per_job=0", "cluster.cpus_per_task=1", "cluster.memory_gb=1",
    f"cluster.time_minutes={fault_injection.LONG_LIMIT}", "cluster.array_parallelism=2", "cluster.partition=low",
    "cluster.keeper_seconds=3", "cluster.heartbeat_seconds=1", "cluster.backoff_seconds=1", "cluster.hang_minutes=5",
    "cluster.retries=100", "cluster.sweep_retries=10000", "cluster.max_requeues=1000",
]  # fmt: skip


@dataclass
class Outcome:
    """What a disturbed sweep came to."""

    strikes: list[fault_injection.Strike]
    complaints: list[str]  # none: it passed
    seconds: float
    sweep: SweepDirectory
    lost: dict[str, list[float]] = field(default_factory=dict)  # by kind of fault, seconds of each; see `seconds_lost`


def grid(runs: int, tokens: int) -> list[str]:
    """So many runs in two lengths, of which the longer ones become array tasks."""
    return [*GRID, f"grid.axes={{tokens: [{tokens}, {2 * tokens}], seed: {list(range(runs // 2))}}}"]


def tokens_for(seconds: float, root: Path) -> int:
    """D of a run that takes so long alone on this machine, as a short one shows.

    Raises:
        SystemExit: it failed.
    """
    command = sweep_command([*GRID, "tokens=50_000", "grid.axes={seed: [0]}"], root, "trial", "cluster=local")
    summary = SweepDirectory.open(run_here(command, root / "trial")).runs()[0].summary() or {}
    return 1000 * round(seconds * summary["D"] / summary["seconds"] / 1000)


def run_here(command: Sequence[str], folder: Path) -> Path:
    """Runs a sweep on this machine, to its end; returns its folder.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the undisturbed grid failed:\n{done.stdout}{done.stderr}")
    return folder


def undisturbed(overrides: Sequence[str], root: Path) -> SweepDirectory:
    """Trains the grid on this machine.

    Raises:
        SystemExit: it failed.
    """
    command = sweep_command(overrides, root, "undisturbed", "cluster=local", "cluster.threads_per_job=1")
    return SweepDirectory.open(run_here(command, root / "undisturbed"))


def sweep_command(overrides: Sequence[str], root: Path, name: str, *more: str) -> list[str]:
    return [sys.executable, "sweep.py", *overrides, f"output_root={root}", f"sweep={name}", *more]


def disturb(
    overrides: Sequence[str], reference: SweepDirectory, root: Path, disk: Path | None, count: int, seed: int,
    patience: float, every: float, kinds: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Submits the grid, strikes it `count` times, and waits until it is over.

    Args:
        overrides: of the grid.
        reference: the same grid, undisturbed.
        root: where the sweep goes.
        disk: the file system of `root`, if it may be filled.
        count: faults to inject, of each kind about as many.
        seed: of the choice of times, places and kinds.
        patience: seconds until what is not over counts as stuck.
        every: mean seconds between two faults.
        kinds: of faults; none: all that can be injected.
    """
    command = sweep_command(overrides, root, f"disturbed-{seed}", *SLURM, *pace(reference))
    began = time.monotonic()
    fault_injection.resume_nodes()
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
    sweep = SweepDirectory.open(root / f"disturbed-{seed}")
    injector = fault_injection.Injector(sweep, command, random.Random(seed), disk)
    strikes = inject(injector, kinds or injector.kinds(), count, every, began + patience)
    over = wait_until_over(sweep, began + patience)
    complaints = [] if over else [f"not over after {patience:.0f} s: {describe(sweep)}"]
    complaints += launchers_ended(injector)
    complaints += check(sweep, reference)
    outcome = Outcome(strikes, complaints, time.monotonic() - began, sweep)
    for strike in strikes:
        outcome.lost.setdefault(strike.kind, []).append(seconds_lost(sweep, strike))
    return outcome


def pace(reference: SweepDirectory) -> list[str]:
    """Settings by which the cluster's estimates are what runs took here, and halfway between the lengths is short."""
    seconds = sorted((run.summary() or {})["seconds"] for run in reference.runs())
    rate = statistics.median(
        (run.summary() or {})["flops_exact"] / (run.summary() or {})["seconds"] for run in reference.runs()
    )
    return [
        f"cluster.flops_per_second={rate * 2:.4g}",
        f"cluster.queue_minutes={statistics.median(seconds) / 60:.4g}",
    ]  # fmt: skip


def inject(
    injector: fault_injection.Injector, kinds: Sequence[str], count: int, every: float, deadline: float
) -> list[fault_injection.Strike]:
    """Strikes at random times, until `count` faults have struck or the sweep is over."""
    chance, strikes = injector.chance, list[fault_injection.Strike]()
    repairs: list[tuple[float, fault_injection.Repair]] = []
    rounds = [chance.sample(kinds, len(kinds)) for _ in range(-(-count // len(kinds)))]  # as many of each kind
    waiting = list(itertools.chain.from_iterable(rounds))[:count]
    due = time.monotonic() + chance.expovariate(1 / every)
    while waiting or repairs:
        now = time.monotonic()
        for item in [item for item in repairs if item[0] <= now or item[1].due() or not waiting]:
            repairs.remove(item)
            time.sleep(max(0.0, 0.0 if waiting else item[0] - now))
            try:
                item[1].do()
            except fault_injection.Away:
                repairs.append((time.monotonic() + 1.0, item[1]))
            except fault_injection.Refused:
                pass  # such as of a job that has ended
        if now > deadline or (waiting and all(run.is_done() for run in injector.sweep.runs())):
            waiting.clear()
        if waiting and now >= due:
            for kind in list(dict.fromkeys(waiting)):
                if (strike := injector.strike(kind)) is not None:
                    waiting.remove(kind)
                    strikes.append(strike)
                    print(f"{time.strftime('%H:%M:%S')} {len(strikes):3} {kind}: {strike.what}", flush=True)
                    if strike.repair is not None:
                        repairs.append((time.monotonic() + strike.repair.seconds, strike.repair))
                    due = time.monotonic() + chance.expovariate(1 / every)
                    break
        time.sleep(0.1)
    fault_injection.resume_nodes()
    return strikes


def jobs_of(sweep: SweepDirectory) -> list[str]:
    """The sweep's jobs that are in the queue: name, state, and why they wait."""
    listed = fault_injection.slurm("squeue", "-h", "-r", "-o", "%j %T %r", patience=60.0).splitlines()
    return sorted(line for line in listed if line.startswith(f"{sweep.path.name}-"))


def wait_until_over(sweep: SweepDirectory, deadline: float) -> bool:
    """Returns once every run is done and no job is left; False at the deadline."""
    while time.monotonic() < deadline:
        if all(run.is_done() for run in sweep.runs()) and not jobs_of(sweep):
            return True
        fault_injection.resume_nodes()
        time.sleep(1.0)
    return False


def describe(sweep: SweepDirectory) -> str:
    unfinished = [run for run in sweep.runs() if not run.is_done()]
    states = [f"{run.run_id} is {run.state().state} ({run.state().reason})" for run in unfinished]
    return f"{'; '.join(states) or 'all runs are done'}; in the queue: {', '.join(jobs_of(sweep)) or 'nothing'}"


def launchers_ended(injector: fault_injection.Injector) -> list[str]:
    """Of launchers that were started beside the first: each must have ended with 0, or with one sentence."""
    complaints = []
    for launcher in injector.launchers:
        said, _ = launcher.communicate(timeout=120)
        full = launcher.returncode == 1 and os.strerror(errno.ENOSPC) in said  # it met that fault
        if not (launcher.returncode in (0, 2) or full) or "Traceback" in said:
            complaints.append(f"launcher {launcher.pid} ended with {launcher.returncode}: {said.strip()}")
    return complaints


def check(sweep: SweepDirectory, reference: SweepDirectory) -> list[str]:
    """What is wrong with a sweep that is over."""
    complaints = []
    known = {run.run_id: run for run in reference.runs()}
    if (mine := {run.run_id for run in sweep.runs()}) != known.keys():
        complaints.append(f"the plan has other runs than the undisturbed one: {sorted(mine ^ known.keys())}")
    for run in sweep.runs():
        complaints += [f"run {run.run_id}: {words}" for words in check_run(run, known[run.run_id])]
    if not (sweep.path / "fit" / "report.html").exists():
        complaints.append("there is no report")
    table = sweep.path / "table.csv"
    rows = len(table.read_text().splitlines()) - 1 if table.exists() else 0
    if rows != len(known):
        complaints.append(f"the table has {rows} rows, for {len(known)} runs")
    # What faults have left damaged beside whole results is for the doctor to mend; then nothing may be left.
    for finding in doctor.examine_sweep(sweep, mend=True):
        print(f"doctor: {finding}")
    complaints += [f"doctor: {finding}" for finding in doctor.examine_sweep(sweep, mend=False) if finding.is_left]
    return complaints


def check_run(run: RunDirectory, reference: RunDirectory) -> Iterator[str]:
    """What is wrong with a run, whose number of starts and order of steps must show one trainer at a time."""
    if not run.is_done():
        yield f"is {run.state().state}: {run.state().reason}"
        return
    mine, theirs = run.summary() or {}, reference.summary() or {}
    for name in EXACT:
        if mine[name] != theirs[name]:
            yield f"{name} is {mine[name]} and not {theirs[name]}"
    lines = attempts.read(run)
    numbers = [line.attempt for line in lines]
    if numbers != sorted(set(numbers)):
        yield f"its attempts are numbered {numbers}"
    if [line.cause for line in lines].count("done") != 1 or lines[-1].cause != "done":
        yield f"its attempts ended as {[line.cause for line in lines]}"
    for before, after in itertools.pairwise(lines):
        if after.began < before.ended:
            yield f"attempt {after.attempt} began {before.ended - after.began:.2f} s before the end of the one before"
    starts = len(re.findall(r" attempt \d+ on ", (run.path / "log.txt").read_text()))
    records = read_json_lines(run.path / "metrics.jsonl")
    steps = [record["step"] for record in records]
    back = sum(after <= before for before, after in itertools.pairwise(steps))
    if back >= max(starts, len(lines)):
        yield f"its steps go back {back} times in {starts} starts, so two trained it at once"
    curve: dict[int, tuple[float, float]] = {}
    expected = {
        record["step"]: (record["train_loss"], record["grad_norm"])
        for record in read_json_lines(reference.path / "metrics.jsonl")
    }
    for record in records:
        values = (record["train_loss"], record["grad_norm"])
        if curve.setdefault(record["step"], values) != values or expected[record["step"]] != values:
            yield f"step {record['step']} came to {values}, and to {expected[record['step']]} undisturbed"
            return
    if curve.keys() != expected.keys():
        yield f"steps {sorted(curve.keys() ^ expected.keys())} are in one metrics.jsonl alone"


def seconds_lost(sweep: SweepDirectory, strike: fault_injection.Strike) -> float:
    """Seconds from a fault until what it struck trains again, the longest of several runs; 0 where none was stopped."""
    lost = 0.0
    for name in strike.runs:
        lines = attempts.read(sweep.run(name))
        # A killed attempt ends with its last sign of life, which may be a second or so before the fault.
        struck = next((line for line in lines if line.began <= strike.at <= line.ended + 2.0), None)
        later = [line for line in lines if struck is not None and line.attempt > struck.attempt]
        # What stopped much later was stopped by another fault.
        if struck is not None and later and struck.ended - strike.at < 60.0:
            lost = max(lost, later[0].began - strike.at)
    return lost


@contextlib.contextmanager
def scratch(keep: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A folder for sweeps, and the same again where it is a file system that may be filled."""
    folder = Path(tempfile.mkdtemp(prefix="isoflop-faults-")) if keep is None else keep
    small = folder / "disk"
    small.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500m", "isoflop-faults", str(small)]
    mounted = small.is_mount() or not subprocess.run(mount, capture_output=True, check=False).returncode
    try:
        yield folder, small if mounted else None
    finally:
        if mounted and keep is None:
            subprocess.run(["umount", "--lazy", str(small)], check=False)
        if keep is None:
            subprocess.run(["rm", "-rf", str(folder)], check=False)


def print_table(outcome: Outcome) -> None:
    done = {run.run_id for run in outcome.sweep.runs() if run.is_done()}
    print(f"\n{'fault':30} injected recovered seconds lost: median   worst")
    for kind in sorted({strike.kind for strike in outcome.strikes}):
        of_kind = [strike for strike in outcome.strikes if strike.kind == kind]
        recovered = sum(set(strike.runs) <= done for strike in of_kind)
        lost = outcome.lost[kind]
        print(f"{kind:30} {len(of_kind):8} {recovered:9} {statistics.median(lost):20.1f} {max(lost):7.1f}")
    lines = [line for run in outcome.sweep.runs() for line in attempts.read(run)]
    useful = sum(line.flops - line.flops_wasted for line in lines)
    wasted = sum(line.flops_wasted for line in lines)
    print(
        f"{len(outcome.strikes)} faults, {len(lines)} attempts at {len(done)} runs in {outcome.seconds:.0f} s; "
        f"{wasted / (useful + wasted):.1%} of the work was done in vain"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where nothing was wrong, 1 where something was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50, help="to inject")
    parser.add_argument("--runs", type=int, default=24, help="of the grid")
    parser.add_argument("--seconds", type=float, default=8.0, help="that the shorter half of the runs take undisturbed")
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument(
        "--kind", action="append", choices=list(fault_injection.FAULTS), help="of fault, may be repeated; all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of times, places and kinds")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds until it counts as stuck")
    parser.add_argument("--keep", type=Path, help="folder for the sweeps, which then stay")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with scratch(given.keep) as (folder, disk):
        overrides = grid(given.runs, tokens_for(given.seconds, folder))
        reference = undisturbed(overrides, folder)
        outcome = disturb(
            overrides,
            reference,
            disk or folder,
            disk,
            given.faults,
            given.seed,
            given.patience,
            given.every,
            given.kind or (),
        )
        print_table(outcome)
        if (struck := len(outcome.strikes)) < given.faults:
            said = f"{struck} of {given.faults} faults could be injected before all was done; give more --seconds"
            outcome.complaints.append(said)
        for complaint in outcome.complaints:
            print(f"WRONG: {complaint}")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
