"""The pictures of a report: each alone for the page, and all together as one file."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure, FigureBase

from deepmd_muon.show.learning_curve import (
    Curve,
    branch_curves,
    draw_legend,
    draw_panel,
    errors_of,
    read_learning_curve,
)
from deepmd_muon.show.palette import BLUE, RED
from deepmd_muon.show.parity import ParityPoints, draw_parity
from deepmd_muon.show.picture import PANEL, STYLE, write
from deepmd_muon.show.stability import draw_closeness, draw_scans, draw_temperature
from deepmd_muon.stability.check import Check, ModelCheck
from deepmd_muon.stability.coverage import WIDTH, Coverage

_ROW = 3  # panels of a row of the common picture
_PAGE_DPI = 220  # of the panels in the page
_MAX_ENTRIES = 9  # of a legend of pairs
_MAX_PAIRS = 15  # rows of the panel of distances


class Panel(NamedTuple):
    """A picture of the report."""

    section: str  # of the page
    text: str  # for readers who do not see it
    draw: Callable[[FigureBase], None]


def curve_panels(path: Path, branch: str | None) -> list[Panel]:
    """Return a panel for each error of a learning curve; of several branches, show one."""
    curves = branch_curves(read_learning_curve(path), "")
    curves = [curve for curve in curves if branch is None or curve.label == branch] or curves
    return [
        Panel(
            "curve",
            f"{error} of training and validation by step",
            partial(_draw_curve, curves, error),
        )
        for error in errors_of(curves)
    ]


def _draw_curve(curves: Sequence[Curve], error: str, figure: FigureBase) -> None:
    draw_panel(figure.subplots(), error, curves, "step", label_rates=True)
    draw_legend(figure, ncols=2)


def parity_panels(points: ParityPoints) -> list[Panel]:
    """Return a panel for energies, for the forces of each element, and for virials."""
    return [
        Panel(
            "parity",
            f"{panel.title}: predictions against reference",
            partial(_draw_parity, points, k),
        )
        for k, panel in enumerate(points.panels())
    ]


def _draw_parity(points: ParityPoints, k: int, figure: FigureBase) -> None:
    draw_parity(figure, points.panels()[k], points.series, max_points=20_000)


def check_panels(check: Check) -> list[Panel]:
    """Return the distances of the data, and scans and dynamics of a check of one model."""
    (model,) = check.models
    scans = [
        Panel("check", "energies of dimers by distance", partial(_draw_scans, check, True)),
        Panel("check", "energies of atoms moved in place", partial(_draw_scans, check, False)),
    ]
    dynamics = [
        Panel("check", "temperature of the dynamics", partial(_draw_run, draw_temperature, model)),
        Panel("check", "closest pair of the dynamics", partial(_draw_run, draw_closeness, model)),
    ]
    distances = partial(_draw_distances, check.coverage, model)
    return [Panel("distances", "distances of every pair in the data", distances), *scans, *dynamics]


def _draw_scans(check: Check, dimers: bool, figure: FigureBase) -> None:
    axes = figure.subplots()
    draw_scans(axes, check.coverage, check.models[0], dimers=dimers)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles[:_MAX_ENTRIES],
            labels[:_MAX_ENTRIES],
            loc="outside lower center",
            ncols=3,
            handlelength=1.0,
            columnspacing=1.0,
        )


def _draw_run(draw: Callable[..., None], model: ModelCheck, figure: FigureBase) -> None:
    draw(figure.subplots(), model.dynamics)


def _draw_distances(coverage: Coverage, model: ModelCheck, figure: FigureBase) -> None:
    """Draw a bar over the distances of each pair, and how close dynamics brought it."""
    axes = figure.subplots()
    pairs = coverage.pairs[:_MAX_PAIRS]
    for row, pair in enumerate(pairs):
        ends = np.flatnonzero(np.diff(np.r_[False, coverage.seen[pair], False].astype(np.int8)))
        bars = [
            (begin * WIDTH, min(end * WIDTH, coverage.rcut) - begin * WIDTH)
            for begin, end in ends.reshape(-1, 2).tolist()
        ]
        axes.broken_barh(bars, (row - 0.3, 0.6), color=BLUE, label="" if row else "data")
        label = "" if row else "dynamics"
        axes.plot(model.dynamics.reached[pair], row, "v", color=RED, markersize=5, label=label)
    axes.set_yticks(range(len(pairs)), [coverage.name(pair) for pair in pairs])
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, coverage.rcut)
    axes.set_xlabel("distance [Å]")
    axes.set_title("Distances of the data, with a margin")
    figure.legend(loc="outside lower center", ncols=2)


@matplotlib.rc_context(STYLE)
def png_of(panel: Panel) -> bytes:
    """Return one panel as a PNG picture."""
    figure = Figure(figsize=(1.4 * PANEL, 1.4 * _height(panel)), layout="constrained")
    panel.draw(figure)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=_PAGE_DPI, format="png")
    return picture.getvalue()


def _height(panel: Panel) -> float:
    return 3.4 if panel.section == "parity" else 2.3


@matplotlib.rc_context(STYLE)
def draw_all(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw all panels in one picture, in rows of panels of one height."""
    rows: list[list[Panel]] = []
    for panel in panels:
        alike = rows and _height(rows[-1][0]) == _height(panel) and len(rows[-1]) < _ROW
        if alike:
            rows[-1].append(panel)
        else:
            rows.append([panel])
    heights = [_height(row[0]) for row in rows]
    figure = Figure(figsize=(_ROW * PANEL, sum(heights)), layout="constrained")
    figure.suptitle(title)
    lines = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for line, row in zip(lines, rows, strict=True):
        places = line.subfigures(1, _ROW, squeeze=False)[0]
        for place, panel in zip(places, row, strict=False):
            panel.draw(place)
    write(figure, path)
