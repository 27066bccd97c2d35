"""Energy models: from structures to energies, forces and virial, with deepmd-kit's parameter names.

Importing this package imports no torch: the input check reads the settings of the parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.checkpoint_file.errors import CheckpointError
    from deepmd_muon.model.descriptor.interface import Described, Descriptor, describe_by_autograd
    from deepmd_muon.model.descriptor.settings import DescriptorSettings, NeighborRequest
    from deepmd_muon.model.energy_model import DescriptorModel, build_model
    from deepmd_muon.model.errors import ForeignModelError, ModelError
    from deepmd_muon.model.fitting.interface import Fitting
    from deepmd_muon.model.interface import EnergyModel
    from deepmd_muon.model.registry import register_descriptor, register_fitting
    from deepmd_muon.model.settings import ModelSettings
    from deepmd_muon.model.statistics import environment_statistics
    from deepmd_muon.model.structures import Structures

_HOME = {
    "CheckpointError": "errors",
    "Described": "descriptor.interface",
    "Descriptor": "descriptor.interface",
    "DescriptorModel": "energy_model",
    "DescriptorSettings": "descriptor.settings",
    "EnergyModel": "interface",
    "Fitting": "fitting.interface",
    "ForeignModelError": "errors",
    "ModelError": "errors",
    "ModelSettings": "settings",
    "NeighborRequest": "descriptor.settings",
    "Structures": "structures",
    "build_model": "energy_model",
    "describe_by_autograd": "descriptor.interface",
    "environment_statistics": "statistics",
    "register_descriptor": "registry",
    "register_fitting": "registry",
}

__all__ = [
    "CheckpointError",
    "Described",
    "Descriptor",
    "DescriptorModel",
    "DescriptorSettings",
    "EnergyModel",
    "Fitting",
    "ForeignModelError",
    "ModelError",
    "ModelSettings",
    "NeighborRequest",
    "Structures",
    "build_model",
    "describe_by_autograd",
    "environment_statistics",
    "register_descriptor",
    "register_fitting",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
