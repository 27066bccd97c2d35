"""The edge part of a DPA-3 layer: messages from edges to their centre and the update of the edges.

For the neighbours j of an atom i, with the terms p of the centre and q of the neighbour computed
before (see `layer`), and with the weights w and the weighted directions h of the edges,

    z_ij = e_ij·W + p_i + q_j,   y = f(z),
    m_i = Σ_j w_ij·y_ij[:M],   H_i = Σ_j h_ij ⊗ [e_ij, v_j],

and y_ij[M:] updates the edge. q and the node features v come as one table, so that one gather
serves both.

Forces need the adjoints of this, a force loss the gradient of these adjoints. The four passes (see
`nn.four_passes`, also for the accents) run block by block in a CPU's cache. Only the inputs, their
tangents and the cotangents are kept between them:

1. `value`: m, y[M:] and H;
2. `adjoint`: ȳ[:M] = w·m̄, z̄ = f′(z)∘ȳ, and from z̄ and H̄ the adjoints of e, p, q, v, w and h;
3. `tangent`: ẏ = f′(z)∘ż, and from it the tangents of m, y[M:] and H;
4. `gradient`: ŷ[:M] = w·m̂ + ẇ·m̄, ẑ = f′(z)∘ŷ + f″(z)∘ż∘ȳ, and from it the gradients of e, p, the
   table and W.

ȳ[M:] and ŷ[M:] are the cotangents of the output y[M:].

The formula is written three times: here, in `kernels.edges` for a GPU (single precision; in each
pass one kernel, then sums of its parts), and in `scripted` for frozen files (`_edge_values`,
`_update_nodes`). Change all three. On a CPU the passes save memory: a step of training takes as
long as with autograd's passes and 2.3 times less memory (six layers, 192 atoms of water, float32,
2026-11-23).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.geometry import Incoming
from deepmd_muon.model.descriptor.dpa3.tensors import EdgeCotangents, EdgeTerms
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors

# Edges of a block on a CPU: with 512 numbers each 2 MB in float32, about a core's cache.
EDGE_BLOCK_ROWS = 1024


class EdgeInputs(NamedTuple):
    """The inputs of the operation."""

    terms: EdgeTerms
    weight: Tensor  # W (E, Y)


class AdjointSaved(NamedTuple):
    """What pass 2 hands over to pass 3 (all) and pass 4 (the cotangents)."""

    bars: EdgeCotangents
    inputs: EdgeInputs


@dataclass(frozen=True)
class Edges(FourPasses):
    """The operation of one layer. Inputs are `EdgeInputs`; outputs m, y[M:] (None if Y = M), and H.

    Attributes
    ----------
    neighbor
        Number of each neighbour among the sorted atoms `(atoms, slots)`, int64; any atom in empty
        slots.
    activation
        f.
    message_columns
        M, the length of a message; 0 without messages.
    incoming
        The edges sorted by neighbour; only kernels need it.
    """

    neighbor: Tensor
    activation: Activation
    message_columns: int
    incoming: Incoming | None

    def value(self, inputs: EdgeInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return m, y[M:] and H."""
        terms, weight = inputs
        E, Y = weight.shape
        M = self.message_columns
        n_update = Y - M
        kernels = _kernels(self, weight)
        if kernels is not None:
            message, update, moment = kernels.value(terms, _edge_layer(self, weight))
            return (message, update if n_update else None, moment), ()
        n_atoms, n_slots = self.neighbor.shape
        V = terms.table.shape[1] - Y
        message = weight.new_empty(n_atoms, M)
        update = weight.new_empty(n_atoms, n_slots, n_update) if n_update else None
        moment = weight.new_empty(n_atoms, 3, E + V)
        for atoms in self._atom_ranges():
            block = self._gather(terms, atoms, Y)
            y = self.activation.value(block.pre_activation(weight))
            message[atoms] = torch.bmm(block.w.unsqueeze(1), y[..., :M]).squeeze(1)
            moment[atoms, :, :E] = block.edge_moment(block.h)
            moment[atoms, :, E:] = block.node_moment(block.h)
            if update is not None:
                update[atoms] = y[..., M:]
        return (message, update, moment), ()

    def adjoint(
        self, cotangents: Any, inputs: EdgeInputs, value_saved: Any
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return the adjoints of `EdgeTerms`, and save the cotangents and inputs."""
        bars = EdgeCotangents(*cotangents)
        terms, weight = inputs
        saved = AdjointSaved(bars=bars, inputs=inputs)
        kernels = _kernels(self, weight)
        if kernels is not None:
            cotangents = _zeros_for_none(self, bars, inputs)
            return kernels.adjoint(cotangents, terms, _edge_layer(self, weight)), saved
        E, Y = weight.shape
        M = self.message_columns
        adjoints = EdgeTerms(*(torch.zeros_like(term) for term in terms))
        for atoms in self._atom_ranges():
            block = self._gather(terms, atoms, Y)
            y, keep = self.activation(block.pre_activation(weight))
            y_bar = self._cotangent_of_y(bars, atoms, block.w, like=y)
            z_bar = self.activation.times_slope(keep, y_bar)
            e_bar = torch.matmul(z_bar, weight.t())
            v_bar = None
            if bars.message is not None:
                m_bar = bars.message[atoms].unsqueeze(-1)
                adjoints.w[atoms] = torch.bmm(y[..., :M], m_bar).squeeze(-1)
            if bars.moment is not None:
                edge_moment_bar = bars.moment[atoms, :, :E]
                node_moment_bar = bars.moment[atoms, :, E:]
                e_bar.baddbmm_(block.h, edge_moment_bar)
                v_bar = torch.bmm(block.h, node_moment_bar)
                h_bar = torch.bmm(block.e, edge_moment_bar.transpose(1, 2))
                adjoints.h[atoms] = h_bar.baddbmm_(block.v, node_moment_bar.transpose(1, 2))
            adjoints.e[atoms] = e_bar
            adjoints.p[atoms] = z_bar.sum(1)
            self._add_to_neighbors(adjoints.table, atoms, z_bar, v_bar)
        return adjoints, saved

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return the tangents of m, y[M:] and H, and save those of `EdgeTerms`."""
        dots = EdgeTerms(*tangents)
        bars, (terms, weight) = saved
        kernels = _kernels(self, weight)
        if kernels is not None:
            return kernels.tangent(terms, dots, _edge_layer(self, weight)), dots
        E, Y = weight.shape
        M = self.message_columns
        out = EdgeCotangents(*(None if bar is None else torch.empty_like(bar) for bar in bars))
        for atoms in self._atom_ranges():
            block = self._gather(terms, atoms, Y)
            block_dot = self._gather(dots, atoms, Y)
            y, keep = self.activation(block.pre_activation(weight))
            y_dot = self.activation.times_slope(keep, block_dot.pre_activation(weight))
            if out.message is not None:
                m_dot = torch.bmm(block.w.unsqueeze(1), y_dot[..., :M])
                m_dot.baddbmm_(block_dot.w.unsqueeze(1), y[..., :M])
                out.message[atoms] = m_dot.squeeze(1)
            if out.update is not None:
                out.update[atoms] = y_dot[..., M:]
            if out.moment is not None:
                edge_moment_dot = block_dot.edge_moment(block.h) + block.edge_moment(block_dot.h)
                node_moment_dot = block_dot.node_moment(block.h) + block.node_moment(block_dot.h)
                out.moment[atoms, :, :E] = edge_moment_dot
                out.moment[atoms, :, E:] = node_moment_dot
        return out, dots

    def gradient(
        self,
        cotangents: Any,
        inputs: EdgeInputs,
        value_saved: Any,
        adjoint_saved: AdjointSaved | None,
        dots: EdgeTerms | None,
    ) -> Nested:
        """Pass 4: return the gradients of e, p, the table and W.

        w and h get none: they depend on positions alone, which pass 4 does not differentiate by.
        """
        hats = EdgeCotangents(*cotangents)
        terms, weight = inputs
        bars = EdgeCotangents(None, None, None) if adjoint_saved is None else adjoint_saved.bars
        kernels = _kernels(self, weight)
        if kernels is not None:
            e_hat, p_hat, table_hat, weight_hat = kernels.gradient(
                hats=_zeros_for_none(self, hats, inputs),
                bars=None if dots is None else _zeros_for_none(self, bars, inputs),
                terms=terms,
                dots=dots,
                layer=_edge_layer(self, weight),
            )
            return e_hat, p_hat, table_hat, None, None, weight_hat
        E, Y = weight.shape
        M = self.message_columns
        weight_hat = torch.zeros_like(weight)
        e_hat = torch.empty_like(terms.e)
        p_hat = torch.empty_like(terms.p)
        table_hat = torch.zeros_like(terms.table)
        for atoms in self._atom_ranges():
            block = self._gather(terms, atoms, Y)
            y, keep = self.activation(block.pre_activation(weight))
            y_hat = self._cotangent_of_y(hats, atoms, block.w, like=y)
            moment_pairs = []  # (h, Ĥ) and (ḣ, H̄)
            if hats.moment is not None:
                moment_pairs.append((block.h, hats.moment[atoms]))
            if dots is None:
                z_hat = self.activation.times_slope(keep, y_hat)
            else:
                block_dot = self._gather(dots, atoms, Y)
                if bars.message is not None:
                    m_bar = bars.message[atoms].unsqueeze(1)
                    y_hat[..., :M].addcmul_(block_dot.w.unsqueeze(-1), m_bar)
                if bars.moment is not None:
                    moment_pairs.append((block_dot.h, bars.moment[atoms]))
                y_bar = self._cotangent_of_y(bars, atoms, block.w, like=y)
                slope, bend = self.activation.derivatives(keep)
                # In place from here on: bend becomes ẑ, y_bar becomes z̄.
                z_hat = (
                    bend.mul_(block_dot.pre_activation(weight)).mul_(y_bar).addcmul_(slope, y_hat)
                )
                z_bar = y_bar.mul_(slope)
                weight_hat.addmm_(block_dot.e.flatten(0, 1).t(), z_bar.flatten(0, 1))
            weight_hat.addmm_(block.e.flatten(0, 1).t(), z_hat.flatten(0, 1))
            block_e_hat = torch.matmul(z_hat, weight.t())
            block_v_hat = None
            for h, moment in moment_pairs:
                block_e_hat.baddbmm_(h, moment[..., :E])
                v_term = torch.bmm(h, moment[..., E:])
                block_v_hat = v_term if block_v_hat is None else block_v_hat.add_(v_term)
            e_hat[atoms] = block_e_hat
            p_hat[atoms] = z_hat.sum(1)
            self._add_to_neighbors(table_hat, atoms, z_hat, block_v_hat)
        return e_hat, p_hat, table_hat, None, None, weight_hat

    def _atom_ranges(self) -> Iterator[slice]:
        """Yield ranges of atoms: as many as a CPU's cache takes, elsewhere all."""
        n_atoms, n_slots = self.neighbor.shape
        step = max(n_atoms, 1)
        if self.neighbor.device.type == "cpu":
            step = max(1, EDGE_BLOCK_ROWS // max(n_slots, 1))
        for start in range(0, n_atoms, step):
            yield slice(start, start + step)

    def _gather(self, terms: EdgeTerms, atoms: slice, Y: int) -> _Block:
        """Return the terms, or their tangents, of a range's edges."""
        neighbor = self.neighbor[atoms]
        rows = terms.table.index_select(0, neighbor.flatten())
        rows = rows.view(*neighbor.shape, terms.table.shape[1])
        return _Block(
            e=terms.e[atoms],
            p=terms.p[atoms],
            q=rows[..., :Y],
            v=rows[..., Y:],
            w=terms.w[atoms],
            h=terms.h[atoms],
        )

    def _cotangent_of_y(
        self, cotangents: EdgeCotangents, atoms: slice, w: Tensor, like: Tensor
    ) -> Tensor:
        """Return [w·m̄, ȳ[M:]] of a block, or [w·m̂, ŷ[M:]] from hats; zeros for None."""
        y_bar = torch.empty_like(like)
        message_part = y_bar[..., : self.message_columns]
        update_part = y_bar[..., self.message_columns :]
        if cotangents.message is None:
            message_part.zero_()
        else:
            m_bar = cotangents.message[atoms].unsqueeze(1)
            torch.mul(m_bar, w.unsqueeze(-1), out=message_part)
        if cotangents.update is None:
            update_part.zero_()
        else:
            update_part.copy_(cotangents.update[atoms])
        return y_bar

    def _add_to_neighbors(
        self, table: Tensor, atoms: slice, z_bar: Tensor, v_bar: Tensor | None
    ) -> None:
        """Add [z̄, v̄] of a block's edges to their neighbours' rows of the table: q̄ = Σ z̄."""
        rows = z_bar.new_zeros(*z_bar.shape[:2], table.shape[1])
        rows[..., : z_bar.shape[2]] = z_bar
        if v_bar is not None:
            rows[..., z_bar.shape[2] :] = v_bar
        table.index_add_(0, self.neighbor[atoms].flatten(), rows.flatten(0, 1))


class _Block(NamedTuple):
    """The terms of some atoms' edges, or their tangents, with the table's rows gathered."""

    e: Tensor  # (atoms, slots, E)
    p: Tensor  # (atoms, Y)
    q: Tensor  # (atoms, slots, Y)
    v: Tensor  # (atoms, slots, V)
    w: Tensor  # (atoms, slots)
    h: Tensor  # (atoms, slots, 3)

    def pre_activation(self, weight: Tensor) -> Tensor:
        """Return z = e·W + p_i + q_j (atoms, slots, Y), or ż from tangents."""
        z = torch.matmul(self.e, weight)
        z += self.p.unsqueeze(1)
        z += self.q
        return z

    def edge_moment(self, h: Tensor) -> Tensor:
        """Return Σ_j h ⊗ e (atoms, 3, E)."""
        return torch.bmm(h.transpose(1, 2), self.e)

    def node_moment(self, h: Tensor) -> Tensor:
        """Return Σ_j h ⊗ v (atoms, 3, V)."""
        return torch.bmm(h.transpose(1, 2), self.v)


# ----- kernels -----------------------------------------------------------------------------------


def _kernels(edges: Edges, weight: Tensor) -> Any:
    """Return the module of kernels if they can be used."""
    if not edges.message_columns or not triton_support.usable(weight.device):
        return None  # the kernels are for layers with a message
    from deepmd_muon.model.descriptor.dpa3.kernels import edges as kernels
    from deepmd_muon.model.descriptor.dpa3.kernels.shared import supports

    if not edges.neighbor.numel() or not supports(weight, edges.activation.formula):
        return None
    return kernels


def _edge_layer(edges: Edges, weight: Tensor) -> Any:
    """Return the kernels' arguments that all passes share."""
    from deepmd_muon.model.descriptor.dpa3.kernels.edges import EdgeLayer

    assert edges.activation.formula is not None
    assert edges.incoming is not None
    return EdgeLayer(
        neighbor=edges.neighbor,
        incoming=edges.incoming,
        weight=weight,
        message_columns=edges.message_columns,
        formula=edges.activation.formula,
    )


def _zeros_for_none(edges: Edges, cotangents: EdgeCotangents, inputs: EdgeInputs) -> EdgeCotangents:
    """Return the cotangents as `EdgeCotangents` defines them for kernels."""
    n_atoms, n_slots = edges.neighbor.shape
    E, Y = inputs.weight.shape
    n_update = Y - edges.message_columns
    shapes = (
        (n_atoms, edges.message_columns),
        (n_atoms, n_slots, n_update) if n_update else (0,),
        (n_atoms, 3, E + inputs.terms.table.shape[1] - Y),
    )
    return EdgeCotangents(
        *(
            inputs.weight.new_zeros(*shape) if cotangent is None else cotangent
            for cotangent, shape in zip(cotangents, shapes, strict=True)
        )
    )
