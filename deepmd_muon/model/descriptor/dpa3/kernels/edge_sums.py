"""The update of a DPA-3 layer's edges on a GPU: four passes of a few kernels each.

The update
----------
    e′ = α·e + ρ₀∘u + ρ₁∘f(h)
    h = m·W + b        for an atom's first edges, which have messages from angles
    h = b              for its other edges

| symbol | name            | shape                     | meaning                                  |
|--------|-----------------|---------------------------|------------------------------------------|
| e, e′  | `e`, `e_new`    | (atoms, slots, width)     | edge features before and after the layer |
| u      | `u`             | (atoms, slots, width)     | update of the edges, from `edges`        |
| m      | `m`             | (atoms·near, width)       | messages of angles, from `angles`        |
| W, b   | `weight`, `bias`| (width, width), (width,)  | linear layer on the messages             |
| h      | `h`             | (atoms·near, width)       | its output; the other edges have no row  |
| ρ      | `step_sizes`    | (width,) each             | two                                      |
| α      | `alpha`         | number                    | weight of the old features               |

The output e′ is called y in ȳ and ŷ. `four_passes` explains the passes and the accents: a bar
(`_bar`) is a derivative of the energy, a dot (`_dot`) a tangent, a hat (`_hat`) a derivative of the
loss.

Reference: `RepflowLayer._edge_features` computes the same from torch's operations when kernels
cannot run, and `test_nodes_and_edge_features_of_dpa3` compares all four passes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.kernels.shared import add_parts
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors
from deepmd_muon.model.nn.layer_kernels import curve

TILE_ELEMENTS = 2048  # elements of (atoms·slots, width) that one program computes

# ----- what the passes exchange ------------------------------------------------------------------


class EdgeSumInputs(NamedTuple):
    """The inputs of the operation; shapes are in the table above."""

    e: Tensor
    u: Tensor
    m: Tensor
    weight: Tensor
    bias: Tensor
    rho_u: Tensor
    rho_h: Tensor

    @property
    def step_sizes(self) -> tuple[Tensor, Tensor]:
        """ρ₀ and ρ₁."""
        return self.rho_u, self.rho_h


class AdjointSaved(NamedTuple):
    """What pass 2 hands over: the first two for pass 4, the others for pass 3."""

    y_bar: Tensor
    h_bar: Tensor
    h: Tensor
    weight: Tensor
    bias: Tensor
    rho_u: Tensor
    rho_h: Tensor


class TangentSaved(NamedTuple):
    """What pass 3 hands over to pass 4."""

    u_dot: Tensor
    m_dot: Tensor
    h_dot: Tensor


# ----- the operation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeSum(FourPasses):
    """The edge update of one layer; inputs are those of `EdgeSumInputs`, the output is e′.

    Attributes
    ----------
    activation
        f; it has a formula that kernels know.
    alpha
        α.
    near
        Edges of an atom that have messages, at least 1.
    """

    activation: Activation
    alpha: float
    near: int

    def value(self, edges: EdgeSumInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return e′."""
        h = torch.addmm(edges.bias, edges.m, edges.weight)
        e_new = torch.empty_like(edges.e)
        value_kernel[self._grid(e_new)](
            e_new=e_new,
            e=edges.e.contiguous(),
            u=edges.u.contiguous(),
            h=h,
            bias=edges.bias,
            step_sizes=edges.step_sizes,
            alpha=self.alpha,
            **self._common(e_new),
        )
        return (e_new,), (h,)

    def adjoint(
        self, cotangents: Any, edges: EdgeSumInputs, value_saved: Any
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return the adjoints of e, u and m."""
        (y_bar,) = cotangents
        (h,) = value_saved
        u_bar = torch.empty_like(y_bar)
        h_bar = torch.empty_like(h)
        adjoint_kernel[self._grid(y_bar)](
            u_bar=u_bar,
            h_bar=h_bar,
            y_bar=y_bar,
            h=h,
            bias=edges.bias,
            step_sizes=edges.step_sizes,
            **self._common(y_bar),
        )
        saved = AdjointSaved(
            y_bar=y_bar,
            h_bar=h_bar,
            h=h,
            weight=edges.weight,
            bias=edges.bias,
            rho_u=edges.rho_u,
            rho_h=edges.rho_h,
        )
        return (y_bar * self.alpha, u_bar, torch.mm(h_bar, edges.weight.t())), saved

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return the tangent of e′."""
        e_dot, u_dot, m_dot = tangents
        h_dot = torch.mm(m_dot, saved.weight)
        e_new_dot = torch.empty_like(e_dot)
        tangent_kernel[self._grid(e_dot)](
            e_new_dot=e_new_dot,
            e_dot=e_dot,
            u_dot=u_dot,
            h_dot=h_dot,
            h=saved.h,
            bias=saved.bias,
            step_sizes=(saved.rho_u, saved.rho_h),
            alpha=self.alpha,
            **self._common(e_dot),
        )
        return (e_new_dot,), TangentSaved(u_dot=u_dot, m_dot=m_dot, h_dot=h_dot)

    def gradient(
        self,
        cotangents: Any,
        edges: EdgeSumInputs,
        value_saved: Any,
        adjoint: AdjointSaved | None,
        tangent: TangentSaved | None,
    ) -> Nested:
        """Pass 4: return the gradients of all inputs in the order of `EdgeSumInputs`.

        Each is the gradient of ⟨ŷ, e′⟩ + ⟨ȳ, ė′⟩. The second term, from the loss on forces, is
        there only if passes 2 and 3 have run with tangents.
        """
        (y_hat,) = cotangents
        (h,) = value_saved
        grid = self._grid(y_hat)
        u_hat = torch.empty_like(y_hat)
        h_hat = torch.empty_like(h)
        sum_parts = h.new_empty(*grid, 3, h.shape[1])
        gradient_kernel[grid](
            u_hat=u_hat,
            h_hat=h_hat,
            sum_parts=sum_parts,
            y_hat=y_hat,
            # Dummies without forces: the kernel does not read them.
            y_bar=y_hat if adjoint is None else adjoint.y_bar,
            u=edges.u.contiguous(),
            u_dot=y_hat if tangent is None else tangent.u_dot,
            h=h,
            h_dot=h if tangent is None else tangent.h_dot,
            bias=edges.bias,
            step_sizes=edges.step_sizes,
            with_forces=tangent is not None,
            **self._common(y_hat),
        )
        ((bias_hat, rho_u_hat, rho_h_hat),) = add_parts(sum_parts)
        weight_hat = torch.mm(edges.m.t(), h_hat)
        if adjoint is not None and tangent is not None:
            weight_hat.addmm_(tangent.m_dot.t(), adjoint.h_bar)
        return EdgeSumInputs(
            e=y_hat if self.alpha == 1.0 else y_hat * self.alpha,
            u=u_hat,
            m=torch.mm(h_hat, edges.weight.t()),
            weight=weight_hat,
            bias=bias_hat,
            rho_u=rho_u_hat,
            rho_h=rho_h_hat,
        )

    # ----- launches ------------------------------------------------------------------------------

    def _grid(self, e: Tensor) -> tuple[int]:
        """Return the grid of a kernel on edge features like e."""
        n_atoms, n_slots, width = e.shape
        return (triton.cdiv(n_atoms * n_slots, _tile_rows(width)),)

    def _common(self, e: Tensor) -> dict[str, Any]:
        """Return the arguments that all kernels on edge features like e share."""
        assert self.activation.formula is not None
        n_atoms, n_slots, width = e.shape
        return {
            "n_edges": n_atoms * n_slots,
            "n_slots": n_slots,
            "n_near": self.near,
            "width": width,
            "tile_rows": _tile_rows(width),
            "tile_columns": triton.next_power_of_2(width),
            **self.activation.formula.kernel_arguments,
        }


def _tile_rows(width: int) -> int:
    """Return how many edges a program takes."""
    return int(max(1, TILE_ELEMENTS // triton.next_power_of_2(width)))


# ----- kernels: a program computes `tile_rows` rows of (atoms·slots, width) -----------------------
# Sizes that differ between batches are not specialized: Triton would compile a kernel again for
# each number of edges that 16 divides. They are factors or limits of rows alone, so that loads of
# columns are as wide without.


class Tile(NamedTuple):
    """The elements of a program (tile_rows, tile_columns), with h and ρ there."""

    index: Any  # in (atoms·slots, width)
    mask: Any  # which elements exist
    h_index: Any  # in the tensor h (atoms·near, width)
    h_mask: Any  # which elements have a place in the tensor h
    h: Any  # m·W + b, or b
    rho_u: Any  # (1, tile_columns)
    rho_h: Any  # (1, tile_columns)


@triton.jit
def _load_tile(
    h,
    bias,
    step_sizes,
    n_edges,
    n_slots,
    n_near,
    width,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Return the tile of this program."""
    # int64, since edges · width may exceed 2³¹.
    edge = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    column_mask = column < width
    slot = edge % n_slots
    is_near = slot < n_near
    h_index = ((edge // n_slots) * n_near + slot)[:, None] * width + column
    h_mask = ((edge < n_edges) & is_near)[:, None] & column_mask
    h_near = tl.load(h + h_index, h_mask, 0.0)
    return Tile(
        index=edge[:, None] * width + column,
        mask=(edge < n_edges)[:, None] & column_mask,
        h_index=h_index,
        h_mask=h_mask,
        h=tl.where(is_near[:, None], h_near, tl.load(bias + column, column_mask, 0.0)),
        rho_u=tl.load(step_sizes[0] + column, column_mask, 0.0),
        rho_h=tl.load(step_sizes[1] + column, column_mask, 0.0),
    )


@triton.jit(do_not_specialize=["n_edges", "n_slots", "n_near"])
def value_kernel(
    e_new,  # (atoms, slots, width), written
    e,  # (atoms, slots, width)
    u,  # (atoms, slots, width)
    h,  # (atoms·near, width)
    bias,  # (width,)
    step_sizes,  # 2 × (width,)
    n_edges,  # atoms·slots
    n_slots,
    n_near,
    width,
    alpha: tl.constexpr,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """e′ = α·e + ρ₀∘u + ρ₁∘f(h)."""
    tile = _load_tile(
        h=h,
        bias=bias,
        step_sizes=step_sizes,
        n_edges=n_edges,
        n_slots=n_slots,
        n_near=n_near,
        width=width,
        rows=tile_rows,
        columns=tile_columns,
    )
    total = alpha * tl.load(e + tile.index, tile.mask, 0.0)
    total += tile.rho_u * tl.load(u + tile.index, tile.mask, 0.0)
    f, _, _ = curve(tile.h, kind, curve_constants)
    tl.store(e_new + tile.index, total + tile.rho_h * f, tile.mask)


@triton.jit(do_not_specialize=["n_edges", "n_slots", "n_near"])
def adjoint_kernel(
    u_bar,  # (atoms, slots, width), written
    h_bar,  # (atoms·near, width), written
    y_bar,  # (atoms, slots, width)
    h,  # (atoms·near, width)
    bias,  # (width,)
    step_sizes,  # 2 × (width,)
    n_edges,  # atoms·slots
    n_slots,
    n_near,
    width,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """ū = ρ₀∘ȳ and h̄ = ρ₁∘f′(h)∘ȳ."""
    tile = _load_tile(
        h=h,
        bias=bias,
        step_sizes=step_sizes,
        n_edges=n_edges,
        n_slots=n_slots,
        n_near=n_near,
        width=width,
        rows=tile_rows,
        columns=tile_columns,
    )
    y_bar_value = tl.load(y_bar + tile.index, tile.mask, 0.0)
    tl.store(u_bar + tile.index, tile.rho_u * y_bar_value, tile.mask)
    _, slope, _ = curve(tile.h, kind, curve_constants)
    tl.store(h_bar + tile.h_index, tile.rho_h * slope * y_bar_value, tile.h_mask)


@triton.jit(do_not_specialize=["n_edges", "n_slots", "n_near"])
def tangent_kernel(
    e_new_dot,  # (atoms, slots, width), written
    e_dot,  # (atoms, slots, width)
    u_dot,  # (atoms, slots, width)
    h_dot,  # (atoms·near, width)
    h,  # (atoms·near, width)
    bias,  # (width,)
    step_sizes,  # 2 × (width,)
    n_edges,  # atoms·slots
    n_slots,
    n_near,
    width,
    alpha: tl.constexpr,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """ė′ = α·ė + ρ₀∘u̇ + ρ₁∘f′(h)∘ḣ; ḣ = 0 for edges without messages, since b has no tangent."""
    tile = _load_tile(
        h=h,
        bias=bias,
        step_sizes=step_sizes,
        n_edges=n_edges,
        n_slots=n_slots,
        n_near=n_near,
        width=width,
        rows=tile_rows,
        columns=tile_columns,
    )
    total = alpha * tl.load(e_dot + tile.index, tile.mask, 0.0)
    total += tile.rho_u * tl.load(u_dot + tile.index, tile.mask, 0.0)
    h_dot_value = tl.load(h_dot + tile.h_index, tile.h_mask, 0.0)
    _, slope, _ = curve(tile.h, kind, curve_constants)
    tl.store(e_new_dot + tile.index, total + tile.rho_h * slope * h_dot_value, tile.mask)


@triton.jit(do_not_specialize=["n_edges", "n_slots", "n_near"])
def gradient_kernel(
    u_hat,  # (atoms, slots, width), written
    h_hat,  # (atoms·near, width), written
    sum_parts,  # (programs, 3, width), written: gradients of b, ρ₀ and ρ₁
    y_hat,  # (atoms, slots, width)
    y_bar,  # (atoms, slots, width); read only with forces, as are all dots
    u,  # (atoms, slots, width)
    u_dot,  # (atoms, slots, width)
    h,  # (atoms·near, width)
    h_dot,  # (atoms·near, width)
    bias,  # (width,)
    step_sizes,  # 2 × (width,)
    n_edges,  # atoms·slots
    n_slots,
    n_near,
    width,
    curve_constants: tl.constexpr,
    kind: tl.constexpr,
    with_forces: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Differentiate ⟨ŷ, e′⟩ + ⟨ȳ, ė′⟩ by u, h, b and ρ.

    û = ρ₀∘ŷ, ĥ = ρ₁∘(f′(h)∘ŷ + f″(h)∘ḣ∘ȳ). The gradient of b is the sum of ĥ over all edges, also
    those without a row in h; that of ρ₀ the sum of u∘ŷ + u̇∘ȳ, that of ρ₁ of f(h)∘ŷ + f′(h)∘ḣ∘ȳ.
    """
    tile = _load_tile(
        h=h,
        bias=bias,
        step_sizes=step_sizes,
        n_edges=n_edges,
        n_slots=n_slots,
        n_near=n_near,
        width=width,
        rows=tile_rows,
        columns=tile_columns,
    )
    f, slope, bend = curve(tile.h, kind, curve_constants)
    y_hat_value = tl.load(y_hat + tile.index, tile.mask, 0.0)
    tl.store(u_hat + tile.index, tile.rho_u * y_hat_value, tile.mask)
    rho_u_terms = tl.load(u + tile.index, tile.mask, 0.0) * y_hat_value
    rho_h_terms = f * y_hat_value
    h_terms = slope * y_hat_value
    if with_forces:
        y_bar_value = tl.load(y_bar + tile.index, tile.mask, 0.0)
        rho_u_terms += tl.load(u_dot + tile.index, tile.mask, 0.0) * y_bar_value
        h_dot_y_bar = tl.load(h_dot + tile.h_index, tile.h_mask, 0.0) * y_bar_value
        rho_h_terms += slope * h_dot_y_bar
        h_terms += bend * h_dot_y_bar
    h_terms *= tile.rho_h
    tl.store(h_hat + tile.h_index, h_terms, tile.h_mask)
    # Rows beyond the last edge contribute nothing: ŷ and ȳ are loaded as 0 there.
    c = tl.arange(0, tile_columns)
    sums = sum_parts + tl.program_id(0) * 3 * width + c
    tl.store(sums, tl.sum(h_terms, 0), c < width)
    tl.store(sums + width, tl.sum(rho_u_terms, 0), c < width)
    tl.store(sums + 2 * width, tl.sum(rho_h_terms, 0), c < width)
