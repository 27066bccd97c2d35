"""Fractional powers of the singular values in Muon's step, for the experiment on stability.

Muon replaces the momentum G = U Σ Vᵀ by its polar factor U Vᵀ, so that directions that no datum constrains move as
fast as others. Here U Σᵖ Vᵀ takes its place, with 0 < p < 1. From the polar factor P, with matrix products only::

    H = Pᵀ G / s + ε                                   positive definite, eigenvalues at most 1 + ε
    Y₀ = H,  Z₀ = 1;   T = (3 − Z Y) / 2,  Y ← Y T,  Z ← T Z        Y → H^½ (Higham, 1997)
    P H^½,  P H^¼ (the root of the root)  or  P H^½ H^¼

s, between 1 and 1.34 times the largest singular value of G, is ‖(Pᵀ G)⁸‖^⅛: no singular value of the update exceeds
that of the polar factor. With the Frobenius norm of the polar factor instead, a few directions take steps up to ten
times as long, and the gradients of the fitting net's hidden layers become zero (on water between 200 and 800 steps).

On a GPU the polar factor has the noise of float16 products, and the smallest eigenvalues of Pᵀ G may be negative; the
iteration makes these grow without bound. ε keeps them positive: singular values count as at least ε of s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from first_layer_rate import is_first_layer
from torch import Tensor
from torch.nn.functional import pad

from deepmd_muon.optim import MatrixRule, register_rule
from deepmd_muon.optim.rules.interface import BlockState

#: ε, which keeps the eigenvalues of H positive.
SMALLEST = 1e-4
#: Steps of the coupled iteration. Each multiplies small eigenvalues of Y by 1.5 and so reaches those above 2.25^−12,
#: 6e-5.
ITERATIONS = 12


@dataclasses.dataclass(frozen=True)
class FractionalPower(MatrixRule):
    """The power as a rule; it has no state.

    Attributes
    ----------
    roots
        Which roots of H multiply the polar factor: '2' for p = ½, '4' for p = ¼, '2·4' for p = ¾.
    first_layer
        Whether only the first layer of the fitting net takes the power, told apart as by `FirstLayerRate`.
    """

    roots: Literal["2", "4", "2·4"] = "2"
    first_layer: bool = False

    def transform(
        self, polar: Sequence[Tensor], directions: Sequence[Tensor], state: BlockState
    ) -> tuple[Sequence[Tensor], BlockState]:
        """Return the powers in place of the polar factors."""
        changed = list(polar)
        chosen = [k for k, o in enumerate(polar) if not self.first_layer or is_first_layer(o)]
        powers = self._powers([_shorter_side(polar[k], directions[k]) for k in chosen])
        for k, power in zip(chosen, powers, strict=True):
            changed[k] = _times(polar[k], power)
        return changed, {}

    def _powers(self, squares: Sequence[Tensor]) -> list[Tensor]:
        """Return H^p of batches (b, n, n) of H."""
        if not squares:
            return []
        halves = square_roots(squares)
        if self.roots == "2":
            return halves
        quarters = square_roots(halves)
        if self.roots == "4":
            return quarters
        return [half @ quarter for half, quarter in zip(halves, quarters, strict=True)]


@dataclasses.dataclass(frozen=True)
class HalfPower(FractionalPower):
    """p = ½."""

    name = "power_half"


@dataclasses.dataclass(frozen=True)
class QuarterPower(FractionalPower):
    """p = ¼, nearer to the polar factor."""

    name = "power_quarter"
    roots: Literal["2", "4", "2·4"] = "4"


@dataclasses.dataclass(frozen=True)
class ThreeQuarterPower(FractionalPower):
    """p = ¾, nearer to the momentum."""

    name = "power_three_quarters"
    roots: Literal["2", "4", "2·4"] = "2·4"


@dataclasses.dataclass(frozen=True)
class FirstHalfPower(FractionalPower):
    """p = ½ in the first layer of the fitting net."""

    name = "first_power_half"
    first_layer: bool = True


@dataclasses.dataclass(frozen=True)
class FirstQuarterPower(FractionalPower):
    """p = ¼ in the first layer of the fitting net."""

    name = "first_power_quarter"
    roots: Literal["2", "4", "2·4"] = "4"
    first_layer: bool = True


def _shorter_side(polar: Tensor, direction: Tensor) -> Tensor:
    """Return H for PᵀG or GPᵀ, the smaller one (b, n, n)."""
    rows, columns = polar.shape[-2:]
    # Squares of the momentum of a dead layer would underflow.
    scaled = direction / _not_zero(direction.abs().amax((1, 2), keepdim=True))
    product = polar.mT @ scaled if rows >= columns else scaled @ polar.mT
    symmetric = product + product.mT
    symmetric = symmetric / _not_zero(torch.linalg.matrix_norm(symmetric, keepdim=True))
    eighth = symmetric
    for _ in range(3):
        eighth = eighth @ eighth
    largest = torch.linalg.matrix_norm(eighth, keepdim=True) ** 0.125
    shift = SMALLEST * torch.eye(symmetric.shape[-1], dtype=polar.dtype, device=polar.device)
    return symmetric / _not_zero(largest) + shift


def square_roots(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the square roots of batches (b, n, n) of positive definite matrices of eigenvalues at most about 1.

    All are padded with zeros to the largest n, so that each step of the iteration is three products.
    """
    largest = max(x.shape[-1] for x in matrices)
    missing = [largest - x.shape[-1] for x in matrices]
    y = torch.cat([pad(x, (0, k, 0, k)) for x, k in zip(matrices, missing, strict=True)])
    three_halves = 1.5 * torch.eye(largest, dtype=y.dtype, device=y.device).expand_as(y)
    z = three_halves / 1.5
    for _ in range(ITERATIONS):
        t = torch.baddbmm(three_halves, z, y, alpha=-0.5)
        y = y @ t
        z = t @ z
    parts = y.split([x.shape[0] for x in matrices])
    return [part[:, : x.shape[-1], : x.shape[-1]] for part, x in zip(parts, matrices, strict=True)]


def _times(polar: Tensor, power: Tensor) -> Tensor:
    """Return the polar factor times a power of H, on the side where H is."""
    return polar @ power if polar.shape[-2] >= polar.shape[-1] else power @ polar


def _not_zero(x: Tensor) -> Tensor:
    """Return norms as divisors: above 0, so that a matrix of zeros stays zero."""
    return x.clamp_min(torch.finfo(x.dtype).tiny)


for rule in (
    HalfPower(),
    QuarterPower(),
    ThreeQuarterPower(),
    FirstHalfPower(),
    FirstQuarterPower(),
):
    register_rule(rule)
