"""The residual sums of a DPA-3 layer on a GPU: the updates of its nodes and of its edges.

The sum
-------
    y = α·x + Σ_k ρ_k∘m_k + Σ_l σ_l∘f(z_l)
    z_l = a_l·W_l + b_l     in the near slots, the first of each atom, which have a row in a_l
    z_l = b_l               in its other slots

Nodes have one slot, a near one; m_k are messages of edges, a₀ = x, and a₁ is the symmetrized
moment. Edges have a slot for each neighbour; m₀ is their own update, and a₀ are messages of angles,
which only the nearest edges have.

| symbol | name            | shape                | meaning                                   |
|--------|-----------------|----------------------|-------------------------------------------|
| x, y   | `x`, `y`        | (atoms·slots, width) | features before and after the layer       |
| m_k    | `terms`         | (atoms·slots, width) | K terms without activation                |
| a_l    | `layer_inputs`  | (atoms·near, …)      | inputs of L linear layers                 |
| W, b   | `weights`, `biases` | (…, width), (width,) | of these layers                       |
| z_l    | `z`             | (atoms·near, width)  | a_l·W_l + b_l                             |
| ρ, σ   | `term_steps`, `layer_steps` | (width,) | step sizes                                |
| α      | `alpha`         | number               | weight of the old features                |

In `edges` and `angles` y, m, a, W and ρ mean other things.

torch computes the products with W_l, kernels the rest. Passes 1 and 3 call `push_kernel` after the
products, passes 2 and 4 call `pull_kernel` before them. In pass 4, each program of `pull_kernel`
writes its part of the sums over rows, and `add_parts` adds the parts.

Passes and accents are those of `nn.four_passes`, except in `pull_kernel`: there a hat (`_hat`)
marks the derivatives that the running pass propagates, a bar (`_bar`) derivatives of the energy
that pass 4 reads. `_pull` writes bars for both passes; in pass 4 they are hats.

The kernels take contiguous tensors. x and the terms are made contiguous for them. z come from
torch.addmm, biases and step sizes are parameters or new, cotangents and tangents come contiguous.

Reference: `RepflowLayer._new_nodes` and `_new_edges` compute the same from torch's operations when
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
EDGE_ELEMENTS = 2048
NODE_ELEMENTS = 256

# ----- what the passes exchange ------------------------------------------------------------------


class ResidualSumInputs(NamedTuple):
    """The inputs of the operation; shapes are in the table above."""

    x: Tensor
    terms: tuple[Tensor, ...]
    layer_inputs: tuple[Tensor, ...]  # without that of the first layer if it reads x
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    term_steps: tuple[Tensor, ...]
    layer_steps: tuple[Tensor, ...]


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: the first two for pass 4, the others for pass 3."""

    y_bar: Tensor
    z_bars: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    inputs: ResidualSumInputs


class TangentSaved(NamedTuple):
    """What pass 3 hands over to pass 4."""

    term_dots: tuple[Tensor, ...]
    layer_input_dots: tuple[Tensor, ...]  # of every layer; ẋ first if the first layer reads x
    z_dots: tuple[Tensor, ...]


# ----- the operation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidualSum(FourPasses):
    """The operation; inputs are those of `ResidualSumInputs`, the output is y.

    Attributes
    ----------
    activation
        f; it has a formula that kernels know.
    alpha
        α.
    n_slots, n_near
        Rows of an atom in x, and in each layer's input.
    first_layer_reads_x
        Whether a₀ is x; then n_near is n_slots.
    """

    activation: Activation
    alpha: float
    n_slots: int = 1
    n_near: int = 1
    first_layer_reads_x: bool = False

    def value(self, inputs: ResidualSumInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return y."""
        layer_inputs = self._all_layer_inputs(inputs.x, inputs.layer_inputs)
        layers = zip(inputs.biases, layer_inputs, inputs.weights, strict=True)
        z = tuple(torch.addmm(bias, a, weight) for bias, a, weight in layers)
        y = inputs.x.new_empty(inputs.x.shape)
        push_kernel[self._grid(y)](
            y=y,
            x=inputs.x.contiguous(),
            terms=_contiguous(inputs.terms),
            z=z,
            z_dots=None,
            alpha=self.alpha,
            **self._launch_arguments(y, inputs),
        )
        return (y,), z

    def adjoint(
        self, cotangents: Any, inputs: ResidualSumInputs, z: tuple[Tensor, ...]
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return the adjoints of x, the terms and the inputs of layers."""
        (y_bar,) = cotangents
        term_bars = tuple(torch.empty_like(y_bar) for _ in inputs.terms)
        z_bars = tuple(torch.empty_like(z_l) for z_l in z)
        pull_kernel[self._grid(y_bar)](
            term_hats=term_bars,
            z_hats=z_bars,
            sum_parts=None,
            y_hat=y_bar,
            y_bar=None,
            terms=None,
            term_dots=None,
            z=z,
            z_dots=None,
            **self._launch_arguments(y_bar, inputs),
        )
        x_bar, layer_input_bars = self._pull(y_bar, z_bars, inputs.weights)
        saved = AdjointSaved(y_bar=y_bar, z_bars=z_bars, z=z, inputs=inputs)
        return (x_bar, *term_bars, *layer_input_bars), saved

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return the tangent of y."""
        inputs = saved.inputs
        x_dot, *other_dots = tangents
        term_dots = tuple(other_dots[: len(inputs.terms)])
        layer_input_dots = self._all_layer_inputs(x_dot, tuple(other_dots[len(inputs.terms) :]))
        z_dots = tuple(
            torch.mm(a_dot, weight)
            for a_dot, weight in zip(layer_input_dots, inputs.weights, strict=True)
        )
        y_dot = torch.empty_like(x_dot)
        push_kernel[self._grid(y_dot)](
            y=y_dot,
            x=x_dot,
            terms=term_dots,
            z=saved.z,
            z_dots=z_dots,
            alpha=self.alpha,
            **self._launch_arguments(y_dot, inputs),
        )
        return (y_dot,), TangentSaved(term_dots, layer_input_dots, z_dots)

    def gradient(
        self,
        cotangents: Any,
        inputs: ResidualSumInputs,
        z: tuple[Tensor, ...],
        adjoint_saved: AdjointSaved | None,
        tangent_saved: TangentSaved | None,
    ) -> Nested:
        """Pass 4: return the gradients of all inputs in the order of `ResidualSumInputs`.

        Each is the gradient of ⟨ŷ, y⟩ + ⟨ȳ, ẏ⟩. The second term is from the loss on forces.
        Without one pass 3 has not run, and `adjoint_saved` and `tangent_saved` are both None.
        """
        (y_hat,) = cotangents
        term_hats = tuple(torch.empty_like(y_hat) for _ in inputs.terms)
        z_hats = tuple(torch.empty_like(z_l) for z_l in z)
        n_layers = len(z)
        n_terms = len(term_hats)
        grid = self._grid(y_hat)
        n_sums = n_layers + n_terms + n_layers  # b̂, ρ̂ and σ̂
        sum_parts = y_hat.new_empty(*grid, n_sums, y_hat.shape[1])
        pull_kernel[grid](
            term_hats=term_hats,
            z_hats=z_hats,
            sum_parts=sum_parts,
            y_hat=y_hat,
            y_bar=None if adjoint_saved is None else adjoint_saved.y_bar,
            terms=_contiguous(inputs.terms),
            term_dots=None if tangent_saved is None else tangent_saved.term_dots,
            z=z,
            z_dots=None if tangent_saved is None else tangent_saved.z_dots,
            **self._launch_arguments(y_hat, inputs),
        )
        (sums,) = add_parts(sum_parts)
        bias_hats, term_step_hats, layer_step_hats = sums.split([n_layers, n_terms, n_layers])
        x_hat, layer_input_hats = self._pull(y_hat, z_hats, inputs.weights)
        layer_inputs = self._all_layer_inputs(inputs.x, inputs.layer_inputs)
        weight_hats = [
            torch.mm(a.t(), z_hat) for a, z_hat in zip(layer_inputs, z_hats, strict=True)
        ]
        if adjoint_saved is not None and tangent_saved is not None:
            by_layer = zip(
                weight_hats, tangent_saved.layer_input_dots, adjoint_saved.z_bars, strict=True
            )
            for weight_hat, a_dot, z_bar in by_layer:
                weight_hat.addmm_(a_dot.t(), z_bar)
        return ResidualSumInputs(
            x=x_hat,
            terms=term_hats,
            layer_inputs=layer_input_hats,
            weights=tuple(weight_hats),
            biases=tuple(bias_hats),
            term_steps=tuple(term_step_hats),
            layer_steps=tuple(layer_step_hats),
        )

    def _all_layer_inputs(self, x: Tensor, layer_inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the input of every linear layer, or its tangent."""
        return (x, *layer_inputs) if self.first_layer_reads_x else layer_inputs

    def _pull(
        self, y_bar: Tensor, z_bars: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the cotangents of x and of `layer_inputs` from those of y and z."""
        layers = list(zip(z_bars, weights, strict=True))
        if self.first_layer_reads_x:
            z_bar, weight = layers.pop(0)
            x_bar = torch.addmm(y_bar, z_bar, weight.t(), beta=self.alpha)
        else:
            # x̄ may be the tensor ȳ, which pass 2 saves too: nobody may write to it.
            x_bar = y_bar if self.alpha == 1.0 else y_bar * self.alpha
        return x_bar, tuple(torch.mm(z_bar, weight.t()) for z_bar, weight in layers)

    # ----- launches ------------------------------------------------------------------------------

    def _tile_rows(self, x: Tensor) -> int:
        """Return how many rows of features like x a program takes."""
        elements = EDGE_ELEMENTS if self.n_slots > 1 else NODE_ELEMENTS
        return int(max(1, elements // triton.next_power_of_2(x.shape[1])))

    def _grid(self, x: Tensor) -> tuple[int]:
        return (triton.cdiv(len(x), self._tile_rows(x)),)

    def _launch_arguments(self, x: Tensor, inputs: ResidualSumInputs) -> dict[str, Any]:
        """Return the arguments that all kernels on features like x share."""
        assert self.activation.formula is not None
        width = x.shape[1]
        return {
            "biases": inputs.biases,
            "term_steps": inputs.term_steps,
            "layer_steps": inputs.layer_steps,
            "n_rows": len(x),
            "n_slots": self.n_slots,
            "n_near": self.n_near,
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
# Tuples hold a pointer for each term or layer. Their lengths are known when a kernel is compiled, so
# that `static_range` unrolls. Sizes that differ between batches are not specialized: Triton would
# compile a kernel again for sizes that 16 divides, and again for 1.


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled."""

    width: tl.constexpr
    rows: tl.constexpr  # of a tile
    columns: tl.constexpr  # of a tile: a power of two that holds the width


class Tile(NamedTuple):
    """The elements of a program (rows, columns)."""

    index: Any  # int64, flat, in (atoms·slots, width)
    mask: Any  # false past the last row or column
    z_index: Any  # int64, flat, in z (atoms·near, width); invalid where `z_mask` is false
    z_mask: Any  # false also in slots without a row in z
    is_near: Any  # (rows, 1): whether the slot has a row in z
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
    z_row = (row // n_slots) * n_near + slot
    return Tile(
        index=row[:, None] * sizes.width + column,
        mask=(row < n_rows)[:, None] & column_mask,
        z_index=z_row[:, None] * sizes.width + column,
        z_mask=((row < n_rows) & is_near)[:, None] & column_mask,
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
def _load_z(z, bias, tile):
    """Load z: a·W + b in near slots, b elsewhere."""
    near = tl.load(z + tile.z_index, tile.z_mask, 0.0)
    return tl.where(tile.is_near, near, _load_by_column(bias, tile))


@triton.jit(do_not_specialize=["n_rows", "n_slots", "n_near"])
def push_kernel(
    y,  # (atoms·slots, width), written; ẏ in pass 3
    x,  # (atoms·slots, width); ẋ in pass 3
    terms,  # K × (atoms·slots, width); tangents in pass 3
    z,  # L × (atoms·near, width)
    z_dots,  # L × (atoms·near, width); None in pass 1
    biases,  # L × (width,)
    term_steps,  # K × (width,)
    layer_steps,  # L × (width,)
    n_rows,  # atoms·slots
    n_slots,
    n_near,
    alpha: tl.constexpr,
    sizes,  # Sizes
    kind: tl.constexpr,  # `kind` and `curve_constants` are those of `curve`
    curve_constants: tl.constexpr,
) -> None:
    """Write y = α·x + Σ_k ρ_k∘m_k + Σ_l σ_l∘f(z_l), or its tangent.

    ẏ = α·ẋ + Σ_k ρ_k∘ṁ_k + Σ_l σ_l∘f′(z_l)∘ż_l; ż = 0 in slots that are not near.
    """
    tile = _open_tile(n_rows, n_slots, n_near, sizes)
    total = alpha * _load(x, tile)
    for k in tl.static_range(len(terms)):
        total += _load_by_column(term_steps[k], tile) * _load(terms[k], tile)
    for layer in tl.static_range(len(z)):
        f, slope, _ = curve(_load_z(z[layer], biases[layer], tile), kind, curve_constants)
        if z_dots is None:
            update = f
        else:
            update = slope * tl.load(z_dots[layer] + tile.z_index, tile.z_mask, 0.0)  # ḟ
        total += _load_by_column(layer_steps[layer], tile) * update
    tl.store(y + tile.index, total, tile.mask)


@triton.jit(do_not_specialize=["n_rows", "n_slots", "n_near"])
def pull_kernel(
    term_hats,  # K × (atoms·slots, width), written
    z_hats,  # L × (atoms·near, width), written
    sum_parts,  # (programs, L + K + L, width), written: parts of b̂, ρ̂ and σ̂; None in pass 2
    y_hat,  # (atoms·slots, width)
    y_bar,  # (atoms·slots, width); None in pass 2, and without forces
    terms,  # K × (atoms·slots, width); None in pass 2
    term_dots,  # K × (atoms·slots, width); None if y_bar is
    z,  # L × (atoms·near, width)
    z_dots,  # L × (atoms·near, width); None if y_bar is
    biases,  # L × (width,)
    term_steps,  # K × (width,)
    layer_steps,  # L × (width,)
    n_rows,  # atoms·slots
    n_slots,
    n_near,
    sizes,  # Sizes
    kind: tl.constexpr,  # `kind` and `curve_constants` are those of `curve`
    curve_constants: tl.constexpr,
) -> None:
    """Write m̂ and ẑ, and in pass 4 b̂, ρ̂ and σ̂: derivatives of ⟨ŷ, y⟩ + ⟨ȳ, ẏ⟩.

    m̂ = ρ∘ŷ, ẑ = σ∘(f′(z)∘ŷ + f″(z)∘ż∘ȳ). Sums over all slots, also those that are not near:
    b̂ = Σ ẑ, ρ̂ = Σ (m∘ŷ + ṁ∘ȳ), σ̂ = Σ (f(z)∘ŷ + f′(z)∘ż∘ȳ).
    """
    tile = _open_tile(n_rows, n_slots, n_near, sizes)
    n_terms: tl.constexpr = len(term_hats)
    n_layers: tl.constexpr = len(z)
    # Rows beyond the last contribute nothing to sums: ŷ and ȳ are loaded as 0 there.
    hat = _load(y_hat, tile)
    if y_bar is not None:
        bar = _load(y_bar, tile)
    if sum_parts is not None:
        sums = sum_parts + tl.program_id(0) * (2 * n_layers + n_terms) * sizes.width
    for k in tl.static_range(n_terms):
        tl.store(term_hats[k] + tile.index, _load_by_column(term_steps[k], tile) * hat, tile.mask)
        if sum_parts is not None:
            step_hat = _load(terms[k], tile) * hat
            if y_bar is not None:
                step_hat += _load(term_dots[k], tile) * bar
            _store_sum(sums, n_layers + k, step_hat, sizes)
    for layer in tl.static_range(n_layers):
        f, slope, bend = curve(_load_z(z[layer], biases[layer], tile), kind, curve_constants)
        z_hat = slope * hat
        step_hat = f * hat
        if y_bar is not None:
            z_dot_bar = tl.load(z_dots[layer] + tile.z_index, tile.z_mask, 0.0) * bar  # ż∘ȳ
            z_hat += bend * z_dot_bar
            step_hat += slope * z_dot_bar
        z_hat *= _load_by_column(layer_steps[layer], tile)
        tl.store(z_hats[layer] + tile.z_index, z_hat, tile.z_mask)
        if sum_parts is not None:
            _store_sum(sums, layer, z_hat, sizes)
            _store_sum(sums, n_layers + n_terms + layer, step_hat, sizes)


@triton.jit
def _store_sum(sums, number, values, sizes):
    """Store the sum over rows of (rows, columns) as row `number` of this program's part."""
    column = tl.arange(0, sizes.columns)
    tl.store(sums + number * sizes.width + column, tl.sum(values, 0), column < sizes.width)
