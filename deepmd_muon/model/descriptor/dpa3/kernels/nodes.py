"""The node update of a DPA-3 layer on a GPU: four passes of a few kernels each.

The update
----------
    x′ = α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) + Σ_k ρ_{2+k}∘m_k
    h₀ = x·W₀ + b₀                        the node itself ("self")
    h₁ = G·W₁ + b₁                        its environment ("symmetric")
    G_ad = Σ_c H_ca·H_cd / 3              symmetrization of the moment H over the components c of space,
                                          in the E and the N columns of H apart, a < `axis`

| symbol | name         | shape                 | meaning                                       |
|--------|--------------|-----------------------|-----------------------------------------------|
| x, x′  | `x`, `x_new` | (atoms, n)            | node features before and after the layer      |
| m_k    | `messages`   | (atoms, n) each       | terms without activation; first: from edges   |
| H      | `moment`     | (atoms, 3, E + N)     | from `edges`: columns of edges, then of nodes |
| G      | `squares`    | (atoms, axis·(E + N)) | E and N columns are symmetrized apart         |
| W₀, b₀ | `self_*`     | (n, n), (n,)          | first linear layer                            |
| W₁, b₁ | `symmetric_*`| (axis·(E + N), n), (n,) | second linear layer                         |
| ρ      | `step_sizes` | (n,) each             | two, and one for each message                 |
| α      | `alpha`      | number                | weight of the old features                    |

N = n. The output x′ is called y in ȳ and ŷ; K is the number of messages. `four_passes` explains the
passes and the accents: a bar (`_bar`) is a derivative of the energy, a dot (`_dot`) a tangent, a
hat (`_hat`) a derivative of the loss.

Reference: `RepflowLayer._nodes` computes the same from torch's operations when kernels cannot run,
and `test_nodes_and_edge_features_of_dpa3` compares all four passes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors
from deepmd_muon.model.nn.layer_kernels import curve

BLOCK = 256  # elements of (atoms, n) that one program computes

# ----- what the passes exchange ------------------------------------------------------------------


class NodeInputs(NamedTuple):
    """The inputs of the operation; shapes are in the table above."""

    x: Tensor
    moment: Tensor
    messages: tuple[Tensor, ...]
    self_weight: Tensor
    self_bias: Tensor
    symmetric_weight: Tensor
    symmetric_bias: Tensor
    step_sizes: tuple[Tensor, ...]


class ValueSaved(NamedTuple):
    """What pass 1 computes and passes 2 to 4 read again."""

    squares: Tensor
    h_self: Tensor
    h_symmetric: Tensor

    @property
    def h(self) -> tuple[Tensor, Tensor]:
        """h₀ and h₁."""
        return self.h_self, self.h_symmetric


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: the first four for pass 4, the others for pass 3."""

    y_bar: Tensor
    h_self_bar: Tensor
    h_symmetric_bar: Tensor
    squares_bar: Tensor
    h_self: Tensor
    h_symmetric: Tensor
    moment: Tensor
    self_weight: Tensor
    symmetric_weight: Tensor
    step_sizes: tuple[Tensor, ...]


class TangentSaved(NamedTuple):
    """What pass 3 hands over to pass 4."""

    h_self_dot: Tensor
    h_symmetric_dot: Tensor
    squares_dot: Tensor
    x_dot: Tensor
    moment_dot: Tensor
    message_dots: tuple[Tensor, ...]


# ----- the operation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes(FourPasses):
    """The node update of one layer; inputs are those of `NodeInputs`, the output is x′.

    Attributes
    ----------
    activation
        f; it has a formula that kernels know.
    alpha
        α.
    axis
        Rows a of G: how many leading columns of each block of H are multiplied with all columns of
        that block.
    edge_columns
        E, the columns of H from edge features.
    """

    activation: Activation
    alpha: float
    axis: int
    edge_columns: int

    def value(self, nodes: NodeInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return x′."""
        squares = self._symmetrize(nodes.moment)
        saved = ValueSaved(
            squares=squares,
            h_self=torch.addmm(nodes.self_bias, nodes.x, nodes.self_weight),
            h_symmetric=torch.addmm(nodes.symmetric_bias, squares, nodes.symmetric_weight),
        )
        x_new = torch.empty_like(nodes.x)
        value_kernel[self._grid(x_new)](
            x_new=x_new,
            x=nodes.x,
            messages=nodes.messages,
            h=saved.h,
            step_sizes=nodes.step_sizes,
            alpha=self.alpha,
            **self._common(x_new),
        )
        return (x_new,), saved

    def adjoint(
        self, cotangents: Any, nodes: NodeInputs, value: ValueSaved
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return x̄, H̄ and the adjoint of each message, from ȳ = x̄′."""
        (y_bar,) = cotangents
        message_bars = tuple(torch.empty_like(y_bar) for _ in nodes.messages)
        h_bar = y_bar.new_empty(2, *y_bar.shape)
        adjoint_kernel[self._grid(y_bar)](
            h_bar=tuple(h_bar),
            message_bars=message_bars,
            y_bar=y_bar,
            h=value.h,
            step_sizes=nodes.step_sizes,
            **self._common(y_bar),
        )
        h_self_bar, h_symmetric_bar = h_bar
        squares_bar = torch.mm(h_symmetric_bar, nodes.symmetric_weight.t())
        x_bar = torch.addmm(y_bar, h_self_bar, nodes.self_weight.t(), beta=self.alpha)
        moment_bar = self._symmetrize_adjoint([(nodes.moment, squares_bar)])

        saved = AdjointSaved(
            y_bar=y_bar,
            h_self_bar=h_self_bar,
            h_symmetric_bar=h_symmetric_bar,
            squares_bar=squares_bar,
            h_self=value.h_self,
            h_symmetric=value.h_symmetric,
            moment=nodes.moment,
            self_weight=nodes.self_weight,
            symmetric_weight=nodes.symmetric_weight,
            step_sizes=nodes.step_sizes,
        )
        return (x_bar, moment_bar, *message_bars), saved

    def tangent(self, tangents: Any, adjoint: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return ẋ′ from ẋ, Ḣ and the tangent of each message."""
        x_dot, moment_dot, *message_dots = tangents
        squares_dot = self._symmetrize(adjoint.moment, moment_dot)
        saved = TangentSaved(
            h_self_dot=torch.mm(x_dot, adjoint.self_weight),
            h_symmetric_dot=torch.mm(squares_dot, adjoint.symmetric_weight),
            squares_dot=squares_dot,
            x_dot=x_dot,
            moment_dot=moment_dot,
            message_dots=tuple(message_dots),
        )
        x_new_dot = torch.empty_like(x_dot)
        tangent_kernel[self._grid(x_dot)](
            x_new_dot=x_new_dot,
            x_dot=x_dot,
            message_dots=saved.message_dots,
            h_dot=(saved.h_self_dot, saved.h_symmetric_dot),
            h=(adjoint.h_self, adjoint.h_symmetric),
            step_sizes=adjoint.step_sizes,
            alpha=self.alpha,
            **self._common(x_dot),
        )
        return (x_new_dot,), saved

    def gradient(
        self,
        cotangents: Any,
        nodes: NodeInputs,
        value: ValueSaved,
        adjoint: AdjointSaved | None,
        tangent: TangentSaved | None,
    ) -> Nested:
        """Pass 4: return the gradients of all inputs in the order of `NodeInputs`.

        Each is the gradient of ⟨ŷ, x′⟩ + ⟨ȳ, ẋ′⟩. The second term, from the loss on forces, is
        there only if passes 2 and 3 have run with tangents.
        """
        (y_hat,) = cotangents
        n_messages = len(nodes.messages)
        message_hats = tuple(torch.empty_like(message) for message in nodes.messages)
        # ĥ₀, ĥ₁, then for each ρ the terms of its gradient, atom by atom: one tensor, so that one
        # sum below gives the gradients of biases and of ρ.
        terms = y_hat.new_empty(2 + len(nodes.step_sizes), *y_hat.shape)
        if adjoint is None or tangent is None:
            # The kernel reads none of these; Triton wants pointers all the same.
            y_bar, h_dot, message_dots = y_hat, (y_hat, y_hat), (y_hat,) * n_messages
        else:
            y_bar = adjoint.y_bar
            h_dot = tangent.h_self_dot, tangent.h_symmetric_dot
            message_dots = tangent.message_dots
        gradient_kernel[self._grid(y_hat)](
            h_hat=tuple(terms[:2]),
            rho_terms=tuple(terms[2:]),
            message_hats=message_hats,
            y_hat=y_hat,
            y_bar=y_bar,
            messages=nodes.messages,
            message_dots=message_dots,
            h=value.h,
            h_dot=h_dot,
            step_sizes=nodes.step_sizes,
            with_forces=tangent is not None,
            **self._common(y_hat),
        )
        h_self_hat, h_symmetric_hat = terms[:2]
        squares_hat = torch.mm(h_symmetric_hat, nodes.symmetric_weight.t())

        self_weight_hat = torch.mm(nodes.x.t(), h_self_hat)
        symmetric_weight_hat = torch.mm(value.squares.t(), h_symmetric_hat)
        moment_terms = [(nodes.moment, squares_hat)]
        if adjoint is not None and tangent is not None:
            self_weight_hat.addmm_(tangent.x_dot.t(), adjoint.h_self_bar)
            symmetric_weight_hat.addmm_(tangent.squares_dot.t(), adjoint.h_symmetric_bar)
            moment_terms.append((tangent.moment_dot, adjoint.squares_bar))

        sums = terms.sum(1)  # (2 + number of ρ, n): a bias has the gradient Σ_atoms ĥ
        return NodeInputs(
            x=torch.addmm(y_hat, h_self_hat, nodes.self_weight.t(), beta=self.alpha),
            moment=self._symmetrize_adjoint(moment_terms),
            messages=message_hats,
            self_weight=self_weight_hat,
            self_bias=sums[0],
            symmetric_weight=symmetric_weight_hat,
            symmetric_bias=sums[1],
            step_sizes=tuple(sums[2:]),
        )

    # ----- launches ------------------------------------------------------------------------------

    def _grid(self, x: Tensor) -> tuple[int]:
        """Return the grid of the element-wise kernels on a matrix like x."""
        return (triton.cdiv(x.numel(), BLOCK),)

    def _common(self, x: Tensor) -> dict[str, Any]:
        """Return the arguments that all element-wise kernels on matrices like x share."""
        assert self.activation.formula is not None
        return {
            "count": x.numel(),
            "width": x.shape[1],
            "block": BLOCK,
            **self.activation.formula.kernel_arguments,
        }

    def _tile(self, moment: Tensor) -> dict[str, int]:
        """Return the sizes of the symmetrization, which are known when its kernels are compiled."""
        node_columns = moment.shape[2] - self.edge_columns
        return {
            "axis": self.axis,
            "edge_columns": self.edge_columns,
            "node_columns": node_columns,
            "tile_rows": triton.next_power_of_2(self.axis),
            "tile_columns": triton.next_power_of_2(max(self.edge_columns, node_columns)),
        }

    def _symmetrize(self, moment: Tensor, moment_dot: Tensor | None = None) -> Tensor:
        """Return G from H, or with Ḣ the tangent of G."""
        squares = moment.new_empty(len(moment), self.axis * moment.shape[2])
        symmetrize_kernel[(len(moment),)](
            squares=squares,
            moment=moment,
            # A dummy where there is no tangent: the kernel does not read it.
            moment_dot=moment if moment_dot is None else moment_dot,
            with_tangent=moment_dot is not None,
            **self._tile(moment),
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
            **self._tile(moment_bar),
        )
        return moment_bar


# ----- element-wise kernels: a program computes `block` elements of (atoms, n) ---------------------
# Tuples hold pointers; their lengths are known when a kernel is compiled, so `static_range` unrolls.


@triton.jit
def _elements(count, width, block: tl.constexpr):
    """Return the flat indices of this program's elements, the mask of those that exist, and columns."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return index, index < count, index % width


@triton.jit
def value_kernel(
    x_new,  # (atoms, n), written
    x,  # (atoms, n)
    messages,  # K × (atoms, n)
    h,  # 2 × (atoms, n)
    step_sizes,  # (2 + K) × (n,)
    count,  # atoms·n
    width,  # n
    alpha: tl.constexpr,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """x′ = α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) + Σ_k ρ_{2+k}∘m_k."""
    index, mask, column = _elements(count, width, block)
    total = alpha * tl.load(x + index, mask, 0.0)
    for k in tl.static_range(len(messages)):
        rho = tl.load(step_sizes[2 + k] + column, mask, 0.0)
        total += rho * tl.load(messages[k] + index, mask, 0.0)
    for k in tl.static_range(2):
        rho = tl.load(step_sizes[k] + column, mask, 0.0)
        f, _, _ = curve(tl.load(h[k] + index, mask, 0.0), kind, curve_constants)
        total += rho * f
    tl.store(x_new + index, total, mask)


@triton.jit
def adjoint_kernel(
    h_bar,  # 2 × (atoms, n), written
    message_bars,  # K × (atoms, n), written
    y_bar,  # (atoms, n)
    h,  # 2 × (atoms, n)
    step_sizes,  # (2 + K) × (n,)
    count,  # atoms·n
    width,  # n
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """h̄ = ρ∘f′(h)∘ȳ, and m̄ = ρ∘ȳ."""
    index, mask, column = _elements(count, width, block)
    y_bar_value = tl.load(y_bar + index, mask, 0.0)
    for k in tl.static_range(len(message_bars)):
        rho = tl.load(step_sizes[2 + k] + column, mask, 0.0)
        tl.store(message_bars[k] + index, rho * y_bar_value, mask)
    for k in tl.static_range(2):
        rho = tl.load(step_sizes[k] + column, mask, 0.0)
        _, slope, _ = curve(tl.load(h[k] + index, mask, 0.0), kind, curve_constants)
        tl.store(h_bar[k] + index, rho * slope * y_bar_value, mask)


@triton.jit
def tangent_kernel(
    x_new_dot,  # (atoms, n), written
    x_dot,  # (atoms, n)
    message_dots,  # K × (atoms, n)
    h_dot,  # 2 × (atoms, n)
    h,  # 2 × (atoms, n)
    step_sizes,  # (2 + K) × (n,)
    count,  # atoms·n
    width,  # n
    alpha: tl.constexpr,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """ẋ′ = α·ẋ + ρ₀∘f′(h₀)∘ḣ₀ + ρ₁∘f′(h₁)∘ḣ₁ + Σ_k ρ_{2+k}∘ṁ_k."""
    index, mask, column = _elements(count, width, block)
    total = alpha * tl.load(x_dot + index, mask, 0.0)
    for k in tl.static_range(len(message_dots)):
        rho = tl.load(step_sizes[2 + k] + column, mask, 0.0)
        total += rho * tl.load(message_dots[k] + index, mask, 0.0)
    for k in tl.static_range(2):
        rho = tl.load(step_sizes[k] + column, mask, 0.0)
        _, slope, _ = curve(tl.load(h[k] + index, mask, 0.0), kind, curve_constants)
        total += rho * slope * tl.load(h_dot[k] + index, mask, 0.0)
    tl.store(x_new_dot + index, total, mask)


@triton.jit
def gradient_kernel(
    h_hat,  # 2 × (atoms, n), written
    rho_terms,  # (2 + K) × (atoms, n), written: the gradient of each ρ before the sum over atoms
    message_hats,  # K × (atoms, n), written
    y_hat,  # (atoms, n)
    y_bar,  # (atoms, n); read only with forces, as are all dots
    messages,  # K × (atoms, n)
    message_dots,  # K × (atoms, n)
    h,  # 2 × (atoms, n)
    h_dot,  # 2 × (atoms, n)
    step_sizes,  # (2 + K) × (n,)
    count,  # atoms·n
    width,  # n
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    with_forces: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Differentiate ⟨ŷ, x′⟩ + ⟨ȳ, ẋ′⟩ by h, ρ and m.

    ĥ = ρ∘(f′(h)∘ŷ + f″(h)∘ḣ∘ȳ), m̂ = ρ∘ŷ; the gradient of ρ is the sum over atoms of
    f(h)∘ŷ + f′(h)∘ḣ∘ȳ, or for a message of m∘ŷ + ṁ∘ȳ.
    """
    index, mask, column = _elements(count, width, block)
    y_hat_value = tl.load(y_hat + index, mask, 0.0)
    if with_forces:
        y_bar_value = tl.load(y_bar + index, mask, 0.0)
    for k in tl.static_range(len(messages)):
        rho = tl.load(step_sizes[2 + k] + column, mask, 0.0)
        tl.store(message_hats[k] + index, rho * y_hat_value, mask)
        rho_term = tl.load(messages[k] + index, mask, 0.0) * y_hat_value
        if with_forces:
            rho_term += tl.load(message_dots[k] + index, mask, 0.0) * y_bar_value
        tl.store(rho_terms[2 + k] + index, rho_term, mask)
    for k in tl.static_range(2):
        rho = tl.load(step_sizes[k] + column, mask, 0.0)
        f, slope, bend = curve(tl.load(h[k] + index, mask, 0.0), kind, curve_constants)
        h_term = slope * y_hat_value
        rho_term = f * y_hat_value
        if with_forces:
            h_dot_y_bar = tl.load(h_dot[k] + index, mask, 0.0) * y_bar_value
            h_term += bend * h_dot_y_bar
            rho_term += slope * h_dot_y_bar
        tl.store(h_hat[k] + index, rho * h_term, mask)
        tl.store(rho_terms[k] + index, rho_term, mask)


# ----- symmetrization: a program computes one atom -----------------------------------------------
# H of an atom is (3, E + N). G is stored as an (axis, E) block and behind it an (axis, N) block, so
# that its flat row is the input of the linear layer.


@triton.jit
def _block_columns(
    block: tl.constexpr, edge_columns: tl.constexpr, node_columns: tl.constexpr, tile: tl.constexpr
):
    """Return where a block of H (0: edges, 1: nodes) begins, its width, its columns and their mask."""
    d = tl.arange(0, tile)
    if block == 0:
        return 0, edge_columns, d, d < edge_columns
    return edge_columns, node_columns, edge_columns + d, d < node_columns


@triton.jit
def symmetrize_kernel(
    squares,  # (atoms, axis·(E + N)), written
    moment,  # (atoms, 3, E + N)
    moment_dot,  # (atoms, 3, E + N); read only with a tangent
    with_tangent: tl.constexpr,
    axis: tl.constexpr,
    edge_columns: tl.constexpr,
    node_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """G_ad = Σ_c H_ca·H_cd / 3 in each block, or Ġ_ad = Σ_c (Ḣ_ca·H_cd + H_ca·Ḣ_cd) / 3."""
    width: tl.constexpr = edge_columns + node_columns
    atom = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, tile_rows)
    a_mask = a < axis
    for block in tl.static_range(2):
        begin, n_columns, d, d_mask = _block_columns(
            block, edge_columns, node_columns, tile_columns
        )
        total = tl.zeros([tile_rows, tile_columns], moment.dtype.element_ty)
        for c in tl.static_range(3):
            row = (atom * 3 + c) * width
            h_a = tl.load(moment + row + begin + a, a_mask, 0.0)
            h_d = tl.load(moment + row + d, d_mask, 0.0)
            if with_tangent:
                h_a_dot = tl.load(moment_dot + row + begin + a, a_mask, 0.0)
                h_d_dot = tl.load(moment_dot + row + d, d_mask, 0.0)
                total += h_a_dot[:, None] * h_d[None, :] + h_a[:, None] * h_d_dot[None, :]
            else:
                total += h_a[:, None] * h_d[None, :]
        block_start = atom * axis * width + axis * begin
        index = block_start + a[:, None] * n_columns + (d - begin)[None, :]
        tl.store(squares + index, total / 3.0, a_mask[:, None] & d_mask[None, :])


@triton.jit
def symmetrize_adjoint_kernel(
    moment_bar,  # (atoms, 3, E + N), written
    moments,  # pairs × (atoms, 3, E + N)
    squares_bars,  # pairs × (atoms, axis·(E + N))
    axis: tl.constexpr,
    edge_columns: tl.constexpr,
    node_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """H̄_cd = Σ_pairs (Σ_a H_ca·Ḡ_ad + [d < axis]·Σ_e Ḡ_de·H_ce) / 3 in each block.

    The second sum is there because the first `axis` columns of H are factors on both sides.
    """
    width: tl.constexpr = edge_columns + node_columns
    atom = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, tile_rows)
    a_mask = a < axis
    for block in tl.static_range(2):
        begin, n_columns, d, d_mask = _block_columns(
            block, edge_columns, node_columns, tile_columns
        )
        block_start = atom * axis * width + axis * begin
        index = block_start + a[:, None] * n_columns + (d - begin)[None, :]
        block_mask = a_mask[:, None] & d_mask[None, :]
        same_column = a[:, None] == (d - begin)[None, :]
        for c in tl.static_range(3):
            row = (atom * 3 + c) * width
            total = tl.zeros([tile_columns], moment_bar.dtype.element_ty)
            for pair in tl.static_range(len(moments)):
                g_bar = tl.load(squares_bars[pair] + index, block_mask, 0.0)
                h_a = tl.load(moments[pair] + row + begin + a, a_mask, 0.0)
                h_d = tl.load(moments[pair] + row + d, d_mask, 0.0)
                as_right_factor = h_a[:, None] * g_bar
                row_sums = tl.sum(g_bar * h_d[None, :], 1)  # (tile_rows,): belongs to column d = a
                as_left_factor = tl.where(same_column, row_sums[:, None], 0.0)
                total += tl.sum(as_right_factor + as_left_factor, 0)
            tl.store(moment_bar + row + d, total / 3.0, d_mask)
