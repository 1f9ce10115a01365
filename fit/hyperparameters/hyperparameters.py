"""Learning-rate and batch-size laws, y = k N^p_N D^p_D or in other inputs, fitted to the optima of cells, (N, D).

Li et al. 2025 (arXiv:2503.04715), equation 1; Bi et al. 2024 (arXiv:2401.02954), equation 1 and section 3.1. The law
also serves other optima, such as critical batch against D (Zhang et al. 2024, arXiv:2410.21676).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import Array, Columns, Constants, InputError, Say, positive, same_length
from ..laws.law import Law, Problem, amplitude, centred, projected_starts
from ..solver.forms import LogSumExp, LogSumTerms
from ..table import Runs, RunTable, as_table
from ..uncertainty import by_group, group_labels, numbered, wild_targets

COLLINEAR = 0.01  # smallest over largest singular value of scaled log inputs for separate exponents; chosen by hand
REACH = np.log(1e6)  # log distance of B_crit from the batches tried beyond which one of the two costs counts as zero


@dataclass(frozen=True)
class CellOptimum:
    """The best settings at one (N, D), from `used` of its `runs`; NaN for a setting that did not vary."""

    N: float
    D: float
    loss: float
    runs: int
    used: int
    method: str
    learning_rate: float = float("nan")
    batch: float = float("nan")
    reason: str = ""

    @property
    def accepted(self) -> bool:
        return not self.reason

    @property
    def C(self) -> float:
        """Return the training FLOPs, 6ND."""
        return 6.0 * self.N * self.D


class Sweep(NamedTuple):
    """The runs of a sweep: N, D, learning_rate, batch (tokens), loss, each (n,)."""

    N: Array
    D: Array
    learning_rate: Array
    batch: Array
    loss: Array


def read_sweep(table: Runs, sequence_length: float | None = None) -> Sweep:
    """Read the settings and losses of a table's runs.

    Columns are `learning_rate` or `lr`, and `batch_tokens`, or else `batch_size` or `bs` (sequences), which is
    multiplied by the argument or column `sequence_length`.
    """
    table = as_table(table)
    rate = _column(table, "learning_rate", "lr")
    if "batch_tokens" in table.frame:
        batch = _column(table, "batch_tokens")
    else:
        batch = _column(table, "batch_size", "bs")
        if sequence_length is not None:
            batch = batch * positive("sequence_length", [sequence_length])
        elif "sequence_length" in table.frame:
            batch = batch * _column(table, "sequence_length")
        else:
            raise InputError(
                f"{table.source} counts batches in sequences and has no column 'sequence_length'; "
                "give sequence_length in tokens."
            )
    return Sweep(table.N, table.D, rate, batch, table.loss)


def _column(table: RunTable, *names: str) -> Array:
    for name in names:
        if name in table.frame:
            return positive(name, table.column(name), table.rows)
    exist = ", ".join(map(str, table.frame.columns))
    raise InputError(f"{table.source} has no column {' or '.join(map(repr, names))}; it has {exist}.")


class DesignedLaw(Law):
    """A law fitted to few independent units chosen by design: cells of a sweep, or single rows."""

    def _designs(self) -> list[Array]:
        """Return the design matrix, (n, m), of each law fitted: ones, and the logarithms of its inputs."""
        raise NotImplementedError

    def _cells(self) -> np.ndarray:
        """Return the index of each row's cell, (n,)."""
        return np.arange(len(self.weight_))

    def bootstrap(self, n: int = 1000, groups: Any = None, seed: int = 0, method: str | None = "wild") -> Self:
        """Refit to `n` bootstrap draws; rows of one cell, or of one of `groups` (rows,), stay together.

        "wild" takes each cell's residuals under a fit to the other cells (MacKinnon and White 1985), with a random sign
        per cell and a random scale per draw (Student's t). InputError if the other cells do not determine a fit.
        "pairs" draws whole cells.
        """
        self._fitted()
        groups = group_labels(self._cells() if groups is None else groups, len(self.weight_))
        if method != "wild" or n < 1:
            return super().bootstrap(n, groups, seed, method)  # this also validates the arguments
        labels, member = by_group(groups)
        freedom = len(labels) - max(design.shape[1] for design in self._designs())
        self._need_every_cell(labels, member, freedom)
        numbers = numbered(groups, *self.data_.values())
        target = wild_targets(self._values(), self.left_out_residuals(groups), numbers, n, seed, freedom)
        self._drawn(self._refit(np.ones(target.shape), target), groups, method=method, seed=seed)
        return self

    def _need_every_cell(self, labels: np.ndarray, member: np.ndarray, freedom: int) -> None:
        if freedom < 1:
            raise InputError(
                f"{self.title} has {len(labels)} cells, too few for an interval; at least {len(labels) - freedom + 1} "
                "are needed."
            )
        for design in self._designs():
            for cell in range(len(labels)):
                if collinear(design[member != cell]):
                    raise InputError(
                        f"without cell {labels[cell]} the other {len(labels) - 1} do not determine the exponents of "
                        f"{self.title}; an interval needs more cells."
                    )


class HyperparameterLaw(DesignedLaw):
    """The power law target = k prod_i input_i^p_i, by least squares in the logarithm (or another objective of `Law`).

    `target` is the quantity predicted ("learning_rate", "batch", ...). After `fit`: constants_ (k, p_N, p_D, ...).
    """

    form = "hyperparameter"
    title = "the law"
    k_: float

    def __init__(
        self,
        target: str = "learning_rate",
        inputs: Sequence[str] = ("N", "D"),
        objective: str = "squares",
        delta: float = 1e-3,
    ) -> None:
        super().__init__(objective, delta)
        inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        if not inputs or len({*inputs, target}) <= len(inputs):
            raise InputError(f"inputs is {inputs}; it must hold one or more different names, none of them {target!r}.")
        self.target = self.output = target
        self.inputs = inputs
        self.names = ("k", *(f"p_{name}" for name in inputs))
        self.title = f"the law of {target} in {', '.join(inputs)}"

    def options(self) -> dict[str, Any]:
        return self.get_params() | {"inputs": list(self.inputs)}

    def fit_cells(self, cells: Sequence[CellOptimum]) -> Self:
        """Fit to the accepted cells; `cells` are from `cell_optima`."""
        good = [cell for cell in cells if cell.accepted]
        if not good:
            reason = f", the first because {cells[0].reason}" if cells else ""
            raise InputError(f"none of {len(cells)} cells has an optimum{reason}.")
        unknown = [name for name in self.inputs if name not in ("N", "D", "C")]
        if unknown or self.output not in ("learning_rate", "batch"):
            message = f"inputs is {self.inputs} for target {self.output!r}"
            raise InputError(f"{message}; cells give learning_rate or batch, in N, D and C.")
        return self.fit(*(np.array([getattr(cell, name) for cell in good]) for name in (*self.inputs, self.output)))

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        powers = [value for name, value in constants.items() if name != "k"]
        with np.errstate(over="ignore"):
            return np.exp(
                np.log(constants["k"]) + sum(p * np.log(value) for p, value in zip(powers, inputs, strict=True))
            )

    def equation(self, say: Say) -> str:
        product = " ".join(f"{name}^{say(f'p_{name}')}" for name in self.inputs)
        return f"{self.output}({', '.join(self.inputs)}) = {say('k')} {product}"

    # The interface to the solver.

    def _designs(self) -> list[Array]:
        return [log_design([self.data_[name] for name in self.inputs], len(self.weight_))]

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        super()._check(inputs, observed)
        if collinear(log_design(list(inputs), len(observed))):
            raise InputError(
                f"{' and '.join(self.inputs)} do not vary separately over the cells, so the exponents of {self.title} "
                "cannot be told apart; add cells, or use fewer inputs."
            )

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        design, middle = centred_design(log_design(list(inputs), len(observed)))
        target, free = np.log(observed), design.shape[1]

        def starts(weights: Array, keep: int | None) -> Array:
            best = np.linalg.lstsq(design, target, rcond=None)[0]
            return np.broadcast_to(best, (len(weights), 1, free))

        return Problem(
            form=LogSumExp(free, [(range(free), design)]),
            target=target,
            bounds=dict.fromkeys(self.names, (-np.inf, np.inf)),
            axes=np.log(np.stack(inputs)),
            starts=starts,
            constants=lambda theta: law_constants(self.names, theta, middle),
        )


class CriticalBatchLaw(DesignedLaw):
    """The tokens E and steps S to reach one loss by batch (tokens): E = E_min (1 + batch / B_crit) = batch S.

    S = S_min (1 + B_crit / batch), B_crit = E_min / S_min (McCandlish et al. 2018, arXiv:1812.06162, equation 2.11;
    Kaplan et al. 2020, arXiv:2001.08361, equations 1.4 and 5.1). Every run must have the best settings for its batch
    and end its schedule where it reaches the loss. The critical batch of Zhang et al. is 0.2 B_crit.

    `fit` takes each run's batch and its tokens to the loss. After it: E_min_ (tokens), S_min_ (steps), B_crit_.
    """

    form = "critical-batch"
    title = "the critical batch law"
    names = ("E_min", "S_min", "B_crit")
    formula = "tokens = {E_min} (1 + batch / {B_crit}), steps >= {S_min}"
    inputs = ("batch",)
    output = "tokens"
    E_min_: float
    S_min_: float
    B_crit_: float

    def __init__(self, objective: str = "squares", delta: float = 1e-3) -> None:
        super().__init__(objective, delta)

    @staticmethod
    def evaluate(constants: Constants, *inputs: Any) -> Any:
        return constants["E_min"] + constants["S_min"] * inputs[0]

    # The interface to the solver.

    def _designs(self) -> list[Array]:
        return [log_design([self.data_["batch"]], len(self.weight_))]

    def _check(self, inputs: tuple[Array, ...], observed: Array) -> None:
        distinct = len(np.unique(np.round(np.log(inputs[0]), 6)))
        if distinct < 3:
            raise InputError(f"{self.title} needs at least 3 different batches; there are {distinct}.")

    def _problem(self, inputs: tuple[Array, ...], observed: Array) -> Problem:
        (u, middle), target, at = centred(inputs[0]), np.log(observed), {"E_min": 0, "S_min": 1}
        floor, ceiling = float(target.min()) - REACH - np.ptp(u), float(target.max()) + 2.0

        def constants(theta: Array) -> Columns:
            E_min, S_min = amplitude(theta[:, 0], floor), amplitude(theta[:, 1], floor, -middle)
            with np.errstate(over="ignore", divide="ignore"):
                return {"E_min": E_min, "S_min": S_min, "B_crit": E_min / S_min}

        def starts(weights: Array, keep: int | None) -> Array:
            basis = np.stack([np.ones_like(u), np.exp(u)], axis=1)[None] / observed[None, :, None]
            smallest = 1e-3 * observed.min()
            return projected_starts(
                at, lambda log: {"E_min": log[..., 0], "S_min": log[..., 1]}, basis, weights, keep, floor=smallest
            )

        form = LogSumTerms(lambda v: [v["E_min"], v["S_min"] + u], at, len(u))
        return Problem(form, target, dict.fromkeys(at, (floor, ceiling)), np.log(np.stack(inputs)), starts, constants)


def tokens_to_loss(tokens: ArrayLike, loss: ArrayLike, target: float) -> float:
    """Return the number of tokens at which a run's loss (n,) first reaches `target`, NaN if never."""
    tokens, loss = positive("tokens", tokens), positive("loss", loss)
    same_length(tokens=tokens, loss=loss)
    order = np.argsort(tokens)
    x, y = np.log(tokens[order]), np.log(loss[order] / positive("target", [target]))
    reached = np.flatnonzero(y <= 0)
    if reached.size == 0:
        return float("nan")
    i = int(reached[0])
    if i == 0 and y[0] < 0:
        raise InputError(f"target is {target:g}, and the run is below it from its first point; choose a lower target.")
    if y[i] == 0:
        return float(np.exp(x[i]))
    return float(np.exp(x[i - 1] + (x[i] - x[i - 1]) * y[i - 1] / (y[i - 1] - y[i])))


def log_design(inputs: list[Array], rows: int) -> Array:
    """Return the design matrix (rows, 1 + inputs): a column of ones, and the logarithm of each input."""
    return np.stack([np.ones(rows), *(np.log(values) for values in inputs)], axis=1)


def centred_design(design: Array) -> tuple[Array, Array]:
    """Subtract the mean of each input from a design matrix (n, 1 + inputs); return the matrix and these means."""
    middle = design[:, 1:].mean(axis=0)
    return np.concatenate([design[:, :1], design[:, 1:] - middle], axis=1), middle


def law_constants(names: Sequence[str], theta: Array, middle: Array) -> Columns:
    """Convert `theta` (P, k), fitted to a design less its means `middle`, to a law's constants, name -> (P,)."""
    with np.errstate(over="ignore"):
        factor = np.exp(theta[:, 0] - theta[:, 1:] @ middle)
    return dict(zip(names, [factor, *theta.T[1:].copy()], strict=True))


def collinear(design: Array) -> bool:
    if design.shape[1] == 1:
        return len(design) == 0
    centred = design[:, 1:] - design[:, 1:].mean(axis=0)
    scale = np.linalg.norm(centred, axis=0)
    if (scale < 1e-3).any():
        return True
    spread = np.linalg.svd(centred / scale, compute_uv=False)
    return len(centred) <= centred.shape[1] or bool(spread[-1] < COLLINEAR * spread[0])
