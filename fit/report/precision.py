"""The report's figures on number formats."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formatting import count
from ..plots import LOSS
from ..precision.study import PrecisionStudy


def draw_precision(study: PrecisionStudy | None) -> dict[str, Any]:
    """Draw loss against FLOPs by format, and the loss that quantization after training adds against D/N."""
    from .figures import PALETTE, layout, line, points

    drawn: dict[str, Any] = {"formats": None, "after-training": None}
    if study is None or study.law is None:
        return drawn
    law, runs, data = study.law, study.runs, list[Any]()
    C = 6.0 * runs.N * runs.D
    reach = np.geomspace(C.min(), C.max(), 40)
    for k, name in enumerate(law.formats_):
        of, colour = study.format == name, PALETTE[k % len(PALETTE)]
        hover = [f"{name}: N {count(N)}, D {count(D)}" for N, D in zip(runs.N[of], runs.D[of], strict=True)]
        data.append(points(C[of], runs.loss[of], colour, hover, 6, name=name, legendgroup=name))
        data.append(line(reach, law.in_format(name).optimal(reach).loss, colour, width=1.5, legendgroup=name))
    drawn["formats"] = {"data": data, "layout": layout("training FLOPs (6ND)", LOSS, C)}
    if law.rise_ is not None:
        table, data = law.rise_.runs, []
        ratio = table["D"] / table["N"]
        x = np.geomspace(ratio.min(), ratio.max(), 20)
        for k, (way, of) in enumerate(table.groupby("way")):
            colour, hover = PALETTE[k % len(PALETTE)], [f"{way}: N {count(N)}" for N in of["N"]]
            data.append(points(of["D"] / of["N"], of["rise"], colour, hover, 6, name=way, legendgroup=way))
            for N in of["N"].unique():
                data.append(line(x, law.rise_(way, np.full(20, N), N * x)[:, 0], colour, width=1.0, legendgroup=way))
        look = layout("tokens per parameter D/N", "added loss (nats per token)", ratio, table["rise"], log_y=True)
        drawn["after-training"] = {"data": data, "layout": look}
    return drawn
