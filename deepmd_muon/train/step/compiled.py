"""The gradient of a hosted model as one program: element-wise chains become a kernel each.

A module of deepmd-kit launches thousands of small kernels a step. Here forward pass, derivatives
for the forces, loss and backward pass are traced together, on fake tensors, as one graph of torch's
basic operations, and torch's compiler fuses their chains (`fusion`). A CUDA graph can
hold the program, as it holds other steps.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_muon.loss import Loss
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn import triton_support
from deepmd_muon.train.batches.batch import TrainingBatch, map_tensors, tensors_of
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.step.evaluate import evaluate

log = logging.getLogger(__name__)

#: Layouts of batches that are compiled at most: each takes a minute or more.
MOST_PROGRAMS = 8


class _Program(NamedTuple):
    """A compiled gradient.

    Attributes
    ----------
    run
        Maps the list of `_arguments`, which it empties, to loss, metrics and gradients.
    metrics
        Names of the metrics.
    differentiated
        The parameters of the gradients: trained ones on which the loss depends.
    """

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    metrics: tuple[str, ...]
    differentiated: tuple[nn.Parameter, ...]


class CompiledGradient:
    """Computes loss and gradients of a model by programs, one for each layout of batches.

    Parameters
    ----------
    model, loss
        What is differentiated.
    trained
        The parameters that get gradients.
    ranks
        The processes of the run. Several compile only one layout, that of their first batch: a rank
        that compiled another one later would keep the others waiting for too long.
    """

    def __init__(
        self,
        model: EnergyModel,
        loss: Loss,
        trained: Sequence[nn.Parameter],
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._loss = loss
        self._trained = {id(p) for p in trained}
        self._ranks = ranks
        self._most = MOST_PROGRAMS if ranks.size == 1 else 1
        self._programs: dict[Hashable, _Program] = {}
        self._failed = False

    def __call__(
        self, layout: Hashable, batch: TrainingBatch, lr_fraction: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return loss and metrics of a batch, and add its gradients to the parameters' `grad`.

        None if there is no program for its layout: the compiler failed, or there are too many.
        """
        program = self._programs.get(layout)
        if program is not None:
            return self._apply(program, batch, lr_fraction)
        if self._failed or len(self._programs) == self._most:
            return None
        self._ranks.doing("compiling the step")
        result = self._compile_and_apply(layout, batch, lr_fraction)
        # The barrier waits on entry. A rank whose compiler failed must arrive, too.
        with self._ranks.barrier("compiling the step"):
            pass
        return result

    def _compile_and_apply(
        self, layout: Hashable, batch: TrainingBatch, lr_fraction: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Compile the program of a layout, and apply it; None, with a log line, if that fails."""
        natoms = len(batch.structures.order)
        log.info("compiling the step for batches of %d atoms; the first time takes minutes", natoms)
        begun = time.monotonic()
        try:
            program = self._compile(batch, lr_fraction)
            result = self._apply(program, batch, lr_fraction)
        except Exception as error:  # no exception of a compiler may end a run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("steps are not compiled, because the compiler failed: %s", reason)
            log.debug("the compiler failed", exc_info=True)
            self._failed = True
            return None
        self._programs[layout] = program
        log.info("compiled in %.0f s", time.monotonic() - begun)
        return result

    def _apply(
        self, program: _Program, batch: TrainingBatch, lr_fraction: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a batch, and add its gradients to the parameters' `grad`."""
        with self._model.precision():
            loss, *others = program.run(self._arguments(batch, lr_fraction))
        n_metrics = len(program.metrics)
        metrics = dict(zip(program.metrics, others[:n_metrics], strict=True))
        for parameter, gradient in zip(program.differentiated, others[n_metrics:], strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        return loss, metrics

    def _arguments(self, batch: TrainingBatch, lr_fraction: Tensor) -> list[Tensor]:
        """Return the program's inputs in the order in which `differentiate` reads them.

        It is the order of `parameters()`, `buffers()` and `map_tensors`, the same at every call.
        """
        weights = [p.detach() for p in self._model.parameters()]
        return [*weights, *self._model.buffers(), *tensors_of((batch, lr_fraction))]

    def _compile(self, batch: TrainingBatch, lr_fraction: Tensor) -> _Program:
        """Compile the gradient of batches with the shapes and other fields of this one.

        The program has no values of its tensors, but all fields that are not tensors.
        """
        model = self._model
        parameters = list(model.parameters())
        buffers = list(model.buffers())
        # `differentiate` sets both when it is traced.
        metric_names: list[str] = []
        differentiated: list[nn.Parameter] = []

        def differentiate(*tensors: Tensor) -> list[Tensor]:
            """Return loss, metrics and gradients of the tensors of `_arguments`."""
            remaining = iter(tensors)
            weights = [
                next(remaining).detach().requires_grad_(id(p) in self._trained) for p in parameters
            ]
            replacement = {id(p): weight for p, weight in zip(parameters, weights, strict=True)}
            replacement |= {id(buffer): next(remaining) for buffer in buffers}
            traced_batch, traced_fraction = map_tensors(
                (batch, lr_fraction), lambda _: next(remaining)
            )
            with (
                torch.enable_grad(),
                triton_support.without_kernels(),
                _replaced(model, replacement),
            ):
                loss, metrics = evaluate(model, self._loss, traced_batch, traced_fraction)
                leaves = [weight for weight in weights if weight.requires_grad]
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            metric_names[:] = metrics
            trained = [p for p in parameters if id(p) in self._trained]
            gradient_of = dict(zip(trained, gradients, strict=True))
            differentiated[:] = [p for p, gradient in gradient_of.items() if gradient is not None]
            return [
                loss.detach(),
                *metrics.values(),
                *(g.contiguous() for g in gradients if g is not None),
            ]

        # torch's compiler takes seconds to import.
        from deepmd_muon.train.step.fusion import fused

        run = fused(differentiate, self._arguments(batch, lr_fraction))
        return _Program(run, tuple(metric_names), tuple(differentiated))


@contextlib.contextmanager
def _replaced(model: nn.Module, replacement: Mapping[int, Tensor]) -> Iterator[None]:
    """Put other tensors in place of parameters and buffers, by `id`, for a `with` block."""
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (tensors, name, tensor)
        for part in model.modules()
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    for tensors, name, tensor in places:
        tensors[name] = replacement[id(tensor)]
    try:
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor
