"""Compare how safe HybridMuon's and AdamW's potentials are at equal error, over lengths of training.

python source/benchmarks/race/stability_frontier.py potentials.csv --picture frontier.png

It reads what `stability_table.py` reads, and prints Markdown tables.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from settings import ADAMW, COEFFICIENTS, DEPTHS, RATIOS, ROUTES, SETTINGS
from stability_table import Potential, SettingRow, grouped, mean_of, read_results, shown

from deepmd_muon.show.palette import OPTIMIZERS, PURPLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Sets with many lengths of training, which the picture shows, and all of them.
DRAWN = ("water", "alloys", "molecules", "salt", "silicon")
SETS = (*DRAWN, "aluminides")
#: Lengths of training whose dynamics are equally long; other runs had shorter ones.
LENGTHS = (1_000, 3_000, 10_000, 15_000, 20_000, 30_000, 100_000)
DRAWN_LENGTHS = (1_000, 3_000, 10_000, 30_000, 100_000)
#: The longest run that takes the rates of short runs.
SHORT = 10_000
LONG = 30_000
#: A setting next to both optimizers, and its name in shorter runs, whose coefficient is another.
ROUTED, ROUTED_SHORT = "first_c4.32_r1", "first_r1"
MODEL = "se_e2_a"
#: Settings of the table of a set, with their names there.
TABLE = {
    "default": "default",
    "adamw": "AdamW",
    "first_c4.32_r1": "first layer",
}
#: AdamW alone, at the best rate known or at one of several.
ADAMW_SETTINGS = [
    name for name, one in SETTINGS.items() if one.change == ADAMW and one.anchors is None
]
#: What runs of `LONG` steps take where `dp init` wrote their input.
SHIPPED = {
    "water": ROUTED,
    "alloys": ROUTED,
    "salt": ROUTED,
    "silicon": ROUTED,
    "aluminides": ROUTED,
}
SHIPPED |= {"molecules": "default"}
#: What an input that sets nothing takes at `SHORT` steps today; the potentials called `default` had higher rates there.
DEFAULT_SHORT = "none_c4.32_r3"
#: The goal allows errors this much larger than the default's.
LARGER = 1.05
#: Parts of DPA-3 on AdamW, with their names in its table.
PARTS = {"first": "first layer", "first_last": "first and last"}
PARTS |= {"types": "type embedding", "edges": "first edges"}
#: Other directions of Muon's step, and a net that learns from a mean, with their names in their table.
DIRECTIONS = {
    "power_0.25": "U Σ^¼ Vᵀ",
    "power_0.25_c12.96": "U Σ^¼ Vᵀ, coefficient 12.96",
    "power_0.5": "U Σ^½ Vᵀ",
    "power_0.5_c12.96": "U Σ^½ Vᵀ, coefficient 12.96",
    "first_power_0.25": "first layer U Σ^¼ Vᵀ",
    "first_power_0.5": "first layer U Σ^½ Vᵀ",
    "projection": "projection off far anchors",
    "distilled": "mean of four, distilled",
}
#: Seeds that a row of the table of a set has.
SEEDS = 8
#: Departures a ps below which the axis is linear.
RARE = 0.01


class Series(NamedTuple):
    """How the picture shows a setting; `offset` is that of the labels of its points [points]."""

    setting: str
    lengths: tuple[int, ...]
    label: str
    color: str
    mark: str
    size: float
    offset: tuple[float, float]


SERIES = (
    Series(
        "default",
        DRAWN_LENGTHS,
        "HybridMuon, nothing set",
        OPTIMIZERS["HybridMuon"],
        "o-",
        5,
        (-6, 6),
    ),
    Series(
        "adamw", DRAWN_LENGTHS, "AdamW at its best rate", OPTIMIZERS["AdamW"], "s-", 5, (2, -11)
    ),
    Series(
        ROUTED,
        (LONG, 100_000),
        "HybridMuon, first layer of the fitting net on AdamW",
        PURPLE,
        "*-",
        13,
        (-10, 8),
    ),
)


@dataclass(frozen=True)
class Point:
    """Potentials that differ by their seeds alone."""

    row: SettingRow
    blown: float
    blown_error: float

    @classmethod
    def of(cls, some: Sequence[Potential]) -> Point:
        """Summarise potentials; the runs of one are dependent, so the error is that over potentials."""
        shares = [potential.blown / potential.runs for potential in some]
        error = statistics.stdev(shares) / math.sqrt(len(some)) if len(some) > 1 else math.nan
        return cls(SettingRow.of(some), statistics.fmean(shares), error)


def points_of(potentials: Sequence[Potential], name: str, setting: str) -> list[Point]:
    """Return a point for each length of a setting on a set, shortest first."""
    chosen = [p for p in potentials if (p.model, p.set, p.setting) == (MODEL, name, setting)]
    groups = grouped(chosen, lambda p: p.steps)
    return [Point.of(groups[steps]) for steps in LENGTHS if steps in groups]


def frontier_table(potentials: Sequence[Potential]) -> list[str]:
    """Return errors, blow-ups and departures of both optimizers by set and length, as Markdown."""
    lines = [
        "| set | steps | HybridMuon [eV/Å] | blown up | departures | AdamW [eV/Å] | blown up | departures |",
        "|" + "---|" * 8,
    ]
    for name in SETS:
        columns = [
            {point.row.steps: point.row for point in points_of(potentials, name, setting)}
            for setting in ("default", "adamw")
        ]
        for steps in LENGTHS:
            rows = [column.get(steps) for column in columns]
            if any(rows):
                cells = [cell for row in rows for cell in _cells(row)]
                lines.append(f"| {name} | {steps:,} | " + " | ".join(cells) + " |")
    return lines


def lengths_table(potentials: Sequence[Potential]) -> list[str]:
    """Return errors and blow-ups of `ROUTED` between those of both optimizers, as Markdown."""
    lines = [
        "| set | steps | default [eV/Å] | blown up | first layer [eV/Å] | blown up | AdamW [eV/Å] | blown up |",
        "|" + "---|" * 8,
    ]
    for name in SETS:
        for steps in LENGTHS:
            routed = ROUTED_SHORT if steps <= SHORT else ROUTED
            rows = [
                next((p.row for p in points_of(potentials, name, s) if p.row.steps == steps), None)
                for s in ("default", routed, "adamw")
            ]
            if rows[1] is None or steps == LONG:
                continue
            cells = " | ".join(
                f"{row.test:.4f} | {row.runs_blown_up} of {row.runs}" if row else "– | –"
                for row in rows
            )
            lines.append(f"| {name} | {steps:,} | {cells} |")
    return lines


def longest_table(potentials: Sequence[Potential]) -> list[str]:
    """Return errors, blow-ups and departures of both optimizers after the longest runs, as Markdown."""
    lines = [
        "| set | optimizer | seeds | test [eV/Å] | out of distribution "
        "| runs (potentials) blown up | departures a ps |",
        "|" + "---|" * 7,
    ]
    for name in DRAWN:
        label_of_set = f"{name} "
        for setting, label in (("default", "HybridMuon"), ("adamw", "AdamW")):
            points = points_of(potentials, name, setting)
            for row in (point.row for point in points if point.row.steps == LENGTHS[-1]):
                lines.append(
                    f"| {label_of_set}| {label} | {row.seeds} | {shown((row.test, row.test_error))} | "
                    f"{row.out_of_distribution:.4f} | {row.runs_blown_up} of {row.runs} "
                    f"({row.potentials_blown_up}) | {row.departures_per_ps:.2f} |"
                )
                label_of_set = ""
    return lines


def sets_table(potentials: Sequence[Potential]) -> list[str]:
    """Return what each set's potentials of `TABLE` did after `LONG` steps, as Markdown."""
    lines = [
        "| set | setting | test [eV/Å] | out of distribution | runs (potentials) blown up | departures a ps |",
        "|" + "---|" * 6,
    ]
    for name in SETS:
        label_of_set = f"{name} "
        for setting, label in TABLE.items():
            for row in (point.row for point in points_of(potentials, name, setting)):
                if (row.steps, row.seeds) != (LONG, SEEDS):
                    continue
                blown = str(row.runs_blown_up)
                if row.potentials_blown_up:
                    blown += f" ({row.potentials_blown_up})"
                lines.append(
                    f"| {label_of_set}| {label} | {shown((row.test, row.test_error))} | "
                    f"{row.out_of_distribution:.4f} | {blown} | {row.departures_per_ps:.2f} |"
                )
                label_of_set = ""
    return lines


def goal_table(potentials: Sequence[Potential]) -> list[str]:
    """Compare what `dp init` writes with the default and with AdamW, and judge it by the goal, as Markdown.

    Blow-ups and departures may exceed AdamW's by two standard errors of the difference, test errors the default's by
    `LARGER`, errors out of distribution must not exceed AdamW's. Test errors are compared seed by seed.
    """
    lines = [
        "| case | steps | on AdamW | seeds | runs blown up (AdamW) | departures a ps (AdamW) "
        "| error / default's | out of distribution / AdamW's | goal |",
        "|" + "---|" * 9,
    ]
    groups = grouped(potentials, lambda p: (p.model, p.set, p.steps, p.setting))
    shipped = [(MODEL, name, LONG, setting) for name, setting in SHIPPED.items()]
    shipped += [(MODEL, name, SHORT, DEFAULT_SHORT) for name in ("water", "alloys")]
    shipped += [key for key in groups if key[0] == "dpa3" and key[3] == "default"]
    for model, name, steps, setting in shipped:
        chosen = groups[model, name, steps, setting]
        rates = [
            groups[key] for rate in ADAMW_SETTINGS if (key := (model, name, steps, rate)) in groups
        ]
        compared = min(rates, key=lambda some: mean_of([p.test for p in some])[0])
        routed = setting not in ("default", DEFAULT_SHORT)
        plain = {p.seed: p.test for p in groups[model, name, steps, "default"]}
        ratios = [p.test / plain[p.seed] if routed else 1.0 for p in chosen if p.seed in plain]
        ratio = mean_of(ratios)
        point = Point.of(chosen)
        theirs = Point.of(compared)
        out = point.row.out_of_distribution / theirs.row.out_of_distribution
        missed = [
            what
            for what, holds in {
                "blow-ups": _within(
                    (point.blown, point.blown_error), (theirs.blown, theirs.blown_error)
                ),
                "departures": _within(_departures(point.row), _departures(theirs.row)),
                "error": ratio[0] <= LARGER,
                "out of distribution": out <= 1.0,
            }.items()
            if not holds
        ]
        cells = [
            name if model == MODEL else f"DPA-3, {name}",
            f"{steps:,}",
            TABLE[setting] if routed else "nothing",
            str(point.row.seeds),
            f"{_blown(point.row)} ({_blown(theirs.row)})",
            f"{point.row.departures_per_ps:.2f} ({theirs.row.departures_per_ps:.2f})",
            shown(ratio, 2) if routed else "1",
            f"{out:.2f}",
            f"missed: {', '.join(missed)}" if missed else "reached",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _blown(row: SettingRow) -> str:
    """Return the share of runs that blew up."""
    return f"{row.runs_blown_up} of {row.runs}"


def _departures(row: SettingRow) -> tuple[float, float]:
    """Return departures a ps and their error."""
    return row.departures_per_ps, row.departures_error


def _within(value: tuple[float, float], limit: tuple[float, float]) -> bool:
    """Return whether a value with its standard error exceeds another by two of them at most."""
    return value[0] - limit[0] <= 2 * math.hypot(value[1], limit[1])


def _cells(row: SettingRow | None) -> tuple[str, str, str]:
    if row is None:
        return ("–", "–", "–")
    return (
        f"{row.test:.4f}",
        f"{row.potentials_blown_up}/{row.seeds} ({row.runs_blown_up}/{row.runs})",
        f"{row.departures_per_ps:.3f}",
    )


def routes_table(potentials: Sequence[Potential]) -> list[str]:
    """Compare each route and its rates with the default, as Markdown."""
    settings = {
        f"{part}_c{coefficient:g}_r{ratio:g}": (part, f"{coefficient:g}", f"{ratio:g}")
        for part in ROUTES
        for coefficient in COEFFICIENTS
        for ratio in RATIOS
    }
    settings["adamw"] = ("all", "–", "–")
    return _compared_table(potentials, ("on AdamW", "coefficient", "ratio"), settings)


def depth_table(potentials: Sequence[Potential]) -> list[str]:
    """Compare few Newton–Schulz steps with the default, as Markdown."""
    settings = {
        f"{prefix}depth_{steps}_c{coefficient:g}": (nets, str(steps), f"{coefficient:g}")
        for prefix, nets in (("", "all"), ("fitting_", "fitting"))
        for steps in DEPTHS
        for coefficient in COEFFICIENTS
    }
    return _compared_table(potentials, ("nets", "Newton–Schulz steps", "coefficient"), settings)


def directions_table(potentials: Sequence[Potential]) -> list[str]:
    """Compare other directions of the step, and a net that learns from a mean, with the default, as Markdown."""
    settings = {name: (label,) for name, label in DIRECTIONS.items()}
    return _compared_table(potentials, ("setting",), settings)


def _compared_table(
    potentials: Sequence[Potential],
    heads: Sequence[str],
    settings: Mapping[str, Sequence[str]],
) -> list[str]:
    """Compare settings, each with its first cells, with the default's potentials of the same seeds.

    A cell has the ratio of test errors with its standard error, that of errors out of distribution, and the runs that
    blew up, with the default's in brackets.
    """
    long = {
        (p.set, p.setting, p.seed): p for p in potentials if (p.model, p.steps) == (MODEL, LONG)
    }
    trained = {name for name, setting, _ in long if setting in settings}
    names = [name for name in SETS if name in trained]
    lines = ["| " + " | ".join([*heads, *names]) + " |", "|" + "---|" * (len(heads) + len(names))]
    for setting, words in settings.items():
        cells = [_compared(long, name, setting) for name in names]
        if any(cells):
            lines.append("| " + " | ".join([*words, *(cell or "–" for cell in cells)]) + " |")
    return lines


def _compared(
    potentials: Mapping[tuple[str, str, int], Potential], name: str, setting: str
) -> str | None:
    """Return the cell of a set and a setting; None without seeds that the default has, too."""
    pairs = [
        (potential, potentials[name, "default", seed])
        for (chosen, kind, seed), potential in potentials.items()
        if (chosen, kind) == (name, setting) and (name, "default", seed) in potentials
    ]
    if not pairs:
        return None
    test = shown(mean_of([potential.test / plain.test for potential, plain in pairs]), 2)
    out = statistics.fmean(potential.out / plain.out for potential, plain in pairs)
    blown, plainly, runs = (
        sum(counts)
        for counts in zip(
            *((potential.blown, plain.blown, potential.runs) for potential, plain in pairs),
            strict=True,
        )
    )
    return f"{test}, {out:.2f}; {blown} ({plainly}) of {runs}"


def dpa3_table(potentials: Sequence[Potential]) -> list[str]:
    """Return what DPA-3's potentials did by set and length, as Markdown."""
    lines = [
        "| set | steps | setting | seeds | test [eV/Å] | out of distribution "
        "| runs (potentials) blown up | departures a ps |",
        "|" + "---|" * 8,
    ]
    names = {"default": "default", "decay_3": "decay 3"}
    names |= {
        name: name.replace("adamw", "AdamW").replace("_", ", rate ") for name in ADAMW_SETTINGS
    }
    names |= {
        f"{part}_c4.32_r{ratio:g}": label + ("" if ratio == 1 else f", ratio {ratio:g}")
        for part, label in PARTS.items()
        for ratio in (1, 0.3, 3)
    }
    groups = grouped(
        (p for p in potentials if p.model == "dpa3" and p.setting in names),
        lambda p: (p.set, p.steps, p.setting),
    )
    order = list(names)
    for name, steps, setting in sorted(groups, key=lambda k: (k[0], k[1], order.index(k[2]))):
        row = SettingRow.of(groups[name, steps, setting])
        lines.append(
            f"| {name} | {steps:,} | {names[setting]} | {row.seeds} | {shown((row.test, row.test_error))} | "
            f"{row.out_of_distribution:.4f} | {row.runs_blown_up} of {row.runs} ({row.potentials_blown_up}) | "
            f"{shown(_departures(row), 2)} |"
        )
    return lines


def draw(potentials: Sequence[Potential], path: Path) -> None:
    """Draw blow-ups and departures against the test error, in a column of panels for each set."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    figure, panels = plt.subplots(
        2, len(DRAWN), figsize=(15.0, 6.4), sharex="col", sharey="row", layout="constrained"
    )
    for (shares, rates), name in zip(panels.T, DRAWN, strict=True):
        for series in SERIES:
            points = [
                point
                for point in points_of(potentials, name, series.setting)
                if point.row.steps in series.lengths
            ]
            _draw_series(shares, rates, points, series)
        shares.set(title=name, xscale="log", ylim=(-12, 110))
        rates.set_yscale("symlog", linthresh=RARE)
        rates.set_ylim(-0.002, 40)
        rates.set_xlabel("force error on test frames [eV/Å]")
        rates.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 4.0, 5.0, 7.0)))
        rates.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        rates.xaxis.set_minor_locator(NullLocator())
        rates.tick_params(axis="x", labelrotation=45)
    panels[0, 0].set_ylabel("runs that blew up [%]")
    panels[1, 0].set_ylabel("departures [1/ps]")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _draw_series(shares: Axes, rates: Axes, points: Sequence[Point], series: Series) -> None:
    """Draw the points of a setting: percentages of blow-ups with their steps, and departures."""
    errors = [point.row.test for point in points]
    style = {
        "fmt": series.mark,
        "color": series.color,
        "label": series.label,
        "capsize": 2,
        "markersize": series.size,
    }
    blown = [100 * point.blown for point in points]
    shares.errorbar(errors, blown, [100 * point.blown_error for point in points], **style)
    departures = [point.row.departures_per_ps for point in points]
    rates.errorbar(errors, departures, [point.row.departures_error for point in points], **style)
    for point, height in zip(points, blown, strict=True):
        if len(series.lengths) > 1:
            shares.annotate(
                f"{point.row.steps // 1000}k",
                (point.row.test, height),
                textcoords="offset points",
                xytext=series.offset,
                fontsize=7,
                color=series.color,
            )


def main() -> None:
    """Print the tables and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, help="file that gets the picture")
    args = parser.parse_args()
    potentials, _ = read_results(args.results)
    tables = (
        goal_table,
        frontier_table,
        longest_table,
        sets_table,
        lengths_table,
        routes_table,
        depth_table,
        directions_table,
        dpa3_table,
    )
    for table in [make(potentials) for make in tables]:
        print("\n".join(table), end="\n\n")
    if args.picture:
        draw(potentials, args.picture)


if __name__ == "__main__":
    main()
