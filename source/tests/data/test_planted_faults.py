"""Every planted fault is named, with its frame; sound sets of many kinds raise no warning."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import sane_sets
from planted_faults import FAULTS, Fault
from sane_sets import write_set

from deepmd_muon.data import open_systems
from deepmd_muon.data.checks.labels import suspicions

EXAMPLES = Path(__file__).parents[3] / "examples"


def said_of(folder):
    return suspicions(open_systems(str(folder)))


@functools.cache
def set_of(base):
    """Return the systems of a sound set, which a short dynamics makes; several faults are planted in each."""
    return base()


def names_frame(sentence: str, frame: int) -> bool:
    """Whether a sentence has "frame N" or "frames …, N, …"."""
    lists = re.findall(r"frames? ([\d, and]+)", sentence)
    return any(str(frame) in re.findall(r"\d+", listed) for listed in lists)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_planted_fault_is_named(fault: Fault, tmp_path):
    systems = copy.deepcopy(set_of(fault.base))
    fault.damage(systems)
    said = said_of(write_set(systems, tmp_path / "damaged"))
    fitting = [one for one in said if all(word in one for word in fault.words)]
    assert fitting, said
    assert fault.frame is None or any(names_frame(one, fault.frame) for one in fitting), said
    assert len(said) <= len(systems) + 1, said  # one fault, one warning a system


@pytest.mark.parametrize(
    "base", dict.fromkeys(fault.base for fault in FAULTS), ids=lambda base: base.__name__
)
def test_the_sets_without_their_faults_raise_no_warning(base, tmp_path):
    assert said_of(write_set(set_of(base), tmp_path / "sound")) == []


@pytest.mark.parametrize(
    "make",
    [*sane_sets.FAST, *(pytest.param(make, marks=pytest.mark.slow) for make in sane_sets.SLOW)],
    ids=lambda make: make.__name__,
)
def test_sound_sets_raise_no_warning(make, tmp_path):
    assert said_of(write_set(make(), tmp_path / "sound")) == []


def test_the_data_of_the_examples_raise_no_warning():
    places = [*EXAMPLES.glob("*/data"), *EXAMPLES.glob("*/*.hdf5"), *EXAMPLES.glob("*/all.xyz")]
    assert len(places) == 5
    assert [said_of(place) for place in places] == [[]] * 5
