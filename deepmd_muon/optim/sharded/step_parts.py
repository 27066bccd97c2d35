"""One step of the parameters that live on several ranks: its three parts, and their order.

    parameters                                           part
    Muon route, domains whose replicas gather momenta    `RepeatedMuon`
    Muon route, other domains                            `Pipeline`
    Adam routes                                          `ElementwiseStep`

The order of a step hides collectives behind the work of other parts:

    1  start the gathers of momenta                                      `RepeatedMuon.start`
    2  pack the first buckets and start their gathers                    `PipelineStep`
    3  step the Adam routes, and start the gathers of their parts        `ElementwiseStep.step`
    4  step the matrices with gathered momenta                           `RepeatedMuon.step`
    5  orthogonalize and apply these buckets, then step all others       `PipelineStep.finish`
    6  wait for the gathers of parts that ranks have updated             `Wait`s of 3 and 5

It is the same on all ranks, which therefore start their collectives in the same order. There are
two variants:

- With offload, 4 also starts the gathers of momenta. Offloaded moments come from one iterator, and
  2 to 5 take them in this order.
- On a GPU, without a `Pipeline` and without offload, 4 comes before 3 if the Adam routes are small.
  These then run on a second stream (`_step_on_two_streams`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.cuda import MOST_BESIDE, SideStream
from deepmd_muon.optim.sharded.elements import ElementwiseStep
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.pipeline import Pipeline, PipelineStep
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.sharded.repeated import RepeatedMuon, StepMatrices
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.host_memory import TransferBatch
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import StepContext


class StepParts:
    """The parts of the step, with all their buffers.

    Parameters
    ----------
    plan, process_groups
        The plan of the Muon route, and the process group of each of its domains.
    pipelined, repeated
        The matrices of `Pipeline` and of `RepeatedMuon`, by position in the plan.
    elementwise
        The parameters of the Adam routes.
    device
        The device of all parameters.

    Attributes
    ----------
    elements, pipeline, repeated
        The parts. The last two are None if they have no matrices.
    """

    def __init__(
        self,
        plan: Plan,
        process_groups: Sequence[dist.ProcessGroup | None],
        *,
        pipelined: Mapping[int, ShardedParameter],
        repeated: Mapping[int, ShardedParameter],
        elementwise: Sequence[ShardedParameter],
        device: torch.device,
    ) -> None:
        collectives = CollectiveStream(device)
        self._device = device
        self._free_gradients = plan.settings.free_gradients
        self.pipeline: Pipeline | None = None
        if pipelined:
            self.pipeline = Pipeline(plan, pipelined, process_groups, collectives)
        self.repeated: RepeatedMuon | None = None
        if repeated:
            self.repeated = RepeatedMuon(list(repeated.values()), collectives)
        self.elements = ElementwiseStep(elementwise, collectives)

        # Without a `Pipeline`, small Adam routes run beside the matrices of `RepeatedMuon`.
        self._side_stream: SideStream | None = None
        is_small = sum(param.p.numel() for param in elementwise) <= MOST_BESIDE
        if device.type == "cuda" and is_small and repeated and not pipelined:
            self._side_stream = SideStream(device)

    def bind(self, context: StepContext) -> None:
        """Create missing state of matrices, and all views of these and of their state."""
        if self.pipeline is not None:
            self.pipeline.bind(context)
        if self.repeated is not None:
            self.repeated.bind(context)

    def choose_with_gradient(self, context: StepContext) -> None:
        """Choose the parameters that have a gradient; create missing state of the Adam routes.

        The pipeline does not need this: it reads gradients in every step.
        """
        self.elements.compile(context)
        if self.repeated is not None:
            self.repeated.choose_with_gradient()

    def release(self) -> None:
        """Release the state; buckets keep their views of it until `bind`."""
        self.elements.waves = []
        if self.pipeline is not None:
            self.pipeline.momenta = {}
        if self.repeated is not None:
            self.repeated.release()

    def step(self, context: StepContext, control: StepControl, step_matrices: StepMatrices) -> None:
        """Take the step; `step_matrices` steps a wave of matrices as a single process does."""
        moments = None
        if context.memory is not None:
            moments = context.memory.fetch_in_turn(self._transfer_batches(context))
        if self.repeated is not None:
            self.repeated.start()  # unless `ShardedStep.start` has, before the step
        if self._side_stream is not None and moments is None:
            self._step_on_two_streams(self._side_stream, control, step_matrices)
        else:
            self._step_in_order(context, control, moments, step_matrices)
        if self.repeated is not None and self._free_gradients:
            self.repeated.free_gradients()

    def _step_in_order(
        self,
        context: StepContext,
        control: StepControl,
        moments: Iterator[list[Tensor]] | None,
        step_matrices: StepMatrices,
    ) -> None:
        """Take the step in the order of the module's docstring."""
        pipeline_step = None
        if self.pipeline is not None:
            pipeline_step = PipelineStep(self.pipeline, context, control, moments)
        waits = self.elements.step(control, moments)
        if self.repeated is not None:
            self.repeated.step(control, moments, step_matrices)
        if pipeline_step is not None:
            waits += pipeline_step.finish()  # exhausts `moments`
        elif moments is not None:
            for _ in moments:  # exhausting it copies the last batch back to the host
                pass
        for wait in waits:
            wait()

    def _step_on_two_streams(
        self, side_stream: SideStream, control: StepControl, step_matrices: StepMatrices
    ) -> None:
        """Step the matrices with gathered momenta, and on a second stream the Adam routes."""
        assert self.repeated is not None
        control = control.on(self._device)  # before the fork: both streams read it
        side_stream.fork()
        self.repeated.step(control, None, step_matrices)
        with side_stream:
            for wait in self.elements.step(control, None):
                wait()

    def _transfer_batches(self, context: StepContext) -> list[TransferBatch]:
        """Return the batches of offloaded moments, in the order in which `step` takes them."""
        batches = [
            wave.transfer_batch for wave in self.elements.waves if wave.transfer_batch is not None
        ]
        if self.repeated is not None:
            batches += self.repeated.transfer_batches()
        if self.pipeline is None:
            return batches
        # The constructor of `PipelineStep` packs the first buckets.
        n_first = self.pipeline.n_first
        first = self.pipeline.transfer_batches(context, self.pipeline.packing_order[:n_first])
        others = self.pipeline.transfer_batches(context, self.pipeline.packing_order[n_first:])
        return [*first, *batches, *others]
