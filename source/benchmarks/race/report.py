"""Tables and pictures of the race, from any number of files of results.

    python source/benchmarks/race/report.py --results doc/benchmarks/raw/race --page doc/benchmarks/race.md \
        --pictures doc/images

The tables replace what stands between two marks of the page; without --page they are printed.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

# These scripts are not a package; they and a test import one another by this path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from contestants import ADAM_RATE, UNTOUCHED, untouched
from fields import BASELINE, TITLES, Field, fields, mean, time_of
from pictures import draw, picture_name
from results import Errors, Result, StepTime, last, pool, read

# HybridMuon at all rates of its Adam route that were raced.
ADAM_ROUTES = {"hybrid_muon", "hybrid_muon_adam_3", "hybrid_muon_adam_10", "hybrid_muon_adam_30"}
MARKS = ("<!-- figures of report.py begin -->", "<!-- figures of report.py end -->")


def force(part: str) -> Callable[[Result], float]:
    """Return a measure: the force error pooled over the systems of a part [eV/Å]."""

    def measure(result: Result) -> float:
        errors: dict[str, Errors] = getattr(result, part)
        return pool(errors)["force"] if errors else math.nan

    return measure


def energy(result: Result) -> float:
    """Return the energy error on the test part [meV/atom]."""
    return 1e3 * pool(result.test)["energy"] if result.test else math.nan


def median(values: Iterable[float]) -> float:
    """Return the median of what is not NaN; NaN of nothing."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def number(value: float, digits: int = 4) -> str:
    """Write a number; a dash for what there is not."""
    return "–" if math.isnan(value) else "failed" if math.isinf(value) else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(head), "|".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if set(line) <= {"-", "|"} else f"| {line} |" for line in lines)


def field_table(field: Field, times: Sequence[StepTime]) -> str:
    """Return the table of a set: contestants at their best rates, the most accurate first."""
    rows = []
    for name in sorted(field.runs, key=lambda name: field.error(name, field.best(name)[0])):
        rate, runs = field.best(name)
        error = field.error(name, rate)
        within, tried = field.robust(name)
        rates = field.runs[name]
        edge = " (edge)" if len(rates) > 1 and rate in (min(rates), max(rates)) else ""
        milliseconds = time_of(times, field, name)
        rows.append(
            [
                TITLES[name],
                f"{rate:g}{edge}",
                number(error) + spread([last(result) for result in runs]),
                number(field.ratio(name, last), 2),
                number(mean(energy(result) for result in runs), 2),
                number(mean(map(force("out"), runs))) if field_has_out(field) else "–",
                number(field.ratio(name, force("out")), 2),
                f"{within} of {tried}",
                number(field.fraction(name), 2),
                number(milliseconds * field.steps / 1e3, 1),
            ]
        )
    head = (
        *("optimizer", "best rate", "force, test [eV/Å]", "ratio to AdamW", "energy, test [meV/atom]"),
        *("force, out [eV/Å]", "ratio to AdamW", "rates within 2×", "AdamW's end after", "seconds"),
    )
    return table(head, rows)


def spread(values: Sequence[float]) -> str:
    """Say how far the seeds lie apart."""
    return f" ({min(values):.4f}–{max(values):.4f})" if len(values) > 1 else ""


def field_has_out(field: Field) -> bool:
    """Return whether any run has errors out of distribution."""
    return any(result.out for rates in field.runs.values() for runs in rates.values() for result in runs)


def grid_table(field: Field) -> str:
    """Return the test errors at all rates, in the order of each contestant's grid."""
    rows, width = [], max(5, *map(len, field.runs.values()))
    for name, rates in field.runs.items():
        cells = [f"{rate:g}: {number(field.error(name, rate))}" for rate in sorted(rates)]
        rows.append([TITLES[name], *cells, *["–"] * (width - len(cells))])
    return table(("optimizer", *["rate: force error [eV/Å]"] * width), rows)


def summary_table(found: Sequence[Field]) -> str:
    """Return the medians over sets, for each model and budget."""
    rows = []
    for model, steps in dict.fromkeys((field.model, field.steps) for field in found):
        some = [field for field in found if (field.model, field.steps) == (model, steps) and BASELINE in field.runs]
        for name in TITLES:
            with_it = [field for field in some if name in field.runs]
            if not with_it:
                continue
            test, out = (
                [r for f in with_it if not math.isnan(r := f.ratio(name, measure))] for measure in (last, force("out"))
            )
            rows.append(
                [
                    model,
                    f"{steps:,}",
                    TITLES[name],
                    str(len(with_it)),
                    number(median(test), 2),
                    f"{number(min(test), 2)}–{number(max(test), 2)}" if test else "–",
                    number(median(out), 2),
                    number(max(out), 2) if out else "–",
                    number(mean(field.robust(name)[0] for field in with_it), 1),
                ]
            )
    head = (
        *("model", "steps", "optimizer", "sets", "force ratio to AdamW, median", "range"),
        *("out of distribution, median", "worst", "rates within 2×, mean"),
    )
    return table(head, rows)


def headline_table(found: Sequence[Field]) -> str:
    """Return HybridMuon's ratios at the best rates of its matrices and of its Adam route, and their medians."""
    raced = [field for field in found if BASELINE in field.runs and ADAM_ROUTES & field.runs.keys()]

    def ratio(field: Field) -> float:
        return min(field.ratio(name, last) for name in ADAM_ROUTES & field.runs.keys())

    def row(steps: int, model: str, some: Sequence[Field], each: str) -> list[str]:
        return [f"{steps:,}", model, each, number(median(map(ratio, some)), 2)]

    rows = []
    for steps in dict.fromkeys(field.steps for field in raced):
        budget = [field for field in raced if field.steps == steps]
        for model in dict.fromkeys(field.model for field in budget):
            some = [field for field in budget if field.model == model]
            rows.append(row(steps, model, some, ", ".join(f"{f.set} {number(ratio(f), 2)}" for f in some)))
        rows.append(row(steps, "all", budget, f"{len(budget)} sets and models"))
    return table(("steps", "model", "force ratio to AdamW", "median"), rows)


def untouched_table(found: Sequence[Field]) -> str:
    """Return HybridMuon's errors at the rate of an input that sets nothing, beside the baseline's best, and medians."""
    rows = []
    ratios: dict[int, dict[str, list[float]]] = {}
    for field in found:
        name, own = (UNTOUCHED, ADAM_RATE) if UNTOUCHED in field.runs else untouched(field.steps)
        if BASELINE not in field.runs or own not in field.runs.get(name, {}):
            continue
        ours, (rate, theirs) = field.runs[name][own], field.best(BASELINE)
        cells = [field.set, field.model, f"{field.steps:,}"]
        for part, measure in {"test": last, "out": force("out")}.items():
            pair = [mean(map(measure, runs)) for runs in (ours, theirs)]
            ratios.setdefault(field.steps, {}).setdefault(part, []).append(pair[0] / pair[1])
            cells += [number(pair[0]), number(pair[1]), number(pair[0] / pair[1], 2)]
        rows.append([*cells[:5], f"{rate:g}", *cells[5:]])
    for steps, parts in ratios.items():
        test, out = (number(median(some), 2) for some in parts.values())
        rows.append([f"median of {len(parts['test'])}", "", f"{steps:,}", "", "", "", test, "", "", out])
    head = (
        *("set", "model", "steps", "HybridMuon, test [eV/Å]", "AdamW, test [eV/Å]", "its best rate", "ratio"),
        *("HybridMuon, out [eV/Å]", "AdamW, out [eV/Å]", "ratio"),
    )
    return table(head, rows)


def training_table(found: Sequence[Field]) -> str:
    """Return errors on training and test frames at the best rates, of the runs that have both."""
    rows = []
    for field in found:
        if not {BASELINE, "hybrid_muon"} <= field.runs.keys():
            continue
        pair = [[run for run in field.best(name)[1] if run.train] for name in ("hybrid_muon", BASELINE)]
        if not all(pair):
            continue
        cells = [field.set, field.model, f"{field.steps:,}"]
        for part in ("train", "test"):
            ours, theirs = (mean(map(force(part), runs)) for runs in pair)
            cells += [number(ours), number(theirs), number(ours / theirs, 2)]
        rows.append(cells)
    columns = (f"{name}, {part} [eV/Å]" for part in ("training", "test") for name in ("HybridMuon", "AdamW"))
    first, second, third, fourth = columns
    return table(("set", "model", "steps", first, second, "ratio", third, fourth, "ratio"), rows)


def systems_table(found: Sequence[Field]) -> str:
    """Return the ratio of force errors at the best rates, HybridMuon's to the baseline's, system by system."""
    rows = []
    for field in found:
        if BASELINE not in field.runs or "hybrid_muon" not in field.runs:
            continue
        ours, theirs = field.best("hybrid_muon")[1], field.best(BASELINE)[1]
        cells = [field.set, field.model, f"{field.steps:,}"]
        for part in ("test", "out"):
            below = system_errors(theirs, part)
            cells += median_and_ends({name: error / below[name] for name, error in system_errors(ours, part).items()})
        rows.append(cells)
    head = ("set", "model", "steps", "test, median", "least", "most", "out, median", "least", "most")
    return table(head, rows)


def system_errors(runs: Iterable[Result], part: str) -> dict[str, float]:
    """Return the mean force error over seeds of each system of a part [eV/Å], without runs that failed."""
    parts = [getattr(result, part) for result in runs if not result.failed]
    return {name: mean(errors[name]["force"] for errors in parts) for name in (parts[0] if parts else ())}


def median_and_ends(ratios: Mapping[str, float]) -> list[str]:
    """Write the median of the values, the least and the most with their names."""
    if not ratios:
        return ["–"] * 3
    ordered = sorted(ratios, key=lambda name: ratios[name])
    ends = [f"{name} {number(ratios[name], 2)}" for name in (ordered[0], ordered[-1])]
    return [number(median(ratios.values()), 2), *ends]


def failures(found: Sequence[Field]) -> str:
    """List runs that ended early."""
    lines = [
        f"- {field.set}, {field.steps:,} steps: {TITLES[name]} at {rate:g}, seed {result.key.seed}: {result.failed}"
        for field in found
        for name, rates in field.runs.items()
        for rate, runs in rates.items()
        for result in runs
        if result.failed
    ]
    return "\n".join(lines) if lines else "No run failed."


def report(results: Iterable[Result], times: Sequence[StepTime]) -> str:
    """Return all tables as Markdown."""
    found = fields(results)
    parts = []
    if any(BASELINE in field.runs for field in found):
        title = "### HybridMuon at the best rates of its matrices and of its Adam route"
        parts = [title, headline_table(found), "### All sets", summary_table(found)]
        parts += ["### HybridMuon with nothing set", untouched_table(found)]
        parts += ["### On training frames and on test frames, Adam route at 0.001", training_table(found)]
        title = "### HybridMuon's error, Adam route at 0.001, divided by AdamW's, system by system"
        parts += [title, systems_table(found)]
    for field in found:
        parts += [f"### {field.set}, {field.model}, {field.steps:,} steps", field_table(field, times)]
        if any(len(rates) > 1 for rates in field.runs.values()):
            parts += ["All rates:", grid_table(field)]
    return "\n\n".join([*parts, "### Runs that failed", failures(found)])


def with_tables(page: str, tables: str) -> str:
    """Return a page with new tables between the marks."""
    begin, end = map(re.escape, MARKS)
    new, count = re.subn(f"{begin}.*{end}", lambda _: f"{MARKS[0]}\n\n{tables}\n\n{MARKS[1]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page must have the marks {MARKS[0]!r} and {MARKS[1]!r} once")
    return new


def main() -> None:
    """Write the tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of *.jsonl")
    parser.add_argument("--page", type=Path, help="gets the tables")
    parser.add_argument("--pictures", type=Path, help="folder that gets race_SET_STEPS.png")
    args = parser.parse_args()
    results, times = read(args.results.glob("*.jsonl"))
    tables = report(results.values(), times)
    if args.page:
        args.page.write_text(with_tables(args.page.read_text(), tables))
    else:
        print(tables)
    if args.pictures:
        for field in (field for field in fields(results.values()) if len(field.runs) > 1):
            draw(field, times, args.pictures / picture_name(field))


if __name__ == "__main__":
    main()
