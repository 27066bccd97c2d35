"""The interface by which settings classes make optimizers, and the table of builders.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deepmd_muon.optim.errors import IdleSettingWarning, warn_caller
from deepmd_muon.setting import check_settings, idle_settings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    Replicas = DeviceMesh | ProcessGroup

Builder = TypeVar("Builder", bound="Callable[..., Any]")

# The function that makes the optimizer of each settings class. `deepmd_muon.optim.build` registers
# them. It needs torch, which settings must not import, so `IMPORT_BUILDERS` imports it when the
# first optimizer is built.
_BUILDERS: dict[type, Callable[..., Optimizer]] = {}
IMPORT_BUILDERS: list[Callable[[], object]] = []


def register_builder(settings: type) -> Callable[[Builder], Builder]:
    """Decorate the function that makes the optimizer of a settings class."""

    def register(build: Builder) -> Builder:
        _BUILDERS[settings] = build
        return build

    return register


def _builder_of(settings: object) -> Callable[..., Optimizer]:
    if type(settings) not in _BUILDERS:
        for load in IMPORT_BUILDERS:
            load()
    return _BUILDERS[type(settings)]


def _warn_idle_settings(config: Any) -> None:
    """Warn of settings that have no effect beside the others.

    Of an input, the input check says it.
    """
    idle = idle_settings(config)
    if idle:
        text = "; ".join(f"{name} {reason}" for name, reason in idle.items())
        warn_caller(IdleSettingWarning(f"{type(config).__name__}: {text}"))


def _check_model(model: object) -> None:
    """Raise TypeError for parameters in place of a model."""
    if not hasattr(model, "named_parameters"):
        raise TypeError(
            f"build takes a model (torch.nn.Module), found {type(model).__name__}; HybridMuon "
            "takes named parameters"
        )


class OptimizerSettings(Protocol):
    """The interface of every configuration, including those of third parties."""

    def build(
        self, model: nn.Module, lr: float | Tensor | None = None, replicas: Replicas | None = None
    ) -> Optimizer:
        """Make the optimizer for the named parameters of a model.

        Parameters
        ----------
        lr
            Learning rate; None means the configuration's own.
        replicas
            Ranks on which parameters and gradients are equal (DDP). HybridMuon shares its work
            among them; Adam and AdamW shard their state over them (ZeRO-1).
        """
        ...


class Buildable:
    """A configuration that checks its values.

    A registered builder makes its optimizer. See `OptimizerSettings`.
    """

    own_lr = 1e-3

    def __post_init__(self) -> None:
        check_settings(self)

    def build(
        self, model: nn.Module, lr: float | Tensor | None = None, replicas: Replicas | None = None
    ) -> Optimizer:
        """Make this optimizer for the named parameters of `model`; see `OptimizerSettings`."""
        _check_model(model)
        _warn_idle_settings(self)
        return _builder_of(self)(self, model, self.own_lr if lr is None else lr, replicas)


class MuonBuildable(Buildable):
    """A configuration that is built as a `HybridMuon`."""

    def build(
        self,
        model: nn.Module,
        lr: float | Tensor | None = None,
        replicas: Replicas | None = None,
        qk_clip: Any = None,
        **arguments: Any,
    ) -> Optimizer:
        """Make this optimizer for the named parameters of `model`; see `OptimizerSettings`.

        A `deepmd_muon.optim.qk_clip.QKClip` names attention layers whose logits stay below a
        threshold. `arguments` are further ones of `HybridMuon`, such as `workspace`.
        """
        _check_model(model)
        _warn_idle_settings(self)
        lr = self.own_lr if lr is None else lr
        return _builder_of(self)(self, model, lr, replicas, qk_clip, **arguments)
