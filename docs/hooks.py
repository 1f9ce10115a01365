"""Hooks of MkDocs: tables of all settings from dataclasses and conf/, and formulas as MathML, which needs no script."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
import sys
import tempfile
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

CONF = Path(__file__).resolve().parent.parent / "conf"
LINKS = tempfile.TemporaryDirectory()  # holds a link to the checkout, named `isoflop`
GROUPS = (
    *("model", "data", "optimizer", "schedule", "tuning", "average", "quantization", "checkpoint"),
    *("parallel", "cluster", "evaluate", "fit", "tracker", "trainer"),
)
OF_OPTIONS = ("kind", "corpus", "tasks", "path")  # settings that make an option what it is
WIDE = 24  # characters of a default above which it stands behind the meaning


def on_startup(**unused: Any) -> None:
    """Make this checkout importable as `isoflop` from a folder of any name, before plugins are set up."""
    (Path(LINKS.name) / "isoflop").symlink_to(CONF.parent)
    sys.path.insert(0, LINKS.name)


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Replace `<!-- settings: GROUP -->` by the group's settings, and names of `fit` in a list by their docstrings."""
    markdown = re.sub(r"<!-- settings: (\w+) -->", lambda match: settings(match[1]), markdown)
    return re.sub(r"^- `fit\.(\w+)`: .*$", lambda match: documented(match[1]), markdown, flags=re.MULTILINE)


def documented(name: str) -> str:
    """Return the directive of mkdocstrings for a public name of `fit`."""
    from isoflop import fit

    return f"\n::: isoflop.fit.{fit._HOMES[name]}.{name}\n"


def on_page_content(html_text: str, **unused: Any) -> str:
    """Replace the formulas that pymdownx.arithmatex marks by MathML, which every browser renders without a script."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
        lambda match: mathml(html.unescape(match[2]), "block" if match[1] == "div" else "inline"),
        html_text,
        flags=re.DOTALL,
    )


def mathml(formula: str, display: str) -> str:
    from latex2mathml.converter import convert

    result = str(convert(formula.strip(), display=display))
    return f'<div class="formula">{result}</div>' if display == "block" else result


def settings(group: str) -> str:
    """Return Markdown with the options of a group of settings and a table of its fields.

    Args:
        group: A group of `conf/`, "sweep" for settings outside all groups, or "grid" for all kinds of grid.
    """
    from isoflop.sweeps.config import SweepConfig
    from isoflop.sweeps.grid.base import GridConfig, grid_kinds

    base = CONF / "config.yaml"
    if group == "grid":
        variants = yaml_comments(CONF / "grid/compare.yaml", "")["variants"]
        parts = [f"### Every grid\n\n{table(GridConfig, None, leave_out={'kind', 'variants'})}"]
        parts[0] += (
            f"\n| `variants`<br>`null` | every point also as a variant; {cell(variants)} *(mapping or `null`)* |"
        )
        common = {item.name for item in dataclasses.fields(GridConfig)}
        for name, path in options("grid").items():
            match = re.search(r"^ +- (\w+)_schema", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert match is not None, path
            cls = grid_kinds()[match[1]]
            also = [CONF / "grid/chinchilla.yaml"] if issubclass(cls, grid_kinds()["isoflop"]) else []
            parts.append(f"### `+grid={name}`\n\n{about(path)}\n\n{table(cls, path, also, 'grid', common)}")
        return "\n\n".join(parts)
    if group == "sweep":
        return table(SweepConfig, base, leave_out={*GROUPS, "grid"})
    cls = get_type_hints(SweepConfig)[group]
    chosen = re.search(rf"^  - {group}: (\w+)$", base.read_text(encoding="utf-8"), re.MULTILINE)
    if chosen is None:
        return table(cls, base, group=group)
    paths = options(group)
    lines = [f"- `{group}={chosen[1]}` (default). {about(paths.pop(chosen[1]))}"] if len(paths) > 1 else []
    default = CONF / group / f"{'local' if group == 'cluster' else chosen[1]}.yaml"
    fields = {item.name: values(default, group).get(item.name, _default(item)) for item in dataclasses.fields(cls)}
    for name, path in paths.items() if lines else ():
        others = {key: value for key, value in values(path, group).items() if value != fields.get(key, value)}
        listed = ", ".join(f"`{key}: {written(value)}`" for key, value in others.items() if key not in OF_OPTIONS)
        lines.append(f"- `{group}={name}`. {about(path)}{f' Other defaults: {listed}.' if listed else ''}")
    return "\n".join([*lines, "", table(cls, default, [*paths.values()], group)])


def options(group: str) -> dict[str, Path]:
    """Return the files of a group of conf/ by the name of the option."""
    return {path.stem: path for path in sorted((CONF / group).glob("*.yaml"))}


def about(path: Path) -> str:
    """Return the comment at the top of a file of conf/, else that of its `kind`."""
    text = path.read_text(encoding="utf-8")
    top = "".join(re.findall(r"\A(?:#.*\n)+", text)).splitlines()
    kind = re.search(r"^kind: \w+ +# (.*)$", text, re.MULTILINE)
    comment = " ".join(line.strip("# ") for line in top if "@package" not in line) or (kind[1] if kind else "")
    comment = re.sub(r"python sweep\.py(?: '[^']+'| [+\w.]+=[^\s']*[^\s',])+", r"`\g<0>`", comment)
    comment = cell(comment[:1].upper() + comment[1:])
    return comment if comment.endswith((".", "`")) else f"{comment}."


def table(
    cls: Any, path: Path | None, others: Sequence[Path] = (), group: str = "", leave_out: Collection[str] = ()
) -> str:
    """Return a Markdown table of a dataclass's fields.

    Args:
        path: File of conf/ whose defaults and comments precede those of the class.
        others: Files whose comments are used for fields that have none behind them in `path` and in the class.
        group: The mapping in these files that holds the fields, for files that set several groups.
    """
    hints, (behind, above) = get_type_hints(cls, include_extras=True), class_comments(cls)
    files = [*([path] if path else []), *others]
    comments = [*(yaml_comments(file, group) for file in files), behind, above]
    defaults = values(path, group) if path else {}
    rows = ["| setting | meaning |", "| --- | --- |"]
    for item in dataclasses.fields(cls):
        if item.name in leave_out:
            continue
        default, kind = written(defaults.get(item.name, _default(item))), type_text(hints[item.name])
        meaning = next((names[item.name] for names in comments if item.name in names), "")
        if item.name == "kind" and options(group):
            meaning = f"set by `{group}=`"
        details = [] if " | " in meaning and kind.startswith("`") else [kind] if kind else []
        if len(default) > WIDE:
            details.append(f"default `{default}`")
        name = f"`{item.name}`" if len(default) > WIDE or not default else f"`{item.name}`<br>`{default}`"
        note = f" *({'; '.join(details)})*" if details else ""
        rows.append(f"| {name} | {cell(meaning)}{note} |")
    return "\n".join(rows)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
        return None if dataclasses.is_dataclass(value) else value
    return None if item.default is dataclasses.MISSING else item.default


def written(value: Any) -> str:
    """Return a value as YAML writes it, and numbers in short."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}".replace("e+", "e")
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "" if value == "???" else str(value).replace("|", "\\|")


def values(path: Path, group: str) -> dict[str, Any]:
    """Return the settings of a group in a file of conf/."""
    content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    inside = content.get(group)
    return inside if isinstance(inside, dict) else content


class _Loader(yaml.SafeLoader):
    """YAML as Hydra reads it, in which 6e-3 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def yaml_comments(path: Path, group: str) -> dict[str, str]:
    """Return the comments behind settings, at the top of the file and inside the mapping `group`, by setting."""
    comments, parent = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"( *)(\w+):(?: .*?)?(?: +# (.*))?$", line):
            indent, name, comment = match.groups()
            parent = parent if indent else name
            if comment and (not indent or (parent == group and len(indent) == 2)):
                comments[name] = comment
    return comments


def class_comments(cls: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the comments of a dataclass behind its fields and above them, each by field."""
    behind, above = {}, {}
    nodes: list[Any] = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    for node in reversed(nodes):
        lines: list[str] = []
        for line in inspect.getsource(node).splitlines():
            if match := re.match(r"    (\w+): [^#]*?(?:  # (.*))?$", line):
                if match[2]:
                    behind[match[1]] = match[2]
                elif lines:
                    text = " ".join(lines)
                    above[match[1]] = text[0].lower() + text[1:].rstrip(".")
            lines = [*lines, line.strip("# ")] if line.startswith("    # ") else []
    return behind, above


def type_text(hint: Any) -> str:
    """Return a type and its bounds in words."""
    if dataclasses.is_dataclass(hint):
        return f"mapping with {', '.join(f'`{item.name}`' for item in dataclasses.fields(hint))}"
    if get_origin(hint) is typing.Annotated:
        base, *notes = get_args(hint)
        if isinstance(notes[0], tuple):
            *first, last = (f"`{value}`" for value in notes[0])
            return f"{', '.join(first)} or {last}" if first else last
        meta, words = notes[0], type_text(base)
        bounds = [("from", meta.ge), ("above", meta.gt), ("below", meta.lt)]
        bounds += [("to", meta.le)] if meta.le is not None and meta.le <= 100 else []
        return " ".join([words, *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)])
    if type(None) in get_args(hint):
        inner = [part for part in get_args(hint) if part is not type(None)]
        return f"{type_text(inner[0])} or `null`"
    if get_origin(hint) is list:
        return f"list of {type_text(get_args(hint)[0]).replace('integer', 'integers').replace('number', 'numbers')}"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}.get(hint, "")


def cell(text: str) -> str:
    """Return a comment as Markdown for a table: `None` as YAML writes it, pages as links, and bars escaped."""
    text = re.sub(r"\bNone\b", "null", text)
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
    return text.replace("|", "\\|").replace("<", "&lt;")
