"""The functions of positions in DPA-3: distances, switches, directions and cosines of angles.

Everything here is plain torch on few numbers an edge or angle; autograd differentiates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.scripted.rows import quintic

EXPONENT = 20.0  # steepness of the exponential switch, deepmd-kit's
# deepmd-kit's guard of the arc cosine, and its normalisation.
COSINE_SCALE = (1.0 - 1e-6) / math.sqrt(math.pi)
DISTANCE_GUARD = 1e-6  # added to a distance before a vector is divided by it [Å]
EDGE_TILE = 32  # slots that a kernel's program takes at a time
ANGLE_BLOCK_ROWS = 4096  # angles of a block on a CPU: with 96 features 1.5 MB, about a core's cache

# ----- switches ----------------------------------------------------------------------------------


def weigh(
    r: Tensor, start: float, end: float, exponential: bool, exponent: float = EXPONENT
) -> Tensor:
    """Return the weight of neighbours at distances r [Å]: 1 up to about `start`, then falling.

    The quintic polynomial ends at 0 at `end`. The exponential form exp(−exp(20·(r − start)/start))
    is not 0 there, but smaller than rounding for the usual radii. Frozen files script this
    function.
    """
    if exponential:
        return torch.exp(-torch.exp((r.clamp(max=end) - start) * (exponent / start)))
    return quintic(((r - start) / (end - start)).clamp(0.0, 1.0)) + 1.0


# ----- edges -------------------------------------------------------------------------------------


class Incoming(NamedTuple):
    """The edges of a batch, sorted by neighbour.

    Attributes
    ----------
    order
        Numbers of the edges, atom · slots + slot `(atoms·slots,)`, int64; those of empty slots come
        last.
    start
        The edges to atom j are `order[start[j]:start[j + 1]]`; the empty slots begin at `start[-1]`
        `(atoms + 1,)`, int64.
    tile_order
        Numbers of tiles, EDGE_TILE slots of an atom `(tiles·atoms,)`, int32. The tiles up to each
        atom's last edge come first. Tile t of atom i has number t · atoms + i.
    n_used_tiles
        How many tiles come first `(1,)`, int64.
    """

    order: Tensor
    start: Tensor
    tile_order: Tensor
    n_used_tiles: Tensor


def sort_by_neighbor(neighbor: Tensor, empty: Tensor) -> Incoming:
    """Sort the edges of a batch by neighbour.

    Parameters
    ----------
    neighbor
        As in `edges.Edges`.
    empty
        The slots without an edge `(atoms, slots)`. They contribute zeros, so that no sum needs
        them. They all name the same atom, which would otherwise get far more edges than any other.
    """
    n_atoms, n_slots = neighbor.shape
    device = neighbor.device
    # Empty slots lead to an atom behind the last one.
    ends, order = torch.where(empty, n_atoms, neighbor).flatten().int().sort(stable=True)
    atoms = torch.arange(n_atoms + 1, device=device, dtype=ends.dtype)
    tile_start = torch.arange(0, n_slots, EDGE_TILE, device=device)
    is_empty = (tile_start[:, None] >= _count_leading(~empty)).flatten().to(torch.uint8)
    sorted_is_empty, tile_order = is_empty.sort(stable=True)
    true = torch.ones(1, dtype=torch.uint8, device=device)
    return Incoming(
        order=order,
        start=torch.searchsorted(ends, atoms),
        tile_order=tile_order.int(),
        n_used_tiles=torch.searchsorted(sorted_is_empty, true),
    )


def _count_leading(used: Tensor) -> Tensor:
    """Return how many leading columns hold all that are used `(rows,)`, int32.

    `used` is a mask `(rows, columns)`.
    """
    n_rows, n_columns = used.shape
    if not n_columns:
        return torch.zeros(n_rows, dtype=torch.int32, device=used.device)
    number = torch.arange(1, n_columns + 1, dtype=torch.int32, device=used.device)
    return (used * number).amax(1)


# ----- angles ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AngleBlock:
    """Atoms whose angles are computed together."""

    atoms: int  # how many
    width: int  # leading neighbours of each whose pairs are the angles


@dataclass(frozen=True)
class AnglePlan:
    """Which edges form angles, and in which order these edges and the angles are stored.

    Block after block, atom after atom: an atom's leading neighbours ("slots"), and the pairs (j, k)
    of them, k fastest.

    Attributes
    ----------
    blocks
        In storage order.
    slot
        Row of every such edge among all edges `(nslots,)`, int64; the rows are distinct.
    atom
        Centre of every such edge `(nslots,)`, int64.
    padded
        Whether every atom has the same number of slots, its leading edges, in one block.
    reach
        In a padded plan, how many leading slots of each atom take part `(nreal,)`, int32. The
        others have no weight; kernels store 0 as the features of some of their angles (see
        `kernels.angles`).
    """

    blocks: tuple[AngleBlock, ...]
    slot: Tensor
    atom: Tensor
    padded: bool = False
    reach: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that the computation of angles reads on a device."""
        return self.slot, self.atom, self.reach

    def within(self, in_angle: Tensor) -> AnglePlan:
        """Return the plan with the `reach` of a mask of the edges in angles `(nslots,)`."""
        if not self.padded:
            return self
        return replace(self, reach=_count_leading(in_angle.view(-1, self.blocks[0].width)))


def plan_angles(counts: np.ndarray, nnei: int, device: torch.device) -> AnglePlan:
    """Order the angles of a batch: exactly on a CPU, padded elsewhere.

    Parameters
    ----------
    counts
        How many leading neighbours of each atom may take part in angles `(nreal,)`, on the host.
    nnei
        Slots of an atom.
    device
        Where the tensors of the plan are.
    """
    make_plan = exact_angles if device.type == "cpu" else padded_angles
    return make_plan(counts, nnei, device)


def exact_angles(counts: np.ndarray, nnei: int, device: torch.device) -> AnglePlan:
    """Order angles in blocks of atoms with equal counts that fit a cache; see `plan_angles`."""
    counts = np.minimum(counts, nnei)
    blocks: list[AngleBlock] = []
    slots = [np.zeros(0, dtype=np.int64)]
    for count in sorted({int(n) for n in counts if n}, reverse=True):
        atoms = np.flatnonzero(counts == count)
        slots.append((atoms[:, None] * nnei + np.arange(count)).reshape(-1))
        block_atoms = max(1, ANGLE_BLOCK_ROWS // count**2)
        blocks += [
            AngleBlock(atoms=min(block_atoms, len(atoms) - start), width=count)
            for start in range(0, len(atoms), block_atoms)
        ]
    slot = torch.from_numpy(np.concatenate(slots)).to(device)
    return AnglePlan(blocks=tuple(blocks), slot=slot, atom=slot // max(nnei, 1))


def padded_angles(counts: np.ndarray, nnei: int, device: torch.device) -> AnglePlan:
    """Order angles in one block as wide as the fullest atom needs; see `plan_angles`.

    Its shapes follow from that width alone.
    """
    width = min(int(counts.max(initial=0)), nnei)
    atoms = torch.arange(len(counts), device=device)
    slot = (atoms.unsqueeze(1) * nnei + torch.arange(width, device=device)).view(-1)
    return AnglePlan(
        blocks=(AngleBlock(atoms=len(counts), width=width),) if width else (),
        slot=slot,
        atom=slot // max(nnei, 1),
        padded=width > 0,
    )


def cosines(directions: Tensor, plan: AnglePlan) -> Tensor:
    """Return the scaled cosine of every angle `(nangles,)`.

    `directions` are d/r of the edges in angles `(nslots, 3)`.
    """
    products = []
    start = 0
    for block in plan.blocks:
        end = start + block.atoms * block.width
        unit = directions[start:end].view(block.atoms, block.width, 3)
        products.append(torch.bmm(unit, unit.transpose(1, 2)).view(-1))
        start = end
    joined = torch.cat(products) if products else directions.new_zeros(0)
    return joined * COSINE_SCALE
