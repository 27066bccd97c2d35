"""The picture of the race: HybridMuon's default relative to AdamW at its best rate, for every set and model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fields import Default

# As in `dp show lcurve`: one colour for each optimizer in all pictures.
ADAM, HYBRID_MUON = "#1f6fb4", "#d1651a"


def draw(rows: Sequence[Default], path: Path) -> None:
    """Draw the ratios of force errors in a panel for each number of steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    budgets = list(dict.fromkeys(row.steps for row in rows))
    figure, panels = plt.subplots(
        1, len(budgets), figsize=(5.5 * len(budgets), 4.2), sharex=True, squeeze=False, layout="constrained"
    )
    farthest = max(1.0, *(ratio for row in rows for ratio in (row.test_ratio, row.out_ratio) if math.isfinite(ratio)))
    for panel, steps in zip(panels[0], budgets, strict=True):
        some = [row for row in rows if row.steps == steps]
        heights = range(len(some))
        panel.axvline(1.0, color=ADAM, label="AdamW at the best of its rates")
        panel.hlines(heights, 0.0, [row.test_ratio for row in some], color=HYBRID_MUON, alpha=0.3)
        panel.plot([row.test_ratio for row in some], heights, "o", color=HYBRID_MUON, label="HybridMuon, test frames")
        hollow = {"color": HYBRID_MUON, "markerfacecolor": "none", "label": "HybridMuon, out of distribution"}
        panel.plot([row.out_ratio for row in some], heights, "D", **hollow)
        panel.set_yticks(heights, [f"{row.set}, {row.model}" for row in some], fontsize="small")
        panel.invert_yaxis()
        panel.set(title=f"{steps:,} steps", xlabel="force error / force error of AdamW", xlim=(0.0, 1.05 * farthest))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
