"""lm-eval asks, our own models answer, in this process and without transformers.

Special here:
- `CheckpointLM` is lm-eval's `TemplateLM` over any causal module `tokens (B, T) -> logits (B, T, V)`. lm-eval splits
  and encodes prompts, and computes the metrics; here are windows, batches and sums.
- Prompts that do not fit are cut on the left, as lm-eval's own `hf` model does it. A *continuation* that does not fit
  (that model refuses those; a byte-level model of short context meets them) is scored by lm-eval's rolling windows.
- Rows are sorted by length and batched to a budget of tokens; sums over tokens are float64, so batching changes
  nothing beyond the rounding of the model itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import lm_eval
import numpy as np
import torch
from lm_eval.api.metrics import mean
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from ..train.config import RunConfig
from .generate import Sampling, generate
from .metrics import ItemResult, task_scores
from .tasks import Suite, SuiteTask, quiet

Window = tuple[list[int], list[int]]  # (tokens that condition, tokens that are scored)


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Loaded(Protocol):
    """What is asked of a loaded checkpoint."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def config(self) -> RunConfig: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def step(self) -> int: ...


class CheckpointLM(TemplateLM):
    """A model of ours as lm-eval sees it.

    Args:
        model: token ids (B, T) -> logits (B, T, V), causal; entries that are no token are -inf.
        tokenizer: text to ids and back; `end_of_document` conditions what has no context.
        max_length: longest sequence that the model accepts.
        device: where the model lies.
        batch_tokens: bound on rows times length of one forward pass.
        seed: of sampled generation.

    Attributes:
        truncated: arguments of the requests whose prompt was cut, or whose continuation took several windows.
        failed: arguments of the generations in which the model returned NaN.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, max_length: int, device: str | torch.device = "cpu",
        batch_tokens: int = 4096, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.text, self.max_length = model, tokenizer, max_length
        self._device, self.batch_tokens, self.seed = torch.device(device), batch_tokens, seed
        self.truncated: set[tuple[Any, ...]] = set()
        self.failed: set[tuple[Any, ...]] = set()

    @property
    def eot_token_id(self) -> int:
        return self.text.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = np.asarray(self.text.encode(string)).tolist()
        return ids

    # --- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Nats of each continuation given its context, and whether greedy decoding would produce it."""
        result: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return result

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        per_request = []
        for strings, context, continuation in requests:
            if len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(strings)
            # A context of blanks has moved into the continuation, whole.
            per_request.append(self._windows(context or [self.prefix_token_id], continuation))
        return self._sum_windows(per_request)

    def _windows(self, context: list[int], continuation: list[int]) -> list[Window]:
        """How a continuation fits the model: one window, the prompt cut on the left, or else rolling windows."""
        if len(continuation) > self.max_length:
            return _rolling_windows(continuation, context[-1], self.max_length)
        return [(context[-(self.max_length + 1 - len(continuation)) :], continuation)] if continuation else []

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Nats of whole texts: every token scored once, in lm-eval's windows of `max_length`, the first after
        `end_of_document`.
        """
        windows = [
            _rolling_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length)
            for request in requests
        ]
        return [total for total, _ in self._sum_windows(windows)]

    def _sum_windows(self, per_request: list[list[Window]]) -> list[tuple[float, bool]]:
        flat = [(owner, window) for owner, windows in enumerate(per_request) for window in windows]
        totals, greedy = np.zeros(len(per_request)), np.ones(len(per_request), dtype=bool)
        scores = self._score([window for _, window in flat])
        for (owner, _), (total, is_greedy) in zip(flat, scores, strict=True):
            totals[owner] += total
            greedy[owner] &= is_greedy
        return list(zip(totals.tolist(), greedy.tolist(), strict=True))

    @torch.inference_mode()
    def _score(self, windows: list[Window]) -> list[tuple[float, bool]]:
        """(nats, greedy) of each window, longest first in batches of at most `batch_tokens`."""
        lengths = [len(context) + len(target) - 1 for context, target in windows]
        order = sorted(range(len(windows)), key=lambda index: -lengths[index])
        results: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        start = 0
        while start < len(order):
            rows = max(1, self.batch_tokens // lengths[order[start]])
            batch = order[start : start + rows]
            for index, result in zip(batch, self._score_batch([windows[index] for index in batch]), strict=True):
                results[index] = result
            start += rows
        return results

    def _score_batch(self, windows: list[Window]) -> list[tuple[float, bool]]:
        """One forward pass. Padding is on the right, where a causal model cannot look."""
        longest = max(len(context) + len(target) - 1 for context, target in windows)
        tokens = np.zeros((len(windows), longest), dtype=np.int64)  # (B, T)
        for row, (context, target) in enumerate(windows):
            tokens[row, : len(context) + len(target) - 1] = (context + target)[:-1]
        counts = [len(target) for _, target in windows]
        rows = np.repeat(np.arange(len(windows)), counts)  # (P,) of P scored tokens
        columns = np.concatenate([np.arange(len(target)) + len(context) - 1 for context, target in windows])
        targets = torch.from_numpy(np.concatenate([target for _, target in windows])).to(self._device)
        logits: Tensor = self.model(torch.from_numpy(tokens).to(self._device))  # (B, T, V)
        scored = logits[torch.from_numpy(rows).to(self._device), torch.from_numpy(columns).to(self._device)]  # (P, V)
        scored = scored if scored.dtype == torch.float64 else scored.float()
        nats = scored.gather(1, targets[:, None])[:, 0] - scored.logsumexp(dim=1)  # (P,)
        hits = (scored.argmax(dim=1) == targets).cpu().numpy()
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        sums = np.add.reduceat(nats.double().cpu().numpy(), starts)
        return list(zip(sums.tolist(), np.logical_and.reduceat(hits, starts).tolist(), strict=True))

    # --- generation --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The text after each context, up to a stop sequence (not included), the end of the document, or the limit."""
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(place)
        results = [""] * len(requests)
        for places in groups.values():
            settings = normalize_gen_kwargs(requests[places[0]].args[1])
            texts = self._generate_group([requests[place] for place in places], places, settings)
            for place, text in zip(places, texts, strict=True):
                results[place] = text
        return results

    def _generate_group(self, requests: list[Any], places: list[int], settings: Any) -> list[str]:
        """Requests that share their settings. Seeds go by place in the whole list, so repeats differ."""
        most, stops = settings["max_gen_toks"], [stop for stop in settings["until"] if stop]
        prompts = []
        for request in requests:
            ids = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            # As lm-eval's `hf` model: the prompt gives way to the answer. Where the answer alone fills the context,
            # the window slides instead.
            room = self.max_length - most if most < self.max_length else self.max_length
            if len(ids) > room:
                self.truncated.add(request.args[:1])
            prompts.append(ids[-room:])

        def finished(new: list[int]) -> bool:
            return new[-1] == self.eot_token_id or (bool(stops) and any(stop in self._decode(new) for stop in stops))

        sampling = Sampling(
            settings["temperature"] if settings["do_sample"] else 0.0,
            int(settings.get("top_k") or 0),
            float(settings.get("top_p") or 1.0),
        )
        # torch keeps 32 bits of a seed on the CPU, so the two numbers are mixed into that many.
        seeds = [int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0]) for place in places]
        outputs = generate(
            self.model, prompts, most, max_length=self.max_length, finished=finished, sampling=sampling, seeds=seeds,
            device=self._device, batch_tokens=self.batch_tokens,
        )  # fmt: skip
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            if output is None:
                self.failed.add(request.args[:1])
            texts.append(postprocess_generated_text(self._decode(output or []), stops, None))
        return texts

    def _decode(self, ids: list[int]) -> str:
        return self.text.decode([token for token in ids if token != self.eot_token_id])


def _rolling_windows(tokens: list[int], prefix: int, max_length: int) -> list[Window]:
    """lm-eval's windows over a text: disjoint, except that the last one looks back as far as the model can."""
    windows = get_rolling_token_windows(tokens, prefix, max_length, context_len=1)
    return [make_disjoint_window(window) for window in windows]


def score(
    loaded: Loaded, suite: Suite, *, device: str | torch.device = "cpu", batch_tokens: int = 4096
) -> dict[str, dict[str, Any]]:
    """Scores one checkpoint on every task of a suite. The suite can be used again for the next checkpoint.

    Returns:
        {task: scores}, see `metrics.task_scores`, with the task's `subset` and `version`.
    """
    lm = make_lm(loaded, device, batch_tokens)
    return {name: score_task(lm, entry) for name, entry in suite.tasks.items()}


def make_lm(loaded: Loaded, device: str | torch.device = "cpu", batch_tokens: int = 4096) -> CheckpointLM:
    """The loaded checkpoint as lm-eval's model."""
    return CheckpointLM(loaded.model, loaded.tokenizer, loaded.config.data.sequence_length, device, batch_tokens)


def score_task(lm: CheckpointLM, entry: SuiteTask) -> dict[str, Any]:
    """Runs lm-eval's evaluator on one task and sums its items up."""
    with quiet(progress_bars=True):
        # Standard errors are ours, from the items: lm-eval's bootstrap would cost more than the model.
        output = lm_eval.evaluate(lm, {"tasks": {entry.name: entry.task}, "groups": {}}, bootstrap_iters=0)
    averaged = {name for name, function in entry.task.aggregation().items() if function is mean}
    items = _item_results(lm, entry, output["samples"][entry.name], averaged)
    scores = task_scores(items)
    for key, value in output["results"][entry.name].items():
        name, _, kind = key.partition(",")
        # Metrics that are no mean over items (perplexity, F1): lm-eval's number, without an error of ours.
        if kind and isinstance(value, int | float) and name not in averaged:
            scores[name if kind == "none" else key] = None if scores["withheld"] or not np.isfinite(value) else value
    return scores | {"subset": entry.subset, "version": entry.version}


def _item_results(
    lm: CheckpointLM, entry: SuiteTask, samples: list[dict[str, Any]], averaged: set[str]
) -> list[ItemResult]:
    """lm-eval's samples as item results. A task with several filters has a sample for each; they become one item."""
    merged: dict[int, ItemResult] = {}
    for sample in samples:
        suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
        values = {name + suffix: float(sample[name]) for name in sample["metrics"] if name in averaged}
        place = sample["doc_id"]
        if place in merged:
            merged[place].values.update(values)
            continue
        merged[place] = _item_result(lm, entry, sample, values)
    return [merged[place] for place in sorted(merged)]


def _item_result(lm: CheckpointLM, entry: SuiteTask, sample: dict[str, Any], values: dict[str, float]) -> ItemResult:
    kind, arguments, doc = entry.task.OUTPUT_TYPE, sample["arguments"], sample["doc"]
    responses = [response[0] for response in sample["resps"]]
    if kind == "generate_until":
        log_probabilities, keys = [], [tuple(request[:1]) for request in arguments]
    elif kind == "loglikelihood_rolling":
        log_probabilities, keys = responses, []
    else:
        log_probabilities, keys = [nats for nats, _ in responses], [tuple(request) for request in arguments]
    gold, chance = None, None
    if kind == "multiple_choice":
        choices = len(entry.task.doc_to_choice(doc))
        right = _right_choices(entry.task, doc, choices)
        chance = len(right) / choices
        gold = _gold(arguments[right[0]], log_probabilities[right[0]]) if right else None
    elif kind == "loglikelihood":
        chance, gold = 0.0, _gold(arguments[0], log_probabilities[0])
    elif kind == "generate_until":
        chance = 0.0
    return ItemResult(
        index=entry.indices[sample["doc_id"]],
        values=values,
        log_probabilities=log_probabilities,
        gold=gold,
        chance=chance,
        truncated=any(key in lm.truncated for key in keys),
        failed=any(key in lm.failed for key in keys),
    )


def _gold(arguments: Any, nats: float) -> tuple[float, str] | None:
    context, continuation = arguments[:2]
    text = context[len(context.rstrip()) :] + continuation  # lm-eval scores the context's trailing blanks too
    return (nats, text) if text else None


def _right_choices(task: Any, doc: Any, choices: int) -> list[int]:
    """Places of the right choices, by lm-eval's reading of the label: a place, a text, or a list of either."""
    label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    labels = label if isinstance(label, list) else [label]
    texts = task.doc_to_choice(doc)
    places = [texts.index(one) if isinstance(one, str) and one in texts else one for one in labels]
    return [place for place in places if isinstance(place, int) and 0 <= place < choices]
