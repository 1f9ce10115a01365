"""The answer to a question of allocation: N, D, loss and what else was asked, with intervals from the draws of a law.

Special here: a question is a pure function of a law's constants. `answer` asks it of the fitted constants and of every
bootstrap draw, in one call each, so that whatever is computed has an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, InputError, positive, same_length
from ..uncertainty import percentile_interval

Constants = Mapping[str, Any]
TITLES = {"flops": "C", "ratio": "D/N"}


@dataclass(frozen=True)
class Optimum:
    """Answers at `targets` questions: arrays (targets,), and the same under each bootstrap draw.

    flops training FLOPs, N parameters, D tokens, loss; `more` holds what else the question has (epochs, overhead,
    dollars, ...). `draws` maps every quantity to (targets, resamples), and is empty before a bootstrap. `level` is that
    of `intervals` and of what is printed.
    """

    flops: Array
    N: Array
    D: Array
    loss: Array
    more: Mapping[str, Array] = field(default_factory=dict)
    draws: Mapping[str, Array] = field(default_factory=dict)
    level: float = 0.95

    @property
    def ratio(self) -> Array:
        """Tokens per parameter, D / N."""
        return divide(self.D, self.N)

    @property
    def values(self) -> dict[str, Array]:
        """Every quantity by name, each (targets,)."""
        return {"flops": self.flops, "N": self.N, "D": self.D, "ratio": self.ratio, "loss": self.loss, **self.more}

    def interval(self, name: str, level: float | None = None) -> Array:
        """Percentile interval of a quantity, of shape (targets, 2); NaN before a bootstrap."""
        if name not in self.values:
            raise InputError(f"interval of {name!r} is not known; choose one of {', '.join(self.values)}.")
        if name not in self.draws:
            return np.full((len(self.N), 2), np.nan)
        return np.array([percentile_interval(row, level or self.level) for row in self.draws[name]])

    @property
    def intervals(self) -> dict[str, Array]:
        """Quantity -> (targets, 2) at `level`; empty before a bootstrap."""
        return {name: self.interval(name) for name in self.draws}

    def rows(self) -> list[dict[str, str]]:
        """What is printed: a row a target, each quantity as text with its interval."""
        from ..formatting import amount, count, scientific

        says = {"N": count, "D": count, "loss": lambda v: f"{v:.4f}", "ratio": amount}
        found, intervals = self.values, self.intervals

        def cell(name: str, i: int) -> str:
            say = says.get(name, scientific if "flops" in name else amount)
            said = _bounded(found[name][i], say)
            low, high = intervals.get(name, np.full((i + 1, 2), np.nan))[i]
            if np.isnan(low) or high <= low * (1 + 1e-9):  # what was asked for is the same in every draw
                return said
            return f"{said} [{_bounded(low, say)}, {_bounded(high, say)}]"

        return [{name: cell(name, i) for name in found} for i in range(len(self.N))]

    def __repr__(self) -> str:
        return "\n".join(
            ", ".join(f"{TITLES.get(name, name)} = {said}" for name, said in row.items()) for row in self.rows()
        )

    def _repr_html_(self) -> str:
        from ..formatting import text

        rows = self.rows()
        head = "".join(f"<th>{text(TITLES.get(name, name))}</th>" for name in self.values)
        body = "".join("<tr>" + "".join(f"<td>{text(said)}</td>" for said in row.values()) + "</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def answer(law: Any, solve: Callable[[Constants], dict[str, Array]], level: float) -> Optimum:
    """`solve` under the law's constants and under its draws; it takes (r,) constants and gives (targets, r) arrays."""
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; it must lie between 0 and 1, as 0.95 does.")
    if getattr(law, "constants_", None) is None:
        raise InputError(f"this {type(law).__name__} is not fitted; call fit first.")

    def every(constants: Constants) -> dict[str, Array]:
        found = solve({name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in constants.items()})
        shape = np.broadcast_shapes(*(v.shape for v in found.values()))
        return {name: np.broadcast_to(v, shape) for name, v in found.items()}

    values = {name: v[:, 0].copy() for name, v in every(law.constants_).items()}
    draws = {} if law.draws_ is None else every(law.draws_)
    if draws:
        draws["ratio"] = divide(draws["D"], draws["N"])
    own = {name: values.pop(name) for name in ("flops", "N", "D", "loss")}
    return Optimum(**own, more=values, draws=draws, level=level)


def aligned(**columns: ArrayLike) -> list[Array]:
    """Positive numbers, broadcast to one length, each of shape (targets, 1)."""
    checked = {name: positive(name, np.atleast_1d(np.asarray(v, dtype=np.float64))) for name, v in columns.items()}
    longest = max(len(v) for v in checked.values())
    same_length(**{name: v for name, v in checked.items() if len(v) > 1} or checked)
    return [np.broadcast_to(v, longest)[:, None] for v in checked.values()]


def exactly_one(**options: Any) -> tuple[str, Any]:
    """The name and the value of the one option that is not None."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise InputError(
            f"{' and '.join(given) or 'nothing'} was given; exactly one of {', '.join(options)} is needed."
        )
    return given[0], options[given[0]]


def divide(a: Array, b: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(a, b)


def _bounded(value: float, say: Callable[[float], str]) -> str:
    """Text of a number that may be infinite: an answer here, not a gap."""
    return say(value) if np.isfinite(value) else "none" if np.isnan(value) else "∞"
