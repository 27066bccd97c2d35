"""Common parts of the strategies of several ranks: agreeing on signals, and reading optimizer state."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.checkpoint_file.directory import is_directory
from deepmd_muon.checkpoint_file.file import checkpoint_path, read_checkpoint
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.train.checkpoint.optimizer_state import load_optimizer_state, read_state_part
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.strategy.base import Strategy

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SeveralRanks(Strategy):
    """A strategy whose ranks sum loss and stop requests together with their gradients."""

    def __init__(self, ranks: Ranks, model: EnergyModel | Branches) -> None:
        super().__init__(ranks, model)
        self._requested: int | None = None

    def request_stop(self, number: int) -> None:
        """Tell the other ranks of a signal with the next `reduce`, which ends the run on all of them."""
        self._requested = number

    def _loss_and_requests(self, loss: Tensor) -> Tensor:
        """Return the values to sum with the gradients: the loss, and one flag for each signal."""
        return torch.stack(
            [loss, *(loss.new_tensor(float(self._requested == number)) for number in SIGNALS)]
        )

    def _agree(self, counts: Sequence[float]) -> None:
        """Take the number of ranks that have received each signal."""
        self.stop_signal = next(
            (int(number) for number, count in zip(SIGNALS, counts, strict=True) if count), None
        )

    def load_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        source: Path,
        build_whole: Callable[[], tuple[EnergyModel | Branches, torch.optim.Optimizer]],
    ) -> None:
        """Load the part of the optimizer's state that this rank keeps; see `Strategy.load_optimizer_state`."""
        path = checkpoint_path(source)
        if is_directory(path):
            if read_state_part(optimizer, content, path):
                return
            content = read_checkpoint(path)
        # An optimizer of one process reads it, with all checks and conversions; the ranks take their parts of that.
        model, reader = build_whole()
        load_optimizer_state(reader, model, content, source)
        with self.ranks.barrier("loading optimizer state"):
            self._take_state(optimizer, reader.state_dict())

    @abstractmethod
    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        """Take the state, or this rank's part of it, of an optimizer of the whole model in the same order."""
