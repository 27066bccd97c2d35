"""D_i = A_iᵀ A_i[:, :axis] and its derivatives: a quadratic form whose parts are few matrix products.

The bilinear form behind D is symmetric, D(A, B) = Aᵀ B_axis and Bᵀ A_axis side by side, so that one function,
`pull`, is its adjoint in either argument: it returns dE/dA from A and dE/dD, and again the cotangent of A in the
backward pass of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepmd_muon.model.nn import triton_support


def pull(a: torch.Tensor, d_bar: torch.Tensor) -> torch.Tensor:
    """Return dE/dA `(natoms, 4, M)` from A and dE/dD `(natoms, M, axis)`."""
    if triton_support.usable(a.device):
        from deepmd_muon.model.descriptor.se_e2_a import kernels

        return kernels.pull_contraction(a, d_bar)
    axis = d_bar.shape[2]
    out = torch.bmm(a[:, :, :axis], d_bar.transpose(1, 2))
    out[:, :, :axis].baddbmm_(a, d_bar)
    return out


class Contract(torch.autograd.Function):
    """D from A."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, axis: int) -> torch.Tensor:
        """Return D `(natoms, M, axis)`."""
        ctx.save_for_backward(a)
        if triton_support.usable(a.device):
            from deepmd_muon.model.descriptor.se_e2_a import kernels

            return kernels.contract(a, axis)
        return torch.bmm(a.transpose(1, 2), a[:, :, :axis])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_bar: torch.Tensor) -> Any:
        """Return the cotangent of A."""
        (a,) = ctx.saved_tensors
        return pull(a, d_bar), None


class PullContraction(torch.autograd.Function):
    """`pull`, differentiable once in both arguments."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, d_bar: torch.Tensor) -> torch.Tensor:
        """Return dE/dA `(natoms, 4, M)`."""
        ctx.save_for_backward(a, d_bar)
        return pull(a, d_bar)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, moved: torch.Tensor) -> Any:
        """Return the cotangents of A and of dE/dD."""
        a, d_bar = ctx.saved_tensors
        axis = d_bar.shape[2]
        of_d_bar = torch.bmm(moved.transpose(1, 2), a[:, :, :axis])
        of_d_bar.baddbmm_(a.transpose(1, 2), moved[:, :, :axis])
        return pull(moved, d_bar), of_d_bar


contract: Callable[[torch.Tensor, int], torch.Tensor] = (
    Contract.apply
)  # torch leaves `apply` untyped
pull_contraction: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = PullContraction.apply
