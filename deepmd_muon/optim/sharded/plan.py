"""The plan of which rank orthogonalizes which matrix, and of the messages: plain values, identical on every rank.

A *block* is one matrix of a parameter (one expert, one part of a fused weight). Its *job* has an owner, *sources* that
hold its momentum, and *destinations* that apply its update. Some jobs stay on one rank. The others form buckets; each
bucket takes one all-to-all to the owners and one back. Owners are chosen longest processing time first (R. L. Graham,
SIAM J. Appl. Math. 17, 416, 1969): blocks of all shapes, in decreasing order of work, go to the rank with the least
work so far; in a tie, to the one with fewer bytes, then to the lower rank.

Parameters whose meshes consist of the same ranks share a *domain*, which has its own exchanges. Replicas with a part of
the momenta each can also gather the momenta and repeat the work: then all jobs stay.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from deepmd_muon.optim.sharded.layout import Layout, held_runs, replicated, total
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
    """The values that messages carry for some rules, beside the elements.

    `blocks` and `lines` are the state tensors with numbers per block, and per row or column; they are sent and
    returned. For each element, `inputs` are sent beside the direction; for each piece, `sums` values of statistics.
    """

    blocks: tuple[str, ...]
    lines: tuple[tuple[str, StateTensor], ...]
    inputs: tuple[Input, ...]
    sums: int


@functools.lru_cache(maxsize=256)
def carried(rules: tuple[MatrixRule, ...]) -> Carried:
    """Return the values that messages carry for these rules."""
    tensors = tensors_of(rules)
    lines = tuple(
        (key, tensor) for key, tensor in tensors.items() if tensor.extent in ("rows", "columns")
    )
    blocks = tuple(key for key, tensor in tensors.items() if tensor.extent == "blocks")
    return Carried(blocks, lines, inputs_of(rules), sum(rule.sums for rule in rules))


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
        Iterations of the orthogonalization, and whether the Gram form may be used; they determine the work.
    state_layout
        The layout of its momentum, if different.
    masters
        Whether master weights with the layout of the state take its updates, instead of the elements.
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
        steps = len(coefficients_of(settings.schedule_of(entry.view.block_shapes[0])))
        rules, itemsize = matrix_rules(settings), moment_dtype(dtype).itemsize
        gram = settings.enable_gram
        masters = state_layout is not None and settings.master_weights and dtype.itemsize == NARROW
        return cls(
            entry.name,
            entry.shape,
            entry.view,
            layout,
            itemsize,
            rules,
            steps,
            gram,
            state_layout,
            masters,
        )

    def layout_of(self, leg: Leg) -> Layout:
        """Return the layout of a leg's pieces: momenta are gathered, and updates return to elements or masters."""
        return (
            self.state_layout
            if self.state_layout and (leg == "gather" or self.masters)
            else self.layout
        )

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        extras = f"{self.itemsize} bytes, rules {[*map(str, self.rules)]}, {self.steps} steps"
        kept = "state and updates" if self.masters else "state"
        state = f", {kept} on {self.state_layout}" if self.state_layout else ""
        return f"{self.name}: {size} as {self.view} on {self.layout}{state}, {extras}, gram {self.gram}"


class Job(NamedTuple):
    """The exchange of one block: sources and destinations map ranks to numbers of elements (0: state only).

    `lines` maps ranks to the numbers of rules' values that they keep for rows or columns; a message carries those
    of its holder.
    """

    parameter: int
    block: int
    owner: int
    sources: Mapping[int, int]
    destinations: Mapping[int, int]
    bucket: int | None
    lines: Mapping[int, int]

    def ends(self, leg: Leg) -> Iterator[tuple[int, int, int]]:
        """Yield sender, receiver and number of elements of every piece of one leg."""
        for rank, elements in (self.sources if leg == "gather" else self.destinations).items():
            yield (rank, self.owner, elements) if leg == "gather" else (self.owner, rank, elements)


def newton_schulz_flops(rows: int, columns: int, steps: int, *, gram: bool) -> int:
    """Return the floating-point operations of one orthogonalization, in the form used for this shape."""
    m, n = min(rows, columns), max(rows, columns)
    if m == 1:
        return 4 * n
    if gram and n >= 2 * m:
        return (
            steps * 8 * m**3 + 12 * m * m * n
        )  # products with R; and three times each, R = X Xᵀ and X ← Q X
    return steps * (4 * m * m * n + 2 * m**3)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Parameters that live on the same ranks with elements of the same size, and their jobs."""

    ranks: tuple[int, ...]  # global ranks, ascending
    parameters: tuple[int, ...]  # positions in the plan's parameters
    itemsize: int  # bytes of an element in full precision
    rules: tuple[
        MatrixRule, ...
    ]  # of all its parameters; headers have room for their values per block
    spread: bool  # whether replicas share the work; see `ShardedSettings.replication`
    jobs: tuple[Job, ...]  # in global order: decreasing work, then name, then block
    buckets: int  # number of exchanges
    work: Mapping[int, int]  # floating-point operations of each rank
    gathered: int = 0  # bytes of the momenta of one rank, if all ranks gather them before the step; see `RepeatedMuon`

    def header(self, leg: Leg) -> int:
        """Return the header's words per piece: presence, the rules' state per block, and (gather only) their sums."""
        found = carried(self.rules)
        return 1 + len(found.blocks) + (found.sums if leg == "gather" else 0)

    def planes(self, leg: Leg) -> int:
        """Return the number of values per element: the direction and the inputs that rules request, or the update."""
        return 1 + len(carried(self.rules).inputs) if leg == "gather" else 1

    def message_bytes(
        self, leg: Leg, pieces: int, lines: int, elements: int, settings: ShardedSettings
    ) -> int:
        """Return the length of one message: headers of all pieces, rules' lines, elements, padded to whole words."""
        dtype = settings.gather_dtype if leg == "gather" else settings.return_dtype
        payload = elements * self.planes(leg) * (self.itemsize if dtype == "full" else NARROW)
        return WORD * (pieces * self.header(leg) + lines + -(-payload // WORD))

    def messages(self, leg: Leg, settings: ShardedSettings) -> dict[tuple[int, int, int], int]:
        """Return the bytes of every message of one leg, by bucket, sender and receiver; none to oneself."""
        pieces: Counter[tuple[int, int, int]] = Counter()
        lines: Counter[tuple[int, int, int]] = Counter()
        elements: Counter[tuple[int, int, int]] = Counter()
        for job in self.jobs:
            if job.bucket is not None:
                for sender, receiver, size in job.ends(leg):
                    if sender != receiver:
                        pieces[job.bucket, sender, receiver] += 1
                        lines[job.bucket, sender, receiver] += job.lines.get(
                            sender if leg == "gather" else receiver, 0
                        )
                        elements[job.bucket, sender, receiver] += size
        return {
            key: self.message_bytes(leg, n, lines[key], elements[key], settings)
            for key, n in pieces.items()
        }

    def sent(self, settings: ShardedSettings) -> dict[int, int]:
        """Return the bytes that leave each rank in one step."""
        found = dict.fromkeys(self.ranks, self.gathered * (len(self.ranks) - 1))
        for leg in LEGS:
            for (_, sender, _), size in self.messages(leg, settings).items():
                found[sender] += size
        return found

    def exchanges(self) -> dict[Leg, tuple[int, ...]]:
        """Return the buckets whose gather, and whose return, exchange data between ranks."""
        found: dict[Leg, set[int]] = {"gather": set(), "return": set()}
        for job in self.jobs:
            if job.bucket is not None:
                for leg in LEGS:
                    if job.bucket not in found[leg] and any(a != b for a, b, _ in job.ends(leg)):
                        found[leg].add(job.bucket)
        return {leg: tuple(sorted(buckets)) for leg, buckets in found.items()}

    def seconds(self, settings: ShardedSettings) -> float:
        """Predict the time of one step, without overlap [s]."""
        collectives = sum(map(len, self.exchanges().values())) + bool(self.gathered)
        sent = max(self.sent(settings).values())
        work = max(self.work.values())
        return (
            work / FLOPS_PER_SECOND + sent / BYTES_PER_SECOND + collectives * SECONDS_PER_COLLECTIVE
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of all parameters of the Muon route."""

    parameters: tuple[PlannedParameter, ...]  # in the optimizer's order
    settings: ShardedSettings
    domains: tuple[Domain, ...]  # the largest first

    def lines(self, domain: Domain) -> list[str]:
        """Return statements, one per line, that must be equal on all ranks of a domain."""
        way = f"spread {domain.spread}, gathered {domain.gathered}"
        found = [f"plan version {VERSION}", str(self.settings), f"ranks {domain.ranks}, {way}"]
        found += [str(self.parameters[i]) for i in domain.parameters]
        found += [
            f"{self.parameters[job.parameter].name} block {job.block}: owner {job.owner}, bucket {job.bucket}"
            for job in domain.jobs
        ]
        return found

    def digest(self, domain: Domain) -> bytes:
        """Return the SHA-256 of `lines`."""
        return hashlib.sha256("\n".join(self.lines(domain)).encode()).digest()

    def describe(self, *, owners: bool = False) -> str:
        """Return the plan as text: balance, bytes and collectives of every domain; with `owners` every block."""
        lines = []
        if len(self.domains) == 1 and len(self.domains[0].ranks) == 1 and not owners:
            return _describe_one_process(self)
        for number, domain in enumerate(self.domains):
            lines.append(f"domain {number}: {_describe_domain(self, domain)}")
            if owners:
                lines += _owners(self, domain)
        if self.domains:
            work = sum(sum(domain.work.values()) for domain in self.domains)
            sent = sum(sum(domain.sent(self.settings).values()) for domain in self.domains)
            lines.append(f"a step on all ranks: {work:.4g} FLOPs, {sent:.4g} bytes sent")
        return "\n".join(lines) or "no matrices to orthogonalize"


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
    # The momenta of all domains are gathered, or none.
    domains = _domains(parameters, settings, gather=True)
    if len({bool(domain.gathered) for domain in domains}) > 1:
        domains = _domains(parameters, settings, gather=False)
    return Plan(tuple(parameters), settings, tuple(domains))


def _domains(
    parameters: Sequence[PlannedParameter], settings: ShardedSettings, *, gather: bool
) -> list[Domain]:
    """Plan all domains; `gather` allows replicas to gather momenta that they keep in parts."""
    members: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    for i, parameter in enumerate(parameters):
        members[tuple(sorted(parameter.layout.ranks)), parameter.itemsize].append(i)
    _refuse_overlaps(parameters)
    # Larger domains first: all ranks of a smaller domain inside one then know the loads from it.
    order = sorted(members.items(), key=lambda item: (-len(item[0][0]), item[1][0]))
    domains: list[Domain] = []
    for (ranks, itemsize), positions in order:
        before = [domain.work for domain in domains if set(ranks) <= set(domain.ranks)]
        loads = {rank: sum(work[rank] for work in before) for rank in ranks}
        repeats = {"spread": (True,), "repeat": (False,), "auto": (True, False)}[
            settings.replication
        ]
        shared = [parameters[i] for i in positions if len(parameters[i].layout.replicas()) > 1]
        cut = any(p.state_layout for p in shared)
        may_gather = gather and len(shared) == len(positions) and _can_be_gathered(shared, settings)
        if (cut and not may_gather) or (settings.replication == "auto" and not shared):
            repeats = (True,)
        choices = [
            _domain(parameters, positions, ranks, itemsize, loads, settings, spread=way)
            for way in repeats
        ]
        domains.append(
            min(choices, key=lambda domain: domain.seconds(settings))
            if len(choices) > 1
            else choices[0]
        )
    return domains


def _refuse_overlaps(parameters: Sequence[PlannedParameter]) -> None:
    """Raise ShardingError unless the sets of ranks that hold parameters are nested or disjoint.

    Ranks of sets that only overlap would start their collectives in different orders.
    """
    names: dict[frozenset[int], str] = {}
    for parameter in parameters:
        names.setdefault(frozenset(parameter.layout.ranks), parameter.name)
    for (ranks, name), (others, other_name) in itertools.combinations(names.items(), 2):
        if ranks & others and not (ranks <= others or others <= ranks):
            raise ShardingError(
                f"{name!r} is on ranks {sorted(ranks)}, {other_name!r} on ranks {sorted(others)}: sets of ranks that "
                "hold parameters must be nested or disjoint; give both a mesh of all these ranks"
            )


def _can_be_gathered(parameters: Sequence[PlannedParameter], settings: ShardedSettings) -> bool:
    """Return whether replicas may gather these momenta: they fit a bucket, and no other state is in parts."""
    size = sum(math.prod(p.shape) * p.itemsize for p in parameters)
    others = any(p.state_layout is None or p.masters or carried(p.rules).lines for p in parameters)
    return settings.gather_dtype == "full" and size <= settings.bucket_bytes and not others


def plan_from_routes(
    routes: Iterable[RouteEntry],
    layout: Layout,
    settings: ShardedSettings | None = None,
    **options: Any,
) -> Plan:
    """Plan a model whose parameters all have one layout, for example for a cluster that is not available yet.

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
    chosen = [
        (entry, entry.view) for entry in routes if entry.view is not None and entry.route == "muon"
    ]
    planned = [
        PlannedParameter(entry.name, entry.shape, view, layout, **options) for entry, view in chosen
    ]
    return make_plan(planned, settings)


def plan_of_one_process(groups: Sequence[Group], settings: ShardedSettings) -> Plan:
    """Return the plan of a process that orthogonalizes every matrix itself; it sends nothing."""
    alone = replicated((0,))
    routed = [
        (p, entry, group) for group in groups for p, entry in group.routed if entry.route == "muon"
    ]
    planned = [
        PlannedParameter.of(entry, p.dtype, group.settings, alone) for p, entry, group in routed
    ]
    return make_plan(planned, settings)


class _PlannedBlock(NamedTuple):
    work: int
    name: str
    number: int
    parameter: int
    size: int
    holders: BlockHolders


def _domain(
    parameters: Sequence[PlannedParameter],
    positions: Sequence[int],
    ranks: tuple[int, ...],
    itemsize: int,
    loads: Mapping[int, int],
    settings: ShardedSettings,
    *,
    spread: bool,
) -> Domain:
    """Choose owners and form buckets for one domain; replicas that repeat the work gather momenta first."""
    blocks: list[_PlannedBlock] = []
    gathered = 0
    for i in positions:
        p = parameters[i]
        if p.state_layout is not None and not spread and len(ranks) > 1:
            gathered += _largest_part(p.shape, p.state_layout) * itemsize
            p = dataclasses.replace(p, state_layout=None)
        shapes = p.view.block_shapes
        work = [newton_schulz_flops(*shape, p.steps, gram=p.gram) for shape in shapes]
        size = [rows * columns for rows, columns in shapes]
        for number, holders in enumerate(
            holders_of_blocks(
                p.shape,
                p.view,
                p.layout,
                p.layout_of("gather"),
                p.layout_of("return"),
                scored=bool(carried(p.rules).blocks),
                lines=tuple(tensor for _, tensor in carried(p.rules).lines),
            )
        ):
            part = number % len(shapes)
            blocks.append(
                _PlannedBlock(work[part], p.name, number, i, size[part] * itemsize, holders)
            )
    blocks.sort(key=lambda block: (-block.work, block.name, block.number))
    balance = Balance(loads)
    jobs: list[Job] = []
    filled: dict[
        int, tuple[int, int]
    ] = {}  # by owner, the bucket that it is filling and the bytes in it
    for work_of_block, _, number, i, bytes_of_block, holders in blocks:
        for owner, sources, destinations in holders.assign(
            balance, work_of_block, bytes_of_block, spread=spread
        ):
            bucket = None
            if any(rank != owner for rank in (*sources, *destinations)):
                outgoing = sum(destinations.values()) * itemsize
                bucket, used = filled.get(owner, (0, 0))
                load = max(bytes_of_block, outgoing)
                if used and used + load > settings.bucket_bytes:
                    bucket, used = bucket + 1, 0
                filled[owner] = bucket, used + load
            jobs.append(Job(i, number, owner, sources, destinations, bucket, holders.lines))
    count = 1 + max((bucket for bucket, _ in filled.values()), default=-1)
    rules = tuple(dict.fromkeys(rule for i in positions for rule in parameters[i].rules))
    work_here = {rank: balance.loads[rank] - loads[rank] for rank in ranks}
    return Domain(
        ranks, tuple(positions), itemsize, rules, spread, tuple(jobs), count, work_here, gathered
    )


def _largest_part(shape: tuple[int, ...], layout: Layout) -> int:
    """Return the number of elements of the rank that comes first, which has the largest part."""
    place = next(layout.coordinates())
    return math.prod(total(held_runs(size, dim, layout, place)) for dim, size in enumerate(shape))


def _describe_one_process(plan: Plan) -> str:
    """Return the number of matrices and the FLOPs of each shape, the most expensive first."""
    flops: Counter[tuple[int, int]] = Counter()
    count: Counter[tuple[int, int]] = Counter()
    for p in plan.parameters:
        for rows, columns in p.view.block_shapes:
            count[rows, columns] += p.view.batch
            flops[rows, columns] += p.view.batch * newton_schulz_flops(
                rows, columns, p.steps, gram=p.gram
            )
    lines = [f"one process: {len(plan.parameters)} parameters, {sum(count.values())} matrices"]
    lines += [
        f"  {count[m, n]} of {m}x{n}: {work:.4g} FLOPs" for (m, n), work in flops.most_common()
    ]
    return "\n".join([*lines, f"a step: {sum(flops.values()):.4g} FLOPs"])


def _describe_domain(plan: Plan, domain: Domain) -> str:
    blocks = len({(job.parameter, job.block) for job in domain.jobs})
    staying = sum(job.bucket is None for job in domain.jobs)
    layouts = sorted({str(plan.parameters[i].layout) for i in domain.parameters})
    shared = any(len(plan.parameters[i].layout.replicas()) > 1 for i in domain.parameters)
    exchanges = domain.exchanges()
    replicas = f", replicas {'share' if domain.spread else 'repeat'} the work" if shared else ""
    return (
        f"{len(domain.ranks)} ranks; {len(domain.parameters)} parameters, {blocks} matrices on {'; '.join(layouts)}"
        f"{replicas}; {staying} jobs stay, {len(domain.jobs) - staying} travel in {domain.buckets} buckets\n"
        f"  collectives a step: {len(exchanges['gather'])} to the owners, {len(exchanges['return'])} back"
        f"{', 1 for the momenta' if domain.gathered else ''}\n"
        f"  FLOPs a rank: {_spread(list(domain.work.values()))}\n"
        f"  bytes sent a rank: {_spread(list(domain.sent(plan.settings).values()))}\n"
        f"  digest {plan.digest(domain).hex()[:16]}"
    )


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
