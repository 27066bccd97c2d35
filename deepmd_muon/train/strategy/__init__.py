"""Ways of training: one process, replicas (stages 0 and 1), or parameters cut over ranks (2 and 3).

The training loop knows one object, a `Strategy`. It decides which rank holds parameters, gradients
and optimizer state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_muon.argcheck.training import MultiTaskTrainingSettings
from deepmd_muon.model.branches import branches_of
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.strategy.base import Alone, Reduced, Strategy

if TYPE_CHECKING:
    from deepmd_muon.argcheck import RunSettings
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.model.branches import Branches
    from deepmd_muon.train.ranks.ranks import Ranks

__all__ = ["Reduced", "Strategy", "choose_strategy"]


def choose_strategy(training: RunSettings, ranks: Ranks, model: EnergyModel | Branches) -> Strategy:
    """Make the strategy that `zero_stage` and the number of processes ask for.

    The model is equal on all ranks, on its device; stages 2 and 3 cut its parameters in place. A
    single process trains alone at any stage.

    Raises
    ------
    TrainingError
        If the ranks cannot form the groups that are asked for.
    """
    if ranks.size == 1:
        return Alone(ranks, model)
    stage = training.zero_stage
    stratified = isinstance(training, MultiTaskTrainingSettings) and training.stratified
    # Imported here because one process needs none of it, and FSDP takes a second to import.
    if stage < 2:
        from deepmd_muon.train.strategy.replicated import Replicated

        return Replicated(ranks, model, state_in_parts=stage == 1, stratified=stratified)
    for branch_model in branches_of(model).values():
        if branch_model.why_foreign:
            raise TrainingError(
                f"training/zero_stage {stage} cannot cut this model "
                f"({branch_model.why_foreign}): use 0 or 1"
            )
    from deepmd_muon.train.strategy.fully_sharded import FullySharded, sharding_mesh

    mesh = sharding_mesh(ranks, training.data_parallel_replicate_degree)
    return FullySharded(ranks, model, mesh, reshard_after_forward=stage == 3, stratified=stratified)
