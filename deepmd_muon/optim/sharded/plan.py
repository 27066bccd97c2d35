"""The plan of which rank orthogonalizes which matrix, and of the messages.

A plan consists of plain values; the glossary of this package has its words. Each rank plans the
parameters that it has. So a domain is identical on all of its ranks, but plans may have different
domains: of four ranks, two may share a further domain. What all ranks of a domain must do alike
has to follow from this domain and those before it, which all of them have.

Some jobs stay on one rank. The others form buckets; each bucket takes one all-to-all to the owners
and one back.

Owners are chosen longest processing time first (R. L. Graham, SIAM J. Appl. Math. 17, 416, 1969):
blocks of all shapes, in decreasing order of work, go to the rank with the least work so far; in a
tie, to the one with fewer bytes, then to the lower rank.

Replicas with a part of the momenta each can also gather the momenta and repeat the work: then all
jobs stay.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from deepmd_muon.optim.config import HybridMuonConfig, ShardedSettings
from deepmd_muon.optim.errors import ShardingError
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.routing.routes import RouteEntry
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import Input, MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import inputs_of, matrix_rules, tensors_of
from deepmd_muon.optim.sharded.layout import Layout, held_interval, replicated
from deepmd_muon.optim.sharded.owners import Balance, BlockHolders, holders_of_blocks
from deepmd_muon.optim.update.adam import moment_dtype

Leg = Literal["gather", "return"]
LEGS: tuple[Leg, Leg] = ("gather", "return")

VERSION = 4
WORD = 8  # bytes of a header entry (float64); messages are padded to whole words
NARROW = 2  # bytes of an element in a 16-bit type

# Rates from which `replication` 'auto' predicts times.
FLOPS_PER_SECOND = 1e14  # of one rank's orthogonalizations
BYTES_PER_SECOND = 2e10  # that one rank sends
SECONDS_PER_COLLECTIVE = 5e-5


class Carried(NamedTuple):
    """The values that messages carry for some rules, besides directions and updates.

    Attributes
    ----------
    blocks
        Keys of state tensors with one number per block; they are sent and returned.
    lines
        State tensors with numbers per row or column, by key; they are sent and returned.
    inputs
        Inputs that rules request; they are sent for each element.
    sums
        Number of values of statistics that are sent for each piece.
    """

    blocks: tuple[str, ...]
    lines: tuple[tuple[str, StateTensor], ...]
    inputs: tuple[Input, ...]
    sums: int


@functools.lru_cache(maxsize=256)
def carried(rules: tuple[MatrixRule, ...]) -> Carried:
    """Return the values that messages carry for these rules."""
    tensors = tensors_of(rules).items()
    return Carried(
        blocks=tuple(key for key, tensor in tensors if tensor.extent == "blocks"),
        lines=tuple((key, x) for key, x in tensors if x.extent in ("rows", "columns")),
        inputs=inputs_of(rules),
        sums=sum(rule.sums for rule in rules),
    )


@dataclasses.dataclass(frozen=True)
class PlannedParameter:
    """A parameter of the Muon route, as the plan needs it.

    Attributes
    ----------
    name, shape, view
        As in its `RouteEntry`.
    layout
        The layout of its elements.
    itemsize
        Bytes of one element of its update: 4, or 8 for float64.
    rules
        The rules of its group; messages carry their state and statistics.
    steps, gram
        Iterations of the orthogonalization, and whether the Gram form may be used; they determine
        the work.
    state_layout
        The layout of its momentum, if different.
    masters
        Whether master weights with the layout of the state take its updates, instead of the
        elements.
    """

    name: str
    shape: tuple[int, ...]
    view: MatrixView
    layout: Layout
    itemsize: int = 4
    rules: tuple[MatrixRule, ...] = ()
    steps: int = 10
    gram: bool = True
    state_layout: Layout | None = None
    masters: bool = False

    @classmethod
    def of(
        cls,
        entry: RouteEntry,
        dtype: torch.dtype,
        settings: HybridMuonConfig,
        layout: Layout,
        state_layout: Layout | None = None,
    ) -> PlannedParameter:
        """Return a parameter of the Muon route with the settings of its group."""
        assert entry.view is not None
        is_narrow = dtype.itemsize == NARROW
        return cls(
            entry.name,
            entry.shape,
            entry.view,
            layout,
            itemsize=moment_dtype(dtype).itemsize,
            rules=matrix_rules(settings),
            steps=len(coefficients_of(settings.schedule_of(entry.view.block_shapes[0]))),
            gram=settings.enable_gram,
            state_layout=state_layout,
            masters=state_layout is not None and settings.master_weights and is_narrow,
        )

    def layout_of(self, leg: Leg) -> Layout:
        """Return the layout of a leg's pieces.

        Momenta are gathered, and updates return to elements or master weights.
        """
        if self.state_layout is not None and (leg == "gather" or self.masters):
            return self.state_layout
        return self.layout

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        state = ""
        if self.state_layout:
            sharded = "state and updates" if self.masters else "state"
            state = f", {sharded} on {self.state_layout}"
        rules = [str(rule) for rule in self.rules]
        return (
            f"{self.name}: {size} as {self.view} on {self.layout}{state}, {self.itemsize} bytes, "
            f"rules {rules}, {self.steps} steps, gram {self.gram}"
        )


class Job(NamedTuple):
    """The exchange of one block.

    Attributes
    ----------
    parameter, block
        Position of the parameter in the plan, and number of the block in it.
    owner
        The rank that orthogonalizes the block.
    sources, destinations
        Numbers of elements, by rank. A rank with 0 elements only has rules' state.
    bucket
        The bucket that the job travels in; None for a job that stays.
    lines
        Numbers of rules' values that ranks keep for rows or columns; a message carries the values
        of its holder.
    """

    parameter: int
    block: int
    owner: int
    sources: Mapping[int, int]
    destinations: Mapping[int, int]
    bucket: int | None
    lines: Mapping[int, int]

    def holders(self, leg: Leg) -> Mapping[int, int]:
        """Return the ranks that send to the owner, or receive from it, and their elements."""
        return self.sources if leg == "gather" else self.destinations


def newton_schulz_flops(rows: int, columns: int, steps: int, *, gram: bool) -> int:
    """Return the floating-point operations of one orthogonalization, in the form for this shape."""
    m = min(rows, columns)
    n = max(rows, columns)
    if m == 1:
        return 4 * n
    if gram and n >= 2 * m:
        # Products with R (m × m) in each step; R = X Xᵀ and X ← Q X three times each.
        return steps * 8 * m**3 + 12 * m * m * n
    return steps * (4 * m * m * n + 2 * m**3)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Parameters that live on the same ranks with elements of the same size, and their jobs.

    Attributes
    ----------
    ranks
        Global ranks, ascending.
    parameters
        Positions in the plan's parameters.
    itemsize
        Bytes of an element in full precision.
    rules
        The rules of all its parameters; headers have room for the values per block of all of them.
    spread
        Whether replicas share the work; see `ShardedSettings.replication`.
    jobs
        In global order: decreasing work, then name, then block.
    buckets
        Number of exchanges.
    work
        Floating-point operations of each rank.
    gathered_bytes
        Bytes of the momenta of one rank, if all ranks gather them before the step (see
        `RepeatedMuon`); else 0.
    """

    ranks: tuple[int, ...]
    parameters: tuple[int, ...]
    itemsize: int
    rules: tuple[MatrixRule, ...]
    spread: bool
    jobs: tuple[Job, ...]
    buckets: int
    work: Mapping[int, int]
    gathered_bytes: int = 0

    def header_words(self, leg: Leg) -> int:
        """Return the header's words per piece.

        They are presence, the rules' state per block, and (gather only) their sums.
        """
        values = carried(self.rules)
        return 1 + len(values.blocks) + (values.sums if leg == "gather" else 0)

    def planes(self, leg: Leg) -> int:
        """Return the number of values per element.

        They are the direction and the inputs that rules request, or the update.
        """
        return 1 + len(carried(self.rules).inputs) if leg == "gather" else 1

    def message_bytes(
        self, leg: Leg, pieces: int, lines: int, elements: int, settings: ShardedSettings
    ) -> int:
        """Return the length of a message: headers of all pieces, lines, elements, whole words."""
        dtype = settings.gather_dtype if leg == "gather" else settings.return_dtype
        itemsize = self.itemsize if dtype == "full" else NARROW
        element_words = -(-elements * self.planes(leg) * itemsize // WORD)  # rounded up
        return WORD * (pieces * self.header_words(leg) + lines + element_words)

    def bytes_of_messages(
        self, leg: Leg, settings: ShardedSettings
    ) -> dict[tuple[int, int, int], int]:
        """Return the bytes of every message of one leg, by bucket, sender and receiver.

        Messages of a rank to itself are left out.
        """
        pieces: Counter[tuple[int, int, int]] = Counter()
        lines: Counter[tuple[int, int, int]] = Counter()
        elements: Counter[tuple[int, int, int]] = Counter()
        for job in self.jobs:
            if job.bucket is None:
                continue
            for holder, n_elements in job.holders(leg).items():
                if holder == job.owner:
                    continue
                sender = holder if leg == "gather" else job.owner
                receiver = job.owner if leg == "gather" else holder
                key = (job.bucket, sender, receiver)
                pieces[key] += 1
                lines[key] += job.lines.get(holder, 0)
                elements[key] += n_elements
        return {
            key: self.message_bytes(leg, n_pieces, lines[key], elements[key], settings)
            for key, n_pieces in pieces.items()
        }

    def sent(self, settings: ShardedSettings) -> dict[int, int]:
        """Return the bytes that leave each rank in one step."""
        sent = dict.fromkeys(self.ranks, self.gathered_bytes * (len(self.ranks) - 1))
        for leg in LEGS:
            for (_, sender, _), size in self.bytes_of_messages(leg, settings).items():
                sent[sender] += size
        return sent

    def exchanges(self) -> dict[Leg, tuple[int, ...]]:
        """Return the buckets whose gather, or return, exchanges data between ranks."""
        exchanges: dict[Leg, tuple[int, ...]] = {}
        for leg in LEGS:
            buckets: set[int] = set()
            for job in self.jobs:
                if job.bucket is None or job.bucket in buckets:
                    continue
                if any(holder != job.owner for holder in job.holders(leg)):
                    buckets.add(job.bucket)
            exchanges[leg] = tuple(sorted(buckets))
        return exchanges

    def seconds(self, settings: ShardedSettings) -> float:
        """Predict the time of one step, without overlap [s]."""
        n_collectives = sum(len(buckets) for buckets in self.exchanges().values())
        if self.gathered_bytes:
            n_collectives += 1
        return (
            max(self.work.values()) / FLOPS_PER_SECOND
            + max(self.sent(settings).values()) / BYTES_PER_SECOND
            + n_collectives * SECONDS_PER_COLLECTIVE
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of this rank's parameters of the Muon route."""

    parameters: tuple[PlannedParameter, ...]  # in the optimizer's order
    settings: ShardedSettings
    domains: tuple[Domain, ...]  # the largest first

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

        It has balance, bytes and collectives of every domain, and with `owners` every block.
        """
        if len(self.domains) == 1 and len(self.domains[0].ranks) == 1 and not owners:
            return _describe_one_process(self)
        lines = []
        for number, domain in enumerate(self.domains):
            lines.append(f"domain {number}: {_describe_domain(self, domain)}")
            if owners:
                lines += _describe_owners(self, domain)
        if not lines:
            return "no matrices to orthogonalize"
        work = sum(sum(domain.work.values()) for domain in self.domains)
        sent = sum(sum(domain.sent(self.settings).values()) for domain in self.domains)
        lines.append(f"a step on all ranks: {work:.4g} FLOPs, {sent:.4g} bytes sent")
        return "\n".join(lines)


# ----- making a plan -----------------------------------------------------------------------------


def make_plan(
    parameters: Sequence[PlannedParameter], settings: ShardedSettings | None = None
) -> Plan:
    """Plan the step of these parameters.

    Parameters
    ----------
    parameters
        In an order that is the same on all ranks; names are unique.
    settings
        Settings of the sharded step.

    Returns
    -------
    Plan
        Identical on all ranks with identical arguments.
    """
    settings = settings or ShardedSettings()
    _refuse_overlaps(parameters)
    domains = _domains(parameters, settings, may_gather=True)
    if len({bool(domain.gathered_bytes) for domain in domains}) > 1:
        # The momenta of all domains are gathered, or none.
        domains = _domains(parameters, settings, may_gather=False)
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


def _domains(
    parameters: Sequence[PlannedParameter], settings: ShardedSettings, *, may_gather: bool
) -> list[Domain]:
    """Plan all domains; `may_gather` allows replicas to gather momenta that they keep in parts."""
    members: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    for i, parameter in enumerate(parameters):
        members[parameter.layout.sorted_ranks, parameter.itemsize].append(i)
    # Larger domains first: all ranks of a smaller domain inside one then know the loads from it.
    by_size = sorted(members.items(), key=lambda item: (-len(item[0][0]), item[1][0]))
    domains: list[Domain] = []
    for (ranks, itemsize), positions in by_size:
        outer = [domain.work for domain in domains if set(ranks) <= set(domain.ranks)]
        loads = {rank: sum(work[rank] for work in outer) for rank in ranks}
        domain_parameters = [parameters[i] for i in positions]
        choices = [
            _domain(
                parameters,
                positions,
                ranks=ranks,
                itemsize=itemsize,
                loads=loads,
                settings=settings,
                spread=spread,
            )
            for spread in _ways_to_replicate(domain_parameters, settings, may_gather=may_gather)
        ]
        best = choices[0]
        if len(choices) > 1:
            best = min(choices, key=lambda domain: domain.seconds(settings))
        domains.append(best)
    return domains


def _ways_to_replicate(
    parameters: Sequence[PlannedParameter], settings: ShardedSettings, *, may_gather: bool
) -> list[bool]:
    """Return the values of `Domain.spread` to choose from, for the parameters of one domain."""
    replicated_parameters = [p for p in parameters if len(p.layout.replicas()) > 1]
    in_parts = any(p.state_layout for p in replicated_parameters)
    if in_parts:
        # To repeat the work, each replica needs whole momenta.
        all_replicated = len(replicated_parameters) == len(parameters)
        if not (may_gather and all_replicated and _fit_one_gather(parameters, settings)):
            return [True]
    if settings.replication == "auto":
        # Predicted times decide; a tie goes to the first. Without replicas both are alike.
        return [True, False] if replicated_parameters else [True]
    return [settings.replication == "spread"]


def _fit_one_gather(parameters: Sequence[PlannedParameter], settings: ShardedSettings) -> bool:
    """Return whether replicas may gather these momenta.

    They must fit a bucket, and no other state may be in parts.
    """
    size = sum(math.prod(p.shape) * p.itemsize for p in parameters)
    only_momenta = all(
        p.state_layout is not None and not p.masters and not carried(p.rules).lines
        for p in parameters
    )
    return settings.gather_dtype == "full" and size <= settings.bucket_bytes and only_momenta


class _PlannedBlock(NamedTuple):
    """A block of a parameter: its work [FLOPs], its size [bytes], and the ranks that hold it."""

    parameter: int
    name: str
    number: int
    work: int
    size: int
    holders: BlockHolders


class _Filling(NamedTuple):
    """The bucket that an owner is filling, and the bytes in it."""

    bucket: int
    used: int


def _domain(
    parameters: Sequence[PlannedParameter],
    positions: Sequence[int],
    *,
    ranks: tuple[int, ...],
    itemsize: int,
    loads: Mapping[int, int],
    settings: ShardedSettings,
    spread: bool,
) -> Domain:
    """Choose owners and form buckets for one domain.

    `loads` has the work of each rank in other domains [FLOPs]. Replicas that repeat the work gather
    momenta first.
    """
    blocks: list[_PlannedBlock] = []
    gathered_bytes = 0
    for i in positions:
        p = parameters[i]
        if p.state_layout is not None and not spread and len(ranks) > 1:
            gathered_bytes += _largest_part(p.shape, p.state_layout) * itemsize
            p = dataclasses.replace(p, state_layout=None)
        blocks += _blocks_of(p, i, itemsize)
    blocks.sort(key=lambda block: (-block.work, block.name, block.number))

    balance = Balance(loads)
    jobs: list[Job] = []
    filling: dict[int, _Filling] = {}  # by owner
    for block in blocks:
        assignments = block.holders.assign(balance, block.work, block.size, spread=spread)
        for owner, sources, destinations in assignments:
            bucket = None
            if any(rank != owner for rank in (*sources, *destinations)):
                # Whole blocks in full precision: without headers and the inputs of rules, which can
                # make an exchange larger than `bucket_bytes`. The bound is on what one owner
                # handles; a rank that holds most of the elements may send more.
                returned = sum(destinations.values()) * itemsize
                n_bytes = max(block.size, returned)
                bucket, used = filling.get(owner, _Filling(bucket=0, used=0))
                if used and used + n_bytes > settings.bucket_bytes:
                    bucket += 1
                    used = 0
                filling[owner] = _Filling(bucket, used + n_bytes)
            jobs.append(
                Job(
                    parameter=block.parameter,
                    block=block.number,
                    owner=owner,
                    sources=sources,
                    destinations=destinations,
                    bucket=bucket,
                    lines=block.holders.lines,
                )
            )
    return Domain(
        ranks=ranks,
        parameters=tuple(positions),
        itemsize=itemsize,
        rules=tuple(dict.fromkeys(rule for i in positions for rule in parameters[i].rules)),
        spread=spread,
        jobs=tuple(jobs),
        buckets=1 + max((last.bucket for last in filling.values()), default=-1),
        work={rank: balance.loads[rank] - loads[rank] for rank in ranks},
        gathered_bytes=gathered_bytes,
    )


def _blocks_of(p: PlannedParameter, position: int, itemsize: int) -> list[_PlannedBlock]:
    """Return the blocks of a parameter, the parts of its first matrix first."""
    values = carried(p.rules)
    shapes = p.view.block_shapes
    work = [newton_schulz_flops(*shape, p.steps, gram=p.gram) for shape in shapes]
    size = [rows * columns * itemsize for rows, columns in shapes]
    holders_of_all = holders_of_blocks(
        p.shape,
        p.view,
        layout=p.layout,
        state_layout=p.layout_of("gather"),
        update_layout=p.layout_of("return"),
        scored=bool(values.blocks),
        lines=tuple(tensor for _, tensor in values.lines),
    )
    return [
        _PlannedBlock(
            parameter=position,
            name=p.name,
            number=number,
            work=work[number % len(shapes)],
            size=size[number % len(shapes)],
            holders=holders,
        )
        for number, holders in enumerate(holders_of_all)
    ]


def _largest_part(shape: tuple[int, ...], layout: Layout) -> int:
    """Return the number of elements of the first rank, which has the largest part."""
    place = layout.places()[layout.ranks[0]]
    return math.prod(
        held_interval(size, dim, layout, place).length for dim, size in enumerate(shape)
    )


# ----- describing a plan -------------------------------------------------------------------------


def _describe_one_process(plan: Plan) -> str:
    """Return the number of matrices and the FLOPs of each shape, the most expensive first."""
    flops: Counter[tuple[int, int]] = Counter()
    count: Counter[tuple[int, int]] = Counter()
    for p in plan.parameters:
        for shape in p.view.block_shapes:
            count[shape] += p.view.batch
            flops[shape] += p.view.batch * newton_schulz_flops(*shape, p.steps, gram=p.gram)
    lines = [f"one process: {len(plan.parameters)} parameters, {sum(count.values())} matrices"]
    for shape, work in flops.most_common():
        lines.append(f"  {count[shape]} of {shape[0]}x{shape[1]}: {work:.4g} FLOPs")
    lines.append(f"a step: {sum(flops.values()):.4g} FLOPs")
    return "\n".join(lines)


def _describe_domain(plan: Plan, domain: Domain) -> str:
    parameters = [plan.parameters[i] for i in domain.parameters]
    layouts = sorted({str(p.layout) for p in parameters})
    n_blocks = len({(job.parameter, job.block) for job in domain.jobs})
    n_staying = sum(job.bucket is None for job in domain.jobs)
    exchanges = domain.exchanges()
    replicas = ""
    if any(len(p.layout.replicas()) > 1 for p in parameters):
        replicas = f", replicas {'share' if domain.spread else 'repeat'} the work"
    momenta = ", 1 for the momenta" if domain.gathered_bytes else ""
    return (
        f"{len(domain.ranks)} ranks; {len(parameters)} parameters, {n_blocks} matrices on "
        f"{'; '.join(layouts)}{replicas}; {n_staying} jobs stay, "
        f"{len(domain.jobs) - n_staying} travel in {domain.buckets} buckets\n"
        f"  collectives a step: {len(exchanges['gather'])} to the owners, "
        f"{len(exchanges['return'])} back{momenta}\n"
        f"  FLOPs a rank: {_mean_and_extremes(list(domain.work.values()))}\n"
        f"  bytes sent a rank: {_mean_and_extremes(list(domain.sent(plan.settings).values()))}\n"
        f"  digest {plan.digest(domain).hex()[:16]}"
    )


def _mean_and_extremes(values: Sequence[int]) -> str:
    mean = sum(values) / len(values)
    if not mean:
        return "none"
    largest = max(values)
    return (
        f"mean {mean:.4g}, largest {largest:.4g}, least {min(values):.4g}; "
        f"largest / mean {largest / mean:.3f}"
    )


def _describe_owners(plan: Plan, domain: Domain) -> list[str]:
    lines = []
    for job in domain.jobs:
        p = plan.parameters[job.parameter]
        rows, columns = p.view.block_shapes[job.block % len(p.view.block_shapes)]
        way = "stays" if job.bucket is None else f"bucket {job.bucket}"
        lines.append(f"  rank {job.owner}: {p.name} block {job.block} ({rows}x{columns}), {way}")
    return lines
