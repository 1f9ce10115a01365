"""Text from a model, token by token: greedy or sampled, many prompts at a time.

- Batching is continuous: who is finished leaves and the next one joins. Who finds no page of the cache waits, and
  where those that run outgrow the pages the last to come goes back to wait, with what it has written.
- Every prompt draws one uniform number per token from a stream of its own: its text depends on neither its neighbours
  nor such waits.
- A text longer than the model's context slides: all positions change with every token, so no cache helps.

Yu et al. 2022 (Orca); Kwon et al. 2023 (arXiv:2309.06180); Holtzman et al. 2020 (arXiv:1904.09751).
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
from .forward import Forward, attention_by_sequence, unless_out_of_memory
from .paged import PAGE, Ids, PagedBatch, PagedCache, Pages

MOST_RUNNING = 256  # requests that decode in one pass
CACHE_BYTES = 1 << 30  # of keys and values on a CPU, where the caller does not say; on a GPU half of what is free
_DRAWN_AHEAD = 64  # random numbers of a stream
_FIRST_SORTED = 64  # tokens that are tried for a nucleus, then 8 times as many
TIMED, TIMED_SECONDS, TIMED_END = 256, 1.5, 32  # tokens that `decode_speed` times, for how long, how far from the end


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

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
    """At most `max_tokens` new tokens of each prompt, none of them empty; None where the model's logits were NaN.

    `finished` is asked after each token with all new ones of that prompt; True ends it (that token is kept). `done` is
    called with a prompt's place and its result as soon as it is there. `options`: see `Generation`. Raises UserError: a
    single prompt does not fit the memory.
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
    """The tokens that follow one prompt, each as soon as it is there; for the options see `Generation`.

    Raises UserError: the model's logits are NaN.
    """
    generation = Generation(model, [prompt], max_tokens, seeds=[seed], **options)
    (request,) = generation.waiting
    while not generation.over:
        before = len(request.new)
        generation.step(lambda new: False)
        if request.failed:
            raise UserError("the model returned NaN, so no token follows; give a checkpoint of a healthy run")
        yield from request.new[before:]


def decode_speed(model: GPT) -> dict[str, Any] | None:
    """Seconds of a greedy token of one request at the end of its context, the fastest of many: on a busy machine their
    median is several times that. None where logits are NaN.
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
    del times[0]  # which warms up
    return {"seconds": min(times), "median": float(np.median(times)), "device": device_name(device)}


@dataclass(eq=False)
class Request:
    """A prompt on its way: the end of its text, what is new, and where its last document starts in the text."""

    index: int
    text: list[int]
    random: torch.Generator
    new: list[int] = field(default_factory=list)
    pages: Pages = field(default_factory=Pages)
    start: int = 0
    failed: bool = False
    _ahead: list[float] = field(default_factory=list)

    def uniform(self) -> float:
        if not self._ahead:
            drawn = torch.rand(_DRAWN_AHEAD, dtype=torch.float64, generator=self.random)
            self._ahead = drawn.flip(0).tolist()
        return self._ahead.pop()


class Generation:
    """Prompts on their way through a model: each waits, then runs (cached) or slides (recomputed), and leaves. Of a
    prompt only the last `max_length` tokens count.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        max_length: int,  # of a sequence that the model accepts
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,  # one per prompt, for sampling; default its place in the list
        device: str | torch.device = "cpu",
        batch_tokens: int = 4096,  # bound on the tokens of one forward pass; a longer prompt goes alone
        cache_bytes: int | None = None,  # of keys and values, default see `CACHE_BYTES`; one prompt always fits
        page: int = PAGE,  # positions
    ) -> None:
        self.model, self.max_tokens, self.max_length, self.sampling = model, max_tokens, max_length, sampling
        self.device, self.batch_tokens = torch.device(device), batch_tokens
        self.most_running = min(batch_tokens, MOST_RUNNING)
        self.end, self.window = model.end_of_document, model.config.window or max_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.sliding: list[Request] = []
        for index, (prompt, seed) in enumerate(zip(prompts, seeds or range(len(prompts)), strict=True)):
            text = list(prompt[-max_length:])
            start = max((place for place, before in enumerate(text[:-1], 1) if before == self.end), default=0)
            self.waiting.append(Request(index, text, torch.Generator().manual_seed(seed), start=start))
        self._batch: PagedBatch | None = None  # of `running`, until that or a table changes
        self.cache, self.forward = self._new_cache(cache_bytes, page), Forward(model, absorbed=True)

    @property
    def over(self) -> bool:
        return not (self.waiting or self.running or self.sliding)

    @torch.inference_mode()
    def step(self, finished: Callable[[list[int]], bool]) -> list[Request]:
        """One round: a token for every request that runs, slides or joins. Returns those that have ended."""
        if self.max_tokens < 1:
            ended, self.waiting = list(self.waiting), deque()
            return ended
        ended = []
        # In this order, so that a request has at most one token a round, and what one leaves another has at once.
        for work in (self._slide, self._decode, self._prefill):
            requests, logits = work()
            if logits is not None:
                ended += self._take(requests, logits, finished)
        return ended

    # Each of these gives requests and the logits after their texts; None: nobody is there, or memory ran out, and the
    # next round tries with fewer.

    def _slide(self) -> tuple[list[Request], Tensor | None]:
        requests, start = self.sliding, 0
        parts: list[Tensor] = []
        while start < len(requests):
            chunk = requests[start : start + max(1, self.batch_tokens // self.max_length)]
            texts = [request.text[-self.max_length :] for request in chunk]
            logits = unless_out_of_memory(partial(recompute_last, self.model, texts, self.device), self.device)
            if logits is None:
                self.batch_tokens = self._halved(len(chunk)) * self.max_length
                continue
            parts.append(logits)
            start += len(chunk)
        return requests, torch.cat(parts) if parts else None

    def _decode(self) -> tuple[list[Request], Tensor | None]:
        self._make_room()
        if not self.running:
            return [], None
        if self._batch is None:
            self.cache.compact()
            tables = [request.pages for request in self.running]
            self._batch = PagedBatch(self.cache, tables, self.model.config.heads)
        texts = [request.text for request in self.running]
        positions = np.array([len(text) - 1 for text in texts])
        first = np.array([self._first(request) for request in self.running])
        tokens = [text[-1] for text in texts]
        logits = unless_out_of_memory(
            partial(decode_tokens, self.forward, self._batch, tokens, positions, first), self.device
        )
        if logits is None:
            self.most_running = self._halved(len(self.running))
            while len(self.running) > self.most_running:
                self._wait_again()
        return self.running, logits

    def _prefill(self) -> tuple[list[Request], Tensor | None]:
        joined = self._admit()
        if not joined:
            return [], None
        texts, pages = [request.text for request in joined], [request.pages for request in joined]
        logits = unless_out_of_memory(partial(prefill_prompts, self.forward, self.cache, texts, pages), self.device)
        self.running += joined
        self._batch = None
        if logits is None:
            self.batch_tokens = self._halved(sum(map(len, texts)), len(joined) == 1)
            for _ in joined:
                self._wait_again()
        return joined, logits

    def _admit(self) -> list[Request]:
        """Those that wait, in order, while there is a place, a budget, and a page for each to grow into."""
        joined: list[Request] = []
        tokens = 0
        while self.waiting and len(self.running) + len(joined) < self.most_running:
            request = self.waiting[0]
            tokens += len(request.text)
            request.pages.first = self._first(request) // self.cache.page
            company = len(self.running) + len(joined)
            needed = -(-len(request.text) // self.cache.page) - request.pages.first
            if (joined and tokens > self.batch_tokens) or (company and needed + company + 1 > self.cache.free):
                break
            if not self.cache.extend(request.pages, len(request.text)):
                break
            joined.append(self.waiting.popleft())
        return joined

    def _take(self, requests: list[Request], logits: Tensor, finished: Callable[[list[int]], bool]) -> list[Request]:
        """Gives each its next token. Those that end leave; those that outgrow the model slide from now on."""
        uniforms = None
        if self.sampling.temperature != 0:
            drawn = [request.uniform() for request in requests]
            uniforms = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
        tokens, failed = choose_tokens(logits, self.sampling, uniforms)
        ended, outgrown = [], []
        for request, token, bad in zip(requests, read(tokens).tolist(), read(failed).tolist(), strict=True):
            request.failed = bad
            if bad:
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
        if ended or outgrown:
            self._leave({*ended, *outgrown})
        self.sliding += outgrown
        return ended

    def _leave(self, requests: set[Request]) -> None:
        for request in requests:
            if request.pages.table:
                self.cache.release(request.pages)
                self._batch = None
        self.running = [request for request in self.running if request not in requests]
        self.sliding = [request for request in self.sliding if request not in requests]

    def _make_room(self) -> None:
        """A page for the next token of each that runs; where there are too few, the last to come waits."""
        place = 0
        while place < len(self.running):
            request = self.running[place]
            pages, length = request.pages, len(request.text)
            if self.cache.forget(pages, self._first(request)):
                self._batch = None
            if pages.end * self.cache.page < length:
                self._batch = None
                if not self.cache.extend(pages, length):
                    self._wait_again()  # which may be the one that asks
                    continue
            place += 1

    def _wait_again(self) -> None:
        request = self.running.pop()
        self.cache.release(request.pages)
        self.waiting.appendleft(request)
        self._batch = None

    def _first(self, request: Request) -> int:
        """The first position that the last token of its text sees."""
        return max(len(request.text) - self.window, request.start)

    def _halved(self, size: int, alone: bool = False) -> int:
        if size == 1 or alone:
            raise UserError(
                f"memory ran out on {self.device} over a single text; precision=bf16 or a machine with more memory "
                "would do"
            )
        return size // 2

    def _new_cache(self, cache_bytes: int | None, page: int) -> PagedCache:
        """Pages for all requests at once, or as many as the bound allows, at least for the longest one."""
        config, dtype = self.model.config, self.model.embedding.weight.dtype
        if cache_bytes is None:
            cache_bytes = CUDA.free_bytes(self.device) // 2 if on_gpu(self.device) else CACHE_BYTES
        lengths = [min(len(request.text) + self.max_tokens, self.max_length) for request in self.waiting]
        least, most = -(-max(lengths) // page), sum(-(-length // page) for length in lengths)
        fitting = cache_bytes // (config.depth * config.cached * page * dtype.itemsize)
        pages = max(least, min(most, fitting))
        return PagedCache.of(config, pages, dtype, self.device, page)


# --- the two passes ---------------------------------------------------------------------------------------------------


def prefill_prompts(
    forward: Forward, cache: PagedCache, texts: Sequence[Sequence[int]], pages: Sequence[Pages]
) -> Tensor:
    """Reads texts and keeps their keys and values: logits after each (texts, vocabulary).

    Positions before the first page of a request are not kept: nothing will look at them.
    """
    model, device = forward.model, forward.model.cos.device
    lengths = [len(text) for text in texts]
    kept = [np.arange(one.first * cache.page, length) for one, length in zip(pages, lengths, strict=True)]
    ends = np.cumsum(lengths)
    flat = np.concatenate([at + end - length for at, end, length in zip(kept, ends, lengths, strict=True)])
    rows = torch.from_numpy(cache.rows(pages, kept)).to(device)
    kept_tokens = None if len(flat) == ends[-1] else torch.from_numpy(flat).to(device)
    tokens = torch.tensor([token for text in texts for token in text], device=device)
    masks = [_mask(model, part) for part in tokens.split(lengths)]

    def attend(block: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        written = (key, value) if kept_tokens is None else (key[kept_tokens], value[kept_tokens])
        cache.write(block, rows, *written)
        asking, seen = lengths, masks
        if len(query) < len(key):  # of each text the last token alone
            asking, seen = [1] * len(texts), [None if mask is None else mask[:, :, -1:] for mask in masks]
        return attention_by_sequence(query, key, value, asking, lengths, seen, model.config.window)

    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return forward.logits(forward.hidden(tokens, positions, attend, torch.from_numpy(ends - 1).to(device)))


def _mask(model: GPT, tokens: Tensor) -> Tensor | None:
    row = tokens[None]
    starts = None if model.end_of_document is None else document_starts(row, model.end_of_document)
    first = first_visible(row, starts, model.config.window)
    return None if first is None else visible_mask(first, model.embedding.weight.dtype)


def decode_tokens(forward: Forward, batch: PagedBatch, tokens: Sequence[int], positions: Ids, first: Ids) -> Tensor:
    """Adds one token to each request: logits after it (requests, vocabulary).

    `tokens`, `positions` and the `first` position that each sees are (requests,).
    """
    device = forward.model.cos.device
    at = torch.from_numpy(positions).to(device)
    return forward.logits(forward.hidden(torch.tensor(tokens, device=device), at, batch.step(positions, first)))


def recompute_last(model: GPT, texts: Sequence[Sequence[int]], device: str | torch.device) -> Tensor:
    """Logits after the last token of each text, computed from nothing: (texts, vocabulary). Padding on the right is
    unseen.
    """
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    last = torch.tensor([len(text) - 1 for text in texts], device=device)
    rows = torch.arange(len(texts), device=device)
    logits: Tensor = model.head(model.last_hidden(tokens)[rows, last])
    return logits[:, : model.head.vocab_size]  # without the padding of the vocabulary


# --- the next token ---------------------------------------------------------------------------------------------------


def choose_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token per row of logits (rows, vocabulary): temperature first, then top-k, then the nucleus.

    `uniforms` (rows,) float64 in [0, 1) are not read where the temperature is 0. The second result (rows,) says which
    rows held a NaN, whose token means nothing.
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
        # A token belongs to the nucleus while those ahead of it hold less than top_p; the first always does.
        outside = before >= sampling.top_p
        outside[:, 0] = False
        likely = likely.masked_fill(outside, 0.0)
    return tokens.gather(1, _drawn(likely, uniforms))[:, 0], highest.isnan()


def _most_likely(probabilities: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The probabilities that top-k leaves (they sum to 1 again), or enough to hold the nucleus, highest first; their
    tokens.
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
    """The first place at which the cumulative sum exceeds uniform times total: (rows, n), (rows,) -> (rows, 1)."""
    cumulative = probabilities.cumsum(1)
    total = cumulative[:, -1:]
    # Below the total even where rounding takes the product there, or a place of probability 0 could be meant.
    threshold = torch.minimum(uniforms[:, None] * total, total * (1 - 2.0**-52))
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=probabilities.shape[1] - 1)
