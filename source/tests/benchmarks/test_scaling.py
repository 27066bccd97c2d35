"""The computed steps on many GPUs: the formulas by hand, the measured steps in, and the table of the page out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from deepmd_muon.optim.sharded import make_plan

TOP = Path(__file__).parents[3]


@pytest.fixture
def scaling(monkeypatch):
    """Return the script as a module."""
    monkeypatch.syspath_prepend(TOP / "source" / "benchmarks")
    import scaling

    return scaling


def make_step(scaling, **changes):
    """Return a step with gradients of 1 MB, 10 GB/s within nodes of four GPUs."""
    network = scaling.Network(gpus=4, bandwidth=5e9, delay=1e-5, peer=1e-6)
    step = scaling.Step(
        case="se_e2_a:f64-b1",
        size=10**6,
        one=1e-3,
        several={2: {0: 1.1e-3, 1: 2e-3}},
        orthogonalization=2e-4,
        network=network,
    )
    return dataclasses.replace(step, **changes)


def test_the_all_reduce_follows_its_formula(scaling):
    step = make_step(scaling)
    assert step.in_node == pytest.approx(1e10)
    assert step.all_reduce(2) == pytest.approx(1e-4)  # as measured
    assert step.all_reduce(4) == pytest.approx(1.5e-4)
    # Four nodes: each GPU sends a quarter of the gradients, in two passes of two messages.
    assert step.all_reduce(16) == pytest.approx(1.5e-4 + 1.5 * 2.5e5 / 5e9 + 4e-5)


def test_two_gpus_take_what_was_measured_and_stage_0_grows_by_the_all_reduce_alone(scaling):
    step = make_step(scaling)
    assert [step.seconds(2, stage) for stage in (0, 1)] == pytest.approx([1.1e-3, 2e-3])
    assert step.seconds(16, 0) - step.seconds(2, 0) == pytest.approx(
        step.all_reduce(16) - step.all_reduce(2)
    )


def test_more_measured_gpus_are_the_base_and_check_the_computation(scaling):
    step = make_step(scaling, several={2: {0: 1.1e-3}, 4: {0: 1.18e-3}})
    assert step.all_reduce(4) == pytest.approx(1.8e-4)  # as measured
    assert step.seconds(4, 0) == 1.18e-3
    # Two nodes of four: each GPU sends a quarter of the gradients to the other node.
    between = 2.5e5 / 5e9 + 2e-5
    assert step.seconds(8, 0) == pytest.approx(1.18e-3 + between)
    row = scaling.check([step]).splitlines()[-1]
    assert row == "| se_e2_a:f64-b1 | 0 | 4 | 2 | 1.15 | 1.18 | 0.975 |"


def test_the_plan_shares_or_repeats_the_orthogonalizations(scaling, monkeypatch):
    """Without links that cost anything, stage 1 has the busiest rank's share of the work left, or all of it."""
    free = scaling.Network(gpus=64, bandwidth=math.inf, delay=0.0, peer=0.0)
    step = make_step(scaling, network=free, several={2: {0: 1e-3 + 1e-15}})
    plan = scaling.plan_of(scaling._input(step.case), 4, 1)
    assert plan.domains[0].gathered_bytes
    assert step.optimizer(4, 1) == pytest.approx(2e-4, rel=1e-6)
    plan = make_plan(plan.parameters, dataclasses.replace(plan.settings, replication="spread"))
    monkeypatch.setattr(scaling, "plan_of", lambda *_: plan)
    (domain,) = plan.domains
    share = max(domain.work.values()) / sum(domain.work.values())
    assert 0.25 <= share < 1.0
    assert step.optimizer(4, 1) == pytest.approx(share * 2e-4, rel=1e-6)
    assert step.optimizer(4, 0) == 2e-4


def test_every_measured_input_has_a_date_and_a_source_that_exists(scaling):
    for times in json.loads(scaling.INPUTS.read_text())["ms a step"].values():
        several = [step for of_stage in times["several"].values() for step in of_stage.values()]
        for found in (times["one"], *several, times["orthogonalization"]):
            assert found["date"].startswith("2026-")
            source = found["source"].partition(",")[0].partition(":")[0]
            assert (TOP / source).exists() or "no raw output kept" in found["source"]


def test_the_page_shows_what_the_script_computes(scaling):
    page = (TOP / "doc" / "benchmarks" / "several_gpus.md").read_text()
    assert scaling.table(scaling.read_steps(scaling.Network())) in page
