"""Text from a model, token by token: greedy or sampled, many prompts at a time.

- Batching is continuous: a finished text leaves and a waiting one takes its row of the cache.
- Every prompt has a random stream, one number per token, so its text does not depend on other prompts.
- A text longer than the context is computed again from its last tokens, because all positions change.

Yu et al. 2022 (Orca); Holtzman et al. 2020 (arXiv:1904.09751).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...train.errors import UserError
from ...train.hardware import CUDA, device_name, on_gpu, read
from ...train.model.attention import document_starts, first_visible, visible_mask
from ...train.model.gpt import GPT
from .forward import Cache, Forward, Ids, attention_by_sequence, unless_out_of_memory

MAX_RUNNING = 256  # texts that decode together
CACHE_BYTES = 1 << 30  # default for keys and values on a CPU; on a GPU it is half of the free memory
_FIRST_SORTED = 64  # tokens that are tried for a nucleus; then 8 times as many
# `decode_speed` times this many tokens, for at most so many seconds, and begins so far from the end of the context.
TIMED, TIMED_SECONDS, TIMED_END = 256, 1.5, 32


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole distribution."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


def generate_texts(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    finished: Callable[[list[int]], bool],
    done: Callable[[int, list[int] | None], None] | None = None,
    **options: Any,
) -> list[list[int] | None]:
    """Generate up to `max_tokens` tokens after each prompt; return them per prompt, or None if its logits were NaN.

    Args:
        prompts: Token ids; no prompt is empty.
        finished: Called after each token with the prompt's new tokens; True ends the text after this token.
        done: Called with a prompt's index and result as soon as it is complete.
        options: Arguments of `Generation`.

    Raises:
        UserError: A single prompt does not fit the memory.
    """
    if not prompts:
        return []
    generation = Generation(model, prompts, max_tokens, **options)
    results: list[list[int] | None] = [None] * len(prompts)
    while not generation.over:
        for request in generation.step(finished):
            results[request.index] = None if request.failed else request.new
            if done is not None:
                done(request.index, results[request.index])
    return results


def stream(model: GPT, prompt: Sequence[int], max_tokens: int, *, seed: int = 0, **options: Any) -> Iterator[int]:
    """Yield the tokens that follow one prompt as they are computed. `options`: arguments of `Generation`.

    Raises UserError if the model's logits are NaN.
    """
    generation = Generation(model, [prompt], max_tokens, seeds=[seed], **options)
    (request,) = generation.waiting
    while not generation.over:
        before = len(request.new)
        generation.step(lambda new: False)
        if request.failed:
            raise UserError("the model returned NaN instead of a token; use a checkpoint of another run")
        yield from request.new[before:]


def decode_speed(model: GPT) -> dict[str, Any] | None:
    """Time greedy decoding near the end of the context, per token: least `seconds`, `median` (also s), and `device`.

    Returns None if logits are NaN.
    """
    context, device, times = model.max_length, model.cos.device, list[float]()
    prompt = [int(model.end_of_document == 0)] * (context - min(TIMED_END, context // 2))
    generation, until = None, time.perf_counter() + TIMED_SECONDS
    while len(times) <= TIMED and (len(times) < 2 or time.perf_counter() < until):
        if generation is None or generation.over:
            generation = Generation(model, [prompt], context - len(prompt) + 1, context, device=device)
            generation.end = None  # a document that began here would not see the cache
            if generation.step(lambda new: False):
                return None
        start = time.perf_counter()
        generation.step(lambda new: False)
        times.append(time.perf_counter() - start)
    del times[0]  # the warm-up
    return {"seconds": min(times), "median": float(np.median(times)), "device": device_name(device)}


@dataclass(eq=False)
class Prompt:
    """A prompt and the tokens generated after it."""

    index: int
    text: list[int]
    uniforms: Tensor  # (max_tokens,) one random number per new token
    start: int
    new: list[int] = field(default_factory=list)
    failed: bool = False


class Generation:
    """Generation after several prompts; `running[i]` has row i of the cache.

    Args:
        prompts: Token ids; only the last `max_length` tokens of each are used.
        max_length: Longest sequence that the model accepts.
        seeds: One per prompt, for sampling; the default is its index.
        batch_tokens: Bound on the tokens of one forward pass; a longer prompt runs alone.
        cache_bytes: Bound on the key-value cache (at least one row); for the default see `CACHE_BYTES`.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        max_length: int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        batch_tokens: int = 4096,
        cache_bytes: int | None = None,
    ) -> None:
        self.model, self.max_tokens, self.max_length, self.sampling = model, max_tokens, max_length, sampling
        self.device, self.batch_tokens = torch.device(device), batch_tokens
        self.end, self.window = model.end_of_document, model.config.window or max_length
        self.waiting: deque[Prompt] = deque()
        self.running: list[Prompt] = []
        for index, (prompt, seed) in enumerate(zip(prompts, seeds or range(len(prompts)), strict=True)):
            text = list(prompt[-max_length:])
            start = max((place for place, before in enumerate(text[:-1], 1) if before == self.end), default=0)
            random = torch.Generator().manual_seed(seed)
            uniforms = torch.rand(max_tokens, dtype=torch.float64, generator=random)
            self.waiting.append(Prompt(index, text, uniforms, start))
        self.cache, self.forward = self._new_cache(cache_bytes), Forward(model, absorbed=True)

    @property
    def over(self) -> bool:
        return not (self.waiting or self.running)

    @torch.inference_mode()
    def step(self, finished: Callable[[list[int]], bool]) -> list[Prompt]:
        """Compute one token for each running or newly started prompt; return the prompts that ended or failed."""
        if self.max_tokens < 1:
            ended, self.waiting = list(self.waiting), deque()
            return ended
        ended = []
        for work in (self._decode, self._prefill):  # in this order a row that becomes free is used at once
            requests, logits = work()
            if logits is not None:
                ended += self._take(requests, logits, finished)
        return ended

    def _decode(self) -> tuple[list[Prompt], Tensor | None]:
        """Extend the running prompts: return them and the logits after their last tokens (None if none runs)."""
        requests, parts, start = self.running, list[Tensor](), 0
        tokens = [request.text[-1] for request in requests]
        lengths = np.array([len(request.text) for request in requests])
        first = np.maximum(lengths - self.window, [request.start for request in requests])
        while start < len(requests):
            chunk = slice(start, min(start + self.batch_tokens, len(requests)))
            states = tokens[chunk], lengths[chunk] - 1, first[chunk], start
            logits = unless_out_of_memory(partial(decode_tokens, self.forward, self.cache, *states), self.device)
            if logits is None:
                self.batch_tokens = self._halved(chunk.stop - start)
                continue
            parts.append(logits)
            start = chunk.stop
        return requests, torch.cat(parts) if parts else None

    def _prefill(self) -> tuple[list[Prompt], Tensor | None]:
        """Start the waiting prompts that fit; return them and their logits (None if none fits or memory ran out)."""
        joined = self._admit()
        if not joined:
            return [], None
        texts, row = [request.text for request in joined], len(self.running)
        self.cache.clear(range(row, row + len(joined)))
        prefill = partial(prefill_prompts, self.forward, self.cache, texts, row)
        logits = unless_out_of_memory(prefill, self.device)
        if logits is None:
            self.batch_tokens = self._halved(sum(map(len, texts)), len(joined) == 1)
            self.waiting.extendleft(reversed(joined))
        else:
            self.running += joined
        return joined, logits

    def _admit(self) -> list[Prompt]:
        joined: list[Prompt] = []
        tokens = 0
        while self.waiting and len(self.running) + len(joined) < self.cache.rows:
            tokens += len(self.waiting[0].text)
            if joined and tokens > self.batch_tokens:
                break
            joined.append(self.waiting.popleft())
        return joined

    def _take(self, requests: list[Prompt], logits: Tensor, finished: Callable[[list[int]], bool]) -> list[Prompt]:
        uniforms = None
        if self.sampling.temperature != 0:
            uniforms = torch.stack([request.uniforms[len(request.new)] for request in requests]).to(logits.device)
        tokens, failed = choose_tokens(logits, self.sampling, uniforms)
        ended, outgrown = [], []
        for request, token, is_nan in zip(requests, read(tokens).tolist(), read(failed).tolist(), strict=True):
            request.failed = is_nan
            if is_nan:
                ended.append(request)
                continue
            if request.text[-1] == self.end:
                request.start = len(request.text)
            request.text.append(token)
            request.new.append(token)
            if finished(request.new) or len(request.new) >= self.max_tokens:
                ended.append(request)
            elif len(request.text) > self.max_length:
                outgrown.append(request)
        self._leave({*ended, *outgrown})
        for request in reversed(outgrown):
            del request.text[: -self.max_length]
            self.waiting.appendleft(request)
        return ended

    def _leave(self, requests: set[Prompt]) -> None:
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row] in requests:
                last = self.running.pop()
                if row < len(self.running):
                    self.running[row] = last
                    self.cache.move(len(self.running), row)

    def _halved(self, size: int, alone: bool = False) -> int:
        if size == 1 or alone:
            raise UserError(
                f"memory ran out on {self.device} for a single text; use precision=bf16 or a machine with more memory"
            )
        return size // 2

    def _new_cache(self, cache_bytes: int | None) -> Cache:
        config, dtype = self.model.config, self.model.embedding.weight.dtype
        if cache_bytes is None:
            cache_bytes = CUDA.free_bytes(self.device) // 2 if on_gpu(self.device) else CACHE_BYTES
        length = max(min(len(request.text) + self.max_tokens, self.max_length) for request in self.waiting)
        rows = cache_bytes // (config.depth * config.cached * length * dtype.itemsize)
        rows = max(1, min(rows, len(self.waiting), MAX_RUNNING))
        return Cache(config, rows, length, dtype, self.device)


# --- the two passes ---------------------------------------------------------------------------------------------------


def prefill_prompts(forward: Forward, cache: Cache, texts: Sequence[Sequence[int]], first_row: int = 0) -> Tensor:
    """Run the model on texts; return the logits after the last token of each text, (texts, vocabulary).

    The texts' keys and values are stored in the cache from row `first_row` on.
    """
    model, device = forward.model, forward.model.cos.device
    lengths = [len(text) for text in texts]
    positions = np.concatenate([np.arange(length) for length in lengths])
    places = cache.places(first_row + np.repeat(np.arange(len(texts)), lengths), positions)
    tokens = torch.tensor([token for text in texts for token in text], device=device)
    masks = [_mask(model, part) for part in tokens.split(lengths)]

    def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache.write(block, places, key, value)
        asking, seen = lengths, masks
        if len(query) < len(key):  # the last token of each text alone
            asking, seen = [1] * len(texts), [None if mask is None else mask[:, :, -1:] for mask in masks]
        return attention_by_sequence(query, key, value, asking, lengths, seen, model.config.window)

    last = torch.from_numpy(np.cumsum(lengths) - 1).to(device)
    return forward.logits(forward.hidden(tokens, torch.from_numpy(positions).to(device), attend, last))


def _mask(model: GPT, tokens: Tensor) -> Tensor | None:
    row = tokens[None]
    starts = None if model.end_of_document is None else document_starts(row, model.end_of_document)
    first = first_visible(row, starts, model.config.window)
    return None if first is None else visible_mask(first, model.embedding.weight.dtype)


def decode_tokens(
    forward: Forward, cache: Cache, tokens: Sequence[int], positions: Ids, first: Ids, first_row: int = 0
) -> Tensor:
    """Run the model on one new token per cache row, from `first_row` on; return logits (rows, vocabulary).

    `tokens`, their `positions` and the `first` position that each token sees are (rows,).
    """
    device = forward.model.cos.device
    attend, at = cache.step(first_row, positions, first), torch.from_numpy(positions).to(device)
    return forward.logits(forward.hidden(torch.tensor(tokens, device=device), at, attend))


# --- the next token ---------------------------------------------------------------------------------------------------


def choose_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose a token per row of logits (rows, vocabulary); return the tokens and which rows have a NaN, (rows,) each.

    The temperature applies first, then top-k, then top-p. `uniforms`: (rows,) float64 in [0, 1), unused at temperature
    0. For a row with a NaN the token has no meaning.
    """
    highest, greedy = logits.max(dim=1)  # a NaN counts as the highest
    if sampling.temperature == 0:
        return greedy, highest.isnan()
    assert uniforms is not None
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=1)
    if not sampling.top_k and sampling.top_p >= 1:
        return _drawn(probabilities, uniforms)[:, 0], highest.isnan()
    likely, tokens = _most_likely(probabilities, sampling)
    if sampling.top_p < 1:
        before = likely.cumsum(1) - likely
        # A token belongs to the nucleus if the tokens ahead of it have less than top_p; the first one always does.
        outside = before >= sampling.top_p
        outside[:, 0] = False
        likely = likely.masked_fill(outside, 0.0)
    return tokens.gather(1, _drawn(likely, uniforms))[:, 0], highest.isnan()


def _most_likely(probabilities: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return each row's highest probabilities, falling, and their tokens.

    With `top_k`: the k highest, normalised. Without: at least enough to sum to `top_p`.
    """
    vocabulary = probabilities.shape[1]
    if sampling.top_k:
        likely, tokens = probabilities.topk(min(sampling.top_k, vocabulary), dim=1)
        return likely / likely.sum(1, keepdim=True), tokens
    count = _FIRST_SORTED
    while count < vocabulary:
        likely, tokens = probabilities.topk(count, dim=1)
        if not read((likely.sum(1) < sampling.top_p).any()):
            return likely, tokens
        count *= 8
    return probabilities.sort(dim=1, descending=True, stable=True)


def _drawn(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return, per row, the first index whose cumulative sum exceeds `uniforms` times the row's total: (rows, 1)."""
    cumulative = probabilities.cumsum(1)
    total = cumulative[:, -1:]
    # Below the total even after rounding, or a place of probability 0 could be chosen.
    threshold = torch.minimum(uniforms[:, None] * total, total * (1 - 2.0**-52))
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=probabilities.shape[1] - 1)
