"""Training data: systems on disk, batches, neighbour lists and statistics, as plain numpy arrays.

Needs numpy, h5py and vesin; torch is not imported here.
"""

from deepmd_muon.data.errors import (
    DataError,
    NeighborError,
    SamplerStateError,
    SamplingError,
    SystemFormatError,
    SystemNotFoundError,
    TypeMapError,
)
from deepmd_muon.data.frames import Frames, Parameters
from deepmd_muon.data.neighbors.cache import NeighborCache, neighbor_statistics, worker_count
from deepmd_muon.data.neighbors.lists import (
    FrameNeighbors,
    NeighborList,
    NeighborStatistics,
    build_neighbors,
    group_limits,
    stack_neighbors,
    widen_sections,
)
from deepmd_muon.data.opening import (
    open_systems,
    register_format,
    with_common_types,
    with_parameters,
)
from deepmd_muon.data.sampling.loader import Batch, DataLoader, Seats
from deepmd_muon.data.sampling.sampler import BatchRule, Plan, Sampler, system_probabilities
from deepmd_muon.data.statistics import (
    StatFile,
    data_fingerprint,
    energy_bias,
)
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.data.system import System

__all__ = [
    "Batch",
    "BatchRule",
    "DataError",
    "DataLoader",
    "FrameNeighbors",
    "Frames",
    "MemoryStore",
    "NeighborCache",
    "NeighborError",
    "NeighborList",
    "NeighborStatistics",
    "Parameters",
    "Plan",
    "Sampler",
    "SamplerStateError",
    "SamplingError",
    "Seats",
    "StatFile",
    "System",
    "SystemFormatError",
    "SystemNotFoundError",
    "TypeMapError",
    "build_neighbors",
    "data_fingerprint",
    "energy_bias",
    "group_limits",
    "neighbor_statistics",
    "open_systems",
    "register_format",
    "stack_neighbors",
    "system_probabilities",
    "widen_sections",
    "with_common_types",
    "with_parameters",
    "worker_count",
]
