"""The mixture of experts trains alike in one process and several, and resumes on another number of ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_script, run_scripts

EXAMPLE = Path(__file__).parents[3] / "examples" / "moe_transformer"
IN_ONE_PROCESS = """
import os
import sys
from pathlib import Path
sys.path.insert(0, os.environ["EXAMPLE"])
from train import Run, adamw, hybrid_muon
steps, stop, checkpoint = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
run = Run(hybrid_muon, 3e-2, steps)
for loss in (run.step() for _ in range(stop)):
    print("alone", loss)
other = Run(hybrid_muon, 3e-2, steps)
other.load(checkpoint)
print("step", other.done)
while other.done < stop:
    print("resumed", other.step())
print("routes", {entry.route for entry in other.optimizers[0].routing})
"""


def losses(text, word):
    return [float(value) for value in re.findall(rf"^{word}.* (-?\d[\d.e-]*)$", text, re.MULTILINE)]


def call(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def torchrun(folder, ranks, *options):
    return call(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "train.py",
        *options,
    )


def ranks_without_torchrun(folder, ranks, *options):
    """Start the ranks directly, which saves a process and imports."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    commands = [
        ((EXAMPLE / "train.py", *options), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    finished = run_scripts(commands, folder)
    assert [each.returncode for each in finished] == [0] * ranks, finished[0].stderr[-4000:]
    return finished[0].stdout


def check(start, folder, ranks, stop, *options):
    """Train to the middle on ranks, save; in one process train all steps, resume, and compare every loss."""
    half, steps = stop // 2, str(2 * stop)
    limits = ("--steps", steps, "--every", "1", "--stop", str(half))
    checkpoint = folder / "checkpoint"
    shared = start(folder, ranks, *limits, "--save", str(checkpoint), *options)
    (folder / "alone.py").write_text(IN_ONE_PROCESS)
    done = run_script("alone.py", steps, stop, checkpoint, folder=folder, EXAMPLE=str(EXAMPLE))
    assert done.returncode == 0, done.stderr[-4000:]
    text = done.stdout
    alone = losses(text, "alone")
    assert len(alone) == stop
    assert losses(shared, "step ") == pytest.approx(alone[:half], abs=2e-5)
    assert f"step {half}" in text
    assert losses(text, "resumed") == pytest.approx(alone[half:], abs=2e-5)
    assert alone[-1] < alone[0]
    return shared


@pytest.mark.slow
def test_two_ranks_train_as_one_and_one_resumes(tmp_path):
    shared = check(ranks_without_torchrun, tmp_path, 2, 4)
    assert re.search(r"blocks.0.moe.experts.up +8x64x64 +8x64x64 +muon", shared)
    assert re.search(r"blocks.1.moe.experts.up +512x64 +1x512x64 rows 64\+64.* muon", shared)
    assert re.search(r"(embedding|head|router).weight .* adamw", shared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"), [(4, ()), (2, ("--expert-parallel",)), (4, ("--expert-parallel",))]
)
def test_more_ranks_and_expert_parallelism(ranks, options, tmp_path):
    check(torchrun, tmp_path, ranks, 10, *options)
    resumed = torchrun(
        tmp_path, 2, "--steps", "20", "--stop", "6", "--load", str(tmp_path / "checkpoint")
    )
    assert "excess loss on fresh text" in resumed


@pytest.mark.slow
def test_both_muons_learn_faster_than_adamw():
    rows = {
        cells[0].strip(): float(cells[-3])
        for line in call("train.py", "--compare", "--steps", "150").splitlines()
        if line.startswith("| ")
        and "optimizer" not in line
        and len(cells := line.strip("| ").split("|")) > 4
    }
    assert max(rows["HybridMuon"], rows["HybridMuon, polar-express-5"]) < rows["torch.optim.AdamW"]
