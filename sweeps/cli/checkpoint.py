"""The commands about one checkpoint: evaluate, generate, quantize, export."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...evaluate.quantization.settings import CODE_BITS, Quantization
from ...train.errors import UserError
from ...train.files import read_json, write_atomic
from .options import AsJson, Average, Checkpoint, Device, Overwrite, show

if TYPE_CHECKING:
    from ...evaluate.export.model_card import Facts

app = typer.Typer()
Scored = tuple[Path, dict[str, Any]]  # where the scores of a checkpoint are, and the scores
SCORES = "scores.json"
TERMINAL_LIMIT = 100  # items per task for a user who waits: an accuracy of 0.5 has a standard error of 0.05
BROKEN = "\N{REPLACEMENT CHARACTER}"
Output = Annotated[
    Path | None,
    typer.Option(
        help="Folder for scores.json, items and report.html, with a subfolder for each of several checkpoints; "
        "default: the checkpoint, and the page of its sweep."
    ),
]


@app.command("evaluate")
def score(
    checkpoint: Annotated[
        list[Path], typer.Argument(help="Checkpoints, or run directories (the newest of each).", show_default=False)
    ],
    tasks: Annotated[
        str,
        typer.Option(help="Suites (small, core, domains), tasks (piqa, piqa@5), files, folders, separated by commas."),
    ] = "small",
    limit: Annotated[
        int | None,
        typer.Option(help=f"Items per task, a fixed subset; default: {TERMINAL_LIMIT} at a terminal, else all."),
    ] = None,
    every_item: Annotated[bool, typer.Option("--all", help="Score all items of each task, at a terminal too.")] = False,
    output: Output = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkpoint, or its scores.json, to compare with item by item.")
    ] = None,
    ngram: Annotated[
        int,
        typer.Option(help="Words in a row shared with the training text that make an item contaminated; 0: no check."),
    ] = 13,
    average: Average = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="Precision of the weights: fp32 or bf16.")] = "fp32",
    ranks: Annotated[int, typer.Option(help="Processes that share the work; on GPUs start them with torchrun.")] = 1,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per forward pass; default: depends on the device.")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Allow your own YAML to run Python, as with !function.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score checkpoints, and write scores.json, every item and report.html for each.

    Run the same command again to continue an interrupted evaluation.
    """
    from ...evaluate.inference.ranks import on_ranks
    from ...train.checkpoint.checkpoint import find
    from ...train.hardware import pick_device

    settings: dict[str, Any] = {"device": device, "precision": precision, "average": average}
    settings |= {"ngram": ngram or None, "batch_tokens": batch_tokens}
    paths = [find(path) for path in checkpoint]
    folders = _folders(paths, output)
    if average is not None and output is None:
        folders = [folder / f"average_{average:g}" for folder in folders]
    targets = list(zip(paths, folders, strict=True))
    other = None if against is None else _read(against)
    if against is not None and other is None:
        targets.append((path := find(against), path))

    # A user who waits gets an answer in minutes; scripts keep every item.
    if limit is None and not every_item and not as_json and sys.stdout.isatty():
        limit = TERMINAL_LIMIT
    suite = {"tasks": tasks, "limit": None if every_item else limit, "allow_code": allow_code}
    score_on = partial(_score, targets=targets, suite=suite, settings=settings, quietly=as_json)
    results = on_ranks(ranks, score_on, device=pick_device(device, "--device").type)
    if results is None:  # this is not the first rank
        return
    if against is not None and other is None:
        other = results.pop()
    _report(results, other, as_json)


def _report(results: list[Scored], other: Scored | None, as_json: bool) -> None:
    """Write the page of each checkpoint, and print its scores."""
    from ...evaluate.pages.report import format_scores

    pages = [_write_page(scored, other) for scored in results]
    if as_json:
        print(json.dumps(results[0][1] if len(results) == 1 else [scores for _, scores in results], indent=1))
        return
    for (_, scores), page in zip(results, pages, strict=True):
        if len(results) > 1:
            print(scores["checkpoint"])
        print(format_scores(scores))
        print(f"report: {page}")


@app.command("lm_eval", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def lm_eval_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of lm_eval; without any, print its help.", show_default=False)
    ] = None,
) -> None:
    """Run lm-eval's own command; --model isoflop --model_args checkpoint=FOLDER loads a checkpoint."""
    from ...evaluate.command import run_lm_eval

    run_lm_eval(arguments or ["--help"])


def _score(
    ranks: Any, targets: Sequence[tuple[Path, Path]], suite: dict[str, Any], settings: dict[str, Any], quietly: bool
) -> list[Scored] | None:
    """Score each (checkpoint, output folder) of `targets` on all ranks; ranks other than 0 return None."""
    from ...evaluate.checkpoint import Evaluator
    from ...evaluate.tasks.tasks import load_suite

    def say(line: str) -> None:
        if ranks.rank == 0 and not quietly:
            print(line, flush=True)

    evaluator = Evaluator(load_suite(**suite, progress=say), ranks=ranks, **settings)
    if any(task.subset["items"] < task.subset["of"] for task in evaluator.suite.values()):
        say(f"at most {suite['limit']} items of each task are scored; --all scores every item")
    results = []
    for number, (path, folder) in enumerate(targets, 1):
        if len(targets) > 1:
            say(f"{path} ({number} of {len(targets)})")
        results.append((folder, evaluator.evaluate(path, folder / SCORES, progress=say)))
    return results if ranks.rank == 0 else None


def _folders(paths: Sequence[Path], output: Path | None) -> list[Path]:
    if output is None:
        return list(paths)
    if len(paths) == 1:
        return [output]
    # runs/<id>/checkpoints/step_<n>: the run id and the step identify a checkpoint.
    names = [f"{path.absolute().parent.parent.name}_{path.name}" for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two checkpoints named {twice} cannot share --output {output}; score them one by one")
    return [output / name for name in names]


def _read(against: Path) -> Scored | None:
    """Return the folder and content of a scores file; None for a checkpoint or a folder without scores."""
    file = against if against.is_file() else against / SCORES
    if not file.is_file() or (against.is_dir() and (against / "manifest.json").is_file()):
        return None
    scores = read_json(file)
    if scores is None or not isinstance(scores.get("tasks"), dict):
        raise UserError(f"{file} is not a scores file; give a checkpoint, or a scores.json of `isoflop evaluate`")
    return file.parent, scores


def _write_page(scored: Scored, other: Scored | None) -> Path:
    """Write report.html, or if a sweep scored the checkpoint, update the sweep's page of it; return the path."""
    from ...evaluate.items import items_path, read_items, with_earlier
    from ...evaluate.pages.report import checkpoint_page

    def items_of(folder: Path) -> Any:
        return read_items(items_path(folder / SCORES), lambda line: print(line, file=sys.stderr))

    folder, scores = scored
    against = None if other is None else (other[1], items_of(other[0]))
    items, page = items_of(folder), folder / "report.html"
    of_sweep = folder.parent.parent / "eval" / f"{folder.name}.json"
    if of_sweep.exists() and folder.parent.name == "checkpoints":
        (scores, items), page = with_earlier(scores, items, of_sweep), of_sweep.with_suffix(".html")
    write_atomic(page, checkpoint_page(scores, items, against))
    return page


@app.command("generate")
def write_text(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str,
        typer.Argument(
            help="Text to continue; - reads standard input; without it, start a document.", show_default=False
        ),
    ] = "",
    max_tokens: Annotated[int, typer.Option(help="Largest number of new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0, tokens are drawn.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeat for more.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a text with a checkpoint and print it as it is generated; greedy unless --temperature is given."""
    check_sampling(max_tokens, temperature, top_k, top_p, seed, stop or [])
    from ...evaluate.inference.generate import Sampling, stream
    from ...train.checkpoint.checkpoint import load_for_evaluation
    from ...train.hardware import pick_device

    place = pick_device(device, "--device")
    text = _standard_input() if prompt == "-" else prompt
    loaded = load_for_evaluation(checkpoint, str(place))
    ids = [int(token) for token in loaded.tokenizer.encode(text)] or [loaded.tokenizer.end_of_document]
    started = time.perf_counter()
    tokens = stream(
        loaded.model,
        ids,
        max_tokens,
        max_length=loaded.config.data.sequence_length,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        device=place,
    )
    pieces, times = Pieces(loaded.tokenizer.decode, stop or []), [started]
    try:
        for token in tokens:
            times.append(time.perf_counter())
            if token == loaded.tokenizer.end_of_document:
                break
            piece = pieces.add(token)
            if not as_json:
                print(piece, end="", flush=True)
            if pieces.stopped:
                break
    except KeyboardInterrupt:
        print(flush=True)
        sys.exit(130)  # without a message: the text was printed
    rest = pieces.rest()
    if not as_json:
        print(rest, flush=True)
        return
    read, written = min(len(ids), loaded.config.data.sequence_length), len(times) - 1
    after_first = times[-1] - times[1]
    decode = (written - 1) / after_first if after_first > 0 else None
    rates = {"prefill": read / (times[1] - started), "decode": decode}
    counts = {"prompt_tokens": read, "tokens": written, "seed": seed, "tokens_per_s": rates}
    show({"prompt": text, "text": pieces.text} | counts, as_json, print)


def check_sampling(
    max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int, stops: Sequence[str]
) -> None:
    greedy = "--temperature is 0, which always takes the likeliest token"
    rules = [
        (max_tokens >= 1, f"--max-tokens is {max_tokens}; it must be 1 or more"),
        (
            0 <= temperature < math.inf,
            f"--temperature is {temperature}; it must be a finite number, 0 (greedy) or more",
        ),
        (top_k >= 0, f"--top-k is {top_k}; it must be 0 (all tokens) or more"),
        (0 < top_p <= 1, f"--top-p is {top_p}; it must be above 0 and at most 1"),
        (0 <= seed < 1 << 63, f"--seed is {seed}; it must be from 0 to 2^63 - 1"),
        (temperature > 0 or (not top_k and top_p == 1), f"{greedy}; with --top-k or --top-p it must be above 0"),
        (all(stops), "--stop is empty; it must be a text of one character or more"),
    ]
    for holds, message in rules:
        if not holds:
            raise UserError(message)


class Pieces:
    """Generated text, returned in pieces as tokens arrive; it ends before the first stop text.

    Incomplete UTF-8 characters and a possible beginning of a stop text are held back until the next token.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []
        self._said = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the new text that no later token can change."""
        self._tokens.append(token)
        self.text = self._decode(self._tokens)
        positions = [position for stop in self._stops if (position := self.text.find(stop)) >= 0]
        if positions:
            self.text, self.stopped = self.text[: min(positions)], True
            return self._say(len(self.text))
        end = len(self.text.rstrip(BROKEN))
        for stop in self._stops:
            sizes = (size for size in range(min(len(stop) - 1, len(self.text)), 0, -1))
            size = next((size for size in sizes if self.text.endswith(stop[:size])), 0)
            end = min(end, len(self.text) - size)
        return self._say(end)

    def rest(self) -> str:
        """Return the text that `add` has not returned yet."""
        return self._say(len(self.text))

    def _say(self, end: int) -> str:
        piece = self.text[self._said : end]
        self._said = max(self._said, end)
        return piece


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 at byte {error.start}; it must be text in UTF-8") from error


@app.command("export")
def export(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)],
    format: Annotated[str, typer.Option(help="hf: loaded by transformers, converted by llama.cpp.")] = "hf",
    dtype: Annotated[str, typer.Option(help="Type of the weights: fp32 or bf16.")] = "fp32",
    average: Average = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a folder that other libraries load, with a model card."""
    from ...evaluate.export.export import export_checkpoint
    from ...train.checkpoint.checkpoint import find

    path = find(checkpoint)
    settings: dict[str, Any] = {"format": format, "dtype": dtype, "average": average, "overwrite": overwrite}
    done = export_checkpoint(path, output, **settings, facts=None if average else facts_about(path))
    result = {"folder": str(done.folder), "architecture": done.architecture, "dtype": dtype, "files": done.files}
    show(
        result,
        as_json,
        lambda result: print(f"{result['folder']}: {result['architecture']}, {', '.join(result['files'])}"),
    )


@app.command("quantize")
def quantize(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    format: Annotated[str, typer.Option(help=f"Of the blocks' matrices: {', '.join(CODE_BITS)}.")] = "int4",
    method: Annotated[str, typer.Option(help="rtn (round to nearest), awq or gptq.")] = "rtn",
    group: Annotated[
        int | None,
        typer.Option(
            help="Weights of a row that share a scale; default: the largest divisor of its length up to 128; mxfp4: 32."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the run's training text that awq and gptq read.")] = 65536,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Quantize the matrices of the blocks; write a checkpoint that evaluate, generate and export read."""
    settings = Quantization(format, method, group)
    from ...evaluate.quantization.quantize import quantize_checkpoint
    from ...train.hardware import pick_device

    say = partial(print, file=sys.stderr, flush=True)
    place = str(pick_device(device, "--device"))
    facts = quantize_checkpoint(checkpoint, output, settings, tokens=tokens, device=place, say=say)
    loss, before = facts["val_loss"], facts["val_loss_before"]
    losses = "" if loss is None or before is None else f", held-out loss {loss:.4f} (before: {before:.4f})"
    line = f"{output}: {format} by {method}, {facts['bits_per_weight']:.2f} bits per weight of the matrices{losses}"
    sizes = f"{facts['bytes']:,} bytes instead of {facts['bytes_before']:,}; embeddings, head and norms stay fp32"
    show({"folder": str(output)} | facts, as_json, lambda facts: print(f"{line}\n{sizes}"))


@app.command("import", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def import_model() -> None:
    """Refer users of the removed command to lm-eval."""
    raise UserError(
        "isoflop no longer imports Hugging Face models; score one with "
        "`lm_eval --model hf --model_args pretrained=FOLDER`"
    )


def facts_about(checkpoint: Path) -> Facts:
    """Collect the facts for a model card: scores, law and provenance, empty where a file is missing."""
    from importlib.metadata import version

    from ...evaluate.export.model_card import Facts
    from ..results.tracking import PROVENANCE
    from ..runs.directory import yaml_or_empty

    run = checkpoint.parent.parent
    sweep = run.parent.parent
    summary = read_json(run / "summary.json") or {}
    if summary.get("step") != int(checkpoint.name.removeprefix("step_")):
        summary = {}
    scores = read_json(run / "eval" / f"{checkpoint.name}.json") or read_json(checkpoint / "scores.json") or {}
    held_out = {name: summary.get(name) for name in ("val_loss", "val_loss_se", "val_bpb")}
    if not (scores.get("held_out") or {}).get("val_loss"):
        scores = scores | {"held_out": held_out}
    settings = yaml_or_empty(sweep / "sweep.yaml")
    return Facts(
        scores=scores,
        law=_law(sweep / "fit" / "law.json", summary),
        provenance={name: settings.get(name) for name in PROVENANCE},
        version=version("isoflop"),
    )


def _law(path: Path, summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the form of the law at `path`, and the loss and interval it predicts for a run; None without a law."""
    from ... import fit

    if not path.is_file() or not summary:
        return None
    try:
        law = fit.read_law(path)
        inputs = {"N": summary["N_total"], "D": summary["D"]}
        interval = None
        if law.draws_ is not None:
            low, high = law.predict_interval(**inputs)
            interval = (float(low), float(high))
        return {"form": law.form, "predicted_loss": float(law.predict(**inputs)), "interval": interval}
    except fit.InputError:
        return None
