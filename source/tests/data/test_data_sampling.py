"""Batch sizes, probabilities and the order of batches."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmd_muon.data import (
    BatchRule,
    Sampler,
    SamplerStateError,
    SamplingError,
    system_probabilities,
)
from deepmd_muon.data.sampling.atom_budget import AtomBudgetSampler
from deepmd_muon.data.sampling.sampler import new_seed

NATOMS = st.lists(st.integers(1, 500), min_size=1, max_size=8)


@given(NATOMS, st.integers(1, 2000))
def test_auto_is_the_smallest_with_enough_atoms(natoms, wanted):
    for frames, n in zip(
        BatchRule.parse(f"auto:{wanted}").frames_per_batch(natoms), natoms, strict=True
    ):
        assert frames >= 1
        assert frames * n >= wanted
        assert (frames - 1) * n < wanted


@given(NATOMS, st.integers(1, 2000))
def test_max_is_the_largest_within_the_atoms(natoms, allowed):
    for frames, n in zip(
        BatchRule.parse(f"max:{allowed}").frames_per_batch(natoms), natoms, strict=True
    ):
        assert frames == 1 or frames * n <= allowed
        assert (frames + 1) * n > allowed


@given(NATOMS, st.integers(1, 600))
def test_filter_leaves_large_systems_out(natoms, allowed):
    rule = BatchRule.parse(f"filter:{allowed}")
    if min(natoms) > allowed:
        with pytest.raises(SamplingError, match=f"filter:{allowed} leaves no system"):
            rule.keep(natoms)
        return
    kept = rule.keep(natoms)
    assert kept == [k for k, n in enumerate(natoms) if n <= allowed]
    left = [natoms[k] for k in kept]
    assert rule.frames_per_batch(left) == BatchRule.parse(f"max:{allowed}").frames_per_batch(left)


def test_plain_batch_sizes():
    assert BatchRule.parse("auto") == BatchRule("auto", 32)
    assert BatchRule.parse(3).frames_per_batch([5, 7]) == (3, 3)
    assert BatchRule.parse([2, 9]).frames_per_batch([5, 7]) == (2, 9)
    assert BatchRule.parse("mixed:4") == BatchRule("mixed", 4)
    with pytest.raises(SamplingError, match="lists 2 numbers, but 3 systems"):
        BatchRule.parse([2, 9]).frames_per_batch([5, 7, 9])


BAD_TEXTS = ["", "list:3", "max", "max:-3", "mix:", "mixed", "filter:1.5"]
BAD_TEXTS += [f"auto:{number}" for number in ("", "0", "x", "²")]


@pytest.mark.parametrize("spec", [0, -1, True, [], [1, 0], [1.5], [True], *BAD_TEXTS])
def test_batch_sizes_that_make_no_sense(spec):
    with pytest.raises(SamplingError, match="batch_size"):
        BatchRule.parse(spec)


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused(text):
    try:
        rule = BatchRule.parse(text)
    except SamplingError:
        return
    assert rule.number > 0
    assert rule.kind == text.partition(":")[0]


# -- probabilities ---------------------------------------------------------------------------------------------

NBATCHES = st.lists(st.integers(1, 1000), min_size=1, max_size=10)


@given(NBATCHES)
def test_named_styles(nbatches):
    n = np.array(nbatches)
    np.testing.assert_allclose(system_probabilities(nbatches, "prob_uniform"), 1 / len(n))
    np.testing.assert_allclose(system_probabilities(nbatches), n / n.sum())
    np.testing.assert_allclose(
        system_probabilities(nbatches, f"prob_sys_size;0:{len(n)}:7.5"), n / n.sum()
    )


@given(NBATCHES, st.data())
def test_blocks_share_their_weight(nbatches, data):
    total = len(nbatches)
    cuts = sorted(data.draw(st.sets(st.integers(0, total), min_size=2, max_size=5)) | {0})
    blocks = list(pairwise(cuts))
    weights = [data.draw(st.floats(0.01, 10)) for _ in blocks]
    rule = ";".join(
        ["prob_sys_size", *(f"{a}:{b}:{w}" for (a, b), w in zip(blocks, weights, strict=True))]
    )
    probabilities = system_probabilities(nbatches, rule)
    assert probabilities.sum() == pytest.approx(1)
    for (a, b), weight in zip(blocks, weights, strict=True):
        part = np.array(nbatches[a:b])
        np.testing.assert_allclose(probabilities[a:b], weight / sum(weights) * part / part.sum())
    assert (probabilities[cuts[-1] :] == 0).all()


@given(NBATCHES, st.data())
def test_given_probabilities(nbatches, data):
    total = len(nbatches)
    automatic = data.draw(st.sets(st.integers(0, total - 1), min_size=1))
    fixed = {k: data.draw(st.floats(0, 1 / total)) for k in range(total) if k not in automatic}
    probabilities = system_probabilities(nbatches, "", [fixed.get(k, -1.0) for k in range(total)])
    rest = 1 - sum(fixed.values())
    size = sum(nbatches[k] for k in automatic)
    for k in range(total):
        assert probabilities[k] == pytest.approx(
            fixed[k] if k in fixed else rest * nbatches[k] / size
        )


def test_a_block_may_end_past_the_systems():
    np.testing.assert_allclose(
        system_probabilities([1, 3], "prob_sys_size;0:1:0.5;1:9:0.5"), [0.5, 0.5]
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("prob_size", "prob_uniform"),
        ("prob_sys_size;", "not first:last:weight"),
        ("prob_sys_size;0:2", "not first:last:weight"),
        ("prob_sys_size;0:2:a", "not first:last:weight"),
        ("prob_sys_size;0:2:1;1:3:1", "overlaps"),
        ("prob_sys_size;3:5:1", "none of the 3 systems"),
        ("prob_sys_size;2:2:1", "none of the 3 systems"),
        ("prob_sys_size;-1:2:1", "none of the 3 systems"),
        ("prob_sys_size;0:2:-1", "weight"),
        ("prob_sys_size;0:2:nan", "weight"),
        ("prob_sys_size;0:2:0", "all weights"),
    ],
)
def test_rules_that_make_no_sense(rule, message):
    with pytest.raises(SamplingError, match=message):
        system_probabilities([1, 2, 3], rule)


@pytest.mark.parametrize(
    ("given_probabilities", "message"),
    [
        ([0.5, 0.5], "2 entries, but 3 systems"),
        ([0.5, 0.2, 0.2], "sum to 0.9, not 1"),
        ([0.5, 0.6, -1], "sum to 1.1, more than 1"),
        ([0.5, float("nan"), -1], "finite"),
    ],
)
def test_probabilities_that_make_no_sense(given_probabilities, message):
    with pytest.raises(SamplingError, match=message):
        system_probabilities([1, 2, 3], "prob_uniform", given_probabilities)


# -- the order of batches --------------------------------------------------------------------------------------


def plans(sampler, count):
    return [
        [(system, frames.tolist()) for system, frames in sampler.next().parts] for _ in range(count)
    ]


SAMPLERS = st.builds(
    lambda shapes, seed, mixed, skew: (
        [n for n, _ in shapes],
        [b for _, b in shapes],
        np.array([1.0 + skew * k for k in range(len(shapes))])
        / sum(1.0 + skew * k for k in range(len(shapes))),
        seed,
        mixed,
    ),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(0, 2**63),
    st.sampled_from([0, 0, 3]),
    st.floats(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(SAMPLERS, st.integers(0, 60))
def test_resuming_continues_exactly(arguments, step):
    whole = Sampler(*arguments)
    expected = plans(whole, step + 40)[step:]
    start = Sampler(*arguments)
    plans(start, step)
    nframes, sizes, probabilities, seed, mixed = arguments
    resumed = Sampler(nframes, sizes, probabilities, seed + 1, mixed)
    plans(resumed, 5)
    resumed.load_state_dict(start.state_dict())
    assert plans(resumed, 40) == expected


def test_resuming_far_away():
    arguments = ([50, 31], [4, 7], np.array([0.3, 0.7]), 11)
    whole = Sampler(*arguments)
    expected = plans(whole, 5000)[4990:]
    resumed = Sampler(*arguments)
    resumed.load_state_dict(whole.state_dict(4990))
    assert plans(resumed, 10) == expected


@settings(max_examples=40, deadline=None)
@given(SAMPLERS)
def test_every_frame_once_an_epoch(arguments):
    nframes, sizes, _, _, mixed = arguments
    served = {k: [] for k in range(len(nframes))}
    for parts in plans(Sampler(*arguments), 120):
        assert sum(len(frames) for _, frames in parts) == mixed or not mixed
        for system, frames in parts:
            assert mixed or len(frames) <= sizes[system]
            served[system] += frames
    for system, frames in served.items():
        n = nframes[system]
        if not mixed:
            for epoch in range(len(frames) // n):
                assert sorted(frames[epoch * n : (epoch + 1) * n]) == list(range(n))
        counts = Counter(frames)
        assert max(counts.values(), default=0) - min((counts[k] for k in range(n)), default=0) <= 1


def test_remainder_frames_make_a_smaller_batch():
    sizes = [len(frames) for [(_, frames)] in plans(Sampler([7], [3], np.array([1.0]), 0), 6)]
    assert sizes == [3, 3, 1, 3, 3, 1]


def test_epochs_are_shuffled_and_seeds_differ():
    first = plans(Sampler([50], [50], np.array([1.0]), 0), 3)
    assert first[0] != first[1] != first[2]
    assert plans(Sampler([50], [50], np.array([1.0]), 1), 3) != first
    assert plans(Sampler([50], [50], np.array([1.0]), 0), 3) == first


def test_systems_follow_their_probabilities():
    probabilities = np.array([0.0, 0.2, 0.5, 0.3, 0.0])
    sampler = Sampler([10] * 5, [1] * 5, probabilities, 5)
    counts = Counter(plan[0][0] for plan in plans(sampler, 20_000))
    # Six standard deviations of a binomial count.
    for k, p in enumerate(probabilities):
        assert abs(counts[k] - 20_000 * p) <= 6 * np.sqrt(20_000 * p * (1 - p))


def test_state_is_plain_and_checked():
    sampler = Sampler([10, 4], [3, 2], np.array([0.5, 0.5]), 2**70)
    plans(sampler, 3)
    state = sampler.state_dict()
    assert {type(value) for value in state.values()} <= {int, str}
    assert state["step"] == 3
    other = Sampler([10, 5], [3, 2], np.array([0.5, 0.5]), 2**70)
    before = other.state_dict()
    with pytest.raises(SamplerStateError, match="belongs to other training data"):
        other.load_state_dict(state)
    assert other.state_dict() == before
    with pytest.raises(SamplerStateError, match="expected version 1"):
        sampler.load_state_dict({})


# -- batches under a bound on atoms ------------------------------------------------------------------------------

BUDGETS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=6)


@given(BUDGETS, st.integers(1, 200), st.integers(0, 5))
def test_mix_serves_every_frame_once_within_the_bound(systems, budget, seed):
    nframes, natoms = zip(*systems, strict=True)
    sampler = AtomBudgetSampler(nframes, natoms, system_probabilities(nframes), budget, seed)
    for _ in range(2):
        served = Counter()
        sizes = []
        for _ in range(sampler.batches_per_epoch):
            parts = sampler.next().parts
            atoms = [natoms[k] for k, frames in parts for _ in frames]
            assert len(atoms) * max(atoms) <= budget or len(atoms) == 1
            sizes.append((min(atoms), max(atoms), -len(atoms)))
            served.update((k, int(f)) for k, frames in parts for f in frames)
        assert served == Counter({(k, f): 1 for k, n in enumerate(nframes) for f in range(n)})
        # No batch could take the first frame of the next one: they are full.
        for (_, _, count), (smallest, _, _) in pairwise(sorted(sizes)):
            assert (1 - count) * smallest > budget


def test_mix_weighs_systems_by_their_probability():
    probabilities = system_probabilities([10, 40], sys_probs=[0.6, 0.4])
    sampler = AtomBudgetSampler([10, 40], [3, 5], probabilities, 20, 7)
    served = Counter()
    for _ in range(sampler.batches_per_epoch):
        for k, frames in sampler.next().parts:
            served.update((k, int(f)) for f in frames)
    # The second system once, the first as often as its share says.
    assert served == Counter({**{(0, f): 6 for f in range(10)}, **{(1, f): 1 for f in range(40)}})
    with pytest.raises(SamplingError, match="epoch"):
        AtomBudgetSampler([10, 40], [3, 5], np.array([1 - 1e-12, 1e-12]), 20, 7)


def test_mix_orders_differ_by_epoch_and_seed():
    def plans_of(seed, count):
        sampler = AtomBudgetSampler([8, 9], [3, 5], np.array([8 / 17, 9 / 17]), 12, seed)
        return [
            [(k, f.tolist()) for k, f in sampler.next().parts] for _ in range(count)
        ], sampler.batches_per_epoch

    first, size = plans_of(1, 20)
    assert first == plans_of(1, 20)[0]
    assert first[:size] != first[size : 2 * size]
    assert first != plans_of(2, 20)[0]


def test_a_new_seed_is_a_plain_integer_of_63_bits():
    seeds = {new_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(type(seed) is int and 0 <= seed < 1 << 63 for seed in seeds)
