"""Run `dp` as rank 0 of N processes without the others: exchanges are copies on its own device.

    python source/benchmarks/one_of_many.py N --pt train input.json

Its steps take the time of N GPUs without that of the wire and of waiting for each other; its weights mean nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepmd_muon.cli.main import main
from deepmd_muon.train import start
from deepmd_muon.train.ranks.ranks import Ranks, training_device


@contextlib.contextmanager
def joined_alone(seconds: float = 0.0) -> Iterator[Ranks]:
    """Be rank 0 of as many processes as the first argument says."""
    dist.init_process_group("fake", rank=0, world_size=COUNT, store=FakeStore())
    yield Ranks(training_device(), 0, COUNT)
    dist.destroy_process_group()


if __name__ == "__main__":
    COUNT = int(sys.argv[1])
    start.joined = joined_alone  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
