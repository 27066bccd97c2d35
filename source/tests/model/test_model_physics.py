"""What any energy model must obey: forces and virial are derivatives, and space has no preferred frame."""

import numpy as np
import pytest
import torch
from model_batches import make_batch, read_fixture, section

from deepmd_muon.model import build_model

STRUCTURES = read_fixture()["structures"]
SETTINGS = {
    "one_side": {},
    "pair_nets": {"descriptor": {"type_one_side": False, "resnet_dt": True}},
    # With a mean, energies of excluded pairs jump at the cutoff, as deepmd-kit's do: a neighbour there counts as
    # zero, but the empty slot it leaves behind as the standardised zero row.
    "excluded": {"descriptor": {"exclude_types": [[0, 1]], "activation_function": "gelu", "set_davg_zero": True}},
    "protected": {
        "descriptor": {"env_protection": 0.1, "set_davg_zero": True},
        "fitting_net": {"atom_ener": [-1.0, -2.0]},
    },
}


@pytest.fixture(params=SETTINGS, scope="module")
def model(request):
    made = build_model(section(**SETTINGS[request.param]))
    made.set_statistics(
        torch.tensor([[0.11, 0, 0, 0], [0.09, 0, 0, 0]]).double(),
        torch.tensor([[0.2, 0.12, 0.12, 0.12], [0.17, 0.1, 0.1, 0.1]]).double(),
    )
    made.set_energy_bias([-3.0, 1.0])
    return made


def frame(kind):
    data = STRUCTURES[kind]
    box = None if data["box"] is None else data["box"][:1].numpy()
    return data["coord"][:1].numpy(), data["atype"][:1].numpy(), box


def predict(model, coord, atype, box, **more):
    with torch.no_grad():
        out = model(make_batch(coord, atype, box, model.rcut, model.sel), **more)
    return {key: value.numpy() for key, value in out.items()}


def energy(model, coord, atype, box):
    return predict(model, coord, atype, box, force=False)["energy"].item()


@pytest.mark.parametrize("kind", STRUCTURES)
def test_force_is_minus_the_slope_of_the_energy(model, kind):
    coord, atype, box = frame(kind)
    force = predict(model, coord, atype, box)["force"][0]
    step = 1e-4
    for atom, axis in [(0, 0), (1, 1), (2, 2)]:
        energies = []
        for factor in (-2, -1, 1, 2):
            moved = coord.copy()
            moved[0, atom, axis] += factor * step
            energies.append(energy(model, moved, atype, box))
        slope = (energies[0] - 8 * energies[1] + 8 * energies[2] - energies[3]) / (12 * step)
        assert force[atom, axis] == pytest.approx(-slope, abs=1e-8)
    np.testing.assert_allclose(force.sum(0), 0, atol=1e-12)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_virial_is_minus_the_slope_against_strain(model, kind):
    coord, atype, box = frame(kind)
    virial = predict(model, coord, atype, box)["virial"].reshape(3, 3)
    step = 1e-4
    for a, b in [(0, 0), (1, 1), (0, 2), (2, 1)]:
        energies = []
        for factor in (-2, -1, 1, 2):
            strain = np.eye(3)
            strain[b, a] += factor * step  # rows are vectors: x_a grows by x_b
            energies.append(energy(model, coord @ strain, atype, None if box is None else box @ strain))
        slope = (energies[0] - 8 * energies[1] + 8 * energies[2] - energies[3]) / (12 * step)
        assert virial[a, b] == pytest.approx(-slope, abs=1e-7)
    np.testing.assert_allclose(virial, virial.T, atol=1e-11)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_rotation_turns_forces_and_virial(model, kind):
    coord, atype, box = frame(kind)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))  # improper ones included: energy is a scalar
    before = predict(model, coord, atype, box)
    after = predict(model, coord @ turn, atype, None if box is None else box @ turn)
    np.testing.assert_allclose(after["energy"], before["energy"], rtol=1e-13)
    np.testing.assert_allclose(after["force"], before["force"] @ turn, atol=1e-11)
    virial = before["virial"].reshape(3, 3)
    np.testing.assert_allclose(after["virial"].reshape(3, 3), turn.T @ virial @ turn, atol=1e-10)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_translation_changes_nothing(model, kind):
    coord, atype, box = frame(kind)
    before, after = predict(model, coord, atype, box), predict(model, coord + np.array([3.1, -20.7, 0.4]), atype, box)
    for key, value in before.items():
        np.testing.assert_allclose(after[key], value, rtol=1e-11, atol=1e-10)


def test_permutation_moves_results_with_their_atoms(model):
    coord, atype, box = frame("triclinic")
    order = np.random.default_rng(3).permutation(atype.shape[1])
    before, after = predict(model, coord, atype, box), predict(model, coord[:, order], atype[:, order], box)
    np.testing.assert_allclose(after["energy"], before["energy"], rtol=1e-13)
    np.testing.assert_allclose(after["atom_energy"], before["atom_energy"][:, order], rtol=1e-12)
    np.testing.assert_allclose(after["force"], before["force"][:, order], atol=1e-11)


def test_supercell_repeats_the_cell(model):
    coord, atype, box = frame("triclinic")
    doubled = np.concatenate([coord, coord + box[:, :1]], axis=1)
    big = box * np.array([[2.0], [1.0], [1.0]])
    one, two = predict(model, coord, atype, box), predict(model, doubled, np.tile(atype, 2), big)
    np.testing.assert_allclose(two["energy"], 2 * one["energy"], rtol=1e-13)
    np.testing.assert_allclose(two["virial"], 2 * one["virial"], atol=1e-10)


def test_energy_and_force_are_continuous_at_the_cutoff(model):
    atype = np.array([[0, 1, 1]])

    def pair(distance):
        coord = np.array([[[0.0, 0, 0], [distance, 0, 0], [0.3, 1.1, 0.2]]])
        return predict(model, coord, atype, None)

    inside, outside = pair(model.rcut - 1e-7), pair(model.rcut + 1e-7)
    np.testing.assert_allclose(inside["energy"], outside["energy"], atol=1e-8)  # the third atom still feels the move
    np.testing.assert_allclose(inside["force"], outside["force"], atol=1e-7)


def test_excluded_types_do_not_see_each_other():
    model = build_model(section(descriptor={"exclude_types": [[0, 1]]}))
    atype = np.array([[0, 1, 1]])
    coord = np.array([[[0.0, 0, 0], [1.2, 0, 0], [0.3, 1.1, 0.2]]])
    moved = coord + np.array([[[0.4, 0.1, -0.2], [0, 0, 0], [0, 0, 0]]])
    before, after = predict(model, coord, atype, None), predict(model, moved, atype, None)
    np.testing.assert_allclose(after["energy"], before["energy"], rtol=1e-14)
    assert (before["force"][0, 0] == 0).all()
    assert np.abs(before["force"][0, 1]).max() > 1e-6


def test_a_lone_atom_in_vacuum_has_its_set_energy():
    zero = section(descriptor={"set_davg_zero": True}, fitting_net={"atom_ener": [-1.0, None]})
    model = build_model(zero)
    model.set_energy_bias([-1.0, -2.0])
    out = predict(model, np.zeros((1, 1, 3)), np.array([[0]]), None)
    assert out["energy"].item() == pytest.approx(-1.0, abs=1e-14)
    assert predict(model, np.zeros((1, 1, 3)), np.array([[1]]), None)["energy"].item() != pytest.approx(-2.0, abs=1e-3)
