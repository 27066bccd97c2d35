"""Several steps of dynamics as replays of one CUDA graph, after which the host checks all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.model.nn.graphs import Replayed

# Bound on the attempts at a stretch of steps, which is repeated when lists had to grow.
_TRIES = 8


class Stretch:
    """Takes steps on the device; if a list was too small in one of them, enlarges it and repeats all steps.

    A step calls `force_field.launch`, for which its structures must have been evaluated, and does other work of the
    device alone. It changes the tensors of `state` in place, and the results of `launch`.
    """

    def __init__(self, force_field: ForceField, state: Sequence[torch.Tensor], step: Callable[[], None]) -> None:
        self._force_field, self._state, self._step = force_field, state, step
        self._saved = [x.clone() for x in state]
        self._replayed = Replayed(step, force_field.memory)

    def __call__(self, count: int) -> bool:
        """Take `count` steps; return False, with the state unchanged, if the host must find the neighbours itself."""
        for saved, x in zip(self._saved, self._state, strict=True):
            saved.copy_(x)
        try:
            for _ in range(_TRIES):
                for _ in range(count):
                    self._replayed()
                if self._force_field.settled():
                    return True
                self.undo()
                self._replayed = Replayed(self._step, self._force_field.memory)
        except NeighborError:
            self.undo()
        return False

    def undo(self) -> None:
        """Restore the state before the last steps."""
        for saved, x in zip(self._saved, self._state, strict=True):
            x.copy_(saved)
