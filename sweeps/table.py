"""Run directories become one DataFrame, a row a (run, checkpoint): what `fit` eats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..train.files import read_json, read_json_lines, write_atomic
from .runs import RunDirectory, SweepDirectory, yaml_or_empty

if TYPE_CHECKING:
    import pandas as pd

# Numbers of a task that become columns `<task>/<number>`.
SCORES = ("acc", "acc_se", "acc_norm", "acc_norm_se", "gold_bpb", "gold_bpb_se", "chance", "items")
# What of a run's summary becomes a column under its own name.
MEASURED = ("N_total", "N_non_embedding", "N_kaplan", "flops_6nd", "flops_exact", "val_bpb", "train_loss", "seconds",
            "device", "tokens_per_s", "mfu", "epochs", "unique_tokens", "warmup_share", "precision")  # fmt: skip
# What of a run's config becomes a column, by group and field: what makes runs comparable, and is asked before a fit.
CONFIGURED = {
    "schedule": ("schedule", "kind"),
    "decay_share": ("schedule", "decay_share"),
    "learning_rate": ("optimizer", "learning_rate"),
    "batch_size": ("optimizer", "batch_size"),
    "sequence_length": ("data", "sequence_length"),
    "vocab_size": ("model", "vocab_size"),
    "tokenizer": ("data", "tokenizer_fingerprint"),
}


def build_table(sweep: SweepDirectory) -> pd.DataFrame:
    """One row a final checkpoint of every run that is done, with its scores where there are any."""
    import pandas as pd

    planned = {run["run_id"]: run for run in sweep.plan()["runs"]}
    rows = [_row(run, planned[run.run_id]) for run in sweep.runs() if run.is_done()]
    columns = ["run_id", "step", "final", "state", "N", "D", "flops", "loss", "loss_se"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)


def write_table(sweep: SweepDirectory) -> pd.DataFrame:
    """Writes table.csv and returns it."""
    table = build_table(sweep)
    write_atomic(sweep.path / "table.csv", table.to_csv(index=False))
    return table


def _row(run: RunDirectory, planned: dict[str, Any]) -> dict[str, Any]:
    summary = run.summary() or {}
    row = {
        "run_id": run.run_id,
        "name": planned["name"],
        "step": summary["step"],
        "final": True,
        "state": run.state().state,
        "budget": planned["budget"],
        "N": summary["N_total"],
        "D": summary["D"],
        "flops": summary["flops_exact"],
        "loss": summary["val_loss"],
        "loss_se": summary["val_loss_se"],
    }
    row |= {name: summary.get(name) for name in MEASURED}
    row |= {name: planned[name] for name in ("width", "depth", "heads", "seed", "estimated_seconds")}
    # A branch shares its trunk's data and luck: `fit` resamples what has one trunk together.
    row["trunk"] = planned["parent"]
    return row | _configured(run) | _scores(run, summary["step"])


def _configured(run: RunDirectory) -> dict[str, Any]:
    """From config.yaml as it was frozen, whichever version wrote it; a field that it lacks is left empty."""
    groups = yaml_or_empty(run.path / "config.yaml")
    return {name: (groups.get(group) or {}).get(field) for name, (group, field) in CONFIGURED.items()}


def _scores(run: RunDirectory, step: int) -> dict[str, Any]:
    scores = read_json(run.path / "eval" / f"step_{step}.json") or {}
    return {
        f"{task}/{name}": values.get(name)
        for task, values in (scores.get("tasks") or {}).items()
        for name in SCORES
        if name in values
    }


def loss_curves(sweep: SweepDirectory) -> pd.DataFrame:
    """metrics.jsonl of every run of the plan, long: run_id, step, tokens, flops, loss (smoothed), val_loss.

    A resumed run repeats the steps since its checkpoint, with the same numbers; the last line of a step counts.
    """
    import pandas as pd

    frames = []
    for run in sweep.runs():
        records = {record["step"]: record for record in read_json_lines(run.path / "metrics.jsonl") if "step" in record}
        if records:
            frame = pd.DataFrame(records.values()).reindex(
                columns=["step", "tokens", "flops", "smoothed_loss", "val_loss"]
            )
            frames.append(frame.rename(columns={"smoothed_loss": "loss"}).assign(run_id=run.run_id))
    columns = ["run_id", "step", "tokens", "flops", "loss", "val_loss"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)
