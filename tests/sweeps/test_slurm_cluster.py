"""What a cluster allows and has, from what real commands have said; and from a real cluster, where there is one."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from isoflop.sweeps.config import ClusterConfig, SweepConfig
from isoflop.sweeps.execute.conduct import check
from isoflop.sweeps.plan.sweep_plan import plan_runs
from isoflop.sweeps.runs.forms import JobShape, PlannedRun
from isoflop.sweeps.slurm import cluster as slurm_cluster
from isoflop.train.config import ModelConfig, RunConfig
from isoflop.train.errors import UserError

Install = Callable[[str, str], None]
CLUSTER = ClusterConfig(kind="slurm", gpus_per_job=1, cpus_per_task=1, memory_gb=1.0, time_minutes=30)
NODES = r"""echo 'main*|4|2|64000|gpu:8|infinite'; echo 'debug|1|8|1000|(null)|30:00'
echo 'mixed|2|64|512000|gpu:h100:4(S:0-1),shard:8|1-00:00:00'; echo 'mixed|1|64|512000|gpu:a100:8|1-00:00:00'"""
CONFIG = """echo 'AccountingStorageEnforce = associations,limits'; echo 'ClusterName             = here'
echo 'MaxArraySize            = 1001'; echo 'SchedulerParameters     = bf_continue,max_array_tasks=500'"""
# The account's own line, the user's, and the QOS's.
ACCOUNTING = """case "$*" in *'show user'*) echo ours;; *account=ours*) echo '||40||'; echo "$USERNAME|12||long";;
*name=long*) echo 'long|9||100';; *name=normal*) echo 'normal|||';; esac"""


@pytest.fixture
def install(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts shell scripts in the place of SLURM's commands, none of which is on the PATH otherwise."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("USERNAME", slurm_cluster.getpass.getuser())
    return install


def run_of(cluster: ClusterConfig, **parallel: int) -> PlannedRun:
    run = RunConfig(model=ModelConfig(width=8, depth=1, heads=1, vocab_size=256), tokens=1024)
    for name, value in parallel.items():
        setattr(run.parallel, name, value)
    (planned,) = plan_runs([run], cluster, 1e12, 1).runs
    return planned


@pytest.mark.parametrize("sign", [*" /%:\\,a+'$~(", "é", "日", "\u202e", "\x7f"])
def test_paths_with_signs_that_jobs_misread_are_refused_on_slurm_alone(sign: str, tmp_path: Path) -> None:
    def refused(kind: str, **settings: str) -> bool:
        for folder, name in ((tmp_path, f"lr{sign}up"), (tmp_path / f"lr{sign}up", "sweep")):
            cluster = ClusterConfig(kind=kind, container=settings.get("container"))
            try:
                check(SweepConfig(sweep=name, output_root=str(folder), cluster=cluster, dry_run=True))
            except UserError:
                return True
        return False

    assert refused("slurm") == (sign in "/%:\\" or not sign.isprintable())
    assert refused("slurm", container="image.sif") == (sign in "/%:\\," or not sign.isprintable())
    assert refused("local") == (sign == "/" or not sign.isprintable())


def test_a_backslash_in_the_folder_that_jobs_are_started_from_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a\\b").mkdir()
    monkeypatch.chdir(tmp_path / "a\\b")
    with pytest.raises(UserError, match="jobs on SLURM cannot work in"):
        check(SweepConfig(sweep="s", output_root=str(tmp_path), cluster=ClusterConfig(kind="slurm"), dry_run=True))


def test_nothing_is_refused_and_nothing_limited_where_no_command_answers(install: Install) -> None:
    slurm_cluster.check(CLUSTER, [run_of(CLUSTER)])
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(1001, None)
    assert slurm_cluster.expected_starts(CLUSTER, [JobShape(0, 1, 1.0, 5)]) == {}
    for name in ("sinfo", "sbatch", "scontrol", "sacctmgr"):
        install(name, "echo 'error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    slurm_cluster.check(CLUSTER, [run_of(CLUSTER)])
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(1001, None)


def test_the_smallest_limit_of_user_account_and_qos_counts(install: Install) -> None:
    install("scontrol", CONFIG)
    install("sacctmgr", ACCOUNTING)
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(500, 9)
    normal = dataclasses.replace(CLUSTER, qos="normal")
    assert slurm_cluster.limits(normal).max_submit == 12
    assert slurm_cluster.limits(dataclasses.replace(normal, max_submit=5)).max_submit == 5
    assert slurm_cluster.limits(dataclasses.replace(normal, account="theirs")).max_submit is None
    install("scontrol", CONFIG.replace("associations,limits", "associations"))
    assert slurm_cluster.limits(CLUSTER).max_submit is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"partition": "gpu"}, "cluster.partition is 'gpu', which SLURM does not have; it has debug, main, mixed"),
        ({"partition": "debug", "gpus_per_job": 0, "time_minutes": 60}, "60, and partition debug allows 30"),
        (
            {"partition": "debug"},
            r"needs 1 GPU, 1 CPU and 1 GB on a node, and partition debug has 1 node of 8 CPUs and",
        ),
        (
            {"cpus_per_task": 3},
            "needs 1 GPU, 3 CPUs and 1 GB on a node, and partition main has 4 nodes of 8 GPUs, 2 CPUs",
        ),
        ({"memory_gb": 64.0}, "1 CPU and 64 GB on a node, and partition main has .* 2 CPUs and 62.5 GB"),
        ({"keeper_partition": "cpu"}, "cluster.keeper_partition is 'cpu', which SLURM does not have; it has debug,"),
        ({"keeper_partition": "debug", "time_minutes": 90}, "'debug', which allows a job 30 minutes; it must .* 60"),
        ({"additional_parameters": {"partition": "debug"}}, "has partition, which cluster.partition sets; give that"),
        ({"additional_parameters": {"cpus_per_task": 2}}, "has cpus-per-task, which cluster.cpus_per_task sets"),
    ],
)
def test_what_the_cluster_does_not_have_is_named(install: Install, settings: dict[str, object], said: str) -> None:
    install("sinfo", NODES)
    cluster = dataclasses.replace(CLUSTER, **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=said):
        slurm_cluster.check(cluster, [run_of(CLUSTER), run_of(cluster)])
    fits = dataclasses.replace(CLUSTER, partition="main,mixed", keeper_partition="debug")
    slurm_cluster.check(fits, [run_of(CLUSTER)])


def test_a_run_of_many_ranks_needs_enough_nodes_that_can_host_their_share(install: Install) -> None:
    install("sinfo", NODES)
    wide = dataclasses.replace(CLUSTER, partition="mixed", ranks_per_node=8)
    slurm_cluster.check(wide, [run_of(wide, dp=8)])
    run = run_of(wide, dp=16)
    with pytest.raises(UserError, match=rf"run {run.run_id} .* needs 8 GPUs, 8 CPUs and 8 GB on each of 2 nodes"):
        slurm_cluster.check(wide, [run_of(wide, dp=8), run])
    narrow = dataclasses.replace(wide, ranks_per_node=4)
    slurm_cluster.check(narrow, [run_of(narrow, dp=12)])
    with pytest.raises(UserError, match=r"on each of 4 nodes, .* 1 node of 8 GPUs, .* and 2 nodes of 4 GPUs, "):
        slurm_cluster.check(narrow, [run_of(narrow, dp=16)])


# Taken from SLURM 22.05.
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("allocation failure: Invalid account or account/partition combination specified", True),
        ("allocation failure: Invalid qos specification", True),
        ("allocation failure: Invalid feature specification", True),
        (
            "allocation failure: Requested node configuration is not available",
            False,
        ),  # so it says of nodes that are down
        ("sbatch: error: AssocMaxSubmitJobLimit\nallocation failure: Job violates accounting/QOS policy", False),
        ("allocation failure: Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_a_refusal_is_passed_on_in_slurms_own_words(install: Install, words: str, refused: bool) -> None:
    install("sbatch", f"echo '{words}' >&2; exit 1")
    run = run_of(CLUSTER)
    if refused:
        with pytest.raises(UserError) as error:
            slurm_cluster.check(CLUSTER, [run])
        assert words.partition(": ")[2] in str(error.value)
        assert run.run_id in str(error.value)
    else:
        slurm_cluster.check(CLUSTER, [run])
    assert slurm_cluster.expected_starts(CLUSTER, [run.shape]) == {}


def test_the_expected_start_is_asked_for_each_shape_of_job(install: Install, tmp_path: Path) -> None:
    said = "sbatch: Job 7 to start at 2026-11-21T21:41:57 using 2 processors on nodes node1 in partition main"
    install("sbatch", f"echo \"$*\" >> {tmp_path / 'asked'}; echo '{said}' >&2")
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
    """The cluster of tests/slurm_cluster.sh."""
    assert slurm_cluster.limits(CLUSTER) == slurm_cluster.Limits(1001, None)
    assert slurm_cluster.limits(dataclasses.replace(CLUSTER, account="small")).max_submit == 8
    run = run_of(CLUSTER)
    slurm_cluster.check(CLUSTER, [run])
    assert slurm_cluster.expected_starts(CLUSTER, [run.shape]).keys() == {run.shape}
    for setting, words in (
        ({"partition": "none"}, "which SLURM does not have; it has low, main"),
        ({"account": "none"}, r"\(Invalid account"),
        ({"qos": "none"}, r"\(Invalid qos"),
        ({"constraint": "none"}, r"\(Invalid feature"),
        ({"gpus_per_job": 9}, "needs 9 GPUs, 1 CPU and 1 GB on a node, and partition main has 4 nodes of 8 GPUs"),
    ):
        cluster = dataclasses.replace(CLUSTER, **setting)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=words):
            slurm_cluster.check(cluster, [run_of(cluster)])
    assert not subprocess.run(["squeue", "-h", "-n", "wrap"], capture_output=True, check=True).stdout
