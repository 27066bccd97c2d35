"""Weights, checkpoints and failures on several GPUs: checks for `several_gpus.py`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from runs import OPTIONS, TRAIN, Job, RunError, Team, write_input
from training_step import make_input

from deepmd_muon.checkpoint_file.file import read_checkpoint

#: `dp train` by torch's deterministic operations alone: our kernels add up forces atomically.
DETERMINISTIC = """
import os
import sys
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
from deepmd_muon.cli.main import main
from deepmd_muon.model.nn import triton_support
torch.use_deterministic_algorithms(True, warn_only=True)
triton_support.usable = lambda device: False
sys.exit(main())
"""
KINDS = ("training_data", "torch_rng", "step")


class Machine(Protocol):
    """The GPUs, see `several_gpus.Machine`."""

    widths: list[int]
    gpus: int
    teams: dict[int, list[Team]]


def small_input(data: Path, frames: int, steps: int, **training: Any) -> dict[str, Any]:
    """Return the input of se_e2_a in float64 on one system, without interpolation."""
    own = {
        "disp_freq": steps,
        "save_freq": max(1, steps // 2),
        "interpolate_embedding": False,
        "enable_ema": True,
        **training,
    }
    content = make_input("se_e2_a", f"f64-b{frames}", "HybridMuon", steps, data, own)
    content["training"]["training_data"]["systems"] = [str(data / "data_0")]
    content["model"]["data_stat_nbatch"] = 1000  # every frame, whatever the batch
    content["optimizer"] |= {"precision": "float64", "lr_adjust_coeff": 0.18}
    return content


def prepared(
    folder: Path, content: dict[str, Any], *options: str, program: Sequence[str] = TRAIN
) -> Job:
    """Write an input; return its run."""
    write_input(folder, content)
    return Job(folder, (*program, *OPTIONS, *options))


def run_together(*pairs: tuple[Team, Job]) -> None:
    """Run jobs of different teams at the same time."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(lambda pair: pair[0].run(pair[1]), pairs))


# ----- weights -----------------------------------------------------------------------------------


def weights_after(machine: Machine, data: Path, folder: Path, scale: float) -> dict[str, Any]:
    """Return how far weights of N GPUs are from those of one with N times the batch.

    One GPU repeats its run. Both comparisons are made as users train, where atomic additions sum
    over neighbours in any order, and by torch's deterministic operations.
    """
    gpus = machine.gpus
    steps = max(2, round(100 * scale))
    script = folder / "deterministic.py"
    folder.mkdir()
    script.write_text(DETERMINISTIC)
    found: dict[str, Any] = {"gpus": gpus, "steps": steps}
    with Team([0]) as first, Team([1]) as second, Team(range(gpus)) as all_gpus:
        deterministic = (first, second, all_gpus)
        for team in deterministic:
            team.open()  # they import torch during the other runs
        usual = (*machine.teams[1][:2], machine.teams[gpus][0])
        for way, teams in {"as trained": usual, "deterministic": deterministic}.items():
            program = TRAIN if way == "as trained" else (str(script),)
            own = {} if way == "as trained" else {"capture": "off"}
            whole = small_input(data, gpus, steps, **own)
            shared = small_input(data, 1, steps, **own)
            place = folder / way.replace(" ", "_")
            one = prepared(place / "1", whole, program=program)
            again = prepared(place / "again", whole, program=program)
            many = prepared(place / "N", shared, program=program)
            run_together((teams[0], one), (teams[1], again))
            teams[2].run(many)
            last = f"model.ckpt-{steps}.pt"
            found[way] = {
                "N against 1": difference(one.folder / last, many.folder / last),
                "1 against itself": difference(one.folder / last, again.folder / last),
            }
        found["restart"] = continued(deterministic, script, folder, data, steps)
    return found


def continued(
    teams: Sequence[Team], script: Path, folder: Path, data: Path, steps: int
) -> dict[str, Any]:
    """Move the middle of the deterministic run of N GPUs to one GPU and back; compare the end."""
    one, _, all_gpus = teams
    half = max(1, steps // 2)
    own = {"capture": "off", "save_ckpt": "again"}
    program = (str(script),)
    middle = folder / "deterministic" / "N" / f"model.ckpt-{half}.pt"
    stop = small_input(data, 1, half, **own)
    on_one = prepared(folder / "on_1", stop, "--restart", str(middle), program=program)
    one.run(on_one)
    saved = on_one.folder / f"again-{half}.pt"
    rest = small_input(data, 1, steps, **own)
    back = prepared(folder / "back", rest, "--restart", str(saved), program=program)
    all_gpus.run(back)
    whole = folder / "deterministic" / "N" / f"model.ckpt-{steps}.pt"
    return {
        f"N to 1 at step {half}": differing(middle, saved),
        "and back, at the end": difference(whole, back.folder / f"again-{steps}.pt"),
    }


def difference(one: Path, other: Path) -> dict[str, Any]:
    """Return the largest difference of two checkpoints' weights: of its tensor's largest, and as it is."""
    first = weights(one)
    second = weights(other)
    relative = {}
    absolute = {}
    for name, x in first.items():
        if x.numel():
            moved = float((x - second[name]).abs().max())
            relative[name] = moved / max(float(x.abs().max()), 1e-30)
            absolute[name] = moved
    worst = max(relative, key=lambda name: relative[name])
    return {"relative": relative[worst], "absolute": max(absolute.values()), "tensor": worst}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors of a checkpoint's model."""
    model = read_checkpoint(path)["model"]
    return {
        name: x
        for name, x in model.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }


# ----- checkpoints -------------------------------------------------------------------------------


def restart_on_others(
    machine: Machine, data: Path, folder: Path, steps: int = 20
) -> dict[str, Any]:
    """Save on N GPUs, load and save on one, and again on N; save on half of them, load on N.

    Returns
    -------
    dict
        By way, what differs between the files: nothing, if every tensor came back bit by bit.
    """
    gpus = machine.gpus
    content = small_input(data, 1, steps)
    last = f"model.ckpt-{steps}.pt"

    def trained(width: int) -> Path:
        job = prepared(folder / f"on_{width}", content)
        machine.teams[width][0].run(job)
        return job.folder / last

    def saved_again(source: Path, width: int) -> Path:
        place = folder / f"{source.parent.name}_to_{width}"
        job = prepared(
            place, small_input(data, 1, steps, save_ckpt="again"), "--restart", str(source)
        )
        machine.teams[width][0].run(job)
        return place / f"again-{steps}.pt"

    first = trained(gpus)
    on_one = saved_again(first, 1)
    back = saved_again(on_one, gpus)
    found = {
        f"{gpus} to 1": differing(first, on_one),
        f"{gpus} to 1 to {gpus}": differing(first, back),
    }
    for width in machine.widths[1:-1]:
        fewer = trained(width)
        found[f"{width} to {gpus}"] = differing(fewer, saved_again(fewer, gpus))
    return found


def differing(one: Path, other: Path) -> dict[str, Any]:
    """Return how many tensors of two checkpoints were compared, and which differ in any bit."""
    first = read_checkpoint(one)
    second = read_checkpoint(other)
    parts = ("model", "optimizer", "ema")
    values = dict(leaves({part: first.get(part) for part in parts}))
    others = dict(leaves({part: second.get(part) for part in parts}))
    unequal = list(values.keys() ^ others.keys())
    unequal += [
        name for name in values.keys() & others.keys() if not same(values[name], others[name])
    ]
    for kind in KINDS:
        if str(first["deepmd_muon"].get(kind)) != str(second["deepmd_muon"].get(kind)):
            unequal.append(kind)
    return {"tensors": sum(map(torch.is_tensor, values.values())), "differ": sorted(unequal)[:8]}


def leaves(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dictionaries and lists, with its path."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, f"{name}/{key}")
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from leaves(value, f"{name}/{number}")
    else:
        yield name, content


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal, bit by bit if they are tensors."""
    if torch.is_tensor(x) and torch.is_tensor(y):
        return x.dtype == y.dtype and torch.equal(x, y)
    return bool(x == y)


# ----- a failure ---------------------------------------------------------------------------------


def kill_rank(machine: Machine, data: Path, folder: Path, limit: float = 90.0) -> dict[str, Any]:
    """Kill the last rank during its steps; return when the others end, and what they say."""
    team = machine.teams[machine.gpus][0]
    content = small_input(data, 1, 10_000_000, disp_freq=10, jsonl_file="steps.jsonl")
    job = prepared(folder, content)
    team.begin(job)
    await_steps(folder / "steps.jsonl", limit)
    victim = len(team.processes) - 1
    os.kill(team.processes[victim].pid, 9)
    ends = team.ends(limit)
    others = ends[:victim]
    messages = {rank: job.log(rank).splitlines()[-1:] for rank in range(victim)}
    named = [bool(re.search(rf"rank {victim}\b", job.log(rank))) for rank in range(victim)]
    team.close()
    team.open()  # for a later part, while others run
    return {
        "killed": f"rank {victim} of {machine.gpus}",
        "others ended": [end.status is not None for end in others],
        "after [s]": [round(end.seconds, 1) for end in others],
        "named the rank": named,
        "messages": messages,
    }


def await_steps(path: Path, limit: float) -> None:
    """Wait until a run has written three rows of its steps."""
    end = time.monotonic() + limit
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        if time.monotonic() > end:
            raise RunError(f"{path.parent.name}: no steps within {limit:g} s")
        time.sleep(0.1)
