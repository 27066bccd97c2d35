"""A tabulated pair potential that replaces the network where atoms come close, as deepmd-kit's `use_srtab`.

An atom's energy is (1 − w) E + w T. E is the network's, T half the sum of the table over its neighbours. w falls from
1 to 0 where σ grows from `sw_rmin` to `sw_rmax`.
σ is the softmin of the neighbours' distances: Σ r exp(−r/α)/Σ exp(−r/α).

TorchScript reads this file.
"""

import logging
import os
from typing import Any, NamedTuple

import numpy as np
import torch

from deepmd_muon.model.errors import ModelError

log = logging.getLogger(__name__)

_LEAST_JUMP = 1e-3  # of an energy at the cut-off that is worth a warning [eV]


class Blend(NamedTuple):
    """The values of a table, and its weights, for atoms and their neighbours.

    Attributes
    ----------
    weight
        w of each atom `(n,)`.
    energy
        T of each atom `(n,)` [eV].
    weight_slope, energy_slope
        dw/dr and dT/dr of each neighbour `(n, nnei)` [1/Å], [eV/Å]; 0 in empty slots.
    distance
        r of each neighbour `(n, nnei)` [Å]; 1 in empty slots.
    """

    weight: torch.Tensor
    energy: torch.Tensor
    weight_slope: torch.Tensor
    energy_slope: torch.Tensor
    distance: torch.Tensor


def edge_slope(blend: Blend, network_energy: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return the contribution of table and weight to dE/dr_ij `(n, nnei, 3)`; energies `(n,)` are the network's."""
    difference = (blend.energy - network_energy).unsqueeze(1)
    radial = blend.weight_slope * difference + blend.weight.unsqueeze(1) * blend.energy_slope
    return (radial / blend.distance).unsqueeze(2) * vectors


class PairTable(torch.nn.Module):
    """Cubic splines through a table of energies against distances, and the switch to it.

    Parameters
    ----------
    path
        Text file: in each row a distance [Å] and the energies [eV] of the pairs 0-0, 0-1, …, 1-1, … of types. Rows are
        equally far apart. A checkpoint holds the splines, so that the file is read for new models only.
    ntypes
        Number of types.
    rcut
        Cut-off of the model [Å].
    switch
        `sw_rmin` and `sw_rmax` [Å].
    alpha
        α of the softmin [Å].
    """

    tab_info: torch.Tensor
    tab_data: torch.Tensor

    def __init__(
        self, path: str, ntypes: int, rcut: float, switch: tuple[float, float], alpha: float
    ) -> None:
        super().__init__()
        self.ntypes, self.rcut, self.alpha = ntypes, rcut, alpha
        self.inner, self.outer = switch
        info, data, self.problem = np.zeros(4), np.zeros((ntypes, ntypes, 0, 4)), ""
        try:
            info, data = splines_of(path, ntypes, rcut)
        except ModelError as error:
            # A checkpoint may bring the splines.
            self.problem = str(error)
        self.register_buffer("tab_info", torch.from_numpy(info))
        self.register_buffer("tab_data", torch.from_numpy(data))

    @torch.jit.unused
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        data = state_dict.get(f"{prefix}tab_data")
        if (
            isinstance(data, torch.Tensor)
            and data.shape[:2] == self.tab_data.shape[:2]
            and data.dim() == 4
        ):
            self.tab_data = torch.zeros_like(data, device=self.tab_data.device)
            self.problem = ""
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(
        self, vectors: torch.Tensor, own_type: torch.Tensor, neighbor_type: torch.Tensor
    ) -> Blend:
        """Return weights and energies.

        Parameters
        ----------
        vectors
            r_ij `(n, nnei, 3)` [Å], arbitrary in empty slots.
        own_type, neighbor_type
            Types `(n,)` and `(n, nnei)`, −1 in empty slots.
        """
        if self.tab_data.shape[2] == 0:
            raise RuntimeError(self.problem)
        there = neighbor_type >= 0
        r = torch.where(there, vectors.square().sum(-1), 1.0).sqrt()
        weight, weight_slope = self._weights(r, there)
        energy, slope = self._table(r, there, own_type, neighbor_type)
        return Blend(weight, energy, weight_slope, slope, r)

    def _weights(self, r: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Measured from the nearest neighbour: deepmd-kit's sums underflow beyond 46 α, and an atom whose neighbours are
        # all farther gets w = 1 there.
        far = torch.where(there, r, torch.inf)
        nearest = far.amin(1, keepdim=True) if r.shape[1] > 0 else r.new_zeros([r.shape[0], 1])
        nearest = torch.where(torch.isfinite(nearest), nearest, 0.0)
        share = torch.where(there, torch.exp((nearest - r) / self.alpha), 0.0)
        total = share.sum(1, keepdim=True).clamp(min=1e-20)
        share = share / total
        sigma = (share * r).sum(1)
        width = self.outer - self.inner
        u = ((sigma - self.inner) / width).clamp(0.0, 1.0)
        # An atom without neighbours has σ = 0 and takes the network's energy.
        lonely = ~there.any(1)
        weight = torch.where(lonely, 0.0, 1.0 - u * u * u * (10.0 + u * (6.0 * u - 15.0)))
        slope = -30.0 * (u * (1.0 - u)).square() / width
        return weight, slope.unsqueeze(1) * share * (1.0 - (r - sigma.unsqueeze(1)) / self.alpha)

    def _table(
        self,
        r: torch.Tensor,
        there: torch.Tensor,
        own_type: torch.Tensor,
        neighbor_type: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, step, pieces = self.tab_info[0], self.tab_info[1], self.tab_data.shape[2]
        u = (r - first) / step
        piece = u.to(torch.int64).clamp(0, pieces - 1)
        row = (own_type.unsqueeze(1) * self.ntypes + neighbor_type.clamp(min=0)) * pieces + piece
        a = self.tab_data.view(-1, 4)[row.view(-1)].view(r.shape[0], r.shape[1], 4)
        # Below the table its first tangent goes on.
        x = (u - piece).clamp(min=0.0)
        below = (u - piece).clamp(max=0.0)
        value = (
            ((a[:, :, 0] * x + a[:, :, 1]) * x + a[:, :, 2]) * x + a[:, :, 3] + a[:, :, 2] * below
        )
        slope = ((3.0 * a[:, :, 0] * x + 2.0 * a[:, :, 1]) * x + a[:, :, 2]) / step
        inside = there & (r < self.rcut) & (u < pieces)
        energy = 0.5 * torch.where(inside, value, 0.0).sum(1)
        return energy, 0.5 * torch.where(inside, slope, 0.0)


def splines_of(path: str, ntypes: int, rcut: float) -> tuple[np.ndarray, np.ndarray]:
    """Read a table; return first distance, step, number of pieces and types `(4,)`, and splines `(nt, nt, n, 4)`.

    A piece is a₃u³ + a₂u² + a₁u + a₀ with u from 0 to 1. Splines have zero slope at both ends, as deepmd-kit's.

    Raises
    ------
    ModelError
        When there is no such file, or it is not a table for these types.
    """
    if not os.path.isfile(path):
        raise ModelError(f"use_srtab: there is no file {path}")
    try:
        rows = np.loadtxt(path, dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise ModelError(f"use_srtab: {path} is not a table of numbers: {error}") from error
    columns = ntypes * (ntypes + 1) // 2
    if rows.shape[0] < 3 or rows.shape[1] != columns + 1 or not np.isfinite(rows).all():
        raise ModelError(
            f"use_srtab: {path} needs 3 rows or more of {columns + 1} finite numbers, a distance and the energies of "
            f"{columns} pairs of types; found {rows.shape[0]} rows of {rows.shape[1]}"
        )
    step = rows[1, 0] - rows[0, 0]
    if not step > 0.0 or not np.allclose(np.diff(rows[:, 0]), step, rtol=1e-3):
        raise ModelError(f"use_srtab: the distances of {path} must grow by equal steps")
    rows = _up_to(rcut, rows, path)
    pieces = len(rows) - 1
    data = np.zeros((ntypes, ntypes, pieces, 4))
    pairs = [(a, b) for a in range(ntypes) for b in range(a, ntypes)]
    for column, (a, b) in enumerate(pairs, start=1):
        value = rows[:, column]
        slope = _clamped_slopes(value)
        rise = value[1:] - value[:-1]
        data[a, b, :, 0] = slope[:-1] + slope[1:] - 2.0 * rise
        data[a, b, :, 1] = 3.0 * rise - 2.0 * slope[:-1] - slope[1:]
        data[a, b, :, 2], data[a, b, :, 3] = slope[:-1], value[:-1]
        data[b, a] = data[a, b]
    return np.array([rows[0, 0], step, pieces, ntypes]), data


def _up_to(rcut: float, rows: np.ndarray, path: str) -> np.ndarray:
    """Return a table that goes on to the cut-off [Å]: as zeros, or if it does not end in zeros, as a cubic to zero.

    Points and values are deepmd-kit's. It takes the difference of the last two rows [eV] for the slope [eV/Å] there.
    """
    end, last = rows[-1, 0], rows[-1, 1:]
    step = rows[1, 0] - rows[0, 0]
    beyond = int(np.ceil(rcut / step - rows[0, 0] / step)) - (len(rows) - 1)
    if beyond <= 0:
        at_cutoff = [np.interp(rcut, rows[:, 0], column) for column in rows.T[1:]]
        jump = max(at_cutoff, key=abs)
        if abs(jump) > _LEAST_JUMP:
            log.warning(
                "use_srtab: the energies of %s jump from %.3g eV to 0 at the cut-off of %g Å",
                path,
                jump,
                rcut,
            )
        return rows
    more = np.zeros((beyond, rows.shape[1]))
    more[:, 0] = np.linspace(end + step, end + step * beyond, beyond)
    if not last.any():
        return np.concatenate([rows, more])
    # It reaches zero in the row before the last where there are two, and ends there.
    kept = beyond - 1 if more[-1, 0] / step - end / step >= 2 else beyond
    more = more[:kept]
    length = more[-1, 0] - end
    u = ((more[:, 0] - end) / length)[:, None]
    slope = (last - rows[-2, 1:]) * length
    more[:, 1:] = (1.0 - u) ** 2 * ((1.0 + 2.0 * u) * last + u * slope)
    log.info(
        "use_srtab: %s does not end in zeros; beyond %g Å its energies fall to 0 at %g Å",
        path,
        end,
        more[-1, 0],
    )
    return np.concatenate([rows, more])


def _clamped_slopes(value: np.ndarray) -> np.ndarray:
    """Return the slopes at the points of a cubic spline, per step, that are 0 at both ends: a tridiagonal system."""
    n = len(value)
    right = np.zeros(n)
    right[1:-1] = 3.0 * (value[2:] - value[:-2])
    upper, slope = np.zeros(n), np.zeros(n)
    for k in range(1, n - 1):  # s[k−1] + 4 s[k] + s[k+1] = right[k]
        below = 4.0 - upper[k - 1]
        upper[k] = 1.0 / below
        right[k] = (right[k] - right[k - 1]) / below
    for k in range(n - 2, 0, -1):
        slope[k] = right[k] - upper[k] * slope[k + 1]
    return slope
