"""Laws as JSON: options, constants, data with its hash, bootstrap draws and provenance.

The round trip is exact to the bit. The law.json of a report has the same content under "estimator".
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np

from ..errors import InputError, check_weights, positive, same_length
from ..files import parse_document, read_document
from ..flops import FlopsPerToken
from ..uncertainty import group_labels
from .registry import LAWS, law_class

FORMAT = "isoflop-law"
VERSION = 1


class Fitted(TypedDict):
    theta: list[float]
    objective: float
    starts: dict[Literal["tried", "agreeing"], int]
    converged: bool
    degenerate: list[str]
    scatter: float


class Drawn(TypedDict):
    resamples: int
    redrawn: int
    unconverged: int
    method: str
    seed: int | None
    groups: list[str]
    draws: dict[str, list[float | Literal["inf", "-inf", "nan"]]]


class Data(TypedDict):
    sha256: str
    columns: dict[str, list[float]]
    weight: list[float]
    se: list[float] | None
    groups: NotRequired[list[str] | None]


class LawFile(TypedDict):
    """The fields that a file must have; the others are for information."""

    options: dict[str, Any]
    fit: Fitted
    bootstrap: Drawn | None
    flops_per_token: NotRequired[FlopsPerToken | None]
    data: Data


def law_to_dict(law: Any) -> dict[str, Any]:
    """Return a fitted law as JSON types; numbers that are not finite become strings such as "inf"."""
    columns = {name: values.tolist() for name, values in law.data_.items()}
    spend = getattr(law, "flops_per_token_", None)
    bootstrap = None
    if law.draws_ is not None:
        draws = {name: [_number(float(v)) for v in values] for name, values in law.draws_.items()}
        bootstrap = law.bootstrap_ | {"groups": law.groups_.tolist(), "draws": draws}
    return {
        "format": FORMAT,
        "version": VERSION,
        "form": law.form,
        "options": {key: _number(value) for key, value in law.options().items()},
        "constants": {name: _number(value) for name, value in law.constants_.items()},
        "fit": {
            "theta": law.theta_.tolist(),
            "objective": law.objective_,
            "starts": law.starts_,
            "converged": law.converged_,
            "degenerate": law.degenerate_,
            "scatter": law.scatter_,
        },
        "bootstrap": bootstrap,
        "flops_per_token": spend and asdict(spend),
        "data": {
            "sha256": data_hash(law),
            "rows": len(law.weight_),
            "columns": columns,
            "weight": law.weight_.tolist(),
            "se": None if law.se_ is None else law.se_.tolist(),
            "groups": None if law._groups is None else law._groups.tolist(),
        },
        "provenance": {"isoflop": installed_version(), "date": datetime.now(UTC).isoformat(timespec="seconds")},
    }


def data_hash(law: Any) -> str:
    """Return the SHA-256 of a law's fitted columns, weights and standard errors."""
    digest = hashlib.sha256()
    for name, values in (*law.data_.items(), ("weight", law.weight_), ("se", law.se_)):
        if values is not None:
            digest.update(name.encode() + np.ascontiguousarray(values, dtype="<f8").tobytes())
    return digest.hexdigest()


def read_law(source: str | Path, kind: type[Any] | None = None) -> Any:
    """Read a fitted law from a file or a JSON text. Raises InputError if its class is not `kind` (default: any)."""
    label, content = _load(source)
    if content.get("version") != VERSION:
        raise InputError(
            f"{label} is version {content.get('version')!r} of the law format; this isoflop reads version {VERSION}."
        )
    if str(content.get("form")) not in LAWS:
        raise InputError(f"{label} holds a law of form {content.get('form')!r}; known forms are {', '.join(LAWS)}.")
    cls = law_class(content["form"])
    if kind is not None and not issubclass(cls, kind):
        raise InputError(f"{label} holds a law of form {content['form']!r}; {kind.form or kind.title!r} is expected.")
    try:
        law_file = msgspec.convert(content, LawFile)
        law = cls(**{key: _read(value) for key, value in law_file["options"].items()})
        _restore(law, law_file)
    except InputError as error:
        raise InputError(f"{label}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}".replace("`", "")
        raise InputError(f"{label} is not a complete law ({reason}); fit the law and write it again.") from None
    if data_hash(law) != law_file["data"]["sha256"]:
        raise InputError(
            f"the data in {label} does not match its sha256, so the file was changed after the fit; fit the law again."
        )
    return law


def _load(source: str | Path) -> tuple[str, dict[str, Any]]:
    text = str(source)
    inline = isinstance(source, str) and text.lstrip().startswith("{")
    label = "the text" if inline else text
    content = parse_document(text.encode(), label, Any) if inline else read_document(Path(text), Any)
    if isinstance(content, dict) and isinstance(content.get("estimator"), dict):
        content = content["estimator"]
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        has_no_fit = isinstance(content, dict) and "approaches" in content and content.get("law") is None
        reason = "the report has no parametric fit" if has_no_fit else f"its format is not {FORMAT!r}"
        if isinstance(content, dict) and "log_history" in content:
            reason = "it is the log of one Hugging Face run; a table in JSON is a list of objects, one per run"
        raise InputError(f"{label} is not a law ({reason}); give a file that `to_json` or a report wrote.")
    return label, content


def _restore(law: Any, content: LawFile) -> None:
    data, fit, theta = content["data"], content["fit"], np.array(content["fit"]["theta"])
    law.data_ = {name: positive(name, data["columns"][name]) for name in (*law.inputs, law.output)}
    law.weight_ = check_weights(data["weight"], len(data["weight"]))
    law.se_ = None if data["se"] is None else positive("se", data["se"])
    same_length(**law.data_, weight=law.weight_)
    law._groups = None if (groups := data.get("groups")) is None else group_labels(groups, len(law.weight_))
    law.objective_, law.starts_ = fit["objective"], fit["starts"]
    law.converged_, law.degenerate_ = fit["converged"], fit["degenerate"]
    law.flops_per_token_ = content.get("flops_per_token")
    law.resume(theta, fit["scatter"])
    if theta.shape != law.problem_.lower.shape:
        raise ValueError(f"theta has {len(theta)} numbers, and the law {len(law.problem_.lower)}")
    if (bootstrap := content["bootstrap"]) is not None:
        drawn: dict[str, Any] = {**bootstrap}
        law.groups_ = np.array(drawn.pop("groups"), dtype=str)
        draws = {name: np.array([_read(v) for v in values]) for name, values in drawn.pop("draws").items()}
        law.draws_ = {name: draws[name] for name in law.problem_.constants(theta[None, :])}
        same_length(**law.draws_)
        same_length(weight=law.weight_, groups=law.groups_)
        law.bootstrap_ = drawn


def installed_version() -> str:
    try:
        return version("isoflop")
    except PackageNotFoundError:
        return "unknown"


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "inf", "-inf": "-inf"}.get(str(value), "nan")
    return value


def _read(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
