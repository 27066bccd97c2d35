"""torch's own element-wise optimizers with state in equal parts on all ranks (ZeRO-1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepmd_muon.optim.sharded.elements import Parts
from deepmd_muon.optim.sharded.members import Replicas, StateCut, state_cut
from deepmd_muon.optim.sharded.transport import Lane

_Kind = TypeVar("_Kind", bound=Optimizer)


def in_parts(
    make: Callable[[list[tuple[str, nn.Parameter]]], _Kind],
    params: Iterable[tuple[str, nn.Parameter]],
    replicas: Replicas,
) -> _Kind:
    """Make an optimizer that keeps state for this rank's rows of every parameter, steps them, and gathers the others'.

    The optimizer's parameters are DTensors that share memory with the whole ones, and so is its state. A step takes
    the whole gradients away. Whole states load too, each rank taking its part.

    Parameters
    ----------
    make
        Makes the optimizer of named parameters; its update of an element must depend on that element alone.
    params
        Whole, and equal on all ranks with equal gradients.
    replicas
        Those ranks.
    """
    chosen = [(name, p, state_cut(p, replicas, matrices=False)) for name, p in params]
    owned = [(p, nn.Parameter(_part(p.detach(), cut)), cut) for _, p, cut in chosen]
    optimizer = make([(name, part) for (name, _, _), (_, part, _) in zip(chosen, owned, strict=True)])
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, StateCut]]] = defaultdict(list)
    for p, _, cut in owned:
        if cut is not None and len(cut.layout.ranks) > 1:
            kinds[p.device, p.dtype].append((p, cut))
    parts = [Parts(taken, Lane(device)) for (device, _), taken in kinds.items()]

    def take_gradients(*_: Any) -> None:
        for p, part, cut in owned:
            part.grad = None if p.grad is None else _part(p.grad, cut)
            p.grad = None

    def gather(*_: Any) -> None:
        for arrived in [each.gather() for each in parts]:
            arrived()

    def cut_state(_self: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        keys = [key for group in state["param_groups"] for key in group["params"]]
        found = dict(state["state"])
        for key, (p, _, cut) in zip(keys, owned, strict=False):  # torch refuses another number, in its words
            if cut is not None and key in found:
                found[key] = {k: cut.of(x).clone() if x.shape == p.shape else x for k, x in found[key].items()}
        return {**state, "state": found}

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(cut_state)
    return optimizer


def _part(whole: Tensor, cut: StateCut | None) -> Tensor:
    """Return this rank's part of a tensor, sharing memory; a scalar is everyone's."""
    return whole if cut is None else cut.joined(cut.part(whole), whole.shape)
