"""Neighbours found on a device are those that the data room finds."""

import itertools

import numpy as np
import pytest
import torch

from deepmd_muon.data import build_neighbors
from deepmd_muon.model.neighbors.atoms import FIRST_WIDTH, ROOM, Atoms, Candidates, Cells, Sections
from deepmd_muon.model.neighbors.candidates import lay_out, mark_stale, refer, renew
from deepmd_muon.model.neighbors.search import count_neighbors, find_neighbors

NTYPES = 3
CELLS = {
    "none": None,
    "cube": np.diag([6.0, 6.0, 6.0]),
    "flat": np.diag([9.0, 8.0, 2.1]),
    "skewed": np.array([[5.0, 0.0, 0.0], [4.0, 5.0, 0.0], [-2.0, 3.0, 4.0]]),
    "left-handed": np.array([[0.0, 5.0, 0.0], [6.0, 0.0, 0.0], [0.5, 0.0, 7.0]]),
    "tiny": np.diag([1.9, 2.0, 2.1]),
}


def structure(cell, natoms, seed):
    """Return positions outside of the cell too, and sorted types, without atoms at the same place."""
    rng = np.random.default_rng(seed)
    grid = np.array(list(itertools.product(range(3), repeat=3)))[:natoms] / 3.0
    box = CELLS[cell]
    fraction = (
        grid
        + rng.uniform(-0.08, 0.08, grid.shape)
        + rng.integers(-2, 3, grid.shape) * (box is not None)
    )
    return fraction @ (np.diag([6.0, 6.0, 6.0]) if box is None else box), np.sort(
        rng.integers(0, NTYPES, natoms)
    )


def on_device(structures, cell, rcut, device):
    """Return structures of several sizes side by side, and place and frame of their atoms and of one beyond them."""
    natoms = max(len(kinds) for _, kinds in structures)
    coord = torch.zeros(len(structures), natoms, 3, dtype=torch.float64)
    atype = torch.full((len(structures), natoms), -1)
    order, frame = [], []
    for k, (places, kinds) in enumerate(structures):
        coord[k, : len(kinds)], atype[k, : len(kinds)] = (
            torch.from_numpy(places),
            torch.from_numpy(kinds),
        )
        order += [k * natoms + a for a in range(len(kinds))]
        frame += [k] * len(kinds)
    counts = torch.tensor([len(kinds) for _, kinds in structures])
    box = CELLS[cell]
    cells = (
        None
        if box is None
        else Cells.of(torch.from_numpy(box).repeat(len(structures), 1, 1).to(device), rcut)
    )
    atoms = Atoms(
        coord.flatten(0, 1).to(device), atype.flatten().to(device), counts.to(device), natoms, cells
    )
    numbers = torch.tensor(
        [[*order, len(structures) * natoms + 3], [*frame, len(structures)]], device=device
    )
    return atoms, numbers[0].contiguous(), numbers[1].contiguous()


@pytest.mark.parametrize("cell", [name for name, box in CELLS.items() if box is not None])
def test_inverse_of_a_cell(cell):
    box = torch.from_numpy(CELLS[cell])
    torch.testing.assert_close(
        Cells.of(box[None], 6.0).inverse[0], torch.linalg.inv(box), rtol=1e-14, atol=1e-16
    )


def neighbors_as_sets(index, shift, sections):
    """Return the neighbours of every atom and section, each with its translation."""
    ends = np.cumsum([0, *sections])
    shift = np.zeros((*index.shape, 3), int) if shift is None else shift
    return [
        [
            {
                (int(j), *map(int, s))
                for j, s in zip(index[a, b:e], shift[a, b:e], strict=True)
                if j >= 0
            }
            for b, e in ends
        ]
        for ends in [list(itertools.pairwise(ends))]
        for a in range(len(index))
    ]


def through_candidates(atoms, order, frame, form, cell, short):
    """Return the lists of candidates that were found before the atoms had moved, in a second attempt."""
    skin, nframes, nreal = 0.3, len(atoms.counts), len(order)
    cells = None if cell == "none" else Cells.of(atoms.cells.box, form.rcut + skin)
    generator = torch.Generator().manual_seed(2)
    moves = 0.08 * (
        2.0 * torch.rand(atoms.coord.shape, generator=generator, dtype=torch.float64) - 1.0
    )
    before = atoms._replace(coord=atoms.coord + moves.to(order.device), cells=cells)
    reach = form.rcut + skin
    room = max(8, int(count_neighbors(before, order, frame, [reach], NTYPES)[0].sum(1).max()))
    entries = FIRST_WIDTH + len(form.widths) + 1
    for size in (4, room) if cell == "skewed" else (room,):  # the first has no room
        candidates = Candidates(
            place=torch.zeros(nreal, size, dtype=torch.int32, device=order.device),
            shift=None
            if cells is None
            else torch.zeros(nreal, size, 3, dtype=torch.int32, device=order.device),
            number=torch.zeros(nreal, dtype=torch.int32, device=order.device),
            needed=torch.zeros(entries, dtype=torch.int32, device=order.device),
            too_near_squared=torch.full((1,), 1e-4, dtype=torch.float64, device=order.device),
            shorter_bounds=(0,),
        )
        reference, built = (
            torch.full((nframes, atoms.natoms, 3), torch.inf, dtype=torch.float64),
            torch.zeros(nframes),
        )
        reference, built = reference.to(order.device), built.long().to(order.device)
        stale = torch.zeros(nframes, dtype=torch.int32, device=order.device)
        for now, expected in ((before, 1), (atoms, 0)):
            coord = now.coord.view(nframes, -1, 3)
            mark_stale(stale, candidates.needed, coord, reference, (0.5 * skin) ** 2)
            assert stale.tolist() == [expected] * nframes
            refer(reference, built, coord, stale)
            renew(candidates, now._replace(cells=cells), order, frame, stale, reach)
        coord = atoms.coord.view(nframes, -1, 3).clone()
        coord[0, 0, 0] += 0.9 * skin
        mark_stale(stale, candidates.needed.clone(), coord, reference, (0.5 * skin) ** 2)
        assert stale.tolist() == [1] + [0] * (nframes - 1)
        found = lay_out(candidates, atoms, order, frame, form, [short])
        assert built.tolist() == [1] * nframes
        needed = candidates.needed.tolist()
        assert needed[ROOM] == (room if size == 4 < room else 0)
        assert needed[ROOM + 1 : FIRST_WIDTH] == [0] * (FIRST_WIDTH - 1)
    most = count_neighbors(atoms, order, frame, [form.rcut, short], NTYPES)
    assert needed[-1] == int(most[1].max())
    return found


def compare(cell, by_type, sel, rcut, device):
    structures = [
        structure(cell, natoms, seed)
        for seed, natoms in enumerate([5, 1, 6 if cell == "tiny" else 13])
    ]
    atoms, order, frame = on_device(structures, cell, rcut, device)
    box = CELLS[cell]
    expected = [
        build_neighbors(x, box, kinds, rcut, sel, by_type, NTYPES) for x, kinds in structures
    ]
    widths = tuple(max(part) + 1 for part in zip(*(e.sections for e in expected), strict=True))
    if sel is not None:
        widths = tuple(sel) if by_type else (sum(sel),)
    counts, shorter, nearest = count_neighbors(atoms, order, frame, [rcut, 0.7 * rcut, 0.2], NTYPES)
    most = max(1, int(counts.sum(1).max()))
    form = Sections(rcut, widths, by_type, most if sel is None else sum(sel), most)
    neighbor, shift = find_neighbors(atoms, order, frame, form)
    found = through_candidates(atoms, order, frame, form, cell, 0.7 * rcut)
    assert all(
        one is other is None or one.equal(other)
        for one, other in zip(found, (neighbor, shift), strict=True)
    )
    first = 0
    for k, ((_, kinds), one) in enumerate(zip(structures, expected, strict=True)):
        here = slice(first, first + len(kinds))
        first += len(kinds)
        index = neighbor[here].cpu().numpy()
        index = np.where(index >= 0, index - k * atoms.natoms, -1)
        moved = None if shift is None else shift[here].cpu().numpy()
        assert neighbors_as_sets(index, moved, widths) == neighbors_as_sets(
            one.index, None if box is None else one.shift, one.sections
        )
        assert counts[here].amax(0).tolist() == list(one.statistics.max_neighbors)
        inner = build_neighbors(
            *structures[k][:1], box, kinds, 0.7 * rcut, None, False, NTYPES
        ).statistics
        assert int(shorter[here, 0].max()) == inner.max_total
        assert not shorter[here, 1].any()
        closest = one.statistics.min_distance
        assert not np.isfinite(closest) or abs(float(nearest[here].min()) ** 0.5 - closest) < 1e-12
    assert (neighbor[-1] == -1).all()
    assert not counts[-1].any()


@pytest.mark.parametrize(
    ("cell", "by_type"),
    [*zip(CELLS, itertools.cycle([True, False]), strict=False), ("skewed", True)],
)
def test_neighbors_are_those_of_the_data_room(device, cell, by_type):
    compare(cell, by_type, None, 3.1, device)


@pytest.mark.parametrize("cell", ["none", "skewed"])
def test_the_nearest_are_kept(device, cell):
    compare(cell, False, (2, 3, 4), 3.1, device)


def test_nearest_first(device):
    structures = [structure("cube", 20, 3)]
    atoms, order, frame = on_device(structures, "cube", 3.9, device)
    neighbor, shift = find_neighbors(atoms, order, frame, Sections(3.9, (64,), False, 64, 64))
    places = atoms.coord[neighbor[:-1].clamp(min=0)] + shift[:-1].double() @ atoms.cells.box[0]
    distance = (places - atoms.coord[order[:-1]].unsqueeze(1)).norm(dim=-1)
    distance[neighbor[:-1] < 0] = torch.inf
    assert (distance[:, 1:] - distance[:, :-1] > -1e-6)[distance[:, 1:].isfinite()].all()
