"""Steps and whole runs on a mesh of ranks, and their comparison with those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import Ended, fork_processes
from isoflop.train import loop
from isoflop.train.config import ParallelConfig, RunConfig
from isoflop.train.data.loader import TrainStream, validation_windows
from isoflop.train.data.shards import prepare
from isoflop.train.optimizer.average import copies
from isoflop.train.parallel.layout import Box, Held, boxes
from isoflop.train.parallel.mesh import Mesh, build_mesh
from isoflop.train.stepper import Stepper

CPU = torch.device("cpu")

Weights = dict[str, np.ndarray]
Boxes = list[tuple[str, Any, Any, np.ndarray]]  # name, shape of the whole tensor, box, values
Outcome = tuple[list[float], list[float], Boxes]  # losses, norms, and the boxes of one rank at the end


def mesh_of(parallel: ParallelConfig) -> Mesh:
    return build_mesh(device=CPU, **parallel.axes)


def stepper_of(config: RunConfig, mesh: Mesh) -> Stepper:
    return Stepper(config, mesh, CPU, TrainStream(prepare(config.data), config.data.sequence_length, config.seed))


def started(config: RunConfig, mesh: Mesh) -> Stepper:
    stepper = stepper_of(config, mesh)
    stepper.start()
    return stepper


def take_steps(config: RunConfig, mesh: Mesh, steps: int) -> Outcome:
    """Return the outcome of the first steps of a run."""
    return outcome(started(config, mesh), 0, steps)


def outcome(stepper: Stepper, first: int, last: int) -> Outcome:
    """Take some steps and score held-out windows after them, with the weights and with each of their averages."""
    results = [stepper.step(step) for step in range(first, last)]
    data = stepper.config.data
    windows = torch.from_numpy(validation_windows(prepare(data), data.sequence_length, 80))
    averages = range(copies(stepper.config.average))
    scores = [loss for copy in (None, *averages) for loss in stepper.losses(windows, lambda: None, copy).tolist()]
    kinds = ("weight", *(f"average_{copy}" for copy in averages))
    rank_boxes = [
        (f"{h.name} {h.kind}", h.placement.shape, box, values_of(h, box))
        for h in stepper.held()
        for box in boxes(h.placement, h.start, h.stop)
        if h.kind in kinds
    ]
    return [r.loss.item() for r in results] + scores, [r.norm.item() for r in results], rank_boxes


def values_of(held: Held, box: Box) -> np.ndarray:
    return held.values[box.start - held.start : box.stop - held.start].clone().numpy()


def whole(ranks: Sequence[Outcome]) -> Weights:
    """Join the boxes of all ranks to whole tensors. Boxes that several ranks hold must be equal."""
    weights: Weights = {}
    for name, shape, box, values in (item for _, _, items in ranks for item in items):
        full = weights.setdefault(name, np.full(shape, np.nan, values.dtype))
        place = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
        filled, values = full[place], values.reshape(box.size)
        assert np.array_equal(values[~np.isnan(filled)], filled[~np.isnan(filled)])
        full[place] = values
    assert not any(np.isnan(full).any() for full in weights.values())
    return weights


def assert_same(ranks: Sequence[Outcome], one_process: Outcome, tolerance: float, case: object) -> None:
    """Compare the outcome on all ranks with that of one process."""
    losses, norms, _ = one_process
    for theirs in ranks:
        assert theirs[0] == ranks[0][0]  # every rank has the same loss, to the bit
        np.testing.assert_allclose(theirs[0], losses, rtol=tolerance, err_msg=str(case))
        # Norms are sums of squares in another order of roundings.
        np.testing.assert_allclose(theirs[1], norms, rtol=10 * tolerance, err_msg=str(case))
    expected = whole([one_process])
    for name, values in whole(ranks).items():
        # Weights are of order 0.1 to 1.
        np.testing.assert_allclose(values, expected[name], atol=tolerance, err_msg=f"{case} {name}")


def train_on_ranks(
    config: RunConfig | Callable[[int], RunConfig], directory: Path, ranks: int,
    should_stop: Callable[[int], Callable[[], bool]] = lambda number: lambda: False,
) -> list[Ended]:  # fmt: skip
    """Train in processes that find each other by their environment, as a launcher starts them."""
    directory.mkdir(exist_ok=True)
    attempt = os.urandom(4).hex()

    def rank(number: int, report: Callable[[str], None]) -> None:
        os.environ.update(
            SUBMITIT_EXECUTOR="local", SUBMITIT_LOCAL_JOB_ID=attempt, SUBMITIT_LOCAL_NTASKS=str(ranks),
            SUBMITIT_LOCAL_GLOBALID=str(number), SUBMITIT_LOCAL_LOCALID=str(number),
        )  # fmt: skip
        try:
            rank_config = config(number) if callable(config) else config
            loop.train(rank_config, directory, should_stop=should_stop(number), report=report)
            report("done")
        except Exception as error:
            report(f"{type(error).__name__}: {error}")

    return fork_processes(ranks, rank, range(ranks), timeout=100.0)


def stop_at(step: int, rank: int) -> Callable[[int], Callable[[], bool]]:
    """Return a function of the rank that makes one rank ask to stop after its `step`-th step."""

    def of_rank(number: int) -> Callable[[], bool]:
        calls = 0

        def should_stop() -> bool:
            nonlocal calls
            calls += 1
            return number == rank and calls == step

        return should_stop

    return of_rank
