import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepmd_muon.train.learning_rate import LearningRateError, learning_rate

FIXTURE = json.loads(Path(__file__).with_name("learning_rate_fixture.json").read_text(encoding="utf-8"))
DEFAULTS = {
    "stop_lr": None,
    "stop_lr_ratio": None,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "warmup_start_factor": 0.0,
    "decay_steps": 5000,
    "decay_rate": None,
    "smooth": False,
    "decay_phase_ratio": 0.1,
    "decay_type": "inverse_linear",
}


def settings(**section):
    return SimpleNamespace(**(DEFAULTS | section))


@pytest.mark.parametrize("case", FIXTURE, ids=lambda case: f"{case['section']['type']}-{case['num_steps']}")
def test_rates_are_those_of_deepmd_kit(case):
    schedule = learning_rate(settings(**case["section"]), case["num_steps"])
    rates = {int(step): rate for step, rate in case["rates"].items()}
    assert {step: schedule(step) for step in rates} == pytest.approx(rates, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("kind", ["exp", "cosine", "wsd"])
def test_first_and_last_rate_are_the_ones_asked_for(kind):
    schedule = learning_rate(settings(type=kind, start_lr=2e-3, stop_lr=3e-6, decay_steps=1), 500)
    assert schedule(0) == pytest.approx(2e-3)
    assert schedule(500) == pytest.approx(3e-6, rel=1e-9)


def test_warmup_rises_linearly_to_the_start_rate():
    schedule = learning_rate(
        settings(type="cosine", start_lr=1e-3, stop_lr=1e-6, warmup_steps=4, warmup_start_factor=0.2), 100
    )
    assert [schedule(step) for step in range(5)] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])


def test_a_run_of_no_steps_has_a_rate():
    for kind in ("exp", "cosine", "wsd"):
        assert learning_rate(settings(type=kind, start_lr=1e-3, stop_lr=1e-3), 0)(0) == 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_lr": 1e-6, "stop_lr_ratio": 1e-3}, "stop_lr=1e-06 and stop_lr_ratio=0.001"),
        ({}, "found neither"),
        ({"stop_lr": 1e-6, "warmup_steps": 10, "warmup_ratio": 0.1}, "one of warmup_steps and warmup_ratio"),
        ({"stop_lr": 1e-6, "warmup_steps": 100}, "takes 100 steps, the whole run only 100"),
        ({"type": "wsd", "stop_lr": 0.0}, "needs a positive stop_lr; found 0"),
        (
            {"type": "wsd", "stop_lr": 1e-6, "decay_type": "sqrt"},
            "decay_type is 'sqrt'; choose inverse_linear",
        ),
        ({"type": "step", "stop_lr": 1e-6}, "type is 'step'; choose exp, cosine or wsd"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(LearningRateError, match=message):
        learning_rate(settings(**({"type": "exp", "start_lr": 1e-3} | changes)), 100)
