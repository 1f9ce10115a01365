"""Logs of nine kinds of trainers become tables of metrics; damage costs single records and one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from isoflop.train.errors import UserError
from isoflop.train.logs.readers import number
from isoflop.train.logs.sources import ForeignRun, find_sources, read_runs

STEPS = range(10, 101, 10)
LOSS = {step: 2.0 + 30 / step for step in STEPS}
N = 1_000_000


def read(
    path: Path, patterns: Any = None, columns: Any = None, tokens_per_step: float | None = None
) -> list[ForeignRun]:
    sources = find_sources(path, patterns)
    return [run for source in sources for run in read_runs(source, columns or {}, tokens_per_step)]


def read_one(path: Path, **options: Any) -> ForeignRun:
    (run,) = read(path, **options)
    assert run.metrics["step"].tolist() == [*STEPS]
    assert run.metrics["train_loss"].tolist() == pytest.approx([*LOSS.values()], abs=6e-3)
    return run


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_tensorboard(tmp_path: Path) -> None:
    """Events of TensorBoard's own writer; the last one is torn."""
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer", reason="needs the extra ingest")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.util import tensor_util

    writer = writers.EventFileWriter(str(tmp_path / "run"))
    for step, loss in LOSS.items():
        values = [
            summary_pb2.Summary.Value(tag="train/loss", simple_value=loss),
            summary_pb2.Summary.Value(tag="eval/loss", tensor=tensor_util.make_tensor_proto(np.float32(loss + 1))),
            summary_pb2.Summary.Value(tag="layers", tensor=tensor_util.make_tensor_proto(np.zeros(3))),
        ]
        writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()
    (file,) = (tmp_path / "run").iterdir()
    (tmp_path / "run/config.json").write_text(json.dumps({"model": {"num_params": N}}))
    run = read_one(tmp_path, tokens_per_step=100)
    assert (run.kind, run.name, run.facts["N_total"], run.remarks) == ("tensorboard", "run", N, [])
    assert run.metrics["val_loss"].iloc[-1] == pytest.approx(LOSS[100] + 1)
    assert run.metrics["flops"].iloc[-1] == 6.0 * N * 100 * 100
    file.write_bytes(file.read_bytes()[:-5])
    torn = read(tmp_path)[0]
    assert (len(torn.metrics), torn.remarks) == (9, [f"{tmp_path}/run has 1 damaged record, left out"])


def test_csv_exports(tmp_path: Path) -> None:
    """In the form of wandb's page: two charts of two runs, and the table of runs."""
    for key, plus in (("train/loss", 0), ("eval/loss", 1)):
        rows = [
            f"{step},{loss + plus},{loss + plus},{loss + plus},{'' if step < 50 else 3.5}"
            for step, loss in LOSS.items()
        ]
        header = f'"Step","a - b - {key}","a - b - {key}__MIN","a - b - {key}__MAX","small - {key}"'
        (tmp_path / f"{key[:4]}.csv").write_text("\n".join([header, *rows]) + "\n")
    both = {run.name: run.metrics for run in read(tmp_path)}
    assert {name: len(frame) for name, frame in both.items()} == {"a - b": 10, "small": 6}
    assert both["a - b"]["val_loss"].tolist() == pytest.approx([loss + 1 for loss in LOSS.values()])
    table = tmp_path / "runs/export.csv"
    table.parent.mkdir()
    table.write_text(
        '"Name","State","params","tokens","val/loss"\n"x","finished","1.3M","2e9","3.1"\n"y",,"2M","4e9","2.9"\n'
    )
    rows = {run.name: (run.facts["N_total"], run.metrics["val_loss"].iloc[0]) for run in read(table)}
    assert rows == {"x": (1.3e6, 3.1), "y": (2e6, 2.9)}


def test_trainer_state(tmp_path: Path) -> None:
    """In the form of transformers' TrainerState; of several checkpoints the newest is read, with its config.json."""
    history = [{"step": step, "loss": loss, "learning_rate": 1e-4, "epoch": 0.1} for step, loss in LOSS.items()]
    history += [{"step": 100, "eval_loss": 2.5}, {"step": 100, "train_loss": 9.0, "train_runtime": 3.0}]
    for step in (50, 100):
        folder = tmp_path / f"out/checkpoint-{step}"
        folder.mkdir(parents=True)
        state = {
            "global_step": step,
            "log_history": [line for line in history if line["step"] <= step],
            "max_steps": 100,
        }
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False} | sizes
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/trainer_state.json").write_text('{"log_history": [{"step": 1')
    with pytest.raises(UserError, match=r"is damaged; give the trainer_state\.json of another checkpoint"):
        read(tmp_path / "damaged")
    run = read_one(tmp_path / "out", tokens_per_step=512)
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert (run.name, run.facts["N_non_embedding"], run.facts["total_steps"]) == ("out", 2 * block + 64, 100)
    assert run.facts["N_total"] == 2 * block + 64 + 2 * 1000 * 64
    assert run.metrics["val_loss"].dropna().tolist() == [2.5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_parameters_are_counted_as_transformers_does(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(kind, intermediate_size=96, vocab_size=300, head_dim=16, **sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    write_lines(tmp_path / "log.jsonl", [{"step": 1, "loss": 2.0}])
    assert read(tmp_path)[0].facts["N_total"] == model.num_parameters()


@pytest.mark.parametrize(
    "keys",
    [
        ("step", "loss_metrics/global_avg_loss", "validation_metrics/loss", "lr", "n_tokens_seen"),  # torchtitan
        ("step", "loss", "val_loss", "learning_rate", "total_tokens"),  # litgpt
        ("time/batch", "metrics/train/LanguageCrossEntropy", "metrics/eval/LanguageCrossEntropy",
         "lr-DecoupledAdamW/group0", "time/token"),  # llm-foundry
        ("step", "train/CE loss", "eval/loss", "optim/LR (group 0)", "throughput/total tokens"),  # OLMo-core
    ],
)  # fmt: skip
def test_json_lines_with_the_keys_of(tmp_path: Path, keys: tuple[str, ...]) -> None:
    records = [dict(zip(keys, (step, loss, loss + 1, 1e-3, step * 7), strict=True)) for step, loss in LOSS.items()]
    run = read_one(write_lines(tmp_path / "log.jsonl", [{"num_params": N}, *records]))
    last = run.metrics.iloc[-1]
    assert (last["val_loss"], last["lr"], last["tokens"]) == (LOSS[100] + 1, 1e-3, 700)
    assert (last["flops"], run.columns["flops"]) == (6.0 * N * 700, "6ND")


def megatron_lines() -> list[str]:
    """In the form of Megatron-LM's training_log and evaluate_and_print_results (megatron/training/training.py)."""
    form = (
        " [2026-03-01 10:00:07] iteration {0:8d}/     100 | consumed samples: {1:12d} | elapsed time (ms): "
        "12.3 | learning rate: 1.000000E-04 | global batch size:     4 | lm loss: {2:.6E} | grad norm: "
        "1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    lines = [form.format(step, step * 4, loss) for step, loss in LOSS.items()]
    return [
        *lines,
        " validation loss at iteration 100 on validation set | lm loss value: 2.500000E+00 | lm loss PPL: 12.2 |",
    ]


def test_megatron(tmp_path: Path) -> None:
    ranks = [f" > number of parameters on (tensor, pipeline) model parallel rank ({i}, 0): {N // 2}" for i in (0, 1, 1)]
    lines = ["  seq_length ...................................... 16", *ranks, *megatron_lines()]
    (tmp_path / "slurm.out").write_text("\n".join(f"[rank0]:{line}" for line in lines))
    run = read_one(tmp_path)
    assert (run.kind, run.facts["N_total"], run.facts["total_steps"]) == ("megatron", N, 100)
    assert (run.metrics["val_loss"].iloc[-1], run.metrics["tokens"].iloc[-1]) == (2.5, 100 * 4 * 16)


def test_nemo(tmp_path: Path) -> None:
    """In the form of NeMo 2's progress printer, which prints the last val_loss again on every line."""
    form = (
        "Training epoch 0, iteration {0}/100 | lr: 1.499e-05 | global_batch_size: 4 | global_step: {0} | "
        "reduced_train_loss: {1:.4g} | train_step_timing in s: 5.2 | consumed_samples: {2} | val_loss: {3}"
    )
    lines = [form.format(step, loss, step * 4, 3.1 if step < 60 else 2.9) for step, loss in LOSS.items()]
    (tmp_path / "log.txt").write_text("\r".join(lines))
    run = read_one(tmp_path / "log.txt", columns={"sequence_length": "16", "N": "1M"})
    held_out = run.metrics.dropna(subset=["val_loss"])
    assert held_out.set_index("step")["val_loss"].to_dict() == {10: 3.1, 60: 2.9}
    assert (run.kind, run.metrics["flops"].iloc[-1]) == ("nemo", 6.0 * N * 100 * 4 * 16)


def test_nanotron(tmp_path: Path) -> None:
    """In the form of nanotron's LoggerWriter and human_format (src/nanotron/logging/base.py)."""
    form = (
        "03/01 10:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: {0} / 200 | consumed_tokens: {0}K | "
        "tokens_per_sec: 13.3K | global_batch_size: 1.02K | grad_norm: 0.5 | lm_loss: {1:.3g} | lr: 0.0003"
    )
    lines = ["[INFO]: Total number of parameters: 1M (2MiB)", *(form.format(*pair) for pair in LOSS.items())]
    (tmp_path / "log.txt").write_text("\n".join(lines))
    run = read_one(tmp_path)
    assert (run.kind, run.facts, run.metrics["tokens"].iloc[-1]) == (
        "nanotron",
        {"N_total": N, "total_steps": 200},
        1e5,
    )


def test_patterns_describe_any_other_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"[{step}] training: {loss:.3f} nats\n" for step, loss in LOSS.items()))
    patterns = yaml.safe_load(r"{step: '^\[<number>\]', train_loss: 'training: <number>'}")
    assert read_one(tmp_path, patterns=patterns).kind == "patterns"
    with pytest.raises(UserError, match=r"the pattern step is '\(\('; it must be a regular expression with one group"):
        read(tmp_path, patterns={"step": "((", "train_loss": "x"})


@pytest.mark.parametrize("kind", ["jsonl", "megatron"])
def test_torn_shuffled_and_doubled_lines_change_nothing_else(tmp_path: Path, kind: str) -> None:
    rng, path = random.Random(0), tmp_path / "log"
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in LOSS.items()]
    lines = megatron_lines()[:-1] if kind == "megatron" else lines
    for _ in range(100):
        kept = rng.sample(range(10), rng.randint(2, 10))
        torn = rng.choice(lines)
        noise = [torn[: rng.randint(0, 25 if kind == "megatron" else len(torn) - 1)], "\x00\xff garbage", "{", "[1]"]
        mixed = [lines[i] for i in kept] + rng.choices([lines[i] for i in kept], k=3) + rng.choices(noise[::1], k=2)
        rng.shuffle(mixed)
        content = "\n".join([lines[kept[0]], *mixed]).replace("\x00", "")
        path.write_bytes(content.encode("latin-1"))  # garbage that is no UTF-8
        (run,) = read(path)
        assert run.metrics["step"].tolist() == [10 * (i + 1) for i in sorted(kept)]
        assert run.metrics["train_loss"].tolist() == pytest.approx([LOSS[10 * (i + 1)] for i in sorted(kept)], rel=1e-5)
        assert len(run.remarks) <= 2


def test_remarks_and_errors_are_one_sentence_each(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    lines = [
        {"step": step, "loss": value} for step, value in ((1, 3.0), (2, 2.9), (1, 2.8), (3, float("nan")), (4, 1e999))
    ]
    run = read(write_lines(log, lines))[0]
    assert run.remarks == [
        f"{log} has 2 values of train_loss not finite, left out",
        f"{log} goes back to an earlier step 1 time; the later value of a step counts",
    ]
    assert (run.facts, run.metrics["train_loss"].dropna().tolist()) == ({"diverged": 3.0}, [2.8, 2.9])
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 50)
    for path, message in (
        (tmp_path / "missing", "does not exist; give the log of a run"),
        (tmp_path / "empty", "is empty; known are"),
        (tmp_path / "binary", "has no log that is known"),
        (write_lines(tmp_path / "b.jsonl", [{"step": 1, "acc": 1}]), "has no loss with a step under a known name"),
        (write_lines(tmp_path / "c.jsonl", [{"step": 1, "loss": float("nan")}]), "has no finite train_loss"),
    ):
        with pytest.raises(UserError, match=message):
            read(path)
    apart = [{"step": 1, "loss": 3.0}, {"step": 2, "tokens": 20}, {"step": 3, "loss": 2.0}, {"step": 4, "tokens": 40}]
    assert read(write_lines(log, apart))[0].metrics["tokens"].tolist() == [20, 20, 30, 40]
    with pytest.raises(UserError, match=r"has no key 'evl'; give --map .*; its keys are step, loss"):
        read(log, columns={"val_loss": "evl"})
    with pytest.raises(UserError, match="--map names 'M'; the names are N, step"):
        read(log, columns={"M": "evl"})


def test_numbers() -> None:
    written = {"1,000": 1e3, "1.3B": 1.3e9, " 7K ": 7e3, "-1e-3": -1e-3, 3: 3.0, "x": None, "1.2.3": None, True: None}
    assert {key: number(key) for key in written} == written
