"""Operations with written-out derivatives: values, forces, and the gradient of a loss on forces.

An operation returns outputs y = F(x, θ). The inputs x depend on positions, θ are parameters. A bar
marks derivatives of the energy, a dot tangents, a hat derivatives of the loss:

| pass | method     | from         | to                                    | when             |
|------|------------|--------------|---------------------------------------|------------------|
| 1    | `value`    | x, θ         | y                                     | forward          |
| 2    | `adjoint`  | ȳ            | x̄ = ȳ·F′                              | forces           |
| 3    | `tangent`  | ẋ = dloss/dx̄ | dloss/dȳ = F′·ẋ                       | gradient of loss |
| 4    | `gradient` | ŷ = dloss/dy | dloss/d(x, θ) = ŷ·F′ + d(x̄·ẋ)/d(x, θ) | gradient of loss |

Autograd cannot know that pass 4 needs results of passes 2 and 3, or that it must wait for pass 3.
Therefore pass 1 returns one more output, an empty tensor that pass 2 takes as an input: the edge
from pass 2 to pass 1 orders them. A `_Call` carries the results from passes 2 and 3 to pass 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Perhaps = Sequence[Tensor | None]
Nested = tuple[Any, ...]
"""A tuple, often a NamedTuple, of tensors, of None, and of tuples like it."""


class FourPasses(ABC):
    """An operation and its passes.

    Inputs, and what passes save, are `Nested`; every pass gets them as they were. Inputs that
    depend on positions come before all others. Cotangents and tangents come in a row, contiguous. A
    cotangent may be None; a tangent that autograd does not have arrives as zeros.
    """

    @abstractmethod
    def value(self, inputs: Any) -> tuple[Perhaps, Nested]:
        """Pass 1: return the outputs, and the tensors to save for later passes (`value_saved`)."""

    @abstractmethod
    def adjoint(self, cotangents: Any, inputs: Any, value_saved: Any) -> tuple[Tensors, Nested]:
        """Pass 2: return adjoints of the first inputs, and tensors to save (`adjoint_saved`).

        There is one cotangent for each output. Pass 3 sees no other tensors than `adjoint_saved`.
        """

    @abstractmethod
    def tangent(self, tangents: Any, adjoint_saved: Any) -> tuple[Perhaps, Nested]:
        """Pass 3: return the tangents of the outputs, and the tensors to save (`tangent_saved`).

        There is one tangent for each input that has an adjoint. Each output of `value` gets a
        tangent, in the same order; that of an output without a cotangent is ignored, so it may be
        None.
        """

    @abstractmethod
    def gradient(
        self, cotangents: Any, inputs: Any, value_saved: Any, adjoint_saved: Any, tangent_saved: Any
    ) -> Nested:
        """Pass 4: return the gradients of the first inputs; autograd takes the others as None.

        `adjoint_saved` and `tangent_saved` are None if the loss does not depend on forces.
        """


# ----- nested tensors ----------------------------------------------------------------------------
# Autograd takes and saves tensors in a row.


def _in_a_row(nested: Nested) -> list[Tensor | None]:
    """Return the tensors of nested tuples in their order."""
    row: list[Tensor | None] = []
    for member in nested:
        if isinstance(member, tuple):
            row += _in_a_row(member)
        else:
            row.append(member)
    return row


class _Nesting(NamedTuple):
    """The class of a tuple, and the nesting of each member; None for a tensor."""

    kind: type
    members: Sequence[Any]

    @classmethod
    def of(cls, nested: Nested) -> _Nesting:
        """Return the nesting of tuples."""
        members = [cls.of(member) if isinstance(member, tuple) else None for member in nested]
        return cls(type(nested), members)

    def fill(self, row: Iterator[Tensor | None]) -> Any:
        """Undo `_in_a_row`."""
        members = [next(row) if nesting is None else nesting.fill(row) for nesting in self.members]
        return tuple(members) if self.kind is tuple else self.kind(*members)


# ----- autograd ----------------------------------------------------------------------------------


@dataclass
class _Call:
    """One call of an operation, and what it must remember between its passes.

    Attributes
    ----------
    passes
        The operation.
    nesting
        Of its inputs.
    gradient_is_next
        Whether the next backward pass is pass 4; otherwise it is pass 2.
    adjoint_saved, tangent_saved
        What passes 2 and 3 hand over to pass 4.
    """

    passes: FourPasses
    nesting: _Nesting
    gradient_is_next: bool
    adjoint_saved: Nested | None = None
    tangent_saved: Nested | None = None


class _AdjointArguments(NamedTuple):
    """The arguments of pass 2 that autograd does not see.

    Pass 2 depends on `inputs`, too, but its backward pass 3 differentiates by the cotangents alone:
    the derivative by the inputs is part of pass 4.
    """

    call: _Call
    inputs: Nested
    value_saved: Nested


class _Value(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *input_row: Tensor | None) -> Any:
        outputs, value_saved = call.passes.value(call.nesting.fill(iter(input_row)))
        order = next(x for x in outputs if x is not None).new_empty(0)
        ctx.call = call
        ctx.n_inputs = len(input_row)
        ctx.nesting = _Nesting.of(value_saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order, *input_row, *_in_a_row(value_saved))
        return *outputs, order

    @staticmethod
    def backward(ctx: Any, *output_cotangents: Tensor | None) -> Any:
        call: _Call = ctx.call
        order, *tensors = ctx.saved_tensors
        row = iter(tensors)
        inputs = call.nesting.fill(row)
        value_saved = ctx.nesting.fill(row)
        cotangents = [None if x is None else x.contiguous() for x in output_cotangents[:-1]]
        # Autograd records this backward pass only under create_graph, which is how forces are asked
        # for.
        create_graph = torch.is_grad_enabled()
        if not call.gradient_is_next:
            call.gradient_is_next = create_graph
            arguments = _AdjointArguments(call, inputs, value_saved)
            gradients = _Adjoint.apply(arguments, order, *cotangents)
        elif create_graph:
            raise RuntimeError(
                f"{type(call.passes).__name__} was differentiated twice with create_graph: its "
                "forces can be differentiated once, and there is no third derivative"
            )
        else:
            gradients = _in_a_row(
                call.passes.gradient(
                    cotangents, inputs, value_saved, call.adjoint_saved, call.tangent_saved
                )
            )
            call.adjoint_saved = None  # frees the memory
            call.tangent_saved = None
        without_gradient = [None] * (ctx.n_inputs - len(gradients))
        return None, *gradients, *without_gradient


class _Adjoint(torch.autograd.Function):
    """Passes 2 and 3."""

    @staticmethod
    def forward(
        ctx: Any, arguments: _AdjointArguments, order: Tensor, *output_cotangents: Tensor | None
    ) -> Any:
        # Detached, because the call keeps what pass 2 saves: with a graph, which holds the call,
        # this would be a cycle that is never freed.
        cotangents = [None if x is None else x.detach() for x in output_cotangents]
        call, inputs, value_saved = arguments
        adjoints, adjoint_saved = call.passes.adjoint(cotangents, inputs, value_saved)
        ctx.call = call
        ctx.nesting = _Nesting.of(adjoint_saved)
        ctx.has_cotangent = [x is not None for x in output_cotangents]
        ctx.save_for_backward(*_in_a_row(adjoint_saved))
        return tuple(adjoints)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        call: _Call = ctx.call
        call.adjoint_saved = adjoint_saved = ctx.nesting.fill(iter(ctx.saved_tensors))
        output_tangents, call.tangent_saved = call.passes.tangent(
            [x.contiguous() for x in tangents], adjoint_saved
        )
        results = [
            tangent if has_cotangent else None
            for tangent, has_cotangent in zip(output_tangents, ctx.has_cotangent, strict=True)
        ]
        return None, None, *results


def run(passes: FourPasses, inputs: Nested, *, force: bool) -> Any:
    """Return the outputs of an operation, differentiable.

    Parameters
    ----------
    passes
        The operation.
    inputs
        Its inputs.
    force
        Whether the first backward pass is that of the energy, with create_graph. It returns no
        gradients of parameters; the second one does. Otherwise the only backward pass is that of
        the loss.
    """
    call = _Call(passes, _Nesting.of(inputs), gradient_is_next=not force)
    *outputs, _order = _Value.apply(call, *_in_a_row(inputs))
    return outputs


def run_with_pullback(passes: FourPasses, inputs: Nested) -> tuple[Any, Callable[..., Any]]:
    """Return the outputs, and pass 2 as a function of cotangents that the caller calls.

    Pass 2 gets an empty `value_saved`: such an operation remembers these tensors itself.
    """
    call = _Call(passes, _Nesting.of(inputs), gradient_is_next=True)
    *outputs, order = _Value.apply(call, *_in_a_row(inputs))

    def pullback(*cotangents: Tensor | None) -> Any:
        arguments = _AdjointArguments(call, inputs, value_saved=())
        return _Adjoint.apply(arguments, order, *cotangents)

    return outputs, pullback
