"""The tables of a fused step: where the blocks of all parameters are, and how programs share them.

A *block* is a matrix that is orthogonalized alone: a parameter, an element of its batch, or a part
of a fused weight. Blocks are numbered through all parameters, in the order of Magma's scores.
Blocks of one shape form a *group*, whose directions are one batch (b, rows, columns) in the buffer
of directions. (`MatrixView.groups` is something else: interleaved parts of a weight.) A program
takes a *chunk*: some consecutive elements of one block, row by row.

A block is stored in *runs*: `run_length` adjacent elements, with `stride` from the start of one run
to that of the next. For example, a weight (4, 6) is split into the blocks a and b:

    columns 4+2      rows 2+2 in 2 groups

    a a a a b b      a a a a a a
    a a a a b b      b b b b b b
    a a a a b b      a a a a a a
    a a a a b b      b b b b b b

On the left, a has four runs of 4 and b four runs of 2, both with stride 6. On the right, both have
two runs of 6 with stride 12. Without a split, a block is one run. So is a block of whole rows that
are adjacent ("rows 2+2").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.update.fused_kernels import BLOCK_ROW, ROW, SIZE, START

# Vectors of the kernels start at multiples of this number of elements, and of bytes.
ALIGNED = 16


class BlockGroup(NamedTuple):
    """Blocks of one shape, adjacent in the buffer of directions from element `start` on."""

    start: int  # a multiple of ALIGNED
    rows: int
    columns: int
    blocks: list[int]  # their numbers

    @property
    def end(self) -> int:
        """The element after the last one."""
        return self.start + len(self.blocks) * self.rows * self.columns


def group_blocks(views: Sequence[MatrixView]) -> list[BlockGroup]:
    """Group the blocks of all parameters by shape, in the order in which shapes first occur."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    n_blocks = 0
    for view in views:
        for _ in range(view.batch):
            for shape in view.block_shapes:
                by_shape[shape].append(n_blocks)
                n_blocks += 1
    groups = []
    start = 0
    for (rows, columns), blocks in by_shape.items():
        groups.append(BlockGroup(start, rows, columns, blocks))
        start = length_of(groups)
    return groups


def length_of(groups: Sequence[BlockGroup]) -> int:
    """Return the elements of a buffer for the directions of these groups, a multiple of ALIGNED."""
    return -(-groups[-1].end // ALIGNED) * ALIGNED


class BlockLocation(NamedTuple):
    """A block's place in memory, in the order of the columns in `fused_kernels` after START.

    Element k of the block is element offset + (k // run_length) · stride + k % run_length of the
    parameter, of its momentum and of its gradient.

    Attributes
    ----------
    size
        Elements of the block.
    run_length, stride
        See above.
    offset
        Number of the block's first element in the parameter.
    parameter, momentum
        Addresses of these tensors.
    tensor
        Number of the parameter in the wave.
    block
        Number of the block.
    plain
        Whether the block is one run and aligned, so that the kernels may use vectors.
    group, result
        Number of the block's group, and first element of the block in that group's polar factors.
    direction
        First element of the block in the buffer of directions.
    """

    size: int
    run_length: int
    stride: int
    offset: int
    parameter: int
    momentum: int
    tensor: int
    block: int
    plain: bool
    group: int
    result: int
    direction: int


def locate_blocks(
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    views: Sequence[MatrixView],
    groups: Sequence[BlockGroup],
) -> list[BlockLocation]:
    """Return the location of each block; `groups` are those of `group_blocks`."""
    place_in_group = {
        block: (number, place)
        for number, group in enumerate(groups)
        for place, block in enumerate(group.blocks)
    }
    locations: list[BlockLocation] = []
    for tensor, (p, m, view) in enumerate(zip(params, buffers, views, strict=True)):
        matrix_size = view.rows * view.columns
        for matrix in range(view.batch):
            offset = matrix * matrix_size
            for rows, columns in view.block_shapes:
                size = rows * columns
                # The matrix consists of `view.groups` equal sections of rows or of columns, and the
                # block has a share of each. A run is one share, or with columns one row of a share.
                if view.axis == "columns":
                    run_length = columns // view.groups
                    stride = view.columns // view.groups
                else:
                    run_length = size // view.groups
                    stride = matrix_size // view.groups
                aligned = not any(x % ALIGNED for x in (size, offset, p.data_ptr(), m.data_ptr()))
                block = len(locations)
                group, place = place_in_group[block]
                locations.append(
                    BlockLocation(
                        size=size,
                        run_length=run_length,
                        stride=stride,
                        offset=offset,
                        parameter=p.data_ptr(),
                        momentum=m.data_ptr(),
                        tensor=tensor,
                        block=block,
                        plain=run_length == size and aligned,
                        group=group,
                        result=place * size,
                        direction=groups[group].start + place * size,
                    )
                )
                offset += run_length  # the first runs of the blocks are adjacent
    return locations


class Chunks(NamedTuple):
    """The chunks of all blocks, int64 tensors in host memory."""

    table: Tensor  # (chunks, ROW): first element of the chunk in its block, and `BlockLocation`
    of_blocks: Tensor  # (blocks, 2): first chunk and number of chunks of each block


def divide_into_chunks(locations: Sequence[BlockLocation], width: int) -> Chunks:
    """Divide blocks into chunks of `width` elements; the last one of a block may have fewer."""
    blocks = torch.tensor(
        [(0, *location) for location in locations], dtype=torch.int64, device="cpu"
    )
    count = (blocks[:, int(SIZE.value)] + width - 1) // width
    first_chunk = count.cumsum(0) - count
    table = blocks.repeat_interleave(count, dim=0)
    number_in_block = torch.arange(len(table), device="cpu") - first_chunk.repeat_interleave(count)
    table[:, int(START.value)] = number_in_block * width
    assert table.shape[1] == int(ROW.value)
    return Chunks(table, torch.stack([first_chunk, count], dim=1))


def block_table(chunks: Chunks, groups: Sequence[BlockGroup], scores: Sequence[Tensor]) -> Tensor:
    """Return the rows (blocks, BLOCK_ROW) that `combine` reads, int64, in host memory.

    `scores` are Magma's, contiguous, float32, a tensor for each parameter; none without Magma.
    """
    count = len(chunks.of_blocks)
    addresses = [
        score.data_ptr() + score.element_size() * i
        for score in scores
        for i in range(score.numel())
    ]
    # Sums of squares are stored group after group. The place of each block is the inverse of the
    # permutation that lists the blocks so.
    by_group = torch.tensor([block for group in groups for block in group.blocks], device="cpu")
    columns = [torch.tensor(addresses or [0] * count, device="cpu"), by_group.argsort()]
    table = torch.cat([chunks.of_blocks, torch.stack(columns, dim=1)], dim=1)
    assert table.shape[1] == int(BLOCK_ROW.value)
    return table
