"""Move the state of parameters that were replaced, by name, or converted in place.

Accelerate, which Hugging Face's Trainer uses, replaces them: it takes an optimizer of plain
parameters, shards the model with FSDP2, and puts the DTensors of the same names into the optimizer.
`Module.to` converts parameters in place.
"""

from __future__ import annotations

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

    Drop that of removed parameters.

    State of a parameter that was converted in place, to another dtype, shape or device, is
    converted, too. All ranks must call this together, because sharded state is gathered. `before`
    has the routes of the earlier parameters, `after` the present groups; `holders` are those of
    parameters that live on several ranks. If a new parameter has another route, view or shape,
    `on_route_change` decides about its state. An error leaves `state` unchanged.

    Raises
    ------
    InvalidParameterError
        When a parameter now has the name of another one.
    RoutingMismatchError
        As `load_state`.
    """
    present = {entry.name: p for group in after for p, entry in group.routed}
    names = {p: name for name, p in present.items()}
    earlier = before.params_among(state)
    for name, p in earlier.items():
        if names.get(p, name) != name:
            raise InvalidParameterError(
                f"the parameter {name!r} is now at the place of {names[p]!r} in param_groups; keep "
                "params and param_names in the same order"
            )
    converted = before.converted(state)
    replaced = {
        name: p for name, p in earlier.items() if present.get(name) is not p or p in converted
    }
    if not replaced:
        return
    table = RouteTable(
        [entry for entry in before.table if entry.name in replaced.keys() & present.keys()]
    )
    # In the form of a state dict, so that `load_state` compares and converts it.
    saved = {
        "state": {number: state[replaced[entry.name]] for number, entry in enumerate(table)},
        "param_groups": [
            {
                "params": range(len(table)),
                "param_names": [entry.name for entry in table],
                **table.manifest(),
            }
        ],
    }
    former = {entry.name: entry for entry in table}

    def compared(entry: RouteEntry) -> RouteEntry:
        # A parameter keeps its state while it is frozen, whatever happens to it meanwhile.
        old = former[entry.name]
        return old if "frozen" in (old.route, entry.route) and old.shape == entry.shape else entry

    groups = [
        group._replace(
            routed=tuple((p, compared(entry)) for p, entry in group.routed if entry.name in former)
        )
        for group in after
    ]
    if memory is not None:
        memory.wait()

    def place(key: str, value: Tensor, p: Tensor, entry: RouteEntry) -> Tensor:
        return holders.get(p, StateHolder(p, entry)).cut(
            key, full_tensor(value), offloaded=memory is not None
        )

    moved = load_state(saved, groups, on_route_change, place)
    for name, p in replaced.items():
        del state[p]
        if name not in present:
            log.warning("%s: no longer in param_groups; its state is dropped", name)
    state.update(moved)
    if memory is not None:
        memory.offload_all(state, [{"params": list(names)}])
