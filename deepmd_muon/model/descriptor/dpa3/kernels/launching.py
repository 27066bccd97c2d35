"""Sizes of programs and precision for the launches of angles and edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

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


def empty_like(*tensors: torch.Tensor) -> Tensors:
    """Return contiguous tensors of the same shapes."""
    return tuple(x.new_empty(x.shape) for x in tensors)
