"""The model behind lm-eval: log-likelihoods, windows and generation against direct computation in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from isoflop.evaluate.harness import CheckpointLM, TokenCache, answer_task
from isoflop.evaluate.inference import generate as generation
from isoflop.evaluate.inference.generate import Sampling, generate_texts
from isoflop.evaluate.inference.scoring import Scorer
from isoflop.evaluate.metrics import ItemResult
from isoflop.evaluate.records.items import _right_choices
from isoflop.evaluate.records.record import Answers
from isoflop.evaluate.tasks.tasks import load_suite
from isoflop.train.config import ModelConfig
from isoflop.train.model.gpt import GPT
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from simple_models import draw, lm_of
from torch import Tensor, nn

END = 256


class Bytes:
    """A byte tokenizer."""

    vocab_size = 257
    end_of_document = END

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < END).decode("utf-8", errors="replace")


class Fading(nn.Module):
    """A causal model that remembers: state_t = 0.8 state_{t-1} + E[x_t], logits = state @ U.

    Where a window starts, how long it is and what pads it all show in its numbers, which can be computed by hand.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.E = nn.Parameter(torch.randn(257, 8, generator=generator, dtype=torch.float64).to(dtype))
        self.U = nn.Parameter(torch.randn(8, 257, generator=generator, dtype=torch.float64).to(dtype))
        self.longest = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        state, states = torch.zeros(len(tokens), 8, dtype=self.E.dtype), []
        for step in range(tokens.shape[1]):
            state = 0.8 * state + self.E[tokens[:, step]]
            states.append(state)
        return torch.stack(states, dim=1) @ self.U


def direct(model: Fading, inputs: list[int], targets: list[int]) -> tuple[float, bool]:
    """Nats of the last len(targets) predictions, one sequence, NumPy in float64: independent of the harness."""
    E, U = model.E.detach().double().numpy(), model.U.detach().double().numpy()
    state, logits = np.zeros(8), []
    for token in inputs:
        state = 0.8 * state + E[token]
        logits.append(state @ U)
    total, greedy = 0.0, True
    for row, target in zip(logits[-len(targets) :], targets, strict=True):
        total += row[target] - (row.max() + np.log(np.exp(row - row.max()).sum()))
        greedy &= int(row.argmax()) == target
    return total, greedy


def request(*arguments: object, kind: str = "loglikelihood") -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


def random_text(rng: np.random.Generator, low: int, high: int) -> str:
    letters = list("abc defgh ijk é\n漢")
    return "x" + "".join(rng.choice(letters, size=int(rng.integers(low, high)))) + "y"


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_loglikelihood_is_the_direct_sum_with_the_prompt_cut_on_the_left() -> None:
    rng, model, T = np.random.default_rng(1), Fading(), 24
    pairs = [(random_text(rng, 0, 60), " " + random_text(rng, 0, 10)) for _ in range(60)]
    lm = lm_of(model, Bytes(), T, batch_tokens=100)
    for (context, continuation), (nats, greedy) in zip(
        pairs, lm.loglikelihood([request(*p) for p in pairs]), strict=True
    ):
        whole, target = ids(context + continuation), ids(continuation)
        if len(target) > T:
            continue  # the next test
        expected = direct(model, whole[-(T + 1) :][:-1], target)
        assert nats == pytest.approx(expected[0], abs=1e-10)  # float64 on both sides
        assert greedy == expected[1]
        assert ((context, continuation) in lm.truncated) == (len(whole) > T + 1)
    assert model.longest == T


def test_a_continuation_longer_than_the_model_is_scored_in_windows_that_see_each_token_once() -> None:
    rng, model, T = np.random.default_rng(2), Fading(), 16
    lm = lm_of(model, Bytes(), T)
    for length in (T, T + 1, 2 * T, 2 * T + 5, 5 * T - 1):
        context, continuation = "the prompt", " " + "".join(rng.choice(list("abcde"), size=length - 1))
        text, target = ids(context)[-1:] + ids(continuation), ids(continuation)
        expected, done = 0.0, 0
        while done < length:  # text[i] predicts target[i]
            end = min(done + T, length)
            start = 0 if done == 0 else end - T
            expected += direct(model, text[start:end], target[done:end])[0]
            done = end
        ((nats, _),) = lm.loglikelihood([request(context, continuation)])
        assert nats == pytest.approx(expected, abs=1e-10)
    assert model.longest == T


def test_without_context_the_end_of_document_is_the_context() -> None:
    model = Fading()
    lm = lm_of(model, Bytes(), 32)
    results = lm.loglikelihood([request("", "abc"), request("  ", "abc"), request("x", "")])
    assert results[0][0] == pytest.approx(direct(model, [END, *ids("ab")], ids("abc"))[0], abs=1e-10)
    assert results[1][0] == pytest.approx(direct(model, [END, *ids("  ab")], ids("  abc"))[0], abs=1e-10)
    assert results[2] == (0.0, True)


class Merged(Bytes):
    """A tokenizer that knows `ab`."""

    def encode(self, text: str) -> np.ndarray:
        return np.array([*text.encode().replace(b"ab", b"\x01")], dtype=np.uint16)


def test_an_answer_that_merges_into_its_context_is_never_certain() -> None:
    model = Fading()
    (merged, other, nothing) = lm_of(model, Merged(), 32).loglikelihood(
        [request("x a", "b"), request("x a", "c"), request("x a", "")]
    )
    assert merged[0] == pytest.approx(direct(model, ids("x "), [1])[0], abs=1e-10)  # of the token that holds both
    assert other[0] == pytest.approx(direct(model, ids("x a"), ids("c"))[0], abs=1e-10)
    assert nothing == (0.0, True)


def test_a_long_text_is_kept_window_by_window() -> None:
    model, answers = gpt(), Answers()
    text = request("".join(np.random.default_rng(14).choice(list("abcdefgh"), size=240)))
    (whole,) = lm_of(model, Bytes(), 32).loglikelihood_rolling([text])
    dying = lm_of(model, Bytes(), 32, batch_tokens=32, answers=answers)
    with pytest.MonkeyPatch.context() as patch:
        dies_after(3, patch)
        with pytest.raises(Killed):
            dying.loglikelihood_rolling([text])
    assert len(answers.known) == 3
    (resumed,) = lm_of(model, Bytes(), 32, answers=answers).loglikelihood_rolling([text])
    assert len(answers.known) == 8
    assert resumed == pytest.approx(whole, rel=1e-12)  # float64; batches are other ones


def test_greedy_means_what_greedy_decoding_would_write() -> None:
    model = Fading(3)
    lm = lm_of(model, Bytes(), 32)
    context = ids("hello")
    for _ in range(4):
        context.append(int(model(torch.tensor([context]))[0, -1].argmax()))
    model_says = context[5:]
    scores = lm._loglikelihood_tokens(
        [(("", "a"), ids("hello"), model_says), (("", "b"), ids("hello"), [*model_says[:3], (model_says[3] + 1) % 256])]
    )
    assert [greedy for _, greedy in scores] == [True, False]


@pytest.mark.parametrize("budget", [1, 50, 10_000])
def test_batching_changes_nothing(budget: int) -> None:
    rng = np.random.default_rng(4)
    torch.manual_seed(0)
    model = GPT(ModelConfig(width=32, depth=2, heads=2, vocab_size=257), 64).eval()
    pairs = [request(random_text(rng, 0, 90), " " + random_text(rng, 0, 90)) for _ in range(16)]
    lm = lm_of(model, Bytes(), 64, batch_tokens=budget)
    together, alone = lm.loglikelihood(pairs), [lm.loglikelihood([pair])[0] for pair in pairs]
    # fp32 matmuls of other shapes round differently, some 1e-7 of each of up to 180 summed terms of about 6 nats.
    np.testing.assert_allclose([n for n, _ in together], [n for n, _ in alone], rtol=1e-6)
    assert [g for _, g in together] == [g for _, g in alone]


def test_our_gpt_is_scored_as_its_own_softmax_says_and_padding_of_the_vocabulary_has_no_probability() -> None:
    torch.manual_seed(1)
    model = GPT(ModelConfig(width=32, depth=2, heads=2, vocab_size=257), 64).double().eval()
    lm = lm_of(model, Bytes(), 64)
    ((nats, _),) = lm.loglikelihood([request("A prompt", " and its answer")])
    tokens = ids("A prompt and its answer")
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([tokens[:-1]]))[0, :, :257], dim=-1)
    expected = sum(float(log_p[place - 1, tokens[place]]) for place in range(8, len(tokens)))
    assert nats == pytest.approx(expected, abs=1e-10)


def test_rolling_sums_are_the_windowed_reference() -> None:
    rng, model, T = np.random.default_rng(5), Fading(), 16
    lm = lm_of(model, Bytes(), T, batch_tokens=40)
    texts = ["", "a", *("".join(rng.choice(list("abcd é"), size=n)) for n in (T - 1, T, T + 1, 3 * T, 3 * T + 7))]
    results = lm.loglikelihood_rolling([request(text, kind="loglikelihood_rolling") for text in texts])
    for text, nats in zip(texts, results, strict=True):
        target, expected, done = ids(text), 0.0, 0
        stream = [END, *target]
        while done < len(target):
            end = min(done + T, len(target))
            start = 0 if done == 0 else end - T
            expected += direct(model, stream[start:end], target[done:end])[0]
            done = end
        assert nats == pytest.approx(expected, abs=1e-10)


def gpt(seed: int = 0, T: int = 32) -> GPT:
    torch.manual_seed(seed)
    return GPT(ModelConfig(width=32, depth=2, heads=2, vocab_size=257), T).double().eval()


@torch.no_grad()
def by_forward(model: GPT, inputs: list[int], targets: list[int]) -> float:
    """Nats of the last len(targets) predictions by the model's own forward."""
    log_p = torch.log_softmax(model(torch.tensor([inputs]))[0, -len(targets) :], dim=-1)
    return float(log_p[range(len(targets)), targets].sum())


def windowed(model: GPT, stream: list[int], T: int) -> float:
    """Nats of stream[1:], each token once, the last window reaching back as far as it can."""
    total, done = 0.0, 0
    while done < len(stream) - 1:
        end = min(done + T, len(stream) - 1)
        total += by_forward(model, stream[0 if done == 0 else end - T : end], stream[done + 1 : end + 1])
        done = end
    return total


def test_prompts_continuations_and_texts_of_any_length_are_what_a_gpts_forward_says() -> None:
    rng, T, model = np.random.default_rng(11), 32, gpt()
    lm = lm_of(model, Bytes(), T, batch_tokens=150)
    prompts = [random_text(rng, 0, 60) for _ in range(12)]
    pairs = [(prompt, " " + random_text(rng, 0, 12)) for prompt in prompts for _ in range(3)]
    pairs += [("a prompt", " " + "".join(rng.choice(list("abc"), size=length))) for length in (T - 1, T, 3 * T)]
    for pair, (nats, _) in zip(pairs, lm.loglikelihood([request(*pair) for pair in pairs]), strict=True):
        whole, target = ids("".join(pair)), ids(pair[1])
        if len(target) <= T:
            expected = by_forward(model, whole[-(T + 1) :][:-1], target)
        else:
            expected = windowed(model, whole[-len(target) - 1 :], T)
        assert nats == pytest.approx(expected, abs=1e-10)
        assert (pair in lm.truncated) == (len(whole) > T + 1)
    texts = ["", *("".join(rng.choice(list("abcd é"), size=n)) for n in (1, T - 1, T, T + 1, 3 * T + 7))]
    rolled = lm.loglikelihood_rolling([request(text, kind="loglikelihood_rolling") for text in texts])
    for text, nats in zip(texts, rolled, strict=True):
        assert nats == pytest.approx(windowed(model, [END, *ids(text)], T), abs=1e-10)


# --- what is kept between evaluations --------------------------------------------------------------------------------


class Killed(Exception):
    """A process that ends here."""


def dies_after(passes: int, patch: pytest.MonkeyPatch) -> None:
    """From now on the model dies in its next pass after so many."""
    left, real = iter(range(passes)), Scorer._pass

    def counted(scorer: Scorer, batch: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return real(scorer, batch)

    patch.setattr(Scorer, "_pass", counted)


def test_an_interrupted_evaluation_goes_on_at_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, model = np.random.default_rng(12), gpt()
    pairs = [request(random_text(rng, 0, 25), " " + random_text(rng, 0, 9)) for _ in range(30)]
    texts = [request("".join(rng.choice(list("abc"), size=n))) for n in (5, 50, 100, 150)]
    writes = [request(random_text(rng, 0, 9), {"until": [], "max_gen_toks": 9}) for _ in range(6)]

    def ask(answers: Answers | None, lm: CheckpointLM | None = None) -> tuple[Any, ...]:
        lm = lm or lm_of(model, Bytes(), 32, batch_tokens=64, answers=answers)
        return lm.loglikelihood(pairs), lm.loglikelihood_rolling(texts), lm.generate_until(writes), lm.truncated

    expected, passes, real = ask(None), 0, Scorer._pass

    def dies_at(number: int) -> None:
        def counted(scorer: Scorer, batch: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == number:
                raise Killed
            return real(scorer, batch)

        nonlocal passes
        passes = 0
        monkeypatch.setattr(Scorer, "_pass", counted)

    dies_at(-1)
    assert ask(None) == expected
    whole, answers = passes, Answers()
    for number in (3, 5, whole):
        dies_at(number)
        try:
            ask(answers)
        except Killed:
            continue
    dies_at(-1)
    resumed = ask(answers)
    assert passes < whole - 5
    # Batches are other ones after a kill; float64.
    np.testing.assert_allclose([n for n, _ in resumed[0]], [n for n, _ in expected[0]], rtol=1e-12)
    np.testing.assert_allclose(resumed[1], expected[1], rtol=1e-12)
    assert resumed[2:] == expected[2:]
    # Now everything is known, through JSON as well, and the model is not asked.
    stored = Answers()
    stored.put(json.loads(json.dumps(answers.known)).items())
    dies_at(1)
    monkeypatch.setattr(generation.Generation, "step", None)
    assert ask(stored) == resumed


def test_nan_is_kept_as_nan() -> None:
    model = gpt()
    with torch.no_grad():
        model.embedding.weight[ord("!")] = torch.nan
    answers = Answers()
    for _ in range(2):
        lm = lm_of(model, Bytes(), 32, answers=answers)
        assert np.isnan(lm.loglikelihood([request("oh!", " no")])[0][0])
        assert lm.generate_until([request("oh!", {"until": []})]) == [""]
        assert lm.failed == {("oh!",)}
    assert len(answers.known) == 2


class Counted(Bytes):
    """Counts the texts that it encodes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        self.texts += texts
        return [self.encode(text) for text in texts]


def test_the_next_checkpoint_encodes_nothing_and_scores_with_its_own_weights() -> None:
    rng, tokenizer, tokens = np.random.default_rng(13), Counted(), TokenCache()
    prompts = [random_text(rng, 0, 30) for _ in range(5)]
    pairs = [request(prompt, " " + random_text(rng, 0, 9)) for prompt in prompts for _ in range(4)]
    scores = [lm_of(gpt(seed), tokenizer, 32, tokens=tokens).loglikelihood(pairs) for seed in (0, 1)]
    assert len(tokenizer.texts) == len(set(tokenizer.texts)) > 20
    assert scores[0] != scores[1] == lm_of(gpt(1), Bytes(), 32).loglikelihood(pairs)


def test_a_cache_of_tokens_keeps_to_its_memory() -> None:
    tokenizer = Counted()
    cache = TokenCache(largest=1000)
    texts = [f"text {number:04}" * 5 for number in range(20)]
    for _ in range(2):
        assert cache.encode(texts, tokenizer.encode_batch) == {text: ids(text) for text in texts}
    assert 0 < len(cache._ids) < 20
    assert cache.bytes <= 1000
    assert len(tokenizer.texts) == 20 + 20 - len(cache._ids)


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
    """Tasks of every kind as lm-eval YAML over a local file; `shots` is `choice` with two examples."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, config in {**KINDS, "shots": {**KINDS["choice"], "num_fewshot": 2}}.items():
        metrics = [{"aggregation": "mean", "higher_is_better": True, **metric} for metric in config["metric_list"]]
        dataset = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "hub")}
        full = {**config, "task": name, "dataset_path": "json", "dataset_kwargs": dataset, "test_split": "test",
                "fewshot_split": "test", "metric_list": metrics, "metadata": {"version": 1}}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(full))
    return TaskManager(include_defaults=False, include_path=str(folder))


@pytest.fixture(scope="module")
def items(tasks: TaskManager) -> dict[str, list[ItemResult]]:
    suite = load_suite([*KINDS, "shots"], None, manager=tasks)
    lm = lm_of(gpt(T=128), Bytes(), 128)
    return {name: answer_task(lm, entry)[0] for name, entry in suite.tasks.items()}


def nats_of(prompt: str, answer: str) -> float:
    whole = ids(prompt + answer)
    return by_forward(gpt(T=128), whole[:-1], ids(answer))


def test_an_item_of_choices_says_what_was_asked_and_what_was_right(items: dict[str, list[ItemResult]]) -> None:
    for name in ("choice", "mutual"):
        for row, item in zip(ROWS, items[name], strict=True):
            assert (item.prompt, item.choices) == (row["q"], [" one", " two three", " four"])
            assert item.right == [row["gold"]]
            expected = [nats_of(row["q"], choice) for choice in item.choices]
            assert item.log_probabilities == pytest.approx(expected, abs=1e-10)
            assert item.values["acc"] == float(np.argmax(expected) == row["gold"])
            assert item.p_right == pytest.approx(float(torch.softmax(torch.tensor(expected), 0)[row["gold"]]), abs=1e-6)
    assert set(items["mutual"][0].values) == {"acc", "acc_mutual_info"}
    for row, item in zip(ROWS, items["shots"], strict=True):
        assert item.prompt.endswith("\n\n" + row["q"])
        assert item.prompt.count("Word") == 3
        expected = [nats_of(item.prompt, choice) for choice in item.choices or []]
        assert item.log_probabilities == pytest.approx(expected, abs=1e-10)


def test_contexts_that_differ_are_choices_that_read_as_they_were_asked(items: dict[str, list[ItemResult]]) -> None:
    for row, item in zip(ROWS, items["who"], strict=True):
        assert item.prompt == row["who"][0].removesuffix("cat")
        assert item.choices == ["cat ran", "dog ran"]
        assert item.right == [row["gold"] % 2]
        assert item.log_probabilities == pytest.approx([nats_of(who, " ran") for who in row["who"]], abs=1e-10)


def test_a_right_choice_that_is_named_twice_counts_once() -> None:
    task = SimpleNamespace(multiple_input=False, doc_to_target=lambda doc: doc["right"])
    assert _right_choices(task, {"right": ["b", 0, "b", 7, "none"]}, ["a", "b", "c"]) == [1, 0]


def test_items_without_choices_say_what_was_wanted(items: dict[str, list[ItemResult]]) -> None:
    for row, item in zip(ROWS, items["last"], strict=True):
        assert (item.prompt, item.target, item.choices, item.right) == (row["q"], " one", None, None)
        assert item.log_probabilities == pytest.approx([nats_of(row["q"], " one")], abs=1e-10)
    for row, item in zip(ROWS, items["text"], strict=True):
        text = f"{row['q']} é two three"
        assert (item.prompt, item.bytes, item.choices) == (text, len(text.encode()), None)
        nats = windowed(gpt(T=128), [END, *ids(text)], 128)
        assert item.bpb == pytest.approx(-nats / math.log(2) / len(text.encode()), abs=1e-10)
    for row, item in zip(ROWS, items["write"], strict=True):
        prompt = ids(row["q"])
        written = Bytes().decode(naive(gpt(T=128), prompt, 5, 128))
        assert (item.prompt, item.target, item.answer) == (row["q"], "one", written.split("\n")[0])
        assert set(item.values) == {"exact_match,first", "exact_match,letter"}


# --- generation ------------------------------------------------------------------------------------------------------


def naive(model: nn.Module, prompt: list[int], count: int, T: int) -> list[int]:
    out = list(prompt)
    for _ in range(count):
        out.append(int(model(torch.tensor([out[-T:]]))[0, -1].argmax()))
    return out[len(prompt) :]


def test_greedy_generation_is_the_naive_loop_whatever_the_batch() -> None:
    rng, model = np.random.default_rng(6), gpt(6, 20)
    prompts = [ids(random_text(rng, 0, 30)) for _ in range(5)]
    # 30 new tokens in a window of 20: it slides.
    for budget in (1, 70, 10_000):
        outputs = generate_texts(model, prompts, 30, max_length=20, finished=lambda new: False, batch_tokens=budget)
        assert outputs == [naive(model, prompt, 30, 20) for prompt in prompts]


def test_generation_ends_before_the_first_stop_sequence_the_limit_or_the_end_of_the_document() -> None:
    model = Fading(7)
    lm = lm_of(model, Bytes(), 64)
    full = Bytes().decode(naive(model, ids("start here"), 40, 64))
    stop = full[9:11]
    calls = [
        ({"until": [], "max_gen_toks": 40}, full),
        ({"until": [], "max_gen_toks": 7}, Bytes().decode(naive(model, ids("start here"), 7, 64))),
        ({"until": [stop, "never there"], "max_gen_toks": 40}, full.split(stop)[0]),
        ({"until": stop, "max_gen_toks": 40}, full.split(stop)[0]),
    ]
    results = lm.generate_until([request("start here", kwargs, kind="generate_until") for kwargs, _ in calls])
    assert results == [expected for _, expected in calls]

    def end_after(tokens: Tensor) -> Tensor:  # the document ends as soon as eight tokens are there
        logits = torch.zeros(*tokens.shape, 257)
        logits[:, :, ord("a")] = 1.0
        logits[:, 7:, END] = 2.0
        return logits

    module = nn.Module()
    module.forward = end_after
    assert lm_of(module, Bytes(), 64).generate_until([request("12345", {"until": []})]) == ["aaa"]


def test_a_prompt_gives_way_to_the_answer() -> None:
    model = Fading(8)
    lm = lm_of(model, Bytes(), 20)
    (text,) = lm.generate_until([request("abcdefghijklmnopqrstuvwxyz", {"until": [], "max_gen_toks": 8})])
    assert text == Bytes().decode(naive(model, ids("opqrstuvwxyz"), 8, 20))
    assert lm.truncated == {("abcdefghijklmnopqrstuvwxyz",)}


def test_sampling_is_reproducible_and_does_not_see_its_neighbours() -> None:
    model = Fading(9)
    kwargs = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    requests = [request(text, kwargs) for text in ("one", "two words", "one", "three more words")]
    texts = lm_of(model, Bytes(), 32).generate_until(requests)
    assert lm_of(model, Bytes(), 32, batch_tokens=1).generate_until(requests) == texts
    assert texts[0] != texts[2]  # repeats of one prompt differ
    assert lm_of(model, Bytes(), 32, seed=1).generate_until(requests) != texts


def test_draws_follow_temperature_top_k_and_the_nucleus() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0], dtype=torch.float64)
    cases = {
        Sampling(1.0): torch.softmax(logits, 0),
        Sampling(2.0): torch.softmax(logits / 2, 0),
        Sampling(1.0, top_k=2): torch.softmax(torch.tensor([-torch.inf, 3.0, 2.0, -torch.inf, -torch.inf]), 0),
        # softmax is 0.087, 0.643, 0.236, 0.012, 0.032: the two largest hold 0.879, so three make up 0.9.
        Sampling(1.0, top_p=0.9): torch.softmax(torch.tensor([1.0, 3.0, 2.0, -torch.inf, -torch.inf]), 0),
        Sampling(1.0, top_p=0.0): torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]),
        Sampling(0.0): torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]),
    }
    for sampling, expected in cases.items():
        generator = torch.Generator().manual_seed(0)
        n = 1500
        counts = np.bincount([draw(logits, sampling, generator) for _ in range(n)], minlength=5)
        error = np.sqrt(expected.numpy() * (1 - expected.numpy()) / n)
        assert np.all(np.abs(counts / n - expected.numpy()) <= 4.5 * error), sampling


def test_nan_is_reported_not_answered() -> None:
    model = Fading()
    with torch.no_grad():
        model.E[ord("!")] = torch.nan
    lm = lm_of(model, Bytes(), 32)
    (good, _), (bad, _) = lm.loglikelihood([request("fine", " yes"), request("oh!", " no")])
    assert np.isfinite(good)
    assert np.isnan(bad)
    lm.generate_until([request("fine", {"until": [], "max_gen_toks": 2}), request("oh!", {"until": []})])
    assert ("oh!",) in lm.failed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_numbers() -> None:
    rng = np.random.default_rng(10)
    torch.manual_seed(0)
    model = GPT(ModelConfig(width=32, depth=2, heads=2, vocab_size=257), 64).eval()
    pairs = [request(random_text(rng, 0, 90), " " + random_text(rng, 0, 90)) for _ in range(40)]
    prompts = [request("a prompt", {"until": [], "max_gen_toks": 20})]
    host = lm_of(model, Bytes(), 64)
    expected, text = [nats for nats, _ in host.loglikelihood(pairs)], host.generate_until(prompts)
    card = lm_of(model.to("cuda"), Bytes(), 64, device="cuda")
    # fp32 on both, in other orders of summation; TF32 is off by default.
    np.testing.assert_allclose([nats for nats, _ in card.loglikelihood(pairs)], expected, rtol=1e-5)
    assert card.generate_until(prompts) == text
