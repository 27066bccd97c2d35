"""The script that doc/sharded.md begins with trains on two ranks, saves, and resumes on another number of ranks.

By default the ranks only have the variables that torchrun sets; with -m slow torchrun starts them.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_scripts

PAGE = Path(__file__).parents[3] / "doc" / "sharded.md"


def start_directly(folder, ranks):
    """Start the ranks without torchrun, which saves a process and imports."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
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
