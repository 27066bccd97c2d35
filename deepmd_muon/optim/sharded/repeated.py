"""The Muon route of replicas that keep their momenta in parts and repeat the work.

Before the step, one collective gathers the momenta. Each rank then takes the step of a single
process, with all its fast paths, and keeps its part of the new momenta. The gather needs no
gradient, so it can run during the forward and the backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.cuda import is_capturing
from deepmd_muon.optim.sharded.elements import all_gather
from deepmd_muon.optim.sharded.params import ShardedParameter, StateSharding
from deepmd_muon.optim.sharded.process_groups import group_of
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.host_memory import TransferBatch
from deepmd_muon.optim.state.schema import StateHolder
from deepmd_muon.optim.torch_hooks import in_phase
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import StateLists, StepContext, Wave, waves_of

StepMatrices = Callable[[Wave, StateLists, StepControl], None]
_MOMENTUM = "momentum_buffer"
_ALIGNMENT = 32  # elements


class RepeatedMuon:
    """Steps matrices with momenta in parts on the ranks that repeat the work."""

    def __init__(
        self, sharded_params: Sequence[ShardedParameter], collectives: CollectiveStream
    ) -> None:
        self._sharded_params = sharded_params
        self._collectives = collectives
        self._momenta: list[WholeMomenta] = []
        self._on_host = False

    def bind(self, context: StepContext) -> None:
        """Create missing state, and the memory of whole momenta."""
        members: dict[int, list[tuple[Tensor, StateHolder]]] = defaultdict(list)
        # Equal shapes adjacent: they share batches.
        for param in sorted(self._sharded_params, key=_matrix_shape):
            members[param.group].append((param.p, param))
        shardings = {
            param.p: param.sharding for param in self._sharded_params if param.sharding is not None
        }
        self._on_host = context.memory is not None
        self._momenta = []
        for number, params in members.items():
            for wave in waves_of(context, number, "muon", params):
                wave_shardings = [shardings[p] for p in wave.params]
                self._momenta.append(WholeMomenta(wave, wave_shardings, self._collectives))

    def choose_with_gradient(self) -> None:
        """Choose the parameters that have a gradient; without communication."""
        for momenta in self._momenta:
            momenta.choose_with_gradient()

    def transfer_batches(self) -> list[TransferBatch]:
        """Return the batches of offloaded momenta, in the order in which `step` takes them."""
        batches = [momenta.wave.transfer_batch for momenta in self._momenta]
        return [batch for batch in batches if batch is not None]

    def release(self) -> None:
        """Release all references to parameters and state."""
        self.wait()
        self._momenta = []

    def wait(self) -> None:
        """Wait for the gathers that have been started."""
        for momenta in self._momenta:
            momenta.wait()

    def start(self) -> None:
        """Start all gathers of momenta on the device.

        `step` starts the gathers of momenta in host memory one by one.
        """
        if not self._on_host:
            for momenta in self._momenta:
                momenta.start(momenta.wave.state[_MOMENTUM])

    def step(
        self,
        control: StepControl,
        moments: Iterator[list[Tensor]] | None,
        step_matrices: StepMatrices,
    ) -> None:
        """Step all matrices that have a gradient.

        `moments` yields each wave's offloaded momenta on the device.
        """
        for momenta in self._momenta:
            wave = momenta.wave
            state = wave.state if moments is None else wave.with_moments(next(moments))
            momenta.step(state[_MOMENTUM], control, step_matrices)

    def free_gradients(self) -> None:
        """Set the gradients of all matrices to None."""
        for param in self._sharded_params:
            param.p.grad = None


def _matrix_shape(param: ShardedParameter) -> tuple[int, int]:
    view = param.entry.view
    assert view is not None
    return view.rows, view.columns


class WholeMomenta:
    """The momenta of one wave: `wave.state` has this rank's parts, and gathers fill `whole`.

    The wave has all parameters, also those without a gradient, so that every rank takes part in
    every gather.
    """

    def __init__(
        self, wave: Wave, shardings: Sequence[StateSharding], collectives: CollectiveStream
    ) -> None:
        self.wave = wave
        self._collectives = collectives
        n_ranks = len(shardings[0].layout.ranks)
        self._group = group_of(shardings[0].layout.sorted_ranks, wave.device)

        longest, source = _sources(wave.params, shardings)
        self._source = source.to(wave.device, torch.int32)
        self._n_received = n_ranks * longest
        self._sent = self._memory(longest)
        # `whole` are views of `_flat`, `_local` the views of this rank's parts of them.
        self._flat = self._memory(len(source))
        self.whole = _views(self._flat, [p.shape for p in wave.params], _ALIGNMENT)
        local = [sharding.part(x) for x, sharding in zip(self.whole, shardings, strict=True)]
        self._not_empty = [i for i, x in enumerate(local) if x.numel()]
        self._local = [local[i] for i in self._not_empty]
        self._local_sent = _views(self._sent, [x.shape for x in self._local], alignment=1)

        self._wait_for_gather: Callable[[], object] | None = None  # for the gather of the next step
        self._in_graph = False  # whether that gather was started in a capture
        self._with_gradient: Wave | None = None

    def choose_with_gradient(self) -> None:
        """Choose the parameters that have a gradient."""
        wave = self.wave
        with_gradient = [i for i, p in enumerate(wave.params) if p.grad is not None]
        self._with_gradient = None
        if with_gradient:
            lists = {**wave.state, _MOMENTUM: self.whole}
            self._with_gradient = dataclasses.replace(
                wave,
                params=[wave.params[i] for i in with_gradient],
                views=[wave.views[i] for i in with_gradient],
                state={key: [tensors[i] for i in with_gradient] for key, tensors in lists.items()},
            )

    def start(self, parts: Sequence[Tensor]) -> None:
        """Start the gather of all ranks' parts, unless one has been started for this step.

        A gather that was started outside a capture cannot be waited for in it, nor the other way
        round.
        """
        if self._wait_for_gather is not None and self._in_graph == is_capturing():
            return
        self._in_graph = is_capturing()
        received: list[Tensor] = []

        def gather(**options: Any) -> Any:
            if self._not_empty:
                torch._foreach_copy_(self._local_sent, [parts[i] for i in self._not_empty])
            # Allocated on the stream of the collective: its memory is reused in that stream's
            # order.
            received.append(self._memory(self._n_received))
            return all_gather(received[0], self._sent, group=self._group, **options)

        def take() -> None:
            torch.index_select(received.pop(), 0, self._source, out=self._flat)

        with in_phase("gather"):
            self._wait_for_gather = self._collectives.launch(gather, then=take)

    def wait(self) -> None:
        """Wait for a gather that has been started; the step does not start another."""
        if self._wait_for_gather is not None and self._in_graph == is_capturing():
            with in_phase("gather"):
                self._wait_for_gather()
            self._wait_for_gather = lambda: None  # this step has waited

    def step(
        self, parts: Sequence[Tensor], control: StepControl, step_matrices: StepMatrices
    ) -> None:
        """Wait for the gather, take the step, and write this rank's parts of the new momenta."""
        self.start(parts)
        self.wait()
        self._wait_for_gather = None
        wave = self._with_gradient
        if wave is not None:
            step_matrices(wave, wave.state, control.on(wave.device))
            if self._not_empty:
                torch._foreach_copy_([parts[i] for i in self._not_empty], self._local)

    def _memory(self, length: int) -> Tensor:
        return self.wave.params[0].new_empty(length)


def _starts(lengths: Iterable[int], alignment: int) -> list[int]:
    """Return where tensors of these lengths begin, one behind the other, and the end."""
    aligned = (-(-length // alignment) * alignment for length in lengths)  # rounded up
    return list(itertools.accumulate(aligned, initial=0))


def _views(flat: Tensor, shapes: Sequence[torch.Size], alignment: int) -> list[Tensor]:
    """Return views of these shapes, one behind the other."""
    lengths = [math.prod(shape) for shape in shapes]
    starts = _starts(lengths, alignment)[:-1]
    return [
        flat[start : start + length].view(shape)
        for start, length, shape in zip(starts, lengths, shapes, strict=True)
    ]


def _sources(params: Sequence[Tensor], shardings: Sequence[StateSharding]) -> tuple[int, Tensor]:
    """Return the most elements of a rank, and where a gather receives each element, int64.

    A gather receives the parts of all ranks, one behind the other; each takes as much space as the
    longest. The second result has an entry for each element of the memory of whole momenta.
    """
    end = _starts([p.numel() for p in params], _ALIGNMENT)[-1]
    # The number of each element in the memory of whole momenta.
    numbers = _views(torch.arange(end, device="cpu"), [p.shape for p in params], _ALIGNMENT)
    by_rank = []
    for rank in range(len(shardings[0].layout.ranks)):
        numbers_of_rank = []
        for x, sharding in zip(numbers, shardings, strict=True):
            start, length = sharding.intervals(x.shape)[rank]
            numbers_of_rank.append(x.narrow(sharding.dim, start, length).reshape(-1))
        by_rank.append(torch.cat(numbers_of_rank))
    longest = max(map(len, by_rank))
    source = torch.zeros(end, dtype=torch.int64, device="cpu")
    for number, elements in enumerate(by_rank):
        source[elements] = number * longest + torch.arange(len(elements), device="cpu")
    return longest, source
