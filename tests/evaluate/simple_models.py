"""Causal modules that are no GPT, behind lm-eval: every request is a whole padded row; and whole suites at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from isoflop.evaluate import harness
from isoflop.evaluate.harness import CheckpointLM, answer_task
from isoflop.evaluate.inference.generate import Sampling, choose_tokens, generate_texts
from isoflop.evaluate.inference.scoring import Done, Score
from isoflop.evaluate.inference.trees import Request
from isoflop.evaluate.metrics import task_scores
from isoflop.evaluate.tasks.suite import Suite, SuiteTask
from isoflop.train.config import ModelConfig
from isoflop.train.model.gpt import GPT
from torch import Tensor, nn


class WholeRows:
    """Scores requests with any causal module, tokens (B, T) -> logits (B, T, V), every request a whole padded row."""

    def __init__(self, model: nn.Module, device: str | torch.device, batch_tokens: int) -> None:
        self.model, self.device, self.batch_tokens = model, torch.device(device), batch_tokens

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], done: Done | None = None) -> list[Score]:
        """As `Scorer.score`."""
        results: list[Score] = [(0.0, True)] * len(requests)
        inputs = [request.inputs for request in requests]
        order = sorted((n for n, r in enumerate(requests) if r.continuation), key=lambda place: -len(inputs[place]))
        start = 0
        while start < len(order):
            rows = max(1, self.batch_tokens // len(inputs[order[start]]))
            batch = order[start : start + rows]
            tokens = np.zeros((len(batch), len(inputs[batch[0]])), dtype=np.int64)  # padded on the right, unseen
            for row, place in enumerate(batch):
                tokens[row, : len(inputs[place])] = inputs[place]
            logits = self.model(torch.from_numpy(tokens).to(self.device))
            for row, place in enumerate(batch):
                results[place] = _row_score(logits[row, : len(inputs[place])], requests[place].continuation)
            if done is not None:
                done([(place, results[place]) for place in batch])
            start += rows
        return results


def _row_score(logits: Tensor, continuation: Sequence[int]) -> Score:
    logits = logits[-len(continuation) :]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.tensor(continuation, device=logits.device)
    nats = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)
    return float(nats.double().sum()), bool((logits.argmax(dim=1) == targets).all())


def lm_of(
    model: Any, tokenizer: Any, max_length: int, device: str = "cpu", batch_tokens: int = 4096, **more: Any
) -> CheckpointLM:
    """A GPT, or any causal module (B, T) -> (B, T, V), as lm-eval's model."""
    if isinstance(model, GPT):
        return CheckpointLM(model, tokenizer, max_length, device, batch_tokens, **more)
    stand_in = GPT(ModelConfig(width=32, depth=1, heads=2, vocab_size=257), max_length)
    lm = CheckpointLM(stand_in, tokenizer, max_length, device, batch_tokens, **more)
    lm.model, lm._scorer = model, cast(Any, WholeRows(model, device, batch_tokens))
    return lm


def texts_of_any(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> Any:
    """As `generate_texts`; a module that is no GPT writes one prompt after the other, recomputing every token."""
    if isinstance(model, GPT):
        return generate_texts(model, prompts, max_tokens, **options)
    results: list[list[int] | None] = []
    for index, (prompt, seed) in enumerate(zip(prompts, options["seeds"], strict=True)):
        generator, text, new = torch.Generator().manual_seed(seed), list(prompt), list[int]()
        with torch.inference_mode():
            while len(new) < max_tokens and not (new and options["finished"](new)):
                logits = model(torch.tensor([text[-options["max_length"] :]]))[0, -1]
                if logits.isnan().any():
                    break
                new.append(draw(logits, options["sampling"], generator))
                text.append(new[-1])
        results.append(None if logits.isnan().any() else new)
        if options["done"] is not None:
            options["done"](index, results[-1])
    return results


harness.generate_texts = texts_of_any


def score_task(lm: CheckpointLM, entry: SuiteTask) -> dict[str, Any]:
    """Asks the model one task and sums its items up."""
    items, others = answer_task(lm, entry)
    scores = task_scores(items)
    if scores["withheld"]:
        others = dict.fromkeys(others)
    return scores | others | {"subset": entry.subset, "version": entry.version}


def score(loaded: Any, suite: Suite) -> dict[str, dict[str, Any]]:
    """Scores of each task."""
    lm = lm_of(loaded.model, loaded.tokenizer, loaded.config.data.sequence_length)
    return {name: score_task(lm, entry) for name, entry in suite.tasks.items()}


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits (vocabulary,) and a stream of random numbers."""
    uniforms = torch.rand(1, dtype=torch.float64, generator=generator)
    return int(choose_tokens(logits[None], sampling, uniforms)[0])
