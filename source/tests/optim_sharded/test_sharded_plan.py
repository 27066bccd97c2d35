"""The plan as a value: regions against slicing, every element routed once, balance, bytes, one digest."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from example_rules import SoapMuon
from hypothesis import given
from hypothesis import strategies as st

from deepmd_muon.optim.errors import ShardingError
from deepmd_muon.optim.routing.views import MatrixView, matrix_view
from deepmd_muon.optim.rules.magma import Magma
from deepmd_muon.optim.rules.normuon import NorMuon
from deepmd_muon.optim.sharded import (
    Layout,
    PlannedParameter,
    ShardedSettings,
    ShardPlacement,
    make_plan,
)
from deepmd_muon.optim.sharded.jobs import travelling_jobs
from deepmd_muon.optim.sharded.layout import (
    Overlap,
    block_bounds,
    held_runs,
    overlap,
    regions_by_rank,
    replicated,
    score_layout,
    state_layout,
)
from deepmd_muon.optim.sharded.messages import Side
from deepmd_muon.optim.sharded.pieces import Rectangle, piece_of, rectangles
from deepmd_muon.optim.sharded.plan import LEGS, newton_schulz_flops
from deepmd_muon.optim.sharded.process_groups import largest_set


def fsdp(ranks, dim=0):
    return Layout((ranks,), tuple(range(ranks)), (ShardPlacement(dim),))


def parameter(name, shape, layout, **options):
    return PlannedParameter(name, shape, matrix_view(shape, "slice"), layout, **options)


@st.composite
def layouts(draw, dims, most=64):
    """Draw any layout of a parameter with `dims` dimensions on up to `most` ranks."""
    mesh = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    while torch.tensor(mesh).prod() > most:
        mesh[mesh.index(max(mesh))] //= 2
    placements = [
        draw(
            st.none()
            | st.builds(ShardPlacement, st.integers(0, dims - 1), st.sampled_from([1, 1, 2, 3]))
        )
        for _ in mesh
    ]
    size = int(torch.tensor(mesh).prod())
    return Layout(tuple(mesh), tuple(range(size)), tuple(placements))


@st.composite
def parameters(draw):
    """Draw several parameters on one mesh's ranks: vectors' matrices, stacks, splits, thin and small ones."""
    found = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
        view = matrix_view(shape, draw(st.sampled_from(["slice", "flat"])))
        if view is None:
            continue
        if view.rows > 1 and draw(st.booleans()):
            k = draw(st.integers(1, view.rows - 1))
            view = dataclasses.replace(view, axis="rows", sizes=(k, view.rows - k))
        elif view.columns > 1 and draw(st.booleans()):
            view = dataclasses.replace(view, axis="columns", sizes=(1, view.columns - 1))
        layout = draw(layouts(len(shape)))
        rules = draw(
            st.sampled_from(
                [
                    (),
                    (Magma(),),
                    (Magma(), NorMuon()),
                    (NorMuon(neurons="columns"),),
                    (SoapMuon(), Magma()),
                ]
            )
        )
        found.append(
            PlannedParameter(f"p{i}", shape, view, layout, draw(st.sampled_from([4, 8])), rules)
        )
    return found


def local_of(full, layout, rank):
    """Cut a full tensor as a rank holds it, placement by placement with torch.chunk."""
    place = layout.places()[rank]
    for index, count, placement in zip(place, layout.mesh, layout.placements, strict=True):
        if placement is None:
            continue
        pieces = [full.narrow(placement.dim, 0, 0)] * 0
        for piece in chunks(full, placement.stride, placement.dim):
            pieces.append(chunks(piece, count, placement.dim)[index])
        full = torch.cat(pieces, dim=placement.dim)
    return full


def chunks(x, count, dim):
    """torch.chunk with empty pieces up to `count`."""
    found = list(x.chunk(count, dim)) if x.shape[dim] else []
    return found + [x.narrow(dim, 0, 0)] * (count - len(found))


def cut(name, shape, ranks, itemsize=4, rules=(), **options):
    state = state_layout(shape, ranks, (len(ranks),), matrices=True)
    return parameter(
        name,
        shape,
        replicated(ranks),
        itemsize=itemsize,
        rules=rules,
        state_layout=state,
        **options,
    )


def test_replicas_gather_small_momenta_and_share_the_work_of_large_ones():
    small = [
        cut("a", (24, 16), range(4), rules=(Magma(),)),
        cut("b", (10, 7), range(4), rules=(Magma(),)),
    ]
    told = ShardedSettings(state="sharded")
    (domain,) = make_plan(small, told).domains
    assert (domain.spread, domain.n_buckets, domain.gathered_bytes) == (
        False,
        0,
        4 * (6 * 16 + 10 * 2),
    )  # ceil(7 / 4) = 2
    assert {job.owner for job in domain.jobs} == {0, 1, 2, 3}
    assert all(job.sources == {job.owner: n} for job in domain.jobs for n in job.sources.values())
    assert domain.bytes_sent(told) == dict.fromkeys(range(4), 3 * domain.gathered_bytes)
    plan = make_plan(small, told)
    assert "1 for the momenta" in plan.describe()
    # Work that takes longer than the bytes is shared, and so is what cannot be gathered.
    large = [cut(f"w{i}", (2048, 2048), range(4)) for i in range(8)]
    for params, settings in (
        (large, {}),
        (small, {"replication": "spread"}),
        (small, {"bucket_bytes": 1000}),
        (small, {"gather_dtype": "bfloat16"}),
        ([cut("a", (24, 16), range(4), rules=(NorMuon(),))], {}),
        ([cut("a", (24, 16), range(4), masters=True)], {}),
        ([*small, parameter("c", (8, 8), Layout((4,), (0, 1, 2, 3), (ShardPlacement(0),)))], {}),
        ([cut("a", (24, 16), range(1))], {}),
    ):
        domains = make_plan(params, dataclasses.replace(told, **settings)).domains
        assert all(domain.spread and not domain.gathered_bytes for domain in domains), settings


def test_ranks_with_further_domains_plan_the_common_one_alike():
    common = [cut("a", (24, 16), range(4)), cut("b", (10, 7), range(4))]
    experts = [parameter("e", (64, 64), Layout((2,), (2, 3), (ShardPlacement(0),)))]
    settings = ShardedSettings(state="sharded")
    fewer = make_plan(common, settings)
    more = make_plan([*common, *experts], settings)
    assert len(more.domains) == 2
    assert fewer.domains[0].gathered_bytes
    assert fewer.statements(fewer.domains[0]) == more.statements(more.domains[0])
    assert not more.domains[1].gathered_bytes
    large = [cut(f"w{i}", (2048, 2048), range(4), itemsize=8) for i in range(8)]
    domains = make_plan([*common, *large], settings).domains
    assert [domain.gathered_bytes > 0 for domain in domains] == [True, False]


@given(parameters())
def test_regions_equal_chunks_of_torch(drawn):
    for p in drawn:
        full = torch.arange(torch.Size(p.shape).numel()).view(p.shape)
        for rank, region in regions_by_rank(p.matrices()).items():
            local = local_of(full, p.layout, rank)
            b, r, c = (
                torch.tensor([i for a, z in runs for i in range(a, z)], dtype=torch.long)
                for runs in region
            )
            expected = full.reshape(p.view.shape)[b][:, r][:, :, c]
            assert torch.equal(local.reshape(region.shape), expected)


@given(parameters(), st.sampled_from(["spread", "repeat"]), st.sampled_from([1, 64, 2**26]))
def test_every_element_is_gathered_once_and_returned_to_every_holder(
    drawn, replication, bucket_bytes
):
    plan = make_plan(drawn, ShardedSettings(replication=replication, bucket_bytes=bucket_bytes))
    planned = [i for domain in plan.domains for i in domain.parameters]
    assert sorted(planned) == list(range(len(drawn)))
    for domain in plan.domains:
        served = {
            i: {rank: torch.zeros(drawn[i].shape) for rank in domain.ranks}
            for i in domain.parameters
        }
        for job in domain.jobs:
            p = drawn[job.parameter]
            parts = block_bounds(p.view)
            batch, part = divmod(job.block, len(parts))
            r0, r1, c0, c1 = parts[part]
            gathered = torch.zeros(p.view.shape)
            of = regions_by_rank(p.matrices())
            for leg, ends in (("gather", job.sources), ("return", job.destinations)):
                for rank, elements in ends.items():
                    rows, columns = (
                        overlap(of[rank].rows, r0, r1),
                        overlap(of[rank].columns, c0, c1),
                    )
                    present = any(a <= batch < z for a, z in of[rank].batch)
                    assert elements == present * rows.size * columns.size
                    target = (
                        gathered
                        if leg == "gather"
                        else served[job.parameter][rank].view(p.view.shape)
                    )
                    if elements:
                        for (a, z), (y, x) in itertools.product(rows.runs, columns.runs):
                            target[batch, r0 + a : r0 + z, c0 + y : c0 + x] += 1
            expected = torch.zeros(p.view.shape)
            expected[batch, r0:r1, c0:c1] = 1
            assert torch.equal(gathered, expected)
        for i, per_rank in served.items():
            p = drawn[i]
            for rank, region in regions_by_rank(p.matrices()).items():
                expected = torch.zeros(p.view.shape)
                b, r, c = (
                    torch.tensor([i for a, z in runs for i in range(a, z)], dtype=torch.long)
                    for runs in region
                )
                if len(b) and len(r) and len(c):
                    expected[torch.meshgrid(b, r, c, indexing="ij")] = 1
                assert torch.equal(per_rank[rank].view(p.view.shape), expected)


@given(
    st.integers(2, 16),
    st.lists(
        st.sampled_from([(5, 7), (16, 16), (2, 9), (6, 8, 16), (33, 2)]), min_size=1, max_size=6
    ),
    st.sampled_from([(), (Magma(),), (NorMuon(),)]),
)
def test_updates_return_to_the_parts_of_master_weights(ranks, shapes, rules):
    layout = replicated(range(ranks))
    plans = []
    for masters in (True, False):
        drawn = [
            parameter(
                f"p{i}",
                shape,
                layout,
                rules=rules,
                state_layout=state_layout(shape, layout.ranks, layout.mesh, matrices=True),
                masters=masters,
            )
            for i, shape in enumerate(shapes)
        ]
        plans.append(make_plan(drawn, ShardedSettings(state="sharded", replication="spread")))
    sent = [sum(plan.domains[0].bytes_sent(plan.settings).values()) for plan in plans]
    assert sent[0] < sent[1]
    assert plans[0].digest(plans[0].domains[0]) != plans[1].digest(plans[1].domains[0])
    for job in plans[0].domains[0].jobs:
        view = plans[0].parameters[job.parameter].view
        assert {rank: n for rank, n in job.destinations.items() if n} == dict(job.sources)
        assert sum(job.sources.values()) == view.rows * view.columns
        if Magma() in rules:
            assert job.destinations.keys() == {*range(ranks)}  # all of them keep the score


@given(parameters(), st.randoms(use_true_random=False))
def test_work_bytes_and_digest_agree_with_the_jobs(drawn, shuffle):
    plan = make_plan(drawn)
    again = make_plan([dataclasses.replace(p) for p in drawn])
    for domain, twin in zip(plan.domains, again.domains, strict=True):
        assert plan.digest(domain) == again.digest(twin)
        work = dict.fromkeys(domain.ranks, 0)
        for job in domain.jobs:
            p = drawn[job.parameter]
            shape = p.view.block_shapes[job.block % len(p.view.block_shapes)]
            work[job.owner] += newton_schulz_flops(*shape, p.steps, gram=p.gram)
            stays = {*job.sources, *job.destinations} == {job.owner}
            assert (job.bucket is None) == stays
        assert work == domain.work
        sent = dict.fromkeys(domain.ranks, 0)
        for leg in LEGS:
            planes = 1 + any(rule.inputs for rule in domain.rules) if leg == "gather" else 1
            for (bucket, sender, receiver), size in domain.bytes_of_messages(
                leg, plan.settings
            ).items():
                holder, owner = (sender, receiver) if leg == "gather" else (receiver, sender)
                pieces = [
                    job
                    for job in domain.jobs
                    if (job.bucket, job.owner) == (bucket, owner) and holder in job.holders(leg)
                ]
                elements = sum(job.holders(leg)[holder] for job in pieces)
                lines = sum(job.line_values.get(holder, 0) for job in pieces)
                words = (
                    len(pieces) * domain.header_words(leg)
                    + lines
                    + -(-elements * planes * domain.itemsize // 8)
                )
                assert size == 8 * words
                sent[sender] += size
        assert sent == domain.bytes_sent(plan.settings)
        assert all(
            0 <= job.bucket < domain.n_buckets for job in domain.jobs if job.bucket is not None
        )
        # Jobs come in one global order whatever the order in which parameters were given.
        mixed = list(drawn)
        shuffle.shuffle(mixed)
        if len(plan.domains) == 1:
            other = make_plan(mixed).domains[0]
            named = [(drawn[j.parameter].name, j.block, j.owner, j.bucket) for j in domain.jobs]
            assert named == [
                (mixed[j.parameter].name, j.block, j.owner, j.bucket) for j in other.jobs
            ]


@given(
    st.integers(2, 64),
    st.lists(st.tuples(st.integers(2, 300), st.integers(2, 300)), min_size=1, max_size=80),
)
def test_balance_keeps_the_bound_of_list_scheduling(ranks, shapes):
    """No rank has more than the mean plus (1 − 1/W) of the largest block that travels."""
    drawn = [parameter(f"p{i:02}", shape, fsdp(ranks)) for i, shape in enumerate(shapes)]
    (domain,) = make_plan(drawn).domains
    work = [newton_schulz_flops(*shape, 10, gram=True) for shape in shapes]
    assert max(domain.work.values()) <= sum(work) / ranks + (1 - 1 / ranks) * max(work) + 1e-6


@given(st.integers(2, 3), st.lists(st.integers(4, 40), min_size=1, max_size=7))
def test_balance_is_within_four_thirds_of_the_best(ranks, sizes):
    drawn = [parameter(f"p{i}", (size, size), fsdp(ranks)) for i, size in enumerate(sizes)]
    (domain,) = make_plan(drawn).domains
    work = [newton_schulz_flops(size, size, 10, gram=True) for size in sizes]
    best = min(
        max(sum(w for w, o in zip(work, owners, strict=True) if o == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(work))
    )
    assert max(domain.work.values()) <= (4 / 3 - 1 / (3 * ranks)) * best


def test_whole_matrices_stay_where_they_are():
    mesh = Layout((4,), (0, 1, 2, 3), (ShardPlacement(0),))
    plan = make_plan([PlannedParameter("experts", (8, 5, 7), MatrixView(8, 5, 7), mesh)])
    (domain,) = plan.domains
    assert domain.n_buckets == 0
    assert [job.owner for job in domain.jobs] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert domain.bytes_sent(plan.settings) == dict.fromkeys(range(4), 0)


def test_the_example_of_the_package():
    """The docstring of `optim.sharded.plan` shows this plan."""
    shapes = {"a": (8, 6), "b": (7, 6), "c": (4, 4), "experts": (2, 4, 4)}
    plan = make_plan(
        [parameter(name, shape, fsdp(2)) for name, shape in shapes.items()],
        ShardedSettings(bucket_bytes=200),
    )
    (domain,) = plan.domains
    jobs = [
        (plan.parameters[job.parameter].name, job.block, job.sources, job.owner, job.bucket)
        for job in domain.jobs
    ]
    assert jobs == [
        ("a", 0, {0: 24, 1: 24}, 0, 0),
        ("b", 0, {0: 24, 1: 18}, 1, 0),
        ("c", 0, {0: 8, 1: 8}, 1, 1),
        ("experts", 0, {0: 16}, 0, None),
        ("experts", 1, {1: 16}, 1, None),
    ]
    for leg in LEGS:
        sizes = domain.bytes_of_messages(leg, plan.settings)
        assert {size for key, size in sizes.items() if key.bucket == 0} == {104}


def test_experts_split_inside_their_group_are_owned_there():
    """Expert parallelism over 4, each expert's rows over 2 ranks more: owners hold a part of what they own."""
    mesh = Layout((2, 4), tuple(range(8)), (ShardPlacement(1), ShardPlacement(0)))
    (domain,) = make_plan(
        [PlannedParameter("experts", (8, 6, 6), MatrixView(8, 6, 6), mesh)]
    ).domains
    assert all(job.owner in job.sources for job in domain.jobs)
    assert len(set(domain.work.values())) == 1


@pytest.mark.parametrize(
    ("replication", "largest", "sent"),
    [
        # N = 4 matrices of 64 elements on 2 replicas × 2 shards: (N/W)(S−1)/S gathered, N/S (R−1)/R and the same again
        ("spread", 1, 4 * (64 // 2 + 64 // 2 + 64)),
        ("repeat", 2, 4 * (2 * 64 // 2 + 2 * 64 // 2)),
    ],
)
def test_hsdp_shares_or_repeats(replication, largest, sent):
    mesh = Layout((2, 2), (0, 1, 2, 3), (None, ShardPlacement(0)))
    drawn = [parameter(f"p{i}", (8, 8), mesh) for i in range(4)]
    (domain,) = make_plan(drawn, ShardedSettings(replication=replication)).domains
    one = newton_schulz_flops(8, 8, 10, gram=True)
    assert set(domain.work.values()) == {largest * one}
    # Each of two pieces gathered or returned carries a header of one word.
    headers = {"spread": 8 * (1 + 3), "repeat": 8 * (2 + 2)}[replication]
    assert set(domain.bytes_sent(ShardedSettings()).values()) == {sent + headers}


def test_replicas_repeat_small_work_and_share_large_work():
    small = [parameter(f"p{i}", (64, 64), replicated(range(8))) for i in range(16)]
    large = [parameter(f"p{i}", (4096, 4096), replicated(range(8))) for i in range(16)]
    (repeated,), (shared,) = make_plan(small).domains, make_plan(large).domains
    assert (repeated.spread, repeated.n_buckets) == (False, 0)
    assert shared.spread
    assert shared.crossing_buckets() == {"gather": (), "return": (0, 1)}


def test_domains_are_apart_and_know_the_load_before():
    world, pair = fsdp(4), Layout((2,), (0, 1), (ShardPlacement(0),))
    drawn = [
        parameter("a", (8, 8), pair),
        parameter("b", (64, 64), world),
        parameter("c", (8, 8), world, itemsize=8),
    ]
    plan = make_plan(drawn)
    assert [(d.ranks, d.parameters) for d in plan.domains] == [
        ((0, 1, 2, 3), (1,)),
        ((0, 1, 2, 3), (2,)),
        ((0, 1), (0,)),
    ]
    # b goes to rank 0; c and a, each in exchanges of its own, to the next rank that has had less.
    assert [job.owner for domain in plan.domains for job in domain.jobs] == [0, 1, 1]


def test_a_rank_receives_no_more_than_a_bucket():
    drawn = [parameter(f"p{i:02}", (16, 16), fsdp(2)) for i in range(12)]
    (domain,) = make_plan(drawn, ShardedSettings(bucket_bytes=2 * 16 * 16 * 4)).domains
    assert domain.n_buckets == 3
    assert [sum(job.bucket == k for job in domain.jobs) for k in range(3)] == [4, 4, 4]


@given(parameters())
def test_scores_live_with_their_blocks(drawn):
    for p in drawn:
        scores = score_layout(p.matrices())
        everywhere = all(x is None for x in scores.placements)
        places = zip(
            p.layout.places().values(),
            regions_by_rank(p.matrices()).values(),
            strict=True,
        )
        for place, region in places:
            kept = {i for a, z in held_runs(p.view.blocks, 0, scores, place) for i in range(a, z)}
            parts = max(1, len(p.view.sizes))
            own = {i for a, z in region.batch for i in range(a * parts, z * parts)}
            assert kept == (set(range(p.view.blocks)) if everywhere else own)


def test_a_large_plan_takes_seconds():
    """70 layers of 7 matrices on 1024 ranks, and a mixture of 58 × 3 × 64 experts on the same."""
    random.seed(0)
    shapes = [(8192, 8192), (1024, 8192), (28672, 8192)]
    dense = [parameter(f"dense{i:03}", random.choice(shapes), fsdp(1024)) for i in range(70)]
    mesh = Layout((16, 64), tuple(range(1024)), (ShardPlacement(1), ShardPlacement(0)))
    experts = [
        PlannedParameter(f"experts{i:03}", (64, 2048, 7168), MatrixView(64, 2048, 7168), mesh)
        for i in range(20)
    ]
    (domain,) = make_plan(dense + experts).domains
    assert len(domain.jobs) == 70 + 64 * 20
    assert max(domain.work.values()) < 1.1 * sum(domain.work.values()) / 1024 + max(
        newton_schulz_flops(*s, 10, gram=True) for s in shapes
    )


def test_describe_says_who_and_how_much():
    mesh = Layout((2, 2), (0, 1, 2, 3), (None, ShardPlacement(0)))
    plan = make_plan(
        [parameter("w", (8, 6), mesh), parameter("v", (4, 4), mesh)],
        ShardedSettings(replication="spread"),
    )
    text = plan.describe(owners=True)
    assert (
        "4 ranks; 2 parameters, 2 matrices on mesh 2x2: Replicate, Shard(0), replicas share the work"
        in text
    )
    assert "collectives a step: 1 to the owners, 1 back" in text
    assert "rank 0: w block 0 (8x6), bucket 0" in text
    assert "rank 1: v block 0 (4x4), bucket 0" in text
    assert make_plan([]).describe() == "no matrices to orthogonalize"


def test_sets_of_ranks_that_only_overlap_are_refused():
    def planned(name, ranks):
        layout = Layout((len(ranks),), ranks, (ShardPlacement(0),))
        return PlannedParameter(name, (8, 8), matrix_view((8, 8), "slice"), layout)

    make_plan([planned("w", (0, 1, 2)), planned("a", (0, 1)), planned("b", (2,))])
    with pytest.raises(ShardingError, match=r"'a' is on ranks \[0, 1\], 'b' on ranks \[1, 2\]"):
        make_plan([planned("a", (0, 1)), planned("b", (1, 2))])
    assert largest_set([(0, 1), (0, 1, 2)]) == (0, 1, 2)
    with pytest.raises(ShardingError, match=r"on ranks \(1, 2\) and on ranks \(0, 1\)"):
        largest_set([(0, 1), (1, 2)])  # vectors, too: rank 0 would not skip for a NaN of rank 2


def test_messages_of_the_example():
    """The table in the docstring of `messages`: (8, 6) in two halves of rows, owned by rank 0."""
    # Of two equal matrices each rank owns one.
    plan = make_plan([parameter("v", (8, 6), fsdp(2)), parameter("w", (8, 6), fsdp(2))])
    (domain,) = plan.domains
    (job,) = (job for job in domain.jobs if job.owner == 0)
    domain = dataclasses.replace(domain, jobs=(job,))

    def description(rank, leg, *, owns):
        (rank_jobs,) = travelling_jobs(plan, domain, rank)
        side = Side(rank_jobs, leg, torch.device("cpu"), owns=owns)
        rows = [x.piece.rows.runs for x in side.pieces]
        starts = [x.element_start for x in side.pieces]
        return rows, side.splits, side.header_index.tolist(), starts

    for leg in LEGS:
        for rank, runs in ((0, ((0, 4),)), (1, ((4, 8),))):
            assert description(rank, leg, owns=False) == ([runs], [13, 0], [[0]], [2])
        both = ([((0, 4),), ((4, 8),)], [13, 13], [[0], [13]], [2, 28])
        assert description(0, leg, owns=True) == both
        assert description(1, leg, owns=True) == ([], [0, 0], [], [])


def test_piece_of_the_example():
    """The example in the docstring of `pieces`: rank 1 of a strided shard of the rows of (8, 6)."""
    layout = Layout((2,), (0, 1), (ShardPlacement(0, stride=2),))
    plan = make_plan([parameter("w", (8, 6), layout)])
    piece = piece_of(plan, 0, 0, 1, "gather")
    assert piece.batch_index == 0
    assert piece.rows == Overlap(0, 4, ((2, 4), (6, 8)))
    assert piece.columns == Overlap(0, 6, ((0, 6),))
    columns = slice(0, 6)
    assert list(rectangles(piece)) == [
        Rectangle((slice(0, 2), columns), (slice(2, 4), columns)),
        Rectangle((slice(2, 4), columns), (slice(6, 8), columns)),
    ]
