"""The edge part of a DPA-3 layer: messages from edges to their centre, and the update of the edges.

For the neighbours j of an atom i, with per-atom terms p and per-neighbour terms q computed before (see `layer`),

    z_ij = e_ij·W + p_i + q_j,   y = f(z),   m_i = Σ_j w_ij·y_ij[:width],   H_i = Σ_j h_ij ⊗ [e_ij, v_j],

and y_ij[width:] updates the edge. q and v come as one table, so that one gather serves both. `update_by_torch` defines
the result. On a GPU each of the four passes (see `four_passes`) is one kernel in single precision (`edge_kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepmd_muon.model import kernels
from deepmd_muon.model.activation import Activation
from deepmd_muon.model.descriptor.dpa3.geometry import Incoming, incoming
from deepmd_muon.model.four_passes import FourPasses, Perhaps, Tensors, run


def incoming_for_kernels(neighbor: torch.Tensor, empty: torch.Tensor) -> Incoming | None:
    """Return `incoming` where kernels will ask for it, else None."""
    if kernels.usable(neighbor.device):
        return incoming(neighbor, empty)
    if not kernels.usable_as_operators(neighbor.device):
        return None
    from deepmd_muon.model.descriptor.dpa3 import edge_operators

    return Incoming(*edge_operators.incoming(neighbor, empty))


def _kernels(neighbor: torch.Tensor, weight: torch.Tensor, activation: Activation) -> Any:
    """Return the launches of kernels where they can be used, or operators of torch that do them."""
    traced = kernels.usable_as_operators(weight.device)
    if not (traced or kernels.usable(weight.device)):
        return None
    from deepmd_muon.model.descriptor.dpa3 import edge_launches

    if not edge_launches.fits(neighbor, weight, activation.formula):
        return None
    if not traced:
        return edge_launches
    from deepmd_muon.model.descriptor.dpa3 import edge_operators

    return edge_operators


@dataclass(frozen=True)
class Edges(FourPasses):
    """The operation of one layer, by kernels; inputs and outputs are those of `update_by_torch`.

    Attributes
    ----------
    neighbor, activation, width
        See `edge_update`.
    incoming
        The edges by neighbour.
    launches
        The kernels, one for each pass.
    """

    neighbor: torch.Tensor
    activation: Activation
    width: int
    incoming: Incoming
    launches: Any

    def _layer(self, weight: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments that all kernels share."""
        formula = self.activation.formula
        assert formula is not None
        kind, *curve_of = formula
        return self.neighbor, *self.incoming, weight, self.width, kind, curve_of

    def _dense(self, cotangents: Perhaps, table: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return cotangents as kernels take them: zeros where none arrived."""
        nreal, nnei = self.neighbor.shape
        rest = weight.shape[1] - self.width
        shapes = (
            (nreal, self.width),
            (nreal, nnei, rest) if rest else (0,),
            (nreal, 3, weight.shape[0] + table.shape[1] - weight.shape[1]),
        )
        return [weight.new_zeros(*shape) if x is None else x for x, shape in zip(cotangents, shapes, strict=True)]

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        *terms, weight = given
        message, rest, moment = self.launches.update(terms, *self._layer(weight))
        return (message, rest if weight.shape[1] > self.width else None, moment), ()

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of all inputs but W, and all tensors that came."""
        *terms, weight = given
        dense = self._dense(cotangents, terms[2], weight)
        return self.launches.adjoint(dense, terms, *self._layer(weight)), (*cotangents, *given)

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivatives of the outputs, and the tangents."""
        _, _, _, *terms, weight = left
        return self.launches.tangent(terms, tangents, *self._layer(weight)), tangents

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """Return the gradients of e, p, table and W; w and h, which depend on positions alone, get none."""
        *terms, weight = given
        earlier = [] if moved is None else self._dense(left[:3], terms[2], weight)
        now = self._dense(cotangents, terms[2], weight)
        weight_hat, *hats = self.launches.gradient(now, earlier, terms, moved or [], *self._layer(weight))
        return *hats, None, None, weight_hat


def update_by_torch(
    neighbor: torch.Tensor,
    activation: Activation,
    width: int,
    e: torch.Tensor,
    p: torch.Tensor,
    table: torch.Tensor,
    w: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return what `edge_update` does, left to autograd."""
    features = weight.shape[1]
    gathered = table.index_select(0, neighbor.flatten()).view(*neighbor.shape, table.shape[1])
    y = activation.value(torch.matmul(e, weight) + p.unsqueeze(1) + gathered[..., :features])
    message = torch.bmm(w.unsqueeze(1), y[..., :width]).squeeze(1)
    moment = torch.bmm(h.transpose(1, 2), torch.cat([e, gathered[..., features:]], 2))
    return message, y[..., width:] if features > width else None, moment


def edge_update(
    neighbor: torch.Tensor,
    incoming_edges: Incoming | None,
    activation: Activation,
    width: int,
    *given: torch.Tensor,
    force: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return m `(nreal, width)`, y[width:] `(nreal, nnei, rest)`, None without such features, and H `(nreal, 3, n)`.

    Parameters
    ----------
    neighbor
        Number of each neighbour among the sorted atoms `(nreal, nnei)`, int64; any atom in empty slots.
    incoming_edges
        The edges by neighbour, for kernels; sorted here when missing.
    activation
        f.
    width
        Length of a message.
    given
        e `(nreal, nnei, e_dim)`; p `(nreal, features)`; the table of q and node features v side by side
        `(nreal, features + n_dim)`; the weight w of an edge in the message `(nreal, nnei)` and its weighted direction h
        `(nreal, nnei, 3)`, 0 in empty slots; W `(e_dim, features)`.
    force
        See `four_passes.run`.
    """
    launches = _kernels(neighbor, given[-1], activation)
    if launches is None:
        return update_by_torch(neighbor, activation, width, *given)
    edges = Edges(neighbor, activation, width, incoming_edges or incoming(neighbor), launches)
    message, update, moment = run(edges, *given, force=force)
    return message, update, moment
