"""Descriptors: the contract between their folders and the rest of the package.

A descriptor is a folder with

- `settings.py`, a `DescriptorSettings`: keys, defaults, rules, the neighbour list that the
  descriptor reads, and how "auto" resolves;
- `module.py`, a `Descriptor`, built from these settings;
- `deepmd_kit.py`, a `Translation`.

`deepmd_muon.model.registry` names them by the `type` of the input; nothing outside of the folder
mentions them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.environment import Environment
from deepmd_muon.model.descriptor.pieces import Pieces
from deepmd_muon.model.structures import Structures

Pullback = Callable[[Tensor], Tensor]
"""Maps dE/dD `(nreal, dim_out)` to dE/dr_ij `(nreal, nnei, 3)` [eV/Å]; differentiable once."""


class Described(NamedTuple):
    """A descriptor of every atom, and how its energy derivative reaches the edges.

    Attributes
    ----------
    descriptor
        Shape `(nreal, dim_out)`, atoms in the order of `Structures.order`.
    pullback
        See `Pullback`; None if the call asked for no forces.
    """

    descriptor: Tensor
    pullback: Pullback | None


class Descriptor(Protocol):
    """A `torch.nn.Module`, built as `cls(settings, type_map, seed)`.

    `settings` is the frozen `DescriptorSettings` with numbers for every "auto". `type_map` has the
    element symbols. `seed` is an int, a sequence of ints or None; it is used if the settings have
    no seed.
    """

    dim_out: int
    """Length of the descriptor of one atom."""

    def __call__(self, structures: Structures, edges: Tensor, *, force: bool) -> Described:
        """Describe every atom from its edge vectors `(nreal, nnei, 3)` [Å], float64.

        `structures` has the neighbour list that the settings request. A slot without a neighbour
        has a negative `neighbor` and an arbitrary edge: mask it before a root or a division, so
        that no second derivative becomes NaN.
        """


@runtime_checkable
class Standardised(Protocol):
    """A descriptor whose environment rows take mean and deviation from the data."""

    needs_statistics: bool

    def environment(self, structures: Structures, edges: Tensor) -> Environment:
        """Return the rows of every edge before standardisation."""

    def used_slots(self, structures: Structures) -> Tensor | None:
        """Return which slots count in the statistics `(nreal, nnei)`, the others as zero.

        None means that all do.
        """

    def set_statistics(self, mean: Tensor, stddev: Tensor) -> None:
        """Take mean and deviation of the rows per centre type `(ntypes, 4)`."""


@runtime_checkable
class Interpolated(Protocol):
    """A descriptor whose networks training steps may interpolate."""

    pieces: Pieces
    """How the interval of a network's argument is cut; no pieces evaluate the networks."""

    def pieces_for(self, structures: Structures, edges: Tensor) -> Pieces:
        """Return the pieces that the present weights need on such a batch.

        They stay the same as long as they suffice. None are returned if interpolation is too
        coarse.
        """


class Table(Protocol):
    """A replacement for a descriptor's networks in predictions."""

    @property
    def nearest(self) -> float:
        """Distance of neighbours down to which results are right [Å]."""


@runtime_checkable
class Tabulated(Protocol):
    """A descriptor that knows tables."""

    table: Any
    """Used where no gradient is wanted; None evaluates the networks."""

    def tabulate(self, structures: Structures, edges: Tensor, nearest: float) -> Table | None:
        """Return a table for the present weights and batches like this one.

        Atoms may also come as near as `nearest` [Å]. None is returned if a table would be too
        coarse.
        """


@runtime_checkable
class Recomputing(Protocol):
    """A descriptor with layers that can be computed again in backward passes, to save memory."""

    recompute: bool
    """Whether they are computed again."""


@runtime_checkable
class TypeIndexed(Protocol):
    """A descriptor or fitting net that can change its type map."""

    type_axes: ClassVar[Mapping[str, int]]
    """Names of its tensors that have a row for each type, and the axis of these rows."""


class _Seed(torch.autograd.Function):
    """A number with a given derivative by a tensor, from which autograd can start.

    ``torch.autograd.grad(tensor, ..., cotangent)`` does the same, but compares shapes by torch's
    symbolic shapes. Their import (with sympy) takes 0.3 s.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cotangent: tuple[Tensor]) -> Tensor:
        # The cotangent comes in a tuple, because autograd must not go up its graph.
        ctx.cotangent = cotangent
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.cotangent[0], None


def describe_by_autograd(
    function: Callable[[Tensor], Tensor], edges: Tensor, *, force: bool
) -> Described:
    """Describe atoms with autograd's pullback, for descriptors without a written-out one.

    Parameters
    ----------
    function
        Maps edge vectors `(nreal, nnei, 3)` [Å] to the descriptor `(nreal, dim_out)`; twice
        differentiable.
    edges
        The edge vectors.
    force
        Whether the pullback is wanted.
    """
    if not force:
        return Described(function(edges), None)
    training = torch.is_grad_enabled()
    with torch.enable_grad():
        leaf = edges.detach().requires_grad_()
        descriptor = function(leaf)

    def pullback(adjoint: Tensor) -> Tensor:
        if leaf.device.type == "cpu":
            with torch.enable_grad():
                seed = _Seed.apply(descriptor, (adjoint,))
            (slope,) = torch.autograd.grad(seed, leaf, create_graph=training)
        else:
            (slope,) = torch.autograd.grad(descriptor, leaf, adjoint, create_graph=training)
        return slope

    return Described(descriptor if training else descriptor.detach(), pullback)
