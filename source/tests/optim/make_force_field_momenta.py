"""Make force_field_momenta.pt: Muon momenta of a potential for water after 400 training steps.

Usage: python make_force_field_momenta.py SYSTEM [SYSTEM ...]

The systems are frames of liquid water in DeePMD's format; the stored file was made from the first two folders of
DeePMD-kit's water example (deepmd-muon 0.1.0, one thread, 2026-11-21).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

KEPT = (
    "descriptor.sea.filter_layers.networks.0.layers.1.matrix",
    "descriptor.sea.filter_layers.networks.1.layers.2.matrix",
    "fitting_net.filter_layers.networks.1.layers.1.matrix",
)


def main(systems: list[str]) -> None:
    """Train and keep the momenta."""
    descriptor = {
        "type": "se_e2_a",
        "sel": [46, 92],
        "rcut": 6.0,
        "rcut_smth": 0.5,
        "neuron": [25, 50, 100],
    }
    content = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {**descriptor, "axis_neuron": 16, "precision": "float32", "seed": 1},
            "fitting_net": {"neuron": [100, 100, 100], "precision": "float32", "seed": 1},
        },
        "learning_rate": {"type": "exp", "start_lr": 0.005, "stop_lr": 1e-5, "decay_steps": 50},
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
            "start_pref_v": 0,
            "limit_pref_v": 0,
        },
        "optimizer": {"type": "HybridMuon"},
        "training": {
            "training_data": {"systems": systems, "batch_size": 1},
            "numb_steps": 400,
            "seed": 1,
            "disp_freq": 100,
            "save_freq": 400,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "input.json").write_text(json.dumps(content))
        subprocess.run(
            [sys.executable, "-m", "deepmd_muon", "--pt", "train", "input.json"],
            cwd=folder,
            check=True,
        )
        saved = torch.load(Path(folder, "model.ckpt-400.pt"), weights_only=True)["optimizer"]
    names = saved["param_groups"][0]["param_names"]
    momenta = {
        name: saved["state"][i]["momentum_buffer"].clone()
        for i, name in enumerate(names)
        if name.removeprefix("atomic_model.") in KEPT
    }
    torch.save(momenta, Path(__file__).with_name("force_field_momenta.pt"))


if __name__ == "__main__":
    main([str(Path(system).resolve()) for system in sys.argv[1:]])
