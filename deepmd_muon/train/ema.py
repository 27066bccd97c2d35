"""Average of a model's parameters over the steps: exponential, or the mean of the last ones.

Checkpoints store it as deepmd-kit does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches, all_names, branches_of
from deepmd_muon.model.deepmd_kit import naming_of
from deepmd_muon.train.checkpoint.optimizer_state import parameter_order
from deepmd_muon.train.ranks.ranks import local_part, shard_like

log = logging.getLogger(__name__)


class EmaError(ValueError):
    """A stored average that does not belong to this model."""


class Ema:
    """Average a model's parameters: average ← decay·average + (1 − decay)·parameter.

    Only floating-point parameters. Buffers (statistics, energy bias) do not change in training and
    are not averaged; deepmd-kit 3.2.0 leaves them out as well.

    Parameters
    ----------
    model
        The model. The average starts as a copy of its parameters, and is sharded like them.
    decay
        Weight of the old average in each update, in [0, 1).
    first
        Number of updates after which the parameters are averaged with equal weights. Until then,
        and after the next update, the average equals the parameters. None for the exponential
        average.
    """

    def __init__(
        self, model: EnergyModel | Branches, decay: float = 0.999, first: int | None = None
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise EmaError(f"ema_decay must be in [0, 1); found {decay!r}")
        self.decay = decay
        self._model = model
        self._parameters: dict[str, torch.Tensor] = {
            name: p for name, p in model.named_parameters() if p.is_floating_point() and p.numel()
        }
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._first = first
        # The number of updates is on the device, because a captured step counts, too.
        device = next(iter(self._parameters.values())).device
        self._done = torch.zeros((), dtype=torch.float64, device=device)

    def resume(self, done: int) -> None:
        """Continue after this number of updates."""
        self._done.fill_(done)

    def weight(self) -> float | torch.Tensor:
        """Return the weight of the parameters in the next update; call it once for each."""
        if self._first is None:
            return 1.0 - self.decay
        self._done += 1.0
        return 1.0 / (self._done - self._first).clamp_min(1.0)

    @torch.no_grad()
    def update(self, weight: float | torch.Tensor | None = None) -> None:
        """Add the present parameters to the average; `weight` is `weight()` by default.

        A weight on the device is read there, without a wait.
        """
        averages = [local_part(x) for x in self._average.values()]
        parameters = [local_part(p) for p in self._parameters.values()]
        if weight is None:
            weight = self.weight()
        if isinstance(weight, torch.Tensor):
            # torch has no _foreach_lerp_ with a weight on the device.
            steps = torch._foreach_sub(parameters, averages)
            widest = max((x.dtype for x in steps), key=lambda dtype: dtype.itemsize)
            torch._foreach_mul_(steps, weight.to(widest))  # fast if all are of that dtype
            torch._foreach_add_(averages, steps)
        else:
            torch._foreach_lerp_(averages, parameters, weight)

    def averages(self) -> Mapping[str, torch.Tensor]:
        """Return the averaged parameters by name; they change with the next `update`."""
        return self._average

    def state_dict(self) -> dict[str, Any]:
        """Return the average under deepmd-kit's keys, for "ema" of a checkpoint; still sharded."""
        average = {name: tensor.detach().clone() for name, tensor in self._average.items()}
        first_name = self._first_names()
        stored = {}
        for branch, model in branches_of(self._model).items():
            prefix = f"{branch}." if isinstance(self._model, Branches) else ""
            # Names of deepmd-kit's model, if it has such a model.
            names = parameter_order(model) or [name for name, _ in model.named_parameters()]
            for name in names:
                stored_name = prefix + name
                own_name = naming_of(self._model)(stored_name)
                # deepmd-kit stores a shared parameter once for each branch. It lists some empty
                # parameters that we do not have, and refuses a state without them.
                stored[stored_name] = average.get(
                    first_name.get(own_name, own_name), torch.zeros(0)
                )
        return {"decay": self.decay, "model": stored, "validation_state": {}}

    def _first_names(self) -> dict[str, str]:
        """Return the name under which each parameter is averaged; shared ones have several."""
        return {name: names[0] for names in all_names(self._model).values() for name in names}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored average, tensors whole; the decay stays that of this run.

        Raises
        ------
        EmaError
            If names or shapes are not those of this model.
        """
        own_name_of = naming_of(self._model)
        stored = {own_name_of(name): x for name, x in state["model"].items() if x.numel()}
        missing = self._average.keys() - stored.keys()
        unknown = stored.keys() - self._first_names().keys()
        if missing or unknown:
            raise EmaError(
                f"the stored average is of another model: it lacks {len(missing)} of the "
                f"parameters {sorted(missing)[:3]} "
                f"and has {len(unknown)} others {sorted(unknown)[:3]}"
            )
        for name, average in self._average.items():
            if stored[name].shape != average.shape:
                raise EmaError(
                    f"stored average of {name} has shape {tuple(stored[name].shape)}; "
                    f"the model's is {tuple(average.shape)}"
                )
        for name, average in self._average.items():
            local_part(average).copy_(local_part(shard_like(stored[name], average)))
        if state.get("decay", self.decay) != self.decay:
            log.warning(
                "ema_decay is %g here and was %g before the restart", self.decay, state["decay"]
            )
