"""The README.md of an exported model (`model_card.md`): its shape, cost and scores. Unknown values are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ...train.checkpoint.checkpoint import LoadedCheckpoint, quantization
from ...train.config import run_id, to_dict
from ...train.flops import count_parameters, training_flops_per_token
from ...train.model.shape import model_shape
from ..pages.page import is_number, scored, with_error
from .hf import window_of

SCORES = {
    "acc": "accuracy",
    "acc_norm": "length-normalised",
    "exact_match": "exact match",
    "gold_bpb": "gold BPB",
    "bpb": "BPB",
}
# Counts of items that are listed next to a task's scores, and their names.
CAVEATS = {
    "truncated_items": "items whose prompt was cut to the context",
    "contaminated_items": "items that share text with the training data",
}


@dataclass(frozen=True)
class Facts:
    """Facts about a checkpoint that its own files lack."""

    scores: Mapping[str, Any] | None = None  # see `Evaluator.evaluate`; `held_out` alone is enough
    law: Mapping[str, Any] | None = None  # of its sweep: form, predicted_loss, interval (low, high) or None
    provenance: Mapping[str, Any] = field(default_factory=dict)  # isoflop_version, git_commit, git_dirty of training
    version: str | None = None  # of the isoflop that exports


def model_card(loaded: LoadedCheckpoint, facts: Facts) -> str:
    """Return a checkpoint's model card in Markdown."""
    config = loaded.config
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"json": json.dumps, "plain": _plain, "scored": scored, "caveats": _caveats}
    environment.tests["number"] = is_number
    tasks = dict(sorted(((facts.scores or {}).get("tasks") or {}).items()))
    context = {
        "title": f"{config.name or f'isoflop {run_id(config)}'}, step {loaded.step}",
        "model": config.model,
        "data": config.data,
        "quantization": config.quantization,
        "run_id": run_id(config),
        "step": loaded.step,
        "checksum": loaded.checksum,
        "has_head_norms": model_shape(config.model).head_norms,
        "window": window_of(config.model, config.data.sequence_length),
        "output_scale": loaded.model.output_scale,
        "rows": _rows(loaded, facts),
        "tasks": tasks,
        "columns": {
            key: name for key, name in SCORES.items() if any(is_number(task.get(key)) for task in tasks.values())
        },
        "made": facts.provenance,
        "version": facts.version,
        "configuration": json.dumps(to_dict(config), indent=1, default=str),
    }
    return environment.get_template("model_card.md").render(context) + "\n"


def _rows(loaded: LoadedCheckpoint, facts: Facts) -> list[tuple[str, str]]:
    config = loaded.config
    model, count, tokens = config.model, count_parameters(config.model), loaded.step * config.batch_tokens
    exact = training_flops_per_token(model, config.data.sequence_length) * tokens
    rows = [
        ("N_total (every weight)", f"{count.N_total:,}"),
        ("N_non_embedding", f"{count.N_non_embedding:,}"),
        ("N_kaplan (matrices inside the blocks)", f"{count.N_kaplan:,}"),
        *([("N_active (what one token uses)", f"{count.N_active:,}")] if model.experts else []),
        ("D, tokens", f"{tokens:,}"),
        (f"C, 6 {'N_active' if model.experts else 'N_total'} D", f"{6.0 * count.N_active * tokens:.4g} FLOPs"),
        ("C, exact", f"{float(exact):.4g} FLOPs"),
    ]
    if (packed := quantization(loaded.path)) is not None:
        numbers = f"{packed['format']} by {packed['method']}, {packed['bits_per_weight']:.2f} bits per weight"
        rows.append(("Matrices of the blocks, here dequantized", numbers))
    held_out, law = (facts.scores or {}).get("held_out") or {}, facts.law
    if is_number(loss := held_out.get("val_loss")):
        rows.append(("Held-out loss, nats per token", with_error(loss, held_out.get("val_loss_se"), 4)))
    if is_number(bits := held_out.get("val_bpb")):
        rows.append(("Held-out bits per byte", f"{bits:.4f}"))
    if law is not None:
        low, high = law.get("interval") or (None, None)
        within = "" if low is None else f" (95 %: {low:.4f} to {high:.4f})"
        name = f"Loss that the sweep's {law['form']} law predicts for this N and D"
        rows.append((name, f"{law['predicted_loss']:.4f}{within}"))
    return rows


def _caveats(task: Mapping[str, Any]) -> str:
    caveats = [f"withheld: {_plain(task['withheld'])}"] if task.get("withheld") else []
    return "; ".join([*caveats, *(f"{name}: {task[key]}" for key, name in CAVEATS.items() if task.get(key))])


def _plain(text: Any) -> str:
    """Return the text on one line, with the characters of Markdown and HTML escaped."""
    line = " ".join(str(text).split())
    # An underscore inside a word marks nothing up, and names are full of them.
    return re.sub(r"[\\`*<>\[\]|#&]|(?<![^\W_])_|_(?![^\W_])", lambda found: f"&#{ord(found.group())};", line)
