import json
from pathlib import Path

import pytest

from deepmd_muon.argcheck import CosineSettings, ExpSettings, WSDSettings
from deepmd_muon.train.learning_rate import LearningRateError, learning_rate

FIXTURE = json.loads(
    Path(__file__).with_name("learning_rate_fixture.json").read_text(encoding="utf-8")
)
SECTIONS = {"exp": ExpSettings, "cosine": CosineSettings, "wsd": WSDSettings}


def settings(type, **section):
    return SECTIONS[type](**section)


@pytest.mark.parametrize(
    "case", FIXTURE, ids=lambda case: f"{case['section']['type']}-{case['num_steps']}"
)
def test_rates_are_those_of_deepmd_kit(case):
    schedule = learning_rate(settings(**case["section"]), case["num_steps"])
    rates = {int(step): rate for step, rate in case["rates"].items()}
    assert {step: schedule(step) for step in rates} == pytest.approx(rates, rel=1e-12, abs=0.0)


@pytest.mark.parametrize(
    "section", [{"type": "exp", "decay_steps": 1}, {"type": "cosine"}, {"type": "wsd"}]
)
def test_first_and_last_rate_are_the_ones_asked_for(section):
    schedule = learning_rate(settings(**section, start_lr=2e-3, stop_lr=3e-6), 500)
    assert schedule(0) == pytest.approx(2e-3)
    assert schedule(500) == pytest.approx(3e-6, rel=1e-9)


def test_warmup_rises_linearly_to_the_start_rate():
    schedule = learning_rate(
        settings(
            type="cosine", start_lr=1e-3, stop_lr=1e-6, warmup_steps=4, warmup_start_factor=0.2
        ),
        100,
    )
    assert [schedule(step) for step in range(5)] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])


def test_a_run_of_no_steps_has_a_rate():
    for kind in ("exp", "cosine", "wsd"):
        assert learning_rate(settings(type=kind, start_lr=1e-3, stop_lr=1e-3), 0)(0) == 1e-3


def test_a_warmup_longer_than_the_run_is_refused():
    section = settings(type="exp", start_lr=1e-3, warmup_steps=100)
    assert learning_rate(section, 101)(100) == pytest.approx(1e-3)
    with pytest.raises(LearningRateError, match="takes 100 steps, the whole run only 100"):
        learning_rate(section, 100)
