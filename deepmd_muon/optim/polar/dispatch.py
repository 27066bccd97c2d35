"""Which implementation orthogonalizes which matrices: one table, read from the top."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal, get_args

import torch

Implementation = Literal["whole", "strips", "tiles", "symmetric", "torch"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_READABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_STRIPS = 128  # programs that share a matrix
_TILE = 64
# With more 64 × 64 tiles, launches of larger products win.
_MOST_TILES = 100


@dataclasses.dataclass(frozen=True)
class MatrixBatch:
    """What the choice depends on: `count` matrices of one shape, rows ≤ columns."""

    rows: int
    columns: int
    count: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    operand: torch.dtype

    @property
    def readable(self) -> bool:
        """Whether a kernel can take them at all: tensor cores with asynchronous copies, fp16 operands."""
        on_gpu = self.device == "cuda" and self.capability >= (8, 0)
        return on_gpu and self.operand == torch.float16 and self.dtype in _READABLE

    @property
    def tiles(self) -> int:
        """Tiles of 64 × 64 in all of them."""
        return self.count * -(-self.rows // _TILE) * -(-self.columns // _TILE)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of the table."""

    implementation: Implementation
    shapes: str
    means: str
    fits: Callable[[MatrixBatch], bool]


def _whole(p: MatrixBatch) -> bool:
    return p.readable and p.columns <= (256 if p.rows <= 64 else 128)


def _strips(p: MatrixBatch) -> bool:
    strips = -(-p.columns // (64 if p.rows <= 128 else 32))
    few = p.rows <= 128 or p.count * strips <= 2 * _MOST_STRIPS
    return p.readable and 1 < p.rows <= 256 and strips <= _MOST_STRIPS and few


def _tiles(p: MatrixBatch) -> bool:
    return p.readable and 1 < p.rows <= 1024 and p.tiles <= _MOST_TILES


def _symmetric(p: MatrixBatch) -> bool:
    return p.readable and p.rows >= 128


TABLE: tuple[Candidate, ...] = (
    Candidate(
        "whole",
        "m ≤ 64 and n ≤ 256, or m, n ≤ 128",
        "one launch for all of them, one program a matrix, X in registers",
        _whole,
    ),
    Candidate(
        "strips",
        "m ≤ 128 and n ≤ 8192; m ≤ 256, n ≤ 4096, ≤ 8192 in all",
        "one cooperative launch, each program keeps 64 or 32 columns in registers",
        _strips,
    ),
    Candidate(
        "tiles",
        f"m ≤ 1024 and at most {_MOST_TILES} tiles of 64 × 64",
        "one cooperative launch, programs share the tiles of each product",
        _tiles,
    ),
    Candidate(
        "symmetric",
        "m ≥ 128",
        "three launches a step, half of each symmetric product; wide ones share products with X",
        _symmetric,
    ),
    Candidate("torch", "everything else", "batched products of torch", lambda _: True),
)


def choose(batch: MatrixBatch, allowed: Collection[str] = IMPLEMENTATIONS) -> Implementation:
    """Return the first implementation of the table that fits and is allowed; torch fits everything."""
    for rule in TABLE:
        if rule.fits(batch) and (rule.implementation in allowed or rule.implementation == "torch"):
            return rule.implementation
    raise AssertionError("the last rule of the table fits everything")


COUNTS: Counter[tuple[str, int, int]] = Counter()
FAILED: dict[str, str] = {}


def counts() -> dict[tuple[str, int, int], int]:
    """Return how many matrices went to each (implementation, rows, columns) since the start."""
    return dict(COUNTS)


def describe() -> str:
    """Return the table as text: shapes (m ≤ n), implementation, what it does; then what is available and what ran."""
    lines = [f"{rule.implementation:10} {rule.shapes:56} {rule.means}" for rule in TABLE]
    reason = unavailable()
    lines.append(f"kernels: {'not used, ' + reason if reason else 'Triton on ' + torch.cuda.get_device_name()}")
    lines += [f"{name} is off: {why}" for name, why in FAILED.items()]
    ran = sorted(COUNTS.items())
    lines += [f"ran: {name} for {number} matrices of {m} × {n}" for (name, m, n), number in ran]
    return "\n".join(lines)


def unavailable() -> str:
    """Say why no kernel can run here; empty when they can. Touches no GPU unless there is one."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return ""
