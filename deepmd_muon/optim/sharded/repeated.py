"""The Muon route of replicas that keep their momenta in parts and repeat the work.

Before the step one collective gathers the momenta. Each rank then takes the step of a single process, with all its fast
paths, and keeps its part of the new momenta. The gather needs no gradient, so it can run beside the forward and the
backward pass.
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
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.sharded.elements import all_gather
from deepmd_muon.optim.sharded.layout import held_runs, total
from deepmd_muon.optim.sharded.params import ShardedParameter, StateSharding
from deepmd_muon.optim.sharded.process_groups import group_of
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.host_memory import HostMemory, TransferBatch
from deepmd_muon.optim.state.schema import State, StateHolder
from deepmd_muon.optim.torch_hooks import in_phase
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import StateLists, Wave, waves_of

StepMatrices = Callable[[Wave, StateLists, StepControl], None]
_MOMENTUM = "momentum_buffer"
_ALIGNMENT = 32  # elements


class WholeMomenta:
    """The momenta of one wave: `wave.state` has this rank's parts, `whole` is the memory that gathers fill.

    The wave has all parameters, also those without a gradient, so that every rank takes part in every gather.
    """

    def __init__(
        self, wave: Wave, shardings: Sequence[StateSharding], collectives: CollectiveStream
    ) -> None:
        self.wave = wave
        self._collectives = collectives
        ranks = sorted(shardings[0].layout.ranks)
        self._group = group_of(tuple(ranks), wave.device)
        longest, place = _places(wave.params, shardings, ranks)
        self._place = place.to(wave.device, torch.int32)
        self._mine = self._memory(longest)
        self._everything = len(ranks) * longest
        self._flat = self._memory(len(place))
        self.whole = _views(self._flat, [p.shape for p in wave.params], _ALIGNMENT)
        cut = [sharding.part(x) for x, sharding in zip(self.whole, shardings, strict=True)]
        self._held = [i for i, part in enumerate(cut) if part.numel()]
        self._cut = [cut[i] for i in self._held]  # this rank's parts of the whole momenta
        self._own = _views(self._mine, [part.shape for part in self._cut], 1)
        self._arriving: Callable[[], object] | None = None
        self._in_graph = False  # whether the gather was started in a capture
        self._stepped: Wave | None = None

    def choose(self) -> None:
        """Choose the parameters that have a gradient."""
        wave = self.wave
        chosen = [i for i, p in enumerate(wave.params) if p.grad is not None]
        state = {
            key: [tensors[i] for i in chosen]
            for key, tensors in {**wave.state, _MOMENTUM: self.whole}.items()
        }
        params, views = [wave.params[i] for i in chosen], [wave.views[i] for i in chosen]
        self._stepped = (
            dataclasses.replace(wave, params=params, views=views, state=state) if chosen else None
        )

    def start(self, parts: Sequence[Tensor]) -> None:
        """Start the gather of all ranks' parts, unless one has been started for this step.

        A gather that was started outside a capture cannot be waited for in it, nor the other way round.
        """
        if self._arriving is None or self._in_graph != is_capturing():
            self._in_graph = is_capturing()
            arriving: list[Tensor] = []

            def gather(**options: Any) -> Any:
                if self._held:
                    torch._foreach_copy_(self._own, [parts[i] for i in self._held])
                # Allocated on the stream of the collective, so that its memory is reused in that stream's order.
                arriving.append(self._memory(self._everything))
                return all_gather(arriving[0], self._mine, group=self._group, **options)

            def take() -> None:
                torch.index_select(arriving.pop(), 0, self._place, out=self._flat)

            with in_phase("gather"):
                self._arriving = self._collectives.launch(gather, then=take)

    def wait(self) -> None:
        """Wait for a gather that has been started; the step does not start another."""
        if self._arriving is not None and self._in_graph == is_capturing():
            with in_phase("gather"):
                self._arriving()
            self._arriving = _arrived

    def step(
        self, parts: Sequence[Tensor], control: StepControl, step_matrices: StepMatrices
    ) -> None:
        """Wait for the gather, take the step, and write this rank's parts of the new momenta."""
        self.start(parts)
        self.wait()
        self._arriving = None
        if self._stepped is not None:
            step_matrices(self._stepped, self._stepped.state, control.on(self.wave.device))
            if self._held:
                torch._foreach_copy_([parts[i] for i in self._held], self._cut)

    def _memory(self, length: int) -> Tensor:
        return self.wave.params[0].new_empty(length)


def _starts(lengths: Iterable[int], alignment: int) -> list[int]:
    """Return where tensors of these lengths begin, one behind the other, and the end."""
    return [*itertools.accumulate((-(-n // alignment) * alignment for n in lengths), initial=0)]


def _views(flat: Tensor, shapes: Sequence[torch.Size], alignment: int) -> list[Tensor]:
    lengths = [math.prod(shape) for shape in shapes]
    places = zip(_starts(lengths, alignment), lengths, shapes, strict=False)
    return [flat[start : start + n].view(shape) for start, n, shape in places]


def _places(
    params: Sequence[Tensor], shardings: Sequence[StateSharding], ranks: Sequence[int]
) -> tuple[int, Tensor]:
    """Return the most elements that a rank has, and where the whole momenta are in what a gather returns.

    The latter has the parts of all ranks, one behind the other, each of which takes as much space as the longest.
    """
    layout = shardings[0].layout
    at = layout.places()
    starts = _starts([p.numel() for p in params], _ALIGNMENT)
    held = []
    for rank in ranks:
        found = []
        for p, sharding, start in zip(params, shardings, starts, strict=False):
            runs = held_runs(p.shape[sharding.dim], sharding.dim, sharding.layout, at[rank])
            places = torch.arange(start, start + p.numel(), device="cpu").view(p.shape)
            found.append(
                places.narrow(sharding.dim, runs[0][0] if runs else 0, total(runs)).reshape(-1)
            )
        held.append(torch.cat(found))
    longest = max(map(len, held))
    place = torch.zeros(starts[-1], dtype=torch.int64, device="cpu")
    for number, own in enumerate(held):
        place[own] = number * longest + torch.arange(len(own), device="cpu")
    return longest, place


class RepeatedMuon:
    """Steps matrices whose momenta are in parts on the ranks that repeat the work."""

    def __init__(
        self, sharded_params: Sequence[ShardedParameter], collectives: CollectiveStream
    ) -> None:
        self._sharded_params = sharded_params
        self._collectives = collectives
        self._several: list[WholeMomenta] = []
        self._on_host = False

    def bind(
        self, groups: Sequence[Group], state: State, memory: HostMemory | None, workspace: int
    ) -> None:
        """Create missing state, and the memory of whole momenta."""
        members: dict[int, list[tuple[Tensor, StateHolder]]] = defaultdict(list)
        for param in sorted(
            self._sharded_params, key=_matrix_shape
        ):  # equal shapes adjacent: they share batches
            members[param.group].append((param.p, param))
        shardings = {
            param.p: param.sharding for param in self._sharded_params if param.sharding is not None
        }
        self._on_host = memory is not None
        self._several = []
        for number, several in members.items():
            for wave in waves_of(groups[number], "muon", several, state, memory, workspace):
                cut = [shardings[p] for p in wave.params]
                self._several.append(WholeMomenta(wave, cut, self._collectives))

    def choose(self) -> None:
        """Choose the parameters that have a gradient; without communication."""
        for momenta in self._several:
            momenta.choose()

    def transfer_batches(self) -> list[TransferBatch]:
        """Return the transfer batches of offloaded momenta, in the order in which `step` takes them."""
        return [
            momenta.wave.transfer_batch
            for momenta in self._several
            if momenta.wave.transfer_batch is not None
        ]

    def release(self) -> None:
        """Release all references to parameters and state."""
        self.wait()
        self._several = []

    def wait(self) -> None:
        """Wait for the gathers that have been started."""
        for momenta in self._several:
            momenta.wait()

    def start(self) -> None:
        """Start all gathers of momenta on the device; of those in host memory, `step` starts them one by one."""
        for momenta in self._several if not self._on_host else ():
            momenta.start(momenta.wave.state[_MOMENTUM])

    def step(
        self,
        control: StepControl,
        moments: Iterator[list[Tensor]] | None,
        step_matrices: StepMatrices,
    ) -> None:
        """Step all matrices that have a gradient; `moments` yields each wave's offloaded momenta on the device."""
        for momenta in self._several:
            wave = momenta.wave
            state = wave.state if moments is None else wave.with_moments(next(moments))
            momenta.step(state[_MOMENTUM], control, step_matrices)

    def free_gradients(self) -> None:
        """Set the gradients of all matrices to None."""
        for param in self._sharded_params:
            param.p.grad = None


def _arrived() -> None:
    """Do nothing: the gather has been waited for."""


def _matrix_shape(param: ShardedParameter) -> tuple[int, int]:
    view = param.entry.view
    assert view is not None
    return view.rows, view.columns
