"""What is made of SLURM's answers, without a cluster: commands on the PATH say what real ones have said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from isoflop.sweeps import slurm, worker
from isoflop.sweeps.runs import RunDirectory
from isoflop.train.errors import UserError

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a shell script of a given name before everything else on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


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


def test_a_job_that_slurm_will_not_requeue_fails_with_slurms_words(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    install("scontrol", f"case $1 in requeue) echo 'Requeue disabled' >&2; exit 1;; *) echo '{RUNNING}';; esac")
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.set_state("preempted", reason="signal SIGUSR2")
    with pytest.raises(worker.RunFailed):
        worker._back_to_the_queue(run)
    assert run.state().state == "failed"
    assert "SLURM would not requeue its job (Requeue disabled)" in (run.state().reason or "")


def test_a_local_job_inside_an_allocation_is_no_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ctrl-C on a local sweep would requeue the allocation that it runs in."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert not slurm.inside_job()
    assert slurm.job_id() == str(os.getpid())
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert slurm.job_id() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert slurm.job_id() == "5_2"


def test_jobs_submitted_from_a_job_do_not_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SRUN_CPUS_PER_TASK": "4", "SUBMITIT_EXECUTOR": "slurm"}
    for name, value in {**given, "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}.items():
        monkeypatch.setenv(name, value)
    with slurm.outside_any_job():
        assert not set(given) & set(os.environ)
        assert os.environ["SLURM_CONF"] == "/etc/slurm.conf"
        assert os.environ["SBATCH_ACCOUNT"] == "mine"
    assert given.items() <= os.environ.items()


def test_a_controller_that_does_not_answer_is_named(install: Install) -> None:
    install("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match=r"squeue does not answer \(.*Unable to contact slurm controller\)"):
        slurm.live_jobs()


@pytest.mark.parametrize(("said", "outcome"), [("CANCELLED by 0", "CANCELLED"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY")])
def test_how_a_job_ended_comes_from_accounting_else_from_the_controller(
    install: Install, said: str, outcome: str
) -> None:
    install("sacct", f"echo '{said}'")
    install("scontrol", "echo JobState=COMPLETED")
    assert slurm.outcome("7") == outcome
    install("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert slurm.outcome("7") == "COMPLETED"
    install("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.outcome("7") is None
    assert slurm.outcome(None) is None
