"""Vectors to neighbours, and the sums of their slopes: forces and virial."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.layers import linear
from deepmd_muon.model.structures import Structures


def edge_vectors(structures: Structures) -> Tensor:
    """Return r_ij = R_j + S·box − R_i `(nreal, nnei, 3)` [Å]; arbitrary in empty slots."""
    if triton_support.usable(structures.coord.device):
        from deepmd_muon.model.descriptor import environment_kernels

        return environment_kernels.edge_vectors(
            coord=structures.coord,
            box=structures.box,
            order=structures.order,
            frame=structures.sorted_frame,
            neighbor=structures.neighbor,
            shift=structures.shift,
        )
    coord = structures.coord.reshape(-1, 3)
    neighbor = structures.neighbor.clamp(min=0)  # empty slots read atom 0
    edges = coord.index_select(0, neighbor.view(-1)).view(*neighbor.shape, 3)
    edges = edges - coord[structures.order].unsqueeze(1)
    if structures.box is None or structures.shift is None:
        return edges
    box = structures.box[structures.sorted_frame]
    return torch.baddbmm(edges, structures.shift.to(box.dtype), box)


def force_and_virial(
    structures: Structures, edges: Tensor, slope: Tensor, *, virial: bool
) -> dict[str, Tensor]:
    """Return `force (nframes, natoms, 3)` and, if wanted, `virial (nframes, 9)`.

    Parameters
    ----------
    structures
        The batch.
    edges
        r_ij `(nreal, nnei, 3)` [Å].
    slope
        dE/dr_ij, like `edges` [eV/Å]; 0 in empty slots.
    virial
        Whether to sum the virial.
    """
    out = {}
    # These kernels have no derivative: a gradient of the loss takes the other way.
    if virial and not slope.requires_grad and sums_by_kernels(slope.device):
        from deepmd_muon.model.descriptor import environment_kernels

        forces, out["virial"] = environment_kernels.force_and_virial(
            slope=slope,
            edges=edges,
            order=structures.order,
            neighbor=structures.neighbor,
            nframes=structures.nframes,
            natoms=structures.natoms,
        )
    else:
        natoms = structures.atype.numel()
        forces = forces_of(slope, structures.order, structures.neighbor, natoms)
        if virial:
            out["virial"] = virial_of(structures, slope, edges)
    out["force"] = forces.view(structures.coord.shape)
    return out


def forces_of(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    """Return −dE/dR `(natoms, 3)` from dE/dr_ij `(nreal, nnei, 3)`; r_ij = R_j − R_i.

    Other arguments as in `Structures`. Kernels sum in an order that varies.
    """
    if sums_by_kernels(slope.device):
        from deepmd_muon.model.descriptor import environment_kernels

        scatter = partial(environment_kernels.scatter, natoms=natoms)
        return linear(scatter, environment_kernels.gather, slope, order, neighbor)
    return linear(partial(_scatter, natoms=natoms), _gather, slope, order, neighbor)


def sums_by_kernels(device: torch.device) -> bool:
    """Return whether kernels may sum over edges, in an order that varies."""
    return triton_support.usable(device) and not torch.are_deterministic_algorithms_enabled()


def _scatter(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    # −dE/dR_i gets +dE/dr_ij of the edges that start at i, and −dE/dr_ki of those that end there.
    flat = slope.new_zeros(natoms, 3).index_add_(0, order, slope.sum(1))
    return flat.index_add_(0, neighbor.clamp(min=0).view(-1), slope.reshape(-1, 3), alpha=-1)


def _gather(cotangent: Tensor, order: Tensor, neighbor: Tensor) -> Tensor:
    """Apply the transpose of `_scatter`; arbitrary in empty slots.

    Their dE/dr_ij is 0 whatever the parameters, so that nothing reads them.
    """
    of_neighbor = cotangent.index_select(0, neighbor.clamp(min=0).view(-1))
    return cotangent.index_select(0, order).unsqueeze(1) - of_neighbor.view(*neighbor.shape, 3)


def virial_of(structures: Structures, slope: Tensor, edges: Tensor) -> Tensor:
    """Return −Σ dE/dr_ij ⊗ r_ij `(nframes, 9)` [eV]."""
    per_atom = torch.bmm(slope.transpose(1, 2), edges).reshape(-1, 9)
    zeros = slope.new_zeros(structures.nframes, 9)
    return zeros.index_add_(0, structures.sorted_frame, per_atom, alpha=-1)
