"""The programs of doc/in-frameworks.md, with the real packages: `pytest -m frameworks`."""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn_ranks import run_cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from deepmd_muon.optim import HybridMuon, MuonConfig

pytestmark = pytest.mark.filterwarnings("ignore")
with_packages = pytest.mark.frameworks
PAGE = Path(__file__).parents[3] / "doc" / "in-frameworks.md"
TEXT = PAGE.read_text(encoding="utf-8")


def program(title):
    """Return the first block below a heading."""
    return re.search(r"```python\n(.*?)```", TEXT.split(f"\n{title}\n")[1], re.DOTALL)[1]


def run(title, **names):
    exec(compile(program(title), f"{PAGE.name}: {title}", "exec"), names)
    return names


def routes(optimizer):
    return {entry.name: entry.route for entry in optimizer.routing}


def views(optimizer):
    return {entry.name: str(entry.view) for entry in optimizer.routing}


@with_packages
def test_hugging_face_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    found = run("## Hugging Face Trainer")
    trainer = found["trainer"]
    optimizer = trainer.optimizer.optimizer  # in accelerate's wrapper
    kinds = routes(optimizer)
    assert kinds["transformer.wte.weight"] == kinds["transformer.wpe.weight"] == "adamw"
    assert views(optimizer)["transformer.h.0.attn.c_attn.weight"] == "1x32x96 columns 32+32+32"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    expected = {name: p.clone() for name, p in trainer.model.named_parameters()}
    torch.manual_seed(1)
    model = found["GPT2LMHeadModel"](trainer.model.config)
    again = found["Trainer"](
        model,
        found["arguments"],
        train_dataset=found["rows"],
        optimizer_cls_and_kwargs=(found["Muon"], {"lr": 0.02}),
    )
    again.train(resume_from_checkpoint="out/checkpoint-10")
    assert again.state.global_step == 20
    assert all(torch.equal(p, expected[name]) for name, p in again.model.named_parameters())


@with_packages
def test_lightning(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    found = run("## Lightning")
    trainer, net, batches = (found[name] for name in ("trainer", "net", "batches"))
    assert trainer.global_step == 40
    assert routes(trainer.optimizers[0])["layers.2.weight"] == "muon"
    assert trainer.callback_metrics["loss"] < 0.1
    expected = [p.clone() for p in net.parameters()]
    lightning.seed_everything(0)
    half = found["Net"]()
    options = {
        "accelerator": "cpu",
        "precision": "bf16-mixed",
        "logger": False,
        "enable_checkpointing": False,
    }
    first = lightning.Trainer(max_epochs=1, **options)
    first.fit(half, batches)
    first.save_checkpoint("half.ckpt")
    resumed = found["Net"]()
    lightning.Trainer(max_epochs=2, **options).fit(resumed, batches, ckpt_path="half.ckpt")
    assert all(map(torch.equal, resumed.parameters(), expected))


def titan_model(seed):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "embeddings": nn.Embedding(13, 16),
            "hidden": nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)),
            "output": nn.Linear(16, 13, bias=False),
        }
    ).double()


def titan_steps(model, optimizers, steps):
    for step in steps:
        optimizers.zero_grad()
        tokens = torch.randint(13, (12,), generator=torch.Generator().manual_seed(step))
        logits = model["output"](model["hidden"](model["embeddings"](tokens)))
        nn.functional.cross_entropy(logits, (tokens + 1) % 13).backward()
        optimizers.step()


class Sharded(nn.Module):
    """Weights in parts on all ranks; all ranks take the same batch."""

    def __init__(self, seed):
        super().__init__()
        self.parts = titan_model(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*self.parts["hidden"][::2], self.parts["embeddings"], self.parts["output"]):
            fully_shard(part, mesh=mesh)

    def train(self, optimizers, steps):
        titan_steps(self.parts, optimizers, steps)


def titan_manager(folder, model, optimizers):
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer

    return CheckpointManager(
        CheckpointManager.Config(enable=True, folder=str(folder), interval=3, keep_latest_k=0),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1 / (1 + step)),
        states={},
        sd_adapter=None,
    )


def save_by_torchtitan(folder):
    names = run("## torchtitan")
    model = Sharded(0)
    optimizers = names["Optimizers"](names["config"], model_parts=[model.parts])
    model.train(optimizers, range(3))
    titan_manager(folder, model.parts, optimizers).save(3)


def load_by_torchtitan(folder):
    names = run("## torchtitan")
    model, expected = Sharded(1), titan_model(0)
    optimizers = names["Optimizers"](names["config"], model_parts=[model.parts])
    assert any(isinstance(each, HybridMuon) for each in optimizers)
    titan_manager(folder, model.parts, optimizers).load(3)
    model.train(optimizers, range(3, 6))
    titan_steps(expected, names["Optimizers"](names["config"], model_parts=[expected]), range(6))
    for (name, p), q in zip(model.parts.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert torch.allclose(p.full_tensor(), q, rtol=0, atol=1e-6), name


@with_packages
def test_torchtitan_saves_and_any_number_of_ranks_reads(tmp_path):
    pytest.importorskip("torchtitan", exc_type=ImportError)
    for world, case in ((2, save_by_torchtitan), (4, load_by_torchtitan), (1, load_by_torchtitan)):
        failures, _ = run_cases(
            world, [("torchtitan", functools.partial(case, tmp_path / "checkpoint"))]
        )
        assert not failures, failures


@with_packages
def test_timm():
    pytest.importorskip("timm", exc_type=ImportError)
    found = run("## timm")
    optimizer = found["optimizer"]
    kinds = routes(optimizer)
    assert kinds["pos_embed"] == kinds["head.weight"] == "adamw"
    assert kinds["cls_token"] == kinds["norm.weight"] == "adam"
    assert views(optimizer)["blocks.0.attn.qkv.weight"] == "1x576x192 rows 192+192+192"
    assert kinds["patch_embed.proj.weight"] == "adamw"
    assert found["loss"] < 0.1
    found = run(
        "### Groups of layers", model=found["model"], CosineLRScheduler=found["CosineLRScheduler"]
    )
    grouped = found["optimizer"]
    assert routes(grouped) == kinds
    rates = {group["lr"] / group["lr_scale"] for group in grouped.param_groups}
    assert all(math.isclose(rate, 0.02) for rate in rates)
    assert len({group["lr"] for group in grouped.param_groups}) > 2


class Block(nn.Module):
    """nanoGPT's, with its names."""

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (2, -1)).transpose(1, 2)
            for y in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT's, with its names and its tied output layer."""

    def __init__(self, vocabulary=64, length=32, width=32):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList([Block(width), Block(width)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.ndim > 1 else None

    def forward(self, tokens, targets):
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return nn.functional.cross_entropy(
            self.lm_head(self.transformer["ln_f"](x)).flatten(0, 1), targets.flatten()
        )


def nano_steps(model, optimizer, steps):
    """Take steps as nanoGPT's train.py does: the rate by hand, accumulated gradients, a scaler."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + math.cos(math.pi * step / 20))
        for part in range(2):
            start = torch.randint(
                61, (8, 1), generator=torch.Generator().manual_seed(2 * step + part)
            )
            rows = (start + torch.arange(33)) % 61
            loss = model(rows[:, :-1], rows[:, 1:])
            scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def test_nanogpt():
    GPT.configure_optimizers = run("## nanoGPT")["configure_optimizers"]
    torch.manual_seed(0)
    model, resumed = GPT(), GPT()
    optimizer = model.configure_optimizers(0.1, 0.02, (0.9, 0.95), "cpu")
    assert (
        routes(optimizer)["transformer.wte.weight"]
        == routes(optimizer)["transformer.wpe.weight"]
        == "adamw"
    )
    assert views(optimizer)["transformer.h.0.attn.c_attn.weight"] == "1x96x32 rows 32+32+32"
    nano_steps(model, optimizer, range(10))
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    resumed.load_state_dict(checkpoint["model"])
    again = resumed.configure_optimizers(0.1, 0.02, (0.9, 0.95), "cpu")
    again.load_state_dict(checkpoint["optimizer"])
    assert nano_steps(resumed, again, range(10, 20)) < 1.5  # ln 64 is 4.2
    nano_steps(model, optimizer, range(10, 20))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def in_groups(model):
    """Two groups without names, as HF's Trainer makes them."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return HybridMuon(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], 0.02, precision="float64"
    )


OPTIMIZERS = [
    lambda model: HybridMuon(model.named_parameters(), 0.02, precision="float64"),
    lambda model: MuonConfig(precision="float64").build(model),
    in_groups,
]


def train(model, optimizer, backward):
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        backward(model(x).square().mean())
        optimizer.step()


def trained_by_accelerate():
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    accelerator = Accelerator(cpu=True)
    # Accelerate shards models on accelerators only; FSDP2 itself, and all that accelerate does for it, run on a CPU.
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False
    )
    for make in OPTIMIZERS:
        expected = make_model()
        train(expected, make(expected), torch.Tensor.backward)
        model = make_model()
        model, optimizer = accelerator.prepare(model, make(model))
        train(model, optimizer, accelerator.backward)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert torch.allclose(p.full_tensor(), q, rtol=0, atol=1e-10)


@with_packages
def test_accelerate():
    pytest.importorskip("accelerate")
    assert run("## accelerate")["loss"] < 0.01


@with_packages
def test_models_that_accelerate_shards_are_trained_as_on_one_process():
    pytest.importorskip("accelerate")
    failures, _ = run_cases(2, [("accelerate", trained_by_accelerate)])
    assert not failures, failures


def test_qk_clip():
    """Queries and keys of the layer are clipped only above the threshold."""
    program_names = run("## QK-clip")
    weight = program_names["layer"].self_attn.in_proj_weight
    before = weight.detach().clone()
    largest = torch.full((4,), 400.0)
    program_names["optimizer"].step(qk_logits={"self_attn": largest})
    queries, keys, values = weight.detach().split(16)
    old_queries, old_keys, old_values = before.split(16)
    factor = 0.5  # (100 / 400) ** 0.5 for each
    torch.testing.assert_close(queries, factor * old_queries)
    torch.testing.assert_close(keys, factor * old_keys)
    assert torch.equal(values, old_values)


def test_every_program_of_the_page_is_run_here():
    tests = Path(__file__).read_text(encoding="utf-8")
    for section in re.split("\n(?=##)", TEXT)[1:]:
        title = section.partition("\n")[0]
        assert section.count("```python") == 1
        assert re.search(rf'run\(\s*"{re.escape(title)}"', tests), title
