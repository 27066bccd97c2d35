"""The parity picture: predictions against reference values, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure, FigureBase

from deepmd_muon.data import Frames
from deepmd_muon.infer.metrics import ErrorSum
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.palette import SERIES
from deepmd_muon.show.picture import PANEL, STYLE, check_ending, write


class Panel(NamedTuple):
    """A column of the picture."""

    title: str
    unit: str
    # By series: reference and prediction (2, npoints).
    points: dict[str, np.ndarray]


# With more points than this, the last series of a panel is shaded by their density.
_DENSE = 3000
# With at most this many, points are large.
_FEW = 300
_BINS = 120  # of the density, on each axis
_COLORS = SERIES[:4]


class ParityPoints:
    """Collect energies, forces and virials of frames, with their labels and as predicted.

    Energies are relative to the least-squares energy of each element, fitted to the reference, so
    that total energies of thousands of eV do not hide errors of a few meV. If frames of one atom
    without a cell have the energies of all elements, energies relative to these have a panel, too.

    Parameters
    ----------
    elements
        Names of the types; with them, forces have a panel for each element.
    """

    def __init__(self, elements: Sequence[str] = ()) -> None:
        self._elements = elements
        self.series: list[str] = []
        self._energy: dict[str, list[np.ndarray]] = {}  # by series, as the others
        self._fractions: dict[str, list[np.ndarray]] = {}
        self._sizes: dict[str, list[np.ndarray]] = {}  # atoms of the frames with energies
        # Reference and predicted energy of single atoms [eV] by type.
        self._atoms: dict[int, list[tuple[float, float]]] = {}
        self._force: dict[str, list[np.ndarray]] = {}
        self._types: dict[str, list[np.ndarray]] = {}  # of the components of the forces
        self._virial: dict[str, list[np.ndarray]] = {}

    def add(self, reference: Frames, prediction: Prediction, series: str = "") -> None:
        """Add frames; quantities without labels are left out."""
        if series not in self.series:
            self.series.append(series)
        real = reference.atype >= 0
        natoms = real.sum(axis=1)  # (nframes,)
        if reference.energy is not None:
            points = np.stack([reference.energy, prediction.energy]) / natoms
            self._energy.setdefault(series, []).append(points)
            counts = reference.type_counts(int(reference.atype.max()) + 1)
            self._fractions.setdefault(series, []).append(counts / natoms[:, None])
            self._sizes.setdefault(series, []).append(natoms)
            if reference.box is None:
                for row in np.flatnonzero(natoms == 1):
                    pair = (float(reference.energy[row]), float(prediction.energy[row]))
                    kind = int(reference.atype[row].max())
                    self._atoms.setdefault(kind, []).append(pair)
        if reference.force is not None:
            points = np.stack([reference.force[real].ravel(), prediction.force[real].ravel()])
            # There are many forces, and their differences need no further digits.
            self._force.setdefault(series, []).append(points.astype(np.float32))
            self._types.setdefault(series, []).append(np.repeat(reference.atype[real], 3))
        if reference.virial is not None and reference.box is not None:
            points = np.stack([reference.virial, prediction.virial]) / natoms[:, None]
            self._virial.setdefault(series, []).append(points.reshape(2, -1))

    def add_free_atoms(self, other: ParityPoints) -> None:
        """Take the free atoms among the frames of another set, for atomization energies."""
        for kind, pairs in other._atoms.items():
            self._atoms.setdefault(kind, []).extend(pairs)

    def panels(self) -> list[Panel]:
        """Return a panel for each quantity that has labels.

        Raises
        ------
        PictureError
            When no quantity has any.
        """
        panels = []
        if self._energy:
            energies = without_offset(_joined(self._energy), self._fractions)
            panels.append(Panel("Energy per atom, less a linear fit", "eV/atom", energies))
        atomization = self._atomization()
        if atomization:
            panels.append(Panel("Atomization energy per atom", "eV/atom", atomization))
        forces = _joined(self._force)
        if forces and not self._elements:
            panels.append(Panel("Force components", "eV/Å", forces))
        for kind, element in enumerate(self._elements):
            of_element = {
                series: values[:, np.concatenate(self._types[series]) == kind]
                for series, values in forces.items()
            }
            of_element = {name: values for name, values in of_element.items() if values.size}
            if of_element:
                panels.append(Panel(f"Force components of {element}", "eV/Å", of_element))
        if self._virial:
            panels.append(Panel("Virial per atom", "eV/atom", _joined(self._virial)))
        if not panels:
            raise PictureError(
                "none of the systems has a label to compare with: there is nothing to draw"
            )
        return panels

    def _atomization(self) -> dict[str, np.ndarray]:
        """Return energies less those of free atoms, reference and prediction (2, nframes) [eV/atom].

        Frames with an element without a free atom are left out, and so are the free atoms.
        """
        by_series = {}
        all_fractions = _padded(self._fractions) if self._atoms else {}
        for series, fractions in all_fractions.items():
            of_atoms = np.zeros((2, fractions.shape[1]))
            for kind, pairs in self._atoms.items():
                of_atoms[:, kind] = np.mean(pairs, axis=0)
            has_atoms = np.isin(np.arange(fractions.shape[1]), list(self._atoms))
            is_known = ~(fractions[:, ~has_atoms] > 0).any(axis=1)
            is_known &= np.concatenate(self._sizes[series]) > 1
            energies = np.concatenate(self._energy[series], axis=1) - of_atoms @ fractions.T
            if is_known.any():
                by_series[series] = energies[:, is_known]
        return by_series


def _joined(parts: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {series: np.concatenate(points, axis=1) for series, points in parts.items()}


@dataclass
class ParityPicture:
    """Collect points from tests, then draw one column each for energy, force and virial.

    The upper panel of a column shows prediction against reference, the lower one their difference.

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
    _points: ParityPoints = field(default_factory=ParityPoints, init=False, repr=False)

    def __post_init__(self) -> None:
        for path in self.paths:
            check_ending(path)

    def add(self, reference: Frames, prediction: Prediction, series: str = "") -> None:
        """Add the points of frames; every `series`, such as "training", has its own colour."""
        self._points.add(reference, prediction, series)

    @matplotlib.rc_context(STYLE)
    def save(self) -> None:
        """Draw and write the picture."""
        panels = self._points.panels()
        figure = Figure(figsize=(PANEL * len(panels), 3.7), layout="constrained")
        columns = figure.subfigures(1, len(panels), squeeze=False)[0]
        for column, panel in zip(columns, panels, strict=True):
            draw_parity(column, panel, self._points.series, self.max_points)
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
    by_series = _padded(fractions)
    all_fractions = np.concatenate(list(by_series.values()))
    energies = np.concatenate([values[0] for values in points.values()])
    element_energies = np.linalg.lstsq(all_fractions, energies, rcond=None)[0]
    return {
        series: values - by_series[series] @ element_energies for series, values in points.items()
    }


def _padded(fractions: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the fractions of all types for each series, `(nframes, ntypes)`."""
    ntypes = max(part.shape[1] for parts in fractions.values() for part in parts)
    return {
        series: np.concatenate(
            [np.pad(part, ((0, 0), (0, ntypes - part.shape[1]))) for part in parts]
        )
        for series, parts in fractions.items()
    }


def draw_parity(
    figure: FigureBase, panel: Panel, series: Sequence[str], max_points: int = 50_000
) -> None:
    """Draw points with the diagonal above, their differences below; errors are of all points.

    `series` lists the series of the whole picture: each has the same colour in all its panels.
    """
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    low = float(min(values.min() for values in panel.points.values()))
    high = float(max(values.max() for values in panel.points.values()))
    largest = max(float(np.abs(values[1] - values[0]).max()) for values in panel.points.values())
    upper.axline((low, low), slope=1, color="0.5", linewidth=0.8, zorder=3)
    lower.axhline(0, color="0.5", linewidth=0.8, zorder=3)
    last = list(panel.points)[-1]
    for name, (reference, predicted) in panel.points.items():
        color = _COLORS[series.index(name) % len(_COLORS)]
        errors = ErrorSum.of((predicted - reference).astype(np.float64))
        text = f"MAE {errors.mae:.2g}, RMSE {errors.rmse:.2g} {panel.unit}"
        upper.plot([], [], "o", color=color, label=f"{name}\n{text}" if name else text)
        if len(reference) > max_points:
            drawn = np.random.default_rng(0).choice(len(reference), max_points, replace=False)
            reference = reference[drawn]
            predicted = predicted[drawn]
        # The last series is drawn over the others; only its density is shaded.
        _scatter(upper, reference, predicted, color, shaded=name == last)
        _scatter(lower, reference, predicted - reference, color, shaded=name == last)
    margin = 0.04 * ((high - low) or 1.0)
    upper.set_title(panel.title)
    upper.set_xlim(low - margin, high + margin)
    upper.set_ylim(low - margin, high + margin)
    upper.set_ylabel(f"predicted [{panel.unit}]")
    upper.set_box_aspect(1)
    upper.locator_params(nbins=4)
    half_height = 1.15 * (largest or 1.0)
    lower.set_ylim(-half_height, half_height)
    lower.set_ylabel("difference")
    lower.set_xlabel(f"reference [{panel.unit}]")
    lower.locator_params(axis="y", nbins=3)
    # Outside: no corner is free of points in every case.
    figure.legend(loc="outside lower center", handlelength=0.6, labelspacing=0.3)


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
