"""The interface between the training loop and a way of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.train.optimizers import build_optimizer
from deepmd_muon.train.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Reduced(NamedTuple):
    """Gradients and loss of a step over the batches of all ranks.

    Attributes
    ----------
    gradients
        The gradients for the optimizer, this rank's part of them.
    norm
        Norm of the whole gradient, the same on all ranks; not finite where any rank's gradient is not.
    loss
        Mean of the ranks' losses, the same on all ranks; not finite where any rank's loss is not.
    """

    gradients: list[Tensor]
    norm: Tensor
    loss: Tensor


class Strategy(ABC):
    """The distribution of model, gradients and optimizer state over ranks, and the sum of gradients.

    Parameters
    ----------
    ranks
        The processes that train together.
    model
        The model, on its device.

    Attributes
    ----------
    stop_signal
        Number of the signal that ends the run after this step, the same on all ranks; None to go on.
    cuts_parameters
        Whether a rank holds only a part of each parameter between steps.
    reads_on_host
        Why a step needs a number on the host; None where a step can wait for nothing, and be captured in a CUDA graph.
    captured_by_default
        Whether `capture: auto` captures such steps.
    """

    cuts_parameters: ClassVar[bool] = False
    reads_on_host: str | None = None
    captured_by_default = True
    _replicas: DeviceMesh | None = None
    _state_in_parts = False

    def __init__(self, ranks: Ranks, model: EnergyModel | Branches) -> None:
        self.ranks = ranks
        self.model = model
        self.stop_signal: int | None = None

    def build_optimizer(self, config: Buildable, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer, on this rank's parts where parameters are cut."""
        return build_optimizer(config, self.model, lr, replicas=self._replicas, state_in_parts=self._state_in_parts)

    @abstractmethod
    def load_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        source: Path,
        build_whole: Callable[[], tuple[EnergyModel | Branches, torch.optim.Optimizer]],
    ) -> None:
        """Load the optimizer's state from a checkpoint.

        Parameters
        ----------
        optimizer
            Made by `build_optimizer`, before its first step.
        content
            The checkpoint; tensors of a directory may be meta tensors.
        source
            Its path.
        build_whole
            Makes the model and an optimizer as a single process has them, for a state that must be converted whole.
        """

    @abstractmethod
    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Combine gradients and loss of all ranks after the backward pass.

        Parameters
        ----------
        loss
            Of this rank's batch.
        branch
            The model that the step trains, where there are several.
        """

    @abstractmethod
    def request_stop(self, number: int) -> None:
        """Ask for the end of the run because this process received a signal."""

    def launched(self) -> None:  # noqa: B027 (a single process has nothing to agree on)
        """Do what several ranks do on the host after every step that waits for nothing."""

    def reshard(self) -> None:  # noqa: B027 (nothing to do where parameters are never gathered)
        """Free parameters that a forward-only pass has gathered."""
