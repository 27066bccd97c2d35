"""The symmetrization of a DPA-3 layer's moments on a GPU.

    G_ad = Σ_c H_ca·H_cd / 3

c is a component of space. H has two blocks of columns, of edges and of nodes; a and d are columns of
one block, a among its first `axis`.

| symbol | name          | shape                 | meaning                                      |
|--------|---------------|-----------------------|----------------------------------------------|
| H      | `moment`      | (atoms, 3, E + V)     | from `edges`: E columns of edges, V of nodes |
| G      | `symmetrized` | (atoms, axis·(E + V)) | (axis, E) and (axis, V), flat: the input of a linear layer |

`nn.four_passes` explains the passes and the accents. `push_kernel` computes passes 1 and 3,
`pull_kernel` passes 2 and 4; its hats are bars in pass 2. All tensors are contiguous: H comes so
from `edges`, tangents and cotangents from `FourPasses`. Reference: `RepflowLayer._new_nodes`, as
for `residual_sums`.
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


class SymmetrizationInputs(NamedTuple):
    """The input of the operation."""

    moment: Tensor


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: H for pass 3, Ḡ for pass 4."""

    moment: Tensor
    symmetrized_bar: Tensor


class Pair(NamedTuple):
    """Two factors of a derivative by H: H with Ḡ or Ĝ, or Ḣ with Ḡ."""

    moment: Tensor
    cotangent: Tensor


@dataclass(frozen=True)
class Symmetrization(FourPasses):
    """The operation; the output is G.

    Attributes
    ----------
    axis
        How many leading columns of each block of H are multiplied with all columns of the block. At
        most E and V (the settings make sure): kernels do not mask column a by the block's width.
    edge_columns
        E, the columns of H from edge features.
    """

    axis: int
    edge_columns: int

    def value(self, inputs: SymmetrizationInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return G."""
        return (self._push(inputs.moment),), ()

    def adjoint(
        self, cotangents: Any, inputs: SymmetrizationInputs, value_saved: Any
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return H̄."""
        (symmetrized_bar,) = cotangents
        moment_bar = self._pull([Pair(inputs.moment, symmetrized_bar)])
        return (moment_bar,), AdjointSaved(inputs.moment, symmetrized_bar)

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return Ġ, and save Ḣ."""
        (moment_dot,) = tangents
        return (self._push(saved.moment, moment_dot),), (moment_dot,)

    def gradient(
        self,
        cotangents: Any,
        inputs: SymmetrizationInputs,
        value_saved: Any,
        adjoint_saved: AdjointSaved | None,
        tangent_saved: tuple[Tensor] | None,
    ) -> Nested:
        """Pass 4: return the gradient of ⟨Ĝ, G⟩ + ⟨Ḡ, Ġ⟩ by H."""
        (symmetrized_hat,) = cotangents
        pairs = [Pair(inputs.moment, symmetrized_hat)]
        if adjoint_saved is not None and tangent_saved is not None:
            (moment_dot,) = tangent_saved
            pairs.append(Pair(moment_dot, adjoint_saved.symmetrized_bar))
        return (self._pull(pairs),)

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

    def _push(self, moment: Tensor, moment_dot: Tensor | None = None) -> Tensor:
        """Return G, or its tangent Ġ if Ḣ is passed."""
        symmetrized = moment.new_empty(len(moment), self.axis * moment.shape[2])
        push_kernel[(len(moment),)](
            symmetrized=symmetrized,
            moment=moment,
            moment_dot=moment_dot,
            sizes=self._sizes(moment),
        )
        return symmetrized

    def _pull(self, pairs: Sequence[Pair]) -> Tensor:
        """Return the derivative by H, a sum over pairs."""
        out = torch.empty_like(pairs[0].moment)
        pull_kernel[(len(out),)](
            out=out,
            moments=tuple(pair.moment for pair in pairs),
            cotangents=tuple(pair.cotangent for pair in pairs),
            sizes=self._sizes(out),
        )
        return out


# ----- kernels: a program computes one atom ------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled.

    `rows` and `columns` are powers of two that hold `axis` and the columns of a block.
    """

    axis: tl.constexpr
    edge_columns: tl.constexpr
    node_columns: tl.constexpr
    rows: tl.constexpr
    columns: tl.constexpr


class Block(NamedTuple):
    """The block of edges or of nodes, of one atom."""

    begin: Any  # its first column in H
    d_mask: Any  # (columns,): which of its columns exist
    g_index: Any  # (rows, columns): flat, in G (atoms·axis·(E + V),)


@triton.jit
def _block(number: tl.constexpr, atom, a, d, sizes):
    """Return the block of edges (0) or of nodes (1)."""
    begin: tl.constexpr = 0 if number == 0 else sizes.edge_columns
    n_columns: tl.constexpr = sizes.edge_columns if number == 0 else sizes.node_columns
    start = atom * sizes.axis * (sizes.edge_columns + sizes.node_columns) + sizes.axis * begin
    return Block(
        begin=begin,
        d_mask=d < n_columns,
        g_index=start + a[:, None] * n_columns + d[None, :],
    )


@triton.jit
def push_kernel(
    symmetrized,  # (atoms, axis·(E + V)), written
    moment,  # (atoms, 3, E + V)
    moment_dot,  # (atoms, 3, E + V); None for G
    sizes,
) -> None:
    """G_ad = Σ_c H_ca·H_cd / 3 in each block, or Ġ_ad = Σ_c (Ḣ_ca·H_cd + H_ca·Ḣ_cd) / 3."""
    width: tl.constexpr = sizes.edge_columns + sizes.node_columns
    atom = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, sizes.rows)
    d = tl.arange(0, sizes.columns)
    a_mask = a < sizes.axis
    for number in tl.static_range(2):
        block = _block(number, atom, a, d, sizes)
        total = tl.zeros([sizes.rows, sizes.columns], moment.dtype.element_ty)
        for c in tl.static_range(3):
            row = (atom * 3 + c) * width + block.begin
            h_a = tl.load(moment + row + a, a_mask, 0.0)
            h_d = tl.load(moment + row + d, block.d_mask, 0.0)
            if moment_dot is not None:
                h_a_dot = tl.load(moment_dot + row + a, a_mask, 0.0)
                h_d_dot = tl.load(moment_dot + row + d, block.d_mask, 0.0)
                total += h_a_dot[:, None] * h_d[None, :] + h_a[:, None] * h_d_dot[None, :]
            else:
                total += h_a[:, None] * h_d[None, :]
        mask = a_mask[:, None] & block.d_mask[None, :]
        tl.store(symmetrized + block.g_index, total / 3.0, mask)


@triton.jit
def pull_kernel(
    out,  # (atoms, 3, E + V), written: Ĥ
    moments,  # pairs × (atoms, 3, E + V)
    cotangents,  # pairs × (atoms, axis·(E + V))
    sizes,
) -> None:
    """Ĥ_cd = Σ_pairs (Σ_a H_ca·Ĝ_ad + [d < axis]·Σ_d′ Ĝ_dd′·H_cd′) / 3 in each block.

    The pairs are H with Ĝ and, in pass 4 with forces, Ḣ with Ḡ in their place.
    The second sum is there because the first `axis` columns of H are factors on both sides.
    """
    width: tl.constexpr = sizes.edge_columns + sizes.node_columns
    atom = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, sizes.rows)
    d = tl.arange(0, sizes.columns)
    a_mask = a < sizes.axis
    for number in tl.static_range(2):
        block = _block(number, atom, a, d, sizes)
        mask = a_mask[:, None] & block.d_mask[None, :]
        for c in tl.static_range(3):
            row = (atom * 3 + c) * width + block.begin
            total = tl.zeros([sizes.columns], out.dtype.element_ty)
            for pair in tl.static_range(len(moments)):
                g_hat = tl.load(cotangents[pair] + block.g_index, mask, 0.0)
                h_a = tl.load(moments[pair] + row + a, a_mask, 0.0)
                h_d = tl.load(moments[pair] + row + d, block.d_mask, 0.0)
                as_right_factor = h_a[:, None] * g_hat
                row_sums = tl.sum(g_hat * h_d[None, :], 1)  # (rows,): belongs to column d = a
                as_left_factor = tl.where(a[:, None] == d[None, :], row_sums[:, None], 0.0)
                total += tl.sum(as_right_factor + as_left_factor, 0)
            tl.store(out + row + d, total / 3.0, block.d_mask)
