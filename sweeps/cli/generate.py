"""The command that lets a checkpoint write: `isoflop generate CHECKPOINT "text"`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...train.errors import UserError
from .sweep import Json, show

app = typer.Typer()
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run directory (its newest).", show_default=False)
    ],
    prompt: Annotated[
        str, typer.Argument(help="Text to go on from; - reads standard input; none: the start of a document.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(help="New tokens, at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above it tokens are drawn.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text, and is left out; repeat for more.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Continues a text with a checkpoint, greedily unless a temperature is given, and prints it as it comes."""
    check(max_tokens, temperature, top_k, top_p, seed, stop or [])
    from ...bench.contenders import bench_device
    from ...evaluate.inference.generate import Sampling, stream
    from ...train.checkpoint.checkpoint import load_for_evaluation

    place = bench_device(device)
    text = _standard_input() if prompt == "-" else prompt
    loaded = load_for_evaluation(checkpoint, str(place))
    ids = [int(token) for token in loaded.tokenizer.encode(text)] or [loaded.tokenizer.end_of_document]
    started = time.perf_counter()
    tokens = stream(
        loaded.model, ids, max_tokens, max_length=loaded.config.data.sequence_length,
        sampling=Sampling(temperature, top_k, top_p), seed=seed, device=place,
    )  # fmt: skip
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
        sys.exit(130)  # what has been printed says it all
    rest = pieces.rest()
    if not as_json:
        print(rest, flush=True)
        return
    read, written = min(len(ids), loaded.config.data.sequence_length), len(times) - 1
    after_first = times[-1] - times[1]
    said: dict[str, Any] = {
        "prompt": text, "text": pieces.text, "prompt_tokens": read, "tokens": written, "seed": seed,
        "tokens_per_s": {
            "prefill": read / (times[1] - started),
            "decode": (written - 1) / after_first if after_first > 0 else None,
        },
    }  # fmt: skip
    show(said, as_json, print)


def check(
    max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int, stops: Sequence[str]
) -> None:  # fmt: skip
    """Refuses what no text can be drawn with.

    Raises:
        UserError: names the option.
    """
    if max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}; it must be 1 or more")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise UserError(f"--temperature is {temperature}; it must be a finite number, 0 (greedy) or more")
    if top_k < 0:
        raise UserError(f"--top-k is {top_k}; it must be 0 (all tokens) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p is {top_p}; it must be above 0 and at most 1")
    if not 0 <= seed < 1 << 63:
        raise UserError(f"--seed is {seed}; it must be from 0 to 2^63 - 1")
    if temperature == 0 and (top_k or top_p < 1):
        raise UserError("--temperature is 0, which is greedy, so --top-k and --top-p say nothing; give one above 0")
    if not all(stops):
        raise UserError("--stop is empty; it must be a text of one character or more")


class Pieces:
    """Text that grows token by token, handed out in pieces that stay true.

    Held back are characters whose bytes are not all there, and what may be the beginning of a stop.

    Args:
        decode: tokens to text; bytes that are no UTF-8 give U+FFFD.
        stops: the text ends before the first of them.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []
        self._said = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be said after one more token."""
        self._tokens.append(token)
        self.text = self._decode(self._tokens)
        found = [place for stop in self._stops if (place := self.text.find(stop)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
            return self._say(len(self.text))
        end = len(self.text.rstrip(_BROKEN))
        for stop in self._stops:
            sizes = (size for size in range(min(len(stop) - 1, len(self.text)), 0, -1))
            size = next((size for size in sizes if self.text.endswith(stop[:size])), 0)
            end = min(end, len(self.text) - size)
        return self._say(end)

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
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
