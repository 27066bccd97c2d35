"""The angle part of a DPA-3 layer: messages from angles to edges and the update of the angles.

For all pairs (j, k) of neighbours of one atom, j = k included, with the weights s of edges and their
terms u as first and t as second neighbour, computed before (see `layer`),

    z_jk = a_jk·W + u_j + t_k,   y = f(z),
    m_j = s_j·Σ_k s_k·y_jk[:M],   a′_jk = α·a_jk + ρ∘y_jk[M:].

Forces need the adjoints of this, a force loss the gradient of these adjoints. The four passes (see
`nn.four_passes`, also for the accents) run block by block in a CPU's cache. Between them only a, the
adjoint of a′ and the tangent of a have a row for each angle:

1. `value`: m and a′;
2. `adjoint`: ȳ = [s_j·s_k·m̄_j, ρ∘ā′], z̄ = f′(z)∘ȳ, and from it ā, ū, t̄, s̄;
3. `tangent`: ẏ = f′(z)∘ż, and from it ṁ and ȧ′;
4. `gradient`: ŷ = [s_j·s_k·m̂_j + (ṡ_j·s_k + s_j·ṡ_k)·m̄_j, ρ∘â′], ẑ = f′(z)∘ŷ + f″(z)∘ż∘ȳ, and
   from it the gradients of a, u, t, W and ρ.

The formula is written three times: here, in `kernels.angles` for a GPU (single precision; in each
pass one kernel, then sums of its parts), and in `scripted` for frozen files (`_angle_values`,
`sum_over_angles`, and `add_updates` for a′). Change all three. On a CPU, a step of training is 1.7
times faster than with autograd's passes (six layers, 192 atoms of water, float32, one thread,
2026-11-23).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.geometry import AnglePlan
from deepmd_muon.model.descriptor.dpa3.tensors import AngleCotangents, AngleTerms
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Nested, Perhaps, Tensors


class AngleInputs(NamedTuple):
    """The inputs of the operation."""

    terms: AngleTerms
    weight: Tensor  # W (A, Y)
    rho: Tensor | None  # ρ (A,); None if a′ is not wanted


class AdjointSaved(NamedTuple):
    """What pass 2 hands over to pass 3 (all) and pass 4 (the cotangents)."""

    bars: AngleCotangents
    inputs: AngleInputs


@dataclass(frozen=True)
class Angles(FourPasses):
    """The operation of one layer. Inputs are `AngleInputs`; outputs m, and a′ or None.

    Attributes
    ----------
    plan
        Storage order of edges in angles ("slots") and of angles.
    activation
        f.
    message_columns
        M, the length of a message.
    alpha
        α.
    """

    plan: AnglePlan
    activation: Activation
    message_columns: int
    alpha: float

    def value(self, inputs: AngleInputs) -> tuple[Perhaps, Nested]:
        """Pass 1: return m and a′."""
        terms, weight, rho = inputs
        M = self.message_columns
        kernels = _kernels(self, weight)
        if kernels is not None:
            return kernels.value(terms, _angle_layer(self, inputs)), ()
        message = terms.u.new_empty(terms.u.shape[0], M)
        a_new = None if rho is None else torch.empty_like(terms.a)
        for block in self._blocks():
            y = self.activation.value(block.pre_activation(terms, weight))
            s_pairs = block.products(terms.s, terms.s)
            message[block.slots] = (y[..., :M] * s_pairs).sum(2).flatten(0, 1)
            if a_new is not None and rho is not None:
                a = terms.a[block.angles]
                step = (y[..., M:] * rho).view_as(a)
                torch.add(step, a, alpha=self.alpha, out=a_new[block.angles])
        return (message, a_new), ()

    def adjoint(
        self, cotangents: Any, inputs: AngleInputs, value_saved: Any
    ) -> tuple[Tensors, Nested]:
        """Pass 2: return ā, ū, t̄ and s̄, and save the cotangents and inputs."""
        bars = AngleCotangents(*cotangents)
        terms, weight, rho = inputs
        saved = AdjointSaved(bars=bars, inputs=inputs)
        kernels = _kernels(self, weight)
        if kernels is not None:
            cotangents = _zeros_for_none(self, bars, inputs)
            return kernels.adjoint(cotangents, terms, _angle_layer(self, inputs)), saved
        a_bar = torch.empty_like(terms.a)
        u_bar = torch.empty_like(terms.u)
        t_bar = torch.empty_like(terms.t)
        s_bar = torch.empty_like(terms.s)
        for block in self._blocks():
            y, keep = self.activation(block.pre_activation(terms, weight))
            s_pairs = block.products(terms.s, terms.s)
            y_bar = self._cotangent_of_y(block, s_pairs, bars, rho, like=y)
            s_bar[block.slots] = self._adjoint_of_s(block, bars.message, terms.s, y)
            z_bar = self.activation.times_slope(keep, y_bar)
            torch.mm(block.rows(z_bar), weight.t(), out=a_bar[block.angles])
            u_bar[block.slots] = z_bar.sum(2).flatten(0, 1)
            t_bar[block.slots] = z_bar.sum(1).flatten(0, 1)
        if bars.a_new is not None:
            a_bar.add_(bars.a_new, alpha=self.alpha)
        return (a_bar, u_bar, t_bar, s_bar), saved

    def tangent(self, tangents: Any, saved: AdjointSaved) -> tuple[Perhaps, Nested]:
        """Pass 3: return ṁ and ȧ′, and save ȧ, u̇, ṫ and ṡ."""
        dots = AngleTerms(*tangents)
        bars, inputs = saved
        terms, weight, rho = inputs
        M = self.message_columns
        kernels = _kernels(self, weight)
        if kernels is not None:
            return kernels.tangent(terms, dots, _angle_layer(self, inputs)), dots
        message_dot = None if bars.message is None else torch.empty_like(bars.message)
        a_new_dot = None if bars.a_new is None else torch.empty_like(bars.a_new)
        for block in self._blocks():
            y, keep = self.activation(block.pre_activation(terms, weight))
            z_dot = block.pre_activation(dots, weight)
            y_dot = self.activation.times_slope(keep, z_dot)
            if message_dot is not None:
                s_pairs = block.products(terms.s, terms.s)
                summands = y_dot[..., :M] * s_pairs
                s_pair_dots = block.product_tangents(terms.s, dots.s)
                summands += y[..., :M] * s_pair_dots
                message_dot[block.slots] = summands.sum(2).flatten(0, 1)
            if a_new_dot is not None and rho is not None:
                a_dot = dots.a[block.angles]
                step = (y_dot[..., M:] * rho).view_as(a_dot)
                torch.add(step, a_dot, alpha=self.alpha, out=a_new_dot[block.angles])
        return (message_dot, a_new_dot), dots

    def gradient(
        self,
        cotangents: Any,
        inputs: AngleInputs,
        value_saved: Any,
        adjoint_saved: AdjointSaved | None,
        dots: AngleTerms | None,
    ) -> Nested:
        """Pass 4: return the gradients of a, u, t, W, ρ; s depends on positions alone."""
        hats = AngleCotangents(*cotangents)
        terms, weight, rho = inputs
        M = self.message_columns
        bars = AngleCotangents(None, None) if adjoint_saved is None else adjoint_saved.bars
        kernels = _kernels(self, weight)
        if kernels is not None:
            a_hat, u_hat, t_hat, weight_hat, rho_hat = kernels.gradient(
                hats=_zeros_for_none(self, hats, inputs),
                bars=None if dots is None else _zeros_for_none(self, bars, inputs),
                terms=terms,
                dots=dots,
                layer=_angle_layer(self, inputs),
            )
            return a_hat, u_hat, t_hat, None, weight_hat, None if rho is None else rho_hat
        a_hat = torch.empty_like(terms.a)
        u_hat = torch.empty_like(terms.u)
        t_hat = torch.empty_like(terms.t)
        weight_hat = torch.zeros_like(weight)
        rho_hat = None if rho is None else torch.zeros_like(rho)
        for block in self._blocks():
            y, keep = self.activation(block.pre_activation(terms, weight))
            s_pairs = block.products(terms.s, terms.s)
            y_hat = self._cotangent_of_y(block, s_pairs, hats, rho, like=y)
            if rho_hat is not None and hats.a_new is not None:
                a_new_hat = hats.a_new[block.angles]
                rho_hat += (y[..., M:].reshape_as(a_new_hat) * a_new_hat).sum(0)
            if dots is None:
                z_hat = self.activation.times_slope(keep, y_hat)
            else:
                y_bar = self._cotangent_of_y(block, s_pairs, bars, rho, like=y)
                if bars.message is not None:
                    s_pair_dots = block.product_tangents(terms.s, dots.s)
                    m_bar = block.by_first(bars.message)
                    y_hat[..., :M].addcmul_(m_bar, s_pair_dots)
                z_dot = block.pre_activation(dots, weight)
                slope, bend = self.activation.derivatives(keep)
                if rho_hat is not None and bars.a_new is not None:
                    a_new_bar = bars.a_new[block.angles]
                    y_dot = slope[..., M:] * z_dot[..., M:]
                    rho_hat += (y_dot.view_as(a_new_bar) * a_new_bar).sum(0)
                # In place from here on: bend becomes ẑ, y_bar becomes z̄.
                z_hat = bend.mul_(z_dot).mul_(y_bar).addcmul_(slope, y_hat)
                z_bar = y_bar.mul_(slope)
                weight_hat.addmm_(dots.a[block.angles].t(), block.rows(z_bar))
            weight_hat.addmm_(terms.a[block.angles].t(), block.rows(z_hat))
            torch.mm(block.rows(z_hat), weight.t(), out=a_hat[block.angles])
            u_hat[block.slots] = z_hat.sum(2).flatten(0, 1)
            t_hat[block.slots] = z_hat.sum(1).flatten(0, 1)
        if hats.a_new is not None:
            a_hat.add_(hats.a_new, alpha=self.alpha)
        return a_hat, u_hat, t_hat, None, weight_hat, rho_hat

    def _blocks(self) -> Iterator[_Ranges]:
        """Yield the blocks with their rows among slots and among angles."""
        first_slot = 0
        first_angle = 0
        for block in self.plan.blocks:
            n_slots = block.atoms * block.width
            n_angles = n_slots * block.width
            yield _Ranges(
                atoms=block.atoms,
                neighbors=block.width,
                slots=slice(first_slot, first_slot + n_slots),
                angles=slice(first_angle, first_angle + n_angles),
            )
            first_slot += n_slots
            first_angle += n_angles

    def _cotangent_of_y(
        self,
        block: _Ranges,
        s_pairs: Tensor,
        cotangents: AngleCotangents,
        rho: Tensor | None,
        like: Tensor,
    ) -> Tensor:
        """Return [s_j·s_k·m̄_j, ρ∘ā′], or [s_j·s_k·m̂_j, ρ∘â′] from hats; zeros for None."""
        M = self.message_columns
        y_bar = torch.empty_like(like)
        message_part = y_bar[..., :M]
        update_part = y_bar[..., M:]
        if cotangents.message is None:
            message_part.zero_()
        else:
            torch.mul(block.by_first(cotangents.message), s_pairs, out=message_part)
        if cotangents.a_new is None or rho is None:
            update_part.zero_()
        else:
            torch.mul(block.by_pair(cotangents.a_new), rho, out=update_part)
        return y_bar

    def _adjoint_of_s(
        self, block: _Ranges, message_bar: Tensor | None, s: Tensor, y: Tensor
    ) -> Tensor | float:
        """Return s̄ of a block's slots, as first and as second neighbours."""
        if message_bar is None:
            return 0.0
        m_bar = block.by_first(message_bar).transpose(2, 3)
        # The adjoint of s_j·s_k: m̄_j·y_jk (atoms, j, k).
        s_pair_bar = torch.matmul(y[..., : self.message_columns], m_bar).squeeze(-1)
        block_s = s[block.slots].view(block.atoms, block.neighbors)
        as_first = torch.bmm(s_pair_bar, block_s.unsqueeze(-1)).squeeze(-1)
        as_second = torch.bmm(block_s.unsqueeze(1), s_pair_bar).squeeze(1)
        return (as_first + as_second).view(-1)


class _Ranges(NamedTuple):
    """The sizes of a block, and where its slots and angles are."""

    atoms: int
    neighbors: int
    slots: slice
    angles: slice

    def by_first(self, values: Tensor) -> Tensor:
        """Return values (slots, n) or (slots,) as those of first neighbours (atoms, j, 1, n)."""
        return values[self.slots].view(self.atoms, self.neighbors, 1, -1)

    def by_second(self, values: Tensor) -> Tensor:
        """Return values (slots, n) or (slots,) as those of second neighbours (atoms, 1, k, n)."""
        return values[self.slots].view(self.atoms, 1, self.neighbors, -1)

    def by_pair(self, values: Tensor) -> Tensor:
        """Return values of angles (angles, n) as (atoms, j, k, n)."""
        return values[self.angles].view(self.atoms, self.neighbors, self.neighbors, -1)

    def rows(self, values: Tensor) -> Tensor:
        """Return (atoms, j, k, n) as (atoms·j·k, n)."""
        return values.view(self.atoms * self.neighbors**2, -1)

    def pre_activation(self, terms: AngleTerms, weight: Tensor) -> Tensor:
        """Return z = a·W + u_j + t_k (atoms, j, k, Y), or ż from tangents."""
        z = torch.mm(terms.a[self.angles], weight)
        z = z.view(self.atoms, self.neighbors, self.neighbors, -1)
        z += self.by_first(terms.u)
        z += self.by_second(terms.t)
        return z

    def products(self, first: Tensor, second: Tensor) -> Tensor:
        """Return first_j·second_k (atoms, j, k, 1)."""
        return self.by_first(first) * self.by_second(second)

    def product_tangents(self, s: Tensor, s_dot: Tensor) -> Tensor:
        """Return the tangents of s_j·s_k (atoms, j, k, 1)."""
        return self.products(s_dot, s) + self.products(s, s_dot)


# ----- kernels -----------------------------------------------------------------------------------


def _kernels(angles: Angles, weight: Tensor) -> Any:
    """Return the module of kernels if they can be used."""
    # Kernels have one number of near neighbours for all atoms.
    if len(angles.plan.blocks) != 1 or not triton_support.usable(weight.device):
        return None
    if not angles.message_columns:  # the kernels are for layers with a message
        return None
    from deepmd_muon.model.descriptor.dpa3.kernels import angles as kernels
    from deepmd_muon.model.descriptor.dpa3.kernels.shared import supports

    if not supports(weight, angles.activation.formula):
        return None
    return kernels


def _angle_layer(angles: Angles, inputs: AngleInputs) -> Any:
    """Return the kernels' arguments that all passes share."""
    from deepmd_muon.model.descriptor.dpa3.kernels.angles import AngleLayer

    assert angles.activation.formula is not None
    (block,) = angles.plan.blocks
    reach = angles.plan.reach
    if reach is None:
        device = inputs.weight.device
        reach = torch.full((block.atoms,), block.width, dtype=torch.int32, device=device)
    return AngleLayer(
        weight=inputs.weight,
        rho=inputs.rho,
        reach=reach,
        n_near=block.width,
        message_columns=angles.message_columns,
        alpha=angles.alpha,
        formula=angles.activation.formula,
    )


def _zeros_for_none(
    angles: Angles, cotangents: AngleCotangents, inputs: AngleInputs
) -> AngleCotangents:
    """Return the cotangents as `AngleCotangents` defines them for kernels."""
    message, a_new = cotangents
    if message is None:
        message = inputs.terms.u.new_zeros(inputs.terms.u.shape[0], angles.message_columns)
    if a_new is None:
        a_new = (
            inputs.terms.a.new_empty(0) if inputs.rho is None else torch.zeros_like(inputs.terms.a)
        )
    return AngleCotangents(message, a_new)
