"""Our models as lm-eval sees them, in this process and without transformers.

lm-eval builds prompts and computes metrics. Prompts that are too long are cut on the left, as in lm-eval's `hf` model;
a *continuation* that is too long is scored by lm-eval's rolling windows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

import lm_eval
import numpy as np
import torch
from lm_eval.api.metrics import mean
from lm_eval.api.model import LM
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
ENCODED = 1024  # requests whose texts are encoded at a time, which bounds memory
ALONE = Mesh()


class Windows(NamedTuple):
    """What the model reads of a request."""

    requests: list[Request]
    is_cut: bool  # whether the prompt was cut, or the continuation takes several windows


WindowCache = dict[tuple[str, ...], Windows]  # by the texts of a request


class CheckpointLM(LM):
    """The lm-eval interface of our models. An empty context becomes the tokenizer's `end_of_document`."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        max_length: int,
        device: str | torch.device = "cpu",
        batch_tokens: int | None = None,  # bound on rows times length of one forward pass; default by device
        *,
        windows: WindowCache | None = None,  # of this tokenizer and length, kept for later checkpoints
        answers: Answers | None = None,  # earlier answers of this model; by default none are kept
        ranks: Mesh = ALONE,  # processes that share the work, each with the same model
        say: Callable[[str], None] = lambda line: None,  # called if memory runs out
    ) -> None:
        super().__init__()
        self.model, self.text, self.max_length = model, tokenizer, max_length
        self._device = torch.device(device)
        self.batch_tokens = batch_tokens or BATCH_TOKENS["cuda" if on_gpu(self._device) else "cpu"]
        self._windows, self._answers, self._ranks = {} if windows is None else windows, answers, ranks
        self._scorer = Scorer(model, device, self.batch_tokens, say)
        # Arguments of requests with a cut prompt or a continuation of several windows, and of those with a NaN.
        self.truncated: set[tuple[Any, ...]] = set()
        self.failed: set[tuple[Any, ...]] = set()

    def _encode(self, texts: Iterable[str]) -> dict[str, list[int]]:
        unique = list(dict.fromkeys(texts))
        return {text: ids.tolist() for text, ids in zip(unique, self.text.encode_batch(unique), strict=True)}

    # --- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Score]:
        """Return each continuation's log-probability in nats, and whether greedy decoding generates it."""
        pairs = self._cut(requests, self._windows_of_pairs)
        self.truncated |= {pair for pair in pairs if self._windows[pair].is_cut}
        return self._sums("loglikelihood", pairs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each whole text in nats, summed over windows that score every token once."""
        return [nats for nats, _ in self._sums("rolling", self._cut(requests, self._windows_of_texts))]

    def _cut(self, requests: list[Any], windows: Callable[[list[Any]], Iterator[Windows]]) -> list[Any]:
        """Cache the windows of requests, and return the requests' texts."""
        texts = [request.args for request in requests]
        new = list(dict.fromkeys(one for one in texts if one not in self._windows))
        for start in range(0, len(new), ENCODED):  # the ids of all whole prompts would take gigabytes
            part = new[start : start + ENCODED]
            self._windows.update(zip(part, windows(part), strict=True))
        return texts

    def _windows_of_pairs(self, pairs: list[tuple[str, str]]) -> Iterator[Windows]:
        # As in lm-eval, trailing blanks of a context belong to the continuation, and both are encoded as one text.
        contexts = [context.rstrip() for context, _ in pairs]
        ids = self._encode([*contexts, *(context + continuation for context, continuation in pairs)])
        for (context, continuation), start in zip(pairs, contexts, strict=True):
            whole, before = ids[context + continuation], ids[start]
            if context == "" and whole[:1] == [self.text.end_of_document]:
                before = whole[:1]
            if len(before) >= len(whole) and context + continuation != start:
                # No token belongs to the answer alone, so tokens across the border count as the answer's.
                before = whole[: min(shared_length(np.asarray(before), np.asarray(whole)), len(whole) - 1)]
            scored = whole[len(before) :]
            room = self.max_length + 1 - len(scored)
            is_cut = len(before) > room
            before = before or [self.text.end_of_document]  # a context of blanks is part of the continuation
            if room < 1:
                yield Windows(self._rolling(scored, before[-1]), is_cut)
            else:
                yield Windows([self._request(before[-room:], scored)] if scored else [], is_cut)

    def _windows_of_texts(self, texts: list[tuple[str]]) -> Iterator[Windows]:
        ids = self._encode(text for (text,) in texts)
        return (Windows(self._rolling(ids[text], self.text.end_of_document), False) for (text,) in texts)

    def _rolling(self, tokens: list[int], prefix: int) -> list[Request]:
        """Split a text into lm-eval's windows, each after one token of context, which is `prefix` for the first window.

        If the last window is shorter, as much context as fits into `max_length` precedes it.
        """
        windows = get_rolling_token_windows(tokens, prefix, self.max_length, context_len=1)
        return [self._request(*make_disjoint_window(window)) for window in windows]

    def _request(self, prefix: list[int], continuation: list[int]) -> Request:
        return Request(np.array(prefix, self.text.dtype), np.array(continuation, self.text.dtype))

    def _sums(self, kind: str, texts: list[tuple[str, ...]]) -> list[Score]:
        # Answers are kept window by window, because the windows of a text are not in one batch.
        windows = [self._windows[one].requests for one in texts]
        names = [request_key(kind, *one) for one in texts]
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
            prompts[names[-1]] = (ids[context] or [self.text.end_of_document])[-room:], seed

        def finished(new: list[int]) -> bool:
            return new[-1] == self.text.end_of_document or (bool(stops) and any(stop in decode(new) for stop in stops))

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
