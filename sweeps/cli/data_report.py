"""What a data recipe removed, step by step, as lines for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...train.data.shards import Shards

REASONS = 3  # of a step, the most frequent ones


def recipe_lines(shards: Shards) -> list[str]:
    """A table of what each step removed of the training documents, and where examples of it are; none for raw text."""
    recipe = shards.manifest.get("recipe")
    if recipe is None:
        return []
    from ...train.data.shards import EXAMPLES

    rows = [("", "documents", "bytes", "")]
    rows.append(("raw", *_amount(recipe["raw"], recipe["raw"]), ""))
    rows += [(f"- {step['step']}", *_amount(step, recipe["raw"]), _why(step)) for step in recipe["steps"]]
    rows.append(("kept", *_amount(recipe["kept"], recipe["raw"]), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return [*lines, f"examples of what went: {shards.directory / EXAMPLES}"]


def _amount(part: dict[str, Any], whole: dict[str, Any]) -> tuple[str, str]:
    return tuple(f"{part[unit]:,} ({part[unit] / max(1, whole[unit]):.1%})" for unit in ("documents", "bytes"))  # type: ignore[return-value]


def _why(step: dict[str, Any]) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in step["reasons"].items()]
    return ", ".join(reasons[:REASONS]) + (f", {len(reasons) - REASONS} more reasons" if len(reasons) > REASONS else "")
