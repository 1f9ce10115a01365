"""The sequential design on ScaleBench (Li et al. 2026, arXiv:2604.22753): R2 of dear runs by the share of the cost.

    python benchmarks/design.py DIR               both tasks, 10 seeds; DIR holds lr_bsz_train.csv and the others
    python benchmarks/design.py DIR --choose      which laws: the same on `train` alone, its dearest runs held out

Special here:
- The protocol is the publication's: candidates cost 6ND, budgets are 1, 5 and 10 % of what all would cost, and R2 of
  the hidden runs is clipped to [-1, 1]. A seed draws the cheap first runs and the candidates of each round. The
  publication's mean is over ten laws, ours of the laws that `--choose` finds best.
- Beside R2: the share of hidden runs inside the 95 % intervals, and the median width of these in log loss.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from isoflop.fit import FunctionLaw, InputError, RepetitionLaw
from isoflop.fit.allocation.design import Buyer, Candidates, Question

Array = Any
CHECKPOINTS = {0.01: (0.0025, 0.005, 0.01), 0.05: (0.022, 0.05), 0.1: (0.07, 0.1)}  # and the rounds up to each
PILOT = 2.5  # first runs per constant, drawn from six times as many of the cheapest
OFFERED, MOST = 500, 40  # candidates of a round, and runs that it buys
SETTINGS = ("lr", "batch", "D", "N")
SIZES = ("N", "D", "U")
MIDDLE = {"lr": 2e-3, "batch": 256.0, "D": 2e10, "N": 4e8}
TASKS = {
    "lr_bsz": ("lr", "bsz", "data_size", "non_embedding_param_size", "lm_loss"),
    "data_constrained": ("params", "tokens", "unique_tokens", "loss"),
}
PUBLISHED = {"lr_bsz": (-0.65, 0.0, 0.22), "data_constrained": (0.73, 0.85, 0.86)}  # the best method of each budget


def logs(columns: tuple[Array, ...]) -> list[Array]:
    return [np.log(x / MIDDLE[name]) for name, x in zip(SETTINGS, columns, strict=True)]


def polynomial(c: Any, *columns: Array) -> Array:
    """Log loss is of second degree in the logarithms of learning rate, batch, D and N."""
    z = logs(columns)
    linear = c["c"] + sum(c[f"c{i}"] * z[i] for i in range(4))
    return np.exp(linear + sum(c[f"c{i}{j}"] * z[i] * z[j] for i in range(4) for j in range(i, 4)))


def bowl(c: Any, *columns: Array) -> Array:
    """Chinchilla's law times exp of a quadratic around the best learning rate and batch, which are power laws."""
    lr, batch, d, n = logs(columns)
    u, v = lr - (c["l"] + c["lN"] * n + c["lD"] * d), batch - (c["b"] + c["bN"] * n + c["bD"] * d)
    best = c["E"] + c["A"] * np.exp(-c["alpha"] * n) + c["B"] * np.exp(-c["beta"] * d)
    return best * np.exp(c["uu"] * u * u + c["uv"] * u * v + c["vv"] * v * v)


def softer(c: Any, N: Array, D: Array, U: Array) -> Array:
    """Chinchilla's law of tokens that are worth U^g D^(1-g)."""
    n, d, u = np.log(N / 3e8), np.log(D / 1e10), np.log(np.minimum(U, D) / 1e10)
    tokens = c["g"] * u + (1.0 - c["g"]) * d
    return c["E"] + c["A"] * np.exp(-c["alpha"] * n) + c["B"] * np.exp(-c["beta"] * tokens)


def additive(c: Any, N: Array, D: Array, U: Array) -> Array:
    """Chinchilla's law with a term of its own for the different tokens."""
    n, d, u = np.log(N / 3e8), np.log(D / 1e10), np.log(np.minimum(U, D) / 1e10)
    terms = c["A"] * np.exp(-c["alpha"] * n) + c["B"] * np.exp(-c["beta"] * d) + c["G"] * np.exp(-c["gamma"] * u)
    return c["E"] + terms


POLYNOMIAL = {"c": (0.5, 1.5)} | {f"c{i}": (-0.5, 0.5) for i in range(4)}
POLYNOMIAL |= {f"c{i}{j}": (-0.1, 0.1) for i in range(4) for j in range(i, 4)}
CHINCHILLA = {"E": (0.5, 2.5), "A": (0.01, 3.0), "alpha": (0.05, 1.0), "B": (0.01, 3.0), "beta": (0.05, 1.0)}
SOFTER = CHINCHILLA | {"g": (0.0, 1.0)}
ADDITIVE = CHINCHILLA | {"G": (0.001, 3.0), "gamma": (0.05, 2.0)}
BOWL = CHINCHILLA | {name: (-3.0, 3.0) for name in ("l", "b")}
BOWL |= {name: (-1.5, 1.5) for name in ("lN", "lD", "bN", "bD")}
BOWL |= {"uu": (5e-4, 0.1), "uv": (-0.1, 0.1), "vv": (5e-4, 0.1)}


def function(law: Any, bounds: Any, inputs: tuple[str, ...], objective: str = "huber") -> FunctionLaw:
    return FunctionLaw(law, bounds, inputs=inputs, tries=8, objective=objective)


LAWS: dict[str, dict[str, Any]] = {
    "lr_bsz": {
        "polynomial": lambda: [function(polynomial, POLYNOMIAL, SETTINGS)],
        "polynomial, squares": lambda: [function(polynomial, POLYNOMIAL, SETTINGS, "squares")],
        "bowl": lambda: [function(bowl, BOWL, SETTINGS)],
        "polynomial and bowl": lambda: [function(polynomial, POLYNOMIAL, SETTINGS), function(bowl, BOWL, SETTINGS)],
    },
    "data_constrained": {
        "repetition": lambda: [RepetitionLaw()],
        "repetition, tied": lambda: [RepetitionLaw(tied=True)],
        "softer": lambda: [function(softer, SOFTER, SIZES)],
        "softer, squares": lambda: [function(softer, SOFTER, SIZES, "squares")],
        "additive": lambda: [function(additive, ADDITIVE, SIZES)],
        "additive, squares": lambda: [function(additive, ADDITIVE, SIZES, "squares")],
        "repetition and additive": lambda: [RepetitionLaw(), function(additive, ADDITIVE, SIZES)],
    },
}  # fmt: skip
CHOSEN = {"lr_bsz": "polynomial and bowl", "data_constrained": "repetition, tied"}


class Task:
    """Runs to buy and runs to predict: inputs by name, log losses, FLOPs."""

    def __init__(self, folder: Path, name: str, choose: bool) -> None:
        self.name, self.inputs = name, SETTINGS if name == "lr_bsz" else SIZES
        train, test = (pd.read_csv(folder / f"{name}_{part}.csv")[[*TASKS[name]]] for part in ("train", "test"))
        if choose:
            # As the hidden runs are: the largest model of lr_bsz at its longest, and all of the largest N or D.
            ends = [np.sort(train[column].unique())[-2] <= train[column] for column in TASKS[name][:2]]
            C = self.flops(train)
            dear = C.max() == C if name == "lr_bsz" else np.logical_or(*ends)
            train, test = train[~dear], train[dear]
        self.train, self.test = train.reset_index(drop=True), test
        self.cost, self.target = self.flops(self.train), self.flops(self.test)

    def flops(self, table: pd.DataFrame) -> Array:
        size, tokens = {"lr_bsz": TASKS["lr_bsz"][3:1:-1]}.get(self.name, TASKS[self.name][:2])
        return 6.0 * table[size].to_numpy(float) * table[tokens].to_numpy(float)

    def columns(self, table: pd.DataFrame) -> dict[str, Array]:
        return {name: table.iloc[:, i].to_numpy(float) for i, name in enumerate(self.inputs)}

    def asked(self, name: str, rows: Array) -> Question:
        """The laws fitted to these rows, asked about the target region."""
        known: Any = self.train.iloc[rows]
        columns = [*self.columns(known).values(), known.iloc[:, -1].to_numpy(float)]
        laws = [law.fit(*columns) for law in LAWS[self.name][name]()]
        return Question.of(laws, self.target, correlation=0.0, points=self.columns(self.test), flops=self.cost[rows])

    def judged(self, question: Question) -> tuple[float, float, float]:
        """R2, the share of hidden runs inside their intervals, and the median width of these."""
        true, said = self.test.iloc[:, -1].to_numpy(float), question.forecast()
        r2 = 1.0 - ((true - said["value"]) ** 2).sum() / ((true - true.mean()) ** 2).sum()
        inside = (said["low"] <= true) & (true <= said["high"])
        return float(np.clip(r2, -1.0, 1.0)), float(inside.mean()), float(np.median(np.log(said["high"] / said["low"])))


def sequence(task: Task, law: str, seed: int, at_random: bool) -> list[tuple[float, float, float]]:
    """What is known at each checkpoint, the runs being bought in rounds."""
    generator, total = np.random.default_rng(seed), float(task.cost.sum())
    constants = max(len(each.names) for each in LAWS[task.name][law]())
    first = int(PILOT * constants)
    rows = generator.choice(np.argsort(task.cost)[: 6 * first], first, replace=False)
    found = []
    for rounds in CHECKPOINTS.values():
        for share in rounds:
            left = np.setdiff1d(np.arange(len(task.cost)), rows)
            room = share * total - float(task.cost[rows].sum())
            offered = generator.choice(left, min(OFFERED, len(left)), replace=False)
            if at_random:
                order = generator.permutation(left)
                rows = np.concatenate([rows, order[np.cumsum(task.cost[order]) <= room]])
            elif task.cost[offered].min() <= room:
                C, inputs = task.cost[offered], task.columns(task.train.iloc[offered])
                buyer = Buyer(task.asked(law, rows), Candidates(inputs, C, C, C, offered))
                rows = np.concatenate([rows, offered[buyer.buy(room, MOST).chosen]])
        try:
            found.append(task.judged(task.asked(law, rows)))
        except InputError as error:
            print(f"seed {seed}: {error}")
            found.append((-1.0, 0.0, np.inf))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--laws", nargs="+", help="by default those chosen, or all with --choose")
    parser.add_argument("--random", action="store_true", help="runs in random order beside the design")
    options = parser.parse_args()
    for name in options.tasks:
        task = Task(options.folder, name, options.choose)
        for law in options.laws or (LAWS[name] if options.choose else [CHOSEN[name]]):
            for at_random in (False, True) if options.random else (False,):
                started = time.perf_counter()
                every = np.array([sequence(task, law, seed, at_random) for seed in range(options.seeds)])
                said = [
                    f"{share:4.0%}: R2 {r2:5.2f} ± {spread:.2f}, inside {inside:4.0%}, width {width:.3f}"
                    for share, (r2, inside, _), spread, width in zip(
                        CHECKPOINTS, every.mean(axis=0), every[..., 0].std(axis=0), np.median(every[..., 2], axis=0),
                        strict=True,
                    )
                ]  # fmt: skip
                order = "random" if at_random else "design"
                print(
                    f"{name}, {law}, {order} | {' | '.join(said)} | {time.perf_counter() - started:.0f} s", flush=True
                )
        print(f"{name}, published, best method at each budget: {PUBLISHED[name]}")


if __name__ == "__main__":
    main()
