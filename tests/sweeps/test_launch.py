"""What is submitted to SLURM, and what is made of its answers: stand-ins for its commands keep a queue."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.execute import advance, worker
from isoflop.sweeps.plan.sweep_plan import Plan
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.sweeps.runs.forms import JobShape, PlannedRun
from isoflop.sweeps.runs.queue import Queue, Unit
from isoflop.sweeps.slurm import commands as slurm
from isoflop.sweeps.slurm import submit, transaction
from isoflop.sweeps.slurm.backend import HELD_BACK, SlurmBackend
from isoflop.sweeps.slurm.record import Inventory, LaunchRecord, rebuilt, strays
from isoflop.train.errors import UserError
from isoflop.train.files import write_json
from small_runs import end_unit
from standin_slurm import StandIn

SHAPE, TWO_RANKS = JobShape(0, 1, 1.0, 60), JobShape(0, 1, 1.0, 60, ranks_per_node=2)


def planned(name: str, minutes: float, parent: str | None = None, shape: JobShape = SHAPE) -> PlannedRun:
    return PlannedRun(
        run_id=name, name=name, N_total=1, N_non_embedding=1, N_kaplan=1, D=1, flops_6nd=1.0, flops_exact=1.0,
        flops_own=1.0, budget=None, width=8, depth=1, heads=1, steps=10, seed=0, sequence_length=8, precision="fp32",
        shape=shape, mesh="", estimated_seconds=60 * minutes, parent=parent, first_step=5 if parent else 0,
    )  # fmt: skip


def cluster(**changes: object) -> ClusterConfig:
    return ClusterConfig(kind="slurm", queue_minutes=10, memory_gb=4.0, time_minutes=60, **changes)  # type: ignore[arg-type]


class Launch:
    """A sweep of given runs, each a unit, and how it is submitted."""

    def __init__(self, path: Path, runs: Sequence[PlannedRun], settings: ClusterConfig) -> None:
        self.sweep, self.runs, self.cluster = SweepDirectory(path), list(runs), settings
        self.plan = Plan(self.runs, [], 1, 1.0, 1.0, 1.0, 1.0, 1.0, None)
        write_json(path / "plan.json", {"runs": [asdict(run) for run in runs]})
        for directory in self.directories:
            directory.set_state("planned")

    @property
    def directories(self) -> list[RunDirectory]:
        return [self.sweep.run(run.run_id) for run in self.runs]

    def launcher(self) -> SlurmBackend:
        return advance.slurm_backend(self.sweep, self.cluster, slurm.live_jobs())

    def go(self, evaluate: bool = False, avoid: dict[str, tuple[str, ...]] | None = None) -> list[str]:
        """What a launch does: submits what no job does yet; returns what was held back."""
        launcher = self.launcher()
        units = [Unit((run.run_id,)) for run in launcher.to_start(self.directories)]
        return launcher.submit(self.plan, units, [], evaluate, avoid)

    def states(self) -> Counter[str]:
        return Counter(run.state().state for run in self.directories)


@pytest.fixture
def cluster_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    standin = StandIn(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{standin.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(transaction.snapshot, "take", lambda sweep: tmp_path / "code")
    return standin


Make = Callable[..., Launch]


@pytest.fixture
def make(tmp_path: Path, cluster_of: StandIn) -> Make:
    def made(*runs: PlannedRun, **settings: object) -> Launch:
        return Launch(tmp_path / "outputs" / "grid", runs, cluster(**settings))

    return made


def calls(launched: Launch, job: str) -> list[submit.Call]:
    """What the tasks of an array will call."""
    (folder,) = {path.parent for path in launched.sweep.path.glob(f"jobs/*/{job}*_submitted.pkl")}
    names = sorted(folder.glob(f"{job}*_submitted.pkl"), key=lambda path: (len(path.name), path.name))
    return [pickle.loads(path.read_bytes()).function for path in names]


def test_short_runs_go_through_a_queue_and_long_ones_are_tasks(make: Make, cluster_of: StandIn) -> None:
    sweep = make(
        *[planned(f"long{i}", 30) for i in range(3)], *[planned(f"short{i}", 4) for i in range(7)],
        planned("ranks", 1, shape=TWO_RANKS), array_parallelism=5,
    )  # fmt: skip
    assert sweep.go(evaluate=True) == []
    (queue,), (alone, ranks) = (
        cluster_of.of_kind("queue"),
        sorted(cluster_of.of_kind("train"), key=cluster_of.tasks)[::-1],
    )
    assert cluster_of.tasks(queue) == 3, "28 minutes in jobs of 10"
    assert (cluster_of.tasks(alone), cluster_of.tasks(ranks)) == (3, 1)
    assert cluster_of.flags(alone)["array"] == "0-2%3"
    assert cluster_of.flags(ranks)["ntasks-per-node"] == "2"
    (folder,) = sweep.sweep.path.glob("jobs/queue-*")
    assert [unit.runs[0] for unit in Queue.open(sweep.sweep, folder).left()] == [f"short{i}" for i in range(7)]
    assert {call.function for call in calls(sweep, queue)} == {worker.work}
    # Scoring: of a queue's runs in as many jobs, after its workers; of a task after its success.
    scoring = {cluster_of.flags(job)["dependency"]: job for job in cluster_of.of_kind("evaluate")}
    assert set(scoring) == {f"afterany:{queue}", f"aftercorr:{alone}", f"afterok:{ranks}"}
    shares = [call.arguments[1] for call in calls(sweep, scoring[f"afterany:{queue}"])]
    assert sorted(len(share) for share in shares) == [2, 2, 3]
    (fit,) = cluster_of.of_kind("fit")
    everything = {queue, alone, ranks, *scoring.values()}
    assert set(cluster_of.flags(fit)["dependency"].removeprefix("afterany:").split(":")) == everything
    assert all("kill-on-invalid-dep" in cluster_of.flags(job) for job in (fit, *scoring.values()))
    assert cluster_of.released() >= {*everything, fit, *cluster_of.of_kind("keeper")}
    assert sweep.states() == {"queued": 11}
    assert sweep.sweep.run("long1").state().job_id == f"{alone}_1"


def test_nothing_is_submitted_twice(make: Make, cluster_of: StandIn) -> None:
    sweep = make(planned("long", 30), planned("short", 1))
    sweep.go()
    before = cluster_of.queue()
    launcher = sweep.launcher()
    assert launcher.to_start(sweep.directories) == []
    launcher.keep()
    assert cluster_of.queue() == before
    # A run whose unit has ended in a live queue, and failed, has no job any more.
    sweep.sweep.run("short").set_state("failed")
    (folder,) = sweep.sweep.path.glob("jobs/queue-*")
    queue = Queue.open(sweep.sweep, folder)
    end_unit(queue, queue.claim(0) or Unit(()))
    queue.close()
    assert [run.run_id for run in sweep.launcher().to_start(sweep.directories)] == ["short"]


def test_a_branch_waits_for_its_trunk_whichever_way_either_goes(make: Make, cluster_of: StandIn) -> None:
    """A family goes one way; what came with an earlier submission may have gone the other."""
    sweep = make(planned("trunk", 30), planned("branch", 1, "trunk"), planned("twig", 1, "branch"), planned("short", 1))
    sweep.go()
    jobs = {name: sweep.sweep.run(name).state().job_id or "" for name in ("trunk", "branch", "twig")}
    assert "dependency" not in cluster_of.flags(jobs["trunk"])
    assert cluster_of.flags(jobs["branch"])["dependency"] == f"afterany:{jobs['trunk']}"
    assert cluster_of.flags(jobs["twig"])["dependency"] == f"afterany:{jobs['branch']}"
    (workers,) = cluster_of.of_kind("queue")
    # Now more branches: of the long trunk a short one, and of the short trunk a long and a short one.
    sweep.runs += [planned("late", 1, "trunk"), planned("far", 30, "short"), planned("near", 1, "short")]
    for name in ("late", "far", "near"):
        sweep.sweep.run(name).path.mkdir()
    sweep.go()
    far = sweep.sweep.run("far").state().job_id or ""
    assert cluster_of.flags(far)["dependency"] == f"afterany:{workers}"
    waits = sorted(cluster_of.flags(job).get("dependency", "") for job in cluster_of.of_kind("queue"))
    assert waits == sorted(["", f"afterany:{jobs['trunk']}", f"afterany:{workers}"])


@pytest.mark.parametrize("evaluate", [False, True])
def test_what_the_queue_has_no_room_for_is_held_back_and_follows(
    make: Make, cluster_of: StandIn, evaluate: bool
) -> None:
    """Longest first and no branch before its trunk; the limit is never passed, though somebody else has jobs there."""
    cluster_of.say("queue", "1 other\n2 other\n")
    runs = [planned(f"run{i}", 60 - i) for i in range(6)] + [planned("branch", 20, "run5"), planned("short", 1)]
    sweep, limit = make(*runs, max_submit=12), 12
    held = sweep.go(evaluate)
    assert len(cluster_of.queue()) <= limit
    started = [run.run_id for run in sweep.directories if run.run_id not in held]
    assert [name for name in started if name != "short"] == [f"run{i}" for i in range(len(started) - 1)]
    assert "short" in started
    assert "branch" in held
    for name in held:
        state = sweep.sweep.run(name).state()
        assert (state.state, state.reason) == ("planned", HELD_BACK)
    rounds = 0
    while held:
        rounds += 1
        assert rounds < 9
        cluster_of.end(*cluster_of.of_kind("train"), *cluster_of.of_kind("evaluate"), *cluster_of.of_kind("queue"))
        for run in sweep.directories:
            if run.run_id not in held:
                run.set_state("done")
                write_json(run.path / "summary.json", {})
        held = sweep.go(evaluate)
        assert len(cluster_of.queue()) <= limit
    assert sweep.states() == {"done": 8 - sweep.states()["queued"], "queued": sweep.states()["queued"]}


@pytest.mark.parametrize("limit", [0, 3, 6])
def test_a_limit_that_nobody_knew_holds_back_and_leaves_no_half_of_a_pair(
    make: Make, cluster_of: StandIn, limit: int
) -> None:
    cluster_of.say("limit", str(limit))
    sweep = make(planned("run0", 40), planned("run1", 30, shape=TWO_RANKS), planned("short", 1))
    if limit == 0:
        with pytest.raises(UserError, match="SLURM takes no more jobs"):
            sweep.go(evaluate=True)
        assert cluster_of.queue() == []
        return
    held = sweep.go(evaluate=True)
    assert sweep.states() == Counter({"queued": 3 - len(held), "planned": len(held)})
    pairs = len(cluster_of.of_kind("train")) + len(cluster_of.of_kind("queue"))
    assert len(cluster_of.of_kind("evaluate")) == pairs == 3 - len(held)
    assert len(held) == max(0, min(3, 3 - (limit - 2) // 2))
    assert len(cluster_of.of_kind("keeper")) == min(2, limit)
    assert not list(sweep.sweep.path.glob("jobs/past-*")) or held


@pytest.mark.parametrize("kind", ["keeper", "evaluate", "fit"])
def test_a_refusal_is_said_in_slurms_words_and_leaves_nothing(make: Make, cluster_of: StandIn, kind: str) -> None:
    sweep = make(planned("run0", 40), planned("short", 1))
    cluster_of.say(f"refuse-{kind}", "sbatch: error: invalid account or account/partition combination specified\n")
    with pytest.raises(UserError, match=f"SLURM refused the {kind} job .*invalid account or account/partition"):
        sweep.go(evaluate=True)
    assert cluster_of.queue() == []
    assert sweep.states() == {"planned": 2}
    assert Inventory(sweep.sweep, slurm.live_jobs()).in_queue() == set()
    (cluster_of.folder / f"refuse-{kind}").unlink()
    assert sweep.go(evaluate=True) == []
    assert sweep.states() == {"queued": 2}
    assert len(list(sweep.sweep.path.glob("jobs/queue-*"))) == 1


def killed_at(step: int, sweep: Launch, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Submits in a process that is gone before its step-th step, without a word; whether it came so far."""
    if (child := os.fork()) > 0:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [step]

    def count(where: object, name: str) -> None:
        function = getattr(where, name)

        def counted(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return function(*arguments, **options)

        monkeypatch.setattr(where, name, counted)

    for where, name in (
        (LaunchRecord, "write"), (submit.Submission, "submit"), (RunDirectory, "set_state"),
        (slurm, "release"), (transaction, "finish"), (transaction, "retire_queues"),
    ):  # fmt: skip
        count(where, name)
    sweep.go(evaluate=True)
    os._exit(0)


def killed_and_launched_again(step: int, sweep: Launch, slurms: StandIn, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the launcher had so many steps; the next one then left every job once, and none on hold."""
    for name in ("run1", "short"):  # as a keeper finds those that it tries again
        sweep.sweep.run(name).set_state("failed", job_id="7")
    if not killed_at(step, sweep, monkeypatch):
        return False
    sweep.go(evaluate=True)
    assert strays(sweep.sweep) == set(), step
    assert {job.split("_")[0] for job in slurms.queue()} <= slurms.released(), step
    kinds = {"train": 2, "queue": 1, "evaluate": 3, "fit": 1, "keeper": 2}  # arrays
    assert {kind: len(slurms.of_kind(kind)) for kind in kinds} == kinds, step
    assert [slurms.tasks(job) for job in slurms.of_kind("train")] == [2, 1], step
    launcher = sweep.launcher()
    assert launcher.to_start(sweep.directories) == [], step
    assert sweep.states() == {"queued": 4}, step
    assert len(list(sweep.sweep.path.glob("jobs/queue-*"))) == 1
    launcher.cancel_all()
    assert slurms.queue() == []
    return True


FAMILY = (planned("run0", 40), planned("run1", 40), planned("branch", 1, "run0"), planned("short", 1))


@pytest.mark.parametrize("step", [0, 12])
def test_a_launcher_that_is_killed_loses_nothing_and_submits_nothing_twice(
    make: Make, cluster_of: StandIn, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    assert killed_and_launched_again(step, make(*FAMILY), cluster_of, monkeypatch)


@pytest.mark.slow
def test_a_launcher_may_be_killed_at_every_step_that_it_has(
    make: Make, cluster_of: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, step = make(*FAMILY), 0
    while killed_and_launched_again(step, sweep, cluster_of, monkeypatch):
        step += 1
    assert step > 18


def test_a_record_that_cannot_be_read_is_rebuilt_from_the_queue(make: Make, cluster_of: StandIn) -> None:
    """Taken for empty, queues that jobs go through would be put aside, and their runs submitted again."""
    sweep = make(*FAMILY)
    sweep.go(evaluate=True)
    before, queue = LaunchRecord.read(sweep.sweep), cluster_of.queue()
    for damaged in ('{"training": ', "[]", '{"queues": {"queue-1": {}}}'):
        (sweep.sweep.path / "jobs" / "slurm.json").write_text(damaged)
        with pytest.raises(UserError, match=r"slurm\.json is not what it must be: .*; `isoflop doctor .*` mends it$"):
            sweep.go(evaluate=True)
    assert cluster_of.queue() == queue
    rebuilt(sweep.sweep).write(sweep.sweep)  # as the doctor does
    assert LaunchRecord.read(sweep.sweep) == before
    assert sweep.launcher().to_start(sweep.directories) == []


def test_jobs_that_slurm_does_not_release_are_released_by_the_next_launch(make: Make, cluster_of: StandIn) -> None:
    sweep = make(planned("run", 40))
    cluster_of.say("refuse-release", "slurm_update error: Socket timed out on send/recv operation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "PATIENCE", 0.0)
        with pytest.raises(
            UserError, match=r"does not release the sweep's jobs \(.*timed out.*\), and they are on hold"
        ):
            sweep.go()
    (cluster_of.folder / "refuse-release").unlink()
    sweep.launcher()
    assert set(cluster_of.queue()) <= cluster_of.released()
    assert LaunchRecord.read(sweep.sweep).held == []


def test_an_answer_that_was_lost_makes_no_second_job(
    make: Make, cluster_of: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic))
    sweep = make(planned("run", 40))
    cluster_of.say("lose", "")
    sweep.go()
    assert len(cluster_of.of_kind("keeper")) == 2, "the first, whose answer was lost, is cancelled"
    assert strays(sweep.sweep) == set()


def test_keepers_come_one_by_one_and_ask_for_little(
    make: Make, cluster_of: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make(
        planned("run", 40), gpus_per_job=1, keeper_seconds=60, partition="gpu", keeper_partition="cpu",
        constraint="h100", additional_parameters={"exclusive": True, "reservation": "scaling"},
    )  # fmt: skip
    sweep.go()
    first, second = cluster_of.of_kind("keeper")
    flags = cluster_of.flags(first)
    expected = {"begin": "now+60", "cpus-per-task": "1", "mem": "2048M", "time": "30", "partition": "cpu"}
    assert flags.items() >= {**expected, "reservation": "scaling"}.items()
    assert not {"gpus-per-node", "constraint", "exclusive", "dependency"} & flags.keys()
    assert cluster_of.flags(second)["begin"] == "now+120"
    assert "dependency" not in cluster_of.flags(second), "a first one that is held up would hold up both"
    (call,) = calls(sweep, first)
    assert (call.function, call.arguments) == (advance.keep, (str(sweep.sweep.path.resolve()),))
    training = cluster_of.flags(cluster_of.of_kind("train")[0])
    assert training.items() >= {"partition": "gpu", "constraint": "h100", "exclusive": ""}.items()

    # In the first, which runs: another comes after the second.
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", first)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    launcher = sweep.launcher()
    assert launcher.keep() == 2
    *_, third = cluster_of.of_kind("keeper")
    assert third not in (first, second)
    assert cluster_of.flags(third)["begin"] == "now+120"
    assert not cluster_of.flags(third).keys() & {"array", "dependency", "gpus-per-node"}
    launcher.end_keepers()
    assert cluster_of.of_kind("keeper") == [first]
    launcher.cancel_all()
    assert cluster_of.queue() == [first], "but for the job that cancels"


def test_nodes_to_avoid_are_excluded_unless_too_few_others_are_up(make: Make, cluster_of: StandIn) -> None:
    sweep = make(*[planned(f"run{i}", 40) for i in range(3)], exclude="b")
    cluster_of.say("nodes", "a b c")
    sweep.go(avoid={"run1": ("a",), "run2": ("a", "c")})
    excluded = [cluster_of.flags(run.state().job_id or "").get("exclude") for run in sweep.directories]
    assert excluded == ["b", "b,a", "b"]


def test_a_job_runs_the_sweeps_copy_of_the_code_in_a_folder_of_its_own(
    make: Make, cluster_of: StandIn, tmp_path: Path
) -> None:
    sweep = make(planned("run", 40), setup=["module load cuda"], python="apptainer exec image.sif python")
    sweep.go()
    script = cluster_of.script(cluster_of.of_kind("train")[0])
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    (folder,) = sweep.sweep.path.glob("jobs/slurm-*")
    assert lines[:5] == [
        "export OMP_NUM_THREADS=1",
        "module load cuda",
        f"cd {folder.resolve()}",
        submit.STALE,
        f"export PYTHONPATH={tmp_path / 'code'}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]
    assert " apptainer exec image.sif python -u -m submitit.core._submit " in script
    assert cluster_of.flags(cluster_of.of_kind("train")[0])["chdir"] == os.getcwd()
    assert "apptainer" not in cluster_of.script(cluster_of.of_kind("keeper")[0]), "it calls sbatch"


@pytest.mark.parametrize(
    ("job", "gone"),
    [({"SLURM_JOB_ID": "7"}, {"7_0", "7_1"}),
     ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}, {"8_1_0"})],
)  # fmt: skip
def test_a_job_removes_the_half_of_a_result_that_its_earlier_start_left(
    tmp_path: Path, job: dict[str, str], gone: set[str]
) -> None:
    """Else submitit fails a job whose function has succeeded."""
    names = {"7_0", "7_1", "77_0", "8_1_0", "8_10_0", "9_0"}
    for name in names:
        (tmp_path / f"{name}_result.pkl.save_tmp").touch()
    subprocess.run(["sh", "-c", submit.STALE], cwd=tmp_path, env=job | {"PATH": os.environ["PATH"]}, check=True)
    assert {path.name.removesuffix("_result.pkl.save_tmp") for path in tmp_path.iterdir()} == names - gone


def test_a_container_is_srun_s_and_sees_the_sweep(make: Make, cluster_of: StandIn) -> None:
    sweep = make(planned("run", 40), container="/images/torch.sqsh")
    sweep.go()
    (line,) = [line for line in cluster_of.script(cluster_of.of_kind("train")[0]).splitlines() if line[:5] == "srun "]
    assert "--container-image=/images/torch.sqsh" in line
    mounts = line.split("--container-mounts=")[1].split()[0].split(",")
    assert f"{sweep.sweep.path.resolve()}:{sweep.sweep.path.resolve()}" in mounts
    assert " python3 -u " in line
    assert "--container" not in cluster_of.script(cluster_of.of_kind("fit")[0])


def test_raw_keys_are_merged_or_refused_by_name(make: Make, cluster_of: StandIn) -> None:
    raw = {"comment": "grant 7", "exclude": "c", "dependency": "afterok:5", "wckey": "mine", "exclusive": False}
    sweep = make(planned("run", 40), planned("branch", 1, "run"), exclude="b", additional_parameters=raw)
    sweep.go()
    flags = [cluster_of.flags(run.state().job_id or "") for run in sweep.directories]
    trunk = sweep.sweep.run("run").state().job_id
    assert [found["dependency"] for found in flags] == ["afterok:5", f"afterany:{trunk},afterok:5"]
    assert flags[0]["comment"].startswith("isoflop:")
    assert flags[0]["comment"].endswith(" grant 7")
    assert (flags[0]["exclude"], flags[0]["wckey"], "exclusive" in flags[0]) == ("b,c", "mine", False)
    sweep.cluster = cluster(additional_parameters={"cpus_per_task": 3})
    with pytest.raises(UserError, match=r"has cpus-per-task, which cluster\.cpus_per_task sets"):
        sweep.launcher().submit_fit()


def test_jobs_that_the_user_holds_stay_on_hold(make: Make, cluster_of: StandIn) -> None:
    sweep = make(planned("run", 40), additional_parameters={"hold": True})
    sweep.go()
    assert cluster_of.released() == set()
    assert "hold" in cluster_of.flags(cluster_of.of_kind("train")[0])
