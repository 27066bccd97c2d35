"""A picture of an optimizer's matrices: spectra of weights and momenta, and the size of updates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.palette import OPTIMIZERS
from deepmd_muon.show.picture import PANEL, STYLE, check_ending, write

#: Singular values above this fraction of the matrix's Frobenius norm count towards the rank;
#: smaller ones are rounding noise in 16 bits.
SHARE = 1e-3

_COLORS = {
    "muon": OPTIMIZERS["HybridMuon"],
    "adam": OPTIMIZERS["Adam"],
    "adamw": OPTIMIZERS["AdamW"],
}
# Opacity of the lines of the first and of the last matrix of the model.
_DARKEST = 0.9
_LIGHTEST = 0.35


@dataclass(frozen=True)
class ParameterUpdate:
    """A parameter, its momentum, and the size of the next update.

    Attributes
    ----------
    route
        "muon", "adam" or "adamw".
    weights
        Singular values of each of its matrices, largest first; empty for vectors.
    momenta
        Singular values of the momenta of these matrices.
    rms
        Root mean square of the weights.
    update
        Root mean square of the update that the optimizer would compute from the momentum; None
        without optimizer state.
    """

    name: str
    route: str
    shape: tuple[int, ...]
    weights: tuple[np.ndarray, ...]
    momenta: tuple[np.ndarray, ...]
    rms: float
    update: float | None

    @property
    def relative(self) -> float | None:
        """Ratio of update to weights; None without optimizer state, or if all weights are zero."""
        return None if self.update is None or self.rms == 0 else self.update / self.rms


def rank(values: np.ndarray) -> int:
    """Return the number of singular values above `SHARE` of the Frobenius norm."""
    return int(np.count_nonzero(values > SHARE * np.sqrt((values**2).sum())))


def stable_rank(values: np.ndarray) -> float:
    """Return ‖X‖²_F / σ₁²: from 1 to the number of singular values, or 0 if all are zero."""
    return float((values**2).sum() / values[0] ** 2) if values[0] > 0 else 0.0


def table(parameters: Sequence[ParameterUpdate]) -> str:
    """Return a line per parameter, and a line per route with the statistics of its updates."""
    width = max(len("parameter"), *(len(parameter.name) for parameter in parameters))
    lines = [
        f"{'parameter':{width}s}  {'route':5s}  {'shape':>12s}  {'weight: max':>11s}  {'min':>8s}  "
        f"{'stable':>6s}  {'momentum: rank':>14s}  {'stable':>6s}  {'update':>8s}  {'/ weight':>8s}"
    ]
    for p in parameters:
        largest = smallest = weight_rank = momentum_rank = stable_momentum_rank = ""
        if p.weights:  # a parameter of several matrices is shown by its first
            values = p.weights[0]
            largest = f"{values[0]:.3g}"
            smallest = f"{values[-1]:.2g}"
            weight_rank = f"{stable_rank(values):.1f}"
        if p.momenta:
            values = p.momenta[0]
            momentum_rank = f"{rank(values)} of {len(values)}"
            stable_momentum_rank = f"{stable_rank(values):.1f}"
        update = "" if p.update is None else f"{p.update:.2g}"
        relative = "" if p.relative is None else f"{p.relative:.2g}"
        shape = "x".join(map(str, p.shape))
        row = (
            f"{p.name:{width}s}  {p.route:5s}  {shape:>12s}  {largest:>11s}  {smallest:>8s}  "
            f"{weight_rank:>6s}  {momentum_rank:>14s}  {stable_momentum_rank:>6s}  {update:>8s}  "
            f"{relative:>8s}"
        )
        lines.append(row.rstrip())
    lines.append("")
    for route in dict.fromkeys(p.route for p in parameters):
        members = [p for p in parameters if p.route == route]
        updates = [p.relative for p in members if p.relative is not None]
        spread = "no state"
        if updates:
            median = np.median(updates)
            spread = f"median {median:.2g}, from {min(updates):.2g} to {max(updates):.2g}"
        lines.append(f"{route}: {len(members)} parameters; update / weight: {spread}")
    return "\n".join(lines)


@matplotlib.rc_context(STYLE)
def plot_spectra(
    parameters: Sequence[ParameterUpdate], picture: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw the spectra of all weights and momenta, and the relative update of every parameter.

    `parameters` are in the order of the model. The ending of `picture` determines its format.

    Raises
    ------
    PictureError
        When no parameter is a matrix.
    """
    picture = Path(picture)
    check_ending(picture)
    matrices = [p for p in parameters if p.weights]
    if not matrices:
        raise PictureError("no parameter is a matrix: there are no spectra to draw")
    figure = Figure(figsize=(3 * PANEL, 2.4), layout="constrained")
    weights, momenta, updates = figure.subplots(1, 3, width_ratios=(1, 1, 1))
    _draw_spectra(weights, matrices, "weights", "Weights", "singular value / largest")
    if any(p.momenta for p in matrices):
        _draw_spectra(momenta, matrices, "momenta", "Momenta", "singular value / Frobenius norm")
        momenta.axhline(SHARE, color="0.4", linewidth=0.8, linestyle="--")
    else:
        momenta.set_title("Momenta")
        momenta.text(
            0.5, 0.5, "no optimizer state", transform=momenta.transAxes, ha="center", color="0.4"
        )
        momenta.set_axis_off()
    _draw_updates(updates, parameters)
    if title:
        figure.suptitle(title)
    # One legend below all panels.
    routes = list(dict.fromkeys(p.route for p in parameters))
    handles = [
        weights.plot([], [], color=_COLORS.get(route, "0.3"), marker="o", markersize=4)[0]
        for route in routes
    ]
    handles.append(weights.plot([], [], color="0.4", linewidth=0.8, linestyle="--")[0])
    labels = [
        *(f"{route} (dark: first layers)" for route in routes),
        f"numerical rank counts above {SHARE:g}",
    ]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
    )
    write(figure, picture)


def _draw_spectra(
    axes: Any, matrices: Sequence[ParameterUpdate], kind: str, title: str, label: str
) -> None:
    """Draw one line per matrix; matrices of earlier layers are darker."""
    for k, parameter in enumerate(matrices):
        shade = _DARKEST - (_DARKEST - _LIGHTEST) * k / max(1, len(matrices) - 1)
        for values in getattr(parameter, kind):
            norm = values[0] if kind == "weights" else np.sqrt((values**2).sum())
            if norm > 0:
                x = np.arange(1, len(values) + 1) / len(values)
                color = _COLORS.get(parameter.route, "0.3")
                axes.plot(x, values / norm, color=color, alpha=shade, linewidth=1.1)
    axes.set_title(title)
    axes.set_xlabel("index / number of singular values")
    axes.set_ylabel(label)
    axes.set_yscale("log")
    low = axes.get_ylim()[0]
    axes.set_ylim(bottom=max(low, 1e-8), top=1.5)
    axes.set_xlim(0, 1)


def _draw_updates(axes: Any, parameters: Sequence[ParameterUpdate]) -> None:
    """Draw relative updates with their median, one row per route."""
    routes = list(dict.fromkeys(p.route for p in parameters))
    for row, route in enumerate(routes):
        updates = np.array([p.relative for p in parameters if p.route == route and p.relative])
        if not len(updates):
            continue
        color = _COLORS.get(route, "0.3")
        y = np.full(1, float(row))
        if len(updates) > 1:  # spread over the row, so that points do not hide each other
            y = row + np.linspace(-0.22, 0.22, len(updates))
        axes.plot(updates, y, "o", color=color, markersize=4, alpha=0.6, markeredgewidth=0)
        median = float(np.median(updates))
        axes.plot([median] * 2, [row - 0.32, row + 0.32], color=color, linewidth=1.6)
        mantissa, exponent = f"{median:.1e}".split("e")
        number = rf"${mantissa}\cdot 10^{{{int(exponent)}}}$"
        axes.annotate(number, (median, row + 0.34), ha="center", va="bottom")
    axes.set_title("Next update")
    axes.set_xlabel("RMS of update / RMS of weights")
    axes.set_yticks(range(len(routes)), routes)
    axes.set_ylim(-0.6, len(routes) - 0.4)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.5, high * 1.5)
    axes.xaxis.set_minor_formatter(NullFormatter())
