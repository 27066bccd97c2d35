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
    device alone. It changes the tensors of `state` in place, and the results of `launch`. One of `state` may be `good`:
    it counts the steps until one must not be taken; from 0, int64.
    """

    def __init__(
        self,
        force_field: ForceField,
        state: Sequence[torch.Tensor],
        step: Callable[[], None],
        good: torch.Tensor | None = None,
    ) -> None:
        self._force_field, self._state, self._step, self._good = force_field, state, step, good
        self._saved = [x.clone() for x in state]
        self._replayed = Replayed(step, force_field.memory)

    def __call__(self, count: int) -> int:
        """Take `count` steps or, if one of them must not be taken, those before it; return how many.

        It is 0, with the state unchanged, also if the host must find the neighbours itself.
        """
        for saved, x in zip(self._saved, self._state, strict=True):
            saved.copy_(x)
        for _ in range(_TRIES):
            for _ in range(count):
                self._replayed()
            good = count if self._good is None else int(self._good)
            if 0 < good < count:
                self._undo()
                self._force_field.discard()  # a step that must not be taken may lead to any positions
                count = good
                continue
            try:
                fits = self._force_field.settled()
            except NeighborError:
                break
            if fits and good:
                return count
            self._undo()
            if fits:
                return 0
            self._replayed = Replayed(self._step, self._force_field.memory)
        self._undo()
        return 0

    def _undo(self) -> None:
        for saved, x in zip(self._saved, self._state, strict=True):
            x.copy_(saved)
