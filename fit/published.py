"""Published scaling laws, and the published runs behind some of them.

Laws are evaluated as their papers print them, and so differ in conventions. A split of C FLOPs has D = C / 6N; Kaplan
et al.'s C_min is C / 2, and DeepSeek's M FLOPs per token gives N = M / 6. Sources are in constants/laws.yaml and
constants/data.yaml.

A data file is looked up in $ISOFLOP_DATA/<name>/<file>, then in the cache ($ISOFLOP_CACHE, else ~/.cache/isoflop, below
`published`), and downloaded only on request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .allocation.allocation import Optimum
from .errors import Array, Constants, InputError, floats, need, one_of, positive, unboxed
from .files import read_constants, replacing
from .laws.registry import law_class
from .table import RunTable, by_name, read_table

if TYPE_CHECKING:
    import pandas as pd

DESCRIBED = ("loss_unit", "N_convention", "flops_convention", "tokenizer", "data", "source", "notes")
_TABLES = read_constants("laws")
# Forms of one input x for which there is no law class; all other forms have one.
CURVES: dict[str, Callable[[Array, Constants], Any]] = {
    "reciprocal": lambda x, c: c.get("E", 0.0) + (c["scale"] / x) ** c["alpha"],
    "logarithm": lambda x, c: c["a"] + c["b"] * np.log(x),
    "exponential": lambda x, c: c["epsilon"] - c["k"] * np.exp(-c["gamma"] * x),
}


@dataclass(frozen=True)
class PublishedLaw:
    """A fitted law as its paper prints it. D and U are tokens; `N_convention` describes N.

    kind        "loss", "optimal N" (or M, D, D/N), "learning rate", "batch size", "critical batch size", "error"
    form        the equation: one of `equations` in laws.yaml, or "power"
    intervals   constant -> (low, high) at `level`, from the paper
    fitted      ranges of the runs behind it: C FLOPs, N parameters, D tokens, M = D / N -> (low, high)
    splits      for a law of the loss: true if the authors' optimum is the lowest loss under 6ND
    frontier    name of the law that gives the loss where this one splits a budget
    """

    name: str
    kind: str
    form: str
    inputs: tuple[str, ...]
    unit: str
    constants: Constants
    authors: str
    year: int
    arxiv: str
    where: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    level: float | None = None
    N_convention: str | None = None
    flops_convention: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    fitted: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    splits: bool = False
    frontier: str | None = None
    notes: str = ""

    def __call__(self, *inputs: ArrayLike, **named: ArrayLike) -> Any:
        """Evaluate the law at inputs given by position or name, broadcast together."""
        values = by_name(self.name, self.inputs, inputs, named)
        for name, argument in values.items():
            value = floats(argument)
            values[name] = positive(name, value.ravel()).reshape(value.shape)
        if self.form == "power":
            c, result = self.constants, floats(self.constants["k"])
            for name, x in values.items():
                result = result * (x / c.get(f"{name}_0", 1.0)) ** c.get(f"p_{name}", 0.0)
        elif self.form in CURVES:
            result = CURVES[self.form](values[self.inputs[0]], self.constants)
        else:
            result = law_class(self.form).evaluate(self.constants, *values.values())
        return unboxed(result)

    @property
    def allocates(self) -> bool:
        """Return whether the law splits a budget between N and D."""
        return self.splits or self.kind.startswith("optimal")

    def optimal(self, flops: ArrayLike) -> Optimum:
        """Return the optimal N, D and loss (NaN if not published) at `flops`, a scalar or (targets,)."""
        C = positive("flops", np.atleast_1d(np.asarray(flops)))
        if not self.allocates:
            able = ", ".join(law.name for law in published_laws() if law.allocates)
            raise InputError(f"{self.name} gives the {self.kind} and does not split a budget; these do: {able}.")
        if self.splits:
            return Optimum(C, *law_class(self.form)().optimum(C, self.constants))
        budget = C / 2 if self.inputs == ("C_min",) else C
        value = self(budget)
        N = {
            "optimal N": value,
            "optimal M": value / 6,
            "optimal D": C / 6 / value,
            "optimal D/N": np.sqrt(C / 6 / value),
        }[self.kind]
        loss = published_law(self.frontier)(budget) if self.frontier else np.full(len(C), np.nan)
        return Optimum(C, N, C / 6 / N, loss)

    @property
    def source(self) -> str:
        return f"{self.authors} {self.year} (arXiv:{self.arxiv}), {self.where}"

    def equation(self) -> str:
        if self.form != "power":
            shown: str = _TABLES["equations"][self.form].format(*self.inputs)
            return shown if "E" in self.constants else shown.removeprefix("E + ")
        scaled = [f"({x} / {x}_0)" if f"{x}_0" in self.constants else x for x in self.inputs]
        factors = [f"{s}^p_{x}" for s, x in zip(scaled, self.inputs, strict=True) if f"p_{x}" in self.constants]
        return " ".join(["k", *factors])

    def __repr__(self) -> str:
        values = ", ".join(f"{name} = {value:.6g}" for name, value in self.constants.items())
        return f"{self.name}: {self.kind} = {self.equation()}   {values}   [{self.unit}; {self.source}]"


def _read() -> dict[str, PublishedLaw]:
    laws = {}
    for name, record in (_TABLES["laws"] | _TABLES["tuning"]).items():
        fields = {"unit": _TABLES["units"].get(record["kind"])} | record | {"inputs": tuple(record["inputs"])}
        for ranges in ("intervals", "fitted"):
            fields[ranges] = {key: tuple(pair) for key, pair in record.get(ranges, {}).items()}
        laws[name] = PublishedLaw(name=name, **fields)
    return laws


_LAWS = _read()


def published_law(name: str) -> PublishedLaw:
    """Return the published law of this name. Raises InputError if there is none.

    >>> published_law("hoffmann2022_approach3").optimal(5.76e23)
    C (6ND) = 5.76e23, N = 32.2B, D = 2.98T, D/N = 92.6, loss = 1.9307
    """
    if not isinstance(name, str) or name not in _LAWS:
        asked = str(name).lower()
        descriptions = {
            candidate: f"{candidate} {law.authors} {law.form} {law.arxiv}".lower() for candidate, law in _LAWS.items()
        }
        near = [candidate for candidate, description in descriptions.items() if asked and asked in description][:6]
        near = near or get_close_matches(asked, _LAWS, n=3, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "published_laws() lists them"
        raise InputError(f"there is no published law {name!r}; {hint}.")
    return _LAWS[name]


def published_laws(kind: str | None = None) -> list[PublishedLaw]:
    """Return every published law, or those of one `kind`, such as "loss"."""
    kinds = sorted({law.kind for law in _LAWS.values()})
    if kind is not None:
        one_of("kind", kind, kinds)
    return [law for law in _LAWS.values() if kind in (None, law.kind)]


def compare_published(flops: ArrayLike, own: Any = None, **own_columns: Any) -> pd.DataFrame:
    """Compare how published laws split `flops`: one row per law and budget, those of `own` first.

    `beyond` is the budget over the law's largest run; unpublished values are NaN. Losses of different tokenizers or
    data are not comparable.

    Parameters
    ----------
    own
        A fitted law, or a mapping of names to laws.
    own_columns
        Conventions to state for `own`, such as N_convention="N_total".
    """
    import pandas as pd

    for name in own_columns:
        one_of("column", name, DESCRIBED)
    mine = {} if own is None else dict(own) if isinstance(own, Mapping) else {"own": own}
    for name, law in mine.items():
        need(name, law, "optimal", "a fitted law")
    rows = [row for name, law in mine.items() for row in _rows(name, law.optimal(flops), np.nan, own_columns)]
    for law in published_laws():
        if law.allocates:
            gives_loss = law if law.kind == "loss" else published_law(law.frontier) if law.frontier else None
            conventions = {name: getattr(law, name) for name in DESCRIBED[1:]} | {
                "loss_unit": gives_loss and gives_loss.unit
            }
            rows += _rows(law.name, law.optimal(flops), law.fitted.get("C", (np.nan, np.nan))[1], conventions)
    return pd.DataFrame(rows)


def _rows(name: str, best: Any, largest: float, conventions: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {column: conventions.get(column) for column in DESCRIBED}
    return [
        {"law": name, "flops": C, "N": N, "D": D, "ratio": D / N, "loss": loss, "beyond": C / largest} | columns
        for C, N, D, loss in zip(best.flops, best.N, best.D, best.loss, strict=True)
    ]


# Published runs.

HOST = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class PublishedFile:
    """A CSV file, with `path`, `sha256` and `size` (bytes) if its repository contains it."""

    name: str
    path: str = ""
    sha256: str = ""
    size: int = 0


@dataclass(frozen=True)
class PublishedData:
    """A published data set; the first of its files is the default.

    `columns` and `derive_d` are passed to `read_table`; `how` explains how to make files that cannot be downloaded. A
    table of runs keeps the last row for each value of column `last`, and adds the constants `same`.
    """

    name: str
    files: tuple[PublishedFile, ...]
    what: str
    repository: str
    commit: str
    licence: str
    columns: Mapping[str, str] = field(default_factory=dict)
    derive_d: str | None = None
    how: str = ""
    last: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, float] = field(default_factory=dict)


DATA = {
    name: PublishedData(name, tuple(PublishedFile(**file) for file in record.pop("files")), **record)
    for name, record in read_constants("data").items()
}


def published_data(name: str) -> PublishedData:
    one_of("data set", name, DATA)
    return DATA[name]


def load_published(
    name: str, file: str | None = None, folder: str | Path | None = None, download: bool = False
) -> pd.DataFrame:
    """Load a published data set with its authors' columns.

    Parameters
    ----------
    file
        Name of a file of the set, by default the first.
    folder
        Folder that contains <name>/<file>, instead of ISOFLOP_DATA and the cache.
    download
        Download a missing file into `folder` or the cache.
    """
    import pandas as pd

    path = _located(name, file, folder, download)
    try:
        return pd.read_csv(path)
    except ValueError as error:  # an empty or a broken file, or one that is not text
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise InputError(
            f"{path} is not a readable CSV file ({reason}); delete it and load the data set again."
        ) from None


def published_runs(
    name: str,
    where: Mapping[str, object] | None = None,
    drop_worst: int = 0,
    folder: str | Path | None = None,
    download: bool = False,
) -> RunTable:
    """Load a published data set as a table of runs.

    `where` keeps the rows with given values (one, or a list) of columns, such as {"train_dataset": "rpj"}; the
    `drop_worst` runs of highest loss are left out. `folder` and `download` are as in `load_published`.
    """
    record = published_data(name)
    frame = load_published(name, folder=folder, download=download)
    if record.last:
        frame = frame.drop_duplicates(record.last, keep="last")
    frame = frame.rename(columns=record.rename).assign(**record.same)
    for column, value in (where or {}).items():
        if column not in frame:
            raise InputError(f"{name} has no column {column!r}; it has {', '.join(map(str, frame.columns))}.")
        values = frame[column]
        frame = frame[values.isin(value if isinstance(value, list | tuple) else [value])]
        if frame.empty:
            examples = ", ".join(map(str, values.unique()[:12]))
            raise InputError(f"{name} has no row whose {column} is {value!r}; there are {examples}.")
    return read_table(frame, record.columns, derive_d=record.derive_d, drop_worst=drop_worst)


def download_published(
    name: str, file: str | None = None, folder: str | Path | None = None, host: str = HOST, timeout: float = 60.0
) -> Path:
    """Download `file`, by default the set's first, into `folder`/<name>, by default in the cache. Returns its path."""
    record, entry = published_data(name), _file(name, file)
    source = f"github.com/{record.repository}, commit {record.commit[:10]}"
    if not entry.sha256:
        raise InputError(
            f"{name}/{entry.name} cannot be downloaded, because {source} has no such CSV. To make it, {record.how}, "
            f"save it as {name}/{entry.name}, and set ISOFLOP_DATA to the folder that contains {name}."
        )
    content = _fetch(f"{host}/{record.repository}/{record.commit}/{entry.path}", entry, timeout)
    path = Path(folder or _cache()) / name / entry.name
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return path


def _located(name: str, file: str | None, folder: str | Path | None, download: bool) -> Path:
    entry = _file(name, file)
    folders = [folder] if folder else [os.environ.get("ISOFLOP_DATA"), _cache()]
    places = [Path(place) / name / entry.name for place in folders if place]
    for path in places:
        if path.is_file():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise InputError(f"{path} cannot be read ({error.strerror}); make it readable.") from None
            _verified(str(path), content, entry)
            return path
    if download:
        return download_published(name, file, folder)
    how = "download=True downloads it" if entry.sha256 else "download_published explains how to make it"
    raise InputError(f"{name} is not at {' or '.join(map(str, places))}; {how}, or set ISOFLOP_DATA to its folder.")


def _file(name: str, file: str | None) -> PublishedFile:
    files = published_data(name).files
    for entry in files:
        if file in (None, entry.name):
            return entry
    raise InputError(f"{name} has no file {file!r}; it has {', '.join(entry.name for entry in files)}.")


def _cache() -> Path:
    return Path(os.environ.get("ISOFLOP_CACHE") or Path.home() / ".cache" / "isoflop") / "published"


def _fetch(url: str, entry: PublishedFile, timeout: float) -> bytes:
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=timeout) as response:
            content = response.read(entry.size + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise InputError(f"{url} cannot be downloaded ({error}); try again, or download it by hand.") from None
    _verified(url, content, entry)
    return bytes(content)


def _verified(source: str, content: bytes, entry: PublishedFile) -> None:
    from hashlib import sha256

    if not entry.sha256:
        return
    if len(content) != entry.size:
        more = "more than " if len(content) > entry.size else ""
        raise InputError(
            f"{source} has {more}{min(len(content), entry.size)} bytes instead of {entry.size}; download it again."
        )
    digest = sha256(content).hexdigest()
    if digest != entry.sha256:
        raise InputError(f"{source} has SHA-256 {digest[:16]}… instead of {entry.sha256[:16]}…; download it again.")
