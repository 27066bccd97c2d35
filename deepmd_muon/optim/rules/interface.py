"""The interface of rules of the Muon route, and the description of state tensors.

One step of a block, which is one matrix of a parameter's view::

    m ← β m + (1 − β) g,   u = m or Nesterov's form of it      u = g if a rule replaces the momentum
    u, state ← rule.orient(u, g, p)                            rule by rule
    O = polar factor of u
    O, state ← rule.transform(O, u)                            rule by rule
    state ← rule.advance(O)
    update = scale · O · rule.factors(O) · …
    update, state ← rule.finish(update, p)                     rule by rule
    p ← p (1 − lr λ) − lr · update                 decay only where all rule.decays(p, update)

A skipped step keeps the state. `orient` calls `prepare`, which calls `before`; `finish` calls
`constrain`. A rule overrides the one with the inputs and state that it needs.

A rule receives blocks and its own state, and does not know which rank holds them: one process, an
owner rank that received the block, and a captured graph call the same methods. The caller stores
the new state, except in a skipped step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.routing.views import Axis, MatrixView, Shape

Rule = TypeVar("Rule", bound="MatrixRule")

# Inputs that a rule may request besides the directions; owners on other ranks then receive them.
Input = Literal["gradient", "weight"]
Extent = Literal["parameter", "blocks", "rows", "columns", "scalar"]


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One state tensor of a parameter.

    Its extent determines shape, sharding, migration and offloading.

    Attributes
    ----------
    extent
        'parameter': the parameter's shape and layout, and in host memory with `offload`; 'blocks':
        one number per block; 'rows' or 'columns': one number per row or column of every block,
        sharded like these; 'scalar': one number. Registered rules may use 'blocks', 'rows' and
        'columns'. When the parameter's view changes, each new number becomes the mean of the old
        numbers of its elements.
    dtype
        'parameter': the parameter's; 'moment': the wider of float32 and the parameter's; 'float32'.
    start
        Value of every element before the first step.
    along
        With the extent 'rows' or 'columns': each row or column has a vector instead of one number,
        with an element for every row ('rows') or column ('columns') of its block. Vectors restart
        when the parameter's view changes.
    at_most
        Blocks with more rows or columns `along` than this have empty vectors.
    """

    extent: Extent
    dtype: Literal["parameter", "moment", "float32"]
    start: float = 0.0
    along: Axis | None = None
    at_most: int = 2**62

    def dtype_for(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of this tensor for a parameter of the given dtype."""
        if self.dtype == "float32":
            return torch.float32
        if self.dtype == "parameter":
            return parameter
        return torch.promote_types(parameter, torch.float32)

    def shape_for(self, shape: Shape, view: MatrixView | None) -> Shape:
        """Return the shape of this tensor for a parameter of the given shape and view."""
        if self.extent == "parameter":
            return shape
        if self.extent == "scalar" or view is None:
            return ()
        if self.extent == "blocks":
            return (view.blocks,)
        dims = (shape[dim] for dim in view.dims_of(shape, self.extent))
        return (*dims, view.repeats(self.extent) * max(self.lengths(view)))

    def length(self, rows: int, columns: int) -> int:
        """Return the size of the vector of one row or column of a block of this shape.

        1 without `along`.
        """
        if self.along is None:
            return 1
        n = rows if self.along == "rows" else columns
        return n if n <= self.at_most else 0

    def lengths(self, view: MatrixView) -> list[int]:
        """Return this size for each part of a matrix; in storage, shorter vectors are padded."""
        return [self.length(*shape) for shape in view.block_shapes]

    def cut(self, x: Tensor, view: MatrixView) -> list[Tensor]:
        """Return a rule's tensor as views, one per part of a matrix.

        They are (batch,), (batch, lines) or (batch, lines, n).

        Lines are the rows or columns of the part.
        """
        if self.extent not in ("rows", "columns"):
            return list(x.view(view.batch, -1).unbind(1)) if view.axis else [x]
        lines = view.rows if self.extent == "rows" else view.columns
        # (batch, lines, blocks that a line crosses, padded vector)
        x = x.view(view.batch, lines, view.repeats(self.extent), max(self.lengths(view)))
        splits_lines = view.axis == self.extent
        vectors = x[:, :, 0].split(view.sizes, dim=1) if splits_lines else x.unbind(2)
        if self.along is None:
            return [vector[:, :, 0] for vector in vectors]
        return [vector[:, :, :n] for vector, n in zip(vectors, self.lengths(view), strict=True)]


class Pieces(NamedTuple):
    """Momentum and gradient, of any shape, of equally large pieces of blocks.

    `shape` is (pieces, elements).
    """

    momentum: Tensor
    gradient: Tensor
    shape: tuple[int, int]


class Blocks(NamedTuple):
    """Some blocks before the orthogonalization, as batches (b, rows, columns).

    `gradients` and `weights` are empty unless the rules' `inputs` ask for them.
    """

    directions: Sequence[Tensor]
    gradients: Sequence[Tensor]
    weights: Sequence[Tensor]


# State of some blocks: by key, one tensor for each batch of blocks, shaped as by `StateTensor.cut`.
BlockState = Mapping[str, Sequence[Tensor]]


class MatrixRule:
    """A rule of the Muon route.

    A subclass is a frozen dataclass of its settings and overrides what it needs.

    Tensors of blocks are batches (b, rows, columns) of equally shaped blocks, in float32 or
    float64. Methods return new tensors, change none in place, and read nothing from the device.

    Attributes
    ----------
    name
        The setting that switches the rule on, or its name in the setting `rules`.
    sums
        Number of float64 values in the rule's statistics of momentum and gradient; 0 for none.
    inputs
        'gradient' if `prepare` or `orient` reads the gradients, 'weight' if a method reads the
        weights.
    replaces_momentum
        Whether the rule keeps moments of its own: the directions that it receives are the
        gradients. The optimizer's momentum then holds the last gradient.
    """

    name: ClassVar[str]
    replaces_momentum: ClassVar[bool] = False
    sums: ClassVar[int] = 0
    inputs: ClassVar[tuple[Input, ...]] = ()

    @classmethod
    def of(cls: type[Rule], settings: HybridMuonConfig) -> Rule | None:
        """Return the rule that settings of this package switch on, or None."""
        return None

    @classmethod
    def forms(cls: type[Rule]) -> tuple[Rule, ...]:
        """Return the rule with every set of state tensors that settings may give it."""
        return (cls(),)

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return the state tensors by key; keys are unique among all rules."""
        return {}

    def measure(self, pieces: Sequence[Pieces], device: torch.device) -> Tensor:
        """Return statistics of pieces of blocks, float64 (pieces, sums).

        Each rank measures the pieces it holds.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `sums` but has no `measure`")

    def combine(self, sums: Tensor) -> Tensor:
        """Return the statistic of each block, (blocks,).

        `sums` is float64 (blocks, pieces, sums), padded with zeros.
        """
        raise NotImplementedError(f"{type(self).__name__} sets `sums` but has no `combine`")

    def measure_whole(self, momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the statistics, (b,) each, of whole blocks, (b, elements) each."""
        pairs = zip(momenta, gradients, strict=True)
        pieces = [Pieces(m, g, (m.shape[0], m.shape[1])) for m, g in pairs]
        statistics = self.combine(self.measure(pieces, momenta[0].device).unsqueeze(1))
        return list(statistics.split([piece.shape[0] for piece in pieces]))

    def before(self, directions: Sequence[Tensor], state: BlockState) -> Sequence[Tensor]:
        """Return the matrices to orthogonalize."""
        return directions

    def prepare(
        self, directions: Sequence[Tensor], gradients: Sequence[Tensor], state: BlockState
    ) -> tuple[Sequence[Tensor], BlockState]:
        """Return the matrices to orthogonalize, and new state.

        Gradients are given if `inputs` has them.
        """
        return self.before(directions, state), {}

    def orient(self, blocks: Blocks, state: BlockState) -> tuple[Sequence[Tensor], BlockState]:
        """Return the matrices to orthogonalize, and new state."""
        return self.prepare(blocks.directions, blocks.gradients, state)

    def transform(
        self, polar: Sequence[Tensor], directions: Sequence[Tensor], state: BlockState
    ) -> tuple[Sequence[Tensor], BlockState]:
        """Return matrices in place of the polar factors, and new state.

        `directions` were orthogonalized; `state` is that after `orient`.
        """
        return polar, {}

    def advance(
        self, polar: Sequence[Tensor], state: BlockState, measured: Sequence[Tensor] | None
    ) -> BlockState:
        """Return the new state, from polar factors and, with `sums`, statistics (b,) of blocks."""
        return {}

    def factors(self, polar: Sequence[Tensor], state: BlockState) -> list[Tensor] | None:
        """Return factors of the updates that broadcast to (b, rows, columns), from the new state.

        None for 1.
        """
        return None

    def constrain(
        self, updates: Sequence[Tensor], weights: Sequence[Tensor], lr: float | Tensor
    ) -> Sequence[Tensor]:
        """Return the updates, to be multiplied by lr (may be 0) and subtracted.

        Called if `inputs` has weights.
        """
        return updates

    def finish(
        self,
        updates: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: BlockState,
        lr: float | Tensor,
    ) -> tuple[Sequence[Tensor], BlockState]:
        """Return the updates as `constrain` does, and new state; `state` is that after `advance`."""
        return (self.constrain(updates, weights, lr) if weights else updates), {}

    def decays(self, weights: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor] | None:
        """Return where weight decay applies, as bool tensors of the updates' shapes.

        None for everywhere.

        Weights and updates are parameters, or pieces of them, of any equal shape.
        """
        return None
