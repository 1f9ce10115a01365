"""`python sweep.py` as a command: its files, resuming, shared trunks, and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml
from isoflop.fit import read_table
from isoflop.fit.checks.doctor import examine
from isoflop.sweeps.entry import sweep_main
from isoflop.sweeps.runs.directory import SweepDirectory
from small_runs import SMOKE, Capture, Patch, set_state, until

ROOT = Path(__file__).resolve().parents[2]
# As SMOKE, but long enough to be interrupted: a few seconds, a checkpoint every few steps.
LONG = [*SMOKE[:5], "grid.sizes=[5e3]", "grid.tokens=[200000]", "checkpoint.every_steps=20", "sweep=long"]


def sweep_process(arguments: list[str], output_root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "sweep.py"), *arguments, f"output_root={output_root}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=interruptible
    )


def interruptible() -> None:
    """Restore Ctrl-C, which a process ignores if the tests were started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def losses(sweep: Path) -> dict[str, float]:
    """Return the final held-out loss of each finished run."""
    result = {}
    for run in SweepDirectory.open(sweep).runs():
        summary = run.summary()
        if run.is_done() and summary is not None:
            result[run.run_id] = summary["val_loss"]
    return result


def test_a_sweep_writes_what_the_contract_says(smoke: tuple[Path, str]) -> None:
    sweep, output = smoke
    settings = yaml.safe_load((sweep / "sweep.yaml").read_text())
    assert {"isoflop_version", "git_commit", "git_dirty", "host", "command", "config"} <= set(settings)
    plan = json.loads((sweep / "plan.json").read_text())
    assert len(plan["runs"]) == 4
    assert {"run_id", "N_total", "D", "flops_6nd", "flops_exact", "shape", "estimated_seconds", "parent"} <= set(
        plan["runs"][0]
    )
    for run in SweepDirectory.open(sweep).runs():
        for name in ("config.yaml", "state.json", "metrics.jsonl", "summary.json", "log.txt"):
            assert (run.path / name).is_file(), name
        summary = run.summary() or {}
        fields = {"N_total", "N_non_embedding", "D", "flops_6nd", "flops_exact", "val_loss", "val_loss_se", "val_bpb"}
        assert fields | {"seconds", "device"} <= set(summary)
        assert (run.path / summary["checkpoint"] / "model.safetensors").is_file()
    table = pd.read_csv(sweep / "table.csv")
    assert len(table) == 4
    assert table["run_id"].is_unique
    assert {"N", "D", "loss", "loss_se", "flops", "run_id"} <= set(table)
    by_size = table.sort_values(["N", "D"])["loss"]
    # Ln 256, the loss of a uniform prediction.
    assert by_size.iloc[-1] == by_size.min() < by_size.max() == by_size.iloc[0] < 5.545
    assert table[["schedule", "decay_share", "tokenizer", "vocab_size"]].drop_duplicates().values.tolist() == [
        ["wsd", 0.2, "bytes", 256]
    ]
    assert (table[["learning_rate", "batch_size", "sequence_length", "unique_tokens"]] > 0).all(axis=None)
    assert table["trunk"].isna().all()
    # Two sizes, two D, and tiny models.
    assert {warning.code for warning in examine(read_table(sweep))} == {"few_runs", "narrow_span", "flop_convention"}
    assert (sweep / "fit" / "law.json").is_file()
    assert json.loads((sweep / "costs.json").read_text())["cpu_share"] > 0
    assert f"report: {sweep / 'fit' / 'report.html'}\n" in output


@pytest.mark.usefixtures("quick_pictures")
def test_again_trains_nothing(sweep: SweepDirectory, capfd: Capture) -> None:
    before = {path: path.stat().st_mtime_ns for path in sweep.path.glob("runs/*/metrics.jsonl")}
    assert sweep_main([*SMOKE, "fit.bootstrap=20", f"output_root={sweep.path.parent}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in sweep.path.glob("runs/*/metrics.jsonl")} == before
    assert "report.html" in capfd.readouterr().out


def test_a_sweep_of_which_nothing_is_done_fits_nothing(
    sweep: SweepDirectory, capfd: Capture, monkeypatch: Patch
) -> None:
    def diverge(*arguments: object) -> None:
        for run in sweep.runs():
            set_state(run, "diverged", reason="the loss rose")

    shutil.rmtree(sweep.path / "fit")
    for run in sweep.runs():
        (run.path / "summary.json").unlink()
    monkeypatch.setattr("isoflop.sweeps.execute.local.LocalBackend.train", diverge)
    assert sweep_main([*SMOKE, f"output_root={sweep.path.parent}"]) == 1
    assert capfd.readouterr().out.count("is diverged: the loss rose") == 4
    assert not (sweep.path / "fit").exists()


def test_the_same_science_has_the_same_id_in_any_sweep(smoke: tuple[Path, str], tmp_path: Path, capfd: Capture) -> None:
    other = [*SMOKE, "sweep=other", "cluster.minutes=1", "log_every=3", f"output_root={tmp_path}", "dry_run=true"]
    assert sweep_main(other) == 0
    output = capfd.readouterr().out
    assert all(run.run_id in output for run in SweepDirectory.open(smoke[0]).runs())
    assert not list(tmp_path.iterdir())  # a dry run writes nothing


def wait_for_steps(root: Path, further: int) -> None:
    """Wait until the run of LONG is `further` steps past its newest checkpoint. It may be a few steps more."""
    until(lambda: list(root.glob("long/runs/*/metrics.jsonl")))
    (path,) = root.glob("long/runs/*/metrics.jsonl")
    newest = max((int(folder.name[5:]) for folder in path.parent.glob("checkpoints/step_*")), default=0)
    until(lambda: steps(path) >= newest + further)


def steps(path: Path) -> int:
    lines = path.read_text().splitlines()
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0


def workers_of(root: Path) -> list[int]:
    """Return the ids of other processes whose command line names this output root."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(root).encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def everything_is_killed(process: subprocess.Popen[str], root: Path) -> None:
    for pid in [process.pid, *workers_of(root)]:
        os.kill(pid, signal.SIGKILL)


def the_launcher_is_killed(process: subprocess.Popen[str], root: Path) -> None:
    process.kill()
    # No launcher signals the workers; they must notice, save, and exit.
    until(lambda: not workers_of(root), 30)


def a_worker_is_killed(process: subprocess.Popen[str], root: Path) -> None:
    (worker,) = [pid for pid in workers_of(root) if b"core._submit" in Path(f"/proc/{pid}/cmdline").read_bytes()][:1]
    os.kill(worker, signal.SIGKILL)


def control_c(process: subprocess.Popen[str], root: Path) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_and_ends_with_the_same_losses(tmp_path: Path) -> None:
    for disturb, exit_code, state in [
        (a_worker_is_killed, 1, "failed"),
        (the_launcher_is_killed, -signal.SIGKILL, "preempted"),
        (control_c, 130, "preempted"),
        (everything_is_killed, -signal.SIGKILL, "running"),
    ]:
        process = sweep_process([*LONG, "cluster.retries=0"], tmp_path)
        wait_for_steps(tmp_path, 25)
        disturb(process, tmp_path)
        code, output = finished(process)
        assert code == exit_code, output
        assert "Traceback" not in output
        (run,) = SweepDirectory.open(tmp_path / "long").runs()
        assert run.state().state == state, disturb
    code, output = finished(sweep_process(LONG, tmp_path))
    assert code == 0, output
    assert (run.path / "log.txt").read_text().count("resumed from step_") == 4
    code, output = finished(sweep_process(LONG, tmp_path / "undisturbed"))
    assert code == 0, output
    assert losses(tmp_path / "long") == losses(tmp_path / "undisturbed" / "long")  # to the last bit


COMMON = [
    *SMOKE[1:5], "data.max_bytes=2000000", "data.sequence_length=64", "data.validation_tokens=8192", "validations=2",
    "fit.bootstrap=50", "cluster.jobs=2", "cluster.threads_per_job=1", "tuning=fixed", "preflight=false", "sweep=s",
]  # fmt: skip
# One rung with three D: 95, 190 and 380 steps; the longest run is the trunk of the others.
RUNG = ["+grid=ladder", "grid.sizes=[5e3]", "grid.tokens_per_parameter=[10,20,40]", *COMMON]


@pytest.mark.slow
def test_an_interrupted_trunk_and_its_branches_end_as_runs_trained_separately(tmp_path: Path) -> None:
    shared, separate = tmp_path / "shared", tmp_path / "separate"
    process = sweep_process([*RUNG, "checkpoint.every_steps=30"], shared)
    until(lambda: any(steps(path) >= 60 for path in shared.glob("s/runs/*/metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    code, output = finished(process)
    assert code == 130, output
    assert "2 of 3 runs branch from 1 trunk" in " ".join(output.split())
    for arguments, root in ((RUNG, shared), ([*RUNG, "trunks=false"], separate)):
        code, output = finished(sweep_process(arguments, root))
        assert code == 0, output
    assert losses(shared / "s") == losses(separate / "s")  # to the last bit
    shared_plan, separate_plan = (json.loads((root / "s" / "plan.json").read_text()) for root in (shared, separate))
    trunk, *branches = sorted(shared_plan["runs"], key=lambda run: -run["D"])
    assert [run["parent"] for run in (trunk, *branches)] == [None, trunk["run_id"], trunk["run_id"]]
    assert [run["first_step"] for run in branches] == [round(0.8 * run["steps"]) for run in branches]
    assert shared_plan["separate_flops"] == pytest.approx(separate_plan["total_flops"])
    # 4 units and a fifth of 2 + 1, instead of 7.
    assert shared_plan["total_flops"] / separate_plan["total_flops"] == pytest.approx(4.6 / 7, rel=0.01)
    assert len(set(read_table(shared / "s").group)) == 1, "runs of one trunk are resampled together"


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_run_is_tried_again(tmp_path: Path) -> None:
    grid = ["+grid=product", "model.width=16", "model.depth=1", "model.heads=1", "grid.axes={seed:[0,1,2]}"]
    settings = ["tokens=40000", "trunks=false", "cluster.jobs=1", "cluster.backoff_seconds=0"]
    process = sweep_process([*grid, *COMMON, *settings], tmp_path)

    def process_ids() -> list[str]:
        logs = [path.read_text() for path in tmp_path.glob("s/runs/*/log.txt")]
        return re.findall(r"process (\d+)", "".join(logs))

    until(process_ids)
    os.kill(int(process_ids()[0]), signal.SIGKILL)
    code, output = finished(process)
    assert code == 0, output
    runs = SweepDirectory.open(tmp_path / "s").runs()
    causes = sorted([attempt.cause for attempt in run.record().attempts] for run in runs)
    assert causes == [["done"], ["done"], ["killed", "done"]]
    assert len(set(process_ids())) == 2, "the second worker trained all remaining runs"


@pytest.mark.slow
def test_without_benchmarks_the_laws_are_fitted_all_the_same(tmp_path: Path, monkeypatch: Patch) -> None:
    arguments = [argument for argument in SMOKE if argument != "evaluate=none"]
    arguments += ["grid.sizes=[5e3]", "grid.tokens=[8192]", "sweep=u"]
    monkeypatch.setenv("ISOFLOP_CACHE", str(tmp_path / "cache"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, output = finished(sweep_process(arguments, tmp_path))
    assert code == 1, output
    assert "not scored: " in output
    assert "isoflop data benchmarks" in output
    assert (tmp_path / "u" / "fit" / "report.html").exists()


@pytest.mark.slow
def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    first = sweep_process(LONG, tmp_path)
    try:
        until(lambda: (tmp_path / "long" / "plan.json").exists())
        code, output = finished(sweep_process(LONG, tmp_path))
        assert code == 2
        assert f"is in use (sweep is held by process {first.pid} on " in output
        assert len(output.strip().splitlines()) == 1
    finally:
        first.send_signal(signal.SIGINT)
        code, output = finished(first)
    assert code == 130, output


@pytest.mark.slow
def test_a_diverged_run_is_reported_and_the_others_are_fitted(tmp_path: Path) -> None:
    # At a learning rate of 1e30 weights overflow in the first step.
    arguments = [*SMOKE, "+grid=product", "tokens=16384", "grid.axes={optimizer.learning_rate:[6e-3,1e30]}", "sweep=d"]
    arguments.remove("+grid=smoke")
    arguments += ["model.width=8", "model.depth=1", "model.heads=1", "data.validation_tokens=4096"]
    code, output = finished(sweep_process(arguments, tmp_path))
    assert code == 1, output
    states = sorted(run.state().state for run in SweepDirectory.open(tmp_path / "d").runs())
    assert states == ["diverged", "done"]
    assert "is diverged: the gradient norm is not finite at step" in output
    assert len(pd.read_csv(tmp_path / "d" / "table.csv")) == 1
    assert (tmp_path / "d" / "fit" / "report.html").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one mebibyte and return its folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_fails_the_run_with_the_reason_and_nothing_is_lost(small_disk: Path) -> None:
    # One size of 100k parameters: its checkpoint, 1.2 MB with Adam's moments, cannot fit.
    arguments = [*SMOKE, "grid.sizes=[1e5]", "grid.tokens=[8192]", "sweep=s", "cluster.retries=1"]
    code, output = finished(sweep_process(arguments, small_disk))
    assert code in (1, 2), output
    assert "Traceback" not in output
    (run,) = SweepDirectory.open(small_disk / "s").runs()
    assert run.state().state == "failed"
    assert "the disk is full" in (run.state().reason or "")
    assert not list(run.path.glob("checkpoints/step_*"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, output = finished(sweep_process(arguments, small_disk))
    assert code == 0, output
    assert run.is_done()


def error_of(arguments: list[str], capsys: Capture) -> str:
    """Run a sweep in this process that must exit with code 2, and return its one-sentence error."""
    code = sweep_main(arguments)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    return line


BAD = [  # numbers out of range are tried in test_fields.py, grids in test_grid.py
    (["grid.budgts=[1]"], "grid.budgts"),
    (["+data.mixture={code:0.7}"], "data.mixture is not a field; data has corpus, path"),
    (["+model.a.b=1"], "model.a is not a field"),
    (["model.width=wide"], "could not be converted to Integer"),
    (["model.width=null"], "model.width cannot be null"),
    (["schedule=null"], "Config group override must be a string or a list"),
    (["grid.variants={a:[model.foo=3]}"], "model.foo"),
    (["data=text", "data.path=/nonexistent/é"], "data.path is '/nonexistent/é'"),
    (["data.path=[a,b]"], "data.path is a list; it must be one file, folder or glob"),
    (["data.path=a,b"], "data.path=a,b has several values; it must be one file, folder or glob"),
    (["words"], "'words' cannot be read as FIELD=VALUE"),
    (["precision=fp8"], "precision is 'fp8'; it must be one of fp32, bf16"),
    (["data.tokenizer=/nonexistent/tokenizer.json"], "/nonexistent/tokenizer.json"),
    (["parallel.micro_batch_size=3", "optimizer.batch_size=8"], "it must divide optimizer.batch_size 8: 1, 2, 4, 8"),
    (["data=text"], "data.path is null"),
    (["model.window=65"], "model.window is 65; it must be 1 to data.sequence_length 64"),
    (["data.validation_tokens=1"], "data.validation_tokens is 1; it must be at least data.sequence_length 64"),
    (["grid.stop_hopeless=true"], "grid.stop_hopeless is true"),
    (["fit.targets=[1e15,1e15]"], "fit.targets contains 1000000000000000.0 more than once"),
    (["cluster.kind=cloud"], "it must be one of local, slurm"),
    (["sweep=a/b"], "sweep is 'a/b'"),
    (["sweep=.."], "sweep is '..'; it must be the name of one folder under output_root"),
    (["sweep='<script>'"], "sweep is '<script>'; it must be the name of one folder"),
    (["sweep='a\nb'"], r"sweep is 'a\nb'; it must be the name of one folder"),
    ([f"sweep={'a' * 300}"], "at most 200 bytes"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_bad_input_leaves_nothing(overrides: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    line = error_of([*SMOKE, f"output_root={tmp_path}", *overrides], capsys)
    assert message in line
    assert not list(tmp_path.iterdir())


def test_no_grid_names_the_grids(capsys: Capture) -> None:
    assert (
        "+grid=NAME with one of adaptive, attention, chinchilla, compare, curves, data_recipe, experts, ladder, "
        in error_of(["cluster=local"], capsys)
    )


def test_a_field_that_does_not_exist_is_refused_in_a_file_of_the_users_too(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text("corpus: zen\nmixture: {code: 0.7}\n")
    assert "data.mixture is not a field" in error_of(["--config-dir", str(tmp_path), "+grid=smoke", "data=own"], capsys)


def test_slurm_without_sbatch_is_refused(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["+grid=smoke", "cluster=slurm", "tracker=none", f"output_root={tmp_path / 'out'}"]
    assert "sbatch is not on the PATH" in error_of(arguments, capsys)


@pytest.mark.parametrize("output_root", ["/proc/nowhere", "file/outputs"])
def test_an_unwritable_folder_is_refused(output_root: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    assert output_root.split("/")[-1] in error_of([*SMOKE, f"output_root={output_root}"], capsys)


def test_an_empty_corpus_and_an_unreadable_line_are_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "one"}\n{"text": broken\n')
    for path, message in ((tmp_path / "empty", "empty"), (bad, "bad.jsonl")):
        code = sweep_main(
            [*SMOKE, "data=text", f"data.path={path}", "data.tokenizer=bytes", f"output_root={tmp_path / 'o'}"]
        )
        captured = capsys.readouterr()
        assert code in (1, 2)
        assert message in captured.out + captured.err
        assert "Traceback" not in captured.out + captured.err


def test_a_text_shorter_than_a_window_is_refused_before_any_run(tmp_path: Path, capsys: Capture) -> None:
    (path := tmp_path / "short.txt").write_text("".join(f"{number}\n\n" for number in range(2000)))
    options = ["data=text", f"data.path={path}", "data.tokenizer=bytes", "data.sequence_length=1024"]
    assert sweep_main([*SMOKE, *options, "preflight=false", f"output_root={tmp_path / 'o'}"]) == 2
    captured = capsys.readouterr()
    assert "note: the held-out text has about 218 tokens, fewer than data.validation_tokens 16,384" in captured.out
    assert "error: data.sequence_length is 1024; it must be at most" in captured.err
    assert not list(tmp_path.glob("o/*/runs/*/log.txt"))


MULTIRUNS = [
    (["+grid=smoke", "seed=0,1"], ["smoke_seed=0", "smoke_seed=1"]),
    (["+grid=smoke,ladder", "sweep=s"], ["s_grid=smoke", "s_grid=ladder"]),
    (["+grid=smoke", "seed=range(0,2)", "grid.sizes=[5e3],[5e3,6e3]"],
     [f"smoke_seed={seed}_grid.sizes={sizes}" for seed in (0, 1) for sizes in ("5000.0", "5000.0,6000.0")]),
    (["+grid=smoke", "data=text", 'data.path="a b/c","ü:%"'], ["smoke_data.path=a-b-c", "smoke_data.path=ü-"]),
    (["+grid=smoke", "seed=3"], ["smoke"]),
]  # fmt: skip


@pytest.fixture
def sweep_names(tmp_path: Path, monkeypatch: Patch) -> list[str]:
    """Replace running a sweep; return the list of the names of the sweeps that would run."""
    names: list[str] = []
    monkeypatch.setattr(
        "isoflop.sweeps.execute.conduct.conduct", lambda config, command: names.append(config.sweep) or 0
    )
    monkeypatch.chdir(tmp_path)
    return names


@pytest.mark.parametrize(
    ("overrides", "folders"),
    [
        pytest.param(*case, id=" ".join(case[0]), marks=[pytest.mark.slow] if number else [])
        for number, case in enumerate(MULTIRUNS)
    ],
)
def test_jobs_of_a_multirun_have_folders(overrides: list[str], folders: list[str], sweep_names: list[str]) -> None:
    assert sweep_main(["--multirun", "cluster=local", *overrides]) == 0
    assert sweep_names == folders
    if len(overrides) == 1 or overrides[1] == "seed=3":  # the flag has two forms and may be anywhere
        assert sweep_main(["cluster=local", *overrides[:1], "-m", *overrides[1:]]) == 0
        assert sweep_names == 2 * folders


def test_the_name_of_a_multiruns_folder_fits_a_file_system(sweep_names: list[str]) -> None:
    assert sweep_main(["--multirun", "+grid=smoke", "cluster=local", f"data.path={'a' * 150}1,{'a' * 150}2"]) == 0
    assert len(set(sweep_names)) == 2
    assert all(len(name) < 140 for name in sweep_names)
