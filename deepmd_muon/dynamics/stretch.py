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
    device alone. It changes the tensors of `state` in place, and the results of `launch`. `valid`, one of `state`,
    int64, starts at 0 and counts the valid steps before the first that must not be taken; None where all are valid.
    """

    def __init__(
        self,
        force_field: ForceField,
        state: Sequence[torch.Tensor],
        step: Callable[[], None],
        valid: torch.Tensor | None = None,
    ) -> None:
        self._force_field, self._state, self._step, self._valid = force_field, state, step, valid
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
            valid = count if self._valid is None else int(self._valid)
            if valid < count:  # later steps may have led anywhere
                self._undo()
                if not valid:
                    return 0
                count = valid
                continue
            try:
                if self._force_field.settled():
                    return count
            except NeighborError:
                break
            self._restore()
            self._replayed = Replayed(self._step, self._force_field.memory)
        self._undo()
        return 0

    def _undo(self) -> None:
        """Forget the last steps."""
        self._restore()
        self._force_field.discard()

    def _restore(self) -> None:
        for saved, x in zip(self._saved, self._state, strict=True):
            x.copy_(saved)
