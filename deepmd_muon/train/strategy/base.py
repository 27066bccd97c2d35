"""The interface between the training loop and a way of training."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches, for_any_name
from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.errors import IdleSettingWarning
from deepmd_muon.optim.other_configs import MuonConfig
from deepmd_muon.setting import InvalidSettingError
from deepmd_muon.train.checkpoint.optimizer_state import load_optimizer_state
from deepmd_muon.train.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Settings that are patterns on names of parameters; those of `splits` begin with one, and are taken as they are.
_PATTERNS = (
    "adam_patterns",
    "adamw_patterns",
    "muon_patterns",
    "expert_patterns",
    "local_patterns",
)


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
        A strategy that does not declare it is not captured.
    """

    cuts_parameters: ClassVar[bool] = False
    reads_on_host: str | None = "the strategy does not say that its steps wait for nothing"
    _replicas: DeviceMesh | None = None
    _state_in_parts = False

    def __init__(self, ranks: Ranks, model: EnergyModel | Branches) -> None:
        self.ranks = ranks
        self.model = model
        self.stop_signal: int | None = None

    def build_optimizer(self, config: Buildable, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer, on this rank's parts where parameters are cut."""
        return build_optimizer(
            config, self.model, lr, replicas=self._replicas, state_in_parts=self._state_in_parts
        )

    def load_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        source: Path,
        build_whole: Callable[[], tuple[EnergyModel | Branches, torch.optim.Optimizer]],
    ) -> None:
        """Load the optimizer's state from a checkpoint, before its first step.

        Tensors of a directory may be meta tensors. `build_whole` makes the model and an optimizer as a single process
        has them, for a state that must be converted whole.
        """
        load_optimizer_state(optimizer, self.model, content, source)

    def overlapping(
        self, branch: EnergyModel | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of the only backward pass of a `branch` before `reduce`, with which exchanges overlap."""
        return contextlib.nullcontext()

    @abstractmethod
    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Combine gradients and loss of all ranks after the backward pass of one `branch`, where there are several."""

    @abstractmethod
    def request_stop(self, number: int) -> None:
        """Ask for the end of the run because this process received a signal."""

    def launched(self) -> None:  # noqa: B027 (a single process has nothing to agree on)
        """Do what several ranks do on the host after every step that waits for nothing."""

    def reshard(self) -> None:  # noqa: B027 (nothing to do where parameters are never gathered)
        """Free parameters that a forward-only pass has gathered."""


def build_optimizer(
    config: Buildable,
    model: nn.Module,
    lr: float,
    *,
    replicas: DeviceMesh | None = None,
    state_in_parts: bool = False,
) -> torch.optim.Optimizer:
    """Make the run's optimizer.

    The ranks of `replicas` hold the same parameters and gradients: HybridMuon shares its work among them, the others
    take the same step on each. With `state_in_parts` each of them keeps a part of the optimizer's state.

    DeePMD's weights are stored (in, out), so `layout` 'auto' becomes 'in_out'. A parameter that several branches share
    has the name of each for patterns.
    """
    if isinstance(config, HybridMuonConfig | MuonConfig):
        if isinstance(config, HybridMuonConfig) and isinstance(model, Branches):
            found: dict[str, Any] = {
                key: for_any_name(getattr(config, key), model) for key in _PATTERNS
            }
            config = dataclasses.replace(config, **found)
        if config.layout == "auto":
            config = dataclasses.replace(config, layout="in_out")
        if state_in_parts:
            config = dataclasses.replace(
                config, sharded=dataclasses.replace(config.sharded, state="sharded")
            )
        with warnings.catch_warnings():
            # The input check has named them in the words of the input, which `layout` above is not from.
            warnings.simplefilter("ignore", IdleSettingWarning)
            return config.build(model, lr, replicas)
    optimizer = config.build(model, lr, replicas if state_in_parts else None)
    if not all("param_names" in group for group in optimizer.param_groups):
        raise InvalidSettingError(
            f"optimizer: {type(config).__name__}.build made {type(optimizer).__name__} without names of "
            "parameters, which checkpoints need; give it model.named_parameters()"
        )
    return optimizer
