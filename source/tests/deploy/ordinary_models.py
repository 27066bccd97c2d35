"""Models as users have them: `sel` and statistics from a rattled crystal, for any cut-off, density and number of types."""

import dataclasses

import numpy as np
from small_models import section_of

from deepmd_muon.data import Frames, build_neighbors, stack_neighbors
from deepmd_muon.data.neighbors.lists import frame_statistics
from deepmd_muon.model import Structures, build_model, environment_statistics
from deepmd_muon.model.settings import model_settings

NETS = {"rcut_smth": 0.5, "neuron": [4, 8], "axis_neuron": 4}
ATTENTION = {"type": "se_atten", "attn": 8, **NETS}
SIZES = {"n_dim": 6, "e_dim": 4, "a_dim": 4, "nlayers": 2, "axis_neuron": 2}
REPFLOW = {**SIZES, "e_sel": "auto", "a_sel": "auto"}
# By name; cut-offs follow, and `sel` is "auto".
DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", **NETS},
    "DPA-1": {**ATTENTION, "attn_layer": 1},
    "DPA-1 without attention": {**ATTENTION, "attn_layer": 0},
    "DPA-1, stripped types": {**ATTENTION, "attn_layer": 0, "tebd_input_mode": "strip"},
    "DPA-1 v2": {**ATTENTION, "type": "se_atten_v2", "attn_layer": 0},
    "DPA-3": {"type": "dpa3", "repflow": REPFLOW},
}
TABULATED = [
    name for name, section in DESCRIPTORS.items() if section.get("attn_layer", 0) == 0
    and section["type"] != "dpa3"
]  # fmt: skip


def with_cutoff(section, rcut):
    """Return the section of a descriptor with its cut-off radii [Å]."""
    if "repflow" not in section:
        return {**section, "rcut": rcut}
    radii = {
        "e_rcut": rcut,
        "e_rcut_smth": 0.6 * rcut,
        "a_rcut": 0.6 * rcut,
        "a_rcut_smth": 0.4 * rcut,
    }
    return {**section, "repflow": {**section["repflow"], **radii}}


def rattled_crystal(volume, ntypes, seed):
    """64 atoms, `volume` Å³ for each, near the points of a cubic lattice: coord, box, atype."""
    points = 4
    edge = points * volume ** (1 / 3)
    grid = np.stack(np.meshgrid(*[np.arange(points)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    shaken = np.random.default_rng(seed).normal(scale=0.1, size=grid.shape)
    return grid * edge / points + shaken, edge * np.eye(3), (grid.sum(1) % ntypes).astype(np.int32)


def ordinary_model(name, rcut, volume, ntypes, seed=1):
    """Build a model with random weights for a rattled crystal, and return it with the shortest distance there [Å]."""
    coord, box, atype = rattled_crystal(volume, ntypes, seed)
    section = with_cutoff(DESCRIPTORS[name], rcut) | {"seed": seed}
    settings = model_settings(section_of(section, {"seed": seed}, ("O", "H", "Na", "Cl")[:ntypes]))
    counted = settings.descriptor.with_counts(
        lambda radius: frame_statistics(coord, box, atype, radius, ntypes)
    )
    model = build_model(dataclasses.replace(settings, descriptor=counted))
    request = model.neighbors
    frame = build_neighbors(
        coord, box, atype, request.rcut, request.sel, request.by_type, ntypes, request.inner
    )
    batch = Structures.of(
        Frames(atype[None], coord[None], box[None]), stack_neighbors([frame]), ntypes
    )
    model.set_statistics(*environment_statistics(model, [batch]))
    model.set_energy_bias(np.random.default_rng(seed).normal(scale=100.0, size=ntypes))
    return model, frame.statistics.min_distance
