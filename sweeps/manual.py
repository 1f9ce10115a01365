"""What `sweep.py --help` prints: grids, groups and settings as the files of conf/ describe them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

HEAD = """\
python sweep.py +grid=GRID [GROUP=OPTION ...] [SETTING=VALUE ...]      (also: isoflop sweep +grid=GRID ...)

Plans a grid of small models, trains and scores them, fits their laws, and writes a report. The same command goes on
where an earlier one stopped.

  python sweep.py +grid=smoke                            seconds of work, to see that everything is in place
  python sweep.py +grid=chinchilla dry_run=true          the plan and its cost; starts nothing
  python sweep.py +grid=ladder sweep=orthogonal optimizer=muon
  python sweep.py +grid=chinchilla data=text data.path=corpus/ cluster=slurm
  python sweep.py --config-dir mine +grid=own            mine/grid/own.yaml beside the grids below
  python sweep.py data=hf --help                         the settings of another option
"""
TAIL = """\
--cfg job prints the whole composed configuration, --multirun starts one sweep per value of a list.
"""


def manual(config: Path, arguments: Sequence[str]) -> str:
    """The help, with the settings of the options that the arguments choose."""
    base = (config / "config.yaml").read_text(encoding="utf-8")
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", base, re.MULTILINE))
    chosen |= {group: option for group, option in _pairs(arguments) if (config / group / f"{option}.yaml").exists()}
    groups = {path.name: sorted(one.stem for one in path.glob("*.yaml")) for path in sorted(config.iterdir())}
    grids = groups.pop("grid")
    lines = [HEAD, "Grids:", *_described(config, grids), "", "Groups, with what is chosen first:"]
    for group, options in groups.items():
        if group in chosen:
            others = [option for option in options if option != chosen[group]]
            lines.append(f"  {group:<10} {', '.join([chosen[group], *others])}")
    own = re.sub(r"^(#.*|defaults:\n(  .*\n)+)", "", base, flags=re.MULTILINE).strip()
    lines += ["", "Settings:", textwrap.indent(own, "  ")]
    for group, option in chosen.items():
        text = (config / group / f"{option}.yaml").read_text(encoding="utf-8").rstrip()
        text = re.sub(r"^(# @package.*\n|defaults:\n(  .*\n)+)", "", f"{text}\n", flags=re.MULTILINE).rstrip()
        lines += ["", f"  {group}:    # {group}={option}", textwrap.indent(text, "    ")]
    return "\n".join([*lines, "", TAIL])


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for argument in arguments:
        group, _, option = argument.lstrip("+").partition("=")
        yield group, option


def _described(config: Path, grids: Sequence[str]) -> Iterator[str]:
    """Every grid with the first sentence of its file."""
    for grid in grids:
        text = (config / "grid" / f"{grid}.yaml").read_text(encoding="utf-8")
        comment = re.sub(r"\s*\n# ?", " ", "\n".join(re.findall(r"^# (?!@package).*$", text, re.MULTILINE)))
        first = re.match(r"#? ?(.*?[.])(?= |$)", comment)
        about = (first[1] if first else comment).strip()
        yield textwrap.fill(about, 118, initial_indent=f"  {grid:<12} ", subsequent_indent=" " * 15)
