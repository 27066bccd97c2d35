"""Triton kernels that find neighbours on a GPU; `search` and `candidates` define their results.

A program of `search_kernel`, `count_kernel` or `renew_kernel` takes one atom i. It compares i with
all images of all atoms j of the same structure:

    r = x_j − x_i + S·box                       vector to an image of j
    S_a = ⌈−reach_a − u_a − MARGIN⌉ + code_a    translation along vector a, 0 ≤ code_a < images_a
    u = (x_j − x_i)·inverse                     r without a translation, as fractions of the cell

reach_a is the cut-off over the height of the cell, so that only these S can bring j within the
cut-off. A program numbers the images k = 0, 1, …: k // images_per_atom is the number of atom j in
its structure, and k % images_per_atom stands for its three codes; images_per_atom = Π_a images_a.

| kernel              | reference in torch       | result                                         |
|---------------------|--------------------------|------------------------------------------------|
| `search_kernel`     | `search.find_neighbors`  | lists                                          |
| `count_kernel`      | `search.count_neighbors` | numbers of neighbours of each atom             |
| `mark_stale_kernel` | `candidates.mark_stale`  | structures with atoms that moved               |
| `refer_kernel`      | `candidates.refer`       | positions that moves are measured from         |
| `renew_kernel`      | `candidates.renew`       | candidates: images within cut-off and skin     |
| `lay_out_kernel`    | `candidates.lay_out`     | lists from the candidates                      |

`test_neighbor_search` compares all of them with the lists of the `data` package.

| name     | meaning                                                                           |
|----------|-----------------------------------------------------------------------------------|
| nframes  | structures, side by side, each with natoms places, of which atoms fill the first  |
| place    | number of an atom through all structures, below nframes·natoms                    |
| nrows    | atoms whose neighbours are searched for, with a row of the list each              |
| nnei     | columns of the list, in n_sections sections                                       |
| room     | most candidates that are kept of an atom                                          |
| capacity | most neighbours or candidates that a program sorts, a power of two                |

Without cells, tensors of S are None when a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

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
    ROOM,
    SAME_PLACE,
    TOO_NEAR,
    Atoms,
    Candidates,
    Cells,
    Sections,
)
from deepmd_muon.model.nn.vector_kernels import (
    Vector,
    cast,
    dot,
    load_vector,
    minus,
    store_vector,
)

BLOCK = 256  # images that a program compares at a time

# Kernels read no other globals than these.
_MARGIN = tl.constexpr(MARGIN)
_NEARNESS = tl.constexpr(NEARNESS)
_SAME_PLACE_SQUARED = tl.constexpr(SAME_PLACE**2)
_ROOM = tl.constexpr(ROOM)
_AT_SAME_PLACE = tl.constexpr(AT_SAME_PLACE)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_TOO_NEAR = tl.constexpr(TOO_NEAR)
_FIRST_WIDTH = tl.constexpr(FIRST_WIDTH)
_LARGEST_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # sorts behind all candidates


# ----- what kernels take and share ---------------------------------------------------------------


class AtomTensors(NamedTuple):
    """The tensors of `Atoms`."""

    coord: Tensor
    atype: Tensor
    counts: Tensor
    cells: Cells | None


class Rows(NamedTuple):
    """The atoms to search for."""

    order: Tensor  # (nrows,) int64: their places
    frame: Tensor  # (nrows,) int64: their structures; nframes or more for a row without an atom


class ListForm(NamedTuple):
    """The form of a list, as kernels take it."""

    starts: Tensor  # (n_sections,) int64: first column of each section
    widths: Tensor  # (n_sections,) int64
    n_sections: int
    nnei: int
    n_nearest: int  # neighbours that enter sections, the nearest first
    rcut_squared: float  # [Å²]


class ProgramAtom(NamedTuple):
    """Atom i of a program."""

    row: Any
    exists: Any
    frame: Any  # of its structure
    place: Any
    position: Any  # Vector


class Images(NamedTuple):
    """Images of atoms j, (block,) each."""

    r: Any  # Vector from atom i
    s: Any  # Vector: S, float64


class Comparison(NamedTuple):
    """A block of images of atoms j, compared with atom i, (block,) each."""

    place: Any  # of atom j
    s: Any  # Vector: S, float64
    squared: Any  # |r|²
    is_image: Any  # false for the atom itself, and beyond the last image


# ----- launches ----------------------------------------------------------------------------------


def find(
    atoms: Atoms, order: Tensor, frame: Tensor, sections: Sections
) -> tuple[Tensor, Tensor | None]:
    """Return neighbours and translations as `search.find_neighbors` does."""
    nrows = order.shape[0]
    neighbor, shift = _new_list(atoms, nrows, sections)
    if neighbor.numel() == 0:
        return neighbor, shift
    capacity = max(16, triton.next_power_of_2(sections.capacity))
    search_kernel[(nrows,)](
        neighbor=neighbor,
        shift=shift,
        scratch=order.new_empty(nrows, capacity),
        **_atom_arguments(atoms, order, frame),
        form=_list_form(sections, order.device),
        by_type=sections.by_type,
        block=BLOCK,
        capacity=capacity,
    )
    return neighbor, shift


def count(
    atoms: Atoms, order: Tensor, frame: Tensor, radii: Sequence[float], ntypes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts and distances as `search.count_neighbors` does."""
    nrows = order.shape[0]
    n_shorter = len(radii) - 1
    type_counts = order.new_empty((nrows, ntypes), dtype=torch.int32)
    shorter_counts = order.new_empty((nrows, n_shorter), dtype=torch.int32)
    nearest_squared = atoms.coord.new_empty(nrows)
    if nrows:
        count_kernel[(nrows,)](
            type_counts=type_counts,
            shorter_counts=shorter_counts,
            nearest_squared=nearest_squared,
            radii_squared=torch.tensor(radii, dtype=torch.float64).square().to(order.device),
            **_atom_arguments(atoms, order, frame),
            ntypes=ntypes,
            n_shorter=n_shorter,
            block=BLOCK,
            type_tile=max(2, triton.next_power_of_2(ntypes)),
            radius_tile=max(2, triton.next_power_of_2(n_shorter)),
        )
    return type_counts, shorter_counts, nearest_squared


def mark_stale(
    stale: Tensor, needed: Tensor, coord: Tensor, reference: Tensor, limit_squared: float
) -> None:
    """Note moves as `candidates.mark_stale` does."""
    nframes, natoms, _ = coord.shape
    stale.zero_()
    mark_stale_kernel[nframes, triton.cdiv(natoms, BLOCK)](
        stale=stale,
        needed=needed,
        coord=coord,
        reference=reference,
        natoms=natoms,
        limit_squared=limit_squared,
        block=BLOCK,
    )


def refer(reference: Tensor, built: Tensor, coord: Tensor, stale: Tensor) -> None:
    """Keep positions as `candidates.refer` does."""
    nframes, natoms, _ = coord.shape
    block = 4 * BLOCK
    refer_kernel[nframes, triton.cdiv(natoms * 3, block)](
        reference=reference, built=built, coord=coord, stale=stale, natoms=natoms, block=block
    )


def renew(
    candidates: Candidates, atoms: Atoms, order: Tensor, frame: Tensor, stale: Tensor, reach: float
) -> None:
    """Find candidates as `candidates.renew` does."""
    nrows, room = candidates.place.shape
    if nrows:
        renew_kernel[(nrows,)](
            place=candidates.place,
            translation=candidates.shift,
            number=candidates.number,
            needed=candidates.needed,
            stale=stale,
            **_atom_arguments(atoms, order, frame),
            room=room,
            limit_squared=reach**2,
            block=BLOCK,
        )


def lay_out(
    candidates: Candidates,
    atoms: Atoms,
    order: Tensor,
    frame: Tensor,
    sections: Sections,
    shorter_radii: Sequence[float],
) -> tuple[Tensor, Tensor | None]:
    """Return neighbours and translations as `candidates.lay_out` does."""
    nrows, room = candidates.place.shape
    neighbor, shift = _new_list(atoms, nrows, sections)
    if neighbor.numel() == 0:
        return neighbor, shift
    shorter_squared, shorter_bounds = _shorter_limits(
        tuple(shorter_radii), candidates.shorter_bounds, order.device
    )
    lay_out_kernel[(nrows,)](
        neighbor=neighbor,
        shift=shift,
        needed=candidates.needed,
        place=candidates.place,
        translation=candidates.shift,
        number=candidates.number,
        too_near_squared=candidates.too_near_squared,
        shorter_squared=shorter_squared,
        shorter_bounds=shorter_bounds,
        n_shorter=len(shorter_radii),
        **_atom_arguments(atoms, order, frame),
        form=_list_form(sections, order.device),
        room=room,
        by_type=sections.by_type,
        block=BLOCK,
        capacity=max(16, triton.next_power_of_2(room)),
        num_warps=1,
    )
    return neighbor, shift


def _new_list(atoms: Atoms, nrows: int, sections: Sections) -> tuple[Tensor, Tensor | None]:
    """Allocate a list and its translations; None without cells."""
    nnei = sum(sections.widths)
    neighbor = atoms.atype.new_empty((nrows, nnei), dtype=torch.int64)
    if atoms.cells is None:
        return neighbor, None
    return neighbor, neighbor.new_empty((nrows, nnei, 3), dtype=torch.int32)


def _atom_arguments(atoms: Atoms, order: Tensor, frame: Tensor) -> dict[str, Any]:
    """Return the arguments that name the structures and the atoms to search for.

    Triton compiles a kernel again for a size that is 1 or that 16 divides, unless an argument is in
    `do_not_specialize`. Members of tuples cannot be: sizes of batches are arguments of their own.
    """
    cells = atoms.cells
    if cells is not None:
        # In the order of memory that kernels assume.
        cells = Cells(*(tensor.contiguous() for tensor in cells))
    return {
        "atoms": AtomTensors(atoms.coord, atoms.atype, counts=atoms.counts, cells=cells),
        "rows": Rows(order, frame),
        "natoms": atoms.natoms,
        "nframes": atoms.counts.shape[0],
    }


def _list_form(sections: Sections, device: torch.device) -> ListForm:
    starts, widths = _section_tensors(sections.widths, device)
    return ListForm(
        starts=starts,
        widths=widths,
        n_sections=len(sections.widths),
        nnei=sum(sections.widths),
        n_nearest=sections.n_nearest,
        rcut_squared=sections.rcut**2,
    )


@cache  # recorded CUDA graphs read this memory
def _section_tensors(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where sections start, and their widths, int64 `(n_sections,)`."""
    sizes = torch.tensor(widths)
    return (sizes.cumsum(0) - sizes).to(device), sizes.to(device)


@cache  # recorded CUDA graphs read this memory
def _shorter_limits(
    radii: tuple[float, ...], bounds: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the squares of shorter radii and the bounds of neighbours within them `(n_shorter,)`."""
    squared = torch.tensor(radii, dtype=torch.float64).square()
    return squared.to(device), torch.tensor(bounds, dtype=torch.int64).to(device)


# ----- functions of several kernels --------------------------------------------------------------
# `atoms`, `rows` and `form` are `AtomTensors`, `Rows` and `ListForm`.


@triton.jit
def _program_atom(rows, coord, nframes):
    """Return the atom of this program's row.

    A row without an atom gets the first atom of the first structure, which may be read.
    """
    row = tl.program_id(0).to(tl.int64)
    frame = tl.load(rows.frame + row)
    exists = frame < nframes
    frame = tl.where(exists, frame, 0)
    place = tl.where(exists, tl.load(rows.order + row), 0)
    return ProgramAtom(row, exists, frame, place, position=load_vector(coord, place))


@triton.jit
def _images_per_atom(cells, frame):
    """Return images_per_atom of a structure."""
    if cells is not None:
        images = cells.images + frame * 3
        return tl.load(images) * tl.load(images + 1) * tl.load(images + 2)
    return 1


@triton.jit
def _translation(cells, frame, axis: tl.constexpr, r, code):
    """Return S_a = ⌈−reach_a − u_a − MARGIN⌉ + code_a of x_j − x_i; the margin is for rounding."""
    column = cells.inverse + frame * 9 + axis
    inverse = Vector(tl.load(column), tl.load(column + 3), tl.load(column + 6))
    fraction = dot(r, inverse)
    return tl.ceil(-tl.load(cells.reach + frame * 3 + axis) - fraction - _MARGIN) + code


@triton.jit
def _translate(box, frame, r, s):
    """Return r + S·box."""
    box = box + frame * 9
    return Vector(
        r.x + (s.x * tl.load(box) + s.y * tl.load(box + 3) + s.z * tl.load(box + 6)),
        r.y + (s.x * tl.load(box + 1) + s.y * tl.load(box + 4) + s.z * tl.load(box + 7)),
        r.z + (s.x * tl.load(box + 2) + s.y * tl.load(box + 5) + s.z * tl.load(box + 8)),
    )


@triton.jit
def _images_of(place, code, atom, coord, cells):
    """Return images `code` of atoms j at `place`, (block,) each."""
    r = minus(load_vector(coord, place), atom.position)
    frame = atom.frame
    if cells is not None:
        # code = (code_0 · images_1 + code_1) · images_2 + code_2
        images_1 = tl.load(cells.images + frame * 3 + 1)
        images_2 = tl.load(cells.images + frame * 3 + 2)
        s = Vector(
            _translation(cells, frame, 0, r, code=code // (images_1 * images_2)),
            _translation(cells, frame, 1, r, code=code // images_2 % images_1),
            _translation(cells, frame, 2, r, code=code % images_2),
        )
        r = _translate(cells.box, frame, r, s)
    else:
        zero = r.x * 0.0
        s = Vector(zero, zero, zero)
    return Images(r, s)


@triton.jit
def _n_images(atoms, frame, images_per_atom, searched):
    """Return how many images atom i is compared with, a scalar tensor; 0 if not searched for."""
    return tl.where(searched, tl.load(atoms.counts + frame).to(tl.int32) * images_per_atom, 0)


@triton.jit
def _compare(k, n_images, images_per_atom, atom, atoms, natoms):
    """Compare atom i with the images k (block,)."""
    exists = k < n_images
    place = atom.frame * natoms + tl.where(exists, k // images_per_atom, 0)
    image = _images_of(place, k % images_per_atom, atom=atom, coord=atoms.coord, cells=atoms.cells)
    s = image.s
    is_itself = (place == atom.place) & (s.x == 0.0) & (s.y == 0.0) & (s.z == 0.0)
    squared = dot(image.r, image.r)
    # A mask, not an infinite distance: that costs `search_kernel` 13 registers (sm_90).
    is_image = exists & (is_itself == 0)
    return Comparison(place, s, squared=squared, is_image=is_image)


@triton.jit
def _sort_key(squared, index):
    """Return int64 keys that sort by |r|² in single precision, then by an index below 2³².

    The bits of floats that are not negative sort as integers do.
    """
    bits = squared.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | index.to(tl.int64)


@triton.jit
def _index_of(key):
    """Return the index in a key."""
    return key & 0xFFFFFFFF


@triton.jit
def _write_empty_row(
    neighbor,  # (nrows, nnei) int64, written
    shift,  # (nrows, nnei, 3) int32, written; None without cells
    row,
    nnei,
    block: tl.constexpr,
):
    """Write a row of empty slots: −1 and no translation."""
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        tl.store(neighbor + row * nnei + column, tl.full((block,), -1, tl.int64), column < nnei)
    if shift is not None:
        for begin in range(0, nnei * 3, block):
            element = begin + tl.arange(0, block)
            offset = row * nnei * 3 + element
            tl.store(shift + offset, tl.zeros((block,), tl.int32), element < nnei * 3)


@triton.jit
def _write_sections(
    neighbor,  # (nrows, nnei) int64, written
    shift,  # (nrows, nnei, 3) int32, written; None without cells
    needed_widths,  # (n_sections,) int32, raised if `counting`
    row,
    place,  # (capacity,) places of neighbours, the nearest first
    s,  # Vector (capacity,): their S; not read without cells
    is_neighbor,  # (capacity,): which lanes hold one
    kind,  # (capacity,) its type
    form,
    by_type: tl.constexpr,
    counting: tl.constexpr,
):
    """Write sorted neighbours into their sections.

    With `counting`, raise `needed_widths` of sections that are too narrow to the width they need.
    """
    for section in range(form.n_sections):
        in_section = is_neighbor
        if by_type:
            in_section = is_neighbor & (kind == section)
        column = tl.cumsum(in_section.to(tl.int32), 0) - 1
        width = tl.load(form.widths + section)
        if counting:
            total = tl.sum(in_section.to(tl.int32))
            tl.atomic_max(needed_widths + section, total, total > width)
        fits = in_section & (column < width)
        offset = row * form.nnei + tl.load(form.starts + section) + column
        tl.store(neighbor + offset, place, fits)
        if shift is not None:
            store_vector(shift, offset, fits, s)


# ----- lists from positions ----------------------------------------------------------------------


@triton.jit(do_not_specialize=["natoms", "nframes"])
def search_kernel(
    neighbor,  # (nrows, nnei) int64, written: places; −1 for an empty slot
    shift,  # (nrows, nnei, 3) int32, written: S; None without cells
    scratch,  # (nrows, capacity) int64, written: keys of the neighbours
    atoms,
    rows,
    natoms,
    nframes,
    form,
    by_type: tl.constexpr,
    block: tl.constexpr,
    capacity: tl.constexpr,  # at least the neighbours of an atom
) -> None:
    """Write the neighbours of one atom, |r| < rcut, into their sections, the nearest first."""
    atom = _program_atom(rows, atoms.coord, nframes)
    row = atom.row
    images_per_atom = _images_per_atom(atoms.cells, atom.frame)
    n_images = _n_images(atoms, atom.frame, images_per_atom, searched=atom.exists)
    total = n_images * 0  # a tensor, as the loop needs
    for begin in range(0, n_images, block):
        k = begin + tl.arange(0, block)
        images = _compare(k, n_images, images_per_atom, atom=atom, atoms=atoms, natoms=natoms)
        near = images.is_image & (images.squared < form.rcut_squared)
        column = total + tl.cumsum(near.to(tl.int32), 0) - 1
        fits = near & (column < capacity)
        tl.store(scratch + row * capacity + column, _sort_key(images.squared, k), fits)
        total += tl.sum(near.to(tl.int32))
    _write_empty_row(neighbor, shift, row, form.nnei, block=block)
    # Other threads of this program read these keys, and write neighbours over empty slots.
    tl.debug_barrier()

    rank = tl.arange(0, capacity)
    keys = tl.load(scratch + row * capacity + rank, rank < total, _LARGEST_KEY)
    keys = tl.sort(keys)
    is_neighbor = (rank < total) & (rank < form.n_nearest)
    k = tl.where(is_neighbor, _index_of(keys), 0).to(tl.int32)
    place = atom.frame * natoms + k // images_per_atom
    # Translations are computed again: this is cheaper than to keep them with the keys.
    image = _images_of(place, k % images_per_atom, atom=atom, coord=atoms.coord, cells=atoms.cells)
    _write_sections(
        neighbor=neighbor,
        shift=shift,
        needed_widths=None,
        row=row,
        place=place,
        s=image.s,
        is_neighbor=is_neighbor,
        kind=tl.load(atoms.atype + place, is_neighbor, -1),
        form=form,
        by_type=by_type,
        counting=False,
    )


@triton.jit(do_not_specialize=["natoms", "nframes", "ntypes", "n_shorter"])
def count_kernel(
    type_counts,  # (nrows, ntypes) int32, written
    shorter_counts,  # (nrows, n_shorter) int32, written
    nearest_squared,  # (nrows,) float64, written: least |r|² of all images, else infinite [Å²]
    radii_squared,  # (1 + n_shorter,) float64: of the cut-off and of shorter radii [Å²]
    atoms,
    rows,
    natoms,
    nframes,
    ntypes,
    n_shorter,
    block: tl.constexpr,
    type_tile: tl.constexpr,  # a power of two, at least `ntypes`
    radius_tile: tl.constexpr,  # a power of two, at least `n_shorter`
) -> None:
    """Count the neighbours of one atom of each type, and those within each shorter radius."""
    atom = _program_atom(rows, atoms.coord, nframes)
    row = atom.row
    images_per_atom = _images_per_atom(atoms.cells, atom.frame)
    n_images = _n_images(atoms, atom.frame, images_per_atom, searched=atom.exists)
    kind = tl.arange(0, type_tile)
    radius = tl.arange(0, radius_tile)
    # |r|² < 0 never holds: lanes beyond the last radius count no neighbours.
    shorter_squared = tl.load(radii_squared + 1 + radius, radius < n_shorter, 0.0)
    rcut_squared = tl.load(radii_squared)
    of_types = tl.zeros((type_tile,), tl.int32)
    within = tl.zeros((radius_tile,), tl.int32)
    least_squared = rcut_squared * 0.0 + float("inf")  # a tensor, as the loop needs
    for begin in range(0, n_images, block):
        k = begin + tl.arange(0, block)
        images = _compare(k, n_images, images_per_atom, atom=atom, atoms=atoms, natoms=natoms)
        squared = tl.where(images.is_image, images.squared, float("inf"))
        least_squared = tl.minimum(least_squared, tl.min(squared))
        # No mask: beyond the last image `place` is that of an atom.
        kind_j = tl.where(squared < rcut_squared, tl.load(atoms.atype + images.place), -1)
        of_types += tl.sum((kind_j[:, None] == kind[None, :]).to(tl.int32), 0)
        within += tl.sum((squared[:, None] < shorter_squared[None, :]).to(tl.int32), 0)
    tl.store(type_counts + row * ntypes + kind, of_types, kind < ntypes)
    tl.store(shorter_counts + row * n_shorter + radius, within, radius < n_shorter)
    tl.store(nearest_squared + row, least_squared)


# ----- lists from candidates ---------------------------------------------------------------------


@triton.jit(do_not_specialize=["natoms"])
def mark_stale_kernel(
    stale,  # (nframes,) int32, set to 1
    needed,  # `Candidates.needed`: NOT_FINITE is set to 1
    coord,  # (nframes, natoms, 3) float64 [Å]
    reference,  # (nframes, natoms, 3) float64 [Å]
    natoms,
    limit_squared,  # [Å²]
    block: tl.constexpr,
) -> None:
    """Mark structures with |x − x_reference|² > limit_squared, or NaN or infinity, for an atom.

    A program compares `block` atoms of one structure.
    """
    frame = tl.program_id(0).to(tl.int64)
    atom = tl.program_id(1) * block + tl.arange(0, block)
    exists = atom < natoms
    offset = (frame * natoms + atom) * 3
    squared = tl.zeros((block,), tl.float64)
    zero = tl.zeros((block,), tl.float64)  # NaN if a coordinate is not finite
    for axis in tl.static_range(3):
        x = tl.load(coord + offset + axis, exists, 0.0)
        displacement = x - tl.load(reference + offset + axis, exists, 0.0)
        squared += displacement * displacement
        zero += x - x
    # Negated, since NaN compares as false: an atom that is not finite is far.
    far = tl.sum((exists & ((squared <= limit_squared) == 0)).to(tl.int32))
    not_finite = tl.sum((exists & (zero != 0.0)).to(tl.int32))
    tl.atomic_max(stale + frame, 1, far > 0)
    tl.atomic_max(needed + _NOT_FINITE, 1, not_finite > 0)


@triton.jit(do_not_specialize=["natoms"])
def refer_kernel(
    reference,  # (nframes, natoms, 3) float64, written for stale structures
    built,  # (nframes,) int64: lists of each structure, counted up
    coord,  # (nframes, natoms, 3) float64
    stale,  # (nframes,) int32
    natoms,
    block: tl.constexpr,
) -> None:
    """Keep the positions of a stale structure, and count its new list.

    A program copies `block` coordinates of one structure.
    """
    frame = tl.program_id(0).to(tl.int64)
    is_stale = tl.load(stale + frame)
    element = tl.program_id(1) * block + tl.arange(0, block)
    mask = (element < natoms * 3) & (is_stale != 0)
    offset = frame * natoms * 3 + element
    tl.store(reference + offset, tl.load(coord + offset, mask, 0.0), mask)
    n_built = tl.load(built + frame)
    tl.store(built + frame, n_built + is_stale, tl.program_id(1) == 0)  # one program of the frame


@triton.jit(do_not_specialize=["natoms", "nframes"])
def renew_kernel(
    place,  # (nrows, room) int32, written: places of candidates
    translation,  # (nrows, room, 3) int32, written: S; None without cells
    number,  # (nrows,) int32, written: candidates of each row, more than `room` if they do not fit
    needed,  # `Candidates.needed`: ROOM is raised to the largest number that does not fit
    stale,  # (nframes,) int32
    atoms,  # with cells for the reach of cut-off and skin
    rows,
    natoms,
    nframes,
    room,
    limit_squared,  # (cut-off + skin)² [Å²]
    block: tl.constexpr,
) -> None:
    """Write the candidates of one atom, |r| < cut-off + skin, if its structure is stale."""
    atom = _program_atom(rows, atoms.coord, nframes)
    images_per_atom = _images_per_atom(atoms.cells, atom.frame)
    renewed = atom.exists & (tl.load(stale + atom.frame) != 0)
    n_images = _n_images(atoms, atom.frame, images_per_atom, searched=renewed)
    total = n_images * 0  # a tensor, as the loop needs
    for begin in range(0, n_images, block):
        k = begin + tl.arange(0, block)
        images = _compare(k, n_images, images_per_atom, atom=atom, atoms=atoms, natoms=natoms)
        near = images.is_image & (images.squared < limit_squared)
        column = total + tl.cumsum(near.to(tl.int32), 0) - 1
        offset = atom.row * room + column
        fits = near & (column < room)
        tl.store(place + offset, images.place.to(tl.int32), fits)
        if translation is not None:
            store_vector(translation, offset, fits, images.s)
        total += tl.sum(near.to(tl.int32))
    tl.store(number + atom.row, total, renewed)
    tl.atomic_max(needed + _ROOM, total, renewed & (total > room))


@triton.jit(do_not_specialize=["natoms", "nframes"])
def lay_out_kernel(
    neighbor,  # (nrows, nnei) int64, written: places; −1 for an empty slot
    shift,  # (nrows, nnei, 3) int32, written: S; None without cells
    needed,  # `Candidates.needed`, raised
    place,  # (nrows, room) int32: places of candidates
    translation,  # (nrows, room, 3) int32: their S; None without cells
    number,  # (nrows,) int32: candidates of each row
    too_near_squared,  # (1,) float64: |r|² below which atoms are too near [Å²]
    shorter_squared,  # (n_shorter,) float64: squares of the shorter radii [Å²]
    shorter_bounds,  # (n_shorter,) int64: bounds of the neighbours within them
    n_shorter,
    atoms,
    rows,
    natoms,
    nframes,
    form,
    room,
    by_type: tl.constexpr,
    block: tl.constexpr,
    capacity: tl.constexpr,  # a power of two, at least `room`
) -> None:
    """Write the neighbours of one atom, |r| < rcut, from its candidates; a lane has one candidate.

    r = x_j − x_i + S·box at the present positions, with S of the time of `renew_kernel`.
    """
    atom = _program_atom(rows, atoms.coord, nframes)
    row = atom.row
    lane = tl.arange(0, capacity)
    has_candidate = atom.exists & (lane < tl.minimum(tl.load(number + row), room))
    offset = row * room + lane
    # Empty lanes read the first atom.
    candidate = tl.load(place + offset, has_candidate, 0).to(tl.int64)
    r = minus(load_vector(atoms.coord, candidate), atom.position)
    if translation is not None:
        s = cast(load_vector(translation, offset, has_candidate, 0), tl.float64)
        r = _translate(atoms.cells.box, atom.frame, r, s)
    squared = dot(r, r)
    near = has_candidate & (squared < form.rcut_squared)
    total = tl.sum(near.to(tl.int32))

    # Report atoms too near, and too many neighbours within shorter radii.
    nearest_squared = tl.min(tl.where(near, squared, float("inf")))
    tl.atomic_max(needed + _AT_SAME_PLACE, 1, nearest_squared < _SAME_PLACE_SQUARED)
    distance = tl.sqrt(tl.maximum(nearest_squared, _SAME_PLACE_SQUARED))
    # A tensor: Triton's interpreter cannot divide a constexpr.
    scale = tl.full((), _NEARNESS, tl.float64)
    nearness = (scale / distance + 1.0).to(tl.int32)  # rounded up; a maximum is the least distance
    tl.atomic_max(needed + _TOO_NEAR, nearness, nearest_squared < tl.load(too_near_squared))
    for k in range(n_shorter):
        within = tl.sum((near & (squared < tl.load(shorter_squared + k))).to(tl.int32))
        too_many = within > tl.load(shorter_bounds + k)
        # In `needed` the bounds follow the widths.
        tl.atomic_max(needed + _FIRST_WIDTH + form.n_sections + k, within, too_many)

    _write_empty_row(neighbor, shift, row, form.nnei, block=block)
    # Other threads of this program write neighbours over these empty slots.
    tl.debug_barrier()
    keys = tl.sort(tl.where(near, _sort_key(squared, lane), _LARGEST_KEY))
    rank = lane
    is_neighbor = (rank < total) & (rank < form.n_nearest)
    sorted_offset = row * room + tl.where(is_neighbor, _index_of(keys), 0)
    neighbor_place = tl.load(place + sorted_offset, is_neighbor, 0).to(tl.int64)
    neighbor_s = None
    if translation is not None:
        neighbor_s = load_vector(translation, sorted_offset, is_neighbor, 0)
    _write_sections(
        neighbor=neighbor,
        shift=shift,
        needed_widths=needed + _FIRST_WIDTH,
        row=row,
        place=neighbor_place,
        s=neighbor_s,
        is_neighbor=is_neighbor,
        kind=tl.load(atoms.atype + neighbor_place, is_neighbor, -1),
        form=form,
        by_type=by_type,
        counting=True,
    )
