"""The edge part of a DPA-3 layer: messages from edges to their centre, and the update of the edges.

For the neighbours j of an atom i, with per-atom terms p and per-neighbour terms q computed before (see `layer`),

    z_ij = e_ij·W + p_i + q_j,   y = f(z),   m_i = Σ_j w_ij·y_ij[:width],   H_i = Σ_j h_ij ⊗ [e_ij, v_j],

and y_ij[width:] updates the edge. q and v come as one table, so that one gather serves both. The four passes are those
of `angles`, written out in the same way; on a GPU each is one kernel in single precision (`edge_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepmd_muon.model import kernels
from deepmd_muon.model.activation import Activation
from deepmd_muon.model.descriptor.dpa3.geometry import Incoming, incoming

EDGE_BLOCK_ROWS = 1024  # edges of a block on a CPU: with 512 numbers each 2 MB in float32, about a core's cache


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
    if kernels.usable(neighbor.device):
        return incoming(neighbor, empty)
    if not kernels.usable_as_operators(neighbor.device):
        return None
    from deepmd_muon.model.descriptor.dpa3 import edge_operators

    return Incoming(*edge_operators.incoming(neighbor, empty))


@dataclass
class EdgeTape:
    """Shared by the passes over the edges of one layer.

    Attributes
    ----------
    neighbor
        Number of each neighbour among the sorted atoms `(nreal, nnei)`, int64; any atom in empty slots.
    activation
        f.
    width
        Length of a message.
    force
        Whether pass 2 will be asked for.
    incoming
        The edges by neighbour, for kernels; sorted in each pass when missing.
    adjoints, tangents
        Left by pass 2 and pass 3 for pass 4.
    """

    neighbor: torch.Tensor
    activation: Activation
    width: int
    force: bool
    incoming: Incoming | None = None
    adjoints: EdgeCotangents | None = None
    tangents: EdgeTerms | None = None

    def blocks(self) -> Iterator[slice]:
        """Yield runs of atoms: as many as a CPU's cache takes, elsewhere all."""
        atoms, slots = self.neighbor.shape
        step = max(1, EDGE_BLOCK_ROWS // max(slots, 1)) if self.neighbor.device.type == "cpu" else max(atoms, 1)
        for first in range(0, atoms, step):
            yield slice(first, first + step)


def _kernels(tape: EdgeTape, weight: torch.Tensor) -> Any:
    """Return the launches of kernels where they can be used, or operators of torch that do them."""
    traced = kernels.usable_as_operators(weight.device)
    if not (traced or kernels.usable(weight.device)):
        return None
    from deepmd_muon.model.descriptor.dpa3 import edge_launches

    if not edge_launches.fits(tape.neighbor, weight, tape.activation.formula):
        return None
    if not traced:
        return edge_launches
    from deepmd_muon.model.descriptor.dpa3 import edge_operators

    return edge_operators


def _layer(tape: EdgeTape, weight: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments that all kernels share."""
    formula = tape.activation.formula
    assert formula is not None
    kind, *curve_of = formula
    return tape.neighbor, *(tape.incoming or incoming(tape.neighbor)), weight, tape.width, kind, curve_of


def _dense(cotangents: EdgeCotangents, tape: EdgeTape, weight: torch.Tensor, terms: EdgeTerms) -> list[torch.Tensor]:
    """Return cotangents as kernels take them: zeros where none arrived."""
    nreal, nnei = tape.neighbor.shape
    rest = weight.shape[1] - tape.width
    shapes = (
        (nreal, tape.width),
        (nreal, nnei, rest) if rest else (0,),
        (nreal, 3, weight.shape[0] + terms.table.shape[1] - weight.shape[1]),
    )
    return [weight.new_zeros(*shape) if x is None else x for x, shape in zip(cotangents, shapes, strict=True)]


class EdgeUpdate(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2.

    Arguments: tape, W `(e_dim, features)`, then the members of `EdgeTerms`. Returns m, y[width:] (None when there are
    no further features), H, and an empty tensor, an argument of `EdgeAdjoint`: so pass 4 waits for pass 3.
    """

    @staticmethod
    def forward(ctx: Any, tape: EdgeTape, weight: torch.Tensor, *given: torch.Tensor) -> Any:
        """See the class."""
        terms = EdgeTerms(*given)
        ctx.tape = tape
        order = weight.new_empty(0)
        ctx.save_for_backward(order, weight, *given)
        ctx.set_materialize_grads(False)
        fast = _kernels(tape, weight)
        if fast is not None:
            message, rest, moment = fast.update(list(terms), *_layer(tape, weight))
            return message, rest if weight.shape[1] > tape.width else None, moment, order
        features, e_dim = weight.shape[1], weight.shape[0]
        nreal, nnei = tape.neighbor.shape
        n_dim = terms.table.shape[1] - features
        message = terms.p.new_empty(nreal, tape.width)
        update = terms.p.new_empty(nreal, nnei, features - tape.width) if features > tape.width else None
        moment = terms.p.new_empty(nreal, 3, e_dim + n_dim)
        for atoms in tape.blocks():
            block = terms.block(atoms, tape.neighbor)
            y = tape.activation.value(block.z(weight))
            message[atoms] = torch.bmm(block.w.unsqueeze(1), y[..., : tape.width]).squeeze(1)
            moment[atoms, :, :e_dim], moment[atoms, :, e_dim:] = block.sums(block.h, features)
            if update is not None:
                update[atoms] = y[..., tape.width :]
        return message, update, moment, order

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        """Run pass 2 when forces are due, else pass 4."""
        tape: EdgeTape = ctx.tape
        cotangents = EdgeCotangents(*(None if x is None else x.contiguous() for x in given[:3]))
        order, weight, *terms = ctx.saved_tensors
        if tape.force and tape.adjoints is None:
            return (None, None, *edge_adjoint(tape, order, *cotangents, weight, *terms))
        return (None, *_gradients(tape, cotangents, weight, EdgeTerms(*terms)))


class EdgeAdjoint(torch.autograd.Function):
    """Passes 2 and 3.

    Arguments: tape, the empty tensor of `EdgeUpdate`, then the members of `EdgeCotangents`, W and those of `EdgeTerms`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tape: EdgeTape,
        order: torch.Tensor,
        message: torch.Tensor | None,
        update: torch.Tensor | None,
        moment: torch.Tensor | None,
        weight: torch.Tensor,
        *given: torch.Tensor,
    ) -> Any:
        """Return the adjoints of the members of `EdgeTerms`."""
        terms = EdgeTerms(*given)
        # detached: a tape that held a node of the graph which holds the tape would never be freed
        old = EdgeCotangents(*(None if x is None else x.detach() for x in (message, update, moment)))
        tape.adjoints = old
        ctx.tape = tape
        ctx.save_for_backward(weight, *given)
        ctx.set_materialize_grads(False)
        fast = _kernels(tape, weight)
        if fast is not None:
            return tuple(fast.adjoint(_dense(old, tape, weight, terms), list(terms), *_layer(tape, weight)))
        f, width, features, e_dim = tape.activation, tape.width, weight.shape[1], weight.shape[0]
        out = EdgeTerms(*(torch.zeros_like(x) for x in terms))
        for atoms in tape.blocks():
            block = terms.block(atoms, tape.neighbor)
            value, keep = f(block.z(weight))
            z_bar = f.times_slope(keep, old.of_y(atoms, block.w, value, width))
            out.p[atoms] = z_bar.sum(1)
            e_bar = torch.matmul(z_bar, weight.t())
            to_neighbor = torch.zeros_like(block.gathered)
            to_neighbor[..., :features] = z_bar
            if message is not None:
                out.w[atoms] = torch.bmm(value[..., :width], message[atoms].unsqueeze(-1)).squeeze(-1)
            if moment is not None:
                here = moment[atoms]
                e_bar = e_bar.baddbmm_(block.h, here[..., :e_dim])
                to_neighbor[..., features:] = torch.bmm(block.h, here[..., e_dim:])
                both = torch.bmm(block.e, here[..., :e_dim].transpose(1, 2))
                out.h[atoms] = both.baddbmm_(block.gathered[..., features:], here[..., e_dim:].transpose(1, 2))
            out.e[atoms] = e_bar
            _add_to_neighbors(out.table, tape.neighbor[atoms], to_neighbor)
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """Take the tangents of the members of `EdgeTerms`; return cotangents of those of `EdgeCotangents`."""
        tape: EdgeTape = ctx.tape
        weight, *given = ctx.saved_tensors
        terms = EdgeTerms(*given)
        arrived = zip(tangents, terms, strict=True)
        moving = EdgeTerms(*(torch.zeros_like(x) if g is None else g.contiguous() for g, x in arrived))
        tape.tangents = moving
        features, e_dim, width = weight.shape[1], weight.shape[0], tape.width
        old = tape.adjoints or EdgeCotangents(None, None, None)
        fast = _kernels(tape, weight)
        if fast is not None:
            found = fast.tangent(list(terms), list(moving), *_layer(tape, weight))
            kept = (None if given is None else new for given, new in zip(old, found, strict=True))
            return (None, None, *kept, *(None,) * 6)
        out = EdgeCotangents(*(None if x is None else torch.empty_like(x) for x in old))
        for atoms in tape.blocks():
            block, dot = terms.block(atoms, tape.neighbor), moving.block(atoms, tape.neighbor)
            value, keep = tape.activation(block.z(weight))
            y_dot = tape.activation.times_slope(keep, dot.z(weight))
            if out.message is not None:
                moved = torch.bmm(block.w.unsqueeze(1), y_dot[..., :width])
                out.message[atoms] = moved.baddbmm_(dot.w.unsqueeze(1), value[..., :width]).squeeze(1)
            if out.update is not None:
                out.update[atoms] = y_dot[..., width:]
            if out.moment is not None:
                first, second = dot.sums(block.h, features), block.sums(dot.h, features)
                out.moment[atoms, :, :e_dim] = first[0] + second[0]
                out.moment[atoms, :, e_dim:] = first[1] + second[1]
        return (None, None, *out, *(None,) * 6)


edge_update: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]] = EdgeUpdate.apply
edge_adjoint: Callable[..., tuple[torch.Tensor, ...]] = EdgeAdjoint.apply


def _add_to_neighbors(table: torch.Tensor, neighbor: torch.Tensor, rows: torch.Tensor) -> None:
    table.index_add_(0, neighbor.reshape(-1), rows.view(-1, rows.shape[-1]))


def _gradients(
    tape: EdgeTape, cotangents: EdgeCotangents, weight: torch.Tensor, terms: EdgeTerms
) -> tuple[torch.Tensor | None, ...]:
    """Pass 4: gradients of W, e, p and table; w and h, which depend on positions alone, get none."""
    f, width, features, e_dim = tape.activation, tape.width, weight.shape[1], weight.shape[0]
    moving = tape.tangents
    old = tape.adjoints or EdgeCotangents(None, None, None)
    fast = _kernels(tape, weight)
    if fast is not None:
        earlier = [] if moving is None else _dense(old, tape, weight, terms)
        dots = [] if moving is None else list(moving)
        given = _dense(cotangents, tape, weight, terms)
        return (*fast.gradient(given, earlier, list(terms), dots, *_layer(tape, weight)), None, None)
    weight_hat = torch.zeros_like(weight)
    e_hat, p_hat, table_hat = torch.empty_like(terms.e), torch.empty_like(terms.p), torch.zeros_like(terms.table)
    for atoms in tape.blocks():
        block = terms.block(atoms, tape.neighbor)
        value, keep = f(block.z(weight))
        y_hat = cotangents.of_y(atoms, block.w, value, width)
        parts = [] if cotangents.moment is None else [(block.h, cotangents.moment[atoms])]
        if moving is None:
            z_hat = f.times_slope(keep, y_hat)
        else:
            dot = moving.block(atoms, tape.neighbor)
            if old.message is not None:
                y_hat[..., :width].addcmul_(dot.w.unsqueeze(-1), old.message[atoms].unsqueeze(1))
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
        _add_to_neighbors(table_hat, tape.neighbor[atoms], to_neighbor)
    return weight_hat, e_hat, p_hat, table_hat, None, None
