"""The fused Muon route: a few launches step all parameters of a wave.

A *wave* is the parameters of one parameter group, device and dtype, which one step updates.
`muon.muon_` defines the results; the launches agree with it up to rounding. `fused_tables` explains
*blocks* (the matrices), *groups* (here blocks of one shape, not parameter groups) and *chunks*
(the elements that one program takes).

| launch | result | programs |
|---|---|---|
| `advance` | momenta; *directions*, which are orthogonalized; sums of chunks | one for each chunk |
| `polar_factors` | polar factors of the directions | several launches, by the sizes of groups |
| `combine` | factors of blocks (scale · damping); norms for applied groups | one for each block |
| `apply` | parameters, but not of applied groups | one for each chunk |

`combine` is launched only for Magma or for applied groups.

Small groups (one program for each matrix) are orthogonalized on a side stream if the launches are
captured in a CUDA graph and there are other groups. *Applied* groups consist of large matrices: the
last matrix product of their orthogonalization updates the parameters itself (`AppliedGroups`), so
that no polar factors are written.

    main stream  advance ─┬─ polar_factors of other groups ────────────┬─ applied groups ─ apply
    side stream           └─ combine ─ polar_factors of small groups ──┘

The launches of a step read tables on the device, which are valid until a parameter or its state
moves, and a few numbers, such as the learning rate. So they can be recorded in a CUDA graph: a
later step writes its numbers and replays the graph. New addresses of gradients, as after
``zero_grad(set_to_none=True)``, take one small copy from pinned memory, and a new learning rate one
launch; neither synchronizes.
"""

from __future__ import annotations

import contextlib
import itertools
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
from deepmd_muon.optim.update.fused_kernels import GROUP, SUMS, advance, apply, combine
from deepmd_muon.optim.update.fused_tables import (
    BlockGroup,
    BlockLocation,
    block_table,
    divide_into_chunks,
    group_blocks,
    length_of,
    locate_blocks,
)
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.update.muon import polar_factors

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
SMALL = 4 * 2**20  # most elements of a small model
# A step of a large model is recorded once more than this number were launched: a caller that
# captures whole training steps needs no graph here.
_STEPS_BEFORE_RECORDING = 10
_ADVANCE_WARPS = 4  # with more, sums in float64 allow too few programs on a multiprocessor
_APPLY_WARPS = 4
_CHUNKS_AT_A_TIME = 256  # that a program of `combine` reads


class Directions(NamedTuple):
    """The buffer of all directions (elements,), and views of it, (b, rows, columns) by group."""

    flat: Tensor
    matrices: list[Tensor]


class FusedMuon:
    """One Muon step of a fixed list of contiguous parameters and momenta, as `muon_` defines it.

    `FusedStepCache` keeps it as long as `fits` says that its tables are valid.

    Parameters
    ----------
    params
        Of one dtype and device.
    buffers
        Their momenta, of the same dtype.
    scores
        Magma's scores of each parameter's blocks, float32 (blocks of the parameter,); none without
        Magma.
    views
        How each parameter consists of blocks.
    settings
        `step` may receive others, if only numbers differ.
    recording
        Whether the launches on a GPU are recorded in a CUDA graph, which keeps the memory of a
        step.

    Attributes
    ----------
    elements
        Number of elements of all parameters.
    records
        Whether steps are recorded: `recording`, until a recording fails; False on a CPU.
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
        self._addresses = _addresses_of(params, buffers, scores)
        self._settings = settings
        self._device = params[0].device
        self._dtype = params[0].dtype
        self._wide = moment_dtype(self._dtype)  # dtype of the computation
        self._magma = bool(scores)
        self.elements = sum(p.numel() for p in params)
        self._is_small = self.elements <= SMALL
        self._width = _SHORT if self._is_small else _LONG

        # Tables of the launches.
        self._groups = group_blocks(views)
        locations = locate_blocks(params, buffers, views, self._groups)
        chunks = divide_into_chunks(locations, self._width)
        self._chunks = chunks.table.to(self._device)
        self._blocks = block_table(chunks, self._groups, scores).to(self._device)

        # What a step writes on the device, to be read by its launches.
        self._numbers = NumbersOnDevice(self._device)
        self._gradients = AddressTable(len(params), self._device)
        self._results = AddressTable(len(self._groups), self._device)  # of the polar factors
        self._directions: Directions | None = None  # kept for small models
        # Scale, scale · damping and Σ u² (u: direction) of each block (blocks,); the last in the
        # order of groups, the others by number of the block.
        self._scales = self._scales_of(settings).to(self._device)
        self._factors = torch.empty_like(self._scales) if self._magma else self._scales
        self._squares = torch.zeros(len(locations), dtype=torch.float64, device=self._device)

        # Three kinds of groups: applied, on the main stream, on the side stream.
        self._applied = self._make_applied(locations)
        applied = [] if self._applied is None else self._applied.group_numbers
        self._on_main_stream, self._on_side_stream = self._divide_between_streams(applied)
        self._chunks_to_apply = self._chunks
        if applied:
            is_applied = torch.isin(
                self._chunks[:, int(GROUP.value)], torch.tensor(applied, device=self._device)
            )
            self._chunks_to_apply = self._chunks[~is_applied].contiguous()
        self._needs_sums = self._magma or self._applied is not None
        self._sums = self._scales  # an argument that no kernel reads or writes
        if self._needs_sums:
            self._sums = torch.zeros(
                len(self._chunks), int(SUMS.value), dtype=torch.float64, device=self._device
            )

        # CUDA graphs.
        on_gpu = self._device.type == "cuda"
        self.records = recording and on_gpu
        self._recorded: dict[torch.dtype, torch.cuda.CUDAGraph] = {}  # by dtype of the gradients
        self._launched_steps = 0
        self._side_stream = SideStream(self._device) if on_gpu else None

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
        return same and _addresses_of(params, buffers, scores) == self._addresses

    # ----- a step --------------------------------------------------------------------------------

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
        # Whether the caller captures a graph.
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        gradients = captured_addresses(grads) if capturing else self._gradients.of(grads)
        grad_dtype = grads[0].dtype
        self._write_numbers(lr, control, maximize=maximize)
        if not capturing and grad_dtype in self._recorded:
            self._recorded[grad_dtype].replay()
            return
        self._launch(gradients, grad_dtype, capturing=capturing)
        self._launched_steps += 1
        wait = 0 if self._is_small else _STEPS_BEFORE_RECORDING
        if self.records and not capturing and self._launched_steps > wait:
            self._record(gradients, grad_dtype)

    def _write_numbers(self, lr: float | Tensor, control: StepControl, *, maximize: bool) -> None:
        """Write the numbers of a step where its launches read them."""
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

    def _record(self, gradients: Tensor, grad_dtype: torch.dtype) -> None:
        """Record the launches of a step, which are replayed from the next step on."""
        graph_and_result = try_record(
            lambda: self._launch(gradients, grad_dtype, capturing=True),
            self._device,
            "a fused step",
        )
        if graph_and_result is None:
            self.records = False
            return
        graph, _ = graph_and_result  # the launches return nothing
        self._recorded[grad_dtype] = graph

    def _launch(self, gradients: Tensor, grad_dtype: torch.dtype, *, capturing: bool) -> None:
        """Launch all kernels of a step, in the order that the diagram of this file shows.

        `gradients` has the gradients' addresses, int64. `capturing` says that a graph is being
        captured, by this object or by the caller. If not, all launches are on the current stream.
        """
        directions = self._direction_buffers()
        matrices = directions.matrices
        self._advance(gradients, grad_dtype, directions.flat)
        side = self._side_stream if capturing else None
        if side is not None:
            side.fork()
        polar = self._orthogonalize(matrices, self._on_main_stream)
        with side or contextlib.nullcontext():  # at its end, the current stream waits for the other
            if self._needs_sums:
                self._combine()
            polar |= self._orthogonalize(matrices, self._on_side_stream)
            # Applied groups have no polar factors. Their directions fill the table, and nothing
            # reads them there.
            results = [polar.get(number, matrix) for number, matrix in enumerate(matrices)]
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

    def _orthogonalize(
        self, matrices: Sequence[Tensor], groups: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return contiguous polar factors of the groups with these numbers, by number."""
        if not groups:
            return {}
        polar = polar_factors([matrices[number] for number in groups], self._settings)
        return {number: o.contiguous() for number, o in zip(groups, polar, strict=True)}

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
        """Return the buffers of the directions, for a large model new ones."""
        if self._directions is not None:
            return self._directions
        # The dtype of the iteration.
        dtype = torch.float64 if self._settings.precision == "float64" else torch.float32
        flat = torch.empty(length_of(self._groups), dtype=dtype, device=self._device)
        matrices = [
            flat[group.start : group.end].view(-1, group.rows, group.columns)
            for group in self._groups
        ]
        directions = Directions(flat, matrices)
        if self._is_small:
            self._directions = directions
        return directions

    def _scales_of(self, settings: HybridMuonConfig) -> Tensor:
        """Return the scales of the blocks (blocks,), in host memory."""
        count = sum(len(group.blocks) for group in self._groups)
        scales = torch.empty(count, dtype=torch.float32, device="cpu")
        for group in self._groups:
            scales[group.blocks] = update_scale((group.rows, group.columns), settings)
        return scales

    # ----- three kinds of groups -----------------------------------------------------------------

    def _make_applied(self, locations: Sequence[BlockLocation]) -> AppliedGroups | None:
        """Return the applied groups.

        None for small models, without `flash_muon`, with a precision other than 'auto' and
        'float16', without suitable groups, and if a launch fails.
        """
        settings = self._settings
        uses_kernels = settings.flash_muon and settings.precision in ("auto", "float16")
        if self._is_small or not uses_kernels:
            return None
        matrix_groups = []
        squares = self._squares.unsqueeze(1).split([len(group.blocks) for group in self._groups])
        for number, group in enumerate(self._groups):
            blocks = [locations[block] for block in group.blocks]
            if not all(block.plain for block in blocks) or not takes(
                group.rows, group.columns, len(blocks), self._dtype, self._device
            ):
                continue
            matrix_groups.append(
                MatrixGroup(
                    number=number,
                    schedule=coefficients_of(settings.schedule_of((group.rows, group.columns))),
                    targets=torch.tensor(
                        [
                            (block.parameter + self._dtype.itemsize * block.offset, block.block)
                            for block in blocks
                        ],
                        device=self._device,
                    ),
                    squares=squares[number],
                )
            )
        if not matrix_groups:
            return None
        applied = AppliedGroups(matrix_groups, self._dtype, self._factors, self._numbers.values)
        self._numbers.write(StepNumbers(rate=0.0, skip=1.0))  # `usable` must not change parameters
        return applied if applied.usable(self._direction_buffers().matrices) else None

    def _divide_between_streams(self, applied: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the numbers of the groups on the main stream, and of those on the side stream.

        `applied` has the numbers of the applied groups, which are in neither list. The kernels of
        the side stream have one program for each matrix. These programs do not wait for each other,
        so they cannot block the cooperative kernels of the main stream, whose programs do.
        """
        side = [
            number for number, group in enumerate(self._groups) if self._takes_one_program(group)
        ]
        if len(side) == len(self._groups):
            return side, []  # nothing would run at the same time
        main = [i for i in range(len(self._groups)) if i not in (*side, *applied)]
        return main, side

    def _takes_one_program(self, group: BlockGroup) -> bool:
        """Return whether one program orthogonalizes each matrix of a group."""
        if self._device.type != "cuda" or self._settings.precision not in ("auto", "float16"):
            return False
        implementation = choose_for(
            len(group.blocks), group.rows, group.columns, torch.float32, self._device
        )
        return implementation == "whole"


def _addresses_of(*lists: Sequence[Tensor]) -> list[int]:
    """Return the addresses of the tensors in all lists."""
    return list(map(Tensor.data_ptr, itertools.chain(*lists)))
