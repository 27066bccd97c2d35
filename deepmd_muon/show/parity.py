"""The parity picture: predictions against reference values, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure

from deepmd_muon.data import Frames
from deepmd_muon.infer.metrics import ErrorSum
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.palette import SERIES
from deepmd_muon.show.picture import check_ending, write

# Title, unit, words of the axis.
_PANELS = {
    "energy": ("Energy per atom", "eV/atom", "energy − linear fit"),
    "force": ("Force components", "eV/Å", "force"),
    "virial": ("Virial per atom", "eV/atom", "virial"),
}
# With more points than this, the last series of a panel is shaded by their density.
_DENSE = 3000
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
    _counts: dict[str, list[np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for path in self.paths:
            check_ending(path)

    def add(self, reference: Frames, prediction: Prediction, series: str = "") -> None:
        """Add the points of frames, given with labels and as predicted.

        Quantities without labels are left out.

        Every `series` of data, such as "training", has its own colour and errors.
        """
        real = reference.atype >= 0
        natoms = real.sum(axis=1)
        if reference.energy is not None:
            self._keep("energy", series, reference.energy / natoms, prediction.energy / natoms)
            counts = reference.type_counts(int(reference.atype.max()) + 1)
            self._counts.setdefault(series, []).append(counts / natoms[:, None])
        if reference.force is not None:
            self._keep("force", series, reference.force[real], prediction.force[real])
        if reference.virial is not None and reference.box is not None:
            self._keep(
                "virial",
                series,
                reference.virial / natoms[:, None],
                prediction.virial / natoms[:, None],
            )

    def _keep(self, name: str, series: str, data: np.ndarray, predicted: np.ndarray) -> None:
        points = np.stack([data.ravel(), predicted.ravel()]).astype(
            np.float32 if name == "force" else np.float64
        )
        self._points.setdefault(name, {}).setdefault(series, []).append(points)

    def save(self) -> None:
        """Draw and write the picture."""
        names = [name for name in _PANELS if name in self._points]
        if not names:
            raise PictureError(
                "none of the systems has a label to compare with: there is nothing to draw"
            )
        panels = {
            name: {s: np.concatenate(p, axis=1) for s, p in self._points[name].items()}
            for name in names
        }
        if "energy" in panels:
            panels["energy"] = without_offset(panels["energy"], self._counts)
        figure = Figure(figsize=(3.9 * len(names), 5.4), layout="constrained")
        rows = figure.subplots(2, len(names), squeeze=False, height_ratios=(3, 1), sharex="col")
        for upper, lower, name in zip(*rows, names, strict=True):
            _draw(upper, lower, name, panels[name], self.max_points)
        for path in self.paths:
            write(figure, path)


def without_offset(
    points: dict[str, np.ndarray], counts: dict[str, list[np.ndarray]]
) -> dict[str, np.ndarray]:
    """Subtract the least-squares energy of each element, fitted to all reference energies.

    `points` has reference and prediction of every series, `(2, nframes)` [eV/atom]. `counts` has
    the fraction of every element, `(nframes, ntypes)`; an array may end at the highest type in its
    frames.
    """
    width = max(part.shape[1] for parts in counts.values() for part in parts)
    fractions = {
        series: np.concatenate(
            [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
        )
        for series, parts in counts.items()
    }
    every = np.concatenate(list(fractions.values()))
    energies = np.concatenate([values[0] for values in points.values()])
    fitted = np.linalg.lstsq(every, energies, rcond=None)[0]
    return {series: values - fractions[series] @ fitted for series, values in points.items()}


def _draw(
    upper: Any, lower: Any, name: str, series: dict[str, np.ndarray], max_points: int
) -> None:
    """Draw a column: points with the diagonal, their differences, and the errors of all points in the corner."""
    title, unit, what = _PANELS[name]
    upper.set_title(title, fontsize="medium")
    ends = np.array(
        [min(p.min() for p in series.values()), max(p.max() for p in series.values())], dtype=float
    )
    upper.axline((ends[0], ends[0]), slope=1, color="0.5", linewidth=0.8, zorder=3)
    lower.axhline(0, color="0.5", linewidth=0.8, zorder=3)
    lines = []
    for number, (label, points) in enumerate(series.items()):
        errors = ErrorSum.of((points[1] - points[0]).astype(np.float64))
        # The last series is drawn over the others; only its density is shaded.
        last = number == len(series) - 1
        if points.shape[1] > max_points:
            points = points[
                :, np.random.default_rng(0).choice(points.shape[1], max_points, replace=False)
            ]
        _scatter(upper, points[0], points[1], _COLORS[number % len(_COLORS)], shaded=last)
        _scatter(
            lower, points[0], points[1] - points[0], _COLORS[number % len(_COLORS)], shaded=last
        )
        words = f"MAE {errors.mae:.2g}, RMSE {errors.rmse:.2g}"
        lines.append((f"{label}: {words}" if label else words, _COLORS[number % len(_COLORS)]))
    for row, (text, color) in enumerate(lines):
        place = (0.03, 0.97 - 0.06 * row)
        upper.text(
            *place,
            text,
            transform=upper.transAxes,
            color=color,
            fontsize="x-small",
            va="top",
            zorder=4,
        )
    margin = 0.04 * (ends[1] - ends[0] or 1.0)
    upper.set_xlim(ends[0] - margin, ends[1] + margin)
    upper.set_ylim(ends[0] - margin, ends[1] + margin)
    largest = max(float(np.abs(p[1] - p[0]).max()) for p in series.values()) or 1.0
    lower.set_ylim(-1.15 * largest, 1.15 * largest)
    upper.set_ylabel(f"predicted {what}\n[{unit}]")
    lower.set_ylabel(f"difference\n[{unit}]")
    lower.set_xlabel(f"reference {what} [{unit}]")
    upper.set_box_aspect(1)
    upper.locator_params(nbins=5)
    lower.locator_params(axis="y", nbins=3)


def _scatter(axes: Any, x: np.ndarray, y: np.ndarray, color: str, *, shaded: bool) -> None:
    """Draw points; if there are many and `shaded`, points in denser regions are darker."""
    if len(x) <= _DENSE or not shaded:
        size, alpha = (9, 0.7) if len(x) <= 300 else (4, 0.35)
        axes.scatter(
            x, y, s=size, color=color, alpha=alpha, linewidths=0, rasterized=True, zorder=1 + shaded
        )
        return
    density, x_edges, y_edges = np.histogram2d(x, y, bins=120)
    column = np.clip(np.searchsorted(x_edges, x, side="right") - 1, 0, 119)
    row = np.clip(np.searchsorted(y_edges, y, side="right") - 1, 0, 119)
    shade = np.log1p(density[column, row])
    order = np.argsort(shade)  # the densest on top
    rgb = np.array(to_rgb(color))
    colors = LinearSegmentedColormap.from_list("density", [1 - 0.3 * (1 - rgb), rgb, 0.3 * rgb])
    axes.scatter(
        x[order],
        y[order],
        s=4,
        c=shade[order],
        cmap=colors,
        linewidths=0,
        rasterized=True,
        zorder=2,
    )
