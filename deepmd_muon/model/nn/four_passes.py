"""Operations whose derivatives are written out: values, forces, and the gradient of a loss on forces.

Take outputs y = F(x, θ), where x depends on positions and θ are parameters. A bar marks derivatives of the energy, a
dot tangents, a hat derivatives of the loss:

| pass | method     | from          | to                                                     | when              |
|------|------------|---------------|--------------------------------------------------------|-------------------|
| 1    | `value`    | x, θ          | y                                                      | forward           |
| 2    | `adjoint`  | ȳ             | x̄ = ȳ·F′                                               | forces            |
| 3    | `tangent`  | ẋ = dloss/dx̄  | dloss/dȳ = F′·ẋ                                        | gradient of loss  |
| 4    | `gradient` | ŷ = dloss/dy  | dloss/d(x, θ) = ŷ·F′ + the derivative of x̄·ẋ by (x, θ) | gradient of loss  |

Autograd knows neither that pass 4 needs results of passes 2 and 3, nor that it must wait for pass 3. So pass 1 has one
output more, an empty tensor that pass 2 takes, and a `_Record` hands the results over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Perhaps = Sequence[Tensor | None]


class FourPasses(ABC):
    """An operation and its passes.

    Inputs that depend on positions come before all others. Tensors arrive contiguous; cotangents may be None, tangents
    are zeros where none arrived.
    """

    @abstractmethod
    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """Return the outputs, and further tensors that other passes need (`kept`)."""

    @abstractmethod
    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of the first inputs, and all tensors that passes 3 and 4 need from here (`left`).

        `cotangents` belong to the outputs. Pass 3 sees no other tensors than `left`.
        """

    @abstractmethod
    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivatives of the outputs, and the tensors that pass 4 needs from here (`moved`).

        `tangents` belong to the inputs that have adjoints. A derivative whose output had no cotangent is ignored.
        """

    @abstractmethod
    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """Return the gradients of the first inputs; `left` and `moved` are None if forces have no part in the loss."""


@dataclass
class _Record:
    """The tensors of passes 2 and 3 that pass 4 of the same call needs, and whether pass 2 has run."""

    pulled: bool
    left: Perhaps | None = None
    moved: Perhaps | None = None


class _Pull(NamedTuple):
    """The arguments of pass 2 without derivatives."""

    passes: FourPasses
    record: _Record
    given: Perhaps
    kept: Perhaps


class _Value(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2."""

    @staticmethod
    def forward(ctx: Any, passes: FourPasses, record: _Record, *given: Tensor | None) -> Any:
        outputs, kept = passes.value(given)
        order = next(x for x in outputs if x is not None).new_empty(0)
        ctx.passes, ctx.record, ctx.count = passes, record, len(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order, *given, *kept)
        return *outputs, order

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        passes, record = ctx.passes, ctx.record
        order, *saved = ctx.saved_tensors
        given, kept = saved[: ctx.count], saved[ctx.count :]
        arrived = [None if x is None else x.contiguous() for x in cotangents[:-1]]
        again = torch.is_grad_enabled()
        if not record.pulled:
            record.pulled = again
            found: Perhaps = _Adjoint.apply(_Pull(passes, record, given, kept), order, *arrived)
        elif again:
            raise RuntimeError(
                f"{type(passes).__name__} was differentiated twice with create_graph: its forces can be differentiated "
                "once, and there is no third derivative"
            )
        else:
            left, moved, record.left, record.moved = record.left, record.moved, None, None
            found = passes.gradient(arrived, given, kept, left, moved)
        return None, None, *found, *[None] * (len(given) - len(found))


class _Adjoint(torch.autograd.Function):
    """Passes 2 and 3."""

    @staticmethod
    def forward(ctx: Any, pull: _Pull, order: Tensor, *cotangents: Tensor | None) -> Any:
        # detached: the record keeps `left`, whose graph holds the record; that cycle would never be freed
        arrived = [None if x is None else x.detach() for x in cotangents]
        found, left = pull.passes.adjoint(arrived, pull.given, pull.kept)
        ctx.passes, ctx.record = pull.passes, pull.record
        ctx.present = [x is not None for x in cotangents]
        ctx.save_for_backward(*left)
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        left = ctx.saved_tensors
        found, moved = ctx.passes.tangent([x.contiguous() for x in tangents], left)
        ctx.record.left, ctx.record.moved = left, moved
        return (
            None,
            None,
            *(x if there else None for x, there in zip(found, ctx.present, strict=True)),
        )


def run(passes: FourPasses, *given: Tensor | None, force: bool) -> Any:
    """Return the outputs of an operation, differentiable.

    Parameters
    ----------
    passes
        The operation.
    given
        Its inputs.
    force
        Whether the first derivative that autograd takes is that of the energy; else there is only that of the loss.
    """
    *outputs, _ = _Value.apply(passes, _Record(pulled=not force), *given)
    return outputs


def run_with_pullback(passes: FourPasses, *given: Tensor | None) -> tuple[Any, Callable[..., Any]]:
    """Return the outputs, and pass 2 as a function of cotangents, for a caller that does not leave it to autograd.

    Pass 2 gets no `kept`: such an operation remembers those tensors itself.
    """
    record = _Record(pulled=True)
    *outputs, order = _Value.apply(passes, record, *given)

    def pull(*cotangents: Tensor | None) -> Any:
        return _Adjoint.apply(_Pull(passes, record, given, ()), order, *cotangents)

    return outputs, pull
