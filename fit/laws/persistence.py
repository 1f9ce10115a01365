"""Laws as JSON: options, constants, the data with its hash, bootstrap draws, and where it all came from.

Special here: a file holds everything that the law was fitted to and found, so that a law read back predicts, says its
intervals and plots without a new fit. Floats are written in full, so the round trip is exact to the bit. A report's
law.json carries the same under "estimator" and is read as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .registry import LAWS, law_class

FORMAT = "isoflop-law"
VERSION = 1


def law_to_dict(law: Any) -> dict[str, Any]:
    """The law as JSON's own types; an infinite option or draw is the string "inf"."""
    columns = {name: values.tolist() for name, values in law.data_.items()}
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
        "data": {
            "sha256": data_hash(law),
            "rows": len(law.weight_),
            "columns": columns,
            "weight": law.weight_.tolist(),
            "se": None if law.se_ is None else law.se_.tolist(),
        },
        "provenance": {"isoflop": installed_version(), "date": datetime.now(UTC).isoformat(timespec="seconds")},
    }


def data_hash(law: Any) -> str:
    """SHA-256 of the columns, weights and standard errors that the law was fitted to."""
    digest = hashlib.sha256()
    for name, values in (*law.data_.items(), ("weight", law.weight_), ("se", law.se_)):
        if values is not None:
            digest.update(name.encode() + np.ascontiguousarray(values, dtype="<f8").tobytes())
    return digest.hexdigest()


def read_law(source: str | Path, kind: type[Any] | None = None) -> Any:
    """A fitted law from a file or a JSON text, of class `kind` or a subclass of it where one is given."""
    said, content = _load(source)
    if content.get("version") != VERSION:
        raise InputError(
            f"{said} is version {content.get('version')!r} of the law format; this isoflop reads version {VERSION}."
        )
    if content.get("form") not in LAWS:
        raise InputError(f"{said} holds a law of form {content.get('form')!r}; known are {', '.join(LAWS)}.")
    cls = law_class(content["form"])
    if kind is not None and not issubclass(cls, kind):
        raise InputError(f"{said} holds a law of form {content['form']!r}; {kind.form or kind.title!r} is expected.")
    try:
        law = cls(**{key: _read(value) for key, value in content["options"].items()})
        _restore(law, content)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{said} is not a whole law ({type(error).__name__}: {error}); write it again.") from None
    if data_hash(law) != content["data"].get("sha256"):
        raise InputError(f"{said} holds data whose hash differs from the one it states; it was changed after the fit.")
    return law


def _load(source: str | Path) -> tuple[str, dict[str, Any]]:
    text = str(source)
    inline = isinstance(source, str) and text.lstrip().startswith("{")
    said = "the text" if inline else text
    try:
        content = json.loads(text if inline else Path(text).read_text())
    except OSError as error:
        raise InputError(f"{said} cannot be read ({error.strerror}); give a law's JSON file.") from None
    except (ValueError, UnicodeDecodeError):
        raise InputError(f"{said} is not JSON; give a file that `to_json` or a report wrote.") from None
    if isinstance(content, dict) and isinstance(content.get("estimator"), dict):
        content = content["estimator"]
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{said} is not a law (no format {FORMAT!r}); give a file that `to_json` or a report wrote.")
    return said, content


def _restore(law: Any, content: dict[str, Any]) -> None:
    data, fit = content["data"], content["fit"]
    law.data_ = {name: np.array(data["columns"][name], dtype=np.float64) for name in (*law.inputs, law.output)}
    law.weight_ = np.array(data["weight"], dtype=np.float64)
    law.se_ = None if data["se"] is None else np.array(data["se"], dtype=np.float64)
    law.objective_, law.starts_ = float(fit["objective"]), dict(fit["starts"])
    law.converged_, law.degenerate_ = bool(fit["converged"]), list(fit["degenerate"])
    law.resume(np.array(fit["theta"], dtype=np.float64), float(fit["scatter"]))
    if content["bootstrap"] is not None:
        drawn = dict(content["bootstrap"])
        law.groups_ = np.array(drawn.pop("groups"), dtype=str)
        law.draws_ = {name: np.array([_read(v) for v in values]) for name, values in drawn.pop("draws").items()}
        law.bootstrap_ = drawn


def installed_version() -> str:
    """This package's version, "unknown" in a checkout that was never installed."""
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
