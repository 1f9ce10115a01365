"""The README.md of an exported model: its shape, cost and scores. Unknown values are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...train.checkpoint.checkpoint import LoadedCheckpoint
from ...train.config import ModelConfig, run_id, to_dict
from ...train.flops import count_parameters, training_flops_per_token
from ...train.model.shape import model_shape
from ..pages.page import is_number, scored, with_error

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
    """What is known about a checkpoint in addition to its own files."""

    scores: Mapping[str, Any] | None = None  # see `Evaluator.evaluate`; `held_out` alone is enough
    law: Mapping[str, Any] | None = None  # of its sweep: form, predicted_loss, interval (low, high) or None
    provenance: Mapping[str, Any] = field(default_factory=dict)  # isoflop_version, git_commit, git_dirty of training
    version: str | None = None  # of the isoflop that exports


def model_card(loaded: LoadedCheckpoint, facts: Facts, notes: list[str]) -> str:
    """Return Markdown; `notes` are paragraphs of the section on use."""
    config, name = loaded.config, f"isoflop {run_id(loaded.config)}"
    model, count = config.model, count_parameters(config.model)
    tokens = loaded.step * config.batch_tokens
    exact = training_flops_per_token(model, config.data.sequence_length) * tokens
    used = "N_active" if model.experts else "N_total"
    rows = [
        ("N_total (every weight)", f"{count.N_total:,}"),
        ("N_non_embedding", f"{count.N_non_embedding:,}"),
        ("N_kaplan (matrices inside the blocks)", f"{count.N_kaplan:,}"),
        *([("N_active (what one token uses)", f"{count.N_active:,}")] if model.experts else []),
        ("D, tokens", f"{tokens:,}"),
        (f"C, 6 {used} D", f"{6.0 * count.N_active * tokens:.4g} FLOPs"),
        ("C, exact", f"{float(exact):.4g} FLOPs"),
    ]
    held_out, law = (facts.scores or {}).get("held_out") or {}, facts.law
    if is_number(loss := held_out.get("val_loss")):
        rows.append(("Held-out loss, nats per token", with_error(loss, held_out.get("val_loss_se"), 4)))
    if is_number(bits := held_out.get("val_bpb")):
        rows.append(("Held-out bits per byte", f"{bits:.4f}"))
    if law is not None:
        low, high = law.get("interval") or (None, None)
        within = "" if low is None else f" (95 %: {low:.4f} to {high:.4f})"
        said = f"Loss that the sweep's {law['form']} law gives for this N and D"
        rows.append((said, f"{law['predicted_loss']:.4f}{within}"))
    parts = [
        _front_matter(loaded),
        f"# {_plain(f'{config.name or name}, step {loaded.step}')}",
        f"A decoder of width {model.width} and depth {model.depth}, {model.heads} heads"
        f" ({model.num_kv_heads} for keys and values), {model.vocab_size} tokens, context "
        f"{config.data.sequence_length}, {'tied' if model.tied_embeddings else 'untied'} embeddings"
        f"{', RMSNorm on queries and keys' if model_shape(model).head_norms else ''}"
        f"{', biases on queries, keys and values' if model.qkv_bias else ''}"
        f"{f', rotary positions by {model.rope.kind} with factor {model.rope.factor:g}' if model.rope else ''}; "
        f"{_mixture(model)}run `{run_id(config)}`, step {loaded.step}.",
        _table(("", ""), rows),
        *_scores(facts.scores or {}),
        "## Use",
        *notes,
        "## How it was trained",
        *_trained_by(loaded, facts),
        "No licence is stated here: the publisher of these weights chooses one, and the text they were trained on has "
        "its own.",
    ]
    return "\n\n".join(parts) + "\n"


def _mixture(model: ModelConfig) -> str:
    if not model.experts:
        return ""
    below = f" above {model.dense_layers} with an MLP" if model.dense_layers else ""
    shared = f", beside {model.shared_experts} for every token" if model.shared_experts else ""
    return (
        f"blocks{below} with {model.experts} experts of width {model.moe_hidden}, of which a token chooses "
        f"{model.experts_per_token} by a {model.gate}{shared}; "
    )


def _front_matter(loaded: LoadedCheckpoint) -> str:
    data = loaded.config.data
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- isoflop", "- scaling-laws"]
    if data.corpus == "hf" and data.name:
        lines += ["datasets:", f"- {json.dumps(data.name)}"]
    return "\n".join(["---", *lines, "---"])


def _plain(text: str) -> str:
    """Return the text as one line in which neither Markdown nor HTML sees markup."""
    line = " ".join(str(text).split())
    # An underscore inside a word marks nothing up, and names are full of them.
    return re.sub(r"[\\`*<>\[\]|#&]|(?<![^\W_])_|_(?![^\W_])", lambda found: f"&#{ord(found.group())};", line)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _scores(scores: Mapping[str, Any]) -> list[str]:
    tasks = dict(sorted((scores.get("tasks") or {}).items()))
    if not tasks:
        return []
    shown = {key: name for key, name in SCORES.items() if any(is_number(task.get(key)) for task in tasks.values())}
    rows = []
    for name, task in tasks.items():
        values = [scored(task, key, 4) if is_number(task.get(key)) else "" for key in shown]
        chance = f"{task['chance']:.3f}" if is_number(task.get("chance")) else ""
        count, whole = task.get("items", ""), (task.get("subset") or {}).get("of")
        items = str(count) if whole in (None, count) else f"{count} of {whole}"
        caveats = [f"withheld: {_plain(task['withheld'])}"] if task.get("withheld") else []
        caveats += [f"{name}: {task[key]}" for key, name in CAVEATS.items() if task.get(key)]
        rows.append((_plain(name), items, str(task.get("shots", "")), *values, chance, "; ".join(caveats)))
    head = ("task", "items", "shots", *shown.values(), "chance", "mind")
    return ["## Scores", "With lm-eval's prompts; ± is a standard error over items.", _table(head, rows)]


def _trained_by(loaded: LoadedCheckpoint, facts: Facts) -> list[str]:
    exported = f" Exported by isoflop {_plain(facts.version)}." if facts.version else ""
    made = facts.provenance
    code = f"isoflop {_plain(made['isoflop_version'])}" if made.get("isoflop_version") else "isoflop"
    if made.get("git_commit"):
        code += f", commit `{_plain(made['git_commit'])}`{' with changes' if made.get('git_dirty') else ''}"
    return [
        f"By {code}, from checkpoint `{loaded.checksum}`.{exported} The run's configuration, complete:",
        f"```json\n{json.dumps(to_dict(loaded.config), indent=1, default=str)}\n```",
    ]
