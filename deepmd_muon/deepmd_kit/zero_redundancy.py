"""`zero_stage` 1 of deepmd-kit: torch's ZeroRedundancyOptimizer around HybridMuon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from deepmd_muon.deepmd_kit.checkpoint import PER_PARAMETER, of_parameters
from deepmd_muon.deepmd_kit.optimizer import DeepmdKitHybridMuon


class ZeroRedundancyHybridMuon(ZeroRedundancyOptimizer):
    """Each rank updates some of the parameters and keeps their state.

    Checkpoints have the form of one process's.

    The groups of torch's class list all parameters, those of a rank's own optimizer only the
    rank's. torch copies every key between them; this class does not copy lists with one entry per
    parameter (names, routes, ...), and collects them from all ranks for a state dict.
    `named_parameters` are those of the whole model, in the same order on all ranks.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, Tensor]], lr: float, **settings: Any
    ) -> None:
        self._names = {p: name for name, p in named_parameters}

        def make(
            groups: list[dict[str, Any]], lr: float
        ) -> DeepmdKitHybridMuon:  # torch's class gives no names
            named = [
                {**group, "params": [(self._names[p], p) for p in group["params"]]}
                for group in groups
            ]
            return DeepmdKitHybridMuon(named, lr, **settings)

        super().__init__([p for _, p in named_parameters], optimizer_class=make, lr=lr)  # type: ignore[arg-type]
        self._manifests: list[Mapping[str, Sequence[str]]] = []

    @staticmethod
    def _sync_param_groups(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for group, other in zip(source, target, strict=True):
            other.update({key: value for key, value in group.items() if key not in PER_PARAMETER})

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state and the routes of all ranks on rank `to`; all ranks call it."""
        super().consolidate_state_dict(to)
        # Name, route, view and shape of each parameter.
        rows = [
            zip(*(group[key] for key in PER_PARAMETER[1:]), strict=True)
            for group in self.optim.param_groups
        ]
        own = [{name: entry for name, *entry in group} for group in rows]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, own, group=self.process_group)
        self._manifests = [
            {name: entry for part in of_group for name, entry in part.items()}
            for of_group in zip(*gathered, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `consolidate_state_dict` collected, in the form of a single process."""
        found = super().state_dict()
        for group, present, manifest in zip(
            found["param_groups"], self.param_groups, self._manifests, strict=True
        ):
            names = [self._names[p] for p in present["params"]]
            columns = zip(*(manifest[name] for name in names), strict=True)
            group.update(
                param_names=names, **dict(zip(PER_PARAMETER[2:], map(list, columns), strict=True))
            )
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state dict whose groups name their parameters."""
        mine = [self._names[p] for group in self.optim.param_groups for p in group["params"]]
        self.optim.load_state_dict(of_parameters(state_dict, mine))
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
