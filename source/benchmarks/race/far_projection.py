"""Muon's step without what changes the forces far from the data most, for the experiment on stability.

Anchors are structures of hot dynamics of the present weights that leave the data or are too stiff, without labels
(`anchors.py`). Between two looks, some steps apart, their forces change by ΔF. The gradient of ½ ‖ΔF‖² with respect to
a matrix is the direction in which the matrix changes these forces further. The last `DIRECTIONS` gradients,
orthonormal for each matrix, are taken off its polar factor::

    O ← O − Σ q ⟨q, O⟩,   ⟨q, q'⟩ = 1 where q is q', else 0

Weights of Adam's routes move as usual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from anchors import AnchoredRun, Anchors, RunAnchors, Surroundings, exactly
from torch import Tensor

from deepmd_muon.model import EnergyModel
from deepmd_muon.optim import MatrixRule, StateTensor, register_rule
from deepmd_muon.optim.rules.interface import BlockState
from deepmd_muon.train.step.step import TrainingStep

#: Gradients that are taken off, of the last looks.
DIRECTIONS = 4
KEYS = tuple(f"far_{number}" for number in range(DIRECTIONS))
#: A gradient shrinks by this factor at most when older ones lose their part along newer ones; else it is dropped.
DEPENDENT = 1e-4


@dataclasses.dataclass(frozen=True)
class FarProjection(MatrixRule):
    """The projection as a rule; its state are the directions q, which the run's looks write."""

    name = "far_projection"

    def tensors(self) -> dict[str, StateTensor]:
        """Return the directions, with the shape of the matrix; zeros take nothing off."""
        return {key: StateTensor("rows", "moment", along="columns") for key in KEYS}

    def transform(
        self, polar: Sequence[Tensor], directions: Sequence[Tensor], state: BlockState
    ) -> tuple[Sequence[Tensor], BlockState]:
        """Return the polar factors without their parts along the directions."""
        projected = list(polar)
        for key in KEYS:
            projected = [
                o - q * (q * o).sum((1, 2), keepdim=True)
                for o, q in zip(projected, state[key], strict=True)
            ]
        return projected, {}


register_rule(FarProjection())


@dataclass(frozen=True)
class Projection(Anchors):
    """When the anchors of the projection start, and how often they are looked at; see `Anchors`."""

    hand_over: int = 1000
    explore_every: int = 1000


def orthonormal(newest: Tensor, older: Sequence[Tensor]) -> list[Tensor]:
    """Return the newest matrix and older ones, each without its parts along newer ones, of norm 1 or zero."""
    found: list[Tensor] = []
    for x in (newest, *older):
        rest = x
        for q in found:
            rest = rest - q * (q * rest).sum()
        length = torch.linalg.vector_norm(rest)
        independent = length > DEPENDENT * torch.linalg.vector_norm(x)
        found.append(torch.where(independent, rest / length.clamp_min(1e-30), 0.0))
    return found


class ProjectedRun(AnchoredRun):
    """Dynamics of the present weights, and the directions in which their forces change most."""

    def __init__(self, model: EnergyModel, surroundings: Surroundings, anchors: Anchors) -> None:
        super().__init__(model, surroundings, anchors)
        self._watched_coord = self._coord.clone()
        self._watched_force = self._force.clone()
        # Copies whose dynamics have found no anchor yet do not count (copies, 1, 1).
        self._has_anchor = torch.zeros_like(self._coord[:, :1, :1])
        self.looked = torch.zeros((), dtype=torch.int64, device=self._coord.device)
        self.change = torch.zeros((), dtype=torch.float64, device=self._coord.device)

    def change_gradients(self, model: EnergyModel, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of ½ ‖ΔF‖² since the last look, and look at other structures."""
        structures = self._structures(self._watched_coord)
        with exactly(model):
            force = model(structures, force=True, virial=False)["force"]
        difference = (force - self._watched_force) * self._has_anchor
        half_square = 0.5 * difference.square().sum()
        gradients = torch.autograd.grad(half_square, list(parameters), materialize_grads=True)
        self.change.add_(difference.detach().square().mean())
        self.looked.add_(1)
        self._watch_others(model)
        return list(gradients)

    @torch.no_grad()
    def _watch_others(self, model: EnergyModel) -> None:
        """Take the next structures of the ring, where a copy has some, with their present forces."""
        count = self.taken.clamp(max=self._ring.shape[1])
        slot = (self._turn + 5 * self._rows) % count.clamp(min=1)
        self._turn.add_(1)
        self._watched_coord.copy_(self._ring[self._rows, slot])
        self._has_anchor.copy_((count > 0)[:, None, None])
        with exactly(model):
            structures = self._structures(self._watched_coord)
            self._watched_force.copy_(model(structures, force=True, virial=False)["force"])


class RunProjection(RunAnchors):
    """The projection of a training run."""

    dynamics_type = ProjectedRun

    def act(self, step: TrainingStep, dynamics: Any, lr_fraction: float | Tensor) -> None:
        """Write new directions into the optimizer's state."""
        states = {p: state for p, state in step.optimizer.state.items() if KEYS[0] in state}
        gradients = dynamics.change_gradients(step._model, list(states))
        for gradient, state in zip(gradients, states.values(), strict=True):
            older = [state[key] for key in KEYS[:-1]]
            directions = orthonormal(gradient.to(older[0].dtype).view_as(older[0]), older)
            for key, direction in zip(KEYS, directions, strict=True):
                state[key].copy_(direction)

    def counts(self) -> dict[str, float]:
        """Return also how much forces changed between two looks, root mean square [eV/Å]."""
        run = self._dynamics
        if not isinstance(run, ProjectedRun):
            return {}
        looked = int(run.looked)
        change = (float(run.change) / max(1, looked)) ** 0.5
        return {**super().counts(), "looked": looked, "change": change}
