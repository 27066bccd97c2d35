"""The angle part of a DPA-3 layer: messages from angles to edges and the update of the angles.

For the neighbours j, k of one atom, with the switches s and per-edge terms t computed before (see `layer`),

    z_jk = a_jk·W + u_j + t_k,   y = f(z),   m_j = s_j·Σ_k s_k·y_jk[:width],   a′_jk = α·a_jk + ρ∘y_jk[width:].

Forces need the adjoints of this, a force loss the gradient of these adjoints. Both are written out, block by block in
a CPU's cache, with only a, the adjoint of a′ and the tangent of a kept between the passes:

1. `AngleUpdate.forward`: values;
2. `AngleAdjoint.forward`: z̄ = f′(z)·ȳ and from it ā, ū, t̄, s̄;
3. `AngleAdjoint.backward`: tangents ȧ, u̇, ṫ, ṡ arrive; ẏ = f′(z)·ż gives the cotangents of m̄ and of the adjoint of a′;
4. `AngleUpdate.backward`: ẑ = f′(z)·ŷ + f″(z)·ż·ȳ gives the gradients of a, u, t, W and ρ at once.

On a GPU each pass is one kernel in single precision (`angle_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepmd_muon.model import kernels
from deepmd_muon.model.activation import Activation
from deepmd_muon.model.descriptor.dpa3.geometry import AngleBlock, AnglePlan


@dataclass
class AngleTape:
    """Shared by the passes over the angles of one layer.

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
    force
        Whether pass 2 will be asked for.
    adjoints, tangents
        Left by pass 2 and pass 3 for pass 4.
    """

    plan: AnglePlan
    activation: Activation
    width: int
    carry: float
    force: bool
    adjoints: tuple[torch.Tensor | None, ...] | None = None
    tangents: _Tangents | None = None

    def blocks(self) -> Iterator[tuple[AngleBlock, slice, slice]]:
        """Yield each block with its rows among slots and among angles."""
        slot = angle = 0
        for block in self.plan.blocks:
            slots, angles = block.atoms * block.width, block.atoms * block.width**2
            yield block, slice(slot, slot + slots), slice(angle, angle + angles)
            slot, angle = slot + slots, angle + angles


def _kernels(tape: AngleTape, weight: torch.Tensor) -> Any:
    """Return the launches of kernels where they can be used, or operators of torch that do them."""
    traced = kernels.usable_as_operators(weight.device)
    if len(tape.plan.blocks) != 1 or not (traced or kernels.usable(weight.device)):
        return None
    from deepmd_muon.model.descriptor.dpa3 import angle_launches

    if not angle_launches.fits(weight, tape.activation.formula):
        return None
    if not traced:
        return angle_launches
    from deepmd_muon.model.descriptor.dpa3 import angle_operators

    return angle_operators


def _layer(tape: AngleTape, weight: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the arguments that all kernels share."""
    formula = tape.activation.formula
    assert formula is not None
    rho = weight.new_empty(0) if residual is None else residual
    kind, *curve_of = formula
    block, reach = tape.plan.blocks[0], tape.plan.reach
    if reach is None:
        reach = torch.full((block.atoms,), block.width, dtype=torch.int32, device=weight.device)
    return weight, rho, reach, block.width, tape.width, tape.carry, kind, curve_of


def _pair(
    tape: AngleTape,
    message: torch.Tensor | None,
    updated: torch.Tensor | None,
    a: torch.Tensor,
    u: torch.Tensor,
    residual: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the cotangents of m and a′ as kernels take them: zeros where none arrived."""
    if updated is None:
        updated = a.new_empty(0) if residual is None else torch.zeros_like(a)
    return [u.new_zeros(u.shape[0], tape.width) if message is None else message, updated]


def _sum_of_terms(
    block: AngleBlock, a: torch.Tensor, weight: torch.Tensor, u: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """Return a·W + u_j + t_k `(atoms, j, k, features)`."""
    n, k = block.atoms, block.width
    z = torch.mm(a, weight).view(n, k, k, -1)
    z += u.view(n, k, 1, -1)
    z += t.view(n, 1, k, -1)
    return z


def _products(block: AngleBlock, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left_j·right_k `(atoms, j, k, 1)`."""
    n, k = block.atoms, block.width
    return left.view(n, k, 1, 1) * right.view(n, 1, k, 1)


def _cotangent_of_y(
    tape: AngleTape,
    block: AngleBlock,
    pairs: torch.Tensor,
    message: torch.Tensor | None,
    tail: torch.Tensor | None,
    residual: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return ȳ from the cotangents of m (weighted with `pairs`) and of a′; zero where one is None."""
    n, k = block.atoms, block.width
    y_bar = torch.empty_like(like)
    if message is None:
        y_bar[..., : tape.width] = 0.0
    else:
        torch.mul(message.view(n, k, 1, -1), pairs, out=y_bar[..., : tape.width])
    if tail is None or residual is None:
        y_bar[..., tape.width :] = 0.0
    else:
        torch.mul(tail.view(n, k, k, -1), residual, out=y_bar[..., tape.width :])
    return y_bar


class AngleUpdate(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2.

    Arguments: tape; a `(nangles, a_dim)`, u and t `(nslots, features)`, s `(nslots,)`, W `(a_dim, features)` and ρ
    `(a_dim,)`, None when a′ is not wanted. Returns m `(nslots, width)`, a′ or None, and an empty tensor, an argument of
    `AngleAdjoint`: so pass 4 waits for pass 3, which leaves it the tangents, even where nothing else connects them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tape: AngleTape,
        a: torch.Tensor,
        u: torch.Tensor,
        t: torch.Tensor,
        s: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Any:
        """See the class."""
        ctx.tape = tape
        order = u.new_empty(0)
        ctx.save_for_backward(a, u, t, s, weight, residual, order)
        ctx.set_materialize_grads(False)
        fast = _kernels(tape, weight)
        if fast is not None:
            message, updated = fast.update([a, u, t, s], *_layer(tape, weight, residual))
            return message, None if residual is None else updated, order
        message = u.new_empty(u.shape[0], tape.width)
        updated = None if residual is None else torch.empty_like(a)
        for block, slots, angles in tape.blocks():
            z = _sum_of_terms(block, a[angles], weight, u[slots], t[slots])
            y = tape.activation.value(z)
            pairs = _products(block, s[slots], s[slots])
            message[slots] = (y[..., : tape.width] * pairs).sum(2).view(-1, tape.width)
            if updated is not None and residual is not None:
                tail = (y[..., tape.width :] * residual).view_as(a[angles])
                torch.add(tail, a[angles], alpha=tape.carry, out=updated[angles])
        return message, updated, order

    @staticmethod
    def backward(ctx: Any, message: torch.Tensor | None, updated: torch.Tensor | None, _: Any) -> Any:
        """Run pass 2 when forces are due, else pass 4."""
        tape: AngleTape = ctx.tape
        *given, order = ctx.saved_tensors
        if tape.force and tape.adjoints is None:
            return (None, *angle_adjoint(tape, order, _dense(message), _dense(updated), *given), None, None)
        return (None, *_gradients(tape, _dense(message), _dense(updated), *given))


class AngleAdjoint(torch.autograd.Function):
    """Passes 2 and 3.

    Arguments: tape, the empty tensor of `AngleUpdate`, the cotangents of m and a′, and the tensors of `AngleUpdate`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tape: AngleTape,
        order: torch.Tensor,
        message: torch.Tensor | None,
        updated: torch.Tensor | None,
        a: torch.Tensor,
        u: torch.Tensor,
        t: torch.Tensor,
        s: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Any:
        """Return ā, ū, t̄, s̄."""
        # detached: a tape that held a node of the graph which holds the tape would never be freed
        tape.adjoints = tuple(None if x is None else x.detach() for x in (message, updated))
        ctx.tape = tape
        ctx.save_for_backward(a, u, t, s, weight, residual)
        ctx.set_materialize_grads(False)
        fast = _kernels(tape, weight)
        if fast is not None:
            bars = _pair(tape, message, updated, a, u, residual)
            return tuple(fast.adjoint(*bars, [a, u, t, s], *_layer(tape, weight, residual)))
        f, width = tape.activation, tape.width
        a_bar, u_bar, t_bar, s_bar = (torch.empty_like(x) for x in (a, u, t, s))
        for block, slots, angles in tape.blocks():
            n, k = block.atoms, block.width
            value, keep = f(_sum_of_terms(block, a[angles], weight, u[slots], t[slots]))
            pairs = _products(block, s[slots], s[slots])
            here = None if message is None else message[slots]
            there = None if updated is None else updated[angles]
            y_bar = _cotangent_of_y(tape, block, pairs, here, there, residual, value)
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
            a_bar.add_(updated, alpha=tape.carry)
        return a_bar, u_bar, t_bar, s_bar

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """Take the tangents of a, u, t, s; return cotangents of the adjoints of m and a′."""
        tape: AngleTape = ctx.tape
        a, u, t, s, weight, residual = ctx.saved_tensors
        message, updated = tape.adjoints or (None, None)
        given = _Tangents.of(tangents, a, u, t, s)
        tape.tangents = given
        fast = _kernels(tape, weight)
        if fast is not None:
            dots = [given.a, given.u, given.t, given.s]
            found = fast.tangent([a, u, t, s], dots, *_layer(tape, weight, residual))
            kept = (None if old is None else new for old, new in zip((message, updated), found, strict=True))
            return (None, None, *kept, *(None,) * 6)
        to_message = None if message is None else torch.empty_like(message)
        to_updated = None if updated is None else torch.empty_like(updated)
        for block, slots, angles in tape.blocks():
            value, keep = tape.activation(_sum_of_terms(block, a[angles], weight, u[slots], t[slots]))
            z_dot = _sum_of_terms(block, given.a[angles], weight, given.u[slots], given.t[slots])
            y_dot = tape.activation.times_slope(keep, z_dot)
            if to_message is not None:
                pairs = _products(block, s[slots], s[slots])
                out = y_dot[..., : tape.width] * pairs
                out += value[..., : tape.width] * _pair_tangent(tape, block, s[slots], given.s[slots])
                to_message[slots] = out.sum(2).view(-1, tape.width)
            if to_updated is not None:
                tail = (y_dot[..., tape.width :] * residual).view_as(a[angles])
                torch.add(tail, given.a[angles], alpha=tape.carry, out=to_updated[angles])
        return (None, None, to_message, to_updated, *(None,) * 6)


angle_update: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = AngleUpdate.apply
angle_adjoint: Callable[..., tuple[torch.Tensor, ...]] = AngleAdjoint.apply


def _dense(cotangent: torch.Tensor | None) -> torch.Tensor | None:
    return None if cotangent is None else cotangent.contiguous()


@dataclass(frozen=True)
class _Tangents:
    a: torch.Tensor
    u: torch.Tensor
    t: torch.Tensor
    s: torch.Tensor

    @classmethod
    def of(cls, given: tuple[torch.Tensor | None, ...], *like: torch.Tensor) -> _Tangents:
        """Replace missing parts by zeros."""
        return cls(*(torch.zeros_like(x) if g is None else g.contiguous() for g, x in zip(given, like, strict=True)))


def _pair_tangent(tape: AngleTape, block: AngleBlock, s: torch.Tensor, s_dot: torch.Tensor) -> torch.Tensor:
    """Return the tangent of s_j·s_k."""
    return _products(block, s_dot, s) + _products(block, s, s_dot)


def _gradients(
    tape: AngleTape,
    message: torch.Tensor | None,
    updated: torch.Tensor | None,
    a: torch.Tensor,
    u: torch.Tensor,
    t: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Pass 4: gradients of a, u, t, (none of s), W, ρ; positions get none from it."""
    fast = _kernels(tape, weight)
    if fast is not None:
        return _gradients_by_kernel(fast, tape, message, updated, (a, u, t, s, weight, residual))
    f, width = tape.activation, tape.width
    a_hat, u_hat, t_hat = (torch.empty_like(x) for x in (a, u, t))
    weight_hat = torch.zeros_like(weight)
    residual_hat = None if residual is None else torch.zeros_like(residual)
    tangents = tape.tangents
    old_message, old_updated = tape.adjoints or (None, None)
    for block, slots, angles in tape.blocks():
        n, k = block.atoms, block.width
        value, keep = f(_sum_of_terms(block, a[angles], weight, u[slots], t[slots]))
        pairs = _products(block, s[slots], s[slots])
        now = None if updated is None else updated[angles]
        y_hat = _cotangent_of_y(tape, block, pairs, None if message is None else message[slots], now, residual, value)
        if residual_hat is not None and now is not None:
            residual_hat += (value[..., width:].reshape_as(now) * now).sum(0)
        if tangents is None:
            z_hat = f.times_slope(keep, y_hat)
        else:
            before = None if old_updated is None else old_updated[angles]
            earlier = None if old_message is None else old_message[slots]
            y_bar = _cotangent_of_y(tape, block, pairs, earlier, before, residual, value)
            if earlier is not None:
                moved = _pair_tangent(tape, block, s[slots], tangents.s[slots])
                y_hat[..., :width].addcmul_(earlier.view(n, k, 1, -1), moved)
            z_dot = _sum_of_terms(block, tangents.a[angles], weight, tangents.u[slots], tangents.t[slots])
            slope, bend = f.derivatives(keep)
            if residual_hat is not None and before is not None:
                y_dot = (slope[..., width:] * z_dot[..., width:]).view_as(before)
                residual_hat += (y_dot * before).sum(0)
            z_hat = bend.mul_(z_dot).mul_(y_bar).addcmul_(slope, y_hat)
            z_bar = y_bar.mul_(slope).view(n * k * k, -1)
            weight_hat.addmm_(tangents.a[angles].t(), z_bar)
        flat = z_hat.view(n * k * k, -1)
        weight_hat.addmm_(a[angles].t(), flat)
        torch.mm(flat, weight.t(), out=a_hat[angles])
        u_hat[slots] = z_hat.sum(2).view(n * k, -1)
        t_hat[slots] = z_hat.sum(1).view(n * k, -1)
    if updated is not None:
        a_hat.add_(updated, alpha=tape.carry)
    return a_hat, u_hat, t_hat, None, weight_hat, residual_hat


def _gradients_by_kernel(
    fast: Any,
    tape: AngleTape,
    message: torch.Tensor | None,
    updated: torch.Tensor | None,
    arguments: tuple[Any, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Pass 4 by its kernel; `arguments` are the tensors of `AngleUpdate`."""
    a, u, t, s, weight, residual = arguments
    earlier: list[torch.Tensor] = []
    dots: list[torch.Tensor] = []
    tangents = tape.tangents
    if tangents is not None:
        old_message, old_updated = tape.adjoints or (None, None)
        earlier = _pair(tape, old_message, old_updated, a, u, residual)
        dots = [tangents.a, tangents.u, tangents.t, tangents.s]
    given = _pair(tape, message, updated, a, u, residual)
    layer = _layer(tape, weight, residual)
    a_hat, u_hat, t_hat, weight_hat, residual_hat = fast.gradient(given, earlier, [a, u, t, s], dots, *layer)
    return a_hat, u_hat, t_hat, None, weight_hat, None if residual is None else residual_hat
