"""A training that is killed at any moment loses nothing, and goes on as if nothing had happened."""

from __future__ import annotations

import pytest
from kills import run_kills


@pytest.mark.parametrize(
    ("ranks", "amount"),
    [
        pytest.param(1, 4, id="alone"),
        pytest.param(2, 1, id="ranks", marks=pytest.mark.slow),
    ],
)
def test_a_few_kills(tmp_path, ranks, amount):
    counts, failures = run_kills(tmp_path, amount, 1, (ranks,))
    assert failures == []
    assert counts["kills"] == amount


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "amount"), [(1, 75), (2, 25)], ids=["alone", "ranks"])
def test_a_hundred_kills(tmp_path, ranks, amount):
    counts, failures = run_kills(tmp_path, amount, 2, (ranks,))
    assert failures == []
    assert counts["kills"] == amount
