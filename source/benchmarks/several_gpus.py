"""A training step on several GPUs against one: whole runs of `dp train`, times from the runs' own JSON lines.

    python source/benchmarks/several_gpus.py --data WATER --gpus 2 --out FILE.json

WATER holds DeePMD's example systems (data_0 to data_2, 192 atoms). A case is MODEL:PRECISION-bFRAMES:STAGE with the
frames of each rank; it runs on each GPU alone, on all of them at the same time, and then on all together. A figure is
the median over the intervals of 100 steps after the first three; the ratio is to the slowest GPU. `--profile` lists the
kernels of rank 0 that take longest. `equal` then trains 100 steps in float64, without interpolated embedding nets, on N
GPUs with one frame each and on one GPU with N frames, and prints the largest difference of a weight, relative to the
largest weight of the same tensor and as it is, beside that of one GPU repeating its own run: as users run it, where
atomic additions sum over neighbours in any order, and by torch's deterministic operations alone. The last checkpoint of
N GPUs is then loaded and saved again on one, and that of one on N: the weights must not change.

What has not begun after `--most` seconds is left out, and named. On a machine without GPUs the ranks are processes that
exchange through gloo: `--cases --equal se_e2_a --steps 4` tries the comparison.

With `--alone` the N processes are one, which takes the part of rank 0 (`one_of_many.py`): the time of N GPUs without
that of the wire, for machines with one GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from training_step import make_input

INTERVAL = 100
CASES = [
    *("se_e2_a:f64-b1:0", "se_e2_a:f64-b8:0", "dpa3:f32-b1:0"),
    *("se_e2_a:f64-b1:1", "se_e2_a:f64-b8:1", "dpa3:f32-b1:1"),
    *("dpa3:f32-b8:0", "dpa3:f32-b8:1", "se_e2_a:f64-b1:2", "se_e2_a:f64-b1:3"),
]
# Steps of a run: ten intervals or more, but for the slowest.
STEPS = {"se_e2_a:f64-b1": 3000, "se_e2_a:f64-b8": 3000, "dpa1:f64-b1": 1000, "dpa3:f32-b1": 1000}
SLOW = 600
#: Lines of a log that tell how steps ran have one of these.
NOTED = ("graph", "launched one", "interpolated on")
DETERMINISTIC = """
import os
import sys
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
from deepmd_muon.cli.main import main
from deepmd_muon.model.nn import triton_support
torch.use_deterministic_algorithms(True, warn_only=True)
triton_support.usable = lambda device: False  # its kernels add up forces atomically
sys.exit(main())
"""


def train(
    folder: Path,
    content: dict[str, Any],
    gpus: int,
    *options: str,
    program: Sequence[str] = ("-m", "deepmd_muon"),
    device: str | None = None,
) -> str:
    """Train on so many GPUs, of which `device` is the only one that the run sees; return the log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "input.json").write_text(json.dumps(content))
    command = [*program, "--pt", "train", "input.json", "--skip-neighbor-stat", *options]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
        if gpus > 1
        else []
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": path, "OMP_NUM_THREADS": "4"}
        | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stderr


def milliseconds(folder: Path) -> float:
    """Return the median time of a step from the JSON lines of a run [ms]."""
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if "time" in row]
    return statistics.median(1e3 * (b - a) / INTERVAL for a, b in itertools.pairwise(times[3:]))


def time_case(case: str, data: Path, gpus: int, folder: Path, *, alone: bool) -> dict[str, Any]:
    """Return the times of a case on each GPU alone and on several, or of rank 0 alone."""
    content = input_of(case, data)
    place = folder / case.replace(":", "_")
    if alone:
        times = [timed(place / "1", content, 1)]
        many = timed(
            place / "N",
            content,
            1,
            program=(str(Path(__file__).parent / "one_of_many.py"), str(gpus)),
        )
    else:
        with ThreadPoolExecutor(gpus) as pool:
            devices = [str(i) if torch.cuda.is_available() else None for i in range(gpus)]
            runs = [
                pool.submit(timed, place / str(i), content, 1, device=own)
                for i, own in enumerate(devices)
            ]
            times = [run.result() for run in runs]
        many = timed(place / "N", content, gpus)
    singles = [time for time, _ in times]
    found = {"1 GPU": singles, f"{gpus} GPUs": many[0], "ratio": round(many[0] / max(singles), 3)}
    return found | {"notes": sorted({note for _, notes in [*times, many] for note in notes})}


def input_of(case: str, data: Path) -> dict[str, Any]:
    """Return the input of a case."""
    kind, sizes, stage = case.split(":")
    own = {"zero_stage": int(stage), "disp_freq": INTERVAL, "jsonl_file": "steps.jsonl"}
    steps = SLOW if stage in "23" else STEPS.get(f"{kind}:{sizes}", SLOW)
    return make_input(kind, sizes, "HybridMuon", steps, data, own)


def timed(
    folder: Path, content: dict[str, Any], gpus: int, **options: Any
) -> tuple[float, list[str]]:
    """Train; return the time of a step [ms] and what the log says of graphs and pieces."""
    log = train(folder, content, gpus, **options)
    notes = [
        line.partition("] ")[2] for line in log.splitlines() if any(word in line for word in NOTED)
    ]
    return round(milliseconds(folder), 3), notes


def profile(case: str, data: Path, gpus: int, folder: Path, most: int = 16) -> dict[str, Any]:
    """Return the time of the kernels of rank 0 that take longest [us a step], over the second half of a short run."""
    steps = 2 * INTERVAL
    content = changed(input_of(case, data), numb_steps=steps, profiling=True)
    place = folder / f"profile_{case.replace(':', '_')}_{gpus}"
    train(place, content, gpus)
    events = [
        e
        for e in json.loads((place / "timeline.json").read_text())["traceEvents"]
        if e.get("cat") == "kernel"
    ]
    middle = (min(e["ts"] for e in events) + max(e["ts"] for e in events)) / 2
    late = sorted((e for e in events if e["ts"] > middle), key=lambda e: e["ts"])
    # The kernel that occurs most regularly counts the steps: one sum over ranks, or one step of the guard.
    sums = [e for e in late if "AllReduce" in e["name"]] or [
        e for e in late if "guard" in e["name"].lower()
    ]
    count = max(1, len(sums))
    total: Counter[str] = Counter()
    for event in late:
        total[event["name"][:90]] += event["dur"]
    longest = {name: round(time / count, 1) for name, time in total.most_common(most)}
    return {"steps": count, "kernels a step": round(len(late) / count, 1), "us a step": longest}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors of a checkpoint's model."""
    model = torch.load(path, weights_only=True)["model"]
    return {
        name: x
        for name, x in model.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }


def difference(one: Path, other: Path) -> tuple[float, float, str]:
    """Return the largest difference of two checkpoints' weights: of its tensor's largest, as it is, and the tensor."""
    first, second = weights(one), weights(other)
    found = {
        name: (float((x - second[name]).abs().max()), x.abs().max())
        for name, x in first.items()
        if x.numel()
    }
    relative, name = max(
        (moved / float(size.clamp(min=1e-30)), name) for name, (moved, size) in found.items()
    )
    return relative, max(moved for moved, _ in found.values()), name


def compare(kind: str, data: Path, gpus: int, folder: Path, steps: int) -> dict[str, Any]:
    """Return how far N GPUs are from one with N frames, and whether checkpoints move between these numbers."""
    own = {
        "disp_freq": steps,
        "save_freq": steps // 2,
        "interpolate_embedding": False,
        "enable_ema": True,
    }
    script = folder / "deterministic.py"
    script.write_text(DETERMINISTIC)
    found: dict[str, Any] = {"steps": steps}
    inputs, places = {}, {}
    for count in (1, gpus):
        content = make_input(kind, f"f64-b{gpus // count}", "HybridMuon", steps, data, own)
        content["training"]["training_data"]["systems"] = [str(data.resolve() / "data_0")]
        content["training"]["save_freq"] = steps // 2
        content["model"]["data_stat_nbatch"] = 1000  # every frame, whatever the batch
        content["optimizer"] |= {"precision": "float64", "lr_adjust_coeff": 0.18}
        inputs[count] = content

    def last(way: str, program: Sequence[str], count: int) -> Path:
        place = folder / f"{kind}_{way}"
        content = inputs[count] if program[0] == "-m" else changed(inputs[count], capture="off")
        train(place, content, count, program=program)
        return place / f"model.ckpt-{steps}.pt"

    for name, program in {"": ("-m", "deepmd_muon"), ", deterministic": (str(script),)}.items():
        one, again, many = (
            last(f"{way}{name}", program, n) for way, n in (("1", 1), ("again", 1), ("N", gpus))
        )
        found[f"1 against itself{name}"] = difference(one, again)
        found[f"N against 1{name}"] = difference(one, many)
        places = places or {1: one, gpus: many}
    for source, target in ((gpus, 1), (1, gpus)):
        place = folder / f"{kind}_again_{source}_{target}"
        train(
            place,
            changed(inputs[target], save_ckpt="again"),
            target,
            "--restart",
            str(places[source]),
        )
        found[f"{source} loaded on {target}"] = difference(
            places[source], place / f"again-{steps}.pt"
        )
    return found


def changed(content: dict[str, Any], **training: Any) -> dict[str, Any]:
    """Return an input with other keys in its section `training`."""
    return {**content, "training": {**content["training"], **training}}


def main() -> None:
    """Run all cases and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument(
        "--alone", action="store_true", help="rank 0 of the GPUs without the others"
    )
    parser.add_argument(
        "--profile", nargs="*", default=[], help="cases of which kernels are listed"
    )
    parser.add_argument(
        "--equal", nargs="*", default=["se_e2_a"], help="models to compare weights of"
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="steps after which weights are compared"
    )
    parser.add_argument(
        "--most", type=float, default=480.0, help="seconds after which nothing new begins"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    end = time.monotonic() + options.most
    with tempfile.TemporaryDirectory() as name:
        folder, data, gpus = Path(name), options.data, options.gpus
        wanted = [
            (case, partial(time_case, case, data, gpus, folder, alone=options.alone))
            for case in options.cases
        ]
        # Behind the first cases, so that a slow machine leaves out the last ones.
        compared = [
            (f"equal:{kind}", partial(compare, kind, data, gpus, folder, options.steps))
            for kind in options.equal
        ]
        listed = [
            (f"profile:{case}", partial(profile, case, data, gpus, folder))
            for case in options.profile
        ]
        for what, work in [*wanted[:6], *listed, *compared, *wanted[6:]]:
            try:
                found = work() if time.monotonic() < end else {"failed": "not begun in time"}
            except SystemExit as error:
                found = {"failed": str(error)}
            results.append({"case": what} | found)
            print(json.dumps(results[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
