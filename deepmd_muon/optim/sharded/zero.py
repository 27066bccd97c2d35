"""torch's element-wise optimizers with sharded state (ZeRO-1)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from deepmd_muon.optim.errors import ReshardedParameterError, ShardingError
from deepmd_muon.optim.sharded.agreement import ComparedParameter, StepComparison
from deepmd_muon.optim.sharded.elements import GatheredParts, gathered_parts, start_gathers
from deepmd_muon.optim.sharded.params import Replicas, StateSharding, layout_of, state_sharding
from deepmd_muon.optim.sharded.transport import CollectiveStream

_Kind = TypeVar("_Kind", bound=Optimizer)


def shard_state(
    kind: type[_Kind],
    params: Iterable[tuple[str, nn.Parameter]],
    replicas: Replicas,
    **options: Any,
) -> _Kind:
    """Make an optimizer that keeps state for this rank's rows of every parameter.

    It steps these rows and gathers the others. Its parameters are DTensors that share memory with
    the whole parameters; its state consists of DTensors, too. A step consumes the whole gradients,
    and `zero_grad` clears them. Whole states load too: each rank takes its part.

    A gradient that only some ranks have raises MissingGradientError on all ranks; on a GPU in the
    next step, or in `state_dict` or `load_state_dict`. The optimizer cannot be copied or pickled;
    its state dict can.

    Parameters
    ----------
    kind
        The optimizer's class. It must update each element independently of the others.
    params
        Names and whole parameters, equal on `replicas` like their gradients. Between steps their
        memory may be replaced by memory of the same shape, strides, dtype and device.
    replicas
        The ranks.
    **options
        Further arguments of the class.

    Raises
    ------
    PlanMismatchError
        On all ranks, when their parameters differ.
    """
    whole_params = [
        _WholeParameter(name, p, state_sharding(p, replicas, matrices=False)) for name, p in params
    ]
    own_kind: Any = kind  # mypy considers a class unhashable
    optimizer: Any = _sharded_state_class(own_kind)(
        [(param.name, param.part) for param in whole_params], **options
    )
    # After the class has checked its arguments: this communicates.
    sharded_params = _Parts(whole_params, replicas)
    optimizer._parts = sharded_params
    optimizer.register_state_dict_pre_hook(lambda _: sharded_params.raise_deferred())
    optimizer.register_load_state_dict_pre_hook(lambda _, state: sharded_params.cut_state(state))
    made: _Kind = optimizer
    return made


@functools.cache
def _sharded_state_class(kind: type[Optimizer]) -> Any:
    """Return the subclass of an optimizer's class that steps this rank's parts."""
    return type(kind.__name__, (_ShardedStateOptimizer, kind), {})


class _ShardedStateOptimizer(Optimizer):
    """An optimizer that steps this rank's parts of whole parameters."""

    _parts: _Parts

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, which computes whole gradients, and take the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._parts.take_gradients()
        inherited: Any = super().step.__func__  # type: ignore[attr-defined]
        # torch wraps this method in hooks; it may have wrapped the inherited one, too.
        if getattr(inherited, "hooked", False):
            inherited = inherited.__wrapped__
        inherited(self)
        self._parts.gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the whole gradients as well as the parts."""
        super().zero_grad(set_to_none)
        for param in self._parts.params:
            if set_to_none:
                param.p.grad = None
            elif param.p.grad is not None:
                param.p.grad = torch.zeros_like(param.p.grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            f"{type(self).__name__} with sharded state cannot be copied or pickled, because it "
            "gathers into the parameters that it was constructed with; build another one and load "
            "its state_dict()"
        )


class _Parts:
    """The whole parameters of an optimizer, and this rank's parts of them that it steps."""

    def __init__(self, params: Sequence[_WholeParameter], replicas: Replicas) -> None:
        self.params = params
        self._gathers: list[GatheredParts] = []
        for device in dict.fromkeys(param.p.device for param in params):
            on_device = [(param.p, param.sharding) for param in params if param.p.device == device]
            self._gathers += gathered_parts(on_device, CollectiveStream(device))
        self._comparison: StepComparison | None = None
        if params:
            compared = []
            for param in params:
                layout = layout_of(param.p, replicas)
                assert layout is not None
                name = f"{param.name!r} of shape {tuple(param.p.shape)}"
                compared.append(ComparedParameter(param.p, name, layout.sorted_ranks))
            self._comparison = StepComparison(
                compared, [param.ranks for param in compared], params[0].p.device
            )

    def take_gradients(self) -> None:
        """Cut this rank's parts from the whole gradients, and release these."""
        for param in self.params:
            param.follow()
        if self._comparison is not None:
            self._comparison.compare()
        for param in self.params:
            grad = param.p.grad
            param.part.grad = None if grad is None else _part(grad, param.sharding)
            param.p.grad = None

    def gather(self) -> None:
        """Write the other ranks' new parts to the whole parameters."""
        for wait in start_gathers(self._gathers):
            wait()

    def raise_deferred(self) -> None:
        """Raise the error of the last step, if it is not yet raised."""
        if self._comparison is not None:
            self._comparison.raise_deferred()

    def cut_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with this rank's parts of whole states."""
        self.raise_deferred()
        keys = [key for group in state["param_groups"] for key in group["params"]]
        by_key = dict(state["state"])
        for key, param in zip(keys, self.params, strict=False):  # torch checks the numbers
            sharding = param.sharding
            if sharding is None or key not in by_key:
                continue
            by_key[key] = {
                name: sharding.of(x).clone() if x.shape == param.p.shape else x
                for name, x in by_key[key].items()
            }
        return {**state, "state": by_key}


class _Memory(NamedTuple):
    """The attributes of a parameter that new memory must share."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, p: Tensor) -> _Memory:
        return cls(p.shape, p.stride(), p.dtype, p.device)

    def __str__(self) -> str:
        return (
            f"{self.dtype} of shape {tuple(self.shape)} and strides {self.strides} on {self.device}"
        )


@dataclasses.dataclass
class _WholeParameter:
    """A whole parameter, and the optimizer's parameter in its memory.

    `sharding` is that of its state, None for a scalar.
    """

    name: str
    p: nn.Parameter
    sharding: StateSharding | None

    def __post_init__(self) -> None:
        self.part = nn.Parameter(_part(self.p.detach(), self.sharding))
        self._address = self.p.data_ptr()
        self._memory = _Memory.of(self.p)

    def follow(self) -> None:
        """Move the optimizer's parameter to the whole one's memory if that was replaced."""
        memory = _Memory.of(self.p)
        if memory != self._memory:
            raise ReshardedParameterError(
                f"{self.name!r} was {self._memory} when its optimizer was constructed, and is "
                f"{memory} now; construct a new optimizer and load its state"
            )
        if self.p.data_ptr() == self._address:
            return
        in_new_memory = _part(self.p.detach(), self.sharding)
        if isinstance(self.part, DTensor) and isinstance(in_new_memory, DTensor):
            self.part._local_tensor = in_new_memory._local_tensor
        else:
            self.part.data = in_new_memory
        self._address = self.p.data_ptr()


def _part(whole: Tensor, sharding: StateSharding | None) -> Tensor:
    """Return this rank's part of a tensor, sharing memory; a scalar is whole on every rank."""
    return whole if sharding is None else sharding.joined(sharding.part(whole), whole.shape)
