"""Errors shown during training: what counts in them, alone and over ranks."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from test_label_presence import write

from deepmd_muon.data import DataLoader, NeighborCache, open_systems
from deepmd_muon.loss import build_loss
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.branches import number_of_steps
from deepmd_muon.train.validation.validate import mean_metrics, metric_weights, validate

CPU = torch.device("cpu")
LOSS = build_loss({"start_pref_v": 1.0, "limit_pref_v": 1.0}, ["Cu"])


@pytest.fixture
def systems(tmp_path):
    """Two systems whose sets of three frames have different labels."""
    first = write(tmp_path / "a", [("energy", "force"), ("energy",), ("virial",)], 8)
    return open_systems([first, write(tmp_path / "b", [("energy", "force", "virial")], 5)], ["Cu"])


def loader(systems, batch_size=2, **settings):
    return DataLoader(
        systems, batch_size, seed=3, cache=NeighborCache(3.5, (20,), True), **settings
    )


def on_ranks(world, model, deal):
    """The metrics that every one of `world` ranks would find; `deal` gives the batches of a rank."""
    parts = []

    def collect(values):
        parts.append(values.clone())
        return values

    def batches(rank):
        return ((to_device(batch, 1, CPU), counts) for batch, counts in deal(rank))

    for rank in range(world):
        validate(model, LOSS, batches(rank), 0.5, collect)
    together = torch.stack(parts).sum(0)
    return [
        validate(model, LOSS, batches(rank), 0.5, lambda values: together) for rank in range(world)
    ]


@pytest.mark.parametrize("batch_size", [2, "mixed:4"])
def test_all_frames_give_the_errors_of_one_large_batch_on_any_number_of_ranks(
    systems, model, batch_size
):
    """Against the definition: squares averaged over what has the label, each frame weighted with its atoms."""
    sums = {"rmse_e": [0.0, 0.0], "rmse_f": [0.0, 0.0], "rmse_v": [0.0, 0.0]}
    for system in systems:
        for k in range(system.nframes):
            batch = loader([system], 1).build(types.SimpleNamespace(parts=((0, np.array([k])),)))
            prediction = model(to_device(batch, 1, CPU).structures, force=True, virial=True)
            for name, label, natoms in (
                ("e", "energy", system.natoms),
                ("f", "force", 1),
                ("v", "virial", system.natoms),
            ):
                wanted = getattr(batch.frames, label)
                if wanted is not None:
                    error = (prediction[label].detach().numpy() - wanted) / natoms
                    sums[f"rmse_{name}"][0] += system.natoms * np.square(error).mean()
                    sums[f"rmse_{name}"][1] += system.natoms
    for world in (1, 2, 3, 20):
        ranks = [loader(systems, batch_size, rank=r, world_size=world) for r in range(world)]
        for found in on_ranks(world, model, lambda rank, ranks=ranks: ranks[rank].deal_all()):
            for name, (total, weight) in sums.items():
                assert float(found[name]) == pytest.approx((total / weight) ** 0.5, rel=1e-12), (
                    world,
                    name,
                )


def test_random_batches_give_the_errors_of_one_process_on_any_number_of_ranks(systems, model):
    (alone,) = on_ranks(1, model, lambda rank: loader(systems).deal(7))
    for world in (2, 3, 8):
        ranks = [
            lambda r=r, world=world: loader(systems, rank=r, world_size=world).deal(7)
            for r in range(world)
        ]
        for found in on_ranks(world, model, lambda rank, ranks=ranks: ranks[rank]()):
            assert found.keys() == alone.keys()
            for name, value in found.items():
                assert float(value) == pytest.approx(float(alone[name]), rel=1e-12), (world, name)


def test_a_metric_weighs_the_atoms_that_it_compares(systems):
    a, b = systems
    batch = to_device(loader([a], 9).next(), 1, CPU)
    weights = {"rmse_e": 6 * 8.0, "rmse_f": 3 * 8.0, "rmse_v": 3 * 8.0, "rmse": 9 * 8.0}
    assert metric_weights(LOSS, batch) == weights
    mae = build_loss({"loss_func": "mae"}, ["Cu"])
    assert metric_weights(mae, to_device(loader([b], 3).next(), 1, CPU)) == {
        "mae_e": 15.0,
        "mae_f": 15.0,
        "rmse": 15.0,
    }


def test_a_mean_is_nan_where_nothing_counts_and_where_an_error_is_no_number():
    nan, one = torch.tensor(torch.nan), torch.tensor(1.0)
    means = mean_metrics([({"rmse_f": nan, "mae_e": one}, {"rmse_f": 0.0, "mae_e": 2.0})])
    assert means["rmse_f"].isnan()
    assert means["mae_e"] == 1.0
    assert mean_metrics([({"mae_e": nan}, {"mae_e": 1.0}), ({"mae_e": one}, {"mae_e": 1.0})])[
        "mae_e"
    ].isnan()


def test_epochs_count_the_batches_of_all_ranks(systems):
    def steps(epochs, world):
        training = types.SimpleNamespace(numb_steps=None, numb_epoch=epochs)
        return number_of_steps(training, loader(systems[:1], 1, world_size=world))

    # 9 frames: rounding up happens once, not in every epoch.
    assert [steps(1, world) for world in (1, 2, 4)] == [9, 5, 3]
    assert [steps(10, world) for world in (1, 2, 4)] == [90, 45, 23]
    assert steps(0.5, 1) == 5
