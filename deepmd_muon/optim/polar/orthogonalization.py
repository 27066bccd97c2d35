"""The polar factor of batches of matrices, by the implementation that `dispatch` chooses.

Kernels are checked against torch on their first use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import Precision
from deepmd_muon.optim.errors import InvalidShapeError
from deepmd_muon.optim.polar import dispatch
from deepmd_muon.optim.polar.dispatch import (
    IMPLEMENTATIONS,
    Geometry,
    Implementation,
    MatrixBatch,
    choose,
    geometry_of,
    kernels_can_read,
)
from deepmd_muon.optim.polar.newton_schulz import orthogonalize_with_torch
from deepmd_muon.optim.polar.schedules import AnySchedule, Coefficients, coefficients_of

_LOG = logging.getLogger(__name__)
_REDUCED = {"bf16", "tf32"}


@contextlib.contextmanager
def requested_precision() -> Iterator[None]:
    """Disable autocast, and multiply float32 matrices in float32.

    Autocast would round float32 operands to 16 bits; ``torch.set_float32_matmul_precision``
    ("high", "medium") would round them to TF32 or bf16. On the Gram matrix of a low-rank gradient,
    such rounding errors grow until the result is NaN. The caller's settings are restored on exit.
    """
    with torch._C._DisableAutocast():
        # torch sets this attribute when it is imported, so that mypy does not see it.
        on_cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        matmuls = on_cpu, torch.backends.cuda.matmul
        precisions = [matmul.fp32_precision for matmul in matmuls]
        if not _REDUCED.intersection(precisions):
            yield
            return
        try:
            word = torch.get_float32_matmul_precision()
        except RuntimeError:
            # The caller uses the newer interface, which the older one cannot express.
            word = None
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if word is not None:
                torch.set_float32_matmul_precision(word)
            for matmul, precision in zip(matmuls, precisions, strict=True):
                matmul.fp32_precision = "none"  # inherited from the backend or from torch.backends
                if matmul.fp32_precision != precision:
                    matmul.fp32_precision = precision


def orthogonalize(
    x: Tensor, schedule: AnySchedule = "8+2", precision: Precision = "auto", *, gram: bool = True
) -> Tensor:
    """Return the polar factor U Vᵀ of each matrix, to the accuracy of the schedule.

    Parameters
    ----------
    x
        Real floating-point tensor (..., m, n). It is not changed. Zero matrices give zeros; a
        matrix with a NaN or infinity gives NaNs without affecting the others; the scale of a matrix
        does not matter.
    schedule
        A name in `SCHEDULES`, a `Schedule`, or one (a, b, c) per step.
    precision
        Operands of the matrix products: 'auto' is float16 on a GPU and float32 elsewhere; the
        iterate is float32, or float64 for 'float64'.
    gram
        Allow iterating on the Gram matrix where that is cheaper.

    Returns
    -------
    Tensor
        (..., m, n), in the dtype of `x`. It carries no gradient.

    Raises
    ------
    InvalidShapeError
        When `x` has fewer than two dimensions or is not real floating point; a ValueError.
    InvalidSettingError
        When the schedule is unknown; a ValueError.

    References
    ----------
    N. J. Higham, "Functions of Matrices", chapter 8; K. Jordan et al., "Muon", 2024.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise InvalidShapeError(
            "orthogonalize needs real matrices of shape (..., m, n); "
            f"found shape {tuple(x.shape)} and {x.dtype}"
        )
    coefficients = coefficients_of(schedule)
    if x.numel() == 0:
        return x.clone()
    (result,) = orthogonalize_matrices(
        [x.reshape(-1, *x.shape[-2:])], coefficients, precision, gram=gram
    )
    return result.reshape(x.shape).to(x.dtype)


@torch.no_grad()
@requested_precision()
def orthogonalize_matrices(
    matrices: Sequence[Tensor],
    schedule: AnySchedule,
    precision: Precision = "auto",
    *,
    gram: bool = True,
    flash: bool = True,
) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) of different shapes on one device together.

    They are not changed.

    The other arguments are as in `orthogonalize`; `flash` says whether to use kernels. The polar
    factors are in the iterate's dtype: float32, or float64 for precision 'float64'.
    """
    if not matrices:
        return []
    coefficients = coefficients_of(schedule)
    on_gpu = matrices[0].device.type == "cuda"
    if precision == "auto":
        operand = torch.float16 if on_gpu else torch.float32
    else:
        operand = getattr(torch, precision)
    results: list[Tensor | None] = [None] * len(matrices)
    if flash and _kernels_available() and on_gpu:
        results = _orthogonalize_with_kernels(matrices, coefficients, operand)
    missing = [i for i, result in enumerate(results) if result is None]
    if missing:
        torch_results = orthogonalize_with_torch(
            [matrices[i] for i in missing], coefficients, operand, gram=gram
        )
        for i, x in zip(missing, torch_results, strict=True):
            results[i] = x
    return [x for x in results if x is not None]


@functools.lru_cache(maxsize=1)
def _kernels_available() -> bool:
    reason = dispatch.unavailable()
    if reason:
        level = logging.WARNING if torch.cuda.is_available() else logging.INFO
        _LOG.log(level, "matrices are orthogonalized by torch: %s", reason)
    return not reason


def _orthogonalize_with_kernels(
    matrices: Sequence[Tensor], coefficients: Coefficients, operand: torch.dtype
) -> list[Tensor | None]:
    """Return float32 results (b, m, n) of batches that a kernel takes; None for all others."""
    results: list[Tensor | None] = [None] * len(matrices)
    usable = tuple(name for name in IMPLEMENTATIONS if name not in dispatch.FAILED)
    capability = torch.cuda.get_device_capability(matrices[0].device)
    names = choose_all(geometry_of(matrices), capability, operand, usable)
    for name in dict.fromkeys(names):
        if name == "torch":
            continue
        members = [i for i, its_name in enumerate(names) if its_name == name]
        polar = try_kernels(name, [matrices[i] for i in members], coefficients)
        if polar is None:  # it has just been disabled: choose again
            return _orthogonalize_with_kernels(matrices, coefficients, operand)
        for i, x in zip(members, polar, strict=True):
            results[i] = x
            dispatch.COUNTS[name, min(x.shape[1:]), max(x.shape[1:])] += x.shape[0]
    return results


@functools.lru_cache(maxsize=64)
def choose_all(
    geometry: Geometry, capability: tuple[int, int], operand: torch.dtype, allowed: tuple[str, ...]
) -> tuple[Implementation, ...]:
    """Choose an implementation for each tensor, and log the choice."""
    names = choices(geometry, capability, operand, allowed)
    tensors = Counter(
        (name, min(shape[1:]), max(shape[1:]))
        for name, (shape, _, _) in zip(names, geometry, strict=True)
    )
    for (name, m, n), count in sorted(tensors.items()):
        _LOG.info("%d tensors of %d × %d matrices are orthogonalized by %r", count, m, n, name)
    return names


def choices(
    geometry: Geometry, capability: tuple[int, int], operand: torch.dtype, allowed: tuple[str, ...]
) -> tuple[Implementation, ...]:
    """Choose an implementation for each tensor, counting equal shapes together."""
    counts: Counter[tuple[int, int]] = Counter()
    for (b, *size), _, _ in geometry:
        counts[min(size), max(size)] += b
    names: list[Implementation] = []
    for (b, *size), _, dtype in geometry:
        batch = MatrixBatch(min(size), max(size), counts[min(size), max(size)])
        takes = b * min(size) > 0 and kernels_can_read(dtype, capability, operand)
        names.append(choose(batch, allowed) if takes else "torch")
    return tuple(names)


def try_kernels(
    name: str, matrices: Sequence[Tensor], coefficients: Coefficients
) -> list[Tensor] | None:
    """Run one implementation, after a check against torch on its first use.

    Disable it and log why on failure.
    """
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
        from deepmd_muon.optim.polar.symmetric_launch import orthogonalize_by_products

        return orthogonalize_by_products(matrices, coefficients)
    from deepmd_muon.optim.polar.launches import run_launches, start_launch

    start = functools.partial(start_launch, name)
    return run_launches(name, start, matrices, coefficients)


class KernelError(RuntimeError):
    """The result of a kernel differs from torch's."""


@functools.lru_cache(maxsize=64)
def check(name: str, device: torch.device) -> None:
    """Compare an implementation with plain torch on low-rank matrices, in each memory layout."""
    shapes = {
        "whole": [(24, 40)],
        "strips": [(100, 400)],
        "symmetric": [(150, 170), (128, 256)],
    }
    coefficients = coefficients_of("8+2")
    for m, n in shapes[name]:
        i = torch.arange(2 * m * n, device=device, dtype=torch.float32).view(2, m, n)
        x = torch.cos(0.3 * i) + torch.eye(m, n, device=device)
        (expected,) = orthogonalize_with_torch(
            [x], coefficients, torch.float16 if x.is_cuda else torch.float32
        )
        for y in (x, x.mT, x.mT.contiguous().mT):
            (polar,) = run_kernels(name, [y], coefficients)
            upright = polar if polar.shape == x.shape else polar.mT
            error = float((upright - expected).norm() / expected.norm())
            if not error < 5e-3:
                raise KernelError(f"the result differs from torch's by {error:.1e}")
