"""The parity picture: predictions against reference values, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure

from deepmd_muon.data import Frames
from deepmd_muon.infer.metrics import ErrorSum
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.palette import SERIES
from deepmd_muon.show.picture import check_ending, write


class _Panel(NamedTuple):
    """Words of one column of the picture."""

    title: str
    unit: str
    axis: str


_PANELS = {
    "energy": _Panel("Energy per atom", "eV/atom", "energy − linear fit"),
    "force": _Panel("Force components", "eV/Å", "force"),
    "virial": _Panel("Virial per atom", "eV/atom", "virial"),
}
# With more points than this, the last series of a panel is shaded by their density.
_DENSE = 3000
# With at most this many, points are large.
_FEW = 300
_BINS = 120  # of the density, on each axis
_COLORS = SERIES[:4]


@dataclass
class ParityPicture:
    """Collect points from tests, then draw one column each for energy, force and virial.

    The upper panel of a column shows prediction against reference, the lower one their difference.
    Energies are drawn relative to the least-squares energy of each element, fitted to the
    reference, so that total energies of thousands of eV do not hide errors of a few meV.

    Parameters
    ----------
    paths
        Files to write, whose endings determine the formats.
    max_points
        Largest number of points drawn per panel and series, chosen at random with a fixed seed.
        Errors are of all points.

    Raises
    ------
    PictureError
        At once if an ending is not a picture format, in `save` if there is nothing to draw.
    """

    paths: Sequence[Path]
    max_points: int = 50_000
    _points: dict[str, dict[str, list[np.ndarray]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _fractions: dict[str, list[np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for path in self.paths:
            check_ending(path)

    def add(self, reference: Frames, prediction: Prediction, series: str = "") -> None:
        """Add the points of frames, with their labels and as predicted.

        Quantities without labels are left out. Every `series` of data, such as "training", has its
        own colour and errors.
        """
        real = reference.atype >= 0
        natoms = real.sum(axis=1)  # (nframes,)
        if reference.energy is not None:
            self._add_points(
                "energy", series, reference.energy / natoms, prediction.energy / natoms
            )
            counts = reference.type_counts(int(reference.atype.max()) + 1)
            self._fractions.setdefault(series, []).append(counts / natoms[:, None])
        if reference.force is not None:
            self._add_points("force", series, reference.force[real], prediction.force[real])
        if reference.virial is not None and reference.box is not None:
            divisor = natoms[:, None]
            self._add_points(
                "virial", series, reference.virial / divisor, prediction.virial / divisor
            )

    def _add_points(
        self, quantity: str, series: str, reference: np.ndarray, predicted: np.ndarray
    ) -> None:
        points = np.stack([reference.ravel(), predicted.ravel()])
        # There are many forces, and their differences need no further digits.
        points = points.astype(np.float32 if quantity == "force" else np.float64)
        self._points.setdefault(quantity, {}).setdefault(series, []).append(points)

    def save(self) -> None:
        """Draw and write the picture."""
        panels = {}
        for quantity in _PANELS:
            if quantity in self._points:
                panels[quantity] = {
                    series: np.concatenate(points, axis=1)
                    for series, points in self._points[quantity].items()
                }
        if not panels:
            raise PictureError(
                "none of the systems has a label to compare with: there is nothing to draw"
            )
        if "energy" in panels:
            panels["energy"] = without_offset(panels["energy"], self._fractions)
        figure = Figure(figsize=(3.9 * len(panels), 5.4), layout="constrained")
        rows = figure.subplots(2, len(panels), squeeze=False, height_ratios=(3, 1), sharex="col")
        for upper, lower, (quantity, points) in zip(*rows, panels.items(), strict=True):
            _draw_column(upper, lower, _PANELS[quantity], points, self.max_points)
        for path in self.paths:
            write(figure, path)


def without_offset(
    points: dict[str, np.ndarray], fractions: dict[str, list[np.ndarray]]
) -> dict[str, np.ndarray]:
    """Subtract the least-squares energy of each element, fitted to all reference energies.

    Parameters
    ----------
    points
        Reference and prediction of every series, `(2, nframes)` [eV/atom].
    fractions
        The fraction of every element, `(nframes, ntypes)`; an array may end at the highest type in
        its frames.
    """
    ntypes = max(part.shape[1] for parts in fractions.values() for part in parts)
    by_series = {}
    for series, parts in fractions.items():
        padded = [np.pad(part, ((0, 0), (0, ntypes - part.shape[1]))) for part in parts]
        by_series[series] = np.concatenate(padded)
    all_fractions = np.concatenate(list(by_series.values()))
    energies = np.concatenate([values[0] for values in points.values()])
    element_energies = np.linalg.lstsq(all_fractions, energies, rcond=None)[0]
    return {
        series: values - by_series[series] @ element_energies for series, values in points.items()
    }


def _draw_column(
    upper: Any, lower: Any, panel: _Panel, points: dict[str, np.ndarray], max_points: int
) -> None:
    """Draw a column: points with the diagonal above, their differences below.

    `points` has reference and prediction of every series, (2, npoints). The errors of all points
    are written in the upper corner.
    """
    low = float(min(series.min() for series in points.values()))
    high = float(max(series.max() for series in points.values()))
    largest = max(float(np.abs(series[1] - series[0]).max()) for series in points.values())
    upper.axline((low, low), slope=1, color="0.5", linewidth=0.8, zorder=3)
    lower.axhline(0, color="0.5", linewidth=0.8, zorder=3)
    for number, (label, (reference, predicted)) in enumerate(points.items()):
        color = _COLORS[number % len(_COLORS)]
        errors = ErrorSum.of((predicted - reference).astype(np.float64))
        text = f"MAE {errors.mae:.2g}, RMSE {errors.rmse:.2g}"
        upper.text(
            0.03,
            0.97 - 0.06 * number,
            f"{label}: {text}" if label else text,
            transform=upper.transAxes,
            color=color,
            fontsize="x-small",
            va="top",
            zorder=4,
        )
        if len(reference) > max_points:
            drawn = np.random.default_rng(0).choice(len(reference), max_points, replace=False)
            reference = reference[drawn]
            predicted = predicted[drawn]
        # The last series is drawn over the others; only its density is shaded.
        shaded = number == len(points) - 1
        _scatter(upper, reference, predicted, color, shaded=shaded)
        _scatter(lower, reference, predicted - reference, color, shaded=shaded)
    margin = 0.04 * ((high - low) or 1.0)
    upper.set_title(panel.title, fontsize="medium")
    upper.set_xlim(low - margin, high + margin)
    upper.set_ylim(low - margin, high + margin)
    upper.set_ylabel(f"predicted {panel.axis}\n[{panel.unit}]")
    upper.set_box_aspect(1)
    upper.locator_params(nbins=5)
    half_height = 1.15 * (largest or 1.0)
    lower.set_ylim(-half_height, half_height)
    lower.set_ylabel(f"difference\n[{panel.unit}]")
    lower.set_xlabel(f"reference {panel.axis} [{panel.unit}]")
    lower.locator_params(axis="y", nbins=3)


def _scatter(axes: Any, x: np.ndarray, y: np.ndarray, color: str, *, shaded: bool) -> None:
    """Draw points; if there are many and `shaded`, points in denser regions are darker."""
    common = {"linewidths": 0, "rasterized": True}
    if len(x) <= _DENSE or not shaded:
        zorder = 2 if shaded else 1
        size = 9 if len(x) <= _FEW else 4
        alpha = 0.7 if len(x) <= _FEW else 0.35
        axes.scatter(x, y, s=size, color=color, alpha=alpha, zorder=zorder, **common)
        return
    density, x_edges, y_edges = np.histogram2d(x, y, bins=_BINS)
    column = np.clip(np.searchsorted(x_edges, x, side="right") - 1, 0, _BINS - 1)
    row = np.clip(np.searchsorted(y_edges, y, side="right") - 1, 0, _BINS - 1)
    shade = np.log1p(density[column, row])
    order = np.argsort(shade)  # the densest on top
    rgb = np.array(to_rgb(color))
    shades = [1 - 0.3 * (1 - rgb), rgb, 0.3 * rgb]
    colors = LinearSegmentedColormap.from_list("density", shades)
    axes.scatter(x[order], y[order], s=4, c=shade[order], cmap=colors, zorder=2, **common)
