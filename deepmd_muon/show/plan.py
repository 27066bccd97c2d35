"""The plan of a model's sharded step on any number of processes, without data or training."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.show.errors import ShowError

if TYPE_CHECKING:
    import torch

    from deepmd_muon.argcheck import Input
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.model.branches import Branches
    from deepmd_muon.model.settings import ModelSettings
    from deepmd_muon.optim.sharded import Layout, Plan

# What ranks share at each `zero_stage`.
_STAGES = (
    "every rank holds everything",
    "optimizer state in parts",
    "gradients, and parameters between steps, in parts",
    "parameters in parts between forward and backward pass too",
)


def plan_page(
    path: Path, ranks: int | None, stage: int | None, groups: int | None, *, owners: bool = False
) -> str:
    """Return the plan of HybridMuon's step as text.

    Parameters
    ----------
    path
        An input file, or a checkpoint with its input.
    ranks
        Number of processes; None is an error that names the option.
    stage, groups
        `zero_stage` and `data_parallel_replicate_degree`; None means those of the input.
    owners
        List the owner of every matrix.

    Raises
    ------
    ShowError
        When this layout of processes is impossible, or the optimizer is not HybridMuon.
    """
    run_input = _input_of(path)
    training = run_input.settings.training
    stage = training.zero_stage if stage is None else stage
    if groups is None:
        groups = training.data_parallel_replicate_degree if stage >= 2 else 1
    plan = plan_of(run_input, ranks, stage, groups)
    hybrid = f" in {groups} groups" if groups > 1 else ""
    title = f"{ranks} ranks{hybrid}, zero_stage {stage}: {_STAGES[stage]}"
    return f"{title}\n{plan.describe(owners=owners)}"


def plan_of(run_input: Input, ranks: int | None, stage: int, groups: int = 1) -> Plan:
    """Return the plan of HybridMuon's step for an input; see `plan_page`."""
    from deepmd_muon.optim import HybridMuon
    from deepmd_muon.optim.groups.group_settings import group_settings
    from deepmd_muon.optim.polar.schedules import coefficients_of
    from deepmd_muon.optim.rules.registry import matrix_rules
    from deepmd_muon.optim.sharded import PlannedParameter, make_plan
    from deepmd_muon.optim.sharded.layout import state_layout

    layout = _layout(ranks, stage, groups)
    optimizer = optimizer_of(run_input)
    if not isinstance(optimizer, HybridMuon):
        raise ShowError(
            f"{type(optimizer).__name__} steps every element by itself: there is no plan"
        )
    (group,) = optimizer.param_groups
    settings = group_settings(group)
    sharded = optimizer.sharded
    if stage == 1:
        sharded = dataclasses.replace(sharded, state="sharded")
    shard_state = stage < 2 and sharded.state == "sharded"
    parameters = dict(zip(group["param_names"], group["params"], strict=True))
    planned = []
    for entry in optimizer.routing:
        if entry.route != "muon" or entry.view is None:
            continue
        layout_of_state = None
        if shard_state:
            layout_of_state = state_layout(entry.shape, layout.ranks, layout.mesh, matrices=True)
        schedule = settings.schedule_of(entry.view.block_shapes[0])
        planned.append(
            PlannedParameter(
                entry.name,
                entry.shape,
                entry.view,
                layout,
                # Momenta travel in float32 at least.
                itemsize=max(4, parameters[entry.name].element_size()),
                rules=matrix_rules(settings),
                steps=len(coefficients_of(schedule)),
                gram=settings.enable_gram,
                state_layout=layout_of_state,
            )
        )
    return make_plan(planned, sharded)


def optimizer_of(run_input: Input) -> torch.optim.Optimizer:
    """Build the model and the optimizer of an input without reading data."""
    from deepmd_muon.train.strategy.base import build_optimizer

    return build_optimizer(
        run_input.settings.optimizer, model_of(run_input), run_input.settings.learning_rate.start_lr
    )


def model_of(run_input: Input) -> EnergyModel | Branches:
    """Build the model of an input, or those of all branches, without reading data."""
    from deepmd_muon.train.branches import build_of

    models = {}
    for name, branch in run_input.branches.items():
        settings = branch.model
        if not settings.type_map:
            raise ShowError(
                "the input leaves out model/type_map, which only dp train takes from its data: "
                "name the types, or give the out.json of the run"
            )
        models[name] = _with_one_neighbor(settings)
    return build_of(run_input.with_models(models))


def _with_one_neighbor(settings: ModelSettings) -> ModelSettings:
    """Replace `sel` "auto", which needs data; no parameter's shape depends on it."""
    from deepmd_muon.data import NeighborStatistics
    from deepmd_muon.model.settings import HostedSettings

    counts = NeighborStatistics(math.inf, (1,) * len(settings.type_map), 1)
    if isinstance(settings, HostedSettings):
        from deepmd_muon.model.hosted.section import with_counts

        return with_counts(settings, lambda rcut: counts)
    descriptor = settings.descriptor.with_counts(lambda rcut: counts)
    return dataclasses.replace(settings, descriptor=descriptor)


def _input_of(path: Path) -> Input:
    """Return the input, from a file or from a checkpoint."""
    from deepmd_muon.argcheck import load, normalize
    from deepmd_muon.checkpoint_file.file import (
        DIRECTORY_SUFFIX,
        OWN_KEY,
        read_checkpoint,
        understood,
    )

    if path.suffix not in (".pt", DIRECTORY_SUFFIX):
        return load(path)
    record = read_checkpoint(path).get(OWN_KEY)
    if record is None:
        raise ShowError(f"{path} comes from deepmd-kit and holds no settings; give the input file")
    with understood(path):
        return normalize(json.loads(record["settings"]), str(path))


def _layout(ranks: int | None, stage: int, groups: int) -> Layout:
    """Return the layout of every parameter."""
    from deepmd_muon.optim.sharded import Layout, ShardPlacement

    if ranks is None or ranks < 1:
        raise ShowError(f"show plan needs the number of processes, --world-size N; found {ranks}")
    if groups < 1 or ranks % groups or (groups > 1 and stage < 2):
        raise ShowError(
            f"{ranks} processes at zero_stage {stage} cannot form {groups} groups: "
            "the number must divide theirs, and the stage be 2 or 3"
        )
    everyone = tuple(range(ranks))
    if stage < 2:
        return Layout((ranks,), everyone, (None,))
    if groups > 1:
        return Layout((groups, ranks // groups), everyone, (None, ShardPlacement(0)))
    return Layout((ranks,), everyone, (ShardPlacement(0),))
