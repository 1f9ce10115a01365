"""Handling of SLURM's answers without a cluster: scripts on the PATH print answers recorded from real commands."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from isoflop.sweeps.config import ClusterConfig, SweepConfig
from isoflop.sweeps.execute.conduct import check
from isoflop.sweeps.plan.sweep_plan import job_shape, plan_runs
from isoflop.sweeps.runs import directory
from isoflop.sweeps.runs.forms import JobShape, PlannedRun
from isoflop.sweeps.slurm import cluster as slurm_cluster
from isoflop.sweeps.slurm import commands as slurm
from isoflop.sweeps.slurm.submit import Request, Submission
from isoflop.train.config import ModelConfig, ParallelConfig, RunConfig
from isoflop.train.errors import UserError
from small_runs import Patch

Install = Callable[[str, str], None]


def test_a_local_job_inside_an_allocation_is_no_slurm_job(monkeypatch: Patch) -> None:
    """Check the job id, because Ctrl-C on a local sweep must not requeue the allocation in which it runs."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert not directory.inside_job()
    assert directory.job_id() == str(os.getpid())
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert directory.job_id() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert directory.job_id() == "5_2"


def test_jobs_submitted_from_a_job_do_not_inherit_it(monkeypatch: Patch) -> None:
    of_job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SRUN_CPUS_PER_TASK": "4", "SUBMITIT_EXECUTOR": "slurm"}
    for name, value in {**of_job, "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}.items():
        monkeypatch.setenv(name, value)
    with slurm.outside_any_job():
        assert not set(of_job) & set(os.environ)
        assert os.environ["SLURM_CONF"] == "/etc/slurm.conf"
        assert os.environ["SBATCH_ACCOUNT"] == "mine"
    assert of_job.items() <= os.environ.items()


def test_how_jobs_ended_comes_from_accounting_in_one_call_for_all(install: Install, tmp_path: Path) -> None:
    calls = tmp_path / "asked"
    answers = ["7_0|COMPLETED|node1", "7_1|FAILED|None assigned", "7_[0-2,5-9%2]|CANCELLED by 0|", "70_4|FAILED|node2"]
    install("sacct", f"echo $* >> {calls}; " + "; ".join(f"echo '{line}'" for line in answers))
    install("scontrol", "exit 1")
    outcomes = slurm.outcomes([*(f"7_{task}" for task in (0, 1, 2, 4, 6, 10)), "70_4", "local-3"])
    assert outcomes == {
        "7_0": ("COMPLETED", "node1"), "7_1": ("FAILED", None), "7_2": ("CANCELLED", None), "7_6": ("CANCELLED", None),
        "70_4": ("FAILED", "node2"),
    }  # fmt: skip
    assert "-j 7,70 " in calls.read_text()
    assert len(calls.read_text().splitlines()) == 1


def test_without_accounting_the_controller_is_asked_once_an_array(install: Install, tmp_path: Path) -> None:
    calls = tmp_path / "asked"
    install("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    answer = "JobId={} {}JobState={} ReqNodeList=node3 ExcNodeList=node4 NodeList={} BatchHost=node1"
    tasks = [
        answer.format(8, "ArrayJobId=7 ArrayTaskId=0 ", "NODE_FAIL", "node[1-2]"),
        answer.format(7, "ArrayJobId=7 ArrayTaskId=2-4%2 ", "PENDING", "(null)"),
    ]
    single_job, unknown = answer.format(5, "", "COMPLETED", "node1"), "echo 'Invalid job id specified' >&2; exit 1"
    array = "; ".join(f"echo '{line}'" for line in tasks)
    install("scontrol", f"echo $4 >> {calls}; case $4 in 7) {array};; 5) echo '{single_job}';; *) {unknown};; esac")
    outcomes = slurm.outcomes(["7_0", "7_1", "7_3", "5", "6"])
    assert outcomes == {"7_0": ("NODE_FAIL", "node[1-2]"), "7_3": ("PENDING", None), "5": ("COMPLETED", "node1")}
    assert calls.read_text().split() == ["5", "6", "7"]


def test_a_controller_that_restarts_is_asked_again(install: Install, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    count, refuse = tmp_path / "count", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    after_three_calls = f'[ "$(wc -l < {count})" -gt 3 ] &&'
    install(
        "squeue",
        f"echo >> {count}; {after_three_calls} {{ echo '5_1|RUNNING|None|isoflop:0:keeper:'; exit 0; }}; {refuse}",
    )
    assert slurm.queue() == [slurm.QueuedJob("5_1", False, "None", "isoflop:0:keeper:")]
    install("squeue", refuse)
    with pytest.raises(UserError, match="Unable to contact"):
        slurm.queue(patience=0.05)


def test_where_no_command_is_there_slurm_says_nothing(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert slurm.outcomes(["7"]) == {}
    assert slurm.elapsed(["7"]) == {}
    slurm.cancel(["7"])
    slurm.release(["7"])
    with pytest.raises(UserError, match="squeue does not answer"):
        slurm.queue()


def test_the_signal_of_a_preemption_does_not_kill_a_new_interpreter(tmp_path: Path) -> None:
    """Check that a new interpreter survives it, because SLURM does not requeue a job that ends in its grace time."""
    cluster = ClusterConfig(kind="slurm", python=f"env -- {sys.executable}")
    shape = JobShape(0, 1, 1.0, 5)
    for request in (Request("worker", shape, "x"), Request("keeper", shape, "x", light=True)):
        command = Submission("x", cluster, tmp_path, tmp_path, tmp_path)._python(request)
        code = "import os, signal, sys; os.kill(os.getpid(), signal.SIGUSR2); print('alive', *sys.argv[1:])"
        line = f"{command} -u -c {shlex.quote(code)} 'a b'"
        process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert process.stdout == "alive a b\n"


def test_the_time_of_a_job_is_that_of_all_its_starts(install: Install, tmp_path: Path) -> None:
    calls = tmp_path / "asked"
    install("sacct", f"echo $* >> {calls}; echo '5_1|30'; echo '5_1|12'; echo '5_2|7'; echo '5_[3-9]|0'; echo '6|0'")
    assert slurm.elapsed(["5_1", "5_3", "6", "8"]) == {"5_1": 42.0, "6": 0.0}
    (line,) = calls.read_text().splitlines()
    assert "-j 5,6,8 " in line, "an array is requested once"


@pytest.mark.parametrize(
    ("clock", "seconds"),
    [("30:00", 1800), ("01:02:03", 3723), ("1-00:00:01", 86401), ("UNLIMITED", None), ("infinite", None), ("", None)],
)
def test_slurms_clock_is_read(clock: str, seconds: int | None) -> None:
    assert slurm.seconds(clock) == seconds


# Recorded from SLURM 22.05: a task is killed, and `srun` then ends the others.
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
    ("log", "expected"),
    [
        (KILLED, "rank 2 on node2 ended first (Killed)"),
        (REQUEUE + KILLED, "rank 2 on node2 ended first (Killed)"),
        (KILLED.split("\n", 3)[3], "ranks 0-1 on node1 ended first (Killed)"),
        (REQUEUE, None),
        (KILLED + "isoflop.train.errors.UserError: the disk has no locks\n", "the disk has no locks"),
        ("", None),
        ("node1: out of ideas\n", None),
    ],
)
def test_the_first_task_to_end_is_named_by_sruns_own_words(log: str, expected: str | None) -> None:
    assert slurm.first_to_end(log) == expected


def submit_worker(install: Install, tmp_path: Path, cluster: ClusterConfig, shape: JobShape) -> str:
    """Submit a worker and return the script that sbatch receives."""
    install("srun", "")
    install("sbatch", f"cp $1 {tmp_path / 'script'}; echo Submitted batch job 7")
    jobs = Submission("grid", cluster, tmp_path / "jobs", tmp_path, tmp_path / "code")
    assert jobs.submit(Request("worker", shape, "isoflop:0:worker:"), print) == ["7"]
    return (tmp_path / "script").read_text()


def test_every_rank_is_a_task_with_its_own_cpus_memory_and_gpu(install: Install, tmp_path: Path) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=4, memory_gb=32.0, ranks_per_node=4)
    script = submit_worker(install, tmp_path, cluster, job_shape(ParallelConfig(tp=2, dp=4), cluster))
    for flag in ("nodes=2", "ntasks-per-node=4", "cpus-per-task=4", "mem=131072M", "gpus-per-node=4"):
        assert f"#SBATCH --{flag}\n" in script
    assert "export OMP_NUM_THREADS=4\n" in script
    (srun,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert {"--cpus-per-task=4", "--kill-on-bad-exit=1", "--distribution=block"} <= set(srun.split())


# Limits and resources of a cluster


CLUSTER = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=1, memory_gb=1.0, time_minutes=30)
NODES = r"""echo 'main*|4|2|64000|gpu:8|infinite'; echo 'debug|1|8|1000|(null)|30:00'
echo 'mixed|2|64|512000|gpu:h100:4(S:0-1),shard:8|1-00:00:00'; echo 'mixed|1|64|512000|gpu:a100:8|1-00:00:00'"""
CONFIG = """echo 'AccountingStorageEnforce = associations,limits'; echo 'ClusterName             = here'
echo 'MaxArraySize            = 1001'; echo 'SchedulerParameters     = bf_continue,max_array_tasks=500'"""
# Lines of the account, of the user, and of the QOS.
ACCOUNTING = """case "$*" in *'show user'*) echo ours;; *account=ours*) echo '||40||'; echo "$USERNAME|12||long";;
*name=long*) echo 'long|9||100';; *name=normal*) echo 'normal|||';; esac"""


@pytest.fixture
def commands(install: Install, tmp_path: Path, monkeypatch: Patch) -> Install:
    """Return a function that puts a script on a PATH that has no command of SLURM."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("USERNAME", slurm_cluster.getpass.getuser())
    return install


def run_of(cluster: ClusterConfig, **parallel: int) -> PlannedRun:
    run = RunConfig(model=ModelConfig(width=8, depth=1, heads=1, vocab_size=256), tokens=1024)
    for name, value in parallel.items():
        setattr(run.parallel, name, value)
    (planned,) = plan_runs([run], cluster, 1e12, 1).runs
    return planned


@pytest.mark.parametrize("character", [*" /%:\\,a+'$~(", "é", "日", "\u202e", "\x7f"])
def test_paths_with_signs_that_jobs_misread_are_refused_on_slurm_alone(character: str, tmp_path: Path) -> None:
    def is_refused(kind: str, **settings: str) -> bool:
        for folder, name in ((tmp_path, f"lr{character}up"), (tmp_path / f"lr{character}up", "sweep")):
            cluster = ClusterConfig(kind=kind, container=settings.get("container"))
            try:
                check(SweepConfig(sweep=name, output_root=str(folder), cluster=cluster, dry_run=True))
            except UserError:
                return True
        return False

    assert is_refused("slurm") == (character in "/%:\\" or not character.isprintable())
    assert is_refused("slurm", container="image.sif") == (character in "/%:\\," or not character.isprintable())
    assert is_refused("local") == (character == "/" or not character.isprintable())


def test_a_backslash_in_the_folder_that_jobs_are_started_from_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "a\\b").mkdir()
    monkeypatch.chdir(tmp_path / "a\\b")
    with pytest.raises(UserError, match="SLURM jobs cannot run in"):
        check(SweepConfig(sweep="s", output_root=str(tmp_path), cluster=ClusterConfig(kind="slurm"), dry_run=True))


def test_nothing_is_refused_and_nothing_limited_where_no_command_answers(commands: Install) -> None:
    slurm_cluster.check(CLUSTER, [run_of(CLUSTER)])
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(1001, None)
    assert slurm_cluster.expected_starts(CLUSTER, [JobShape(0, 1, 1.0, 5)]) == {}
    for name in ("sinfo", "sbatch", "scontrol", "sacctmgr"):
        commands(name, "echo 'error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    slurm_cluster.check(CLUSTER, [run_of(CLUSTER)])
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(1001, None)


def test_the_smallest_limit_of_user_account_and_qos_counts(commands: Install) -> None:
    commands("scontrol", CONFIG)
    commands("sacctmgr", ACCOUNTING)
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(500, 9)
    normal = dataclasses.replace(CLUSTER, qos="normal")
    assert slurm_cluster.limits(normal).max_submit == 12
    assert slurm_cluster.limits(dataclasses.replace(normal, max_submit=5)).max_submit == 5
    assert slurm_cluster.limits(dataclasses.replace(normal, account="theirs")).max_submit is None
    commands("scontrol", CONFIG.replace("associations,limits", "associations"))
    assert slurm_cluster.limits(CLUSTER).max_submit is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "gpu"}, "cluster.partition is 'gpu', which SLURM does not have; choose one of debug, main"),
        ({"partition": "debug", "gpus_per_job": 0, "time_minutes": 60}, "60, but partition debug allows 30"),
        (
            {"partition": "debug"},
            r"needs 1 GPU, 1 CPU and 1 GB on a node, but partition debug has 1 node of 8 CPUs and",
        ),
        (
            {"cpus_per_task": 3},
            "needs 1 GPU, 3 CPUs and 1 GB on a node, but partition main has 4 nodes of 8 GPUs, 2 CPUs",
        ),
        ({"memory_gb": 64.0}, "1 CPU and 64 GB on a node, but partition main has .* 2 CPUs and 62.5 GB"),
        ({"keeper_partition": "cpu"}, "cluster.keeper_partition is 'cpu', which SLURM does not have; choose one of"),
        ({"keeper_partition": "debug", "time_minutes": 90}, "'debug', which allows a job 30 minutes; it must .* 60"),
        ({"additional_parameters": {"partition": "debug"}}, "has partition, which cluster.partition sets; use that"),
        ({"additional_parameters": {"cpus_per_task": 2}}, "has cpus-per-task, which cluster.cpus_per_task sets"),
    ],
)
def test_what_the_cluster_does_not_have_is_named(commands: Install, settings: dict[str, object], message: str) -> None:
    commands("sinfo", NODES)
    cluster = dataclasses.replace(CLUSTER, **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        slurm_cluster.check(cluster, [run_of(CLUSTER), run_of(cluster)])
    fits = dataclasses.replace(CLUSTER, partition="main,mixed", keeper_partition="debug")
    slurm_cluster.check(fits, [run_of(CLUSTER)])


def test_a_run_of_many_ranks_needs_enough_nodes_that_can_host_their_share(commands: Install) -> None:
    commands("sinfo", NODES)
    wide = dataclasses.replace(CLUSTER, partition="mixed", ranks_per_node=8)
    slurm_cluster.check(wide, [run_of(wide, dp=8)])
    run = run_of(wide, dp=16)
    with pytest.raises(UserError, match=rf"run {run.run_id} .* needs 8 GPUs, 8 CPUs and 8 GB on each of 2 nodes"):
        slurm_cluster.check(wide, [run_of(wide, dp=8), run])
    narrow = dataclasses.replace(wide, ranks_per_node=4)
    slurm_cluster.check(narrow, [run_of(narrow, dp=12)])
    with pytest.raises(UserError, match=r"on each of 4 nodes, .* 1 node of 8 GPUs, .* and 2 nodes of 4 GPUs, "):
        slurm_cluster.check(narrow, [run_of(narrow, dp=16)])


# Recorded from SLURM 22.05.
@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("allocation failure: Invalid account or account/partition combination specified", True),
        ("allocation failure: Invalid qos specification", True),
        ("allocation failure: Invalid feature specification", True),
        # SLURM's answer for nodes that are down.
        ("allocation failure: Requested node configuration is not available", False),
        ("sbatch: error: AssocMaxSubmitJobLimit\nallocation failure: Job violates accounting/QOS policy", False),
        ("allocation failure: Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_a_refusal_is_passed_on_in_slurms_own_words(commands: Install, message: str, refused: bool) -> None:
    commands("sbatch", f"echo '{message}' >&2; exit 1")
    run = run_of(CLUSTER)
    if refused:
        with pytest.raises(UserError) as error:
            slurm_cluster.check(CLUSTER, [run])
        assert message.partition(": ")[2] in str(error.value)
        assert run.run_id in str(error.value)
    else:
        slurm_cluster.check(CLUSTER, [run])
    assert slurm_cluster.expected_starts(CLUSTER, [run.shape]) == {}


def test_the_expected_start_is_asked_for_each_shape_of_job(commands: Install, tmp_path: Path) -> None:
    answer = "sbatch: Job 7 to start at 2026-11-21T21:41:57 using 2 processors on nodes node1 in partition main"
    commands("sbatch", f"echo \"$*\" >> {tmp_path / 'asked'}; echo '{answer}' >&2")
    cluster = dataclasses.replace(
        CLUSTER, partition="main", constraint="h100", additional_parameters={"hold": True, "nice": 5, "exclusive": True}
    )
    shapes = [JobShape(1, 2, 4.0, 30, nodes=2, ranks_per_node=4), JobShape(0, 1, 1.0, 30)]
    starts = slurm_cluster.expected_starts(cluster, [shapes[0], *shapes])
    assert starts == dict.fromkeys(shapes, "2026-11-21T21:41:57")
    first, second = (tmp_path / "asked").read_text().splitlines()
    for flag in (
        "--test-only", "--partition=main", "--constraint=h100", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=2",
        "--mem=16384M", "--gpus-per-node=4", "--time=30", "--nice=5", "--exclusive",
    ):  # fmt: skip
        assert flag in first.split()
    assert "hold" not in first
    assert "gpus" not in second


@pytest.mark.slurm
@pytest.mark.usefixtures("own_cluster")
def test_a_real_cluster_is_read_aright() -> None:
    """Check against the cluster of tests/slurm_cluster.sh."""
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(1001, None)
    assert slurm_cluster.limits(dataclasses.replace(CLUSTER, account="small")).max_submit == 8
    run = run_of(CLUSTER)
    slurm_cluster.check(CLUSTER, [run])
    assert slurm_cluster.expected_starts(CLUSTER, [run.shape]).keys() == {run.shape}
    for setting, message in (
        ({"partition": "none"}, "which SLURM does not have; choose one of low, main"),
        ({"account": "none"}, r"\(Invalid account"),
        ({"qos": "none"}, r"\(Invalid qos"),
        ({"constraint": "none"}, r"\(Invalid feature"),
        ({"gpus_per_job": 9}, "needs 9 GPUs, 1 CPU and 1 GB on a node, but partition main has 4 nodes of 8 GPUs"),
    ):
        cluster = dataclasses.replace(CLUSTER, **setting)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message):
            slurm_cluster.check(cluster, [run_of(cluster)])
    assert not subprocess.run(["squeue", "-h", "-n", "wrap"], capture_output=True, check=True).stdout
