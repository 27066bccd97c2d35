"""Energy models: from structures to energies, forces and virial, with deepmd-kit's parameter names."""

from deepmd_muon.model.descriptor.se_e2_a import SeE2A
from deepmd_muon.model.energy_model import EnergyModel, build_model
from deepmd_muon.model.errors import CheckpointError, CheckpointFileError, ModelError
from deepmd_muon.model.fitting import EnergyFitting
from deepmd_muon.model.registry import Described, Descriptor, Fitting, register_descriptor, register_fitting
from deepmd_muon.model.statistics import environment_statistics
from deepmd_muon.model.structures import Structures

__all__ = [
    "CheckpointError",
    "CheckpointFileError",
    "Described",
    "Descriptor",
    "EnergyFitting",
    "EnergyModel",
    "Fitting",
    "ModelError",
    "SeE2A",
    "Structures",
    "build_model",
    "environment_statistics",
    "register_descriptor",
    "register_fitting",
]
