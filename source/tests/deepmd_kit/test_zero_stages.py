"""The optimizer at deepmd-kit's `zero_stage` 1 and 2, on two ranks over gloo: equal to one process, bit by bit."""

from __future__ import annotations

import forked
import torch.multiprocessing as mp
from zero_ranks import run


def test_two_ranks_equal_one_process_and_take_its_state(tmp_path):
    forked.context()
    mp.start_processes(
        run, (str(tmp_path / "store"),), nprocs=2, join=True, start_method="forkserver"
    )
