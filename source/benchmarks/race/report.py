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
from dataclasses import dataclass
from pathlib import Path

# These scripts are not a package; they and a test import one another by this path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from contestants import untouched
from results import Errors, Result, StepTime, last, pool, read
from sets import SETS

BASELINE = "adamw"
WITHIN = 2.0  # rates whose error is at most this multiple of the best one's
MARKS = ("<!-- figures of report.py begin -->", "<!-- figures of report.py end -->")
TITLES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "hybrid_muon": "HybridMuon",
    "hybrid_muon_no_magma": "HybridMuon, no Magma",
    "hybrid_muon_decay_01": "HybridMuon, decay 0.1",
    "hybrid_muon_decay_03": "HybridMuon, decay 0.3",
    "hybrid_muon_decay_1": "HybridMuon, decay 1",
    "hybrid_muon_decay_3": "HybridMuon, decay 3",
    "hybrid_muon_adam_3": "HybridMuon, Adam route at 0.003",
    "hybrid_muon_adam_10": "HybridMuon, Adam route at 0.01",
    "hybrid_muon_adam_30": "HybridMuon, Adam route at 0.03",
    "hybrid_muon_present": "HybridMuon, absent elements stay",
    "deepmd_kit_muon": "deepmd-kit's HybridMuon",
    "torch_muon": "torch's Muon and AdamW",
    "schedule_free": "schedule-free AdamW",
    "soap": "SOAP",
}


@dataclass(frozen=True)
class Field:
    """All runs on a set with one model and budget.

    Attributes
    ----------
    set, model, steps
        Which.
    runs
        Results by contestant and rate; one a seed.
    """

    set: str
    model: str
    steps: int
    runs: Mapping[str, Mapping[float, Sequence[Result]]]

    def error(self, contestant: str, rate: float) -> float:
        """Return the mean force error on the test part over seeds [eV/Å]; infinite where a run failed."""
        return mean(last(result) for result in self.runs[contestant][rate])

    def best(self, contestant: str) -> tuple[float, Sequence[Result]]:
        """Return the best rate of a contestant, and its runs."""
        rates = self.runs[contestant]
        rate = min(rates, key=lambda rate: self.error(contestant, rate))
        return rate, rates[rate]

    def ratio(self, contestant: str, measure: Callable[[Result], float]) -> float:
        """Return a measure at the best rate divided by the baseline's; NaN without a baseline."""
        if BASELINE not in self.runs:
            return math.nan
        ours, theirs = (mean(measure(r) for r in self.best(name)[1]) for name in (contestant, BASELINE))
        return ours / theirs if theirs else math.nan

    def robust(self, contestant: str) -> tuple[int, int]:
        """Return how many rates end within a factor `WITHIN` of the best, and how many were tried."""
        rates = self.runs[contestant]
        found = [self.error(contestant, rate) for rate in rates]
        best = min(found)
        return sum(error <= WITHIN * best and math.isfinite(error) for error in found), len(rates)

    def fraction(self, contestant: str) -> float:
        """Return the fraction of the steps after which the baseline's last error is reached; NaN where it is not."""
        if BASELINE not in self.runs:
            return math.nan
        goal = self.error(BASELINE, self.best(BASELINE)[0])
        runs = self.best(contestant)[1]
        for points in zip(*(result.curve for result in runs), strict=False):
            if mean(force for _, force, _ in points) <= goal:
                return points[0][0] / self.steps
        return math.nan


def fields(results: Iterable[Result]) -> list[Field]:
    """Group results by set, model and budget, in the order of the sets and of the budgets."""
    found: dict[tuple[str, str, int], dict[str, dict[float, list[Result]]]] = {}
    for result in sorted(results, key=lambda result: result.key):
        key = result.key
        runs = found.setdefault((key.set, key.model, key.steps), {})
        runs.setdefault(key.contestant, {}).setdefault(key.rate, []).append(result)
    order = list(SETS)
    return [Field(*case, found[case]) for case in sorted(found, key=lambda c: (c[2], c[1], order.index(c[0])))]


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


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


def time_of(times: Iterable[StepTime], field: Field, contestant: str) -> float:
    """Return the milliseconds a step of a contestant alone; NaN where they were not measured.

    A variant of HybridMuon with other numbers takes the time of HybridMuon, a larger set that of the small one.
    """
    same_steps = contestant.startswith(("hybrid_muon_decay", "hybrid_muon_adam"))
    case = (field.set.removesuffix("_large"), field.model, "hybrid_muon" if same_steps else contestant)
    return next((e.milliseconds for e in times if (e.set, e.model, e.contestant) == case), math.nan)


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
                    number(statistics.median(test), 2) if test else "–",
                    f"{number(min(test), 2)}–{number(max(test), 2)}" if test else "–",
                    number(statistics.median(out), 2) if out else "–",
                    number(max(out), 2) if out else "–",
                    number(mean(field.robust(name)[0] for field in with_it), 1),
                ]
            )
    head = (
        *("model", "steps", "optimizer", "sets", "force ratio to AdamW, median", "range"),
        *("out of distribution, median", "worst", "rates within 2×, mean"),
    )
    return table(head, rows)


def untouched_table(found: Sequence[Field]) -> str:
    """Return HybridMuon's errors at the rate of an input that sets nothing, beside the baseline's best."""
    rows = []
    for field in found:
        name, own = untouched(field.steps)
        if BASELINE not in field.runs or own not in field.runs.get(name, {}):
            continue
        ours, (rate, theirs) = field.runs[name][own], field.best(BASELINE)
        cells = [field.set, field.model, f"{field.steps:,}"]
        for measure in (last, force("out")):
            pair = [mean(map(measure, runs)) for runs in (ours, theirs)]
            cells += [number(pair[0]), number(pair[1]), number(pair[0] / pair[1], 2)]
        rows.append([*cells[:5], f"{rate:g}", *cells[5:]])
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
    return [number(statistics.median(ratios.values()), 2), *ends]


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
        parts = ["### All sets", summary_table(found), "### HybridMuon with nothing set", untouched_table(found)]
        parts += ["### On training frames and on test frames, Adam route at 0.001", training_table(found)]
        title = "### HybridMuon's error, Adam route at 0.001, divided by AdamW's, system by system"
        parts += [title, systems_table(found)]
    for field in found:
        parts += [f"### {field.set}, {field.model}, {field.steps:,} steps", field_table(field, times)]
        if any(len(rates) > 1 for rates in field.runs.values()):
            parts += ["All rates:", grid_table(field)]
    return "\n\n".join([*parts, "### Runs that failed", failures(found)])


def draw(field: Field, times: Sequence[StepTime], path: Path) -> None:
    """Draw the test error of each contestant at its best rate over steps, and over seconds where times are known."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    milliseconds = {name: time_of(times, field, name) for name in field.runs}
    timed = not all(map(math.isnan, milliseconds.values()))
    width = 12.0 if timed else 8.0
    figure, panels = plt.subplots(1, 1 + timed, figsize=(width, 4.5), sharey=True, squeeze=False, layout="constrained")
    for panel, label in zip(panels[0], ("steps", "seconds"), strict=False):
        for number_of_line, name in enumerate(TITLES):
            unit = milliseconds.get(name, math.nan) / 1e3 if label == "seconds" else 1.0
            if name not in field.runs or math.isnan(unit):
                continue
            points = list(zip(*(result.curve for result in field.best(name)[1]), strict=False))
            x = [unit * several[0][0] for several in points]
            y = [mean(force_error for _, force_error, _ in several) for several in points]
            style = {"color": f"C{number_of_line % 10}", "linestyle": ("-", "--")[number_of_line // 10]}
            panel.plot(x, y, marker="o", markersize=3, label=TITLES[name], **style)
        panel.set(xscale="log", yscale="log", xlabel=label)
    panels[0, 0].set_ylabel("force error, test [eV/Å]")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{field.set}, {field.model}, {field.steps:,} steps")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def picture_name(field: Field) -> str:
    """Return the name of a set's picture."""
    model = "" if field.model == "se_e2_a" else f"_{field.model}"
    return f"race_{field.set}{model}_{field.steps}.png"


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
