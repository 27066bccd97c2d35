"""Choose the implementation that orthogonalizes matrices: the first suitable row of a table."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Implementation = Literal["whole", "strips", "symmetric", "torch"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_READABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_STRIPS = 128  # bound on the programs of one matrix


# Shape, strides and dtype of each tensor.
Geometry = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


def geometry_of(tensors: Sequence[Tensor]) -> Geometry:
    """Return all that determines the launches for these tensors, besides their addresses."""
    return tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors)


@dataclasses.dataclass(frozen=True)
class MatrixBatch:
    """The input of the choice: `count` matrices of one shape, rows ≤ columns."""

    rows: int
    columns: int
    count: int


def kernels_can_read(dtype: torch.dtype, capability: tuple[int, int], operand: torch.dtype) -> bool:
    """Return whether kernels take such matrices: tensor cores with asynchronous copies, in fp16."""
    return capability >= (8, 0) and operand == torch.float16 and dtype in _READABLE


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A row of the table: an implementation, and the matrices that it takes."""

    implementation: Implementation
    shapes: str
    means: str
    fits: Callable[[MatrixBatch], bool]


def _strips(p: MatrixBatch) -> bool:
    strips = -(-p.columns // (64 if p.rows <= 128 else 32))
    few = p.rows <= 128 or p.count * strips <= 2 * _MOST_STRIPS
    return 1 < p.rows <= 256 and strips <= _MOST_STRIPS and few


TABLE: tuple[Candidate, ...] = (
    Candidate(
        "whole",
        "m ≤ 64 and n ≤ 256, or m, n ≤ 128",
        "one launch, one program per matrix, X in registers",
        lambda p: p.columns <= (256 if p.rows <= 64 else 128),
    ),
    Candidate(
        "strips",
        "m ≤ 128 and n ≤ 8192; m ≤ 256, n ≤ 4096, ≤ 8192 in all",
        "one cooperative launch, each program keeps 64 or 32 columns in registers",
        _strips,
    ),
    Candidate(
        "symmetric",
        "m ≥ 128",
        "three launches per step, half of each symmetric product; wide matrices share products "
        "with X",
        lambda p: p.rows >= 128,
    ),
    Candidate("torch", "everything else", "batched products of torch", lambda _: True),
)


def choose(batch: MatrixBatch, allowed: Collection[str] = IMPLEMENTATIONS) -> Implementation:
    """Return the first implementation of the table that fits and is allowed; torch always fits."""
    for rule in TABLE:
        if rule.fits(batch) and (rule.implementation in allowed or rule.implementation == "torch"):
            return rule.implementation
    raise AssertionError("the last rule of the table fits everything")


def choose_for(
    count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Implementation:
    """Return the implementation for `count` matrices of one shape with operands in float16."""
    # Triton's interpreter, on a CPU, runs the kernels of an H200.
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if not kernels_can_read(dtype, capability, torch.float16):
        return "torch"
    return choose(MatrixBatch(min(rows, columns), max(rows, columns), count))


COUNTS: Counter[tuple[str, int, int]] = Counter()
FAILED: dict[str, str] = {}


def counts() -> dict[tuple[str, int, int], int]:
    """Return the number of matrices orthogonalized so far, by (implementation, rows, columns)."""
    return dict(COUNTS)


def describe() -> str:
    """Return the table, availability and use as text; shapes have m ≤ n."""
    lines = [f"{rule.implementation:10} {rule.shapes:56} {rule.means}" for rule in TABLE]
    reason = unavailable()
    backend = f"not used, {reason}" if reason else f"Triton on {torch.cuda.get_device_name()}"
    lines.append(f"kernels: {backend}")
    lines += [f"{name} is off: {why}" for name, why in FAILED.items()]
    ran = sorted(COUNTS.items())
    lines += [f"ran: {name} for {number} matrices of {m} × {n}" for (name, m, n), number in ran]
    return "\n".join(lines)


def unavailable() -> str:
    """Return why kernels cannot run here, or "" when they can.

    Without a GPU no CUDA context is created.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return ""
