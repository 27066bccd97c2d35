"""Parameter sets, and makers of the optimizers that are measured on them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepmd_muon.optim import HybridMuon

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "update_rules"))

from radial_brake import RadialBrake  # needs the path above
from soap_muon import SoapMuon  # needs the path above

SETS = ("se_e2_a", "dpa1", "dpa2", "dpa3", "dpa4_mini", "llm")
# The rules of the Muon route, by the name that tables give them.
RULES: dict[str, dict[str, Any]] = {
    "Magma": {"magma_muon": True},
    "NorMuon": {"normuon": True},
    "cautious decay": {"cautious_decay": True},
    "SOAP-Muon": {"rules": [SoapMuon.name]},
    "radial brake": {"rules": [RadialBrake.name]},
}
Named = list[tuple[str, nn.Parameter]]
# What steps: a torch optimizer, or something with its `step` and `state`.
Make = Callable[[Named, bool], list[Any]]


def transformer(depth: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of transformer layers."""
    layer = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4), "norm": (1,)}
    shapes = {key: tuple(factor * width for factor in factors) for key, factors in layer.items()}
    return [
        (f"layers.{i}.{key}.weight", shape) for i in range(depth) for key, shape in shapes.items()
    ]


def mixture_of_experts(depth: int, width: int, experts: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of layers with attention, a router and stacked experts, (experts, in, out)."""
    layer: dict[str, tuple[int, ...]] = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "router": (experts, width),
        "experts.up": (experts, width, width // 2),
        "experts.down": (experts, width // 2, width),
        "norm": (width,),
    }
    return [
        (f"layers.{i}.{key}.weight", shape) for i in range(depth) for key, shape in layer.items()
    ]


def shapes_of(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a parameter set, such as `dpa3`, `llm`, `moe` or `12x2048`, without empty parameters."""
    if name == "llm":
        return transformer(24, 2048)
    if name == "moe":
        return mixture_of_experts(8, 1024, 64)
    if size := re.fullmatch(r"moe(\d+)x(\d+)x(\d+)", name):
        return mixture_of_experts(*map(int, size.groups()))
    if size := re.fullmatch(r"(\d+)x(\d+)", name):
        return transformer(int(size[1]), int(size[2]))
    entries = json.loads((Path(__file__).parent / "shapes" / f"{name}.json").read_text())
    return [(key, tuple(shape)) for key, shape, _ in entries if 0 not in shape]


def parameters(name: str, dtype: torch.dtype, device: str = "cuda") -> Named:
    """Make a parameter set with gradients."""
    made = [
        (key, nn.Parameter(torch.randn(shape, device=device, dtype=dtype)))
        for key, shape in shapes_of(name)
    ]
    for _, p in made:
        p.grad = torch.randn_like(p)
    return made


def hybrid(**settings: Any) -> Make:
    """Return the maker of our optimizer with some settings."""
    return lambda named, capturable: [HybridMuon(named, lr=1e-3, capturable=capturable, **settings)]


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


def deepmd_kit_module(path: Path) -> ModuleType:
    """Load the file of deepmd-kit's optimizer without the rest of deepmd-kit."""
    spec = importlib.util.spec_from_file_location("deepmd_kit_hybrid_muon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def deepmd_kit(path: Path) -> Make:
    """Return the maker of deepmd-kit's optimizer."""
    module = deepmd_kit_module(path)

    def make(named: Named, capturable: bool) -> list[Optimizer]:
        if capturable:
            raise NotImplementedError("it has no capturable learning rate")
        return [module.HybridMuonOptimizer([p for _, p in named], lr=1e-3, named_parameters=named)]

    return make
