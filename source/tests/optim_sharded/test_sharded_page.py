"""The script that doc/sharded.md begins with trains under torchrun, saves, and resumes on another number of ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "doc" / "sharded.md"


def test_the_script_of_the_page_trains_saves_and_resumes(tmp_path):
    script = re.search(r"```python\n(# train\.py: torchrun.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(script[1], encoding="utf-8")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}  # as torchrun would say
    found = []
    for launcher, told in ((["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], {}), ([], alone)):
        done = subprocess.run(
            [sys.executable, *launcher, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **told},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found += re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(40))
    losses = [float(loss) for _, loss in found]
    assert sum(losses[20:]) < 0.6 * sum(losses[:20])
    # The first loss after the restart goes on from the last ones before it.
    assert losses[20] < 2.0 * max(losses[15:20])
