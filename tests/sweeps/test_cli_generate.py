"""`isoflop generate` prints the text that full recomputation gives, streams whole characters, and refuses bad input."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from isoflop.sweeps.cli import checkpoint as cli_generate
from isoflop.sweeps.cli.checkpoint import Pieces, app
from isoflop.sweeps.entry import guarded
from isoflop.train.checkpoint.checkpoint import load_for_evaluation
from isoflop.train.data.tokenizers import ByteTokenizer
from small_runs import Capture, Patch


def run(capsys: Capture, *arguments: Any) -> tuple[int, str, str]:
    """Run `isoflop generate` and return the exit code, standard output and standard error."""
    command = typer.main.get_command(app)
    code = guarded(lambda: command.main(["generate", *map(str, arguments)], standalone_mode=False) or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def checkpoint(smoke: tuple[Path, str]) -> Path:
    return next(iter(sorted((smoke[0] / "runs").iterdir())))


def recompute(checkpoint: Path, prompt: str, count: int) -> list[int]:
    """Return greedy tokens, recomputing the whole window for each."""
    loaded = load_for_evaluation(checkpoint)
    length, end = loaded.config.data.sequence_length, loaded.tokenizer.end_of_document
    text = loaded.tokenizer.encode(prompt).tolist() or [end]
    new: list[int] = []
    while len(new) < count and (not new or new[-1] != end):
        with torch.inference_mode():
            new.append(int(loaded.model(torch.tensor([text[-length:]]))[0, -1].argmax()))
        text.append(new[-1])
    return new


@pytest.mark.parametrize("prompt", ["def run(", ""])
def test_the_text_is_that_of_recomputation(checkpoint: Path, prompt: str, capsys: Capture) -> None:
    new = recompute(checkpoint, prompt, 20)
    expected = load_for_evaluation(checkpoint).tokenizer.decode(new)
    code, out, _ = run(capsys, checkpoint, prompt, "--max-tokens", 20, "--device", "cpu")
    assert (code, out) == (0, expected + "\n")
    code, out, _ = run(capsys, checkpoint, prompt, "--max-tokens", 20, "--device", "cpu", "--json")
    document = json.loads(out)
    assert (document["prompt"], document["text"], document["tokens"]) == (prompt, expected, len(new))
    assert document["tokens_per_s"]["prefill"] > 0
    assert len(new) < 2 or document["tokens_per_s"]["decode"] > 0


def test_a_seed_repeats_a_sampled_text_and_another_one_does_not(checkpoint: Path, capsys: Capture) -> None:
    def sampled(seed: int) -> str:
        return run(capsys, checkpoint, "x", "--max-tokens", 30, "--temperature", 2, "--seed", seed)[1]

    assert sampled(1) == sampled(1) != sampled(2)


def test_the_prompt_comes_from_standard_input(checkpoint: Path, capsys: Capture, monkeypatch: Patch) -> None:
    _, expected, _ = run(capsys, checkpoint, "déf", "--max-tokens", 5)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("déf".encode())))
    assert run(capsys, checkpoint, "-", "--max-tokens", 5)[:2] == (0, expected)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    assert "standard input is not UTF-8 at byte 3" in run(capsys, checkpoint, "-")[2]


def test_pieces_are_whole_characters_and_add_up_to_the_text() -> None:
    rng, tokenizer = random.Random(0), ByteTokenizer()
    for _ in range(300):
        text = "".join(rng.choice("aé😀\n漢") for _ in range(rng.randrange(12)))
        tokens = list(text.encode())
        if rng.random() < 0.3:  # bytes that are not UTF-8 become U+FFFD
            tokens.insert(rng.randrange(len(tokens) + 1), 0xC3)
            text = bytes(tokens).decode(errors="replace")
        pieces = Pieces(tokenizer.decode)
        printed = []
        for token in tokens:
            printed.append(pieces.add(token))
            assert text.startswith("".join(printed))
        assert "".join(printed) + pieces.rest() == text == pieces.text


def test_no_part_of_a_stop_is_printed_however_the_tokens_cut_it() -> None:
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice("ab\n") for _ in range(20))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 5))) for _ in range(2)]
        # The first stop that is complete ends the text, but a longer stop may begin earlier.
        stopped_text = next((text[:n] for n in range(21) if any(stop in text[:n] for stop in stops)), text)
        cut = min([len(stopped_text), *(place for stop in stops if (place := stopped_text.find(stop)) >= 0)])
        pieces, printed = Pieces(ByteTokenizer().decode, stops), ""
        for token in text.encode():
            printed += pieces.add(token)
            assert text[:cut].startswith(printed)
            if pieces.stopped:
                break
        assert printed + pieces.rest() == pieces.text == text[:cut]
        assert pieces.stopped == any(stop in text for stop in stops)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-1", "--temperature is -1.0; it must be a finite number, 0 (greedy) or more"),
        ("--top-p", "1.5", "--top-p is 1.5; it must be above 0 and at most 1"),
        ("--top-k", "-3", "--top-k is -3; it must be 0 (all tokens) or more"),
        ("--top-k", "3", "--temperature is 0, which always takes the likeliest token"),
        ("--max-tokens", "0", "--max-tokens is 0; it must be 1 or more"),
        ("--seed", "-1", "--seed is -1; it must be from 0"),
        ("--stop", "", "--stop is empty; it must be a text"),
        ("--device", "tpu", "--device is 'tpu'; it must be auto, cpu or cuda"),
        ("--device", "cpu", "holds no checkpoint; give a run directory"),
    ],
)
def test_bad_input_gets_a_sentence(option: str, value: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, tmp_path, "text", option, value)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_interrupt_ends_the_line_without_a_traceback(checkpoint: Path, capsys: Capture, monkeypatch: Patch) -> None:
    class Interrupted(Pieces):
        def add(self, token: int) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli_generate, "Pieces", Interrupted)
    with pytest.raises(SystemExit, match="130"):
        run(capsys, checkpoint, "text")
    assert capsys.readouterr() == ("\n", ""), "no traceback is printed"
