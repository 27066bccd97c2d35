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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from deepmd_muon.model.activation import Activation
from deepmd_muon.model.networks import Copies, LayerTensors, unflatten

CPU_BLOCK_ROWS = 1024  # edges in a block: values and derivatives of 1024 × 100 float64 features fill 1.6 MB


@dataclass
class _LayerTrace:
    """What the backward pass of one layer needs: its stacked input, activation and tangent before it."""

    stack: torch.Tensor
    keep: torch.Tensor
    tangent: torch.Tensor | None


@dataclass
class _Block:
    """A range of atoms, G (and G′) of its edges `(1 or 2, atoms, edges, M)`, and what every layer left behind."""

    here: slice
    features: torch.Tensor
    layers: list[_LayerTrace]


@dataclass
class Tape:
    """Shared by one `Gather` and its `Spread`: the blocks, and Ā once it is known.

    Attributes
    ----------
    activation, copies
        Of the network.
    tangent
        Whether G′ is wanted.
    trace
        Whether a backward pass may follow.
    """

    activation: Activation
    copies: tuple[Copies, ...]
    tangent: bool
    trace: bool
    blocks: list[_Block] = field(default_factory=list)
    adjoint: torch.Tensor | None = None


class _LayerGradient:
    """Sums up the gradient of one layer over blocks."""

    def __init__(self, layer: LayerTensors) -> None:
        self.matrix = torch.zeros_like(layer.matrix)
        self.bias = torch.zeros_like(layer.bias)
        self.idt = None if layer.idt is None else torch.zeros_like(layer.idt)


def _forward_layer(
    stack: torch.Tensor, layer: LayerTensors, copies: Copies, f: Activation, trace: list[_LayerTrace] | None
) -> torch.Tensor:
    """Map stacked (values, derivatives) `(1 or 2, rows, n_in)` to `(1 or 2, rows, n_out)`."""
    parts, rows, n_in = stack.shape
    z = torch.mm(stack.view(parts * rows, n_in), layer.matrix).view(parts, rows, -1)
    value, keep = f(z[0].add_(layer.bias))
    tangent = z[1] if parts == 2 else None
    if trace is not None:
        trace.append(_LayerTrace(stack, keep, tangent))
    outputs = [value if layer.idt is None else value * layer.idt]
    if tangent is not None:
        moved = f.times_slope(keep, tangent)
        outputs.append(moved if layer.idt is None else moved.mul_(layer.idt))
    out = torch.empty_like(z)
    for part, y in enumerate(outputs):
        if copies:
            shape = (rows, copies, n_in)
            torch.add(y.view(shape), stack[part].unsqueeze(1), out=out[part].view(shape))
        else:
            out[part].copy_(y)
    return out


def _backward_layer(
    cotangent: torch.Tensor,
    layer: LayerTensors,
    copies: Copies,
    f: Activation,
    trace: _LayerTrace,
    gradient: _LayerGradient,
    *,
    first: bool,
) -> torch.Tensor | None:
    """Add this layer's gradient and return the cotangent of its stacked input (None for the first layer's: data).

    `cotangent` is overwritten.
    """
    parts, rows, n_out = cotangent.shape
    n_in = layer.matrix.shape[0]
    skipped = None
    if not first and copies:
        skipped = torch.add(cotangent[..., :n_in], cotangent[..., n_in:]) if copies == 2 else cotangent.clone()
    if layer.idt is not None and gradient.idt is not None:
        gradient.idt += (f.value_of(trace.keep) * cotangent[0]).sum(0)
        if trace.tangent is not None:
            gradient.idt += f.times_slope(trace.keep, trace.tangent).mul_(cotangent[1]).sum(0)
        cotangent *= layer.idt
    f.pull_back_(trace.keep, trace.tangent, cotangent)
    gradient.bias += cotangent[0].sum(0)
    flat = cotangent.view(parts * rows, n_out)
    gradient.matrix.addmm_(trace.stack.view(parts * rows, n_in).t(), flat)
    if first:
        return None
    if skipped is None:
        return torch.mm(flat, layer.matrix.t()).view(parts, rows, n_in)
    skipped.view(parts * rows, n_in).addmm_(flat, layer.matrix.t())
    return skipped


def _blocks(rows: torch.Tensor) -> list[slice]:
    """Split the atoms of `rows` `(atoms, edges, 4)` into ranges that fit a cache."""
    atoms, edges, _ = rows.shape
    step = max(1, CPU_BLOCK_ROWS // max(1, edges)) if rows.device.type == "cpu" else max(1, atoms)
    return [slice(first, min(first + step, atoms)) for first in range(0, atoms, step)]


class Gather(torch.autograd.Function):
    """A = Σ R ⊗ G(s) over the edges of each atom, and the `link` through which `Spread` reaches back.

    Arguments: tape, s `(atoms, edges)`, R `(atoms, edges, 4)`, then matrix, bias, idt of every layer.
    Only the layers have a gradient: s and R are data.
    """

    @staticmethod
    def forward(ctx: Any, tape: Tape, s: torch.Tensor, rows: torch.Tensor, *flat: torch.Tensor | None) -> Any:
        """Return A `(atoms, 4, M)` and `link` (zeros like R, without memory)."""
        layers = unflatten(flat)
        out = rows.new_empty((rows.shape[0], 4, layers[-1].matrix.shape[1]))
        for here in _blocks(rows):
            values = s[here].reshape(1, -1, 1)
            stack = torch.cat([values, torch.ones_like(values)]) if tape.tangent else values
            trace: list[_LayerTrace] = []
            for layer, copies in zip(layers, tape.copies, strict=True):
                stack = _forward_layer(stack, layer, copies, tape.activation, trace if tape.trace else None)
            r = rows[here]
            features = stack.view(stack.shape[0], *r.shape[:2], -1)
            torch.bmm(r.transpose(1, 2), features[0], out=out[here])
            if tape.trace or tape.tangent:
                tape.blocks.append(_Block(here, features, trace))
        ctx.tape = tape
        ctx.save_for_backward(rows, *flat)
        return out, rows.new_zeros(()).expand(rows.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor, edge_cotangent: torch.Tensor) -> Any:
        """Return the gradient of every layer's tensors."""
        tape: Tape = ctx.tape
        rows, *flat = ctx.saved_tensors
        layers = unflatten(flat)
        gradients = [_LayerGradient(layer) for layer in layers]
        left, right, through_s = rows, cotangent, None
        if tape.adjoint is not None:
            left = torch.cat([rows, edge_cotangent], 2)
            right = torch.cat([cotangent, tape.adjoint], 1)
            through_s = rows * edge_cotangent[..., :1]
        for block in tape.blocks:
            here = block.here
            stack = torch.empty_like(block.features)
            torch.bmm(left[here], right[here], out=stack[0])
            if through_s is not None and tape.adjoint is not None:
                torch.bmm(through_s[here], tape.adjoint[here], out=stack[1])
            elif tape.tangent:
                stack[1].zero_()
            below: torch.Tensor | None = stack.view(stack.shape[0], -1, stack.shape[-1])
            for index in reversed(range(len(layers))):
                assert below is not None
                args = layers[index], tape.copies[index], tape.activation, block.layers[index], gradients[index]
                below = _backward_layer(below, *args, first=index == 0)
        return (None, None, None, *(part for g in gradients for part in (g.matrix, g.bias, g.idt)))


class Spread(torch.autograd.Function):
    """dE/drow of every edge from Ā = dE/dA: Ā·G, plus R·Ā·G′ on the first component, through which s enters.

    Arguments: tape, Ā `(atoms, 4, M)`, `link` of the matching `Gather`, R `(atoms, edges, 4)`.
    """

    @staticmethod
    def forward(ctx: Any, tape: Tape, adjoint: torch.Tensor, link: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return dE/drow `(atoms, edges, 4)`."""
        tape.adjoint = adjoint = adjoint.detach()  # with its graph it would keep itself alive
        out = torch.empty_like(rows)
        by_s = torch.empty_like(rows)
        for block in tape.blocks:
            here = block.here
            torch.bmm(block.features[0], adjoint[here].transpose(1, 2), out=out[here])
            torch.bmm(block.features[1], adjoint[here].transpose(1, 2), out=by_s[here])
        out[..., 0] += by_s.mul_(rows).sum(-1)
        ctx.tape = tape
        ctx.save_for_backward(rows)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        """Return the cotangent of Ā, and Ṙ for `Gather`."""
        tape: Tape = ctx.tape
        assert tape.adjoint is not None
        (rows,) = ctx.saved_tensors
        through_s = rows * cotangent[..., :1]
        out = torch.empty_like(tape.adjoint)
        for block in tape.blocks:
            here = block.here
            torch.bmm(cotangent[here].transpose(1, 2), block.features[0], out=out[here])
            out[here].baddbmm_(through_s[here].transpose(1, 2), block.features[1])
        return None, out, cotangent, None


# torch leaves `Function.apply` untyped.
gather: Callable[..., tuple[torch.Tensor, torch.Tensor]] = Gather.apply
spread: Callable[..., torch.Tensor] = Spread.apply
