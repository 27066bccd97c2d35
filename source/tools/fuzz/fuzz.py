"""Try mutants of inputs, data and checkpoints, and count how many are read right or refused in words.

    python source/tools/fuzz/fuzz.py --tries 2000 --seed 1 input system
    python source/tools/fuzz/fuzz.py --seed 1 --only 1234 restart

Every try has a generator of its own, drawn from the seed and its number, so that a find can be repeated alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from command_doors import CheckJson, ExploreInput, Replay, Rounds
from doors import (
    CheckpointBytes,
    CheckpointStructure,
    Door,
    FrozenBytes,
    HDF5System,
    Input,
    Restart,
    System,
)
from more_doors import Average, CompressedXYZ, ExtendedXYZ, HDF5Bytes, Reports, Shown, Statistics

# A try may take this long [s of CPU time] and this much memory above the start [KiB].
MOST_TIME, MOST_MEMORY = 5.0, 1 << 20
# A message is one of these long at most: whoever reads it finds what is wrong [characters].
LONGEST_MESSAGE = 20_000


DOORS: dict[str, type[Door]] = {
    "frozen": FrozenBytes,
    "xyz": ExtendedXYZ,
    "xyz-gz": CompressedXYZ,
    "input": Input,
    "system": System,
    "hdf5": HDF5System,
    "hdf5-bytes": HDF5Bytes,
    "file": CheckpointBytes,
    "structure": CheckpointStructure,
    "average": Average,
    "restart": Restart,
    "reports": Reports,
    "statistics": Statistics,
    "show": Shown,
    "explore": ExploreInput,
    "rounds": Rounds,
    "replay": Replay,
    "check-json": CheckJson,
}


@dataclass
class Outcome:
    """What came of the tries at one door: the longest try [s of CPU time], and for each failure its number and text."""

    read: int = 0
    refused: int = 0
    longest: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let a mutant that asks for too much get an error, not the memory of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (MOST_MEMORY << 10), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(door: Door, seed: int, numbers: Iterable[int]) -> Outcome:
    """Enter a door with the mutants of some numbers."""
    outcome = Outcome()
    for number in numbers:
        begin = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                door.change(random.Random(f"{seed}/{number}"))
                door.enter()
            outcome.read += 1
        except Exception as error:
            # The command line prints the message of such errors, and the traceback of others.
            if not type(error).__module__.startswith("deepmd_muon"):
                outcome.failures.append((number, traceback.format_exc()))
                continue
            outcome.refused += 1
            if problem := message_problem(str(error), door.name):
                outcome.failures.append(
                    (number, f"{type(error).__name__}: {problem}: {str(error)[:500]}")
                )
        took = time.process_time() - begin
        outcome.longest = max(outcome.longest, took)
        if took > MOST_TIME:
            outcome.failures.append((number, f"took {took:.1f} s"))
    return outcome


def message_problem(message: str, name: str) -> str | None:
    """Say what a message lacks; None when it is a good one."""
    if name not in message:
        return f"the message does not name {name}"
    if len(message) > LONGEST_MESSAGE:
        return f"the message has {len(message)} characters"
    return None


def main() -> int:
    """Fuzz the doors that the command line names, all of them without names, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "doors", nargs="*", default=list(DOORS), metavar="door", help=", ".join(DOORS)
    )
    parser.add_argument("--tries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="number of a single try")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("deepmd_muon").setLevel(logging.ERROR)
    failed = 0
    for name in options.doors:
        with tempfile.TemporaryDirectory() as place:
            door = DOORS[name](Path(place))
            with bounded_memory():
                numbers = range(options.tries) if options.only is None else [options.only]
                found = fuzz(door, options.seed, numbers)
        failed += len(found.failures)
        done = f"{found.read} read, {found.refused} refused, {len(found.failures)} failures"
        print(
            f"{name}: {len(numbers)} tries, {done}, longest {found.longest:.2f} s of CPU time",
            flush=True,
        )
        for number, text in found.failures:
            print(f"--- {name}, seed {options.seed}, try {number}\n{text}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
