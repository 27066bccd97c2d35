"""`zero_stage` 1 of deepmd-kit: torch's ZeroRedundancyOptimizer around HybridMuon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from deepmd_muon.deepmd_kit.checkpoint import PER_PARAMETER, of_parameters
from deepmd_muon.deepmd_kit.optimizer import DeepmdKitHybridMuon, as_deepmd_kit_reads


class ZeroRedundancyHybridMuon(ZeroRedundancyOptimizer):
    """Each rank updates some of the parameters and keeps their state.

    Checkpoints have the form of a single process.

    The groups of torch's class list all parameters; the groups of a rank's inner optimizer list
    the parameters of this rank. torch copies every key between them. This class does not copy lists
    with one entry per parameter (names, routes, ...), and collects them from all ranks for a state
    dict.

    Parameters
    ----------
    named_parameters
        Names and parameters of the whole model, in the same order on all ranks.
    lr, settings
        As of `HybridMuon`.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, Tensor]], lr: float, **settings: Any
    ) -> None:
        self._names = {p: name for name, p in named_parameters}

        def make_inner(groups: list[dict[str, Any]], lr: float) -> DeepmdKitHybridMuon:
            """Make the optimizer of this rank; torch's class passes no names."""
            named_groups = []
            for group in groups:
                named = [(self._names[p], p) for p in group["params"]]
                named_groups.append({**group, "params": named})
            return DeepmdKitHybridMuon(named_groups, lr, **settings)

        parameters = [p for _, p in named_parameters]
        optimizer_class: Any = make_inner
        super().__init__(parameters, optimizer_class=optimizer_class, lr=lr)
        # Of each group: the routes of the whole model's parameters, by name.
        self._routes: list[Mapping[str, str]] = []

    @staticmethod
    def _sync_param_groups(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for source_group, target_group in zip(source, target, strict=True):
            for key, value in source_group.items():
                if key not in PER_PARAMETER:
                    target_group[key] = value

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state and the routes of all ranks on rank `to`; all ranks call it."""
        super().consolidate_state_dict(to)
        routes = [
            dict(zip(group["param_names"], group["routes"], strict=True))
            for group in self.optim.param_groups
        ]
        rank_routes: list[Any] = [None] * self.world_size
        dist.all_gather_object(rank_routes, routes, group=self.process_group)
        self._routes = [
            {name: route for routes_of_rank in by_rank for name, route in routes_of_rank.items()}
            for by_rank in zip(*rank_routes, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks that `consolidate_state_dict` collected."""
        state_dict = super().state_dict()
        groups = []
        for saved_group, group, routes in zip(
            state_dict["param_groups"], self.param_groups, self._routes, strict=True
        ):
            names = [self._names[p] for p in group["params"]]
            lists = {"param_names": names, "routes": [routes[name] for name in names]}
            groups.append({**as_deepmd_kit_reads(saved_group), **lists})
        return {**state_dict, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state dict whose groups name their parameters."""
        names = [self._names[p] for group in self.optim.param_groups for p in group["params"]]
        self.optim.load_state_dict(of_parameters(state_dict, names))
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
