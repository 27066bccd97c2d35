"""A tabulated pair potential that replaces the network where atoms come close: `use_srtab`.

As in deepmd-kit, an atom has the energy

    (1 − w)·E + w·T

E is the network's energy, T half the sum of the table over the neighbours. w falls from 1 to 0
while σ grows from `sw_rmin` to `sw_rmax`. σ = Σ r·exp(−r/α) / Σ exp(−r/α) is the softmin of the
distances r of the neighbours.

TorchScript reads this file.
"""

import logging
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.errors import ModelError

log = logging.getLogger(__name__)

_SMALLEST_JUMP = 1e-3  # of an energy at the cut-off that is worth a warning [eV]


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

    weight: Tensor
    energy: Tensor
    weight_slope: Tensor
    energy_slope: Tensor
    distance: Tensor


def edge_slope(blend: Blend, network_energy: Tensor, vectors: Tensor) -> Tensor:
    """Return the contribution of table and weight to dE/dr_ij `(n, nnei, 3)` [eV/Å].

    It is (dw/dr·(T − E) + w·dT/dr)·r_ij/r. `network_energy` is E `(n,)` [eV], `vectors` are r_ij
    `(n, nnei, 3)` [Å].
    """
    difference = (blend.energy - network_energy).unsqueeze(1)
    radial = blend.weight_slope * difference + blend.weight.unsqueeze(1) * blend.energy_slope
    return (radial / blend.distance).unsqueeze(2) * vectors


class PairTable(torch.nn.Module):
    """Cubic splines through a table of energies against distances, and the switch to it.

    Parameters
    ----------
    path
        Text file, see `splines_of`. A checkpoint holds the splines, so that only new models read
        the file.
    ntypes
        Number of types.
    rcut
        Cut-off of the model [Å].
    switch
        `sw_rmin` and `sw_rmax` [Å].
    alpha
        α of the softmin [Å].

    Attributes
    ----------
    problem
        Why the file cannot be used, if no checkpoint has brought the splines; else empty.
    """

    tab_info: Tensor
    tab_data: Tensor

    def __init__(
        self, path: str, ntypes: int, rcut: float, switch: tuple[float, float], alpha: float
    ) -> None:
        super().__init__()
        self.ntypes = ntypes
        self.rcut = rcut
        self.alpha = alpha
        self.inner, self.outer = switch
        self.problem = ""
        splines = Splines(info=np.zeros(4), data=np.zeros((ntypes, ntypes, 0, 4)))
        try:
            splines = splines_of(path, ntypes, rcut)
        except ModelError as error:
            # A checkpoint may bring the splines.
            self.problem = str(error)
        self.register_buffer("tab_info", torch.from_numpy(splines.info))
        self.register_buffer("tab_data", torch.from_numpy(splines.data))

    @torch.jit.unused
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        data = state_dict.get(f"{prefix}tab_data")
        is_table = isinstance(data, Tensor) and data.dim() == 4
        if is_table and data.shape[:2] == self.tab_data.shape[:2]:
            # The table of a checkpoint may have another number of pieces.
            self.tab_data = torch.zeros_like(data, device=self.tab_data.device)
            self.problem = ""
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, vectors: Tensor, own_type: Tensor, neighbor_type: Tensor) -> Blend:
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
        is_neighbor = neighbor_type >= 0
        r = torch.where(is_neighbor, vectors.square().sum(-1), 1.0).sqrt()
        weight, weight_slope = self._weights(r, is_neighbor)
        energy, energy_slope = self._table(r, is_neighbor, own_type, neighbor_type)
        return Blend(weight, energy, weight_slope, energy_slope, r)

    def _weights(self, r: Tensor, is_neighbor: Tensor) -> tuple[Tensor, Tensor]:
        """Return w `(n,)` and dw/dr `(n, nnei)`."""
        # Exponents are measured from the nearest neighbour. deepmd-kit's sums underflow beyond
        # 46 α, so that an atom has w = 1 there if all its neighbours are farther away.
        finite_r = torch.where(is_neighbor, r, torch.inf)
        nearest = finite_r.amin(1, keepdim=True) if r.shape[1] > 0 else r.new_zeros([r.shape[0], 1])
        nearest = torch.where(torch.isfinite(nearest), nearest, 0.0)
        share = torch.where(is_neighbor, torch.exp((nearest - r) / self.alpha), 0.0)
        total = share.sum(1, keepdim=True).clamp(min=1e-20)
        share = share / total
        sigma = (share * r).sum(1)
        width = self.outer - self.inner
        u = ((sigma - self.inner) / width).clamp(0.0, 1.0)
        # An atom without neighbours has σ = 0 and takes the network's energy.
        is_lonely = ~is_neighbor.any(1)
        weight = torch.where(is_lonely, 0.0, 1.0 - u * u * u * (10.0 + u * (6.0 * u - 15.0)))
        dw_dsigma = -30.0 * (u * (1.0 - u)).square() / width
        # dσ/dr = share·(1 − (r − σ)/α)
        slope = dw_dsigma.unsqueeze(1) * share * (1.0 - (r - sigma.unsqueeze(1)) / self.alpha)
        return weight, slope

    def _table(
        self,
        r: Tensor,
        is_neighbor: Tensor,
        own_type: Tensor,
        neighbor_type: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return T `(n,)` and dT/dr `(n, nnei)`."""
        start = self.tab_info[0]
        step = self.tab_info[1]
        n_pieces = self.tab_data.shape[2]
        u = (r - start) / step
        piece = u.to(torch.int64).clamp(0, n_pieces - 1)
        pair = own_type.unsqueeze(1) * self.ntypes + neighbor_type.clamp(min=0)
        row = pair * n_pieces + piece
        a = self.tab_data.view(-1, 4)[row.view(-1)].view(r.shape[0], r.shape[1], 4)
        # Below the table its first tangent goes on.
        x = (u - piece).clamp(min=0.0)
        below = (u - piece).clamp(max=0.0)
        value = (
            ((a[:, :, 0] * x + a[:, :, 1]) * x + a[:, :, 2]) * x + a[:, :, 3] + a[:, :, 2] * below
        )
        slope = ((3.0 * a[:, :, 0] * x + 2.0 * a[:, :, 1]) * x + a[:, :, 2]) / step
        inside = is_neighbor & (r < self.rcut) & (u < n_pieces)
        energy = 0.5 * torch.where(inside, value, 0.0).sum(1)
        return energy, 0.5 * torch.where(inside, slope, 0.0)


class Splines(NamedTuple):
    """Cubic splines of a table, under deepmd-kit's names without `tab_`.

    Attributes
    ----------
    info
        First distance [Å], step [Å], number of pieces and number of types `(4,)`.
    data
        a₃, a₂, a₁, a₀ of each piece `(ntypes, ntypes, n_pieces, 4)` [eV]. The energy is
        a₃u³ + a₂u² + a₁u + a₀, with u from 0 to 1.
    """

    info: np.ndarray
    data: np.ndarray


def splines_of(path: str, ntypes: int, rcut: float) -> Splines:
    """Read a table; its splines have zero slope at both ends, as deepmd-kit's.

    Each row of the file has a distance [Å] and the energies [eV] of the pairs 0-0, 0-1, …, 1-1, …
    of types. Distances grow by equal steps.

    Raises
    ------
    ModelError
        If there is no such file, or it is not a table for these types.
    """
    if not os.path.isfile(path):
        raise ModelError(f"use_srtab: there is no file {path}")
    try:
        rows = np.loadtxt(path, dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise ModelError(f"use_srtab: {path} is not a table of numbers: {error}") from error
    n_pairs = ntypes * (ntypes + 1) // 2
    if rows.shape[0] < 3 or rows.shape[1] != n_pairs + 1 or not np.isfinite(rows).all():
        raise ModelError(
            f"use_srtab: {path} needs 3 rows or more of {n_pairs + 1} finite numbers, "
            f"a distance and the energies of {n_pairs} pairs of types; "
            f"found {rows.shape[0]} rows of {rows.shape[1]}"
        )
    step = rows[1, 0] - rows[0, 0]
    if not step > 0.0 or not np.allclose(np.diff(rows[:, 0]), step, rtol=1e-3):
        raise ModelError(f"use_srtab: the distances of {path} must grow by equal steps")
    rows = _extend(rows, rcut, path)
    n_pieces = len(rows) - 1
    data = np.zeros((ntypes, ntypes, n_pieces, 4))
    pairs = [(i, j) for i in range(ntypes) for j in range(i, ntypes)]
    for column, (i, j) in enumerate(pairs, start=1):
        value = rows[:, column]
        slope = _clamped_slopes(value)
        rise = value[1:] - value[:-1]
        data[i, j, :, 0] = slope[:-1] + slope[1:] - 2.0 * rise
        data[i, j, :, 1] = 3.0 * rise - 2.0 * slope[:-1] - slope[1:]
        data[i, j, :, 2] = slope[:-1]
        data[i, j, :, 3] = value[:-1]
        data[j, i] = data[i, j]
    return Splines(info=np.array([rows[0, 0], step, n_pieces, ntypes]), data=data)


def _extend(rows: np.ndarray, rcut: float, path: str) -> np.ndarray:
    """Return a table that reaches the cut-off [Å].

    It goes on as zeros, or if it does not end in zeros, as a cubic to zero. Points and values are
    deepmd-kit's, which takes the difference of the last two rows [eV] for the slope [eV/Å] there.
    """
    end = rows[-1, 0]
    end_energies = rows[-1, 1:]
    step = rows[1, 0] - rows[0, 0]
    n_missing = int(np.ceil(rcut / step - rows[0, 0] / step)) - (len(rows) - 1)
    if n_missing <= 0:
        at_cutoff = [np.interp(rcut, rows[:, 0], column) for column in rows.T[1:]]
        jump = max(at_cutoff, key=abs)
        if abs(jump) > _SMALLEST_JUMP:
            log.warning(
                "use_srtab: the energies of %s jump from %.3g eV to 0 at the cut-off of %g Å",
                path,
                jump,
                rcut,
            )
        return rows
    added = np.zeros((n_missing, rows.shape[1]))
    added[:, 0] = np.linspace(end + step, end + step * n_missing, n_missing)
    if not end_energies.any():
        return np.concatenate([rows, added])
    # The cubic reaches zero in the row before the last if there are two, and the table ends there.
    if added[-1, 0] / step - end / step >= 2:
        added = added[:-1]
    length = added[-1, 0] - end
    u = ((added[:, 0] - end) / length)[:, None]
    slope = (end_energies - rows[-2, 1:]) * length
    added[:, 1:] = (1.0 - u) ** 2 * ((1.0 + 2.0 * u) * end_energies + u * slope)
    log.info(
        "use_srtab: %s does not end in zeros; beyond %g Å its energies fall to 0 at %g Å",
        path,
        end,
        added[-1, 0],
    )
    return np.concatenate([rows, added])


def _clamped_slopes(value: np.ndarray) -> np.ndarray:
    """Return the slopes at the points of a cubic spline, per step; they are 0 at both ends."""
    n = len(value)
    right = np.zeros(n)
    right[1:-1] = 3.0 * (value[2:] - value[:-2])
    upper = np.zeros(n)
    slope = np.zeros(n)
    # The tridiagonal system, by elimination and back substitution.
    for k in range(1, n - 1):  # s[k−1] + 4 s[k] + s[k+1] = right[k]
        below = 4.0 - upper[k - 1]
        upper[k] = 1.0 / below
        right[k] = (right[k] - right[k - 1]) / below
    for k in range(n - 2, 0, -1):
        slope[k] = right[k] - upper[k] * slope[k + 1]
    return slope
