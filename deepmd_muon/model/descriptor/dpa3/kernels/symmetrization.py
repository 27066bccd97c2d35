"""The symmetrization of a DPA-3 layer's moments on a GPU: four passes of one kernel each.

    G_ad = Σ_c H_ca·H_cd / 3

The sum is over the components c of space, in the E and the N columns of H apart, with a < `axis`.

| symbol | name      | shape                 | meaning                                              |
|--------|-----------|-----------------------|------------------------------------------------------|
| H      | `moment`  | (atoms, 3, E + N)     | from `edges`: columns of edges, then of nodes        |
| G      | `squares` | (atoms, axis·(E + N)) | environment of a node, the input of its linear layer |

`four_passes` explains the passes and the accents. Reference: `RepflowLayer._nodes`, as for
`residual_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.kernels.shared import as_constexpr
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors


class Moment(NamedTuple):
    """The input of the operation."""

    moment: Tensor


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: H for pass 3, Ḡ for pass 4."""

    moment: Tensor
    squares_bar: Tensor


@dataclass(frozen=True)
class Symmetrization(FourPasses):
    """The operation; the output is G.

    Attributes
    ----------
    axis
        Rows a of G: how many leading columns of each block of H are multiplied with all columns of
        that block.
    edge_columns
        E, the columns of H from edge features.
    """

    axis: int
    edge_columns: int

    def value(self, inputs: Moment) -> tuple[Perhaps, Nested]:
        """Pass 1: return G."""
        return (self._symmetrize(inputs.moment),), ()

    def adjoint(self, cotangents: Any, inputs: Moment, value_saved: Any) -> tuple[Tensors, Nested]:
        """Pass 2: return H̄."""
        (squares_bar,) = cotangents
        moment_bar = self._symmetrize_adjoint([(inputs.moment, squares_bar)])
        return (moment_bar,), AdjointSaved(inputs.moment, squares_bar)

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return Ġ, and save Ḣ."""
        (moment_dot,) = tangents
        return (self._symmetrize(saved.moment, moment_dot),), (moment_dot,)

    def gradient(
        self,
        cotangents: Any,
        inputs: Moment,
        value_saved: Any,
        adjoint: AdjointSaved | None,
        tangent: tuple[Tensor] | None,
    ) -> Nested:
        """Pass 4: return the gradient of ⟨Ĝ, G⟩ + ⟨Ḡ, Ġ⟩ by H."""
        (squares_hat,) = cotangents
        pairs = [(inputs.moment, squares_hat)]
        if adjoint is not None and tangent is not None:
            (moment_dot,) = tangent
            pairs.append((moment_dot, adjoint.squares_bar))
        return (self._symmetrize_adjoint(pairs),)

    def _sizes(self, moment: Tensor) -> Sizes:
        node_columns = moment.shape[2] - self.edge_columns
        columns = triton.next_power_of_2(max(self.edge_columns, node_columns))
        return as_constexpr(
            Sizes(
                axis=self.axis,
                edge_columns=self.edge_columns,
                node_columns=node_columns,
                rows=triton.next_power_of_2(self.axis),
                columns=columns,
            )
        )

    def _symmetrize(self, moment: Tensor, moment_dot: Tensor | None = None) -> Tensor:
        """Return G from H, or with Ḣ the tangent of G."""
        squares = moment.new_empty(len(moment), self.axis * moment.shape[2])
        symmetrize_kernel[(len(moment),)](
            squares=squares,
            moment=moment,
            moment_dot=moment_dot,
            sizes=self._sizes(moment),
        )
        return squares

    def _symmetrize_adjoint(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the adjoint of H: the sum over pairs of H (or Ḣ) and an adjoint of G."""
        moments, squares_bars = zip(*pairs, strict=True)
        moment_bar = torch.empty_like(moments[0])
        symmetrize_adjoint_kernel[(len(moment_bar),)](
            moment_bar=moment_bar,
            moments=moments,
            squares_bars=squares_bars,
            sizes=self._sizes(moment_bar),
        )
        return moment_bar


# ----- kernels: a program computes one atom ------------------------------------------------------
# H of an atom is (3, E + N). G is stored as an (axis, E) block and behind it an (axis, N) block, so
# that its flat row is the input of the linear layer.


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled.

    `rows` and `columns` are powers of two that hold `axis` and the columns of a block.
    """

    axis: tl.constexpr
    edge_columns: tl.constexpr
    node_columns: tl.constexpr
    rows: tl.constexpr
    columns: tl.constexpr


@triton.jit
def _block_columns(block: tl.constexpr, sizes):
    """Return where a block of H (0: edges, 1: nodes) begins, its width, its columns and their mask."""
    d = tl.arange(0, sizes.columns)
    if block == 0:
        return 0, sizes.edge_columns, d, d < sizes.edge_columns
    return sizes.edge_columns, sizes.node_columns, d + sizes.edge_columns, d < sizes.node_columns


@triton.jit
def symmetrize_kernel(
    squares,  # (atoms, axis·(E + N)), written
    moment,  # (atoms, 3, E + N)
    moment_dot,  # (atoms, 3, E + N); None for G
    sizes,
) -> None:
    """G_ad = Σ_c H_ca·H_cd / 3 in each block, or Ġ_ad = Σ_c (Ḣ_ca·H_cd + H_ca·Ḣ_cd) / 3."""
    width: tl.constexpr = sizes.edge_columns + sizes.node_columns
    atom = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, sizes.rows)
    a_mask = a < sizes.axis
    for block in tl.static_range(2):
        begin, n_columns, d, d_mask = _block_columns(block, sizes)
        total = tl.zeros([sizes.rows, sizes.columns], moment.dtype.element_ty)
        for c in tl.static_range(3):
            row = (atom * 3 + c) * width
            h_a = tl.load(moment + row + begin + a, a_mask, 0.0)
            h_d = tl.load(moment + row + d, d_mask, 0.0)
            if moment_dot is not None:
                h_a_dot = tl.load(moment_dot + row + begin + a, a_mask, 0.0)
                h_d_dot = tl.load(moment_dot + row + d, d_mask, 0.0)
                total += h_a_dot[:, None] * h_d[None, :] + h_a[:, None] * h_d_dot[None, :]
            else:
                total += h_a[:, None] * h_d[None, :]
        block_start = atom * sizes.axis * width + sizes.axis * begin
        index = block_start + a[:, None] * n_columns + (d - begin)[None, :]
        tl.store(squares + index, total / 3.0, a_mask[:, None] & d_mask[None, :])


@triton.jit
def symmetrize_adjoint_kernel(
    moment_bar,  # (atoms, 3, E + N), written
    moments,  # pairs × (atoms, 3, E + N)
    squares_bars,  # pairs × (atoms, axis·(E + N))
    sizes,
) -> None:
    """H̄_cd = Σ_pairs (Σ_a H_ca·Ḡ_ad + [d < axis]·Σ_e Ḡ_de·H_ce) / 3 in each block.

    The second sum is there because the first `axis` columns of H are factors on both sides.
    """
    width: tl.constexpr = sizes.edge_columns + sizes.node_columns
    atom = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, sizes.rows)
    a_mask = a < sizes.axis
    for block in tl.static_range(2):
        begin, n_columns, d, d_mask = _block_columns(block, sizes)
        block_start = atom * sizes.axis * width + sizes.axis * begin
        index = block_start + a[:, None] * n_columns + (d - begin)[None, :]
        block_mask = a_mask[:, None] & d_mask[None, :]
        same_column = a[:, None] == (d - begin)[None, :]
        for c in tl.static_range(3):
            row = (atom * 3 + c) * width
            total = tl.zeros([sizes.columns], moment_bar.dtype.element_ty)
            for pair in tl.static_range(len(moments)):
                g_bar = tl.load(squares_bars[pair] + index, block_mask, 0.0)
                h_a = tl.load(moments[pair] + row + begin + a, a_mask, 0.0)
                h_d = tl.load(moments[pair] + row + d, d_mask, 0.0)
                as_right_factor = h_a[:, None] * g_bar
                row_sums = tl.sum(g_bar * h_d[None, :], 1)  # (rows,): belongs to column d = a
                as_left_factor = tl.where(same_column, row_sums[:, None], 0.0)
                total += tl.sum(as_right_factor + as_left_factor, 0)
            tl.store(moment_bar + row + d, total / 3.0, d_mask)
