"""Tables of the race: values follow from the results, and the published page holds those of the committed files."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

# The race's scripts are not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "source" / "benchmarks" / "race"))

import report
from pictures import draw
from results import Key, Result, StepTime, read

TOP = Path(__file__).resolve().parents[3]


def result(contestant, rate, curve, *, out=0.5, seed=1, failed="", name="water"):
    points = [(step, force, force / 10) for step, force in curve]
    errors = {"300K": {"force": curve[-1][1], "energy": 2e-3, "virial": float("nan")}}
    outside = {"600K": {"force": out, "energy": 3e-3, "virial": float("nan")}}
    about = ("a machine", "2.11", "2026-11-22")
    key = Key(name, "se_e2_a", contestant, rate, seed, 3000)
    return Result(key, points, *(({}, {}) if failed else (errors, outside)), failed, *about)


@pytest.fixture
def results():
    return [
        result("adamw", 1.5e-3, [(1500, 0.4), (3000, 0.2)]),
        result("adamw", 3e-3, [(1500, 0.3), (3000, 0.1)], out=0.4),
        result("hybrid_muon", 0.00216, [(1500, 0.1), (3000, 0.05)], out=0.6),
        result("hybrid_muon", 0.00432, [(1500, 0.1), (3000, 0.09)]),
        result("hybrid_muon", 0.00864, [(1500, 0.9)], failed="step 1600: NonFiniteError"),
    ]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def row(tables, title):
    return next(cells(line) for line in tables.splitlines() if line.startswith(f"| {title} |"))


def test_a_set_shows_every_contestant_at_its_best_rate(results):
    (field,) = report.fields(results)
    times = [StepTime("water", "se_e2_a", "hybrid_muon", 2.0, "a", "b", "c")]
    table = report.field_table(field, times)
    assert row(table, "HybridMuon")[1:] == [
        *("0.00216 (edge)", "0.0500", "0.50", "2.00", "0.6000", "1.50", "2 of 3", "0.50", "6.0"),
    ]
    assert row(table, "AdamW")[1:] == [
        *("0.003 (edge)", "0.1000", "1.00", "2.00", "0.4000", "1.00", "2 of 2", "1.00", "–"),
    ]
    assert table.index("| HybridMuon |") < table.index("| AdamW |")
    assert row(report.grid_table(field), "HybridMuon")[-3:] == ["0.00864: failed", "–", "–"]


def test_hybrid_muon_with_nothing_set_stands_beside_the_best_of_adamw(results):
    ours = result(*report.untouched(3000), [(3000, 0.08)], out=0.2, name="silicon")
    tables = report.untouched_table(
        report.fields([*results, ours, result("adamw", 3e-3, [(3000, 0.1)], name="silicon")])
    )
    assert row(tables, "silicon")[3:] == ["0.0800", "0.1000", "0.003", "0.80", "0.2000", "0.5000", "0.40"]
    assert row(tables, "median of 1")[2:] == ["3,000", "", "", "", "0.80", "", "", "0.40"]
    assert "water" not in tables
    measured = result(report.UNTOUCHED, report.ADAM_RATE, [(3000, 0.07)], name="silicon")
    more = [*results, ours, measured, result("adamw", 3e-3, [(3000, 0.1)], name="silicon")]
    assert row(report.untouched_table(report.fields(more)), "silicon")[3] == "0.0700"
    failed = result(*report.untouched(3000), [(3000, 0.08)], failed="step 1: NaN")
    tables = report.untouched_table(report.fields([*results, failed]))
    assert row(tables, "water")[3:7] == ["failed", "0.1000", "0.003", "failed"]


def test_the_headline_takes_the_best_adam_route_and_medians_over_sets_and_models(results):
    more = [
        result("hybrid_muon_adam_10", 0.00864, [(3000, 0.03)]),
        result("adamw", 3e-3, [(3000, 0.1)], name="silicon"),
        result("hybrid_muon", 0.00432, [(3000, 0.07)], name="silicon"),
        result("hybrid_muon", 0.00432, [(3000, 0.07)], name="alloys"),  # without AdamW
    ]
    rows = report.headline_table(report.fields(results + more)).splitlines()[2:]
    assert [cells(line) for line in rows] == [
        ["3,000", "se_e2_a", "water 0.30, silicon 0.70", "0.50"],
        ["3,000", "all", "2 sets and models", "0.50"],
    ]


def test_errors_on_training_frames_stand_beside_those_on_test_frames(results):
    def trained(entry, error):
        return dataclasses.replace(entry, train={"300K": {"force": error, "energy": 1e-3, "virial": float("nan")}})

    (field,) = report.fields([*results, trained(results[1], 0.08), trained(results[2], 0.02)])
    assert row(report.training_table([field]), "water")[3:] == ["0.0200", "0.0800", "0.25", "0.0500", "0.1000", "0.50"]
    (field,) = report.fields(results)
    assert "water" not in report.training_table([field])


def test_systems_stand_side_by_side(results):
    table = report.systems_table(report.fields(results))
    # HybridMuon 0.05 and out 0.6 at its best rate, AdamW 0.1 and 0.4 at its.
    assert row(table, "water")[3:] == ["0.50", "300K 0.50", "300K 0.50", "1.50", "600K 1.50", "600K 1.50"]
    assert report.median_and_ends({"a": 3.0, "b": 1.0, "c": 1.5}) == ["1.50", "b 1.00", "a 3.00"]


def test_the_summary_takes_medians_over_sets(results):
    more = [
        result("adamw", 3e-3, [(3000, 0.1)], name="silicon"),
        result("hybrid_muon", 0.00432, [(3000, 0.07)], name="silicon"),
    ]
    found = report.summary_table(report.fields(results + more))
    summary = next(cells(line) for line in found.splitlines() if "| HybridMuon |" in line)
    assert summary == ["se_e2_a", "3,000", "HybridMuon", "2", "0.60", "0.50–0.70", "1.25", "1.50", "1.5"]


def test_seeds_are_averaged_with_their_spread(results):
    more = [result("adamw", 3e-3, [(1500, 0.3), (3000, 0.14)], seed=2)]
    (field,) = report.fields(results + more)
    assert row(report.field_table(field, []), "AdamW")[2] == "0.1200 (0.1000–0.1400)"
    assert field.ratio("hybrid_muon", report.last) == pytest.approx(0.05 / 0.12)


def test_failures_are_listed(results):
    assert report.failures(report.fields(results)) == (
        "- water, 3,000 steps: HybridMuon at 0.00864, seed 1: step 1600: NonFiniteError"
    )


def test_pictures_are_drawn(results, tmp_path):
    (field,) = report.fields(results)
    sizes = []
    for times in ([], [StepTime("water", "se_e2_a", "hybrid_muon", 2.0, "a", "b", "c")]):
        draw(field, times, tmp_path / "a.png")
        content = (tmp_path / "a.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(content[16:20], "big"))
    assert sizes[1] > sizes[0]  # with a panel over seconds


def test_variants_and_larger_sets_take_the_time_of_the_same_step(results):
    times = [StepTime("water", "se_e2_a", "hybrid_muon", 2.0, "a", "b", "c")]
    (field,) = report.fields([result("hybrid_muon_decay_1", 0.00432, [(3000, 0.1)], name="water_large")])
    assert report.time_of(times, field, "hybrid_muon_decay_1") == 2.0
    assert np.isnan(report.time_of(times, field, "soap"))


def test_tables_replace_those_of_a_page():
    page = f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n"
    assert report.with_tables(page, "new") == f"before\n{report.MARKS[0]}\n\nnew\n\n{report.MARKS[1]}\nafter\n"
    with pytest.raises(ValueError, match="marks"):
        report.with_tables("no marks", "new")


def test_the_published_page_holds_the_tables_of_the_published_results():
    page = (TOP / "doc" / "benchmarks" / "race.md").read_text()
    results, times = read((TOP / "doc" / "benchmarks" / "raw" / "race").glob("*.jsonl"))
    assert report.with_tables(page, report.report(results.values(), times)) == page
