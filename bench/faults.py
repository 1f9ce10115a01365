"""Disturb a sweep on a SLURM cluster while it runs, and check that its results are those of an undisturbed sweep.

    tests/slurm_cluster.sh up; eval "$(tests/slurm_cluster.sh env)"
    python -m isoflop.bench.faults --faults 50 --seed 0

The grid is trained on this machine and on the cluster, where faults strike at random times and places. In the end every
run must be done, once, with the same losses to the last bit, and `isoflop doctor` must find nothing. Needs root and the
cluster of tests/slurm_cluster.sh, whose daemons it kills.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..sweeps.observe import doctor
from ..sweeps.runs.directory import RunDirectory, SweepDirectory
from ..train.files import read_json_lines
from . import fault_injection
from .fault_injection import Injector, Repair, Strike

ROOT = Path(__file__).resolve().parent.parent
EXACT = ("val_loss", "val_loss_se", "train_loss")
GRID = [
    "+grid=product", "model.width=16", "model.depth=2", "model.heads=2", "data.sequence_length=64",
    "data.max_bytes=2000000", "data.validation_tokens=16384", "optimizer.batch_size=8", "validations=2",
    "fit.bootstrap=50", "precision=fp32", "tracker=none", "evaluate=none", "parallel.device=cpu",
    "trunks=false", "checkpoint.every_seconds=1", "tuning=fixed", "preflight=false",
]  # fmt: skip
SLURM = [
    "cluster=slurm", "cluster.gpus_per_job=0", "cluster.cpus_per_task=1", "cluster.memory_gb=1",
    f"cluster.time_minutes={fault_injection.LONG_LIMIT}", "cluster.array_parallelism=2", "cluster.partition=low",
    "cluster.keeper_seconds=3", "cluster.heartbeat_seconds=1", "cluster.backoff_seconds=1", "cluster.hang_minutes=5",
    "cluster.retries=100", "cluster.sweep_retries=10000", "cluster.max_requeues=1000",
]  # fmt: skip


def grid(runs: int, tokens: int) -> list[str]:
    """Return the overrides of a grid of `runs` runs, half with `tokens` tokens and half with twice as many."""
    return [*GRID, f"grid.axes={{tokens: [{tokens}, {2 * tokens}], seed: {list(range(runs // 2))}}}"]


def tokens_for(seconds: float, root: Path) -> int:
    """Return how many tokens a run trains on in `seconds` alone on this machine, estimated from a short run."""
    trial = train_here([*GRID, "tokens=50_000", "grid.axes={seed: [0]}"], root, "trial")
    summary = trial.runs()[0].summary() or {}
    return 1000 * round(seconds * summary["D"] / summary["seconds"] / 1000)


def train_here(overrides: Sequence[str], root: Path, name: str = "undisturbed") -> SweepDirectory:
    """Train a grid on this machine and return its sweep. Raises SystemExit if it fails."""
    command = sweep_command(overrides, root, name, "cluster=local", "cluster.threads_per_job=1")
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the undisturbed grid failed:\n{done.stdout}{done.stderr}")
    return SweepDirectory.open(root / name)


def sweep_command(overrides: Sequence[str], root: Path, name: str, *more: str) -> list[str]:
    return [sys.executable, "sweep.py", *overrides, f"output_root={root}", f"sweep={name}", *more]


def disturb(
    overrides: Sequence[str], reference: SweepDirectory, root: Path, disk: Path | None, count: int, seed: int,
    patience: float, every: float, kinds: Sequence[str] = (),
) -> tuple[list[Strike], list[str], SweepDirectory]:  # fmt: skip
    """Submit the grid below `root`, inject `count` faults, about as many of each kind, and wait until it is over.

    `disk` is the file system of `root` if it may be filled, `patience` the seconds until an unfinished sweep counts as
    stuck, and `every` the mean seconds between two faults. Returns the faults, complaints, and the sweep.
    """
    command = sweep_command(overrides, root, f"disturbed-{seed}", *SLURM, *pace(reference))
    started = time.monotonic()
    fault_injection.resume_nodes()
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
    sweep = SweepDirectory.open(root / f"disturbed-{seed}")
    injector = Injector(sweep, command, random.Random(seed), disk)
    strikes = inject(injector, kinds or injector.kinds(), count, every, started + patience)
    complaints = []
    if not wait_until_over(sweep, started + patience):
        unfinished = [run for run in sweep.runs() if not run.is_done()]
        states = [f"{run.run_id} is {run.state().state} ({run.state().reason})" for run in unfinished]
        complaints.append(f"not over after {patience:.0f} s: {states}; in the queue: {jobs_of(sweep)}")
    return strikes, [*complaints, *launcher_complaints(injector), *check(sweep, reference)], sweep


def pace(reference: SweepDirectory) -> list[str]:
    """Return overrides that fit time estimates to this machine and make the longer half of the runs count as long."""
    summaries = [run.summary() or {} for run in reference.runs()]
    rate = statistics.median(summary["flops_exact"] / summary["seconds"] for summary in summaries)
    minutes = f"cluster.queue_minutes={statistics.median(summary['seconds'] for summary in summaries) / 60:.4g}"
    return [f"cluster.flops_per_second={rate * 2:.4g}", minutes]


def inject(injector: Injector, kinds: Sequence[str], count: int, every: float, deadline: float) -> list[Strike]:
    """Inject faults at random times, until there are `count` or the sweep is over; return them."""
    chance, strikes = injector.chance, list[Strike]()
    repairs: list[tuple[float, Repair]] = []
    rounds = [chance.sample(kinds, len(kinds)) for _ in range(-(-count // len(kinds)))]  # as many of each kind
    waiting = list(itertools.chain.from_iterable(rounds))[:count]
    due = time.monotonic() + chance.expovariate(1 / every)
    while waiting or repairs:
        now = time.monotonic()
        for item in [item for item in repairs if item[0] <= now or item[1].due() or not waiting]:
            repairs.remove(item)
            time.sleep(0.0 if waiting else max(0.0, item[0] - now))
            try:
                item[1].do()
            except fault_injection.Away:
                repairs.append((time.monotonic() + 1.0, item[1]))
            except fault_injection.Refused:
                pass  # such as for a job that has ended
        if now > deadline or (waiting and all(run.is_done() for run in injector.sweep.runs())):
            waiting.clear()
        for kind in dict.fromkeys(waiting) if now >= due else ():
            if (strike := injector.strike(kind)) is not None:
                waiting.remove(kind)
                strikes.append(strike)
                print(f"{time.strftime('%H:%M:%S')} {len(strikes):3} {kind}: {strike.text}", flush=True)
                if strike.repair is not None:
                    repairs.append((time.monotonic() + strike.repair.seconds, strike.repair))
                due = time.monotonic() + chance.expovariate(1 / every)
                break
        time.sleep(0.1)
    fault_injection.resume_nodes()
    return strikes


def jobs_of(sweep: SweepDirectory) -> list[str]:
    lines = fault_injection.slurm("squeue", "-h", "-r", "-o", "%j %T %r", patience=60.0).splitlines()
    return sorted(line for line in lines if line.startswith(f"{sweep.path.name}-"))


def wait_until_over(sweep: SweepDirectory, deadline: float) -> bool:
    """Wait until every run is done and no job is left. Returns False at the deadline."""
    while time.monotonic() < deadline:
        if all(run.is_done() for run in sweep.runs()) and not jobs_of(sweep):
            return True
        fault_injection.resume_nodes()
        time.sleep(1.0)
    return False


def launcher_complaints(injector: Injector) -> Iterator[str]:
    """Yield a complaint for every later launcher that crashed."""
    for launcher in injector.launchers:
        output, _ = launcher.communicate(timeout=120)
        disk_was_full = launcher.returncode == 1 and os.strerror(errno.ENOSPC) in output
        if not (launcher.returncode in (0, 2) or disk_was_full) or "Traceback" in output:
            yield f"launcher {launcher.pid} ended with {launcher.returncode}: {output.strip()}"


def check(sweep: SweepDirectory, reference: SweepDirectory) -> list[str]:
    """Return complaints about a sweep that is over: faults, and differences from the undisturbed `reference`."""
    complaints, expected = [], {run.run_id: run for run in reference.runs()}
    if (planned := {run.run_id for run in sweep.runs()}) != expected.keys():
        complaints.append(f"the plan has other runs than the undisturbed one: {sorted(planned ^ expected.keys())}")
    for run in sweep.runs():
        complaints += [f"run {run.run_id}: {text}" for text in check_run(run, expected[run.run_id])]
    if not (sweep.path / "fit" / "report.html").exists():
        complaints.append("there is no report")
    table = sweep.path / "table.csv"
    if (rows := len(table.read_text().splitlines()) - 1 if table.exists() else 0) != len(expected):
        complaints.append(f"the table has {rows} rows, for {len(expected)} runs")
    # The doctor repairs files that faults have damaged next to whole results; then nothing may be left.
    print(*(f"doctor: {finding}" for finding in doctor.examine_sweep(sweep, repair=True)), sep="\n")
    return complaints + [f"doctor: {item}" for item in doctor.examine_sweep(sweep, repair=False) if item.is_left]


def check_run(run: RunDirectory, reference: RunDirectory) -> Iterator[str]:
    """Yield complaints about a run: differences from `reference`, or signs that two trainers ran at once."""
    if not run.is_done():
        yield f"is {run.state().state}: {run.state().reason}"
        return
    summary, expected = run.summary() or {}, reference.summary() or {}
    for name in EXACT:
        if summary[name] != expected[name]:
            yield f"{name} is {summary[name]} and not {expected[name]}"
    lines = run.record().attempts
    if (attempt_numbers := [line.attempt for line in lines]) != sorted(set(attempt_numbers)):
        yield f"its attempts are numbered {attempt_numbers}"
    if [line.cause for line in lines].count("done") != 1 or lines[-1].cause != "done":
        yield f"its attempts ended as {[line.cause for line in lines]}"
    for before, after in itertools.pairwise(lines):
        if after.began < before.ended:
            yield f"attempt {after.attempt} began {before.ended - after.began:.2f} s before the end of the one before"
    starts = len(re.findall(r" attempt \d+ on ", (run.path / "log.txt").read_text()))
    steps, undisturbed = (
        [(line["step"], (line["train_loss"], line["grad_norm"])) for line in read_json_lines(path / "metrics.jsonl")]
        for path in (run.path, reference.path)
    )
    back = sum(after[0] <= before[0] for before, after in itertools.pairwise(steps))
    if back >= max(starts, len(lines)):
        yield f"its steps go back {back} times in {starts} starts, so two trained it at once"
    if wrong := {*steps} ^ {*undisturbed}:
        yield f"steps differ from the undisturbed ones: {sorted(wrong)[:2]}"


@contextlib.contextmanager
def scratch(keep: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """Yield a folder for sweeps, and in it a small file system that may be filled, or None if none can be mounted."""
    folder = keep or Path(tempfile.mkdtemp(prefix="isoflop-faults-"))
    small = folder / "disk"
    small.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500m", "isoflop-faults", str(small)]
    mounted = small.is_mount() or not subprocess.run(mount, capture_output=True, check=False).returncode
    try:
        yield folder, small if mounted else None
    finally:
        if keep is None:
            if mounted:
                subprocess.run(["umount", "--lazy", str(small)], check=False)
            subprocess.run(["rm", "-rf", str(folder)], check=False)


def main() -> int:
    """Run the check and return exit code 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50, help="number of faults")
    parser.add_argument("--runs", type=int, default=24, help="of the grid")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the shorter half of the runs, undisturbed")
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--kind", action="append", choices=[*fault_injection.FAULTS], help="repeatable; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of times, places and kinds")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds until the sweep counts as stuck")
    parser.add_argument("--keep", type=Path, help="folder for the sweeps, which then stay")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with scratch(options.keep) as (folder, disk):
        overrides = grid(options.runs, tokens_for(options.seconds, folder))
        place = (train_here(overrides, folder), disk or folder, disk, options.faults, options.seed)
        strikes, complaints, sweep = disturb(overrides, *place, options.patience, options.every, options.kind or ())
        for kind, count in Counter(strike.kind for strike in strikes).items():
            print(f"{kind:30} {count}")
        lines = [line for run in sweep.runs() for line in run.record().attempts]
        share = sum(line.flops_wasted for line in lines) / sum(line.flops for line in lines)
        print(f"{len(strikes)} faults, {len(lines)} attempts at {options.runs} runs, {share:.1%} of the work wasted")
        if len(strikes) < options.faults:
            complaints.append(f"{len(strikes)} of {options.faults} faults struck before the end; raise --seconds")
        print(*(f"WRONG: {complaint}" for complaint in complaints), sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
