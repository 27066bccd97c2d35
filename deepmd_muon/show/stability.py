"""The picture of `dp check`: scans and dynamics, one row per model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepmd_muon.show.picture import write
from deepmd_muon.stability.check import Check, ModelCheck
from deepmd_muon.stability.coverage import Coverage

# Energies beyond these are cut off [eV].
_LOWEST = -4.0
_HIGHEST = 6.0


def draw_check(check: Check, path: Path) -> None:
    """Draw and write the picture; curves are dotted at distances that do not occur in the data."""
    figure = Figure(figsize=(14.0, 3.4 * len(check.models)), layout="constrained")
    rows = figure.subplots(len(check.models), 4, squeeze=False)
    for (dimers, displaced, heat, closeness), model in zip(rows, check.models, strict=True):
        dimers.set_ylabel(f"{model.model}: {model.verdict.name}\nenergy [eV]", fontsize="small")
        displaced.set_ylabel("energy [eV]")
        _draw_scans(dimers, check.coverage, model, "dimers", dimers=True)
        _draw_scans(displaced, check.coverage, model, "moved in place", dimers=False)
        _draw_dynamics(heat, closeness, model)
    write(figure, path)


def _draw_scans(
    axes: Any, coverage: Coverage, model: ModelCheck, title: str, *, dimers: bool
) -> None:
    for number, pair in enumerate(coverage.pairs):
        label: str | None = coverage.name(pair)
        for curve in model.curves:
            if set(curve.pair) != set(pair) or (curve.kind == "dimer") != dimers:
                continue
            color = f"C{number % 10}"
            inside = np.where(curve.outside, np.nan, curve.energy)
            axes.plot(curve.distance, curve.energy, color=color, linestyle=":", linewidth=0.9)
            axes.plot(curve.distance, inside, color=color, linewidth=1.2, label=label)
            label = None  # once in the legend
            for feature in curve.features:
                if feature.verdict:
                    nearest = np.abs(curve.distance - feature.distance).argmin()
                    energy = np.clip(curve.energy[nearest], _LOWEST, _HIGHEST)
                    axes.plot(feature.distance, energy, "v", color=color, markersize=5)
    axes.set_ylim(_LOWEST, _HIGHEST)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("distance [Å]; dotted: not in the data")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _draw_dynamics(heat: Any, closeness: Any, model: ModelCheck) -> None:
    run = model.dynamics
    heat.plot(run.times, np.array(run.heat), linewidth=0.8)
    heat.axhline(run.temperature, color="0.5", linestyle=":", linewidth=0.8)
    heat.set_title("dynamics", fontsize="medium")
    heat.set_ylabel("temperature [K]")
    closeness.plot(run.times, np.array(run.closeness), linewidth=0.8)
    closeness.axhline(1.0, color="0.5", linestyle=":", linewidth=0.8)
    closeness.set_title("dynamics", fontsize="medium")
    closeness.set_ylabel("shortest distance / that in the data (no unit)", fontsize="small")
    for blow_up in run.blow_ups:
        for axes in (heat, closeness):
            axes.axvline(blow_up.time, color="tab:red", linewidth=0.8)
    for axes in (heat, closeness):
        axes.set_xlabel("time [ps]")
