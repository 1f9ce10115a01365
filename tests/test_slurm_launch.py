"""What is submitted to a real SLURM: tests/slurm_cluster.sh brings up a cluster that has what is needed here.

That is at least four nodes, and an account `small` that may have 8 jobs in the queue.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from isoflop.sweeps import slurm as commands
from isoflop.sweeps import snapshot
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.launch_record import LaunchRecord, labelled_jobs
from isoflop.sweeps.plan import JobShape
from isoflop.sweeps.runs import SweepDirectory
from isoflop.sweeps.submission import Call, Request, Submission, release
from slurm_sweeps import ROOT, SMALL, Sweep, slurm, sweeps_in, until

pytestmark = pytest.mark.slurm


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    with sweeps_in(tmp_path / "outputs") as make:
        yield make


def test_a_job_has_its_cpus_the_sweeps_code_and_hugging_faces_evaluate(tmp_path: Path) -> None:
    script, answer, sweep = tmp_path / "script.py", tmp_path / "answer.json", SweepDirectory(tmp_path / "sweep")
    script.write_text(
        "import json, os, sys, evaluate, isoflop.evaluate.tasks as ours\n"
        "threads = os.environ['OMP_NUM_THREADS']\n"
        "answer = [evaluate.__file__, hasattr(evaluate, 'load'), ours.__file__, sys.path[0] or os.getcwd(), threads]\n"
        f"open({str(answer)!r}, 'w').write(json.dumps(answer))\n"
    )
    code, folder = snapshot.take(sweep), sweep.path.resolve() / "jobs" / "slurm-0"
    # It is launched from the root of the code, where a folder `evaluate` lies.
    jobs = Submission("grid", "isoflop:0:0", ClusterConfig(kind="slurm"), folder, ROOT, code)
    (job,) = jobs.submit(Request("train", JobShape(0, 2, 1.0, 5)), [Call(runpy.run_path, (str(script),))])
    assert slurm("squeue", "-h", "-j", job, "-o", "%T %r").split() == ["PENDING", "JobHeldUser"]
    release([job])
    until(lambda: job not in commands.live_jobs(), "an end of the job")
    file, has_load, ours, first, threads = json.loads(answer.read_text())
    assert has_load
    assert "site-packages" in file
    assert Path(ours) == code / "isoflop" / "evaluate" / "tasks.py"
    assert Path(first) == folder
    assert threads == "2"
    steps = dict(
        line.split("|") for line in slurm("sacct", "-n", "-P", "-j", job, "-o", "JobID,AllocCPUS").splitlines()
    )
    assert steps[f"{job}.0"] == "2", "the CPUs that the job asked for are its task's"


def test_launchers_that_are_killed_at_random_times_submit_every_run_once(sweep: Callable[..., Sweep]) -> None:
    """What they submit the user wants on hold, so that it can be counted."""
    shot, rolls, killed = sweep("shot"), random.Random(6), 0
    overrides = [*SMALL, "+grid=smoke", "cluster=slurm", "cluster.additional_parameters={hold: true}"]
    overrides += [f"sweep={shot.name}", f"output_root={shot.output_root}"]
    begun = time.monotonic()
    shot.submit("+grid=smoke", "cluster.additional_parameters={hold: true}")
    usual = time.monotonic() - begun
    for _ in range(5):
        slurm("scancel", *shot.queue("train,queue,evaluate,fit,keeper"))
        until(lambda: not shot.queue("train,queue,evaluate,fit,keeper"), "an empty queue")
        process = subprocess.Popen(
            [sys.executable, "sweep.py", *overrides], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(usual * rolls.uniform(0.3, 1.0))
        process.kill()
        killed += process.wait() != 0
        shot.submit("+grid=smoke", "cluster.additional_parameters={hold: true}")
        directory = SweepDirectory(shot.path)
        record = LaunchRecord.read(directory)
        assert labelled_jobs(directory).keys() == record.jobs() & commands.live_jobs()
        assert len(shot.queue("train")) == len({record.training[name] for name in shot.runs()}) == 4
        assert (len(shot.queue("fit")), len(shot.queue("keeper"))) == (1, 2)
    assert killed >= 2


def test_an_account_with_room_for_few_jobs_never_refuses_one_and_gets_all_done(sweep: Callable[..., Sweep]) -> None:
    few = sweep("few")
    settings = ["cluster.account=small", "cluster.keeper_seconds=2", "grid.seeds=[0, 1]", "+grid=smoke"]
    printed = few.submit(*settings)
    assert "wait until the queue takes more jobs" in printed
    most = 0

    def over() -> bool:
        nonlocal most
        jobs = few.queue("train,queue,evaluate,fit,keeper")
        most = max(most, len(jobs))
        return not jobs

    until(over, "an empty queue")
    assert few.states() == ["done"] * 8, few.job_logs()
    assert most <= 8
    attempts = [len((run.path / "attempts.jsonl").read_text().splitlines()) for run in few.runs().values()]
    assert attempts == [1] * 8
    assert (few.path / "fit" / "report.html").exists()
