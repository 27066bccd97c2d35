"""What dynamics and training ask of every descriptor alike: conserved energy, smooth cut-offs, finite gradients."""

import numpy as np
import pytest
import torch
from model_batches import batch_of, make_batch

from deepmd_muon.model import build_model

REPFLOW = {
    "n_dim": 6,
    "e_dim": 4,
    "a_dim": 4,
    "nlayers": 2,
    "axis_neuron": 2,
    "e_sel": 20,
    "a_sel": 20,
    "e_rcut": 4.0,
    "e_rcut_smth": 2.0,
    "a_rcut": 3.0,
    "a_rcut_smth": 1.5,
    "smooth_edge_update": True,
    "update_residual": 1.0,
}
RADIAL = {"rcut": 4.0, "rcut_smth": 2.0, "neuron": [4, 8], "axis_neuron": 2}
ATTENTION = {**RADIAL, "sel": 20, "attn": 6, "smooth_type_embedding": True}
DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", "sel": [20, 20], **RADIAL},
    "dpa1": {"type": "se_atten", **ATTENTION},
    "dpa1_temperature": {"type": "se_atten", **ATTENTION, "temperature": 1.0, "type_one_side": True},
    "dpa1_v2": {"type": "se_atten_v2", **RADIAL, "sel": 20, "attn_layer": 0, "set_davg_zero": True},
    "dpa3": {"type": "dpa3", "repflow": REPFLOW},
    "dpa3_dynamic": {"type": "dpa3", "repflow": {**REPFLOW, "use_dynamic_sel": True, "e_sel": 200, "a_sel": 200}},
}


@pytest.fixture(params=DESCRIPTORS)
def model(request):
    fitting = {"type": "ener", "neuron": [8, 8], "seed": 2}
    descriptor = {**DESCRIPTORS[request.param], "seed": 1}
    made = build_model({"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": fitting})
    made.set_statistics(torch.zeros(2, 4), torch.full((2, 4), 0.1))
    return made


def batch_for(model, coord, atype):
    """Return a batch of atoms without a cell."""
    data = {"coord": torch.as_tensor(coord), "atype": torch.as_tensor(atype), "box": None}
    if model.by_type:
        return make_batch(data["coord"], data["atype"], None, model.rcut, model.sel)
    return batch_of(model, data)


def cluster(natoms=7):
    """Atoms at least 1.2 Å apart within 4 Å."""
    rng, chosen = np.random.default_rng(4), []
    while len(chosen) < natoms:
        x = 4.0 * rng.random(3)
        if all(np.linalg.norm(x - y) > 1.2 for y in chosen):
            chosen.append(x)
    return np.array([chosen]), np.array([[0, 1, 1, 0, 1, 1, 0][:natoms]])


def evaluate(model, coord, atype):
    """Return energy and forces as arrays."""
    return {key: value.detach().numpy() for key, value in model(batch_for(model, coord, atype), virial=False).items()}


def test_dynamics_conserve_the_energy(model):
    """Velocity Verlet: the error of the total energy falls with the square of the time step."""
    start, atype = cluster()
    kick = 0.1 * np.random.default_rng(5).normal(size=start.shape)

    def spread(dt, steps):
        x, v, totals, potentials = start.copy(), kick.copy(), [], []
        out = evaluate(model, x, atype)
        for _ in range(steps):
            v = v + 0.5 * dt * out["force"]
            x = x + dt * v
            out = evaluate(model, x, atype)
            v = v + 0.5 * dt * out["force"]
            potentials.append(out["energy"].item())
            totals.append(potentials[-1] + 0.5 * (v**2).sum())
        return np.ptp(totals), np.ptp(potentials)

    coarse, exchanged = spread(0.14, 10)
    fine, _ = spread(0.07, 20)
    assert coarse < 0.02 * exchanged
    assert fine < 0.4 * coarse


def test_forces_are_finite_differences(model):
    coord, atype = cluster()
    force = evaluate(model, coord, atype)["force"][0]
    for atom, axis in ((0, 0), (3, 2), (5, 1)):
        energies = []
        for factor in (-2, -1, 1, 2):
            moved = coord.copy()
            moved[0, atom, axis] += factor * 1e-4
            energies.append(evaluate(model, moved, atype)["energy"].item())
        slope = (energies[0] - 8 * energies[1] + 8 * energies[2] - energies[3]) / 12e-4
        assert force[atom, axis] == pytest.approx(-slope, abs=1e-9)
    assert np.abs(force).max() > 1e-3


def test_energy_and_forces_are_smooth_through_every_cut_off(model):
    """An atom leaves: no jump beyond what a smooth function does on the way."""
    atype = np.array([[0, 1, 1]])

    def at(distance):
        coord = np.array([[[0.0, 0, 0], [0.9, 0.3, 0.1], [0, 0, distance]]])
        out = evaluate(model, coord, atype)
        return np.concatenate([out["energy"], out["force"].ravel()])

    for rcut in {model.rcut, *(radius for radius, _ in model.neighbors.inner)}:
        step = 1e-5
        before, below, above, after = (at(rcut + shift * step) for shift in (-3, -1, 1, 3))
        jump = np.abs(above - below - 0.5 * (below - before) - 0.5 * (after - above)).max()
        assert jump < 1e-8, rcut


def test_gradients_of_a_force_loss_are_finite(model):
    """Isolated atoms, padded atoms and slots, and two atoms on a line with a third: no root or division at zero."""
    line = [[0.0, 0, 0], [0, 0, 1.3], [0, 0, 2.6], [40.0, 0, 0], [0, 0, 0]]
    coord, atype = np.array([line, line[::-1]]), np.array([[0, 1, 1, 0, -1], [-1, 0, 1, 1, 0]])
    out = model(batch_for(model, coord, atype))
    loss = out["energy"].sum() + out["force"].square().sum() + (out["virial"].square().sum() if "virial" in out else 0)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > 5
    assert all(g.isfinite().all() for g in gradients)
    alone = model(batch_for(model, np.zeros((1, 1, 3)), np.array([[1]])))
    assert torch.equal(alone["force"].detach(), torch.zeros(1, 1, 3, dtype=torch.float64))
