"""Shapes that a run can take: refusals name the field and numbers that work, and every shape that fits passes."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from isoflop.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from isoflop.train.errors import UserError
from isoflop.train.job.environment import detect
from isoflop.train.planner.validation import check_hosts, check_shapes, check_world, working_shapes


def run(batch: int = 16, length: int = 32, model: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    shape = {"width": 64, "heads": 8, "kv_heads": 2, "vocab_size": 256} | (model or {})
    return RunConfig(
        model=ModelConfig(**shape),
        data=DataConfig(sequence_length=length),
        optimizer=OptimizerConfig(batch_size=batch),
        parallel=ParallelConfig(**parallel),
    )


def refusal(config: RunConfig) -> str | None:
    try:
        check_shapes(config)
    except UserError as error:
        return str(error)
    return None


def fits(config: RunConfig) -> bool:
    return refusal(config) is None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (run(tp=0), "parallel.tp is 0; .* 1 or more"),
        (run(zero=4), "parallel.zero is 4; .* 0, 1, 2, 3"),
        (run(tp=3), "parallel.tp is 3; .* model.heads 8; .* 1, 2, 4, 8"),
        (
            run(tp=2, batch=18, length=18, model={"heads": 6, "width": 48, "kv_heads": 3, "hidden": 96,
                                                 "vocab_multiple": 96}),
            "parallel.tp is 2; .* model.kv_heads 3; .* 1, 3, 6",
        ),
        (run(tp=8, model={"hidden": 100}), "parallel.tp is 8; .* model.hidden.* 100; .* 1, 2, 4"),
        (run(tp=8, model={"vocab_size": 250, "vocab_multiple": 6}), "parallel.tp is 8; .* 252; .* 1, 2, 4"),
        (run(tp=8, length=6, micro_batch_size=2), "parallel.tp is 8; .* data.sequence_length 6.* 1, 2"),
        (run(dp=100, batch=720), "parallel.dp is 100; .* optimizer.batch_size 720: 60, 72, 80, 90, 120, 144"),
        (run(dp=4, micro_batch_size=3), "parallel.micro_batch_size is 3; .* parallel.dp 4 = 4: 1, 2, 4"),
        (run(micro_batch_size=0), "parallel.micro_batch_size is 0; .* optimizer.batch_size 16: 1, 2, 4, 8, 16"),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused_with_those_that_do(config: RunConfig, problem: str) -> None:
    assert re.fullmatch(problem, refusal(config) or "")


def test_what_need_not_be_split_is_not_asked_about() -> None:
    check_shapes(run(tp=8, length=6, micro_batch_size=2, sequence_parallel=False))
    check_shapes(
        run(tp=8, model={"vocab_size": None, "vocab_multiple": 6})
    )  # the planner fills it in, and checks again
    check_shapes(run(zero=3))  # nothing to share, and nothing wrong


def random_run(draw: random.Random) -> RunConfig:
    heads = draw.choice([1, 2, 3, 4, 6, 8, 12, 16])
    return run(
        batch=draw.choice([1, 2, 6, 8, 12, 16, 24]), length=draw.choice([3, 4, 6, 16]),
        model={
            "heads": heads, "width": heads * 4,
            "kv_heads": draw.choice([k for k in range(1, heads + 1) if heads % k == 0]),
            "hidden": draw.choice([8, 12, 24, 48]),
            "vocab_size": draw.randint(20, 300), "vocab_multiple": draw.choice([1, 6, 16, 64]),
        },
        tp=draw.choice([1, 2, 3, 4, 6, 8]), dp=draw.choice([1, 2, 3, 4, 6]),
        micro_batch_size=draw.choice([None, 1, 2, 3]), sequence_parallel=draw.random() < 0.5,
    )  # fmt: skip


def splits_evenly(config: RunConfig) -> bool:
    """Return whether every rank gets whole and equal parts, by cutting everything up."""
    model, parallel = config.model, config.parallel
    even = all(
        len(range(n)[:: parallel.tp]) == len(range(n)[parallel.tp - 1 :: parallel.tp])
        for n in (model.heads, model.mlp_hidden, model.padded_vocab_size)
    )
    # The key-value heads that a rank's query heads need: the same number on every rank, and none shared by halves.
    group = model.heads // model.num_kv_heads
    rank_heads = [
        {head // group for head in range(rank * model.heads // parallel.tp, (rank + 1) * model.heads // parallel.tp)}
        for rank in range(parallel.tp)
    ]
    even &= len({len(heads) for heads in rank_heads}) == 1
    even &= all(a == b or not a & b for a in rank_heads for b in rank_heads)
    rows = config.optimizer.batch_size / parallel.dp
    micro = parallel.micro_batch_size or rows
    # One sequence is the smallest pass: the last of the held-out ones may be alone.
    even &= not (parallel.sequence_parallel and config.data.sequence_length % parallel.tp)
    return even and rows % 1 == 0 and rows % micro == 0


def test_the_check_agrees_with_cutting_everything_up() -> None:
    draw = random.Random(0)
    verdicts = []
    for _ in range(1000):
        config = random_run(draw)
        verdicts.append(fits(config))
        assert verdicts[-1] == splits_evenly(config), config
    assert 100 < sum(verdicts) < 900


def test_every_number_that_a_refusal_names_works_for_its_field() -> None:
    draw = random.Random(1)
    tried = 0
    for _ in range(500):
        config = random_run(draw)
        message = refusal(config)
        if message is None:
            continue
        field, numbers = re.match(r"parallel\.(\w+) is", message), re.search(r"[\d, ]+$", message)
        for number in map(int, numbers[0].split(",")):
            setattr(config.parallel, field[1], number)
            assert not (refusal(config) or "").startswith(field[0])  # another field may be wrong as well
            tried += 1
    assert tried > 500


def test_working_shapes_are_all_that_use_the_ranks_and_fit() -> None:
    draw = random.Random(2)
    for _ in range(200):
        config, ranks = random_run(draw), draw.choice([1, 2, 4, 6, 8, 12])
        expected = []
        for config.parallel.tp, config.parallel.dp in itertools.product(range(1, ranks + 1), repeat=2):
            if config.parallel.world_size == ranks and fits(config):
                expected.append((config.parallel.tp, config.parallel.dp))
        assert working_shapes(config, ranks) == expected


def test_a_tensor_parallel_group_stays_inside_a_node() -> None:
    config = run()
    assert working_shapes(config, 16) == [(1, 16), (2, 8), (4, 4), (8, 2)]
    assert working_shapes(config, 16, ranks_per_node=4) == [(1, 16), (2, 8), (4, 4)]
    check_world(run(tp=4, dp=4), ranks=16, ranks_per_node=4)
    with pytest.raises(UserError, match=r"parallel\.tp is 8; .* 4 ranks of a node.* tp 4 \* dp 4 or tp 2 \* dp 8"):
        check_world(run(tp=8, dp=2), ranks=16, ranks_per_node=4)


def test_a_job_with_other_ranks_is_refused_with_shapes_for_them() -> None:
    shapes = r"parallel\.dp 4 is 8 and the job has 4 ranks; .* tp 2 \* dp 2 or tp 1 \* dp 4 or tp 4 \* dp 1"
    with pytest.raises(UserError, match=shapes):
        check_world(run(tp=2, dp=4), ranks=4, ranks_per_node=4)
    with pytest.raises(UserError, match=r"no split over 7 ranks .* use 4 ranks"):
        check_world(run(tp=2, dp=2), ranks=7, ranks_per_node=7)


def test_ranks_dealt_out_to_nodes_in_turn_are_refused() -> None:
    check_hosts(ParallelConfig(tp=2), ["a", "a", "b", "b"])
    check_hosts(ParallelConfig(tp=1), ["a", "b", "a", "b"])
    with pytest.raises(UserError, match="ranks 2 to 3 of one tensor-parallel group are on a, b"):
        check_hosts(ParallelConfig(tp=2), ["a", "a", "a", "b", "b", "b"])


SLURM = {
    "SLURM_JOB_ID": "71", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURMD_NODENAME": "node07", "SLURM_RESTART_COUNT": "3",
}  # fmt: skip
LOCAL = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "4", "SUBMITIT_LOCAL_GLOBALID": "3",
    "SUBMITIT_LOCAL_LOCALID": "3", "SUBMITIT_LOCAL_JOB_ID": "812",
}  # fmt: skip
TORCHRUN = {
    "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


STEP = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3,2,1", "SLURM_LOCALID": "0"}
BY_SLURM = {"SUBMITIT_EXECUTOR": "slurm"} | SLURM


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (BY_SLURM, (5, 7, 1, 2, "slurm", "71-3")),
        (BY_SLURM | STEP, (5, 6, 0, 1, "slurm", "71-3")),  # a step of a job counts its own tasks
        (SLURM, (0, 1, 0, 1, "alone", "0")),  # started by hand inside an allocation
        (LOCAL, (3, 4, 3, 4, "local", "812")),
        (SLURM | LOCAL, (3, 4, 3, 4, "local", "812")),
        (TORCHRUN, (6, 8, 2, 4, "torchrun", "none-0")),
        (LOCAL | TORCHRUN, (3, 4, 3, 4, "local", "812")),  # a pod that exports RANK for all its processes
        (LOCAL | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}, (6, 8, 2, 4, "torchrun", "x-0")),
        ({}, (0, 1, 0, 1, "alone", "0")),
    ],
)
def test_the_rank_is_what_the_launcher_says(environment: dict[str, str], expected: tuple[int | str, ...]) -> None:
    ranks = detect(environment)
    place = ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.source, ranks.attempt
    assert place == expected
    assert ranks.source != "slurm" or ranks.host == "node07"


@pytest.mark.parametrize(
    "wrong", [{"SLURM_PROCID": "x"}, {"SLURM_PROCID": "7"}, {"SLURM_TASKS_PER_NODE": "many"}, {"SLURM_NODEID": "9"}]
)
def test_a_launcher_that_makes_no_sense_is_an_error_and_not_one_process(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match="variables give no valid rank"):
        detect(BY_SLURM | wrong)
