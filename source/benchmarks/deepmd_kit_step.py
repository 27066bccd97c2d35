"""Time of whole training steps inside deepmd-kit 3.2: its HybridMuon, ours in its place, and its Adam.

    python source/benchmarks/deepmd_kit_step.py --examples DEEPMD_KIT/examples [--steps 20] [--rounds 5]

Run it with a Python that has deepmd-kit, and this package on PYTHONPATH. DEEPMD_KIT/examples is the folder of a
checkout of deepmd-kit; from it come the inputs of se_e2_a, DPA-1, DPA-3 and DPA-4 and the water systems (192 atoms,
batch 1). The three optimizers take turns within one process, each turn a new run of deepmd-kit's trainer, so that a
drift of the machine's speed meets all. A turn's time is that between the end of the optimizer step `--warm-up` and of
the last one; the device is waited for at these two alone. The first step is timed apart, from the start of the
trainer's loop.

deepmd-kit's compiled operators are not needed: its wheel may lack the libraries, and MPI and mendeleev may be missing;
what would load them is replaced before. DPA-4 needs ``vesin[torch]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

INPUTS = {
    "se_e2_a": "water/se_e2_a/input_torch.json",
    "DPA-1": "water/se_atten/input_torch.json",
    "DPA-3": "water/dpa3/input_torch.json",
    "DPA-4": "water/dpa4/input.json",
}
OPTIMIZERS = {
    "its HybridMuon": {"type": "HybridMuon"},
    "ours": {"type": "HybridMuon"},
    "its Adam": {"type": "Adam"},
}


def import_deepmd_kit() -> types.ModuleType:
    """Import deepmd-kit's trainer, also where only its Python is there; return its entry point."""
    if find_spec("mendeleev") is None:
        mendeleev: Any = types.ModuleType("mendeleev")
        # It is asked for the order of the elements of the examples alone.
        mendeleev.element = lambda symbol: types.SimpleNamespace(atomic_number={"H": 1, "O": 8}[symbol])
        sys.modules["mendeleev"] = mendeleev
    if not any(True for _ in distributions(name="mpich")):
        from deepmd.env import GLOBAL_CONFIG

        GLOBAL_CONFIG["cibuildwheel"] = "0"  # its wheel loads MPI for its operators, which are not used here
    from deepmd.pt.entrypoints import main as entry

    return entry


def prepared(path: Path, optimizer: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return an example input with another optimizer, without files, validation or display."""
    content: dict[str, Any] = json.loads(path.read_text())
    training = content["training"]
    training["training_data"]["systems"] = [
        str((path.parent / system).resolve()) for system in training["training_data"]["systems"]
    ]
    unwanted = ("validation_data", "stat_file", "stat_file_mode", "save_dir", "enable_ema", "ema_decay")
    for key in (*unwanted, "ema_ckpt_keep", "zero_stage", "numb_epoch"):
        training.pop(key, None)
    training.update(numb_steps=steps, disp_freq=10**9, save_freq=10**9, disp_training=False, time_training=False)
    content["optimizer"] = optimizer
    return content


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Turn:
    """One run of deepmd-kit's trainer: the seconds of its first step, and of each counted one [s]."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.ends: list[float] = []
        self.begin = 0.0

    def __call__(self, *_: Any) -> None:
        """Note the time after a step."""
        number = len(self.ends) + 1
        if number in (1, self.warm_up, self.warm_up + self.steps):
            synchronize()
        self.ends.append(time.perf_counter())

    @property
    def first(self) -> float:
        """Seconds from the start of the loop to the end of the first step."""
        return self.ends[0] - self.begin

    @property
    def each(self) -> float:
        """Seconds of a counted step."""
        return (self.ends[-1] - self.ends[self.warm_up - 1]) / self.steps


@contextlib.contextmanager
def quiet_folder() -> Iterator[None]:
    """Work in an empty folder."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def take_turn(entry: Any, trainer: type, content: dict[str, Any], turn: Turn) -> None:
    """Train once with a trainer class."""
    training = entry.training

    class Timed(trainer):  # type: ignore[misc, valid-type]
        def run(self) -> None:
            turn.begin = time.perf_counter()
            super().run()

    previous, training.Trainer = training.Trainer, Timed
    hook = register_optimizer_step_post_hook(turn)
    try:
        with quiet_folder():
            Path("input.json").write_text(json.dumps(content))
            entry.train("input.json", None, None, None, None, "", skip_neighbor_stat=True)
    finally:
        hook.remove()
        training.Trainer = previous
    assert len(turn.ends) == turn.warm_up + turn.steps


def spread(values: list[float], unit: float) -> str:
    """Return median and range of some times."""
    return f"{statistics.median(values) / unit:.4g} ({min(values) / unit:.4g}–{max(values) / unit:.4g})"


def main() -> None:
    """Take turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, required=True, help="the folder examples of a deepmd-kit checkout")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--steps", type=int, default=20, help="counted steps of a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them, at least 1")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each optimizer")
    parser.add_argument("--log", type=Path, help="write every turn to this file, a line of JSON each")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    examples = args.examples.resolve()
    log = args.log.resolve().open("w") if args.log else None
    entry: Any = import_deepmd_kit()
    from deepmd_muon.deepmd_kit.trainer import extend

    own = entry.training.Trainer
    extend(entry.training)
    trainers = {"its HybridMuon": own, "ours": entry.training.Trainer, "its Adam": own}

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}; Python {platform.python_version()}, torch {torch.__version__}; {time.strftime('%Y-%m-%d')}")
    print(f"{args.rounds} turns of {args.steps} steps each, after {args.warm_up}; median (range), ms a step\n")
    print("| input | its HybridMuon | ours | its Adam | ours / its Adam | first step, s: its / ours / Adam |")
    print("|---|---|---|---|---|---|")
    for name in args.inputs:
        turns: dict[str, list[Turn]] = {kind: [] for kind in OPTIMIZERS}
        for _ in range(args.rounds):
            for kind, optimizer in OPTIMIZERS.items():
                turn = Turn(args.warm_up, args.steps)
                content = prepared(examples / INPUTS[name], dict(optimizer), args.warm_up + args.steps)
                take_turn(entry, trainers[kind], content, turn)
                turns[kind].append(turn)
                if log:
                    line = {"input": name, "optimizer": kind, "first_s": turn.first, "step_s": turn.each}
                    print(json.dumps(line), file=log, flush=True)
        medians = {kind: statistics.median(turn.each for turn in taken) for kind, taken in turns.items()}
        cells = [spread([turn.each for turn in taken], 1e-3) for taken in turns.values()]
        firsts = " / ".join(f"{taken[0].first:.2f}" for taken in turns.values())
        print(f"| {name} | {' | '.join(cells)} | {medians['ours'] / medians['its Adam']:.2f} | {firsts} |", flush=True)


if __name__ == "__main__":
    main()
