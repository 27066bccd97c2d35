"""Triton kernels that find neighbours; `search` and `candidates` define their results.

A program takes one atom. It goes through the atoms of its structure, each with the few translations that may bring it
within the cut-off, keeps those that are, sorts them by distance and writes them into their sections. With a skin there
are two steps: `renew` keeps what is within cut-off and skin, `lay_out` sorts and writes what is within the cut-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.neighbors.atoms import (
    AT_SAME_PLACE,
    FIRST_WIDTH,
    MARGIN,
    NEARNESS,
    NOT_FINITE,
    SAME_PLACE,
    TOO_NEAR,
    Atoms,
    Candidates,
    Sections,
)

BLOCK = 256
_MARGIN = tl.constexpr(MARGIN)
_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _dot(inverse, cell, k: tl.constexpr, x, y, z):
    """Return the component along cell vector k, in cells."""
    at = inverse + cell * 9 + k
    return x * tl.load(at) + y * tl.load(at + 3) + z * tl.load(at + 6)


@triton.jit
def _first(reach, cell, k: tl.constexpr, along):
    """Return the first translation along cell vector k that may bring an atom near."""
    return tl.ceil(-tl.load(reach + cell * 3 + k) - along - _MARGIN)


@triton.jit
def _vector(coord, box, inverse, reach, images, cell, x, y, z, there, code, periodic: tl.constexpr):
    """Return the vectors from (x, y, z) to images of atoms, and their translations."""
    dx, dy, dz = (
        tl.load(coord + there * 3) - x,
        tl.load(coord + there * 3 + 1) - y,
        tl.load(coord + there * 3 + 2) - z,
    )
    if periodic:
        one, two = tl.load(images + cell * 3 + 1), tl.load(images + cell * 3 + 2)
        s0 = _first(reach, cell, 0, _dot(inverse, cell, 0, dx, dy, dz)) + code // (one * two)
        s1 = _first(reach, cell, 1, _dot(inverse, cell, 1, dx, dy, dz)) + code // two % one
        s2 = _first(reach, cell, 2, _dot(inverse, cell, 2, dx, dy, dz)) + code % two
        at = box + cell * 9
        dx += s0 * tl.load(at) + s1 * tl.load(at + 3) + s2 * tl.load(at + 6)
        dy += s0 * tl.load(at + 1) + s1 * tl.load(at + 4) + s2 * tl.load(at + 7)
        dz += s0 * tl.load(at + 2) + s1 * tl.load(at + 5) + s2 * tl.load(at + 8)
    else:
        s0, s1, s2 = dx * 0.0, dx * 0.0, dx * 0.0
    return dx, dy, dz, s0, s1, s2


@triton.jit
def _per_atom(images, cell, periodic: tl.constexpr):
    """Return how many images of an atom are candidates."""
    if periodic:
        return (
            tl.load(images + cell * 3)
            * tl.load(images + cell * 3 + 1)
            * tl.load(images + cell * 3 + 2)
        )
    return 1


@triton.jit
def _own(frame, nframes, order, coord, images, periodic: tl.constexpr):
    """Return a program's row, whether it has an atom, its structure, the atom, its position, and images per atom."""
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(frame + row)
    inside = cell < nframes
    cell = tl.where(inside, cell, 0)
    here = tl.where(inside, tl.load(order + row), 0)
    x, y, z = (
        tl.load(coord + here * 3),
        tl.load(coord + here * 3 + 1),
        tl.load(coord + here * 3 + 2),
    )
    return row, inside, cell, here, x, y, z, _per_atom(images, cell, periodic)


@triton.jit
def _look(
    coord, box, inverse, reach, images, cell, natoms, here, x, y, z, begin, candidates, each, square,
    periodic: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Return number, place, translation and squared distance of some candidates, and which are neighbours."""
    k = begin + tl.arange(0, block)
    real = k < candidates
    there = cell * natoms + tl.where(real, k // each, 0)
    dx, dy, dz, s0, s1, s2 = _vector(
        coord, box, inverse, reach, images, cell, x, y, z, there, k % each, periodic
    )
    distance = dx * dx + dy * dy + dz * dz
    itself = (there == here) & (s0 == 0.0) & (s1 == 0.0) & (s2 == 0.0)
    return k, there, s0, s1, s2, distance, real & (distance < square) & (itself == 0)


@triton.jit
def _key(distance, k):
    """Return what sorts candidates by distance, then by number."""
    return (distance.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32) | k.to(tl.int64)


@triton.jit
def _write_empty(neighbor, shift, row, nnei, periodic: tl.constexpr, block: tl.constexpr):
    """Write a row of empty slots."""
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        tl.store(neighbor + row * nnei + column, tl.full((block,), -1, tl.int64), column < nnei)
    if periodic:
        for begin in range(0, nnei * 3, block):
            column = begin + tl.arange(0, block)
            tl.store(
                shift + row * nnei * 3 + column, tl.zeros((block,), tl.int32), column < nnei * 3
            )


@triton.jit
def _write(
    neighbor, shift, needed, row, nnei, there, s0, s1, s2, kept, kind, starts, widths, groups,
    by_type: tl.constexpr, periodic: tl.constexpr, counting: tl.constexpr,
):  # fmt: skip
    """Write sorted neighbours into their sections; `counting` notes in `needed` how wide too narrow ones must be."""
    for group in range(groups):
        mine = kept
        if by_type:
            mine = kept & (kind == group)
        column = tl.cumsum(mine.to(tl.int32), 0) - 1
        width = tl.load(widths + group)
        if counting:
            total = tl.sum(mine.to(tl.int32))
            tl.atomic_max(needed + group, total, total > width)
        mine = mine & (column < width)
        at = row * nnei + tl.load(starts + group) + column
        tl.store(neighbor + at, there, mine)
        if periodic:
            tl.store(shift + at * 3, s0.to(tl.int32), mine)
            tl.store(shift + at * 3 + 1, s1.to(tl.int32), mine)
            tl.store(shift + at * 3 + 2, s2.to(tl.int32), mine)


@triton.jit
def _search_kernel(
    neighbor, shift, scratch,
    coord, atype, counts, natoms, box, inverse, reach, images,
    order, frame, nframes, starts, widths, groups, nnei, most, square,
    by_type: tl.constexpr, periodic: tl.constexpr, block: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    """Find the neighbours of one atom; `starts` and `widths` are those of the sections."""
    row, inside, cell, here, x, y, z, each = _own(frame, nframes, order, coord, images, periodic)
    candidates = tl.where(inside, tl.load(counts + cell).to(tl.int32) * each, 0)
    found = candidates * 0
    for begin in range(0, candidates, block):
        k, _, _, _, _, distance, near = _look(
            coord, box, inverse, reach, images, cell, natoms, here, x, y, z, begin, candidates, each, square,
            periodic, block,
        )  # fmt: skip
        place = found + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(scratch + row * capacity + place, _key(distance, k), near & (place < capacity))
        found += tl.sum(near.to(tl.int32))
    _write_empty(neighbor, shift, row, nnei, periodic, block)
    tl.debug_barrier()
    rank = tl.arange(0, capacity)
    key = tl.sort(tl.load(scratch + row * capacity + rank, rank < found, _NONE))
    kept = (rank < found) & (rank < most)
    k = tl.where(kept, key & 0xFFFFFFFF, 0).to(tl.int32)
    there = cell * natoms + k // each
    _, _, _, s0, s1, s2 = _vector(
        coord, box, inverse, reach, images, cell, x, y, z, there, k % each, periodic
    )
    kind = tl.load(atype + there, kept, -1)
    _write(
        neighbor, shift, neighbor, row, nnei, there, s0, s1, s2, kept, kind, starts, widths, groups,
        by_type, periodic, False,
    )  # fmt: skip


@triton.jit
def _moved_kernel(
    stale, needed, coord, reference, numbers, limit, not_finite: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Note whether some atoms of a structure have moved too far, or are nowhere."""
    frame = tl.program_id(0).to(tl.int64)
    atom = tl.program_id(1) * block + tl.arange(0, block)
    real = atom < numbers
    at = (frame * numbers + atom) * 3
    square, total = tl.zeros((block,), tl.float64), tl.zeros((block,), tl.float64)
    for k in tl.static_range(3):
        x = tl.load(coord + at + k, real, 0.0)
        moved = x - tl.load(reference + at + k, real, 0.0)
        square += moved * moved
        total += x - x  # NaN for what is not finite
    far = tl.sum((real & ((square <= limit) == 0)).to(tl.int32))
    nowhere = tl.sum((real & (total != 0.0)).to(tl.int32))
    tl.atomic_max(stale + frame, 1, far > 0)
    tl.atomic_max(needed + not_finite, 1, nowhere > 0)


@triton.jit
def _refer_kernel(reference, built, coord, stale, numbers, block: tl.constexpr):
    """Keep the positions of a stale structure, and count its new list."""
    frame = tl.program_id(0).to(tl.int64)
    renewed = tl.load(stale + frame)
    at = tl.program_id(1) * block + tl.arange(0, block)
    wanted = (at < numbers * 3) & (renewed != 0)
    place = frame * numbers * 3 + at
    tl.store(reference + place, tl.load(coord + place, wanted, 0.0), wanted)
    count = tl.load(built + frame)
    tl.store(built + frame, count + renewed, tl.program_id(1) == 0)


@triton.jit
def _renew_kernel(
    place, translation, number, needed, stale,
    coord, atype, counts, natoms, box, inverse, reach, images,
    order, frame, nframes, room, square,
    periodic: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write all atoms within cut-off and skin of one atom, where its structure is stale."""
    row, inside, cell, here, x, y, z, each = _own(frame, nframes, order, coord, images, periodic)
    wanted = inside & (tl.load(stale + cell) != 0)
    candidates = tl.where(wanted, tl.load(counts + cell).to(tl.int32) * each, 0)
    found = candidates * 0
    for begin in range(0, candidates, block):
        _, there, s0, s1, s2, _, near = _look(
            coord, box, inverse, reach, images, cell, natoms, here, x, y, z, begin, candidates, each, square,
            periodic, block,
        )  # fmt: skip
        column = found + tl.cumsum(near.to(tl.int32), 0) - 1
        at = row * room + column
        fits = near & (column < room)
        tl.store(place + at, there.to(tl.int32), fits)
        if periodic:
            tl.store(translation + at * 3, s0.to(tl.int32), fits)
            tl.store(translation + at * 3 + 1, s1.to(tl.int32), fits)
            tl.store(translation + at * 3 + 2, s2.to(tl.int32), fits)
        found += tl.sum(near.to(tl.int32))
    tl.store(number + row, found, wanted)
    tl.atomic_max(needed, found, wanted & (found > room))


@triton.jit
def _lay_out_kernel(
    neighbor, shift, needed, place, translation, number,
    coord, atype, box, order, frame, nframes, room, starts, widths, groups, nnei, most, square, short, inner, ninner,
    nearest, first: tl.constexpr, same: tl.constexpr, same_place: tl.constexpr, too_near: tl.constexpr,
    near_by: tl.constexpr, by_type: tl.constexpr, periodic: tl.constexpr, block: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    """Write the neighbours of one atom, the nearest first, from those within cut-off and skin."""
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(frame + row)
    inside = cell < nframes
    cell = tl.where(inside, cell, 0)
    here = tl.where(inside, tl.load(order + row), 0)
    lane = tl.arange(0, capacity)
    real = inside & (lane < tl.minimum(tl.load(number + row), room))
    at = row * room + lane
    there = tl.load(place + at, real, 0).to(tl.int64) * 3
    dx = tl.load(coord + there) - tl.load(coord + here * 3)
    dy = tl.load(coord + there + 1) - tl.load(coord + here * 3 + 1)
    dz = tl.load(coord + there + 2) - tl.load(coord + here * 3 + 2)
    if periodic:
        s0 = tl.load(translation + at * 3, real, 0).to(tl.float64)
        s1 = tl.load(translation + at * 3 + 1, real, 0).to(tl.float64)
        s2 = tl.load(translation + at * 3 + 2, real, 0).to(tl.float64)
        own = box + cell * 9
        dx += s0 * tl.load(own) + s1 * tl.load(own + 3) + s2 * tl.load(own + 6)
        dy += s0 * tl.load(own + 1) + s1 * tl.load(own + 4) + s2 * tl.load(own + 7)
        dz += s0 * tl.load(own + 2) + s1 * tl.load(own + 5) + s2 * tl.load(own + 8)
    distance = dx * dx + dy * dy + dz * dz
    near = real & (distance < square)
    found = tl.sum(near.to(tl.int32))
    least = tl.min(tl.where(near, distance, float("inf")))
    tl.atomic_max(needed + same_place, 1, least < same)
    nearness = (near_by / tl.sqrt(tl.maximum(least, same)) + 1.0).to(tl.int32)
    tl.atomic_max(needed + too_near, nearness, least < tl.load(nearest))
    for k in range(ninner):
        within = tl.sum((near & (distance < tl.load(short + k))).to(tl.int32))
        tl.atomic_max(needed + first + groups + k, within, within > tl.load(inner + k))
    _write_empty(neighbor, shift, row, nnei, periodic, block)
    tl.debug_barrier()
    key = tl.sort(tl.where(near, _key(distance, lane), _NONE))
    kept = (lane < found) & (lane < most)
    at = row * room + tl.where(kept, key & 0xFFFFFFFF, 0)
    there = tl.load(place + at, kept, 0).to(tl.int64)
    t0, t1, t2 = there, there, there
    if periodic:
        t0 = tl.load(translation + at * 3, kept, 0).to(tl.int64)
        t1 = tl.load(translation + at * 3 + 1, kept, 0).to(tl.int64)
        t2 = tl.load(translation + at * 3 + 2, kept, 0).to(tl.int64)
    kind = tl.load(atype + there, kept, -1)
    _write(
        neighbor, shift, needed + first, row, nnei, there, t0, t1, t2, kept, kind, starts, widths, groups,
        by_type, periodic, True,
    )  # fmt: skip


@triton.jit
def _count_kernel(
    of_types, within, nearest,
    coord, atype, counts, natoms, box, inverse, reach, images,
    order, frame, nframes, squares, ntypes, nradii,
    periodic: tl.constexpr, block: tl.constexpr, kinds: tl.constexpr, radii: tl.constexpr,
):  # fmt: skip
    """Count the neighbours of one atom by type, and within shorter radii."""
    row, inside, cell, here, x, y, z, each = _own(frame, nframes, order, coord, images, periodic)
    candidates = tl.where(inside, tl.load(counts + cell).to(tl.int32) * each, 0)
    kind, radius = tl.arange(0, kinds), tl.arange(0, radii)
    short = tl.load(squares + 1 + radius, radius < nradii - 1, 0.0)
    square = tl.load(squares)
    totals, shorter = tl.zeros((kinds,), tl.int32), tl.zeros((radii,), tl.int32)
    least = tl.load(squares) * 0.0 + float("inf")
    for begin in range(0, candidates, block):
        k = begin + tl.arange(0, block)
        real = k < candidates
        there = cell * natoms + tl.where(real, k // each, 0)
        dx, dy, dz, s0, s1, s2 = _vector(
            coord, box, inverse, reach, images, cell, x, y, z, there, k % each, periodic
        )
        itself = (there == here) & (s0 == 0.0) & (s1 == 0.0) & (s2 == 0.0)
        real = real & (itself == 0)
        distance = tl.where(real, dx * dx + dy * dy + dz * dz, float("inf"))
        least = tl.minimum(least, tl.min(distance))
        mine = tl.where(distance < square, tl.load(atype + there), -1)
        totals += tl.sum((mine[:, None] == kind[None, :]).to(tl.int32), 0)
        shorter += tl.sum((distance[:, None] < short[None, :]).to(tl.int32), 0)
    tl.store(of_types + row * ntypes + kind, totals, kind < ntypes)
    tl.store(within + row * (nradii - 1) + radius, shorter, radius < nradii - 1)
    tl.store(nearest + row, least)


def _geometry(atoms: Atoms) -> tuple[Tensor | int, ...]:
    """Return the arguments of both kernels that describe the structures; unused ones repeat the positions."""
    cells = (
        (atoms.coord,) * 4 if atoms.cells is None else tuple(x.contiguous() for x in atoms.cells)
    )
    return atoms.coord, atoms.atype, atoms.counts, atoms.natoms, *cells


def find(
    atoms: Atoms, order: Tensor, frame: Tensor, sections: Sections
) -> tuple[Tensor, Tensor | None]:
    """Return neighbours and translations as `find_neighbors` does."""
    nnei, rows = sum(sections.widths), order.shape[0]
    capacity = max(16, triton.next_power_of_2(sections.capacity))
    periodic = atoms.cells is not None
    neighbor = order.new_empty(rows, nnei)
    shift = order.new_empty((rows, nnei, 3), dtype=torch.int32) if periodic else None
    if rows == 0 or nnei == 0:
        return neighbor, shift
    layout = _layout(sections.widths, order.device)
    _search_kernel[(rows,)](
        neighbor, neighbor if shift is None else shift, order.new_empty(rows, capacity),
        *_geometry(atoms),
        order, frame, atoms.counts.shape[0], *layout, len(sections.widths), nnei, sections.most, sections.rcut**2,
        by_type=sections.by_type, periodic=periodic, block=BLOCK, capacity=capacity,
    )  # fmt: skip
    return neighbor, shift


def mark_stale(
    stale: Tensor, needed: Tensor, coord: Tensor, reference: Tensor, limit: float
) -> None:
    """Note moves as `candidates.mark_stale` does."""
    nframes, natoms, _ = coord.shape
    stale.zero_()
    grid = nframes, triton.cdiv(natoms, BLOCK)
    _moved_kernel[grid](
        stale, needed, coord, reference, natoms, limit, not_finite=NOT_FINITE, block=BLOCK
    )


def refer(reference: Tensor, built: Tensor, coord: Tensor, stale: Tensor) -> None:
    """Keep positions as `candidates.refer` does."""
    nframes, natoms, _ = coord.shape
    _refer_kernel[nframes, triton.cdiv(natoms * 3, 4 * BLOCK)](
        reference, built, coord, stale, natoms, block=4 * BLOCK
    )


def renew(
    candidates: Candidates, atoms: Atoms, order: Tensor, frame: Tensor, stale: Tensor, reach: float
) -> None:
    """Find candidates as `candidates.renew` does."""
    rows, room = candidates.place.shape
    periodic = atoms.cells is not None
    if rows:
        _renew_kernel[(rows,)](
            candidates.place, candidates.place if candidates.shift is None else candidates.shift, candidates.number,
            candidates.needed, stale,
            *_geometry(atoms),
            order, frame, atoms.counts.shape[0], room, reach**2,
            periodic=periodic, block=BLOCK,
        )  # fmt: skip


def lay_out(
    candidates: Candidates,
    atoms: Atoms,
    order: Tensor,
    frame: Tensor,
    sections: Sections,
    inner: Sequence[float],
) -> tuple[Tensor, Tensor | None]:
    """Return neighbours and translations as `candidates.lay_out` does."""
    nnei, (rows, room) = sum(sections.widths), candidates.place.shape
    periodic = atoms.cells is not None
    neighbor = order.new_empty(rows, nnei)
    shift = order.new_empty((rows, nnei, 3), dtype=torch.int32) if periodic else None
    if rows == 0 or nnei == 0:
        return neighbor, shift
    coord, atype, _, _, box, *_ = _geometry(atoms)
    radii, bounds = _bounds(tuple(inner), candidates.inner, order.device)
    _lay_out_kernel[(rows,)](
        neighbor, neighbor if shift is None else shift, candidates.needed,
        candidates.place, candidates.place if candidates.shift is None else candidates.shift, candidates.number,
        coord, atype, box, order, frame, atoms.counts.shape[0], room,
        *_layout(sections.widths, order.device), len(sections.widths), nnei, sections.most, sections.rcut**2,
        radii, bounds, len(inner), candidates.nearest,
        first=FIRST_WIDTH, same=SAME_PLACE**2, same_place=AT_SAME_PLACE, too_near=TOO_NEAR,
        near_by=NEARNESS, by_type=sections.by_type, periodic=periodic,
        block=BLOCK, capacity=max(16, triton.next_power_of_2(room)), num_warps=1,
    )  # fmt: skip
    return neighbor, shift


@cache
def _bounds(
    radii: tuple[float, ...], inner: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return squares of shorter radii and the bounds of neighbours within them; graphs may read them."""
    squares = torch.tensor(radii, dtype=torch.float64).square()
    return squares.to(device), torch.tensor(inner, dtype=torch.int64).to(device)


@cache
def _layout(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where sections start, and their widths, in memory that graphs may read as long as they exist."""
    sizes = torch.tensor(widths)
    return (sizes.cumsum(0) - sizes).to(device), sizes.to(device)


def count(
    atoms: Atoms, order: Tensor, frame: Tensor, radii: Sequence[float], ntypes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts and distances as `count_neighbors` does."""
    rows = order.shape[0]
    of_types = order.new_empty((rows, ntypes), dtype=torch.int32)
    within = order.new_empty((rows, len(radii) - 1), dtype=torch.int32)
    nearest = atoms.coord.new_empty(rows)
    if rows:
        squares = torch.tensor(radii, dtype=torch.float64).square().to(order.device)
        _count_kernel[(rows,)](
            of_types, within, nearest,
            *_geometry(atoms),
            order, frame, atoms.counts.shape[0], squares, ntypes, len(radii),
            periodic=atoms.cells is not None, block=BLOCK, kinds=max(2, triton.next_power_of_2(ntypes)),
            radii=max(2, triton.next_power_of_2(len(radii) - 1)),
        )  # fmt: skip
    return of_types, within, nearest
