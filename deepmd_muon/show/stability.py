"""The picture of `dp check`: scans and dynamics, one row per model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from deepmd_muon.show.palette import GRAY, RED, SERIES
from deepmd_muon.show.picture import STYLE, write
from deepmd_muon.stability.check import Check, ModelCheck
from deepmd_muon.stability.coverage import Coverage
from deepmd_muon.stability.trajectories import Trajectories

# Energies beyond these are cut off [eV].
_LOWEST = -4.0
_HIGHEST = 6.0
# Pairs whose colours come again are dashed.
_DASHES = ("-", "--", "-.")
_MAX_ENTRIES = 8  # pairs that the legend of a panel lists


@matplotlib.rc_context(STYLE)
def draw_check(check: Check, path: Path) -> None:
    """Draw and write the picture; curves are dotted at distances that do not occur in the data."""
    height = 2.5 * len(check.models)
    figure = Figure(figsize=(8.8, height), layout="constrained")
    rows = figure.subfigures(len(check.models), 1, squeeze=False)[:, 0]
    for row, model in zip(rows, check.models, strict=True):
        row.suptitle(f"{model.model}: {model.verdict.name}")
        dimers, displaced, heat, closeness = row.subplots(1, 4)
        draw_scans(dimers, check.coverage, model, dimers=True)
        draw_scans(displaced, check.coverage, model, dimers=False)
        draw_temperature(heat, model.dynamics)
        draw_closeness(closeness, model.dynamics)
        handles, labels = displaced.get_legend_handles_labels()
        row.legend(
            handles[:_MAX_ENTRIES],
            labels[:_MAX_ENTRIES],
            loc="outside lower center",
            ncols=_MAX_ENTRIES,
        )
    write(figure, path)


def draw_scans(axes: Any, coverage: Coverage, model: ModelCheck, *, dimers: bool) -> None:
    """Draw energies of dimers, or of atoms moved in place, against the distance of each pair."""
    for number, pair in enumerate(coverage.pairs):
        label: str | None = coverage.name(pair)
        color = SERIES[number % len(SERIES)]
        dashes = _DASHES[number // len(SERIES) % len(_DASHES)]
        for curve in model.curves:
            if set(curve.pair) != set(pair) or (curve.kind == "dimer") != dimers:
                continue
            inside = np.where(curve.outside, np.nan, curve.energy)
            axes.plot(curve.distance, curve.energy, color=color, linestyle=":", linewidth=0.9)
            axes.plot(curve.distance, inside, color=color, linestyle=dashes, label=label)
            label = None  # once in the legend
            for feature in curve.features:
                if feature.verdict:
                    nearest = np.abs(curve.distance - feature.distance).argmin()
                    energy = np.clip(curve.energy[nearest], _LOWEST, _HIGHEST)
                    axes.plot(feature.distance, energy, "v", color=color, markersize=4)
    axes.set_ylim(_LOWEST, _HIGHEST)
    axes.set_title("Dimers" if dimers else "Atoms moved in place")
    axes.set_xlabel("distance [Å] (dotted: no data)")
    axes.set_ylabel("energy [eV]")


def draw_temperature(axes: Any, run: Trajectories) -> None:
    """Draw the temperature of every copy of the dynamics."""
    axes.plot(run.times, np.array(run.heat), color=SERIES[2], linewidth=0.6)
    axes.axhline(run.temperature, color=GRAY, linestyle=":", linewidth=0.8)
    axes.set_title(
        "Dynamics of one copy" if run.copies == 1 else f"Dynamics of {run.copies} copies"
    )
    axes.set_ylabel("temperature [K]")
    _mark_blow_ups(axes, run)


def draw_closeness(axes: Any, run: Trajectories) -> None:
    """Draw the shortest distance of every copy relative to the shortest one in the data."""
    axes.plot(run.times, np.array(run.closeness), color=SERIES[2], linewidth=0.6)
    axes.axhline(1.0, color=GRAY, linestyle=":", linewidth=0.8)
    axes.set_title("Closest pair")
    axes.set_ylabel("distance / shortest of data")
    _mark_blow_ups(axes, run)


def _mark_blow_ups(axes: Any, run: Trajectories) -> None:
    for blow_up in run.blow_ups:
        axes.axvline(blow_up.time, color=RED, linewidth=0.8)
    axes.set_xlabel("time [ps]" + ("; lines: blow-ups" if run.blow_ups else ""))
