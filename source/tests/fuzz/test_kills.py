"""A training that is killed at any moment loses nothing, and goes on as if nothing had happened."""

from __future__ import annotations

import pytest
from kills import ALONE, TWO_RANKS, Kind, run_kills


@pytest.mark.parametrize(
    ("kinds", "amount"), [((Kind("both", 1),), 4), ((Kind("file", 2),), 1)], ids=["alone", "ranks"]
)
def test_a_few_kills(tmp_path, kinds, amount):
    counts, failures = run_kills(tmp_path, amount, 1, kinds)
    assert failures == []
    assert counts["kills"] == amount


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "amount"), [(ALONE, 75), (TWO_RANKS, 25)], ids=["alone", "ranks"]
)
def test_a_hundred_kills(tmp_path, kinds, amount):
    counts, failures = run_kills(tmp_path, amount, 2, kinds)
    assert failures == []
    assert counts["kills"] == amount
