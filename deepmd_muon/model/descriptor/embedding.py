"""The embedding of se_e2_a and its two contractions, with the derivative as a forward-mode by-product.

An embedding net G maps one number s per edge to M features. The descriptor needs, per atom,

    A = Σ_edges R ⊗ G(s)                                   (4, M)

and its energy derivative, given Ā = dE/dA, needs per edge

    dE/dR = Ā·G(s)  and  dE/ds = R·Ā·G′(s).

Since s is a scalar, G and G′ = dG/ds come out of one pass in which every layer multiplies values and
derivatives stacked in one matrix. Forces are then plain forward arithmetic, and the gradient of a force
loss is ONE backward pass.

`Gather` computes A and `Spread` the edge derivative. In the backward pass both need cotangents of G and G′,
which are low-rank: with Ṙ the cotangent of dE/dR that arrives at `Spread`, and A̅ the one of A at `Gather`,

    cot(G) = R·A̅ + Ṙ·Ā      cot(G′) = Ṙ₀·R·Ā.

Forming them twice and adding would move two (edges, M) arrays through memory; so `Spread` hands only Ṙ back,
through a stand-in output of `Gather` (`link`), and `Gather` forms both in one product per atom. Work proceeds in
blocks of atoms small enough for a CPU's cache (one block on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepmd_muon.model.activation import Activation
from deepmd_muon.model.networks import Copies, LayerTensors

CPU_BLOCK_ROWS = 1024  # edges in a block: 1024 × 100 float64 values and derivatives are 1.6 MB


@dataclass
class _LayerTrace:
    """What the backward pass of one layer needs: its stacked input, activation and tangent before it."""

    stack: torch.Tensor
    keep: torch.Tensor
    tangent: torch.Tensor | None


@dataclass
class _Block:
    """A range of atoms, G (and G′) of its edges, and what every layer left behind."""

    first: int
    last: int
    features: torch.Tensor
    layers: list[_LayerTrace]


@dataclass
class Tape:
    """Shared by one `Gather` and its `Spread`: the blocks, and Ā once it is known."""

    activation: Activation
    copies: tuple[Copies, ...]
    tangent: bool
    trace: bool
    blocks: list[_Block] = field(default_factory=list)
    adjoint: torch.Tensor | None = None


def _forward_layer(
    stack: torch.Tensor, layer: LayerTensors, copies: Copies, activation: Activation, trace: list[_LayerTrace] | None
) -> torch.Tensor:
    """Map stacked (values, derivatives) `(1 or 2, rows, n_in)` to `(1 or 2, rows, n_out)`."""
    parts, rows, n_in = stack.shape
    n_out = layer.matrix.shape[1]
    z = torch.mm(stack.view(parts * rows, n_in), layer.matrix).view(parts, rows, n_out)
    value, keep = activation(z[0].add_(layer.bias))
    if trace is not None:
        trace.append(_LayerTrace(stack, keep, z[1] if parts == 2 else None))
    out = torch.empty_like(z)
    scaled = value if layer.idt is None else value * layer.idt
    slope = activation.slope(keep) if parts == 2 else None
    if slope is not None and layer.idt is not None:
        slope = slope * layer.idt
    if copies == 0:
        out[0].copy_(scaled)
        if slope is not None:
            torch.mul(slope, z[1], out=out[1])
        return out
    skip = stack.unsqueeze(2)
    shape = (rows, copies, n_in)
    torch.add(scaled.view(shape), skip[0], out=out[0].view(shape))
    if slope is not None:
        torch.addcmul(skip[1], slope.view(shape), z[1].view(shape), out=out[1].view(shape))
    return out


@dataclass
class _LayerGradient:
    matrix: torch.Tensor
    bias: torch.Tensor
    idt: torch.Tensor | None

    @classmethod
    def zeros_like(cls, layer: LayerTensors) -> _LayerGradient:
        idt = None if layer.idt is None else torch.zeros_like(layer.idt)
        return cls(torch.zeros_like(layer.matrix), torch.zeros_like(layer.bias), idt)


def _backward_layer(
    cotangent: torch.Tensor,
    layer: LayerTensors,
    copies: Copies,
    activation: Activation,
    trace: _LayerTrace,
    gradient: _LayerGradient,
    *,
    need_input: bool,
) -> torch.Tensor | None:
    """Add this layer's gradient and return the cotangent of its stacked input; `cotangent` is overwritten."""
    parts, rows, n_out = cotangent.shape
    n_in = layer.matrix.shape[0]
    below = None
    if need_input and copies:
        below = cotangent.view(parts, rows, copies, n_in).sum(2) if copies == 2 else cotangent.clone()
    slope = activation.slope(trace.keep)
    bend = None
    if trace.tangent is not None:
        bend = activation.curvature(trace.keep, slope).mul_(trace.tangent).mul_(cotangent[1])
    if layer.idt is not None and gradient.idt is not None:
        value = trace.keep if not activation.keeps_input else activation.value(trace.keep)
        gradient.idt += (value * cotangent[0]).sum(0)
        if trace.tangent is not None:
            gradient.idt += (slope * trace.tangent).mul_(cotangent[1]).sum(0)
        slope = slope * layer.idt
        bend = None if bend is None else bend.mul_(layer.idt)
    cotangent *= slope
    if bend is not None:
        cotangent[0] += bend
    gradient.bias += cotangent[0].sum(0)
    flat = cotangent.view(parts * rows, n_out)
    gradient.matrix.addmm_(trace.stack.view(parts * rows, n_in).t(), flat)
    if not need_input:
        return None
    if below is None:
        return torch.mm(flat, layer.matrix.t()).view(parts, rows, n_in)
    below.view(parts * rows, n_in).addmm_(flat, layer.matrix.t())
    return below


def _atoms_per_block(rows: torch.Tensor) -> int:
    if rows.device.type != "cpu":
        return max(1, rows.shape[0])
    return max(1, CPU_BLOCK_ROWS // max(1, rows.shape[1]))


def _unflatten(flat: Sequence[torch.Tensor | None]) -> list[LayerTensors]:
    return [LayerTensors(*flat[i : i + 3]) for i in range(0, len(flat), 3)]  # type: ignore[arg-type]  # idt may be None


class Gather(torch.autograd.Function):
    """A = Σ R ⊗ G(s) over the edges of each atom, and the `link` through which `Spread` reaches back.

    Arguments: tape, s `(atoms, edges)`, R `(atoms, edges, 4)`, then matrix, bias, idt of every layer.
    """

    @staticmethod
    def forward(ctx: Any, tape: Tape, s: torch.Tensor, rows: torch.Tensor, *flat: torch.Tensor | None) -> Any:  # noqa: D102 - see class
        layers = _unflatten(flat)
        atoms, edges = s.shape
        out = rows.new_zeros((atoms, 4, layers[-1].matrix.shape[1]))
        step = _atoms_per_block(rows)
        for first in range(0, atoms, step):
            last = min(first + step, atoms)
            values = s[first:last].reshape(-1, 1)
            stack = torch.stack([values, torch.ones_like(values)]) if tape.tangent else values.unsqueeze(0)
            trace: list[_LayerTrace] = []
            for layer, copies in zip(layers, tape.copies, strict=True):
                stack = _forward_layer(stack, layer, copies, tape.activation, trace if tape.trace else None)
            features = stack.view(stack.shape[0], last - first, edges, -1)
            torch.bmm(rows[first:last].transpose(1, 2), features[0], out=out[first:last])
            if tape.trace or tape.tangent:
                tape.blocks.append(_Block(first, last, features, trace))
        ctx.tape = tape
        ctx.save_for_backward(rows, *flat)
        return out, rows.new_zeros(()).expand(rows.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor, edge_cotangent: torch.Tensor) -> Any:  # noqa: D102 - see class
        tape: Tape = ctx.tape
        rows, *flat = ctx.saved_tensors
        layers = _unflatten(flat)
        gradients = [_LayerGradient.zeros_like(layer) for layer in layers]
        for block in tape.blocks:
            stack = Gather._feature_cotangent(tape, block, rows, cotangent, edge_cotangent)
            for index in reversed(range(len(layers))):
                below = _backward_layer(
                    stack,
                    layers[index],
                    tape.copies[index],
                    tape.activation,
                    block.layers[index],
                    gradients[index],
                    need_input=index > 0,
                )
                if below is not None:
                    stack = below
        return (None, None, None, *(part for g in gradients for part in (g.matrix, g.bias, g.idt)))

    @staticmethod
    def _feature_cotangent(
        tape: Tape, block: _Block, rows: torch.Tensor, cotangent: torch.Tensor, edge_cotangent: torch.Tensor
    ) -> torch.Tensor:
        """cot(G) and cot(G′) of one block, stacked `(1 or 2, rows, M)`."""
        here = slice(block.first, block.last)
        out = torch.empty_like(block.features)
        r = rows[here]
        if tape.adjoint is None:
            torch.bmm(r, cotangent[here], out=out[0])
            if tape.tangent:
                out[1].zero_()
        else:
            moved, adjoint = edge_cotangent[here], tape.adjoint[here]
            torch.bmm(torch.cat([r, moved], 2), torch.cat([cotangent[here], adjoint], 1), out=out[0])
            torch.bmm(r * moved[..., :1], adjoint, out=out[1])
        return out.view(out.shape[0], -1, out.shape[-1])


class Spread(torch.autograd.Function):
    """dE/drow of every edge from Ā = dE/dA: Ā·G, plus R·Ā·G′ on the first component, through which s enters.

    Arguments: tape, Ā `(atoms, 4, M)`, `link` of the matching `Gather`, R. Returns `(atoms, edges, 4)`.
    """

    @staticmethod
    def forward(ctx: Any, tape: Tape, adjoint: torch.Tensor, link: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # noqa: D102 - see class
        tape.adjoint = adjoint = adjoint.detach()  # with its graph it would keep itself alive
        out = torch.empty_like(rows)
        for block in tape.blocks:
            here = slice(block.first, block.last)
            a = adjoint[here].transpose(1, 2)
            torch.bmm(block.features[0], a, out=out[here])
            out[here, :, 0] += (rows[here] * torch.bmm(block.features[1], a)).sum(-1)
        ctx.tape = tape
        ctx.save_for_backward(rows)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # noqa: D102 - see class
        tape: Tape = ctx.tape
        (rows,) = ctx.saved_tensors
        assert tape.adjoint is not None  # noqa: S101 - set by forward
        out = torch.empty_like(tape.adjoint)
        through_s = rows * cotangent[..., :1]
        for block in tape.blocks:
            here = slice(block.first, block.last)
            torch.bmm(cotangent[here].transpose(1, 2), block.features[0], out=out[here])
            out[here].baddbmm_(through_s[here].transpose(1, 2), block.features[1])
        return None, out, cotangent, None
