"""The angle part of a DPA-3 layer: messages from angles to edges and the update of the angles.

For the neighbours j, k of one atom, with the switches s and per-edge terms t computed before (see `layer`),

    z_jk = a_jk·W + u_j + t_k,   y = f(z),   m_j = s_j·Σ_k s_k·y_jk[:width],   a′_jk = α·a_jk + ρ∘y_jk[width:].

Forces need the adjoints of this, a force loss the gradient of these adjoints. The four passes (see `four_passes`) run
block by block in a CPU's cache, with only a, the adjoint of a′ and the tangent of a kept between them:

1. `value`: m and a′;
2. `adjoint`: z̄ = f′(z)·ȳ and from it ā, ū, t̄, s̄;
3. `tangent`: ẏ = f′(z)·ż gives the derivatives of m and a′;
4. `gradient`: ẑ = f′(z)·ŷ + f″(z)·ż·ȳ gives the gradients of a, u, t, W and ρ at once.

On a GPU each pass is one kernel in single precision (`kernels.angles`). On a CPU, a step of training is 1.7 times
faster than with autograd's passes (six layers, 192 atoms of water, float32, one thread, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.geometry import AngleBlock, AnglePlan
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors


@dataclass(frozen=True)
class Angles(FourPasses):
    """The operation of one layer.

    Inputs: a `(nangles, a_dim)`, u and t `(nslots, features)`, s `(nslots,)`, W `(a_dim, features)` and ρ `(a_dim,)`,
    None when a′ is not wanted. Outputs: m `(nslots, width)`, and a′ or None.

    Attributes
    ----------
    plan
        Storage order of edges in angles ("slots") and of angles.
    activation
        f.
    width
        Length of a message, in y and m.
    carry
        α.
    """

    plan: AnglePlan
    activation: Activation
    width: int
    carry: float

    def blocks(self) -> Iterator[tuple[AngleBlock, slice, slice]]:
        """Yield each block with its rows among slots and among angles."""
        slot = angle = 0
        for block in self.plan.blocks:
            slots, angles = block.atoms * block.width, block.atoms * block.width**2
            yield block, slice(slot, slot + slots), slice(angle, angle + angles)
            slot, angle = slot + slots, angle + angles

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        a, u, t, s, weight, residual = given
        fast = _kernels(self, weight)
        if fast is not None:
            message, updated = fast.update([a, u, t, s], *_layer(self, weight, residual))
            return (message, None if residual is None else updated), ()
        message = u.new_empty(u.shape[0], self.width)
        updated = None if residual is None else torch.empty_like(a)
        for block, slots, angles in self.blocks():
            z = _sum_of_terms(block, a[angles], weight, u[slots], t[slots])
            y = self.activation.value(z)
            pairs = _products(block, s[slots], s[slots])
            message[slots] = (y[..., : self.width] * pairs).sum(2).flatten(0, 1)
            if updated is not None:
                tail = (y[..., self.width :] * residual).view_as(a[angles])
                torch.add(tail, a[angles], alpha=self.carry, out=updated[angles])
        return (message, updated), ()

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return ā, ū, t̄, s̄, and all tensors that came."""
        message, updated = cotangents
        a, u, t, s, weight, residual = given
        left = *cotangents, *given
        fast = _kernels(self, weight)
        if fast is not None:
            bars = _pair(self, message, updated, a, u, residual)
            return fast.adjoint(*bars, [a, u, t, s], *_layer(self, weight, residual)), left
        f, width = self.activation, self.width
        a_bar, u_bar, t_bar, s_bar = (torch.empty_like(x) for x in (a, u, t, s))
        for block, slots, angles in self.blocks():
            n, k = block.atoms, block.width
            value, keep = f(_sum_of_terms(block, a[angles], weight, u[slots], t[slots]))
            pairs = _products(block, s[slots], s[slots])
            here = None if message is None else message[slots]
            there = None if updated is None else updated[angles]
            y_bar = _cotangent_of_y(self, block, pairs, here, there, residual, value)
            if here is None:
                s_bar[slots] = 0.0
            else:
                along = torch.matmul(value[..., :width], here.view(n, k, width, 1)).squeeze(-1)
                s_here = s[slots].view(n, k)
                by_first = torch.bmm(along, s_here.unsqueeze(-1)).squeeze(-1)
                by_second = torch.bmm(s_here.unsqueeze(1), along).squeeze(1)
                s_bar[slots] = (by_first + by_second).view(-1)
            z_bar = f.times_slope(keep, y_bar)
            torch.mm(z_bar.view(n * k * k, -1), weight.t(), out=a_bar[angles])
            u_bar[slots] = z_bar.sum(2).view(n * k, -1)
            t_bar[slots] = z_bar.sum(1).view(n * k, -1)
        if updated is not None:
            a_bar.add_(updated, alpha=self.carry)
        return (a_bar, u_bar, t_bar, s_bar), left

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivatives of m and a′, and ȧ, u̇, ṫ, ṡ."""
        a_dot, u_dot, t_dot, s_dot = tangents
        message, updated, a, u, t, s, weight, residual = left
        fast = _kernels(self, weight)
        if fast is not None:
            return fast.tangent([a, u, t, s], tangents, *_layer(self, weight, residual)), tangents
        to_message = None if message is None else torch.empty_like(message)
        to_updated = None if updated is None else torch.empty_like(updated)
        for block, slots, angles in self.blocks():
            value, keep = self.activation(
                _sum_of_terms(block, a[angles], weight, u[slots], t[slots])
            )
            z_dot = _sum_of_terms(block, a_dot[angles], weight, u_dot[slots], t_dot[slots])
            y_dot = self.activation.times_slope(keep, z_dot)
            if to_message is not None:
                pairs = _products(block, s[slots], s[slots])
                out = y_dot[..., : self.width] * pairs
                out += value[..., : self.width] * _pair_tangent(block, s[slots], s_dot[slots])
                to_message[slots] = out.sum(2).flatten(0, 1)
            if to_updated is not None:
                tail = (y_dot[..., self.width :] * residual).view_as(a[angles])
                torch.add(tail, a_dot[angles], alpha=self.carry, out=to_updated[angles])
        return (to_message, to_updated), tangents

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """Return the gradients of a, u, t, (none of s), W, ρ; positions get none from it."""
        message, updated = cotangents
        a, u, t, s, weight, residual = given
        old_message, old_updated = (None, None) if left is None else left[:2]
        fast = _kernels(self, weight)
        if fast is not None:
            old = [] if moved is None else _pair(self, old_message, old_updated, a, u, residual)
            now = _pair(self, message, updated, a, u, residual)
            layer = _layer(self, weight, residual)
            *hats, weight_hat, residual_hat = fast.gradient(
                now, old, [a, u, t, s], moved or [], *layer
            )
            return *hats, None, weight_hat, None if residual is None else residual_hat
        f, width = self.activation, self.width
        a_hat, u_hat, t_hat = (torch.empty_like(x) for x in (a, u, t))
        weight_hat = torch.zeros_like(weight)
        residual_hat = None if residual is None else torch.zeros_like(residual)
        for block, slots, angles in self.blocks():
            n, k = block.atoms, block.width
            value, keep = f(_sum_of_terms(block, a[angles], weight, u[slots], t[slots]))
            pairs = _products(block, s[slots], s[slots])
            here = None if message is None else message[slots]
            there = None if updated is None else updated[angles]
            y_hat = _cotangent_of_y(self, block, pairs, here, there, residual, value)
            if residual_hat is not None and there is not None:
                residual_hat += (value[..., width:].reshape_as(there) * there).sum(0)
            if moved is None:
                z_hat = f.times_slope(keep, y_hat)
            else:
                a_dot, u_dot, t_dot, s_dot = moved
                before = None if old_updated is None else old_updated[angles]
                earlier = None if old_message is None else old_message[slots]
                y_bar = _cotangent_of_y(self, block, pairs, earlier, before, residual, value)
                if earlier is not None:
                    along = _pair_tangent(block, s[slots], s_dot[slots])
                    y_hat[..., :width].addcmul_(earlier.view(n, k, 1, -1), along)
                z_dot = _sum_of_terms(block, a_dot[angles], weight, u_dot[slots], t_dot[slots])
                slope, bend = f.derivatives(keep)
                if residual_hat is not None and before is not None:
                    y_dot = (slope[..., width:] * z_dot[..., width:]).view_as(before)
                    residual_hat += (y_dot * before).sum(0)
                z_hat = bend.mul_(z_dot).mul_(y_bar).addcmul_(slope, y_hat)
                z_bar = y_bar.mul_(slope).view(n * k * k, -1)
                weight_hat.addmm_(a_dot[angles].t(), z_bar)
            flat = z_hat.view(n * k * k, -1)
            weight_hat.addmm_(a[angles].t(), flat)
            torch.mm(flat, weight.t(), out=a_hat[angles])
            u_hat[slots] = z_hat.sum(2).view(n * k, -1)
            t_hat[slots] = z_hat.sum(1).view(n * k, -1)
        if updated is not None:
            a_hat.add_(updated, alpha=self.carry)
        return a_hat, u_hat, t_hat, None, weight_hat, residual_hat


def _kernels(angles: Angles, weight: Tensor) -> Any:
    """Return the launches of kernels where they can be used."""
    if len(angles.plan.blocks) != 1 or not triton_support.usable(weight.device):
        return None
    if not angles.width:  # the kernels are for layers with a message
        return None
    from deepmd_muon.model.descriptor.dpa3.kernels import angles as kernels
    from deepmd_muon.model.descriptor.dpa3.kernels.shared import fits_weight

    if not fits_weight(weight, angles.activation.formula):
        return None
    return kernels


def _layer(angles: Angles, weight: Tensor, residual: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments that all kernels share."""
    formula = angles.activation.formula
    assert formula is not None
    rho = weight.new_empty(0) if residual is None else residual
    kind, *curve_of = formula
    block, reach = angles.plan.blocks[0], angles.plan.reach
    if reach is None:
        reach = torch.full((block.atoms,), block.width, dtype=torch.int32, device=weight.device)
    return weight, rho, reach, block.width, angles.width, angles.carry, kind, curve_of


def _pair(
    angles: Angles,
    message: Tensor | None,
    updated: Tensor | None,
    a: Tensor,
    u: Tensor,
    residual: Tensor | None,
) -> list[Tensor]:
    """Return the cotangents of m and a′ as kernels take them: zeros where none arrived."""
    if updated is None:
        updated = a.new_empty(0) if residual is None else torch.zeros_like(a)
    return [u.new_zeros(u.shape[0], angles.width) if message is None else message, updated]


def _sum_of_terms(block: AngleBlock, a: Tensor, weight: Tensor, u: Tensor, t: Tensor) -> Tensor:
    """Return a·W + u_j + t_k `(atoms, j, k, features)`."""
    n, k = block.atoms, block.width
    z = torch.mm(a, weight).view(n, k, k, -1)
    z += u.view(n, k, 1, -1)
    z += t.view(n, 1, k, -1)
    return z


def _products(block: AngleBlock, left: Tensor, right: Tensor) -> Tensor:
    """Return left_j·right_k `(atoms, j, k, 1)`."""
    n, k = block.atoms, block.width
    return left.view(n, k, 1, 1) * right.view(n, 1, k, 1)


def _cotangent_of_y(
    angles: Angles,
    block: AngleBlock,
    pairs: Tensor,
    message: Tensor | None,
    tail: Tensor | None,
    residual: Tensor | None,
    like: Tensor,
) -> Tensor:
    """Return ȳ from the cotangents of m (weighted with `pairs`) and of a′; zero where one is None."""
    n, k = block.atoms, block.width
    y_bar = torch.empty_like(like)
    if message is None:
        y_bar[..., : angles.width] = 0.0
    else:
        torch.mul(message.view(n, k, 1, -1), pairs, out=y_bar[..., : angles.width])
    if tail is None or residual is None:
        y_bar[..., angles.width :] = 0.0
    else:
        torch.mul(tail.view(n, k, k, -1), residual, out=y_bar[..., angles.width :])
    return y_bar


def _pair_tangent(block: AngleBlock, s: Tensor, s_dot: Tensor) -> Tensor:
    """Return the tangent of s_j·s_k."""
    return _products(block, s_dot, s) + _products(block, s, s_dot)
