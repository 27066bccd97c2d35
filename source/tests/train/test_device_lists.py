"""With each setting that may change neighbour lists, the device's lists are those of the host, and so are predictions.

On a CPU the lists come from torch's operations, which define the results of the kernels; the kernels themselves run on a
GPU, and in Triton's interpreter.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from kernel_backends import passed_in_interpreter, without_kernels
from model_changes import DESCRIPTORS, is_single, model_with, settings_of
from write_systems import make_arrays, write_npy

from deepmd_muon.data import DataLoader, NeighborCache, open_systems
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.batches.resident import ResidentBatches

NAMES = ("O", "H")
NTYPES = len(NAMES)


@pytest.fixture
def systems(tmp_path):
    """Atoms with and without a cell, alone, and mixtures with virtual atoms.

    Cells are smaller than twice the cut-off, but no atom sees two images of itself: these are equally far, and a list
    that `sel` cuts may keep either.
    """
    random = np.random.default_rng(3)
    paths = []
    for name, natoms, scale in (
        ("cell", 8, 5.5),
        ("cluster", 7, 5.0),
        ("small cell", 4, 4.4),
        ("alone", 1, 9.0),
    ):
        arrays = make_arrays(3, natoms, seed=natoms, scale=scale)
        types = np.sort(random.integers(0, NTYPES, natoms))  # the device sorts atoms by type
        nopbc = name == "cluster"
        paths.append(write_npy(tmp_path / name, types, [arrays], NAMES, nopbc=nopbc))
    arrays = make_arrays(4, 6, seed=9, scale=5.0)
    kinds = np.sort(random.integers(0, NTYPES, (4, 6)))
    kinds[1::2, 4:] = -1  # virtual atoms
    arrays["real_atom_types"] = kinds
    paths.append(write_npy(tmp_path / "mixture", [0] * 6, [arrays], NAMES))
    return open_systems(paths, NAMES)


def cases(kind):
    """Return the settings of models that ask for other lists, or read them otherwise, by what differs."""
    every = settings_of(kind)
    plain = model_with(every["nothing"]).neighbors
    return {
        name: settings
        for name, settings in every.items()
        if name == "nothing" or "exclude" in name or model_with(settings).neighbors != plain
    }


def edges(structures):
    """Return the neighbours of each atom, as sets of atoms with their translations, for each section of the list."""
    width = structures.coord.shape[1]
    ends = np.cumsum([0, *structures.sections])
    neighbor = structures.neighbor.cpu().numpy()
    shift = np.zeros((*neighbor.shape, 3), dtype=int)
    if structures.shift is not None:
        shift = structures.shift.cpu().numpy()
    found = {}
    for row, place in enumerate(structures.order.cpu().tolist()):
        frame, atom = divmod(place, width)
        if frame >= structures.atype.shape[0] or int(structures.atype[frame, atom]) < 0:
            continue
        found[frame, atom] = [
            {
                (int(j) % width, *map(int, moved))
                for j, moved in zip(neighbor[row, a:b], shift[row, a:b], strict=True)
                if j >= 0
            }
            for a, b in itertools.pairwise(ends)
        ]
    return found


def compare(name, settings, systems, *, batch_size, device):
    """Compare lists and predictions of some batches; return the number of neighbours."""
    model = model_with(settings).to(device)

    def loader():
        return DataLoader(
            systems, batch_size, seed=5, cache=NeighborCache.of(model.neighbors, NTYPES)
        )

    plain = loader()
    batches = ResidentBatches(loader(), device)
    neighbors = 0
    limit = 1e-4 if is_single(settings) else 1e-10
    try:
        for _ in range(4):
            expected_batch = to_device(plain.next(), NTYPES, device)
            batch = batches.next().read()
            listed = edges(expected_batch.structures)
            assert edges(batch.structures) == listed, name
            neighbors += sum(len(part) for parts in listed.values() for part in parts)
            with without_kernels():
                expected = expected_batch.compared(model(expected_batch.structures))
                found = batch.compared(model(batch.structures))
            for key in ("energy", "force"):
                size = expected[key].shape[1:2]  # batches on the device may be wider
                same = found[key][:, : size[0]] if size else found[key]
                error = float((same - expected[key]).detach().abs().max())
                assert error <= limit * (1.0 + float(expected[key].detach().abs().max())), (
                    name,
                    key,
                )
    finally:
        batches.close()
    return neighbors


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_lists_of_the_device_are_those_of_the_host(device, kind, systems):
    counts = {}
    for name, settings in cases(kind).items():
        counts[name] = compare(name, settings, systems, batch_size="mixed:3", device=device)
    assert len(set(counts.values())) > 1  # some settings do change lists
    assert min(counts.values()) > 20
    compare("nothing", settings_of(kind)["nothing"], systems, batch_size=2, device=device)


@pytest.mark.slow
def test_lists_of_the_kernels_in_the_interpreter():
    assert passed_in_interpreter(Path(__file__)) == 2 * len(DESCRIPTORS)
