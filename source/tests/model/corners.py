"""Models on the batches that real data sets hold at their edges, by torch's operations and by kernels."""

import dataclasses

import numpy as np
import torch
from model_batches import make_batch

from deepmd_muon.model import build_model
from deepmd_muon.model.descriptor.pieces import finest, uniform
from deepmd_muon.model.descriptor.se_e2_a import interpolation
from deepmd_muon.model.nn import triton_support

#: Sixteen pieces between a hundredth and an eighth of the interval.
UNEVEN = finest([uniform(8), (0, 8, 16, 32, 64, 96, 128, 512, 768, 960, 992, 1016)])

TYPES = ["Ni", "Pd", "Al"]
_RADIAL = {"rcut": 4.0, "rcut_smth": 1.5, "neuron": [4, 8], "axis_neuron": 2}
_REPFLOW = {
    "n_dim": 8,
    "e_dim": 6,
    "a_dim": 4,
    "nlayers": 2,
    "axis_neuron": 2,
    "smooth_edge_update": True,
}
_REPFLOW |= {
    "e_rcut": 4.0,
    "e_rcut_smth": 2.0,
    "e_sel": 5,
    "a_rcut": 3.0,
    "a_rcut_smth": 1.5,
    "a_sel": 5,
}
_DYNAMIC = {"use_dynamic_sel": True, "e_sel": 40, "a_sel": 40}
_LINEAR = {"a_compress_rate": 1, "a_compress_e_rate": 4, "n_multi_edge_message": 2}
DESCRIPTORS = {
    "se_e2_a": {"type": "se_e2_a", "sel": [3, 3, 3], "type_one_side": True, **_RADIAL},
    "se_e2_a_pairs": {"type": "se_e2_a", "sel": [3, 3, 3], "type_one_side": False, **_RADIAL},
    "dpa1": {"type": "se_atten", **_RADIAL, "sel": 5, "attn": 6},
    "dpa1_smooth": {
        "type": "se_atten",
        **_RADIAL,
        "sel": 5,
        "attn": 6,
        "smooth_type_embedding": True,
    },
    "dpa1_v2": {"type": "se_atten_v2", **_RADIAL, "sel": 5, "attn_layer": 0},
    "dpa3": {"type": "dpa3", "repflow": _REPFLOW},
    "dpa3_dynamic": {"type": "dpa3", "repflow": {**_REPFLOW, **_DYNAMIC}},
}
#: Options of layers, which see no other corners than those above.
LAYERS = {
    "dpa3_linear": {"type": "dpa3", "repflow": {**_REPFLOW, **_LINEAR}},
    "dpa3_sequential": {"type": "dpa3", "repflow": {**_REPFLOW, "sequential_update": True}},
}
_TETRAHEDRON = 1.6 * np.array([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / np.sqrt(2)
_DISTORTED = np.add(_TETRAHEDRON, [[0.1, 0, 0], [0, 0.2, 0], [0, 0, 0.3], [0, 0.1, 0]])
CORNERS = {
    "two of three types": (_DISTORTED, [0, 1, 1, 0]),
    "one type": (_DISTORTED, [2, 2, 2, 2]),
    "all slots full, all distances equal": (_TETRAHEDRON, [1, 1, 1, 1]),
    "one atom": (np.zeros((1, 3)), [1]),
    "no neighbours": (9.0 * np.eye(3), [0, 1, 0]),
    "padding": (_DISTORTED, [0, 1, -1, -1]),
    "excluded types and parameters": (_DISTORTED, [0, 1, 1, 2]),
}
_EXCLUDED = {"pair_exclude_types": [[0, 1], [2, 2]], "atom_exclude_types": [2]}


def corner_model(name, precision, device="cpu", corner=""):
    """Return a small model of three types; an interpolating one where the descriptor can."""
    special = corner.startswith("excluded")
    fitting = {"type": "ener", "neuron": [8, 8], "seed": 2, "precision": precision}
    fitting |= {"numb_fparam": 1, "numb_aparam": 2} if special else {}
    descriptor = {**DESCRIPTORS, **LAYERS}[name] | {"seed": 1, "precision": precision}
    section = {"type_map": TYPES, "descriptor": descriptor, "fitting_net": fitting}
    model = build_model(section | (_EXCLUDED if special else {}))
    # Means that differ a little between types, as those of similar elements do.
    mean = torch.tensor([[0.051, 0, 0, 0], [0.05, 0, 0, 0], [0.0505, 0, 0, 0]], dtype=torch.float64)
    model.set_statistics(mean, torch.full((3, 4), 0.15, dtype=torch.float64))
    if precision == "float64":  # the weights that the same model has in single precision
        model.load_state_dict(corner_model(name, "float32", corner=corner).state_dict())
    model.pieces = uniform(16)
    return model.to(device)


def corner_batch(model, corner, device="cpu"):
    """Return a frame of a corner and the same atoms displaced, padded if the descriptor pads."""
    coord, atype = CORNERS[corner]
    coord, atype = np.stack([coord, 1.01 * coord]), np.stack([atype, atype])
    sections = {} if model.by_type else {"ntypes": 3, "inner": model.neighbors.inner}
    batch = make_batch(
        coord, atype, None, model.rcut, model.neighbors.sel, device=device, **sections
    )
    if not model.settings.fitting_net.numb_fparam:
        return batch
    fparam, aparam = (
        np.array([[0.3], [-0.4]]),
        np.linspace(-1.0, 1.0, 2 * coord.shape[0] * coord.shape[1]),
    )
    given = {"fparam": fparam, "aparam": aparam.reshape(*atype.shape, 2)}
    return dataclasses.replace(
        batch, **{name: torch.from_numpy(x).to(device) for name, x in given.items()}
    )


def corner_results(name, corner, precision, monkeypatch, *, fused, device="cpu"):
    """Return energy, force, virial, the same without autograd, and the gradient of a loss; float64 on the CPU."""
    monkeypatch.setattr(interpolation, "EDGES_PER_NODE", 0)
    monkeypatch.setattr(triton_support, "usable", lambda _: fused)
    if device == "cpu":
        monkeypatch.setattr(triton_support, "has_tensor_cores", lambda _: True)
    model = corner_model(name, precision, device, corner)
    batch = corner_batch(model, corner, device)
    with torch.no_grad():
        predicted = model(batch)
    out = model(batch)
    weights = torch.linspace(0.5, 1.5, out["force"].numel(), dtype=torch.float64).view(
        out["force"].shape
    )
    loss = (
        out["energy"].sum()
        + (out["force"] * weights.to(device)).square().sum()
        + out["virial"].square().sum()
    )
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    found = [
        *(part[name] for part in (out, predicted) for name in ("energy", "force", "virial")),
        gradient,
    ]
    return [x.detach().double().cpu() for x in found]


def assert_corner(name, corner, precision, monkeypatch, device="cpu"):
    """Compare kernels in `precision` with torch's operations in float64; what no kernel writes is NaN."""
    wanted = corner_results(name, corner, "float64", monkeypatch, fused=False)
    for make in ("new_empty", "empty_like"):
        owner = torch.Tensor if make == "new_empty" else torch
        original = getattr(owner, make)

        def poisoned(*args, _original=original, **options):
            made = _original(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(owner, make, poisoned)
    found = corner_results(name, corner, precision, monkeypatch, fused=True, device=device)
    limit = 1e-12 if precision == "float64" else 5e-6
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert float((one - other).norm()) <= limit * (float(other.norm()) + 1e-3)
