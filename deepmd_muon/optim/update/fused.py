"""The fused Muon route: one kernel each for the momenta, the damping and the updates of a wave.

A *wave* is the parameters that a step takes together; `muon.muon_` defines its results, with which
this agrees up to rounding. A *block* is a matrix that is orthogonalized alone, a *group* all blocks
of one shape: one batch (b, rows, columns) of directions. (`MatrixView.groups` is something else:
the parts in which the blocks of a weight are interleaved.) A *chunk* is the elements of a block
that one program takes. An *applied* group is one of large matrices: its last product updates the
parameters itself (`AppliedGroups`).

A step: `advance` writes the directions, group after group; each group is orthogonalized; `combine`
writes the blocks' factors; `apply` updates the parameters of groups that are not applied.

Tables on the device, a small model's directions, and a CUDA graph of all launches are made once and
serve until a parameter moves. A step then writes its numbers and replays the graph. New addresses
of gradients, as after ``zero_grad(set_to_none=True)``, take one small copy from pinned memory, and
a new learning rate one launch; neither synchronizes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig, update_scale
from deepmd_muon.optim.cuda import SideStream, try_record
from deepmd_muon.optim.polar.dispatch import choose_for
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.polar.tables import (
    AddressTable,
    NumbersOnDevice,
    StepNumbers,
    captured_addresses,
)
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.torch_hooks import in_phase
from deepmd_muon.optim.update.adam import moment_dtype
from deepmd_muon.optim.update.applied import AppliedGroups, MatrixGroup, takes
from deepmd_muon.optim.update.fused_kernels import (
    GROUP,
    ROW,
    SIZE,
    START,
    SUMS,
    advance,
    apply,
    combine,
)
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.update.muon import polar_factors

_LOG = logging.getLogger(__name__)
TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Elements of a chunk: short chunks occupy all multiprocessors for small models, long ones suit
# large models.
_SHORT = 1024
_LONG = 4096
SMALL = 4 * 2**20  # elements of a small model
# A step of a large model is recorded once more than this number were launched: a caller that
# captures whole training steps needs no graph here.
_STEPS_BEFORE_RECORDING = 10
_ADVANCE_WARPS = 4  # with more, sums in float64 allow too few programs on a multiprocessor
_APPLY_WARPS = 4
_CHUNKS_AT_A_TIME = 256  # that a program of `combine` reads
_ALIGNED = 16  # vectors start at multiples of this number of elements, and of bytes


# ----- tables ------------------------------------------------------------------------------------


class BlockGroup(NamedTuple):
    """Blocks of one shape, adjacent in the buffer of directions from element `start` on."""

    start: int
    rows: int
    columns: int
    blocks: list[int]  # their numbers

    @property
    def end(self) -> int:
        """The element after the last one."""
        return self.start + len(self.blocks) * self.rows * self.columns


class ChunkRow(NamedTuple):
    """A row of the kernels' table, in the order of the constants in `fused_kernels`.

    A block is stored in *runs* of adjacent elements. Its element k is this element of parameter,
    momentum and gradient: offset + (k // columns) · stride + k % columns.

    Attributes
    ----------
    start
        First element of the chunk in its block.
    size
        Of the block.
    columns, stride
        Length of a run, and distance from one run to the next. A block without gaps is one run.
    offset
        Of the block in its tensors.
    parameter, momentum
        Addresses of these tensors.
    tensor
        Number of the parameter in the wave.
    block
        Number of the block in the wave.
    plain
        Whether the block has no gaps and is aligned, so that the kernels may use vectors.
    group, result
        Number of the block's group, and offset of the block in the polar factors of that group.
    direction
        Offset of the block in the buffer of directions.
    """

    start: int
    size: int
    columns: int
    stride: int
    offset: int
    parameter: int
    momentum: int
    tensor: int
    block: int
    plain: bool
    group: int = 0
    result: int = 0
    direction: int = 0


def block_rows(
    params: Sequence[Tensor], buffers: Sequence[Tensor], views: Sequence[MatrixView]
) -> tuple[list[ChunkRow], list[BlockGroup]]:
    """Return a row for the first chunk of each block, in the order of the scores, and the groups.

    Each group starts at a multiple of `_ALIGNED`.
    """
    rows: list[ChunkRow] = []
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tensor, (p, m, view) in enumerate(zip(params, buffers, views, strict=True)):
        in_columns = view.axis == "columns"
        whole = view.rows * view.columns
        for matrix in range(view.batch):
            offset = matrix * whole
            for shape in view.block_shapes:
                size = shape[0] * shape[1]
                # Each interleaved part of a block is one run; if columns are split, each row of
                # each part is one.
                run = (shape[1] if in_columns else size) // view.groups
                aligned = not any(x % _ALIGNED for x in (size, offset, p.data_ptr(), m.data_ptr()))
                by_shape[shape].append(len(rows))
                rows.append(
                    ChunkRow(
                        start=0,
                        size=size,
                        columns=run,
                        stride=(view.columns if in_columns else whole) // view.groups,
                        offset=offset,
                        parameter=p.data_ptr(),
                        momentum=m.data_ptr(),
                        tensor=tensor,
                        block=len(rows),
                        plain=run == size and aligned,
                    )
                )
                offset += run  # the blocks' first runs are adjacent
    groups: list[BlockGroup] = []
    start = 0
    for number, (shape, blocks) in enumerate(by_shape.items()):
        groups.append(BlockGroup(start, *shape, blocks))
        for place, block in enumerate(blocks):
            result = place * rows[block].size
            rows[block] = rows[block]._replace(
                group=number, result=result, direction=start + result
            )
        start = -(-groups[-1].end // _ALIGNED) * _ALIGNED
    return rows, groups


class Chunks(NamedTuple):
    """The chunks of all blocks, int64 tensors in host memory."""

    table: Tensor  # (chunks, ROW)
    of_blocks: Tensor  # (blocks, 2): first chunk and number of chunks of each block


def divide_into_chunks(rows: Sequence[ChunkRow], width: int) -> Chunks:
    """Divide blocks into chunks of `width` elements."""
    blocks = torch.tensor(rows, dtype=torch.int64, device="cpu")
    count = (blocks[:, int(SIZE.value)] + width - 1) // width
    first_chunk = count.cumsum(0) - count
    table = blocks.repeat_interleave(count, dim=0)
    number = torch.arange(len(table), device="cpu") - first_chunk.repeat_interleave(count)
    table[:, int(START.value)] = number * width
    assert table.shape[1] == int(ROW.value)
    return Chunks(table, torch.stack([first_chunk, count], dim=1))


# ----- a step ------------------------------------------------------------------------------------


class Directions(NamedTuple):
    """The buffer of all directions, and its batches (b, rows, columns) by group."""

    flat: Tensor
    matrices: list[Tensor]


class FusedMuon:
    """One Muon step of a fixed list of contiguous parameters and momenta, as `muon_` defines it.

    `buffers` are the momenta, `scores` Magma's scores of each parameter's blocks, none without
    Magma. With `recording`, the launches on a GPU are recorded in a CUDA graph, which keeps the
    memory of a step; `records` turns false if that fails.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        scores: Sequence[Tensor],
        views: Sequence[MatrixView],
        settings: HybridMuonConfig,
        *,
        recording: bool = True,
    ) -> None:
        self._fixed = _addresses(params, buffers, scores)
        self._settings = settings
        self._device = params[0].device
        self._dtype = params[0].dtype
        self._wide = moment_dtype(self._dtype)
        self._magma = bool(scores)
        self.elements = sum(p.numel() for p in params)
        self._is_small = self.elements <= SMALL
        self._width = _SHORT if self._is_small else _LONG

        rows, self._groups = block_rows(params, buffers, views)
        chunks = divide_into_chunks(rows, self._width)
        self._chunks = chunks.table.to(self._device)
        self._blocks = self._block_table(chunks, scores).to(self._device)
        self._directions: Directions | None = None
        self._scales = self._scales_of(settings).to(self._device)
        # Without damping the factor of a block is its scale.
        self._factors = torch.empty_like(self._scales) if self._magma else self._scales
        self._squares = torch.zeros(len(rows), dtype=torch.float64, device=self._device)
        self._gradients = AddressTable(len(params), self._device)
        self._results = AddressTable(len(self._groups), self._device)
        self._numbers = NumbersOnDevice(self._device)

        self._side_stream = SideStream(self._device) if self._device.type == "cuda" else None
        self._recorded: dict[torch.dtype, torch.cuda.CUDAGraph] = {}  # by dtype of the gradients
        self.records = recording and self._device.type == "cuda"
        self._launched_steps = 0

        self._applied = self._make_applied(rows)
        applied = [] if self._applied is None else self._applied.numbers
        self._chunks_to_apply = self._chunks
        if applied:
            is_applied = torch.isin(
                self._chunks[:, int(GROUP.value)], torch.tensor(applied, device=self._device)
            )
            self._chunks_to_apply = self._chunks[~is_applied].contiguous()
        # In a graph, a side stream computes the smallest matrices, the damping factors and the table
        # of results. The programs of these kernels do not wait for each other, so they cannot block
        # the cooperative kernels of the main stream, whose programs do.
        self._on_side_stream = self._in_one_program()
        self._on_main_stream = [
            i for i in range(len(self._groups)) if i not in (*self._on_side_stream, *applied)
        ]
        if len(self._on_side_stream) == len(self._groups):
            # With nothing on the main stream, a side stream would run beside nothing.
            self._on_main_stream = self._on_side_stream
            self._on_side_stream = []
        self._sums = self._scales  # a dummy argument: nothing is summed
        if self._magma or self._applied is not None:
            self._sums = torch.zeros(
                len(self._chunks), int(SUMS.value), dtype=torch.float64, device=self._device
            )

    def _block_table(self, chunks: Chunks, scores: Sequence[Tensor]) -> Tensor:
        """Return the rows of `combine` (blocks, BLOCK_ROW), int64, in host memory."""
        count = len(chunks.of_blocks)
        addresses = [x.data_ptr() + 4 * i for x in scores for i in range(x.numel())]  # of float32
        # The squares are in the order of the groups: the inverse permutation has their places.
        by_group = [block for group in self._groups for block in group.blocks]
        columns = [
            torch.tensor(addresses or [0] * count, device="cpu"),
            torch.tensor(by_group, device="cpu").argsort(),
        ]
        return torch.cat([chunks.of_blocks, torch.stack(columns, dim=1)], dim=1)

    def _scales_of(self, settings: HybridMuonConfig) -> Tensor:
        """Return the scales of the blocks (blocks,), in host memory."""
        count = sum(len(group.blocks) for group in self._groups)
        scales = torch.empty(count, dtype=torch.float32, device="cpu")
        for group in self._groups:
            scales[group.blocks] = update_scale((group.rows, group.columns), settings)
        return scales

    def _in_one_program(self) -> list[int]:
        """Return the numbers of the groups in which one program orthogonalizes each matrix."""
        if self._device.type != "cuda" or self._settings.precision not in ("auto", "float16"):
            return []
        return [
            number
            for number, group in enumerate(self._groups)
            if choose_for(len(group.blocks), group.rows, group.columns, torch.float32, self._device)
            == "whole"
        ]

    def _make_applied(self, rows: Sequence[ChunkRow]) -> AppliedGroups | None:
        """Return the groups whose last product updates the parameters.

        None for small models and other precisions, without suitable groups, and if a launch fails.
        """
        settings = self._settings
        uses_kernels = settings.flash_muon and settings.precision in ("auto", "float16")
        if self._is_small or not uses_kernels:
            return None
        matrix_groups = []
        squares = self._squares.unsqueeze(1).split([len(group.blocks) for group in self._groups])
        for number, group in enumerate(self._groups):
            members = [rows[block] for block in group.blocks]
            if not all(row.plain for row in members) or not takes(
                group.rows, group.columns, len(members), self._dtype, self._device
            ):
                continue
            # Address of the block in its parameter, and number of its factor.
            targets = [
                (row.parameter + self._dtype.itemsize * row.offset, row.block) for row in members
            ]
            matrix_groups.append(
                MatrixGroup(
                    number=number,
                    schedule=coefficients_of(settings.schedule_of((group.rows, group.columns))),
                    targets=torch.tensor(targets, device=self._device),
                    squares=squares[number],
                )
            )
        if not matrix_groups:
            return None
        applied = AppliedGroups(matrix_groups, self._dtype, self._factors, self._numbers.values)
        self._numbers.write(StepNumbers(rate=0.0, skip=1.0))  # `usable` must not change parameters
        return applied if applied.usable(self._direction_buffers().matrices) else None

    def fits(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        scores: Sequence[Tensor],
        settings: HybridMuonConfig,
    ) -> bool:
        """Return whether the tables are valid for these tensors and settings.

        A scheduler may have changed the numbers of the settings, which `step` takes over.
        """
        same = settings is self._settings or settings.structure == self._settings.structure
        return same and _addresses(params, buffers, scores) == self._fixed

    def step(
        self,
        grads: Sequence[Tensor],
        lr: float | Tensor,
        control: StepControl,
        *,
        maximize: bool,
        settings: HybridMuonConfig | None = None,
    ) -> None:
        """Take one step with contiguous gradients of one dtype.

        `settings` are those of the constructor, unless a scheduler has changed numbers in them.
        """
        if settings is not None and settings is not self._settings:
            if settings.lr_adjust_coeff != self._settings.lr_adjust_coeff:
                self._scales.copy_(self._scales_of(settings))
            self._settings = settings
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        gradients = captured_addresses(grads) if capturing else self._gradients.of(grads)
        grad_dtype = grads[0].dtype
        gradient_factor: float | Tensor = -1.0 if maximize else 1.0
        if control.scale is not None:
            gradient_factor = gradient_factor * control.scale.double().reciprocal()
        self._numbers.write(
            StepNumbers(
                rate=lr,
                decay=self._settings.weight_decay,
                pace=1.0 - self._settings.momentum,
                skip=0.0 if control.skip is None else control.skip,
                factor=gradient_factor,
            )
        )
        graph = None if capturing else self._recorded.get(grad_dtype)
        if graph is not None:
            graph.replay()
            return
        self._launch(gradients, grad_dtype, capturing=capturing)
        self._launched_steps += 1
        wait = 0 if self._is_small else _STEPS_BEFORE_RECORDING
        if self.records and not capturing and self._launched_steps > wait:
            recording = try_record(
                lambda: self._launch(gradients, grad_dtype, capturing=True),
                self._device,
                "a fused step",
            )
            if recording is None:
                self.records = False
            else:
                self._recorded[grad_dtype], _ = recording  # the launches return nothing

    def _launch(self, gradients: Tensor, grad_dtype: torch.dtype, *, capturing: bool) -> None:
        """Launch all kernels of a step; `gradients` has the gradients' addresses."""
        directions = self._direction_buffers()
        matrices = directions.matrices
        self._advance(gradients, grad_dtype, directions.flat)
        side = self._side_stream if capturing else None
        if side is not None:
            side.fork()
        polar = self._orthogonalize(matrices, self._on_main_stream)
        with side or contextlib.nullcontext():  # its end joins the side stream
            if self._magma or self._applied is not None:
                self._combine()
            polar |= self._orthogonalize(matrices, self._on_side_stream)
            # Applied groups have no polar factors: their directions fill the table, and nothing
            # reads them there.
            results = [polar.get(i, matrix) for i, matrix in enumerate(matrices)]
            addresses = captured_addresses(results) if capturing else self._results.of(results)
        if self._applied is not None:
            with in_phase("orthogonalize"):
                self._applied.run(matrices)
        if len(self._chunks_to_apply):
            # All have one dtype: polar factors keep that of their directions.
            self._apply(addresses, results[0].dtype)

    def _advance(self, gradients: Tensor, grad_dtype: torch.dtype, directions: Tensor) -> None:
        """Launch the update of the momenta, which writes the directions and the sums of chunks."""
        with in_phase("momentum"):
            advance[(len(self._chunks),)](
                chunks=self._chunks,
                gradients=gradients,
                directions=directions,
                sums=self._sums,
                numbers=self._numbers.values,
                DTYPE=TYPES[self._dtype],
                GRADIENT=TYPES[grad_dtype],
                WIDE=TYPES[self._wide],
                MAGMA=self._magma,
                NESTEROV=self._settings.nesterov,
                SQUARES=self._applied is not None,
                WIDTH=self._width,
                num_warps=_ADVANCE_WARPS,
            )

    def _combine(self) -> None:
        """Launch the sums over the chunks of each block, for damping and norms."""
        combine[(len(self._blocks),)](
            blocks=self._blocks,
            sums=self._sums,
            scales=self._scales,
            factors=self._factors,
            squares=self._squares,
            numbers=self._numbers.values,
            MAGMA=self._magma,
            SQUARES=self._applied is not None,
            WIDTH=_CHUNKS_AT_A_TIME,
        )

    def _orthogonalize(
        self, matrices: Sequence[Tensor], groups: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return contiguous polar factors of the groups with these numbers, by number."""
        if not groups:
            return {}
        polar = polar_factors([matrices[i] for i in groups], self._settings)
        return {i: o.contiguous() for i, o in zip(groups, polar, strict=True)}

    def _apply(self, results: Tensor, polar_dtype: torch.dtype) -> None:
        """Launch the update of the parameters; `results` has the addresses of the polar factors."""
        with in_phase("update"):
            apply[(len(self._chunks_to_apply),)](
                chunks=self._chunks_to_apply,
                results=results,
                factors=self._factors,
                numbers=self._numbers.values,
                DTYPE=TYPES[self._dtype],
                POLAR=TYPES[polar_dtype],
                WIDE=TYPES[self._wide],
                WIDTH=self._width,
                num_warps=_APPLY_WARPS,
            )

    def _direction_buffers(self) -> Directions:
        """Return the buffers of the directions; those of a small model are kept."""
        if self._directions is not None:
            return self._directions
        length = -(-self._groups[-1].end // _ALIGNED) * _ALIGNED
        # The dtype of the iteration.
        dtype = torch.float64 if self._settings.precision == "float64" else torch.float32
        flat = torch.empty(length, dtype=dtype, device=self._device)
        matrices = [
            flat[group.start : group.end].view(-1, group.rows, group.columns)
            for group in self._groups
        ]
        directions = Directions(flat, matrices)
        if self._is_small:
            self._directions = directions
        return directions


def _addresses(*several: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, itertools.chain(*several)))
