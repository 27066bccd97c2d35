"""Make the tables of the stability experiment from the lines of `stability_runs.py`, as Markdown and as CSV.

python source/benchmarks/race/stability_table.py runs.jsonl --csv potentials.csv --settings settings.csv

Files that `--csv` and `--checks` wrote replace the lines of their runs:

python source/benchmarks/race/stability_table.py potentials.csv checks.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepmd_muon.dynamics.systems import BOLTZMANN
from deepmd_muon.stability.check import CPU_TIME
from deepmd_muon.stability.curves import BARRIER, Verdict

#: A pair this much closer than in any training frame is a departure, as in `dynamics.py`.
CLOSER = 0.9
#: Closer than this the labelling method's own dynamics never comes (`stability_reference.py`): the potential is wrong.
WRONG = 0.75
#: Length of the check's dynamics [ps]: those of older lines were shorter, and the hotter copies stand for the rest.
CHECKED = CPU_TIME


@dataclass(frozen=True)
class Potential:
    """One trained potential.

    Attributes
    ----------
    model, set, setting, seed, steps
        Which one.
    test, out
        Force errors on test frames and out of distribution [eV/Å].
    flatness
        Force error on test frames after a random change of the weights by 1 %, divided by that before it.
    runs, time
        Dynamics at the temperature that is wanted: their number, and the time until each ended [ps].
    blown, departed
        How many blew up, and how many came too close.
    departing
        Time until each run departed or ended [ps].
    least
        Smallest ratio of a distance to the shortest of its pair in the training frames.
    hot_runs, hot
        Number of the hotter copies, and when the first of them blew up or came closer than `WRONG` [ps]; infinite where
        none did.
    verdict, check_copies, check_time, check_blown, check_least
        Of `dp check`, at the last of its temperatures, and of its dynamics the copies, the length [ps], the blow-ups,
        and the smallest ratio of a distance to the shortest of its pair in the training frames; None where it was not
        checked.
    """

    model: str
    set: str
    setting: str
    seed: int
    steps: int
    test: float
    out: float
    flatness: float
    runs: int
    time: float
    blown: int
    departed: int
    departing: float
    least: float
    hot_runs: int
    hot: float
    verdict: str | None
    check_copies: int | None
    check_time: float | None
    check_blown: int | None
    check_least: float | None

    @property
    def outcome(self) -> str:
        """What became of its runs."""
        if self.blown:
            return "a run blew up"
        if self.least < WRONG:
            return f"none blew up, a pair came closer than {WRONG:g}"
        return "neither" if math.isinf(self.hot) else "neither, but one of both in a hotter run"

    @classmethod
    def of(cls, line: dict[str, Any]) -> Potential:
        """Read a line."""
        test, out = (
            pooled(one["force"] for one in line[part].values()) for part in ("test", "out")
        )
        run = line["dynamics"]
        count, end = run["copies"][0], run["picoseconds"]
        column = run["ratios"].index(CLOSER)
        blown = run["blown"][:count]
        checked = list(line["check"].values())[-1] if line.get("check") else None
        hot = hottest(run)
        passed = [times[column] for times in run["passed"][:count]]
        ended = [end if when is None else when for when in blown]
        left = [
            until if when is None else min(when, until)
            for when, until in zip(passed, ended, strict=True)
        ]
        return cls(
            model=line["model"],
            set=line["set"],
            setting=line["setting"],
            seed=line["seed"],
            steps=line["steps"],
            test=test,
            out=out,
            flatness=pooled(line["changed"]) / test if line.get("changed") else math.nan,
            runs=count,
            time=sum(ended),
            blown=sum(when is not None for when in blown),
            departed=sum(when is not None for when in passed),
            departing=sum(left),
            least=min(value for value in run["least"][-1][:count] if value is not None),
            hot_runs=run["copies"][1],
            hot=hot,
            verdict=checked and verdict_of(checked, hot).name,
            check_copies=checked and checked["copies"],
            check_time=checked and checked.get("time", CHECKED),
            check_blown=checked and len(checked["blown"]),
            check_least=checked and checked["ratio"],
        )


def hottest(run: dict[str, Any]) -> float:
    """Return when the first hotter copy blew up or came closer than `WRONG` [ps]; infinite where none did."""
    count, column = run["copies"][0], run["ratios"].index(WRONG)
    ended = [*run["blown"][count:], *(times[column] for times in run["passed"][count:])]
    return min((when for when in ended if when is not None), default=math.inf)


def verdict_of(check: dict[str, Any], hot: float) -> Verdict:
    """Return what `dp check` says today, by its present `BARRIER` and `CHECKED`."""
    kt = BOLTZMANN * check["temperature"]
    found = [Verdict[verdict] for item, verdict in check["items"].items() if item != "scans"]
    for kind, _, _, feature, verdict, _, barrier in check["features"]:
        if kind != "dimer":
            safe = feature != "not finite" and barrier >= BARRIER * kt
            found.append(min(Verdict[verdict], Verdict.doubtful) if safe else Verdict[verdict])
    if check.get("time", 0.0) < CHECKED and hot <= CHECKED:
        found.append(Verdict.fails)
    return max(found)


def pooled(values: Iterable[float]) -> float:
    """Return the root mean square."""
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and its standard error over seeds, NaN where there are too few."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values) if values else math.nan, error


def rate_of(events: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return events per ps and their standard error over potentials, whose runs are not independent of each other.

    The error is that of a ratio of sums; without an event it is the rate that one would give.
    """
    total, count = sum(times), len(times)
    rate = sum(events) / total
    if not sum(events):
        return 0.0, 1.0 / total
    if count == 1:
        return rate, math.nan
    squares = sum((found - rate * time) ** 2 for found, time in zip(events, times, strict=True))
    return rate, math.sqrt(squares * count / max(1, count - 1)) / total


def shown(value: tuple[float, float], digits: int = 4) -> str:
    """Write a value with its error."""
    if math.isnan(value[0]):
        return "–"
    return f"{value[0]:.{digits}f}" + ("" if math.isnan(value[1]) else f" ± {value[1]:.{digits}f}")


def grouped(
    potentials: Iterable[Potential], key: Callable[[Potential], Any]
) -> dict[Any, list[Potential]]:
    """Group potentials in the order they come."""
    found: dict[Any, list[Potential]] = defaultdict(list)
    for potential in potentials:
        found[key(potential)].append(potential)
    return found


@dataclass(frozen=True)
class SettingRow:
    """The potentials of a setting; errors are standard errors over seeds."""

    model: str
    steps: int
    set: str
    setting: str
    seeds: int
    test: float
    test_error: float
    out_of_distribution: float
    out_of_distribution_error: float
    runs_blown_up: int
    runs: int
    potentials_blown_up: int
    blow_ups_per_ps: float
    blow_ups_error: float
    departures_per_ps: float
    departures_error: float
    flatness: float
    flatness_error: float

    @classmethod
    def of(cls, some: Sequence[Potential]) -> SettingRow:
        """Summarise potentials that differ by their seeds alone."""
        first = some[0]
        return cls(
            first.model,
            first.steps,
            first.set,
            first.setting,
            len(some),
            *mean_of([p.test for p in some]),
            *mean_of([p.out for p in some]),
            sum(p.blown for p in some),
            sum(p.runs for p in some),
            sum(p.blown > 0 for p in some),
            *rate_of([p.blown for p in some], [p.time for p in some]),
            *rate_of([p.departed for p in some], [p.departing for p in some]),
            *mean_of([p.flatness for p in some if not math.isnan(p.flatness)]),
        )


def settings_rows(potentials: Sequence[Potential]) -> list[SettingRow]:
    """Return a row for each setting of each model, set and length."""
    groups = grouped(potentials, lambda p: (p.model, p.set, p.steps, p.setting))
    return [SettingRow.of(some) for some in groups.values()]


def settings_table(potentials: Sequence[Potential]) -> list[str]:
    """Return the rows of all settings of each set, as Markdown."""
    lines = [
        "| model | set | steps | setting | seeds | test [eV/Å] | out of distribution [eV/Å] | flatness "
        "| runs that blew up | potentials | blow-ups a ps | departures a ps |",
        "|" + "---|" * 12,
    ]
    for r in settings_rows(potentials):
        cells = [
            r.model,
            r.set,
            f"{r.steps:,}",
            r.setting,
            str(r.seeds),
            shown((r.test, r.test_error)),
        ]
        cells += [
            shown((r.out_of_distribution, r.out_of_distribution_error)),
            shown((r.flatness, r.flatness_error), 2),
        ]
        cells += [f"{r.runs_blown_up} of {r.runs}", str(r.potentials_blown_up)]
        cells += [
            shown((r.blow_ups_per_ps, r.blow_ups_error), 3),
            shown((r.departures_per_ps, r.departures_error), 3),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_csv(
    path: Path, rows: Sequence[Potential] | Sequence[SettingRow] | Sequence[HeatedCheck]
) -> None:
    """Write a line for each row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(rows[0])], lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {key: f"{v:.6g}" if isinstance(v, float) else v for key, v in vars(row).items()}
            )


def verdict_table(potentials: Sequence[Potential]) -> list[str]:
    """Return what `dp check` says of potentials by what became of their runs: of each set, each check, and of all."""
    lines = ["| potentials | dynamics | potentials | holds | doubtful | fails |", "|" + "---|" * 6]
    checked = [p for p in potentials if p.verdict is not None]
    of_sets = grouped(checked, lambda p: f"{p.model}, {p.set}, {p.steps:,} steps")
    of_checks = grouped(
        checked,
        lambda p: (
            f"check of {p.check_copies} copies, {p.check_time:g} ps; {p.hot_runs} hotter runs, {p.steps:,} steps"
        ),
    )
    for what, some in [*of_sets.items(), *of_checks.items(), ("all", checked)]:
        for outcome, chosen in sorted(grouped(some, lambda p: p.outcome).items()):
            counts = [sum(p.verdict == verdict.name for p in chosen) for verdict in Verdict]
            lines.append(
                f"| {what} | {outcome} | {len(chosen)} | " + " | ".join(map(str, counts)) + " |"
            )
    return lines


def limit_table(potentials: Sequence[Potential]) -> list[str]:
    """Return what other limits would do: the potentials with a blow-up that they find, and the others that pass."""
    checked = [p for p in potentials if p.verdict is not None]
    lines = [
        "| check fails a potential where | of those that blew up | passes of the others |",
        "|---|---|---|",
    ]
    limits: dict[str, Callable[[Potential], bool]] = {
        "dp check": lambda p: p.verdict == Verdict.fails.name
    }
    for least in (WRONG, 0.6, 0.4, 0.2):
        limits[f"a pair comes closer than {least:g}"] = lambda p, least=least: p.check_least < least
    for blown in (1, 2, 8):
        limits[f"at least {blown} of its copies blow up"] = lambda p, blown=blown: (
            p.check_blown >= blown
        )
    for what, fails in limits.items():
        bad, others = (
            [fails(p) for p in checked if (p.blown > 0) is wanted] for wanted in (True, False)
        )
        lines.append(
            f"| {what} | {sum(bad)} of {len(bad)} | {len(others) - sum(others)} of {len(others)} |"
        )
    return lines


@dataclass(frozen=True)
class HeatedCheck:
    """A check of a potential that was checked at several temperatures.

    Attributes
    ----------
    model, set, setting, seed, steps
        The potential.
    heat
        Temperature of the check, divided by the temperature of the dynamics.
    blew_up
        Whether one of the potential's dynamics blew up.
    fails
        Whether the check fails the potential.
    check_blew_up
        Whether a copy of the check blew up.
    """

    model: str
    set: str
    setting: str
    seed: int
    steps: int
    heat: float
    blew_up: bool
    fails: bool
    check_blew_up: bool


def heated_checks(lines: Iterable[dict[str, Any]]) -> list[HeatedCheck]:
    """Return the checks of the potentials that were checked at several temperatures."""
    checks = []
    for line in lines:
        if len(line.get("check") or ()) < 2:
            continue
        potential = Potential.of(line)
        for heat, check in line["check"].items():
            checks.append(
                HeatedCheck(
                    model=potential.model,
                    set=potential.set,
                    setting=potential.setting,
                    seed=potential.seed,
                    steps=potential.steps,
                    heat=float(heat),
                    blew_up=potential.blown > 0,
                    fails=verdict_of(check, math.inf) == Verdict.fails,
                    check_blew_up=bool(check["blown"]),
                )
            )
    return checks


def heat_table(checks: Sequence[HeatedCheck]) -> list[str]:
    """Compare checks of the same potentials at several temperatures.

    For each temperature: of the potentials with a blow-up, the number that fails and the number that blows up in the
    check; of the others, the number that passes and the number that does not blow up in the check.
    """
    lines = ["| temperature | fails | blows up | passes | does not blow up |", "|" + "---|" * 5]
    for heat, some in sorted(grouped(checks, lambda check: check.heat).items()):
        bad = [check for check in some if check.blew_up]
        others = [check for check in some if not check.blew_up]
        cells = [
            f"{heat:.1f}",
            f"{sum(check.fails for check in bad)} of {len(bad)}",
            f"{sum(check.check_blew_up for check in bad)} of {len(bad)}",
            f"{sum(not check.fails for check in others)} of {len(others)}",
            f"{sum(not check.check_blew_up for check in others)} of {len(others)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of files that have dynamics."""
    lines = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    return [line for line in lines if "dynamics" in line]


def read_rows(path: Path) -> list[Potential] | list[HeatedCheck]:
    """Return the rows of a file that `write_csv` wrote: potentials, or checks if it has a column `heat`."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        row_class = HeatedCheck if "heat" in (reader.fieldnames or ()) else Potential
        kinds = {field.name: str(field.type).removesuffix(" | None") for field in fields(row_class)}
        return [
            row_class(**{name: value_of(row[name], kind) for name, kind in kinds.items()})
            for row in reader
        ]


def value_of(cell: str, kind: str) -> str | int | float | bool | None:
    """Return the value of a cell by the name of its type; None of an empty cell."""
    if not cell:
        return None
    if kind == "bool":
        return cell == "True"  # as `csv` writes it
    return {"str": str, "int": int, "float": float}[kind](cell)


def read_results(paths: Sequence[Path]) -> tuple[list[Potential], list[HeatedCheck]]:
    """Return the potentials of files of either kind, and their checks at several temperatures."""
    tables = [path for path in paths if path.suffix == ".csv"]
    lines = read_lines(path for path in paths if path not in tables)
    rows = [row for path in tables for row in read_rows(path)]
    earlier = [row for row in rows if isinstance(row, Potential)]
    checks = [row for row in rows if isinstance(row, HeatedCheck)]
    return potentials_of(lines, earlier), [*checks, *heated_checks(lines)]


def potentials_of(
    lines: Iterable[dict[str, Any]], earlier: Sequence[Potential] = ()
) -> list[Potential]:
    """Return earlier potentials and those of lines, sorted; of a repeated run the last one."""
    every = [*earlier, *map(Potential.of, lines)]
    found = [*{(p.model, p.set, p.setting, p.seed, p.steps): p for p in every}.values()]
    order = {p.setting: k for k, p in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda p: (p.model, p.set, p.steps, order[p.setting], p.seed))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--csv", type=Path, help="file that gets a line a potential")
    parser.add_argument("--settings", type=Path, help="file that gets a line a setting")
    parser.add_argument(
        "--checks", type=Path, help="file that gets a line a check at one of several temperatures"
    )
    args = parser.parse_args()
    potentials, checks = read_results(args.results)
    tables = [table(potentials) for table in (settings_table, verdict_table, limit_table)]
    print("\n\n".join("\n".join(table) for table in [*tables, heat_table(checks)]))
    if args.csv:
        write_csv(args.csv, potentials)
    if args.settings:
        write_csv(args.settings, settings_rows(potentials))
    if args.checks:
        write_csv(args.checks, checks)


if __name__ == "__main__":
    main()
