"""Our models as lm-eval sees them, in this process and without transformers.

lm-eval builds prompts and computes metrics. Prompts that are too long are cut on the left, as in lm-eval's `hf` model;
a *continuation* that is too long is scored by lm-eval's rolling windows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.api.metrics import mean
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..train.data.tokenizers import Tokenizer
from ..train.hardware import on_gpu
from ..train.job.control import run_on_ranks
from ..train.model.gpt import GPT
from ..train.parallel.mesh import Mesh
from .inference.generate import Sampling, generate_texts
from .inference.ranks import share_requests
from .inference.scoring import Score, Scorer
from .inference.trees import Request, shared_length
from .metrics import ItemResult
from .records import Answers, item_results, request_key
from .tasks.suite import SuiteTask, quiet

# Small enough for the caches of a CPU, large enough to fill a GPU.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
# Tokens that a rank scores, and prompts that it continues, before the answers of all ranks are stored.
ROUND_TOKENS, ROUND_PROMPTS = 1 << 18, 64
ALONE = Mesh()


class TokenCache(dict[str, np.ndarray]):
    """Token ids of texts under one tokenizer, kept for later checkpoints."""

    def encode(self, texts: Iterable[str], encode: Callable[[Sequence[str]], Sequence[Any]]) -> dict[str, list[int]]:
        unique = dict.fromkeys(texts)
        if new := [text for text in unique if text not in self]:
            self.update(zip(new, map(np.asarray, encode(new)), strict=True))
        return {text: self[text].tolist() for text in unique}


class CheckpointLM(TemplateLM):
    """The lm-eval interface of our models. An empty context becomes the tokenizer's `end_of_document`."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        max_length: int,
        device: str | torch.device = "cpu",
        batch_tokens: int | None = None,  # bound on rows times length of one forward pass; default by device
        *,
        tokens: TokenCache | None = None,  # of this tokenizer
        answers: Answers | None = None,  # earlier answers of this model; by default none are kept
        ranks: Mesh = ALONE,  # processes that share the work, each with the same model
        say: Callable[[str], None] = lambda line: None,  # called if memory runs out
    ) -> None:
        super().__init__()
        self.model, self.text, self.max_length = model, tokenizer, max_length
        self._device = torch.device(device)
        self.batch_tokens = batch_tokens or BATCH_TOKENS["cuda" if on_gpu(self._device) else "cpu"]
        self._tokens, self._answers, self._ranks = TokenCache() if tokens is None else tokens, answers, ranks
        self._scorer = Scorer(model, device, self.batch_tokens, say)
        # Arguments of requests with a cut prompt or a continuation of several windows, and of those with a NaN.
        self.truncated: set[tuple[Any, ...]] = set()
        self.failed: set[tuple[Any, ...]] = set()

    @property
    def eot_token_id(self) -> int:
        return self.text.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._encode([string])[string]

    def _encode(self, texts: Sequence[str]) -> dict[str, list[int]]:
        return self._tokens.encode(texts, self.text.encode_batch)

    # --- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Score]:
        """Return each continuation's log-probability in nats, and whether greedy decoding generates it."""
        pairs = [request.args for request in requests]
        # As in lm-eval, trailing blanks of a context belong to the continuation, and both are encoded as one text.
        contexts = [context.rstrip() for context, _ in pairs]
        ids = self._encode([*contexts, *(context + continuation for context, continuation in pairs)])
        split = []
        for (context, continuation), start in zip(pairs, contexts, strict=True):
            whole, before = ids[context + continuation], ids[start]
            if context == "" and whole[:1] == [self.prefix_token_id]:
                before = whole[:1]
            if len(before) >= len(whole) and context + continuation != start:
                # No token belongs to the answer alone, so tokens across the border count as the answer's.
                before = whole[: min(shared_length(np.asarray(before), np.asarray(whole)), len(whole) - 1)]
            split.append(((context, continuation), before, whole[len(before) :]))
        return self._loglikelihood_tokens(split)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Score]:
        windows = []
        for strings, context, continuation in requests:
            room = self.max_length + 1 - len(continuation)
            if len(context) > room:
                self.truncated.add(strings)
            before = context or [self.prefix_token_id]  # a context of blanks is part of the continuation
            if room < 1:
                windows.append(_rolling_windows(continuation, before[-1], self.max_length))
            else:
                windows.append([Request(before[-room:], continuation)] if continuation else [])
        return self._sums([request_key("loglikelihood", *strings) for strings, _, _ in requests], windows)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each whole text in nats, summed over windows that score every token once."""
        texts = [request.args[0] for request in requests]
        ids = self._encode(texts)
        windows = [_rolling_windows(ids[text], self.prefix_token_id, self.max_length) for text in texts]
        return [total for total, _ in self._sums([request_key("rolling", text) for text in texts], windows)]

    def _sums(self, names: list[str], windows: list[list[Request]]) -> list[Score]:
        # Answers are kept window by window, because the windows of a text are not in one batch.
        parts = [[f"{name}.{number}" for number in range(len(of))] for name, of in zip(names, windows, strict=True)]
        by_name = dict(zip(chain(*parts), chain(*windows), strict=True))
        scores = {name: (float(nats), bool(greedy)) for name, (nats, greedy) in self._known(by_name).items()}
        missing = [name for name in by_name if name not in scores]
        requests = [by_name[name] for name in missing]

        def done(batch: list[tuple[int, Score]]) -> None:
            new = {missing[place]: score for place, score in batch}
            scores.update(new)
            self._keep([(name, list(score)) for name, score in new.items()])

        if self._ranks.size == 1:
            self._scorer.score(requests, done)
        else:
            for shared in share_requests(requests, self._ranks.size, ROUND_TOKENS):
                mine = [requests[place] for place in shared[self._ranks.rank]]
                gathered = self._ranks.gather(run_on_ranks(self._ranks, partial(self._scorer.score, mine)))
                done(list(zip(chain(*shared), chain(*gathered), strict=True)))
        # A request without windows has probability 1, and greedy decoding writes it.
        return [(sum((scores[one][0] for one in of), 0.0), all(scores[one][1] for one in of)) for of in parts]

    def _known(self, names: Iterable[str]) -> dict[str, Any]:
        if (store := self._answers) is None:
            return {}
        return run_on_ranks(
            self._ranks,
            lambda: {name: answer for name in names if (answer := store.get(name)) is not None},
            only_first=True,
        )

    def _keep(self, answers: list[tuple[str, Any]]) -> None:
        if self._answers is not None:
            run_on_ranks(self._ranks, partial(self._answers.put, answers), only_first=True)

    # --- generation --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate the text after each context, up to a stop sequence, the end of the document, or a token limit."""
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(place)
        results = [""] * len(requests)
        for group, places in groups.items():
            contexts = [requests[place].args[0] for place in places]
            texts = self._continue(contexts, places, group, normalize_gen_kwargs(requests[places[0]].args[1]))
            for place, text in zip(places, texts, strict=True):
                results[place] = text
        return results

    def _continue(self, contexts: list[str], places: list[int], group: str, settings: Any) -> list[str]:
        """Generate a text after each context. The requests' indices, `places`, give the seeds, so repeats differ."""
        limit, stops = settings["max_gen_toks"], [stop for stop in settings["until"] if stop]
        decode = self.text.decode
        # As in lm-eval's `hf` model, the prompt is cut to leave room for the answer. If the answer alone fills the
        # context, the window slides instead.
        room = self.max_length - limit if limit < self.max_length else self.max_length
        ids = self._encode(contexts)
        self.truncated |= {(context,) for context in contexts if len(ids[context]) > room}
        sampling = Sampling(
            settings["temperature"] if settings["do_sample"] else 0.0,
            int(settings.get("top_k") or 0),
            float(settings.get("top_p") or 1.0),
        )
        names: list[str] = []
        prompts: dict[str, tuple[list[int], int]] = {}  # ids and seed
        for context, place in zip(contexts, places, strict=True):
            # 32 bits, which is what torch keeps of a seed on the CPU; neighbouring numbers would be poor seeds.
            seed = int(np.random.SeedSequence([0, place]).generate_state(1)[0])
            names.append(request_key("generate", context, group, seed if sampling.temperature > 0 else None))
            prompts[names[-1]] = (ids[context] or [self.prefix_token_id])[-room:], seed

        def finished(new: list[int]) -> bool:
            return new[-1] == self.eot_token_id or (bool(stops) and any(stop in decode(new) for stop in stops))

        texts = {name: answer[0] for name, answer in self._known(prompts).items()}
        missing = [name for name in prompts if name not in texts]

        def ask(part: list[str], done: Callable[[int, list[int] | None], None] | None = None) -> list[list[int] | None]:
            return generate_texts(
                self.model,
                [prompts[name][0] for name in part],
                limit,
                max_length=self.max_length,
                finished=finished,
                sampling=sampling,
                seeds=[prompts[name][1] for name in part],
                device=self._device,
                batch_tokens=self.batch_tokens,
                done=done,
            )

        def take(names: list[str], outputs: list[list[int] | None]) -> None:
            for name, output in zip(names, outputs, strict=True):
                texts[name] = None if output is None else postprocess_generated_text(decode(output), stops, None)
            self._keep([(name, [texts[name]]) for name in names])

        # One rank stores each text as soon as it ends; several ranks take every size-th prompt, round by round.
        size, rank = self._ranks.size, self._ranks.rank
        if size == 1:
            ask(missing, lambda number, output: take([missing[number]], [output]))
        for start in range(0, len(missing) if size > 1 else 0, size * ROUND_PROMPTS):
            part = missing[start : start + size * ROUND_PROMPTS]
            outputs = self._ranks.gather(run_on_ranks(self._ranks, partial(ask, part[rank::size])))
            take([name for other in range(size) for name in part[other::size]], list(chain(*outputs)))
        self.failed |= {(context,) for context, name in zip(contexts, names, strict=True) if texts[name] is None}
        return [texts[name] or "" for name in names]


def _rolling_windows(tokens: list[int], prefix: int, max_length: int) -> list[Request]:
    """Split a text into lm-eval's windows, each after one token of context, which is `prefix` for the first window.

    If the last window is shorter, as much context as fits into `max_length` precedes it.
    """
    windows = get_rolling_token_windows(tokens, prefix, max_length, context_len=1)
    return [Request(*make_disjoint_window(window)) for window in windows]


def answer_task(lm: CheckpointLM, entry: SuiteTask) -> tuple[list[ItemResult], dict[str, float | None]]:
    """Run a task. Returns its items with the model's answers, and metrics that are not a mean over items, such as F1.

    Metrics that are not finite are None.
    """
    with quiet(progress_bars=True):
        # Our standard errors come from the items; lm-eval's bootstrap would cost more than the model.
        output = lm_eval.evaluate(lm, {"tasks": {entry.name: entry.task}, "groups": {}}, bootstrap_iters=0)
    averaged = {name for name, function in entry.task.aggregation().items() if function is mean}
    items = item_results(entry, output["samples"][entry.name], averaged, lm.truncated, lm.failed)
    others = {}
    for metric, value in output["results"][entry.name].items():
        name, _, kind = metric.partition(",")
        if kind and isinstance(value, Real) and name not in averaged:
            others[name if kind == "none" else metric] = float(value) if np.isfinite(float(value)) else None
    return items, others
