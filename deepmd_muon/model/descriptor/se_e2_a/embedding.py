"""The sums of `se_e2_a` over the neighbours of an atom, and their contraction.

Sums
----
An embedding net G maps one number s per edge to M features. The descriptor needs, per atom,

    A = Σ_edges R ⊗ G(s)                                   (4, M)

and its energy derivative, from Ā = dE/dA, needs per edge

    dE/dR = Ā·G(s)  and  dE/ds = R·Ā·G′(s).

Since s is a scalar, one pass yields G and G′ = dG/ds: every layer multiplies values and derivatives
by s, stacked in one matrix `(2, edges, n)`. So forces are plain forward arithmetic, and the gradient
of a force loss is one backward pass. Without forces the stack has values alone `(1, edges, n)`.

Pass 1 (see `four_passes`) computes A, pass 2 the edge derivative. With Ṙ the tangent that arrives
in pass 3, and Â the gradient of A in pass 4, the layers get the gradients

    Ĝ = R·Â + Ṙ·Ā      Ĝ′ = Ṙ₀·R·Ā.

Forming the terms of Ĝ one after the other would move two (edges, M) arrays through memory; pass 4
forms both in one product per atom. Work proceeds in blocks of atoms that are small enough for a
CPU's cache, each as wide as its fullest atom needs (one block on a GPU).

All slots of `sel` count. An empty slot has the same row and s for every atom of a type. So the
slots beyond the width of a block enter as one edge, the stand-in, with its row multiplied by their
number.

Contraction
-----------
D = Aᵀ·A_axis with A_axis = A[:, :axis]. The bilinear form behind D, Aᵀ·B_axis + Bᵀ·A_axis, is
symmetric. Therefore one function, `pull`, is its adjoint in either argument. It maps A and D̄ to Ā;
in its own backward pass, it maps the cotangent of Ā, and D̄, to the cotangent of A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors
from deepmd_muon.model.nn.networks import Copies, LayerTensors

# Edges in a block. Between 512 and 4096 a step of the water example varies by 15 % on one core,
# where smaller blocks win (caches), and by 30 % on two, where larger blocks win (fewer joins of the
# threads).
CPU_BLOCK_ROWS = 2048

# ----- blocks -------------------------------------------------------------------------------------


class BlockPlan(NamedTuple):
    """Some atoms, and how many of their slots are computed; the slots beyond are empty."""

    atoms: Tensor | slice
    width: int


def plan_blocks(filled: np.ndarray, width: int, device: torch.device) -> list[BlockPlan]:
    """Split atoms into blocks: on a CPU as large as a cache, elsewhere a single one.

    On a CPU, atoms are sorted by falling number of neighbours. The batch has `width` neighbour
    slots; the first `filled` `(atoms,)` of them hold all neighbours of an atom.
    """
    if device.type != "cpu":
        return [BlockPlan(slice(None), width)]
    order = np.argsort(-filled, kind="stable")
    plans = []
    start = 0
    while start < len(order):
        fullest = int(filled[order[start]])
        stop = start + max(1, CPU_BLOCK_ROWS // (fullest + 1))
        plans.append(BlockPlan(torch.from_numpy(order[start:stop]), fullest))
        start = stop
    return plans


# ----- the sums -----------------------------------------------------------------------------------


class SumInputs(NamedTuple):
    """The inputs of `Sums`."""

    rows: Tensor  # R (atoms, edges, 4)
    empty: Tensor  # R of an empty slot (atoms, 4)
    layers: tuple[LayerTensors, ...]


@dataclass
class Sums(FourPasses):
    """A = Σ R ⊗ G(s) over all slots of each atom; in pass 2 dE/dR from Ā.

    Inputs: `SumInputs`. Output: A `(atoms, 4, M)`. Adjoint: dE/dR `(atoms, edges, 4)`, with
    R·Ā·G′ on the first component, through which s enters. Only the layers have a gradient: R is
    data, and s its first component.

    Attributes
    ----------
    plans
        The blocks.
    sel
        Slots that count; the batch may have fewer.
    activation, copies
        Of the network; `copies` of each layer, see `Copies`.
    force
        Whether pass 2 will be called, which needs G′.
    trace
        Whether a backward pass may follow.
    """

    plans: list[BlockPlan]
    sel: int
    activation: Activation
    copies: tuple[Copies, ...]
    force: bool
    trace: bool
    blocks: list[_Block] = field(default_factory=list)

    def value(self, inputs: SumInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return A."""
        rows, empty, layers = inputs
        a = rows.new_empty((rows.shape[0], 4, layers[-1].matrix.shape[1]))
        for plan in self.plans:
            s, block_rows = self._block_inputs(plan, rows, empty)
            stack = s.reshape(1, -1, 1)
            if self.force:
                stack = torch.cat([stack, torch.ones_like(stack)])  # ds/ds = 1
            traces: list[_LayerTrace] = []
            for layer, copies in zip(layers, self.copies, strict=True):
                stack = _forward_layer(
                    stack, layer, copies, self.activation, traces=traces if self.trace else None
                )
            features = stack.unflatten(1, s.shape)
            a[plan.atoms] = torch.bmm(block_rows.transpose(1, 2), features[0])
            if self.trace or self.force:
                block = _Block(
                    plan=plan,
                    has_stand_in=self.sel > plan.width,
                    rows=block_rows,
                    features=features,
                    traces=traces,
                )
                self.blocks.append(block)
        return (a,), ()

    def _block_inputs(self, plan: BlockPlan, rows: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        """Return s `(atoms, edges)` and R `(atoms, edges, 4)` of a block, the stand-in first."""
        edge_rows = rows[plan.atoms, : plan.width]
        missing = self.sel - plan.width
        if not missing:
            return edge_rows[..., 0], edge_rows
        stand_in = empty[plan.atoms].unsqueeze(1)
        s = torch.cat([stand_in[..., 0], edge_rows[..., 0]], dim=1)
        return s, torch.cat([stand_in * missing, edge_rows], dim=1)

    def adjoint(
        self, cotangents: Any, inputs: SumInputs, value_saved: Any
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return dE/dR, and save Ā."""
        (a_bar,) = cotangents
        out = torch.zeros_like(inputs.rows)
        for block in self.blocks:
            atoms, width = block.plan
            block_a_bar = a_bar[atoms].transpose(1, 2)
            rows_bar = torch.bmm(block.edge_features(0), block_a_bar)
            through_s = torch.bmm(block.edge_features(1), block_a_bar).mul_(block.edge_rows)
            rows_bar[..., 0] += through_s.sum(-1)
            out[atoms, :width] = rows_bar
        return (out,), (a_bar,)

    def tangent(self, tangents: Any, adjoint_saved: Any) -> tuple[Perhaps, Nested]:
        """Pass 3: return Ȧ, and save Ṙ."""
        (rows_dot,) = tangents
        (a_bar,) = adjoint_saved
        a_dot = torch.empty_like(a_bar)
        for block in self.blocks:
            atoms, width = block.plan
            block_rows_dot = rows_dot[atoms, :width]
            through_s = block.edge_rows * block_rows_dot[..., :1]
            sums = torch.bmm(block_rows_dot.transpose(1, 2), block.edge_features(0))
            a_dot[atoms] = sums.baddbmm_(through_s.transpose(1, 2), block.edge_features(1))
        return (a_dot,), (rows_dot,)

    def gradient(
        self,
        cotangents: Any,
        inputs: SumInputs,
        value_saved: Any,
        adjoint_saved: Any,
        tangent_saved: Any,
    ) -> Nested:
        """Pass 4: return the gradient of every layer's tensors."""
        (a_hat,) = cotangents
        layers = inputs.layers
        gradients = tuple(
            LayerTensors(
                matrix=torch.zeros_like(layer.matrix),
                bias=torch.zeros_like(layer.bias),
                idt=None if layer.idt is None else torch.zeros_like(layer.idt),
            )
            for layer in layers
        )
        a_bar = None if adjoint_saved is None else adjoint_saved[0]
        rows_dot = None if tangent_saved is None else tangent_saved[0]
        if a_hat is None:  # the loss depends on A through forces alone
            assert a_bar is not None
            a_hat = torch.zeros_like(a_bar)
        for block in self.blocks:
            y_hat = _features_hat(block, a_hat, a_bar, rows_dot)
            for index in reversed(range(1, len(layers))):
                y_hat = _backward_layer(
                    y_hat,
                    layers[index],
                    self.copies[index],
                    self.activation,
                    trace=block.traces[index],
                    gradient=gradients[index],
                )
            # The input of the first layer, s, has no gradient.
            _backward_activation(
                y_hat, layers[0], self.activation, trace=block.traces[0], gradient=gradients[0]
            )
        return None, None, gradients


def _features_hat(
    block: _Block, a_hat: Tensor, a_bar: Tensor | None, rows_dot: Tensor | None
) -> Tensor:
    """Return Ĝ and Ĝ′ of a block, stacked `(1 or 2, edges, M)`; see the module."""
    atoms, width = block.plan
    out = torch.empty_like(block.features)
    if a_bar is None or rows_dot is None:  # no loss on forces
        torch.bmm(block.rows, a_hat[atoms], out=out[0])
        out[1:].zero_()
    else:
        block_rows_dot = rows_dot[atoms, :width]
        if block.has_stand_in:  # its Ṙ is 0: an empty slot does not depend on positions
            block_rows_dot = torch.nn.functional.pad(block_rows_dot, (0, 0, 1, 0))
        block_a_bar = a_bar[atoms]
        torch.bmm(
            torch.cat([block.rows, block_rows_dot], 2),
            torch.cat([a_hat[atoms], block_a_bar], 1),
            out=out[0],
        )
        torch.bmm(block.rows * block_rows_dot[..., :1], block_a_bar, out=out[1])
    return out.flatten(1, 2)


class _LayerTrace(NamedTuple):
    """Tensors for the backward pass of one layer, f(h) with h = x·matrix + bias.

    Attributes
    ----------
    stack
        Its input x, and dx/ds if forces are needed `(1 or 2, edges, n_in)`.
    keep
        What the derivatives of f need `(edges, n)`.
    h_dot
        dh/ds `(edges, n)`; None without forces.
    """

    stack: Tensor
    keep: Tensor
    h_dot: Tensor | None


@dataclass
class _Block:
    """Tensors of a block that later passes read.

    Attributes
    ----------
    plan
        The atoms.
    has_stand_in
        Whether edge 0 is the stand-in for missing slots.
    rows
        R `(atoms, edges, 4)`.
    features
        G, and G′ if forces are needed `(1 or 2, atoms, edges, M)`.
    traces
        Of each layer, if a backward pass may follow.
    """

    plan: BlockPlan
    has_stand_in: bool
    rows: Tensor
    features: Tensor
    traces: list[_LayerTrace]

    @property
    def edge_rows(self) -> Tensor:
        """R without the stand-in."""
        return self.rows[:, 1:] if self.has_stand_in else self.rows

    def edge_features(self, order: int) -> Tensor:
        """G (order 0) or G′ (order 1) without the stand-in."""
        return self.features[order, :, 1:] if self.has_stand_in else self.features[order]


# ----- layers of stacked values and derivatives ---------------------------------------------------


def _forward_layer(
    stack: Tensor,
    layer: LayerTensors,
    copies: Copies,
    f: Activation,
    traces: list[_LayerTrace] | None,
) -> Tensor:
    """Map the stacked input `(1 or 2, edges, n_in)` of a layer to its output `(…, n_out)`.

    Append to `traces` what the backward pass reads.
    """
    n_stacked, n_edges, n_in = stack.shape
    flat = torch.mm(stack.view(n_stacked * n_edges, n_in), layer.matrix)
    h = flat.view(n_stacked, n_edges, layer.matrix.shape[1])
    value, keep = f(h[0].add_(layer.bias))  # may overwrite h[0]
    h_dot = h[1] if n_stacked == 2 else None
    if traces is not None:
        traces.append(_LayerTrace(stack, keep, h_dot))
    outputs = [value if layer.idt is None else value * layer.idt]
    if h_dot is not None:
        value_dot = f.times_slope(keep, h_dot)
        outputs.append(value_dot if layer.idt is None else value_dot.mul_(layer.idt))
    out = torch.empty_like(h)
    for number, y in enumerate(outputs):
        if copies:
            shape = (n_edges, copies, n_in)  # the copies are side by side in the output
            torch.add(y.view(shape), stack[number].unsqueeze(1), out=out[number].view(shape))
        else:
            out[number].copy_(y)
    return out


def _backward_layer(
    y_hat: Tensor,
    layer: LayerTensors,
    copies: Copies,
    f: Activation,
    trace: _LayerTrace,
    gradient: LayerTensors,
) -> Tensor:
    """Add to a layer's gradient; return the gradient of its stacked input. Overwrites `y_hat`."""
    n_stacked, n_edges, _ = y_hat.shape
    n_in = layer.matrix.shape[0]
    through_copies = None
    if copies == 2:
        through_copies = torch.add(y_hat[..., :n_in], y_hat[..., n_in:])
    elif copies:
        through_copies = y_hat.clone()
    flat = _backward_activation(y_hat, layer, f, trace, gradient)
    if through_copies is None:
        return torch.mm(flat, layer.matrix.t()).view(n_stacked, n_edges, n_in)
    through_copies.view(n_stacked * n_edges, n_in).addmm_(flat, layer.matrix.t())
    return through_copies


def _backward_activation(
    y_hat: Tensor, layer: LayerTensors, f: Activation, trace: _LayerTrace, gradient: LayerTensors
) -> Tensor:
    """Add to a layer's gradient; turn `y_hat` in place into ĥ `(stacked·edges, n_out)`."""
    if layer.idt is not None and gradient.idt is not None:
        gradient.idt.add_((f.value_of(trace.keep) * y_hat[0]).sum(0))
        if trace.h_dot is not None:
            gradient.idt.add_(f.times_slope(trace.keep, trace.h_dot).mul_(y_hat[1]).sum(0))
        y_hat *= layer.idt
    f.pull_back_(trace.keep, trace.h_dot, y_hat)
    gradient.bias.add_(y_hat[0].sum(0))
    flat = y_hat.view(-1, y_hat.shape[2])
    gradient.matrix.addmm_(trace.stack.view(-1, trace.stack.shape[2]).t(), flat)
    return flat


# ----- the contraction ----------------------------------------------------------------------------


class Contract(torch.autograd.Function):
    """D from A, differentiable once."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, axis: int) -> Tensor:
        """Return D `(natoms, M, axis)`."""
        ctx.save_for_backward(a)
        if triton_support.usable(a.device):
            from deepmd_muon.model.descriptor.se_e2_a import kernels

            return kernels.contract(a, axis)
        return torch.bmm(a.transpose(1, 2), a[:, :, :axis])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_bar: Tensor) -> Any:
        """Return Ā."""
        (a,) = ctx.saved_tensors
        return pull(a, d_bar), None


class PullContraction(torch.autograd.Function):
    """`pull`, differentiable once in both arguments."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, d_bar: Tensor) -> Tensor:
        """Return Ā `(natoms, 4, M)`."""
        ctx.save_for_backward(a, d_bar)
        return pull(a, d_bar)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a_dot: Tensor) -> Any:
        """Return the gradients of A and D̄ from the cotangent of Ā."""
        a, d_bar = ctx.saved_tensors
        axis = d_bar.shape[2]
        d_dot = torch.bmm(a_dot.transpose(1, 2), a[:, :, :axis])
        d_dot.baddbmm_(a.transpose(1, 2), a_dot[:, :, :axis])
        return pull(a_dot, d_bar), d_dot


def pull(a: Tensor, d_bar: Tensor) -> Tensor:
    """Return Ā `(natoms, 4, M)` from A and D̄ `(natoms, M, axis)`; see the module."""
    if triton_support.usable(a.device):
        from deepmd_muon.model.descriptor.se_e2_a import kernels

        return kernels.pull_contraction(a, d_bar)
    axis = d_bar.shape[2]
    a_bar = torch.bmm(a[:, :, :axis], d_bar.transpose(1, 2))
    a_bar[:, :, :axis].baddbmm_(a, d_bar)
    return a_bar


# torch leaves `apply` untyped.
contract: Callable[[Tensor, int], Tensor] = Contract.apply
pull_contraction: Callable[[Tensor, Tensor], Tensor] = PullContraction.apply
