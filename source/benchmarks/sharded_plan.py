"""Bytes on the wire and critical path of the sharded step, from the plan alone, on clusters that one does not have.

    python source/benchmarks/sharded_plan.py [--out FILE.md] [--quick]

Both are maxima over ranks, relative to the lower bound of a step whose state is sharded: every element travels to an
owner and back once, 2 (N/W) (W − 1)/W elements leave each rank, and work is divided evenly. Every scheme is counted
with the same work per matrix, 4 m² n + 2 m³ operations an iteration, and elements of the same size both ways; ours is
what the plan says byte for byte, headers included. The other schemes are counted from their published descriptions:

everyone    all ranks gather every matrix and orthogonalize it (state sharded)
by shape    matrices of one shape in batches of W, the last one padded (dion)
in turn     matrices sorted by work and dealt out in turn (Motif)
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.sharded import (
    Layout,
    Plan,
    PlannedParameter,
    ShardedSettings,
    ShardPlacement,
    make_plan,
)

STEPS = 10
ELEMENT = 4  # bytes

Shape = tuple[int, int]


class Case(NamedTuple):
    """A model on a cluster: matrices of every layer, experts apart, and how they are laid out."""

    name: str
    ranks: int
    dense: list[Shape]
    experts: tuple[Shape, ...] = ()
    number: int = 0  # experts of each shape
    expert_ranks: int = (
        1  # ranks over which experts are spread; the rest of the ranks cut each of them
    )


class Row(NamedTuple):
    """Largest over ranks: elements sent and operations."""

    scheme: str
    sent: float
    work: float


def llama(layers: int, width: int, key_value: int, hidden: int) -> list[Shape]:
    """Return the matrices of a Llama model without embedding and head."""
    return [
        *[(width, width), (key_value, width), (key_value, width), (width, width)],
        *[(hidden, width), (hidden, width), (width, hidden)],
    ] * layers


def dpa_like() -> list[Shape]:
    """Return 232 matrices as a DPA model with 16 layers has them, 5.5 M weights."""
    layer = [(128, 128)] * 6 + [(256, 128)] * 3 + [(128, 256)] * 2 + [(64, 128)] * 2 + [(384, 128)]
    return (
        layer * 16
        + [(240, 240)] * 2
        + [(256, 240), (240, 128), (128, 384), (100, 16), (50, 100), (25, 50)]
    )


def cases(*, quick: bool) -> Iterator[Case]:
    """Yield the table's rows; `quick` leaves out those that take more than a second."""
    few = [(1024, 1024)] * 6 + [(4096, 1024)] * 2 + [(1024, 4096)]
    yield Case("9 matrices", 8, few)
    for ranks in (4, 8):
        yield Case("DPA-like, 5.5 M", ranks, dpa_like())
    for ranks in (8, 64, 256, 1024) if not quick else (8, 64):
        yield Case("Llama-8B", ranks, llama(32, 4096, 1024, 14336))
    for ranks in (64, 256, 1024) if not quick else (64,):
        yield Case("Llama-70B", ranks, llama(80, 8192, 1024, 28672))
    attention = [(7168, 1536), (1536, 7168)] * 4
    for ranks in (64, 256, 1024) if not quick else ():
        experts = ((2048, 7168), (2048, 7168), (7168, 2048)) * 16
        yield Case("MoE, 256 experts", ranks, attention * 16, experts, 256, min(ranks, 256))


def operations(shape: Shape) -> float:
    """Return the work of one matrix in the standard form."""
    m, n = min(shape), max(shape)
    return STEPS * (4 * m * m * n + 2 * m**3)


def plan_of(case: Case) -> Plan:
    """Plan a case: dense matrices FSDP over all ranks; experts spread, and cut on their rows where ranks remain."""
    ranks = tuple(range(case.ranks))
    fsdp = Layout((case.ranks,), ranks, (ShardPlacement(0),))
    cutting = case.ranks // case.expert_ranks
    spread = Layout((cutting, case.expert_ranks), ranks, (ShardPlacement(1), ShardPlacement(0)))
    options = {"steps": STEPS, "gram": False}
    parameters = [
        PlannedParameter(f"dense{i:04}", shape, MatrixView(1, *shape), fsdp, **options)
        for i, shape in enumerate(case.dense)
    ]
    parameters += [
        PlannedParameter(
            f"expert{i:04}",
            (case.number, *shape),
            MatrixView(case.number, *shape),
            spread,
            **options,
        )
        for i, shape in enumerate(case.experts)
    ]
    return make_plan(parameters, ShardedSettings())


def rivals(case: Case) -> list[Row]:
    """Count the other schemes on the dense matrices."""
    ranks, shapes = case.ranks, case.dense
    apart = (ranks - 1) / ranks
    total = sum(m * n for m, n in shapes)
    rows = [Row("everyone", total * apart, sum(map(operations, shapes)))]
    sent = work = 0.0
    for (m, n), count in Counter(shapes).items():
        batches, height = -(-count // ranks), -(-m // ranks) * ranks
        sent += 2 * batches * height * n * apart
        work += batches * operations((m, n))
    rows.append(Row("by shape", sent, work))
    loads, sizes = [0.0] * ranks, [0] * ranks
    for i, (m, n) in enumerate(sorted(shapes, key=operations, reverse=True)):
        loads[i % ranks] += operations((m, n))
        sizes[i % ranks] += m * n
    rows.append(Row("in turn", total / ranks * apart + max(sizes) * apart, max(loads)))
    return rows


def bound(case: Case) -> tuple[float, float]:
    """Return the least elements a rank must send and its even share of the work."""
    dense = sum(m * n for m, n in case.dense)
    experts = case.number * sum(m * n for m, n in case.experts)
    cutting = case.ranks // case.expert_ranks
    sent = 2 * dense / case.ranks * (case.ranks - 1) / case.ranks
    sent += 2 * experts / case.ranks * (cutting - 1) / cutting
    work = sum(map(operations, case.dense)) + case.number * sum(map(operations, case.experts))
    return sent, work / case.ranks


def rows_of(case: Case) -> Iterator[str]:
    """Yield the table's lines for one case."""
    least_sent, least_work = bound(case)
    start = time.perf_counter()
    plan = plan_of(case)
    seconds = time.perf_counter() - start
    (domain,) = plan.domains
    ours = Row(
        "**ours**",
        max(domain.bytes_sent(plan.settings).values()) / ELEMENT,
        max(domain.work.values()),
    )
    # What the buckets cost where nothing overlaps: each one waits for its busiest owner.
    busiest: Counter[tuple[int, int]] = Counter()
    for job in domain.jobs:
        if job.bucket is not None:
            p = plan.parameters[job.parameter]
            busiest[job.bucket, job.owner] += int(operations((p.view.rows, p.view.columns)))
    in_turn = sum(
        max(work for (b, _), work in busiest.items() if b == bucket)
        for bucket in {b for b, _ in busiest}
    )
    others = rivals(case) if not case.experts else []
    for row in [*others, ours]:
        mine = row is ours
        yield " | ".join(
            [
                f"| {case.name}",
                f"{case.ranks}",
                f"{len({(j.parameter, j.block) for j in domain.jobs})}",
                row.scheme,
                f"{row.sent / least_sent:.3f}" if least_sent else "nothing travels",
                f"{row.work / least_work:.3f}",
                f"{ELEMENT * row.sent / 2**20:.1f}",
                f"{domain.n_buckets}" if mine else "",
                f"{in_turn / least_work:.3f}" if mine and not case.experts else "",
                f"{seconds:.2f} |" if mine else "|",
            ]
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the table here too")
    parser.add_argument(
        "--quick", action="store_true", help="only cases that take less than a second"
    )
    arguments = parser.parse_args()
    lines = [
        "| model | ranks | matrices | scheme | bytes / bound | work / bound | MiB sent by a rank | buckets | work if "
        "buckets wait | s to plan |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for case in cases(quick=arguments.quick):
        for line in rows_of(case):
            lines.append(line)
            print(line, flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
