"""Our evaluation beside lm-eval's own `hf` model, on one checkpoint and its export: `isoflop bench evaluate`.

Both sides answer the same requests through lm-eval's own evaluator; agreement is counted item by item, and in nats. The
model is trained for a moment on Python's standard library, so that its answers are no coin tosses; the peer reads what
`isoflop export` writes, and gets its fastest batch size.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..train.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrackerConfig,
)
from ..train.errors import UserError
from .contenders import (
    Contender,
    Row,
    contract_row,
    fastest,
    measuring_on,
    plain_row,
    require,
    seconds_a_step,
    take_turns,
)

if TYPE_CHECKING:
    import torch

    from ..evaluate.metrics import ItemResult
    from ..evaluate.tasks.suite import SuiteTask

ABOUT = "ratio: ours over the peer's, more is better; of nats, what is allowed over what was found"
CASES = ("agreement", "throughput", "overhead", "generation", "duplicates")
ITEMS, ALLOWED_NATS = 500, 1e-3
PEER = "lm-eval hf"
BATCH_SIZES = (8, 16, 32, 64)  # of the peer; its `auto` finds 64 on a CPU
TRIAL_ITEMS = 50  # by which its batch size is chosen


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(width=256, depth=10, heads=8))
    vocab_size: int = 8192
    text_bytes: int = 8 << 20
    length: int = 1024
    tokens: int = 1 << 16
    generation: tuple[int, int] = (20, 64)
    overhead: tuple[str, int] = ("small", 100)
    documents: int = 1_000_000


def bench_evaluate(
    device: str = "auto",
    rounds: int = 3,
    items: int = ITEMS,
    cases: Sequence[str] = CASES,
    sweep: Path | None = None,
    setting: Setting | None = None,
) -> Iterator[Row]:
    """Rows of the contract, case by case (some of `CASES`).

    HellaSwag and LAMBADA have so many `items`; ARC-E is whole from 500 on. Of a finished `sweep` it is asked whether
    gold BPB falls with compute.
    """
    setting = setting or Setting()
    for case in cases:
        if case not in CASES:
            raise UserError(f"--case is {case!r}; it must be one of {', '.join(CASES)}")
    if {"agreement", "throughput", "generation"} & set(cases):
        require("transformers", "which is the benchmark's peer")
    if {"agreement", "throughput"} & set(cases):
        require("accelerate", "which lm-eval's hf model needs")
    if "duplicates" in cases:
        require("datasketch", "which duplicates are measured beside")
    if sweep is not None:
        yield falling(sweep)
    with measuring_on(device) as place, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {"agreement", "throughput"} & set(cases):
            pair = Pair.make(folder, setting, place)
            if "agreement" in cases:
                yield from pair.agreement(items)
            if "throughput" in cases:
                yield pair.throughput(items, rounds)
        if "overhead" in cases:
            from .overhead import overhead

            yield overhead(folder, setting.overhead, setting.vocab_size)
    if "generation" in cases:
        from .generate import bench_generate

        yield from bench_generate(device, rounds)
    if "duplicates" in cases:
        from .dedup import bench_dedup

        yield from bench_dedup(setting.documents)


def trained(folder: Path, setting: Setting) -> Path:
    """A checkpoint that was trained for a moment."""
    from ..train.data.corpora import open_corpus
    from ..train.loop import train

    data = DataConfig(
        corpus="stdlib",
        max_bytes=setting.text_bytes,
        tokenizer="bpe",
        vocab_size=setting.vocab_size,
        sequence_length=setting.length,
        validation_tokens=4 * setting.length,
    )
    data.fingerprint, data.tokenizer_fingerprint = open_corpus(data).fingerprint(), "bpe"
    config = RunConfig(
        model=replace(setting.model, vocab_size=setting.vocab_size),
        data=data,
        tokens=setting.tokens,
        optimizer=OptimizerConfig(batch_size=2),
        schedule=ScheduleConfig(warmup_tokens=0),
        parallel=ParallelConfig(device="cpu"),
        tracker=TrackerConfig(kind="none"),
        validations=1,
        checkpoint=CheckpointConfig(every_seconds=1e9),
    )
    summary = train(config, folder / "run", report=lambda line: None)
    return folder / "run" / str(summary["checkpoint"])


@dataclass
class Pair:
    """One checkpoint and its export."""

    loaded: Any
    exported: Path
    setting: Setting
    device: torch.device

    @classmethod
    def make(cls, folder: Path, setting: Setting, device: torch.device) -> Pair:
        from ..evaluate.export.export import export_checkpoint
        from ..train.checkpoint.checkpoint import load_for_evaluation

        checkpoint = trained(folder, setting)
        exported = export_checkpoint(checkpoint, folder / "hf").folder
        return cls(load_for_evaluation(checkpoint, device.type), exported, setting, device)

    def ours(self) -> Any:
        """Our side, which has seen no text yet."""
        from ..evaluate.harness import CheckpointLM

        length = self.loaded.config.data.sequence_length
        return CheckpointLM(self.loaded.model, self.loaded.tokenizer, length, self.device)

    def peer(self, batch_size: int) -> Any:
        from lm_eval.models.huggingface import HFLM

        with redirect_stderr(io.StringIO()):  # without progress bars
            lm = HFLM(str(self.exported), dtype="float32", device=self.device.type, batch_size=batch_size)
        lm.truncated, lm.failed = set(), set()  # what our side says of itself beside its answers
        return lm

    def agreement(self, items: int) -> Iterator[Row]:
        """Of each task the items that both answer alike, and how far apart log-likelihoods are at most."""
        from ..train.hardware import device_name

        (prompts, new), place = self.setting.generation, device_name(self.device)
        whole = items >= ITEMS
        ours, peer = self.ours(), self.peer(BATCH_SIZES[1])
        for name, limit, said in (
            ("hellaswag", items, "HellaSwag"),
            ("arc_easy", None if whole else items, "ARC-E"),
            ("lambada_openai", items, "LAMBADA"),
            ("gsm8k", min(prompts, items), f"GSM8K, generation of {new} tokens"),
        ):
            entry = load_entry(name, limit)
            limit_new_tokens(entry, new)
            pairs = list(zip(answers(ours, entry), answers(peer, entry), strict=True))
            alike = sum(same_answer(a, b) for a, b in pairs)
            case = f"{said}, {len(pairs)} items: the same answer"
            yield plain_row(case, alike, len(pairs), PEER, "items equal", place)
            if any(a.log_probabilities for a, _ in pairs):
                nats = max(nats_apart(a, b) for a, b in pairs)
                case, ratio = f"{said}: log-likelihoods apart, at most", ALLOWED_NATS / max(nats, 1e-12)
                yield plain_row(case, nats, ALLOWED_NATS, "what is allowed", "max nats", place, ratio)

    def throughput(self, items: int, rounds: int) -> Row:
        """Items of HellaSwag per second, from prompts to answers; ours encodes all text anew in each turn, too."""
        from ..train.flops import count_parameters

        trial, entry = load_entry("hellaswag", min(items, TRIAL_ITEMS)), load_entry("hellaswag", items)
        peers = {size: self.peer(size) for size in BATCH_SIZES}
        trials = [Contender(str(size), partial(answers, lm, trial)) for size, lm in peers.items()]
        # Ours too: the trial is what warms both sides up, for a whole turn of the peer takes a minute.
        take_turns([*trials, Contender("ours", lambda: answers(self.ours(), trial))], 1, 1, self.device)
        size = int(fastest(trials).name)
        ours = Contender("ours", lambda: answers(self.ours(), entry))
        peer = Contender(PEER, lambda: answers(peers[size], entry))
        for side in [ours, peer] * rounds:
            side.seconds.append(seconds_a_step(side.step, 1, self.device))
        millions = count_parameters(self.loaded.config.model).N_total / 1e6
        case = f"HellaSwag, {len(entry.indices)} items, {millions:.1f}M parameters, fp32"
        name = f"{PEER}, batch size {size}"
        return contract_row(case, len(entry.indices), "items/s", ours.seconds, peer.seconds, name, self.device)


def load_entry(name: str, limit: int | None) -> SuiteTask:
    from ..evaluate.tasks.tasks import load_suite

    (entry,) = load_suite(name, limit).tasks.values()
    return entry


def limit_new_tokens(entry: SuiteTask, most: int) -> None:
    """No answer may be longer, on either side."""
    for request in entry.task.instances:
        if request.request_type == "generate_until":
            context, settings = request.args
            request.arguments = (context, settings | {"max_gen_toks": most})


def answers(lm: Any, entry: SuiteTask) -> list[ItemResult]:
    """Item by item, by lm-eval's evaluator."""
    from ..evaluate.harness import answer_task

    with redirect_stderr(io.StringIO()):  # without the peer's progress bars
        return answer_task(lm, entry)[0]


def same_answer(ours: ItemResult, theirs: ItemResult) -> bool:
    """Whether both chose, or wrote, the same, and lm-eval's metrics of the item are equal."""

    def choice(item: ItemResult) -> int | None:
        nats = item.log_probabilities
        return nats.index(max(nats)) if nats else None

    return (
        ours.index == theirs.index
        and ours.values == theirs.values
        and ours.answer == theirs.answer
        and choice(ours) == choice(theirs)
    )


def nats_apart(ours: ItemResult, theirs: ItemResult) -> float:
    """The largest difference between two items' log-likelihoods; infinite where one is no number."""
    pairs = zip(ours.log_probabilities, theirs.log_probabilities, strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return max((math.inf if math.isnan(d) else d for d in differences), default=0.0)


def falling(sweep: Path) -> Row:
    """On how many tasks gold BPB of each budget's run of the lowest loss falls from budget to budget."""
    import pandas as pd

    from ..sweeps.runs.directory import SweepDirectory

    directory = SweepDirectory.open(sweep)
    budgets = {run["run_id"]: run["budget"] for run in directory.plan()["runs"]}
    try:
        table = pd.read_csv(sweep / "table.csv", dtype={"run_id": str})
    except OSError:
        raise UserError(f"--sweep is {str(sweep)!r}; it has no table.csv, so it is not finished") from None
    table = table[table["final"].astype(bool)].assign(budget=lambda rows: rows["run_id"].map(budgets))
    best = table.dropna(subset=["budget", "loss"]).sort_values("loss").groupby("budget").head(1).sort_values("budget")
    columns = [str(name) for name in best if str(name).endswith("/gold_bpb") and best[name].notna().all()]
    if len(best) < 2 or not columns:
        raise UserError(f"--sweep is {str(sweep)!r}; it must have runs of two budgets or more, scored on tasks")
    steps = {name.removesuffix("/gold_bpb"): best[name].diff().dropna() for name in columns}
    down = {name: bool((step < 0).all()) for name, step in steps.items()}
    case = f"gold BPB of the best run of each of {len(best)} budgets falls with compute"
    return plain_row(case, sum(down.values()), len(down), "tasks scored", "tasks", "cpu") | {"tasks": down}
