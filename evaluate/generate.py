"""Text from a model, token by token: greedy or sampled, many prompts at a time.

Special here: every prompt draws from its own random stream, so what it gets does not depend on its neighbours in the
batch. The whole context is recomputed for each token; nothing outside of `generate` knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    max_length: int,
    finished: Callable[[list[int]], bool],
    sampling: Sampling = Sampling(),
    seeds: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
    batch_tokens: int = 4096,
) -> list[list[int] | None]:
    """Continues every prompt.

    Args:
        model: token ids (batch, time) -> logits (batch, time, vocabulary).
        prompts: token ids, none empty; only the last `max_length` count, and the window slides on as the text grows.
        max_tokens: at most so many new tokens a prompt.
        max_length: longest sequence that the model accepts.
        finished: is asked after each token with all new ones of that prompt; True ends it (that token is kept).
        sampling: temperature, top-k, top-p.
        seeds: one a prompt, for sampling; default its place in the list.
        device: where the model lies.
        batch_tokens: bound on batch times time of one forward pass.

    Returns:
        New tokens of each prompt; None where the model's logits were NaN.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in (seeds or range(len(prompts)))]
    texts: list[list[int]] = [list(prompt) for prompt in prompts]
    results: list[list[int] | None] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: -len(texts[index]))
    rows = max(1, batch_tokens // max_length)
    for start in range(0, len(order), rows):
        active = order[start : start + rows]
        for _ in range(max_tokens):
            if not active:
                break
            logits = _last_logits(model, [texts[index][-max_length:] for index in active], device)
            going = []
            for row, index in enumerate(active):
                if logits[row].isnan().any():
                    results[index] = None
                    continue
                token = draw(logits[row], sampling, generators[index])
                new = results[index]
                assert new is not None
                new.append(token)
                texts[index].append(token)
                if not finished(new):
                    going.append(index)
            active = going
    return results


def _last_logits(model: nn.Module, texts: list[list[int]], device: str | torch.device) -> Tensor:
    """Logits after the last token of each text: (batch, vocabulary), float64 on the host.

    Texts are padded on the right: the model is causal, so padding never reaches a token that counts.
    """
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    last = torch.tensor([len(text) - 1 for text in texts], device=device)
    logits: Tensor = model(tokens)[torch.arange(len(texts), device=device), last]
    return logits.double().cpu()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits (vocabulary,): temperature first, then top-k, then the nucleus (Holtzman et al. 2020)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits / sampling.temperature, dim=0).sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
        probabilities = probabilities / probabilities.sum()
    if sampling.top_p < 1:  # else rounding of the sum would decide how many there are, and with that which is drawn
        before = probabilities.cumsum(0) - probabilities
        # A token belongs to the nucleus while those ahead of it hold less than top_p; the first always does.
        probabilities = probabilities[: max(1, int((before < sampling.top_p).sum()))]
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return int(tokens[choice])
