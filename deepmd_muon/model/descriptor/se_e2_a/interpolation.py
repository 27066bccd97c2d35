"""The embedding net of `se_e2_a` by interpolation: no feature of an edge is ever formed.

The net G maps one number s per edge to M features, and the descriptor needs only sums over edges,

    A_i = Σ_e R_e ⊗ G(s_e)            dE/dR_e = Ā_i·G(s_e)            dE/ds_e = R_e·Ā_i·G′(s_e).

The s of a batch's neighbours of one type are in a short interval. The interval is cut into pieces
(`pieces`), which are short where G bends much. On each piece G is a polynomial of degree 15 to
rounding, G(s) = Σ_m T_m(u) C_jm, where j is the piece of s and u ∈ [−1, 1] its place in the piece.
Then

    A_i = B_i·C,   B_i[c, jm] = Σ_{e in piece j} R_e[c] T_m(u_e)
    dE/dR_e[c] = Σ_m T_m(u_e) P_i[c, jm],  P_i = Ā_i·Cᵀ,  and dE/ds_e alike with T′_m.

Each neighbour type has its own network, interval and C. The terms jm run over types, pieces and
orders m; a series is the polynomials of one atom, type and piece. `expand` computes B from geometry
alone. `evaluate` is linear in P; `spread` is its transpose.

So the network is evaluated at 16 nodes a piece instead of once per edge (in training, at least
`EDGES_PER_NODE` times fewer rows), and only matrix products per atom remain. Forces and the
gradient of a force loss are the exact derivatives of the interpolated energy, through torch's
autograd. `tails` estimates the interpolation error by the last coefficients, as usual for Chebyshev
series (Trefethen, Approximation Theory and Approximation Practice, chapter 8).

Compressed files use splines instead; `deepmd_muon.model.scripted.tabulated` has the figures.

On a GPU, Triton kernels (`kernels`) compute the intervals, `expand`, `evaluate` and `spread`; the
functions here define their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.pieces import (
    GRID,
    ORDERS,
    Edges,
    Pieces,
    lengths,
    places,
    refined,
)
from deepmd_muon.model.nn import layers, triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.layers import linear
from deepmd_muon.model.nn.networks import Copies, Network, unflatten

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
"""Largest interpolation error as `tails` estimates it.

The slope of a feature errs 10³ times more.
"""

MARGIN = 1 / 8
"""New pieces meet MARGIN times the tolerance, unless they would be too many.

An error grows with the 16th power of the weights: the pieces suffice until the weights have grown
by an eighth.
"""

SHORTEST = 1.0
"""Least length of an interval, in standard deviations of s.

All s of a type may be equal, as in empty slots of an absent element. Pieces of a shorter interval
would turn their rounding errors into slopes.
"""

TABLE_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6}
"""The tolerance of tables that replace the networks in predictions."""

CLOSER = 0.8
"""A table reaches down to this multiple of the smallest distance between atoms."""

EDGES_PER_NODE = 4
"""With fewer edges for each node, evaluating the networks at every edge is as fast."""


# ----- intervals and pieces -----------------------------------------------------------------------


def intervals_of(rows: Tensor, empty: Tensor, widths: Sequence[int]) -> Tensor:
    """Return the `intervals` of `Edges` `(types, 2)`: from the least to the largest s of each type.

    The s of an empty slot counts. No interval is shorter than `SHORTEST`.

    `rows` and `empty` are those of `Edges`; `widths` are the columns of each neighbour type.
    """
    kernels = _kernels(rows)
    if kernels is not None:
        fast: Tensor = kernels.intervals_of(rows, empty, widths, SHORTEST)
        return fast
    s_by_type = [
        torch.cat([empty[:, :1], s], dim=1) for s in rows[..., 0].split(list(widths), dim=1)
    ]
    low = torch.stack([s.amin() for s in s_by_type])
    span = torch.stack([s.amax() for s in s_by_type]) - low
    return torch.stack([low, GRID / span.clamp_min(SHORTEST)], dim=1)


def _kernels(tensor: Tensor) -> Any:
    """Return the module of Triton kernels if it can be used, else None."""
    if not triton_support.usable(tensor.device):
        return None
    from deepmd_muon.model.descriptor.se_e2_a import kernels

    return kernels


def cut(
    rows: Tensor, empty: Tensor, pieces: Pieces, widths: Sequence[int], sel: Sequence[int]
) -> Edges:
    """Return the edges of a batch on intervals that they fill.

    `rows` and `empty` are those of `Edges`; `widths` are the columns, and `sel` the slots, of each
    neighbour type.
    """
    intervals = intervals_of(rows, empty, widths)
    return _edges(rows, empty, intervals, pieces=pieces, widths=widths, sel=sel)


def _edges(
    rows: Tensor,
    empty: Tensor,
    intervals: Tensor,
    pieces: Pieces,
    widths: Sequence[int],
    sel: Sequence[int],
) -> Edges:
    missing = tuple(slots - width for slots, width in zip(sel, widths, strict=True))
    return Edges(rows, empty, intervals, pieces, widths=tuple(widths), missing=missing)


def pays(networks: int, edges: int, pieces: int) -> bool:
    """Return whether a step with so many edges is faster with interpolated networks."""
    return edges >= EDGES_PER_NODE * ORDERS * pieces * networks


def choose_pieces(
    networks_by_centre: Sequence[Sequence[Network]],
    f: Activation,
    intervals: Tensor,
    present: Pieces,
) -> Pieces:
    """Return pieces that interpolate all networks within `TOLERANCE`; none if they are too many.

    Parameters
    ----------
    networks_by_centre
        For each centre type, or one for all, the networks of all neighbour types.
    f
        Their activation.
    intervals
        Of each neighbour type, see `Edges`.
    present
        The pieces of the last steps. They stay if they suffice and no fewer do.
    """
    errors = partial(_errors, networks_by_centre, f, intervals)
    tolerance = TOLERANCE[intervals.dtype]
    sufficient = bool(present) and bool((errors(present) <= tolerance).all())
    fresh = refined(errors, MARGIN * tolerance)
    if sufficient and not 0 < len(fresh) < len(present):
        return present
    return fresh or refined(errors, tolerance)


def _errors(
    networks_by_centre: Sequence[Sequence[Network]],
    f: Activation,
    intervals: Tensor,
    pieces: Pieces,
) -> Tensor:
    """Return the largest error of any network on every piece `(pieces,)`, see `tails`."""
    errors = [
        tails(coefficients(networks, f, intervals, pieces), len(pieces))
        for networks in networks_by_centre
    ]
    return torch.stack(errors).amax(0)


def tails(c: Tensor, pieces: int) -> Tensor:
    """Estimate each piece's error `(pieces,)`, relative to the largest coefficient.

    The estimate is the larger of the last two coefficients.
    """
    by_piece = c.unflatten(0, (-1, pieces, ORDERS)).abs()  # (types, pieces, orders, M)
    return torch.div(by_piece[:, :, -2:].amax(dim=(0, 2, 3)), by_piece.amax())


# ----- coefficients -------------------------------------------------------------------------------


def coefficients(
    networks: Sequence[Network],
    f: Activation,
    intervals: Tensor,
    pieces: Pieces,
    scale: float = 1.0,
) -> Tensor:
    """Return `scale` times C of every neighbour type's network `(terms, M)`, differentiable."""
    device = intervals.device
    low, rate = intervals.double().unsqueeze(-1).unbind(1)
    s = torch.addcdiv(low, _nodes(pieces, device), rate)
    flat = [tensor for network in networks for tensor in network.flat]
    c = _chebyshev_coefficients(f, networks[0].copies, s, _transform(scale, device), *flat)
    return c.to(intervals.dtype)


def _angles() -> Tensor:
    """Return the angles of the Chebyshev nodes `(16,)`."""
    return (torch.arange(ORDERS, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / ORDERS)


@cache  # captured graphs read these nodes
def _nodes(pieces: Pieces, device: torch.device) -> Tensor:
    """Return the Chebyshev nodes of all pieces, in cells `(pieces·16,)`."""
    inside = (torch.cos(_angles()) + 1.0) / 2.0
    first_cells = torch.tensor(pieces, dtype=torch.float64, device="cpu")
    sizes = torch.tensor(lengths(pieces), dtype=torch.float64, device="cpu")
    return torch.addcmul(first_cells[:, None], sizes[:, None], inside).view(-1).to(device)


@cache  # captured graphs read this matrix
def _transform(scale: float, device: torch.device) -> Tensor:
    """Return the matrix from values at the nodes of a piece to scaled coefficients `(16, 16)`."""
    orders = torch.arange(ORDERS, dtype=torch.float64, device="cpu")
    matrix = torch.cos(orders[:, None] * _angles())
    matrix *= 2.0 * scale / ORDERS
    matrix[0] /= 2.0
    return matrix.to(device)


class ChebyshevCoefficients(torch.autograd.Function):
    """The coefficients of several networks, which overlap on a GPU.

    They are computed in float64: the slope of a series multiplies the errors of high orders, so
    these must be small compared with the high orders themselves.

    Arguments: activation, copies of every layer, nodes s of each network `(networks, nodes)`, the
    matrix of `_transform`, then matrix, bias and idt of every layer of every network. s has no
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        f: Activation,
        copies: tuple[Copies, ...],
        s: Tensor,
        transform: Tensor,
        *flat: Tensor | None,
    ) -> Tensor:
        """Return C `(networks·nodes, M)`, float64."""
        n_networks = s.shape[0]
        ctx.activation = f
        ctx.copies = copies
        ctx.n_networks = n_networks
        ctx.dtype = next(tensor.dtype for tensor in flat if tensor is not None)
        in_float64 = _converted(flat, torch.float64)
        blocks: list[Tensor] = []  # of C
        tapes: list[Tensor] = []
        with triton_support.Branches(s.device, n_networks) as branches:
            for number, network in enumerate(unflatten(in_float64, n_networks)):
                with branches.chain(number):
                    features, tape = layers.values(f, copies, s[number, :, None], network)
                    blocks.append(
                        _by_piece(transform, features.view(-1, ORDERS, features.shape[1]))
                    )
                    tapes += [*tape.inputs, *tape.keeps]
        ctx.save_for_backward(transform, *in_float64, *tapes)
        return torch.cat(blocks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, c_hat: Tensor) -> Any:
        """Return the gradient of every layer's tensors."""
        n_networks = ctx.n_networks
        depth = len(ctx.copies)
        transform, *tensors = ctx.saved_tensors
        n_parameters = 3 * depth * n_networks  # matrix, bias, idt of every layer
        in_float64 = tensors[:n_parameters]
        tapes = tensors[n_parameters:]  # inputs, then keeps of each network
        by_network = c_hat.view(n_networks, -1, ORDERS, c_hat.shape[1])
        gradients: list[Tensor | None] = []
        with triton_support.Branches(c_hat.device, n_networks) as branches:
            for number, network in enumerate(unflatten(in_float64, n_networks)):
                with branches.chain(number):
                    features_hat = _by_piece(transform.t(), by_network[number])
                    start = 2 * depth * number
                    tape = layers.Tape(
                        inputs=tapes[start : start + depth],
                        keeps=tapes[start + depth : start + 2 * depth],
                    )
                    gradients += layers.pull_values(
                        ctx.activation, ctx.copies, tape, network, features_hat
                    )
        return (None, None, None, None, *_converted(gradients, ctx.dtype))


_chebyshev_coefficients: Callable[..., Tensor] = (
    ChebyshevCoefficients.apply
)  # torch leaves `apply` untyped


def _by_piece(matrix: Tensor, values: Tensor) -> Tensor:
    """Return matrix `(16, 16)` · values `(pieces, 16, M)` of every piece `(pieces·16, M)`."""
    return torch.bmm(matrix.expand(values.shape[0], -1, -1), values).flatten(0, 1)


def _converted(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Convert parameters, or their gradients, side by side in one tensor."""
    present = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.dtype == dtype for tensor in present):
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in present]).to(dtype)
    converted = iter(flat.split([tensor.numel() for tensor in present]))
    return [None if tensor is None else next(converted).view(tensor.shape) for tensor in tensors]


# ----- tables for predictions ---------------------------------------------------------------------


class Table(NamedTuple):
    """Interpolated networks with constant weights, on one interval for all neighbour types.

    Attributes
    ----------
    intervals, pieces
        As in `Edges`.
    coefficients
        C times the scale `(terms, M)`, for each of `networks_by_centre`.
    nearest
        Distance of neighbours down to which the interval reaches [Å].
    """

    intervals: Tensor
    pieces: Pieces
    coefficients: tuple[Tensor, ...]
    nearest: float

    def edges(
        self, rows: Tensor, empty: Tensor, widths: Sequence[int], sel: Sequence[int]
    ) -> Edges:
        """Return the edges of a batch on this interval; arguments as in `cut`."""
        return _edges(rows, empty, self.intervals, pieces=self.pieces, widths=widths, sel=sel)


def tabulate(
    networks_by_centre: Sequence[Sequence[Network]],
    f: Activation,
    ends: Tensor,
    scale: float,
    nearest: float,
) -> Table | None:
    """Return the table of all networks on an interval; None if it would need too many pieces.

    Parameters
    ----------
    networks_by_centre, f
        As in `choose_pieces`.
    ends
        The least and the largest s `(2,)`.
    scale
        Factor of the coefficients.
    nearest
        As in `Table`.
    """
    n_types = len(networks_by_centre[0])
    low, high = ends
    interval = torch.stack([low, GRID / (high - low).clamp_min(SHORTEST)])
    intervals = interval.expand(n_types, 2).contiguous()
    pieces = refined(
        partial(_errors, networks_by_centre, f, intervals), TABLE_TOLERANCE[intervals.dtype]
    )
    if not pieces:
        return None
    return Table(
        intervals=intervals,
        pieces=pieces,
        coefficients=tuple(
            coefficients(networks, f, intervals, pieces, scale) for networks in networks_by_centre
        ),
        nearest=nearest,
    )


# ----- sums over edges ----------------------------------------------------------------------------


def expand(edges: Edges) -> Tensor:
    """Return B `(atoms, 4, terms)`, by the kernel on a GPU."""
    kernels = _kernels(edges.rows)
    return expand_reference(edges) if kernels is None else kernels.expand(edges)


def evaluate(edges: Edges, p: Tensor) -> Tensor:
    """Return the result of `evaluate_reference`, by the kernel on a GPU; differentiable by P."""
    kernels = _kernels(p)
    if kernels is None:
        return linear(partial(evaluate_reference, edges), partial(spread_reference, edges), p)
    return linear(partial(kernels.evaluate, edges), partial(kernels.spread, edges), p)


def expand_reference(edges: Edges) -> Tensor:
    """Return B `(atoms, 4, terms)`; see the module."""
    series, values, _ = _edge_basis(edges)
    b = _scatter(edges, series, edges.rows.unsqueeze(-1) * values.unsqueeze(-2))
    # Missing slots count as edges. Those of one type have equal rows: one addend serves all.
    n_types = len(edges.widths)
    types = torch.arange(n_types, device=b.device)
    piece, values, _ = _basis(edges, edges.empty[:, :1], types)  # (atoms, types[, 16])
    atom = torch.arange(piece.shape[0], device=piece.device).unsqueeze(1)
    missing = edges.empty.new_tensor(edges.missing)
    rows = edges.empty[:, None] * missing[:, None]  # (atoms, types, 4)
    by_type = b.unflatten(2, (n_types, len(edges.pieces), ORDERS)).permute(0, 2, 3, 1, 4)
    by_type[atom, types, piece] += rows.unsqueeze(-1) * values.unsqueeze(-2)  # a view of b
    return b


def evaluate_reference(edges: Edges, p: Tensor) -> Tensor:
    """Return dE/dR of every edge `(atoms, edges, 4)` from P `(atoms, 4, terms)`, linear in P.

    dE/ds is added to dE/dR₀.
    """
    series, values, slopes = _edge_basis(edges)
    n_series = len(edges.widths) * len(edges.pieces)
    by_series = p.unflatten(2, (n_series, ORDERS)).transpose(1, 2).reshape(-1, 4, ORDERS)
    by_edge = by_series[series].view(*values.shape[:2], 4, ORDERS)
    out = torch.matmul(by_edge, values.unsqueeze(-1)).squeeze(-1)
    by_component = torch.matmul(by_edge, slopes.unsqueeze(-1)).squeeze(-1)
    out[..., 0] += (by_component * edges.rows).sum(-1)
    return out


def spread_reference(edges: Edges, cotangent: Tensor) -> Tensor:
    """Apply the transpose of `evaluate_reference` to `(atoms, edges, 4)`."""
    series, values, slopes = _edge_basis(edges)
    addends = cotangent.unsqueeze(-1) * values.unsqueeze(-2)
    addends += (edges.rows * cotangent[..., :1]).unsqueeze(-1) * slopes.unsqueeze(-2)
    return _scatter(edges, series, addends)


def _edge_basis(edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of each edge's series `(atoms·edges,)`, T_m and dT_m/ds `(…, 16)`."""
    kind = _kinds(edges.widths, edges.rows.device)
    piece, values, slopes = _basis(edges, edges.rows[..., 0], kind)
    atom = torch.arange(piece.shape[0], device=piece.device).unsqueeze(1)
    series = (atom * len(edges.widths) + kind) * len(edges.pieces) + piece
    return series.view(-1), values, slopes


@lru_cache
def _kinds(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the neighbour type of every column."""
    types = torch.arange(len(widths), device="cpu")
    return types.repeat_interleave(torch.tensor(widths, device="cpu")).to(device)


def _basis(edges: Edges, s: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the piece of each s among neighbours of type `kind`, and T_m and dT_m/ds `(…, 16)`."""
    low, rate = edges.intervals[kind].unbind(-1)
    place = (s - low) * rate  # in cells
    cells, spans = places(edges.pieces, s.dtype, s.device)
    piece = cells[place.floor().clamp_(0, GRID - 1).long()].long()
    first_cell, inverse_length = spans[piece].unbind(-1)
    u = 2.0 * (place - first_cell) * inverse_length - 1.0
    values = [torch.ones_like(u), u]
    slopes = [torch.zeros_like(u), torch.ones_like(u)]
    for _ in range(2, ORDERS):
        slopes.append(2.0 * (values[-1] + u * slopes[-1]) - slopes[-2])
        values.append(2.0 * u * values[-1] - values[-2])
    du_ds = (2.0 * rate * inverse_length).unsqueeze(-1)
    return piece, torch.stack(values, -1), torch.stack(slopes, -1) * du_ds


def _scatter(edges: Edges, series: Tensor, addends: Tensor) -> Tensor:
    """Sum `(atoms, edges, 4, 16)` over the edges of each series: `(atoms, 4, terms)`."""
    atoms = edges.rows.shape[0]
    n_series = len(edges.widths) * len(edges.pieces)
    sums = addends.new_zeros(atoms * n_series, 4 * ORDERS)
    sums.index_add_(0, series, addends.view(-1, 4 * ORDERS))
    by_series = sums.view(atoms, n_series, 4, ORDERS)
    return by_series.transpose(1, 2).reshape(atoms, 4, edges.terms)
