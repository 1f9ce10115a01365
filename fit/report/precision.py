"""The report's section on number formats: sentences, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats import NONE
from ..formatting import amount, count, fixed, percent, scientific, text
from ..plots import LOSS
from .figures import PALETTE, layout, line, points

if TYPE_CHECKING:
    import pandas as pd

    from ..precision.precisionlaw import PrecisionLaw


def precision_text(content: Mapping[str, Any]) -> tuple[list[str], dict[str, pd.DataFrame]]:
    """Return a `PrecisionLaw.to_dict` as sentences, and as tables of text by title."""
    import pandas as pd

    def shown(row: Mapping[str, Any], name: str, say: Any, ends: str = "") -> str:
        value, low, high = (row[k] for k in (name, f"{ends}low", f"{ends}high"))
        return "{} [{}, {}]".format(*("∞" if v in (None, np.inf) else say(v) for v in (value, low, high)))

    best, rise, sentences = content["best"], content["rise"], list[str]()
    for flops in dict.fromkeys(row["flops"] for row in best):
        row = next(row for row in best if row["flops"] == flops)  # the lowest loss is first
        name = "training without quantization" if row["format"] == NONE else row["format"]
        sentences.append(
            f"In the time of {scientific(flops)} FLOPs without quantization, {name} at a speed of "
            f"{amount(row['speedup'])} has the lowest loss: {fixed(row['loss'], 4)} with N = {count(row['N'])} and D = "
            f"{count(row['D'])}. The probability that it is the best format is {percent(row['wins'])}."
        )
    names = {"N": "e_N", "D": "e_D", "speedup": "pays from a speed of"}
    tables = {
        "Efficiency of formats": [
            {"format": row["format"]} | {title: shown(row, k, amount, f"{k}_") for k, title in names.items()}
            for row in content["efficiencies"][1:]
        ],
        "Best model in the time of a budget": [
            {"FLOPs": scientific(row["flops"]), "format": row["format"], "speed": amount(row["speedup"])}
            | {name: count(row[name]) for name in "ND"}
            | {"loss": shown(row, "loss", lambda v: fixed(v, 4)), "best": percent(row["wins"])}
            for row in best
        ],
        "Forms of the law of formats, by hold-outs": [
            {"form": name, "share": percent(share), "error": percent(error)}
            for name, (share, error) in content["forms"].items()
        ],
    }
    if rise:
        g_D, g_N = ("{:.2f} [{:.2f}, {:.2f}]".format(*rise[name]) for name in ("g_D", "g_N"))
        sentences.append(f"Quantization after training adds a loss that grows with D^{g_D} and falls with N^{g_N}.")
        tables["Quantized after training, more tokens raise the loss from"] = [
            {"quantized": row["way"], "N": count(row["N"]), "D/N": shown(row, "ratio", amount)}
            for row in rise["turning_points"]
        ]
    return sentences + content["notes"], {title: pd.DataFrame(rows) for title, rows in tables.items()}


def draw_precision(law: PrecisionLaw | None) -> dict[str, Any]:
    """Draw loss against FLOPs by format, and the loss that quantization after training adds against D/N."""
    drawn: dict[str, Any] = {"formats": None, "after-training": None}
    if law is None:
        return drawn
    runs, data = law.runs_, list[Any]()
    C = 6.0 * runs.N * runs.D
    best = law.best(np.geomspace(C.min(), C.max(), 40)).sort_values("flops")
    for k, name in enumerate(law.formats_):
        of_best, of = best[best["format"] == name], law.names_ == name
        look: dict[str, Any] = {"name": text(name), "legendgroup": text(name)}
        hover = [f"{text(name)}: N {count(N)}, D {count(D)}" for N, D in zip(runs.N[of], runs.D[of], strict=True)]
        data.append(points(C[of], runs.loss[of], colour := PALETTE[k % len(PALETTE)], hover, 6, **look))
        data.append(line(of_best["flops"], of_best["loss"], colour, width=1.5, **look))
    drawn["formats"] = {"data": data, "layout": layout("training FLOPs (6ND)", LOSS, C)}
    if law.rise_ is not None:
        rises, data, ratio = law.rise_.runs, [], (law.rise_.runs["D"] / law.rise_.runs["N"]).to_numpy()
        x = np.geomspace(ratio.min(), ratio.max(), 20)
        sizes = np.unique(rises["N"])
        for k, way in enumerate(law.rise_.ways):
            colour, look = PALETTE[k % len(PALETTE)], {"name": text(way), "legendgroup": text(way)}
            for N in sizes:
                of = ((rises["way"] == way) & (rises["N"] == N)).to_numpy()
                hover, shown = [f"{text(way)}: N {count(N)}"] * int(of.sum()), bool(sizes[0] == N)
                data.append(points(ratio[of], rises["rise"][of], colour, hover, 6, showlegend=shown, **look))
                data.append(line(x, law.rise_(way, np.full(20, N), N * x)[:, 0], colour, width=1.0, **look))
        axes = layout("tokens per parameter D/N", "added loss (nats per token)", ratio, rises["rise"], log_y=True)
        drawn["after-training"] = {"data": data, "layout": axes}
    return drawn
