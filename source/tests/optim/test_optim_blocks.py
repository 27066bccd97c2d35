"""Experts and fused weights: views cut into blocks, each orthogonalized, scaled and damped by itself."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_builders import random
from torch import nn

from deepmd_muon.optim import (
    HybridMuon,
    HybridMuonConfig,
    InvalidShapeError,
    MuonConfig,
    RoutingMismatchError,
)
from deepmd_muon.optim.routing.routes import RouteTable
from deepmd_muon.optim.routing.views import MatrixView


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("w: columns 5", r"w: 96 columns of view 1x64x96 cannot be split into 5 equal parts"),
        ("w: rows 60+5", r"w: 64 rows of view 1x64x96 cannot be split into 60\+5"),
        ("w: rows 0", "cannot be split into 0 equal parts"),
        ("w: rows (20+12)*3", r"64 rows of view 1x64x96 cannot be split into \(20\+12\)\*3"),
        ("w: rows 64+rest", r"cannot be split into 64\+rest"),
        ("w: rows 0+64", r"cannot be split into 0\+64"),
        ("w: rows rest+8+rest", "with one 'rest'; found"),
    ],
)
def test_splits_that_do_not_fit_are_refused_by_name(split, message):
    with pytest.raises(InvalidShapeError, match=message):
        HybridMuon([("w", nn.Parameter(random(64, 96)))], splits=[split])


def test_splits_of_another_form_are_refused():
    for split in ("w = 3", "w: rows (3+4", "w: rows 3*", "w: rows rest*2", "w: rows ((3+4)*2)*2"):
        with pytest.raises(ValueError, match="splits: must be of the form 'PATTERN: rows 3'"):
            HybridMuonConfig(splits=(split,))


class Latent(nn.Module):
    """A query projection that knows its heads: rows with and without position."""

    muon_splits: ClassVar = {"weight": "rows (4+2)*3"}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(random(18, 8))


@pytest.mark.parametrize("config", [HybridMuonConfig, MuonConfig])
def test_modules_declare_their_splits(config):
    model = nn.Sequential(Latent(), nn.Linear(3, 3))
    views = [str(entry.view) for entry in config().build(model).routing if entry.view]
    assert views == ["1x18x8 rows 4+2+4+2+4+2", "1x3x3"]
    own = config(splits=["0.weight: rows 3"]).build(model)  # the user's come first
    assert str(own.routing[0].view) == "1x18x8 rows 6+6+6"
    wrong = nn.Linear(3, 3)
    wrong.muon_splits = {"wieght": "rows 3"}
    with pytest.raises(
        InvalidShapeError, match="0: muon_splits names 'wieght', no parameter of it"
    ):
        config().build(nn.Sequential(wrong))


class OwnAttention(nn.MultiheadAttention):
    muon_splits: ClassVar = {"in_proj_weight": "rows 4*6"}


def test_attention_modules_have_three_matrices_in_one_weight():
    def view(module, config=MuonConfig, **settings):
        optimizer = config(**settings).build(nn.Sequential(module))
        return next(str(entry.view) for entry in optimizer.routing if entry.view)

    attention = nn.MultiheadAttention(8, 2)
    assert view(attention) == "1x24x8 rows 8+8+8"
    assert view(attention, splits=["*.in_proj_weight: rows 1"]) == "1x24x8"
    assert view(attention, splits=["*.in_proj_weight: rows 4*6"]) == "1x24x8 rows " + "+".join(
        ["4"] * 6
    )
    assert view(OwnAttention(8, 2)) == "1x24x8 rows " + "+".join(["4"] * 6)
    assert view(nn.MultiheadAttention(8, 2, kdim=4, vdim=4)) == "1x8x8"  # three parameters
    # The score of Magma for each matrix would make directories of earlier checkpoints unreadable for torch.
    assert view(attention, HybridMuonConfig) == "1x24x8"


def test_states_of_before_attention_was_split_load(caplog):
    model = nn.Sequential(nn.MultiheadAttention(8, 2))

    def train(optimizer):
        optimizer.zero_grad()
        x = torch.ones(3, 1, 8)
        model[0](x, x, x)[0].square().sum().backward()
        optimizer.step()

    first = MuonConfig().build(model)
    first.param_groups[0]["splits"] = ()  # as in earlier versions
    train(first)
    saved = first.state_dict()
    assert saved["param_groups"][0]["routes"][0] == "muon 24x8 as 1x24x8"
    then = MuonConfig().build(model)
    then.load_state_dict(saved)
    p = model[0].in_proj_weight
    assert torch.equal(then.state[p]["momentum_buffer"], first.state[p]["momentum_buffer"])
    assert "0.in_proj_weight" in caplog.text
    train(then)
    whole = MuonConfig(splits=["*.in_proj_weight: rows 1"]).build(model)
    whole.load_state_dict(saved)
    assert all(torch.equal(x, saved["state"][0][key]) for key, x in whole.state[p].items())
    per_head = MuonConfig(splits=["*.in_proj_weight: rows 4*6"]).build(model)
    with pytest.raises(RoutingMismatchError):  # the user's change, not the version's
        per_head.load_state_dict(saved)


def test_a_stored_split_into_one_part_is_no_split():
    (entry,) = RouteTable.from_groups([{"routes": ["muon 64x96 as 1x64x96 rows 64"]}])
    assert str(entry.view) == "1x64x96"


def split_view(batch, sizes, other, axis, groups):
    length = groups * sum(sizes)
    shape = (length, other) if axis == "rows" else (other, length)
    return MatrixView(batch, *shape, axis, tuple(groups * size for size in sizes), groups)


views = st.builds(
    split_view,
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["rows", "columns"]),
    st.integers(1, 3),
)


@given(views)
def test_cutting_and_joining_are_inverse(view):
    x = random(*view.shape)
    blocks = view.cut(x)
    assert [tuple(block.shape) for block in blocks] == [
        (view.batch, *shape) for shape in view.block_shapes
    ]
    assert torch.equal(view.join(blocks), x)
    assert MatrixView.parse(str(view)) == view
    numbers = view.numbers("blocks").reshape(view.shape)
    assert numbers.max() == view.blocks - 1
    for i, block in enumerate(view.cut(numbers)):
        for b in range(view.batch):
            assert (block[b] == b * len(view.sizes) + i).all()
    axis, start = (1, 0) if view.axis == "rows" else (2, 0)
    for lines in view.cut(view.numbers(view.axis).reshape(view.shape)):
        # The lines of a block are adjacent in state tensors.
        size = lines.shape[axis]
        first = lines[0].select(2 - axis, 0)
        assert first.tolist() == list(range(start, start + size))
        start += size


def test_interleaved_parts_must_have_a_share_in_every_group():
    with pytest.raises(InvalidShapeError, match="over 3 groups evenly"):
        HybridMuon([("w", nn.Parameter(torch.ones(20, 6)))], splits=["w: rows 12+4+4 in 3 groups"])


def test_interleaving_may_begin_with_the_state_of_the_parts_group_by_group():
    p = nn.Parameter(random(20, 6))
    apart = HybridMuon([("w", p)], splits=["w: rows (6+2+2)*2"], normuon=True)
    p.grad = random(20, 6, seed=1)
    apart.step()
    saved = apart.state_dict()
    together = HybridMuon(
        [("w", p)],
        splits=["w: rows 12+4+4 in 2 groups"],
        normuon=True,
        on_route_change="migrate",
    )
    together.load_state_dict(saved)
    momentum = together.state[p]["momentum_buffer"]
    assert torch.equal(momentum, apart.state[p]["momentum_buffer"])
    of_rows = saved["state"][0]["second_moment_of_rows"].flatten()
    order = [*range(6), *range(10, 16), 6, 7, 16, 17, 8, 9, 18, 19]
    assert torch.equal(together.state[p]["second_moment_of_rows"].flatten(), of_rows[order])


def test_single_columns_are_blocks_where_a_split_asks_for_them():
    """Alone, a column is a vector and takes Adam."""
    assert (
        HybridMuon([("w", nn.Parameter(random(24, 32)))], splits=["w: columns 32"])
        .routing[0]
        .view.blocks
        == 32
    )
