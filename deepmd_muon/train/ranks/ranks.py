"""The processes of one run: how they find each other, agree, and put full tensors together."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from deepmd_muon.optim.sharded.process_groups import release_exchanges_at_exit
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.launch import Place, end_with_parent, find_place
from deepmd_muon.train.ranks.rendezvous import ANSWER, Rendezvous, describe
from deepmd_muon.train.ranks.watchdog import (
    GRACE,
    WAITING,
    LostRankError,
    Watch,
    end_process,
    is_lost_connection,
    reason,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: A rank that has not answered for this long is given up, and the run ends.
TIMEOUT = datetime.timedelta(seconds=60)
# The last exchange of each run, so that gloo's threads never release it.
_last_exchanges: list[dist.Work] = []

T = TypeVar("T")


class Stopwatch:
    """Adds up the time of `with` blocks in `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._begun


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that train one model together.

    Attributes
    ----------
    device
        Of this process.
    rank, size
        Number of this process, and how many there are.
    timeout
        A rank that has not answered for this long is given up.
    watch
        Shares this process's activity with the others; None for a single process.
    summing
        Time in `sum`; over gloo it ends with the exchange, over NCCL with its launch.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    timeout: datetime.timedelta = TIMEOUT
    watch: Watch | None = None
    summing: Stopwatch = dataclasses.field(default_factory=Stopwatch, compare=False)

    @property
    def first(self) -> bool:
        """Whether this process writes files and the log."""
        return self.rank == 0

    def doing(self, what: str, step: int = 0) -> None:
        """Share this process's activity with the others; `step` counts from 1."""
        if self.watch is not None:
            self.watch.doing(what, step)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for work that needs the other processes."""
        return contextlib.nullcontext() if self.watch is None else self.watch.waiting()

    @contextlib.contextmanager
    def barrier(self, what: str) -> Iterator[None]:
        """Wait until all processes have arrived, then run a `with` block of short common work.

        They may have worked for longer than the timeout; a rank without a sign of life is given up.
        """
        if self.watch is not None:
            self.watch.doing(WAITING)
            self.watch.barrier()
            self.watch.doing(what)
        with self.waiting():
            yield
        if self.watch is not None:
            self.watch.doing("preparing")

    def run_on_rank0(self, what: str, compute: Callable[[], T]) -> T:
        """Compute `what` on rank 0 alone, however long it takes, and hand the result to all.

        The others get a TrainingError when rank 0 raised anything.
        """
        if self.size == 1:
            return compute()
        result: T | None = None
        failure: Exception | None = None
        if self.first:
            self.doing(what)
            try:
                with contextlib.nullcontext() if self.watch is None else self.watch.guarding():
                    result = compute()
            except Exception as error:  # whatever it is, the others must not wait
                failure = error
        problem = f"{type(failure).__name__}: {failure}" if failure else None
        message: list[Any] = [result, problem]
        with self.barrier(f"handing over after {what}"):
            dist.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        if failure is not None:
            raise failure
        shared: T
        shared, problem = message
        if problem is not None:
            raise TrainingError(f"rank 0 stopped with {problem}")
        return shared

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place."""
        if self.size > 1:
            # Over NCCL, the host only launches the exchange.
            on_host = values.device.type == "cpu"
            with self.summing, self.waiting() if on_host else contextlib.nullcontext():
                dist.all_reduce(values)
        return values

    def copy_from_rank0(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        if self.size == 1:
            return
        with self.barrier("copying the model"):
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def gather_objects(self, local: T) -> list[T]:
        """Return the objects of all ranks, in order."""
        if self.size == 1:
            return [local]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, local)
        return gathered


@contextlib.contextmanager
def joined(seconds: float = TIMEOUT.total_seconds()) -> Iterator[Ranks]:
    """Join the processes that torchrun or srun started, for the time of a `with` block.

    See `find_place` for the environment; a process that is alone makes no process group. GPUs talk
    through NCCL, CPUs through gloo. A rank that the others wait for longer than `seconds` is given
    up.

    Raises
    ------
    TrainingError
        When the environment is incomplete, there are fewer GPUs than processes on this machine, or
        another rank cannot begin or is lost; the message then describes that rank.
    """
    place = find_place()
    if place is None:
        yield Ranks(training_device())
        return
    if place.launched:
        end_with_parent()
    release_exchanges_at_exit()
    device, rendezvous = _begin(place)
    on_gpu = device.type == "cuda"
    timeout = datetime.timedelta(seconds=seconds)
    watch = Watch(
        store=PrefixStore("watch", rendezvous.store),
        rank=place.rank,
        size=place.size,
        limit=seconds,
        give_up=end_process,
        errors_come=not on_gpu,
    )
    # NCCL's own watchdog ends a process without a message; ours must act first.
    patience = timeout + datetime.timedelta(seconds=GRACE) if on_gpu else timeout
    finished = False
    try:
        with watch.waiting():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=PrefixStore("ranks", rendezvous.store),
                rank=place.rank,
                world_size=place.size,
                timeout=patience,
            )
        yield Ranks(device, place.rank, place.size, patience, watch)
        finished = True
        launcher_is_dead = False
        try:
            watch.barrier()  # rank 0 may have written files for longer than the limit
        except LostRankError:
            # torchrun keeps the store: without it, the exchange below is the barrier.
            launcher_is_dead = place.agent and watch.store_has_ended
            if not launcher_is_dead:
                raise
        try:
            with watch.waiting():
                _exchange_last()
        except RuntimeError as error:
            # A rank that has its part of the exchange ends, and closes its connections. Without
            # the store it cannot say so before; this rank has saved all it had, too.
            if not (launcher_is_dead and is_lost_connection(error)):
                raise
    except BaseException as error:
        if is_lost_connection(error):
            raise TrainingError(f"{watch.verdict()} ({reason(error)})") from error
        watch.stopped(error)
        raise
    finally:
        watch.close()
        # After an error on this rank alone, NCCL would wait here for ranks that will not come.
        if dist.is_initialized() and (finished or not on_gpu):
            dist.destroy_process_group()


def _begin(place: Place) -> tuple[torch.device, Rendezvous]:
    """Choose this process's device and meet the others; all learn when one cannot begin."""
    failure: TrainingError | None = None
    device = torch.device("cpu")
    try:
        device = _device_of(place)
    except TrainingError as error:
        failure = error
    rendezvous = Rendezvous(place)
    problems = rendezvous.report(str(failure or ""))
    if problems:
        rendezvous.leave(ANSWER)
        raise failure or TrainingError(describe(problems))
    return device, rendezvous


@contextlib.contextmanager
def prints_error(message: str) -> Iterator[bool]:
    """Return a context that says whether this process prints an error from before `joined`.

    Rank 0 prints at once. The others wait for its report and print only errors that differ from it,
    or any error if rank 0 does not report in time. Ranks that can begin receive the error.
    """
    try:
        place = find_place()
    except TrainingError:  # the environment does not give this process a rank
        place = None
    if place is None:
        yield True
        return
    error_of_rank0 = ""
    if place.rank == 0:
        yield True
    with contextlib.suppress(TrainingError, RuntimeError):
        rendezvous = Rendezvous(place, ANSWER)
        rendezvous.report(message)
        if place.rank:
            error_of_rank0 = rendezvous.problem_of(0, ANSWER)
        rendezvous.leave(ANSWER)
    if place.rank:
        yield error_of_rank0 != message


def _exchange_last() -> None:
    """Exchange a number, and keep the exchange until the process ends.

    So gloo's threads never release it (see `release_exchanges_at_exit`).
    """
    last = dist.all_reduce(torch.zeros(1), async_op=True)
    last.wait()
    _last_exchanges.append(last)


def _device_of(place: Place) -> torch.device:
    device = training_device()
    if device.type != "cuda":
        return device
    n_gpus = torch.cuda.device_count()
    if n_gpus == 1 and place.size > 1 and place.srun:
        # Slurm may show each task its own GPU alone.
        device = torch.device("cuda", 0)
    elif place.local >= n_gpus:
        raise TrainingError(
            f"process {place.local} of this machine finds {n_gpus} GPUs; "
            "start one process a GPU, or set DEVICE=cpu"
        )
    else:
        device = torch.device("cuda", place.local)
    torch.cuda.set_device(device)
    return device


def training_device() -> torch.device:
    """Return the device that the environment variable DEVICE names; unset, a GPU if there is one.

    deepmd-kit reads the same variable.
    """
    name = os.environ.get("DEVICE", "").lower()
    if name not in ("", "cpu", "cuda"):
        raise TrainingError(
            f"the environment variable DEVICE must be cpu or cuda; found {os.environ['DEVICE']!r}"
        )
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise TrainingError(
            "DEVICE is cuda, but torch finds no GPU: unset it, or set DEVICE=cpu to train on the "
            "CPU"
        )
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether something is a DTensor, without importing them, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def gather_whole(content: Any) -> Any:
    """Gather the DTensors in nested dicts, lists and tuples into full tensors; a collective.

    Each tensor is gathered once, however often it appears; everything else stays as it is.
    """
    full_tensors: dict[int, Tensor] = {}

    def gather(node: Any) -> Any:
        if _is_dtensor(node):
            if id(node) not in full_tensors:
                full_tensors[id(node)] = node.full_tensor().detach()
            return full_tensors[id(node)]
        if isinstance(node, Mapping):
            # All ranks gather in one order, although an optimizer's state may differ in its order.
            gathered = {key: gather(node[key]) for key in sorted(node, key=str)}
            return {key: gathered[key] for key in node}
        if isinstance(node, (list, tuple)):
            return type(node)(gather(value) for value in node)
        return node

    return gather(content)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements that this rank holds, sharing memory."""
    return (tensor.to_local() if _is_dtensor(tensor) else tensor).detach()


def shard_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Shard a full tensor like `pattern` if that is a DTensor; otherwise return it."""
    if not _is_dtensor(pattern):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None
    )
