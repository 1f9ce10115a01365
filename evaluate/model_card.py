"""The README.md of an exported model: what it is, what it cost, how good it is, and how far to trust that.

Special here: numbers keep their convention (N_total or N_non_embedding, 6ND or exact FLOPs), and what is not known is
left out or said to be unknown, never filled in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..train.checkpoint import LoadedCheckpoint
from ..train.config import run_id, to_dict
from ..train.flops import count_parameters, training_flops_per_token

SCORES = ("acc", "acc_norm", "gold_bpb", "bpb")


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint beside itself.

    Attributes:
        scores: a file of scores, see `checkpoint.evaluate_checkpoint`; `held_out` alone will do.
        law: what the law of its sweep says of this N and D: `form`, `predicted_loss`, `interval` (low, high) or None.
        provenance: isoflop_version, git_commit, git_dirty of the training.
        version: of the isoflop that exports.
    """

    scores: Mapping[str, Any] | None = None
    law: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None


def model_card(loaded: LoadedCheckpoint, facts: Facts, notes: list[str]) -> str:
    """Markdown; `notes` are said under how to use it, a paragraph each."""
    config = loaded.config
    model, count = config.model, count_parameters(config.model)
    tokens = loaded.step * config.batch_tokens
    exact = training_flops_per_token(model, config.data.sequence_length) * tokens
    known = tokens > 0
    rows = [
        ("N_total (every weight)", f"{count.N_total:,}"),
        ("N_non_embedding", f"{count.N_non_embedding:,}"),
        ("N_kaplan (matrices inside the blocks)", f"{count.N_kaplan:,}"),
        ("D, tokens", f"{tokens:,}" if known else "unknown: the weights were imported"),
        ("C, 6 N_total D", _flops(6.0 * count.N_total * tokens) if known else "unknown"),
        ("C, exact", _flops(float(exact)) if known else "unknown"),
        *_held_out((facts.scores or {}).get("held_out") or {}),
        *_law(facts.law),
    ]
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- isoflop\n- scaling-laws\n---",
        f"# {_title(loaded)}",
        f"A decoder of width {model.width} and depth {model.depth}, {model.heads} heads"
        f" ({model.num_kv_heads} for keys and values), {model.vocab_size} tokens, context "
        f"{config.data.sequence_length}, {'tied' if model.tied_embeddings else 'untied'} embeddings"
        f"{', RMSNorm on queries and keys' if model.qk_norm else ''}; run `{run_id(config)}`, step {loaded.step}.",
        _table(("", ""), rows),
        *_scores(facts.scores or {}),
        "## Use",
        *notes,
        "## How it was trained",
        _trained_by(loaded, facts),
        f"```json\n{json.dumps(to_dict(config), indent=1, default=str)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _title(loaded: LoadedCheckpoint) -> str:
    name = loaded.config.name or f"isoflop {run_id(loaded.config)}"
    return _plain(f"{name}, step {loaded.step}")


def _plain(text: str) -> str:
    """One line of it, which neither Markdown nor a page takes for markup."""
    line = " ".join(str(text).split())
    for character in "\\`*_<>[]|#":
        line = line.replace(character, f"&#{ord(character)};")
    return line


def _flops(value: float) -> str:
    return f"{value:.4g} FLOPs"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _held_out(held_out: Mapping[str, Any]) -> list[tuple[str, str]]:
    loss, bits = held_out.get("val_loss"), held_out.get("val_bpb")
    rows = []
    if loss is not None and _is_number(loss):
        rows.append(("Held-out loss, nats a token", _with_error(loss, held_out.get("val_loss_se"))))
    if _is_number(bits):
        rows.append(("Held-out bits per byte", f"{bits:.4f}"))
    return rows


def _law(law: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if law is None:
        return []
    interval = law.get("interval")
    within = f" (95 %: {interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
    return [(f"Loss that the sweep's {law['form']} law gives for this N and D", f"{law['predicted_loss']:.4f}{within}")]


def _scores(scores: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, task in sorted((scores.get("tasks") or {}).items()):
        values = [_with_error(task[key], task.get(f"{key}_se")) if _is_number(task.get(key)) else "" for key in SCORES]
        chance = f"{task['chance']:.3f}" if _is_number(task.get("chance")) else ""
        said = _plain(task["withheld"]) if task.get("withheld") else ""
        rows.append((_plain(name), str(task.get("items", "")), *values, chance, said))
    if not rows:
        return []
    head = ("task", "items", "accuracy", "length-normalised", "gold BPB", "BPB", "chance", "withheld")
    return ["## Scores", "With lm-eval's prompts; ± is a standard error over items.", _table(head, rows)]


def _trained_by(loaded: LoadedCheckpoint, facts: Facts) -> str:
    made = facts.provenance
    code = f"isoflop {_plain(made['isoflop_version'])}" if made.get("isoflop_version") else "isoflop"
    if made.get("git_commit"):
        code += f", commit `{_plain(made['git_commit'])}`{' with changes' if made.get('git_dirty') else ''}"
    exported = f" Exported by isoflop {_plain(facts.version)}." if facts.version else ""
    return f"By {code}, from checkpoint `{loaded.checksum}`.{exported} The run's configuration, complete:"


def _with_error(value: float, error: Any) -> str:
    return f"{value:.4f} ± {error:.4f}" if _is_number(error) else f"{value:.4f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
