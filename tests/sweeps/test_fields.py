"""Every numeric field of a sweep's config refuses absurd values with one sentence, before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from isoflop.sweeps import prepare
from isoflop.sweeps.config import SweepConfig
from isoflop.sweeps.entry import compose, composition_error
from isoflop.sweeps.execute.conduct import check
from isoflop.sweeps.grid.adaptive import AdaptiveGrid
from isoflop.sweeps.grid.base import grid_kinds
from isoflop.sweeps.grid.isoflop import CurvesGrid, IsoflopGrid
from isoflop.sweeps.grid.ladder import LadderGrid
from isoflop.sweeps.grid.mixture import MixtureGrid
from isoflop.sweeps.grid.precision import PrecisionGrid
from isoflop.sweeps.grid.product import CheckGrid, PointsGrid, ProductGrid
from isoflop.sweeps.grid.tune import TuneGrid
from isoflop.sweeps.grid.tuning import PowerRule, TuningConfig
from isoflop.train.config import DataConfig
from isoflop.train.errors import UserError
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

ABSURD = (0, -1, 1e300, math.nan, math.inf, True, "many")
# Fields for which zero is valid: off, none, the first, or an empty share.
ZERO = {
    "cluster.backoff_seconds", "cluster.dollars_per_gpu_hour", "cluster.gpus_per_job",
    "cluster.max_requeues", "cluster.queue_minutes", "cluster.retries", "cluster.sweep_retries",
    "fit.bootstrap", "grid.mixtures", "grid.seeds", "optimizer.beta1", "optimizer.beta2",
    "optimizer.gradient_clip", "optimizer.momentum", "optimizer.weight_decay", "optimizer.width_exponent",
    "optimizer.z_loss", "model.experts", "model.shared_experts", "model.dense_layers", "model.balance_rate",
    "model.balance_loss", "model.router_z_loss",
    "parallel.zero", "schedule.decay_share", "schedule.final_share", "schedule.warmup_max_share",
    "schedule.warmup_per_parameter", "schedule.warmup_tokens", "seed", "skip_bad_steps",
}  # fmt: skip
# Exponents of power laws may have any sign, but the rule of the batch has no exponent of the batch.
EXPONENTS = {
    f"tuning.{rule.name}.{name}"
    for rule in dataclasses.fields(TuningConfig) if rule.default_factory is PowerRule for name in ("N", "D", "batch")
}  # fmt: skip
ZERO |= EXPONENTS
NEGATIVE = {"optimizer.width_exponent"} | EXPONENTS - {"tuning.batch_tokens.batch"}
WORKING = {
    "isoflop": IsoflopGrid(budgets=[1e11]),
    "curves": CurvesGrid(budgets=[1e11]),
    "adaptive": AdaptiveGrid(budgets=[1e12, 3e12]),
    "ladder": LadderGrid(sizes=[8e3], tokens_per_parameter=[20.0]),
    "mixture": MixtureGrid(sizes=[8e3], tokens_per_parameter=[20.0], mixtures=1),
    "precision": PrecisionGrid(sizes=[8e3], tokens_per_parameter=[20.0], formats=["int8"]),
    "product": ProductGrid(axes={"model.qk_norm": [False]}),
    "points": PointsGrid(points=[{"model.qk_norm": False}]),
    "check": CheckGrid(points=[{"model.qk_norm": False, "tokens": 2**17}]),
    "tune": TuneGrid(sizes=[8e3], tokens_per_parameter=[5.0], flops_budget=1e12, span=1.0),
}


def numeric_fields(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields that hold a number or a list of numbers."""
    hints = typing.get_type_hints(type(node))
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from numeric_fields(value, f"{prefix}{item.name}.")
        elif {"int", "float"} & set(str(hints[item.name]).replace("[", " ").replace("]", " ").split()) or hints[
            item.name
        ] in (int, float):
            yield prefix + item.name


FIELDS = sorted(
    {(kind, f"grid.{name}") for kind, grid in WORKING.items() for name in numeric_fields(grid)}
    | {("product", name) for name in numeric_fields(SweepConfig())}
)


def test_every_grid_is_tried() -> None:
    assert set(WORKING) == set(grid_kinds())
    assert len(FIELDS) > 120


def test_a_whole_number_may_have_an_exponent() -> None:
    config = compose(["+grid=product", "tokens=2.5e6", "grid.axes={data.max_bytes:[3e+06,16e3]}", "fit.bootstrap=1e2"])
    assert (config.tokens, config.fit.bootstrap) == (2_500_000, 100)
    assert config.grid.axes == {"data.max_bytes": [3_000_000, 16_000]}
    with pytest.raises(UserError, match=r"tokens.*2500\.5"):
        compose(["+grid=product", "tokens=2.5005e3"])


@functools.cache
def working_config(kind: str) -> Any:
    """Return a valid OmegaConf config with this kind of grid."""
    config = SweepConfig(grid=WORKING[kind], sweep="sweep", dry_run=True)
    config.cluster.flops_per_second = 1e11
    config.tokens = 4096 if kind in ("product", "points") else None
    config.average.kind = "ema" if kind == "curves" else "none"
    return OmegaConf.structured(config)


@pytest.fixture(scope="module")
def corpus(small_corpus: Callable[..., DataConfig]) -> DataConfig:
    return small_corpus(validation_tokens=256)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind}-{name}" for kind, name in FIELDS])
def test_an_absurd_number_is_refused_or_works(kind: str, name: str, corpus: DataConfig, tmp_path: Path) -> None:
    config = working_config(kind)
    config.data, config.output_root = corpus, str(tmp_path)
    if kind == "mixture":
        domains = {name: {"path": corpus.path} for name in ("a", "b")}
        config.data = dataclasses.replace(corpus, corpus="mixture", path=None, domains=domains)
    before = copy.deepcopy(OmegaConf.select(config, name))
    is_list = OmegaConf.is_list(before) or name in (
        "average.spans", "checkpoint.at_steps", "cluster.budgets", "grid.seeds", "grid.tokens",
        "grid.tokens_per_parameter", "schedule.factors", "schedule.shares",
    )  # fmt: skip
    for value in ABSURD:
        message = None
        try:
            OmegaConf.update(config, name, [value] if is_list else value)
            sweep_config = OmegaConf.to_object(config)
            assert isinstance(sweep_config, SweepConfig)
            check(sweep_config)
            prepare.from_config(sweep_config)
        except OmegaConfBaseException as error:
            message = f"{error.full_key}: {composition_error(error)}"  # Hydra's message begins with the override
        except UserError as error:
            message = str(error)
        finally:
            OmegaConf.update(config, name, before)
        works = not isinstance(value, bool) and ((value == 0 and name in ZERO) or (value == -1 and name in NEGATIVE))
        assert (message is None) == works, f"{name}={value}: {message}"
        assert message is None or ("\n" not in message and name.split(".")[-1].rstrip("s") in message), message
    assert not list(tmp_path.glob("sweep"))
