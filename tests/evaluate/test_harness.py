"""The model behind lm-eval: log-likelihoods, windows and generation against the model's own forward in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.evaluate.harness import CheckpointLM, WindowCache, answer_task
from isoflop.evaluate.metrics import ItemResult
from isoflop.evaluate.records import Answers, _right_choices
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.model.gpt import GPT
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from simple_models import by_forward, decode_greedily, gpt, load_indexed, write_tasks

END, T = ByteTokenizer.end_of_document, 32


def lm_of(model: GPT, batch_tokens: int = 4096, **more: Any) -> CheckpointLM:
    return CheckpointLM(model, more.pop("tokenizer", ByteTokenizer()), model.max_length, "cpu", batch_tokens, **more)


def request(*arguments: object, kind: str = "loglikelihood") -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


def random_text(rng: np.random.Generator, low: int, high: int) -> str:
    letters = list("abc defgh ijk é\n漢")
    return "x" + "".join(rng.choice(letters, size=int(rng.integers(low, high)))) + "y"


def ids(text: str) -> list[int]:
    return list(text.encode())


def windowed(model: GPT, stream: list[int]) -> float:
    """Return nats of stream[1:], each token once, with the last window reaching back as far as possible."""
    total, done, length = 0.0, 0, model.max_length
    while done < len(stream) - 1:
        end = min(done + length, len(stream) - 1)
        total += by_forward(model, stream[0 if done == 0 else end - length : end], stream[done + 1 : end + 1])[0]
        done = end
    return total


@pytest.mark.parametrize("budget", [1, 150, 10_000])
def test_prompts_continuations_and_texts_of_any_length_are_scored(budget: int) -> None:
    rng, model = np.random.default_rng(11), gpt(vocab_multiple=100)
    lm = lm_of(model, budget)
    prompts = [random_text(rng, 0, 60) for _ in range(12)]
    pairs = [(prompt, " " + random_text(rng, 0, 12)) for prompt in prompts for _ in range(3)]
    pairs += [("a prompt", " " + "".join(rng.choice(list("abc"), size=length))) for length in (T - 1, T, 3 * T)]
    pairs += [("hello", bytes(decode_greedily(model, ids("hello"), 1)).decode("latin-1"))]
    scores = lm.loglikelihood([request(*pair) for pair in [*pairs, ("", "abc"), ("  ", "abc"), ("x", "")]])
    for pair, (nats, greedy) in zip(pairs, scores, strict=False):
        whole, target = ids("".join(pair)), ids(pair[1])
        if len(target) <= T:
            expected = by_forward(model, whole[-(T + 1) :][:-1], target)
            assert greedy == expected[1]
        else:
            expected = (windowed(model, whole[-len(target) - 1 :]), False)
        assert nats == pytest.approx(expected[0], abs=1e-10)  # float64 on both sides
        assert (pair in lm.truncated) == (len(whole) > T + 1)
    # Without a context the end of a document is the context.
    assert scores[-3][0] == pytest.approx(by_forward(model, [END, *ids("ab")], ids("abc"))[0], abs=1e-10)
    assert scores[-2][0] == pytest.approx(by_forward(model, [END, *ids("  ab")], ids("  abc"))[0], abs=1e-10)
    assert scores[-1] == (0.0, True)
    texts = ["", *("".join(rng.choice(list("abcd é"), size=n)) for n in (1, T - 1, T, T + 1, 3 * T + 7))]
    rolled = lm.loglikelihood_rolling([request(text, kind="loglikelihood_rolling") for text in texts])
    for text, nats in zip(texts, rolled, strict=True):
        assert nats == pytest.approx(windowed(model, [END, *ids(text)]), abs=1e-10)


class Merged(ByteTokenizer):
    """A tokenizer with one token for `ab`."""

    def encode(self, text: str) -> np.ndarray:
        return np.array([*text.encode().replace(b"ab", b"\x01")], dtype=np.uint16)


def test_an_answer_that_merges_into_its_context_is_never_certain() -> None:
    model = gpt()
    (merged, other, nothing) = lm_of(model, tokenizer=Merged()).loglikelihood(
        [request("x a", "b"), request("x a", "c"), request("x a", "")]
    )
    assert merged[0] == pytest.approx(by_forward(model, ids("x "), [1])[0], abs=1e-10)  # of the token that holds both
    assert other[0] == pytest.approx(by_forward(model, ids("x a"), ids("c"))[0], abs=1e-10)
    assert nothing == (0.0, True)


# --- what is kept between evaluations --------------------------------------------------------------------------------


class Killed(Exception):
    """The simulated end of a process."""


class Mortal(Answers):
    """A store of answers that ends the process after `left` batches, and records every key."""

    left = -1

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Any] = []

    def put(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        pairs = list(pairs)
        super().put(pairs)
        self.keys += [key for key, _ in pairs]
        self.left -= bool(pairs)
        if self.left == 0:
            raise Killed


def test_an_interrupted_evaluation_goes_on_at_the_request() -> None:
    rng, model = np.random.default_rng(12), gpt()
    pairs = [request(random_text(rng, 0, 25), " " + random_text(rng, 0, 9)) for _ in range(30)]
    texts = [request("".join(rng.choice(list("abc"), size=n))) for n in (5, 50, 100, 150)]
    writes = [request(random_text(rng, 0, 9), {"until": [], "max_gen_toks": 9}) for _ in range(6)]

    def ask(answers: Answers | None, model: GPT = model) -> tuple[Any, ...]:
        lm = lm_of(model, 64, answers=answers)
        return lm.loglikelihood(pairs), lm.loglikelihood_rolling(texts), lm.generate_until(writes), lm.truncated

    expected, answers, killed = ask(None), Mortal(), 0
    for _ in range(20):
        answers.left = 3
        try:
            resumed = ask(answers)
            break
        except Killed:
            killed += 1
    assert killed > 5  # among pairs, windows of a text, and prompts
    assert len(answers.keys) == len(set(answers.keys))  # nothing was asked twice
    # Batches differ after a kill; float64.
    np.testing.assert_allclose([n for n, _ in resumed[0]], [n for n, _ in expected[0]], rtol=1e-12)
    np.testing.assert_allclose(resumed[1], expected[1], rtol=1e-12)
    assert resumed[2:] == expected[2:]
    # Now every answer is stored, also through JSON, and the model does not compute.
    stored = Answers()
    stored.put(json.loads(json.dumps(answers.known)).items())
    assert ask(stored, gpt(1)) == resumed


def test_nan_is_reported_and_kept_as_nan() -> None:
    model = gpt()
    with torch.no_grad():
        model.embedding.weight[ord("!")] = torch.nan
        model.head.weight = torch.nn.Parameter(gpt(1).head.weight.detach().clone())
    answers = Answers()
    for _ in range(2):
        lm = lm_of(model, answers=answers)
        (good, _), (bad, _) = lm.loglikelihood([request("fine", " yes"), request("oh!", " no")])
        assert np.isfinite(good)
        assert np.isnan(bad)
        wrote, failed = lm.generate_until([request(text, {"until": [], "max_gen_toks": 2}) for text in ("fine", "oh!")])
        assert wrote
        assert failed == ""
        assert lm.failed == {("oh!",)}
    assert len(answers.known) == 4


class Counted(ByteTokenizer):
    """A tokenizer that counts the texts that it encodes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        self.texts += texts
        return [self.encode(text) for text in texts]


def test_the_next_checkpoint_encodes_nothing_and_has_its_own_scores() -> None:
    rng, tokenizer = np.random.default_rng(13), Counted()
    windows: WindowCache = {}
    prompts = [random_text(rng, 0, 30) for _ in range(5)]
    pairs = [request(prompt, " " + random_text(rng, 0, 9)) for prompt in prompts for _ in range(4)]
    scores = [lm_of(gpt(seed), tokenizer=tokenizer, windows=windows).loglikelihood(pairs) for seed in (0, 1)]
    assert len(tokenizer.texts) == len(set(tokenizer.texts)) > 20
    assert scores[0] != scores[1] == lm_of(gpt(1)).loglikelihood(pairs)


# --- every kind of task ----------------------------------------------------------------------------------------------

ROWS = [
    {
        "q": f"Word {n} is", "a": ["one", "two three", "four"], "gold": n % 3,
        "who": [f"The cat {n} saw the dog since the cat", f"The cat {n} saw the dog since the dog"], "then": "ran",
    }
    for n in range(9)
]  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "choice": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
               "doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "mutual": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
               "doc_to_target": "gold", "metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}]},
    "who": {"output_type": "multiple_choice", "doc_to_text": "{{gold % 2}}", "doc_to_choice": "{{who}}",
            "doc_to_target": "{{then}}", "metric_list": [{"metric": "acc"}]},
    "last": {"output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": " {{a[0]}}",
             "metric_list": [{"metric": "acc"}, {"metric": "perplexity", "aggregation": "perplexity"}]},
    "text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}} é {{a[1]}}",
             "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte"}]},
    "write": {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a[0]}}", "repeats": 2,
              "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5}, "metric_list": [{"metric": "exact_match"}],
              "filter_list": [{"name": "first", "filter": [{"function": "take_first"}]},
                              {"name": "letter", "filter": [{"function": "regex", "regex_pattern": "([a-z])"},
                                                            {"function": "take_first"}]}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Write tasks of every kind as lm-eval YAML over a local file; `shots` is `choice` with two examples."""
    kinds = {**KINDS, "shots": {**KINDS["choice"], "num_fewshot": 2, "fewshot_split": "test"}}
    return write_tasks(tmp_path_factory.mktemp("tasks"), kinds, ROWS)


@pytest.fixture(scope="module")
def model() -> GPT:
    return gpt(max_length=128)


@pytest.fixture(scope="module")
def items(tasks: TaskManager, model: GPT) -> dict[str, list[ItemResult]]:
    suite = load_indexed(tasks, [*KINDS, "shots"], None)
    lm = lm_of(model)
    return {name: answer_task(lm, entry)[0] for name, entry in suite.items()}


def nats_of(model: GPT, prompt: str, answer: str) -> float:
    return by_forward(model, ids(prompt + answer)[:-1], ids(answer))[0]


def test_an_item_of_choices_says_what_was_asked_and_what_was_right(
    items: dict[str, list[ItemResult]], model: GPT
) -> None:
    for name in ("choice", "mutual", "shots"):
        for row, item in zip(ROWS, items[name], strict=True):
            assert item.prompt.endswith(row["q"])
            assert item.prompt.count("Word") == (3 if name == "shots" else 1)
            assert item.choices == [" one", " two three", " four"]
            assert item.right == [row["gold"]]
            expected = [nats_of(model, item.prompt, choice) for choice in item.choices]
            assert item.log_probabilities == pytest.approx(expected, abs=1e-10)
            assert item.values["acc"] == float(np.argmax(expected) == row["gold"])
            assert item.p_right == pytest.approx(float(torch.softmax(torch.tensor(expected), 0)[row["gold"]]), abs=1e-6)
    assert set(items["mutual"][0].values) == {"acc", "acc_mutual_info"}
    for row, item in zip(ROWS, items["who"], strict=True):  # contexts differ, and are the choices
        assert item.prompt == row["who"][0].removesuffix("cat")
        assert item.choices == ["cat ran", "dog ran"]
        assert item.right == [row["gold"] % 2]
        expected = [nats_of(model, context, " ran") for context in row["who"]]
        assert item.log_probabilities == pytest.approx(expected, abs=1e-10)


def test_a_right_choice_that_is_named_twice_counts_once() -> None:
    task = SimpleNamespace(multiple_input=False, doc_to_target=lambda doc: doc["right"])
    assert _right_choices(task, {"right": ["b", 0, "b", 7, "none"]}, ["a", "b", "c"]) == [1, 0]


def test_items_without_choices_say_what_was_wanted(items: dict[str, list[ItemResult]], model: GPT) -> None:
    for row, item in zip(ROWS, items["last"], strict=True):
        assert (item.prompt, item.target, item.choices, item.right) == (row["q"], " one", None, None)
        assert item.log_probabilities == pytest.approx([nats_of(model, row["q"], " one")], abs=1e-10)
    for row, item in zip(ROWS, items["text"], strict=True):
        text = f"{row['q']} é two three"
        assert (item.prompt, item.bytes, item.choices) == (text, len(text.encode()), None)
        nats = windowed(model, [END, *ids(text)])
        assert item.bpb == pytest.approx(-nats / math.log(2) / len(text.encode()), abs=1e-10)
    for row, item in zip(ROWS, items["write"], strict=True):
        text = ByteTokenizer().decode(decode_greedily(model, ids(row["q"]), 5))
        assert (item.prompt, item.target, item.answer) == (row["q"], "one", text.split("\n")[0])
        assert set(item.values) == {"exact_match,first", "exact_match,letter"}


# --- generation ------------------------------------------------------------------------------------------------------


def test_generation_ends_before_a_stop_the_limit_or_the_end_of_a_document() -> None:
    model = gpt(7, 64)
    new = decode_greedily(model, ids("start here"), 40)
    full = ByteTokenizer().decode(new)
    stop = full[9:11]
    calls = [
        ({"until": [], "max_gen_toks": 40}, full),
        ({"until": [], "max_gen_toks": 7}, ByteTokenizer().decode(new[:7])),
        ({"until": [stop, "never there"], "max_gen_toks": 40}, full.split(stop)[0]),
        ({"until": stop, "max_gen_toks": 40}, full.split(stop)[0]),
    ]
    results = lm_of(model).generate_until([request("start here", kwargs, kind="generate_until") for kwargs, _ in calls])
    assert results == [expected for _, expected in calls]

    class Ends(ByteTokenizer):
        end_of_document = new[4]

    assert new[4] not in new[:4]
    (text,) = lm_of(model, tokenizer=Ends()).generate_until([request("start here", {"until": []})])
    assert text == ByteTokenizer().decode(new[:4])


def test_a_prompt_gives_way_to_the_answer() -> None:
    model = gpt(8, 20)
    lm = lm_of(model)
    (text,) = lm.generate_until([request("abcdefghijklmnopqrstuvwxyz", {"until": [], "max_gen_toks": 8})])
    assert text == ByteTokenizer().decode(decode_greedily(model, ids("opqrstuvwxyz"), 8))
    assert lm.truncated == {("abcdefghijklmnopqrstuvwxyz",)}
