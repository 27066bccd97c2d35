"""Let deepmd-kit 3.2.0 make a checkpoint of two branches and fine-tune from it.

Run it with a Python that has deepmd-kit and its PyTorch backend::

    python source/tests/train/make_finetune_fixture.py

It writes `finetune.pt.gz` beside itself: the `model` of a small multi-task DPA-3 (118 elements, one descriptor and one
fitting net with a case embedding for both branches) after two steps; small systems; the `model` that deepmd-kit's own
`train --finetune` makes of one branch, and of the others what differs from it; and the tensors that its `change-bias`
changes. Fine-tuning takes one step at a rate of 1e-14, so that its weights are those it starts from. It loads with
`weights_only=True`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
ELEMENTS = re.findall(
    r"\w+",
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au "
    "Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts "
    "Og",
)
REPFLOW = {
    "n_dim": 6,
    "e_dim": 4,
    "a_dim": 4,
    "nlayers": 2,
    "axis_neuron": 2,
    "e_sel": 30,
    "a_sel": 20,
    "e_rcut": 4.0,
    "e_rcut_smth": 3.0,
    "a_rcut": 3.0,
    "a_rcut_smth": 2.0,
    "update_residual": 1.0,
    "a_compress_rate": 1,
    "a_compress_e_rate": 2,
    "a_compress_use_split": True,
    "smooth_edge_update": True,
    "edge_init_use_dist": True,
    "use_exp_switch": True,
}
# Of each branch: its elements, and the atoms of a frame.
PRETRAINING = {"water": (["O", "H"], [0, 1, 1, 0, 1, 1]), "metal": (["Cu", "O"], [0, 0, 0, 1])}
TARGET = {"a": (["H", "O"], [1, 0, 0, 1, 0, 0, 1, 0, 0]), "b": (["H", "O"], [1, 1, 0, 0, 0])}
DP = (str(Path(sys.executable).with_name("dp")), "--pt")


def system(rng: np.random.Generator, elements: list[str], types: list[int], nframes: int) -> dict:
    """Random frames of atoms at least 1.1 Å apart in a cubic box, with random labels around −3 eV an atom."""
    cell, natoms = 6.0, len(types)
    coord = np.empty((nframes, natoms, 3))
    for frame in coord:
        placed = 0
        while placed < natoms:
            x = cell * rng.random(3)
            d = frame[:placed] - x
            d -= cell * np.round(d / cell)
            if placed == 0 or np.linalg.norm(d, axis=1).min() > 1.1:
                frame[placed] = x
                placed += 1
    arrays = {
        "coord": coord.reshape(nframes, -1),
        "box": np.tile(cell * np.eye(3).ravel(), (nframes, 1)),
        "energy": -3.0 * natoms + rng.normal(size=nframes),
        "force": rng.normal(size=(nframes, 3 * natoms)),
    }
    return {
        "type_map": elements,
        "type": torch.tensor(types),
        **{key: torch.from_numpy(value) for key, value in arrays.items()},
    }


def write(folder: Path, content: dict) -> None:
    """Write a system as a folder of NumPy files."""
    (folder / "set.000").mkdir(parents=True)
    (folder / "type_map.raw").write_text("\n".join(content["type_map"]) + "\n")
    np.savetxt(folder / "type.raw", content["type"].numpy(), fmt="%d")
    for key in ("coord", "box", "energy", "force"):
        np.save(folder / "set.000" / f"{key}.npy", content[key].numpy())


def given(model: dict, training: dict, lr: float) -> dict:
    """Return an input."""
    pref = {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1}
    return {
        "model": model,
        "learning_rate": {"type": "exp", "start_lr": lr, "stop_lr": lr / 10, "decay_steps": 10},
        "optimizer": {"type": "Adam"},
        **(
            {"loss_dict": {name: {"type": "ener", **pref} for name in PRETRAINING}}
            if "model_dict" in model
            else {}
        ),
        **({} if "model_dict" in model else {"loss": {"type": "ener", **pref}}),
        "training": {"seed": 1, "disp_freq": 1, **training},
    }


def multi_task() -> dict:
    """Return the input of two branches that share all but statistics and case embedding."""
    fitting = {"neuron": [8, 8], "dim_case_embd": 2, "seed": 8, "activation_function": "silut:3.0"}
    branches = {
        "water": {"model_branch_alias": ["H2O", "liquid"]},
        "metal": {"model_branch_alias": ["copper"], "info": {"about": "copper and its oxide"}},
    }
    shared = {"type_map": "elements", "descriptor": "dpa3", "fitting_net": "fit"}
    model = {
        "shared_dict": {
            "elements": ELEMENTS,
            "dpa3": {
                "type": "dpa3",
                "seed": 7,
                "repflow": REPFLOW,
                "activation_function": "silut:3.0",
            },
            "fit": fitting,
        },
        "model_dict": {name: {**shared, **more} for name, more in branches.items()},
    }
    data = {name: {"training_data": {"systems": [name], "batch_size": 2}} for name in PRETRAINING}
    training = {
        "data_dict": data,
        "model_prob": {"water": 0.5, "metal": 0.5},
        "numb_steps": 2,
        "save_freq": 2,
    }
    return given(model, training, 1e-2)


def finetuning(type_map: list[str]) -> dict:
    """Return the input of a fine-tuning on the target systems; the model section is the checkpoint's."""
    model = {
        "type_map": type_map,
        "descriptor": {"type": "dpa3", "repflow": REPFLOW, "seed": 7},
        "fitting_net": {},
    }
    data = {"systems": [f"target/{name}" for name in TARGET], "batch_size": 4}
    return given(model, {"training_data": data, "numb_steps": 1, "save_freq": 1}, 1e-14)


def dp(folder: Path, *words: str) -> None:
    """Run a command of deepmd-kit."""
    done = subprocess.run(
        [*DP, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"dp {' '.join(words)}:\n{done.stdout}{done.stderr}")


def finetune(folder: Path, source: str, type_map: list[str], branch: str | None) -> dict:
    """Return the model that deepmd-kit fine-tunes from a checkpoint."""
    (folder / "finetune.json").write_text(json.dumps(finetuning(type_map)))
    words = [
        "train",
        "finetune.json",
        "--finetune",
        source,
        "--use-pretrain-script",
        "--skip-neighbor-stat",
    ]
    dp(folder, *words, *(["--model-branch", branch] if branch else []))
    return torch.load(folder / "model.ckpt-1.pt", weights_only=True)["model"]


def changes(before: dict, after: dict) -> dict:
    """Return the tensors that differ by more than the tiny step."""

    def same(old: torch.Tensor, new: torch.Tensor) -> bool:
        return old.shape == new.shape and torch.allclose(old, new, rtol=1e-12, atol=1e-12)

    tensors = {
        key: value
        for key, value in after.items()
        if key != "_extra_state" and "._networks." not in key
    }
    return {
        key: value
        for key, value in tensors.items()
        if key not in before or not same(before[key], value)
    }


def main() -> None:
    rng = np.random.default_rng(20261122)
    pretraining = {name: system(rng, *what, 4) for name, what in PRETRAINING.items()}
    target = {name: system(rng, *what, 4) for name, what in TARGET.items()}
    found: dict = {"target": target, "finetuned": {}, "changed": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, content in pretraining.items():
            write(folder / name, content)
        for name, content in target.items():
            write(folder / "target" / name, content)
        (folder / "input.json").write_text(json.dumps(multi_task()))
        dp(folder, "train", "input.json", "--skip-neighbor-stat")
        (folder / "model.ckpt-2.pt").rename(folder / "branches.pt")
        found["branches"] = torch.load(folder / "branches.pt", weights_only=True)["model"]
        for name, branch in (("named", "water"), ("alias", "copper"), ("random", None)):
            found["finetuned"][name] = finetune(folder, "branches.pt", ["O", "H"], branch)
            (folder / "model.ckpt-1.pt").rename(folder / f"{name}.pt")
        named = found["finetuned"]["named"]
        # Hydrogen, an element that neither checkpoint nor data know, and oxygen.
        found["finetuned"]["grown"] = finetune(folder, "named.pt", ["H", "Xx", "O"], None)
        for name in ("alias", "random", "grown"):
            found["finetuned"][name] = changes(named, found["finetuned"][name])
        for mode in ("change", "set"):
            words = ["-s", "target", "-m", mode, "--model-branch", "water", "-o", f"{mode}.pt"]
            dp(folder, "change-bias", "branches.pt", *words)
            changed = torch.load(folder / f"{mode}.pt", weights_only=True)["model"]
            found["changed"][mode] = changes(found["branches"], changed)
    buffer = io.BytesIO()
    torch.save(found, buffer)
    (HERE / "finetune.pt.gz").write_bytes(gzip.compress(buffer.getvalue(), 9, mtime=0))


if __name__ == "__main__":
    main()
