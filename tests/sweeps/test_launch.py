"""Jobs that are submitted to SLURM, and handling of its answers; stand-ins for its commands keep a queue."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_sweep import planned_run
from isoflop.sweeps.config import ClusterConfig, SweepConfig
from isoflop.sweeps.execute import controller, slurm
from isoflop.sweeps.execute.slurm import FITS, SlurmBackend
from isoflop.sweeps.execute.worker import Claims
from isoflop.sweeps.grid.product import ProductGrid
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.runs.membership import stop_growth
from isoflop.sweeps.slurm import snapshot, submit
from isoflop.sweeps.slurm.jobs import jobs_of, label_of, shape_of, submitted_workers
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from small_runs import Patch, end, set_state
from standin_slurm import StandIn

SHAPE, TWO_RANKS = JobShape(0, 1, 1.0, 60), JobShape(0, 1, 1.0, 60, ranks_per_node=2)


class Launch:
    """A SLURM sweep made of runs with a name and minutes."""

    def __init__(self, path: Path, runs: dict[str, float], shapes: dict[str, JobShape], **changes: Any) -> None:
        self.sweep = SweepDirectory(path)
        self.settings = {"queue_minutes": 10, "memory_gb": 4.0, "time_minutes": 60, "backoff_seconds": 0.0} | changes
        planned = [
            planned_run(name, shape=asdict(shapes.get(name, SHAPE)), estimated_seconds=60 * minutes)
            for name, minutes in runs.items()
        ]
        write_json(path / "plan.json", {"runs": planned})
        for run in self.runs():
            run.path.mkdir(parents=True)
            set_state(run, "planned")
        self.configure(**self.settings)

    def configure(self, **settings: Any) -> None:
        config = SweepConfig(grid=ProductGrid(axes={"seed": [0]}), cluster=ClusterConfig(kind="slurm", **settings))
        (self.sweep.path / "sweep.yaml").write_text(yaml.safe_dump({"config": asdict(config)}))
        self.cluster = config.cluster

    def runs(self) -> list[RunDirectory]:
        return self.sweep.runs()

    def backend(self) -> SlurmBackend:
        return SlurmBackend(self.sweep, self.cluster)

    def run_pass(self) -> bool:
        """Run a pass. Returns True if the sweep is over."""
        return bool(slurm.run_pass(self.sweep).memory["over"])

    def states(self) -> Counter[str]:
        return Counter(run.state().state for run in self.runs())

    def finish(self) -> None:
        for run in self.runs():
            write_json(run.path / "summary.json", {})
            set_state(run, "done")


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: Patch) -> StandIn:
    standin = StandIn(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{standin.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(snapshot, "take", lambda sweep: tmp_path / "code")
    return standin


Make = Callable[..., Launch]


@pytest.fixture
def make(tmp_path: Path, queue: StandIn) -> Make:
    def made(runs: dict[str, float], shapes: dict[str, JobShape] | None = None, **settings: Any) -> Launch:
        return Launch(tmp_path / "outputs" / "grid", runs, shapes or {}, **settings)

    return made


def calls(launched: Launch, job: str) -> list[partial[None]]:
    """Return the calls of a job or of the tasks of an array."""
    pickles = sorted(launched.sweep.path.glob(f"jobs/*/{job}*_submitted.pkl"))
    return [pickle.loads(path.read_bytes()).function for path in pickles]


def test_runs_of_a_shape_have_workers_and_nothing_is_submitted_twice(make: Make, queue: StandIn) -> None:
    runs = {f"long{i}": 30.0 for i in range(3)} | {f"short{i}": 4.0 for i in range(7)} | {"ranks": 1.0}
    sweep = make(runs, {"ranks": TWO_RANKS}, array_parallelism=6)
    assert not sweep.run_pass()
    single_rank, two_ranks = queue.of_kind("worker")
    assert (queue.tasks(single_rank), queue.tasks(two_ranks)) == (5, 1), (
        "three of long runs, two of 28 minutes, room for six"
    )
    assert queue.flags(single_rank)["array"] == "0-4%5"
    assert (queue.flags(two_ranks)["ntasks-per-node"], "array" in queue.flags(two_ranks)) == ("2", False)
    assert {call.func for call in calls(sweep, single_rank)} == {slurm.work}
    assert {call.args[0].shape for call in calls(sweep, single_rank)} == {SHAPE}
    assert not {"dependency", "hold"} & (queue.flags(single_rank).keys() | queue.flags(two_ranks).keys())
    assert sweep.states() == {"queued": 11}
    before = queue.queue()
    for _ in range(3):
        sweep.run_pass()
    assert queue.queue() == before
    queue.end(f"{single_rank}_0", f"{single_rank}_1")
    sweep.run_pass()
    assert len(queue.queue()) == len(before), "two new ones replace the two that ended"


def test_a_limit_is_never_passed_though_others_have_jobs_there(make: Make, queue: StandIn) -> None:
    queue.say("queue", "1 other\n2 other\n")
    sweep = make({f"run{i}": 60.0 for i in range(9)}, max_submit=8)
    sweep.run_pass()
    assert (len(queue.queue()), len(queue.of_kind("keeper"))) == (7, 2), "one place is left for the fit"
    sweep.configure(**sweep.settings | {"max_submit": 4})
    with pytest.raises(UserError, match=r"4 jobs may be in the queue at once.*it must be 5 or more"):
        sweep.run_pass()


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_that_only_sbatch_knows_leaves_the_rest_to_the_keeper(make: Make, queue: StandIn, limit: int) -> None:
    queue.say("limit", str(limit))
    sweep = make({"run0": 40.0, "run1": 30.0})
    if limit < 2:
        with pytest.raises(UserError, match="SLURM accepts no more jobs"):
            sweep.run_pass()
        return
    assert not sweep.run_pass()
    assert len(queue.of_kind("keeper")) == 2
    queue.say("limit", "99")
    sweep.run_pass()
    assert sum(map(queue.tasks, queue.of_kind("worker"))) == 2


def test_a_refusal_is_reported_in_slurms_words_and_the_next_pass_continues(make: Make, queue: StandIn) -> None:
    sweep = make({"run0": 40.0})
    queue.say("refuse-worker", "sbatch: error: invalid account or account/partition combination specified\n")
    with pytest.raises(UserError, match=r"SLURM refused the worker job .*invalid account or account/partition"):
        sweep.run_pass()
    assert sweep.states() == {"planned": 1}
    (queue.folder / "refuse-worker").unlink()
    sweep.run_pass()
    assert len(queue.of_kind("worker")) == 1


def test_an_answer_that_was_lost_may_make_a_worker_too_many(make: Make, queue: StandIn, monkeypatch: Patch) -> None:
    monkeypatch.setattr(submit, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic))
    sweep = make({"run": 40.0})
    queue.say("lose", "")
    sweep.run_pass()
    assert sorted(job.kind for job in jobs_of(sweep.sweep)) == ["keeper"] * 3 + ["worker"]
    before = queue.queue()
    sweep.run_pass()
    assert queue.queue() == before


def test_a_launcher_may_be_killed_at_every_step_that_it_has(make: Make, queue: StandIn, monkeypatch: Patch) -> None:
    sweep = make({"run0": 40.0, "run1": 40.0, "short": 1.0}, {"short": TWO_RANKS})

    def killed_at(step: int) -> bool:
        """Run a pass in a process that exits before its step number `step`. Returns False if it has fewer steps."""
        if (child := os.fork()) > 0:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        steps_left = [step]
        for owner, name in (
            (submit.Submission, "submit"), (RunDirectory, "write_event"), (slurm, "write_json"),
            (SlurmBackend, "jobs"), (SlurmBackend, "limits"),
        ):  # fmt: skip
            function = getattr(owner, name)

            def exit_or_call(*arguments: Any, _function: Any = function, **options: Any) -> Any:
                steps_left[0] -= 1
                if steps_left[0] < 0:
                    os._exit(9)
                return _function(*arguments, **options)

            monkeypatch.setattr(owner, name, exit_or_call)
        sweep.run_pass()
        os._exit(0)

    step = 0
    while killed_at(step):
        sweep.run_pass()
        workers = {job: queue.tasks(job) for job in queue.of_kind("worker")}
        assert sorted(workers.values()) in ([1, 2], [1, 1, 1]), step
        assert (len(queue.of_kind("keeper")), sweep.states()) == (2, {"queued": 3}), step
        queue.say("ended", "".join(f"{job}|CANCELLED|None\n" for job in submitted_workers(sweep.sweep)))
        queue.end(*queue.queue())
        for run in sweep.runs():
            set_state(run, "planned")
        step += 1
    assert step > 8


def test_keepers_come_one_by_one_and_ask_for_little(make: Make, queue: StandIn, monkeypatch: Patch) -> None:
    sweep = make(
        {"run": 40.0}, {"run": JobShape(1, 4, 8.0, 60)}, gpus_per_job=1, keeper_seconds=60, partition="gpu",
        keeper_partition="cpu", constraint="h100", additional_parameters={"exclusive": True, "reservation": "scaling"},
    )  # fmt: skip
    sweep.run_pass()
    first, second = queue.of_kind("keeper")
    expected = {"begin": "now+60", "cpus-per-task": "1", "mem": "2048M", "time": "30", "partition": "cpu"}
    assert queue.flags(first).items() >= {**expected, "reservation": "scaling"}.items()
    assert not {"gpus-per-node", "constraint", "exclusive", "dependency"} & queue.flags(first).keys()
    assert queue.flags(second)["begin"] == "now+120"
    (call,) = calls(sweep, first)
    assert (call.func, call.args) == (slurm.keep, (str(sweep.sweep.path.resolve()),))
    training = queue.flags(queue.of_kind("worker")[0])
    assert training.items() >= {"partition": "gpu", "constraint": "h100", "exclusive": ""}.items()

    # In a running first keeper: another is submitted after the second.
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": first}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    queue.say("running", first + "\n")
    queue.say("clock", "2030-12-31T23:59:00\n")  # the controller's, which this node's need not be
    sweep.run_pass()
    *_, third = queue.of_kind("keeper")
    assert queue.flags(third)["begin"] == "2031-01-01T00:01:00"
    sweep.backend().cancel_all()
    assert queue.queue() == [first], "the job that cancels stays"


def test_workers_that_die_before_they_claim_end_with_the_budget(make: Make, queue: StandIn) -> None:
    sweep = make({"run": 40.0}, retries=2)
    for starts in (1, 2, 3):
        sweep.run_pass()
        (job,) = queue.of_kind("worker")
        queue.end(job)
        queue.say("ended", f"{job}|FAILED|node3\n")
        (run,) = sweep.runs()
        assert len(run.record().attempts) == starts - 1
    sweep.run_pass()
    assert (queue.of_kind("worker"), sweep.states()) == ([], {"failed": 1})
    reason = str(run.state().reason)
    assert "SLURM reports FAILED; it left no log in" in reason
    assert "which all nodes must share" in reason
    # Workers that were cancelled, found no task, or had claimed a task do not reduce the budget of a run.
    sweep = make({"other": 40.0})
    sweep.run_pass()
    (job,) = queue.of_kind("worker")
    queue.end(job)
    queue.say("ended", f"{job}|CANCELLED|None\n")
    sweep.run_pass()
    (idle,) = queue.of_kind("worker")
    queue.end(idle)
    queue.say("ended", f"{idle}|COMPLETED|node3\n")
    sweep.run_pass()
    (second,) = queue.of_kind("worker")
    (folder,) = {path.parent for path in sweep.sweep.path.glob(f"jobs/*/{second}_submitted.pkl")}
    Claims(folder, second).path.write_text('{"task": "train", "run": "other"}\n')
    queue.end(second)
    queue.say("ended", f"{second}|FAILED|node3\n")
    sweep.run_pass()
    assert sweep.runs()[0].record().attempts == ()


def test_the_laws_are_fitted_after_the_last_result_a_few_times_at_most(make: Make, queue: StandIn) -> None:
    sweep = make({"run": 40.0})
    sweep.finish()
    queue.say("limit", "2")
    assert not sweep.run_pass(), "the fit has no place yet"
    queue.say("limit", "99")
    for _ in range(FITS):
        assert not sweep.run_pass()
        (fit,) = queue.of_kind("fit")
        assert not sweep.run_pass(), "the fit is in the queue"
        assert queue.of_kind("fit") == [fit]
        queue.end(fit)
    assert len(queue.of_kind("keeper")) == 2
    assert sweep.run_pass(), "all fits failed, so the sweep is over"
    assert queue.queue() == [], "keepers are cancelled"
    newer = max(file.stat().st_mtime for file in sweep.sweep.path.glob("runs/*/summary.json")) + 1
    (sweep.sweep.path / "fit").mkdir()
    for file in (sweep.sweep.path / "table.csv", sweep.sweep.path / "fit" / "law.json"):
        file.write_text("")
        os.utime(file, (newer, newer))
    assert sweep.run_pass()
    os.utime(sweep.runs()[0].path / "summary.json", (newer + 1, newer + 1))
    assert not sweep.run_pass(), "a result is newer than the table"


def test_a_job_that_could_not_be_launched_is_released_and_a_held_one_is_not_counted(make: Make, queue: StandIn) -> None:
    sweep = make({"run": 40.0})
    sweep.run_pass()
    (job,) = queue.of_kind("worker")
    queue.say("reasons", f"{job} launch failed requeued held\n")
    sweep.run_pass()
    assert (queue.released(), queue.of_kind("worker")) == ({job}, [job])
    queue.say("reasons", f"{job} JobHeldUser\n")
    sweep.run_pass()
    assert len(queue.of_kind("worker")) == 2


def test_jobs_of_an_earlier_version_in_the_queue_are_refused(make: Make, queue: StandIn) -> None:
    sweep = make({"run": 40.0})
    (sweep.sweep.path / "jobs").mkdir()
    (sweep.sweep.path / "jobs" / "label").write_text("0123\n")
    queue.say("queue", "7_0 isoflop:0123:abcd\n")
    with pytest.raises(UserError, match=r"1 queued job of .* came from an earlier version: 7_0"):
        sweep.run_pass()
    queue.end("7")
    sweep.run_pass()
    assert len(queue.of_kind("worker")) == 1


def test_nodes_to_avoid_are_excluded_unless_too_few_others_are_up(make: Make, queue: StandIn) -> None:
    sweep = make({"run": 40.0}, exclude="b")
    queue.say("nodes", "a b c")
    end(sweep.runs()[0], "node", host="a")
    sweep.run_pass()
    assert queue.flags(queue.of_kind("worker")[0])["exclude"] == "b,a"
    queue.end(*queue.of_kind("worker"))
    end(sweep.runs()[0], "node", host="c")
    sweep.run_pass()
    assert queue.flags(queue.of_kind("worker")[0])["exclude"] == "b"


def test_a_job_runs_the_sweeps_copy_of_the_code(make: Make, queue: StandIn, tmp_path: Path) -> None:
    sweep = make({"run": 40.0}, setup=["module load cuda"], python="apptainer exec image.sif python")
    sweep.run_pass()
    (worker,) = queue.of_kind("worker")
    script = queue.script(worker)
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    (folder,) = sweep.sweep.path.glob("jobs/worker-*")
    assert lines[:4] == ["export OMP_NUM_THREADS=1", "module load cuda", f"cd {folder.resolve()}", submit.STALE]
    # A job that this one submits has its environment.
    twice = ["bash", "-c", f"{lines[4]}\n{lines[4]}\necho $PYTHONPATH"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "/other"}
    shown = subprocess.run(twice, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == f"{tmp_path / 'code'}:/other"
    assert " apptainer exec image.sif python -u -m submitit.core._submit " in script
    assert queue.flags(worker)["chdir"] == os.getcwd()
    assert "apptainer" not in queue.script(queue.of_kind("keeper")[0]), (
        "the keeper calls sbatch, so it runs outside of the container"
    )


@pytest.mark.parametrize(
    ("job", "removed"),
    [({"SLURM_JOB_ID": "7"}, {"7_0", "7_1"}),
     ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}, {"8_1_0"})],
)  # fmt: skip
def test_a_job_removes_half_a_result_of_its_last_start(tmp_path: Path, job: dict[str, str], removed: set[str]) -> None:
    """Check the removal, without which submitit fails a job whose function has succeeded."""
    names = {"7_0", "7_1", "77_0", "8_1_0", "8_10_0", "9_0"}
    for name in names:
        (tmp_path / f"{name}_result.pkl.save_tmp").touch()
    subprocess.run(["sh", "-c", submit.STALE], cwd=tmp_path, env=job | {"PATH": os.environ["PATH"]}, check=True)
    assert {path.name.removesuffix("_result.pkl.save_tmp") for path in tmp_path.iterdir()} == names - removed


def test_a_container_is_srun_s_and_sees_the_sweep(make: Make, queue: StandIn) -> None:
    sweep = make({"run": 40.0}, container="/images/torch.sqsh")
    sweep.run_pass()
    (line,) = [line for line in queue.script(queue.of_kind("worker")[0]).splitlines() if line[:5] == "srun "]
    assert "--container-image=/images/torch.sqsh" in line
    mounts = line.split("--container-mounts=")[1].split()[0].split(",")
    assert f"{sweep.sweep.path.resolve()}:{sweep.sweep.path.resolve()}" in mounts
    assert " python3 -u " in line
    assert "--container" not in queue.script(queue.of_kind("keeper")[0])


def test_raw_keys_are_merged_or_refused_by_name(make: Make, queue: StandIn) -> None:
    raw = {"comment": "grant 7", "exclude": "c", "wckey": "mine", "exclusive": False, "hold": True}
    sweep = make({"run": 40.0}, exclude="b", additional_parameters=raw)
    sweep.run_pass()
    flags = queue.flags(queue.of_kind("worker")[0])
    assert flags["comment"].startswith("isoflop:")
    assert flags["comment"].endswith(" grant 7")
    assert (flags["exclude"], flags["wckey"], "exclusive" in flags, "hold" in flags) == ("b,c", "mine", False, True)
    sweep.run_pass()
    assert len(queue.of_kind("worker")) == 1, "a worker that the user holds counts"
    sweep.configure(**sweep.settings | {"additional_parameters": {"cpus_per_task": 3}})
    queue.end(*queue.queue())
    with pytest.raises(UserError, match=r"has cpus-per-task, which cluster\.cpus_per_task sets"):
        sweep.run_pass()


@pytest.mark.parametrize("shape", [SHAPE, TWO_RANKS, JobShape(8, 12, 93.75, 2880, nodes=4, ranks_per_node=8)])
def test_a_shape_is_read_from_the_comment_of_a_job(shape: JobShape) -> None:
    assert shape_of(label_of(shape)) == shape
    assert shape_of("keeper") is None


# The keeper


def recorded_pauses(monkeypatch: Patch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(slurm, "time", SimpleNamespace(**vars(time) | {"sleep": pauses.append}))
    return pauses


def test_a_keeper_makes_one_pass_and_goes_while_another_waits(make: Make, queue: StandIn, monkeypatch: Patch) -> None:
    sweep, pauses = make({"run": 40.0}), recorded_pauses(monkeypatch)
    slurm.keep(str(sweep.sweep.path))
    assert (len(queue.of_kind("keeper")), len(queue.of_kind("worker")), pauses) == (2, 1, [])
    queue.end(*queue.queue())
    stop_growth(sweep.sweep, "ann")
    slurm.run_pass(sweep.sweep)
    assert queue.queue() == [], "a pass of a cancelled sweep starts no job"


def test_a_failed_pass_is_repeated_by_the_same_keeper(make: Make, queue: StandIn, monkeypatch: Patch) -> None:
    """Check that a full disk does not end both keepers within a minute, which would leave the sweep unattended."""
    sweep, pauses = make({"run": 40.0}, keeper_seconds=7), recorded_pauses(monkeypatch)
    failures: list[Exception] = [OSError(errno.ENOSPC, "No space left on device"), UserError("SLURM refuses")]
    reconcile = controller.reconcile

    def fail_first(*arguments: Any) -> bool:
        if failures:
            raise failures.pop()
        return reconcile(*arguments)

    monkeypatch.setattr(controller, "reconcile", fail_first)
    slurm.keep(str(sweep.sweep.path))
    assert (pauses, len(queue.of_kind("worker"))) == ([7, 7], 1)


def test_a_keeper_waits_while_another_process_holds_the_sweep(make: Make, queue: StandIn, monkeypatch: Patch) -> None:
    sweep = make({"run": 40.0})
    monkeypatch.setattr(slurm, "LOCK_SECONDS", 0.0)
    lock = sweep.sweep.lock()
    lock.__enter__()

    def pause(seconds: float) -> None:
        assert queue.queue() == []
        lock.__exit__(None, None, None)

    monkeypatch.setattr(slurm, "time", SimpleNamespace(**vars(time) | {"sleep": pause}))
    slurm.keep(str(sweep.sweep.path))
    assert len(queue.of_kind("worker")) == 1
