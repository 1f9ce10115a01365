"""Grids over any fields of a run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...train.config import RunConfig
from ...train.errors import UserError
from .base import GridConfig
from .content import Texts, is_text_field
from .tuning import Tuner


@dataclass
class ProductGrid(GridConfig):
    """Every combination of values of run fields, given by dotted name."""

    kind: str = "product"
    # A mapping, e.g. {optimizer.learning_rate: [1e-3, 2e-3], seed: [0, 1]}. Typed Any, because Hydra would refuse new
    # keys of a typed mapping.
    axes: Any = None

    def set_first_text(self, base: RunConfig) -> None:
        for name, values in dotted(self.axes if isinstance(self.axes, dict) else {}):
            if is_text_field(name) and isinstance(values, list) and values:
                assign(base, name, values[0])

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        if self.axes is not None and not isinstance(self.axes, dict):
            raise UserError(f"grid.axes is {self.axes!r}; it must map fields to values, such as {{seed:[0,1]}}")
        axes = dict(dotted(self.axes or {}))
        if not axes:
            raise UserError(
                "grid.axes is empty; name at least one field and its values, such as "
                "{optimizer.learning_rate:[4e-3,8e-3]}"
            )
        for name, values in axes.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"grid.axes.{name} is {values!r}; it must be a list of values")
            if not is_text_field(name) and name != "data.recipe" and is_cosmetic(base, name):
                raise UserError(
                    f"grid.axes names {name!r}, which does not change what a run learns, so all its values would be "
                    f"one run; set it for all runs with {name}=VALUE"
                )
        texts, vary_text = Texts(base), any(map(is_text_field, axes))
        copied = pickle.dumps(base)  # ten times as fast as copy.deepcopy
        for combination in itertools.product(*axes.values()):
            run: RunConfig = pickle.loads(copied)
            for name, value in zip(axes, combination, strict=True):
                assign(run, name, value)
            if vary_text:
                texts.fill(run, fixed=axes)
            if (run := tuner.dialled(run)).tokens <= 0:
                raise UserError("tokens is not set; a product grid needs tokens=… or an axis of that name")
            yield tuner.tuned(run, fixed=axes)


@dataclass
class PointsGrid(GridConfig):
    """Runs listed one by one, each by the fields that it changes; `isoflop suggest` writes such grids."""

    kind: str = "points"
    # A list of mappings from dotted fields to values, e.g. [{model.width: 64, model.depth: 4, tokens: 1000000}].
    points: Any = None

    def set_first_text(self, base: RunConfig) -> None:
        if isinstance(self.points, list) and self.points and isinstance(self.points[0], dict):
            for name, value in dotted(self.points[0]):
                if is_text_field(name):
                    assign(base, name, value, "grid.points[0]")

    def runs(self, base: RunConfig, tuner: Tuner) -> Iterator[RunConfig]:
        if not isinstance(self.points, list) or not self.points:
            raise UserError(
                f"grid.points is {self.points!r}; it must be a list of runs, each a mapping such as "
                "{tokens:1000000,seed:1}"
            )
        texts = Texts(base)
        for number, point in enumerate(self.points):
            where = f"grid.points[{number}]"
            if not isinstance(point, dict) or not point:
                raise UserError(
                    f"{where} is {point!r}; it must map fields to values, such as {{tokens:1000000,seed:1}}"
                )
            run, changes = copy.deepcopy(base), dict(dotted(point))
            for name, value in changes.items():
                assign(run, name, value, where)
            if any(map(is_text_field, changes)):
                texts.fill(run, fixed=changes)
            if (run := tuner.dialled(run)).tokens <= 0:
                raise UserError(f"{where} has no tokens; give it, or tokens=… for all points")
            yield tuner.tuned(run, fixed=changes)


@dataclass
class CheckGrid(PointsGrid):
    """The runs of `isoflop tune --check`, to which no law is fitted."""

    kind: str = "check"

    @classmethod
    def results(cls, sweep: Any) -> dict[str, Any]:
        return {"warnings": []}


def dotted(axes: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to (dotted name, value): {a: {b: [1]}} and {a.b: [1]} are both the axis a.b."""
    for name, value in axes.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def assign(run: RunConfig, name: str, value: Any, where: str = "grid.axes") -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    *groups, last = name.split(".")
    node: Any = run
    for group in groups:
        node = node.get(group) if isinstance(node, dict) else getattr(node, group, None)
    if not dataclasses.is_dataclass(node) or last not in {item.name for item in dataclasses.fields(node)}:
        raise UserError(f"{where} names {name!r}, which is not a field of a run; see conf/ for the fields")
    if dataclasses.is_dataclass(below := getattr(node, last)):
        first = dataclasses.fields(below)[0].name
        raise UserError(f"{where} names the group {name!r}; name one of its fields, such as {name}.{first}")
    kind: Any = type(node)
    typed = _typed(kind)
    try:
        typed[last] = value
    except OmegaConfBaseException as error:
        raise UserError(f"{where}.{name} contains {value!r}: {str(error).splitlines()[0]}") from error
    checked = typed[last]
    setattr(node, last, OmegaConf.to_container(checked) if OmegaConf.is_config(checked) else checked)


def is_cosmetic(run: RunConfig, name: str) -> bool:
    """Return whether a run's id is independent of the field with this dotted name."""
    node: Any = run
    for part in name.split("."):
        if isinstance(node, dict):
            node = node.get(part)
            continue
        fields = {item.name: item for item in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {}
        if part not in fields or "cosmetic" in fields[part].metadata:
            return part in fields
        node = getattr(node, part)
    return False


@functools.cache
def _typed(kind: type) -> Any:
    """Return an OmegaConf object of a dataclass, which type-checks its values."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(kind)
