"""The residual sums of a DPA-3 layer on a GPU: the updates of its nodes and of its edges.

The sum
-------
    y = α·x + Σ_k ρ_k∘m_k + Σ_l σ_l∘f(h_l)
    h_l = a_l·W_l + b_l     in the first slots of each atom, which have a row in a_l
    h_l = b_l               in its other slots

Nodes have one slot; m_k are messages of edges, a₀ = x and a₁ is the symmetrized moment. Edges have a
slot for each neighbour; m₀ is their own update, and a₀ are messages of angles, which only the
nearest edges have.

| symbol | name            | shape                | meaning                                   |
|--------|-----------------|----------------------|-------------------------------------------|
| x, y   | `x`, `y`        | (atoms·slots, width) | features before and after the layer       |
| m_k    | `terms`         | (atoms·slots, width) | K terms without activation                |
| a_l    | `arguments`     | (atoms·near, …)      | inputs of L linear layers                 |
| W, b   | `weights`, `biases` | (…, width), (width,) | of these layers                       |
| h_l    | `h`             | (atoms·near, width)  | a_l·W_l + b_l                             |
| ρ, σ   | `term_sizes`, `layer_sizes` | (width,) | step sizes                                |
| α      | `alpha`         | number               | weight of the old features                |

`four_passes` explains the passes and the accents: a bar (`_bar`) is a derivative of the energy, a
dot (`_dot`) a tangent, a hat (`_hat`) a derivative of the loss.

Reference: `RepflowLayer._nodes` and `_edge_features` compute the same from torch's operations when
kernels cannot run, and `test_nodes_and_edge_features_of_dpa3` compares all four passes with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.kernels.shared import add_parts, as_constexpr
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors
from deepmd_muon.model.nn.layer_kernels import curve

# Elements of (atoms·slots, width) that one program computes. Nodes are few: small tiles let all
# multiprocessors work on them.
EDGE_TILE = 2048
NODE_TILE = 256

# ----- what the passes exchange ------------------------------------------------------------------


class SumInputs(NamedTuple):
    """The inputs of the operation; shapes are in the table above."""

    x: Tensor
    terms: tuple[Tensor, ...]
    arguments: tuple[Tensor, ...]  # without that of the first layer if it is x
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    term_sizes: tuple[Tensor, ...]
    layer_sizes: tuple[Tensor, ...]


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: the first two for pass 4, the others for pass 3."""

    y_bar: Tensor
    h_bars: tuple[Tensor, ...]
    h: tuple[Tensor, ...]
    inputs: SumInputs


class TangentSaved(NamedTuple):
    """What pass 3 hands over to pass 4."""

    term_dots: tuple[Tensor, ...]
    argument_dots: tuple[Tensor, ...]  # of every layer
    h_dots: tuple[Tensor, ...]


# ----- the operation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidualSum(FourPasses):
    """The operation; inputs are those of `SumInputs`, the output is y.

    Attributes
    ----------
    activation
        f; it has a formula that kernels know.
    alpha
        α.
    slots, near
        Rows of an atom in x, and in the arguments.
    reads_x
        Whether a₀ is x.
    """

    activation: Activation
    alpha: float
    slots: int = 1
    near: int = 1
    reads_x: bool = False

    def value(self, inputs: SumInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return y."""
        arguments = self._all_arguments(inputs.x, inputs.arguments)
        layers = zip(inputs.biases, arguments, inputs.weights, strict=True)
        h = tuple(torch.addmm(bias, a, weight) for bias, a, weight in layers)
        y = inputs.x.new_empty(inputs.x.shape)
        push_kernel[self._grid(y)](
            y=y,
            x=inputs.x.contiguous(),
            terms=_contiguous(inputs.terms),
            h=h,
            h_dots=None,
            alpha=self.alpha,
            **self._common(y, inputs),
        )
        return (y,), h

    def adjoint(
        self, cotangents: Any, inputs: SumInputs, h: tuple[Tensor, ...]
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return the adjoints of x, of the terms and of the arguments."""
        (y_bar,) = cotangents
        term_bars = tuple(torch.empty_like(y_bar) for _ in inputs.terms)
        h_bars = tuple(torch.empty_like(x) for x in h)
        pull_kernel[self._grid(y_bar)](
            term_hats=term_bars,
            h_hats=h_bars,
            sum_parts=None,
            y_hat=y_bar,
            y_bar=None,
            terms=None,
            term_dots=None,
            h=h,
            h_dots=None,
            **self._common(y_bar, inputs),
        )
        x_bar, argument_bars = self._pull(y_bar, h_bars, inputs.weights)
        saved = AdjointSaved(y_bar=y_bar, h_bars=h_bars, h=h, inputs=inputs)
        return (x_bar, *term_bars, *argument_bars), saved

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return the tangent of y."""
        inputs = saved.inputs
        x_dot, *other_dots = tangents
        term_dots = tuple(other_dots[: len(inputs.terms)])
        argument_dots = self._all_arguments(x_dot, tuple(other_dots[len(inputs.terms) :]))
        h_dots = tuple(
            torch.mm(a_dot, weight)
            for a_dot, weight in zip(argument_dots, inputs.weights, strict=True)
        )
        y_dot = torch.empty_like(x_dot)
        push_kernel[self._grid(y_dot)](
            y=y_dot,
            x=x_dot,
            terms=term_dots,
            h=saved.h,
            h_dots=h_dots,
            alpha=self.alpha,
            **self._common(y_dot, inputs),
        )
        return (y_dot,), TangentSaved(term_dots, argument_dots, h_dots)

    def gradient(
        self,
        cotangents: Any,
        inputs: SumInputs,
        h: tuple[Tensor, ...],
        adjoint: AdjointSaved | None,
        tangent: TangentSaved | None,
    ) -> Nested:
        """Pass 4: return the gradients of all inputs in the order of `SumInputs`.

        Each is the gradient of ⟨ŷ, y⟩ + ⟨ȳ, ẏ⟩. The second term, from the loss on forces, is there
        only if passes 2 and 3 have run with tangents.
        """
        (y_hat,) = cotangents
        term_hats = tuple(torch.empty_like(y_hat) for _ in inputs.terms)
        h_hats = tuple(torch.empty_like(x) for x in h)
        n_layers = len(h)
        n_terms = len(term_hats)
        grid = self._grid(y_hat)
        sum_parts = y_hat.new_empty(*grid, 2 * n_layers + n_terms, y_hat.shape[1])
        pull_kernel[grid](
            term_hats=term_hats,
            h_hats=h_hats,
            sum_parts=sum_parts,
            y_hat=y_hat,
            y_bar=None if adjoint is None else adjoint.y_bar,
            terms=_contiguous(inputs.terms),
            term_dots=None if tangent is None else tangent.term_dots,
            h=h,
            h_dots=None if tangent is None else tangent.h_dots,
            **self._common(y_hat, inputs),
        )
        (sums,) = add_parts(sum_parts)
        bias_hats, term_size_hats, layer_size_hats = sums.split([n_layers, n_terms, n_layers])
        x_hat, argument_hats = self._pull(y_hat, h_hats, inputs.weights)
        arguments = self._all_arguments(inputs.x, inputs.arguments)
        weight_hats = [torch.mm(a.t(), h_hat) for a, h_hat in zip(arguments, h_hats, strict=True)]
        if adjoint is not None and tangent is not None:
            by_layer = zip(weight_hats, tangent.argument_dots, adjoint.h_bars, strict=True)
            for weight_hat, a_dot, h_bar in by_layer:
                weight_hat.addmm_(a_dot.t(), h_bar)
        return SumInputs(
            x=x_hat,
            terms=term_hats,
            arguments=argument_hats,
            weights=tuple(weight_hats),
            biases=tuple(bias_hats),
            term_sizes=tuple(term_size_hats),
            layer_sizes=tuple(layer_size_hats),
        )

    def _all_arguments(self, x: Tensor, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the input of every linear layer, or its tangent."""
        return (x, *arguments) if self.reads_x else arguments

    def _pull(
        self, y_bar: Tensor, h_bars: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the cotangents of x and of `SumInputs.arguments` from those of y and h."""
        layers = list(zip(h_bars, weights, strict=True))
        if self.reads_x:
            h_bar, weight = layers.pop(0)
            x_bar = torch.addmm(y_bar, h_bar, weight.t(), beta=self.alpha)
        else:
            x_bar = y_bar if self.alpha == 1.0 else y_bar * self.alpha
        return x_bar, tuple(torch.mm(h_bar, weight.t()) for h_bar, weight in layers)

    # ----- launches ------------------------------------------------------------------------------

    def _tile_rows(self, x: Tensor) -> int:
        """Return how many rows of features like x a program takes."""
        elements = EDGE_TILE if self.slots > 1 else NODE_TILE
        return int(max(1, elements // triton.next_power_of_2(x.shape[1])))

    def _grid(self, x: Tensor) -> tuple[int]:
        return (triton.cdiv(len(x), self._tile_rows(x)),)

    def _common(self, x: Tensor, inputs: SumInputs) -> dict[str, Any]:
        """Return the arguments that all kernels on features like x share."""
        assert self.activation.formula is not None
        width = x.shape[1]
        return {
            "biases": inputs.biases,
            "term_sizes": inputs.term_sizes,
            "layer_sizes": inputs.layer_sizes,
            "n_rows": len(x),
            "n_slots": self.slots,
            "n_near": self.near,
            "sizes": as_constexpr(
                Sizes(
                    width=width,
                    rows=self._tile_rows(x),
                    columns=triton.next_power_of_2(width),
                )
            ),
            **self.activation.formula.kernel_arguments,
        }


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)


# ----- kernels: a program computes some rows of (atoms·slots, width) ------------------------------
# Tuples hold a pointer for each term or layer; their lengths are known when a kernel is compiled, so
# that `static_range` unrolls. Sizes that differ between batches are not specialized: Triton would
# compile a kernel again for each number of rows that 16 divides.


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled: columns of x, rows and columns of a tile."""

    width: tl.constexpr
    rows: tl.constexpr
    columns: tl.constexpr


class Tile(NamedTuple):
    """The elements of a program (rows, columns)."""

    index: Any  # in (atoms·slots, width)
    mask: Any  # which exist
    h_index: Any  # in h (atoms·near, width)
    h_mask: Any  # which have a place in h
    is_near: Any  # (rows, 1): whether the slot has a row in h
    column: Any  # (1, columns)
    column_mask: Any  # (1, columns)


@triton.jit
def _open_tile(n_rows, n_slots, n_near, sizes):
    """Return the tile of this program."""
    # int64, since rows · width may exceed 2³¹.
    row = tl.program_id(0).to(tl.int64) * sizes.rows + tl.arange(0, sizes.rows)
    column = tl.arange(0, sizes.columns)[None, :]
    column_mask = column < sizes.width
    slot = row % n_slots
    is_near = slot < n_near
    h_row = (row // n_slots) * n_near + slot
    return Tile(
        index=row[:, None] * sizes.width + column,
        mask=(row < n_rows)[:, None] & column_mask,
        h_index=h_row[:, None] * sizes.width + column,
        h_mask=((row < n_rows) & is_near)[:, None] & column_mask,
        is_near=is_near[:, None],
        column=column,
        column_mask=column_mask,
    )


@triton.jit
def _load(tensor, tile):
    return tl.load(tensor + tile.index, tile.mask, 0.0)


@triton.jit
def _load_by_column(vector, tile):
    return tl.load(vector + tile.column, tile.column_mask, 0.0)


@triton.jit
def _load_h(h, bias, tile):
    """Load a·W + b where a has a row, b elsewhere."""
    near = tl.load(h + tile.h_index, tile.h_mask, 0.0)
    return tl.where(tile.is_near, near, _load_by_column(bias, tile))


@triton.jit(do_not_specialize=["n_rows", "n_slots", "n_near"])
def push_kernel(
    y,  # (atoms·slots, width), written
    x,  # (atoms·slots, width)
    terms,  # K × (atoms·slots, width)
    h,  # L × (atoms·near, width)
    h_dots,  # L × (atoms·near, width); None in pass 1. In pass 3, y, x and terms are tangents
    biases,  # L × (width,)
    term_sizes,  # K × (width,)
    layer_sizes,  # L × (width,)
    n_rows,  # atoms·slots
    n_slots,
    n_near,
    alpha: tl.constexpr,
    curve_constants: tl.constexpr,
    sizes,
    kind: tl.constexpr,
) -> None:
    """Write y = α·x + Σ_k ρ_k∘m_k + Σ_l σ_l∘f(h_l), or its tangent.

    ẏ = α·ẋ + Σ_k ρ_k∘ṁ_k + Σ_l σ_l∘f′(h_l)∘ḣ_l; ḣ = 0 in slots without a row, since b has none.
    """
    tile = _open_tile(n_rows, n_slots, n_near, sizes)
    total = alpha * _load(x, tile)
    for k in tl.static_range(len(terms)):
        total += _load_by_column(term_sizes[k], tile) * _load(terms[k], tile)
    for k in tl.static_range(len(h)):
        f, slope, _ = curve(_load_h(h[k], biases[k], tile), kind, curve_constants)
        if h_dots is not None:
            f = slope * tl.load(h_dots[k] + tile.h_index, tile.h_mask, 0.0)
        total += _load_by_column(layer_sizes[k], tile) * f
    tl.store(y + tile.index, total, tile.mask)


@triton.jit(do_not_specialize=["n_rows", "n_slots", "n_near"])
def pull_kernel(
    term_hats,  # K × (atoms·slots, width), written
    h_hats,  # L × (atoms·near, width), written
    sum_parts,  # (programs, 2L + K, width), written: gradients of b, ρ and σ; None in pass 2
    y_hat,  # (atoms·slots, width); in pass 2 ȳ, and all hats below are bars
    y_bar,  # (atoms·slots, width); None in pass 2, and without forces, as are all dots
    terms,  # K × (atoms·slots, width)
    term_dots,  # K × (atoms·slots, width)
    h,  # L × (atoms·near, width)
    h_dots,  # L × (atoms·near, width)
    biases,  # L × (width,)
    term_sizes,  # K × (width,)
    layer_sizes,  # L × (width,)
    n_rows,  # atoms·slots
    n_slots,
    n_near,
    curve_constants: tl.constexpr,
    sizes,
    kind: tl.constexpr,
) -> None:
    """Differentiate ⟨ŷ, y⟩ + ⟨ȳ, ẏ⟩ by m and h, and in pass 4 by b, ρ and σ.

    m̂ = ρ∘ŷ, ĥ = σ∘(f′(h)∘ŷ + f″(h)∘ḣ∘ȳ). The gradient of b is the sum of ĥ over all slots, also
    those without a row in h; that of ρ the sum of m∘ŷ + ṁ∘ȳ, that of σ of f(h)∘ŷ + f′(h)∘ḣ∘ȳ.
    """
    tile = _open_tile(n_rows, n_slots, n_near, sizes)
    n_terms: tl.constexpr = len(term_hats)
    n_layers: tl.constexpr = len(h)
    # Rows beyond the last contribute nothing to sums: ŷ and ȳ are loaded as 0 there.
    hat = _load(y_hat, tile)
    if y_bar is not None:
        bar = _load(y_bar, tile)
    if sum_parts is not None:
        sums = sum_parts + tl.program_id(0) * (2 * n_layers + n_terms) * sizes.width
    for k in tl.static_range(n_terms):
        tl.store(term_hats[k] + tile.index, _load_by_column(term_sizes[k], tile) * hat, tile.mask)
        if sum_parts is not None:
            size_terms = _load(terms[k], tile) * hat
            if y_bar is not None:
                size_terms += _load(term_dots[k], tile) * bar
            _store_sum(sums, n_layers + k, size_terms, sizes)
    for k in tl.static_range(n_layers):
        f, slope, bend = curve(_load_h(h[k], biases[k], tile), kind, curve_constants)
        h_hat = slope * hat
        size_terms = f * hat
        if y_bar is not None:
            h_dot_bar = tl.load(h_dots[k] + tile.h_index, tile.h_mask, 0.0) * bar
            h_hat += bend * h_dot_bar
            size_terms += slope * h_dot_bar
        h_hat *= _load_by_column(layer_sizes[k], tile)
        tl.store(h_hats[k] + tile.h_index, h_hat, tile.h_mask)
        if sum_parts is not None:
            _store_sum(sums, k, h_hat, sizes)
            _store_sum(sums, n_layers + n_terms + k, size_terms, sizes)


@triton.jit
def _store_sum(sums, number, values, sizes):
    """Store the sum over rows of (rows, columns)."""
    column = tl.arange(0, sizes.columns)
    tl.store(sums + number * sizes.width + column, tl.sum(values, 0), column < sizes.width)
