"""Whole runs of `dp train` with models of deepmd-kit on a GPU: captured steps, a restart, time a step.

    python source/benchmarks/hosted_train.py --cases mini dpa2 hybrid
    torchrun --nproc-per-node 2 source/benchmarks/hosted_train.py --cases mini --no-restart
    python source/benchmarks/hosted_train.py --cases mini --deepmd-kit [--compile]

A case is a model of `hosted_step.py`. The data are random water, made here. Each case trains once, and again from its
middle. The printed gap compares the final weights: on a GPU, sums in another order let two equal runs differ, too;
`--again` prints by how much. With `--deepmd-kit`, deepmd-kit's own trainer runs the input once more, with its
HybridMuon; --compile sets its key `use_compile`, which DPA-4 alone has. DPA-4 needs ``vesin[torch]`` there.
The script ends with status 1 if a step was not captured.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from hosted_step import FITTING, MODELS, TYPE_MAP, import_deepmd_kit, water

RANK = int(os.environ.get("RANK", "0"))
_INTERVAL = re.compile(r"Batch +(\d+): total wall time = ([\d.]+) s(?:, ([\d.]+) s/batch)?")


class LastInterval(logging.Handler):
    """Remembers the time of a step in the last interval that a run logs [ms].

    Compilers and the recording of graphs belong to the intervals before. This package logs the time
    of a step, deepmd-kit the time of an interval.
    """

    milliseconds = float("nan")
    _step = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Read a message."""
        match = _INTERVAL.search(record.getMessage())
        if match is None:
            return
        step = int(match[1])
        seconds = float(match[3]) if match[3] else float(match[2]) / (step - self._step)
        self.milliseconds = 1e3 * seconds
        self._step = step


def write_data(folder: Path, natoms: int, nframes: int) -> str:
    """Write frames of water with random forces; ranks other than the first wait for them."""
    system = folder / f"water-{natoms}"
    done = system / "done"
    if RANK == 0:
        frames = water(natoms, nframes)
        (system / "set.000").mkdir(parents=True, exist_ok=True)
        np.savetxt(system / "type.raw", frames.atype[0], fmt="%d")
        (system / "type_map.raw").write_text("\n".join(TYPE_MAP))
        force = frames.force - frames.force.mean(1, keepdims=True)
        arrays = {"coord": frames.coord, "box": frames.box, "force": force}
        for name, array in arrays.items():
            np.save(system / "set.000" / f"{name}.npy", array.reshape(nframes, -1))
        np.save(system / "set.000" / "energy.npy", -150.0 * natoms + np.arange(nframes))
        done.touch()
    while not done.exists():
        time.sleep(0.1)
    return str(system)


def input_of(name: str, system: str, prefix: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the input of a case."""
    steps = options.steps
    model = copy.deepcopy(MODELS[name])
    fitting = {"neuron": [0], "precision": "float32", "seed": 42}
    model["fitting_net"] = fitting if model.get("type") == "dpa4" else copy.deepcopy(FITTING)
    return {
        "model": {"type_map": TYPE_MAP, **model},
        "learning_rate": {"type": "exp", "start_lr": 4.5e-4, "stop_lr": 1e-4, "decay_steps": 20},
        "loss": {"type": "ener", "start_pref_v": 0, "limit_pref_v": 0},
        "optimizer": {"type": "HybridMuon"},
        "training": {
            "training_data": {"systems": [system], "batch_size": 1},
            "numb_steps": steps,
            "seed": 1,
            "disp_freq": steps // 2,
            "save_freq": steps // 2,
            "enable_tf32": True,
            "enable_compile": options.compile,
            "gradient_max_norm": 5.0,
            "save_ckpt": str(prefix),
            "disp_file": f"{prefix}.lcurve",
        },
    }


def train(content: dict[str, Any], restart: Path | None = None) -> tuple[int, float]:
    """Train; return the number of captured graphs and the time of a step [ms]."""
    from deepmd_muon.cli.main import main as dp
    from deepmd_muon.train.step.stepper import CapturedStep

    recorded = []
    close = CapturedStep.close

    def count_and_close(step: CapturedStep) -> None:
        recorded.append(step.recorded)
        close(step)

    prefix = content["training"]["save_ckpt"]
    path = Path(f"{prefix}.json")
    if RANK == 0:
        path.write_text(json.dumps(content))
    while not path.exists():
        time.sleep(0.1)
    interval = LastInterval()
    logging.getLogger("deepmd_muon").addHandler(interval)
    words = ["--pt", "train", str(path), "-o", f"{prefix}.out.json", "--skip-neighbor-stat"]
    CapturedStep.close = count_and_close  # type: ignore[method-assign]
    try:
        status = dp([*words, *(["--restart", str(restart)] if restart else [])])
    finally:
        CapturedStep.close = close  # type: ignore[method-assign]
        logging.getLogger("deepmd_muon").removeHandler(interval)
    if status:
        raise SystemExit(status)
    return sum(recorded), interval.milliseconds


def train_in_deepmd_kit(content: dict[str, Any]) -> float:
    """Train with deepmd-kit's own trainer; return the time of a step [ms].

    It writes files without a path into the working directory: go to that of `save_ckpt`.
    """
    from deepmd.main import main as dp

    content = copy.deepcopy(content)
    prefix = content["training"]["save_ckpt"]
    if content["training"].pop("enable_compile"):
        content["model"]["use_compile"] = True
    Path(f"{prefix}.json").write_text(json.dumps(content))
    interval = LastInterval()
    # Its command clears the handlers of its other loggers.
    logging.getLogger("deepmd.pt.train.training").addHandler(interval)
    words = ["train", f"{prefix}.json", "-o", f"{prefix}.out.json", "--skip-neighbor-stat"]
    here = Path.cwd()
    os.chdir(Path(prefix).parent)
    try:
        dp(["--pt", *words])
    finally:
        os.chdir(here)
    return interval.milliseconds


def weights_of(path: Path) -> torch.Tensor:
    """Return all numbers of a checkpoint's model in one vector."""
    model = torch.load(path, weights_only=True, map_location="cpu")["model"]
    tensors = [x for x in model.values() if torch.is_tensor(x) and x.is_floating_point()]
    return torch.cat([x.double().flatten() for x in tensors])


def run_case(name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Train a case; return whether all steps that could be captured were."""
    system = write_data(folder, options.atoms, options.frames)
    steps = options.steps
    label = f"{name}-compiled" if options.compile else name
    first = folder / f"{label}-{os.environ.get('WORLD_SIZE', '1')}"
    begun = time.monotonic()
    graphs, step_time = train(input_of(name, system, first, options))
    took = time.monotonic() - begun
    print(
        f"{label}: {graphs} graphs, {step_time:.2f} ms a step, run of {steps} steps {took:.1f} s",
        flush=True,
    )
    if options.restart:
        second = folder / f"{label}-restarted"
        middle = Path(f"{first}-{steps // 2}.pt")
        train(input_of(name, system, second, options), restart=middle)
        whole = weights_of(Path(f"{first}-{steps}.pt"))
        gap = (weights_of(Path(f"{second}-{steps}.pt")) - whole).norm() / whole.norm()
        moved = (weights_of(middle) - whole).norm() / whole.norm()
        print(
            f"{label}: restarted against whole run {gap:.1e}; the same steps moved {moved:.1e}",
            flush=True,
        )
    if options.again:
        again = folder / f"{label}-again"
        train(input_of(name, system, again, options))
        for step in (steps // 2, steps):
            expected = weights_of(Path(f"{first}-{step}.pt"))
            gap = (weights_of(Path(f"{again}-{step}.pt")) - expected).norm() / expected.norm()
            print(f"{label}: two equal runs differ after {step} steps by {gap:.1e}", flush=True)
    if options.deepmd_kit:
        content = input_of(name, system, folder / f"{label}-deepmd-kit", options)
        print(f"{label}: {train_in_deepmd_kit(content):.2f} ms a step in deepmd-kit", flush=True)
    return graphs > 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["mini", "dpa2", "hybrid"])
    parser.add_argument("--atoms", type=int, default=192)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--compile", action="store_true", help="set training/enable_compile")
    parser.add_argument("--restart", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--again", action="store_true", help="train once more, to compare")
    parser.add_argument("--deepmd-kit", action="store_true", help="train in deepmd-kit, too")
    parser.add_argument("--folder", type=Path, help="where files go; new by default")
    options = parser.parse_args(arguments)
    import_deepmd_kit()
    folder = Path(options.folder or mkdtemp()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    captured = [run_case(name, folder, options) for name in options.cases]
    return 0 if all(captured) or not torch.cuda.is_available() else 1


if __name__ == "__main__":
    sys.exit(main())
