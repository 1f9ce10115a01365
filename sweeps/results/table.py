"""Collect run directories in one DataFrame, a row per (run, checkpoint): the input of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...train.config import PASSES, ModelConfig, QuantizationConfig, domain_losses, from_dict, mixture_label
from ...train.data.recipe.recipe import recipe_label
from ...train.data.storage import checksum
from ...train.errors import UserError
from ...train.files import read_json_lines, write_atomic
from ..runs.directory import RunDirectory, SweepDirectory, yaml_or_empty
from ..runs.forms import NEEDED
from .scoring import evaluations

if TYPE_CHECKING:
    import pandas as pd

    from ...evaluate.pages.paired import Answers

UNTUNED = "untuned.csv"  # result of `isoflop tune --check`: run_id, excess, excess_se
# Scores of a task that become columns `<task>/<score>`.
SCORES = ("acc", "acc_se", "acc_norm", "acc_norm_se", "gold_bpb", "gold_bpb_se", "chance", "items")
# Further columns, if a task has these scores; `<task>/clean_<score>` is over items that were not trained on.
MORE = ("p_right", "p_right_se", "margin", "margin_se", "bpb", "bpb_se", "contaminated_items")
CLEAN = ("acc", "acc_se", "gold_bpb", "gold_bpb_se")
# Fields of a run's summary that become columns of the same name.
COUNTS = ("N_total", "N_active", "N_non_embedding", "N_kaplan")
OF_THE_RUN = (*COUNTS, "device", "precision")  # the same at every step of the run
TRAINED = ("tokens_per_s", "mfu", "epochs", "unique_tokens", "warmup_share", "precision")
MEASURED = (*COUNTS, "flops_6nd", "flops_exact", "val_bpb", "train_loss", "seconds", "device", *TRAINED)
# Columns from a run's config, by group and field: `fit` checks them for whether runs are comparable.
CONFIGURED = {
    "schedule": ("schedule", "kind"),
    "decay_share": ("schedule", "decay_share"),
    "learning_rate": ("optimizer", "learning_rate"),
    "batch_size": ("optimizer", "batch_size"),
    "sequence_length": ("data", "sequence_length"),
    "vocab_size": ("model", "vocab_size"),
    "tokenizer": ("data", "tokenizer_fingerprint"),
}
CURVE = ["run_id", "step", "tokens", "flops", "lr", "batch", "N", "loss", "val_loss"]  # columns of curves.csv
CURVE_ROWS = 400  # rows of a run in addition to its validated steps
# Columns that only a sweep with mixtures of experts has, or one with simulated number formats.
OF_EXPERTS = ("experts", "experts_per_token", "shared_experts", "load_max", "load_entropy", "dead_experts")
OF_FORMATS = tuple(f"{name}_{kind}" for kind in ("format", "bits") for name in PASSES)


def build_table(sweep: SweepDirectory) -> pd.DataFrame:
    """Return a table with a row per finished run, each followed by rows of its earlier checkpoints with scores."""
    import pandas as pd

    planned = {run["run_id"]: run for run in sweep.plan()["runs"]}
    rows = [row for run in sweep.runs() if run.is_done() for row in _rows(run, planned[run.run_id])]
    rows = name_texts_apart(name_recipes_apart(name_mixtures_apart(rows)))
    absent = {*(() if any(row["experts"] for row in rows) else OF_EXPERTS)}
    absent.update(() if any(row[name] != "none" for row in rows for name in OF_FORMATS[:3]) else OF_FORMATS)
    rows = [{name: value for name, value in row.items() if name not in absent} for row in rows]
    if (file := sweep.path / UNTUNED).exists():
        checked: dict[Any, Any] = pd.read_csv(file, dtype={"run_id": str}).set_index("run_id").to_dict("index")
        rows = [row | (checked.get(row["run_id"], {}) if row["final"] else {}) for row in rows]
    columns = ["run_id", "step", "final", "state", "N", "D", "flops", "loss", "loss_se"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def name_mixtures_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Name recipes by the mixture if runs have different ones, so that `fit` fits each mixture separately."""
    mixtures = [{name[7:]: value for name, value in row.items() if name.startswith("weight_")} for row in rows]
    if all(mixture == mixtures[0] for mixture in mixtures):
        return rows
    names = [mixture_label(mixture) for mixture in mixtures]
    return [
        row | {"recipe": name if row["recipe"] == "raw" else f"{name} {row['recipe']}"}
        for row, name in zip(rows, names, strict=True)
    ]


def name_recipes_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append fingerprints to the names of different recipes that share a name."""
    names = _told_apart(rows, "recipe", "recipe_fingerprint")
    return [row | {"recipe": name} for row, name in zip(rows, names, strict=True)]


def name_texts_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prefix recipe names with the corpus if held-out texts differ, so that `fit` fits each text separately."""
    if len({row["held_out"] for row in rows}) < 2:
        return rows
    corpora = _told_apart(rows, "corpus", "held_out")
    return [row | {"recipe": f"{corpus}: {row['recipe']}"} for row, corpus in zip(rows, corpora, strict=True)]


def _told_apart(rows: list[dict[str, Any]], name: str, digest: str) -> list[str]:
    """Return each row's value in column `name`, followed by its digest if that name has several digests."""
    digests: dict[str, set[str | None]] = {}
    for row in rows:
        digests.setdefault(row[name], set()).add(row[digest])
    return [f"{row[name]} ({row[digest]})" if len(digests[row[name]]) > 1 else row[name] for row in rows]


def write_table(sweep: SweepDirectory, answers: Mapping[str, Answers]) -> pd.DataFrame:
    """Write table.csv and return it, with tests of whether runs differ in accuracy on each task in `answers`."""
    from ...evaluate.pages.paired import compare_tasks

    table = build_table(sweep)
    for task, comparison in compare_tasks(answers, "acc").items():
        table[f"{task}/acc_z"], table[f"{task}/acc_z_by_luck"] = comparison.z, comparison.threshold
    write_atomic(sweep.path / "table.csv", table.to_csv(index=False))
    return table


def _rows(run: RunDirectory, planned: dict[str, Any]) -> Iterator[dict[str, Any]]:
    summary, scored = run.summary() or {}, evaluations(run)
    if absent := [name for name in NEEDED if name not in summary]:
        raise UserError(
            f"{run.path / 'summary.json'} lacks {', '.join(absent)}; remove it, run `isoflop doctor`, and retry the run"
        )
    last = summary["step"]
    row = _row(run, planned, summary)
    yield row | _scores(scored.get(last, {}))
    between = dict.fromkeys((*MEASURED, "estimated_seconds")) | {name: row[name] for name in OF_THE_RUN}
    for step, scores in scored.items():
        if step < last:
            held_out = scores.get("held_out") or {}
            D = scores.get("tokens")
            changes = {"step": step, "final": False, "D": D, "flops_6nd": None if D is None else 6 * row["N"] * D}
            changes |= dict.fromkeys(("flops", "flops_exact"), scores.get("flops"))
            changes |= {name: held_out.get(f"val_{name}") for name in ("loss", "loss_se")} | _by_domain(held_out)
            yield row | between | changes | {"val_bpb": held_out.get("val_bpb")} | _scores(scores)


def _row(run: RunDirectory, planned: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    row = {
        "run_id": run.run_id,
        "name": planned["name"],
        "step": summary["step"],
        "final": True,
        "state": run.state().state,
        "budget": planned["budget"],
        "N": summary.get("N_active", summary["N_total"]),  # they differ for a mixture of experts only
        "D": summary["D"],
        "flops": summary.get("flops", summary["flops_exact"]),  # of an ingested run as its log counts
        "loss": summary["val_loss"],
        "loss_se": summary["val_loss_se"],
    }
    row |= {name: summary.get(name) for name in MEASURED} | _by_domain(summary)
    row |= {name: planned[name] for name in ("width", "depth", "heads", "seed", "estimated_seconds")}
    # A branch shares its trunk's noise, so `fit` resamples runs of one trunk together.
    row["trunk"] = planned["parent"]
    groups = yaml_or_empty(run.path / "config.yaml")  # not parsed, so that any version's config can be read
    row |= {name: (groups.get(group) or {}).get(field) for name, (group, field) in CONFIGURED.items()}
    model = groups.get("model") or {}
    if groups.get("variant"):
        row["variant"] = groups["variant"]
        row["kv_bytes"] = _kv_bytes(model)
    row |= {name: model.get(name) or 0 for name in ("experts", "experts_per_token", "shared_experts")}
    # Of the worst block; missing if the run was interrupted after its last step.
    loads: dict[str, Callable[[list[float]], float]] = {"load_max": max, "load_entropy": min, "dead_experts": sum}
    row |= {name: worst(summary[name]) if summary.get(name) else None for name, worst in loads.items()}
    data = groups.get("data") or {}
    steps = data.get("recipe") or []
    try:
        row["recipe"] = recipe_label(steps)
    except UserError:  # a step that this version does not know
        row["recipe"] = "+".join(steps)
    named = data.get("name") or data.get("corpus", "stdlib")
    row["corpus"] = Path(str(data.get("path"))).name if data.get("corpus") == "text" else named
    scored_on = [data.get(name) for name in ("fingerprint", "validation_fraction", "validation_tokens")]
    if data.get("domains"):
        row["corpus"] = "mixture"
        scored_on.append(data.get("target"))
        row |= {name: value for name, value in summary.items() if name.startswith(("weight_", "unique_"))}
    row["held_out"] = checksum(scored_on)[:8]
    quantization = from_dict(QuantizationConfig, groups.get("quantization") or {}, "quantization.")
    row |= quantization.columns(groups.get("precision", "fp32"))
    return row | {"recipe_fingerprint": data.get("recipe_fingerprint")}


def _by_domain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns loss_<domain> from metrics val_loss_<domain>."""
    return {f"loss_{name}": loss for name, loss in domain_losses(metrics).items()}


def _kv_bytes(model: dict[str, Any]) -> int | None:
    """Return the key-value cache's bytes per token, at two bytes a number; None if the config cannot be read."""
    try:
        config = from_dict(ModelConfig, model, "model.")
        return 2 * config.depth * config.cached
    except (UserError, TypeError):
        return None


def _scores(scores: dict[str, Any]) -> dict[str, Any]:
    timed = scores.get("decode") or {}
    columns = {f"decode_{name}": timed[name] for name in ("seconds", "device") if name in timed}
    columns |= {f"quantized_loss_{name}": loss for name, loss in (scores.get("quantized") or {}).items()}
    for task, values in (scores.get("tasks") or {}).items():
        clean = values.get("clean") or {}
        # Whole texts have no accuracy; empty columns would make `fit` warn.
        always = SCORES if values.get("bpb") is None else ("items",)
        columns |= {f"{task}/{name}": values[name] for name in always if name in values}
        columns |= {f"{task}/{name}": values[name] for name in MORE if values.get(name) is not None}
        columns |= {f"{task}/clean_{name}": clean[name] for name in CLEAN if clean.get(name) is not None}
    return columns


def write_curves(sweep: SweepDirectory) -> pd.DataFrame:
    curves = sweep_curves(sweep)
    write_atomic(sweep.path / "curves.csv", curves.to_csv(index=False))
    return curves


def sweep_curves(sweep: SweepDirectory, only: Container[str] | None = None) -> pd.DataFrame:
    """Return the loss curves of a sweep's runs: a row per run and step.

    A run has all its validated steps and about CURVE_ROWS others, evenly spread; a branch has its trunk's steps too.
    Columns: `lr`, `batch` in sequences, `N` as in the table, `loss` (smoothed training loss), `val_loss` (empty if not
    validated), and val_loss_ema_0.1 and others for averages of the weights.

    Args:
        only: Ids of the runs to return; None: all runs of the plan.
    """
    import pandas as pd

    frames = []
    for planned in sweep.plan()["runs"]:
        if only is not None and planned["run_id"] not in only:
            continue
        lines = read_json_lines(sweep.run(planned["run_id"]).path / "metrics.jsonl")
        records = {record["step"]: record for record in lines if "step" in record}
        if not records:
            continue
        frame = pd.DataFrame(records.values()).rename(columns={"smoothed_loss": "loss"})
        constants = {
            "run_id": planned["run_id"],
            "batch": planned["D"] // planned["steps"] // planned["sequence_length"],
            "N": planned.get("N_active") or planned["N_total"],
        }
        averaged = [name for name in frame if str(name).startswith(("val_loss_ema_", "val_loss_window_"))]
        frame = frame.assign(**constants).reindex(columns=[*CURVE, *averaged])
        spread = np.zeros(len(frame), dtype=bool)
        spread[np.linspace(0, len(frame) - 1, CURVE_ROWS).round().astype(int)] = True
        frames.append(frame[spread | frame["val_loss"].notna().to_numpy()])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=CURVE)
