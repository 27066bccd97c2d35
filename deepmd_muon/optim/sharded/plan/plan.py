"""The plan of one rank: its domains, the statements that ranks compare, and a description."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence

from deepmd_muon.optim.config import ShardedSettings
from deepmd_muon.optim.sharded.plan.domain import Domain, PlannedParameter

# Ranks with different versions refuse to step together. Raise it when the same parameters get other
# jobs, buckets or messages.
VERSION = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rank does what in the step of this rank's parameters of the Muon route.

    Attributes
    ----------
    parameters
        In the optimizer's order. The numbers of parameters in jobs and domains are positions here.
    settings
        Settings of the sharded step.
    domains
        The domains that this rank belongs to, those of more ranks first.
    """

    parameters: tuple[PlannedParameter, ...]
    settings: ShardedSettings
    domains: tuple[Domain, ...]

    def statements(self, domain: Domain) -> list[str]:
        """Return statements that must be equal on all ranks of a domain."""
        return [
            f"plan version {VERSION}",
            str(self.settings),
            f"ranks {domain.ranks}, spread {domain.spread}, gathered {domain.gathered_bytes}",
            *(str(self.parameters[i]) for i in domain.parameters),
            *(
                f"{self.parameters[job.parameter].name} block {job.block}: owner {job.owner}, "
                f"bucket {job.bucket}"
                for job in domain.jobs
            ),
        ]

    def digest(self, domain: Domain) -> bytes:
        """Return the SHA-256 of `statements`."""
        return hashlib.sha256("\n".join(self.statements(domain)).encode()).digest()

    def describe(self, *, owners: bool = False) -> str:
        """Return the plan as text.

        It has balance, bytes and collectives of every domain, and with `owners` every block. On one
        process, it has the number and work of the matrices of each shape instead.
        """
        if len(self.domains) == 1 and len(self.domains[0].ranks) == 1 and not owners:
            return self._describe_one_process()
        lines = []
        for number, domain in enumerate(self.domains):
            lines.append(f"domain {number}: {self._describe_domain(domain)}")
            if owners:
                lines += self._describe_owners(domain)
        if not lines:
            return "no matrices to orthogonalize"
        # On all ranks, but only in the domains of this rank: it does not know others.
        work = sum(sum(domain.work.values()) for domain in self.domains)
        sent = sum(sum(domain.bytes_sent(self.settings).values()) for domain in self.domains)
        lines.append(f"a step on all ranks: {work:.4g} FLOPs, {sent:.4g} bytes sent")
        return "\n".join(lines)

    def _describe_one_process(self) -> str:
        """Return the number of matrices and the FLOPs of each shape, the most expensive first."""
        flops: Counter[tuple[int, int]] = Counter()
        count: Counter[tuple[int, int]] = Counter()
        for p in self.parameters:
            for shape, work in zip(p.view.block_shapes, p.block_flops(), strict=True):
                count[shape] += p.view.batch
                flops[shape] += p.view.batch * work
        lines = [f"one process: {len(self.parameters)} parameters, {sum(count.values())} matrices"]
        for shape, work in flops.most_common():
            lines.append(f"  {count[shape]} of {shape[0]}x{shape[1]}: {work:.4g} FLOPs")
        lines.append(f"a step: {sum(flops.values()):.4g} FLOPs")
        return "\n".join(lines)

    def _describe_domain(self, domain: Domain) -> str:
        """Return the sizes, collectives, balance and digest of a domain, in five lines."""
        parameters = [self.parameters[i] for i in domain.parameters]
        layouts = sorted({str(p.layout) for p in parameters})
        n_blocks = len({(job.parameter, job.block) for job in domain.jobs})
        n_staying = sum(job.bucket is None for job in domain.jobs)
        crossing = domain.crossing_buckets()
        replicas = ""
        if any(p.has_replicas for p in parameters):
            replicas = f", replicas {'share' if domain.spread else 'repeat'} the work"
        momenta = ", 1 for the momenta" if domain.gathers_momenta else ""
        bytes_sent = domain.bytes_sent(self.settings)
        return (
            f"{len(domain.ranks)} ranks; {len(parameters)} parameters, {n_blocks} matrices on "
            f"{'; '.join(layouts)}{replicas}; {n_staying} jobs stay, "
            f"{len(domain.jobs) - n_staying} travel in {domain.n_buckets} buckets\n"
            f"  collectives a step: {len(crossing['gather'])} to the owners, "
            f"{len(crossing['return'])} back{momenta}\n"
            f"  FLOPs a rank: {_mean_and_extremes(list(domain.work.values()))}\n"
            f"  bytes sent a rank: {_mean_and_extremes(list(bytes_sent.values()))}\n"
            f"  digest {self.digest(domain).hex()[:16]}"
        )

    def _describe_owners(self, domain: Domain) -> list[str]:
        """Return a line for each job: its owner, block and bucket."""
        lines = []
        for job in domain.jobs:
            p = self.parameters[job.parameter]
            rows, columns = p.view.block_shapes[job.block % len(p.view.block_shapes)]
            way = "stays" if job.bucket is None else f"bucket {job.bucket}"
            lines.append(
                f"  rank {job.owner}: {p.name} block {job.block} ({rows}x{columns}), {way}"
            )
        return lines


def _mean_and_extremes(values: Sequence[int]) -> str:
    mean = sum(values) / len(values)
    if not mean:
        return "none"
    largest = max(values)
    return (
        f"mean {mean:.4g}, largest {largest:.4g}, least {min(values):.4g}; "
        f"largest / mean {largest / mean:.3f}"
    )
