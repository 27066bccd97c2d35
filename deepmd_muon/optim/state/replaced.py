"""Move the state of parameters that were replaced, by name, or converted in place.

Accelerate, which Hugging Face's Trainer uses, replaces them: it takes an optimizer of plain
parameters, shards the model with FSDP2, and puts the DTensors of the same names into the optimizer.
`Module.to` converts parameters in place.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from deepmd_muon.optim.config import RouteChange
from deepmd_muon.optim.dtensors import full_tensor
from deepmd_muon.optim.errors import InvalidParameterError
from deepmd_muon.optim.groups.param_groups import Group, Routing
from deepmd_muon.optim.routing.routes import RouteEntry, RouteTable
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.load import load_state
from deepmd_muon.optim.state.schema import State, StateHolder

log = logging.getLogger(__name__)


def move_state(
    state: State,
    before: Routing,
    after: Sequence[Group],
    holders: Mapping[Tensor, StateHolder],
    memory: HostMemory | None,
    on_route_change: RouteChange,
) -> None:
    """Move the state of replaced parameters to the new ones of the same names.

    The state of removed parameters is dropped. State of a parameter that was converted in place, to
    another dtype, shape or device, is converted, too. All ranks must call this together, because
    sharded state is gathered. An error leaves `state` unchanged.

    Parameters
    ----------
    state
        The optimizer's state.
    before, after
        The former routes, and the present groups.
    holders
        Of parameters that live on several ranks.
    memory
        Host memory that holds the moments, if any.
    on_route_change
        Decides about the state of a new parameter that has another route, view or shape.

    Raises
    ------
    InvalidParameterError
        When a parameter now has the name of another one.
    RoutingMismatchError
        As `load_state`.
    """
    present = {entry.name: p for group in after for p, entry in group.routed}
    replaced = _replaced_parameters(state, before, present)
    if not replaced:
        return
    table = RouteTable(
        [entry for entry in before.table if entry.name in replaced and entry.name in present]
    )
    # In the form of a state dict, so that `load_state` compares and converts it.
    group = {
        "params": range(len(table)),
        "param_names": [entry.name for entry in table],
        "routes": table.texts(),
    }
    state_dict = {
        "state": {number: state[replaced[entry.name]] for number, entry in enumerate(table)},
        "param_groups": [group],
    }
    if memory is not None:
        memory.wait()

    def place(key: str, value: Tensor, p: Tensor, entry: RouteEntry) -> Tensor:
        holder = holders.get(p, StateHolder(p, entry))
        return holder.cut(key, full_tensor(value), offloaded=memory is not None)

    groups = _groups_to_compare(after, table)
    moved_state = load_state(state_dict, groups, on_route_change, place)
    for name, p in replaced.items():
        del state[p]
        if name not in present:
            log.warning("%s: no longer in param_groups; its state is dropped", name)
    state.update(moved_state)
    if memory is not None:
        memory.offload_all(state, [{"params": list(present.values())}])


def _replaced_parameters(
    state: State, before: Routing, present: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the former parameters with state that were replaced, removed or converted, by name."""
    names = {p: name for name, p in present.items()}
    former = before.params_among(state)
    for name, p in former.items():
        if names.get(p, name) != name:
            raise InvalidParameterError(
                f"the parameter {name!r} is now at the place of {names[p]!r} in param_groups; keep "
                "params and param_names in the same order"
            )
    converted = before.converted(state)
    return {name: p for name, p in former.items() if present.get(name) is not p or p in converted}


def _groups_to_compare(after: Sequence[Group], table: RouteTable) -> list[Group]:
    """Return the present groups with the parameters of a table of former routes.

    A parameter keeps its state while it is frozen, whatever happens to it meanwhile. So it has its
    former route if it is or was frozen.
    """
    former = {entry.name: entry for entry in table}

    def route_to_compare(entry: RouteEntry) -> RouteEntry:
        before = former[entry.name]
        frozen = "frozen" in (before.route, entry.route)
        return before if frozen and before.shape == entry.shape else entry

    return [
        dataclasses.replace(
            group,
            routed=tuple(
                (p, route_to_compare(entry)) for p, entry in group.routed if entry.name in former
            ),
        )
        for group in after
    ]
