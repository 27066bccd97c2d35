"""Change deepmd-kit's trainers: they make this package's HybridMuon and load its state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from deepmd_muon import __version__
from deepmd_muon.deepmd_kit.checkpoint import laid_out, with_names
from deepmd_muon.deepmd_kit.optimizer import DeepmdKitHybridMuon
from deepmd_muon.deepmd_kit.settings import further_settings
from deepmd_muon.deepmd_kit.zero_redundancy import ZeroRedundancyHybridMuon
from deepmd_muon.optim.routing.routes import adamw_patterns_of

log = logging.getLogger(__name__)

_Trainer: Any = object


class UnsupportedDeepmdKitError(RuntimeError):
    """The installed deepmd-kit lacks the methods that this package overrides."""


class HybridMuonTrainer(_Trainer):
    """Mixed into a trainer of deepmd-kit, before its own class."""

    def __init__(self, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        section = config.get("optimizer", {})
        # Show this package's messages where deepmd-kit shows its own.
        deepmd_kit_log = logging.getLogger("deepmd")
        package_log = logging.getLogger("deepmd_muon")
        package_log.setLevel(deepmd_kit_log.getEffectiveLevel())
        for handler in deepmd_kit_log.handlers:
            package_log.addHandler(handler)
        self._further: dict[str, Any] = {}
        if section.get("type") == "HybridMuon":
            self._further = further_settings(section)
        else:
            log.warning(
                "DEEPMD_MUON=1 changes nothing: the optimizer is %s", section.get("type", "Adam")
            )
        super().__init__(config, *args, **kwargs)

    def _create_optimizer(self, optimizer_class: type, **settings: Any) -> torch.optim.Optimizer:
        """Make this package's optimizer if deepmd-kit asks for its HybridMuon."""
        optimizer: torch.optim.Optimizer
        if optimizer_class.__name__ != "HybridMuonOptimizer":
            optimizer = super()._create_optimizer(optimizer_class, **settings)
            return optimizer
        # deepmd-kit's way around gaps of torch; HybridMuon does not need it.
        settings.pop("use_foreach", None)
        # `_further` has the two settings that it stands for.
        settings.pop("lr_adjust", None)
        named_parameters = list(self.wrapper.named_parameters())
        # deepmd-kit after 3.2.0: substrings of names that its models leave to AdamW. Our setting of
        # this name has shell patterns for Adam without decay.
        if substrings := settings.pop("adam_patterns", None):
            shapes = {name: p.shape for name, p in named_parameters}
            declared = adamw_patterns_of(substrings, shapes, settings["muon_mode"])
            self._further["adamw_patterns"] = (*self._further["adamw_patterns"], *declared)
        if self.sharding.stage == 1:
            sharded = ZeroRedundancyHybridMuon(named_parameters, **settings, **self._further)
            optimizer = sharded
            routing = sharded.optim.routing
            routed = "parameters of the first rank"
        else:
            hybrid_muon = DeepmdKitHybridMuon(named_parameters, **settings, **self._further)
            optimizer = hybrid_muon
            routing = hybrid_muon.routing
            routed = "all parameters"
        if self.rank == 0:
            log.info(
                "HybridMuon of deepmd-muon %s in place of deepmd-kit's (DEEPMD_MUON=1)", __version__
            )
            log.info("routing of %s: %s", routed, routing.summary())
            log.debug("routes of %s:\n%s", routed, routing)
        return optimizer

    def _load_optimizer_state(self, optimizer_state_dict: Mapping[str, Any] | None) -> None:
        """Load the state of a checkpoint of either class, saved at any `zero_stage`."""
        is_ours = isinstance(self.optimizer, (DeepmdKitHybridMuon, ZeroRedundancyHybridMuon))
        if not is_ours or optimizer_state_dict is None or not self.restart_training:
            super()._load_optimizer_state(optimizer_state_dict)
            return
        names = [name for name, _ in self.wrapper.named_parameters()]
        state = with_names(optimizer_state_dict, names, self.start_step + 1)
        if isinstance(self.optimizer, DeepmdKitHybridMuon):
            state = laid_out(state, self.optimizer)
        self.optimizer.load_state_dict(state)


def extend(module: ModuleType) -> None:
    """Replace a module's ``Trainer`` by one that makes this package's HybridMuon.

    Raises
    ------
    UnsupportedDeepmdKitError
        When the module's trainer lacks the methods that `HybridMuonTrainer` overrides.
    """
    trainer: Any = getattr(module, "Trainer", None)
    overridden = ("_create_optimizer", "_load_optimizer_state")
    missing = [name for name in overridden if not hasattr(trainer, name)]
    if missing:
        raise UnsupportedDeepmdKitError(
            f"{module.__name__}.Trainer has no {' and no '.join(missing)}: DEEPMD_MUON=1 works "
            "with deepmd-kit 3.2; install that, or unset DEEPMD_MUON to train with deepmd-kit's "
            "own optimizer"
        )
    namespace = {"__module__": module.__name__}
    extended: Any = module
    extended.Trainer = type("Trainer", (HybridMuonTrainer, trainer), namespace)
