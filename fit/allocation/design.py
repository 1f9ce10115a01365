"""Which runs to buy next: the batch that most narrows what a law says of a large budget, within a budget of FLOPs.

Special here:
- Two things are asked of a target budget C: log L*(C), the loss at the optimum, and log N*(C), its size. Both widths
  are relative, and what is minimised is the mean of their logarithms: 1 % off either counts the same, whatever units or
  sizes they have. Each alone is a c-optimal design: the least variance c' Sigma c of one function of the constants.
- Sigma = (J' W J + prior)^-1 from slopes J of log loss by the constants. Locally optimal designs trust the very
  constants that they are to find, so every gain is an average over bootstrap draws of the law (a Bayesian design); the
  weak prior only keeps a draw finite in which the runs so far leave a direction open.
- Each pick knows of those before it, and of what it shares with them: a trunk's cost, and a trunk's error.
- Gain per FLOP alone buys many tiny runs. So batches are grown by gain / FLOPs^p for several p, each is improved by
  exchanges (one run for another as long as the criterion falls and the budget holds), and the best one is taken.
- A c-optimal design rests on hardly more points than there are constants, and so cannot see that the law's *form* is
  wrong. Therefore a share of each batch goes to the largest affordable runs near the optimum, nearest to the question:
  what the law foretold of them can be held against what they show.

Fedorov 1972, Theory of Optimal Experiments (exchanges); Kiefer and Wolfowitz 1959; Chaloner and Verdinelli 1995,
Bayesian experimental design: a review, section 4 (nonlinear models, c-optimality).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import Array, InputError, positive, same_length
from .design_beliefs import Beliefs, Linear, Question, Widths
from .isoloss import optimum

DRAWS = 32  # of the law's bootstrap, over which a gain is averaged
POWERS = (1.0, 0.7, 0.4, 0.0)  # of FLOPs in gain / FLOPs^p; 0 takes the largest gain that can be paid
PASSES = 6  # of exchanges over a batch, at most; few change anything after the third
CHECK_SHARE = 0.2  # of the budget, for runs that check the law's form
FIRST_CHECK = 0.5  # of the budget, that the first of them may cost where the share pays for none
CHECK_FLOPS = 0.5  # of the largest C, that each of them has at least
CHECK_SIZE = 2.0  # factor by which their N may be farther off N*(C) than that of the nearest such run
REFILL = 0.7  # the p by which what an exchange leaves over is spent


@dataclass(frozen=True)
class Candidates:
    """Runs that could be bought, arrays (k,): N parameters, D tokens, flops, branch_flops, size, and trunk.

    `flops` is what a run costs by itself given what is there, and `branch_flops` what is left of it where a longer run
    of the same `trunk` (a label) is bought too and makes its first steps; both are the same for a run that shares
    nothing, or that branches off what is there already. `size` is the run's whole training FLOPs, which its loss
    belongs to.
    """

    N: Array
    D: Array
    flops: Array
    branch_flops: Array
    size: Array
    trunk: np.ndarray

    def __post_init__(self) -> None:
        columns = {name: positive(name, getattr(self, name)) for name in ("N", "D", "flops", "branch_flops", "size")}
        same_length(**columns, trunk=self.trunk)

    def __len__(self) -> int:
        return len(self.N)

    def extra(self, chosen: list[int]) -> Array:
        """FLOPs (k,) that each candidate adds to a batch: the longest run of a trunk pays for it, the others branch."""
        cost, makes = self.flops.copy(), self._makes_trunk
        for trunk, longest in self._longest(chosen).items():
            reach, mates = self.D[longest], makes & (self.trunk == trunk)
            shorter, longer = mates & (reach > self.D), mates & (reach < self.D)
            cost[shorter] = self.branch_flops[shorter]
            cost[longer] -= self.flops[longest] - self.branch_flops[longest]
        return cost

    def cost(self, chosen: list[int]) -> float:
        """FLOPs of a batch."""
        longest = set(self._longest(chosen).values())
        pays = [self.flops[i] if i in longest else min(self.flops[i], self.branch_flops[i]) for i in chosen]
        return float(sum(pays))

    @property
    def _makes_trunk(self) -> np.ndarray:
        return self.flops > self.branch_flops

    def _longest(self, chosen: list[int]) -> dict[str, int]:
        """The run of each trunk in a batch that makes the steps which the others of its trunk begin with."""
        found: dict[str, int] = {}
        makes = self._makes_trunk
        for i in chosen:
            if makes[i] and (self.trunk[i] not in found or self.D[i] > self.D[found[self.trunk[i]]]):
                found[self.trunk[i]] = i
        return found


@dataclass(frozen=True)
class Design:
    """A batch, best buy first: `chosen` are positions among the candidates.

    Of each: `gains`, by how much it lowers the mean log width given those before it; `flops` that it adds; `check`,
    whether it is there to check the law's form. `before` and `after` are the widths without and with the batch.
    """

    chosen: list[int]
    gains: list[float]
    flops: list[float]
    check: list[bool]
    before: Widths
    after: Widths

    def narrowed(self, quantity: str, estimate: float, interval: tuple[float, float]) -> tuple[float, float]:
        """The interval of "loss" or "N" that is expected after the batch: each end's log distance from the estimate
        shrinks as the width does. It so begins from what the bootstrap says now, and not from a linearisation.
        """
        ratio = getattr(self.after, quantity) / getattr(self.before, quantity)
        low, high = (float(estimate * (end / estimate) ** ratio) for end in interval)
        return low, high


class Buyer:
    """Chooses batches for one question from one list of candidates."""

    def __init__(self, question: Question, pool: Candidates, draws: int = DRAWS, seed: int = 0) -> None:
        self.pool, self.question = pool, question
        linear = Linear(question, draws, seed)
        self.linear = linear
        shared = question.correlation * question.noise**2
        _, place = np.unique(pool.trunk.astype(str), return_inverse=True)
        labels = {str(name): i for name, i in zip(pool.trunk, place, strict=True)}
        for label, count in zip(*np.unique(question.trunk.astype(str), return_counts=True), strict=True):
            if count > 1:
                labels.setdefault(str(label), len(labels))
        self.place = place
        own = question.noise**2 - shared
        self.beliefs = Beliefs(linear.goals(question.target_flops), linear.prior, len(labels), shared, own)
        law = question.law
        slopes = linear.slopes(law.data_["N"], law.data_["D"])
        for row in np.flatnonzero(law.weight_ > 0):
            trunk = labels.get(str(question.trunk[row]), -1)
            self.beliefs.observe(slopes[:, row], trunk, float(law.weight_[row]))
        self.slopes = linear.slopes(pool.N, pool.D)
        self.before = self.beliefs.widths()

    def buy(self, budget: float, max_runs: int | None = None, check_share: float = CHECK_SHARE) -> Design:
        """The batch for so many FLOPs.

        Raises InputError where the budget is no positive number, or pays for no candidate (it names the cheapest).
        """
        (budget,) = positive("budget", [budget])
        if self.pool.flops.min() > budget:
            least = self.pool.flops.min()
            raise InputError(
                f"budget is {budget:.3g} FLOPs; the cheapest run costs {least:.3g}, so give at least that."
            )
        most = len(self.pool) if max_runs is None else max_runs
        locked = self._checks(budget, check_share, most)
        found = []
        for power in POWERS:
            chosen, beliefs = self._grow(list(locked), budget, most, power)
            found.append(self._exchange(chosen, beliefs, budget, most, len(locked)))
        chosen, _ = min(found, key=lambda item: item[1])
        return self._told(chosen, set(locked))

    def with_beliefs(self, chosen: list[int]) -> Beliefs:
        """What will be believed once these runs are done."""
        beliefs = self.beliefs.copy()
        for i in chosen:
            beliefs.observe(self.slopes[:, i], self.place[i])
        return beliefs

    def _checks(self, budget: float, share: float, most: int) -> list[int]:
        """Runs of nearly the largest C near its optimum, for `share` of the budget; one, where half of it pays that."""
        pool, data = self.pool, self.question.law.data_
        payable = pool.flops <= max(share, FIRST_CHECK) * budget
        if share <= 0 or not payable.any():
            return []
        reach = max(float(pool.size[payable].max()), float((6.0 * data["N"] * data["D"]).max()))
        draws = {name: values[:, None] for name, values in self.linear.constants.items()}
        best = np.median(optimum(pool.size, draws)[0], axis=0)
        off, large = np.abs(np.log(pool.N / best)), payable & (pool.size >= CHECK_FLOPS * reach)
        allowed = large & (off <= off[large].min(initial=np.inf) + np.log(CHECK_SIZE))
        chosen: list[int] = []
        beliefs = self.beliefs.copy()
        while len(chosen) < most:
            part = share if chosen else max(share, FIRST_CHECK)
            fits = allowed & (pool.extra(chosen) <= part * budget - pool.cost(chosen))
            if not fits.any():
                break
            pick = int(np.where(fits, beliefs.gains(self.slopes, self.place), -np.inf).argmax())
            chosen.append(pick)
            allowed[pick] = False
            beliefs.observe(self.slopes[:, pick], self.place[pick])
        return chosen

    def _grow(self, chosen: list[int], budget: float, most: int, power: float) -> tuple[list[int], Beliefs]:
        beliefs = self.with_beliefs(chosen)
        spent = self.pool.cost(chosen)
        free = np.ones(len(self.pool), dtype=bool)
        free[chosen] = False
        while len(chosen) < most:
            cost = self.pool.extra(chosen)
            fits = free & (cost <= budget - spent)
            if not fits.any():
                break
            worth = beliefs.gains(self.slopes, self.place) / np.maximum(cost, 1e-9 * budget) ** power
            pick = int(np.where(fits, worth, -np.inf).argmax())
            chosen.append(pick)
            free[pick] = False
            spent += float(cost[pick])
            beliefs.observe(self.slopes[:, pick], self.place[pick])
        return chosen, beliefs

    def _exchange(
        self, chosen: list[int], beliefs: Beliefs, budget: float, most: int, locked: int
    ) -> tuple[list[int], float]:
        """Fedorov's exchanges: take a run back, buy the best that can then be paid, and whatever else fits."""
        value = beliefs.criterion()
        for _ in range(PASSES):
            improved = False
            for place in range(len(chosen) - 1, locked - 1, -1):
                out = chosen[place]
                rest = chosen[:place] + chosen[place + 1 :]
                trial = beliefs.copy()
                trial.observe(self.slopes[:, out], self.place[out], -1.0)
                cost = self.pool.extra(rest)
                fits = cost <= budget - self.pool.cost(rest)
                fits[rest] = False
                gains = np.where(fits, trial.gains(self.slopes, self.place), -np.inf)
                pick = int(gains.argmax())
                if pick == out or not np.isfinite(gains[pick]) or gains[pick] <= gains[out] + 1e-6:
                    continue
                trial.observe(self.slopes[:, pick], self.place[pick])
                rest.append(pick)
                if len(rest) < most:
                    rest, trial = self._grow(rest, budget, most, REFILL)
                chosen, beliefs, value, improved = rest, trial, trial.criterion(), True
            if not improved:
                break
        return chosen, value

    def _told(self, chosen: list[int], locked: set[int]) -> Design:
        """The batch in order of gain per FLOP, each run given those before it."""
        beliefs, left = self.beliefs.copy(), list(chosen)
        order: list[int] = []
        gains, flops = [], []
        while left:
            cost = self.pool.extra(order)[left]
            worth = beliefs.gains(self.slopes[:, left], self.place[left])
            best = int((worth / np.maximum(cost, 1e-9 * cost.max())).argmax())
            gains.append(float(worth[best]))
            flops.append(float(cost[best]))
            order.append(left.pop(best))
            beliefs.observe(self.slopes[:, order[-1]], self.place[order[-1]])
        return Design(order, gains, flops, [i in locked for i in order], self.before, beliefs.widths())
