"""The tensors that the passes over edges and angles exchange, on CPUs and with their kernels.

`edges` and `angles` have the symbols. In shapes of edges, "slots" are those of one atom; in shapes
of angles, those of all atoms in a row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EdgeTerms(NamedTuple):
    """The inputs of `edges` that depend on positions, their tangents, or their adjoints."""

    e: Tensor  # (atoms, slots, E): edge features
    p: Tensor  # (atoms, Y): term of the centre
    table: Tensor  # (atoms, Y + V): term q and node features v of a neighbour, side by side
    w: Tensor  # (atoms, slots): weight of an edge in the message; 0 in empty slots
    h: Tensor  # (atoms, slots, 3): weighted direction of an edge; 0 in empty slots


class EdgeCotangents(NamedTuple):
    """Cotangents of m, y[M:] and H; None for one that did not arrive.

    Kernels get zeros in place of None, and no elements for an absent y[M:].
    """

    message: Tensor | None  # (atoms, M)
    update: Tensor | None  # (atoms, slots, Y − M)
    moment: Tensor | None  # (atoms, 3, E + V)


class AngleTerms(NamedTuple):
    """The inputs of `angles` that depend on positions, their tangents, or their adjoints."""

    a: Tensor  # (angles, A)
    u: Tensor  # (slots, Y)
    t: Tensor  # (slots, Y)
    s: Tensor  # (slots,)


class AngleCotangents(NamedTuple):
    """Cotangents of m and a′; None for one that did not arrive.

    Kernels get zeros in place of None, and no elements for an absent a′.
    """

    message: Tensor | None  # (slots, M)
    a_new: Tensor | None  # (angles, A)
