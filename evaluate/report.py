"""One checkpoint's scores as a page and as plain text.

Special here: the page is one file without scripts, fonts or network; error bars are inline SVG; chance is drawn beside
accuracy, because an accuracy says nothing without it. Every text is escaped.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ..train.files import write_atomic

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1d2733;background:#f6f7f9;margin:0}
main{max-width:960px;margin:32px auto;padding:28px 36px;background:#fff;border:1px solid #e3e7ec;border-radius:10px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}.muted{color:#66727f}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:10px 24px;margin:18px 0 0}
dt{font-size:12px;color:#66727f}dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}th{font-size:12px;color:#66727f;font-weight:500}
th,td{text-align:right;padding:7px 8px;border-bottom:1px solid #edf0f3;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}.warn{background:#fff5e0;border-left:3px solid #d9920a;padding:8px 12px}
"""
_WIDTH = 220  # of an accuracy bar, in pixels


def write_checkpoint_report(scores: dict[str, Any], path: Path) -> None:
    """Writes a self-contained HTML page of what `evaluate_checkpoint` returned."""
    write_atomic(path, render(scores))


def render(scores: dict[str, Any]) -> str:
    """The page as text."""
    held_out = scores.get("held_out") or {}
    facts = {
        "Run": scores["run_id"],
        "Step": f"{scores['step']:,}",
        "Parameters (N_total)": f"{scores['N_total']:,}",
        "Tokens": f"{scores['tokens']:,}",
        "Held-out loss, nats/token": _with_error(held_out.get("val_loss"), held_out.get("val_loss_se"), 4),
        "Held-out bits per byte": _number(held_out.get("val_bpb"), 4),
        "lm-eval": scores["lm_eval_version"],
        "Device": f"{scores['device']}, {scores['seconds']:.1f} s",
    }
    rows = "".join(_row(name, task) for name, task in scores["tasks"].items())
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>Scores of {escape(str(scores["run_id"]))}, step {escape(str(scores["step"]))}</title>
<style>{_STYLE}</style></head>
<body><main><h1>Checkpoint scores</h1><div class="muted">{escape(str(scores["checkpoint"]))}</div>
<dl>{"".join(f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts.items())}</dl>
<h2>Benchmarks</h2>{"".join(f'<p class="warn">{escape(line)}</p>' for line in _warnings(scores))}
<table><thead><tr><th>Task</th><th>Items</th><th>Accuracy</th><th>Chance</th><th></th><th>Length-normalised</th>
<th>Gold bits per byte</th></tr></thead><tbody>{rows}</tbody></table>
<p class="muted">± is one standard error over items. The bar is accuracy, its whisker two standard errors, the tick
chance. Gold bits per byte: what the model spends on the right answer, per UTF-8 byte; lower is better.</p>
</main></body></html>
"""


def _row(name: str, task: dict[str, Any]) -> str:
    of = task["subset"]["of"]
    cells = [
        escape(name),
        f"{task['items']:,} of {of:,}",
        escape(_with_error(task["acc"], task["acc_se"], 3)),
        escape(_number(task["chance"], 3)),
        _bar(task["acc"], task["acc_se"], task["chance"]),
        escape(_with_error(task["acc_norm"], task["acc_norm_se"], 3)),
        escape(_with_error(task["gold_bpb"], task["gold_bpb_se"], 3)),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _bar(accuracy: float | None, error: float | None, chance: float | None) -> str:
    """Accuracy from 0 to 1 with a whisker of two standard errors and a tick at chance; nothing without accuracy."""
    if accuracy is None:
        return ""
    low, high = (max(0.0, accuracy - 2 * (error or 0)), min(1.0, accuracy + 2 * (error or 0)))
    tick = ""
    if chance is not None:
        x = f"{chance * _WIDTH:.1f}"
        tick = f'<line x1="{x}" x2="{x}" y1="0" y2="16" stroke="#c2410c" stroke-width="2"/>'
    return (
        f'<svg width="{_WIDTH}" height="16" role="img" aria-label="accuracy {accuracy:.3f}">'
        f'<rect y="3" width="{_WIDTH}" height="10" rx="2" fill="#edf0f3"/>'
        f'<rect y="3" width="{accuracy * _WIDTH:.1f}" height="10" rx="2" fill="#5b8fd6"/>'
        f'<line x1="{low * _WIDTH:.1f}" x2="{high * _WIDTH:.1f}" y1="8" y2="8" stroke="#16324f"/>{tick}</svg>'
    )


def _warnings(scores: dict[str, Any]) -> list[str]:
    lines = []
    for name, task in scores["tasks"].items():
        if task["withheld"]:
            lines.append(f"{name} has no score: {task['withheld']}.")
        elif task["truncated_items"]:
            lines.append(
                f"{name}: the prompts of {task['truncated_items']} of {task['items']} items were cut on the left to "
                f"the model's context of {scores['sequence_length']} tokens."
            )
    if (scores.get("held_out") or {}).get("withheld"):
        lines.append(f"Held-out loss is missing: {scores['held_out']['withheld']}.")
    return lines


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _with_error(value: float | None, error: float | None, digits: int) -> str:
    return _number(value, digits) + ("" if value is None or error is None else f" ± {error:.{digits}f}")


def format_scores(scores: dict[str, Any]) -> str:
    """The same as a plain table, for a terminal."""
    table = [("task", "items", "accuracy", "chance", "acc_norm", "gold BPB")]
    for name, task in scores["tasks"].items():
        scored = [_with_error(task[key], task[f"{key}_se"], 3) for key in ("acc", "acc_norm", "gold_bpb")]
        table.append((name, str(task["items"]), scored[0], _number(task["chance"], 3), scored[1], scored[2]))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines + _warnings(scores))
