"""torch's requirements on an optimizer: profiler ranges, hooks, scalers, and the compiler."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Step = TypeVar("Step", bound=Callable[..., Any])
Method = TypeVar("Method", bound=Callable[..., Any])
Phase = Literal["momentum", "gather", "orthogonalize", "update", "return", "adam"]

_NO_RANGE = contextlib.nullcontext()


def outside_compiler(method: Method) -> Method:
    """Exclude a method from torch.compile without importing the compiler.

    torch's own decorator imports the compiler at the first call, which takes seconds. As long as
    the compiler has not been imported, there is nothing to exclude.
    """
    disabled = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else method)(*args, **kwargs)

    return cast("Method", call)


def _bare(method: Method) -> Method:
    """Decorate a method of torch's optimizer by `outside_compiler` instead of torch's decorator."""
    return outside_compiler(getattr(method, "__wrapped__", method))


class QuickOptimizer(Optimizer):
    """torch's Optimizer without the import of the compiler at the first call."""

    add_param_group = _bare(Optimizer.add_param_group)
    state_dict = _bare(Optimizer.state_dict)
    zero_grad = _bare(Optimizer.zero_grad)


class Adam(QuickOptimizer, torch.optim.Adam):
    """torch's Adam without the import of the compiler, which takes seconds.

    `differentiable` must stay False.
    """

    load_state_dict = _bare(Optimizer.load_state_dict)
    step = outside_compiler(torch.no_grad()(inspect.unwrap(torch.optim.Adam.step)))


class AdamW(QuickOptimizer, torch.optim.AdamW):
    """torch's AdamW without the import of the compiler; see `Adam`."""

    load_state_dict = _bare(Optimizer.load_state_dict)
    step = outside_compiler(torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step)))


def read_by_grad_scaler() -> bool:
    """Return True when the property that calls this is read by torch.amp.GradScaler.

    GradScaler then leaves unscaling and skipping to `step`, through the attributes `grad_scale` and
    `found_inf`. Other readers interpret True as "gradients are still scaled before the step":
    Lightning then refuses to clip them, even in bf16, where no scaler is used.
    """
    # Frames: this function, the property, its reader.
    return sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"


def profiled_on_demand(step: Step) -> Step:
    """Wrap an optimizer's `step` in torch's profiler range and hooks while either is in use.

    On the host, opening the range and looking for hooks takes as long as all checks of a small
    model's step. Compiled code calls the step without tracing it: tracing Newton-Schulz for every
    shape takes seconds per parameter.
    """
    profiled = Optimizer.profile_hook_step(step)

    @outside_compiler
    @functools.wraps(step)
    def outer(self: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooks = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        # torch wraps the step of a subclass itself.
        if (hooks or torch._C._autograd._profiler_enabled()) and type(self).step is outer:
            return profiled(self, closure, **options)
        return step(self, closure, **options)

    outer.hooked = True  # type: ignore[attr-defined]  # marks the step as wrapped for torch
    return cast("Step", outer)


def in_phase(name: Phase) -> contextlib.AbstractContextManager[Any]:
    """Return a context that is the range ``HybridMuon.<name>`` while a profiler is active."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_RANGE
    return record_function(f"HybridMuon.{name}")


def phase(name: Phase) -> Callable[[Method], Method]:
    """Decorate a function that is a phase of the step."""

    def decorate(function: Method) -> Method:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with in_phase(name):
                return function(*args, **kwargs)

        return cast("Method", call)

    return decorate
