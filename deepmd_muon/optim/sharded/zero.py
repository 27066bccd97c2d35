"""torch's element-wise optimizers with sharded state (ZeRO-1)."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from deepmd_muon.optim.errors import ReshardedParameterError, ShardingError
from deepmd_muon.optim.sharded.agreement import ComparedParameter, GradientPresence
from deepmd_muon.optim.sharded.elements import GatheredParts
from deepmd_muon.optim.sharded.params import Replicas, StateSharding, layout_of, state_sharding
from deepmd_muon.optim.sharded.transport import CollectiveStream

_Kind = TypeVar("_Kind", bound=Optimizer)


def shard_state(
    kind: type[_Kind],
    params: Iterable[tuple[str, nn.Parameter]],
    replicas: Replicas,
    **options: Any,
) -> _Kind:
    """Make an optimizer that keeps state for this rank's rows of every parameter, steps them, and gathers the others.

    The optimizer's parameters are DTensors that share memory with the whole parameters; its state consists of DTensors,
    too. A step consumes the whole gradients, and `zero_grad` clears them. Whole states load too: each rank takes its
    part. A gradient that only some ranks have raises MissingGradientError on all ranks; on a GPU in the next step, or
    in `state_dict` or `load_state_dict`. The optimizer cannot be copied or pickled; its state dict can.

    Its class `kind` must update each element independently of the others. The whole parameters and their gradients are
    equal on `replicas`. Between steps their memory may be replaced by memory of the same shape, strides, dtype and
    device.

    Raises
    ------
    PlanMismatchError
        On all ranks, when their parameters differ.
    """
    whole_params = [
        _WholeParameter(name, p, state_sharding(p, replicas, matrices=False)) for name, p in params
    ]
    own: Any = kind  # mypy considers a class unhashable
    optimizer: Any = _sharded_state_class(own)(
        [(each.name, each.part) for each in whole_params], **options
    )
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, StateSharding]]] = defaultdict(
        list
    )
    for each in whole_params:
        if each.sharding is not None and len(each.sharding.layout.ranks) > 1:
            kinds[each.p.device, each.p.dtype].append((each.p, each.sharding))
    parts = [GatheredParts(taken, CollectiveStream(device)) for (device, _), taken in kinds.items()]
    presence = _presence(whole_params, replicas)

    def take_gradients() -> None:
        for each in whole_params:
            each.follow()
        if presence is not None:
            presence.compare()
        for each in whole_params:
            each.part.grad = None if each.p.grad is None else _part(each.p.grad, each.sharding)
            each.p.grad = None

    def gather() -> None:
        for each in parts:
            each.read()
        for arrived in [each.gather() for each in parts]:
            arrived()

    def finish(*_: Any) -> None:
        if presence is not None:
            presence.raise_deferred()

    def cut_state(_self: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        finish()
        keys = [key for group in state["param_groups"] for key in group["params"]]
        found = dict(state["state"])
        for key, each in zip(
            keys, whole_params, strict=False
        ):  # torch raises if the numbers differ
            sharding, shape = each.sharding, each.p.shape
            if sharding is not None and key in found:
                found[key] = {
                    k: sharding.of(x).clone() if x.shape == shape else x
                    for k, x in found[key].items()
                }
        return {**state, "state": found}

    optimizer.register_state_dict_pre_hook(finish)
    optimizer.register_load_state_dict_pre_hook(cut_state)
    optimizer._whole = [each.p for each in whole_params]
    optimizer._around = take_gradients, gather
    made: _Kind = optimizer
    return made


@functools.cache
def _sharded_state_class(kind: type[Optimizer]) -> Any:
    """Return the subclass of an optimizer's class that steps this rank's parts."""
    return type(kind.__name__, (_ShardedStateOptimizer, kind), {})


class _ShardedStateOptimizer(Optimizer):
    """An optimizer that steps this rank's parts of whole parameters.

    `_around` takes the gradients before a step, and gathers the other ranks' parts after it.
    """

    _whole: Sequence[Tensor]
    _around: tuple[Callable[[], None], Callable[[], None]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, which computes whole gradients, and then take the step that consumes them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        take_gradients, gather = self._around
        take_gradients()
        inherited: Any = super().step.__func__  # type: ignore[attr-defined]
        # torch wraps this method in hooks; it may have wrapped the inherited one, too.
        (inherited.__wrapped__ if getattr(inherited, "hooked", False) else inherited)(self)
        gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the whole gradients as well as the parts."""
        super().zero_grad(set_to_none)
        for p in self._whole:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad = torch.zeros_like(p.grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            f"{type(self).__name__} with sharded state cannot be copied or pickled, because it gathers into the "
            "parameters that it was constructed with; build another one and load its state_dict()"
        )


@dataclasses.dataclass
class _WholeParameter:
    """A whole parameter, the sharding of its state (None for a scalar), and the optimizer's parameter in its memory."""

    name: str
    p: nn.Parameter
    sharding: StateSharding | None

    def __post_init__(self) -> None:
        self.part = nn.Parameter(_part(self.p.detach(), self.sharding))
        self._memory, self._kind = self.p.data_ptr(), _kind(self.p)

    def follow(self) -> None:
        """Make the optimizer's parameter share memory with the whole one, whose memory may have been replaced."""
        if self.p.data_ptr() == self._memory and _kind(self.p) == self._kind:
            return
        if _kind(self.p) != self._kind:
            was, now = (
                f"{dtype} of shape {tuple(shape)} and strides {tuple(stride)} on {device}"
                for shape, stride, dtype, device in (self._kind, _kind(self.p))
            )
            raise ReshardedParameterError(
                f"{self.name!r} was {was} when its optimizer was constructed, "
                f"and is {now} now; construct a new optimizer and load its state"
            )
        part = _part(self.p.detach(), self.sharding)
        if isinstance(self.part, DTensor) and isinstance(part, DTensor):
            self.part._local_tensor = part._local_tensor
        else:
            self.part.data = part
        self._memory = self.p.data_ptr()


def _presence(
    whole_params: Sequence[_WholeParameter], replicas: Replicas
) -> GradientPresence | None:
    """Return the comparison of gradients among the replicas; None without parameters."""
    compared = []
    for each in whole_params:
        layout = layout_of(each.p, replicas)
        assert layout is not None
        compared.append(
            ComparedParameter(
                each.p, f"{each.name!r} of shape {tuple(each.p.shape)}", tuple(sorted(layout.ranks))
            )
        )
    return (
        GradientPresence(compared, [each.ranks for each in compared], whole_params[0].p.device)
        if compared
        else None
    )


def _kind(p: Tensor) -> tuple[Any, ...]:
    return p.shape, p.stride(), p.dtype, p.device


def _part(whole: Tensor, sharding: StateSharding | None) -> Tensor:
    """Return this rank's part of a tensor, sharing memory; a scalar is whole on every rank."""
    return whole if sharding is None else sharding.joined(sharding.part(whole), whole.shape)
