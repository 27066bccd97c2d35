"""A check as text and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from deepmd_muon.stability.angles import Angles
from deepmd_muon.stability.check import Check, ModelCheck
from deepmd_muon.stability.coverage import Coverage
from deepmd_muon.stability.curves import Verdict

# Lines of the table of scans.
_MAX_ROWS = 12


def text_of(check: Check) -> Iterator[str]:
    """Yield the lines of the report."""
    coverage = check.coverage
    density = ""
    if coverage.density:
        low, high = coverage.density
        density = f", density {low:.2f} to {high:.2f} g/cm³"
        if high < 1.02 * low:
            density += " (one density: pressure and expansion are not covered)"
    yield f"data: {coverage.used} of {coverage.nframes} frames looked at{density}"
    kelvin = (
        f"the data's forces tell {check.data_temperature:.0f} K; " if check.data_temperature else ""
    )
    for model in check.models:
        verdict = model.verdict.name.upper()
        yield ""
        yield f"{model.model}: {verdict} ({kelvin}dynamics at {model.dynamics.temperature:.0f} K)"
        for item in model.items:
            yield f"  {item.name:10s} {item.verdict.name:9s} {item.reason}"
            if item.verdict > Verdict.holds and item.advice:
                yield f"  {'':20s} next: {item.advice}"
        yield from _pair_table(coverage, model)
        yield from _angle_table(check.angles, model)
        yield from _feature_table(coverage, model)
        yield from _events(model)


def _pair_table(coverage: Coverage, model: ModelCheck) -> Iterator[str]:
    yield (
        f"  {'pair':8s} {'data [Å]':>13s} {'scans from':>11s} {'dynamics from':>14s}  "
        "distances without data"
    )
    for pair in coverage.pairs:
        scanned = min(
            (float(c.distance.min()) for c in model.curves if set(c.pair) == set(pair)),
            default=math.nan,
        )
        reached = model.dynamics.reached[pair]
        gaps = ", ".join(f"{low:.2f}-{high:.2f}" for low, high in coverage.gaps(pair)) or "none"
        data = f"{coverage.shortest[pair]:.2f} - {coverage.largest[pair]:.2f}"
        yield f"  {coverage.name(pair):8s} {data:>13s} {scanned:11.2f} {reached:14.2f}  {gaps}"


def _angle_table(angles: Angles, model: ModelCheck) -> Iterator[str]:
    reached = model.dynamics.angles
    if reached is None or not angles.triples:
        return
    yield f"  {'angle':10s} {'data [°]':>13s} {'dynamics [°]':>14s}"
    for triple in angles.triples:
        data = f"{angles.smallest[triple]:.0f} - {angles.largest[triple]:.0f}"
        dynamics = "none"
        if math.isfinite(reached.smallest[triple]):
            dynamics = f"{reached.smallest[triple]:.0f} - {reached.largest[triple]:.0f}"
        yield f"  {angles.name(triple):10s} {data:>13s} {dynamics:>14s}"


def _feature_table(coverage: Coverage, model: ModelCheck) -> Iterator[str]:
    rows = [(feature, curve) for curve in model.curves for feature in curve.features]
    if not rows:
        return
    rows.sort(key=lambda row: (-row[0].verdict, -row[0].depth))
    yield (
        f"  {'scan':8s} {'what moved':18s} {'found':14s} {'at [Å]':>6s} {'depth [eV]':>10s} "
        f"{'behind [eV]':>11s}"
    )
    for f, curve in rows[:_MAX_ROWS]:
        path = f"{coverage.name(curve.pair):8s} {curve.kind:18s} {f.kind:14s}"
        numbers = f"{f.distance:6.2f} {f.depth:10.2f} {f.barrier:11.2f}"
        yield f"  {path} {numbers}  {f.verdict.name}  {curve.place}".rstrip()
    if len(rows) > _MAX_ROWS:
        yield f"  and {len(rows) - _MAX_ROWS} more (--json lists all)"


def _events(model: ModelCheck) -> Iterator[str]:
    if model.dynamics.departures:
        event = min(model.dynamics.departures, key=lambda departure: departure.time)
        in_data = "no data"
        if math.isfinite(event.shortest):
            in_data = "no frame has this distance"
            if event.distance < event.shortest:
                in_data = f"{event.shortest:.2f} Å is the shortest in the data"
        yield (
            f"  first departure from the data: copy {event.copy} after {event.time:.3f} ps, "
            f"{event.pair} (atoms {event.atoms[0]} and {event.atoms[1]}) at {event.distance:.2f} "
            f"Å; {in_data}"
        )
    for blow_up in model.dynamics.blow_ups:
        place = f"{blow_up.element} (atom {blow_up.atom})"
        yield (
            f"  copy {blow_up.copy} blew up after {blow_up.time:.3f} ps at {place}: "
            f"{blow_up.reason}"
        )


def values_of(check: Check) -> dict[str, Any]:
    """Return the check as dictionaries, lists, numbers and text.

    What is not finite becomes None.
    """
    coverage = check.coverage
    plain: dict[str, Any] = _plain(
        {
            "verdict": check.verdict.name,
            "data_temperature": check.data_temperature,
            "frames": coverage.nframes,
            "frames_used": coverage.used,
            "density": coverage.density,
            "coverage": {
                coverage.name(pair): {
                    "shortest": coverage.shortest[pair],
                    "largest": coverage.largest[pair],
                    "gaps": coverage.gaps(pair),
                }
                for pair in coverage.pairs
            },
            "angles": _extremes(check.angles),
            "models": [_model(coverage, model) for model in check.models],
        }
    )
    return plain


def _model(coverage: Coverage, model: ModelCheck) -> dict[str, Any]:
    run = model.dynamics
    return {
        "model": model.model,
        "verdict": model.verdict.name,
        "items": [asdict(item) | {"verdict": item.verdict.name} for item in model.items],
        "scans": [
            {
                "pair": coverage.name(curve.pair),
                "kind": curve.kind,
                "place": curve.place,
                "distance": curve.distance,
                "energy": curve.energy,
                "outside": curve.outside,
                "features": [asdict(f) | {"verdict": f.verdict.name} for f in curve.features],
            }
            for curve in model.curves
        ],
        "dynamics": {
            "temperature": run.temperature,
            "time_step": run.time_step,
            "steps": run.steps,
            "copies": run.copies,
            "followed": run.followed,
            "drift": run.drift,
            "blow_ups_per_ps": len(run.blow_ups) / run.followed if run.followed else None,
            "blow_ups": [asdict(event) for event in run.blow_ups],
            "departures": [asdict(event) for event in run.departures],
            "angles": None if run.angles is None else _extremes(run.angles),
            "shortest": {coverage.name(pair): run.reached[pair] for pair in coverage.pairs},
        },
    }


def _extremes(angles: Angles) -> dict[str, Any]:
    return {
        angles.name(triple): [angles.smallest[triple], angles.largest[triple]]
        for triple in angles.triples
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
