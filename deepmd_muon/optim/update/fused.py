"""The fused Muon route: one kernel each for the momenta, the damping and the updates of a wave.

`deepmd_muon.optim.update.muon` defines the results, which agree up to rounding. Tables on the device, buffers, and for
small models a CUDA graph of all launches, orthogonalization included, are created once and reused while the addresses
of the parameters stay the same. A step then checks the addresses and replays the graph. New addresses of gradients, as
after ``zero_grad(set_to_none=True)``, take one small copy from pinned memory, and a new learning rate one launch;
neither synchronizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from deepmd_muon.optim.polar.dispatch import MatrixBatch, choose
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.polar.tables import AddressTable, captured_addresses
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.torch_hooks import in_phase
from deepmd_muon.optim.update.adam import moment_dtype
from deepmd_muon.optim.update.applied import AppliedGroups, MatrixGroup, takes
from deepmd_muon.optim.update.fused_kernels import (
    GROUP,
    OFFSET,
    PARAMETER,
    PLAIN,
    RESULT,
    ROW,
    SUMS,
    advance,
    apply,
    damp,
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
# Elements of a chunk: short chunks occupy all multiprocessors for small models, long ones suit large models.
_SHORT, _LONG = 1024, 4096
SMALL = 4 * 2**20
_ADVANCE_WARPS = 4  # with more, sums in float64 allow too few programs on a multiprocessor
_ALIGNED = 16  # vectors start at multiples of this number of elements, and of bytes


class Variant(NamedTuple):
    """The conditions for which kernels are compiled; they may change from step to step."""

    gradient: torch.dtype
    maximize: bool
    skip: bool
    scale: bool


@dataclasses.dataclass(frozen=True)
class BlockLocation:
    """The location of one block in its parameter: tensor number, offset, row stride and shape, in elements."""

    tensor: int
    offset: int
    stride: int
    rows: int
    columns: int


class StepScalars:
    """The learning rate, the skip predicate and the gradients' scale, at the addresses that recorded launches read."""

    def __init__(self, device: torch.device) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=device)
        self.skip, self.scale = (
            torch.zeros((), dtype=torch.float32, device=device) for _ in range(2)
        )
        self._rate: float | None = None

    def write(self, lr: float | Tensor, control: StepControl) -> None:
        """Write the present values without synchronizing."""
        if isinstance(lr, Tensor):
            self.rate.copy_(lr)
            self._rate = None
        elif lr != self._rate:
            self.rate.fill_(lr)
            self._rate = lr
        if control.skip is not None:
            self.skip.copy_(control.skip)
        if control.scale is not None:
            self.scale.copy_(control.scale)


class FusedMuon:
    """One Muon step of a fixed list of contiguous parameters and momenta, as `muon_` defines it.

    With `recording`, the launches of a small model are recorded in a CUDA graph.
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
        dtype, self._wide = params[0].dtype, moment_dtype(params[0].dtype)
        self._dtype, self._wide_type = TYPES[dtype], TYPES[self._wide]
        self._magma = bool(scores)
        groups: dict[tuple[int, int], list[BlockLocation]] = defaultdict(list)
        blocks = [block for i, view in enumerate(views) for block in block_locations(i, view)]
        for block in blocks:
            groups[block.rows, block.columns].append(block)
        small = sum(p.numel() for p in params) <= SMALL
        self._width = _SHORT if small else _LONG
        self._warps = 4
        table = self._make_table(params, buffers, blocks, groups)
        self._chunks, first, count = chunks_of(table, self._width, self._device)
        self._programs = self._chunks.shape[0]
        self._keep = small
        self._directions: list[Tensor] | None = None
        scale = [update_scale((block.rows, block.columns), settings) for block in blocks]
        self._scales = torch.tensor(scale, dtype=torch.float32, device=self._device)
        self._gradients = AddressTable(len(params), self._device)
        self._results = AddressTable(len(groups), self._device)
        self._sums = self._scales  # a placeholder if nothing is summed
        if self._magma:
            at = [score.data_ptr() + 4 * i for score in scores for i in range(score.numel())]
            self._blocks = torch.stack([first, count, torch.tensor(at, device="cpu")], dim=1).to(
                self._device
            )
            self._factors = torch.empty_like(self._scales)
        self._peaks = self._wide == torch.float64
        # In a graph, a side stream computes the smallest matrices, the damping factors and a table. The programs of
        # these kernels do not wait for each other, so they cannot block the cooperative kernels, whose programs do.
        self._second = self._in_one_program()
        self._first = [i for i in range(len(self._shapes)) if i not in self._second]
        if not self._first:
            self._first, self._second = self._second, []
        self._side_stream = SideStream(self._device) if self._device.type == "cuda" else None
        self._scalars = StepScalars(self._device)
        self._recorded: dict[Variant, torch.cuda.CUDAGraph] = {}
        self._record_launches = recording and self._keep and self._device.type == "cuda"
        self._weight = split_float64(1.0 - settings.momentum)
        self._decay = split_float64(settings.weight_decay)
        self._applied = self._make_applied(table, first, count, dtype)
        if self._magma or self._applied is not None:
            # The two peaks are written only for float64, whose squares could overflow.
            self._sums = torch.ones(
                self._programs, int(SUMS.value), dtype=torch.float64, device=self._device
            )
        self._separate = self._chunks  # of the matrices that a separate launch updates
        if self._applied is not None:
            self._try_applied(self._applied)

    def _make_table(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        blocks: Sequence[BlockLocation],
        groups: dict[tuple[int, int], list[BlockLocation]],
    ) -> Tensor:
        """Return the blocks' table rows, and assign equal shapes adjacent places in the directions."""
        rows: dict[BlockLocation, list[int]] = {}
        self._shapes: list[tuple[int, int, int, int]] = []
        start = 0
        numbers = {block: i for i, block in enumerate(blocks)}
        for group, ((m, n), members) in enumerate(groups.items()):
            size = m * n
            for i, block in enumerate(members):
                p, buffer = params[block.tensor], buffers[block.tensor]
                in_a_row = block.stride == n
                plain = in_a_row and not any(
                    x % _ALIGNED for x in (size, block.offset, p.data_ptr(), buffer.data_ptr())
                )
                columns, stride = (size, size) if in_a_row else (n, block.stride)
                rows[block] = [
                    0,
                    size,
                    columns,
                    stride,
                    block.offset,
                    p.data_ptr(),
                    buffer.data_ptr(),
                    block.tensor,
                ]
                rows[block] += [start + i * size, group, i * size, numbers[block], int(plain)]
            self._shapes.append((start, len(members), m, n))
            start += -(-len(members) * size // _ALIGNED) * _ALIGNED
        self._length = start
        return torch.tensor([rows[block] for block in blocks], dtype=torch.int64, device="cpu")

    def _make_applied(
        self, table: Tensor, first: Tensor, count: Tensor, dtype: torch.dtype
    ) -> AppliedGroups | None:
        """Return the groups whose last product updates the parameters; None without any."""
        settings = self._settings
        by_kernels = settings.flash_muon and settings.precision in ("auto", "float16")
        if self._keep or not by_kernels:
            return None
        groups = []
        for number, (_, b, m, n) in enumerate(self._shapes):
            blocks = (table[:, int(GROUP.value)] == number).nonzero().flatten()
            blocks = blocks[table[blocks, int(RESULT.value)].argsort()]
            if not takes(m, n, b, dtype, self._device) or not bool(
                table[blocks, int(PLAIN.value)].all()
            ):
                continue
            addresses = (
                table[blocks, int(PARAMETER.value)]
                + dtype.itemsize * table[blocks, int(OFFSET.value)]
            )
            columns = (
                x.to(self._device) for x in (addresses, blocks, first[blocks], count[blocks])
            )
            groups.append(
                MatrixGroup(number, m, n, coefficients_of(settings.schedule_of((m, n))), *columns)
            )
        return AppliedGroups(groups, dtype, self._decay) if groups else None

    def _try_applied(self, applied: AppliedGroups) -> None:
        """Exclude the groups' matrices from the launches for all others; drop the groups if their launches fail."""
        self._never = torch.zeros((), dtype=torch.float32, device=self._device)
        _, matrices = self._direction_buffers()
        chosen = [matrices[i] for i in applied.numbers]
        if not applied.usable(chosen, self._sums, self._scales, self._scalars.rate):
            self._applied = None
            return
        self._first = [i for i in self._first if i not in applied.numbers]
        inside = torch.isin(
            self._chunks[:, int(GROUP.value)], torch.tensor(applied.numbers, device=self._device)
        )
        self._separate = self._chunks[~inside].contiguous()

    def _in_one_program(self) -> list[int]:
        """Return the groups in which one program orthogonalizes each matrix."""
        if self._device.type != "cuda" or self._settings.precision not in ("auto", "float16"):
            return []
        capability = torch.cuda.get_device_capability(self._device)
        chosen = [
            choose(
                MatrixBatch(min(m, n), max(m, n), b, self._wide, "cuda", capability, torch.float16)
            )
            for _, b, m, n in self._shapes
        ]
        return [i for i, name in enumerate(chosen) if name == "whole"]

    def fits(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        scores: Sequence[Tensor],
        settings: HybridMuonConfig,
    ) -> bool:
        """Return whether the tables are valid for these tensors and settings."""
        return settings is self._settings and _addresses(params, buffers, scores) == self._fixed

    def step(
        self, grads: Sequence[Tensor], lr: float | Tensor, control: StepControl, *, maximize: bool
    ) -> None:
        """Take one step with contiguous gradients of one dtype."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        table = captured_addresses(grads) if capturing else self._gradients.of(grads)
        variant = Variant(
            grads[0].dtype, maximize, control.skip is not None, control.scale is not None
        )
        self._scalars.write(lr, control)
        recorded = None if capturing else self._recorded.get(variant)
        if recorded is not None:
            recorded.replay()
            return
        self._launch(table, variant, capturing)
        if self._record_launches and not capturing:
            new = try_record(
                lambda: self._launch(table, variant, True), self._device, "a fused step"
            )
            if new is None:
                self._record_launches = False
            else:
                self._recorded[variant], _ = new

    def _launch(self, table: Tensor, variant: Variant, capturing: bool) -> None:
        """Launch all kernels of a step."""
        skip = self._scalars.skip if variant.skip else None
        scale = self._scalars.scale if variant.scale else None
        directions, matrices = self._direction_buffers()
        with in_phase("momentum"):
            advance[(self._programs,)](
                self._chunks, table, directions, self._sums, *self._weight, skip, scale, DTYPE=self._dtype,
                GRADIENT=TYPES[variant.gradient], WIDE=self._wide_type, MAGMA=self._magma,
                NESTEROV=self._settings.nesterov, MAXIMIZE=variant.maximize, PEAKS=self._peaks,
                SQUARES=self._applied is not None, WIDTH=self._width, num_warps=_ADVANCE_WARPS,
            )  # fmt: skip
        side = self._side_stream if capturing else None
        if side is not None:
            side.fork()
        polar = self._orthogonalize(matrices, self._first)
        with side or contextlib.nullcontext():
            factors = self._factors if self._magma else self._scales
            if self._magma:  # advances the scores, and writes scale times damping of each block
                damp[(factors.shape[0],)](
                    self._blocks,
                    self._sums,
                    self._scales,
                    factors,
                    skip,
                    PEAKS=self._peaks,
                    WIDTH=256,
                )
            polar |= self._orthogonalize(matrices, self._second)
            ordered = [polar.get(i, matrix) for i, matrix in enumerate(matrices)]
            results = captured_addresses(ordered) if capturing else self._results.of(ordered)
        if self._applied is not None:
            with in_phase("orthogonalize"):
                self._applied.run(
                    [matrices[i] for i in self._applied.numbers], self._sums, factors, self._scalars.rate,
                    self._never if skip is None else skip,
                )  # fmt: skip
        if len(self._separate) == 0:
            return
        with in_phase("update"):
            apply[(len(self._separate),)](
                self._separate, results, factors, self._scalars.rate, *self._decay, skip, DTYPE=self._dtype,
                POLAR=TYPES[ordered[0].dtype], WIDE=self._wide_type, WIDTH=self._width, num_warps=self._warps,
            )  # fmt: skip

    def _orthogonalize(
        self, matrices: Sequence[Tensor], chosen: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return contiguous polar factors of some of the matrices, by number."""
        found = polar_factors([matrices[i] for i in chosen], self._settings) if chosen else []
        return {
            i: o if o.is_contiguous() else o.contiguous()
            for i, o in zip(chosen, found, strict=True)
        }

    def _direction_buffers(self) -> tuple[Tensor, list[Tensor]]:
        """Return the buffer of directions, and its batches of equal shapes; a small buffer is kept."""
        if self._directions is not None:
            return self._directions[0], self._directions[1:]
        flat = torch.empty(self._length, dtype=self._wide, device=self._device)
        matrices = [
            flat[start : start + b * m * n].view(b, m, n) for start, b, m, n in self._shapes
        ]
        if self._keep:
            self._directions = [flat, *matrices]
        return flat, matrices


def _addresses(*several: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, itertools.chain(*several)))


def block_locations(tensor: int, view: MatrixView) -> list[BlockLocation]:
    """Return a parameter's blocks in the order of its Magma scores."""
    blocks = []
    for b in range(view.batch):
        offset = b * view.rows * view.columns
        for m, n in view.block_shapes:
            blocks.append(BlockLocation(tensor, offset, view.columns, m, n))
            offset += m * n if view.axis == "rows" else n
    return blocks


def chunks_of(table: Tensor, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Divide blocks into chunks; return the chunks' table, and each block's first chunk and number of chunks."""
    count = (table[:, 1] + width - 1) // width
    first = count.cumsum(0) - count
    chunks = table.repeat_interleave(count, dim=0)
    chunks[:, 0] = (
        torch.arange(len(chunks), device="cpu") - first.repeat_interleave(count)
    ) * width
    assert chunks.shape[1] == int(ROW.value)
    return chunks.to(device), first, count


@functools.lru_cache(maxsize=64)
def split_float64(x: float) -> tuple[float, float]:
    """Split a float64 number into two float32 numbers, because kernel arguments are float32."""
    high = float(torch.tensor(x, dtype=torch.float32, device="cpu"))
    return high, x - high
