"""An evaluation shared out over ranks gives what one process gives, on each, and no failure leaves one waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from isoflop.evaluate.harness import CheckpointLM
from isoflop.evaluate.inference.ranks import on_ranks, share_requests
from isoflop.evaluate.inference.trees import Request
from isoflop.evaluate.records import Answers
from isoflop.train.data.tokenizers import ByteTokenizer
from isoflop.train.errors import UserError
from isoflop.train.job.control import run_on_ranks
from isoflop.train.parallel.mesh import Mesh
from simple_models import gpt

T = 48


def make_request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def requests(count: int = 12) -> list[Any]:
    rng = np.random.default_rng(0)

    def text(low: int, high: int) -> str:
        return "".join(rng.choice(list("abcd e"), size=int(rng.integers(low, high)))) + "x"

    prompts = [text(0, 60) for _ in range(count)]
    return [make_request(prompt, " " + text(1, 9)) for prompt in prompts for _ in range(3)]


def everything(ranks: Mesh, answers: Answers | None = None, seed: int = 0) -> dict[str, Any]:
    lm = CheckpointLM(gpt(seed, T), ByteTokenizer(), T, batch_tokens=200, ranks=ranks, answers=answers)
    settings = {"until": ["\n"], "max_gen_toks": 6}
    drawn = {**settings, "do_sample": True, "temperature": 1.0}
    return {
        "likely": lm.loglikelihood(requests()),
        "rolling": lm.loglikelihood_rolling([make_request("abc" * n) for n in (0, 1, 5, 40, 100)]),
        "greedy": lm.generate_until([make_request(prompt, settings) for prompt in ("a", "bc d", "eee", "a")]),
        "drawn": lm.generate_until([make_request(prompt, drawn) for prompt in ("a", "bc d", "eee", "a")]),
        "truncated": sorted(lm.truncated),
    }


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("greedy", "drawn", "truncated"):
        assert ours[name] == expected[name]
    # float64; in other batches sums have another order.
    np.testing.assert_allclose([n for n, _ in ours["likely"]], [n for n, _ in expected["likely"]], rtol=1e-12)
    np.testing.assert_allclose(ours["rolling"], expected["rolling"], rtol=1e-12)
    assert [g for _, g in ours["likely"]] == [g for _, g in expected["likely"]]


def test_every_rank_gets_what_one_process_gets_and_the_first_one_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isoflop.evaluate.harness.ROUND_TOKENS", 150)  # several rounds
    monkeypatch.setattr("isoflop.evaluate.harness.ROUND_PROMPTS", 1)
    expected = everything(Mesh())
    assert expected["drawn"][0] != expected["drawn"][3]  # repeats of one prompt differ

    def twice(ranks: Mesh) -> list[Any]:
        answers = Answers()
        first = everything(ranks, answers)
        stored = len(answers.known)
        return ranks.gather((first, stored, everything(ranks, answers, seed=1)))  # another model, which is not used

    (first, stored, again), (second, none, _) = on_ranks(2, twice)
    assert first == second
    assert_same(first, expected)
    assert_same(again, expected)
    assert stored > 40
    assert none == 0


def test_shares_hold_every_request_once_and_weigh_the_same() -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 99, rng.integers(20, 200)).tolist() for _ in range(60)]
    flat = [Request(prompt, rng.integers(0, 99, 10).tolist()) for prompt in prompts for _ in range(4)]
    for ranks, round_tokens in ((1, 10**9), (2, 10**9), (3, 1000), (5, 400)):
        rounds = list(share_requests(flat, ranks, round_tokens))
        assert sorted(place for parts in rounds for part in parts for place in part) == list(range(len(flat)))
        for parts in rounds:
            assert len(parts) == ranks
            # A prompt stays together, unless a border cuts it.
            homes: dict[int, set[int]] = {}
            for rank, part in enumerate(parts):
                for place in part:
                    homes.setdefault(place // 4, set()).add(rank)
            assert sum(len(home) > 1 for home in homes.values()) < ranks
            loads = [sum(len(prompts[group]) + 36 for group in {place // 4 for place in part}) for part in parts]
            assert max(loads) - min(loads) < 3 * 236  # two prompts at borders, and one that both compute
        expected = sum(len(prompt) + 36 for prompt in prompts) / (ranks * round_tokens)
        assert len(rounds) == max(1, round(expected))
    assert list(share_requests([], 2, 100)) == []
    assert [sorted(map(len, parts)) for parts in share_requests(flat[:1], 3, 100)] == [[0, 0, 1]]


def test_an_error_of_one_rank_ends_all_of_them() -> None:
    def fails(ranks: Mesh) -> None:
        def work() -> None:
            if ranks.rank == 1:
                raise UserError("the model has no memory left")

        run_on_ranks(ranks, work)

    with pytest.raises(UserError, match=r"rank 1.*: the model has no memory left"):
        on_ranks(2, fails)

    def dies(ranks: Mesh) -> None:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run_on_ranks(ranks, lambda: None)

    with pytest.raises(RuntimeError, match="rank 1: ended without a result"):
        on_ranks(2, dies)

    def breaks(ranks: Mesh) -> None:
        run_on_ranks(ranks, lambda: 1 / 0 if ranks.rank == 1 else 0.0)

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        on_ranks(2, breaks)


def test_ranks_that_cannot_be_had_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="ranks is 0; it must be 1 to "):
        on_ranks(0, lambda ranks: None)
    with pytest.raises(UserError, match="ranks is 1000000007; it must be 1 to "):
        on_ranks(1_000_000_007, lambda ranks: None)
    with pytest.raises(UserError, match="ranks is 2 on cuda; start one per GPU with torchrun --nproc-per-node 2"):
        on_ranks(2, lambda ranks: None, device="cuda")
    assert on_ranks(1, lambda ranks: (ranks.rank, ranks.size)) == (0, 1)
    for name, value in (
        ("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="ranks is 2, but torchrun started 3; leave ranks out"):
        on_ranks(2, lambda ranks: None)


@pytest.mark.slow
def test_under_torchrun_the_ranks_are_the_jobs_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from isoflop.evaluate.inference.ranks import on_ranks\n"
        "from test_ranks import everything\n"
        "if __name__ == '__main__':\n"
        "    result = on_ranks(1, lambda ranks: (ranks.rank, ranks.size, everything(ranks)))\n"
        "    Path(sys.argv[2], f'{result[0]}.json').write_text(json.dumps(result))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(Path(__file__).parent), str(tmp_path)], check=True, timeout=240)
    expected = json.loads(json.dumps(everything(Mesh())))
    for rank in (0, 1):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result[:2] == [rank, 2]
        assert_same(result[2], expected)
