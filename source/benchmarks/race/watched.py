"""Dynamics of many copies whose steps wait for nothing: one CUDA graph finds neighbours, moves atoms and watches them.

`deepmd_muon.dynamics` returns to the host every few steps, and follows any model; here hundreds of short runs of small
potentials are wanted. A test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.neighbors.lists import group_limits
from deepmd_muon.dynamics.integrators import FARTHEST
from deepmd_muon.dynamics.systems import ACCELERATION, BOLTZMANN, HOT, Systems
from deepmd_muon.model import EnergyModel, Structures
from deepmd_muon.model.neighbors.atoms import Atoms, Cells, Sections
from deepmd_muon.model.neighbors.search import find_neighbors

#: Steps between two looks.
WATCH = 4
#: Room for neighbours of an atom; further ones of a collapsing copy are left out.
CAPACITY = 512
#: Ratios of a distance to the shortest of its pair in the training frames whose first passage is noted.
RATIOS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)


@dataclass(frozen=True)
class Watched:
    """What became of each copy.

    Attributes
    ----------
    blown
        When it blew up `(ncopies,)` [ps]; infinite where it did not.
    passed
        When the smallest ratio of a distance to its shortest fell below each of `RATIOS` `(ncopies, nratios)` [ps].
    times
        When the following were looked at `(ntimes,)` [ps].
    least
        Smallest ratio so far `(ntimes, ncopies)`.
    energy
        Change of the total energy `(ntimes, ncopies)` [eV/atom].
    pairs
        Smallest ratio of each pair of types in the end `(ncopies, ntypes, ntypes)`; infinite for one that never met.
    """

    blown: np.ndarray
    passed: np.ndarray
    times: np.ndarray
    least: np.ndarray
    energy: np.ndarray
    pairs: np.ndarray


class WatchedRun:
    """Copies at constant energy that go on until each blows up.

    Parameters
    ----------
    model
        On the device of the copies.
    systems
        The copies with their velocities.
    shortest
        Shortest distance of each pair of types in the training frames `(ntypes, ntypes)` [Å].
    temperature
        Of the velocities of each copy `(ncopies,)` [K]; three times as hot is a blow-up, as for `dp check`.
    time_step
        [fs].
    """

    def __init__(
        self,
        model: EnergyModel,
        systems: Systems,
        shortest: np.ndarray,
        temperature: Tensor,
        time_step: float,
    ) -> None:
        device = systems.coord.device
        self._model, self._time_step, self._device = model, time_step, device
        self._mass, self._atype = systems.mass[..., None], systems.atype
        self._start, self._coord = systems.coord.clone(), systems.coord.clone()
        self._velocity = systems.velocity.clone()
        copies, natoms = systems.atype.shape
        self._natoms = systems.real.sum(1)
        flat = systems.atype.reshape(-1)
        order = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]
        self._order, self._frame, self._kind = order, order // natoms, flat[order]
        self._box = systems.box
        self._cells = None if systems.box is None else Cells.of(systems.box, float(model.rcut))
        request, ntypes = model.neighbors, model.ntypes
        widths = tuple(int(width) for width in group_limits(request.sel, request.by_type, ntypes))
        self._sections = Sections(float(model.rcut), widths, request.by_type, sum(widths), CAPACITY)
        # Sections are sorted: the first neighbour of each is the nearest of its type.
        first = np.cumsum((0, *widths[:-1])) if request.by_type else np.arange(sum(widths))
        self._columns, self._ntypes = torch.tensor(first, device=device), ntypes
        self._counts = tuple(torch.bincount(self._kind, minlength=model.ntypes).tolist())
        self._filled = np.repeat(np.array(widths)[:, None], len(order), axis=1)
        # A pair that the frames do not hold is never too close.
        self._shortest = torch.tensor(
            np.where(np.isfinite(shortest), shortest, 1e-9), device=device
        )
        bounds = np.array([min(most, sum(widths)) for _, most in request.inner], dtype=np.int64)
        self._inner = np.repeat(bounds[:, None], len(order), axis=1)
        limit = HOT * (1.0 + 2.0 / (3.0 * self._natoms.double()).sqrt())
        self._limit = limit * temperature.to(device)
        self._degrees = (3 * self._natoms - 3).clamp(min=3)

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        self._time, self._fast = full(0.0), torch.zeros(copies, dtype=torch.bool, device=device)
        self._blown, self._passed = full(math.inf, copies), full(math.inf, copies, len(RATIOS))
        self._ratios = torch.tensor(RATIOS, dtype=torch.float64, device=device)
        self._least = full(math.inf, copies * ntypes**2)
        self._force = torch.zeros_like(self._coord)
        self._energy = full(0.0, copies)
        with torch.no_grad():
            self._evaluate()
        self._first_energy = self._total()

    def forces(self) -> Tensor:
        """Return the present forces `(ncopies, natoms, 3)` [eV/Å]."""
        return self._force

    def _total(self) -> Tensor:
        kinetic = (0.5 / ACCELERATION) * (self._mass * self._velocity.square()).sum((1, 2))
        return (self._energy + kinetic) / self._natoms

    def _structures(self, coord: Tensor) -> Structures:
        """Return the copies at these positions with their neighbours."""
        atoms = Atoms(
            coord.reshape(-1, 3),
            self._atype.reshape(-1),
            self._natoms,
            coord.shape[1],
            self._cells,
        )
        neighbor, shift = find_neighbors(atoms, self._order, self._frame, self._sections)
        return Structures(
            coord=coord,
            atype=self._atype,
            box=self._box,
            order=self._order,
            sorted_type=self._kind,
            sorted_frame=self._frame,
            neighbor=neighbor,
            shift=shift,
            sections=self._sections.widths,
            type_counts=self._counts,
            filled=self._filled,
            inner=self._inner,
        )

    def _evaluate(self) -> None:
        self._present = self._structures(self._coord)
        found = self._model(self._present, force=True, virial=False)
        self._force.copy_(found["force"])
        self._energy.copy_(found["energy"])

    def _step(self) -> None:
        """Velocity Verlet."""
        half = 0.5 * ACCELERATION * self._time_step
        self._velocity.add_(half * self._force / self._mass)
        far = self._velocity.square().sum(-1).sqrt().amax(1) * self._time_step
        self._fast.logical_or_(~(far <= FARTHEST))
        self._coord.add_(self._time_step * self._velocity)
        self._evaluate()
        self._velocity.add_(half * self._force / self._mass)
        self._time.add_(1e-3 * self._time_step)

    def _look(self) -> None:
        """Note distances, passages and blow-ups; copies that blew up stay where they began."""
        ratio, rows = self._nearest()
        gone = self._is_gone()
        self._blown.copy_(torch.where(gone & self._blown.isinf(), self._time, self._blown))
        alive = self._blown.isinf()
        ratio = torch.where(alive[self._frame][:, None], ratio, math.inf)
        self._least.scatter_reduce_(0, rows.flatten(), ratio.flatten(), "amin")
        below = self._smallest()[:, None] < self._ratios
        self._passed.copy_(torch.where(below & self._passed.isinf(), self._time, self._passed))
        keep = alive[:, None, None]
        self._coord.copy_(torch.where(keep, self._coord, self._start))
        self._velocity.copy_(torch.where(keep, self._velocity, 0.0))
        self._force.copy_(torch.where(keep, self._force, 0.0))
        self._fast.zero_()

    def _nearest(self) -> tuple[Tensor, Tensor]:
        """Return the least ratios of each atom, infinite in empty slots, and their rows of `_least`."""
        neighbor, shift = self._present.neighbor, self._present.shift
        near = neighbor[:, self._columns]
        place = near.clamp(min=0)
        flat, pair = (
            self._coord.reshape(-1, 3),
            (self._kind[:, None], self._atype.reshape(-1)[place]),
        )
        vector = flat[place] - flat[self._order][:, None]
        if shift is not None and self._box is not None:
            vector = vector + torch.einsum(
                "aki,aix->akx", shift[:, self._columns].double(), self._box[self._frame]
            )
        ratio = vector.square().sum(-1).sqrt() / self._shortest[pair]
        ratio = torch.where((near >= 0) & ratio.isfinite(), ratio, math.inf)
        return ratio, (self._frame[:, None] * self._ntypes + pair[0]) * self._ntypes + pair[1]

    def _is_gone(self) -> Tensor:
        """Return which copies blow up now `(ncopies,)`."""
        kelvin = (
            self._mass.mul(self._velocity.square()).sum((1, 2))
            / ACCELERATION
            / BOLTZMANN
            / self._degrees
        )
        return self._fast | ~(kelvin <= self._limit) | ~self._energy.isfinite()

    def _smallest(self) -> Tensor:
        return self._least.view(len(self._natoms), -1).amin(1)

    def _round(self) -> None:
        for _ in range(WATCH):
            self._step()
        self._look()

    @torch.no_grad()
    def run(self, picoseconds: float, times: tuple[float, ...] = ()) -> Watched:
        """Follow the copies, and look at them at some times [ps]; the end is always one."""
        rounds = max(1, round(1e3 * picoseconds / self._time_step / WATCH))
        stops = sorted(
            {
                min(rounds, max(1, round(1e3 * t / self._time_step / WATCH)))
                for t in (*times, picoseconds)
            }
        )
        advance = self._recorded() if self._device.type == "cuda" else self._round
        done, least, energy = 0, [], []
        for stop in stops:
            for _ in range(stop - done):
                advance()
            done = stop
            least.append(self._smallest().cpu().numpy())
            energy.append((self._total() - self._first_energy).cpu().numpy())
        ntypes = self._shortest.shape[0]
        return Watched(
            self._blown.cpu().numpy(),
            self._passed.cpu().numpy(),
            np.array(stops) * 1e-3 * self._time_step * WATCH,
            np.array(least),
            np.array(energy),
            self._least.view(-1, ntypes, ntypes).cpu().numpy(),
        )

    def _recorded(self) -> Any:
        """Return the replay of a graph of some steps and a look; nothing moves meanwhile."""
        state = [value for value in vars(self).values() if isinstance(value, Tensor)]
        before = [value.clone() for value in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._round()  # kernels are compiled
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a trainer's threads may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._round()
        for value, old in zip(state, before, strict=True):
            value.copy_(old)
        return graph.replay


def copies_of(systems: Systems, temperature: Tensor, seed: int) -> Systems:
    """Return the copies with velocities of exactly these temperatures `(ncopies,)` [K]."""
    heated = systems.heated(temperature, torch.Generator().manual_seed(seed))
    scale = (temperature.to(heated.coord.device) / heated.temperature.clamp(min=1e-9)).sqrt()[
        :, None, None
    ]
    return replace(heated, velocity=heated.velocity * scale)
