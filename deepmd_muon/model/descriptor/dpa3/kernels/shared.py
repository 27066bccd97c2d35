"""What the launches of DPA-3's kernels share: sizes, precision, and sums of the parts that they write.

No two programs of these kernels add to one number. They write parts, which are added up afterwards
in the same order every time, so that results repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.tensors import AngleTerms, EdgeTerms
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Formula

Tensors = Sequence[Tensor]
Terms = TypeVar("Terms", EdgeTerms, AngleTerms)
Sizes = TypeVar("Sizes", bound=tuple[Any, ...])

# ----- sizes and precision -----------------------------------------------------------------------

MULTIPROCESSORS = 132  # of an H200; assumed if the device does not say
SMALLEST = 16  # side of the smallest tile that tensor cores multiply
WIDEST = 64  # rows of a matrix W that a program holds


def holding(count: int) -> int:
    """Return the side of a tile that holds so many rows or columns."""
    side: int = max(SMALLEST, triton.next_power_of_2(count))
    return side


def constants(sizes: Sizes) -> Sizes:
    """Return sizes that are known when a kernel is compiled."""
    return type(sizes)(*map(tl.constexpr, sizes))


def contiguous(terms: Terms) -> Terms:
    """Return the terms as contiguous tensors, which the kernels expect."""
    return type(terms)(*(x.contiguous() for x in terms))


def at_once(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs a device runs at once."""
    count = MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return count * per_multiprocessor


def share(atoms: int, parts: int, programs: int) -> int:
    """Return how many programs take the atoms in turn.

    `parts` programs share each atom, and `programs` run at once. The atoms are spread evenly over
    the least number of turns.
    """
    turns = triton.cdiv(atoms * parts, programs)
    return int(triton.cdiv(atoms, max(1, turns)))


def precision() -> str:
    """Return the precision of products: "tf32x3" splits each factor in two to keep single precision."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def fits_weight(weight: Tensor, formula: Formula | None) -> bool:
    """Return whether the kernels know activation and device, and their tiles hold the rows of W."""
    if formula is None or weight.dtype != torch.float32 or weight.shape[0] > WIDEST:
        return False
    return triton_support.has_tensor_cores(weight.device)


@triton.jit
def load_tile(tensor, row, column, mask, stride):
    """Load a tile `(row, column)` of a matrix with `stride` columns; 0 where the mask is false."""
    return tl.load(tensor + row[:, None] * stride + column[None, :], mask, 0.0)


# ----- sums of parts -----------------------------------------------------------------------------

FEW = 32  # addends that a program adds one by one; more are added in tiles
BLOCK = 512  # elements of a program that adds few
ROWS = 64  # addends and elements of the tile of a program that adds many
COLUMNS = 32


class Sum(NamedTuple):
    """A sum over the first axis of `addends`, and where it goes."""

    out: Tensor
    addends: Tensor


def add_parts(*parts: Tensor) -> list[Tensor]:
    """Return the sums of dense tensors over their first axis, in at most two launches."""
    sums: list[Tensor] = []
    few: list[Sum] = []
    many: list[Sum] = []
    for addends in parts:
        if len(addends) == 1:
            sums.append(addends.squeeze(0))
            continue
        out = addends.new_empty(addends.shape[1:])
        sums.append(out)
        if out.numel():
            (few if len(addends) <= FEW else many).append(Sum(out, addends))
    if few:
        max_counts = tuple(tl.constexpr(_rounded_up(len(job.addends))) for job in few)
        few_kernel[_programs(few, BLOCK)](**_arguments(few), max_counts=max_counts, block=BLOCK)
    if many:
        many_kernel[_programs(many, COLUMNS)](**_arguments(many), rows=ROWS, columns=COLUMNS)
    return sums


def _rounded_up(count: int) -> int:
    """Return numbers up to 4 as they are, larger ones as a multiple of 4."""
    return count if count <= 4 else -(-count // 4) * 4


def _programs(sums: list[Sum], width: int) -> tuple[int]:
    return (sum(triton.cdiv(job.out.numel(), width) for job in sums),)


def _arguments(sums: list[Sum]) -> dict[str, tuple[Tensor | int, ...]]:
    return {
        "outs": tuple(job.out for job in sums),
        "addends": tuple(job.addends for job in sums),
        "sizes": tuple(job.out.numel() for job in sums),
        "counts": tuple(len(job.addends) for job in sums),
    }


@triton.jit
def few_kernel(outs, addends, sizes, counts, max_counts, block: tl.constexpr) -> None:
    """Write several sums of `counts` addends, each of `sizes` elements.

    `max_counts` is known when the kernel is compiled, so that the loop over addends is unrolled and
    all loads are under way at once. `counts` is not: each number would need a kernel of its own.
    """
    program = tl.program_id(0)
    for number in tl.static_range(len(outs)):
        size = sizes[number]
        if (program >= 0) & (program * block < size):
            at = program * block + tl.arange(0, block)
            real = at < size
            total = tl.load(addends[number] + at, real, 0.0)
            for i in tl.static_range(1, max_counts[number]):
                # int64, since addends · size may exceed 2³¹
                begin = tl.full([], size, tl.int64) * i
                total += tl.load(addends[number] + begin + at, real & (i < counts[number]), 0.0)
            tl.store(outs[number] + at, total, real)
        program -= tl.cdiv(size, block)  # the next tensor's programs come after these


@triton.jit
def many_kernel(outs, addends, sizes, counts, rows: tl.constexpr, columns: tl.constexpr) -> None:
    """Write several sums of many addends."""
    program = tl.program_id(0)
    row = tl.arange(0, rows)
    for number in tl.static_range(len(outs)):
        size = sizes[number]
        count = counts[number]
        if (program >= 0) & (program * columns < size):
            at = program * columns + tl.arange(0, columns)
            total = tl.zeros([rows, columns], outs[number].dtype.element_ty)
            for offset in range(0, count, rows):
                i = offset + row
                real = (i < count)[:, None] & (at < size)[None, :]
                begin = i[:, None].to(tl.int64) * size
                total += tl.load(addends[number] + begin + at[None, :], real, 0.0)
            tl.store(outs[number] + at, tl.sum(total, 0), at < size)
        program -= tl.cdiv(size, columns)


# ----- sums over the edges that lead to an atom --------------------------------------------------

NEIGHBOR_ROWS = 32  # rows and columns of the tile of a program that adds rows for an atom
NEIGHBOR_COLUMNS = 64


def add_to_neighbors(values: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """Return, for each atom, the sum of the rows of `values` `(edges, width)` that belong to it.

    `order` and `start` are those of `geometry.Incoming`.
    """
    atoms = len(start) - 1
    width = values.shape[1]
    out = values.new_empty(atoms, width)
    grid = (atoms, triton.cdiv(width, NEIGHBOR_COLUMNS))
    neighbor_kernel[grid](
        out=out,
        values=values,
        order=order,
        start=start,
        width=width,
        rows=NEIGHBOR_ROWS,
        columns=NEIGHBOR_COLUMNS,
    )
    return out


@triton.jit
def neighbor_kernel(
    out,  # (atoms, width), written
    values,  # (edges, width)
    order,  # (edges,): rows of `values`, sorted by atom
    start,  # (atoms + 1,): where the rows of each atom start in `order`
    width,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Add up the rows of `values` that belong to an atom."""
    atom = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    tile_row = tl.arange(0, rows)
    total = tl.zeros([rows, columns], out.dtype.element_ty)
    end = tl.load(start + atom + 1)
    for offset in range(tl.load(start + atom), end, rows):
        real = offset + tile_row < end
        row = tl.load(order + offset + tile_row, real, 0)
        mask = real[:, None] & (column < width)[None, :]
        total += tl.load(values + row[:, None] * width + column[None, :], mask, 0.0)
    tl.store(out + atom * width + column, tl.sum(total, 0), column < width)
