"""Shared prefixes scored once, equal to every request alone, over models, groups, budgets and failing memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from isoflop.evaluate.inference import scoring as module
from isoflop.evaluate.inference.forward import Forward
from isoflop.evaluate.inference.scoring import Score, Scorer
from isoflop.evaluate.inference.trees import Costs, Request, plan_trees, tree_batches
from isoflop.train.errors import UserError
from isoflop.train.model.gpt import GPT
from simple_models import by_forward, decode_greedily, gpt

V, T, END = 37, 64, 3

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries, query-key norm": {"heads": 4, "kv_heads": 2, "qk_norm": True},
    "window, untied head": {"window": 9, "tied_embeddings": False},
    "biases, heads of another size": {"kv_heads": 1, "qkv_bias": True, "head_size": 6},
    "padded vocabulary, one head": {"heads": 1, "vocab_multiple": 64},
    "latent attention, window": {"attention": "mla", "query_rank": 8, "window": 9},
    "experts above a dense block": {"experts": 4, "experts_per_token": 2, "expert_hidden": 16, "dense_layers": 1},
}


def groups(seed: int, count: int = 10, header: int = 0) -> list[Request]:
    """Return prompts with one to five continuations each, some of one token, some repeated."""
    rng = np.random.default_rng(seed)
    first, requests = rng.integers(0, V, header).tolist(), []
    for _ in range(count):
        prefix = first + rng.integers(0, V, rng.integers(1, 40 - header)).tolist()
        requests += [
            Request(prefix, rng.integers(0, V, rng.integers(1, 14)).tolist()) for _ in range(rng.integers(1, 6))
        ]
    requests.append(requests[0])
    return [requests[place] for place in rng.permutation(len(requests))]


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64, separate: bool = False, **shape: Any) -> GPT:
    model = gpt(seed, T, dtype, vocab_size=V, **shape)
    if separate:
        model.end_of_document = END
    return model


def score_alone(model: GPT, request: Request) -> Score:
    """Score one request through `GPT.forward`."""
    return by_forward(model, request.inputs.tolist(), request.continuation)


def assert_close(ours: Sequence[Score], expected: Sequence[Score], tolerance: float) -> None:
    np.testing.assert_allclose([nats for nats, _ in ours], [nats for nats, _ in expected], rtol=0, atol=tolerance)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]


@pytest.mark.parametrize(
    ("name", "separate", "as_on_gpus"), covering(list(product(MODELS, (False, True), (False, True))))
)
def test_what_is_shared_is_scored_as_if_each_request_were_alone(
    name: str, separate: bool, as_on_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_gpus:
        monkeypatch.setattr(module, "_one_by_one", module._side_by_side)
    model = model_of(separate=separate, **MODELS[name])
    requests = groups(0, 4) + groups(1, 4, header=12)
    requests += [Request(request.prefix, decode_greedily(model, request.prefix, 3)) for request in requests[:5]]
    expected = [score_alone(model, request) for request in requests]
    assert [greedy for _, greedy in expected[-5:]] == [True] * 5
    for budget in (80, 100_000):
        # float64 on both sides; sums of up to 13 terms of some 5 nats.
        assert_close(Scorer(model, "cpu", budget).score(requests), expected, 1e-10)


def test_bf16_is_as_close_as_the_models_own_forward() -> None:
    model, requests = model_of(dtype=torch.bfloat16), groups(4, 8)
    exact = [score_alone(model_of(dtype=torch.bfloat16).double(), request)[0] for request in requests]
    ours = np.abs(np.array([nats for nats, _ in Scorer(model, "cpu", 500).score(requests)]) - exact)
    reference = np.abs(np.array([score_alone(model, request)[0] for request in requests]) - exact)
    assert ours.mean() < 1.5 * reference.mean() + 1e-3


# --- trees -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_once_and_choices_of_one_token_add_nothing() -> None:
    prompt = list(range(20))
    letters = [Request(prompt, [letter]) for letter in (30, 31, 32, 33)]
    answers = [Request(prompt, [30, 31, 32]), Request(prompt, [30, 33, 34]), Request(prompt, [35, 36])]
    free = Costs(1, 0)
    assert [len(tree) for tree in plan_trees(letters, range(4), free, 1000)] == [20]
    # Two requests share 30; 31, 33 and 35 are separate.
    assert [len(tree) for tree in plan_trees(answers, range(3), free, 1000)] == [24]
    # Contexts differ and continuations are equal (WinoGrande): the tree branches where contexts differ.
    pair = [Request([*prompt, name, 9], [10, 11]) for name in (30, 31)]
    assert [len(tree) for tree in plan_trees(pair, range(2), free, 1000)] == [20 + 2 * 3]


def test_prompts_share_their_examples_only_where_that_pays() -> None:
    rng = np.random.default_rng(7)
    examples = rng.integers(0, V, 500).tolist()
    requests = [
        Request([*examples, question, *rng.integers(0, V, 30)], rng.integers(0, V, 5).tolist())
        for question in range(20)
    ]
    (everything,) = plan_trees(requests, range(20), Costs(1, 0), 10_000)
    assert len(everything) == 500 + 20 * 35
    # Attention over a large tree is expensive: a few trees cost less than one and than none.
    costs, short = Costs(1, 1), [Request(request.prefix[400:], request.continuation) for request in requests]
    some = plan_trees(short, range(20), costs, 10_000)
    assert 1 < len(some) < 20
    assert sum(costs.of(len(tree)) for tree in some) < min(20 * costs.of(135), costs.of(100 + 20 * 35))
    # Long questions that share a word do not pay.
    long = [Request([7, question, *rng.integers(0, V, 300)], [1]) for question in range(5)]
    assert len(plan_trees(long, range(5), costs, 10_000)) == 5
    # No tree is larger than the budget, unless a request is.
    assert all(len(tree) <= 700 for tree in plan_trees(requests, range(20), Costs(1, 0), 700))
    assert [len(tree) for tree in plan_trees(requests, range(20), Costs(1, 0), 100)] == [535] * 20


def test_no_tree_outgrows_what_its_mask_may_take_however_large_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples cost so little compared with attention that all prompts would share them in one tree."""
    requests, model = groups(3, header=20), model_of()
    free = Scorer(model, "cpu", 10_000)
    free._costs = Costs(token=1.0, pair=0.0)
    (whole,) = free._plan(requests, range(len(requests)))
    monkeypatch.setattr(module, "LARGEST_TREE", len(whole) // 3)
    bounded = Scorer(model, "cpu", 10_000)
    bounded._costs = free._costs
    assert max(map(len, bounded._plan(requests, range(len(requests))))) <= len(whole) // 3
    assert_close(bounded.score(requests), free.score(requests), 1e-10)


def test_batches_keep_to_the_budget_and_hold_every_tree_once() -> None:
    requests = [request for request in groups(9, 30) if request.continuation]
    trees = plan_trees(requests, range(len(requests)), Costs(100, 1), 200)
    for budget in (1, 90, 300, 10_000):
        cut = list(tree_batches(trees, budget))
        assert sorted(id(tree) for batch in cut for tree in batch) == sorted(map(id, trees))
        assert all(len(batch) == 1 or len(batch) * max(map(len, batch)) <= budget for batch in cut)
        assert all(len({tree.branches for tree in batch}) == 1 for batch in cut)


# --- memory, NaN -----------------------------------------------------------------------------------------------------

WORDS = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


class Small:
    """A machine whose memory holds passes of at most `tokens` tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int, error: type[RuntimeError] = RuntimeError) -> None:
        self.refused, self.largest, real = 0, 0, Forward.hidden

        def hidden(forward: Forward, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            if len(ids) > tokens:
                self.refused += 1
                raise error(WORDS)
            self.largest = max(self.largest, len(ids))
            return real(forward, ids, *rest)

        monkeypatch.setattr(Forward, "hidden", hidden)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_where_memory_runs_out_batches_shrink_and_stay_small(
    monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError]
) -> None:
    model, requests, lines = model_of(10), groups(10, 40), []
    expected = [score_alone(model, request) for request in requests]
    small = Small(monkeypatch, 80, error)
    scorer, batches = Scorer(model, "cpu", 5000, lines.append), []
    assert_close(scorer.score(requests, batches.append), expected, 1e-10)
    assert sorted(place for batch in batches for place, _ in batch) == list(range(len(requests)))  # each once
    assert 40 < small.largest <= 80
    assert scorer.batch_tokens < 200
    assert len(lines) == small.refused > 1
    assert lines[-1] == f"memory ran out; batch_tokens is {scorer.batch_tokens} from now on"
    refused = small.refused
    scorer.score(requests)
    assert small.refused == refused


def test_one_request_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    Small(monkeypatch, 30)
    requests = [Request([1] * 5, [2, 3]), Request([4] * 50, [5, 6])]
    with pytest.raises(UserError, match=r"memory ran out on cpu for one request of 51 tokens; use precision=bf16 or"):
        Scorer(model_of(), "cpu", 1000).score(requests)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Forward, "hidden", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        Scorer(model_of(), "cpu", 1000).score(groups(0))


def test_nan_is_blamed_on_the_request_that_meets_it() -> None:
    model = model_of(11)
    with torch.no_grad():
        model.embedding.weight[30] = torch.nan
        model.head.weight = torch.nn.Parameter(model_of(12).head.weight.detach().clone())
    prompt = [1, 2, 4, 5]
    requests = [Request(prompt, [6, 7, 8]), Request(prompt, [30, 7, 8]), Request(prompt, [9, 30]), Request(prompt, [5])]
    scores = Scorer(model, "cpu", 1000).score(requests)
    # The last token is predicted, not read.
    assert [bool(np.isnan(nats)) for nats, _ in scores] == [False, True, False, False]
    assert_close([scores[0], *scores[2:]], [score_alone(model, requests[k]) for k in (0, 2, 3)], 1e-10)


@pytest.mark.parametrize("as_on_gpus", [False, True])
def test_nan_does_not_pass_from_tree_to_tree(as_on_gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if as_on_gpus:  # where trees of unequal length are padded
        monkeypatch.setattr(module, "_one_by_one", module._side_by_side)
    model = model_of(11, window=9)
    with torch.no_grad():
        model.embedding.weight[30] = torch.nan
        model.head.weight = torch.nn.Parameter(model_of(12).head.weight.detach().clone())
    rng = np.random.default_rng(11)
    requests = [Request([place, *rng.integers(4, 29, rng.integers(3, 40)).tolist()], [1, 2]) for place in range(30)]
    for place in (5, 17):
        requests[place] = Request([place, 30, *requests[place].prefix[2:]], [1, 2])
    scores = Scorer(model, "cpu", 400).score(requests)
    assert [place for place, (nats, _) in enumerate(scores) if np.isnan(nats)] == [5, 17]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in MODELS if "experts" not in name])  # a router may be at a tie
def test_a_gpu_gives_the_same_numbers(name: str) -> None:
    model, requests = model_of(13, torch.float32, **MODELS[name]), groups(13, 20)
    expected = Scorer(model, "cpu", 1000).score(requests)
    for budget in (100, 10_000):
        ours = Scorer(model.to("cuda"), "cuda", budget).score(requests)
        # fp32 on both, in other orders of summation; TF32 is off by default.
        assert_close(ours, expected, 1e-3)
