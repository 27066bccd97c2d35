"""The embedding of se_e2_a and its two contractions, with the derivative as a forward-mode by-product.

An embedding net G maps one number s per edge to M features. The descriptor needs, per atom,

    A = Σ_edges R ⊗ G(s)                                   (4, M)

and its energy derivative, given Ā = dE/dA, needs per edge

    dE/dR = Ā·G(s)  and  dE/ds = R·Ā·G′(s).

Since s is a scalar, G and G′ = dG/ds come out of one pass in which every layer multiplies values and
derivatives stacked in one matrix. Forces are then plain forward arithmetic, and the gradient of a force
loss is ONE backward pass.

Pass 1 (see `four_passes`) computes A, pass 2 the edge derivative. The gradient of the layers needs cotangents of G and
G′, which are low-rank: with Ṙ the cotangent of dE/dR that arrives in pass 3, and A̅ the one of A in pass 4,

    cot(G) = R·A̅ + Ṙ·Ā      cot(G′) = Ṙ₀·R·Ā.

Forming them twice and adding would move two (edges, M) arrays through memory; so pass 4 forms both in one product per
atom. Work proceeds in blocks of atoms small enough for a CPU's cache, each as wide as its fullest atom needs (one block
on a GPU).

All slots of `sel` count. An empty one has the same row and s for every atom of a type, so those beyond a
block's width enter as one edge whose row is multiplied with their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors
from deepmd_muon.model.nn.networks import Copies, LayerTensors, unflatten

# Edges in a block. Between 512 and 4096 a step of the water example varies by 15 % on one core, where smaller
# blocks win (caches), and by 30 % on two, where larger ones do (fewer joins of the threads).
CPU_BLOCK_ROWS = 2048


class BlockPlan(NamedTuple):
    """Some atoms, and how many of their neighbour slots are looked at; the slots beyond are empty."""

    atoms: torch.Tensor | slice
    width: int


def plan_blocks(filled: np.ndarray, width: int, device: torch.device) -> list[BlockPlan]:
    """Split atoms into blocks: on a CPU by falling number of neighbours and as large as a cache, elsewhere one.

    The first `filled` of the `width` neighbour slots of a batch hold all neighbours of an atom `(atoms,)`.
    """
    if device.type != "cpu":
        return [BlockPlan(slice(None), width)]
    order = np.argsort(-filled, kind="stable")
    plans, first = [], 0
    while first < len(order):
        fullest = int(filled[order[first]])
        last = first + max(1, CPU_BLOCK_ROWS // (fullest + 1))
        plans.append(BlockPlan(torch.from_numpy(order[first:last]), fullest))
        first = last
    return plans


@dataclass
class _LayerTrace:
    """Tensors for the backward pass of one layer: its stacked input, activation and tangent before it."""

    stack: torch.Tensor
    keep: torch.Tensor
    tangent: torch.Tensor | None


@dataclass
class _Block:
    """R `(atoms, edges, 4)` of a block, its G (and G′) `(1 or 2, atoms, edges, M)`, and each layer's trace.

    When slots are missing, edge 0 stands for all of them, its row multiplied with their number.
    """

    plan: BlockPlan
    missing: bool
    rows: torch.Tensor
    features: torch.Tensor
    layers: list[_LayerTrace]

    @property
    def real(self) -> torch.Tensor:
        """R without the stand-in."""
        return self.rows[:, 1:] if self.missing else self.rows

    def real_features(self, part: int) -> torch.Tensor:
        """G (part 0) or G′ (part 1) without the stand-in."""
        return self.features[part, :, 1:] if self.missing else self.features[part]


def _forward_layer(
    stack: torch.Tensor,
    layer: LayerTensors,
    copies: Copies,
    f: Activation,
    trace: list[_LayerTrace] | None,
) -> torch.Tensor:
    """Map stacked (values, derivatives) `(1 or 2, rows, n_in)` to `(1 or 2, rows, n_out)`."""
    parts, rows, n_in = stack.shape
    z = torch.mm(stack.view(parts * rows, n_in), layer.matrix).view(
        parts, rows, layer.matrix.shape[1]
    )
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
    gradient: LayerTensors,
    *,
    first: bool,
) -> torch.Tensor | None:
    """Add to this layer's gradient and return the cotangent of its stacked input (None for the first layer's: data).

    `cotangent` is overwritten.
    """
    parts, rows, n_out = cotangent.shape
    n_in = layer.matrix.shape[0]
    skipped = None
    if not first and copies:
        skipped = (
            torch.add(cotangent[..., :n_in], cotangent[..., n_in:])
            if copies == 2
            else cotangent.clone()
        )
    if layer.idt is not None and gradient.idt is not None:
        gradient.idt.add_((f.value_of(trace.keep) * cotangent[0]).sum(0))
        if trace.tangent is not None:
            gradient.idt.add_(f.times_slope(trace.keep, trace.tangent).mul_(cotangent[1]).sum(0))
        cotangent *= layer.idt
    f.pull_back_(trace.keep, trace.tangent, cotangent)
    gradient.bias.add_(cotangent[0].sum(0))
    flat = cotangent.view(parts * rows, n_out)
    gradient.matrix.addmm_(trace.stack.view(parts * rows, n_in).t(), flat)
    if first:
        return None
    if skipped is None:
        return torch.mm(flat, layer.matrix.t()).view(parts, rows, n_in)
    skipped.view(parts * rows, n_in).addmm_(flat, layer.matrix.t())
    return skipped


def _inputs(
    sums: Sums, plan: BlockPlan, rows: torch.Tensor, empty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s `(atoms, edges)` and R `(atoms, edges, 4)` of a block, the stand-in for missing slots first."""
    r = rows[plan.atoms, : plan.width]
    missing = sums.sel - plan.width
    if not missing:
        return r[..., 0], r
    stand_in = empty[plan.atoms].unsqueeze(1)
    s = torch.cat([stand_in[..., 0], r[..., 0]], dim=1)
    return s, torch.cat([stand_in * missing, r], dim=1)


@dataclass
class Sums(FourPasses):
    """A = Σ R ⊗ G(s) over all slots of each atom; in pass 2 dE/dR from Ā = dE/dA.

    Inputs: R `(atoms, edges, 4)`, R of an empty slot `(atoms, 4)`, then matrix, bias, idt of every layer. Output: A
    `(atoms, 4, M)`. Adjoint: dE/drow `(atoms, edges, 4)`, with R·Ā·G′ on the first component, through which s enters.
    Only the layers have a gradient: R is data, and s its first component.

    Attributes
    ----------
    plans
        The blocks.
    sel
        Slots that count, of which the batch may have fewer.
    activation, copies
        Of the network.
    force
        Whether pass 2 will be asked for, which needs G′.
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

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        rows, empty, *flat = given
        (layers,) = unflatten(flat)
        out = rows.new_empty((rows.shape[0], 4, layers[-1].matrix.shape[1]))
        for plan in self.plans:
            s, r = _inputs(self, plan, rows, empty)
            values = s.reshape(1, -1, 1)
            stack = torch.cat([values, torch.ones_like(values)]) if self.force else values
            trace: list[_LayerTrace] = []
            for layer, copies in zip(layers, self.copies, strict=True):
                stack = _forward_layer(
                    stack, layer, copies, self.activation, trace if self.trace else None
                )
            features = stack.unflatten(1, s.shape)
            out[plan.atoms] = torch.bmm(r.transpose(1, 2), features[0])
            if self.trace or self.force:
                self.blocks.append(_Block(plan, self.sel > plan.width, r, features, trace))
        return (out,), ()

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return dE/drow, and Ā."""
        (adjoint,) = cotangents
        out = torch.zeros_like(given[0])
        for block in self.blocks:
            atoms, width = block.plan
            a = adjoint[atoms].transpose(1, 2)
            slope = torch.bmm(block.real_features(0), a)
            slope[..., 0] += torch.bmm(block.real_features(1), a).mul_(block.real).sum(-1)
            out[atoms, :width] = slope
        return (out,), cotangents

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of A, and Ṙ."""
        out = torch.empty_like(left[0])
        for block in self.blocks:
            atoms, width = block.plan
            moved = tangents[0][atoms, :width]
            sums = torch.bmm(moved.transpose(1, 2), block.real_features(0))
            out[atoms] = sums.baddbmm_(
                (block.real * moved[..., :1]).transpose(1, 2), block.real_features(1)
            )
        return (out,), tangents

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """Return the gradient of every layer's tensors."""
        (layers,) = unflatten(given[2:])
        above = left[0].new_zeros(left[0].shape) if cotangents[0] is None else cotangents[0]
        found = [None if x is None else torch.zeros_like(x) for x in given[2:]]
        (gradients,) = unflatten(found)
        for block in self.blocks:
            below: torch.Tensor | None = _feature_cotangent(block, above, left, moved)
            for index in reversed(range(len(layers))):
                assert below is not None
                args = (
                    layers[index],
                    self.copies[index],
                    self.activation,
                    block.layers[index],
                    gradients[index],
                )
                below = _backward_layer(below, *args, first=index == 0)
        return None, None, *found


def _feature_cotangent(
    block: _Block, cotangent: torch.Tensor, left: Tensors | None, moved: Tensors | None
) -> torch.Tensor:
    """Cotangents of G and G′ of a block, stacked `(1 or 2, rows, M)`."""
    atoms, width = block.plan
    out = torch.empty_like(block.features)
    if left is None or moved is None:
        torch.bmm(block.rows, cotangent[atoms], out=out[0])
        out[1:].zero_()
    else:
        along = moved[0][atoms, :width]
        if block.missing:
            along = torch.nn.functional.pad(along, (0, 0, 1, 0))
        adjoint = left[0][atoms]
        torch.bmm(
            torch.cat([block.rows, along], 2), torch.cat([cotangent[atoms], adjoint], 1), out=out[0]
        )
        torch.bmm(block.rows * along[..., :1], adjoint, out=out[1])
    return out.flatten(1, 2)
