"""Tables of runs, the input of every fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Array, InputError, check_weights, floats, positive
from .formatting import text

if TYPE_CHECKING:
    import pandas as pd

ALIASES = {  # also with other separators, in upper or lower case, and with a unit behind them
    "N": ("N", "N_total", "params", "parameters", "n_params", "num_params", "num_parameters"),
    "D": ("D", "tokens", "train_tokens", "tokens_seen", "n_tokens_seen"),
    "loss": ("loss", "val_loss", "eval_loss", "validation_loss"),
    "loss_se": ("loss_se", "val_loss_se"),
    "flops": ("flops",),
    "run_id": ("run_id", "run", "run_name"),
    "group": ("group", "trunk"),
    "weight": ("weight",),
    "budget": ("budget",),
    "recipe": ("variant", "recipe"),
}
# Other names that suggest a role, the first that matches; errors propose these columns.
PERHAPS = {"D": "tok|^d[_ ]", "loss": "loss|ppl|perplexity|nll", "flops": "flop|comp", "N": "param|^n([_ ]|[at]$)|size"}
LOGARITHM = re.compile(r"(?:log|ln|lg)(2|10)?[_ ]?(\w+)", re.I)
WORD = "(?:thousand|million|billion|trillion)s?|bn"
# 125M, 1.3B tokens, 2 billion, 1,000
SIZE = re.compile(
    rf"(?i)((?:\d{{1,3}}(?:,\d{{3}})+|\d+|(?=\.\d))(?:\.\d*)?(?:e[+-]?\d+)?) ?({WORD}|[kmbgt])?"
    r"(?: ?(?:tok(?:en)?|param(?:eter)?|flop)s?)?"
)
# params (M), tokens [in billions], FLOPs (1e18), tokens_b, D_billions
UNIT = re.compile(
    rf"(?i)(.+?)(?:[ _-]*[(\[](?:in )?({WORD}|[kmbgt]|1e\d+)(?: \w+)?[)\]]|[ _-](?:in[ _-])?({WORD}|[kmb]))"
)
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
FACTORS |= {"thousand": 1e3, "million": 1e6, "bn": 1e9, "billion": 1e9, "trillion": 1e12}

SIZES = ("N", "D", "flops", "budget")
NO_NUMBERS = (bool, np.bool_, complex, date, timedelta)  # what pandas would turn into numbers
IDS = {"run_id": str, "run": str, "trunk": str}  # read as text even if all digits
MOST_COLUMNS, MOST_RUNS = 20_000, 10_000
MOST_BYTES = 8 << 20  # bytes of a header that are read
SHOWN = 20  # columns listed in an error
LOGGED = 50  # D per run that are logged steps, not checkpoints: published tables of those have up to 35 (Gemstones)
LOG_LINE = re.compile(r"[=:] ?[-+]?\d")  # in a header: key=1, key: 1, 12:30
READ = "CSV, JSON, JSON Lines or Parquet file with one row per run"


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
    earlier: int = 0  # rows left out as logged steps before the last of a run

    def __len__(self) -> int:
        return len(self.N)

    @property
    def known_se(self) -> Array | None:
        """Return `loss_se` if it is above zero in every row, else None."""
        return self.loss_se if (np.isfinite(self.loss_se) & (self.loss_se > 0)).all() else None

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of a law's `fit` other than its inputs and the loss."""
        return {"weight": self.weight, "loss_se": self.known_se, "flops": self.flops, "groups": self.group}

    def column(self, name: str) -> Array:
        return numeric(self.frame, name)[self.rows]

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame of the columns that laws read, without empty or default columns."""
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


Runs = Any  # a RunTable, a DataFrame, or a path that `read_table` reads


def as_table(source: Runs) -> RunTable:
    """Return `source` itself if it is a RunTable, else read it with `read_table`."""
    return source if isinstance(source, RunTable) else read_table(source)


def columns_of(table: Any, names: Sequence[str]) -> list[Any]:
    """Return the columns `names` of a RunTable or DataFrame. Raises InputError if one is missing."""
    if isinstance(table, RunTable):
        fields = {name: getattr(table, name) for name in ("N", "D", "loss", "flops")}
        table = table.frame.iloc[table.rows].assign(**fields)
    exist = list(map(str, table.columns))
    columns = [next((column for column in (name, *ALIASES.get(name, ())) if column in exist), "") for name in names]
    if "" in columns:
        raise InputError(f"the table has no column {names[columns.index('')]!r}; it has {some(exist)}.")
    return [table[column].to_numpy() for column in columns]


def by_name(
    what: str, inputs: Sequence[str], positional: Sequence[Any], named: Mapping[str, Any], output: Sequence[str] = ()
) -> dict[str, Any]:
    """Match arguments to the names in `inputs` and `output`; `what` names the function in an InputError.

    The first argument may be a RunTable or DataFrame with all names not given otherwise, or an array (n, inputs).
    """
    names, values = (*inputs, *output), list(positional)
    unnamed = [name for name in names if name not in named]
    covered = unnamed[: len(unnamed) - len(values) + 1]
    if values and (isinstance(values[0], RunTable) or hasattr(values[0], "columns")):
        values[:1] = columns_of(values[0], covered)
    elif values and covered == [*inputs] and (array := floats(values[0])).shape[1:] == (len(inputs),):
        values[:1] = array.T
    arguments = dict(zip(unnamed, values, strict=False)) | dict(named)
    if len(values) + len(named) != len(names) or set(arguments) != set(names):
        received = ", ".join([*(f"#{i + 1}" for i in range(len(values))), *named]) or "nothing"
        raise InputError(f"{what} was given {received}; it takes {', '.join(names)}, each once, or a table with them.")
    return {name: arguments[name] for name in names}


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
        Maps names of ALIASES to the table's columns, as in {"N": "Model Size"}; {"flops": "6nd"} counts 6ND.
    derive_d
        "6nd" fills a missing D as flops / (6 N).
    drop_worst
        Number of runs of highest loss to leave out.
    """
    frame, header, origin = load(source)
    frame, notes = _averaged(frame, source)
    if len(frame) == 0:
        raise InputError(f"{origin} has no rows; at least one run is needed.")
    if derive_d not in (None, "6nd"):
        raise InputError(f"derive_d is {derive_d!r}; '6nd' (D = FLOPs / 6N) or None is accepted.")
    names = _resolve(frame, header, columns or {}, origin)
    if "recipe" in names:
        frame = frame.assign(recipe=frame[names["recipe"]])
    rows = finished = _finished(frame, notes, origin)
    if "final" not in frame and "group" not in (columns or {}):
        frame, rows = _last_steps(frame, names, rows)
    _check_count(len(rows), origin)
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
    run_id, group = _identities(part, names)
    selected = _best(loss, drop_worst, notes)
    table = RunTable(
        N=N,
        D=D,
        loss=loss,
        loss_se=numbers("loss_se"),
        flops=flops,
        budget=numbers("budget"),
        run_id=run_id,
        group=group,
        weight=check_weights(numbers("weight") if "weight" in names else None, len(part), labels),
        frame=frame,
        rows=rows,
        notes=tuple(notes),
        source=origin,
        derived_d="D" not in names,
        dropped=drop_worst,
        earlier=len(finished) - len(rows),
    )
    return table.where(selected)


def _check_count(runs: int, origin: str) -> None:
    if runs > MOST_RUNS:
        raise InputError(
            f"{origin} has {runs:,} rows of finished runs; at most {MOST_RUNS:,} can be fitted (to leave out "
            "intermediate checkpoints, add a column final that is false for them)."
        )


def _identities(part: pd.DataFrame, names: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's run id and its group (if missing: the run id), both (rows,)."""
    run_id = part[names["run_id"]].astype(str).to_numpy() if "run_id" in names else np.arange(len(part)).astype(str)
    if "group" not in names:
        return np.asarray(run_id, dtype=str), np.asarray(run_id, dtype=str)
    group = part[names["group"]]
    return np.asarray(run_id, dtype=str), np.where(group.isna(), run_id, group.astype(str)).astype(str)


def _numbers(part: pd.DataFrame, names: dict[str, str], labels: list[Any], notes: list[str], name: str) -> Array:
    if name not in names:
        return np.full(len(part), np.nan)
    column = names[name]
    cells = part[column].map(lambda cell: str(cell) if isinstance(cell, NO_NUMBERS) else cell)
    unit = unit_of(column, name)[1]
    values = numeric(part.assign(**{column: cells}), column) * unit
    if unit != 1.0:
        notes.append(f"{column} is taken in units of {unit:g}.")
    for i in np.flatnonzero(np.isnan(values) & cells.notna().to_numpy()):
        content = str(cells.iloc[i]).strip()
        if name in SIZES and (size := SIZE.fullmatch(content)):
            values[i] = float(size[1].replace(",", "")) * (FACTORS[size[2].lower().rstrip("s")] if size[2] else unit)
        elif content.lower() != "nan":
            hint = ", such as 1300000000, 1,300,000,000 or 1.3B" if name in SIZES else ""
            raise InputError(f"{column} is {part[column].iloc[i]!r} in row {labels[i]}; a number is expected{hint}.")
    if name == "loss" and re.search("ppl|perplexity", column, re.I):
        notes.append(f"{column} is taken as a perplexity, so the loss is its natural logarithm.")
        values = np.log(np.maximum(values, 1.0))
    return values


def unit_of(column: str, name: str) -> tuple[str, float]:
    """Split the unit off a column of sizes: "tokens (B)" gives ("tokens", 1e9). The factor is 1 for other columns."""
    match = UNIT.fullmatch(column) if name in SIZES else None
    base, unit = filter(None, match.groups()) if match else (column, "")
    return base, FACTORS.get(unit.lower().rstrip("s")) or float(unit)


def load(source: str | Path | pd.DataFrame, default: str = "table.csv") -> tuple[pd.DataFrame, list[str], str]:
    """Return the table, its column names as in the file, and its name for errors. In a directory, `default` is read."""
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        return source.reset_index(drop=True), [str(name) for name in source.columns], "the table"
    if not isinstance(source, (str, Path)):
        raise InputError(f"table is a {type(source).__name__}; a path or a DataFrame is expected.")
    path = Path(source)
    if path.is_dir():
        if not (path / default).is_file():
            raise InputError(f"{path} has no {default}; give a sweep directory that has finished runs, or a table.")
        path = path / default
    if not path.is_file():
        raise InputError(f"{path} does not exist; give a {READ}, or a sweep directory.")
    kinds = {".parquet": "Parquet", ".pq": "Parquet", ".jsonl": "JSON Lines", ".json": "JSON"}
    kind = kinds.get(path.suffix.lower(), "CSV")
    try:
        with path.open("rb") as file:  # pandas takes minutes for a million columns
            width = file.readline(MOST_BYTES).count(b",") + 1 if kind == "CSV" else 0
        if width > MOST_COLUMNS:
            raise InputError(f"{path} has more than {MOST_COLUMNS:,} columns; one row per run is expected.")
        if kind == "CSV":  # read_csv renames the second of two equal columns
            header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna()
            separator = next((sign for sign in ";\t" if len(header) == 1 and sign in header[0]), ",")
            header = header if separator == "," else header[0].split(separator)
            frame = pd.read_csv(path, sep=separator, low_memory=False, dtype=IDS)
            return frame, [str(name) for name in header], str(path)
        frame = pd.read_parquet(path) if kind == "Parquet" else pd.read_json(path, lines=kind == "JSON Lines")
        return frame, [str(name) for name in frame.columns], str(path)
    except InputError:
        raise
    except pd.errors.EmptyDataError:
        raise InputError(f"{path} is empty; a header and at least one run are needed.") from None
    except Exception as error:  # readers raise various exceptions of their backends
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"{path} is not a readable {kind} file ({reason}).") from None


def _averaged(frame: pd.DataFrame, source: Any) -> tuple[pd.DataFrame, list[str]]:
    """Add rows for averaged model weights if `source` is a folder with a curves.csv. Returns the table and notes."""
    import pandas as pd

    from .curves.averaged import with_averages

    if not isinstance(source, (str, Path)) or not (path := Path(source) / "curves.csv").is_file():
        return frame, []
    try:
        more, note = with_averages(frame, pd.read_csv(path, low_memory=False, dtype=IDS))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read as curves ({error}); write it again with `isoflop report`.") from None
    return more, [note] if note else []


def _resolve(frame: pd.DataFrame, exist: list[str], columns: Mapping[str, str], source: str) -> dict[str, str]:
    if twice := sorted(name for name, times in Counter(exist).items() if times > 1):
        raise InputError(f"{source} has more than one column {twice[0]!r}; each name must occur once.")
    unknown = [name for name in columns if name not in ALIASES]
    if unknown:
        raise InputError(f"column {unknown[0]!r} is not a known name; choose among {', '.join(ALIASES)}.")
    names = {}
    for name, aliases in ALIASES.items():
        column = columns.get(name) or alias_in(exist, aliases, name)
        if column in exist:
            names[name] = column
        elif name in ("N", "loss") or (name in columns and column != "6nd"):
            remedy, start = _remedy(name, exist), ", ".join(exist)[:60]
            if len(exist) == 1 or (remedy.startswith("add one") and any(map(LOG_LINE.search, exist))):
                raise InputError(f"{source} begins with {start!r} and not with a header like N,D,loss; give a {READ}.")
            raise InputError(f"{source} has no column {column or name!r}; it has {some(exist)} ({remedy}).")
    ids = names.get("run_id", "run_id")
    if ids not in ("run_id", columns.get("run_id")) and frame.groupby(ids)[names["N"]].nunique().max() > 1:
        del names["run_id"]  # a column `run` may number the seeds of every size
    return names


def alias_in(exist: Sequence[str], aliases: Iterable[str], name: str) -> str | None:
    """Return the column that matches the first possible alias, or None.

    Names longer than a letter may differ in case and separators, and columns of sizes may have a unit.
    """
    spelled = {column: column for column in exist}
    for column in exist:
        base = unit_of(column, name)[0]
        spelled.setdefault(re.sub(r"[ /.-]+", "_", base.strip().lower()) if len(base) > 1 else base, column)
    names = (alias.lower() if len(alias) > 1 else alias for alias in aliases)
    return next((spelled[alias] for alias in names if alias in spelled), None)


def _remedy(name: str, exist: list[str]) -> str:
    for column in exist:
        if (match := LOGARITHM.fullmatch(column)) and match[2].lower() in map(str.lower, ALIASES[name]):
            power = f"{match[1]} ** t[{column!r}]" if match[1] else f"np.exp(t[{column!r}])"
            return f"{column} is a logarithm: `t[{name!r}] = {power}` makes the column of a DataFrame t"
    roles = [next((role for role in PERHAPS if re.search(PERHAPS[role], column, re.I)), "") for column in exist]
    perhaps = [column for column, role in zip(exist, roles, strict=True) if role == name]
    if not perhaps:
        return f"add one, or select it with `columns={{{name!r}: '...'}}`"
    return " or ".join(f"`columns={{{name!r}: {c!r}}}`" for c in perhaps) + " selects it"


def some(names: list[str]) -> str:
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
    return np.flatnonzero(keep)


def _last_steps(frame: pd.DataFrame, names: dict[str, str], rows: np.ndarray) -> tuple[pd.DataFrame, np.ndarray]:
    """If rows are logged steps, keep each run's last row with a loss, and fill gaps in its N and D from nearby rows.

    Without run ids, a new run begins where N differs or D falls. Returns the table and the rows kept.
    """
    import pandas as pd

    part, size, tokens = frame.iloc[rows], names["N"], names.get("D", names.get("flops"))
    if tokens in (None, size) or len(rows) < LOGGED:
        return frame, rows
    has_ids = "run_id" in names and part[names["run_id"]].duplicated().any()
    ids = pd.factorize(part[names["run_id"] if has_ids else size])[0]
    filled = part[[size, tokens]].groupby(ids).ffill().groupby(ids).bfill()
    run = filled.groupby([ids, size]).ngroup()
    D = pd.Series(numeric(filled, tokens), part.index).fillna(0.0)
    restart = run * 0 if has_ids else D.groupby(run).diff().lt(0).groupby(run).cumsum()
    if D.groupby([run, restart]).nunique().mean() < LOGGED:
        return frame, rows
    order = np.lexsort((D, np.isfinite(numeric(part, names["loss"]))))
    last = ~pd.DataFrame({"run": run, "restart": restart}).iloc[order].duplicated(keep="last").to_numpy()
    frame = frame.copy()
    frame.update(filled)
    return frame, np.sort(rows[order[last]])


def _derived(frame: pd.DataFrame, N: Array, flops: Array | None, derive_d: str | None, source: str) -> Array:
    exist = some(list(map(str, frame.columns)))
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
