"""The embedding net of `se_e2_a` by piecewise Chebyshev interpolation: no feature of an edge is ever formed.

The net G maps one number s per edge to M features, and the descriptor needs only sums over edges,

    A_i = Σ_e R_e ⊗ G(s_e)                  dE/dR_e = Ā_i·G(s_e)                dE/ds_e = R_e·Ā_i·G′(s_e).

The s of a batch's neighbours of one type lie in a short interval. It is cut into `pieces`, short where G bends much, on
each of which G is a polynomial of degree 15 to rounding, G(s) = Σ_m T_m(u) C_jm with j the piece of s and u ∈ [−1, 1]
its place there. Then

    A_i = B_i·C,   B_i[c, jm] = Σ_{e in piece j} R_e[c] T_m(u_e)            (`expand`: geometry alone)
    dE/dR_e[c] = Σ_m T_m(u_e) P_i[c, jm],  P_i = Ā_i·Cᵀ,  and dE/ds_e alike with T′_m      (`evaluate`: linear in P)

so the network is evaluated at 16 nodes a piece instead of once per edge (10² to 10³ times fewer rows), and only matrix
products per atom remain. Forces and the gradient of a force loss are the exact derivatives of the interpolated
energy, through torch's own autograd. `tails` estimate the interpolation error by the last
coefficients, as usual for Chebyshev series (Trefethen, Approximation Theory and Approximation Practice, chapter 8).

On a GPU the two sums over edges are one Triton kernel each; the functions here define their result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.pieces import GRID, Pieces, lengths, places, refined
from deepmd_muon.model.descriptor.se_e2_a.edges import ORDERS, Edges
from deepmd_muon.model.nn import layers, triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.linear import linear
from deepmd_muon.model.nn.networks import Copies, Network, unflatten

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
"""Largest estimated interpolation error relative to the largest feature; the slope of a feature errs 10³ times more."""

MARGIN = 1 / 8
"""Part of the tolerance that newly chosen pieces keep. An error grows with the 16th power of the weights, so that the
pieces suffice until the weights have grown by an eighth."""

SHORTEST = 1.0
"""Least length of an interval, in standard deviations of s. Where all s of a type are equal, as in empty slots of an
absent element, pieces of a shorter interval would turn rounding errors into slopes."""

TABLE_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6}
"""The same for tables that stand for the networks in predictions."""

CLOSER = 0.8
"""Distance down to which a table reaches, over the smallest one of the atoms it is made for."""

EDGES_PER_NODE = 4
"""With fewer edges, evaluating the networks at every edge is as fast."""


def cut(
    rows: Tensor, empty: Tensor, pieces: Pieces, widths: Sequence[int], sel: Sequence[int]
) -> Edges:
    """Cut the interval of the s of each neighbour type.

    `rows` and `empty` are those of `Edges`; `widths` are the columns, and `sel` the slots, of each neighbour type.
    """
    missing = _missing(widths, sel)
    if triton_support.usable(rows.device):
        from deepmd_muon.model.descriptor.se_e2_a.kernels import interval_starts

        start = interval_starts(rows, empty, widths, SHORTEST)
        return Edges(rows, empty, start, pieces, tuple(widths), missing)
    columns = [
        torch.cat([empty[:, :1], part], dim=1) for part in rows[..., 0].split(list(widths), dim=1)
    ]
    low = torch.stack([s.amin() for s in columns])
    span = torch.stack([s.amax() for s in columns]) - low
    start = torch.stack([low, GRID / span.clamp_min(SHORTEST)], dim=1)
    return Edges(rows, empty, start, pieces, tuple(widths), missing)


@lru_cache
def _nodes(pieces: Pieces, device: torch.device) -> Tensor:
    """Return the Chebyshev nodes of all pieces, in cells `(pieces·16,)`."""
    inside = (torch.cos(_angles()) + 1.0) / 2.0
    first, size = (
        torch.tensor(values, dtype=torch.float64, device="cpu")
        for values in (pieces, lengths(pieces))
    )
    return torch.addcmul(first[:, None], size[:, None], inside).view(-1).to(device)


@lru_cache
def _transform(scale: float, device: torch.device) -> Tensor:
    """Return the matrix from values at the nodes of a piece to `scale` times the coefficients `(16, 16)`."""
    matrix = torch.cos(torch.arange(ORDERS, dtype=torch.float64, device="cpu")[:, None] * _angles())
    matrix *= 2.0 * scale / ORDERS
    matrix[0] /= 2.0
    return matrix.to(device)


def _angles() -> Tensor:
    return (torch.arange(ORDERS, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / ORDERS)


def _converted(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Convert parameters, or their gradients, at once."""
    given = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.dtype == dtype for tensor in given):
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in given]).to(dtype)
    parts = iter(flat.split([tensor.numel() for tensor in given]))
    return [None if tensor is None else next(parts).view(tensor.shape) for tensor in tensors]


class Coefficients(torch.autograd.Function):
    """The coefficients of several networks, which overlap on a GPU.

    They are computed in float64: the slope of a series multiplies the error of high orders, which must be small
    beside these orders themselves.

    Arguments: activation, copies of every layer, nodes s of each network `(networks, nodes)`, the matrix of
    `_transform`, then matrix, bias, idt of every layer of every network. s is data.
    """

    @staticmethod
    def forward(
        ctx: Any,
        f: Activation,
        copies: tuple[Copies, ...],
        s: Tensor,
        matrix: Tensor,
        *flat: Tensor | None,
    ) -> Tensor:
        """Return C `(networks·nodes, M)`, float64."""
        ctx.activation, ctx.copies, ctx.networks = f, copies, s.shape[0]
        ctx.dtype = next(tensor.dtype for tensor in flat if tensor is not None)
        wide = _converted(flat, torch.float64)
        found, saved = [], []
        with triton_support.Branches(s.device, s.shape[0]) as branches:
            for number, tensors in enumerate(unflatten(wide, s.shape[0])):
                with branches.chain(number):
                    features, tape = layers.values(f, copies, s[number, :, None], tensors)
                    by_piece = features.view(-1, ORDERS, features.shape[1])
                    found.append(
                        torch.bmm(matrix.expand(by_piece.shape[0], -1, -1), by_piece).flatten(0, 1)
                    )
                    saved += [*tape.inputs, *tape.keeps]
        ctx.save_for_backward(matrix, *wide, *saved)
        return torch.cat(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the gradient of every layer's tensors."""
        f, copies, networks, depth = ctx.activation, ctx.copies, ctx.networks, len(ctx.copies)
        matrix, *others = ctx.saved_tensors
        wide, saved = others[: 3 * depth * networks], others[3 * depth * networks :]
        by_network = cotangent.view(networks, -1, ORDERS, cotangent.shape[1])
        gradients: list[Tensor | None] = []
        with triton_support.Branches(cotangent.device, networks) as branches:
            for number, tensors in enumerate(unflatten(wide, networks)):
                with branches.chain(number):
                    mine = by_network[number]
                    of_features = torch.bmm(matrix.t().expand(mine.shape[0], -1, -1), mine).flatten(
                        0, 1
                    )
                    at = 2 * depth * number
                    tape = layers.Tape(saved[at : at + depth], saved[at + depth : at + 2 * depth])
                    gradients += layers.pull_values(f, copies, tape, tensors, of_features)
        return (None, None, None, None, *_converted(gradients, ctx.dtype))


_coefficients: Callable[..., Tensor] = Coefficients.apply  # torch leaves `apply` untyped


def coefficients(
    networks: Sequence[Network], f: Activation, edges: Edges, scale: float = 1.0
) -> Tensor:
    """Return `scale` times the coefficients C of every neighbour type's network `(terms, M)`, differentiable."""
    device = edges.rows.device
    low, rate = edges.start.double().unsqueeze(-1).unbind(1)
    s = torch.addcdiv(low, _nodes(edges.pieces, device), rate)
    flat = [part for network in networks for part in network.flat]
    found = _coefficients(f, networks[0].copies, s, _transform(scale, device), *flat)
    return found.to(edges.rows.dtype)


def tails(coefficient: Tensor, pieces: int) -> Tensor:
    """Estimate each piece's error `(pieces,)` relative to the largest feature, from the last two coefficients."""
    by_piece = coefficient.unflatten(0, (-1, pieces, ORDERS)).abs()
    return torch.div(by_piece[:, :, -2:].amax(dim=(0, 2, 3)), by_piece.amax())


class Table(NamedTuple):
    """Interpolated networks whose weights no longer change, on one interval for all neighbour types.

    Attributes
    ----------
    start, pieces
        As in `Edges`.
    coefficients
        Those of each kind of centre, `scale` included `(terms, M)`.
    nearest
        Distance of neighbours down to which the interval reaches [Å].
    """

    start: Tensor
    pieces: Pieces
    coefficients: tuple[Tensor, ...]
    nearest: float

    def edges(
        self, rows: Tensor, empty: Tensor, widths: Sequence[int], sel: Sequence[int]
    ) -> Edges:
        """Return the edges of a batch on this interval; arguments as in `cut`."""
        return Edges(rows, empty, self.start, self.pieces, tuple(widths), _missing(widths, sel))


def _missing(widths: Sequence[int], sel: Sequence[int]) -> tuple[int, ...]:
    return tuple(slots - width for slots, width in zip(sel, widths, strict=True))


def tabulate(
    blocks: Sequence[Sequence[Network]], f: Activation, ends: Tensor, scale: float, nearest: float
) -> Table | None:
    """Return the table of all networks on an interval; None where the most pieces do not suffice.

    `blocks` and `f` are as in `choose_pieces`, `ends` holds the least and the largest s `(2,)`. The coefficients are
    multiplied with `scale`; `nearest` is that of `Table`.
    """
    types, span = len(blocks[0]), (ends[1] - ends[0]).clamp_min(SHORTEST)
    start = torch.stack([ends[0], GRID / span]).expand(types, 2).contiguous()
    edges = Edges(start, start, start, (), (0,) * types, (0,) * types)
    pieces = refined(partial(_errors, blocks, f, edges), TABLE_TOLERANCE[start.dtype])
    if not pieces:
        return None
    edges = edges._replace(pieces=pieces)
    return Table(
        start, pieces, tuple(coefficients(nets, f, edges, scale) for nets in blocks), nearest
    )


def _errors(
    blocks: Sequence[Sequence[Network]], f: Activation, edges: Edges, pieces: Pieces
) -> Tensor:
    """Return the largest error of any network on every piece, see `tails`."""
    own = edges._replace(pieces=pieces)
    return torch.stack([tails(coefficients(nets, f, own), len(pieces)) for nets in blocks]).amax(0)


def pays(networks: int, edges: int, pieces: int) -> bool:
    """Return whether a step with so many edges is faster with the networks interpolated."""
    return edges >= EDGES_PER_NODE * ORDERS * pieces * networks


def choose_pieces(
    blocks: Sequence[Sequence[Network]],
    f: Activation,
    rows: Tensor,
    empty: Tensor,
    widths: Sequence[int],
    sel: Sequence[int],
    present: Pieces,
) -> Pieces:
    """Return pieces that interpolate all networks within `TOLERANCE`; none where the most do not suffice.

    The `present` ones are kept while they suffice and fewer would not. `blocks` holds the networks of all neighbour
    types, of each kind of centre, and `f` is their activation. The others are those of a batch, see `cut`.
    """
    errors = partial(_errors, blocks, f, cut(rows, empty, (), widths, sel))
    tolerance = TOLERANCE[rows.dtype]
    kept = present if present and bool((errors(present) <= tolerance).all()) else ()
    wanted = refined(errors, MARGIN * tolerance)
    if kept and not 0 < len(wanted) < len(kept):
        return kept
    return wanted or refined(errors, tolerance)


def _basis(edges: Edges, s: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the piece of each s among neighbours of type `kind`, and T_m and dT_m/ds there with m as last axis."""
    low, rate = edges.start[kind].unbind(-1)
    place = (s - low) * rate
    cells, spans = places(edges.pieces, s.dtype, s.device)
    piece = cells[place.floor().clamp_(0, GRID - 1).long()].long()
    first, inverse = spans[piece].unbind(-1)
    u = 2.0 * (place - first) * inverse - 1.0
    values, slopes = [torch.ones_like(u), u], [torch.zeros_like(u), torch.ones_like(u)]
    for _ in range(2, ORDERS):
        slopes.append(2.0 * (values[-1] + u * slopes[-1]) - slopes[-2])
        values.append(2.0 * u * values[-1] - values[-2])
    return (
        piece,
        torch.stack(values, -1),
        torch.stack(slopes, -1) * (2.0 * rate * inverse).unsqueeze(-1),
    )


@lru_cache
def _kinds(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the neighbour type of every column."""
    return (
        torch.arange(len(widths), device="cpu")
        .repeat_interleave(torch.tensor(widths, device="cpu"))
        .to(device)
    )


def _edge_basis(edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
    """Return the flat number (atom, neighbour type, piece) of every edge, and T_m and dT_m/ds there."""
    kind = _kinds(edges.widths, edges.rows.device)
    piece, values, slopes = _basis(edges, edges.rows[..., 0], kind)
    atom = torch.arange(piece.shape[0], device=piece.device).unsqueeze(1)
    return ((atom * len(edges.widths) + kind) * len(edges.pieces) + piece).view(-1), values, slopes


def _scatter(edges: Edges, cell: Tensor, terms: Tensor) -> Tensor:
    """Sum `(edges, 4, 16)` into `(atoms, 4, terms)`."""
    atoms, each = edges.rows.shape[0], len(edges.widths) * len(edges.pieces)
    sums = terms.new_zeros(atoms * each, 4 * ORDERS).index_add_(0, cell, terms.view(-1, 4 * ORDERS))
    by_type = sums.view(atoms, each, 4, ORDERS)
    return by_type.transpose(1, 2).reshape(atoms, 4, edges.terms)


def expand_reference(edges: Edges) -> Tensor:
    """Return B `(atoms, 4, terms)`; see the module."""
    cell, values, _ = _edge_basis(edges)
    out = _scatter(edges, cell, edges.rows.unsqueeze(-1) * values.unsqueeze(-2))
    types = torch.arange(len(edges.widths), device=out.device)
    piece, values, _ = _basis(edges, edges.empty[:, :1], types)
    atom = torch.arange(piece.shape[0], device=piece.device).unsqueeze(1)
    stand_in = edges.empty[:, None] * edges.empty.new_tensor(edges.missing)[:, None]
    by_type = out.unflatten(2, (len(edges.widths), len(edges.pieces), ORDERS)).permute(
        0, 2, 3, 1, 4
    )
    by_type[atom, types, piece] += stand_in.unsqueeze(-1) * values.unsqueeze(-2)
    return out


def evaluate_reference(edges: Edges, product: Tensor) -> Tensor:
    """Return dE/dR of every edge `(atoms, edges, 4)`, with dE/ds added to its first component, from P."""
    cell, values, slopes = _edge_basis(edges)
    each = len(edges.widths) * len(edges.pieces)
    by_cell = product.unflatten(2, (each, ORDERS)).transpose(1, 2).reshape(-1, 4, ORDERS)
    mine = by_cell[cell].view(*values.shape[:2], 4, ORDERS)
    out = torch.matmul(mine, values.unsqueeze(-1)).squeeze(-1)
    out[..., 0] += (torch.matmul(mine, slopes.unsqueeze(-1)).squeeze(-1) * edges.rows).sum(-1)
    return out


def spread_reference(edges: Edges, moved: Tensor) -> Tensor:
    """Apply the transpose of `evaluate_reference` to `(atoms, edges, 4)`."""
    cell, values, slopes = _edge_basis(edges)
    terms = moved.unsqueeze(-1) * values.unsqueeze(-2)
    terms += (edges.rows * moved[..., :1]).unsqueeze(-1) * slopes.unsqueeze(-2)
    return _scatter(edges, cell, terms)


def _kernels(tensor: Tensor) -> Any:
    """Return the module of Triton kernels where it can be used."""
    if not triton_support.usable(tensor.device):
        return None
    from deepmd_muon.model.descriptor.se_e2_a import kernels

    return kernels


def expand(edges: Edges) -> Tensor:
    """Return B `(atoms, 4, terms)`, by the kernel on a GPU."""
    fast = _kernels(edges.rows)
    return expand_reference(edges) if fast is None else fast.expand(edges)


def evaluate(edges: Edges, product: Tensor) -> Tensor:
    """Return the result of `evaluate_reference`, by the kernel on a GPU; differentiable by P, in which it is linear."""
    fast = _kernels(product)
    forward, transpose = (
        (evaluate_reference, spread_reference) if fast is None else (fast.evaluate, fast.spread)
    )
    return linear(partial(forward, edges), partial(transpose, edges), product)
