"""Results of the race: one JSON line a finished run, in any number of files that are read together."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Errors = dict[str, float]
"""Root-mean-square errors: `force` [eV/Å], `energy` and `virial` [eV/atom]; NaN where nothing is compared."""


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """The identity of a run: equal keys are the same run.

    Attributes
    ----------
    set, model, contestant
        Names.
    rate
        A point of the contestant's grid.
    seed
        Of weights and data order.
    steps
        The budget.
    """

    set: str
    model: str
    contestant: str
    rate: float
    seed: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes
    ----------
    key
        Which one.
    curve
        Steps done, force error [eV/Å] and energy error [eV/atom] on the test part.
    test, out
        Last errors of each system: force [eV/Å], energy and virial [eV/atom].
    failed
        Why it ended early; empty where it did not.
    machine, torch, date
        Where and when.
    train
        Like `test`, on some of the training frames; empty where it was not measured.
    """

    key: Key
    curve: list[tuple[int, float, float]]
    test: dict[str, Errors]
    out: dict[str, Errors]
    failed: str
    machine: str
    torch: str
    date: str
    train: dict[str, Errors] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Milliseconds a training step, alone on the machine."""

    set: str
    model: str
    contestant: str
    milliseconds: float
    machine: str
    torch: str
    date: str


def append(path: Path, entry: Result | StepTime) -> None:
    """Add a line to a file; NaN becomes null."""
    kind = "run" if isinstance(entry, Result) else "step_time"
    content = {"kind": kind, **_without_nan(dataclasses.asdict(entry))}
    path.parent.mkdir(parents=True, exist_ok=True)
    broken = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * broken + json.dumps(content, allow_nan=False) + "\n")


def read(paths: Iterable[Path]) -> tuple[dict[Key, Result], list[StepTime]]:
    """Merge files of results; of two runs of a key the later counts; lines cut short by a kill are left out."""
    results: dict[Key, Result] = {}
    times: list[StepTime] = []
    for path in sorted(paths):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                content = json.loads(line)
            except json.JSONDecodeError:
                log.warning("%s, line %d is cut short: %.40r", path, number, line)
                continue
            if content.pop("kind") == "step_time":
                times.append(StepTime(**content))
                continue
            content["key"] = key = Key(**content["key"])
            content["curve"] = [
                (step, _number(force), _number(energy)) for step, force, energy in content["curve"]
            ]
            for part in ("test", "out", "train"):
                content[part] = {
                    name: {short: _number(value) for short, value in errors.items()}
                    for name, errors in content.get(part, {}).items()
                }
            results[key] = Result(**content)
    return results, times


def best_rates(results: Iterable[Result]) -> dict[tuple[str, str, str], float]:
    """Return the rate with the smallest mean force error on the test part, for each set, model and contestant.

    Only runs of the case's smallest budget count, over the seeds that they have; a run that failed counts as infinite.
    """
    found: dict[tuple[str, str, str], dict[int, dict[float, list[float]]]] = {}
    for result in results:
        key = result.key
        budgets = found.setdefault((key.set, key.model, key.contestant), {})
        budgets.setdefault(key.steps, {}).setdefault(key.rate, []).append(last(result))
    shortest = {case: budgets[min(budgets)] for case, budgets in found.items()}
    return {
        case: min(rates, key=lambda rate: sum(rates[rate]) / len(rates[rate]))
        for case, rates in shortest.items()
    }


def last(result: Result) -> float:
    """Return the last force error on the test part [eV/Å]; infinite for a run that failed."""
    if result.failed or not result.curve or math.isnan(result.curve[-1][1]):
        return math.inf
    return result.curve[-1][1]


def pool(errors: Mapping[str, Errors]) -> Errors:
    """Return the root of the mean square over systems, each of which counts once, where it has the label."""
    found = {}
    for name in ("force", "energy", "virial"):
        # Published files keep only the labels that a table needs.
        known = [system.get(name, math.nan) for system in errors.values()]
        squares = [error**2 for error in known if not math.isnan(error)]
        found[name] = math.sqrt(sum(squares) / len(squares)) if squares else math.nan
    return found


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _number(value: float | None) -> float:
    return math.nan if value is None else value
