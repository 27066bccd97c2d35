"""What `MuonConfig` excludes from Muon by the types of a model's modules."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from deepmd_muon.optim import HybridMuonConfig, MuonConfig, RoutingMismatchError
from deepmd_muon.optim.routing.modules import tables_and_heads


class GPT(nn.Module):
    """nanoGPT's names."""

    def __init__(self, *, tied):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, 8),
                "wpe": nn.Embedding(16, 8),
                "h": nn.ModuleList(
                    nn.ModuleDict(
                        {"attn": nn.Linear(8, 24), "fc": nn.Linear(8, 32), "proj": nn.Linear(32, 8)}
                    )
                    for _ in range(2)
                ),
            }
        )
        self.unembed_rows = nn.Linear(8, 11, bias=False) if not tied else None
        self.out = nn.Linear(8, 11, bias=False)
        if tied:
            self.out.weight = self.transformer["wte"].weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Parameter(torch.ones(24, 8))
        self.posterior = nn.Parameter(torch.ones(8, 8))


class ViT(nn.Module):
    """Positions and tokens as timm, CLIP and others name them."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(8, 8, 4)
        self.pos = nn.Parameter(torch.zeros(1, 5, 8))
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.register_tokens = nn.Parameter(torch.zeros(4, 8))
        self.queries = nn.Parameter(torch.zeros(1, 6, 8))
        self.block = Attention()
        self.mix = nn.Conv1d(4, 1, 5)
        self.mha = nn.MultiheadAttention(8, 2)
        self.rnn = nn.GRU(8, 4)
        self.experts = nn.Parameter(torch.zeros(3, 8, 8))
        self.list = nn.ParameterList([torch.zeros(8, 8)])
        self.pos_proj = nn.Linear(8, 8)
        self.last = nn.Linear(8, 10)


def routes(model, **settings):
    return {entry.name: entry.route for entry in MuonConfig(**settings).build(model).routing}


def muon(model, **settings):
    return {name for name, route in routes(model, **settings).items() if route == "muon"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_gpt_orthogonalizes_its_blocks_only(tied, prefix):
    model = GPT(tied=tied)
    for name in filter(None, prefix.split(".")):
        model = nn.ModuleDict({name: model})
    blocks = {
        f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in ("attn", "fc", "proj")
    }
    assert muon(model) == blocks  # `unembed_rows` goes by its name, `out` by its shape


def test_the_tables_of_a_module_of_another_kind_count():
    class VocabParallelEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_embeddings, self.weight = 7, nn.Parameter(torch.ones(7, 4))

    model = nn.ModuleDict(
        {"words": VocabParallelEmbedding(), "bag": nn.EmbeddingBag(5, 4), "body": nn.Linear(4, 4)}
    )
    assert tables_and_heads(model) == {
        "words.weight": "table of VocabParallelEmbedding",
        "bag.weight": "table of EmbeddingBag",
    }


def test_a_last_linear_that_a_layer_feeds_on_is_hidden():
    body = nn.ModuleDict(
        {"words": nn.Embedding(32, 8), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    )
    assert muon(body) == {"up.weight", "down.weight"}
    assert muon(nn.Linear(4, 5)) == {"weight"}  # a model of one matrix


class Block(nn.Module):
    """A layer of timm's ViT: queries, keys and values in one Linear that no layer feeds on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def of_timm(name):
    """Return a model as timm and torchvision build them: body, then its classifier."""
    model = nn.Module()
    model.patch_embed = nn.Conv2d(3, 8, 4)
    model.blocks = nn.Sequential(Block())
    model.add_module(name, nn.Linear(8, 10))
    return model


def of_transformers(name):
    """Return a model as transformers builds them: the body is one module, with a pooler."""
    model = nn.Module()
    model.bert = nn.ModuleDict(
        {"embeddings": nn.Embedding(30, 8), "encoder": Block(), "pooler": nn.Linear(8, 8)}
    )
    model.dropout = nn.Dropout()
    model.add_module(name, nn.Linear(8, 3))
    return model


def of_two_heads(name):
    """Return a distilled ViT, with two classifiers of different sizes."""
    model = of_timm(name)
    model.add_module(f"{name}_dist", nn.Linear(8, 12))
    return model


def of_heads_in_modules(name):
    """Return a model with two classifiers of one size, each in a module, as LeViT has them."""
    model = nn.Module()
    model.blocks = nn.Sequential(Block())
    for heads in (name, f"{name}_dist"):
        model.add_module(heads, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 10)))
    return model


class FusedLast(nn.Module):
    """A layer that registers its fused Linear last, and a list of widths as some packages do."""

    def __init__(self):
        super().__init__()
        self.embed_dim = [8, 8]
        self.proj = nn.Linear(8, 8)
        self.qkv = nn.Linear(8, 24)


def of_head_before_body(name):
    """Return a model that registers its classifier first."""
    model = nn.Module()
    model.add_module(name, nn.Linear(8, 10))
    model.blocks = nn.Sequential(FusedLast(), Block(), FusedLast())
    return model


@pytest.mark.parametrize("name", ["head", "fc", "classifier", "score", "out"])
@pytest.mark.parametrize(
    "build", [of_timm, of_transformers, of_two_heads, of_heads_in_modules, of_head_before_body]
)
def test_classifiers_are_output_layers_whatever_their_name(build, name):
    model = build(name)
    expected = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith(name)
    }
    heads = {
        path for path, reason in tables_and_heads(model).items() if reason.startswith("output")
    }
    assert heads == expected
    assert not muon(model) & expected


def test_the_last_layer_of_a_plain_net_is_its_output():
    assert muon(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))) == {"0.weight"}
    for layer in (Block, FusedLast):
        assert not tables_and_heads(nn.Sequential(layer(), layer()))
    assert not tables_and_heads(Block())
    own_layers = nn.Module()
    own_layers.enter = nn.Linear(3, 8)
    own_layers.body = nn.ParameterList([torch.ones(8, 8), torch.ones(2, 8)])
    own_layers.leave = nn.Linear(2, 5)
    assert set(tables_and_heads(own_layers)) == {"leave.weight"}
    own_layers.leave = nn.Linear(2, 3)  # it reads its output again
    assert not tables_and_heads(own_layers)


def test_positions_and_tokens_are_added_and_not_multiplied():
    model = ViT()
    added = {"pos", "positions", "register_tokens", "queries"}
    assert set(tables_and_heads(model)) == {*added, "last.weight"}
    assert muon(model) == {
        "block.in_proj",
        "block.posterior",
        "patch.weight",
        "mha.in_proj_weight",
        "mha.out_proj.weight",
        "experts",
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
        "list.0",
        "pos_proj.weight",
    }
    assert {route for name, route in routes(model).items() if name == "cls_token"} == {"adam"}


def test_kernels_that_read_the_input_are_no_hidden_ones():
    """A U-Net's first kernel, and none of its skips; both towers; no dense block or bottleneck."""
    unet = [nn.Linear(32, 64), nn.Conv2d(4, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(96, 32, 3)]
    unet.append(nn.Conv2d(32, 4, 3))
    dense = [nn.Conv2d(3, 16, 7), nn.Conv2d(16, 8, 3), nn.Conv2d(24, 8, 3), nn.Conv2d(32, 64, 1)]
    bottleneck = [nn.Conv2d(64, 16, 1), nn.Conv2d(16, 64, 1)]
    towers = [nn.Linear(16, 16), nn.Conv2d(3, 16, 4, 4), nn.Conv1d(1, 16, 9), nn.Conv1d(2, 8, 3)]
    mamba = [nn.Linear(8, 32), nn.Conv1d(16, 16, 4, groups=16), nn.Conv1d(4, 8, 3, groups=2)]
    found = [
        {
            name
            for name, reason in tables_and_heads(nn.Sequential(*layers)).items()
            if reason == "reads the input of the model"
        }
        for layers in (unet, dense, bottleneck, towers, mamba)
    ]
    assert found == [
        {"1.weight"},
        {"0.weight"},
        set(),
        {"1.weight", "2.weight", "3.weight"},
        set(),
    ]


def test_settings_declare_matrices():
    assert "queries" in muon(ViT(), expert_patterns=("queries",))
    assert "pos" in muon(ViT(), splits=("pos: columns 2",))
    assert {"pos", "positions", "queries"} <= muon(ViT(), adamw_patterns=())


def test_the_reasons_are_logged_and_odd_names_are_no_patterns(caplog):
    model = nn.ModuleDict({"table[0]": nn.Embedding(5, 4), "table0": nn.Linear(4, 4)})
    with caplog.at_level(logging.INFO, logger="deepmd_muon"):
        assert muon(model) == {"table0.weight"}
    assert "table[0].weight (table of Embedding)" in caplog.text


COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "former weight_norm": weight_norm,
    "former spectral_norm": spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


def computed(wrap):
    torch.manual_seed(0)
    layers = (
        nn.Embedding(11, 8),
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Linear(8, 8),
        nn.Linear(8, 11),
    )
    return nn.ModuleList(map(wrap, layers))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", COMPUTED.values(), ids=COMPUTED)
def test_weights_that_modules_compute_are_found(wrap):
    model = computed(wrap)
    before = copy.deepcopy(model.state_dict())
    for config, table in ((HybridMuonConfig, "muon 1x11x8"), (MuonConfig, "adamw")):
        placements = [
            entry.placement
            for entry in config().build(model).routing
            if math.prod(entry.shape) > 16
        ]
        assert placements == [table, "muon 1x8x72", "muon 1x8x36 rows 4+4", "muon 1x8x8", table]
    assert all(
        torch.equal(x, before[key]) for key, x in model.state_dict().items()
    )  # power iterations, too


def test_states_of_before_these_weights_were_found_are_migrated():
    model = computed(parametrizations.weight_norm)
    found = [
        entry.name
        for entry in MuonConfig().build(model).routing
        if entry.name.endswith("original1")
    ]
    first = MuonConfig(
        conv_patterns=[], muon_mode="slice", muon_patterns=found[:1] + found[-1:]
    ).build(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    first.step()
    then = MuonConfig(muon_mode="slice").build(model)
    then.load_state_dict(first.state_dict())
    momenta = [
        optimizer.state[dict(model.named_parameters())[found[1]]]["momentum_buffer"]
        for optimizer in (first, then)
    ]
    assert torch.equal(*momenta)
    then.step()
    # Another choice of the user's is a change of route, as for other parameters.
    other = MuonConfig(muon_mode="slice", adam_patterns=[found[1]]).build(model)
    with pytest.raises(RoutingMismatchError):
        other.load_state_dict(then.state_dict())
