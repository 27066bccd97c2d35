"""Atoms a second and lost time, in numbers of a clock that the test winds."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepmd_muon.train.batches.streamed import AccumulatedFeed
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.report.throughput import Throughput


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self):
        return self.now


def feed(*atoms, places=None):
    """A batch of frames with these atoms; with `places`, of a layout that has so many of each type."""
    layout = ("a layout", 3) if places is None else SimpleNamespace(counts=places)
    return SimpleNamespace(atoms=np.array(atoms), layout=layout)


def two_steps(ranks, batches):
    """Take two steps of 2 s each, of which data take 0.5 s and sums over ranks 0.2 s."""
    clock = Clock()
    throughput = Throughput(ranks, clock)
    for batch in batches:
        with throughput.reading():
            clock.now += 0.5
        clock.now += 1.5
        ranks.summing.seconds += 0.2
        throughput.take(batch)
    return throughput


def test_the_share_of_padding_and_data_since_the_first_step():
    """A layout without counts pads nothing; several batches of a step count together."""
    second = AccumulatedFeed((feed(6, 6, places=(10, 6)), feed(4)))
    throughput = two_steps(Ranks(torch.device("cpu")), [feed(1000, places=(10000,)), second])
    assert throughput.atoms == 1016.0
    expected = (
        "8 atoms/s since the first step; lost: 25.0% waiting for data, 20.0% of atoms padding"
    )
    assert throughput.describe() == expected


def test_a_run_of_one_step_has_nothing_to_tell():
    assert two_steps(Ranks(torch.device("cpu")), []).describe() is None
    assert two_steps(Ranks(torch.device("cpu")), [feed(3)]).describe() is None


@pytest.mark.parametrize(
    ("device", "lost"),
    [
        (
            "cpu",
            "25.0% waiting for data, 10.0% in sums over ranks, most of it waiting, 0.0% of atoms padding",
        ),
        (
            "cuda",
            "at most 25.0% waiting for data, waiting for other ranks unknown to the host, 0.0% of atoms padding",
        ),
    ],
)
def test_ranks_add_up_their_atoms(monkeypatch, device, lost):
    """Of two ranks, which are alike here; on a GPU the host's clock bounds the time that is lost."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda values: values.mul_(2))
    throughput = two_steps(Ranks(torch.device(device), 0, 2), [feed(4), feed(4, 4)])
    assert throughput.atoms == 0.0
    throughput.share()
    assert throughput.atoms == 24.0
    assert throughput.describe() == f"8 atoms/s since the first step; lost: {lost}"


def test_the_log_of_a_run_has_atoms_a_second(small_input, train, caplog):
    """The example's cells have 32 atoms: a line's steps times atoms by its seconds."""
    assert train(small_input(), "INFO") == 0
    lines = [message for message in caplog.messages if "wall time" in message]
    assert len(lines) == 6
    assert all(re.search(r" s/batch, [\d.e+]+ atoms/s", line) for line in lines)
    (told,) = [message for message in caplog.messages if "since the first step" in message]
    assert re.fullmatch(
        r"[\d.e+]+ atoms/s since the first step; lost: \d+\.\d% waiting for data, 0\.0% of atoms padding",
        told,
    )


def test_logs_no_throughput_without_timing(small_input, train, caplog):
    content = small_input()
    content["training"]["time_training"] = False
    assert train(content, "INFO") == 0
    assert not [message for message in caplog.messages if "atoms/s" in message]
