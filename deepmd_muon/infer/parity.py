"""The parity picture: predictions against reference values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepmd_muon.data import Frames
from deepmd_muon.infer.errors import PictureError
from deepmd_muon.infer.metrics import ErrorSum
from deepmd_muon.infer.picture import check_ending, write
from deepmd_muon.infer.predictor import Prediction

_PANELS = {
    "energy": ("Energy per atom", "eV"),
    "force": ("Force components", "eV/Å"),
    "virial": ("Virial per atom", "eV"),
}


@dataclass
class ParityPicture:
    """Collect points of a test, then draw one panel each for energy, force and virial.

    Parameters
    ----------
    path
        Where the picture goes; its format follows from the ending.
    max_points
        Most points drawn in a panel, chosen at random but the same every time. The errors in the titles are of all.

    Raises
    ------
    PictureError
        At once when the ending is no picture format, in `save` when there is nothing to draw.
    """

    path: Path
    max_points: int = 50_000
    _points: dict[str, list[np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_ending(self.path)

    def add(self, reference: Frames, prediction: Prediction) -> None:
        """Take the points of some frames; quantities without reference are left out."""
        real = reference.atype >= 0
        natoms = real.sum(axis=1)
        if reference.energy is not None:
            self._keep("energy", reference.energy / natoms, prediction.energy / natoms)
        if reference.force is not None:
            self._keep("force", reference.force[real], prediction.force[real])
        if reference.virial is not None and reference.box is not None:
            self._keep("virial", reference.virial / natoms[:, None], prediction.virial / natoms[:, None])

    def _keep(self, name: str, data: np.ndarray, predicted: np.ndarray) -> None:
        points = np.stack([data.ravel(), predicted.ravel()]).astype(np.float32 if name == "force" else np.float64)
        self._points.setdefault(name, []).append(points)

    def save(self) -> None:
        """Draw and write the picture."""
        panels = [name for name in _PANELS if name in self._points]
        if not panels:
            raise PictureError("none of the systems has a label to compare with: there is nothing to draw")
        figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, name, np.concatenate(self._points[name], axis=1), self.max_points)
        write(figure, self.path)


def _draw(axes: Any, name: str, points: np.ndarray, max_points: int) -> None:
    """Draw one panel: points, the diagonal, and the errors of all points in the title."""
    title, unit = _PANELS[name]
    errors = ErrorSum.of((points[1] - points[0]).astype(np.float64))
    if points.shape[1] > max_points:
        points = points[:, np.random.default_rng(0).choice(points.shape[1], max_points, replace=False)]
    ends = [float(points.min()), float(points.max())]
    axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
    axes.scatter(points[0], points[1], s=4, alpha=0.4, linewidths=0, rasterized=True, zorder=2)
    axes.set_title(f"{title}\nMAE {errors.mae:.3g}, RMSE {errors.rmse:.3g} {unit}", fontsize="medium")
    axes.set_xlabel(f"reference [{unit}]")
    axes.set_ylabel(f"prediction [{unit}]")
    axes.set_aspect("equal", adjustable="datalim")
    axes.locator_params(nbins=4)  # energies have long labels
