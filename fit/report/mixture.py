"""The report on the best mixture of domains: sentences, tables, law.json, and a page with Matplotlib figures."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from ..files import filling, write_text
from ..formatting import count, fixed, interval, percent, plain_json
from ..mixtures.answer import BestMixture
from ..mixtures.mixturelaw import MixtureLaw
from ..plots import DPI, FAINT, SIZE, STAR, draw_axes, draw_legend, shades
from ..table import load, numeric
from .figures import INK, PALETTE
from .report import TEMPLATES, render_template

CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])  # of the ternary plot
DIAMOND: dict[str, Any] = STAR | {"marker": "D", "s": 40}
STEPS, COLUMNS, NAMED = 40, 3, 4  # mixtures along an axis, panels in a row, domains that a sentence names


@dataclass(frozen=True)
class MixtureStudy:
    """A law of mixtures, its answer, the table it was fitted to, and the unique tokens of domains."""

    law: MixtureLaw
    answer: BestMixture
    frame: pd.DataFrame
    unique: dict[str, float]

    @classmethod
    def of(cls, table: Any, seed: int = 0, epochs_of: float = 0.0, **options: Any) -> MixtureStudy:
        """Fit a table and answer with `options` of `MixtureLaw.best`.

        Unique tokens that are not given are the table's largest, which grow with D up to `epochs_of`.
        """
        frame = load(table)[0]
        law, scale = MixtureLaw(seed=seed).fit(frame), max(1.0, epochs_of / numeric(frame, "D").max())
        largest = {name: scale * float(np.fmax.reduce(numeric(frame, f"unique_{name}"))) for name in law.domains_}
        unique = {k: v for k, v in largest.items() if v > 0} | (options.pop("unique", None) or {})
        if (total := sum((base := options.get("base") or {}).values())) > 0:
            options["base"] = {name: weight / total for name, weight in base.items()}
        return cls(law, law.best(unique=unique, **options), frame, unique)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of law.json."""
        law, a, sentences = self.law, self.answer, _sentences(self.answer)
        target, runs = np.array([*a.target.values()]), self.frame.get("run_id", self.frame.index.to_series()).nunique()
        hold_out = {"by": law.hold_outs_, "errors": ((law.errors_**2 @ target) ** 0.5).to_dict()}
        mixture = asdict(a) | {"forms": (law.weights_ @ target).to_dict(), "hold_out": hold_out}
        warnings = [] if a.trustworthy else [{"code": "no_mixture_answer", "message": sentences[0]}]
        if edge := [k for k, w in a.weights.items() if w > numeric(self.frame, f"weight_{k}").max() - 1e-3]:
            message = f"No run has more {' or '.join(edge)} than the best mixture; train some with more."
            warnings.append({"code": "mixture_at_edge", "message": message})
        return plain_json({"mixture": mixture, "verdict": "\n".join(sentences), "warnings": warnings, "runs": runs})

    def write(self, folder: Path, title: str, origin: Mapping[str, Any], costs: Any = None) -> None:
        """Write report.html, law.json and figures, all or none; `origin` are names and values for the footer."""
        content, style = self.to_dict(), Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
        context = {"title": title, "origin": origin, "costs": costs, "style": style, "tables": mixture_tables(content)}
        with filling(folder, [f"{name}.png" for name in DRAWINGS]) as new:
            pictures, domains = dict[str, str](), len(self.law.domains_)
            for name, (draw, caption) in DRAWINGS.items():
                if draw is not _ternary or domains == len(CORNERS):
                    size = (9.0, 2.8 * -(-domains // COLUMNS)) if draw is _domains else SIZE
                    draw(self, figure := Figure(size, layout="constrained"))
                    figure.savefig(path := new / f"{name}.png", dpi=DPI, format="png")
                    pictures[caption] = b64encode(path.read_bytes()).decode()
            write_text(new / "report.html", render_template("mixture.html", pictures=pictures, **context, **content))
            write_text(new / "law.json", json.dumps(content, allow_nan=False) + "\n")

    def predict(self, weights: Any) -> pd.DataFrame:
        """Return mean losses of mixtures (n, domains) at the planned N and D, with intervals."""
        a = self.answer
        return self.law.predict(weights, a.N, a.D, self.unique, a.level, a.target, kind="mean")


def _sentences(a: BestMixture) -> list[str]:
    goal = "mean loss of the domains" if len({*a.target.values()}) == 1 else f"loss on the target ({_shares(a.target)})"
    at = " and ".join(f"{name} = {count(value)}" for name, value in (("N", a.N), ("D", a.D)) if value)
    doubt = [] if a.trustworthy else [f"These runs do not show a mixture that is better than the base: {a.reason}"]
    return [
        *doubt,
        f"The best mixture{f' for {at}' if at else ''} is {_shares(a.weights)}. Its {goal} is {fixed(a.loss, 4)} "
        f"({interval(a.loss_interval, fixed, 4)}), that of the base ({_shares(a.base)}) {fixed(a.base_loss, 4)}.",
        f"The gain is {fixed(a.gain, 4)} ({interval(a.gain_interval, fixed, 4)}) nats per token. Allowing for the "
        f"choice of the best, it is above zero with a confidence of {percent(a.probability)}.",
    ]


def _shares(weights: Mapping[str, float]) -> str:
    largest = sorted(weights.items(), key=lambda item: -item[1])[:NAMED]
    named = [f"{name} {fixed(weight)}" for name, weight in largest if weight > 0]
    return ", ".join(named + ["…"] * (len(weights) > NAMED))


def mixture_tables(content: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Return the tables of a law.json on mixtures by title, with numbers as text."""
    a = content["mixture"]
    ends = pd.DataFrame(a["intervals"], ["low", "high"]).T
    best = pd.DataFrame({"best": a["weights"], **ends, "base": a["base"], "epochs": a["epochs"]}, [*a["weights"]])
    scales = [
        {"N": count(s["N"]), "D": count(s["D"]), **s["weights"], "loss": s["loss"], "gain": s["base_loss"] - s["loss"]}
        for s in a["scales"]
    ]
    forms = pd.DataFrame({"share": a["forms"], "hold-out error": a["hold_out"]["errors"]}).map(percent)
    tables = {
        f"Best weights, {a['level']:.0%} intervals": best.dropna(axis=1, how="all").reset_index(names="domain"),
        "Best weights by scale": pd.DataFrame(scales),
        "Mixtures worth training next": pd.DataFrame(a["next"], range(1, len(a["next"]) + 1)).reset_index(names=""),
        f"Forms, by hold-outs of {a['hold_out']['by']}": forms.reset_index(names="form"),
    }
    filled = {title: table for title, table in tables.items() if len(table)}
    return {title: t.map(lambda v: fixed(v, 4) if isinstance(v, float) else str(v)) for title, t in filled.items()}


def _held_out(study: MixtureStudy, figure: Figure) -> None:
    law, ax = study.law, draw_axes(figure.subplots(), "predicted loss (nats per token)", "loss of the run", log_x=False)
    for k, name in enumerate(law.losses_):
        loss = numeric(study.frame, f"loss_{name}")
        ax.scatter(loss * np.exp(law.held_[k]), loss, s=14, color=PALETTE[k % len(PALETTE)], label=name, zorder=3)
        ax.plot(loss, loss, color=FAINT, linewidth=1.0)
    draw_legend(ax, 4)


def _domains(study: MixtureStudy, figure: Figure) -> None:
    a, domains, best = study.answer, study.law.domains_, np.array([*study.answer.weights.values()])
    frame = study.frame.assign(target=sum(w * numeric(study.frame, f"loss_{k}") for k, w in a.target.items()))
    size = np.prod([np.nan_to_num(numeric(frame, name), nan=1.0) for name in ("N", "D")], axis=0)
    for i, (unit, name) in enumerate(zip(np.eye(len(best)), domains, strict=True), 1):
        loss = f"loss_{name}" if f"loss_{name}" in frame else "target"
        weights, rest = numeric(frame, f"weight_{name}"), (1.0 - unit) * (best + 1e-9)
        x = np.linspace(weights.min(), weights.max(), STEPS)
        curve = study.predict(np.outer(x, unit) + np.outer(1.0 - x, rest / rest.sum()))
        ax = figure.add_subplot(-(-len(best) // COLUMNS), COLUMNS, i)
        draw_axes(ax, f"weight of {name}", loss.replace("_", " of ", 1), log_x=False)
        ax.fill_between(x, curve[f"{loss}_low"], curve[f"{loss}_high"], color=PALETTE[0], alpha=0.15, linewidth=0)
        ax.plot(x, curve[loss], color=PALETTE[0])
        ax.scatter(weights, numeric(frame, loss), s=14, color=shades(size), zorder=3)
        ax.axvspan(*a.intervals[name], color=PALETTE[1], alpha=0.15, linewidth=0)
        ax.axvline(a.weights[name], color=PALETTE[1])
        ax.axvline(a.base[name], color=FAINT, linestyle="--")


def _ternary(study: MixtureStudy, figure: Figure) -> None:
    ax, names, a = figure.subplots(), study.law.domains_, study.answer
    cells = np.array([(i, j, STEPS - i - j) for i, j in product(range(STEPS + 1), repeat=2) if i + j <= STEPS]) / STEPS
    loss = study.predict(cells)["target"].to_numpy()
    levels = np.linspace(loss.min(), np.quantile(loss, 0.9) + 1e-9, 16)
    x, y = (cells @ CORNERS).T
    filled = ax.tricontourf(x, y, loss, levels=levels, extend="max", cmap="viridis")
    figure.colorbar(filled, label="predicted loss", format="%.3f", shrink=0.8)
    runs = study.frame[[f"weight_{name}" for name in names]].to_numpy(float) @ CORNERS
    ax.scatter(runs[:, 0], runs[:, 1], s=14, color="white", edgecolor=INK, linewidth=0.6, zorder=3)
    for label, mixture, style in (("best", a.weights, STAR), ("base", a.base, DIAMOND)):
        x, y = np.array([*mixture.values()]) @ CORNERS
        ax.scatter(x, y, color=PALETTE[1], label=label, clip_on=False, **style)
    for name, (x, y) in zip(names, CORNERS, strict=True):
        ax.text(x, y + (0.03 if y else -0.03), f"all {name}", ha="center", va="bottom" if y else "top")
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.legend(frameon=False, loc="upper left")


DRAWINGS = {
    "domains": (_domains, "Losses by weight: runs, dark if small, and predictions with the other domains in the best "
    "ratios. Orange: best weight and interval; dashed: base."),
    "held_out": (_held_out, "Losses of the runs against predictions by fits to other mixtures."),
    "ternary": (_ternary, "Predicted loss of the target; far from the runs (dots) it is an extrapolation."),
}  # fmt: skip
