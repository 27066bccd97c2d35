"""The picture of the race: HybridMuon's default and other optimizers, relative to AdamW at its best rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fields import Default

from deepmd_muon.show.palette import OPTIMIZERS, colors_of

ADAMW, HYBRID_MUON = OPTIMIZERS["AdamW"], OPTIMIZERS["HybridMuon"]
LARGEST = (
    4.0  # of the ratios drawn; a larger one, and a run that failed, stands as an arrow at the edge
)


class Rival(NamedTuple):
    """Another optimizer at its best rate: its force error on test frames divided by that of AdamW."""

    set: str
    model: str
    steps: int
    title: str
    ratio: float


def draw(rows: Sequence[Default], rivals: Sequence[Rival], path: Path) -> None:
    """Draw the ratios of force errors in a panel for each number of steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    budgets = list(dict.fromkeys(row.steps for row in rows))
    figure, panels = plt.subplots(
        1,
        len(budgets),
        figsize=(5.5 * len(budgets), 5.0),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, steps in zip(panels[0], budgets, strict=True):
        some = [row for row in rows if row.steps == steps]
        heights = range(len(some))
        panel.axvline(1.0, color=ADAMW, label="AdamW at the best of its rates")
        at = {(row.set, row.model): height for height, row in zip(heights, some, strict=True)}
        _draw_rivals(panel, at, [rival for rival in rivals if rival.steps == steps])
        panel.hlines(heights, 0.1, [row.test_ratio for row in some], color=HYBRID_MUON, alpha=0.3)
        panel.plot(
            [row.test_ratio for row in some],
            heights,
            "o",
            color=HYBRID_MUON,
            label="HybridMuon, nothing set",
        )
        hollow = {
            "color": HYBRID_MUON,
            "markerfacecolor": "none",
            "label": "HybridMuon, out of distribution",
        }
        panel.plot([row.out_ratio for row in some], heights, "D", **hollow)
        panel.set_yticks(heights, [f"{row.set}, {row.model}" for row in some], fontsize="small")
        panel.invert_yaxis()
        panel.set(title=f"{steps:,} steps", xscale="log", xlim=(0.2, 1.08 * LARGEST))
        panel.set_xlabel("force error / force error of AdamW (no unit)")
        panel.set_xticks((0.25, 0.5, 1, 2, 4), ("0.25", "0.5", "1", "2", "4"))
        panel.minorticks_off()
    found = {
        label: handle
        for panel in panels[0]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=4, fontsize="small"
    )
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_rivals(panel: object, at: dict[tuple[str, str], int], rivals: Sequence[Rival]) -> None:
    """Draw a small mark for each rival in the row of its set and model."""
    titles = sorted({rival.title for rival in rivals})
    for title, color in zip(titles, colors_of(titles), strict=True):
        some = [rival for rival in rivals if rival.title == title and not math.isnan(rival.ratio)]
        inside = [rival for rival in some if rival.ratio <= LARGEST]
        beyond = [rival for rival in some if rival.ratio > LARGEST]
        style = {"color": color, "linestyle": "none", "markersize": 5, "alpha": 0.8}
        panel.plot(
            [r.ratio for r in inside],
            [at[r.set, r.model] for r in inside],
            "s",
            label=title,
            **style,
        )
        panel.plot([LARGEST] * len(beyond), [at[r.set, r.model] for r in beyond], ">", **style)
