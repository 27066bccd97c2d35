"""Prediction, loss and gradient of a training step, compiled by torch's compiler as one function.

Forces are themselves a derivative of the model, and torch.compile does not differentiate twice. So the whole function
from weights and batch to loss and gradient is traced into one graph of plain operations, which compute both
derivatives. The compiler then turns chains of element-wise operations into single kernels. The compiled function
differs from the plain one by rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.loss import Loss
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn import triton_support
from deepmd_muon.train.batches.batch import TrainingBatch, map_tensors, tensors_of

log = logging.getLogger(__name__)

Compiled = Callable[..., Sequence[Tensor]]

#: Functions that are compiled at most in a run; batches of further layouts are differentiated plainly.
MOST_COMPILED = 8


def differentiate(
    model: EnergyModel,
    loss: Loss,
    batch: TrainingBatch,
    lr_fraction: float | Tensor,
    *,
    sharded: bool = False,
    trained: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics of a batch, the gradients in the parameters' `grad`.

    Edges are leaves of the graph as well (`describe_by_autograd`); their second derivatives are not computed unless the
    model is `sharded`, when other tensors stand for its parameters. `trained` spares a walk through the modules for the
    parameters that have gradients.
    """
    structures = batch.structures
    prediction = model(structures, force=loss.needs_force, virial=loss.needs_virial)
    mask = batch.counted(model.counted)
    value, metrics = loss(
        batch.compared(prediction), batch.labels, lr_fraction, structures.natoms, mask
    )
    if trained is None:
        trained = [p for p in model.parameters() if p.requires_grad]
    value.backward(inputs=None if sharded else trained or None)
    return value.detach(), metrics


@dataclasses.dataclass
class _Function:
    """A compiled function of parameters, buffers, tensors of the batch and the fraction of the learning rate.

    `call` returns a flat list: the loss, the `metrics`, and the gradients of the parameters `with_gradient`.
    """

    call: Compiled
    metrics: tuple[str, ...] = ()
    with_gradient: tuple[torch.nn.Parameter, ...] = ()


class CompiledGradient:
    """`differentiate`, compiled for the layouts of batches that are asked for.

    `compiler` maps a traced graph and its example arguments to a function; torch's Inductor when left out. `failed`
    says why nothing is compiled any more.
    """

    def __init__(
        self,
        model: EnergyModel,
        loss: Loss,
        compiler: Callable[[torch.fx.GraphModule, list[Any]], Compiled] | None = None,
    ) -> None:
        self._model = model
        self._loss = loss
        self._compiler = compiler or _inductor
        self._functions: dict[Hashable, _Function] = {}
        self._layout: Hashable | None = None
        self._full = self._compiling = False
        self.failed: str | None = None

    def expect(self, layout: Hashable | None) -> None:
        """Set the layout of the next batch."""
        self._layout = layout

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile, in a `with` block, the functions of all layouts that are wanted before they are called."""
        self._compiling = True
        try:
            yield
        finally:
            self._compiling = False

    def forget(self) -> None:
        """Drop all functions: the model computes in another way from now on."""
        self._functions.clear()

    def wants(self, layout: Hashable | None) -> bool:
        """Return whether the next batch of this layout should be compiled."""
        if self.failed is not None or layout is None or layout in self._functions:
            return False
        if len(self._functions) == MOST_COMPILED:
            if not self._full:
                self._full = True
                log.info(
                    "batches have more than %d layouts: steps of further ones are not compiled",
                    MOST_COMPILED,
                )
            return False
        return True

    def __call__(
        self, batch: TrainingBatch, lr_fraction: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a batch, the gradients added to the parameters' `grad`; see `differentiate`."""
        if self._compiling and self.wants(self._layout):
            self.compile(batch, lr_fraction)
        function = self._functions.get(self._layout)
        if function is None:
            return differentiate(self._model, self._loss, batch, lr_fraction)
        with torch.no_grad():
            value, *others = function.call(*self._arguments(batch, lr_fraction))
        found = iter(others)
        metrics = {name: next(found) for name in function.metrics}
        for parameter, gradient in zip(function.with_gradient, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return value, metrics

    def compile(self, batch: TrainingBatch, lr_fraction: float | Tensor) -> None:
        """Compile the function for batches of the expected layout, given one of them.

        The batch's layout must have been differentiated plainly before: tables that are made once, at first use, must
        not be made while tracing. A failure is logged once and leaves the plain function in use.
        """
        begun = time.perf_counter()
        try:
            with _quiet(), triton_support.traced():
                graph, function = self._trace(batch, lr_fraction)
                arguments = [value.detach() for value in self._arguments(batch, lr_fraction)]
                with torch.no_grad():
                    function.call = self._compiler(graph, arguments)
                    function.call(*arguments)
        except Exception as error:  # no exception of a compiler may end a training run
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            # Errors of a compiler's processes bear its traceback first and the reason last.
            self.failed = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"
            log.warning("training steps are not compiled: %s", self.failed)
            log.debug("%s", error)
            return
        self._functions[self._layout] = function
        log.info("compiled the training step in %.0f s", time.perf_counter() - begun)

    def _arguments(self, batch: TrainingBatch, lr_fraction: float | Tensor) -> list[Tensor]:
        model = self._model
        fraction = torch.as_tensor(lr_fraction, dtype=torch.float64)
        return [*model.parameters(), *model.buffers(), *tensors_of(batch), fraction]

    def _trace(
        self, batch: TrainingBatch, lr_fraction: float | Tensor
    ) -> tuple[torch.fx.GraphModule, _Function]:
        """Record the function as a graph of torch's operations without derivatives."""
        from torch.fx.experimental.proxy_tensor import make_fx

        names = [
            name for name, _ in (*self._model.named_parameters(), *self._model.named_buffers())
        ]
        trained = [index for index, p in enumerate(self._model.parameters()) if p.requires_grad]
        function = _Function(_not_compiled)

        def flat(*arguments: Tensor) -> list[Tensor]:
            state = dict(zip(names, arguments, strict=False))
            rest = iter(arguments[len(names) :])
            given = map_tensors(batch, lambda _: next(rest))
            structures = given.structures
            wanted = {"force": self._loss.needs_force, "virial": self._loss.needs_virial}
            prediction = torch.func.functional_call(self._model, state, (structures,), wanted)
            prediction, mask = given.compared(prediction), given.counted(self._model.counted)
            value, metrics = self._loss(
                prediction, given.labels, next(rest), structures.natoms, mask
            )
            leaves = [arguments[index] for index in trained]
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            parameters = list(self._model.parameters())
            function.metrics = tuple(metrics)
            found = [
                (parameters[i], g) for i, g in zip(trained, gradients, strict=True) if g is not None
            ]
            function.with_gradient = tuple(parameter for parameter, _ in found)
            results = [value, *metrics.values(), *(gradient for _, gradient in found)]
            return [result.detach() for result in results]

        arguments = [value.detach() for value in self._arguments(batch, lr_fraction)]
        for index in trained:
            arguments[index].requires_grad_()
        graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph, function


def _not_compiled(*arguments: Tensor) -> Sequence[Tensor]:
    raise AssertionError("the function is traced, not yet compiled")


def _inductor(graph: torch.fx.GraphModule, arguments: list[Any]) -> Compiled:
    """Compile with torch's Inductor."""
    import torch._inductor

    compiled: Compiled = torch._inductor.compile(graph, arguments)
    return compiled


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings about the compiler's internals out of the run's log."""
    logger = logging.getLogger("torch._inductor.select_algorithm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
