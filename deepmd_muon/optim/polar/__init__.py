"""The polar factor of batches of matrices by Newton–Schulz iteration.

(The package is not called `orthogonalize` because that is the name of its public function.)
"""

from deepmd_muon.optim.polar.newton_schulz import orthogonalize, orthogonalize_matrices
from deepmd_muon.optim.polar.schedules import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "Schedule", "orthogonalize", "orthogonalize_matrices"]
