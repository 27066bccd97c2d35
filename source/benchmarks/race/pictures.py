"""Pictures of the race: the test error over steps, and over seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fields import TITLES, Field, mean, time_of
from results import StepTime


def draw(field: Field, times: Sequence[StepTime], path: Path) -> None:
    """Draw the test error of each contestant at its best rate over steps, and over seconds where times are known."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    milliseconds = {name: time_of(times, field, name) for name in field.runs}
    timed = not all(map(math.isnan, milliseconds.values()))
    width = 12.0 if timed else 8.0
    figure, panels = plt.subplots(1, 1 + timed, figsize=(width, 4.5), sharey=True, squeeze=False, layout="constrained")
    for panel, label in zip(panels[0], ("steps", "seconds"), strict=False):
        for number_of_line, name in enumerate(TITLES):
            unit = milliseconds.get(name, math.nan) / 1e3 if label == "seconds" else 1.0
            if name not in field.runs or math.isnan(unit):
                continue
            points = list(zip(*(result.curve for result in field.best(name)[1]), strict=False))
            x = [unit * several[0][0] for several in points]
            y = [mean(force_error for _, force_error, _ in several) for several in points]
            style = {"color": f"C{number_of_line % 10}", "linestyle": ("-", "--")[number_of_line // 10]}
            panel.plot(x, y, marker="o", markersize=3, label=TITLES[name], **style)
        panel.set(xscale="log", yscale="log", xlabel=label)
    panels[0, 0].set_ylabel("force error, test [eV/Å]")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{field.set}, {field.model}, {field.steps:,} steps")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def picture_name(field: Field) -> str:
    """Return the name of a set's picture."""
    model = "" if field.model == "se_e2_a" else f"_{field.model}"
    return f"race_{field.set}{model}_{field.steps}.png"
