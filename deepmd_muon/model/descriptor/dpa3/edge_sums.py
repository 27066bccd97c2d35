"""The update of a DPA-3 layer's edges on a GPU: few kernels for what autograd would do in many.

From edge features e, their update u (see `edges`) and the messages m of the angles to the first edges of each atom
(see `angles`), with h = m·W + b, and h = b for the other edges,

    e′ = α·e + ρ₀∘u + ρ₁∘f(h).

`layer` defines the result by torch's operations. The four passes are those of `angles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepmd_muon.model import kernels
from deepmd_muon.model.activation import Activation
from deepmd_muon.model.descriptor.dpa3.geometry import AnglePlan


@dataclass
class EdgeSumTape:
    """Shared by the passes over the edges' update of one layer.

    Attributes
    ----------
    activation
        f.
    carry
        α.
    near
        Edges of an atom that have messages.
    force
        Whether pass 2 will be asked for.
    adjoints
        Left by pass 2 for pass 4: those of e′ and h.
    tangents
        Left by pass 3 for pass 4: those of u, m and h.
    """

    activation: Activation
    carry: float
    near: int
    force: bool
    adjoints: tuple[torch.Tensor, ...] | None = None
    tangents: tuple[torch.Tensor, ...] | None = None

    def launches(self, h: torch.Tensor, bias: torch.Tensor, rho: tuple[torch.Tensor, ...], slots: int) -> Any:
        """Return the launches for a layer with so many `slots` an atom."""
        from deepmd_muon.model.descriptor.dpa3.edge_sum_kernels import Edges

        formula = self.activation.formula
        assert formula is not None
        kind, *curve_of = formula
        return Edges(h, bias, rho, slots, self.near, self.carry, kind, curve_of)


def fits(edge: torch.Tensor, plan: AnglePlan, activation: Activation) -> bool:
    """Return whether kernels can be used on a padded plan, and know the activation."""
    return activation.formula is not None and plan.padded and kernels.usable(edge.device)


class EdgeSum(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2.

    Arguments: tape, e and u `(atoms, slots, width)`, m `(atoms·near, width)`, W, b, ρ₀ and ρ₁. Returns e′ and an empty
    tensor, an argument of `EdgeSumAdjoint`: so pass 4 waits for pass 3.
    """

    @staticmethod
    def forward(ctx: Any, tape: EdgeSumTape, *given: torch.Tensor) -> Any:
        """See the class."""
        e, u, m, weight, bias, *rho = given
        h = torch.addmm(bias, m, weight)
        order = e.new_empty(0)
        ctx.tape = tape
        ctx.save_for_backward(order, h, *given[1:])
        ctx.set_materialize_grads(False)
        return tape.launches(h, bias, tuple(rho), e.shape[1]).value(e.contiguous(), u.contiguous()), order

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor, _: Any) -> Any:
        """Run pass 2 when forces are due, else pass 4."""
        tape: EdgeSumTape = ctx.tape
        order, h, u, m, *given = ctx.saved_tensors
        y = cotangent.contiguous()
        if tape.force and tape.adjoints is None:
            return (None, *edge_sum_adjoint(tape, order, y, h, *given), *(None,) * 4)
        return (None, *_gradients(tape, y, h, u, m, *given))


class EdgeSumAdjoint(torch.autograd.Function):
    """Passes 2 and 3.

    Arguments: tape, the empty tensor of `EdgeSum`, the cotangent of e′, h, W, b, ρ₀ and ρ₁.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tape: EdgeSumTape,
        order: torch.Tensor,
        y_bar: torch.Tensor,
        h: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        *rho: torch.Tensor,
    ) -> Any:
        """Return the adjoints of e, u and m."""
        u_bar, h_bar = tape.launches(h, bias, rho, y_bar.shape[1]).adjoint(y_bar)
        # detached: a tape that held a node of the graph which holds the tape would never be freed
        tape.adjoints = (y_bar.detach(), h_bar)
        ctx.tape = tape
        ctx.save_for_backward(h, weight, bias, *rho)
        return y_bar * tape.carry, u_bar, torch.mm(h_bar, weight.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        """Take the tangents of e, u and m; return the cotangent of the adjoint of e′."""
        tape: EdgeSumTape = ctx.tape
        h, weight, bias, *rho = ctx.saved_tensors
        e_dot, u_dot, m_dot = (x.contiguous() for x in tangents)
        h_dot = torch.mm(m_dot, weight)
        tape.tangents = (u_dot, m_dot, h_dot)
        moved = tape.launches(h, bias, tuple(rho), e_dot.shape[1]).tangent(e_dot, u_dot, h_dot)
        return (None, None, moved, *(None,) * 5)


edge_sum: Callable[..., tuple[torch.Tensor, torch.Tensor]] = EdgeSum.apply
edge_sum_adjoint: Callable[..., tuple[torch.Tensor, ...]] = EdgeSumAdjoint.apply


def _gradients(
    tape: EdgeSumTape,
    y: torch.Tensor,
    h: torch.Tensor,
    u: torch.Tensor,
    m: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *rho: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Pass 4: gradients of e, u, m, W, b, ρ₀ and ρ₁."""
    earlier: list[torch.Tensor] = []
    if tape.tangents is not None and tape.adjoints is not None:
        earlier = [tape.adjoints[0], tape.tangents[0], tape.tangents[2]]
    u_hat, h_hat, sums = tape.launches(h, bias, rho, y.shape[1]).gradient(y, u.contiguous(), earlier)
    weight_hat = torch.mm(m.t(), h_hat)
    if tape.tangents is not None and tape.adjoints is not None:
        weight_hat.addmm_(tape.tangents[1].t(), tape.adjoints[1])
    e_hat = y if tape.carry == 1.0 else y * tape.carry
    return e_hat, u_hat, torch.mm(h_hat, weight.t()), weight_hat, *sums
