"""The step on several ranks equals the step of one process: one spawn per number of ranks carries all cases."""

from __future__ import annotations

import pytest
from sharded_cases import EQUALITY
from spawn_ranks import run_cases


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_together_equal_one_process(world, tmp_path):
    failures, seconds = run_cases(world, EQUALITY, tmp_path)
    print({name: round(took, 1) for name, took in seconds.items()})
    assert not failures, "\n\n".join(f"{name}, rank {rank}: {text}" for (name, rank), text in failures.items())
    assert len(seconds) == len(EQUALITY)
