"""Tables of the race: values follow from the results, and the published page and files are those of the raw results."""

import csv
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import report
from fields import Default
from pictures import Rival, draw
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


def table_rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def contestants(results, times=()):
    return {
        row["optimizer"]: row
        for row in table_rows(report.tables(report.fields(results), times)["contestants.csv"])
    }


def test_every_contestant_stands_at_its_best_rate(results):
    times = [StepTime("water", "se_e2_a", "hybrid_muon", 2.0, "a", "b", "c")]
    rows = contestants(results, times)
    assert list(rows) == ["HybridMuon", "AdamW"]
    wanted = {
        "best_rate": "0.00216",
        "at_edge": "True",
        "force_test_eV_per_A": "0.05",
        "to_adamw": "0.5",
    }
    wanted |= {
        "energy_test_meV_per_atom": "2",
        "force_out_eV_per_A": "0.6",
        "out_to_adamw": "1.5",
        "seconds": "6",
    }
    wanted |= {
        "rates_within_2x": "2",
        "rates": "3",
        "seeds": "1",
        "adamw_end_after_fraction": "0.5",
    }
    assert rows["HybridMuon"].items() >= wanted.items()
    assert (
        rows["AdamW"].items()
        >= {"best_rate": "0.003", "to_adamw": "1", "out_to_adamw": "1", "seconds": ""}.items()
    )


def test_hybrid_muon_with_nothing_set_stands_beside_the_best_of_adamw(results):
    def rows(more):
        return {row.set: row for row in report.defaults(report.fields([*results, *more]))}

    theirs = result("adamw", 3e-3, [(3000, 0.1)], name="silicon")
    ours = result(*report.untouched(3000), [(3000, 0.08)], out=0.2, name="silicon")
    assert rows([ours, theirs]) == {
        "silicon": Default("silicon", "se_e2_a", 3000, (0.08, 0.1), pytest.approx((0.2, 0.5)))
    }
    measured = result(report.UNTOUCHED, report.ADAM_RATE, [(3000, 0.07)], name="silicon")
    assert rows([ours, theirs, measured])["silicon"].test_ratio == pytest.approx(0.7)
    failed = result(*report.untouched(3000), [(3000, 0.08)], failed="step 1: NaN")
    table = report.default_table(list(rows([ours, theirs, failed]).values()))
    assert "| 3,000 | se_e2_a | silicon | 0.0800 | 0.1000 | 0.80 | 0.40 |" in table
    assert "| 3,000 | se_e2_a | water | failed | 0.1000 | failed | – |" in table


def test_the_last_row_of_a_budget_has_medians():
    rows = [Default("water", "dpa3", 3000, (0.1 * k, 1.0), (float("nan"), 1.0)) for k in (1, 2, 9)]
    assert (
        report.default_table(rows).splitlines()[-1]
        == "| 3,000 | all | median of 3 |  |  | 0.20 | – |"
    )


def test_systems_stand_side_by_side(results):
    rows = table_rows(report.tables(report.fields(results), [])["systems.csv"])
    # HybridMuon 0.05 and out 0.6 at its best rate, AdamW 0.1 and 0.4 at its.
    assert [(row["part"], row["system"], row["ratio"]) for row in rows] == [
        ("test", "300K", "0.5"),
        ("out", "600K", "1.5"),
    ]


def test_seeds_are_averaged_with_their_spread(results):
    more = [result("adamw", 3e-3, [(1500, 0.3), (3000, 0.14)], seed=2)]
    row = contestants(results + more)["AdamW"]
    assert (row["force_test_eV_per_A"], row["lowest_seed"], row["highest_seed"], row["seeds"]) == (
        "0.12",
        "0.1",
        "0.14",
        "2",
    )


def test_every_run_is_listed_and_failures_say_why(results):
    trained = dataclasses.replace(
        results[0], train={"300K": {"force": 0.08, "energy": 1e-3, "virial": float("nan")}}
    )
    rows = table_rows(report.tables(report.fields([trained, *results[1:]]), [])["runs.csv"])
    assert len(rows) == len(results)
    assert [row["force_train_eV_per_A"] for row in rows] == ["0.08", "", "", "", ""]
    assert [row["failed"] for row in rows if row["force_test_eV_per_A"] == "inf"] == [
        "step 1600: NonFiniteError"
    ]


def test_the_picture_has_a_panel_for_each_budget(tmp_path):
    rows = [
        Default("water", "dpa3", steps, (0.1, 1.0), (float("nan"), 1.0)) for steps in (3000, 30000)
    ]
    widths = []
    for some in (rows[:1], rows):
        draw(some, [Rival("water", "dpa3", 3000, "SOAP", 0.5)], tmp_path / "a.png")
        content = (tmp_path / "a.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        widths.append(int.from_bytes(content[16:20], "big"))
    assert widths[1] == 2 * widths[0]


def test_variants_and_larger_sets_take_the_time_of_the_same_step():
    times = [StepTime("water", "se_e2_a", "hybrid_muon", 2.0, "a", "b", "c")]
    (field,) = report.fields(
        [result("hybrid_muon_decay_1", 0.00432, [(3000, 0.1)], name="water_large")]
    )
    assert report.time_of(times, field, "hybrid_muon_decay_1") == 2.0
    assert np.isnan(report.time_of(times, field, "soap"))


def test_a_table_replaces_that_of_a_page():
    page = f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n"
    assert (
        report.with_table(page, "new")
        == f"before\n{report.MARKS[0]}\n\nnew\n\n{report.MARKS[1]}\nafter\n"
    )
    with pytest.raises(ValueError, match="marks"):
        report.with_table("no marks", "new")


def test_the_published_page_and_files_are_those_of_the_published_results():
    raw = TOP / "doc" / "benchmarks" / "raw" / "race"
    results, times = read(raw.glob("*.jsonl"))
    found = report.fields(results.values())
    page = (TOP / "doc" / "benchmarks" / "race.md").read_text()
    assert report.with_table(page, report.default_table(list(report.defaults(found)))) == page
    assert {path.name: path.read_text() for path in raw.glob("*.csv")} == report.tables(
        found, times
    )
