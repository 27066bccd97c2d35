"""The node part of a DPA-3 layer on a GPU: few kernels for what autograd would do in many.

From node features x, the message m of the edges and their moments H (see `edges`),

    G_ad = Σ_c H_ca·H_cd/3,   h₀ = x·W₀ + b₀,   h₁ = G·W₁ + b₁,   x′ = α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) + ρ₂∘m,

G of H's columns from edges and from nodes apart. Further terms ρ₃∘v, … are treated as ρ₂∘m.
`layer` defines the result by torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors


def fits(x: torch.Tensor, activation: Activation) -> bool:
    """Return whether kernels can be used, and know the activation."""
    return activation.formula is not None and x.numel() > 0 and triton_support.usable(x.device)


@dataclass(frozen=True)
class Nodes(FourPasses):
    """The operation of one layer.

    Inputs: x `(atoms, n)`, H `(atoms, 3, columns)`, m and further terms `(atoms, n)`, W₀, b₀, W₁, b₁, and all ρ.
    Output: x′. Kept: G, h₀, h₁.

    Attributes
    ----------
    activation
        f.
    carry
        α.
    axis, edge
        Columns a of G, and columns of H that come from edges.
    """

    activation: Activation
    carry: float
    axis: int
    edge: int

    def launches(self, moment: torch.Tensor, rho: Tensors) -> tuple[Any, Any]:
        """Return the launches for rows and for G."""
        from deepmd_muon.model.descriptor.dpa3.kernels.nodes import Rows, Symmetric

        formula = self.activation.formula
        assert formula is not None
        kind, *curve_of = formula
        return Rows(tuple(rho), self.carry, kind, curve_of), Symmetric(
            self.axis, self.edge, moment.shape[2] - self.edge
        )

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        x, moment, plain, (w_0, b_0, w_1, b_1), rho = _sorted(given)
        rows, symmetric = self.launches(moment, rho)
        squares = symmetric.value(moment)
        h = torch.addmm(b_0, x, w_0), torch.addmm(b_1, squares, w_1)
        return (rows.value(x, plain, h),), (squares, *h)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of x, H, m and further terms."""
        (y_bar,), (_, moment, _, (w_0, _, w_1, _), rho), (_, *h) = cotangents, _sorted(given), kept
        rows, symmetric = self.launches(moment, rho)
        h_bar, plain_bar = rows.adjoint(y_bar, h)
        squares_bar = torch.mm(h_bar[1], w_1.t())
        x_bar = torch.addmm(y_bar, h_bar[0], w_0.t(), beta=self.carry)
        left = y_bar, *h_bar, squares_bar, *h, moment, w_0, w_1, *rho
        return (x_bar, symmetric.pull((moment, squares_bar)), *plain_bar), left

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of x′; and those of both h and of G, ẋ, Ḣ, ṁ, …."""
        (x_dot, moment_dot, *plain_dot), (_, _, _, _, h_0, h_1, moment, w_0, w_1, *rho) = tangents, left
        rows, symmetric = self.launches(moment, rho)
        squares_dot = symmetric.value(moment, moment_dot)
        h_dot = torch.mm(x_dot, w_0), torch.mm(squares_dot, w_1)
        return (rows.tangent(x_dot, plain_dot, h_dot, (h_0, h_1)),), (*h_dot, squares_dot, *tangents)

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (y,), (x, moment, plain, (w_0, _, w_1, _), rho), (squares, *h) = cotangents, _sorted(given), kept
        rows, symmetric = self.launches(moment, rho)
        earlier = [] if moved is None else [left[0], *moved[:2], *moved[5:]]
        h_hat, plain_hat, sums = rows.gradient(y, plain, h, earlier)
        squares_hat = torch.mm(h_hat[1], w_1.t())
        w_0_hat, w_1_hat = torch.mm(x.t(), h_hat[0]), torch.mm(squares.t(), h_hat[1])
        pairs = [(moment, squares_hat)]
        if moved is not None:
            _, _, squares_dot, x_dot, moment_dot, *_ = moved
            _, h_0_bar, h_1_bar, squares_bar, *_ = left
            w_0_hat.addmm_(x_dot.t(), h_0_bar)
            w_1_hat.addmm_(squares_dot.t(), h_1_bar)
            pairs.append((moment_dot, squares_bar))
        x_hat = torch.addmm(y, h_hat[0], w_0.t(), beta=self.carry)
        return x_hat, symmetric.pull(*pairs), *plain_hat, w_0_hat, sums[0], w_1_hat, sums[1], *sums[2:]


def _sorted(given: Any) -> tuple[torch.Tensor, torch.Tensor, Tensors, Tensors, Tensors]:
    """Return x, H, m and further terms, weights and biases, and ρ: two more than there are terms."""
    x, moment, *rest = given
    terms = (len(rest) - 6) // 2
    return x, moment, rest[:terms], rest[terms : terms + 4], rest[terms + 4 :]
