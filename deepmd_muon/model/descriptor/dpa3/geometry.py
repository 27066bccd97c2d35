"""The functions of positions in DPA-3: distances, switches and directions of edges, cosines of angles.

Everything here is plain torch on few numbers an edge or angle; autograd differentiates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from deepmd_muon.model.descriptor.environment import quintic

EXPONENT = 20.0  # steepness of the exponential switch, deepmd-kit's
COSINE_SCALE = (1.0 - 1e-6) / math.sqrt(
    math.pi
)  # deepmd-kit's guard of the arc cosine, and its normalisation
DISTANCE_GUARD = 1e-6  # added to a distance before a vector is divided by it [Å]
EDGE_TILE = 32  # slots that a kernel's program takes at a time
ANGLE_BLOCK_ROWS = 4096  # angles of a block on a CPU: with 96 features 1.5 MB, about a core's cache


def weigh(
    r: torch.Tensor, start: float, end: float, exponential: bool, exponent: float = EXPONENT
) -> torch.Tensor:
    """Return the weight of neighbours at distances r [Å], 1 up to about `start`, then falling; also in TorchScript.

    The quintic polynomial ends at 0 at `end`; the exponential form exp(−exp(20·(r − start)/start)) is not 0 there, but
    smaller than rounding for the usual radii.
    """
    if exponential:
        return torch.exp(-torch.exp((r.clamp(max=end) - start) * (exponent / start)))
    return quintic(((r - start) / (end - start)).clamp(0.0, 1.0)) + 1.0


def leading(used: torch.Tensor) -> torch.Tensor:
    """Return how many leading columns hold all that are `used`, a mask `(rows, columns)`; `(rows,)`, int32."""
    if not used.shape[1]:
        return torch.zeros(len(used), dtype=torch.int32, device=used.device)
    number = torch.arange(1, used.shape[1] + 1, dtype=torch.int32, device=used.device)
    return (used * number).amax(1)


@dataclass(frozen=True)
class AngleBlock:
    """Atoms whose angles are handled together: `atoms` of them, each with the pairs of its first `width` neighbours."""

    atoms: int
    width: int


@dataclass(frozen=True)
class AnglePlan:
    """Which edges form angles, and in which order these edges and the angles are stored.

    Block after block, atom after atom: an atom's first neighbours ("slots"), and the pairs (j, k) of them, k fastest.

    Attributes
    ----------
    blocks
        In storage order.
    slot
        Row of every such edge among all edges `(nslots,)`, int64; the rows are distinct.
    atom
        Centre of every such edge `(nslots,)`, int64.
    padded
        Whether the slots are equally many leading edges of every atom, in one block.
    reach
        How many leading slots of each atom take part, where the plan is padded: the others have no weight
        `(nreal,)`, int32. Kernels store zeros instead of the features of their angles.
    """

    blocks: tuple[AngleBlock, ...]
    slot: torch.Tensor
    atom: torch.Tensor
    padded: bool = False
    reach: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What angles read of the plan on a device."""
        return self.slot, self.atom, self.reach

    def within(self, in_angle: torch.Tensor) -> AnglePlan:
        """Return the plan with the `reach` of these edges in angles `(nslots,)`."""
        if not self.padded:
            return self
        return replace(self, reach=leading(in_angle.view(-1, self.blocks[0].width)))


class Incoming(NamedTuple):
    """The edges of a batch, sorted by neighbour.

    Attributes
    ----------
    order
        Numbers of the edges `(nreal·nnei,)`, int64; those of empty slots come last.
    start
        Where the edges to each atom start, and the end of all but the empty slots `(nreal + 1,)`, int64.
    tiles
        Numbers of tiles, EDGE_TILE slots of an atom, those with an edge first `(tiles·nreal,)`, int32; the first tiles
        of all atoms have the numbers of the atoms, and so on.
    used
        How many tiles have an edge `(1,)`, int64.
    """

    order: torch.Tensor
    start: torch.Tensor
    tiles: torch.Tensor
    used: torch.Tensor


def incoming(neighbor: torch.Tensor, empty: torch.Tensor | None = None) -> Incoming:
    """Sort the edges of a batch by neighbour.

    Parameters
    ----------
    neighbor
        As in `edges.Edges`.
    empty
        Slots that no sum needs, since they contribute zeros `(nreal, nnei)`; all of them name the same atom, which
        would get far more edges than any other.
    """
    used = torch.ones_like(neighbor, dtype=torch.bool) if empty is None else ~empty
    ends, order = torch.where(used, neighbor, len(neighbor)).flatten().int().sort(stable=True)
    atoms = torch.arange(len(neighbor) + 1, device=neighbor.device, dtype=ends.dtype)
    first = torch.arange(0, neighbor.shape[1], EDGE_TILE, device=neighbor.device)
    beyond = (first[:, None] >= leading(used)).flatten().to(torch.uint8)
    sorted_beyond, tiles = beyond.sort(stable=True)
    count = torch.searchsorted(
        sorted_beyond, torch.ones(1, dtype=torch.uint8, device=neighbor.device)
    )
    return Incoming(order, torch.searchsorted(ends, atoms), tiles.int(), count)


def plan_angles(counts: np.ndarray, nnei: int, device: torch.device) -> AnglePlan:
    """Order the angles of a batch: exactly on a CPU, padded elsewhere.

    The first `counts` of the `nnei` neighbours of each atom may take part in angles `(nreal,)`, on the host.
    """
    return (
        exact_angles(counts, nnei, device)
        if device.type == "cpu"
        else padded_angles(counts, nnei, device)
    )


def exact_angles(counts: np.ndarray, nnei: int, device: torch.device) -> AnglePlan:
    """Order angles in blocks of atoms with equal counts, small enough for a CPU's cache; arguments as `plan_angles`."""
    counts = np.minimum(counts, nnei)
    blocks: list[AngleBlock] = []
    slots = [np.zeros(0, dtype=np.int64)]
    for count in sorted({int(n) for n in counts if n}, reverse=True):
        atoms = np.flatnonzero(counts == count)
        slots.append((atoms[:, None] * nnei + np.arange(count)).reshape(-1))
        room = max(1, ANGLE_BLOCK_ROWS // count**2)
        blocks += [
            AngleBlock(min(room, len(atoms) - first), count) for first in range(0, len(atoms), room)
        ]
    slot = torch.from_numpy(np.concatenate(slots)).to(device)
    return AnglePlan(tuple(blocks), slot, slot // max(nnei, 1))


def padded_angles(counts: np.ndarray, nnei: int, device: torch.device) -> AnglePlan:
    """Order angles in one block as wide as the fullest atom needs; arguments as `plan_angles`.

    Its shapes follow from that width alone.
    """
    width = min(int(counts.max(initial=0)), nnei)
    atoms = torch.arange(len(counts), device=device)
    slot = (atoms.unsqueeze(1) * nnei + torch.arange(width, device=device)).view(-1)
    blocks = (AngleBlock(len(counts), width),) if width else ()
    return AnglePlan(blocks, slot, slot // max(nnei, 1), padded=width > 0)


def cosines(directions: torch.Tensor, plan: AnglePlan) -> torch.Tensor:
    """Return the scaled cosine of every angle `(nangles,)` from d/r of the edges in angles `(nslots, 3)`."""
    parts = []
    start = 0
    for block in plan.blocks:
        rows = block.atoms * block.width
        unit = directions[start : start + rows].view(block.atoms, block.width, 3)
        parts.append(torch.bmm(unit, unit.transpose(1, 2)).view(-1))
        start += rows
    joined = torch.cat(parts) if parts else directions.new_zeros(0)
    return joined * COSINE_SCALE
