"""Item response: each item gains from a run's latent ability, which is a line in log compute or in the loss.

  margins      margin_ri = discrimination_i (ability_r - difficulty_i) + noise_i, right if above zero (Samejima 1973)
  right/wrong  P(right) = chance + (1 - chance) Phi(discrimination_i (ability_r - difficulty_i)) (Birnbaum 1968)

Both are solved on a grid of items. Its prior is learnt from all items (Kiefer and Wolfowitz 1956), so an item that all
runs answer alike is shrunk to what the others allow, and an ability that items hardly determine is shrunk to the line.
Abilities have mean 0 and variance 1 over the fitted runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import scipy  # its parts are imported at first use: scipy.special takes 0.2 s
from numpy.typing import ArrayLike

from ..errors import Array, Column, InputError, check_level, floats, one_of, positive
from ..laws.law import Estimator
from ..uncertainty import excess_scatter

if TYPE_CHECKING:
    import pandas as pd

MIN_RUNS, MIN_ITEMS = 4, 2  # a line of abilities with two degrees of freedom; two items to tell ability from difficulty
GRID = (33, 22)  # items of different level, and of different slope; a finer grid changed no figure
ROUNDS, STEPS = 8, 5  # most solutions of the abilities, and steps of the prior in each
LEAST = 0.7  # smallest scatter of abilities, in units of their errors; chosen on simulated items
SETTLED = 1e-3  # change of the abilities that ends them
SMOOTH = 60.0  # items that the grid's first prior counts as; chosen on simulated items
# Right/wrong answers say little about one item: difficulties and log discriminations before any answer is seen.
DIFFICULTIES, DISCRIMINATIONS, SPREAD = (-5.0, 6.0), (0.1, 3.0), (2.0, 0.7)
TAILS = (np.arange(101) + 0.5) / 101  # levels of the quantiles that stand for a distribution


class ItemLaw(Estimator):
    """A two-parameter item response law, which predicts the accuracy of larger runs on the same items.

    After `fit`: ability_ and ability_se_ (runs,); items_, a DataFrame with difficulty (the ability at which a margin is
    zero, or half of what is not guessed is right), its 95 % interval low and high, and discrimination.

    Parameters
    ----------
    along : {"flops", "loss"}
        What abilities are a line in: the logarithm of compute, or the loss.
    """

    form = "item"
    output = "acc"

    def __init__(self, along: str = "flops") -> None:
        one_of("along", along, ("flops", "loss"))
        self.along, self.inputs = along, (along,)

    def __repr__(self) -> str:
        fitted = f", {len(self.ability_)} runs and {len(self.names_)} items" if self.__sklearn_is_fitted__() else ""
        return f"ItemLaw(along={self.along!r}){fitted}"

    def fit(self, responses: Any, at: Column = None, chance: float = 0.0) -> Self:
        """Fit to responses (runs, items) at each run's FLOPs or loss (runs,).

        Responses are margins: log-likelihood of the right choice minus that of the likeliest wrong one; or, if all are
        0 or 1, wrong and right answers, a share `chance` of which is guessed.

        Raises InputError for one run or item, missing responses, and answers that are all right or all wrong.
        """
        y, x = floats(responses), self._position(at)
        self._check_responses(y, x, at, chance)
        self.names_ = np.asarray(getattr(responses, "columns", np.arange(y.shape[1])))
        self._binary = bool(np.isin(y, (0.0, 1.0)).all())
        self.chance_ = float(chance) if self._binary else 0.0
        self._middle, self._spread, runs = float(x.mean()), float(x.std()), len(x)
        u = (x - self._middle) / self._spread
        self._scale, weight = self._grid(y, u)
        first, ability, scatter = weight.copy(), u, 1.0
        y = y / self._scale
        for _ in range(ROUNDS):
            likelihood = self._likelihood(y, ability)
            for _ in range(STEPS):
                counts = weight * (likelihood.T @ (1.0 / (likelihood @ weight)))
                weight = (counts + SMOOTH * first) / (y.shape[1] + SMOOTH)
            self._weight = likelihood * weight
            self._weight /= self._weight.sum(axis=1, keepdims=True)
            before, (ability, error) = ability, self._abilities(y, ability)
            line = np.polyval(np.polyfit(u, ability, 1, w=1.0 / np.hypot(error, scatter)), u)
            scatter = max(excess_scatter((ability - line) ** 2, error**2, runs - 2), LEAST * float(np.median(error)))
            share = scatter**2 / (scatter**2 + error**2)  # the rest is shrinkage to the line
            ability = line + share * (ability - line)
            spread = float(ability.std())
            ability = (ability - ability.mean()) / spread
            if np.abs(ability - before).max() < SETTLED:
                break
        self.ability_, self.ability_se_ = ability, np.sqrt(share) * error / spread
        gain, middle = np.polyfit(u, ability, 1).tolist()
        # Abilities err in a run's distance from the line, and in the line: without the latter 85 % to 93 % were inside.
        squares = ((ability - middle - gain * u) ** 2 + 2.0 * self.ability_se_**2).sum()
        self.constants_ = {"gain": gain, "middle": middle, "scatter": float(np.sqrt(squares / (runs - 2)))}
        return self

    def _position(self, at: Column) -> Array:
        x = positive(self.along, np.atleast_1d(floats(at)))
        return -x if self.along == "loss" else np.log(x)

    def _check_responses(self, y: Array, x: Array, at: Column, chance: float) -> None:
        if y.ndim != 2 or len(y) != len(x):
            raise InputError(f"responses have shape {y.shape}; {len(x)} runs need a table (runs, items).")
        for size, required, what in ((len(y), MIN_RUNS, "run"), (y.shape[1], MIN_ITEMS, "item")):
            if size < required:
                have = f"{size} {what}{'s' * (size != 1)}"
                raise InputError(f"responses have {have}; an item law needs at least {required}.")
        if not np.isfinite(y).all():
            run, item = np.argwhere(~np.isfinite(y))[0]
            raise InputError(f"run {run} has no response to item {item}; all runs must answer the same items.")
        if (y > 0).all() or not (y > 0).any():
            raise InputError(f"every answer is {'right' if y[0, 0] > 0 else 'wrong'}; an item law needs both kinds.")
        if not 0 <= chance < 1:
            raise InputError(f"chance is {chance}; it must be at least 0 and below 1.")
        if np.ptp(x) < 1e-9 * np.abs(x).max():
            first = np.ravel(floats(at))[0]
            raise InputError(f"{self.along} is {first:g} in every run; an item law needs different values.")

    def _grid(self, y: Array, u: Array) -> tuple[Array, Array]:
        """Choose the items of the grid; return the scale of each item's responses and a first prior of the grid."""
        if self._binary:
            axes = [np.linspace(*DIFFICULTIES, num=GRID[0]), np.geomspace(*DISCRIMINATIONS, num=GRID[1])]
            difficulty, self._slope = (values.ravel() for values in np.meshgrid(*axes, indexing="ij"))
            self._level, scale = -difficulty * self._slope, np.ones(y.shape[1])
            square = ((difficulty - 0.5) / SPREAD[0]) ** 2 + ((np.log(self._slope) + 0.5) / SPREAD[1]) ** 2
        else:
            level, slope = y.mean(axis=0), u @ y / len(u)
            noise, freedom = ((y - level - np.outer(u, slope)) ** 2).sum(axis=0) / (len(u) - 2), len(u) - 2
            usual = max(float(np.median(noise)), 1e-12 * float(np.abs(y).max()) ** 2)
            noise = np.maximum(noise, 0.01 * usual)
            # Variances are shrunk to the usual one (Smyth 2004), else items that fit the line by luck weigh most.
            excess = float(np.log(noise).var()) - float(scipy.special.polygamma(1, 0.5 * freedom))
            prior = 1.0 + 2.0 / max(excess, 1e-3)  # its degrees of freedom, nearly
            scale = np.sqrt((prior * usual + freedom * noise) / (prior + freedom))
            self._prior = prior, prior * usual / scale[:, None] ** 2
            both = np.stack([level, slope]) / scale
            ends = np.quantile(both, [0.002, 0.998], axis=1) + np.array([[-0.3], [0.3]])
            axes = [np.linspace(ends[0, k], ends[1, k], GRID[k]) for k in range(2)]
            self._level, self._slope = grid = [values.ravel() for values in np.meshgrid(*axes, indexing="ij")]
            square = (((np.stack(grid).T - both.mean(axis=1)) / (both.std(axis=1) + 0.1)) ** 2).sum(axis=1)
        first = np.exp(-0.5 * square)
        return scale, first / first.sum()

    def _likelihood(self, y: Array, ability: Array) -> Array:
        """Return the likelihood of each item's responses at the grid's items, (items, grid), up to a factor."""
        argument = self._argument(ability)
        if self._binary:
            p = self._right(argument)
            log = y.T @ np.log(p) + (1 - y).T @ np.log1p(-p)
        else:  # Student's, because the noise is estimated
            square = (y**2).sum(axis=0)[:, None] - 2 * y.T @ argument + (argument**2).sum(axis=0)
            log = -0.5 * (len(y) + self._prior[0]) * np.log(self._prior[1] + np.maximum(square, 0.0))
        return np.asarray(np.exp(log - log.max(axis=1, keepdims=True)))

    def _argument(self, ability: ArrayLike) -> Array:
        return np.asarray(self._level + np.atleast_1d(floats(ability))[..., None] * self._slope)

    def _right(self, argument: Array) -> Array:
        return np.clip(self.chance_ + (1 - self.chance_) * scipy.special.ndtr(argument), 1e-12, 1 - 1e-12)

    def _abilities(self, y: Array, ability: Array) -> tuple[Array, Array]:
        """Return abilities after one step of Newton's method, and their errors, those of the items included."""
        argument = self._argument(ability)
        if self._binary:
            p, rise = self._right(argument), self._rise(argument)
            gain = rise / (p * (1 - p))
            slopes = y * (gain @ self._weight.T) - (p * gain) @ self._weight.T  # of the log likelihood, by item
        else:
            slopes = y * (self._weight @ self._slope) - (argument * self._slope) @ self._weight.T
        variance = 1.0 / np.maximum((slopes**2).sum(axis=1), 1e-12)
        return ability + variance * slopes.sum(axis=1), np.sqrt(variance)

    def _rise(self, argument: Array) -> Array:
        return (1 - self.chance_) * np.exp(-0.5 * argument**2) / np.sqrt(2 * np.pi) * self._slope

    @property
    def items_(self) -> pd.DataFrame:
        """Return a DataFrame of the items, see the class."""
        import pandas as pd

        self._fitted()
        difficulty = -self._level / np.where(np.abs(self._slope) < 1e-9, 1e-9, self._slope)
        order = np.argsort(difficulty)
        below = np.cumsum(self._weight[:, order], axis=1)
        levels = {"difficulty": 0.5, "low": 0.025, "high": 0.975}
        places = {name: np.minimum((below < level).sum(axis=1), len(order) - 1) for name, level in levels.items()}
        columns = {name: difficulty[order][place] for name, place in places.items()}
        columns["discrimination"] = self._weight @ self._slope * self._scale
        return pd.DataFrame(columns, index=pd.Index(self.names_, name="item"))

    # Answers.

    def predict_items(self, ability: ArrayLike) -> Array:
        """Return each item's probability of a right answer, (abilities, items), averaged over its uncertainty."""
        self._fitted()
        return np.asarray(self._right(self._argument(ability)) @ self._weight.T)

    def predict_ability(self, at: ArrayLike) -> Array:
        """Return the line's ability at FLOPs or losses (points,)."""
        self._fitted()
        u = (self._position(at) - self._middle) / self._spread
        return np.asarray(self.constants_["middle"] + self.constants_["gain"] * u)

    def predict(self, at: ArrayLike) -> Array:
        """Return the accuracy at FLOPs or losses (points,)."""
        return np.asarray(self._right(self._argument(self.predict_ability(at))) @ self._weight.mean(axis=0))

    def forecast(self, at: ArrayLike, level: float = 0.95) -> pd.DataFrame:
        """Return acc, low and high of a new run on the fitted items, at FLOPs or losses (points,)."""
        import pandas as pd

        check_level(level)
        middle, runs = self.predict_ability(at), len(self.ability_)
        u = (self._position(at) - self._middle) / self._spread
        wide = self.constants_["scatter"] * np.sqrt(1 + (1 + u**2) / runs)  # of a new run about the line
        abilities = middle[:, None] + np.outer(wide, scipy.special.stdtrit(runs - 2, TAILS))
        mean = self._right(self._argument(abilities)) @ self._weight.mean(axis=0)
        p = self.predict_items(middle)
        luck = np.sqrt((p * (1 - p)).sum(axis=1)) / p.shape[1]
        drawn = mean[:, :, None] + luck[:, None, None] * scipy.special.ndtri(TAILS)
        low, high = np.quantile(drawn.reshape(len(u), -1), [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=1)
        return pd.DataFrame({"acc": p.mean(axis=1), "low": np.maximum(low, 0.0), "high": np.minimum(high, 1.0)})

    def information(self, ability: ArrayLike) -> Array:
        """Return Fisher's information of each item's right or wrong answer about an ability, (abilities, items)."""
        self._fitted()
        argument = self._argument(ability)
        p = self._right(argument)
        return np.asarray((self._rise(argument) ** 2 / (p * (1 - p))) @ self._weight.T)

    def subset(self, k: int, ability: ArrayLike | None = None) -> np.ndarray:
        """Return the names of the k items that inform most about `ability`, by default about the fitted runs'."""
        self._fitted()
        if not 1 <= k <= len(self.names_):
            raise InputError(f"k is {k}; it must be from 1 to {len(self.names_)}, the number of items.")
        total = self.information(self.ability_ if ability is None else ability).sum(axis=0)
        return np.asarray(self.names_[np.argsort(-total, kind="stable")[:k]])
