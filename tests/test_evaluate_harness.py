"""The model behind lm-eval: log-likelihoods, windows and generation against direct computation in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from isoflop.evaluate.generate import Sampling, draw, generate
from isoflop.evaluate.harness import CheckpointLM
from isoflop.train.config import ModelConfig
from isoflop.train.model import GPT
from lm_eval.api.instance import Instance
from torch import Tensor, nn

END = 256


class Bytes:
    """A byte tokenizer."""

    vocab_size = 257
    end_of_document = END

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

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
    lm = CheckpointLM(model, Bytes(), T, batch_tokens=100)
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
    lm = CheckpointLM(model, Bytes(), T)
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
    lm = CheckpointLM(model, Bytes(), 32)
    results = lm.loglikelihood([request("", "abc"), request("  ", "abc"), request("x", "")])
    assert results[0][0] == pytest.approx(direct(model, [END, *ids("ab")], ids("abc"))[0], abs=1e-10)
    assert results[1][0] == pytest.approx(direct(model, [END, *ids("  ab")], ids("  abc"))[0], abs=1e-10)
    assert results[2] == (0.0, True)


def test_greedy_means_what_greedy_decoding_would_write() -> None:
    model = Fading(3)
    lm = CheckpointLM(model, Bytes(), 32)
    context = ids("hello")
    for _ in range(4):
        context.append(int(model(torch.tensor([context]))[0, -1].argmax()))
    model_says = context[5:]
    scores = lm._loglikelihood_tokens(
        [(("", ""), ids("hello"), model_says), (("", ""), ids("hello"), [*model_says[:3], (model_says[3] + 1) % 256])]
    )
    assert [greedy for _, greedy in scores] == [True, False]


@pytest.mark.parametrize("budget", [1, 50, 10_000])
def test_batching_changes_nothing(budget: int) -> None:
    rng = np.random.default_rng(4)
    torch.manual_seed(0)
    model = GPT(ModelConfig(width=32, depth=2, heads=2, vocab_size=257), 64).eval()
    pairs = [request(random_text(rng, 0, 90), " " + random_text(rng, 0, 90)) for _ in range(40)]
    lm = CheckpointLM(model, Bytes(), 64, batch_tokens=budget)
    together, alone = lm.loglikelihood(pairs), [lm.loglikelihood([pair])[0] for pair in pairs]
    # fp32 matmuls of other shapes round differently, some 1e-7 of each of up to 180 summed terms of about 6 nats.
    np.testing.assert_allclose([n for n, _ in together], [n for n, _ in alone], rtol=1e-6)
    assert [g for _, g in together] == [g for _, g in alone]


def test_our_gpt_is_scored_as_its_own_softmax_says_and_padding_of_the_vocabulary_has_no_probability() -> None:
    torch.manual_seed(1)
    model = GPT(ModelConfig(width=32, depth=2, heads=2, vocab_size=257), 64).double().eval()
    lm = CheckpointLM(model, Bytes(), 64)
    ((nats, _),) = lm.loglikelihood([request("A prompt", " and its answer")])
    tokens = ids("A prompt and its answer")
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([tokens[:-1]]))[0, :, :257], dim=-1)
    expected = sum(float(log_p[place - 1, tokens[place]]) for place in range(8, len(tokens)))
    assert nats == pytest.approx(expected, abs=1e-10)


def test_rolling_sums_are_the_windowed_reference() -> None:
    rng, model, T = np.random.default_rng(5), Fading(), 16
    lm = CheckpointLM(model, Bytes(), T, batch_tokens=40)
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


def naive(model: nn.Module, prompt: list[int], count: int, T: int) -> list[int]:
    out = list(prompt)
    for _ in range(count):
        out.append(int(model(torch.tensor([out[-T:]]))[0, -1].argmax()))
    return out[len(prompt) :]


def test_greedy_generation_is_the_naive_loop_whatever_the_batch() -> None:
    rng, model = np.random.default_rng(6), Fading(6)
    prompts = [ids(random_text(rng, 0, 30)) for _ in range(9)]
    # 30 new tokens in a window of 20: it slides.
    for budget in (1, 70, 10_000):
        outputs = generate(model, prompts, 30, max_length=20, finished=lambda new: False, batch_tokens=budget)
        assert outputs == [naive(model, prompt, 30, 20) for prompt in prompts]


def test_generation_ends_before_the_first_stop_sequence_the_limit_or_the_end_of_the_document() -> None:
    model = Fading(7)
    lm = CheckpointLM(model, Bytes(), 64)
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
    assert CheckpointLM(module, Bytes(), 64).generate_until([request("12345", {"until": []})]) == ["aaa"]


def test_a_prompt_gives_way_to_the_answer() -> None:
    model = Fading(8)
    lm = CheckpointLM(model, Bytes(), 20)
    (text,) = lm.generate_until([request("abcdefghijklmnopqrstuvwxyz", {"until": [], "max_gen_toks": 8})])
    assert text == Bytes().decode(naive(model, ids("opqrstuvwxyz"), 8, 20))
    assert lm.truncated == {("abcdefghijklmnopqrstuvwxyz",)}


def test_sampling_is_reproducible_and_does_not_see_its_neighbours() -> None:
    model = Fading(9)
    kwargs = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    requests = [request(text, kwargs) for text in ("one", "two words", "one", "three more words")]
    texts = CheckpointLM(model, Bytes(), 32).generate_until(requests)
    assert CheckpointLM(model, Bytes(), 32, batch_tokens=1).generate_until(requests) == texts
    assert texts[0] != texts[2]  # repeats of one prompt differ
    assert CheckpointLM(model, Bytes(), 32, seed=1).generate_until(requests) != texts


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
        n = 4000
        counts = np.bincount([draw(logits, sampling, generator) for _ in range(n)], minlength=5)
        error = np.sqrt(expected.numpy() * (1 - expected.numpy()) / n)
        assert np.all(np.abs(counts / n - expected.numpy()) <= 4.5 * error), sampling


def test_nan_is_reported_not_answered() -> None:
    model = Fading()
    with torch.no_grad():
        model.E[ord("!")] = torch.nan
    lm = CheckpointLM(model, Bytes(), 32)
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
    host = CheckpointLM(model, Bytes(), 64)
    expected, text = [nats for nats, _ in host.loglikelihood(pairs)], host.generate_until(prompts)
    card = CheckpointLM(model.to("cuda"), Bytes(), 64, device="cuda")
    # fp32 on both, in other orders of summation; TF32 is off by default.
    np.testing.assert_allclose([nats for nats, _ in card.loglikelihood(pairs)], expected, rtol=1e-5)
    assert card.generate_until(prompts) == text
