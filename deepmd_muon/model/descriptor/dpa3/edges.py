"""The edge part of a DPA-3 layer: messages from edges to their centre, and the update of the edges.

For the neighbours j of an atom i, with per-atom terms p and per-neighbour terms q computed before (see `layer`),

    z_ij = e_ij·W + p_i + q_j,   y = f(z),   m_i = Σ_j w_ij·y_ij[:width],   H_i = Σ_j h_ij ⊗ [e_ij, v_j],

and y_ij[width:] updates the edge. q and v come as one table, so that one gather serves both. The four passes (see
`four_passes`) run block by block as those of `angles`; on a GPU each is one kernel in single precision
(`kernels.edges`). On a CPU they take as long as autograd's (1.0 times), and a step of training 2.3 times less memory
(six layers, 192 atoms of water, float32, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepmd_muon.model.descriptor.dpa3.geometry import Incoming, incoming
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors

EDGE_BLOCK_ROWS = (
    1024  # edges of a block on a CPU: with 512 numbers each 2 MB in float32, about a core's cache
)


class EdgeTerms(NamedTuple):
    """The inputs of one layer's edges, or tangents or gradients of them.

    Attributes
    ----------
    e
        Edge features `(nreal, nnei, e_dim)`.
    p
        Terms of the centre `(nreal, features)`.
    table
        Terms q of a neighbour and its node features v side by side `(nreal, features + n_dim)`.
    w
        Weight of an edge in the message `(nreal, nnei)`; 0 in empty slots.
    h
        Weighted direction of an edge `(nreal, nnei, 3)`; 0 in empty slots.
    """

    e: torch.Tensor
    p: torch.Tensor
    table: torch.Tensor
    w: torch.Tensor
    h: torch.Tensor

    def block(self, atoms: slice, neighbor: torch.Tensor) -> _Block:
        """Return the part that belongs to some atoms."""
        here = neighbor[atoms]
        gathered = self.table.index_select(0, here.flatten()).view(*here.shape, self.table.shape[1])
        return _Block(self.e[atoms], self.p[atoms], gathered, self.w[atoms], self.h[atoms])


class _Block(NamedTuple):
    e: torch.Tensor
    p: torch.Tensor
    gathered: torch.Tensor
    w: torch.Tensor
    h: torch.Tensor

    def z(self, weight: torch.Tensor) -> torch.Tensor:
        """Return e·W + p_i + q_j `(atoms, nnei, features)`."""
        z = torch.matmul(self.e, weight)
        z += self.p.unsqueeze(1)
        z += self.gathered[..., : weight.shape[1]]
        return z

    def sums(self, h: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Σ_j h ⊗ e `(atoms, 3, e_dim)` and Σ_j h ⊗ v `(atoms, 3, n_dim)`."""
        across = h.transpose(1, 2)
        return torch.bmm(across, self.e), torch.bmm(across, self.gathered[..., features:])


class EdgeCotangents(NamedTuple):
    """Cotangents of m `(nreal, width)`, of y[width:] and of H `(nreal, 3, e_dim + n_dim)`; None where none arrived."""

    message: torch.Tensor | None
    update: torch.Tensor | None
    moment: torch.Tensor | None

    def of_y(self, atoms: slice, w: torch.Tensor, like: torch.Tensor, width: int) -> torch.Tensor:
        """Return ȳ of a block."""
        y_bar = torch.empty_like(like)
        if self.message is None:
            y_bar[..., :width] = 0.0
        else:
            torch.mul(self.message[atoms].unsqueeze(1), w.unsqueeze(-1), out=y_bar[..., :width])
        if self.update is None:
            y_bar[..., width:] = 0.0
        else:
            y_bar[..., width:] = self.update[atoms]
        return y_bar


def incoming_for_kernels(neighbor: torch.Tensor, empty: torch.Tensor) -> Incoming | None:
    """Return `incoming` where kernels will ask for it, else None."""
    return incoming(neighbor, empty) if triton_support.usable(neighbor.device) else None


@dataclass(frozen=True)
class Edges(FourPasses):
    """The operation of one layer.

    Inputs: the members of `EdgeTerms`, W `(e_dim, features)`. Outputs: m, y[width:] (None without further features), H.

    Attributes
    ----------
    neighbor
        Number of each neighbour among the sorted atoms `(nreal, nnei)`, int64; any atom in empty slots.
    activation
        f.
    width
        Length of a message.
    incoming
        The edges by neighbour, for kernels; sorted in each pass when missing.
    """

    neighbor: torch.Tensor
    activation: Activation
    width: int
    incoming: Incoming | None = None

    def blocks(self) -> Iterator[slice]:
        """Yield runs of atoms: as many as a CPU's cache takes, elsewhere all."""
        atoms, slots = self.neighbor.shape
        step = (
            max(1, EDGE_BLOCK_ROWS // max(slots, 1))
            if self.neighbor.device.type == "cpu"
            else max(atoms, 1)
        )
        for first in range(0, atoms, step):
            yield slice(first, first + step)

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        terms, weight = EdgeTerms(*given[:-1]), given[-1]
        fast = _kernels(self, weight)
        if fast is not None:
            message, rest, moment = fast.update(list(terms), _layer(self, weight))
            return (message, rest if weight.shape[1] > self.width else None, moment), ()
        features, e_dim = weight.shape[1], weight.shape[0]
        nreal, nnei = self.neighbor.shape
        n_dim = terms.table.shape[1] - features
        message = terms.p.new_empty(nreal, self.width)
        update = (
            terms.p.new_empty(nreal, nnei, features - self.width) if features > self.width else None
        )
        moment = terms.p.new_empty(nreal, 3, e_dim + n_dim)
        for atoms in self.blocks():
            block = terms.block(atoms, self.neighbor)
            y = self.activation.value(block.z(weight))
            message[atoms] = torch.bmm(block.w.unsqueeze(1), y[..., : self.width]).squeeze(1)
            moment[atoms, :, :e_dim], moment[atoms, :, e_dim:] = block.sums(block.h, features)
            if update is not None:
                update[atoms] = y[..., self.width :]
        return (message, update, moment), ()

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of the members of `EdgeTerms`, and all tensors that came."""
        terms, weight, old = EdgeTerms(*given[:-1]), given[-1], EdgeCotangents(*cotangents)
        left = *cotangents, *given
        fast = _kernels(self, weight)
        if fast is not None:
            return fast.adjoint(
                _dense(old, self, weight, terms), list(terms), _layer(self, weight)
            ), left
        f, width, features, e_dim = self.activation, self.width, weight.shape[1], weight.shape[0]
        out = EdgeTerms(*(torch.zeros_like(x) for x in terms))
        for atoms in self.blocks():
            block = terms.block(atoms, self.neighbor)
            value, keep = f(block.z(weight))
            z_bar = f.times_slope(keep, old.of_y(atoms, block.w, value, width))
            out.p[atoms] = z_bar.sum(1)
            e_bar = torch.matmul(z_bar, weight.t())
            to_neighbor = torch.zeros_like(block.gathered)
            to_neighbor[..., :features] = z_bar
            if old.message is not None:
                out.w[atoms] = torch.bmm(
                    value[..., :width], old.message[atoms].unsqueeze(-1)
                ).squeeze(-1)
            if old.moment is not None:
                here = old.moment[atoms]
                e_bar = e_bar.baddbmm_(block.h, here[..., :e_dim])
                to_neighbor[..., features:] = torch.bmm(block.h, here[..., e_dim:])
                both = torch.bmm(block.e, here[..., :e_dim].transpose(1, 2))
                out.h[atoms] = both.baddbmm_(
                    block.gathered[..., features:], here[..., e_dim:].transpose(1, 2)
                )
            out.e[atoms] = e_bar
            _add_to_neighbors(out.table, self.neighbor[atoms], to_neighbor)
        return out, left

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivatives of the outputs, and the tangents of the members of `EdgeTerms`."""
        old, terms, weight = EdgeCotangents(*left[:3]), EdgeTerms(*left[3:-1]), left[-1]
        moving = EdgeTerms(*tangents)
        fast = _kernels(self, weight)
        if fast is not None:
            return fast.tangent(list(terms), tangents, _layer(self, weight)), tangents
        features, e_dim, width = weight.shape[1], weight.shape[0], self.width
        out = EdgeCotangents(*(None if x is None else torch.empty_like(x) for x in old))
        for atoms in self.blocks():
            block, dot = terms.block(atoms, self.neighbor), moving.block(atoms, self.neighbor)
            value, keep = self.activation(block.z(weight))
            y_dot = self.activation.times_slope(keep, dot.z(weight))
            if out.message is not None:
                moved = torch.bmm(block.w.unsqueeze(1), y_dot[..., :width])
                out.message[atoms] = moved.baddbmm_(dot.w.unsqueeze(1), value[..., :width]).squeeze(
                    1
                )
            if out.update is not None:
                out.update[atoms] = y_dot[..., width:]
            if out.moment is not None:
                first, second = dot.sums(block.h, features), block.sums(dot.h, features)
                out.moment[atoms, :, :e_dim] = first[0] + second[0]
                out.moment[atoms, :, e_dim:] = first[1] + second[1]
        return out, tangents

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """Return the gradients of e, p, table and W; w and h, which depend on positions alone, get none."""
        terms, weight, now = EdgeTerms(*given[:-1]), given[-1], EdgeCotangents(*cotangents)
        old = EdgeCotangents(*(left or [None] * 3)[:3])
        fast = _kernels(self, weight)
        if fast is not None:
            earlier = [] if moved is None else _dense(old, self, weight, terms)
            arrived = _dense(now, self, weight, terms)
            weight_hat, *hats = fast.gradient(
                arrived, earlier, list(terms), moved or [], _layer(self, weight)
            )
            return *hats, None, None, weight_hat
        moving = None if moved is None else EdgeTerms(*moved)
        f, width, features, e_dim = self.activation, self.width, weight.shape[1], weight.shape[0]
        weight_hat = torch.zeros_like(weight)
        e_hat, p_hat, table_hat = (
            torch.empty_like(terms.e),
            torch.empty_like(terms.p),
            torch.zeros_like(terms.table),
        )
        for atoms in self.blocks():
            block = terms.block(atoms, self.neighbor)
            value, keep = f(block.z(weight))
            y_hat = now.of_y(atoms, block.w, value, width)
            parts = [] if now.moment is None else [(block.h, now.moment[atoms])]
            if moving is None:
                z_hat = f.times_slope(keep, y_hat)
            else:
                dot = moving.block(atoms, self.neighbor)
                if old.message is not None:
                    y_hat[..., :width].addcmul_(
                        dot.w.unsqueeze(-1), old.message[atoms].unsqueeze(1)
                    )
                if old.moment is not None:
                    parts.append((dot.h, old.moment[atoms]))
                y_bar = old.of_y(atoms, block.w, value, width)
                slope, bend = f.derivatives(keep)
                z_hat = bend.mul_(dot.z(weight)).mul_(y_bar).addcmul_(slope, y_hat)
                weight_hat.addmm_(dot.e.flatten(0, 1).t(), y_bar.mul_(slope).flatten(0, 1))
            weight_hat.addmm_(block.e.flatten(0, 1).t(), z_hat.flatten(0, 1))
            p_hat[atoms] = z_hat.sum(1)
            below = torch.matmul(z_hat, weight.t())
            to_neighbor = torch.zeros_like(block.gathered)
            to_neighbor[..., :features] = z_hat
            for h, moment in parts:
                below = below.baddbmm_(h, moment[..., :e_dim])
                to_neighbor[..., features:] += torch.bmm(h, moment[..., e_dim:])
            e_hat[atoms] = below
            _add_to_neighbors(table_hat, self.neighbor[atoms], to_neighbor)
        return e_hat, p_hat, table_hat, None, None, weight_hat


def _kernels(edges: Edges, weight: torch.Tensor) -> Any:
    """Return the launches of kernels where they can be used: for layers with a message."""
    if not edges.width or not triton_support.usable(weight.device):
        return None
    from deepmd_muon.model.descriptor.dpa3.kernels import edges as kernels

    if not kernels.fits(edges.neighbor, weight, edges.activation.formula):
        return None
    return kernels


def _layer(edges: Edges, weight: torch.Tensor) -> Any:
    """Return the arguments that all kernels share."""
    from deepmd_muon.model.descriptor.dpa3.kernels.edges import EdgeLayer

    formula = edges.activation.formula
    assert formula is not None
    return EdgeLayer(
        neighbor=edges.neighbor,
        incoming=edges.incoming or incoming(edges.neighbor),
        weight=weight,
        message_columns=edges.width,
        formula=formula,
    )


def _dense(
    cotangents: EdgeCotangents, edges: Edges, weight: torch.Tensor, terms: EdgeTerms
) -> list[torch.Tensor]:
    """Return cotangents as kernels take them: zeros where none arrived."""
    nreal, nnei = edges.neighbor.shape
    rest = weight.shape[1] - edges.width
    shapes = (
        (nreal, edges.width),
        (nreal, nnei, rest) if rest else (0,),
        (nreal, 3, weight.shape[0] + terms.table.shape[1] - weight.shape[1]),
    )
    return [
        weight.new_zeros(*shape) if x is None else x
        for x, shape in zip(cotangents, shapes, strict=True)
    ]


def _add_to_neighbors(table: torch.Tensor, neighbor: torch.Tensor, rows: torch.Tensor) -> None:
    table.index_add_(0, neighbor.reshape(-1), rows.view(-1, rows.shape[-1]))
