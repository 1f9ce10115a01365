"""What is made of SLURM's answers, without a cluster: commands on the PATH say what real ones have said."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from isoflop.sweeps.config import ClusterConfig
from isoflop.sweeps.plan.sweep_plan import job_shape
from isoflop.sweeps.runs import directory
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.forms import JobShape
from isoflop.sweeps.slurm import commands as slurm
from isoflop.sweeps.slurm.record import LaunchRecord
from isoflop.sweeps.slurm.submit import Call, Request, Submission
from isoflop.sweeps.slurm.transaction import release_forgotten
from isoflop.train.config import ParallelConfig
from isoflop.train.errors import UserError

Install = Callable[[str, str], None]


# Taken from SLURM 22.05 at the moment when the job's process had got its signal.
RUNNING = (
    "JobId=7 JobName=x Priority=1 JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:00:03 TimeLimit=01:00:00"
)
PREEMPTED = f"{RUNNING} PreemptTime=2026-11-21T04:43:50"
CANCELLED = RUNNING.replace("=RUNNING", "=COMPLETING")
REQUEUED = CANCELLED.replace("Restarts=0", "Restarts=1")
OVER = CANCELLED.replace("RunTime=00:00:03", "RunTime=1-01:00:02").replace("TimeLimit=01:00:00", "TimeLimit=1-01:00:00")
UNLIMITED = CANCELLED.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED")


@pytest.mark.parametrize(
    ("shown", "restarts", "fate"),
    [
        (RUNNING, 0, "running"), (PREEMPTED, 0, "running"), (CANCELLED, 0, "cancelled"), (REQUEUED, 0, "requeued"),
        (REQUEUED.replace("COMPLETING", "PENDING"), 0, "requeued"), (REQUEUED, 1, "cancelled"), (OVER, 0, "timeout"),
        (UNLIMITED, 0, "cancelled"), ("", 0, "running"),
    ],
)  # fmt: skip
def test_a_cancelled_job_is_told_from_one_that_comes_back(
    install: Install, shown: str, restarts: int, fate: str
) -> None:
    install("scontrol", f"echo '{shown}'")
    assert slurm.fate("7", restarts) == fate


def test_a_requeue_whose_answer_was_lost_has_happened_all_the_same(install: Install) -> None:
    install("scontrol", f"case $1 in requeue) kill -TERM $$;; *) echo '{REQUEUED}';; esac")
    assert slurm.requeue("7", 0) is None
    install("scontrol", f"case $1 in requeue) echo 'Access denied' >&2; exit 1;; *) echo '{RUNNING}';; esac")
    assert slurm.requeue("7", 0) == "Access denied"


def test_a_local_job_inside_an_allocation_is_no_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ctrl-C on a local sweep would requeue the allocation that it runs in."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert not directory.inside_job()
    assert directory.job_id() == str(os.getpid())
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert directory.job_id() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert directory.job_id() == "5_2"


def test_jobs_submitted_from_a_job_do_not_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SRUN_CPUS_PER_TASK": "4", "SUBMITIT_EXECUTOR": "slurm"}
    for name, value in {**given, "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}.items():
        monkeypatch.setenv(name, value)
    with slurm.outside_any_job():
        assert not set(given) & set(os.environ)
        assert os.environ["SLURM_CONF"] == "/etc/slurm.conf"
        assert os.environ["SBATCH_ACCOUNT"] == "mine"
    assert given.items() <= os.environ.items()


def test_how_jobs_ended_comes_from_accounting_in_one_call_for_all(install: Install, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    said = ["7_0|COMPLETED|node1", "7_1|FAILED|None assigned", "7_[0-2,5-9%2]|CANCELLED by 0|", "70_4|FAILED|node2"]
    install("sacct", f"echo $* >> {asked}; " + "; ".join(f"echo '{line}'" for line in said))
    install("scontrol", "exit 1")
    found = slurm.outcomes([*(f"7_{task}" for task in (0, 1, 2, 4, 6, 10)), "70_4", "local-3"])
    assert found == {
        "7_0": ("COMPLETED", "node1"), "7_1": ("FAILED", None), "7_2": ("CANCELLED", None), "7_6": ("CANCELLED", None),
        "70_4": ("FAILED", "node2"),
    }  # fmt: skip
    assert "-j 7,70 " in asked.read_text()
    assert len(asked.read_text().splitlines()) == 1


def test_without_accounting_the_controller_is_asked_once_an_array(install: Install, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    install("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    shown = "JobId={} {}JobState={} ReqNodeList=node3 ExcNodeList=node4 NodeList={} BatchHost=node1"
    tasks = [
        shown.format(8, "ArrayJobId=7 ArrayTaskId=0 ", "NODE_FAIL", "node[1-2]"),
        shown.format(7, "ArrayJobId=7 ArrayTaskId=2-4%2 ", "PENDING", "(null)"),
    ]
    alone, forgotten = shown.format(5, "", "COMPLETED", "node1"), "echo 'Invalid job id specified' >&2; exit 1"
    array = "; ".join(f"echo '{line}'" for line in tasks)
    install("scontrol", f"echo $4 >> {asked}; case $4 in 7) {array};; 5) echo '{alone}';; *) {forgotten};; esac")
    found = slurm.outcomes(["7_0", "7_1", "7_3", "5", "6"])
    assert found == {"7_0": ("NODE_FAIL", "node[1-2]"), "7_3": ("PENDING", None), "5": ("COMPLETED", "node1")}
    assert asked.read_text().split() == ["5", "6", "7"]


AWAY = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"


def test_a_controller_that_restarts_is_asked_again_for_a_while(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    count, later = tmp_path / "count", f"[ $(wc -l < {tmp_path / 'count'}) -gt 2 ] && {{"
    install("squeue", f"echo >> {count}; {later} echo 5_1; exit 0; }}; {AWAY}")
    assert slurm.live_jobs() == {"5_1"}
    count.unlink()
    # What `scontrol requeue` says of a connection that failed, and `scontrol show` as ever.
    away = "echo 'Unexpected message received for job 7' >&2; exit 1"
    install("scontrol", f"case $1 in requeue) echo >> {count}; {later} exit 0; }}; {away};; *) echo '{RUNNING}';; esac")
    assert slurm.requeue("7", 0) is None
    assert len(count.read_text()) == 3, "until it is heard"
    monkeypatch.setattr(slurm, "PATIENCE", 0.05)
    for name in ("squeue", "scontrol", "sacct", "scancel"):
        install(name, AWAY)
    with pytest.raises(UserError, match="squeue does not answer"):
        slurm.live_jobs(patience=0.05)
    assert "Unable to contact" in (slurm.requeue("7", 0) or "")
    assert slurm.fate("7", 0) == "running"
    slurm.cancel(["7"])


def test_where_no_command_is_there_slurm_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert slurm.fate("7", 0) == "running"
    assert slurm.outcomes(["7", "5_1"]) == {}
    assert slurm.elapsed(["7", "5_1"]) == {}
    with pytest.raises(UserError, match="squeue does not answer"):
        slurm.live_jobs()


def test_jobs_that_slurm_holds_are_told_from_those_that_a_user_holds(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken from SLURM 22.05: the words of squeue."""
    reasons = ("launch failed requeued held", "JobHeldUser", "Dependency", "JobHeldAdmin", "job requeued in held state")
    install("squeue", "; ".join(f"echo '7_{task}|{reason}'" for task, reason in enumerate(reasons)))
    assert slurm.on_hold() == ({"7_0"}, {"7_1"})
    install("scontrol", f"echo $* > {tmp_path / 'asked'}")
    assert slurm.release({"7_3", "7_0"}) is None
    assert (tmp_path / "asked").read_text() == "release 7_0,7_3\n"
    install("scontrol", "echo 'Access/permission denied for job 7_0' >&2; exit 1")
    assert slurm.release(["7_0"]) == slurm.release(["7"]) == "Access/permission denied for job 7_0"
    assert slurm.release([]) is None
    assert slurm.release(["7_2", "9"]) is None, "neither is on hold, whatever scontrol says"
    install("squeue", AWAY)
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "PATIENCE", 0.0)
        assert slurm.release(["9"]) == "Access/permission denied for job 7_0"


def test_jobs_whose_release_slurm_forgot_are_released_once_more(install: Install, tmp_path: Path) -> None:
    """A controller that is killed forgets its last seconds; a user may hold a job too."""
    sweep, cluster = SweepDirectory(tmp_path / "sweep"), ClusterConfig(kind="slurm")
    (sweep.path / "jobs").mkdir(parents=True)
    record = LaunchRecord(training={"a": "7_0", "b": "7_1"}, fit="8")
    install("squeue", "echo '7_0|launch failed requeued held'; echo '8|JobHeldUser'; echo '9|JobHeldUser'")
    install("scontrol", f"echo $* >> {tmp_path / 'asked'}")
    for _ in range(2):
        release_forgotten(sweep, cluster, record)
    assert (tmp_path / "asked").read_text().splitlines() == ["release 7_0,8", "release 7_0"]
    release_forgotten(sweep, ClusterConfig(kind="slurm", additional_parameters={"hold": True}), record)
    assert (tmp_path / "asked").read_text().splitlines()[2:] == ["release 7_0"]


def test_the_signal_of_a_preemption_does_not_kill_a_new_interpreter(tmp_path: Path) -> None:
    """SLURM takes a job that ends in its grace for ended, and does not put it back in the queue."""
    cluster = ClusterConfig(kind="slurm", python=f"env -- {sys.executable}")
    for request in (Request("train", JobShape(0, 1, 1.0, 5)), Request("keeper", JobShape(0, 1, 1.0, 5), light=True)):
        command = Submission("x", "x", cluster, tmp_path, tmp_path, tmp_path)._python(request)
        code = "import os, signal, sys; os.kill(os.getpid(), signal.SIGUSR2); print('alive', *sys.argv[1:])"
        line = f"{command} -u -c {shlex.quote(code)} 'a b'"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert done.stdout == "alive a b\n"


def test_the_time_of_a_job_is_that_of_all_its_starts(install: Install, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    install("sacct", f"echo $* >> {asked}; echo '5_1|30'; echo '5_1|12'; echo '5_2|7'; echo '5_[3-9]|0'; echo '6|0'")
    assert slurm.elapsed(["5_1", "5_3", "6", "8"]) == {"5_1": 42.0, "6": 0.0}
    (line,) = asked.read_text().splitlines()
    assert "-j 5,6,8 " in line, "an array is asked for once"


@pytest.mark.parametrize(
    ("clock", "seconds"),
    [("30:00", 1800), ("01:02:03", 3723), ("1-00:00:01", 86401), ("UNLIMITED", None), ("infinite", None), ("", None)],
)
def test_slurms_clock_is_read(clock: str, seconds: int | None) -> None:
    assert slurm.seconds(clock) == seconds


# Taken from SLURM 22.05: a task that is killed, and what `srun` then does to the others.
KILLED = """srun: error: node2: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7415102.0
srun: error: node2: task 3: Killed
srun: error: node1: tasks 0-1: Killed
srun: Force Terminated StepId=7415102.0
"""
REQUEUE = """srun: error: node1: task 0: Exited with exit code 1
slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-21T15:48:00 DUE TO JOB REQUEUE ***
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (KILLED, "rank 2 on node2 ended first (Killed)"),
        (REQUEUE + KILLED, "rank 2 on node2 ended first (Killed)"),
        (KILLED.split("\n", 3)[3], "ranks 0-1 on node1 ended first (Killed)"),
        (REQUEUE, None),
        ("", None),
        ("node1: out of ideas\n", None),
    ],
)
def test_the_first_task_to_end_is_named_by_sruns_own_words(log: str, said: str | None) -> None:
    assert slurm.first_to_end(log) == said


def submitted(install: Install, tmp_path: Path, cluster: ClusterConfig, shape: JobShape) -> str:
    """The script that sbatch gets."""
    install("srun", "")
    install("sbatch", f"cp $1 {tmp_path / 'script'}; echo Submitted batch job 7")
    jobs = Submission("grid", "isoflop:0:0", cluster, tmp_path / "jobs", tmp_path, tmp_path / "code")
    assert jobs.submit(Request("train", shape), [Call(print, ())]) == ["7"]
    return (tmp_path / "script").read_text()


def test_every_rank_is_a_task_with_its_own_cpus_memory_and_gpu(install: Install, tmp_path: Path) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=4, memory_gb=32.0, ranks_per_node=4)
    script = submitted(install, tmp_path, cluster, job_shape(ParallelConfig(tp=2, dp=4), cluster))
    for flag in ("nodes=2", "ntasks-per-node=4", "cpus-per-task=4", "mem=131072M", "gpus-per-node=4"):
        assert f"#SBATCH --{flag}\n" in script
    assert "export OMP_NUM_THREADS=4\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert {"--cpus-per-task=4", "--kill-on-bad-exit=1", "--distribution=block"} <= set(srun.split())
