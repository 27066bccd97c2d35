"""The arguments of `HybridMuon`: one declaration for constructor, checks and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from deepmd_muon.optim.groups.group_settings import GroupArguments, checked_arguments
from deepmd_muon.optim.qk_clip.layers import QKClip
from deepmd_muon.setting import setting, setting_of

if TYPE_CHECKING:
    from deepmd_muon.optim.buildable import Replicas
else:
    Replicas = object  # needs torch.distributed

P = ParamSpec("P")
S = TypeVar("S")
C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(GroupArguments):
    """All arguments of `HybridMuon`."""

    differentiable: bool = setting(
        False, choices=(False,), note="HybridMuon is not differentiable", doc="Must be False."
    )
    workspace: int = setting(
        80 * 2**20,
        minimum=1,
        doc=(
            "Bound on the parameter elements of a wave; a larger parameter forms its own wave. "
            "Besides the state, a step needs 19 to 24 bytes for each of these elements (float32), "
            "on a GPU up to 27; there, two waves of more than 4 Mi elements may be in flight."
        ),
    )
    offload_bytes: int = setting(
        64 * 2**20,
        minimum=1,
        doc=(
            "Bound on the bytes of a transfer batch (the device holds two), and so on the moments "
            "of a wave."
        ),
    )
    replicas: Replicas | None = setting(
        None,
        doc=(
            "Device mesh or process group whose ranks hold copies of the non-DTensor parameters "
            "with equal gradients (DDP) and share the step. Without it, this process steps such "
            "parameters alone. DTensors carry their own layout."
        ),
    )
    qk_clip: QKClip | None = setting(
        None,
        doc=(
            "Attention layers whose logits stay below a threshold; see `deepmd_muon.optim.qk_clip`."
        ),
    )


def takes(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[S, Arguments], None]], Callable[Concatenate[S, P], None]]:
    """Decorate a constructor that receives its checked arguments as one object.

    Callers see the fields of `arguments`: editors and type checkers read them from the dataclass,
    `help` and `inspect.signature` from the decorated function.
    """
    signature = inspect.signature(arguments)

    def decorate(init: Callable[[S, Arguments], None]) -> Callable[Concatenate[S, P], None]:
        def construct(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
            bound.apply_defaults()
            init(self, checked_arguments(Arguments, bound.arguments))

        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        with_self = [self_parameter, *signature.parameters.values()]
        construct.__signature__ = signature.replace(  # type: ignore[attr-defined]  # for `help`
            parameters=with_self
        )
        return construct

    return decorate


def documented(arguments: type) -> Callable[[type[C]], type[C]]:
    """Decorate a class: fill in ``{arguments}`` of its docstring by the fields of `arguments`."""
    lines = []
    for field in dataclasses.fields(arguments):
        text = textwrap.wrap(setting_of(field).doc, 108, break_on_hyphens=False)
        lines.append(field.name)
        lines += [f"    {line}" for line in text]

    def decorate(cls: type[C]) -> type[C]:
        cls.__doc__ = (cls.__doc__ or "").replace("{arguments}", "\n    ".join(lines))
        return cls

    return decorate
