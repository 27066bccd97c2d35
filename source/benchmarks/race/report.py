"""The race's published table, picture and CSV files, from any number of files of results.

    python source/benchmarks/race/report.py --results doc/benchmarks/raw/race --page doc/benchmarks/race.md \
        --picture doc/images/race.png --csv doc/benchmarks/raw/race

The table replaces the text between two marks of the page. Each option may be left out.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

# These scripts are not a package; they and a test import one another by this path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from contestants import ADAM_RATE, UNTOUCHED, untouched
from fields import BASELINE, TITLES, Default, Field, fields, mean, time_of
from pictures import Rival, draw
from results import Errors, Result, StepTime, last, pool, read

MARKS = ("<!-- table of report.py begin -->", "<!-- table of report.py end -->")
RIVALS = (
    "adam",
    "soap",
    "schedule_free",
    "torch_muon",
    "deepmd_kit_muon",
)  # beside HybridMuon and AdamW
Row = dict[str, object]


def force(part: str) -> Callable[[Result], float]:
    """Return a measure: the force error pooled over the systems of a part [eV/Å]."""

    def measure(result: Result) -> float:
        errors: dict[str, Errors] = getattr(result, part)
        return pool(errors)["force"] if errors else math.nan

    return measure


def energy(result: Result) -> float:
    """Return the energy error on the test part [meV/atom]."""
    return 1e3 * pool(result.test)["energy"] if result.test else math.nan


def number(value: float, digits: int = 4) -> str:
    """Write a number; a dash where there is none."""
    return "–" if math.isnan(value) else "failed" if math.isinf(value) else f"{value:.{digits}f}"


def median(values: Iterable[float]) -> float:
    """Return the median of the values that are not NaN; NaN of nothing."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def defaults(found: Sequence[Field]) -> Iterator[Default]:
    """Yield HybridMuon with an input that sets nothing, beside the baseline at its best rate, of each set and model."""
    for field in found:
        name, own = (UNTOUCHED, ADAM_RATE) if UNTOUCHED in field.runs else untouched(field.steps)
        if BASELINE not in field.runs or own not in field.runs.get(name, {}):
            continue
        ours, (_, theirs) = field.runs[name][own], field.best(BASELINE)
        pairs = [
            tuple(mean(map(measure, runs)) for runs in (ours, theirs))
            for measure in (last, force("out"))
        ]
        yield Default(field.set, field.model, field.steps, *pairs)


def rivals(found: Sequence[Field], rows: Sequence[Default]) -> Iterator[Rival]:
    """Yield the other optimizers of the picture, each at its best rate, on the sets and models of the table."""
    drawn = {(row.set, row.model, row.steps) for row in rows}
    for field in found:
        for name in RIVALS:
            if name in field.runs and (field.set, field.model, field.steps) in drawn:
                yield Rival(
                    field.set, field.model, field.steps, TITLES[name], field.ratio(name, last)
                )


def default_table(rows: Sequence[Default]) -> str:
    """Return the Markdown table of the page, with the medians for each number of steps."""
    head = (
        *("steps", "model", "set", "HybridMuon, test [eV/Å]", "AdamW, test [eV/Å]", "ratio"),
        "ratio out of distribution",
    )
    lines = [head, ["---"] * len(head)]
    for steps in dict.fromkeys(row.steps for row in rows):
        some = [row for row in rows if row.steps == steps]
        for row in some:
            ours, theirs = map(number, row.test)
            ratios = (number(ratio, 2) for ratio in (row.test_ratio, row.out_ratio))
            lines.append([f"{steps:,}", row.model, row.set, ours, theirs, *ratios])
        test, out = (
            median(getattr(row, name) for row in some) for name in ("test_ratio", "out_ratio")
        )
        lines.append(
            [f"{steps:,}", "all", f"median of {len(some)}", "", "", number(test, 2), number(out, 2)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def case_of(field: Field) -> Row:
    """Return the first columns of every file."""
    return {"set": field.set, "model": field.model, "steps": field.steps}


def contestant_rows(found: Sequence[Field], times: Sequence[StepTime]) -> Iterator[Row]:
    """Yield every contestant of every set, model and budget at its best rate, the most accurate first."""
    for field in found:
        for name in sorted(field.runs, key=lambda name: field.error(name, field.best(name)[0])):
            rate, runs = field.best(name)
            errors = [last(result) for result in runs]
            within, tried = field.robust(name)
            yield {
                **case_of(field),
                "optimizer": TITLES[name],
                "best_rate": rate,
                "at_edge": tried > 1 and rate in (min(field.runs[name]), max(field.runs[name])),
                "rates_within_2x": within,
                "rates": tried,
                "seeds": len(runs),
                "force_test_eV_per_A": mean(errors),
                "lowest_seed": min(errors),
                "highest_seed": max(errors),
                "to_adamw": field.ratio(name, last),
                "energy_test_meV_per_atom": mean(map(energy, runs)),
                "force_out_eV_per_A": mean(map(force("out"), runs)),
                "out_to_adamw": field.ratio(name, force("out")),
                "adamw_end_after_fraction": field.fraction(name),
                "seconds": time_of(times, field, name) * field.steps / 1e3,
            }


def run_rows(found: Sequence[Field]) -> Iterator[Row]:
    """Yield every run: its errors on test, training and out-of-distribution frames."""
    for field in found:
        for name, rates in field.runs.items():
            for result in (run for rate in sorted(rates) for run in rates[rate]):
                yield {
                    **case_of(field),
                    "optimizer": TITLES[name],
                    "rate": result.key.rate,
                    "seed": result.key.seed,
                    "force_test_eV_per_A": last(result),
                    **{f"force_{part}_eV_per_A": force(part)(result) for part in ("train", "out")},
                    "failed": result.failed,
                }


def system_rows(found: Sequence[Field]) -> Iterator[Row]:
    """Yield force errors of HybridMuon and of the baseline at their best rates, system by system [eV/Å]."""
    for field in found:
        if not {BASELINE, "hybrid_muon"} <= field.runs.keys():
            continue
        for part in ("test", "out"):
            ours, theirs = (
                system_errors(field.best(name)[1], part) for name in ("hybrid_muon", BASELINE)
            )
            for system, error in ours.items():
                row = {
                    "part": part,
                    "system": system,
                    "hybrid_muon": error,
                    "adamw": theirs[system],
                }
                yield {**case_of(field), **row, "ratio": error / theirs[system]}


def system_errors(runs: Iterable[Result], part: str) -> dict[str, float]:
    """Return the mean force error over seeds of each system of a part [eV/Å], without runs that failed."""
    parts = [getattr(result, part) for result in runs if not result.failed]
    return {
        name: mean(errors[name]["force"] for errors in parts)
        for name in (parts[0] if parts else ())
    }


def as_csv(rows: Iterable[Row]) -> str:
    """Return rows as CSV with a head; floats have five digits, and what is not known is empty."""

    def cell(value: object) -> object:
        return ("" if math.isnan(value) else f"{value:.5g}") if isinstance(value, float) else value

    listed, text = list(rows), io.StringIO()
    writer = csv.DictWriter(text, list(listed[0]) if listed else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in listed)
    return text.getvalue()


def tables(found: Sequence[Field], times: Sequence[StepTime]) -> dict[str, str]:
    """Return the content of the CSV files by name."""
    return {
        "contestants.csv": as_csv(contestant_rows(found, times)),
        "runs.csv": as_csv(run_rows(found)),
        "systems.csv": as_csv(system_rows(found)),
    }


def with_table(page: str, table: str) -> str:
    """Return a page with a new table between the marks."""
    begin, end = map(re.escape, MARKS)
    new, count = re.subn(
        f"{begin}.*{end}", lambda _: f"{MARKS[0]}\n\n{table}\n\n{MARKS[1]}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page must have the marks {MARKS[0]!r} and {MARKS[1]!r} once")
    return new


def main() -> None:
    """Write the table, the picture and the CSV files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of *.jsonl")
    parser.add_argument("--page", type=Path, help="gets the table; without it the table is printed")
    parser.add_argument("--picture", type=Path, help="file of the picture")
    parser.add_argument("--csv", type=Path, help="folder that gets the CSV files")
    args = parser.parse_args()
    results, times = read(args.results.glob("*.jsonl"))
    found = fields(results.values())
    rows = list(defaults(found))
    if args.page:
        args.page.write_text(with_table(args.page.read_text(), default_table(rows)))
    else:
        print(default_table(rows))
    if args.picture:
        draw(rows, list(rivals(found, rows)), args.picture)
    for name, text in tables(found, times).items() if args.csv else ():
        (args.csv / name).write_text(text)


if __name__ == "__main__":
    main()
