"""Print the tables of two pages on several GPUs and draw their picture, from results of `several_gpus.py`.

python source/benchmarks/show_several_gpus.py doc/benchmarks/raw/FILE.json … --picture doc/images/weak_scaling.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Times of a step on 4 and on 8 GPUs over that on one, at stage 0: what we want at most.
GOALS = {
    "se_e2_a:f64-b1": {4: 1.15, 8: 1.25},
    "se_e2_a:f64-b8": {4: 1.08, 8: 1.10},
    "se_e2_a:f64-b32": {4: 1.08, 8: 1.10},
    "mini:f32-b1": {4: 1.12},
}
GOALS_OF_OTHERS = {4: 1.08, 8: 1.10}
LAYOUTS = {
    "ddp": "replicas (DDP)",
    "zero1": "replicas, state in parts (ZeRO-1)",
    "fsdp": "FSDP2",
    "hsdp": "HSDP, two groups",
    "tp": "FSDP2 × TP 2",
    "ep": "experts whole (EP), the rest FSDP2",
}
NAMES = {"se_e2_a": "se_e2_a", "dpa1": "DPA-1", "dpa3": "DPA-3", "mini": "DPA-4 Mini"}


def title(case: str) -> str:
    """Return the name of a case such as `dpa3:f32-b8`."""
    kind, sizes = case.split(":")
    precision, frames = sizes.split("-b")
    return f"{NAMES[kind]} float{precision[1:]}, batch {frames}"


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the results of several calls, each with its card."""
    results = []
    for path in paths:
        content = json.loads(path.read_text())
        card = re.sub(r".*NVIDIA (\w+).*", r"\1", content["machine"])
        results += [{"card": card, **entry} for entry in content["results"]]
    return {"results": results}


def entries(content: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    """Return the results of a part by the rest of their names."""
    return {
        entry["what"].partition(" ")[2]: entry
        for entry in content["results"]
        if entry["what"].partition(" ")[0] == part
    }


def widths_of(content: dict[str, Any]) -> list[int]:
    """Return the numbers of GPUs above one."""
    found = {
        int(key.partition(" GPUs")[0])
        for entry in entries(content, "training").values()
        for key in entry
        if " GPUs, stage" in key
    }
    return sorted(found)


def named(content: dict[str, Any], case: str) -> str:
    """Return the title of a case, with its card if there are several."""
    cards = {entry.get("card") for entry in content["results"]}
    card = entries(content, "training")[case].get("card")
    return title(case) if len(cards) == 1 else f"{title(case)}, {card}"


def training_table(content: dict[str, Any]) -> str:
    """Return milliseconds a step and ratios to one GPU, by case and stage."""
    widths = widths_of(content)
    most = widths[-1]
    heads = ["case", "stage", "1 GPU", *(f"{width} GPUs" for width in widths)]
    waiting = entries(content, "waiting")
    heads += ["goal", f"atoms/s and GPU, 1 / {most}"]
    heads += [f"waiting on {most}"] if waiting else []
    rows = [heads, ["---"] * len(heads)]
    for case, entry in entries(content, "training").items():
        for stage in (0, 1):
            times = [entry.get(f"{width} GPUs, stage {stage}") for width in widths]
            if not any(times):
                continue
            single = entry["1 GPU, ms"]
            goal = GOALS.get(case, GOALS_OF_OTHERS).get(most) if stage == 0 else None
            on_most = f"{times[-1]['atoms/s and GPU']:,}" if times[-1] else "–"
            share = waiting.get(f"{case} stage {stage}", {}).get("share")
            rows.append(
                [
                    named(content, case),
                    str(stage),
                    span(single),
                    *("–" if t is None else f"{t['ms']:.3g} ({t['ratio']:.2f})" for t in times),
                    "–" if goal is None else f"{goal:.2f}",
                    f"{entry['1 GPU, atoms/s']:,} / {on_most}",
                ]
            )
            if waiting:
                rows[-1].append("–" if share is None else f"{share:.1%}")
    return as_markdown(rows)


def span(times: list[float]) -> str:
    """Return the least and the largest time."""
    least, largest = (f"{time:.3g}" for time in (min(times), max(times)))
    return least if least == largest else f"{least}–{largest}"


def optimizer_table(content: dict[str, Any]) -> str:
    """Return milliseconds of the optimizer step, by set and layout."""
    columns = ["AdamW, fused", "AdamW, fused, captured", "HybridMuon", "HybridMuon, captured"]
    peers = ["torch Muon + AdamW", "dion Muon + AdamW"]
    heads = ["set", "layout", *columns, "exposed: eager", "captured", "differs", *peers]
    rows = [heads, ["---"] * len(heads)]
    others = entries(content, "peers")
    for name, entry in entries(content, "optimizer").items():
        layout, kind = name.split()
        steps = {step["optimizer"]: step for step in entry.get("results", [])}
        if not steps:
            continue
        peer_steps = {s["optimizer"]: s for s in others.get(name, {}).get("results", [])}
        cells = [kind, LAYOUTS[layout]]
        cells += [milliseconds(steps.get(column), "gpu_ms") for column in columns]
        cells += [milliseconds(steps.get(column), "exposed_ms") for column in columns[2:]]
        cells += [f"{next(iter(steps.values()))['disagreement']:.0e}"]
        cells += [milliseconds(peer_steps.get(peer), "gpu_ms") for peer in peers]
        rows.append(cells)
    return as_markdown(rows)


def milliseconds(step: dict[str, Any] | None, key: str) -> str:
    """Return a time with three digits; a dash if the step did not run."""
    return "–" if step is None or math.isnan(step[key]) else f"{step[key]:.3g}"


def as_markdown(rows: list[list[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(content: dict[str, Any], file: Path) -> None:
    """Draw the share of linear scaling against the number of GPUs."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    widths = widths_of(content)
    figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
    for number, (case, entry) in enumerate(entries(content, "training").items()):
        for stage, line in ((0, "-o"), (1, "--s")):
            steps = {width: entry.get(f"{width} GPUs, stage {stage}") for width in widths}
            shares = {width: 100 / step["ratio"] for width, step in steps.items() if step}
            if not shares:
                continue
            label = named(content, case) if stage == 0 else None
            axes.plot(
                [1, *shares], [100, *shares.values()], line, color=f"C{number}", label=label, ms=4
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, *widths], [str(width) for width in (1, *widths)])
    axes.set(xlabel="GPUs", ylabel="time of one GPU / time of a step [%]", ylim=(None, 102))
    axes.axhline(100, color="gray", linewidth=0.5)
    figure.legend(
        loc="outside right center",
        frameon=False,
        fontsize=8,
        title="stage 0 solid, stage 1 dashed",
        title_fontsize=8,
    )
    figure.savefig(file, dpi=110)


def main() -> None:
    """Print the tables; draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    content = read(options.results)
    print(f"{training_table(content)}\n\n{optimizer_table(content)}")
    if options.picture:
        draw(content, options.picture)


if __name__ == "__main__":
    main()
