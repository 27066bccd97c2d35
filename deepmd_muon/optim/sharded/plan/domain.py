"""The parts of a plan: its parameters, the jobs of their blocks, and domains.

A `Domain` also knows the sizes of its messages, from which the plan predicts times. `messages.Side`
lays out the messages of one rank; `Domain.header_words` and `Domain.n_planes` keep both alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from deepmd_muon.optim.config import HybridMuonConfig, ShardedSettings
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.routing.routes import RouteEntry
from deepmd_muon.optim.routing.views import MatrixView, Shape
from deepmd_muon.optim.rules.interface import Input, MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import inputs_of, matrix_rules, tensors_of
from deepmd_muon.optim.sharded.layout import Layout, MatrixLayout, RankSet
from deepmd_muon.optim.update.adam import moment_dtype

Leg = Literal["gather", "return"]
LEGS: tuple[Leg, Leg] = ("gather", "return")
WORD_BYTES = 8  # a float64, the unit of buffers and messages
_NARROW_BYTES = 2  # an element in a 16-bit type


# ----- parameters --------------------------------------------------------------------------------


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
        elements. False without `state_layout`: master weights then have the layout of the elements.
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
            # `steps` and `gram` only serve to estimate work, so those of the first part of a fused
            # weight suffice for all its parts.
            steps=len(coefficients_of(settings.schedule_of(entry.view.block_shapes[0]))),
            gram=settings.enable_gram,
            state_layout=state_layout,
            masters=(
                settings.master_weights
                and state_layout is not None
                and dtype.itemsize == _NARROW_BYTES
            ),
        )

    @property
    def has_replicas(self) -> bool:
        """Whether there are several complete copies of its elements."""
        return len(self.layout.replicas()) > 1

    def matrices(self, leg: Leg | None = None) -> MatrixLayout:
        """Return the layout of the matrices whose pieces a leg moves.

        leg         tensor                                      layout
        "gather"    momentum                                    of the state
        "return"    master weights if any, else the elements    of the state; of the elements
        None        elements                                    of the elements
        """
        is_state = leg == "gather" or (leg == "return" and self.masters)
        layout = self.layout
        if is_state and self.state_layout is not None:
            layout = self.state_layout
        return MatrixLayout(self.shape, self.view, layout)

    def block_flops(self) -> list[int]:
        """Return the work [FLOPs] of each part of a matrix, the same in all matrices of a batch.

        These are the blocks of one matrix: block number k of the parameter is part k % len(parts).
        """
        return [
            newton_schulz_flops(rows, columns, self.steps, gram=self.gram)
            for rows, columns in self.view.block_shapes
        ]

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


def newton_schulz_flops(rows: int, columns: int, steps: int, *, gram: bool) -> int:
    """Return the floating-point operations of one orthogonalization, in the form for this shape.

    X is the matrix (m, n) with m ≤ n, R = X Xᵀ its Gram matrix (m, m), and Q (m, m) the product of
    the polynomials of steps; see `polar.newton_schulz`.
    """
    m = min(rows, columns)
    n = max(rows, columns)
    if m == 1:
        return 4 * n  # a vector is only normalized
    if gram and n >= 2 * m:
        # Four products of m × m matrices in each step; R = X Xᵀ and X ← Q X about three times each.
        return steps * 8 * m**3 + 12 * m * m * n
    # In each step X Xᵀ, its square, and the polynomial times X.
    return steps * (4 * m * m * n + 2 * m**3)


# ----- what messages carry for rules -------------------------------------------------------------


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


# ----- jobs and domains --------------------------------------------------------------------------


class Job(NamedTuple):
    """What moves for one block: pieces to its owner, and updates back.

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
        By rank, how many values it holds for this block of all state tensors with values per line.
        Its messages carry them. Ranks of all replicas are among them, also if replicas repeat the
        work.
    """

    parameter: int
    block: int
    owner: int
    sources: Mapping[int, int]
    destinations: Mapping[int, int]
    bucket: int | None
    line_values: Mapping[int, int]

    def holders(self, leg: Leg) -> Mapping[int, int]:
        """Return the ranks that send to the owner, or receive from it: elements by rank."""
        return self.sources if leg == "gather" else self.destinations


class MessageKey(NamedTuple):
    """A message of one leg of a domain: the number of its bucket, and the ranks at its ends."""

    bucket: int
    sender: int
    receiver: int


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
        By rank [FLOPs].
    gathered_bytes
        Bytes of the largest part of the momenta, which every rank sends if the domain
        `gathers_momenta`; else 0.
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

    def header_words(self, leg: Leg) -> int:
        """Return the words of a piece's header: presence, state per block, sums (gather only).

        The module `messages` has their order.
        """
        values = rule_values(self.rules)
        return 1 + len(values.block_keys) + (values.sums if leg == "gather" else 0)

    def n_planes(self, leg: Leg) -> int:
        """Return the number of values that a message has for each element.

        The gather has its direction and the inputs that rules request, the return its update.
        """
        return 1 + len(rule_values(self.rules).inputs) if leg == "gather" else 1

    def bytes_of_messages(self, leg: Leg, settings: ShardedSettings) -> dict[MessageKey, int]:
        """Return the bytes of every message of one leg, except from a rank to itself."""
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
