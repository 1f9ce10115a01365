"""Tables of runs, the input of every fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Array, InputError, check_weights, positive
from .formatting import text

if TYPE_CHECKING:
    import pandas as pd

ALIASES = {
    "N": ("N", "N_total", "params", "parameters", "n_params", "num_params"),
    "D": ("D", "tokens"),
    "loss": ("loss", "val_loss"),
    "loss_se": ("loss_se", "val_loss_se"),
    "flops": ("flops",),
    "run_id": ("run_id",),
    "group": ("group", "trunk"),
    "weight": ("weight",),
    "budget": ("budget",),
    "recipe": ("variant", "recipe"),
}
# Other names that suggest a role; errors propose these columns.
PERHAPS = {"N": "param|^n([_ ]|[at]$)|size", "D": "tok|^d[_ ]", "loss": "loss|ppl|perplexity|nll", "flops": "flop|comp"}
LOGARITHM = re.compile(r"(?:log|ln|lg)(2|10)?[_ ]?(\w+)", re.I)
# 125M, 1.3B tokens, 1,000 (commas are removed first)
SIZE = re.compile(r"(\d*\.?\d+(?:e[+-]?\d+)?) ?(?:([kmbgt])[a-z ]*)?", re.I)
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

IDS = {"run_id": str, "trunk": str}  # read as text even if all digits
MOST_COLUMNS, MOST_RUNS = 20_000, 10_000
MOST_BYTES = 8 << 20  # bytes of a header that are read
SHOWN = 20  # columns listed in an error


@dataclass(frozen=True)
class RunTable:
    """Finished runs as NumPy arrays of shape (n,).

    N parameters, D tokens, loss in nats per token, loss_se (NaN: unknown), flops, budget of the run's profile (NaN:
    none), run_id, group (rows with a common error: the trunk of a branch, else the run itself), weight. `frame` is the
    whole table with intermediate checkpoints, `rows` the positions of these runs in it, `notes` what was derived,
    dropped or assumed.
    """

    N: Array
    D: Array
    loss: Array
    loss_se: Array
    flops: Array
    budget: Array
    run_id: np.ndarray
    group: np.ndarray
    weight: Array
    frame: pd.DataFrame
    rows: np.ndarray
    notes: tuple[str, ...]
    source: str
    derived_d: bool = False
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.N)

    @property
    def known_se(self) -> Array | None:
        """Return `loss_se` if it is above zero in every row, else None."""
        return self.loss_se if (np.isfinite(self.loss_se) & (self.loss_se > 0)).all() else None

    def column(self, name: str) -> Array:
        return numeric(self.frame, name)[self.rows]

    def to_frame(self) -> pd.DataFrame:
        """Return the runs with the columns that laws read, without empty or default ones."""
        import pandas as pd

        names = ("run_id", "N", "D", "flops", "loss", "loss_se", "budget", "weight", "group")
        frame = pd.DataFrame({name: getattr(self, name) for name in names})
        if (self.weight == 1.0).all():
            frame = frame.drop(columns="weight")
        return frame.drop(columns="group" if (self.group == self.run_id).all() else []).dropna(axis=1, how="all")

    def _head(self) -> str:
        span = ", ".join(f"{name} {low:.3g} to {high:.3g}" for name, low, high in self._spans())
        return f"{len(self)} runs of {self.source}: {span}"

    def _spans(self) -> list[tuple[str, float, float]]:
        shown = {"N": self.N, "D": self.D, "FLOPs": self.flops, "loss": self.loss}
        return [(name, float(values.min()), float(values.max())) for name, values in shown.items() if len(values)]

    def __repr__(self) -> str:
        return f"{self._head()}\n{self.to_frame().to_string(max_rows=8, show_dimensions=False)}"

    def _repr_html_(self) -> str:
        return f"<p>{text(self._head())}</p>{self.to_frame().to_html(max_rows=8, show_dimensions=False)}"

    def where(self, keep: np.ndarray) -> RunTable:
        """Return a table of the runs selected by a mask (n,)."""
        names = ("N", "D", "loss", "loss_se", "flops", "budget", "run_id", "group", "weight", "rows")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})


def numeric(frame: pd.DataFrame, name: str) -> Array:
    """Return a column as numbers, NaN where absent or not a number."""
    import pandas as pd

    if name not in frame:
        return np.full(len(frame), np.nan)
    if np.iscomplexobj(frame[name]):
        raise InputError(f"{name} holds complex numbers; each must be a real number.")
    return pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)


def ended(frame: pd.DataFrame) -> np.ndarray:
    """Return a mask (rows,) of the rows whose column `final` is true."""
    return frame["final"].astype(str).str.strip().str.lower().isin(["true", "1", "1.0"]).to_numpy(dtype=bool)


def read_table(
    source: str | Path | pd.DataFrame,
    columns: Mapping[str, str] | None = None,
    derive_d: str | None = None,
    drop_worst: int = 0,
) -> RunTable:
    """Read runs from a CSV, JSON Lines or Parquet file, a sweep directory (its table.csv), or a DataFrame.

    Sizes such as 125M become numbers; a loss in a column named as a perplexity becomes its logarithm. Raises InputError
    if the table cannot be read or a number is not positive and finite.

    Parameters
    ----------
    columns
        Maps a name of ALIASES to the table's own, as in {"N": "Model Size"}; {"flops": "6nd"} counts 6ND.
    derive_d
        "6nd" fills a missing D as flops / (6 N).
    drop_worst
        Number of runs of highest loss to leave out.
    """
    frame, header, origin = _load(source)
    frame, notes = _averaged(frame, source)
    if len(frame) == 0:
        raise InputError(f"{origin} has no rows; at least one run is needed.")
    if derive_d not in (None, "6nd"):
        raise InputError(f"derive_d is {derive_d!r}; '6nd' (D = FLOPs / 6N) or None is accepted.")
    names = _resolve(header, columns or {}, origin)
    if "recipe" in names:
        frame = frame.assign(recipe=frame[names["recipe"]])
    rows = _finished(frame, notes, origin)
    part = frame.iloc[rows]
    # Line numbers of a file with a header, for errors.
    labels = list(part.index + (2 if isinstance(source, (str, Path)) else 0))

    numbers = partial(_numbers, part, names, labels, notes)
    N = positive(names["N"], numbers("N"), labels)
    flops = positive(names["flops"], numbers("flops"), labels) if "flops" in names else None
    if "D" in names:
        D = positive(names["D"], numbers("D"), labels)
        if derive_d:
            notes.append("D is in the table, so it was not derived.")
    else:
        D = _derived(frame, N, flops, derive_d, origin)
        notes.append("D was not given and is derived as FLOPs / (6N).")
    loss = positive(names["loss"], numbers("loss"), labels)
    with np.errstate(over="ignore", under="ignore"):
        six_nd = positive("FLOPs (6ND)", 6.0 * N * D, labels)
    if flops is None:
        flops = six_nd
        notes.append("FLOPs were not given and are taken as 6ND.")
    run_id = part[names["run_id"]].astype(str).to_numpy() if "run_id" in names else np.arange(len(part)).astype(str)
    group = run_id
    if "group" in names:
        named = part[names["group"]]
        group = np.where(named.isna(), run_id, named.astype(str))
    selected = _best(loss, drop_worst, notes)
    table = RunTable(
        N=N,
        D=D,
        loss=loss,
        loss_se=numbers("loss_se"),
        flops=flops,
        budget=numbers("budget"),
        run_id=np.asarray(run_id, dtype=str),
        group=np.asarray(group, dtype=str),
        weight=check_weights(numbers("weight") if "weight" in names else None, len(part), labels),
        frame=frame,
        rows=rows,
        notes=tuple(notes),
        source=origin,
        derived_d="D" not in names,
        dropped=drop_worst,
    )
    return table.where(selected)


def _numbers(part: pd.DataFrame, names: dict[str, str], labels: list[Any], notes: list[str], name: str) -> Array:
    if name not in names:
        return np.full(len(part), np.nan)
    column = names[name]
    values, texts = numeric(part, column).copy(), part[column].astype(str).str.replace(",", "").str.strip()
    for i in np.flatnonzero(np.isnan(values) & part[column].notna().to_numpy()):
        if name in ("N", "D", "flops") and (size := SIZE.fullmatch(texts.iloc[i])):
            values[i] = float(size[1]) * FACTORS[(size[2] or "").lower()]
        elif texts.iloc[i].lower() != "nan":
            raise InputError(f"{column} is {part[column].iloc[i]!r} in row {labels[i]}; a number is expected.")
    if name == "loss" and re.search("ppl|perplexity", column, re.I):
        notes.append(f"{column} is taken as a perplexity, so the loss is its natural logarithm.")
        values = np.log(np.maximum(values, 1.0))
    return values


def _load(source: str | Path | pd.DataFrame) -> tuple[pd.DataFrame, list[str], str]:
    """Return the table, its column names before pandas renames duplicates, and its name for messages."""
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        return source.reset_index(drop=True), [str(name) for name in source.columns], "the table"
    if not isinstance(source, (str, Path)):
        raise InputError(f"table is a {type(source).__name__}; a path or a DataFrame is expected.")
    path = Path(source)
    if path.is_dir():
        if not (path / "table.csv").is_file():
            raise InputError(f"{path} has no table.csv; give a sweep directory that has finished runs, or a table.")
        path = path / "table.csv"
    if not path.is_file():
        raise InputError(f"{path} does not exist; give a CSV, JSON Lines or Parquet file, or a sweep directory.")
    kind = {".parquet": "Parquet", ".pq": "Parquet", ".jsonl": "JSON Lines"}.get(path.suffix.lower(), "CSV")
    try:
        with path.open("rb") as file:  # pandas takes minutes for a million columns
            width = file.readline(MOST_BYTES).count(b",") + 1 if kind == "CSV" else 0
        if width > MOST_COLUMNS:
            raise InputError(f"{path} has more than {MOST_COLUMNS:,} columns; one row per run is expected.")
        if kind == "CSV":  # read_csv renames the second of two equal columns
            header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna()
            return pd.read_csv(path, low_memory=False, dtype=IDS), [str(name) for name in header], str(path)
        frame = pd.read_parquet(path) if kind == "Parquet" else pd.read_json(path, lines=True)
        return frame, [str(name) for name in frame.columns], str(path)
    except InputError:
        raise
    except pd.errors.EmptyDataError:
        raise InputError(f"{path} is empty; a header and at least one run are needed.") from None
    except Exception as error:  # readers raise various exceptions of their backends
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"{path} is not a readable {kind} file ({reason}).") from None


def _averaged(frame: pd.DataFrame, source: Any) -> tuple[pd.DataFrame, list[str]]:
    """Add losses of averaged model weights as rows, if `source` has a curves.csv. Returns the table and notes."""
    import pandas as pd

    from .curves.averaged import with_averages

    if not isinstance(source, (str, Path)) or not (path := Path(source) / "curves.csv").is_file():
        return frame, []
    try:
        more, note = with_averages(frame, pd.read_csv(path, low_memory=False, dtype=IDS))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read as curves ({error}); write it again with `isoflop report`.") from None
    return more, [note] if note else []


def _resolve(exist: list[str], columns: Mapping[str, str], source: str) -> dict[str, str]:
    if twice := sorted(name for name, times in Counter(exist).items() if times > 1):
        raise InputError(f"{source} has more than one column {twice[0]!r}; each name must occur once.")
    unknown = [name for name in columns if name not in ALIASES]
    if unknown:
        raise InputError(f"column {unknown[0]!r} is not a known name; choose among {', '.join(ALIASES)}.")
    names = {}
    for name, aliases in ALIASES.items():
        accepted = (columns[name],) if name in columns else aliases
        present = [column for column in accepted if column in exist]
        if present:
            names[name] = present[0]
        elif name in ("N", "loss") or (name in columns and accepted != ("6nd",)):
            raise InputError(f"{source} has no column {accepted[0]!r}; it has {_some(exist)} ({_remedy(name, exist)}).")
    return names


def _remedy(name: str, exist: list[str]) -> str:
    for column in exist:
        if (match := LOGARITHM.fullmatch(column)) and match[2].lower() in map(str.lower, ALIASES[name]):
            power = f"{match[1]} ** t[{column!r}]" if match[1] else f"np.exp(t[{column!r}])"
            return f"{column} is a logarithm: `t[{name!r}] = {power}` makes the column of a DataFrame t"
    perhaps = [column for column in exist if name in PERHAPS and re.search(PERHAPS[name], column, re.I)]
    return " or ".join(f"`--column {name}={quote(c)}`" for c in perhaps or ["..."]) + " selects it"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _finished(frame: pd.DataFrame, notes: list[str], source: str) -> np.ndarray:
    keep = np.ones(len(frame), dtype=bool)
    if "final" in frame:
        keep = ended(frame)
        if not keep.all():
            notes.append(f"{int((~keep).sum())} intermediate checkpoints are left out of the fits.")
    if "state" in frame:
        done = frame["state"].isna().to_numpy() | (frame["state"].astype(str) == "done").to_numpy()
        if (keep & ~done).any():
            notes.append(f"{int((keep & ~done).sum())} rows of unfinished runs are left out.")
        keep = keep & done
    if not keep.any():
        raise InputError(f"{source} has {len(frame)} rows, but none of a finished run; at least one is needed.")
    if (runs := int(keep.sum())) > MOST_RUNS:
        raise InputError(
            f"{source} has {runs:,} rows of finished runs; at most {MOST_RUNS:,} can be fitted (to leave out "
            "intermediate checkpoints, add a column final that is false for them)."
        )
    return np.flatnonzero(keep)


def _derived(frame: pd.DataFrame, N: Array, flops: Array | None, derive_d: str | None, source: str) -> Array:
    exist = _some(list(map(str, frame.columns)))
    if derive_d is None:
        hint = ", or derive D from the FLOPs with derive_d='6nd'" if flops is not None else ""
        remedy = _remedy("D", list(map(str, frame.columns)))
        raise InputError(f"{source} has no column 'D'; it has {exist} ({remedy}{hint}).")
    if flops is None:
        raise InputError(f"D cannot be derived as FLOPs / 6N because {source} has no column 'flops'; it has {exist}.")
    return flops / (6.0 * N)


def _best(loss: Array, drop_worst: int, notes: list[str]) -> np.ndarray:
    if drop_worst < 0 or drop_worst >= len(loss):
        raise InputError(
            f"drop_worst is {drop_worst}; it must be at least 0 and below {len(loss)}, the number of runs in the table."
        )
    selected, dropped = np.split(np.argsort(loss, kind="stable"), [len(loss) - drop_worst])
    if drop_worst:
        out = ", ".join(f"{value:.4g}" for value in loss[dropped])
        notes.append(f"The {drop_worst} highest losses were dropped at the user's request ({out}).")
    return np.sort(selected)
