"""Jobs that are submitted to a real SLURM, for example the cluster of tests/slurm_cluster.sh.

The cluster needs at least four nodes, and an account `small` that may have 8 jobs in the queue.
"""

from __future__ import annotations

import json
import runpy
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
    # Launched from the root of the code, which has a folder `evaluate`.
    jobs = Submission("grid", ClusterConfig(kind="slurm"), folder, ROOT, code)
    request = Request("worker", JobShape(0, 2, 1.0, 5), "isoflop:0:worker:")
    (job,) = jobs.submit(request, partial(runpy.run_path, str(script)))
    until(lambda: job not in {queued.name for queued in commands.queue()}, "an end of the job")
    evaluate_file, has_load, tasks_file, first_path, threads, *step = json.loads(answer.read_text())
    assert has_load
    assert "site-packages" in evaluate_file
    assert Path(tasks_file) == code / "isoflop" / "evaluate" / "tasks" / "tasks.py"
    assert Path(first_path) == folder
    assert threads == "2"
    assert step == ["0", "2"], "the CPUs that the job asked for are its task's"


def test_a_sweep_in_a_folder_of_any_signs_that_are_not_refused_is_done(sweep: Callable[..., Sweep]) -> None:
    characters = "".join(
        character for character in map(chr, range(32, 127)) if not character.isalnum() and character not in "/%:\\"
    )
    odd_sweep = sweep("odd")
    odd_sweep.output_root = odd_sweep.output_root / f"{characters} éü日😀"
    odd_sweep.path = odd_sweep.output_root / odd_sweep.name
    odd_sweep.output_root.mkdir(parents=True)
    overrides = ("+grid=smoke", "grid.tokens=[16384]", "fit.bootstrap=50", "preflight=true")
    code = conduct.conduct(configured(odd_sweep.name, odd_sweep.output_root, *overrides), ["test"])
    assert code == 0
    odd_sweep.wait()
    assert odd_sweep.states() == ["done"] * 2, odd_sweep.job_logs()
    assert (odd_sweep.path / "fit" / "report.html").exists(), odd_sweep.job_logs()
    nodes = json.loads((odd_sweep.path / "preflight.json").read_text())["nodes"]
    assert {name.rstrip("1234") for name in nodes} == {"node"}
    for node in nodes.values():
        assert {finding["outcome"] for finding in node["findings"] + node["of_kind"]} == {"passed"}
    assert {path.name for path in odd_sweep.output_root.parent.iterdir()} == {odd_sweep.output_root.name}


def configured(name: str, output_root: Path, *overrides: str) -> SweepConfig:
    config = compose([*SMALL, "cluster=slurm", *overrides])
    config.sweep, config.output_root = name, str(output_root)
    return config


def test_an_account_with_room_for_few_jobs_gets_all_done(sweep: Callable[..., Sweep]) -> None:
    limited_sweep = sweep("few")
    # Two of the eight jobs that the account may have are not of this sweep.
    for _ in range(2):
        options = ("--hold", "--account=small", f"--job-name={limited_sweep.name}-other", "--output=/dev/null")
        slurm("sbatch", *options, "--wrap=true")
    limited_sweep.submit("cluster.account=small", "cluster.keeper_seconds=1", "+grid=smoke", "fit.bootstrap=50")
    largest_queue = 0

    def is_over() -> bool:
        nonlocal largest_queue
        largest_queue = max(largest_queue, len(limited_sweep.queue(f"{EVERY},other")))
        return not limited_sweep.queue(EVERY)

    until(is_over, "no job of the sweep")
    assert limited_sweep.states() == ["done"] * 4, limited_sweep.job_logs()
    assert largest_queue <= 8
    assert [len(run.record().attempts) for run in limited_sweep.runs().values()] == [1] * 4
    slurm("scancel", *limited_sweep.queue("other"))
    assert (limited_sweep.path / "fit" / "report.html").exists()
