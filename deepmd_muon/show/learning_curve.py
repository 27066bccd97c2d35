"""Read and draw learning curves (`lcurve.out`, or a log of JSON lines)."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from deepmd_muon.files import regular_text
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.palette import colors_of
from deepmd_muon.show.picture import check_ending, write

Against = Literal["step", "time"]

_UNITS = {"e": "eV/atom", "f": "eV/Å", "v": "eV/atom"}
_TITLES = {"e": "Energy", "f": "Force", "v": "Virial"}
# Columns without "_trn" or "_val"; a loss of absolute errors writes mae_ columns.
_ERRORS = tuple(f"{kind}_{quantity}" for quantity in _TITLES for kind in ("rmse", "mae"))
# Multi-task runs write one column per branch.
_OF_BRANCH = re.compile(r"(?P<error>(rmse|mae)(_[a-z]+)*_(val|trn))_(?P<branch>.+)")
# With at most this many rows, every row gets a marker.
_SPARSE = 40


def read_learning_curve(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read a learning curve, of this package or of deepmd-kit: `lcurve.out` or, with the ending .jsonl, JSON lines.

    Return columns by name ("step", "rmse_e_trn", …, "lr", and for JSON lines "time" [s]), each
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
    json_lines = path.suffix == ".jsonl"
    rows, names = [], list[str]()
    for number, line in enumerate(lines, 1):
        if not json_lines and line.startswith("#"):
            names = line[1:].split() if line.startswith("# step") else names
            continue
        try:
            row = _json_row(line) if json_lines else _table_row(line, names)
        except (ValueError, OverflowError, RecursionError) as error:
            if number == len(lines):
                continue  # cut short by a crash, or just being written
            raise PictureError(
                f"{path}, line {number}: not a row of a learning curve; remove the line"
            ) from error
        rows += [row] if row else []
    if not rows:
        wanted = "no complete line of JSON" if json_lines else "no row below a header '# step …'"
        raise PictureError(
            f"{path} holds {wanted}: it is not a learning curve, or the run has just begun"
        )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in columns}


def _table_row(line: str, names: Sequence[str]) -> dict[str, float]:
    """Return the values of a row by column; {} for a row that is cut short or has no header."""
    fields = line.split()
    return dict(zip(names, map(float, fields), strict=True)) if len(fields) == len(names) else {}


def _json_row(line: str) -> dict[str, float]:
    row = json.loads(line)
    if not isinstance(row, dict) or "step" not in row:
        return {}
    return {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}


def plot_learning_curves(
    paths: Sequence[str | os.PathLike[str]],
    picture: str | os.PathLike[str],
    labels: Sequence[str] | None = None,
    against: Against = "step",
) -> None:
    """Draw learning curves: one panel per quantity, with validation and training errors and learning rates.

    The ending of `picture` determines its format. Without `labels`, runs have the names or folders
    of their files. The axis "time" needs logs of JSON lines.

    Raises
    ------
    PictureError
        When a file is not a learning curve or lacks the time, or labels and files differ in number.
    """
    picture = Path(picture)
    check_ending(picture)
    runs = [read_learning_curve(path) for path in paths]
    if labels is None:  # the files' names if these differ, else their folders
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
    several = len(runs) > 1
    curves: list[tuple[str, dict[str, np.ndarray]]] = []
    for run, label in zip(runs, labels, strict=True):
        curves += _branches(run, label if several else "")
    labels, runs = [label for label, _ in curves], [columns for _, columns in curves]
    drawn = [error for error in _ERRORS if any(_has(columns, f"{error}_trn") for columns in runs)]
    if not drawn:
        raise PictureError(f"no errors of energy, force or virial in {', '.join(map(str, paths))}")
    figure = Figure(figsize=(4.1 * len(drawn), 3.5), layout="constrained")
    for number, (axes, error) in enumerate(
        zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True)
    ):
        _draw(axes, error, runs, labels, against, last=number == len(drawn) - 1)
    # One legend below all panels; with several runs, one column per run.
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        found = {**dict(zip(names, handles, strict=True)), **found}
    ncols = 2 if len(runs) == 1 else len(runs)  # matplotlib fills column by column
    place: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": "small"}
    figure.legend(found.values(), found.keys(), ncols=ncols, **place)
    write(figure, picture)


def _branches(
    columns: dict[str, np.ndarray], label: str
) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Return label and curves of each branch of a multi-task run.

    For any other run, the given ones.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    common = {name: x for name, x in columns.items() if not _OF_BRANCH.fullmatch(name)}
    for name, x in columns.items():
        if parts := _OF_BRANCH.fullmatch(name):
            found.setdefault(parts["branch"], dict(common))[parts["error"]] = x
    if not found:
        return [(label, columns)]
    return [(f"{label}, {branch}" if label else branch, own) for branch, own in found.items()]


def _has(columns: dict[str, np.ndarray], name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _draw(
    axes: Any,
    error: str,
    runs: Sequence[dict[str, np.ndarray]],
    labels: Sequence[str],
    against: Against,
    *,
    last: bool,
) -> None:
    """Draw one quantity of all runs, with the learning rates on the right axis."""
    kind, _, quantity = error.partition("_")
    rate = axes.twinx()
    axes.set_zorder(rate.get_zorder() + 1)  # errors over rates
    axes.patch.set_visible(False)
    for columns, label, color in zip(runs, labels, colors_of(labels), strict=True):
        x = columns[against]
        validated = _has(columns, f"{error}_val")
        for data, style in (
            ("val", {}),
            ("trn", {"alpha": 0.4, "linewidth": 0.9} if validated else {}),
        ):
            if _has(columns, f"{error}_{data}"):
                y = columns[f"{error}_{data}"]
                there = np.isfinite(y)
                marker = {"marker": "o", "markersize": 3} if there.sum() <= _SPARSE else {}
                name = "validation" if data == "val" else "training"
                name = name if len(runs) == 1 else f"{label}, {name}"
                axes.plot(
                    x[there],
                    y[there],
                    color=color,
                    label=name,
                    **{"linewidth": 1.4, **marker, **style},
                )
        if _has(columns, "lr"):
            rate.plot(
                x,
                columns["lr"],
                color=color if len(runs) > 1 else "0.5",
                linewidth=0.8,
                linestyle=":",
            )
    axes.set_title(_TITLES[quantity], fontsize="medium")
    axes.set_ylabel(f"{kind.upper()} [{_UNITS[quantity]}]")
    axes.set_xlabel("step" if against == "step" else "time [s]")
    axes.set_yscale("log")
    # Plain numbers, at 1, 2 and 5 if the axis spans few decades.
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if np.log10(high / low) < 2.5 else (1.0,))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    rate.set_yscale("log")
    if last:
        rate.set_ylabel("learning rate (dotted)", color="0.4")
        rate.tick_params(axis="y", colors="0.4", labelsize="small")
    else:
        rate.tick_params(axis="y", which="both", right=False, labelright=False)
