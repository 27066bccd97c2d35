"""Named ranges of a step for torch's profiler; without a profiler each costs one check."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch.autograd.profiler import record_function

Phase = Literal["momentum", "gather", "orthogonalize", "update", "scatter", "adam"]
Function = TypeVar("Function", bound=Callable[..., Any])

_NOTHING = contextlib.nullcontext()


def in_phase(name: Phase) -> contextlib.AbstractContextManager[Any]:
    """Return a context that is the range ``HybridMuon.<name>`` while a profiler is active."""
    return (
        record_function(f"HybridMuon.{name}")
        if torch._C._autograd._profiler_enabled()
        else _NOTHING
    )


def phase(name: Phase) -> Callable[[Function], Function]:
    """Decorate a function that is a phase of the step."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with in_phase(name):
                return function(*args, **kwargs)

        return cast("Function", call)

    return decorate
