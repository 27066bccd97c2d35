"""What a training step on 8 to 1,024 GPUs would take: a computation from measured steps, bytes and bandwidths.

    python source/benchmarks/scaling.py [--network-gb 40] [--network-us 15] [--peer-us 2] [--gpus-per-node 8]

Nobody has run these numbers of GPUs. Every GPU takes the same batch as one GPU does. The step of N GPUs at a stage is
the step of the largest number of GPUs that was measured, plus what the formulas below give for N less what they give
for that number. `--check` computes the largest measured step from the next smaller number in the same way:

all-reduce      of all gradients, first within a node, then over nodes, where each GPU sends its part through an adapter
                of its own: 2 (g − 1)/g G/B + 2 (M − 1)/M G/(g b) + 2 log2(M) a. G: bytes of the gradients; g, M: GPUs
                of a node, and nodes; B: bandwidth in a node; b, a: bandwidth and delay of the network
gather, scatter half of that: FSDP2 scatters gradients once, and gathers parameters once (stage 2) or twice (stage 3)
exchange        of HybridMuon's plan at stages 1 to 3: the largest number of bytes that a rank sends, through the slower
                of both links, and for each of its exchanges a delay of every peer
orthogonalize   the measured time of all matrices, times the share of the busiest rank; at stage 0 all of it

B is measured: the step of several GPUs at stage 0, less that of one, is the time of their all-reduce with all that it
brings, and without what the backward pass hides. b, a and the delay of a peer are assumptions, which the options
change. Left out: ranks whose batches cost more, reading data, and that a step of 1,024 frames is not worth 1,024 steps
of one frame.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from training_step import make_input

from deepmd_muon.argcheck import normalize
from deepmd_muon.show.plan import optimizer_of, plan_of

INPUTS = Path(__file__).with_name("scaling_inputs.json")
GPUS = (8, 64, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between GPUs: an assumption.

    Attributes
    ----------
    gpus
        Of a node, each with an adapter of its own.
    bandwidth
        Of an adapter [bytes/s].
    delay
        Of a message between nodes [s].
    peer
        Time that one exchange takes for each peer [s].
    """

    gpus: int = 8
    bandwidth: float = 4e10
    delay: float = 1.5e-5
    peer: float = 2e-6


@dataclasses.dataclass(frozen=True)
class Step:
    """A model's bytes and measured times.

    Attributes
    ----------
    case
        MODEL:PRECISION-bFRAMES, as in `several_gpus.py`.
    size
        Bytes of all gradients.
    one
        Measured step of one GPU [s].
    several
        Measured steps of more GPUs, by their number and the stage [s].
    orthogonalization
        Measured time of all matrices on one GPU [s].
    network
        The links.
    """

    case: str
    size: int
    one: float
    several: dict[int, dict[int, float]]
    orthogonalization: float
    network: Network

    @property
    def in_node(self) -> float:
        """Bandwidth within a node, from one GPU and the largest number at stage 0 [bytes/s]."""
        gpus = self.measured(0)
        return 2 * (gpus - 1) / gpus * self.size / (self.several[gpus][0] - self.one)

    def measured(self, stage: int) -> int:
        """Return the largest number of GPUs that was measured at a stage."""
        return max(gpus for gpus, steps in self.several.items() if stage in steps)

    def all_reduce(self, gpus: int) -> float:
        """Return the time of an all-reduce of the gradients [s]."""
        local = min(gpus, self.network.gpus)
        nodes = gpus // local
        seconds = 2 * (local - 1) / local * self.size / self.in_node
        if nodes > 1:
            seconds += 2 * (nodes - 1) / nodes * self.size / local / self.network.bandwidth
            seconds += 2 * math.log2(nodes) * self.network.delay
        return seconds

    def optimizer(self, gpus: int, stage: int) -> float:
        """Return the time of orthogonalizations and of the exchanges for them [s]."""
        if stage == 0:
            return self.orthogonalization
        plan = plan_of(_input(self.case), gpus, stage)
        link = (
            self.in_node if gpus <= self.network.gpus else min(self.in_node, self.network.bandwidth)
        )
        seconds = 0.0
        # Replicas that repeat the work have all of it each.
        whole = (
            sum(sum(d.work.values()) / (1 if d.spread else len(d.ranks)) for d in plan.domains)
            or math.inf
        )
        for domain in plan.domains:
            exchanges = sum(map(len, domain.crossing_buckets().values())) + bool(
                domain.gathered_bytes
            )
            seconds += (
                max(domain.bytes_sent(plan.settings).values()) / link
                + exchanges * (gpus - 1) * self.network.peer
            )
            seconds += max(domain.work.values()) / whole * self.orthogonalization
        return seconds

    def formula(self, gpus: int, stage: int) -> float:
        """Return all that depends on the number of GPUs [s]."""
        exchanged = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5}[stage]
        return exchanged * self.all_reduce(gpus) + self.optimizer(gpus, stage)

    def seconds(self, gpus: int, stage: int) -> float:
        """Return the time of a step; measured where it can be, otherwise computed [s]."""
        steps = self.several.get(gpus, {})
        if stage in steps:
            return steps[stage]
        base = self.measured(stage)
        return self.several[base][stage] + self.formula(gpus, stage) - self.formula(base, stage)

    def without_largest(self) -> Step:
        """Return the same step as if the largest number of GPUs had not been measured."""
        largest = max(self.several)
        rest = {gpus: steps for gpus, steps in self.several.items() if gpus != largest}
        return dataclasses.replace(self, several=rest)


def _input(case: str) -> Any:
    kind, sizes = case.split(":")
    return normalize(make_input(kind, sizes, "HybridMuon", 1000, Path("water"), {}))


def read_steps(network: Network, path: Path = INPUTS) -> list[Step]:
    """Return the measured models; their bytes are counted from their parameters."""
    steps = []
    for case, times in json.loads(path.read_text())["ms a step"].items():
        parameters = [
            p for group in optimizer_of(_input(case)).param_groups for p in group["params"]
        ]
        several = {
            int(gpus): {int(stage): 1e-3 * step["ms"] for stage, step in of_stage.items()}
            for gpus, of_stage in times["several"].items()
        }
        size = sum(p.numel() * p.element_size() for p in parameters)
        steps.append(
            Step(
                case=case,
                size=size,
                one=1e-3 * times["one"]["ms"],
                several=several,
                orthogonalization=1e-3 * times["orthogonalization"]["ms"],
                network=network,
            )
        )
    return steps


def table(steps: list[Step]) -> str:
    """Return milliseconds a step and the share of linear scaling, as Markdown."""
    numbers = sorted({gpus for step in steps for gpus in step.several})
    heads = ["model", "stage", "1 GPU, measured", *(f"{gpus}, measured" for gpus in numbers)]
    heads += [f"{gpus:,}, computed" for gpus in GPUS]
    rows = [heads, ["---"] * len(heads)]
    for step in steps:
        for stage in step.several[numbers[0]]:
            times = [step.several.get(gpus, {}).get(stage) for gpus in numbers]
            times += [step.seconds(gpus, stage) for gpus in GPUS]
            shown = ["–" if t is None else f"{1e3 * t:.3g} ({step.one / t:.0%})" for t in times]
            rows.append([step.case, str(stage), f"{1e3 * step.one:.3g}", *shown])
    return as_markdown(rows)


def check(steps: list[Step]) -> str:
    """Return the largest measured steps next to those computed from fewer GPUs, as Markdown."""
    heads = ["model", "stage", "GPUs", "from", "computed", "measured", "computed / measured"]
    rows = [heads, ["---"] * len(heads)]
    for step in steps:
        if len(step.several) < 2:
            continue
        largest = max(step.several)
        fewer = step.without_largest()
        for stage, seconds in step.several[largest].items():
            computed = fewer.seconds(largest, stage)
            base = str(fewer.measured(stage))
            numbers = [f"{1e3 * computed:.3g}", f"{1e3 * seconds:.3g}", f"{computed / seconds:.3f}"]
            rows.append([step.case, str(stage), str(largest), base, *numbers])
    return as_markdown(rows)


def as_markdown(rows: list[list[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--network-gb", type=float, default=40.0, help="bandwidth of an adapter [GB/s]"
    )
    parser.add_argument(
        "--network-us", type=float, default=15.0, help="delay of a message between nodes [µs]"
    )
    parser.add_argument(
        "--peer-us", type=float, default=2.0, help="time of an exchange for each peer [µs]"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument(
        "--check", action="store_true", help="compute the largest measured number of GPUs too"
    )
    given = parser.parse_args()
    network = Network(
        given.gpus_per_node, 1e9 * given.network_gb, 1e-6 * given.network_us, 1e-6 * given.peer_us
    )
    steps = read_steps(network)
    for step in steps:
        print(
            f"{step.case}: {step.size / 1e6:.2f} MB of gradients, {step.in_node / 1e9:.0f} GB/s between GPUs"
        )
    print(table(steps))
    if given.check:
        print(f"\n{check(steps)}")


if __name__ == "__main__":
    main()
