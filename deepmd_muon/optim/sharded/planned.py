"""Parameters of an optimizer as the plan takes them, and the plan of a process that steps all by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.routing.param_groups import Group
from deepmd_muon.optim.routing.rules import RouteEntry
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.optim.sharded.layout import Layout, replicated
from deepmd_muon.optim.sharded.plan import Plan, PlannedParameter, make_plan
from deepmd_muon.optim.sharded_config import ShardedSettings
from deepmd_muon.optim.update.adam import moment_dtype


def planned_parameter(
    entry: RouteEntry,
    dtype: torch.dtype,
    settings: HybridMuonConfig,
    layout: Layout,
    state_layout: Layout | None = None,
) -> PlannedParameter:
    """Return a parameter of the Muon route as the plan needs it."""
    assert entry.view is not None
    return PlannedParameter(
        entry.name,
        entry.shape,
        entry.view,
        layout,
        itemsize=moment_dtype(dtype).itemsize,
        rules=matrix_rules(settings),
        steps=len(coefficients_of(settings.schedule_of(entry.view.block_shapes[0]))),
        gram=settings.enable_gram,
        state_layout=state_layout,
    )


def plan_of_one_process(groups: Sequence[Group], settings: ShardedSettings) -> Plan:
    """Return the plan of a process that orthogonalizes every matrix itself; it sends nothing."""
    alone = replicated((0,))
    routed = [(p, entry, group) for group in groups for p, entry in group.routed if entry.route == "muon"]
    return make_plan([planned_parameter(entry, p.dtype, group.settings, alone) for p, entry, group in routed], settings)
