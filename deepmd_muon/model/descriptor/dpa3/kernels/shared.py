"""What DPA-3's kernels share: sizes of tiles, precision of products, and deterministic sums.

No two programs of these kernels add to one number. They write parts, which `add_parts` and
`sum_by_neighbor` add up in a fixed order, so that results repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.geometry import Incoming
from deepmd_muon.model.descriptor.dpa3.tensors import AngleTerms, EdgeTerms
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Formula

Tensors = Sequence[Tensor]
Terms = TypeVar("Terms", EdgeTerms, AngleTerms)
AnySizes = TypeVar("AnySizes", bound=tuple[Any, ...])

# ----- sizes and precision -----------------------------------------------------------------------

MULTIPROCESSORS = 132  # of an H200; assumed on a CPU
MIN_DOT_SIDE = 16  # side of the smallest tile that tensor cores multiply
MAX_WEIGHT_ROWS = 64  # rows of W that a program holds in registers


def supports(weight: Tensor, formula: Formula | None) -> bool:
    """Return whether kernels fit: float32, activation, tensor cores, and tiles for W's rows."""
    if formula is None or weight.dtype != torch.float32 or weight.shape[0] > MAX_WEIGHT_ROWS:
        return False
    return triton_support.has_tensor_cores(weight.device)


def contiguous(terms: Terms) -> Terms:
    """Return the terms as contiguous tensors, which the kernels expect."""
    return type(terms)(*(x.contiguous() for x in terms))


def concurrent_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Return a device's number of multiprocessors times a tuned number of programs for each."""
    count = MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return count * per_multiprocessor


def tile_side(count: int) -> int:
    """Return the side of a tile for `count` rows or columns: a power of two, at least 16."""
    side: int = max(MIN_DOT_SIDE, triton.next_power_of_2(count))
    return side


def dot_precision() -> str:
    """Return `tl.dot`'s precision; "tf32x3" splits each factor in two to keep single precision."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def as_constexpr(sizes: AnySizes) -> AnySizes:
    """Return a kernel's `Sizes` as compile-time constants."""
    return type(sizes)(*map(tl.constexpr, sizes))


@triton.jit
def load_tile(tensor, row, column, mask, stride):
    """Load a tile `(row, column)` of a matrix with `stride` columns; 0 where the mask is false."""
    return tl.load(tensor + row[:, None] * stride + column[None, :], mask, 0.0)


# ----- sums of parts -----------------------------------------------------------------------------
# Sizes are specialized, unlike in DPA-3's other kernels: if 16 divides them, loads are vectorized.

MAX_FEW = 32  # addends that `sum_few_kernel` adds one by one; `sum_many_kernel` adds more
FEW_BLOCK = 512  # elements of a program of `sum_few_kernel`
MANY_ROWS = 64  # addends in the tile of a program of `sum_many_kernel`
MANY_COLUMNS = 32  # elements in this tile


class SumJob(NamedTuple):
    """A sum over the first axis of `addends`, and where it goes."""

    out: Tensor
    addends: Tensor


def add_parts(*parts: Tensor) -> list[Tensor]:
    """Return the sums of contiguous tensors over their first axis, in at most two launches."""
    outs: list[Tensor] = []
    few: list[SumJob] = []
    many: list[SumJob] = []
    for addends in parts:
        if len(addends) == 1:
            outs.append(addends.squeeze(0))  # a view
            continue
        out = addends.new_empty(addends.shape[1:])
        outs.append(out)
        if out.numel():
            (few if len(addends) <= MAX_FEW else many).append(SumJob(out, addends))
    if few:
        max_counts = tuple(tl.constexpr(_rounded_up(len(job.addends))) for job in few)
        sum_few_kernel[_grid(few, FEW_BLOCK)](
            **_arguments(few), max_counts=max_counts, block=FEW_BLOCK
        )
    if many:
        sum_many_kernel[_grid(many, MANY_COLUMNS)](
            **_arguments(many), rows=MANY_ROWS, columns=MANY_COLUMNS
        )
    return outs


def _rounded_up(count: int) -> int:
    """Return counts up to 4 as they are, larger ones as a multiple of 4: fewer kernels to compile."""
    return count if count <= 4 else -(-count // 4) * 4


def _grid(jobs: list[SumJob], elements: int) -> tuple[int]:
    """Return the grid with `elements` of one sum for each program."""
    return (sum(triton.cdiv(job.out.numel(), elements) for job in jobs),)


def _arguments(jobs: list[SumJob]) -> dict[str, tuple[Tensor | int, ...]]:
    return {
        "outs": tuple(job.out for job in jobs),
        "addends": tuple(job.addends for job in jobs),
        "sizes": tuple(job.out.numel() for job in jobs),
        "counts": tuple(len(job.addends) for job in jobs),
    }


@triton.jit
def sum_few_kernel(
    outs,  # tensors of `sizes[number]` elements, written
    addends,  # tensors (counts[number], sizes[number])
    sizes,
    counts,
    max_counts,  # compile-time: unrolls the loop over addends, so that all loads overlap
    block: tl.constexpr,
) -> None:
    """Write several sums of few addends."""
    # Among the programs of sum `number`: too large before this program's sum, negative after it.
    program = tl.program_id(0)
    for number in tl.static_range(len(outs)):
        size = sizes[number]
        if (program >= 0) & (program * block < size):
            element = program * block + tl.arange(0, block)
            mask = element < size
            total = tl.load(addends[number] + element, mask, 0.0)
            for i in tl.static_range(1, max_counts[number]):
                # int64, since addends · size may exceed 2³¹.
                begin = tl.full([], size, tl.int64) * i
                i_mask = mask & (i < counts[number])
                total += tl.load(addends[number] + begin + element, i_mask, 0.0)
            tl.store(outs[number] + element, total, mask)
        program -= tl.cdiv(size, block)


@triton.jit
def sum_many_kernel(
    outs,  # tensors of `sizes[number]` elements, written
    addends,  # tensors (counts[number], sizes[number])
    sizes,
    counts,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Write several sums of many addends."""
    # Among the programs of sum `number`: too large before this program's sum, negative after it.
    program = tl.program_id(0)
    row = tl.arange(0, rows)
    for number in tl.static_range(len(outs)):
        size = sizes[number]
        count = counts[number]
        if (program >= 0) & (program * columns < size):
            element = program * columns + tl.arange(0, columns)
            total = tl.zeros([rows, columns], outs[number].dtype.element_ty)
            for offset in range(0, count, rows):
                i = offset + row
                mask = (i < count)[:, None] & (element < size)[None, :]
                begin = i[:, None].to(tl.int64) * size
                total += tl.load(addends[number] + begin + element[None, :], mask, 0.0)
            tl.store(outs[number] + element, tl.sum(total, 0), element < size)
        program -= tl.cdiv(size, columns)


# ----- sums over the edges that lead to an atom --------------------------------------------------

NEIGHBOR_ROWS = 32  # edges in the tile of a program of `sum_by_neighbor_kernel`
NEIGHBOR_COLUMNS = 64  # columns in this tile


def sum_by_neighbor(edge_rows: Tensor, incoming: Incoming) -> Tensor:
    """Return, for each atom, the sum of the rows `(edges, width)` of the edges that lead to it."""
    n_atoms = len(incoming.start) - 1
    width = edge_rows.shape[1]
    out = edge_rows.new_empty(n_atoms, width)
    grid = (n_atoms, triton.cdiv(width, NEIGHBOR_COLUMNS))
    sum_by_neighbor_kernel[grid](
        out=out,
        edge_rows=edge_rows,
        order=incoming.order,
        start=incoming.start,
        width=width,
        tile_rows=NEIGHBOR_ROWS,
        tile_columns=NEIGHBOR_COLUMNS,
    )
    return out


@triton.jit
def sum_by_neighbor_kernel(
    out,  # (atoms, width), written
    edge_rows,  # (edges, width)
    order,  # (edges,): numbers of the edges, sorted by neighbour
    start,  # (atoms + 1,): where the edges to each atom start in `order`
    width,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Write some columns of the sum for one atom."""
    atom = tl.program_id(0)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    row = tl.arange(0, tile_rows)
    total = tl.zeros([tile_rows, tile_columns], out.dtype.element_ty)
    end = tl.load(start + atom + 1)
    for offset in range(tl.load(start + atom), end, tile_rows):
        row_mask = offset + row < end
        edge = tl.load(order + offset + row, row_mask, 0)
        mask = row_mask[:, None] & (column < width)[None, :]
        total += tl.load(edge_rows + edge[:, None] * width + column[None, :], mask, 0.0)
    tl.store(out + atom * width + column, tl.sum(total, 0), column < width)
