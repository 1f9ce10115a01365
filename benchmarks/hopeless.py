"""Replays finished tunes with `grid.stop_hopeless`: FLOPs saved, and whether the same run wins.

python benchmarks/hopeless.py SWEEP... [--seed 0] [--replays 40]
A replay draws runs of one size and D of one sweep, their order and how many train at a time; their recorded losses are
played on one clock of FLOPs, and each run is judged whenever another twentieth of it has been trained.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from isoflop.fit.curves.hopeless import Trial, chance_to_win
from isoflop.sweeps.execute.hopeless import LEAST_CHANCE, trial_of
from isoflop.sweeps.runs.directory import SweepDirectory
from isoflop.sweeps.runs.membership import members

LOOKS = np.arange(1, 20) / 20
LEAST = 12  # runs of a group that is replayed


def recorded(folder: Path) -> Iterator[Trial]:
    for run in members(SweepDirectory.open(folder)):
        if run.is_done():
            yield trial_of(run)


def replay(trials: Sequence[Trial], places: int) -> tuple[float, bool]:
    """Share of FLOPs saved, and whether the same run wins; all runs of a group cost the same."""
    finished, spent = list[Trial](), 0.0
    waiting, clock = list(range(len(trials))), list[tuple[float, int, int]]()
    while waiting or clock:
        while waiting and len(clock) < places:
            heapq.heappush(clock, ((clock[0][0] if clock else 0.0), waiting.pop(0), 0))
        now, index, look = heapq.heappop(clock)
        run = trials[index]
        if look == len(LOOKS):
            finished.append(run)
            spent += 1.0
            continue
        seen = run.share <= LOOKS[look]
        part = replace(run, share=run.share[seen], loss=run.loss[seen], final=None)
        chance = chance_to_win(part, finished)
        if chance is not None and chance.probability < LEAST_CHANCE:
            spent += float(LOOKS[look])
            continue
        heapq.heappush(clock, (now + 1 / (len(LOOKS) + 1), index, look + 1))
    best = min(trials, key=lambda one: one.final or math.inf)
    return 1 - spent / len(trials), any(one is best for one in finished)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replays", type=int, default=40)
    asked = parser.parse_args()
    groups = list[list[Trial]]()
    for folder in asked.sweeps:
        found: dict[object, list[Trial]] = {}
        for one in recorded(folder):
            found.setdefault(one.group, []).append(one)
        groups += [group for group in found.values() if len(group) >= LEAST]
    random = np.random.default_rng(asked.seed)
    results = []
    for number in range(asked.replays):
        group = groups[number % len(groups)]
        count = int(random.integers(LEAST, len(group) + 1))
        chosen = [group[int(index)] for index in random.permutation(len(group))[:count]]
        results.append(replay(chosen, int(random.integers(1, 5))))
    saved, same = np.array([one for one, _ in results]), np.array([won for _, won in results])
    said = {
        "groups": len(groups),
        "replays": len(results),
        "saved": float(saved.mean()),
        "saved_least": float(saved.min()),
    }
    print(json.dumps(said | {"same_winner": float(same.mean())}))


if __name__ == "__main__":
    main()
