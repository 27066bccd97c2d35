"""A plan as a page of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepmd_muon.optim.sharded.plan import Domain, Plan


def describe(plan: Plan, *, owners: bool = False) -> str:
    """Return balance, bytes and collectives of every domain; with `owners` also every block's owner."""
    lines = []
    if plan.settings.exchange == "reference" and plan.domains:
        lines.append("exchange 'reference' gathers everything on every rank; 'owners' would do this:")
    for number, domain in enumerate(plan.domains):
        lines += [f"domain {number}: {_domain(plan, domain)}", *_costs(plan, domain)]
        if owners:
            lines += _owners(plan, domain)
    return "\n".join(lines) or "no parameter of the Muon route is sharded or replicated"


def _domain(plan: Plan, domain: Domain) -> str:
    blocks = len({(job.parameter, job.block) for job in domain.jobs})
    staying = sum(job.bucket is None for job in domain.jobs)
    layouts = sorted({str(plan.parameters[i].layout) for i in domain.parameters})
    shared = any(len(plan.parameters[i].layout.replicas()) > 1 for i in domain.parameters)
    replicas = f", replicas {'share' if domain.spread else 'repeat'} the work" if shared else ""
    return (
        f"{len(domain.ranks)} ranks; {len(domain.parameters)} parameters, {blocks} matrices on {'; '.join(layouts)}"
        f"{replicas}; {staying} jobs stay, {len(domain.jobs) - staying} travel in {domain.buckets} buckets"
    )


def _costs(plan: Plan, domain: Domain) -> list[str]:
    exchanges = domain.exchanges()
    sent = domain.sent(plan.settings)
    return [
        f"  collectives a step: {len(exchanges['gather'])} to the owners, {len(exchanges['return'])} back",
        f"  FLOPs a rank: {_spread(list(domain.work.values()))}",
        f"  bytes sent a rank: {_spread(list(sent.values()))}",
        f"  digest {plan.digest(domain).hex()[:16]}",
    ]


def _spread(values: Sequence[int]) -> str:
    mean = sum(values) / len(values)
    if not mean:
        return "none"
    most = max(values)
    return f"mean {mean:.4g}, largest {most:.4g}, least {min(values):.4g}; largest / mean {most / mean:.3f}"


def _owners(plan: Plan, domain: Domain) -> list[str]:
    lines = []
    for job in domain.jobs:
        p = plan.parameters[job.parameter]
        rows, columns = p.view.block_shapes[job.block % len(p.view.block_shapes)]
        way = "stays" if job.bucket is None else f"bucket {job.bucket}"
        lines.append(f"  rank {job.owner}: {p.name} block {job.block} ({rows}x{columns}), {way}")
    return lines
