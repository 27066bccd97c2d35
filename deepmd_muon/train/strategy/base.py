"""The interface between the training loop and a way of training; training in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches, branches_of, for_any_name
from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.errors import IdleSettingWarning
from deepmd_muon.optim.other_configs import MuonConfig
from deepmd_muon.optim.routing.routes import adamw_patterns_of
from deepmd_muon.setting import InvalidSettingError
from deepmd_muon.train.checkpoint.optimizer_state import load_optimizer_state
from deepmd_muon.train.process.signals import SIGNALS
from deepmd_muon.train.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Settings that are patterns on names of parameters. Those of `splits` only begin with one, and are
# not translated.
_PATTERNS = (
    "adam_patterns",
    "adamw_patterns",
    "muon_patterns",
    "expert_patterns",
    "local_patterns",
)

BuildWhole = Callable[[], tuple[EnergyModel | Branches, torch.optim.Optimizer]]
"""Makes model and optimizer as a single process has them."""


class Reduced(NamedTuple):
    """Gradients and loss of a step over the batches of all ranks.

    Attributes
    ----------
    gradients
        The gradients for the optimizer, this rank's part of them.
    norm
        Norm of the whole gradient, the same on all ranks; not finite if any rank's gradient is not.
    loss
        Mean of the ranks' losses, the same on all ranks; not finite if any rank's loss is not.
    """

    gradients: list[Tensor]
    norm: Tensor
    loss: Tensor


class Strategy(ABC):
    """How model, gradients and optimizer state are distributed over ranks, and gradients summed.

    Parameters
    ----------
    ranks
        The processes that train together.
    model
        The model, on its device.

    Attributes
    ----------
    stop_signal
        Number of the signal that ends the run after this step; None to go on. The training loop
        reads it before each step. `request_stop` on one rank sets it on all ranks after the same
        step, in `reduce` or `launched`; a single process sets it at once.
    cuts_parameters
        Whether a rank holds only a part of each parameter between steps.
    reads_on_host
        Why a step needs a number on the host. None if a step can wait for nothing, and be captured
        in a CUDA graph. A strategy that does not declare it is not captured.
    """

    cuts_parameters: ClassVar[bool] = False
    reads_on_host: str | None = "the strategy does not say that its steps wait for nothing"
    # The mesh of ranks with the same parameters and gradients, and whether they share the state.
    _replicas: DeviceMesh | None = None
    _state_in_parts = False

    def __init__(self, ranks: Ranks, model: EnergyModel | Branches) -> None:
        self.ranks = ranks
        self.model = model
        self.stop_signal: int | None = None

    def build_optimizer(self, config: Buildable, lr: float) -> torch.optim.Optimizer:
        """Make the run's optimizer, on this rank's parts if parameters are cut."""
        return build_optimizer(
            config, self.model, lr, replicas=self._replicas, state_in_parts=self._state_in_parts
        )

    def load_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        path: Path,
        build_whole: BuildWhole,
    ) -> None:
        """Load the optimizer's state from a checkpoint, before its first step.

        `build_whole` is called if the state must be checked and converted as a whole.
        """
        load_optimizer_state(optimizer, self.model, content, path)

    def overlapping(
        self, branch: EnergyModel | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of a branch's only backward pass before `reduce`.

        Exchanges between ranks may overlap with it.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Combine gradients and loss of all ranks after the backward pass of one branch."""

    @abstractmethod
    def request_stop(self, number: int) -> None:
        """Ask for the end of the run because this process received a signal."""

    def launched(self) -> None:  # noqa: B027 (a single process has nothing to agree on)
        """Do what several ranks do on the host after a step of `DeviceStepper`.

        Such a step waits for nothing, so what it has summed is still on its way to the host.
        """

    def reshard(self) -> None:  # noqa: B027 (nothing to do if parameters are never gathered)
        """Free parameters that a forward-only pass has gathered."""


class Alone(Strategy):
    """A single process, which holds everything."""

    reads_on_host = None

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Return this process's gradients, their norm and the loss."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        return Reduced(gradients, torch.nn.utils.get_total_norm(gradients), loss)

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """The parameters with gradients; to walk the modules would take 1 % of a small step."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def request_stop(self, number: int) -> None:
        """End the run after this step."""
        self.stop_signal = number


class SeveralRanks(Strategy):
    """A strategy with ranks that sum loss and requests to stop together with their gradients."""

    def __init__(self, ranks: Ranks, model: EnergyModel | Branches) -> None:
        super().__init__(ranks, model)
        self._requested: int | None = None

    def request_stop(self, number: int) -> None:
        """Tell the other ranks of a signal with the next `reduce`, which ends the run on all."""
        self._requested = number

    def _loss_and_requests(self, loss: Tensor) -> Tensor:
        """Return the values to sum with the gradients: the loss, and one flag for each signal."""
        requests = [loss.new_tensor(float(self._requested == number)) for number in SIGNALS]
        return torch.stack([loss, *requests])

    def _agree(self, counts: Sequence[float]) -> None:
        """Take the number of ranks that have received each signal, in the order of `SIGNALS`.

        If ranks have received different signals, the run ends by the first of `SIGNALS`.
        """
        received = [number for number, count in zip(SIGNALS, counts, strict=True) if count]
        self.stop_signal = int(received[0]) if received else None

    def load_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        path: Path,
        build_whole: BuildWhole,
    ) -> None:
        """Load the part of the optimizer's state that this rank keeps.

        An optimizer of a single process reads the whole state first, with all checks and
        conversions.
        """
        model, reader = build_whole()
        load_optimizer_state(reader, model, content, path)
        with self.ranks.barrier("loading optimizer state"):
            self._take_state(optimizer, reader.state_dict())

    @abstractmethod
    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        """Take this rank's part of the state of an optimizer of the whole model."""


def build_optimizer(
    config: Buildable,
    model: nn.Module,
    lr: float,
    *,
    replicas: DeviceMesh | None = None,
    state_in_parts: bool = False,
) -> torch.optim.Optimizer:
    """Make the run's optimizer.

    The ranks of `replicas` hold the same parameters and gradients: HybridMuon shares its work among
    them, other optimizers take the same step on each. With `state_in_parts` each of them keeps a
    part of the optimizer's state.

    DeePMD's weights are stored (in, out), so `layout` 'auto' becomes 'in_out'. A pattern matches
    a parameter that several branches share if it matches the name in any of them.
    """
    if isinstance(config, HybridMuonConfig | MuonConfig):
        return _build_muon(config, model, lr, replicas=replicas, state_in_parts=state_in_parts)
    optimizer = config.build(model, lr, replicas if state_in_parts else None)
    if not all("param_names" in group for group in optimizer.param_groups):
        raise InvalidSettingError(
            f"optimizer: {type(config).__name__}.build made {type(optimizer).__name__} without "
            "names of parameters, which checkpoints need; give it model.named_parameters()"
        )
    return optimizer


def _build_muon(
    config: HybridMuonConfig | MuonConfig,
    model: nn.Module,
    lr: float,
    *,
    replicas: DeviceMesh | None,
    state_in_parts: bool,
) -> torch.optim.Optimizer:
    if isinstance(config, HybridMuonConfig) and isinstance(model, Branches):
        patterns: dict[str, Any] = {
            key: for_any_name(getattr(config, key), model) for key in _PATTERNS
        }
        config = dataclasses.replace(config, **patterns)
    if isinstance(config, MuonConfig):
        config = config.for_potentials()
    if isinstance(config, HybridMuonConfig):
        declared = _declared_adamw(model, config)
        config = dataclasses.replace(config, adamw_patterns=(*config.adamw_patterns, *declared))
    if config.layout == "auto":
        config = dataclasses.replace(config, layout="in_out")
    if state_in_parts:
        sharded = dataclasses.replace(config.sharded, state="sharded")
        config = dataclasses.replace(config, sharded=sharded)
    with warnings.catch_warnings():
        # The input check has named idle settings in the words of the input; `layout` is not in it.
        warnings.simplefilter("ignore", IdleSettingWarning)
        return config.build(model, lr, replicas)


def _declared_adamw(model: nn.Module, config: HybridMuonConfig) -> tuple[str, ...]:
    """Return patterns for the matrices that models leave to AdamW, see `adamw_substrings`."""
    models = branches_of(model).values() if isinstance(model, EnergyModel | Branches) else ()
    substrings = [
        substring for branch_model in models for substring in branch_model.adamw_substrings
    ]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return adamw_patterns_of(substrings, shapes, config.muon_mode) if substrings else ()
