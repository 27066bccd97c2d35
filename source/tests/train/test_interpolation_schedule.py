"""Runs whose steps interpolate the embedding nets, and how they look at the number of pieces."""

import numpy as np
import pytest
import torch
from compared import tensors

from deepmd_muon.model.descriptor.pieces import uniform
from deepmd_muon.model.descriptor.se_e2_a import interpolation
from deepmd_muon.train.step.interpolation_schedule import Tuning


@pytest.fixture(autouse=True)
def _small_batches_count(monkeypatch):
    monkeypatch.setattr(interpolation, "EDGES_PER_NODE", 0)


def test_interpolated_training_follows_the_exact_one(small_input, train, load):
    content = small_input(training={"save_ckpt": "interpolated"})
    assert train(content) == 0
    content["training"] |= {
        "interpolate_embedding": False,
        "save_ckpt": "exact",
        "disp_file": "exact.out",
    }
    assert train(content) == 0
    first, second = load("interpolated.pt"), load("exact.pt")
    assert (len(first["deepmd_muon"]["pieces"]), second["deepmd_muon"]["pieces"]) == (16, [])
    found, wanted = tensors(first["model"]), tensors(second["model"])
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, msg=name)
    np.testing.assert_allclose(np.loadtxt("lcurve.out"), np.loadtxt("exact.out"), rtol=1e-6)


@pytest.mark.parametrize("saved", [3, 8])  # 8 is a step at which the run looks anew
def test_a_continued_run_takes_the_same_pieces(small_input, check_restart, saved):
    check_restart(small_input(training={"save_freq": saved}), saved)


def test_when_a_run_looks(monkeypatch):
    class Model:
        pieces, ntypes, looks = (), 1, 0

        def wanted_pieces(self, batches):
            self.looks += 1
            return uniform(16)

    class Loader:
        def sample_batches(self, count):
            yield from ()

    def looks(steps, looked=False):
        model = Model()
        tuning, found = Tuning([(model, Loader())], torch.device("cpu")), []
        tuning.looked = looked
        for step in steps:
            before = model.looks
            tuning(step)
            if model.looks > before:
                found.append(step)
        return found

    assert looks(range(20)) == [0, 1, 2, 4, 8, 16]
    assert looks(range(1020, 3010)) == [1020, 1024, 2000, 2048, 3000]
    assert looks(range(1020, 3010), looked=True) == [1024, 2000, 2048, 3000]


def test_the_pieces_of_a_shared_descriptor_suffice_for_all_branches():
    class Model:
        pieces, ntypes = (), 1

        def __init__(self, wanted):
            self.wanted = wanted

        def wanted_pieces(self, batches):
            return self.wanted

    class Loader:
        def sample_batches(self, count):
            yield from ()

    for wanted, expected in (((16, 32), 32), ((64, 32), 64), ((16, 0), 0)):
        models = [Model(uniform(number)) for number in wanted]
        Tuning([(model, Loader()) for model in models], torch.device("cpu"))(0)
        assert models[0].pieces == uniform(expected)
