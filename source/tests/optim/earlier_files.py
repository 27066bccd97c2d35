"""What earlier_state.pt and earlier_checkpoint.pt were made from; later versions must read both bitwise.

deepmd_muon 0.1.0 wrote them before its optimizer was cut into layers (commit 5090226, torch 2.13, one thread,
2026-11-22). The first file has parameters and state after three steps of `set_gradients`, parameters after a fourth,
and the state of the training after eight steps. The second is the checkpoint of its fourth step.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

TRAINING_DATA = Path(__file__).parents[3] / "examples" / "cu_emt" / "data" / "train"
SETTINGS = {
    "muon_mode": "slice",
    "adam_patterns": ["*.table"],
    "adamw_patterns": ["*.head.weight"],
    "expert_patterns": ["*.experts"],
    "splits": ["*.qkv.weight: rows 3"],
    "weight_decay": 0.01,
}


def make_parameters() -> dict[str, Tensor]:
    """Return named parameters of every route, with gradients that `set_gradients` fills."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    return {
        "net.first.weight": normal(6, 9),
        "net.first.bias": normal(6),
        "net.adam_scale": normal(4, 4),
        "net.adamw_gain": normal(3, 5),
        "net.stack": normal(3, 4, 6),
        "net.qkv.weight": normal(12, 5),
        "net.experts": normal(2, 4, 3, 2),
        "net.table": normal(7, 3),
        "net.head.weight": normal(5, 6),
        "net.half.weight": normal(4, 8, dtype=torch.bfloat16),
        "net.half.bias": normal(4, dtype=torch.bfloat16),
        "net.double.weight": normal(5, 5, dtype=torch.float64),
        "net.scalar": normal(),
        "net.frozen_later.weight": normal(3, 4),
    }


def set_gradients(parameters: dict[str, Tensor], step: int) -> None:
    """Give every trainable parameter a gradient that depends on the step alone."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters.values():
        gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = gradient.to(p.dtype) if p.requires_grad else None


def make_groups(parameters: dict[str, Tensor]) -> list[dict[str, object]]:
    """Return two parameter groups, the second with settings of its own."""
    other = {"net.stack", "net.head.weight"}
    return [
        {"params": [(name, p) for name, p in parameters.items() if name not in other]},
        {
            "params": [(name, parameters[name]) for name in sorted(other)],
            "lr": 0.004,
            "momentum": 0.9,
            "nesterov": False,
        },
    ]


def training_input() -> dict[str, object]:
    """Return the input of the small training run; its data are TRAINING_DATA, copied to the folder `train`."""
    descriptor = {
        "type": "se_e2_a",
        "sel": [48],
        "rcut": 4.5,
        "rcut_smth": 2.0,
        "neuron": [4, 8],
        "axis_neuron": 3,
    }
    return {
        "model": {
            "type_map": ["Cu"],
            "descriptor": {**descriptor, "seed": 1},
            "fitting_net": {"neuron": [6, 6], "seed": 2},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon"},
        "training": {
            "training_data": {"systems": ["train"], "batch_size": 2},
            "numb_steps": 8,
            "seed": 3,
            "disp_freq": 4,
            "save_freq": 4,
        },
    }
