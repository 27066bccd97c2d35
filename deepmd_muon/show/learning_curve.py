"""Read and draw learning curves (`lcurve.out`, or a log of JSON lines)."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from deepmd_muon.files import regular_text
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.palette import colors_of
from deepmd_muon.show.picture import COLUMN, PANEL, STYLE, check_ending, write

Against = Literal["step", "time"]
Columns = dict[str, np.ndarray]

_UNITS = {"e": "eV/atom", "f": "eV/Å", "fr": "eV/Å", "fm": "eV/uB", "v": "eV/atom"}
_TITLES = {"e": "Energy", "f": "Force", "fr": "Force", "fm": "Magnetic force", "v": "Virial"}
# Columns without "_trn" or "_val"; a loss of absolute errors writes mae_ columns.
_ERRORS = tuple(f"{kind}_{quantity}" for quantity in _TITLES for kind in ("rmse", "mae"))
# Multi-task runs write one column per branch.
_BRANCH_COLUMN = re.compile(r"(?P<error>(rmse|mae)(_[a-z]+)*_(val|trn))_(?P<branch>.+)")
# With at most this many rows, every row gets a marker.
_SPARSE = 40


class Curve(NamedTuple):
    """The columns of one run, or of one branch of a multi-task run."""

    label: str
    columns: Columns

    def has(self, name: str) -> bool:
        """Whether a column has a finite value."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())


# ----- reading -----------------------------------------------------------------------------------


def read_learning_curve(path: str | os.PathLike[str]) -> Columns:
    """Read a learning curve of this package or of deepmd-kit.

    The file is `lcurve.out` or, with the ending .jsonl, a log of JSON lines.

    Returns
    -------
    dict of ndarray
        Columns by name ("step", "rmse_e_trn", …, "lr", and for JSON lines "time" [s]), each
        (nrows,) float64. If columns change at a restart, rows without a column have nan there.

    Raises
    ------
    PictureError
        When the file does not exist, is not text, or lacks a header or a complete row.
    """
    path = Path(path)
    if not path.exists():
        raise PictureError(f"there is no learning curve {path}")
    try:
        lines = regular_text(path).splitlines()
    except OSError as error:
        if path.is_file() and error.errno != errno.EINVAL:
            raise
        found = "a folder" if path.is_dir() else error.strerror
        raise PictureError(f"{path} is {found}; give a learning curve, as lcurve.out") from error
    is_json = path.suffix == ".jsonl"
    rows = []
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#") and not is_json:
            if line.startswith("# step"):
                names = line[1:].split()
            continue
        try:
            row = _json_row(line) if is_json else _table_row(line, names)
        except (ValueError, OverflowError, RecursionError) as error:
            if number == len(lines):
                continue  # cut short by a crash, or just being written
            raise PictureError(
                f"{path}, line {number}: not a row of a learning curve; remove the line"
            ) from error
        if row:
            rows.append(row)
    if not rows:
        missing = "no complete line of JSON" if is_json else "no row below a header '# step …'"
        raise PictureError(
            f"{path} holds {missing}: it is not a learning curve, or the run has just begun"
        )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in columns}


def _table_row(line: str, names: Sequence[str]) -> dict[str, float]:
    """Return the values of a row by column; {} for a row that is cut short or has no header."""
    fields = line.split()
    if len(fields) != len(names):
        return {}
    return dict(zip(names, map(float, fields), strict=True))


def _json_row(line: str) -> dict[str, float]:
    row = json.loads(line)
    if not isinstance(row, dict) or "step" not in row:
        return {}
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


# ----- drawing -----------------------------------------------------------------------------------


@matplotlib.rc_context(STYLE)
def plot_learning_curves(
    paths: Sequence[str | os.PathLike[str]],
    picture: str | os.PathLike[str],
    labels: Sequence[str] | None = None,
    against: Against = "step",
    *,
    stacked: bool = False,
) -> None:
    """Draw learning curves: one panel per quantity, with errors and learning rates.

    Parameters
    ----------
    paths
        Files of learning curves.
    picture
        File to write; its ending determines the format.
    labels
        Names of the runs; by default the names of their files, or of their folders if files have
        the same name.
    against
        The horizontal axis; "time" needs logs of JSON lines.
    stacked
        Draw panels one below the other, for one column of a page.

    Raises
    ------
    PictureError
        When a file is not a learning curve or lacks the time, or labels and files differ in number.
    """
    picture = Path(picture)
    check_ending(picture)
    runs = [read_learning_curve(path) for path in paths]
    if labels is None:
        labels = [Path(path).name for path in paths]
        if len(set(labels)) < len(labels):
            labels = [str(Path(path).parent) for path in paths]
    if len(labels) != len(runs):
        raise PictureError(
            f"{len(runs)} learning curves need {len(runs)} labels; found {len(labels)}: "
            f"{list(labels)}"
        )
    for path, columns in zip(paths, runs, strict=True):
        if against not in columns:
            raise PictureError(
                f"{path} has no column {against!r}: lcurve.out keeps no time; set "
                "training/jsonl_file and draw its file"
            )
    curves: list[Curve] = []
    for columns, label in zip(runs, labels, strict=True):
        curves += branch_curves(columns, label if len(runs) > 1 else "")
    errors = errors_of(curves)
    if not errors:
        raise PictureError(f"no errors of energy, force or virial in {', '.join(map(str, paths))}")

    if stacked:
        size = (COLUMN, 2.0 * len(errors) + 0.3 * len(curves))
        shape = (len(errors), 1)
    else:
        size = (PANEL * len(errors), 2.2)
        shape = (1, len(errors))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(*shape, squeeze=False).ravel()
    for axes, error in zip(panels, errors, strict=True):
        draw_panel(axes, error, curves, against, label_rates=stacked or error == errors[-1])
    draw_legend(figure, ncols=2 if stacked or len(curves) == 1 else len(curves))
    write(figure, picture)


def branch_curves(columns: Columns, label: str) -> list[Curve]:
    """Return the curve of each branch of a multi-task run; of another run, its one curve."""
    common: Columns = {}  # step, time, learning rate
    branches: dict[str, Columns] = {}
    for name, column in columns.items():
        match = _BRANCH_COLUMN.fullmatch(name)
        if match:
            branches.setdefault(match["branch"], {})[match["error"]] = column
        else:
            common[name] = column
    if not branches:
        return [Curve(label, columns)]
    return [
        Curve(f"{label}, {branch}" if label else branch, {**common, **errors})
        for branch, errors in branches.items()
    ]


def errors_of(curves: Sequence[Curve]) -> list[str]:
    """Return the errors that a curve has, such as "rmse_f": each has a panel."""
    return [error for error in _ERRORS if any(curve.has(f"{error}_trn") for curve in curves)]


def draw_panel(
    axes: Any, error: str, curves: Sequence[Curve], against: Against, *, label_rates: bool
) -> None:
    """Draw one quantity of all curves, with the learning rates on the right axis."""
    rate_axes = axes.twinx()
    axes.set_zorder(rate_axes.get_zorder() + 1)  # errors over rates
    axes.patch.set_visible(False)
    alone = len(curves) == 1
    colors = colors_of([curve.label for curve in curves])
    for curve, color in zip(curves, colors, strict=True):
        x = curve.columns[against]
        is_validated = curve.has(f"{error}_val")
        for data, name in (("val", "validation"), ("trn", "training")):
            column = f"{error}_{data}"
            if not curve.has(column):
                continue
            y = curve.columns[column]
            finite = np.isfinite(y)
            style: dict[str, Any] = {"linewidth": 1.2}
            if data == "trn" and is_validated:
                style = {"linewidth": 0.7, "alpha": 0.45}
            if finite.sum() <= _SPARSE:
                style |= {"marker": "o", "markersize": 3}
            label = name if alone else f"{curve.label}, {name}"
            axes.plot(x[finite], y[finite], color=color, label=label, **style)
        if curve.has("lr"):
            rate_color = "0.5" if alone else color
            rates = curve.columns["lr"]
            rate_axes.plot(x, rates, color=rate_color, linewidth=0.8, linestyle=":")
    kind, _, quantity = error.partition("_")
    axes.set_title(_TITLES[quantity])
    axes.set_ylabel(f"{kind.upper()} [{_UNITS[quantity]}]")
    axes.set_xlabel("step" if against == "step" else "time [s]")
    axes.set_yscale("log")
    # Plain numbers, at 1, 2 and 5 if the axis spans few decades.
    low, high = axes.get_ylim()
    digits = (1.0, 2.0, 5.0) if np.log10(high / low) < 2.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=digits))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    rate_axes.set_yscale("log")
    if label_rates:
        rate_axes.set_ylabel("learning rate (dotted)", color="0.4")
        rate_axes.tick_params(axis="y", colors="0.4")
    else:
        rate_axes.tick_params(axis="y", which="both", right=False, labelright=False)


def draw_legend(figure: Any, ncols: int) -> None:
    """Draw one legend below all panels; of lines with the same label, the first."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        ncols=ncols,  # matplotlib fills column by column
        loc="outside lower center",
    )
