"""Steps of two branches that share a descriptor, beside steps of one model, on a GPU by whole runs of `dp train`.

    python source/benchmarks/branch_steps.py --data WATER --out FILE.json

WATER holds DeePMD's example systems (192 atoms). Both branches have the same data and shapes, so that a step of either
does the work of the single model's step. Runs of both inputs alternate in one process; the first of each is not
counted. The time of a run is the median over its intervals of 100 steps after the first three [ms]. A case gives the
least and the median of its runs, and their ratios.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from runs import INTERVAL, milliseconds
from training_step import make_input

from deepmd_muon.argcheck import load
from deepmd_muon.files import working_folder
from deepmd_muon.train import run

CASES = ("se_e2_a:f64-b1", "se_e2_a:f64-b8", "dpa3:f32-b1")


def in_branches(content: dict[str, Any]) -> dict[str, Any]:
    """Return an input of one model as two branches that share its descriptor."""
    content = copy.deepcopy(content)
    model, loss, training = content["model"], content.pop("loss"), content["training"]
    branch = {"type_map": "types", "descriptor": "all", "fitting_net": model["fitting_net"]}
    shared = {"types": model["type_map"], "all": model["descriptor"]}
    content["model"] = {"shared_dict": shared, "model_dict": {"a": branch, "b": branch}}
    content["loss_dict"] = {"a": loss, "b": loss}
    data = {"training_data": training.pop("training_data")}
    content["training"] = {
        **training,
        "data_dict": {"a": data, "b": data},
        "model_prob": {"a": 1, "b": 1},
    }
    return content


def time_run(content: dict[str, Any], folder: Path) -> float:
    """Train in this process; return the time of a step [ms]."""
    folder.mkdir()
    (folder / "input.json").write_text(json.dumps(content))
    with working_folder(folder):
        run(load("input.json"), skip_neighbor_stat=True, log_level="WARNING")
    return milliseconds(folder)


def time_case(case: str, data: Path, folder: Path, *, steps: int, repeats: int) -> dict[str, Any]:
    """Return the times of a case with one model and with two branches."""
    kind, sizes = case.split(":")
    own = {"disp_freq": INTERVAL, "jsonl_file": "steps.jsonl"}
    single = make_input(kind, sizes, "HybridMuon", steps, data, own)
    times: dict[str, list[float]] = {"one model": [], "two branches": []}
    contents = {"one model": single, "two branches": in_branches(single)}
    for repeat in range(repeats + 1):
        for name, content in contents.items():
            took = time_run(
                content, folder / f"{case.replace(':', '_')}_{name.replace(' ', '_')}_{repeat}"
            )
            if repeat:
                times[name].append(round(took, 4))
    one, two = times.values()
    ratios = {
        "ratio of least": min(two) / min(one),
        "ratio of medians": statistics.median(two) / statistics.median(one),
    }
    return {"case": case, **times, **{name: round(ratio, 3) for name, ratio in ratios.items()}}


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            results.append(
                time_case(
                    case, args.data.resolve(), Path(folder), steps=args.steps, repeats=args.repeats
                )
            )
            print(results[-1], flush=True)
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            machine = {"gpu": gpu, "torch": torch.__version__}
            args.out.write_text(
                json.dumps({"machine": machine, "results": results}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
