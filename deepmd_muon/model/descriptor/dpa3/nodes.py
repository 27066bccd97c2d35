"""The node part of a DPA-3 layer on a GPU: few kernels for what autograd would do in many.

From node features x, the message m of the edges and their moments H (see `edges`),

    G_ad = Σ_c H_ca·H_cd/3,   h₀ = x·W₀ + b₀,   h₁ = G·W₁ + b₁,   x′ = α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) + ρ₂∘m,

G of H's columns from edges and from nodes apart. `layer` defines the result by torch's operations. The four passes are
those of `angles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepmd_muon.model import kernels
from deepmd_muon.model.activation import Activation


@dataclass
class NodeTape:
    """Shared by the passes over the nodes of one layer.

    Attributes
    ----------
    activation
        f.
    carry
        α.
    axis, edge
        Columns a of G, and columns of H that come from edges.
    force
        Whether pass 2 will be asked for.
    adjoints
        Left by pass 2 for pass 4: those of x′, both h, and G.
    tangents
        Left by pass 3 for pass 4: those of x, m, H, both h, and G.
    """

    activation: Activation
    carry: float
    axis: int
    edge: int
    force: bool
    adjoints: tuple[torch.Tensor, ...] | None = None
    tangents: tuple[torch.Tensor, ...] | None = None

    def launches(self, moment: torch.Tensor, rho: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """Return the launches for rows and for G."""
        from deepmd_muon.model.descriptor.dpa3.node_kernels import Rows, Symmetric

        formula = self.activation.formula
        assert formula is not None
        kind, *curve_of = formula
        return Rows(rho, self.carry, kind, curve_of), Symmetric(self.axis, self.edge, moment.shape[2] - self.edge)


def fits(x: torch.Tensor, activation: Activation) -> bool:
    """Return whether kernels can be used, and know the activation."""
    return activation.formula is not None and x.numel() > 0 and kernels.usable(x.device)


class NodeUpdate(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2.

    Arguments: tape, x and m `(atoms, n)`, H `(atoms, 3, columns)`, W₀, b₀, W₁, b₁, and ρ₀, ρ₁, ρ₂. Returns x′ and an
    empty tensor, an argument of `NodeAdjoint`: so pass 4 waits for pass 3.
    """

    @staticmethod
    def forward(ctx: Any, tape: NodeTape, *given: torch.Tensor) -> Any:
        """See the class."""
        x, m, moment, w_0, b_0, w_1, b_1, *rho = given
        rows, symmetric = tape.launches(moment, tuple(rho))
        squares = symmetric.value(moment)
        h = torch.addmm(b_0, x, w_0), torch.addmm(b_1, squares, w_1)
        order = x.new_empty(0)
        ctx.tape = tape
        ctx.save_for_backward(order, squares, *h, *given)
        ctx.set_materialize_grads(False)
        return rows.value(x, m, h), order

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor, _: Any) -> Any:
        """Run pass 2 when forces are due, else pass 4."""
        tape: NodeTape = ctx.tape
        order, squares, h_0, h_1, *given = ctx.saved_tensors
        y = cotangent.contiguous()
        if tape.force and tape.adjoints is None:
            moment, w_0, w_1, rho = given[2], given[3], given[5], given[7:]
            return (None, *node_adjoint(tape, order, y, h_0, h_1, moment, w_0, w_1, *rho), *(None,) * 7)
        return (None, *_gradients(tape, y, squares, (h_0, h_1), *given))


class NodeAdjoint(torch.autograd.Function):
    """Passes 2 and 3.

    Arguments: tape, the empty tensor of `NodeUpdate`, the cotangent of x′, h₀, h₁, H, W₀, W₁, and ρ₀, ρ₁, ρ₂.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tape: NodeTape,
        order: torch.Tensor,
        y_bar: torch.Tensor,
        h_0: torch.Tensor,
        h_1: torch.Tensor,
        moment: torch.Tensor,
        w_0: torch.Tensor,
        w_1: torch.Tensor,
        *rho: torch.Tensor,
    ) -> Any:
        """Return the adjoints of x, m and H."""
        rows, symmetric = tape.launches(moment, rho)
        h_bar, m_bar = rows.adjoint(y_bar, (h_0, h_1))
        squares_bar = torch.mm(h_bar[1], w_1.t())
        # detached: a tape that held a node of the graph which holds the tape would never be freed
        tape.adjoints = (y_bar.detach(), h_bar, squares_bar)
        ctx.tape = tape
        ctx.save_for_backward(h_0, h_1, moment, w_0, w_1, *rho)
        x_bar = torch.addmm(y_bar, h_bar[0], w_0.t(), beta=tape.carry)
        return x_bar, m_bar, symmetric.pull((moment, squares_bar))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        """Take the tangents of x, m and H; return the cotangent of the adjoint of x′."""
        tape: NodeTape = ctx.tape
        h_0, h_1, moment, w_0, w_1, *rho = ctx.saved_tensors
        rows, symmetric = tape.launches(moment, tuple(rho))
        x_dot, m_dot, moment_dot = (x.contiguous() for x in tangents)
        squares_dot = symmetric.value(moment, moment_dot)
        h_dot = torch.mm(x_dot, w_0), torch.mm(squares_dot, w_1)
        tape.tangents = (x_dot, m_dot, moment_dot, *h_dot, squares_dot)
        return (None, None, rows.tangent(x_dot, m_dot, h_dot, (h_0, h_1)), *(None,) * 8)


node_update: Callable[..., tuple[torch.Tensor, torch.Tensor]] = NodeUpdate.apply
node_adjoint: Callable[..., tuple[torch.Tensor, ...]] = NodeAdjoint.apply


def _gradients(
    tape: NodeTape, y: torch.Tensor, squares: torch.Tensor, h: tuple[torch.Tensor, ...], *given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Pass 4; `given` are the tensors of `NodeUpdate`."""
    x, m, moment, w_0, _, w_1, _, *rho = given
    rows, symmetric = tape.launches(moment, tuple(rho))
    earlier: list[torch.Tensor] = []
    if tape.tangents is not None and tape.adjoints is not None:
        earlier = [tape.adjoints[0], tape.tangents[1], *tape.tangents[3:5]]
    h_hat, m_hat, sums = rows.gradient(y, m, h, earlier)
    squares_hat = torch.mm(h_hat[1], w_1.t())
    w_0_hat, w_1_hat = torch.mm(x.t(), h_hat[0]), torch.mm(squares.t(), h_hat[1])
    pairs = [(moment, squares_hat)]
    if tape.tangents is not None and tape.adjoints is not None:
        x_dot, _, moment_dot, _, _, squares_dot = tape.tangents
        _, h_bar, squares_bar = tape.adjoints
        w_0_hat.addmm_(x_dot.t(), h_bar[0])
        w_1_hat.addmm_(squares_dot.t(), h_bar[1])
        pairs.append((moment_dot, squares_bar))
    x_hat = torch.addmm(y, h_hat[0], w_0.t(), beta=tape.carry)
    return (x_hat, m_hat, symmetric.pull(*pairs), w_0_hat, sums[0], w_1_hat, sums[1], *sums[2:])
