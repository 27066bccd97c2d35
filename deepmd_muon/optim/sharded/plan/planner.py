"""How a plan is made.

`make_plan` takes these steps:

1. Parameters on the same ranks form a domain, those with float64 updates (8 bytes) apart from the
   others (4 bytes). Domains are planned one after the other, those of more ranks first.
2. The blocks of a domain get owners, longest processing time first (R. L. Graham, SIAM J. Appl.
   Math. 17, 416, 1969): in decreasing order of work, each goes to the rank with the least work so
   far; in a tie, to a rank with a piece of it, then to the one with fewer bytes, then to the lower
   rank. A block that is whole on one rank of each replica is owned by one of these ranks
   (`BlockHolders.assign`).
3. Jobs with all pieces on their owner stay. The others travel in buckets; each bucket takes at most
   one all-to-all to the owners and one back.
4. Replicas share the work or repeat it. With `replication` 'auto', steps 2 and 3 are taken for both
   if there are replicas and both ways are possible, and the faster way is kept. Replicas that
   repeat the work but have a part of the momenta each gather the momenta before the step; then all
   jobs stay.

All ranks of a domain must make the same plan of it, although each rank plans only the parameters
that it has. Two of four ranks, for example, may share a domain that the others do not know. So the
choices for a domain depend only on this domain, and on earlier domains that contain all its ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from deepmd_muon.optim.config import ShardedSettings
from deepmd_muon.optim.errors import ShardingError
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import RouteEntry
from deepmd_muon.optim.routing.views import Shape
from deepmd_muon.optim.sharded.layout import Layout, RankSet, held_interval, replicated
from deepmd_muon.optim.sharded.owners import Balance, BlockHolders, holders_of_blocks
from deepmd_muon.optim.sharded.plan.domain import Domain, Job, PlannedParameter, rule_values
from deepmd_muon.optim.sharded.plan.plan import Plan

# Rates from which `replication` 'auto' predicts times.
FLOPS_PER_SECOND = 1e14  # of one rank's orthogonalizations
BYTES_PER_SECOND = 2e10  # that one rank sends
SECONDS_PER_COLLECTIVE = 5e-5


def make_plan(
    parameters: Sequence[PlannedParameter], settings: ShardedSettings | None = None
) -> Plan:
    """Plan the step of these parameters.

    Parameters
    ----------
    parameters
        Those that this rank has, in an order that is the same on all ranks; names are unique.
    settings
        Settings of the sharded step.

    Returns
    -------
    Plan
        Identical on all ranks with identical arguments.

    Raises
    ------
    ShardingError
        When the sets of ranks of two parameters overlap and neither contains the other.
    """
    settings = settings or ShardedSettings()
    _refuse_overlaps(parameters)
    members: dict[tuple[RankSet, int], dict[int, PlannedParameter]] = defaultdict(dict)
    for i, p in enumerate(parameters):
        members[p.layout.sorted_ranks, p.itemsize][i] = p
    domains: list[Domain] = []
    # Earlier domains count if they contain all ranks of this domain: then all its ranks know them.
    # Domains on the same ranks keep the order of their first parameters.
    for ranks, itemsize in sorted(members, key=lambda kind: -len(kind[0])):
        earlier_work = [domain.work for domain in domains if set(ranks) <= set(domain.ranks)]
        unplanned = _UnplannedDomain(
            ranks=ranks,
            itemsize=itemsize,
            parameters=members[ranks, itemsize],
            earlier_work={rank: sum(work[rank] for work in earlier_work) for rank in ranks},
        )
        domains.append(_plan_domain(unplanned, settings))
    return Plan(tuple(parameters), settings, tuple(domains))


def plan_from_routes(
    routes: Iterable[RouteEntry],
    layout: Layout,
    settings: ShardedSettings | None = None,
    **options: Any,
) -> Plan:
    """Plan a model with one layout of all parameters, such as for a cluster not yet available.

    Parameters
    ----------
    routes
        Routes of its parameters, e.g. ``optimizer.routing``; those of the Muon route are planned.
    layout
        The layout of every parameter.
    settings
        Settings of the sharded step.
    **options
        `itemsize`, `rules`, `steps` and `gram` of `PlannedParameter`.
    """
    planned = [
        PlannedParameter(entry.name, entry.shape, entry.view, layout, **options)
        for entry in routes
        if entry.view is not None and entry.route == "muon"
    ]
    return make_plan(planned, settings)


def plan_of_one_process(groups: Sequence[Group], settings: ShardedSettings) -> Plan:
    """Return the plan of a process that orthogonalizes every matrix itself; it sends nothing."""
    layout = replicated((0,))
    planned = [
        PlannedParameter.of(entry, p.dtype, group.settings, layout)
        for group in groups
        for p, entry in group.routed
        if entry.route == "muon"
    ]
    return make_plan(planned, settings)


def _refuse_overlaps(parameters: Sequence[PlannedParameter]) -> None:
    """Raise ShardingError unless the sets of ranks that hold parameters are nested or disjoint.

    Ranks of sets that only overlap would start their collectives in different orders.
    """
    names: dict[frozenset[int], str] = {}
    for parameter in parameters:
        names.setdefault(frozenset(parameter.layout.ranks), parameter.name)
    for (ranks, name), (other_ranks, other_name) in itertools.combinations(names.items(), 2):
        if ranks & other_ranks and not (ranks <= other_ranks or other_ranks <= ranks):
            raise ShardingError(
                f"{name!r} is on ranks {sorted(ranks)}, {other_name!r} on ranks "
                f"{sorted(other_ranks)}: "
                "sets of ranks that hold parameters must be nested or disjoint; give both a mesh "
                "of all these ranks"
            )


# ----- one domain: do replicas share the work or repeat it? --------------------------------------


class _UnplannedDomain(NamedTuple):
    """The parameters of a domain, before their blocks have owners.

    Attributes
    ----------
    ranks, itemsize
        As in `Domain`.
    parameters
        By position in the plan.
    earlier_work
        By rank, its work in the domains before [FLOPs].
    """

    ranks: RankSet
    itemsize: int
    parameters: Mapping[int, PlannedParameter]
    earlier_work: Mapping[int, int]


def _plan_domain(unplanned: _UnplannedDomain, settings: ShardedSettings) -> Domain:
    """Plan a domain in every way to try, and return the fastest."""
    domains = [
        _assign_owners(unplanned, settings, spread=spread)
        for spread in _ways_to_try(unplanned, settings)
    ]
    if len(domains) == 1:  # predicting takes time
        return domains[0]
    # In a tie `min` returns the first.
    return min(domains, key=lambda domain: _predicted_seconds(domain, settings))


def _ways_to_try(unplanned: _UnplannedDomain, settings: ShardedSettings) -> list[bool]:
    """Return the values of `spread` to try: True to share the work, False to repeat it.

    Replicas with momenta in parts that cannot be gathered share the work under every `replication`.
    """
    replicated_parameters = [p for p in unplanned.parameters.values() if p.has_replicas]
    # To repeat the work, replicas need whole momenta.
    in_parts = any(p.state_layout for p in replicated_parameters)
    if in_parts and not _can_gather_momenta(unplanned, settings):
        return [True]
    if settings.replication == "auto":
        # Without replicas both ways are alike.
        return [True, False] if replicated_parameters else [True]
    return [settings.replication == "spread"]


def _can_gather_momenta(unplanned: _UnplannedDomain, settings: ShardedSettings) -> bool:
    """Return whether replicas may gather the momenta of a domain before the step.

    All momenta must be in parts, and no other state may be. They must fit a bucket. `gather_dtype`
    must be 'full', because the gathered momenta themselves advance: rounding would accumulate.
    """
    parameters = unplanned.parameters.values()
    n_bytes = sum(math.prod(p.shape) * p.itemsize for p in parameters)
    fits = settings.gather_dtype == "full" and n_bytes <= settings.bucket_bytes
    return fits and all(
        p.has_replicas
        and p.state_layout is not None
        and not p.masters
        and not rule_values(p.rules).line_tensors
        for p in parameters
    )


def _predicted_seconds(domain: Domain, settings: ShardedSettings) -> float:
    """Predict the time of one step, without overlap [s]."""
    n_collectives = sum(len(numbers) for numbers in domain.crossing_buckets().values())
    n_collectives += domain.gathers_momenta
    return (
        max(domain.work.values()) / FLOPS_PER_SECOND
        + max(domain.bytes_sent(settings).values()) / BYTES_PER_SECOND
        + n_collectives * SECONDS_PER_COLLECTIVE
    )


# ----- one domain: owners and buckets ------------------------------------------------------------


def _assign_owners(
    unplanned: _UnplannedDomain, settings: ShardedSettings, *, spread: bool
) -> Domain:
    """Choose the owners of all blocks of a domain, and form its buckets."""
    itemsize = unplanned.itemsize
    blocks: list[_Block] = []
    gathered_bytes = 0
    # A single rank has nothing to gather.
    may_gather = not spread and len(unplanned.ranks) > 1
    for i, p in unplanned.parameters.items():
        if may_gather and p.state_layout is not None:
            # Replicas gather the momenta and repeat the work, so the jobs are those of whole
            # momenta. `Plan.parameters` keep the layout.
            gathered_bytes += itemsize * _elements_of_first_rank(p.shape, p.state_layout)
            blocks += _blocks_of(dataclasses.replace(p, state_layout=None), i, itemsize)
        else:
            blocks += _blocks_of(p, i, itemsize)
    blocks.sort(key=lambda block: (-block.work, block.name, block.number))

    balance = Balance(unplanned.earlier_work)
    buckets = _Buckets(settings.bucket_bytes)
    jobs: list[Job] = []
    for block in blocks:
        # One assignment; if replicas repeat the work, one for each replica.
        assignments = block.holders.assign(
            balance, work=block.work, size=block.n_bytes, spread=spread
        )
        for owner, sources, destinations in assignments:
            bucket = None
            if any(rank != owner for rank in (*sources, *destinations)):
                # The owner gathers the block once, and returns a copy to each replica it serves.
                returned_bytes = sum(destinations.values()) * itemsize
                bucket = buckets.add(owner, max(block.n_bytes, returned_bytes))
            jobs.append(
                Job(
                    parameter=block.parameter,
                    block=block.number,
                    owner=owner,
                    sources=sources,
                    destinations=destinations,
                    bucket=bucket,
                    line_values=block.holders.line_values,
                )
            )
    rules = [rule for p in unplanned.parameters.values() for rule in p.rules]
    return Domain(
        ranks=unplanned.ranks,
        parameters=tuple(unplanned.parameters),
        itemsize=itemsize,
        rules=tuple(dict.fromkeys(rules)),
        spread=spread,
        jobs=tuple(jobs),
        n_buckets=buckets.count,
        work={rank: balance.loads[rank] - unplanned.earlier_work[rank] for rank in unplanned.ranks},
        gathered_bytes=gathered_bytes,
    )


def _elements_of_first_rank(shape: Shape, layout: Layout) -> int:
    """Return the elements of the first rank's part, which is the largest."""
    place = layout.places()[layout.ranks[0]]
    return math.prod(
        held_interval(size, dim, layout, place).length for dim, size in enumerate(shape)
    )


class _Block(NamedTuple):
    """A block of a parameter, and the ranks that hold it."""

    parameter: int  # position in the plan
    name: str  # of the parameter
    number: int  # in the parameter
    work: int  # [FLOPs]
    n_bytes: int  # in full precision
    holders: BlockHolders


def _blocks_of(p: PlannedParameter, position: int, itemsize: int) -> list[_Block]:
    """Return the blocks of a parameter, in the order of their numbers: matrix by matrix."""
    values = rule_values(p.rules)
    # By part of a matrix: the parts of all matrices are alike.
    work = p.block_flops()
    n_bytes = [rows * columns * itemsize for rows, columns in p.view.block_shapes]
    holders_of_all = holders_of_blocks(
        p.matrices(),
        state=p.matrices("gather"),
        updates=p.matrices("return"),
        scored=bool(values.block_keys),  # a score: a number per block
        line_tensors=tuple(tensor for _, tensor in values.line_tensors),
    )
    return [
        _Block(
            parameter=position,
            name=p.name,
            number=number,
            work=work[number % len(work)],
            n_bytes=n_bytes[number % len(n_bytes)],
            holders=holders,
        )
        for number, holders in enumerate(holders_of_all)
    ]


class _Buckets:
    """The buckets of a domain while jobs are added.

    Each owner fills its part of one bucket after the other, so the bound `bucket_bytes` is on what
    one owner handles: whole blocks in full precision. A rank that holds most of the elements may
    send more, and headers and the inputs of rules come on top.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._last: dict[int, int] = {}  # by owner: the number of the bucket that it is filling
        self._used_bytes: dict[int, int] = {}  # by owner: the bytes of its jobs in this bucket
        self.count = 0

    def add(self, owner: int, n_bytes: int) -> int:
        """Add a job; return the number of its bucket. A job too large for a bucket goes alone."""
        number = self._last.get(owner, 0)
        used_bytes = self._used_bytes.get(owner, 0)
        if used_bytes and used_bytes + n_bytes > self._bucket_bytes:
            number += 1
            used_bytes = 0
        self._last[owner] = number
        self._used_bytes[owner] = used_bytes + n_bytes
        self.count = max(self.count, number + 1)
        return number
