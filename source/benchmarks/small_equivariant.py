"""A small equivariant potential (scalar and vector features, in the manner of PaiNN) and generated data for it.

Data: clusters of two kinds of atoms, with energies and forces of an analytic potential of pairs and angles. Energies
are in units of their own spread. The potential sees all pairs through a smooth cutoff.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

ATOMS, KINDS, CUTOFF, WAVES = 12, 2, 3.0, 8
BATCH, HELD_OUT = 32, 1024  # clusters
_SIDE = 2.6  # of the box in which clusters are drawn


def pairs(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (b, n, n, 3) from atom to atom, and distances (b, n, n), which are `CUTOFF` on the diagonal."""
    vectors = positions[:, None] - positions[:, :, None]
    same = torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)
    squares = vectors.square().sum(-1).masked_fill(same, CUTOFF**2)
    return vectors, squares.sqrt()


def smooth(distances: Tensor) -> Tensor:
    """Return weights that fall to 0 at the cutoff."""
    return 0.5 * (torch.cos(math.pi * (distances / CUTOFF).clamp_max(1.0)) + 1.0)


def analytic_energy(positions: Tensor, kinds: Tensor) -> Tensor:
    """Return the energies (b,) of clusters (b, n, 3): Morse pairs and a preferred angle that depends on the kind."""
    vectors, distances = pairs(positions)
    weights = smooth(distances)
    length = 1.0 + 0.15 * (kinds[:, None] + kinds[:, :, None])
    morse = (1.0 - torch.exp(-2.0 * (distances - length))).square() - 1.0
    cosines = torch.einsum("bijx,bikx->bijk", vectors, vectors) / (
        distances[..., None] * distances[:, :, None]
    )
    preferred = -1.0 / 3.0 + 0.5 * kinds[:, :, None, None]
    angles = weights[..., None] * weights[:, :, None] * (cosines - preferred).square()
    return 0.5 * (weights * morse).sum((1, 2)) + 0.3 * angles.sum((1, 2, 3))


class Layer(nn.Module):
    """Messages between atoms, then an update of each atom; scalars (b, n, f), vectors (b, n, 3, f)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width)
        )
        self.filter = nn.Linear(WAVES, 3 * width)
        self.mix = nn.Linear(width, 2 * width, bias=False)
        self.update = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width)
        )

    def forward(
        self, s: Tensor, v: Tensor, waves: Tensor, weights: Tensor, units: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the next scalars and vectors."""
        filters = self.filter(waves) * weights[..., None]
        of_scalars, of_vectors, of_units = (
            filters * self.message(s)[:, None]  # from atom k to atom i: (b, i, k, f)
        ).chunk(3, -1)
        s = s + of_scalars.sum(2)
        v = (
            v
            + torch.einsum("bikf,bkxf->bixf", of_vectors, v)
            + torch.einsum("bikf,bikx->bixf", of_units, units)
        )
        one, other = self.mix(v).chunk(2, -1)
        norms = (one.square().sum(2) + 1e-6).sqrt()
        gate, scale, shift = self.update(torch.cat([s, norms], -1)).chunk(3, -1)
        return s + scale * (one * other).sum(2) + shift, v + gate[:, :, None] * other


class Potential(nn.Module):
    """An invariant energy (b,) of clusters."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.kinds = nn.Embedding(KINDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, positions: Tensor, kinds: Tensor) -> Tensor:
        """Return the energies."""
        vectors, distances = pairs(positions)
        numbers = torch.arange(1, WAVES + 1, device=positions.device)
        waves = (
            torch.sin(distances[..., None] * numbers * (math.pi / CUTOFF)) / distances[..., None]
        )
        s = self.kinds(kinds)
        v = s.new_zeros(*s.shape[:2], 3, s.shape[2])
        for layer in self.layers:
            s, v = layer(s, v, waves, smooth(distances), vectors / distances[..., None])
        return self.readout(s).sum((1, 2))


@functools.lru_cache(maxsize=4)
def clusters(seed: int, count: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return positions, kinds, energies and forces of clusters without close pairs, in units of the energies' spread."""
    draw = torch.Generator(device).manual_seed(seed)
    positions = _SIDE * torch.rand(count, ATOMS, 3, generator=draw, device=device)
    for _ in range(40):  # push close pairs apart
        vectors, distances = pairs(positions)
        push = (0.95 - distances).clamp_min(0.0) / distances
        positions = positions - 0.5 * (push[..., None] * vectors).sum(2)
    kinds = torch.randint(KINDS, (count, ATOMS), generator=draw, device=device)
    positions.requires_grad_()
    energies = analytic_energy(positions, kinds)
    (slopes,) = torch.autograd.grad(energies.sum(), positions)
    energies = energies.detach()
    spread = energies.std()
    return (
        positions.detach(),
        kinds,
        (energies - energies.mean()) / spread,
        -slopes / spread,
    )


class Clusters:
    """The potential on generated clusters: the batches of one seed."""

    def __init__(self, seed: int, steps: int, device: str, *, width: int = 64) -> None:
        self.data = clusters(seed, steps * BATCH, device)
        held_out = clusters(99, HELD_OUT, device)
        self.halves = list(zip(*(x.chunk(2) for x in held_out), strict=True))
        self.width = width

    def model(self) -> nn.Module:
        """Return a new model."""
        return Potential(self.width)

    def loss(self, model: nn.Module, at: Tensor) -> Tensor:
        """Return the loss of batch number `at`."""
        rows = at * BATCH + torch.arange(BATCH, device=at.device)
        return loss_of(model, *(x[rows] for x in self.data))

    def held_out(self, model: nn.Module) -> list[float]:
        """Return the losses of two sets of new clusters."""
        with torch.enable_grad():
            return [loss_of(model, *half).item() for half in self.halves]


def loss_of(
    model: nn.Module, positions: Tensor, kinds: Tensor, energies: Tensor, forces: Tensor
) -> Tensor:
    """Return the mean squared errors of energies and forces, relative to the variance of each."""
    positions = positions.clone().requires_grad_()
    predicted = model(positions, kinds)
    (slopes,) = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
    error = (predicted - energies).square().mean()
    return error + (slopes + forces).square().mean() / forces.square().mean()
