"""The polar factor of batches of matrices, by the implementation that the table of `dispatch` chooses."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import Precision
from deepmd_muon.optim.errors import InvalidShapeError
from deepmd_muon.optim.polar.arithmetic import requested_precision
from deepmd_muon.optim.polar.dispatch import IMPLEMENTATIONS
from deepmd_muon.optim.polar.newton_schulz import orthogonalize_with_torch
from deepmd_muon.optim.polar.run import orthogonalize_with_kernels
from deepmd_muon.optim.polar.schedules import AnySchedule, coefficients_of


def orthogonalize(
    x: Tensor, schedule: AnySchedule = "8+2", precision: Precision = "auto", *, gram: bool = True
) -> Tensor:
    """Return the polar factor U Vᵀ of each matrix, to the accuracy of the schedule.

    Parameters
    ----------
    x
        Real floating-point tensor (..., m, n). It is not changed. Zero matrices give zeros; a matrix with a NaN
        or infinity gives NaNs without affecting the others; the scale of a matrix does not matter.
    schedule
        A name in `SCHEDULES`, a `Schedule`, or one (a, b, c) per step.
    precision
        Operands of the matrix products: 'auto' is float16 on a GPU and float32 elsewhere; the iterate is float32,
        or float64 for 'float64'.
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
            f"orthogonalize needs real matrices of shape (..., m, n); found shape {tuple(x.shape)} and {x.dtype}"
        )
    coefficients = coefficients_of(schedule)
    if x.numel() == 0:
        return x.clone()
    (result,) = orthogonalize_matrices([x.reshape(-1, *x.shape[-2:])], coefficients, precision, gram=gram)
    return result.reshape(x.shape).to(x.dtype)


@torch.no_grad()
@requested_precision()
def orthogonalize_matrices(
    matrices: Sequence[Tensor],
    schedule: AnySchedule,
    precision: Precision = "auto",
    *,
    gram: bool = True,
    flash: bool | Collection[str] = True,
) -> list[Tensor]:
    """Orthogonalize several batches of matrices of different shapes together.

    Parameters
    ----------
    matrices
        Tensors (b, m, n) on one device; they are not changed.
    schedule, precision, gram
        As in `orthogonalize`.
    flash
        Whether to use kernels, or the implementations of `polar.dispatch` that may be used.

    Returns
    -------
    list of Tensor
        The polar factors, shapes as given, in the iterate's dtype (float32, or float64 for precision 'float64').
    """
    if not matrices:
        return []
    coefficients = coefficients_of(schedule)
    operand = _operand_dtype(precision, matrices[0].device)
    implementations = (IMPLEMENTATIONS if flash else ()) if isinstance(flash, bool) else flash
    results = orthogonalize_with_kernels(matrices, coefficients, operand, implementations)
    left = [i for i, done in enumerate(results) if done is None]
    if left:
        done = orthogonalize_with_torch([matrices[i] for i in left], coefficients, operand, gram=gram)
        for i, x in zip(left, done, strict=True):
            results[i] = x
    return [x for x in results if x is not None]


def _operand_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float64": torch.float64,
    }[precision]
