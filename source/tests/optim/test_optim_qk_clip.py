"""QK-clip against direct float64 programs, on weights of every layout; logits recorded in forward passes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from optim_builders import random as normal
from torch import nn

from deepmd_muon.optim import HybridMuon, QKClipError
from deepmd_muon.optim.qk_clip import (
    FusedQKV,
    LatentQK,
    LogitRecorder,
    QKClip,
    SeparateQK,
    max_logits,
)

HEADS, KEY_HEADS, DIM, WIDTH = 6, 2, 4, 10
TAU = 3.0


def random(*shape, seed=0, scale=1.0):
    return scale * normal(*shape, seed=seed, dtype=torch.float64)


def parameters(**shapes):
    return {
        name: nn.Parameter(random(*shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())
    }


def clipped(params, layer, logits, alpha=0.5, **settings):
    """Clip at learning rate 0, where nothing else changes the parameters; return them before and after it."""
    clip = QKClip((layer,), threshold=TAU, alpha=alpha)
    optimizer = HybridMuon(params.items(), 0.0, weight_decay=0.0, qk_clip=clip, **settings)
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step(qk_logits={layer.name: logits})
    return before, {name: p.detach() for name, p in params.items()}


def factor(logit):
    return TAU / logit if logit > TAU else 1.0


LOGITS = torch.tensor([1.0, 3.5, 6.0, 2.0, -9.0, 30.0], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.5, 0.3, 1.0])
def test_multi_head_attention(alpha):
    rows = HEADS * DIM
    params = parameters(
        **{
            "q.weight": (rows, WIDTH),
            "q.bias": (rows,),
            "k.weight": (rows, WIDTH),
            "v.weight": (9, 9),
        }
    )
    before, after = clipped(
        params,
        SeparateQK("module.attn", "module.q.weight", "_orig_mod.k.weight", HEADS),
        LOGITS,
        alpha,
    )
    for h in range(HEADS):
        g, mine = factor(LOGITS[h].item()), slice(h * DIM, (h + 1) * DIM)
        for name, power in (("q.weight", alpha), ("q.bias", alpha), ("k.weight", 1 - alpha)):
            assert torch.allclose(
                after[name][mine], before[name][mine] * g**power, rtol=1e-12, atol=0
            )
            assert g < 1 or torch.equal(after[name][mine], before[name][mine])
    assert torch.equal(after["v.weight"], before["v.weight"])


def test_grouped_queries_share_the_smallest_factor_of_their_group():
    group = HEADS // KEY_HEADS
    params = parameters(**{"q.weight": (HEADS * DIM, WIDTH), "k.weight": (KEY_HEADS * DIM, WIDTH)})
    before, after = clipped(
        params, SeparateQK("attn", "q.weight", "k.weight", HEADS, KEY_HEADS), LOGITS
    )
    for h in range(HEADS):
        mine = slice(h * DIM, (h + 1) * DIM)
        scaled = before["q.weight"][mine] * factor(LOGITS[h].item()) ** 0.5
        assert torch.allclose(after["q.weight"][mine], scaled, rtol=1e-12, atol=0)
    for g in range(KEY_HEADS):
        mine, smallest = (
            slice(g * DIM, (g + 1) * DIM),
            min(factor(x) for x in LOGITS[g * group :][:group].tolist()),
        )
        assert torch.allclose(
            after["k.weight"][mine], before["k.weight"][mine] * smallest**0.5, rtol=1e-12, atol=0
        )


def test_latent_attention():
    nope, rope, value = 4, 2, 3
    params = parameters(
        **{
            "q.weight": (HEADS * (nope + rope), WIDTH),
            "kv.weight": (HEADS * (nope + value), WIDTH),
            "kv_a.weight": (8 + rope, WIDTH),  # the shared rotary key
        }
    )
    before, after = clipped(
        params, LatentQK("attn", "q.weight", "kv.weight", HEADS, nope, rope, value), LOGITS
    )
    for h in range(HEADS):
        g, q, kv = factor(LOGITS[h].item()), h * (nope + rope), h * (nope + value)
        expected = before["q.weight"][q : q + nope + rope].clone()
        expected[:nope] *= math.sqrt(g)
        expected[nope:] *= g
        assert torch.allclose(after["q.weight"][q : q + nope + rope], expected, rtol=1e-12, atol=0)
        expected = before["kv.weight"][kv : kv + nope + value].clone()
        expected[:nope] *= math.sqrt(g)
        assert torch.allclose(
            after["kv.weight"][kv : kv + nope + value], expected, rtol=1e-12, atol=0
        )
    assert torch.equal(after["kv_a.weight"], before["kv_a.weight"])


@pytest.mark.parametrize(
    "splits",
    [
        [],
        ["qkv.*: rows 24+8+8"],
        ["qkv.*: rows 10"],
        ["qkv.*: columns 2"],
        ["qkv.*: rows (3+1)*8+rest"],
        ["qkv.*: rows (1+1+2)*10"],
    ],
)
def test_fused_weights_are_scaled_in_their_parts(splits):
    layer = FusedQKV("attn", "qkv.weight", HEADS, KEY_HEADS)
    params = parameters(**{"qkv.weight": (40, WIDTH), "qkv.bias": (40,)})
    before, after = clipped(params, layer, LOGITS, splits=splits)
    before, after = before["qkv.weight"], after["qkv.weight"]
    separate = {
        "q.weight": nn.Parameter(before[:24].clone()),
        "k.weight": nn.Parameter(before[24:32].clone()),
    }
    pair = SeparateQK("attn", "q.weight", "k.weight", HEADS, KEY_HEADS)
    _, expected = clipped(separate, pair, LOGITS)
    assert torch.equal(after[:24], expected["q.weight"])
    assert torch.equal(after[24:32], expected["k.weight"])
    assert torch.equal(after[32:], before[32:])


# q, k and v of 3 queries and of 1 key and 1 value of another size; their parts by key head, by kind and by head.
WIDE = "+".join(["12+4+7"] * KEY_HEADS)
EACH = "+".join(["4+4+4+4+7"] * KEY_HEADS)
GATHERED = "+".join(str(KEY_HEADS * size) for size in (12, 4, 7)) + f" in {KEY_HEADS} groups"


@pytest.mark.parametrize(
    ("value", "split"),
    [
        (DIM, None),
        (DIM, "2"),
        (DIM, "10"),
        (DIM, "12+4+4+12+4+4"),
        (7, WIDE),
        (7, EACH),
        (7, GATHERED),
    ],
)
def test_interleaved_rows_and_weights_stored_as_columns(value, split):
    size = KEY_HEADS * ((HEADS // KEY_HEADS + 1) * DIM + value)
    layer = FusedQKV("attn", "qkv.matrix", HEADS, KEY_HEADS, interleaved=True, axis="columns")
    splits = [f"qkv.matrix: columns {split}"] if split else []
    params = parameters(**{"qkv.matrix": (WIDTH, size)})
    both = clipped(params, layer, LOGITS, splits=splits)
    first, second = (each["qkv.matrix"].view(WIDTH, KEY_HEADS, -1) for each in both)
    for g in range(KEY_HEADS):
        mine = [factor(x) for x in LOGITS.view(KEY_HEADS, -1)[g].tolist()]
        for i, scale in enumerate([*mine, min(mine)]):
            rows = slice(i * DIM, (i + 1) * DIM)
            assert torch.allclose(
                second[:, g, rows], first[:, g, rows] * scale**0.5, rtol=1e-12, atol=0
            )
    assert torch.equal(second[..., -value:], first[..., -value:])


def test_values_may_have_heads_of_another_size():
    layer = FusedQKV("attn", "qkv.weight", 2)
    for splits in (["*: rows 8+8+6"], ["*: rows 4+4+4+4+3+3"]):
        params = parameters(**{"qkv.weight": (22, WIDTH)})
        logits = torch.tensor([1.0, 12.0])
        before, after = clipped(params, layer, logits, splits=splits)
        expected = before["qkv.weight"].clone()
        expected[4:8] *= 0.5
        expected[12:16] *= 0.5
        assert torch.allclose(after["qkv.weight"], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("interleaved", "split"),
    [(False, "5"), (False, "8+8+8+4+4+4+4"), (True, "3"), (True, "5+5+10+5+10+5"), (True, "4")],
)
def test_parts_that_are_not_those_of_heads_are_refused(interleaved, split):
    layer = FusedQKV("attn", "qkv.weight", HEADS, KEY_HEADS, interleaved=interleaved)
    size = 45 if split == "3" else 40
    with pytest.raises(QKClipError, match="is split into"):
        HybridMuon(
            [("qkv.weight", nn.Parameter(random(size, WIDTH)))],
            splits=[f"qkv.weight: rows {split}"],
            qk_clip=QKClip((layer,)),
        )


def test_queries_and_keys_of_other_sizes_are_refused():
    with pytest.raises(QKClipError, match="8 rows a query head and 12 a key head"):
        HybridMuon(
            [("qkv.weight", nn.Parameter(random(32, WIDTH)))],
            splits=["*: rows 8+12+12"],
            qk_clip=QKClip((FusedQKV("attn", "qkv.weight", heads=1),)),
        )


def test_nothing_is_clipped_by_nan_by_infinity_or_in_a_step_that_is_left_out():
    params = parameters(**{"q.weight": (24, WIDTH), "k.weight": (24, WIDTH)})
    layer = SeparateQK("attn", "q.weight", "k.weight", HEADS)
    before, after = clipped(
        params, layer, torch.tensor([math.nan, math.inf, -math.inf, 1.0, TAU, 0.0])
    )
    assert all(torch.equal(before[name], after[name]) for name in params)
    optimizer = HybridMuon(params.items(), 0.1, qk_clip=QKClip((layer,), TAU), on_nonfinite="skip")
    for p in params.values():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step(qk_logits={"attn": torch.full((HEADS,), 50.0)})
    assert all(torch.equal(before[name], p) for name, p in params.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_are_rounded_once(dtype):
    params = {
        name: nn.Parameter(random(24, WIDTH, seed=i).to(dtype))
        for i, name in enumerate(("q.weight", "k.weight"))
    }
    before, after = clipped(params, SeparateQK("attn", "q.weight", "k.weight", HEADS), LOGITS)
    scale = (
        (TAU / LOGITS)
        .where(LOGITS > TAU, torch.ones(()))
        .sqrt()
        .float()
        .repeat_interleave(DIM)[:, None]
    )
    for name in params:
        assert torch.equal(after[name], (before[name].float() * scale).to(dtype))


def test_wrong_declarations_and_logits_are_named_together():
    params = parameters(
        **{"q.weight": (24, 8), "k.weight": (25, 8), "b.q_norm.weight": (8,), "b.q.weight": (24, 8)}
    )
    with pytest.raises(QKClipError) as error:
        QKClip(
            (SeparateQK("a", "q", "k", 6, 4), SeparateQK("a", "q", "k", 6)),
            threshold=0.0,
            alpha=2.0,
        )
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "threshold",
        "alpha",
        "layers",
        "a",
    ]
    layers = (
        SeparateQK("a", "q.weight", "k.weight", 6),
        SeparateQK("b", "b.q.weight", "b.q.weight", 6),
        FusedQKV("c", "missing.weight", 6),
        FusedQKV("d", "q.weight", 5),
        LatentQK("e", "q.weight", "k.weight", 6, 4, 2, 3),
        FusedQKV("f", "b.q_norm.weight", 2),
    )
    with pytest.raises(QKClipError) as error:
        HybridMuon(params.items(), qk_clip=QKClip(layers))
    problems = dict(problem.split(": ", 1) for problem in error.value.problems)
    assert problems["a"].startswith("'k.weight' has 25 rows")
    assert "'b.q_norm.weight' normalizes queries or keys" in problems["b"]
    assert "no parameter 'missing.weight'" in problems["c"]
    assert "24 rows of 'q.weight' do not divide" in problems["d"]
    assert problems["f"].endswith("is not a matrix")
    assert set(problems) == set("abcdef")
    good = HybridMuon(
        params.items(), qk_clip=QKClip((SeparateQK("a", "q.weight", "b.q.weight", 6),))
    )
    with pytest.raises(QKClipError) as error:
        good.step(qk_logits={"a": torch.ones(5), "z": torch.ones(6)})
    assert [problem[:22] for problem in error.value.problems] == [
        "qk_logits: unknown lay",
        "qk_logits['a']: must b",
    ]
    before = {name: p.detach().clone() for name, p in params.items()}
    for p in params.values():
        p.grad = torch.ones_like(p)
    for wrong, words in (
        ({0: torch.ones(6)}, "unknown layer 0; known are 'a'"),
        ([torch.ones(6)], "found list"),
        (torch.ones(1, 6), "found Tensor"),
        ({"a": [1.0] * 6}, "found list"),
        ({"a": torch.ones(6), "module.a": torch.ones(6)}, "two entries"),
    ):
        with pytest.raises(QKClipError, match=words):
            good.step(qk_logits=wrong)
    assert all(torch.equal(before[name], p) for name, p in params.items())
    with pytest.raises(QKClipError, match="without qk_clip"):
        HybridMuon(params.items()).step(qk_logits={"a": torch.ones(6)})


class Attention(nn.Module):
    """Grouped-query attention by scaled_dot_product_attention."""

    def __init__(self, causal=False):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * DIM, dtype=torch.float64)
        self.k = nn.Linear(WIDTH, KEY_HEADS * DIM, dtype=torch.float64)
        self.v = nn.Linear(WIDTH, KEY_HEADS * DIM, dtype=torch.float64)
        self.causal = causal

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    def direct(self, x):
        """Logits (batch, heads, L, L)."""
        q = self.q(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        k = (
            self.k(x)
            .unflatten(-1, (-1, DIM))
            .transpose(1, 2)
            .repeat_interleave(HEADS // KEY_HEADS, 1)
        )
        logits = q @ k.mT / math.sqrt(DIM)
        return (
            logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -math.inf)
            if self.causal
            else logits
        )


def model_of(attention):
    return nn.ModuleDict({"attn": attention})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 100, 2**22])
def test_recorded_logits_are_those_of_the_module_and_the_clip_keeps_them_below_the_threshold(
    causal, block
):
    torch.manual_seed(0)
    attention = Attention(causal)
    model, x = model_of(attention), random(3, 7, WIDTH, scale=2.0)
    clip = QKClip((SeparateQK("attn", "attn.q.weight", "attn.k.weight", HEADS, KEY_HEADS),), TAU)
    recorder = LogitRecorder(model, clip, block=block)
    optimizer = HybridMuon(model.named_parameters(), 0.0, qk_clip=clip)
    for part in x.split([2, 1]):  # accumulated gradients
        attention(part).square().sum().backward()
    logits = recorder.take()
    expected = attention.direct(x).amax((0, 2, 3))
    assert torch.allclose(logits["attn"], expected, rtol=1e-12)
    assert expected.max() > TAU
    assert expected.min() < TAU
    optimizer.step(qk_logits=logits)
    now = attention.direct(x).amax((0, 2, 3))
    assert now.max() <= TAU * (1 + 1e-12)
    untouched = [h for h in range(HEADS) if expected.view(KEY_HEADS, -1)[h // 3].max() <= TAU]
    assert all(torch.equal(now[h], expected[h]) for h in untouched)
    recorder.remove()
    attention(x)
    assert recorder.take() is None


def test_logits_are_recorded_in_every_kth_step_and_in_training_only():
    attention = Attention()
    model, x = model_of(attention), random(1, 5, WIDTH)
    layer = SeparateQK("attn", "attn.q.weight", "attn.k.weight", HEADS, KEY_HEADS)
    recorder = LogitRecorder(model, QKClip((layer,)), every=3)
    found = []
    for _ in range(7):
        attention(x)
        found.append(recorder.take() is not None)
    assert found == [True, False, False, True, False, False, True]
    recorder.take(), recorder.take()
    attention.eval()(x)
    assert recorder.take() is None


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", ["no", "bool", "float", "padding", "3d"])
def test_torch_multi_head_attention_is_recorded(batch_first, masked):
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(12, 3, batch_first=batch_first, dtype=torch.float64)
    nn.init.normal_(mha.in_proj_bias)
    x = random(2, 5, 12, scale=3.0)
    hidden = torch.zeros(2, 3, 5, 5, dtype=torch.bool)
    options = {}
    if masked in ("bool", "float"):
        hidden[:] = torch.ones(5, 5).triu(1) > 0
        mask = hidden[0, 0]
        options["attn_mask"] = (
            mask if masked == "bool" else torch.zeros(5, 5).double().masked_fill(mask, -math.inf)
        )
    elif masked == "3d":
        hidden = random(2, 3, 5, 5, seed=5) > 0.5
        hidden[..., 0] = False
        options["attn_mask"] = hidden.view(6, 5, 5)
    elif masked == "padding":
        options["key_padding_mask"] = torch.tensor(
            [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool
        )
        hidden |= options["key_padding_mask"][:, None, None]
    clip = QKClip((FusedQKV("attn", "attn.in_proj_weight", 3),), TAU)
    model = model_of(mha)
    recorder = LogitRecorder(model, clip)
    given = x if batch_first else x.transpose(0, 1)

    def direct():
        q, k, _ = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1)
        q, k = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in (q, k))
        return (q @ k.mT / 2.0).masked_fill(hidden, -math.inf).amax((0, 2, 3))

    mha(given, given, given, **options)
    logits = recorder.take()
    assert torch.allclose(logits["attn"], direct(), rtol=1e-12)
    optimizer = HybridMuon(model.named_parameters(), 0.0, qk_clip=clip)
    optimizer.step(qk_logits=logits)
    assert torch.allclose(direct(), logits["attn"].clamp(max=TAU), rtol=1e-12)


def test_attention_that_cannot_be_recorded_is_named():
    model = model_of(nn.Linear(4, 4))
    layer = SeparateQK("attn", "attn.weight", "attn.weight", 2)
    LogitRecorder(model, QKClip((layer,)))
    with pytest.raises(QKClipError, match="attn: Linear calls no scaled_dot_product_attention"):
        model["attn"](torch.ones(4))
    other = model_of(Attention())
    LogitRecorder(other, QKClip((SeparateQK("attn", "q", "k", 4),)))
    with pytest.raises(QKClipError, match="has 6 heads, declared are 4"):
        other["attn"](random(1, 5, WIDTH))
    F.scaled_dot_product_attention(*[random(1, 2, 3, 4)] * 3)  # no longer watched
    normal = model_of(Attention())
    normal["attn"].k_norm = nn.LayerNorm(4)
    with pytest.raises(QKClipError) as error:
        LogitRecorder(normal, QKClip((layer, SeparateQK("other", "q", "k", 2))), every=0)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "layers",
        "attn",
        "every",
    ]


def test_masks_of_the_function_are_those_of_torch():
    q, k = random(2, HEADS, 7, DIM), random(2, HEADS, 9, DIM, seed=1)
    for shape in ((7, 9), (1, 9), (2, 1, 7, 9), (HEADS, 7, 9), (2, 1, 1, 9), (7, 1)):
        mask = random(*shape, seed=2) > 0
        logits = (q @ k.mT * 0.3).masked_fill(~mask, -math.inf).amax((0, 2, 3))
        for given in (mask, torch.zeros(shape).masked_fill(~mask, -math.inf)):
            assert torch.allclose(max_logits(q, k, given, scale=0.3, block=40), logits, rtol=1e-12)
    assert max_logits(q[:, :, :0], k).tolist() == [-math.inf] * HEADS
    assert max_logits(q.bfloat16(), k.bfloat16()).dtype == torch.float32


def test_it_is_off_by_default_and_survives_a_copy():
    params = parameters(**{"q.weight": (24, WIDTH), "k.weight": (24, WIDTH)})
    assert HybridMuon(params.items()).qk_clip is None
    clip = QKClip((SeparateQK("attn", "q.weight", "k.weight", HEADS),), TAU)
    first = HybridMuon(params.items(), 0.0, qk_clip=clip, weight_decay=0.0)
    second = copy.deepcopy(first)
    second.step(qk_logits={"attn": LOGITS})
    (group,) = second.param_groups
    first.step(qk_logits={"attn": LOGITS})
    assert second.qk_clip == clip
    assert all(torch.equal(p, q) for p, q in zip(params.values(), group["params"], strict=True))
