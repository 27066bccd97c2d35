"""The update of a DPA-3 layer's edges on a GPU: few kernels for what autograd would do in many.

From edge features e, their update u (see `edges`) and the messages m of the angles to the first edges of each atom
(see `angles`), with h = m·W + b, and h = b for the other edges,

    e′ = α·e + ρ₀∘u + ρ₁∘f(h).

`layer` defines the result by torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepmd_muon.model.descriptor.dpa3.geometry import AnglePlan
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors


def fits(edge: torch.Tensor, plan: AnglePlan, activation: Activation) -> bool:
    """Return whether kernels can be used on a padded plan, and know the activation."""
    return activation.formula is not None and plan.padded and triton_support.usable(edge.device)


@dataclass(frozen=True)
class EdgeSum(FourPasses):
    """The operation of one layer.

    Inputs: e and u `(atoms, slots, width)`, m `(atoms·near, width)`, W, b, ρ₀ and ρ₁. Output: e′. Kept: h.

    Attributes
    ----------
    activation
        f.
    carry
        α.
    near
        Edges of an atom that have messages.
    """

    activation: Activation
    carry: float
    near: int

    def launches(self, h: torch.Tensor, bias: torch.Tensor, rho: Tensors, slots: int) -> Any:
        """Return the launches for a layer with so many `slots` an atom."""
        from deepmd_muon.model.descriptor.dpa3.kernels.sums import Edges

        formula = self.activation.formula
        assert formula is not None
        kind, *curve_of = formula
        return Edges(h, bias, tuple(rho), slots, self.near, self.carry, kind, curve_of)

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        e, u, m, weight, bias, *rho = given
        h = torch.addmm(bias, m, weight)
        return (self.launches(h, bias, rho, e.shape[1]).value(e.contiguous(), u.contiguous()),), (h,)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of e, u and m."""
        (y_bar,), (_, _, _, weight, bias, *rho), (h,) = cotangents, given, kept
        u_bar, h_bar = self.launches(h, bias, rho, y_bar.shape[1]).adjoint(y_bar)
        return (y_bar * self.carry, u_bar, torch.mm(h_bar, weight.t())), (y_bar, h_bar, h, weight, bias, *rho)

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of e′; and u̇, ṁ and that of h."""
        (e_dot, u_dot, m_dot), (_, _, h, weight, bias, *rho) = tangents, left
        h_dot = torch.mm(m_dot, weight)
        moved = self.launches(h, bias, rho, e_dot.shape[1]).tangent(e_dot, u_dot, h_dot)
        return (moved,), (u_dot, m_dot, h_dot)

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (y,), (_, u, m, weight, bias, *rho), (h,) = cotangents, given, kept
        earlier = [] if moved is None else [left[0], moved[0], moved[2]]
        u_hat, h_hat, sums = self.launches(h, bias, rho, y.shape[1]).gradient(y, u.contiguous(), earlier)
        weight_hat = torch.mm(m.t(), h_hat)
        if moved is not None:
            weight_hat.addmm_(moved[1].t(), left[1])
        e_hat = y if self.carry == 1.0 else y * self.carry
        return e_hat, u_hat, torch.mm(h_hat, weight.t()), weight_hat, *sums
