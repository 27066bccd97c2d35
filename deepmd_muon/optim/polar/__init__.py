"""The polar factor of batches of matrices by Newton–Schulz iteration."""

from deepmd_muon.optim.polar.orthogonalization import orthogonalize, orthogonalize_matrices
from deepmd_muon.optim.polar.schedules import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "Schedule", "orthogonalize", "orthogonalize_matrices"]
