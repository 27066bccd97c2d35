"""Batches for the model tests: fixtures, and a neighbour search by brute force that owes nothing to the package."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
from pathlib import Path

import numpy as np
import torch
from write_systems import write_npy

from deepmd_muon.model import Structures, build_model
from deepmd_muon.model.deepmd_kit import from_deepmd_kit

HERE = Path(__file__).parent


@functools.cache
def read_fixture(path: Path = HERE / "se_e2_a.pt.gz") -> dict:
    """Return what a file holds; nobody changes it."""
    # `weights_only` reads three times as long, and the files are our own.
    return torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=False)


def write_system(folder: Path, data: dict) -> dict:
    """Write structures of a fixture as a system with random labels, and return the labels."""
    random = np.random.default_rng(6)
    nframes, natoms = data["atype"].shape
    labels = {
        "energy": random.normal(size=nframes),
        "force": random.normal(size=(nframes, natoms * 3)),
        "virial": random.normal(size=(nframes, 9)),
    }
    arrays = {key: data[key].numpy().reshape(nframes, -1) for key in ("coord", "box")}
    write_npy(folder, data["atype"][0].tolist(), [arrays | labels], "OH")
    return labels


def neighbors_of_frame(coord, box, atype, rcut, sel):
    """Per atom and type: the (index, translation) of neighbours, nearest first.

    As deepmd-kit does, the nearest sum(sel) of all types are taken first, then the nearest sel of each type.
    """
    reach = 0
    if box is not None:
        heights = 1.0 / np.linalg.norm(np.linalg.inv(box), axis=0)
        reach = int(np.ceil(rcut / heights.min())) + 1
    shifts = np.array(list(np.ndindex(*[2 * reach + 1] * 3))) - reach
    vectors = shifts @ box if box is not None else np.zeros((1, 3))
    out = []
    for i in range(len(coord)):
        images = coord[None] + vectors[:, None] - coord[i]
        distance = np.linalg.norm(images, axis=-1)
        distance[(shifts == 0).all(1), i] = np.inf
        s, j = np.nonzero(distance < rcut)
        nearest = np.argsort(distance[s, j], kind="stable")[: sum(sel)]
        by_type = [[] for _ in sel]
        for k in nearest:
            found = by_type[atype[j[k]]]
            if len(found) < sel[atype[j[k]]]:
                found.append((j[k], shifts[s[k]]))
        out.append(by_type)
    return out


def make_batch(  # noqa: PLR0913 - the arrays of a batch
    coord, atype, box, rcut, sel, *, widths=None, ntypes=None, inner=(), device="cpu"
) -> Structures:
    """Batch of frames; columns as wide as the fullest atom needs, or `widths`.

    With `ntypes`, `sel` is one number for all types: the columns are not grouped. `inner` names shorter cut-offs and
    the most neighbours within each.
    """
    coord, atype = np.asarray(coord), np.asarray(atype)
    group = atype if ntypes is None else np.minimum(atype, 0)
    box = None if box is None else np.asarray(box)
    frames = [
        neighbors_of_frame(
            coord[f][atype[f] >= 0],
            None if box is None else box[f],
            group[f][atype[f] >= 0],
            rcut,
            sel,
        )
        for f in range(len(coord))
    ]
    if widths is None:
        widths = tuple(
            max(len(atom[t]) for frame in frames for atom in frame) for t in range(len(sel))
        )
    starts = np.concatenate([[0], np.cumsum(widths)])
    neighbor = np.full((*atype.shape, starts[-1]), -1, dtype=np.int32)
    shift = np.zeros((*neighbor.shape, 3), dtype=np.int16)
    for f, frame in enumerate(frames):
        real = np.flatnonzero(atype[f] >= 0)
        for i, atom in zip(real, frame, strict=True):
            for t, found in enumerate(atom):
                for column, (j, s) in enumerate(found, start=starts[t]):
                    neighbor[f, i, column] = real[j]
                    shift[f, i, column] = s
    return Structures.from_numpy(
        coord,
        atype,
        box,
        neighbor,
        None if box is None else shift,
        widths,
        ntypes or len(sel),
        device=device,
        inner=count_inner(coord, box, neighbor, shift, inner),
    )


def count_inner(coord, box, neighbor, shift, inner):
    """Count the neighbours within shorter cut-offs `(nframes, ninner, natoms)`."""
    other = np.take_along_axis(coord[:, None], np.maximum(neighbor, 0)[..., None], axis=2)
    moved = 0.0 if box is None else np.einsum("fnki,fij->fnkj", shift, box)
    distance = np.linalg.norm(other + moved - coord[:, :, None], axis=-1)
    distance[neighbor < 0] = np.inf
    counts = [np.minimum((distance < short).sum(-1), most) for short, most in inner]
    return np.stack(counts, axis=1) if counts else None


def batch_of(model, data, **more) -> Structures:
    """Return the batch that a model asks for, with the parameters that it reads."""
    request = model.neighbors
    batch = make_batch(
        data["coord"],
        data["atype"],
        data["box"],
        request.rcut,
        request.sel,
        ntypes=None if model.by_type else model.ntypes,
        inner=request.inner,
        **more,
    )
    numbers = {
        name: getattr(model.settings.fitting_net, f"numb_{name}") for name in ("fparam", "aparam")
    }
    given = {
        name: data[name]
        for name, number in numbers.items()
        if number and data.get(name) is not None
    }
    return dataclasses.replace(
        batch, **{name: x[..., : numbers[name]].contiguous() for name, x in given.items()}
    )


def oxygen_batch(sel=(40, 30)) -> Structures:
    """Return one open frame of four atoms, none of them of the second type."""
    coord = np.random.default_rng(0).random((1, 4, 3)) * 3
    return make_batch(coord, np.zeros((1, 4), int), None, 4.0, sel)


def pull_back(out):
    """Give the parameters the gradients of a sum over all that a model predicts."""
    loss = out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()
    loss.backward()


def section(**changes) -> dict:
    """Return a small normalised model section; `descriptor` and `fitting_net` take further settings."""
    another = changes.get("descriptor", {}).get("type", "se_e2_a") != "se_e2_a"
    descriptor = {
        "type": "se_e2_a",
        "sel": [40, 30],
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "neuron": [4, 8, 16],
        "axis_neuron": 4,
        "resnet_dt": False,
        "type_one_side": True,
        "exclude_types": [],
        "precision": "default",
        "activation_function": "tanh",
        "set_davg_zero": False,
        "env_protection": 0.0,
        "trainable": True,
        "seed": 3,
        **changes.get("descriptor", {}),
    }
    fitting = {
        "type": "ener",
        "neuron": [12, 12],
        "resnet_dt": True,
        "precision": "default",
        "activation_function": "tanh",
        "atom_ener": [],
        "seed": 4,
        "rcond": None,
        "numb_fparam": 0,
        "numb_aparam": 0,
        "trainable": True,
        **changes.get("fitting_net", {}),
    }
    return {
        "type_map": ["O", "H"],
        "descriptor": changes["descriptor"] if another else descriptor,
        "fitting_net": fitting,
    }


def stored_model(fixture, name):
    """Return the model of a case of a fixture, with its weights."""
    settings, state = from_deepmd_kit(fixture["cases"][name]["state"])
    model = build_model(settings)
    model.load_state_dict(state)
    return model
