"""Shared by the launches of DPA-3's kernels: sizes of programs, precision, and the sums of the parts they write.

Every sum is taken in the same order every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Formula

MULTIPROCESSORS = 132  # assumed where the device does not say; an H200's
SMALLEST = 16  # side of a tile that tensor cores multiply
WIDEST = 64  # rows of a matrix W that a program holds

Tensors = Sequence[torch.Tensor]


def holding(count: int) -> int:
    """Return the side of a tile that holds so many rows or columns."""
    side: int = max(SMALLEST, triton.next_power_of_2(count))
    return side


def at_once(device: torch.device, each: int) -> int:
    """Return how many programs run at once, `each` on a multiprocessor."""
    count = MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return count * each


def share(atoms: int, parts: int, programs: int) -> int:
    """Return how many programs take the atoms in turn, if `parts` share each and `programs` run at once."""
    turns = triton.cdiv(atoms * parts, programs)
    return int(triton.cdiv(atoms, max(1, turns)))


def precision() -> str:
    """Return the precision of products: "tf32x3" splits each factor in two, which keeps single precision."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def fits_weight(weight: torch.Tensor, formula: Formula | None) -> bool:
    """Return whether the kernels know the activation and the device, and their tiles hold the rows of W."""
    known = formula is not None and weight.dtype == torch.float32
    return known and weight.shape[0] <= WIDEST and triton_support.has_tensor_cores(weight.device)


FEW = 32  # parts that a program adds one by one
BLOCK = 512  # elements of a program that adds few parts
ROWS, COLUMNS = 64, 32  # of the tile of a program that adds many parts
NEIGHBOR_ROWS, NEIGHBOR_COLUMNS = 32, 64  # of one that adds rows for an atom


@triton.jit
def few_kernel(outs, parts, sizes, counts, block: tl.constexpr) -> None:
    """Add up the parts of several tensors, `counts` of each, known when it is compiled."""
    program = tl.program_id(0)
    for number in tl.static_range(len(outs)):
        size = sizes[number]
        if (program >= 0) & (program * block < size):
            at = program * block + tl.arange(0, block)
            real = at < size
            total = tl.load(parts[number] + at, real, 0.0)
            for part in tl.static_range(1, counts[number]):
                total += tl.load(parts[number] + tl.full([], size, tl.int64) * part + at, real, 0.0)
            tl.store(outs[number] + at, total, real)
        program -= tl.cdiv(size, block)


@triton.jit
def many_kernel(outs, parts, sizes, counts, rows: tl.constexpr, columns: tl.constexpr) -> None:
    """Add up the parts of several tensors, many of each."""
    program, r = tl.program_id(0), tl.arange(0, rows)
    for number in tl.static_range(len(outs)):
        size, count = sizes[number], counts[number]
        if (program >= 0) & (program * columns < size):
            at = program * columns + tl.arange(0, columns)
            total = tl.zeros([rows, columns], outs[number].dtype.element_ty)
            for first in range(0, count, rows):
                part = first + r
                real = (part < count)[:, None] & (at < size)[None, :]
                total += tl.load(
                    parts[number] + part[:, None].to(tl.int64) * size + at[None, :], real, 0.0
                )
            tl.store(outs[number] + at, tl.sum(total, 0), at < size)
        program -= tl.cdiv(size, columns)


def add_parts(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of dense tensors over their first axis."""
    outs = [x[0] if len(x) == 1 else x.new_empty(x.shape[1:]) for x in parts]
    work = [(out, x) for out, x in zip(outs, parts, strict=True) if len(x) > 1 and out.numel()]
    few, many = (
        [(out, x) for out, x in work if (len(x) <= FEW) == is_few] for is_few in (True, False)
    )
    for pairs, kernel, width in ((few, few_kernel, BLOCK), (many, many_kernel, COLUMNS)):
        if pairs:
            totals, given = zip(*pairs, strict=True)
            sizes, counts = tuple(out.numel() for out in totals), tuple(len(x) for x in given)
            grid = (sum(triton.cdiv(size, width) for size in sizes),)
            if kernel is few_kernel:
                few_kernel[grid](
                    totals, given, sizes, tuple(map(tl.constexpr, counts)), block=BLOCK
                )
            else:
                many_kernel[grid](totals, given, sizes, counts, rows=ROWS, columns=COLUMNS)
    return outs


@triton.jit
def neighbor_kernel(
    out, values, order, start, width, rows: tl.constexpr, columns: tl.constexpr
) -> None:
    """Add up the rows of `values` that belong to an atom: those that `order` lists from its `start` on."""
    atom = tl.program_id(0)
    c, r = tl.program_id(1) * columns + tl.arange(0, columns), tl.arange(0, rows)
    total = tl.zeros([rows, columns], out.dtype.element_ty)
    end = tl.load(start + atom + 1)
    for first in range(tl.load(start + atom), end, rows):
        real = first + r < end
        row = tl.load(order + first + r, real, 0)
        total += tl.load(
            values + row[:, None] * width + c[None, :], real[:, None] & (c < width)[None, :], 0.0
        )
    tl.store(out + atom * width + c, tl.sum(total, 0), c < width)


def add_to_neighbors(
    values: torch.Tensor, order: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """Return, for each atom, the sum of the rows of `values` `(edges, width)` that belong to it.

    `order` and `start` are those of `geometry.Incoming`.
    """
    atoms, width = len(start) - 1, values.shape[1]
    out = values.new_empty(atoms, width)
    grid = (atoms, triton.cdiv(width, NEIGHBOR_COLUMNS))
    neighbor_kernel[grid](
        out, values, order, start, width, rows=NEIGHBOR_ROWS, columns=NEIGHBOR_COLUMNS
    )
    return out
