"""Parameter sets, and makers of the optimizers that are measured on them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.qk_clip import FusedQKV, QKClip

SETS = ("se_e2_a", "dpa1", "dpa2", "dpa3", "dpa4_mini", "llm")
Named = list[tuple[str, nn.Parameter]]
# What steps: a torch optimizer, or something with its `step` and `state`.
Make = Callable[[Named, bool], list[Any]]


def shapes_of(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a parameter set, what cannot be trained left out."""
    if name == "llm":
        layer = {"qkv": (6144, 2048), "out": (2048, 2048), "up": (8192, 2048), "down": (2048, 8192), "norm": (2048,)}
        return [(f"layers.{i}.{key}.weight", shape) for i in range(24) for key, shape in layer.items()]
    entries = json.loads((Path(__file__).parent / "shapes" / f"{name}.json").read_text())
    return [(key, tuple(shape)) for key, shape, _ in entries if 0 not in shape]


def parameters(name: str, dtype: torch.dtype, device: str = "cuda") -> Named:
    """Make a parameter set with gradients."""
    made = [(key, nn.Parameter(torch.randn(shape, device=device, dtype=dtype))) for key, shape in shapes_of(name)]
    for _, p in made:
        p.grad = torch.randn_like(p)
    return made


def hybrid(kind: Callable[..., Any] = HybridMuon, **settings: Any) -> Make:
    """Return the maker of our optimizer with some settings."""
    return lambda named, capturable: [kind(named, lr=1e-3, capturable=capturable, **settings)]


class OtherTree:
    """HybridMuon of another revision's tree, imported beside ours; for CPUs, on which a step imports nothing."""

    def __init__(self, tree: Path) -> None:
        self._path, self._modules = str(tree.resolve()), {}

    def __call__(self, named: Named, **settings: Any) -> Any:
        """Make an optimizer and take its first step, while the modules of the other tree are the imported ones."""
        ours = self._exchange(self._modules)
        sys.path.insert(0, self._path)
        optimizer = importlib.import_module("deepmd_muon.optim").HybridMuon(named, **settings)
        optimizer.step()
        sys.path.remove(self._path)
        self._modules = self._exchange(ours)
        return optimizer

    @staticmethod
    def _exchange(modules: dict[str, Any]) -> dict[str, Any]:
        before = {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == "deepmd_muon"}
        sys.modules.update(modules)
        return before


class Clipping:
    """HybridMuon with QK-clip on every attention layer of the transformer, half of whose heads exceed the threshold."""

    HEADS = 16

    def __init__(self, named: Named, capturable: bool, **settings: Any) -> None:
        weights = [(name.removesuffix(".qkv.weight"), p) for name, p in named if name.endswith(".qkv.weight")]
        layers = tuple(FusedQKV(name, f"{name}.qkv.weight", self.HEADS) for name, _ in weights)
        clip = QKClip(layers, threshold=100.0)
        self.optimizer = HybridMuon(named, lr=1e-3, capturable=capturable, qk_clip=clip, **settings)
        self.state = self.optimizer.state
        self.logits = {
            name: torch.linspace(99.0, 101.0, self.HEADS, dtype=torch.float32, device=p.device) for name, p in weights
        }

    def step(self) -> None:
        """Take a step with the largest logits of every layer."""
        self.optimizer.step(qk_logits=self.logits)


def clipping(**settings: Any) -> Make:
    """Return the maker of our optimizer with QK-clip."""
    return lambda named, capturable: [Clipping(named, capturable, **settings)]


def adamw(named: Named, capturable: bool) -> list[Optimizer]:
    """Make torch's fused AdamW."""
    return [torch.optim.AdamW([p for _, p in named], lr=1e-3, fused=True, capturable=capturable)]


def torch_muon(named: Named, capturable: bool) -> list[Optimizer]:
    """Make torch's Muon for the matrices and its AdamW for the rest; this Muon knows no capture."""
    if capturable:
        raise NotImplementedError("torch.optim.Muon takes its learning rate from the host")
    matrices = [p for _, p in named if p.ndim == 2]
    rest = [p for _, p in named if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=True)]


def deepmd_kit(path: Path) -> Make:
    """Return the maker of deepmd-kit's optimizer, loaded from its file alone."""
    spec = importlib.util.spec_from_file_location("deepmd_kit_hybrid_muon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    def make(named: Named, capturable: bool) -> list[Optimizer]:
        if capturable:
            raise NotImplementedError("it has no capturable learning rate")
        return [module.HybridMuonOptimizer([p for _, p in named], lr=1e-3, named_parameters=named)]

    return make
