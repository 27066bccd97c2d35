"""The script that doc/sharded.md begins with trains on two ranks, saves, and resumes on another number of ranks.

The ranks have the variables that torchrun sets; `test_torchrun_trains_and_logs_once` starts torchrun itself.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

from forked import run_scripts

PAGE = Path(__file__).parents[3] / "doc" / "sharded.md"


def test_the_script_of_the_page_trains_saves_and_resumes(tmp_path):
    script = re.search(r"```python\n(# train\.py: torchrun.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(script[1], encoding="utf-8")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    found = []
    for ranks in (2, 1):
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
        commands = [(("train.py",), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
        for done in run_scripts(commands, tmp_path):
            assert done.returncode == 0, done.stderr[-4000:]
            found += re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(40))
    losses = [float(loss) for _, loss in found]
    assert sum(losses[20:]) < 0.6 * sum(losses[:20])
    # The first loss after the restart goes on from the last ones before it.
    assert losses[20] < 2.0 * max(losses[15:20])
