"""Schedules end, keep and wait as in their papers; unknown ones are refused; blocks are divided by cost."""

from __future__ import annotations

import graphlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product

import pytest
from isoflop.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    from_dict,
    run_id,
    to_dict,
)
from isoflop.train.errors import UserError
from isoflop.train.flops import block_flops, stage_blocks, training_flops_per_token
from isoflop.train.parallel.schedules import SCHEDULES, Action, divide, schedule
from isoflop.train.planner.validation import check_shapes, check_world, validate, working_shapes

Need = tuple[str, int, int]  # an action by its kind, micro-batch and virtual stage


def bubbles(lists: Sequence[Sequence[Action]]) -> list[int]:
    """Return how long each rank waits between its first action and its last, in times of one forward action.

    A backward action takes two of them. A receive waits until the message is sent, which takes no time.
    """
    stages = len(lists)
    count = stages * (1 + max(action.chunk for actions in lists for action in actions))
    ends: dict[Need, int] = {}
    clocks, busy, waiting = [0] * stages, [0] * stages, [deque(actions) for actions in lists]
    starts = list[int | None]([None] * stages)
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue:
                kind, micro, chunk = action = queue[0]
                virtual, seconds = chunk * stages + rank, 1 if kind == "forward" else 2
                if not ends.keys() >= (needs := needs_of(action, virtual, count)):
                    break
                queue.popleft()
                start = max([clocks[rank], *(ends[need] for need in needs)])
                starts[rank] = start if starts[rank] is None else starts[rank]
                ends[kind, micro, virtual] = clocks[rank] = start + seconds
                busy[rank] += seconds
    return [end - (start or 0) - work for end, start, work in zip(clocks, starts, busy, strict=True)]


def needs_of(action: Action, virtual: int, count: int) -> set[Need]:
    """Return the actions that must end before this one, which is in a virtual stage of `count`."""
    kind, micro, _ = action
    if kind == "forward":
        return {("forward", micro, virtual - 1)} if virtual else set()
    needs: set[Need] = {("forward", micro, virtual)}
    if virtual + 1 < count:
        needs.add(("backward", micro, virtual + 1))
    return needs


# The formulas of docs/parallel.md, by rank r of S stages, M micro-batches and V chunks, in times of one forward action.
KEPT = {
    "gpipe": lambda r, S, M, V: M,
    "1f1b": lambda r, S, M, V: min(S - r, M),
    "interleaved": lambda r, S, M, V: min(2 * (S - 1 - r) + (V - 1) * S + 1, M * V),
}


def cases(stages: int = 8, micro_batches: int = 12, chunks: int = 4) -> Iterator[tuple[str, int, int, int]]:
    for name in SCHEDULES:
        for S in range(1, stages + 1):
            for M in range(1, micro_batches + 1):
                for V in range(1, chunks + 1) if name == "interleaved" else (1,):
                    if name != "interleaved" or V == 1 or M % S == 0:
                        yield name, S, M, V


def ends(lists: list[list[Action]]) -> bool:
    """Return whether ranks with these actions end: no cycle, and every channel receives messages in the order sent."""
    stages, before = len(lists), dict[tuple[int, Action], set[tuple[int, Action]]]()
    count = stages * (1 + max(action.chunk for actions in lists for action in actions))
    done = {
        (action.kind == "backward", action.micro, action.chunk * stages + rank): (rank, action)
        for rank, actions in enumerate(lists) for action in actions
    }  # fmt: skip
    sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    got: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for rank, actions in enumerate(lists):
        for earlier, action in pairwise([None, *actions]):
            node, back, virtual = (rank, action), action.kind == "backward", action.chunk * stages + rank
            before[node] = set() if earlier is None else {(rank, earlier)}
            if back:
                before[node].add(done[False, action.micro, virtual])
            source, target = (virtual + 1, virtual - 1) if back else (virtual - 1, virtual + 1)
            if 0 <= source < count:
                before[node].add(done[back, action.micro, source])
                got.setdefault((source % stages, rank, back), []).append((action.micro, virtual))
            if 0 <= target < count:
                sent.setdefault((rank, target % stages, back), []).append((action.micro, target))
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return False
    local_channels = {(rank, rank, back) for rank in range(stages) for back in (False, True)}  # need no order
    return all(sent.get(way) == got.get(way) for way in sent.keys() | got.keys() if way not in local_channels)


def test_every_schedule_does_each_action_once_and_ends() -> None:
    tried = 0
    for name, S, M, V in cases():
        lists = schedule(name, S, M, V)
        every = sorted(Action(*action) for action in product(("forward", "backward"), range(M), range(V)))
        assert [sorted(actions) for actions in lists] == [every] * S, (name, S, M, V)
        assert ends(lists), (name, S, M, V)
        tried += 1
    assert tried > 350


def test_bubble_and_activations_are_those_of_the_papers() -> None:
    for name, S, M, V in cases():
        lists = schedule(name, S, M, V)
        kept = [max(accumulate(1 if action.kind == "forward" else -1 for action in actions)) for actions in lists]
        assert kept == [KEPT[name](r, S, M, V) for r in range(S)]
        assert bubbles(lists) == [3 * (S - 1 - r) for r in range(S)], (name, S, M, V)


@pytest.mark.parametrize(("name", "micro_batches", "chunks"), [("1f1b", 4, 2), ("2f2b", 4, 1), ("interleaved", 6, 2)])
def test_what_is_no_schedule_is_not_made(name: str, micro_batches: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        schedule(name, 4, micro_batches, chunks)


def largest_cost(costs: list[float], shares: list[range], last: float) -> float:
    sums = [sum(costs[number] for number in share) for share in shares]
    return max([*sums[:-1], sums[-1] + last])


def test_no_other_division_has_a_smaller_largest_share() -> None:
    draw = random.Random(0)
    for _ in range(500):
        costs = [float(draw.choice([4, draw.randint(1, 9)])) for _ in range(draw.randint(1, 9))]
        stages, last = draw.randint(1, len(costs)), draw.choice([0.0, 3.0, 20.0])
        division = divide(costs, stages, last)
        assert len(division) == stages
        assert all(division)
        assert [number for share in division for number in share] == list(range(len(costs)))
        cuts = combinations(range(1, len(costs)), stages - 1)
        divisions = ([range(*pair) for pair in pairwise((0, *cut, len(costs)))] for cut in cuts)
        assert largest_cost(costs, division, last) == min(largest_cost(costs, shares, last) for shares in divisions)


def a_run(depth: int = 8, batch: int = 8, model: dict[str, int] | None = None, **parallel: object) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**{"depth": depth, "vocab_size": 256} | (model or {})), data=DataConfig(sequence_length=64),
        optimizer=OptimizerConfig(batch_size=batch), parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )  # fmt: skip


def test_stages_count_the_head_and_what_a_token_uses_of_experts() -> None:
    assert stage_blocks(a_run(pp=4)) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    # A head that costs as much as three blocks leaves the last stage fewest; dense blocks below experts are cheaper.
    block = block_flops(a_run().model, 64)[0]
    wide = a_run(pp=4, depth=9, model={"vocab_size": 3 * block // (2 * 64)})
    assert stage_blocks(wide) == [range(0, 2), range(2, 5), range(5, 8), range(8, 9)]
    mixed = {"experts": 8, "expert_hidden": 512, "dense_layers": 4}
    first, *_, last = stage_blocks(a_run(pp=2, model=mixed))
    assert len(first) > len(last)
    for run in (a_run(), wide, a_run(model=mixed)):
        head = 2 * run.model.padded_vocab_size * run.model.width
        assert 3 * (sum(block_flops(run.model, 64)) + head) == training_flops_per_token(run.model, 64)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (a_run(pp=9), r"parallel\.pp is 9; .* model\.depth 8.* at most 8"),
        (a_run(pp=5, schedule="interleaved", chunks=2), r"parallel\.pp is 5; .* model\.depth 8.* at most 4"),
        (a_run(pp=2, schedule="interleaved", chunks=5), r"parallel\.chunks is 5 .* 2 to 4"),
        (a_run(pp=2, schedule="interleaved"), r"parallel\.chunks is 1 .* 2 to 4"),
        (a_run(pp=2, chunks=2), r"parallel\.chunks is 2 .* must be 1"),
        (a_run(schedule="interleaved", chunks=2), r"parallel\.chunks is 2 with parallel\.pp 1; .* must be 1"),
        (a_run(pp=2, dp=2, zero=3), r"parallel\.zero is 3 with parallel\.pp 2; it must be 0, 1 or 2"),
        (
            a_run(pp=4, dp=2, micro_batch_size=2, schedule="interleaved", chunks=2),
            r"parallel\.micro_batch_size is 2.* can be 1$",
        ),
        (a_run(pp=4, batch=6, schedule="interleaved", chunks=2), r"parallel\.pp is 4 .* 6 sequences .*: 2, 3"),
        (a_run(pp=4, batch=1, schedule="interleaved", chunks=2), r"parallel\.pp is 4 .* 1 sequence .* 1f1b"),
        (a_run(pp=2, schedule="2f2b"), r"parallel\.schedule is '2f2b'; it must be one of gpipe, 1f1b, interleaved"),
        (a_run(dp=2, cp=2, ep=3, model={"experts": 8}), r"parallel\.ep is 3; .* model\.experts 8: 1, 2, 4"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_what_could(config: RunConfig, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_shapes(config)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_recorded_run_of_a_removed_schedule_keeps_its_id_and_is_not_trained(name: str) -> None:
    recorded = to_dict(a_run(pp=2))
    recorded["parallel"]["schedule"] = name
    config = from_dict(RunConfig, recorded)
    assert run_id(config) == run_id(a_run(pp=2))
    with pytest.raises(UserError) as error:
        validate(config)
    assert str(error.value) == f"parallel.schedule is '{name}'; it must be one of gpipe, 1f1b, interleaved"


def test_what_a_refusal_names_works() -> None:
    """Try the numbers at the end of refusals, for random pipelines."""
    draw, tried = random.Random(3), 0
    for _ in range(1000):
        config = a_run(
            draw.randint(1, 12), draw.choice([1, 2, 6, 8, 12, 16]), pp=draw.randint(2, 9), chunks=draw.randint(2, 4),
            schedule="interleaved", dp=draw.choice([1, 2]), micro_batch_size=draw.choice([None, 1, 2]),
        )  # fmt: skip
        try:
            check_shapes(config)
        except UserError as error:
            field, _, numbers = str(error).rpartition(": ")
            if "interleaved" not in field:
                continue
            for number in numbers.split(", "):
                setattr(config.parallel, field.partition(" ")[0].removeprefix("parallel."), int(number))
                config.parallel.micro_batch_size = 1 if field.startswith("parallel.pp") else int(number)
                check_shapes(config)
                tried += 1
    assert tried > 40


def test_ranks_are_shared_out_with_stages_and_parts_of_sequences() -> None:
    config = a_run(pp=2, cp=2)
    assert working_shapes(config, 8) == [(1, 2), (2, 1)]
    assert working_shapes(config, 6) == []
    check_world(a_run(pp=2, cp=2, dp=2), 8, 8)
    with pytest.raises(UserError, match=r"the job has 8 ranks; with 8 ranks it can be tp 1 \* dp 2 \* cp 2 \* pp 2 or"):
        check_world(config, 8, 8)
    with pytest.raises(UserError, match="no split over 3 ranks fits this model and batch; use 4 ranks"):
        check_world(config, 3, 3)
