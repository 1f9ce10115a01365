"""Suggested runs against the isoFLOP grid and a random one, at equal FLOPs: interval and error at a far target.

    python benchmarks/suggest.py                          50 simulated laws, target 100 times the largest budget
    python benchmarks/suggest.py --times 1000 --errors independent --runs 30 --smallest 1
    python benchmarks/suggest.py --published DIR          Epoch's reconstruction of Hoffmann et al., row by row

Special here:
- A law is drawn around published ones; runs show it times exp(noise), the noise of one run being 0.2 to 1 % and the
  runs of one trunk (one size, one seed) sharing half of its variance, or with `--errors independent` none.
- All designs pay alike: 6 N D, and 20 % of that for a run that branches off a longer one of its trunk. All have the
  same total, the same cap on the C of a run (`--cap` lifts it for those that choose), the same mixture of forms.
  The random one draws from the same candidates as the suggested one. None is told the truth: the suggested one begins
  with a cheap grid around where published laws put the optimum, and designs two more rounds from its own fits.
- `--bend` adds so much to log loss for every squared decade below the largest budget: a law of the wrong form.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from isoflop.fit import ChinchillaLaw, FormMixture, published_runs
from isoflop.fit.allocation.allocation import optimum
from isoflop.fit.allocation.design import Buyer, Candidates, Question
from isoflop.fit.uncertainty import resampled_together

Array = Any
LARGEST = 3e21  # FLOPs of the isoFLOP grid's largest budget
EXPECTED = {"E": 1.82, "A": 482.0, "B": 2085.0, "alpha": 0.348, "beta": 0.366}  # Besiroglu et al. 2024
GAP = 16.0 ** (1 / 5)  # between two sizes of an isoFLOP budget
SIZES = 1e9 * GAP ** (np.arange(-24, 25) / 2)  # what every design chooses from
DECAY = 0.2  # share of a run that a branch makes itself
ROUNDS = (0.2, 0.3, 0.5)  # of the FLOPs: the first grid, and two rounds of suggested runs


def draw_law(generator: np.random.Generator) -> dict[str, float]:
    """Constants around the published ones, their terms drawn in the middle of the runs."""
    alpha, beta = generator.normal(0.35, 0.03), generator.normal(0.365, 0.03)
    a, b = 0.356 * np.exp(generator.normal(0, 0.2)), 0.354 * np.exp(generator.normal(0, 0.2))
    A, B = a * 1e9**alpha, b * 2e10**beta
    return {"E": generator.uniform(1.5, 2.0), "A": A, "B": B, "alpha": alpha, "beta": beta}


class World:
    """Shows the noisy loss of runs (n, 3): N, D, seed."""

    def __init__(self, law: dict[str, float], noise: float, shared: float, bend: float, seed: list[int]) -> None:
        self.law, self.noise, self.shared, self.bend = law, noise, shared, bend
        self.generator, self.trunks = np.random.default_rng(seed), dict[str, float]()

    def train(self, runs: Array) -> Array:
        N, D = runs[:, 0], runs[:, 1]
        common = [self.trunks.setdefault(trunk, self.generator.normal()) for trunk in trunks(runs)]
        own = self.generator.normal(size=len(runs))
        error = self.noise * (np.sqrt(self.shared) * np.array(common) + np.sqrt(1 - self.shared) * own)
        error += self.bend * np.minimum(np.log10(6 * N * D / LARGEST), 0) ** 2
        return ChinchillaLaw.evaluate(self.law, N, D) * np.exp(error)


def trunks(runs: Array) -> list[str]:
    return [f"{N:.6g}/{seed:g}" for N, _, seed in runs]


def candidates(runs: Array) -> Candidates:
    C = 6 * runs[:, 0] * runs[:, 1]
    inputs = {"N": runs[:, 0], "D": runs[:, 1]}
    return Candidates(inputs, C, DECAY * C, C, np.array(trunks(runs)))


def cost(runs: Array) -> float:
    return candidates(runs).cost(list(range(len(runs))))


def profile(C: float, sizes: int, gap: float) -> list[tuple[float, float, float]]:
    """An isoFLOP budget: sizes of the lattice around the expected optimum."""
    middle = np.log(optimum(C, EXPECTED)[0] / 1e9) / np.log(GAP)
    middle = (np.floor(middle) + 0.5) if sizes % 2 == 0 else np.round(middle)
    wanted = 1e9 * GAP ** (middle + gap * (np.arange(sizes) - (sizes - 1) / 2))
    found = [SIZES[np.abs(np.log(SIZES / N)).argmin()] for N in wanted]
    return [(N, C / (6 * N), 0) for N in found]


def isoflop_grid(span: float) -> Array:
    """5 budgets of 6 sizes."""
    return np.array([run for C in LARGEST * np.geomspace(1 / span, 1, 5) for run in profile(C, 6, 1.0)])


def region(least: float, most: float, ratio: float, seeds: tuple[int, ...]) -> Array:
    """Every candidate: C from `least` to `most`, eight a decade, and D/N within `ratio` of the expected optimum's."""
    runs = []
    for C in np.geomspace(most, least, round(8 * np.log10(most / least)) + 1):
        N0, D0, _ = optimum(C, EXPECTED)
        for N in SIZES:
            if abs(np.log(C / (6 * N * N) / (D0 / N0))) <= np.log(ratio) + 1e-3:
                runs += [(N, C / (6 * N), seed) for seed in seeds]
    return np.array(runs)


def fitted(runs: Array, loss: Array) -> FormMixture:
    """As a sweep fits: trunks are resampled together where they are enough."""
    groups = resampled_together(np.array(trunks(runs)), np.arange(len(runs)).astype(str), 5)
    return FormMixture().fit(runs[:, 0], runs[:, 1], loss, groups=groups)


def asked(runs: Array, loss: Array, target: float, trunk: Any = None) -> Question:
    mixture = fitted(runs, loss)
    return Question.of([*mixture.laws_.values()], target, trunk, shares=[*mixture.weights_.values()])


def suggested(world: World, total: float, pool: Callable[..., Array], target: float, most: int) -> tuple[Array, Array]:
    runs = first_grid(ROUNDS[0] * total)
    loss = world.train(runs)
    for number, share in enumerate(ROUNDS[1:], 1):
        last = number == len(ROUNDS) - 1
        left = total - cost(runs)
        question = asked(runs, loss, target, trunks(runs))
        offered = pool(
            seeds=(2 * number, 2 * number + 1)
        )  # other seeds than before: what was trained has no trunk left
        room = most - len(runs)
        part = room if last else round(room * share / sum(ROUNDS[number:]))
        batch = Buyer(question, candidates(offered)).buy(left if last else min(left, share * total), part)
        new = offered[batch.chosen]
        runs, loss = np.vstack([runs, new]), np.concatenate([loss, world.train(new)])
    return runs, loss


def first_grid(budget: float) -> Array:
    """Three budgets, each a third of the next, of four sizes: as large as `budget` pays for."""
    for top in LARGEST * np.geomspace(1, 1e-4, 81):
        runs = np.array([run for C in (top, top / 3, top / 9) for run in profile(C, 4, 1.5)])
        if cost(runs) <= budget:
            return runs
    raise ValueError(f"{budget} FLOPs pay for no grid")


def scattered(
    world: World, total: float, pool: Callable[..., Array], most: int, seed: list[int]
) -> tuple[Array, Array]:
    """Candidates in random order, each as long as it can be paid."""
    offered, chosen = pool(seeds=(0,)), list[int]()
    offer = candidates(offered)
    for i in np.random.default_rng(seed).permutation(len(offered)):
        if len(chosen) < most and offer.cost([*chosen, i]) <= total:
            chosen.append(int(i))
    return offered[chosen], world.train(offered[chosen])


def judged(runs: Array, loss: Array, law: dict[str, float], target: float) -> dict[str, float]:
    """Widths of the 95 % intervals (ratio of their ends, as a logarithm), errors, and whether they hold the truth."""
    found = fitted(runs, loss).optimal(target)
    N, _, L = (float(value) for value in optimum(target, law))
    (l0, l1), (n0, n1) = found.interval("loss")[0], found.interval("N")[0]
    with np.errstate(divide="ignore"):
        return {
            "loss width": np.log(l1 / l0), "N width": np.log(n1 / n0), "loss error": abs(np.log(found.loss[0] / L)),
            "N error": abs(np.log(found.N[0] / N)), "loss held": l0 <= L <= l1, "N held": n0 <= N <= n1,
            "runs": len(runs), "flops": cost(runs),
        }  # fmt: skip


def simulate(options: argparse.Namespace) -> None:
    grid = isoflop_grid(options.span)
    total, target = cost(grid), options.times * LARGEST
    shared = 0.0 if options.errors == "independent" else 0.5

    def pool(seeds: tuple[int, ...]) -> Array:
        return region(options.smallest * LARGEST / options.span, options.cap * LARGEST, options.ratio, seeds)

    rows: dict[str, list[dict[str, float]]] = {"isoflop": [], "suggested": [], "random": []}
    for i in range(options.laws):
        generator = np.random.default_rng(i)
        law, noise = draw_law(generator), float(np.exp(generator.uniform(np.log(0.002), np.log(0.01))))
        worlds = [World(law, noise, shared, options.bend, [i, j]) for j in range(3)]
        # The truth of a bent law is its value at the largest budget and beyond, where it does not bend.
        rows["isoflop"].append(judged(grid, worlds[0].train(grid), law, target))
        rows["suggested"].append(judged(*suggested(worlds[1], total, pool, target, options.runs), law, target))
        rows["random"].append(judged(*scattered(worlds[2], total, pool, options.runs, [i, 9]), law, target))
    print(f"{options.laws} laws, target {options.times:g} x the largest budget; {vars(options)}")
    for name, found in rows.items():
        column = {key: np.array([row[key] for row in found], dtype=float) for key in found[0]}
        base = {key: np.array([row[key] for row in rows["isoflop"]]) for key in ("loss width", "N width")}
        ratio = {key: column[key] / base[key] for key in base}
        both = np.sqrt(ratio["loss width"] * ratio["N width"])
        print(
            f"{name:10} {column['runs'].mean():4.0f} runs, {column['flops'].mean() / total:4.0%} of the FLOPs"
            f" | width: loss {np.median(column['loss width']):.4f} N {np.median(column['N width']):.2f}"
            f" | over isoFLOP's: loss {np.median(ratio['loss width']):.2f} N {np.median(ratio['N width']):.2f}"
            f" both {np.median(both):.2f}"
            f" | median error: loss {np.median(column['loss error']):.4f} N {np.median(column['N error']):.3f}"
            f" | covers: loss {column['loss held'].mean():.0%} N {column['N held'].mean():.0%}",
            flush=True,
        )


# Published runs.

SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the FLOPs of the table, at which the interval is looked at


def reveal(options: argparse.Namespace) -> None:
    """Widths at the target after each share of the table's FLOPs, rows in suggested, isoFLOP and random order."""
    table = published_runs("epoch", drop_worst=5, folder=options.published)
    target = options.times * float(table.flops.max())
    runs = np.stack([table.N, table.D, np.arange(len(table))], 1)  # no trunks: each row has a seed of its own
    spent = table.flops / table.flops.sum()
    rising = np.argsort(table.flops, kind="stable")
    start = rising[: int(np.searchsorted(np.cumsum(spent[rising]), options.start)) + 1]

    def widths(rows: Array) -> tuple[float, float]:
        found = fitted(runs[rows], table.loss[rows]).optimal(target)
        (l0, l1), (n0, n1) = found.interval("loss")[0], found.interval("N")[0]
        return float(np.log(l1 / l0)), float(np.log(n1 / n0))

    def in_order(order: Array) -> list[tuple[float, float]]:
        rest = order[~np.isin(order, start)]
        every = np.concatenate([start, rest])
        return [widths(every[np.cumsum(spent[every]) <= share + 1e-9]) for share in SHARES]

    def by_suggestion() -> list[tuple[float, float]]:
        known, found = start, []
        for share in SHARES:
            left = np.setdiff1d(np.arange(len(table)), known)
            room = share + 1e-9 - spent[known].sum()
            if len(left) and spent[left].min() <= room:
                C = table.flops[left]
                question = asked(runs[known], table.loss[known], target)
                offer = Candidates({"N": table.N[left], "D": table.D[left]}, C, C, C, left)
                known = np.concatenate([known, left[Buyer(question, offer).buy(room * table.flops.sum()).chosen]])
            found.append(widths(known))
        return found

    orders = [np.random.default_rng(seed).permutation(len(table)) for seed in range(10)]
    print(f"{len(table)} rows, {len(start)} known at first; widths of log loss and log N at {target:.3g} FLOPs")
    print("share of FLOPs", *(f"{share:14.0%}" for share in SHARES))
    scattered = np.median([in_order(order) for order in orders], axis=0)
    for name, found in (("suggested", by_suggestion()), ("isoFLOP", in_order(rising)), ("random (median)", scattered)):
        print(f"{name:15}", *(f"{loss:7.4f} {size:6.2f}" for loss, size in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", type=int, default=50)
    parser.add_argument("--times", type=float, default=100.0, help="target over the largest budget")
    parser.add_argument("--span", type=float, default=50.0, help="largest over smallest budget of the isoFLOP grid")
    parser.add_argument("--errors", choices=("trunk", "independent"), default="trunk")
    parser.add_argument("--runs", type=int, default=45, help="runs that suggested and random designs may have")
    parser.add_argument("--smallest", type=float, default=0.1, help="their least C, over the grid's smallest budget")
    parser.add_argument("--cap", type=float, default=1.0, help="their largest C, over the grid's largest budget")
    parser.add_argument("--ratio", type=float, default=16.0, help="factor by which their D/N may be off the expected")
    parser.add_argument("--bend", type=float, default=0.0)
    parser.add_argument("--published", help="folder that holds epoch/svg_extracted_data.csv")
    parser.add_argument(
        "--start", type=float, default=0.01, help="published: share of the FLOPs that is known at first"
    )
    options = parser.parse_args()
    started = time.perf_counter()
    (reveal if options.published else simulate)(options)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
