"""The conditions that a step was compiled for, and whether they still hold."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter, eq, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, spec_of
from deepmd_muon.optim.routing.group_settings import raw_settings
from deepmd_muon.optim.state.schema import State, known_tensors

_is_trained = attrgetter("requires_grad")


class Snapshot:
    """Groups and their settings, parameters, layouts of gradients, and state that a step was compiled for.

    `devices` has one parameter of each wave with its device; `shared`, the parameters that live on several ranks, of
    whose local memory the compiled step holds views.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: State,
        workspace: int,
        devices: Sequence[tuple[Tensor, torch.device]],
        shared: Sequence[Tensor],
    ) -> None:
        self._groups = list(param_groups)
        self._settings = copy.deepcopy([_settings_of(group, workspace) for group in param_groups])
        self._sizes = [len(group["params"]) for group in param_groups]
        self._params = [p for group in param_groups for p in group["params"]]
        self._trained = list(map(_is_trained, self._params))
        self._gradients = _layouts(self._params)
        self._states = list(state.values())
        self._tensors = [
            (itemgetter(key), holders, [values[key] for values in holders])
            for key in known_tensors()
            if (holders := [values for values in self._states if key in values])
        ]
        self._devices = devices
        self._shared = shared
        self._specs = list(map(spec_of, shared))
        self._addresses = [local_of(p).data_ptr() for p in shared]

    def holds(self, param_groups: Sequence[dict[str, Any]], state: State, workspace: int) -> bool:
        """Return whether the compiled step is still valid."""
        return (
            [len(group["params"]) for group in param_groups] == self._sizes
            and all(map(is_, param_groups, self._groups))
            and all(map(eq, [_settings_of(group, workspace) for group in param_groups], self._settings))
            and self.same_tensors(param_groups, state)
            and _layouts(self._params) == self._gradients
            and list(map(_is_trained, self._params)) == self._trained
            and all(
                g is None or spec_of(g) is s or spec_of(g) == s
                for g, s in zip([p.grad for p in self._shared], self._specs, strict=True)
            )
        )

    def same_tensors(self, param_groups: Sequence[dict[str, Any]], state: State) -> bool:
        """Return whether parameters and state are the same tensors in the same memory."""
        params = itertools.chain.from_iterable(group["params"] for group in param_groups)
        return (
            sum(len(group["params"]) for group in param_groups) == len(self._params)
            and all(map(is_, params, self._params))
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and self._same_state()
            and all(p.device == device for p, device in self._devices)
            and all(map(is_, map(spec_of, self._shared), self._specs))
            and [local_of(p).data_ptr() for p in self._shared] == self._addresses
        )

    def _same_state(self) -> bool:
        """Return whether all state tensors are the same."""
        try:
            return all(all(map(is_, map(get, holders), known)) for get, holders, known in self._tensors)
        except KeyError:  # a state tensor has been deleted
            return False


def _settings_of(group: Mapping[str, Any], workspace: int) -> tuple[Any, ...]:
    """Return the settings that determine waves and updates."""
    return raw_settings(group), group["foreach"], workspace


def _layouts(params: Sequence[Tensor]) -> list[torch.layout | None]:
    return [g if (g := p.grad) is None else g.layout for p in params]
