"""Time of whole training steps inside deepmd-kit 3.2: its HybridMuon, ours in its place, and its Adam.

    python source/benchmarks/deepmd_kit_step.py --examples EXAMPLES [--steps 5] [--rounds 30] [--its-rounds 3]

Run it with a Python that has deepmd-kit, and this package on PYTHONPATH. EXAMPLES is the folder `examples` of a
checkout of deepmd-kit; from it come the inputs of se_e2_a, DPA-1, DPA-3 and DPA-4 and the water systems (192 atoms,
batch 1). The three optimizers take turns of a few steps within one run of deepmd-kit's trainer, each with its own
scheduler, so that a drift of the machine's speed meets all: the trainer's attributes `optimizer` and `scheduler` change
at the end of a turn, and the device is waited for. The first round warms up. A ratio is the median over rounds of the
ratios within a round. On a CPU its HybridMuon takes much longer than the rest: --its-rounds gives it fewer turns.

deepmd-kit's compiled operators are not needed: its wheel may lack the libraries, and MPI and mendeleev may be missing;
what would load them is replaced before. DPA-4 needs ``vesin[torch]``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

INPUTS = {
    "se_e2_a": "water/se_e2_a/input_torch.json",
    "DPA-1": "water/se_atten/input_torch.json",
    "DPA-3": "water/dpa3/input_torch.json",
    "DPA-4": "water/dpa4/input.json",
}
OPTIMIZERS = ("its HybridMuon", "ours", "its Adam")


def import_deepmd_kit() -> types.ModuleType:
    """Import deepmd-kit's trainer, also where only its Python is there; return its entry point."""
    if find_spec("mendeleev") is None:
        mendeleev: Any = types.ModuleType("mendeleev")
        # It is asked for the order of the elements of the examples alone.
        mendeleev.element = lambda symbol: types.SimpleNamespace(
            atomic_number={"H": 1, "O": 8}[symbol]
        )
        sys.modules["mendeleev"] = mendeleev
    if not any(True for _ in distributions(name="mpich")):
        from deepmd.env import GLOBAL_CONFIG

        GLOBAL_CONFIG["cibuildwheel"] = (
            "0"  # its wheel loads MPI for its operators, which are not used here
        )
    from deepmd.pt.entrypoints import main as entry

    return entry


def prepared(path: Path, optimizer: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return an example input with another optimizer, without files, validation or display."""
    content: dict[str, Any] = json.loads(path.read_text())
    training = content["training"]
    training["training_data"]["systems"] = [
        str((path.parent / system).resolve()) for system in training["training_data"]["systems"]
    ]
    unwanted = (
        "validation_data",
        "stat_file",
        "stat_file_mode",
        "save_dir",
        "enable_ema",
        "ema_decay",
    )
    for key in (*unwanted, "ema_ckpt_keep", "zero_stage", "numb_epoch"):
        training.pop(key, None)
    training.update(
        numb_steps=steps, disp_freq=10**9, save_freq=10**9, disp_training=False, time_training=False
    )
    content["optimizer"] = optimizer
    return content


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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


class Turns:
    """Gives a trainer's steps to its optimizers in turn and notes how long each turn takes.

    Parameters
    ----------
    steps
        Steps of a turn.
    rounds
        Rounds in which ours and its Adam take a turn each, beside the first one.
    its_rounds
        The number of them in which its HybridMuon does, too, evenly spread; it does in the first one.
    note
        Called with the optimizer and its seconds a step, wall and processor, after each turn that counts.

    Attributes
    ----------
    firsts
        Seconds of each optimizer's first step.
    times
        Seconds of wall and processor time of a step, for each turn after the first round.
    """

    def __init__(
        self, steps: int, rounds: int, its_rounds: int, note: Callable[[str, float, float], None]
    ) -> None:
        self.steps, self.note = steps, note
        self.order = list(OPTIMIZERS)
        for number in range(rounds):
            with_its = (number + 1) * its_rounds // rounds > number * its_rounds // rounds
            self.order += OPTIMIZERS if with_its else OPTIMIZERS[1:]
        self.done = 0
        self.firsts: dict[str, float] = {}
        self.times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in OPTIMIZERS}

    @property
    def all_steps(self) -> int:
        """Number of steps of all turns, and the first one."""
        return 1 + self.steps * len(self.order)

    def begin(self, trainer: Any, optimizers: dict[str, tuple[Any, Any]]) -> None:
        """Let Adam take a first step, in which the model warms up."""
        self.trainer, self.optimizers = trainer, optimizers
        self._give_to("its Adam")

    def _give_to(self, kind: str) -> None:
        self.kind = kind
        self.trainer.optimizer, self.trainer.scheduler = self.optimizers[kind]
        synchronize()
        self.start = time.perf_counter(), time.process_time()

    def __call__(self, *_: Any) -> None:
        """Do what is due after a step: the trainer's first, the first of an optimizer, the last of a turn."""
        turn, step = divmod(self.done - 1, self.steps)
        self.done += 1
        if turn < 0:
            self._give_to(self.order[0])
            return
        last = step == self.steps - 1
        if last or self.kind not in self.firsts:
            synchronize()
        passed = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        self.firsts.setdefault(self.kind, passed[0])
        if last:
            if turn >= len(OPTIMIZERS):
                self.times[self.kind].append((passed[0] / self.steps, passed[1] / self.steps))
                self.note(self.kind, *self.times[self.kind][-1])
            if turn + 1 < len(self.order):
                self._give_to(self.order[turn + 1])


def train(entry: Any, theirs: Any, content: dict[str, Any], turns: Turns) -> None:
    """Train once with deepmd-kit's trainer, extended to make our optimizer, and give its steps to all three."""
    training = entry.training

    class Timed(training.Trainer):  # type: ignore[misc, name-defined]
        def _create_optimizer(self, optimizer_class: type, **settings: Any) -> Any:
            """Make all three as deepmd-kit makes them."""
            its = theirs._create_optimizer(self, optimizer_class, **settings)
            its.set_param_names(tuple(self.wrapper.named_parameters()))
            options = {
                "lr": settings["lr"],
                "betas": settings["adam_betas"],
                "fused": torch.cuda.is_available(),
            }
            adam = theirs._create_optimizer(self, torch.optim.Adam, **options)
            ours = super()._create_optimizer(optimizer_class, **settings)
            self.made = dict(zip(OPTIMIZERS, (its, ours, adam), strict=True))
            return ours

        def run(self) -> None:
            schedulers = {
                kind: self._create_lr_scheduler(made, self.lr_schedule, self.start_step)
                for kind, made in self.made.items()
            }
            turns.begin(self, {kind: (made, schedulers[kind]) for kind, made in self.made.items()})
            super().run()

    previous, training.Trainer = training.Trainer, Timed
    hook = register_optimizer_step_post_hook(turns)
    try:
        with quiet_folder():
            Path("input.json").write_text(json.dumps(content))
            entry.train("input.json", None, None, None, None, "", skip_neighbor_stat=True)
    finally:
        hook.remove()
        training.Trainer = previous


def write_turn(log: TextIO | None, name: str, kind: str, wall: float, processor: float) -> None:
    """Write the times of a turn at once: a run that is ended leaves those it has."""
    if log is not None:
        line = {"input": name, "optimizer": kind, "wall_s": wall, "processor_s": processor}
        print(json.dumps(line), file=log, flush=True)


def spread(values: list[float], unit: float = 1.0) -> str:
    """Return median and range of some numbers."""
    if not values:
        return "–"
    return f"{statistics.median(values) / unit:.4g} ({min(values) / unit:.4g}–{max(values) / unit:.4g})"


def main() -> None:
    """Take turns, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--examples", type=Path, required=True, help="the folder examples of a deepmd-kit checkout"
    )
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=30, help="counted turns of each optimizer")
    parser.add_argument("--its-rounds", type=int, help="counted turns of its HybridMuon, if fewer")
    parser.add_argument("--wall", action="store_true", help="wall time also on a CPU")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument(
        "--log", type=Path, help="write every turn to this file, a line of JSON each"
    )
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    examples = args.examples.resolve()
    log = args.log.resolve().open("w") if args.log else None
    entry: Any = import_deepmd_kit()
    from deepmd_muon.deepmd_kit.trainer import extend

    if args.threads:
        torch.set_num_threads(args.threads)
    theirs = entry.training.Trainer
    extend(entry.training)
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    by_wall = args.wall or torch.cuda.is_available()
    clock = "wall time" if by_wall else "processor time"
    print(
        f"{device}; Python {platform.python_version()}, torch {torch.__version__}; {time.strftime('%Y-%m-%d')}"
    )
    fewer = "" if args.its_rounds is None else f" ({args.its_rounds} of its HybridMuon)"
    print(
        f"{args.rounds} turns{fewer} of {args.steps} steps each; median (range), ms of {clock} a step\n"
    )
    print(
        "| input | its HybridMuon | ours | its Adam | ours / its Adam | first step, s: its / ours / Adam |"
    )
    print("|---|---|---|---|---|---|")
    for name in args.inputs:
        note = functools.partial(write_turn, log, name)
        turns = Turns(
            args.steps,
            args.rounds,
            args.rounds if args.its_rounds is None else args.its_rounds,
            note,
        )
        train(
            entry,
            theirs,
            prepared(examples / INPUTS[name], {"type": "HybridMuon"}, turns.all_steps),
            turns,
        )
        shown = {
            kind: [t[0 if by_wall else 1] for t in times] for kind, times in turns.times.items()
        }
        ratios = [ours / adam for ours, adam in zip(shown["ours"], shown["its Adam"], strict=True)]
        firsts = " / ".join(f"{turns.firsts[kind]:.2f}" for kind in OPTIMIZERS)
        cells = [*(spread(shown[kind], 1e-3) for kind in OPTIMIZERS), spread(ratios)]
        print(f"| {name} | {' | '.join(cells)} | {firsts} |", flush=True)


if __name__ == "__main__":
    main()
