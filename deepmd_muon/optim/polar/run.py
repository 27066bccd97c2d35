"""Orthogonalize with kernels, each checked against torch on first use."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar import dispatch
from deepmd_muon.optim.polar.dispatch import Implementation, MatrixBatch, choose
from deepmd_muon.optim.polar.newton_schulz import orthogonalize_with_torch
from deepmd_muon.optim.polar.schedules import Coefficients, coefficients_of
from deepmd_muon.optim.polar.tables import Geometry

_LOG = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def _kernels_available() -> bool:
    reason = dispatch.unavailable()
    if reason:
        level = logging.WARNING if torch.cuda.is_available() else logging.INFO
        _LOG.log(level, "matrices are orthogonalized by torch: %s", reason)
    return not reason


def orthogonalize_with_kernels(
    matrices: Sequence[Tensor], coefficients: Coefficients, operand: torch.dtype, allowed: Collection[str]
) -> list[Tensor | None]:
    """Orthogonalize the matrices for which the table chooses a kernel.

    Parameters
    ----------
    matrices
        Batches (b, m, n) on one device.
    coefficients
        One (a, b, c) per step.
    operand
        Dtype of the operands of matrix products.
    allowed
        Implementations that may be used.

    Returns
    -------
    list
        float32 results (b, m, n); None where torch handles it.
    """
    nothing: list[Tensor | None] = [None] * len(matrices)
    device = matrices[0].device
    if not allowed or not _kernels_available() or device.type != "cuda":
        return nothing
    usable = tuple(name for name in allowed if name not in dispatch.FAILED)
    geometry = tuple((tuple(x.shape), x.stride(), x.dtype) for x in matrices)
    capability = torch.cuda.get_device_capability(device)
    chosen = choose_all(geometry, capability, operand, usable)
    results = nothing
    for name in dict.fromkeys(chosen):
        members = [i for i, c in enumerate(chosen) if c == name]
        if name == "torch":
            continue
        done = try_kernels(name, [matrices[i] for i in members], coefficients)
        if done is None:  # it has just been disabled: choose again
            return orthogonalize_with_kernels(matrices, coefficients, operand, allowed)
        for i, x in zip(members, done, strict=True):
            results[i] = x
            dispatch.COUNTS[name, min(x.shape[1:]), max(x.shape[1:])] += x.shape[0]
    return results


@functools.lru_cache(maxsize=64)
def choose_all(
    geometry: Geometry, capability: tuple[int, int], operand: torch.dtype, allowed: tuple[str, ...]
) -> tuple[Implementation, ...]:
    """Choose an implementation for each tensor, and log the choice."""
    chosen = choices(geometry, capability, operand, allowed)
    lines = Counter(
        (name, min(shape[1:]), max(shape[1:])) for name, (shape, _, _) in zip(chosen, geometry, strict=True)
    )
    for (name, m, n), number in sorted(lines.items()):
        _LOG.info("%d tensors of %d × %d matrices are orthogonalized by %r", number, m, n, name)
    return chosen


def choices(
    geometry: Geometry, capability: tuple[int, int], operand: torch.dtype, allowed: tuple[str, ...]
) -> tuple[Implementation, ...]:
    """Choose an implementation for each tensor, counting equal shapes together."""
    sizes = [(shape[0], min(shape[1:]), max(shape[1:])) for shape, _, _ in geometry]
    count: Counter[tuple[int, int]] = Counter()
    for b, m, n in sizes:
        count[m, n] += b
    chosen: list[Implementation] = []
    for (b, m, n), (_, _, dtype) in zip(sizes, geometry, strict=True):
        batch = MatrixBatch(m, n, count[m, n], dtype, "cuda", capability, operand)
        chosen.append("torch" if b * m * n == 0 else choose(batch, allowed))
    return tuple(chosen)


def try_kernels(name: str, matrices: Sequence[Tensor], coefficients: Coefficients) -> list[Tensor] | None:
    """Run one implementation, after a check against torch on its first use; disable it and log why on failure."""
    try:
        check(name, matrices[0].device)
        return run_kernels(name, matrices, coefficients)
    except Exception as error:  # an error of the compiler or driver must not end a training run
        if torch.cuda.is_current_stream_capturing():
            raise
        dispatch.FAILED[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("%r is disabled, and torch is used instead: %s", name, dispatch.FAILED[name])
        return None


def run_kernels(name: str, matrices: Sequence[Tensor], coefficients: Coefficients) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) on one device with the kernels of one implementation."""
    if name == "symmetric":
        from deepmd_muon.optim.polar.symmetric_launch import orthogonalize_by_products as run
    else:
        from deepmd_muon.optim.polar.one_launch import orthogonalize_in_one_launch

        run = functools.partial(orthogonalize_in_one_launch, name)
    done: list[Tensor] = run(matrices, coefficients)
    return done


class KernelError(RuntimeError):
    """The result of a kernel differs from torch's."""


@functools.lru_cache(maxsize=64)
def check(name: str, device: torch.device) -> None:
    """Compare an implementation with plain torch on low-rank matrices, in each memory layout that it supports."""
    shapes = {"whole": [(24, 40)], "strips": [(100, 400)], "tiles": [(270, 290)], "symmetric": [(150, 170), (128, 256)]}
    coefficients = coefficients_of("8+2")
    for m, n in shapes[name]:
        i = torch.arange(2 * m * n, device=device, dtype=torch.float32).view(2, m, n)
        x = torch.cos(0.3 * i) + torch.eye(m, n, device=device)
        (expected,) = orthogonalize_with_torch([x], coefficients, torch.float16 if x.is_cuda else torch.float32)
        for y in (x, x.mT, x.mT.contiguous().mT):
            (found,) = run_kernels(name, [y], coefficients)
            error = float(((found if found.shape == x.shape else found.mT) - expected).norm() / expected.norm())
            if not error < 5e-3:
                raise KernelError(f"the result differs from torch's by {error:.1e}")
