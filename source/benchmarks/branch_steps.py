"""Steps of two branches that share a descriptor, beside steps of one model, on a GPU by whole runs of `dp train`.

    python source/benchmarks/branch_steps.py --data WATER --out FILE.json

WATER holds DeePMD's example systems (192 atoms). Both branches have the same data and shapes, so that a step of either
does the work of the single model's step. Times are medians over intervals of 100 steps after the first three [ms].
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from several_gpus import INTERVAL, STEPS, milliseconds, train
from training_step import make_input

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
    content["training"] = {**training, "data_dict": {"a": data, "b": data}, "model_prob": {"a": 1, "b": 1}}
    return content


def time_case(case: str, data: Path, folder: Path) -> dict[str, Any]:
    """Return the times of a case with one model and with two branches."""
    kind, sizes = case.split(":")
    own = {"disp_freq": INTERVAL, "jsonl_file": "steps.jsonl"}
    single = make_input(kind, sizes, "HybridMuon", STEPS[kind], data, own)
    found: dict[str, Any] = {"case": case}
    for name, content in (("one model", single), ("two branches", in_branches(single))):
        place = folder / f"{case.replace(':', '_')}_{name.replace(' ', '_')}"
        log = train(place, content, 1)
        found[name] = round(milliseconds(place), 3)
        found[f"notes, {name}"] = [line for line in log.splitlines() if "graph" in line or "launched one" in line]
    found["ratio"] = round(found["two branches"] / found["one model"], 3)
    return found


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=CASES)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            results.append(time_case(case, args.data, Path(folder)))
            print(results[-1], flush=True)
            machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
