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
from pass 2 to pass 1 orders them. A `_Record` carries the results from passes 2 and 3 to pass 4.
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

    Inputs that depend on positions come before all others. Tensors arrive contiguous. A cotangent
    may be None; a tangent that autograd does not have arrives as zeros.
    """

    @abstractmethod
    def value(self, inputs: Any) -> tuple[Perhaps, Perhaps]:
        """Pass 1: return the outputs, and the tensors to save for later passes (`value_saved`)."""

    @abstractmethod
    def adjoint(self, cotangents: Any, inputs: Any, value_saved: Any) -> tuple[Tensors, Perhaps]:
        """Pass 2: return adjoints of the first inputs, and tensors to save (`adjoint_saved`).

        There is one cotangent for each output. Pass 3 sees no other tensors than `adjoint_saved`.
        """

    @abstractmethod
    def tangent(self, tangents: Any, adjoint_saved: Any) -> tuple[Perhaps, Perhaps]:
        """Pass 3: return the tangents of the outputs, and the tensors to save (`tangent_saved`).

        There is one tangent for each input that has an adjoint. The tangent of an output without a
        cotangent is ignored.
        """

    @abstractmethod
    def gradient(
        self, cotangents: Any, inputs: Any, value_saved: Any, adjoint_saved: Any, tangent_saved: Any
    ) -> Perhaps:
        """Pass 4: return the gradients of the first inputs; autograd takes the others as None.

        `adjoint_saved` and `tangent_saved` are None if the loss does not depend on forces.
        """


@dataclass
class _Record:
    """What one call of the operation must remember between its passes.

    Attributes
    ----------
    gradient_is_next
        Whether the next backward pass is pass 4; otherwise it is pass 2.
    adjoint_saved, tangent_saved
        What passes 2 and 3 hand over to pass 4.
    """

    gradient_is_next: bool
    adjoint_saved: Perhaps | None = None
    tangent_saved: Perhaps | None = None


class _AdjointArguments(NamedTuple):
    """The arguments of pass 2 that autograd does not see.

    Pass 2 depends on `inputs`, too, but its backward pass 3 differentiates by the cotangents alone:
    the derivative by the inputs is part of pass 4.
    """

    passes: FourPasses
    record: _Record
    inputs: Perhaps
    value_saved: Perhaps


class _Value(torch.autograd.Function):
    """Passes 1 and 4, and the way into pass 2."""

    @staticmethod
    def forward(ctx: Any, passes: FourPasses, record: _Record, *inputs: Tensor | None) -> Any:
        outputs, value_saved = passes.value(inputs)
        order = next(x for x in outputs if x is not None).new_empty(0)
        ctx.passes = passes
        ctx.record = record
        ctx.n_inputs = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order, *inputs, *value_saved)
        return *outputs, order

    @staticmethod
    def backward(ctx: Any, *output_cotangents: Tensor | None) -> Any:
        passes = ctx.passes
        record = ctx.record
        order, *tensors = ctx.saved_tensors
        inputs = tensors[: ctx.n_inputs]
        value_saved = tensors[ctx.n_inputs :]
        cotangents = [None if x is None else x.contiguous() for x in output_cotangents[:-1]]
        # Autograd records this backward pass only under create_graph, which is how forces are asked
        # for.
        create_graph = torch.is_grad_enabled()
        input_gradients: Perhaps
        if not record.gradient_is_next:
            record.gradient_is_next = create_graph
            arguments = _AdjointArguments(passes, record, inputs, value_saved)
            input_gradients = _Adjoint.apply(arguments, order, *cotangents)
        elif create_graph:
            raise RuntimeError(
                f"{type(passes).__name__} was differentiated twice with create_graph: its forces "
                "can be differentiated once, and there is no third derivative"
            )
        else:
            input_gradients = passes.gradient(
                cotangents, inputs, value_saved, record.adjoint_saved, record.tangent_saved
            )
            record.adjoint_saved = None  # frees the memory
            record.tangent_saved = None
        without_gradient = [None] * (len(inputs) - len(input_gradients))
        return None, None, *input_gradients, *without_gradient


class _Adjoint(torch.autograd.Function):
    """Passes 2 and 3."""

    @staticmethod
    def forward(
        ctx: Any, arguments: _AdjointArguments, order: Tensor, *output_cotangents: Tensor | None
    ) -> Any:
        # Detached, because the record keeps what pass 2 saves: with a graph, which holds the
        # record, this would be a cycle that is never freed.
        cotangents = [None if x is None else x.detach() for x in output_cotangents]
        adjoints, adjoint_saved = arguments.passes.adjoint(
            cotangents, arguments.inputs, arguments.value_saved
        )
        ctx.passes = arguments.passes
        ctx.record = arguments.record
        ctx.has_cotangent = [x is not None for x in output_cotangents]
        ctx.save_for_backward(*adjoint_saved)
        return tuple(adjoints)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        adjoint_saved = ctx.saved_tensors
        output_tangents, tangent_saved = ctx.passes.tangent(
            [x.contiguous() for x in tangents], adjoint_saved
        )
        ctx.record.adjoint_saved = adjoint_saved
        ctx.record.tangent_saved = tangent_saved
        results = [
            tangent if has_cotangent else None
            for tangent, has_cotangent in zip(output_tangents, ctx.has_cotangent, strict=True)
        ]
        return None, None, *results


def run(passes: FourPasses, *inputs: Tensor | None, force: bool) -> Any:
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
    record = _Record(gradient_is_next=not force)
    *outputs, _order = _Value.apply(passes, record, *inputs)
    return outputs


def run_with_pullback(passes: FourPasses, *inputs: Tensor | None) -> tuple[Any, Callable[..., Any]]:
    """Return the outputs, and pass 2 as a function of cotangents that the caller calls.

    Pass 2 gets an empty `value_saved`: such an operation remembers these tensors itself.
    """
    record = _Record(gradient_is_next=True)
    *outputs, order = _Value.apply(passes, record, *inputs)

    def pullback(*cotangents: Tensor | None) -> Any:
        arguments = _AdjointArguments(passes, record, inputs, value_saved=())
        return _Adjoint.apply(arguments, order, *cotangents)

    return outputs, pullback
