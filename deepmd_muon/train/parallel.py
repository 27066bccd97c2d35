"""The processes of one run: how they find each other, agree, and put full tensors together."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from deepmd_muon.train.errors import TrainingError

#: A rank that has not answered for this long is given up, and the run ends.
TIMEOUT = datetime.timedelta(seconds=60)
# Counting the neighbours of a large data set may take rank 0 this long, while the others wait.
_SETUP_TIMEOUT = datetime.timedelta(hours=6)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that train one model together.

    Attributes
    ----------
    device
        This process's.
    rank, size
        Number of this process, and how many there are.
    waiting
        The group for what may take rank 0 long; None for a single process.
    timeout
        A rank that has not answered for this long is given up.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    waiting: dist.ProcessGroup | None = None
    timeout: datetime.timedelta = TIMEOUT

    @property
    def first(self) -> bool:
        """Whether this process writes files and the log."""
        return self.rank == 0

    def from_first(self, compute: Callable[[], T]) -> T:
        """Compute something on rank 0 alone, and hand the result to all.

        Raises
        ------
        TrainingError
            On the other ranks, when rank 0 raised anything.
        """
        if self.size == 1:
            return compute()
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.first:
            try:
                answer[0] = compute()
            except Exception as error:  # whatever it is, the others must not wait
                failure, answer[1] = error, f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(answer, src=0, group=self.waiting)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise TrainingError(f"rank 0 stopped with {answer[1]}")
        result: T = answer[0]
        return result

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def copy_from_first(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        if self.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def gather_objects(self, mine: T) -> list[T]:
        """Return what every rank gave, in order."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that torchrun started, for the time of a `with` block.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say who they are; without WORLD_SIZE, or with one
    process, no process group is made. GPUs talk through NCCL, CPUs through gloo.

    Raises
    ------
    TrainingError
        When the environment is incomplete or there are fewer GPUs than processes on this machine.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks(training_device())
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainingError(f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; start with torchrun")
    device = training_device()
    if device.type == "cuda":
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise TrainingError(
                f"process {local} of this machine finds {there} GPUs; start one process a GPU, or set DEVICE=cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    finished = False
    try:
        yield Ranks(device, dist.get_rank(), size, dist.new_group(backend="gloo", timeout=_SETUP_TIMEOUT))
        finished = True
    finally:
        # After an error on this rank alone, NCCL would wait here for ranks that will not come.
        if finished or device.type == "cpu":
            dist.destroy_process_group()


def training_device() -> torch.device:
    """Return the GPU when there is one and the environment variable DEVICE, deepmd-kit's own, does not say cpu."""
    wants_cpu = os.environ.get("DEVICE", "").lower() == "cpu"
    return torch.device("cpu" if wants_cpu or not torch.cuda.is_available() else "cuda")


def whole(content: Any) -> Any:
    """Put the DTensors in nested dicts, lists and tuples together; all ranks must ask for it.

    Each tensor is gathered once, however often it appears; what is no DTensor stays as it is.
    """
    known: dict[int, Tensor] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, DTensor):
            if id(node) not in known:
                known[id(node)] = node.full_tensor().detach()
            return known[id(node)]
        if isinstance(node, Mapping):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(walk(value) for value in node)
        return node

    return walk(content)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements that this rank holds, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def cut_as(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return of a full tensor what `pattern` is on this rank: a DTensor laid out alike, or the tensor itself."""
    if not isinstance(pattern, DTensor):
        return tensor
    tensor = tensor.to(pattern.device)
    return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)
