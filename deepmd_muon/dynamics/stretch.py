"""Several steps of dynamics as replays of one CUDA graph, checked by the host at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.model.nn.graphs import Replayed

# Largest number of attempts at a stretch. It is repeated when neighbour lists had to grow.
_MAX_ATTEMPTS = 8


class Stretch:
    """Does steps on the device; if a list was too small, enlarges it and repeats all steps.

    Parameters
    ----------
    force_field
        The potential; `launchable` must be true whenever steps are done.
    state
        The tensors that a step changes in place.
    step
        Launches one step: it calls `force_field.launch`, and waits for nothing.
    valid_steps
        One of `state`, int64 `(1,)`, 0 at the start. Steps count in it the valid steps before the
        first that fails.
    """

    def __init__(
        self,
        force_field: ForceField,
        state: Sequence[Tensor],
        step: Callable[[], None],
        valid_steps: Tensor,
    ) -> None:
        self._force_field = force_field
        self._state = state
        self._step = step
        self._valid_steps = valid_steps
        self._saved = [x.clone() for x in state]
        self._record_again()

    def __call__(self, steps: int) -> int:
        """Do `steps` steps, or those before the first that fails; return their number.

        It is 0, with the state unchanged, also if the host must find the neighbours itself.
        """
        if self._recorded_version != self._force_field.version:
            self._record_again()
        for saved, x in zip(self._saved, self._state, strict=True):
            saved.copy_(x)
        for _ in range(_MAX_ATTEMPTS):
            for _ in range(steps):
                self._replayed()
            # Reading the number waits for the device.
            valid = int(self._valid_steps)
            if valid < steps:
                # Steps after a failure may have led anywhere: repeat only those before it.
                self._undo()
                if valid == 0:
                    return 0
                steps = valid
                continue
            try:
                if self._force_field.settled():
                    return steps
            except NeighborError:
                break
            self._restore()
            self._record_again()  # the lists have grown
        self._undo()
        return 0

    def _record_again(self) -> None:
        self._replayed = Replayed(self._step, self._force_field.memory)
        self._recorded_version = self._force_field.version

    def _undo(self) -> None:
        """Forget the steps of the last attempt."""
        self._restore()
        self._force_field.discard()

    def _restore(self) -> None:
        for saved, x in zip(self._saved, self._state, strict=True):
            x.copy_(saved)
