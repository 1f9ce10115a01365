"""Parts of every benchmark: the format of rows, the direction of ratios, and peak memory."""

from __future__ import annotations

import pytest
import torch
from isoflop.bench.timing import Contender, measuring_on, print_benchmark, spread, take_turns, timed_row
from isoflop.train.errors import UserError
from isoflop.train.hardware import peak_bytes, pick_device

CPU = torch.device("cpu")


def test_a_ratio_above_one_says_that_ours_needs_fewer_seconds() -> None:
    row = timed_row("case", 1000.0, "tokens/s", [1.0, 2.0, 2.0], [4.0, 4.0, 8.0], "peer", CPU)
    assert row["ours"] == 500
    assert row["peer"] == 250
    assert row["ratio"] == 2
    assert row["spread"] == spread([4.0, 2.0, 4.0]) == 1.0
    assert row["device"].startswith("cpu ")


def test_contenders_alternate_and_the_first_step_is_not_counted() -> None:
    order: list[str] = []
    contenders = [Contender(name, lambda name=name: order.append(name)) for name in "ab"]
    take_turns(contenders, rounds=3, steps=2, device=CPU, between=lambda: order.append("|"))
    assert "".join(order) == "ab|" + 3 * "aabb|"
    assert [len(contender.seconds) for contender in contenders] == [3, 3]
    assert all(seconds >= 0 for contender in contenders for seconds in contender.seconds)


def test_peak_memory_is_the_most_that_is_held_at_once() -> None:
    size = 1 << 20
    held = torch.ones(size)

    def step() -> torch.Tensor:
        two = held + held.neg()  # the negated one and the sum live at once
        one = two.sum()
        del two
        return one + held.mul(2).sum()

    with measuring_on("cpu", 1):
        measured = peak_bytes(step, CPU)
    assert 2 * 4 * size <= measured < 2 * 4 * size + 4096


def test_threads_are_pinned_and_given_back() -> None:
    before = torch.get_num_threads()

    def interrupted() -> None:
        with measuring_on("cpu", before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.get_num_threads() == before


def test_a_device_that_is_no_device_is_refused_in_a_sentence() -> None:
    assert pick_device("cpu", "--device").type == "cpu"
    with pytest.raises(UserError, match="--device is 'tpu'; it must be auto, cpu or cuda"):
        pick_device("tpu", "--device")
    if not torch.cuda.is_available():
        assert pick_device("auto", "--device").type == "cpu"
        with pytest.raises(UserError, match="no CUDA device is visible"):
            pick_device("cuda", "--device")


def test_the_table_has_the_columns_that_its_rows_have(capsys: pytest.CaptureFixture[str]) -> None:
    row = timed_row("loss", 10.0, "tokens/s", [1.0], [1.0], "peer", CPU)
    print_benchmark([row, row | {"peak_bytes": 3 * 2**20, "peer_peak_bytes": 2**20, "worse": 2}], "as counted")
    printed = capsys.readouterr().out
    assert "as counted" in printed
    assert "3.0 / 1.0" in printed
    assert "tokens/s" in printed
    assert "MFU" not in printed
    without_peer = dict.fromkeys(row) | {"case": "start of a worker", "ours": 1.25, "unit": "s"}
    print_benchmark([without_peer, row])  # one without a peer
    assert "1.25" in capsys.readouterr().out
