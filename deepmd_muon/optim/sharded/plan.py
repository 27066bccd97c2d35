"""The plan of which rank orthogonalizes which matrix, and of the messages.

A plan consists of plain values, and every rank makes its own, without communication. The glossary
of this package has the words. `make_plan` takes these steps:

1. Parameters on the same ranks form a domain, those with float64 updates (8 bytes) apart from the
   others (4 bytes). Domains are planned one after the other, those of more ranks first.
2. The blocks of a domain get owners, longest processing time first (R. L. Graham, SIAM J. Appl.
   Math. 17, 416, 1969): in decreasing order of work, each goes to the rank with the least work so
   far; in a tie, to a rank with a piece of it, then to the one with fewer bytes, then to the lower
   rank. A block that one rank holds whole stays there.
3. Jobs with all pieces on their owner stay. The others travel in buckets; each bucket takes at most
   one all-to-all to the owners and one back (`Domain.crossing_buckets`).
4. Replicas share the work or repeat it. With `replication` 'auto', steps 2 and 3 are taken for both
   if there are replicas and both ways are possible, and the faster way is kept. Replicas that
   repeat the work but have a part of the momenta each gather the momenta before the step; then all
   jobs stay.

The choices for a domain depend on this domain and on earlier domains that contain all of its ranks.
Other domains may be unknown to some of its ranks, because each rank plans the parameters that it
has. Two of four ranks, for example, may share a domain that the others do not know.
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
from deepmd_muon.optim.routing.views import MatrixView, Shape
from deepmd_muon.optim.rules.interface import Input, MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import inputs_of, matrix_rules, tensors_of
from deepmd_muon.optim.sharded.layout import (
    Layout,
    MatrixLayout,
    RankSet,
    held_interval,
    replicated,
)
from deepmd_muon.optim.sharded.owners import Balance, BlockHolders, holders_of_blocks
from deepmd_muon.optim.update.adam import moment_dtype

Leg = Literal["gather", "return"]
LEGS: tuple[Leg, Leg] = ("gather", "return")
# Ranks with different versions refuse to step together. Raise it when the same parameters get other
# jobs, buckets or messages.
VERSION = 4
WORD_BYTES = 8  # a float64, the unit of buffers and messages
_NARROW_BYTES = 2  # an element in a 16-bit type

# Rates from which `replication` 'auto' predicts times.
FLOPS_PER_SECOND = 1e14  # of one rank's orthogonalizations
BYTES_PER_SECOND = 2e10  # that one rank sends
SECONDS_PER_COLLECTIVE = 5e-5


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
    shape: Shape
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
        return cls(
            entry.name,
            entry.shape,
            entry.view,
            layout,
            itemsize=moment_dtype(dtype).itemsize,
            rules=matrix_rules(settings),
            # `steps` and `gram` only weigh work, and ranks compare them: the first part of a fused
            # weight speaks for all.
            steps=len(coefficients_of(settings.schedule_of(entry.view.block_shapes[0]))),
            gram=settings.enable_gram,
            state_layout=state_layout,
            masters=(
                settings.master_weights
                and state_layout is not None
                and dtype.itemsize == _NARROW_BYTES
            ),
        )

    def matrices(self, leg: Leg | None = None) -> MatrixLayout:
        """Return the layout of the matrices whose pieces a leg moves.

        leg         tensor                                      layout
        "gather"    momentum                                    of the state
        "return"    master weights if any, else the elements    of the state; of the elements
        None        elements                                    of the elements
        """
        in_state = leg == "gather" or (leg == "return" and self.masters)
        layout = self.state_layout if in_state else None
        return MatrixLayout(self.shape, self.view, layout or self.layout)

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
    """What moves for one block: pieces to its owner, and updates back.

    A matrix of 8 × 6 with its first half of rows on rank 0 and the second on rank 1 is one block;
    sources and destinations are {0: 24, 1: 24}, the owner one of them.

    Attributes
    ----------
    parameter, block
        Position of the parameter in the plan, and number of the block in it.
    owner
        The rank that orthogonalizes the block.
    sources, destinations
        Numbers of elements, by rank. A source has some; a destination with 0 elements only has
        rules' state.
    bucket
        Number of the bucket that the job travels in; None for a job that stays.
    line_values
        By rank: how many line values of the rules it holds for this block. Its messages carry them.
    """

    parameter: int
    block: int
    owner: int
    sources: Mapping[int, int]
    destinations: Mapping[int, int]
    bucket: int | None
    line_values: Mapping[int, int]

    def holders(self, leg: Leg) -> Mapping[int, int]:
        """Return the ranks that send to the owner, or receive from it, and their elements."""
        return self.sources if leg == "gather" else self.destinations


class MessageKey(NamedTuple):
    """A message of one leg of a domain: the number of its bucket, and the ranks at its ends."""

    bucket: int
    sender: int
    receiver: int


class RuleValues(NamedTuple):
    """The values that messages carry for some rules, besides directions and updates.

    Attributes
    ----------
    block_keys
        Keys of state tensors with one number per block; the numbers are gathered and returned.
    line_tensors
        State tensors with values per line (row or column), by key; gathered and returned.
    inputs
        Inputs that rules request; gathered, one value for each element.
    sums
        Number of values of statistics; gathered, for each piece.
    """

    block_keys: tuple[str, ...]
    line_tensors: tuple[tuple[str, StateTensor], ...]
    inputs: tuple[Input, ...]
    sums: int


@functools.lru_cache(maxsize=256)
def rule_values(rules: tuple[MatrixRule, ...]) -> RuleValues:
    """Return the values that messages carry for these rules."""
    tensors = tensors_of(rules).items()
    return RuleValues(
        block_keys=tuple(key for key, tensor in tensors if tensor.extent == "blocks"),
        line_tensors=tuple(
            (key, tensor) for key, tensor in tensors if tensor.extent in ("rows", "columns")
        ),
        inputs=inputs_of(rules),
        sums=sum(rule.sums for rule in rules),
    )


@dataclasses.dataclass(frozen=True)
class Domain:
    """Parameters on the same ranks with updates of the same element size, and their jobs.

    Attributes
    ----------
    ranks
        Global ranks, ascending.
    parameters
        Positions in the plan's parameters.
    itemsize
        Bytes of an element of an update in full precision, 4 or 8.
    rules
        The rules of all its parameters; headers have room for the values per block of all of them.
    spread
        Whether replicas share the work; see `ShardedSettings.replication`.
    jobs
        In global order: decreasing work, then name, then block.
    n_buckets
        Number of buckets; the domain's buckets are numbered from 0.
    work
        Floating-point operations, by rank.
    gathered_bytes
        Bytes of the part of the momenta that one rank sends if it `gathers_momenta`; else 0.
    """

    ranks: RankSet
    parameters: tuple[int, ...]
    itemsize: int
    rules: tuple[MatrixRule, ...]
    spread: bool
    jobs: tuple[Job, ...]
    n_buckets: int
    work: Mapping[int, int]
    gathered_bytes: int = 0

    @property
    def gathers_momenta(self) -> bool:
        """Whether replicas gather momenta before the step (`RepeatedMuon`); no job travels then."""
        return self.gathered_bytes > 0

    def seconds(self, settings: ShardedSettings) -> float:
        """Predict the time of one step, without overlap [s]."""
        n_collectives = sum(len(numbers) for numbers in self.crossing_buckets().values())
        n_collectives += self.gathers_momenta
        return (
            max(self.work.values()) / FLOPS_PER_SECOND
            + max(self.bytes_sent(settings).values()) / BYTES_PER_SECOND
            + n_collectives * SECONDS_PER_COLLECTIVE
        )

    def crossing_buckets(self) -> dict[Leg, tuple[int, ...]]:
        """Return, by leg, the numbers of the buckets with a message between two ranks.

        Only these need a collective.
        """
        crossing: dict[Leg, tuple[int, ...]] = {}
        for leg in LEGS:
            numbers: set[int] = set()
            for job in self.jobs:
                if job.bucket is None or job.bucket in numbers:
                    continue
                if any(holder != job.owner for holder in job.holders(leg)):
                    numbers.add(job.bucket)
            crossing[leg] = tuple(sorted(numbers))
        return crossing

    def bytes_sent(self, settings: ShardedSettings) -> dict[int, int]:
        """Return, by rank, the bytes that leave it in one step.

        They are those of exchanges and of momenta gathered before the step. All-gathers of 16-bit
        elements after it, with master weights, come on top (`Pipeline.part_gathers`).
        """
        sent = dict.fromkeys(self.ranks, self.gathered_bytes * (len(self.ranks) - 1))
        for leg in LEGS:
            for key, size in self.bytes_of_messages(leg, settings).items():
                sent[key.sender] += size
        return sent

    def bytes_of_messages(self, leg: Leg, settings: ShardedSettings) -> dict[MessageKey, int]:
        """Return the bytes of every message of one leg, except from a rank to itself.

        `messages.Side` lays the messages of one rank out; the sizes must be equal.
        """
        n_words: Counter[MessageKey] = Counter()  # of headers and lines
        n_elements: Counter[MessageKey] = Counter()
        for job in self.jobs:
            if job.bucket is None:
                continue
            for holder, elements in job.holders(leg).items():
                if holder == job.owner:
                    continue
                sender = holder if leg == "gather" else job.owner
                receiver = job.owner if leg == "gather" else holder
                key = MessageKey(job.bucket, sender, receiver)
                n_words[key] += self.header_words(leg) + job.line_values.get(holder, 0)
                n_elements[key] += elements
        dtype = settings.gather_dtype if leg == "gather" else settings.return_dtype
        itemsize = self.itemsize if dtype == "full" else _NARROW_BYTES
        bytes_per_element = self.n_planes(leg) * itemsize
        for key, elements in n_elements.items():
            n_words[key] += -(-elements * bytes_per_element // WORD_BYTES)  # rounded up
        return {key: WORD_BYTES * count for key, count in n_words.items()}

    def header_words(self, leg: Leg) -> int:
        """Return the words of a piece's header: presence, state per block, sums (gather only).

        The module `messages` has their order.
        """
        values = rule_values(self.rules)
        return 1 + len(values.block_keys) + (values.sums if leg == "gather" else 0)

    def n_planes(self, leg: Leg) -> int:
        """Return the number of values of each element.

        The gather has its direction and the inputs that rules request, the return its update.
        """
        return 1 + len(rule_values(self.rules).inputs) if leg == "gather" else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of this rank's parameters of the Muon route."""

    parameters: tuple[PlannedParameter, ...]  # in the optimizer's order
    settings: ShardedSettings
    domains: tuple[Domain, ...]  # those of more ranks first

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
        text = []
        for number, domain in enumerate(self.domains):
            text.append(f"domain {number}: {_describe_domain(self, domain)}")
            if owners:
                text += _describe_owners(self, domain)
        if not text:
            return "no matrices to orthogonalize"
        # Of the domains that this rank knows.
        work = sum(sum(domain.work.values()) for domain in self.domains)
        sent = sum(sum(domain.bytes_sent(self.settings).values()) for domain in self.domains)
        text.append(f"a step on all ranks: {work:.4g} FLOPs, {sent:.4g} bytes sent")
        return "\n".join(text)


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
    members: dict[tuple[RankSet, int], list[int]] = defaultdict(list)
    for i, p in enumerate(parameters):
        members[p.layout.sorted_ranks, p.itemsize].append(i)
    domains: list[Domain] = []
    # Domains of more ranks first: all ranks of a domain then know the work of each in the earlier
    # ones. Domains on the same ranks keep the order of their first parameters.
    for ranks, itemsize in sorted(members, key=lambda member: -len(member[0])):
        domain_parameters = {i: parameters[i] for i in members[ranks, itemsize]}
        earlier_work = [domain.work for domain in domains if set(ranks) <= set(domain.ranks)]
        choices = [
            _plan_domain(
                domain_parameters,
                ranks=ranks,
                itemsize=itemsize,
                loads={rank: sum(work[rank] for work in earlier_work) for rank in ranks},
                settings=settings,
                spread=spread,
            )
            for spread in _spread_choices(list(domain_parameters.values()), settings)
        ]
        best = choices[0]
        if len(choices) > 1:  # only then: predicting takes time
            best = min(choices, key=lambda domain: domain.seconds(settings))
        domains.append(best)
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


def _spread_choices(
    parameters: Sequence[PlannedParameter], settings: ShardedSettings
) -> list[bool]:
    """Return the values of `Domain.spread` to choose from for the parameters of one domain."""
    replicated_parameters = [p for p in parameters if len(p.layout.replicas()) > 1]
    # To repeat the work, replicas need whole momenta.
    in_parts = any(p.state_layout for p in replicated_parameters)
    if in_parts and not _can_gather_momenta(parameters, settings):
        return [True]
    if settings.replication == "auto":
        # Predicted times decide; a tie goes to the first. Without replicas both are alike.
        return [True, False] if replicated_parameters else [True]
    return [settings.replication == "spread"]


def _can_gather_momenta(parameters: Sequence[PlannedParameter], settings: ShardedSettings) -> bool:
    """Return whether replicas may gather the momenta of a domain before the step.

    All momenta must be in parts, and no other state may be. They must fit a bucket. `gather_dtype`
    must be 'full', because the gathered momenta themselves advance: rounding would accumulate.
    """
    n_bytes = sum(math.prod(p.shape) * p.itemsize for p in parameters)
    fits = settings.gather_dtype == "full" and n_bytes <= settings.bucket_bytes
    return fits and all(
        len(p.layout.replicas()) > 1
        and p.state_layout is not None
        and not p.masters
        and not rule_values(p.rules).line_tensors
        for p in parameters
    )


def _plan_domain(
    parameters: Mapping[int, PlannedParameter],
    *,
    ranks: RankSet,
    itemsize: int,
    loads: Mapping[int, int],
    settings: ShardedSettings,
    spread: bool,
) -> Domain:
    """Choose owners and form buckets for one domain.

    `parameters` are by position in the plan. `loads` has the work of each rank in the domains
    before [FLOPs].
    """
    blocks: list[_PlannedBlock] = []
    gathered_bytes = 0
    for i, p in parameters.items():
        planned = p
        if p.state_layout is not None and not spread and len(ranks) > 1:
            # Gathered before the step: replicas then repeat the work as if momenta were whole. A
            # single rank has nothing to gather. `Plan.parameters` keep their layout; later only
            # `Plan.statements` reads it, as the pipeline leaves domains that gather momenta out.
            gathered_bytes += itemsize * _elements_of_first_rank(p.shape, p.state_layout)
            planned = dataclasses.replace(p, state_layout=None)
        blocks += _blocks_of(planned, i, itemsize)
    blocks.sort(key=lambda block: (-block.work, block.name, block.number))

    balance = Balance(loads)
    filling: dict[int, _Filling] = {}
    jobs: list[Job] = []
    for block in blocks:
        assignments = block.holders.assign(
            balance, work=block.work, size=block.n_bytes, spread=spread
        )
        for owner, sources, destinations in assignments:
            bucket = None
            if any(rank != owner for rank in (*sources, *destinations)):
                # The owner gathers the block once, and returns a copy to each replica it serves.
                returned_bytes = sum(destinations.values()) * itemsize
                n_bytes = max(block.n_bytes, returned_bytes)
                bucket = _bucket_with_room(filling, owner, n_bytes, settings.bucket_bytes)
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
    return Domain(
        ranks=ranks,
        parameters=tuple(parameters),
        itemsize=itemsize,
        rules=tuple(dict.fromkeys(rule for p in parameters.values() for rule in p.rules)),
        spread=spread,
        jobs=tuple(jobs),
        n_buckets=1 + max((last.bucket for last in filling.values()), default=-1),
        work={rank: balance.loads[rank] - loads[rank] for rank in ranks},
        gathered_bytes=gathered_bytes,
    )


def _elements_of_first_rank(shape: Shape, layout: Layout) -> int:
    """Return the elements of the first rank's part, which is the largest."""
    place = layout.places()[layout.ranks[0]]
    return math.prod(
        held_interval(size, dim, layout, place).length for dim, size in enumerate(shape)
    )


class _PlannedBlock(NamedTuple):
    """A block of a parameter, and the ranks that hold it."""

    parameter: int  # position in the plan
    name: str  # of the parameter
    number: int  # in the parameter
    work: int  # [FLOPs]
    n_bytes: int  # in full precision
    holders: BlockHolders


def _blocks_of(p: PlannedParameter, position: int, itemsize: int) -> list[_PlannedBlock]:
    """Return the blocks of a parameter, in the order of their numbers: matrix by matrix."""
    values = rule_values(p.rules)
    shapes = p.view.block_shapes
    # By part of a matrix: the parts of all matrices are alike.
    work = [newton_schulz_flops(*shape, p.steps, gram=p.gram) for shape in shapes]
    n_bytes = [rows * columns * itemsize for rows, columns in shapes]
    holders_of_all = holders_of_blocks(
        p.matrices(),
        state=p.matrices("gather"),
        updates=p.matrices("return"),
        scored=bool(values.block_keys),  # a score: a number per block
        line_tensors=tuple(tensor for _, tensor in values.line_tensors),
    )
    return [
        _PlannedBlock(
            parameter=position,
            name=p.name,
            number=number,
            work=work[number % len(shapes)],
            n_bytes=n_bytes[number % len(shapes)],
            holders=holders,
        )
        for number, holders in enumerate(holders_of_all)
    ]


def newton_schulz_flops(rows: int, columns: int, steps: int, *, gram: bool) -> int:
    """Return the floating-point operations of one orthogonalization, in the form for this shape."""
    m = min(rows, columns)
    n = max(rows, columns)
    if m == 1:
        return 4 * n
    if gram and n >= 2 * m:
        # Four products of m × m matrices in each step; R = X Xᵀ and X ← Q X three times each.
        return steps * 8 * m**3 + 12 * m * m * n
    # In each step X Xᵀ, its square, and the polynomial times X.
    return steps * (4 * m * m * n + 2 * m**3)


class _Filling(NamedTuple):
    """The number of the bucket that an owner is filling, and the bytes of its jobs in it."""

    bucket: int
    used_bytes: int


def _bucket_with_room(
    filling: dict[int, _Filling], owner: int, n_bytes: int, bucket_bytes: int
) -> int:
    """Choose the bucket of a job, and add the job's bytes to `filling`, by owner.

    Each owner fills its part of one bucket after the other, so the bound is on what one owner
    handles: whole blocks in full precision. A rank that holds most of the elements may send more,
    and headers and the inputs of rules come on top.
    """
    bucket, used_bytes = filling.get(owner, _Filling(bucket=0, used_bytes=0))
    if used_bytes and used_bytes + n_bytes > bucket_bytes:
        bucket += 1
        used_bytes = 0
    filling[owner] = _Filling(bucket, used_bytes + n_bytes)
    return bucket


# ----- describing a plan -------------------------------------------------------------------------


def _describe_one_process(plan: Plan) -> str:
    """Return the number of matrices and the FLOPs of each shape, the most expensive first."""
    flops: Counter[tuple[int, int]] = Counter()
    count: Counter[tuple[int, int]] = Counter()
    for p in plan.parameters:
        for shape in p.view.block_shapes:
            count[shape] += p.view.batch
            flops[shape] += p.view.batch * newton_schulz_flops(*shape, p.steps, gram=p.gram)
    text = [f"one process: {len(plan.parameters)} parameters, {sum(count.values())} matrices"]
    for shape, work in flops.most_common():
        text.append(f"  {count[shape]} of {shape[0]}x{shape[1]}: {work:.4g} FLOPs")
    text.append(f"a step: {sum(flops.values()):.4g} FLOPs")
    return "\n".join(text)


def _describe_domain(plan: Plan, domain: Domain) -> str:
    parameters = [plan.parameters[i] for i in domain.parameters]
    layouts = sorted({str(p.layout) for p in parameters})
    n_blocks = len({(job.parameter, job.block) for job in domain.jobs})
    n_staying = sum(job.bucket is None for job in domain.jobs)
    crossing = domain.crossing_buckets()
    replicas = ""
    if any(len(p.layout.replicas()) > 1 for p in parameters):
        replicas = f", replicas {'share' if domain.spread else 'repeat'} the work"
    momenta = ", 1 for the momenta" if domain.gathers_momenta else ""
    bytes_sent = domain.bytes_sent(plan.settings)
    return (
        f"{len(domain.ranks)} ranks; {len(parameters)} parameters, {n_blocks} matrices on "
        f"{'; '.join(layouts)}{replicas}; {n_staying} jobs stay, "
        f"{len(domain.jobs) - n_staying} travel in {domain.n_buckets} buckets\n"
        f"  collectives a step: {len(crossing['gather'])} to the owners, "
        f"{len(crossing['return'])} back{momenta}\n"
        f"  FLOPs a rank: {_mean_and_extremes(list(domain.work.values()))}\n"
        f"  bytes sent a rank: {_mean_and_extremes(list(bytes_sent.values()))}\n"
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
    text = []
    for job in domain.jobs:
        p = plan.parameters[job.parameter]
        rows, columns = p.view.block_shapes[job.block % len(p.view.block_shapes)]
        way = "stays" if job.bucket is None else f"bucket {job.bucket}"
        text.append(f"  rank {job.owner}: {p.name} block {job.block} ({rows}x{columns}), {way}")
    return text
