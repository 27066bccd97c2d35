"""The script that doc/sharded.md begins with trains on two ranks, saves, and resumes on another number of ranks.

By default the ranks only have the variables that torchrun sets; with -m slow torchrun starts them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_scripts
from spawn_ranks import free_port

PAGE = Path(__file__).parents[3] / "doc" / "sharded.md"


def start_directly(folder, ranks):
    """Start the ranks without torchrun, which saves a process and imports."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "",
    }
    commands = [
        (("train.py",), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    return run_scripts(commands, folder)


def start_by_torchrun(folder, ranks):
    """Start the ranks as the first line of the script says."""
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "train.py",
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [
        subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    ]


@pytest.mark.parametrize(
    "start", [start_directly, pytest.param(start_by_torchrun, marks=pytest.mark.slow)]
)
def test_the_script_of_the_page_trains_saves_and_resumes(start, tmp_path):
    script = re.search(
        r"```python\n(# train\.py: torchrun.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "train.py").write_text(script[1], encoding="utf-8")
    found = []
    for ranks in (2, 1):
        for done in start(tmp_path, ranks):
            assert done.returncode == 0, done.stderr[-4000:]
            found += re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(40))
    losses = [float(loss) for _, loss in found]
    assert sum(losses[20:]) < 0.6 * sum(losses[:20])
    # The first loss after the restart goes on from the last ones before it.
    assert losses[20] < 2.0 * max(losses[15:20])


ENDING = """
import os
import sys
import time

import torch
import torch.distributed as dist

from deepmd_muon.optim import HybridMuon

rank = int(os.fork() == 0)
address = f"tcp://127.0.0.1:{sys.argv[1]}"
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
w = torch.nn.Parameter(torch.eye(4))
w.grad = torch.ones(4, 4)
HybridMuon([("w", w)], replicas=dist.group.WORLD).step()
if rank == 0:
    for _ in range(8):
        dist.all_reduce(torch.zeros(1))
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
# Threads of gloo release these exchanges last, and wait for the interpreter's lock to its end.
sys.setswitchinterval(1000)
for _ in range(8):
    dist.all_reduce(torch.zeros(1), async_op=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
"""


@pytest.mark.slow
def test_a_rank_ends_while_threads_hold_its_last_exchanges():
    command = [sys.executable, "-c", ENDING, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
