"""The comparison of a file with its model: it lets every ordinary model pass, and no error of 1e-8."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ordinary_models import DESCRIPTORS, TABULATED, ordinary_model

from deepmd_muon.data import build_neighbors
from deepmd_muon.data.neighbors.lists import find_pairs
from deepmd_muon.deploy import compress as compressing
from deepmd_muon.deploy import freeze as freezing
from deepmd_muon.deploy.compress import compress, evaluate
from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.freeze import difference_of, freeze, program_of
from deepmd_muon.deploy.structures import (
    VOLUME_PER_ATOM,
    random_cluster,
    random_crystal,
    random_structures,
    structures_with_close_atoms,
)
from deepmd_muon.infer import Predictor
from deepmd_muon.model import registry

ORDINARY = {
    "rcut": st.floats(3.0, 10.0),
    "volume": st.floats(8.0, 40.0),
    "ntypes": st.integers(1, 4),
    "seed": st.integers(0, 2**16),
}
WRITERS = [(freeze, name) for name in DESCRIPTORS] + [(compress, name) for name in TABULATED]
# Models that take half a second each: a third of the profile's examples.
fewer_examples = settings(max_examples=settings.default.max_examples // 3)
each_file = pytest.mark.parametrize(
    ("write", "name"), WRITERS, ids=[f"{write.__name__} {name}" for write, name in WRITERS]
)
# Tests of programs that are not written take every descriptor by default.
each_writer = pytest.mark.parametrize(
    ("write", "name"),
    [
        pytest.param(
            write,
            name,
            marks=[] if name == "se_e2_a" else pytest.mark.slow,
            id=f"{write.__name__} {name}",
        )
        for write, name in WRITERS
    ],
)
# Half the atoms of the check's densest structures, a cut-off above their cell: "auto" leaves too few slots for them.
DILUTE = {"rcut": 7.5, "volume": 20.0, "ntypes": 2}


def test_every_descriptor_of_the_package_is_compared():
    ours = {
        kind
        for kind, section in registry.DESCRIPTORS.settings.items()
        if section.__module__.startswith("deepmd_muon.")
    }
    assert {section["type"] for section in DESCRIPTORS.values()} == ours
    models = {name: ordinary_model(name, 3.0, 40.0, 1)[0] for name in DESCRIPTORS}
    assert {name for name in models if _has_tables(models[name])} == set(TABULATED)


def _has_tables(model):
    table = registry.DESCRIPTORS.tabulated(model.settings.descriptor)
    return table is not None and not getattr(model.settings.descriptor, "attn_layer", 0)


@fewer_examples
@given(name=st.sampled_from(sorted(DESCRIPTORS)), **ORDINARY)
def test_the_program_of_an_ordinary_model_is_the_model(name, rcut, volume, ntypes, seed):
    model, closest = ordinary_model(name, rcut, volume, ntypes, seed)
    reference, program = Predictor(model, device="cpu"), program_of(model)
    structures = random_structures(model, seed)
    if name in TABULATED:
        structures += structures_with_close_atoms(model, closest, seed)
    pairs = [(reference.predict(*one), evaluate(program, one)) for one in structures]
    # A tenth of what `dp freeze` allows. Rounding reaches 2e-11 of small forces between energies of 35 eV an atom.
    assert difference_of(*zip(*pairs, strict=True)).relative < 1e-10
    assert np.abs(pairs[-1][0].force).max() > 0.0


@each_writer
def test_ordinary_models_are_written(write, name, tmp_path):
    model, closest = ordinary_model(name, **DILUTE)
    write(model, tmp_path / "model.pth", min_distance=closest)
    assert (tmp_path / "model.pth").is_file()


@pytest.mark.slow
@each_file
@given(**ORDINARY)
def test_every_ordinary_model_is_written(tmp_path_factory, write, name, rcut, volume, ntypes, seed):
    model, closest = ordinary_model(name, rcut, volume, ntypes, seed)
    output = tmp_path_factory.mktemp("ordinary") / "model.pth"
    write(model, output, min_distance=closest)
    assert output.is_file()


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_a_difference_of_1e_8_is_seen(name):
    model, _ = ordinary_model(name, **DILUTE)
    reference, wrong = Predictor(model, device="cpu"), program_of(_scaled(model, 1e-8))
    pairs = [(reference.predict(*one), evaluate(wrong, one)) for one in random_structures(model)]
    assert difference_of(*zip(*pairs, strict=True)).relative == pytest.approx(1e-8, rel=1e-3)


def _scaled(model, error):
    """Return a copy of a model whose fitting nets return (1 + error) times as much."""
    copied = copy.deepcopy(model)
    net = copied.atomic_model.fitting_net
    with torch.no_grad():
        for network in net.filter_layers.networks:
            last = list(network.tensors)[-1]
            last.matrix.mul_(1 + error)
            last.bias.mul_(1 + error)
        net.bias_atom_e.mul_(1 + error)
    return copied


@each_writer
def test_a_program_with_an_error_of_1e_8_is_refused(write, name, tmp_path, monkeypatch):
    for module in (freezing, compressing):
        monkeypatch.setattr(
            module, "program_of", lambda model, *distance: program_of(_scaled(model, 1e-8))
        )
    model, closest = ordinary_model(name, **DILUTE)
    with pytest.raises(FreezeError, match=r"relative 1\.0e-08, allowed 1e-09"):
        write(model, tmp_path / "model.pth", min_distance=closest)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [freeze, compress])
def test_a_file_with_an_error_of_1e_8_is_refused(write, tmp_path, monkeypatch):
    def save(program, model, *paths):
        program.bias *= 1 + 1e-8
        freezing_save(program, model, *paths)
        program.bias /= 1 + 1e-8

    freezing_save = freezing.save
    for module in (freezing, compressing):
        monkeypatch.setattr(module, "save", save)
    model, closest = ordinary_model("se_e2_a", **DILUTE)
    with pytest.raises(FreezeError, match=r"relative 1\.0e-08, allowed 1e-09"):
        write(model, tmp_path / "model.pth", min_distance=closest)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_a_list_that_ends_one_neighbour_early_is_seen(name):
    """Clusters have lists that leave neighbours out, so the comparison covers which ones."""
    model, _ = ordinary_model(name, rcut=5.0, volume=30.0, ntypes=2)
    reference, program = Predictor(model, device="cpu"), program_of(model)
    structures = random_structures(model)
    pairs = [(reference.predict(*one), evaluate(program, one)) for one in structures]
    assert difference_of(*zip(*pairs, strict=True)).relative < 1e-11
    request = program.descriptor.request
    program.descriptor.request = request._replace(sel=[most - 1 for most in request.sel])
    pairs = [(reference.predict(*one), evaluate(program, one)) for one in structures]
    assert difference_of(*zip(*pairs, strict=True)).relative > 1e-9


def test_not_a_number_is_no_agreement():
    model, _ = ordinary_model("se_e2_a", **DILUTE)
    right = Predictor(model, device="cpu").predict(*random_structures(model)[0])
    for key in ("energy", "atom_energy", "force", "virial"):
        wrong = copy.deepcopy(right)
        getattr(wrong, key).flat[0] = np.nan
        for pair in ((right, wrong), (wrong, right), (wrong, wrong)):
            assert np.isnan(difference_of(*zip(pair, (right, right), strict=True)).relative)


@given(name=st.sampled_from(sorted(DESCRIPTORS)), **ORDINARY)
def test_crystals_leave_no_neighbour_out(name, rcut, volume, ntypes, seed):
    model, _ = ordinary_model(name, rcut, volume, ntypes, seed)
    crystal = random_crystal(np.random.default_rng(seed), model)
    frame, (short, most) = _lists_of(model, crystal)
    assert frame.dropped == 0
    pairs = find_pairs(crystal.coord, crystal.box, crystal.atype, short)
    assert np.bincount(pairs.i, minlength=1).max() <= most


def _lists_of(model, structure):
    """Return the model's lists, and the last of its shorter cut-offs with the most neighbours counted there."""
    request = model.neighbors
    given = structure.coord, structure.box, structure.atype, request.rcut, request.sel
    frame = build_neighbors(*given, request.by_type, model.ntypes, request.inner)
    return frame, (request.inner or ((request.rcut, sum(request.sel)),))[-1]


@given(periodic=st.booleans(), **ORDINARY)
def test_atoms_of_clusters_have_one_image_near_each_other(periodic, rcut, volume, ntypes, seed):
    model, _ = ordinary_model("se_e2_a", rcut, volume, ntypes, seed)
    cluster = random_cluster(np.random.default_rng(seed), model, periodic=periodic, points=3)
    pairs = find_pairs(cluster.coord, cluster.box, cluster.atype, rcut)
    assert (cluster.box is not None) == periodic
    assert len(pairs.i) > 0
    assert len(set(zip(pairs.i, pairs.j, strict=True))) == len(pairs.i)
    assert pairs.distance.min() > 0.3 * VOLUME_PER_ATOM ** (1 / 3)


def test_crystals_are_dense_where_the_lists_are_long():
    """Atoms then have several images near each other."""
    model, _ = ordinary_model("se_e2_a", rcut=8.0, volume=8.0, ntypes=2)
    crystal = random_crystal(np.random.default_rng(0), model)
    density = len(crystal.coord) / abs(np.linalg.det(crystal.box))
    assert density * VOLUME_PER_ATOM == pytest.approx(1.0, abs=0.1)
    pairs = find_pairs(crystal.coord, crystal.box, crystal.atype, model.rcut)
    assert len(set(zip(pairs.i, pairs.j, strict=True))) < len(pairs.i) / 5
