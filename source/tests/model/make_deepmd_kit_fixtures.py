"""Let deepmd-kit 3.2.0 compute the reference values that the model and loss tests compare with.

Run it with a Python that has deepmd-kit and its PyTorch backend::

    python source/tests/model/make_deepmd_kit_fixtures.py

It writes `se_e2_a.pt.gz` beside itself: for every case the checkpoint state dict of a small seeded model, and its
energies, forces, virials on our own random structures; gradients of the ener loss for two cases, the loss of 20 steps
of Adam for one. In `../loss/deepmd_kit_loss.pt.gz` it writes values of the loss on random predictions. Both load with
`weights_only=True`.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import torch
from deepmd.pt.loss.ener import EnergyStdLoss
from deepmd.pt.model.model import get_model
from deepmd.pt.train.wrapper import ModelWrapper
from deepmd.utils.argcheck import model_args

HERE = Path(__file__).parent
RCUT = 4.0

CASES: dict[str, dict] = {
    "one_side": {"descriptor": {"type_one_side": True}},
    "pair_nets": {"descriptor": {"type_one_side": False}},
    "time_steps": {
        "descriptor": {"resnet_dt": True, "neuron": [4, 8, 8, 16]},
        "fitting_net": {"neuron": [12, 12, 24]},
    },
    "no_time_steps": {"fitting_net": {"resnet_dt": False, "neuron": [12, 10]}},
    "exclude_one_side": {"descriptor": {"type_one_side": True, "exclude_types": [[0, 0]]}},
    "exclude_pair_nets": {"descriptor": {"type_one_side": False, "exclude_types": [[0, 1]]}},
    "float32": {"descriptor": {"precision": "float32"}, "fitting_net": {"precision": "float32"}},
    "vacuum": {
        "descriptor": {"set_davg_zero": True, "env_protection": 0.05},
        "fitting_net": {"atom_ener": [-1.5, None]},
    },
    "gelu": {
        "descriptor": {"activation_function": "gelu"},
        "fitting_net": {"activation_function": "silu"},
    },
    "softplus": {
        "descriptor": {"activation_function": "softplus"},
        "fitting_net": {"activation_function": "sigmoid"},
    },
    "silut": {
        "descriptor": {"activation_function": "silut:1.0"},
        "fitting_net": {"activation_function": "relu6"},
    },
    "truncated": {"descriptor": {"sel": [5, 9]}},
}
WITH_GRADIENT = ("one_side", "time_steps")
FOLLOWED = "one_side"


def structures() -> dict[str, dict]:
    """Random atoms of two types: two orthorhombic frames, a triclinic cell, one smaller than the cutoff, no cell."""
    rng = np.random.default_rng(20261121)

    def spread(natoms: int, cell: np.ndarray, frames: int, apart: float) -> np.ndarray:
        """Positions in `cell` that keep a distance from each other and from images."""
        shifts = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), -1).reshape(-1, 3) @ cell
        out = []
        for _ in range(frames):
            chosen: list[np.ndarray] = []
            while len(chosen) < natoms:
                x = rng.random(3) @ cell
                gaps = [np.linalg.norm(x - y + shifts, axis=1).min() for y in chosen]
                if min(gaps, default=np.inf) > apart:
                    chosen.append(x)
            out.append(np.array(chosen))
        return np.array(out)

    ortho = np.diag([6.0, 6.5, 7.0])
    triclinic = np.array([[6.0, 0.0, 0.0], [1.5, 5.5, 0.0], [-0.8, 1.1, 6.2]])
    tiny = np.array([[2.4, 0.0, 0.0], [0.3, 2.6, 0.0], [0.2, -0.4, 2.9]])
    room = np.diag([6.0, 6.0, 6.0])
    made = {
        "orthorhombic": (spread(14, ortho, 2, 1.1), ortho),
        "triclinic": (spread(12, triclinic, 1, 1.1), triclinic),
        "tiny": (spread(3, tiny, 1, 1.0), tiny),
        "open": (spread(15, room, 1, 1.1), None),
    }
    out = {}
    for name, (coord, cell) in made.items():
        atype = np.arange(coord.shape[1]) % 3 // 2  # O O H O O H …
        out[name] = {
            "coord": torch.from_numpy(coord),
            "atype": torch.from_numpy(np.tile(atype, (len(coord), 1)).astype(np.int64)),
            "box": None if cell is None else torch.from_numpy(np.tile(cell, (len(coord), 1, 1))),
        }
    return out


def model_section(changes: dict) -> dict:
    """Return a section as deepmd-kit's argument check normalises it."""
    section = {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [40, 30],
            "rcut": RCUT,
            "rcut_smth": 1.0,
            "neuron": [4, 8, 16],
            "axis_neuron": 4,
            "type_one_side": True,
            "seed": 7,
            **changes.get("descriptor", {}),
        },
        "fitting_net": {"neuron": [12, 12], "seed": 8, **changes.get("fitting_net", {})},
    }
    base = model_args()
    return base.normalize_value(section, trim_pattern="_*")


def run(model: torch.nn.Module, batch: dict, **more: bool) -> dict:
    box, parameters = (
        batch["box"],
        {name: batch[name] for name in ("fparam", "aparam") if name in batch},
    )
    box = None if box is None else box.reshape(-1, 9)
    return model(batch["coord"], batch["atype"], box=box, **parameters, **more)


def sample_of(batches: dict[str, dict]) -> list[dict]:
    """Return structures as deepmd-kit's statistics take them: cells as rows of nine."""
    return [
        {
            key: value if key != "box" or value is None else value.reshape(-1, 9)
            for key, value in batch.items()
        }
        for batch in batches.values()
    ]


def one_case(name: str, changes: dict, batches: dict[str, dict]) -> dict:
    """Build a model, give it statistics and bias, and evaluate it."""
    section = model_section(changes)
    model = get_model(section)
    model.get_descriptor().compute_input_stats(sample_of(batches))
    model.set_out_bias(torch.tensor([[[-3.5], [1.25]]], dtype=torch.float64))
    return values_of(
        model, section, batches, gradient=name in WITH_GRADIENT, followed=name == FOLLOWED
    )


def values_of(
    model: torch.nn.Module,
    section: dict,
    batches: dict[str, dict],
    *,
    gradient: bool,
    followed: bool,
) -> dict:
    """Return the checkpoint state of a model, what it predicts, a gradient of the loss, and steps of Adam."""
    wrapper = ModelWrapper(model, model_params=section)
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in wrapper.state_dict().items()
    }
    # one storage for both names of a network, as in a checkpoint
    for key in state:
        if "._networks." in key:
            state[key] = state[key.replace("._networks.", ".networks.")]
    case: dict = {"state": state, "outputs": {}}
    model.eval()
    for kind, batch in batches.items():
        out = run(model, batch)
        case["outputs"][kind] = {
            "energy": out["energy"].detach().reshape(-1),
            "atom_energy": out["atom_energy"].detach().squeeze(-1),
            "force": out["force"].detach(),
            "virial": out["virial"].detach().reshape(-1, 9),
        }
    if gradient or followed:
        case["gradients"] = gradients(model, batches["orthorhombic"])
    if followed:
        case["followed"] = follow(model, batches["orthorhombic"], case["gradients"])
    return case


LABEL_SCALE = {"energy": 30.0, "force": 1.0, "virial": 5.0}


def gradients(model: torch.nn.Module, batch: dict) -> dict:
    """Gradient of the ener loss with energy, force and virial terms on random labels."""
    rng = np.random.default_rng(5)
    nframes, natoms = batch["atype"].shape
    shapes = {"energy": (nframes, 1), "force": (nframes, natoms, 3), "virial": (nframes, 9)}
    label = {
        key: torch.from_numpy(rng.normal(0, LABEL_SCALE[key], shape))
        for key, shape in shapes.items()
    }
    settings = {
        "start_pref_e": 0.5,
        "limit_pref_e": 1.0,
        "start_pref_f": 100.0,
        "limit_pref_f": 1.0,
        "start_pref_v": 0.2,
        "limit_pref_v": 1.0,
    }
    loss = EnergyStdLoss(starter_learning_rate=1.0, **settings)
    model.train()
    model.zero_grad()
    found = {f"find_{key}": 1.0 for key in label}

    def predict(**_: torch.Tensor) -> dict:
        out = run(model, batch)
        out.pop("mask")  # an integer tensor: 1/N of it would be rounded to float32
        return out

    _, value, _ = loss({}, predict, {**label, **found}, natoms, 0.25)
    value.backward()
    return {
        "label": label,
        "settings": settings,
        "lr_fraction": 0.25,
        "loss": value.detach(),
        "parameters": {
            key: p.grad.clone()
            for key, p in model.named_parameters()
            if p.grad is not None and p.numel()
        },
        "order": [key for key, _ in model.named_parameters()],
    }


LOSS_CASES: dict[str, dict] = {
    "mse": {},
    "mse_intensive": {"intensive_ener_virial": True},
    "mae": {"loss_func": "mae"},
    "mae_norm": {"loss_func": "mae", "f_use_norm": True},
    "huber": {"use_huber": True, "huber_delta": 0.3, "start_pref_pf": 0.0},
    "huber_three": {"use_huber": True, "huber_delta": [0.1, 0.5, 0.2], "start_pref_pf": 0.0},
    "huber_norm": {"use_huber": True, "f_use_norm": True, "huber_delta": 0.8, "start_pref_pf": 0.0},
    "relative": {"relative_f": 0.5},
    "coefficients": {"enable_atom_ener_coeff": True},
}
ALL_TERMS = {
    f"{end}_pref_{term}": value
    for term, start, limit in (
        ("e", 0.5, 1.0),
        ("f", 10.0, 2.0),
        ("v", 0.3, 0.7),
        ("ae", 0.2, 0.4),
        ("pf", 0.6, 0.9),
    )
    for end, value in (("start", start), ("limit", limit))
}


def loss_values() -> dict:
    """Values of the loss on random predictions, with and without padding atoms."""
    rng = np.random.default_rng(11)
    nframes, natoms = 3, 5
    shapes = {
        "energy": (nframes, 1),
        "force": (nframes, natoms, 3),
        "virial": (nframes, 9),
        "atom_energy": (nframes, natoms, 1),
    }
    prediction = {key: torch.from_numpy(rng.normal(size=shape)) for key, shape in shapes.items()}
    label = {key: torch.from_numpy(rng.normal(size=shape)) for key, shape in shapes.items()}
    label["atom_ener"] = label.pop("atom_energy")
    pref = torch.from_numpy(rng.random((nframes, natoms)))
    label["atom_pref"] = pref.repeat_interleave(3, dim=1)
    label["atom_ener_coeff"] = torch.from_numpy(rng.normal(size=(nframes, natoms, 1)))
    padded = torch.tensor([[0, 1, 1, 0, -1], [0, 1, 1, 0, 1], [0, 1, -1, -1, -1]])
    out: dict = {"prediction": prediction, "label": label, "padded_atype": padded, "cases": {}}
    for name, changes in LOSS_CASES.items():
        settings = {**ALL_TERMS, **changes}
        loss = EnergyStdLoss(starter_learning_rate=1.0, **settings)
        found = {
            f"find_{key}": 1.0 for key in ("energy", "force", "virial", "atom_ener", "atom_pref")
        }
        case: dict = {"settings": settings}
        for kind, inputs in (("whole", {}), ("padded", {"atype": padded})):
            _, value, more = loss(
                inputs, lambda **_: dict(prediction), {**label, **found}, natoms, 0.3
            )
            metrics = {
                key: number.detach().reshape(())
                for key, number in more.items()
                if key.startswith(("rmse", "mae"))
            }
            case[kind] = {"loss": value, "metrics": metrics}
        out["cases"][name] = case
    return out


STEPS = 20


def follow(model: torch.nn.Module, batch: dict, given: dict) -> list[float]:
    """Return the loss before each of the steps of Adam on one batch."""
    loss = EnergyStdLoss(starter_learning_rate=1.0, **given["settings"])
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    label = {**given["label"], **{f"find_{key}": 1.0 for key in given["label"]}}

    def predict(**_: torch.Tensor) -> dict:
        out = run(model, batch)
        out.pop("mask")
        return out

    values = []
    for _ in range(STEPS):
        adam.zero_grad()
        _, value, _ = loss({}, predict, label, batch["atype"].shape[1], given["lr_fraction"])
        value.backward()
        adam.step()
        values.append(float(value.detach()))
    return values


def save(content: dict, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue(), 9, mtime=0))


def main() -> None:
    batches = structures()
    cases = {name: one_case(name, changes, batches) for name, changes in CASES.items()}
    save({"structures": batches, "cases": cases}, HERE / "se_e2_a.pt.gz")
    save(loss_values(), HERE.parent / "loss" / "deepmd_kit_loss.pt.gz")


if __name__ == "__main__":
    main()
