"""External programs as the runs of a grid: done, killed and resumed, and every way in which a program may misbehave."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import isoflop
import pytest
from isoflop.evaluate.records import read_items
from isoflop.sweeps.config import base_run
from isoflop.sweeps.entry import compose, sweep_main
from isoflop.sweeps.execute import attempt
from isoflop.sweeps.observe import doctor
from isoflop.sweeps.prepare import from_config
from isoflop.sweeps.results import scoring
from isoflop.sweeps.results.table import build_table, sweep_curves
from isoflop.sweeps.runs import lease
from isoflop.sweeps.runs.attempts import Policy
from isoflop.sweeps.runs.directory import RunDirectory, SweepDirectory
from isoflop.train.config import ModelConfig, RunConfig, TrackerConfig, TrainerConfig, run_id
from isoflop.train.errors import UserError
from isoflop.train.external import program
from isoflop.train.files import read_json_lines
from isoflop.train.job.environment import Ranks
from isoflop.train.planner.command import check_command, command_line
from small_runs import Capture, Patch, logged_steps

ROOT = Path(isoflop.__file__).resolve().parent
# A trainer of a tenth of a second: it logs every 5 steps, saves every 10, and resumes exactly.
TRAINER = """
import json, os, sys, time
out, steps, width, pause, resume = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]
state = json.load(open(resume[0])) if resume else {"step": 0, "loss": 6.0}
log = open(f"{out}/log.jsonl", "a", buffering=1)
while state["step"] < steps:
    time.sleep(pause)
    state = {"step": state["step"] + 1, "loss": state["loss"] - 0.9 / width / (state["step"] + 3) ** 0.5}
    if state["step"] % 5 == 0:
        log.write(json.dumps({"step": state["step"], "train_loss": state["loss"], "lr": 0.1}) + chr(10))
    if state["step"] % 10 == 0:
        print("saved", state["step"])
        with open(f"{out}/new", "w") as file:
            json.dump(state, file)
        os.replace(f"{out}/new", f"{out}/checkpoint-{state['step']}")
log.write(json.dumps({"step": steps, "val_loss": state["loss"] + 0.1}) + chr(10))
"""
COMMAND = "{python} trainer.py {{run}} {{steps}} {{model.width}} {pause} {{resume}}"


def config_of(command: Any, folder: Path, steps: int = 40, **trainer: Any) -> RunConfig:
    """Return a run of some steps by a command that is planned in `folder`."""
    return RunConfig(
        model=ModelConfig(width=16, depth=1, heads=2, vocab_size=256), tokens=steps * 1024,
        trainer=TrainerConfig("command", command, **{"folder": str(folder), "grace_seconds": 0.3} | trainer),
        tracker=TrackerConfig(kind="none"),
    )  # fmt: skip


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    (tmp_path / "trainer.py").write_text(TRAINER)
    return tmp_path


def train(config: RunConfig, folder: Path, stop_after: float = 1e9) -> lease.Ending:
    """Train a run once, told to stop after `stop_after` seconds, and return how it ended."""
    run = RunDirectory(folder / "s" / "runs" / run_id(config))
    run.freeze(config)
    interrupt, began = attempt.Interrupt(), time.monotonic()
    interrupt._alive = lambda: time.monotonic() < began + stop_after
    with lease.hold(run, "1", Policy()) as record:
        assert record is not None
        ending = attempt.train_one(run, Ranks(), interrupt, Policy())
        lease.conclude(run, ending)
    return ending


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code.replace("{", "{{").replace("}", "}}")]


@pytest.mark.usefixtures("quick_pictures")
def test_a_grid_of_programs_is_trained_like_one_of_ours(trainer: Path, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.chdir(trainer)
    command = COMMAND.format(python=sys.executable, pause=0)
    overrides = [
        "+grid=ladder", "grid.sizes=[2e4,6e4]", "grid.tokens_per_parameter=[2]", "fit.bootstrap=0",
        "optimizer.batch_size=8", "tracker=none", "cluster=local", "cluster.jobs=1", "cluster.flops_per_second=1e11",
        "sweep=s", "trainer=command", f'trainer.command="{command}"', "data.sequence_length=64",
    ]  # fmt: skip
    assert sweep_main(overrides) == 0
    assert "benchmarks of 2 runs are left out: the program left no Hugging Face folder" in capfd.readouterr().out
    sweep = SweepDirectory.open(trainer / "outputs" / "s")
    table = build_table(sweep)
    assert len(table) == 2
    assert (table["loss"] > 1).all()
    assert (table["D"] > 1.9 * table["N"]).all()
    assert set(sweep_curves(sweep)["run_id"]) == set(table["run_id"])
    assert doctor.examine_sweep(sweep, repair=False) == []
    assert all("saved 10" in (run.path / "log.txt").read_text() for run in sweep.runs())
    assert not (sweep.path / "preflight.json").exists()


def test_a_stopped_and_a_killed_program_resume_with_equal_losses(trainer: Path, tmp_path: Path) -> None:
    whole, parts = (config_of(COMMAND.format(python=sys.executable, pause=pause), trainer, 80) for pause in (0, 0.1))
    assert train(whole, tmp_path).state == "done"
    assert train(parts, tmp_path, stop_after=1.5).state == "preempted"
    path = tmp_path / "s" / "runs" / run_id(parts)

    def saved() -> int:
        steps = [int(file.name.rpartition("-")[2]) for file in (path / "program").glob("checkpoint-*")]
        return max(steps, default=0)

    before = saved()
    # A worker that dies by kill -9 takes its program and the program's children with it.
    arguments = f"config_of({parts.trainer.command!r}, {str(trainer)!r}, 80), Path({str(tmp_path)!r})"
    code = f"from test_command import *; train({arguments})"
    paths = os.pathsep.join([str(ROOT.parent), str(ROOT / "tests"), str(Path(__file__).parent)])
    worker = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})
    while saved() == before:
        assert worker.poll() is None
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    sizes = [0, 1]
    while sizes[-1] != sizes[-2]:  # until the program is gone
        time.sleep(0.7)
        sizes.append((path / "program" / "log.jsonl").stat().st_size)
    assert saved() < 80
    assert train(parts, tmp_path).state == "done"
    attempts = RunDirectory(path).record().attempts
    assert [one.cause for one in attempts] == ["preempted", "killed", "done"]
    assert attempts[2].first_step > before
    ours, theirs = (logged_steps(tmp_path / "s" / "runs" / run_id(one)) for one in (parts, whole))
    losses = [
        {step: (row.get("train_loss"), row.get("val_loss")) for step, row in rows.items()} for rows in (ours, theirs)
    ]
    assert losses[0] == losses[1]


SPAWNS = "import subprocess, sys, time; subprocess.Popen(['sleep', '61.25'], start_new_session=True); "
MISBEHAVING = {
    "input: trainer.command begins with 'no-such-program'": ["no-such-program", "{run}"],
    "error: the program ended with exit code 0 without metrics": python("print('hello')"),
    "program: the program ended with exit code 3: no GPU": python("import sys; print('no GPU'); sys.exit(3)"),
    "killed: the program was ended by signal 9": python("import os; os.kill(os.getpid(), 9)"),
    "error: the program ended with exit code 0, but its last train_loss is at token 1.024e+04 of 4.096e+04":
        python("import json; [print(json.dumps({'step': s, 'train_loss': 3.0})) for s in range(1, 11)]"),
    "diverged: the loss is not finite from step 31 on":
        python("[print('{\"step\": %d, \"train_loss\": %s}' % (s, 3.0 if s < 31 else 'NaN')) for s in range(1, 41)]"),
    "hung: the program printed nothing for trainer.silence_seconds 1, and was stopped":
        python(SPAWNS + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"),
}  # fmt: skip


@pytest.mark.parametrize("expected", MISBEHAVING)
def test_a_program_that_misbehaves_is_one_sentence(expected: str, tmp_path: Path) -> None:
    config = config_of(MISBEHAVING[expected], tmp_path, silence_seconds=1.0 if "hung" in expected else 60.0)
    ending = train(config, tmp_path)
    cause = ending.cause or ending.state
    assert f"{cause}: {ending.reason}".startswith(expected)
    assert "\n" not in str(ending.reason)
    log = (tmp_path / "s" / "runs" / run_id(config) / "log.txt").read_text()
    assert ("ignored TERM" in log) == (cause == "hung")
    assert "Traceback" not in log
    alive = subprocess.run(["pgrep", "-f", "sleep 61.25"], capture_output=True).stdout
    assert not alive, "a child of the program is left"


def test_a_damaged_checkpoint_is_passed_over_after_two_failures(trainer: Path, tmp_path: Path) -> None:
    config = config_of(COMMAND.format(python=sys.executable, pause=0), trainer, metrics="log.jsonl")
    path = tmp_path / "s" / "runs" / run_id(config)
    (path / "program").mkdir(parents=True)
    (path / "program" / "checkpoint-10").write_text('{"step": 10, "loss": 4.5}')
    (path / "program" / "checkpoint-20").write_text("")
    assert [train(config, tmp_path).state for _ in range(3)] == ["failed", "failed", "done"]
    assert [file.name.partition(".")[0] for file in (path / "damaged").iterdir()] == ["checkpoint-20"]
    assert "twice from checkpoint-20" in (path / "log.txt").read_text()
    assert min(line["step"] for line in read_json_lines(path / "metrics.jsonl")) > 10


def test_much_output_is_cut_in_the_middle(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(program, "KEPT_FIRST", 1 << 20)
    code = "print('{\"step\": 40, \"val_loss\": 2.5}'); [print('x' * 1023) for _ in range(20_000)]; print('end')"
    config = config_of(python(code), tmp_path)
    assert train(config, tmp_path).state == "done"
    log = tmp_path / "s" / "runs" / run_id(config) / "log.txt"
    assert log.stat().st_size < 1.2e6
    assert "bytes are left out" in log.read_text()
    assert "\nend\n" in log.read_text()[-300:]
    assert read_json_lines(log.with_name("metrics.jsonl"))[-1]["val_loss"] == 2.5


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("t.py {model.dpeth}", "trainer.command names {model.dpeth}, which is not a field of a run; it may name"),
        ("t.py {model.window}", "trainer.command names {model.window}, which is null; set it, or leave it out"),
        ("t.py 'a", 'trainer.command is "t.py \'a", which cannot be filled in (No closing quotation); close quotes'),
        ("t.py {a", "trainer.command is 't.py {a', which cannot be filled in (expected '}' before end of string)"),
        ("t.py {seed:.3q}", "trainer.command is 't.py {seed:.3q}', which cannot be filled in"),
        (None, "trainer.command is None; it must be a text or a list of a program and its arguments"),
        ({"a": 1}, "trainer.command is {'a': 1}; it must be a text or a list"),
    ],
)
def test_a_template_is_checked_when_the_sweep_is_planned(command: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        check_command(config_of(command, tmp_path))
    assert str(refusal.value).startswith(expected)


def test_arguments_are_filled_in(trainer: Path) -> None:
    command = "./trainer.py --lr={optimizer.learning_rate:.2e} '{{a b}}' {tokens} --load={resume} --config=trainer.py"
    config = config_of(command, trainer)
    own = str(trainer / "trainer.py")
    rate = f"--lr={config.optimizer.learning_rate:.2e}"
    assert command_line(config, trainer) == [own, rate, "{a b}", "40960", f"--config={own}"]
    for name in ("checkpoint-9", "checkpoint-10.pt"):
        (trainer / name).touch()
    assert f"--load={trainer}/checkpoint-10.pt" in command_line(config, trainer)
    shell = config_of("echo {run} > $HOME/x", trainer, shell=True)
    assert command_line(shell, Path("/a b"))[-1] == "echo '/a b' > $HOME/x"


def test_run_ids() -> None:
    ours = RunConfig()
    assert run_id(replace(ours, trainer=TrainerConfig(grace_seconds=1.0, folder="/x"))) == run_id(ours)
    one = config_of("a {run}", Path("/x"))
    ids = [run_id(replace(one, trainer=replace(one.trainer, **change))) for change in (
        {}, {"folder": "/y", "silence_seconds": 5.0, "metrics": "*.jsonl"}, {"version": "2"}, {"command": "b {run}"},
    )]  # fmt: skip
    assert ids[0] == ids[1]
    assert len({run_id(ours), *ids}) == 4


def test_a_grid_picks_from_the_sizes_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "sizes.yaml").write_text("- {N: 9e4, layers: 3}\n- {N: 2e4, layers: 1}\n- {N: 4e4, layers: 2}\n")
    overrides = [
        "+grid=ladder", "trainer=command", f"trainer.sizes={tmp_path}/sizes.yaml", "sweep=s",
        'trainer.command="t --layers {size.layers}"', "grid.sizes=[2.2e4,3.5e4,8e4]", "grid.tokens_per_parameter=[20]",
        "cluster=local", "cluster.flops_per_second=1e11", f"output_root={tmp_path}",
    ]  # fmt: skip
    prepared = from_config(compose(overrides))
    assert sorted(run.N_total for run in prepared.plan.runs) == [20_000, 40_000, 90_000]
    layers = {int(run.model.size["N"]): command_line(run, tmp_path)[-1] for run in prepared.runs}
    assert layers == {20_000: "1", 40_000: "2", 90_000: "3"}
    assert all(run.flops_exact == 6 * run.N_total * run.D for run in prepared.plan.runs)
    with pytest.raises(UserError, match=r"trainer.sizes is \[{'n': 1}\]; trainer.sizes must be rows such as"):
        base_run(compose([*overrides, "trainer.sizes=[{n:1}]"]))


def test_a_hugging_face_folder_is_scored_by_lm_eval(tmp_path: Path, monkeypatch: Patch) -> None:
    import torch  # here, because a worker of another test imports this file
    from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=32, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = ByteLevelBPETokenizer({symbol: number for number, symbol in enumerate(symbols)}, [])
    PreTrainedTokenizerFast(tokenizer_object=bytewise._tokenizer, eos_token="<end>").save_pretrained(tmp_path / "model")
    copy = f"import shutil; shutil.copytree('{tmp_path}/model', 'hf'); print('{{\"step\": 40, \"val_loss\": 2.5}}')"
    config = config_of(python(copy), tmp_path)
    assert train(config, tmp_path).state == "done"
    run = RunDirectory(tmp_path / "s" / "runs" / run_id(config))
    rows = [("It is", ["red", "blue"]), ("A long question; it does not fit", ["so", "or"]), ("x", ["y" * 63, "z"])]
    lines = [json.dumps({"question": text, "choices": choices, "answer": 1}) for text, choices in rows]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    settings = {"tasks": [str(tmp_path / "own.jsonl")], "limit": None}
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "find_spec", lambda name: None)
        assert scoring.is_scored(run, settings)
        assert "pip install 'isoflop[bench]'" in str(scoring.why_unscored(run))
    assert not scoring.is_scored(run, settings)
    scoring.evaluate_run(run, settings, scoring.open_evaluator(settings, print))
    assert scoring.is_scored(run, settings)
    assert [scores["tokens"] for scores in scoring.evaluations(run).values()] == [config.D]
    items = read_items(run.path / "eval" / "step_40.items.jsonl.gz")
    assert [item["truncated"] for item in items] == [False, True, True]

    def nats(context: str, continuation: str) -> float:
        ids, count = torch.tensor([bytewise.encode(context + continuation).ids[-33:]]), len(continuation)
        logs = model(ids[:, :-1]).logits.log_softmax(-1)
        return logs.gather(2, ids[:, 1:, None])[0, -count:].sum().item()

    for item, (text, choices) in zip(items[:2], rows, strict=False):
        expected = [nats(text, f" {choice}") for choice in choices]
        assert item["log_probabilities"] == pytest.approx(expected, abs=1e-4)
    long = nats("x", " " + "y" * 31) + nats("y", "y" * 32)  # two windows of the model's context
    assert items[2]["log_probabilities"][0] == pytest.approx(long, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char_model", "hf_trainer"])
def test_an_example_of_its_readme_runs(name: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / name
    for path in ("train.py", f"trainer/{name}.yaml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((example / path).read_text())
    (tmp_path / "text.txt").write_bytes(Path(json.__file__).read_bytes() * 8)
    text = (example / "README.md").read_text().replace("\\\n", "")
    command = next(line for line in text.splitlines() if "isoflop sweep" in line)
    _, _, *arguments = shlex.split(command)
    (tmp_path / "own.jsonl").write_text('{"question": "x =", "choices": ["1", "None"], "answer": 1}\n' * 3)
    more = ["cluster=local", "fit.bootstrap=0", "grid.tokens_per_parameter=[0.5]", "cluster.flops_per_second=1e11"]
    more += [f"evaluate.tasks=[{tmp_path}/own.jsonl]"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "sweep.py"), *arguments, *more], cwd=tmp_path, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 0
    table = build_table(SweepDirectory.open(next((tmp_path / "outputs").iterdir())))
    assert (table["loss"] < 5).all()
    assert ("own/acc" in table and bool((table["own/items"] == 3).all())) == (name == "hf_trainer")
    assert any(tmp_path.glob("outputs/*/fit/evaluation.html")) == (name == "hf_trainer")
