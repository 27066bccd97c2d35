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
_MOST = 12


def text_of(check: Check) -> Iterator[str]:
    """Yield the lines of the report."""
    data, coverage = check.data_temperature, check.coverage
    of_data = f"the data's forces tell {data:.0f} K; " if data else ""
    density = ""
    if coverage.density:
        low, high = coverage.density
        density = f", density {low:.2f} to {high:.2f} g/cm³"
        if high < 1.02 * low:
            density += " (one density: pressure and expansion are not covered)"
    yield f"data: {coverage.used} of {coverage.nframes} frames looked at{density}"
    for model in check.models:
        yield ""
        yield f"{model.model}: {model.verdict.name.upper()} ({of_data}dynamics at {model.dynamics.temperature:.0f} K)"
        for item in model.items:
            yield f"  {item.name:10s} {item.verdict.name:9s} {item.reason}"
            if item.verdict > Verdict.holds and item.advice:
                yield f"  {'':20s} next: {item.advice}"
        yield from _pairs(coverage, model)
        yield from _angles(check.angles, model)
        yield from _features(coverage, model)
        yield from _events(model)


def _pairs(coverage: Coverage, model: ModelCheck) -> Iterator[str]:
    yield f"  {'pair':8s} {'data [Å]':>13s} {'scans from':>11s} {'dynamics from':>14s}  distances without data"
    for pair in coverage.pairs:
        scanned = min(
            (float(c.distance.min()) for c in model.curves if set(c.pair) == set(pair)),
            default=math.nan,
        )
        gaps = ", ".join(f"{low:.2f}-{high:.2f}" for low, high in coverage.gaps(pair)) or "none"
        data = f"{coverage.shortest[pair]:.2f} - {coverage.largest[pair]:.2f}"
        yield f"  {coverage.name(pair):8s} {data:>13s} {scanned:11.2f} {model.dynamics.reached[pair]:14.2f}  {gaps}"


def _angles(angles: Angles, model: ModelCheck) -> Iterator[str]:
    reached = model.dynamics.angles
    if reached is None or not angles.triples:
        return
    yield f"  {'angle':10s} {'data [°]':>13s} {'dynamics [°]':>14s}"
    for triple in angles.triples:
        data = f"{angles.smallest[triple]:.0f} - {angles.largest[triple]:.0f}"
        seen = f"{reached.smallest[triple]:.0f} - {reached.largest[triple]:.0f}"
        seen = seen if math.isfinite(reached.smallest[triple]) else "none"
        yield f"  {angles.name(triple):10s} {data:>13s} {seen:>14s}"


def _features(coverage: Coverage, model: ModelCheck) -> Iterator[str]:
    rows = [(f, curve) for curve in model.curves for f in curve.features]
    if not rows:
        return
    rows.sort(key=lambda row: (-row[0].verdict, -row[0].depth))
    yield f"  {'scan':8s} {'what moved':18s} {'found':14s} {'at [Å]':>6s} {'depth [eV]':>10s} {'behind [eV]':>11s}"
    for f, curve in rows[:_MOST]:
        numbers = f"{f.distance:6.2f} {f.depth:10.2f} {f.barrier:11.2f}  {f.verdict.name}"
        yield f"  {coverage.name(curve.pair):8s} {curve.kind:18s} {f.kind:14s} {numbers}  {curve.place}".rstrip()
    if len(rows) > _MOST:
        yield f"  and {len(rows) - _MOST} more (--json lists all)"


def _events(model: ModelCheck) -> Iterator[str]:
    if model.dynamics.departures:
        first = min(model.dynamics.departures, key=lambda departure: departure.time)
        known = (
            f"{first.shortest:.2f} Å is the shortest in the data"
            if math.isfinite(first.shortest)
            else "no data"
        )
        yield (
            f"  first departure from the data: copy {first.copy} after {first.time:.3f} ps, {first.pair} (atoms "
            f"{first.atoms[0]} and {first.atoms[1]}) at {first.distance:.2f} Å; {known}"
        )
    for blow_up in model.dynamics.blow_ups:
        where = f"{blow_up.element} (atom {blow_up.atom})"
        yield f"  copy {blow_up.copy} blew up after {blow_up.time:.3f} ps at {where}: {blow_up.reason}"


def values_of(check: Check) -> dict[str, Any]:
    """Return the check as dictionaries, lists, numbers and text; what is not finite becomes None."""
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
