"""Runs of models with frame and atomic parameters and excluded types: statistics, batches, restarts, commands."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_dp

from deepmd_muon.cli.main import main
from deepmd_muon.data import (
    DataLoader,
    NeighborCache,
    Parameters,
    open_systems,
    with_parameters,
)
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.predictor import load_model
from deepmd_muon.loss import build_loss
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import settings_of
from deepmd_muon.model.type_map import TypeMove
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.batches.resident import ResidentBatches
from deepmd_muon.train.batches.streamed import StreamedBatches
from deepmd_muon.train.step.step import differentiate

sys.path.append(str(Path(__file__).parents[1] / "model"))

from model_batches import HERE, read_fixture
from write_systems import write_npy

CPU = torch.device("cpu")
FIXTURE = read_fixture(HERE / "parameters.pt.gz")
DESCRIPTORS = ("se_e2_a", "dpa1", "dpa3")


@pytest.fixture
def systems(tmp_path):
    """The structures of the fixture as folders, with random forces."""
    random, paths = np.random.default_rng(8), []
    for name, data in FIXTURE["structures"].items():
        nframes = len(data["coord"])
        arrays = {
            key: data[key].numpy().reshape(nframes, -1)
            for key in ("coord", "energy", "fparam", "aparam")
        }
        arrays["aparam"] = data["aparam"][..., :1].numpy().reshape(nframes, -1)
        arrays["force"] = random.normal(size=arrays["coord"].shape)
        if data["box"] is not None:
            arrays["box"] = data["box"].numpy().reshape(nframes, 9)
        folder = tmp_path / "systems" / name
        paths.append(
            write_npy(
                folder, data["atype"][0].tolist(), [arrays], ("O", "H"), nopbc=data["box"] is None
            )
        )
    return paths


def params_of(name):
    """Return the model section of a case, as deepmd-kit has it."""
    return FIXTURE["cases"][name]["state"]["_extra_state"]["model_params"]


def section_of(name):
    """Return the model section of a case, as an input has it."""
    params = params_of(name)
    kept = {key: params[key] for key in ("type_map", "pair_exclude_types", "atom_exclude_types")}
    own = {key: value for key, value in params["fitting_net"].items() if value is not None}
    return kept | {"descriptor": params["descriptor"], "fitting_net": own}


def an_input(name, systems, **training):
    return {
        "model": section_of(name),
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"start_pref_v": 0.1, "limit_pref_v": 0.1},
        "optimizer": {"type": "HybridMuon"},
        "training": {
            "training_data": {"systems": systems, "batch_size": 2},
            "numb_steps": 6,
            "seed": 3,
            "disp_freq": 2,
            "save_freq": 3,
            **training,
        },
    }


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_statistics_and_energy_bias_are_deepmd_kits(kind, systems, train, load):
    content = an_input(f"{kind}-everything", systems, numb_steps=1, save_freq=1)
    content["learning_rate"] = {"start_lr": 1e-14, "stop_lr": 1e-14}
    content["training"]["stat_file"] = "stat.hdf5"
    assert train(content, skip_neighbor_stat=True) == 0
    found, expected = load()["model"], FIXTURE["cases"][f"{kind}-everything"]["state"]
    names = [
        key
        for key in expected
        if key.endswith(("_avg", "_inv_std", "out_bias", ".mean", ".stddev"))
    ]
    assert len(names) == 7
    for key in names:
        torch.testing.assert_close(
            found[key], expected[key], rtol=1e-9, atol=1e-11, msg=lambda text, k=key: f"{k} {text}"
        )
    excluded = found["model.Default.atomic_model.out_bias"][0, 1]
    assert excluded.abs() < 1e-12
    assert (
        train(
            content | {"training": content["training"] | {"save_ckpt": "again"}},
            skip_neighbor_stat=True,
        )
        == 0
    )
    for key in names:  # from the file
        assert torch.equal(load("again-1.pt")["model"][key], found[key])


@pytest.mark.parametrize("batch_size", [pytest.param(2, marks=pytest.mark.slow), "mixed:3"])
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_resident_and_streamed_batches_have_the_outputs_of_plain_ones(kind, batch_size, systems):
    model = build_model(settings_of(params_of(f"{kind}-everything")), seed=1)
    opened = with_parameters(open_systems(systems, model.type_map), Parameters.of(model.settings))

    def loader():
        request = model.neighbors
        cache = NeighborCache(
            request.rcut, request.sel, request.by_type, ntypes=2, inner=request.inner
        )
        return DataLoader(opened, batch_size, seed=5, cache=cache)

    plain, streamed = loader(), StreamedBatches(loader(), 2, CPU)
    resident = ResidentBatches(loader(), CPU)
    for _ in range(5):
        batch = to_device(plain.next(), 2, CPU)
        expected = model(batch.structures)
        for source in (streamed, resident):
            other = source.next().read()
            found = other.compared(model(other.structures))
            # The atoms of a frame in memory of the device are sorted by type.
            energy = expected["energy"]
            torch.testing.assert_close(found["energy"], energy, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["virial"], expected["virial"], rtol=1e-10, atol=1e-10)
            squares = [values["force"].square().sum((1, 2)) for values in (found, expected)]
            torch.testing.assert_close(*squares, rtol=1e-10, atol=1e-12)
    streamed.close()


def test_the_loss_counts_atoms_of_types_with_energy(systems):
    """deepmd-kit divides energies by their number, and forces of the others do not count."""
    model = build_model(settings_of(params_of("se_e2_a-everything")), seed=1)
    opened = with_parameters(open_systems(systems[1:2], ("O", "H")), Parameters.of(model.settings))
    loader = DataLoader(opened, 1, seed=1, cache=NeighborCache.of(model.neighbors, 2))
    batch = to_device(loader.next(), 2, CPU)
    mask = batch.compared_atoms(model.counted).mask
    assert torch.equal(mask, batch.structures.atype == 0)
    _, metrics = differentiate(
        model, build_loss({"start_pref_e": 1.0, "start_pref_f": 1.0}, model.type_map), batch, 1.0
    )
    found = model(batch.structures)
    error = (found["force"] - batch.labels["force"])[mask]
    assert float(metrics["rmse_f"]) == pytest.approx(float(error.square().mean().sqrt()), rel=1e-12)
    energy = (found["energy"] - batch.labels["energy"]).abs().item() / int(mask.sum())
    assert float(metrics["rmse_e"]) == pytest.approx(energy, rel=1e-12)
    assert batch.compared_atoms(None).mask is batch.mask


@pytest.mark.parametrize("kind", [pytest.param("se_e2_a", marks=pytest.mark.slow), "dpa3"])
def test_a_restart_is_exact_to_the_bit(kind, systems, train, check_restart):
    content = an_input(f"{kind}-everything", systems)
    content["training"]["training_data"]["batch_size"] = "mixed:2"
    check_restart(content, 3, skip_neighbor_stat=True)
    content["model"]["atom_exclude_types"] = []
    with pytest.raises(Exception, match="atom_exclude_types"):
        train(content, restart="model.ckpt-3.pt", skip_neighbor_stat=True)


def test_commands_use_the_parameters_of_the_data(systems, train, capsys):
    """dp test, model-devi, change-bias and freeze, on a checkpoint and on its frozen file."""
    content = an_input("se_e2_a-everything", systems, numb_steps=3)
    assert train(content, skip_neighbor_stat=True) == 0
    assert main(["--pt", "freeze", "-o", "frozen.pth", "-v", "ERROR"]) == 0
    predictor = Predictor("model.ckpt.pt", device="cpu")
    (system,) = with_parameters(open_systems(systems[0], predictor.type_map), predictor.parameters)
    expected = predictor.evaluate(system.frames([0, 1]))
    other = predictor.evaluate(
        dataclasses.replace(system.frames([0, 1]), fparam=system.frames([1, 0]).fparam)
    )
    assert np.abs(other.energy - expected.energy).min() > 1e-6
    for model in ("model.ckpt.pt", "frozen.pth"):
        assert run_dp(f"--pt test -m {model} -s {systems[0]} -d of-{model} -v ERROR") == 0
        table = np.loadtxt(f"of-{model}.e.out")
        np.testing.assert_allclose(table[:, 1], expected.energy, rtol=1e-9)
    assert run_dp(f"--pt model-devi -m model.ckpt.pt frozen.pth -s {systems[0]} -o devi.out") == 0
    assert np.abs(np.loadtxt("devi.out")[:, 1:]).max() < 1e-6
    every = str(Path(systems[0]).parent)
    assert run_dp(f"--pt change-bias model.ckpt.pt -s {every} -o moved.pt -v ERROR") == 0
    moved = Predictor("moved.pt", device="cpu").model.atomic_model.out_bias[0, :, 0]
    before = predictor.model.atomic_model.out_bias[0, :, 0]
    assert (moved - before)[0].abs() > 1e-3
    assert (moved - before)[1].abs() < 1e-12
    Path(systems[0], "set.000", "fparam.npy").unlink()
    assert main(["--pt", "test", "-m", "frozen.pth", "-s", systems[0]]) == 2
    assert "set.000/fparam.npy: missing" in capsys.readouterr().err
    assert main(["--pt", "check", "model.ckpt.pt", "-s", systems[1]]) == 2
    assert "numb_aparam" in capsys.readouterr().err


def test_ase_takes_parameters_from_atoms_and_arguments():
    ase = pytest.importorskip("ase")
    from deepmd_muon.infer import DeepPotCalculator

    model = build_model(settings_of(params_of("se_e2_a-everything")), seed=1)
    data = FIXTURE["structures"]["triclinic"]
    symbols = ["OH"[kind] for kind in data["atype"][0].tolist()]
    atoms = ase.Atoms(
        symbols, positions=data["coord"][0].numpy(), cell=data["box"][0].numpy(), pbc=True
    )
    predictor = Predictor(model, device="cpu")
    atoms.calc = DeepPotCalculator(predictor, fparam=[310.0, 2.5], aparam=[-1.5])

    def expected(fparam, aparam):
        cell, types = np.array(atoms.cell), data["atype"][0].numpy()
        return predictor.predict(
            atoms.positions, cell, types, np.array(fparam), np.array(aparam)
        ).energy[0]

    assert atoms.get_potential_energy() == expected([310.0, 2.5], [-1.5])
    atoms.info["fparam"] = [250.0, 4.0]  # ASE itself would return the energy of before
    assert atoms.get_potential_energy() == expected([250.0, 4.0], [-1.5])
    own = np.linspace(-3.0, -1.0, len(atoms))[:, None]
    atoms.arrays["aparam"] = own
    assert atoms.get_potential_energy() == expected([250.0, 4.0], own)
    atoms.info["aparam"] = own[::-1]
    assert atoms.get_potential_energy() == expected([250.0, 4.0], own[::-1])
    hot, cold = [310.0, 2.5], [250.0, 4.0]
    assert len({expected(cold, own[::-1]), expected(cold, own), expected(hot, [-1.5])}) == 3


def test_exclusions_follow_their_elements_to_another_type_map():
    """Known types take theirs with them; of new ones, the input says."""

    def settings(type_map, pairs=(), atoms=()):
        changes = {"type_map": type_map, "pair_exclude_types": pairs, "atom_exclude_types": atoms}
        return dataclasses.replace(settings_of(params_of("dpa3-everything")), **changes)

    saved = settings(("O", "H", "C"), ((0, 1), (1, 2)), (1,))
    present = settings(("H", "N", "O"), ((1, 1), (2, 0)), (0, 1))
    moved = TypeMove(saved.type_map, present.type_map).settings(saved, present)
    # In the order of the input: they are the same.
    assert moved.pair_exclude_types == ((1, 1), (2, 0))
    assert moved.atom_exclude_types == (0, 1)
    bare = settings(("H", "O"))
    moved = TypeMove(saved.type_map, bare.type_map).settings(saved, bare)
    assert (moved.pair_exclude_types, moved.atom_exclude_types) == (((1, 0),), (0,))


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("dpa1", "finetune"),
        ("dpa3", "restart"),
        pytest.param("dpa1", "init_model", marks=pytest.mark.slow),
        pytest.param("dpa1", "restart", marks=pytest.mark.slow),
        pytest.param("dpa3", "finetune", marks=pytest.mark.slow),
        pytest.param("dpa3", "init_model", marks=pytest.mark.slow),
    ],
)
def test_runs_on_another_type_map_exclude_the_same_elements(systems, train, kind, option):
    """O and H get other numbers and C is new; pairs of the descriptor and of the model, and types without energy."""
    content = an_input(f"{kind}-own", systems, numb_steps=1, save_freq=1)
    content["model"]["atom_exclude_types"] = [1]
    assert train(content, skip_neighbor_stat=True) == 0
    content["model"] |= {
        "type_map": ["H", "C", "O"],
        "atom_exclude_types": [0],
        "pair_exclude_types": [[0, 0], [1, 2]],
    }
    content["model"]["descriptor"] = {
        **content["model"]["descriptor"],
        "exclude_types": [[2, 0], [1, 1]],
    }
    content["training"] |= {
        "save_ckpt": "moved",
        "numb_steps": 2 * (option == "restart"),
    }  # the second moves nothing
    content["learning_rate"] = {"start_lr": 1e-14, "stop_lr": 1e-14}
    assert train(content, **{option: "model.ckpt.pt"}, skip_neighbor_stat=True) == 0
    before, after = Predictor("model.ckpt.pt", device="cpu"), Predictor("moved.pt", device="cpu")
    for path in systems:
        (then,), (now,) = (open_systems([path], each.type_map) for each in (before, after))
        force = before.evaluate(then.frames(np.arange(1))).force
        np.testing.assert_allclose(
            after.evaluate(now.frames(np.arange(1))).force, force, rtol=0, atol=1e-10
        )
    settings = load_model("moved.pt").settings
    assert settings.type_map == ("H", "C", "O")
    assert settings.descriptor.exclude_types == ((2, 0), (1, 1))
    assert (settings.pair_exclude_types, settings.atom_exclude_types) == (((0, 0), (1, 2)), (0,))
