"""What is submitted to a real SLURM: tests/slurm_cluster.sh brings up a cluster that has what is needed here.

That is at least four nodes, and an account `small` that may have 8 jobs in the queue.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from isoflop.sweeps.config import ClusterConfig, SweepConfig
from isoflop.sweeps.entry import compose
from isoflop.sweeps.execute import conduct
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.slurm import commands, snapshot
from isoflop.sweeps.slurm.jobs import jobs_of
from isoflop.sweeps.slurm.submit import Request, Submission
from slurm_sweeps import EVERY, ROOT, SMALL, Sweep, slurm, sweeps_in, until

pytestmark = pytest.mark.slurm


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    with sweeps_in(tmp_path / "outputs") as make:
        yield make


def test_a_job_has_its_cpus_the_sweeps_code_and_hugging_faces_evaluate(tmp_path: Path) -> None:
    script, answer, sweep = tmp_path / "script.py", tmp_path / "answer.json", SweepDirectory(tmp_path / "sweep")
    script.write_text(
        "import json, os, sys, evaluate, isoflop.evaluate.tasks.tasks as ours\n"
        "answer = [evaluate.__file__, hasattr(evaluate, 'load'), ours.__file__, sys.path[0] or os.getcwd()]\n"
        "answer += [os.environ[name] for name in ('OMP_NUM_THREADS', 'SLURM_STEP_ID', 'SLURM_CPUS_ON_NODE')]\n"
        f"open({str(answer)!r}, 'w').write(json.dumps(answer))\n"
    )
    code, folder = snapshot.take(sweep), sweep.path.resolve() / "jobs" / "slurm-0"
    # It is launched from the root of the code, where a folder `evaluate` lies.
    jobs = Submission("grid", ClusterConfig(kind="slurm"), folder, ROOT, code)
    request = Request("worker", JobShape(0, 2, 1.0, 5), "isoflop:0:worker:")
    (job,) = jobs.submit(request, partial(runpy.run_path, str(script)))
    until(lambda: job not in {queued.name for queued in commands.queue()}, "an end of the job")
    file, has_load, ours, first, threads, *step = json.loads(answer.read_text())
    assert has_load
    assert "site-packages" in file
    assert Path(ours) == code / "isoflop" / "evaluate" / "tasks" / "tasks.py"
    assert Path(first) == folder
    assert threads == "2"
    assert step == ["0", "2"], "the CPUs that the job asked for are its task's"


def test_a_sweep_in_a_folder_of_any_signs_that_are_not_refused_is_done(sweep: Callable[..., Sweep]) -> None:
    signs = "".join(sign for sign in map(chr, range(32, 127)) if not sign.isalnum() and sign not in "/%:\\")
    odd = sweep("odd")
    odd.output_root = odd.output_root / f"{signs} éü日😀"
    odd.path = odd.output_root / odd.name
    odd.output_root.mkdir(parents=True)
    asked = ("+grid=smoke", "grid.tokens=[16384]", "fit.bootstrap=50", "preflight=true")
    printed = conduct.conduct(configured(odd.name, odd.output_root, *asked), ["test"])
    assert printed == 0
    odd.wait()
    assert odd.states() == ["done"] * 2, odd.job_logs()
    assert (odd.path / "fit" / "report.html").exists(), odd.job_logs()
    nodes = json.loads((odd.path / "preflight.json").read_text())["nodes"]
    assert {name.rstrip("1234") for name in nodes} == {"node"}
    for node in nodes.values():
        assert {finding["outcome"] for finding in node["findings"] + node["of_kind"]} == {"passed"}
    assert {path.name for path in odd.output_root.parent.iterdir()} == {odd.output_root.name}


def configured(name: str, output_root: Path, *overrides: str) -> SweepConfig:
    config = compose([*SMALL, "cluster=slurm", *overrides])
    config.sweep, config.output_root = name, str(output_root)
    return config


def launched(directory: SweepDirectory) -> int:
    """A process of this one's kind, which has imported everything, and launches what the sweep wants."""
    if (child := os.fork()) > 0:
        return child
    try:
        conduct.resume(directory)
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_launchers_that_are_killed_at_random_times_submit_no_worker_twice(sweep: Callable[..., Sweep]) -> None:
    """What they submit the user wants on hold, so that it can be counted."""
    shot, rolls, killed, usual = sweep("shot"), random.Random(6), 0, 0.0
    shot.submit("+grid=smoke", "cluster.additional_parameters={hold: true}")
    directory = SweepDirectory(shot.path)
    for _ in range(30):  # a launcher may end before it is killed
        if killed == 4:
            break
        slurm("scancel", *shot.queue(EVERY))
        until(lambda: not shot.queue(EVERY), "an empty queue")
        if usual:
            process = launched(directory)
            time.sleep(usual * rolls.random())
            os.kill(process, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(process, 0)[1])
        begun = time.monotonic()
        assert os.waitpid(launched(directory), 0)[1] == 0
        usual = usual or time.monotonic() - begun
        assert (len(shot.queue("worker")), len(shot.queue("keeper")), len(shot.queue(EVERY))) == (2, 2, 4)
        assert {job.name for job in jobs_of(directory)} == set(shot.queue(EVERY))
    assert killed == 4


def test_an_account_with_room_for_few_jobs_gets_all_done(sweep: Callable[..., Sweep]) -> None:
    few = sweep("few")
    # Two of the eight that the account may have are somebody else's.
    for _ in range(2):
        slurm(
            "sbatch", "--hold", "--account=small", f"--job-name={few.name}-other", "--output=/dev/null", "--wrap=true"
        )
    few.submit("cluster.account=small", "cluster.keeper_seconds=1", "+grid=smoke", "fit.bootstrap=50")
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, len(few.queue(f"{EVERY},other")))
        return not few.queue(EVERY)

    until(over, "no job of the sweep")
    assert few.states() == ["done"] * 4, few.job_logs()
    assert most <= 8
    assert [len(run.record().attempts) for run in few.runs().values()] == [1] * 4
    slurm("scancel", *few.queue("other"))
    assert (few.path / "fit" / "report.html").exists()
