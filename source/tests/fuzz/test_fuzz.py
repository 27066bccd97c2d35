"""Every mutant of an input, a system or a checkpoint is read right or refused in words: no traceback, no long work.

`pytest -m slow source/tests/fuzz` tries hundreds, `-m hours` thousands; the seeds are fixed, so that a find can be
repeated.
"""

from __future__ import annotations

import random
import resource

import numpy as np
import pytest
from doors import INPUT
from fuzz import DOORS, MOST_MEMORY, bounded_memory, fuzz, message_problem
from mutants import array_mutant, bytes_mutant, tree_mutant

pytestmark = pytest.mark.usefixtures("as_alone")
# Mutants of doors that take long, by default.
FEW = {
    "restart": 6,
    "show": 8,
    "frozen": 15,
    "replay": 15,
    "check-json": 6,
}


def check(folder, name, seed, tries):
    door = DOORS[name](folder)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with bounded_memory():
        found = fuzz(door, seed, range(tries))
    assert found.failures == []
    assert found.read + found.refused == tries
    assert found.refused > tries // 20 or name == "reports"  # their damaged rows are left out
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MOST_MEMORY


@pytest.mark.parametrize("name", list(DOORS))
def test_some_mutants(tmp_path, name):
    check(tmp_path, name, 1, FEW.get(name, 20))


@pytest.mark.parametrize(
    "tries",
    [pytest.param(400, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.hours)],
)
@pytest.mark.parametrize("name", list(DOORS))
def test_many_mutants(tmp_path, name, tries):
    check(tmp_path, name, 2, tries)


def test_the_generators_repeat_themselves():
    array = np.arange(12.0).reshape(3, 4)
    for mutant, value in ((bytes_mutant, b"abc" * 100), (tree_mutant, INPUT)):
        assert mutant(value, random.Random(7)) == mutant(value, random.Random(7)) != value
    first, second = (array_mutant(array, random.Random(7)) for _ in range(2))
    assert (first.dtype, first.shape, first.tobytes()) == (
        second.dtype,
        second.shape,
        second.tobytes(),
    )


def test_a_door_that_fails_is_reported(tmp_path, monkeypatch):
    door = DOORS["input"](tmp_path)
    monkeypatch.setattr(door, "enter", lambda: [][0])
    found = fuzz(door, 1, range(3))
    assert [number for number, _ in found.failures] == [0, 1, 2]
    assert "IndexError" in found.failures[0][1]
    assert (found.read, found.refused) == (0, 0)
    assert message_problem("input.json is wrong", "input.json") is None
    assert "does not name" in message_problem("it is wrong", "input.json")
    assert "characters" in message_problem("a" * 30_000, "a")
