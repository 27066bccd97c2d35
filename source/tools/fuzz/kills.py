"""Kill trainings at drawn moments, start them again, and compare what comes out with a run that nobody disturbed.

    python source/tools/fuzz/kills.py --kills 100 --seed 1

A chain is a training in a new folder: one to three processes are killed, the last one ends. Processes are forked from
one that has imported everything and run nothing. Half of the moments are counted in changes of the file system (the
third rename, the tenth file opened for writing, …), so that they lie within saves; the others in time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deepmd_muon.checkpoint_file.file import read_checkpoint

PRELOADED = [
    "deepmd_muon.cli.main",
    *(
        "deepmd_muon.train.start",
        "deepmd_muon.train.strategy.replicated",
        "deepmd_muon.train.strategy.fully_sharded",
    ),
    "numpy.random",
    "torch._dynamo",
]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
STEPS, SAVE_EVERY, KEPT = 9, 2, 2
# A process that has not ended by then hangs [s], however busy the machine is.
PATIENCE = 600.0
# Changes of the file system that the interpreter reports; "open" counts when it is for writing.
_CHANGES = frozenset(
    ("os.rename", "os.remove", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate")
)
_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Kill:
    """Which rank gets which signal, at a change of the file system or after a time [s]."""

    rank: int
    number: signal.Signals
    change: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        when = f"at change {self.change}" if self.change else f"after {self.seconds:.3f} s"
        return f"{self.number.name} to rank {self.rank} {when}"


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run leaves, and how long it takes in changes of the file system and seconds."""

    content: dict
    curve: str
    changes: int
    seconds: float


class KillError(AssertionError):
    """A kill has lost or damaged something."""


def write_input(folder: Path) -> None:
    """Write a system of four atoms and an input that trains on it for a few steps."""
    part = folder / "data/set.000"
    part.mkdir(parents=True)
    (folder / "data/type.raw").write_text("0 0 1 1")
    (folder / "data/type_map.raw").write_text("A B")
    draw = np.random.default_rng(1)
    np.save(part / "coord.npy", draw.uniform(0.0, 4.0, (6, 12)))
    np.save(part / "box.npy", np.tile(4.0 * np.eye(3).ravel(), (6, 1)))
    np.save(part / "energy.npy", draw.standard_normal(6))
    np.save(part / "force.npy", draw.standard_normal((6, 12)))
    net = {"neuron": [4, 4], "seed": 1}
    descriptor = {
        "type": "se_e2_a",
        "sel": [16, 16],
        "rcut": 3.0,
        "rcut_smth": 1.0,
        "axis_neuron": 2,
        **net,
    }
    content = {
        "model": {"type_map": ["A", "B"], "descriptor": descriptor, "fitting_net": net},
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon", "lr_adjust": 0.0},
        "training": {
            "training_data": {"systems": ["../data"], "batch_size": 1},
            "numb_steps": STEPS,
            "seed": 3,
            "disp_freq": 1,
            "save_freq": SAVE_EVERY,
            "max_ckpt_keep": KEPT,
            "enable_ema": True,
            "time_training": False,
            "rank_timeout": 30.0,
        },
    }
    (folder / "run").mkdir()
    (folder / "run/input.json").write_text(json.dumps(content))


def _work(folder: Path, place: dict[str, str], log: Path, kill: Kill | None, answers) -> None:
    """Train in this process, which answers when it begins and how many changes it has made."""
    status = 130
    try:
        with log.open("a") as stream:
            for descriptor in (1, 2):
                os.dup2(stream.fileno(), descriptor)
        os.chdir(folder)
        os.environ.update(place)
        torch.set_num_threads(1)
        changes = _count_changes(kill)
        from deepmd_muon.cli.main import main

        answers.put("ready")
        status = main(["train", "input.json", "--restart", "auto", "--skip-neighbor-stat"])
        answers.put(changes[0])
    except KeyboardInterrupt:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 99
    finally:
        os._exit(status)


def _count_changes(kill: Kill | None) -> list[int]:
    """Count changes of the file system in a list of one number, and send the signal at the one that is wanted."""
    count = [0]

    def hook(event: str, arguments: tuple) -> None:
        if event not in _CHANGES and not (event == "open" and (arguments[2] or 0) & _WRITING):
            return
        count[0] += 1
        if kill is not None and count[0] == kill.change:
            os.kill(os.getpid(), kill.number)

    sys.addaudithook(hook)
    return count


def train(folder: Path, ranks: int, kill: Kill | None = None) -> tuple[list[int], int, float]:
    """Start or continue the training of a folder; return the exit codes, changes of the file system and seconds.

    Raises
    ------
    KillError
        When a process does not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = _free_port()
    queues, processes = [], []
    for rank in range(ranks):
        place = {"DEVICE": "cpu"}
        if ranks > 1:
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        queues.append(context.SimpleQueue())
        mine = kill if kill is not None and kill.rank == rank else None
        given = (folder / "run", place, folder / f"log{rank}", mine, queues[-1])
        processes.append(context.Process(target=_work, args=given, daemon=True))
    for process in processes:
        process.start()
    victim = processes[kill.rank if kill else 0]
    queues[kill.rank if kill else 0].get()
    begin = time.monotonic()
    if kill is not None and kill.seconds:
        victim.join(kill.seconds)
        if victim.is_alive():
            os.kill(victim.pid, kill.number)
    end = begin + PATIENCE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hung:
        processes[rank].kill()
    if hung:
        raise KillError(f"ranks {hung} do not end")
    changes = queues[0].get() if kill is None and not queues[0].empty() else 0
    return [process.exitcode for process in processes], changes, time.monotonic() - begin


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def whole_checkpoints(run: Path) -> dict[int, Path]:
    """Read every checkpoint of a run by its name, and return those of each step.

    Raises
    ------
    KillError
        When one is damaged or holds another step.
    """
    found: dict[int, Path] = {}
    for path in sorted(run.iterdir()):
        if path.is_symlink() or not path.name.startswith("model.ckpt-"):
            continue
        step = int(path.stem.rpartition("-")[2])
        try:
            content = read_checkpoint(path)
        except Exception as error:
            raise KillError(f"{path.name} is damaged: {error}") from error
        if content["deepmd_muon"]["step"] != step:
            raise KillError(f"{path.name} is of step {content['deepmd_muon']['step']}")
        found[step] = path
    return found


def same(first: object, second: object) -> bool:
    """Compare nested values; tensors bit by bit."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and torch.equal(first, second)
        )
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def result(run: Path) -> dict:
    """Return what the last checkpoint of a run says of its training: all but the names of the others."""
    content = read_checkpoint(run / f"model.ckpt-{STEPS}.pt")
    content["deepmd_muon"] = {k: v for k, v in content["deepmd_muon"].items() if k != "series"}
    return content


def reference(folder: Path, ranks: int) -> Reference:
    """Train without being disturbed."""
    write_input(folder)
    codes, changes, seconds = train(folder, ranks)
    if any(codes):
        raise KillError(f"the undisturbed run ended with {codes}: {(folder / 'log0').read_text()}")
    return Reference(
        result(folder / "run"), (folder / "run/lcurve.out").read_text(), changes, seconds
    )


def draw_kill(draw: random.Random, ranks: int, undisturbed: Reference) -> Kill:
    """Draw a moment, a signal and a rank."""
    rank, number = draw.randrange(ranks), draw.choice(SIGNALS)
    if draw.random() < 0.5:
        return Kill(rank, number, seconds=draw.uniform(0.0, undisturbed.seconds))
    return Kill(rank, number, change=draw.randint(1, undisturbed.changes))


def try_chain(folder: Path, ranks: int, kills: list[Kill], undisturbed: Reference) -> list[int]:
    """Kill a training several times, continue it to its end, and check all that is promised.

    Returns
    -------
    list of int
        Step of the newest checkpoint after each kill; 0 without one.

    Raises
    ------
    KillError
        When something is lost, damaged, left over or different.
    """
    write_input(folder)
    run, log, steps = folder / "run", folder / "log0", []
    newest = 0
    for kill in [*kills, None]:
        log.write_text("")
        codes, _, _ = train(folder, ranks, kill)
        text = log.read_text()
        if newest and "restarting from" in text and f"at step {newest}\n" not in text:
            raise KillError(f"the restart did not begin at step {newest}: {text}")
        found = whole_checkpoints(run)
        if newest and max(found, default=0) < newest:
            raise KillError(f"the checkpoint of step {newest} is lost")
        for rank in range(ranks):
            if "Traceback" in (folder / f"log{rank}").read_text():
                raise KillError((folder / f"log{rank}").read_text())
        newest = max(found, default=0)
        steps.append(newest)
    if any(codes):
        raise KillError(f"the last restart ended with {codes}: {log.read_text()}")
    if not same(result(run), undisturbed.content):
        raise KillError("the result differs from that of the undisturbed run")
    if (run / "lcurve.out").read_text() != undisturbed.curve:
        raise KillError(
            f"lcurve.out differs from that of the undisturbed run: {(run / 'lcurve.out').read_text()}"
        )
    kept = sorted(path.name for path in run.glob("model.ckpt-*.pt"))
    if len(kept) > KEPT:
        raise KillError(f"more than {KEPT} are kept: {kept}")
    # A kill leaves at most the small file that was being written; restarts remove checkpoints.
    hidden = [path.name for path in run.iterdir() if path.name.startswith(".")]
    checkpoints = [name for name in hidden if name.startswith(".model")]
    if checkpoints or len(hidden) > len(kills):
        raise KillError(f"left over: {hidden}")
    return steps[:-1]


def run_kills(
    place: Path, amount: int, seed: int, numbers_of_ranks: tuple[int, ...]
) -> tuple[Counter, list[str]]:
    """Kill `amount` times; return the number of kills by kind, signal and what was reached, and all failures."""
    draw, counts, failures = random.Random(seed), Counter(), []
    references: dict[int, Reference] = {}
    while counts["kills"] < amount:
        ranks = draw.choice(numbers_of_ranks)
        if ranks not in references:
            references[ranks] = reference(place / f"undisturbed_{ranks}", ranks)
        number = min(draw.randint(1, 3), amount - counts["kills"])
        kills = [draw_kill(draw, ranks, references[ranks]) for _ in range(number)]
        folder = place / f"chain{counts['chains']}"
        try:
            steps = try_chain(folder, ranks, kills, references[ranks])
        except KillError as error:
            failures.append(
                f"seed {seed}, chain {counts['chains']}, {ranks} ranks, {'; '.join(map(str, kills))}: {error}"
            )
        else:
            counts["kills before the first checkpoint"] += steps.count(0)
            counts["chains that ended alike"] += 1
            shutil.rmtree(folder)
        counts["kills"] += number
        counts["chains"] += 1
        counts.update(f"{kill.number.name}" for kill in kills)
        counts[f"{ranks} processes"] += number
    return counts, failures


def main() -> int:
    """Kill as often as the command line says and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        begin = time.monotonic()
        # One in four with two ranks, which take three times as long.
        counts, failures = run_kills(Path(place), options.kills, options.seed, (1, 1, 1, 2))
    for name, count in sorted(counts.items()):
        print(f"{count:6d} {name}")
    for failure in failures:
        print(failure)
    print(f"{len(failures)} failures in {time.monotonic() - begin:.0f} s")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
