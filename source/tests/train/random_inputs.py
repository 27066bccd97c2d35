"""Random inputs of both packages, with random systems: every setting of model, loss and optimizer that both have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from write_systems import write_npy

TYPE_MAP = ["O", "H"]
RCUT, RCUT_SMTH = 4.0, 1.5
ACTIVATIONS = ("tanh", "gelu", "silu", "softplus", "sigmoid", "silut:3.0", "linear", "relu6")


class Draw:
    """Random choices of settings, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def chance(self, probability: float = 0.5) -> bool:
        return bool(self.random.random() < probability)

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def some(self, **settings: tuple[Any, ...]) -> dict[str, Any]:
        """Return a part of the settings, each with one of its values."""
        return {key: self.one_of(*values) for key, values in settings.items() if self.chance()}


def draw_descriptor(draw: Draw, kind: str) -> dict[str, Any]:
    """Return a section `model/descriptor` of a kind."""
    flags = (True, False)
    if kind == "dpa3":
        return {
            "type": kind,
            "seed": int(draw.random.integers(1000)),
            "repflow": _draw_repflow(draw),
            **draw.some(
                concat_output_tebd=flags,
                activation_function=ACTIVATIONS,
                use_tebd_bias=flags,
                exclude_types=([[0, 0]], [[0, 1]]),
                env_protection=(0.0, 0.01, 0.5),
                trainable=flags,
            ),
        }
    cutoffs = {"rcut": RCUT, "rcut_smth": RCUT_SMTH}
    common = draw.some(
        neuron=([4, 8], [3, 3, 6], [5]),
        resnet_dt=flags,
        activation_function=ACTIVATIONS,
        type_one_side=flags,
        exclude_types=([[0, 0]], [[0, 1]]),
        set_davg_zero=flags,
        env_protection=(0.0, 0.01),
        trainable=flags,
    ) | {"axis_neuron": draw.one_of(2, 3), "seed": int(draw.random.integers(1000))}
    common.setdefault("neuron", [4, 8])
    if kind == "se_e2_a":
        return {"type": kind, "sel": draw.one_of([20, 40], [6, 9]), **cutoffs, **common}
    attention = draw.some(
        tebd_dim=(2, 4, 5),
        attn_layer=(0, 1, 2),
        attn_dotr=flags,
        normalize=flags,
        scaling_factor=(0.5, 2.0),
        temperature=(0.7, 1.5),
        concat_output_tebd=flags,
        trainable_ln=flags,
        ln_eps=(1e-3,),
        use_tebd_bias=flags,
    )
    if kind == "se_atten":
        attention |= draw.some(tebd_input_mode=("concat", "strip"), smooth_type_embedding=flags)
    sel = draw.one_of(20, 40, [30, 30])
    return {"type": kind, "sel": sel, **cutoffs, **common, "attn": 6, **attention}


def _draw_repflow(draw: Draw) -> dict[str, Any]:
    flags = (True, False)
    widths = {"n_dim": draw.one_of(4, 6), "e_dim": draw.one_of(4, 8), "a_dim": draw.one_of(4, 8)}
    repflow = {
        **widths,
        "e_rcut": RCUT,
        "e_rcut_smth": RCUT_SMTH,
        "e_sel": draw.one_of(30, 60),
        "a_rcut": 3.0,
        "a_rcut_smth": 1.5,
        "a_sel": draw.one_of(10, 20),
        "nlayers": draw.one_of(1, 2, 3),
        "axis_neuron": draw.one_of(2, 4),
        **draw.some(
            fix_stat_std=(0.0, 0.3, 1.0),
            update_angle=flags,
            update_style=("res_residual", "res_avg", "res_incr"),
            update_residual=(0.05, 0.3),
            update_residual_init=("const", "norm"),
            smooth_edge_update=flags,
            edge_init_use_dist=flags,
            use_exp_switch=flags,
            sequential_update=flags,
            n_multi_edge_message=(1, 2, 3),
            optim_update=flags,
            use_dynamic_sel=flags,
            sel_reduce_factor=(2.0, 10.0),
        ),
    }
    if draw.chance():
        rate, e_rate = draw.one_of(1, 2), draw.one_of(1, 2)
        node, edge = widths["a_dim"] // rate, widths["a_dim"] // (2 * rate) * e_rate
        enough = node <= widths["n_dim"] and edge <= widths["e_dim"]
        repflow |= {"a_compress_rate": rate, "a_compress_e_rate": e_rate}
        repflow["a_compress_use_split"] = enough and draw.chance()
    if repflow.get("use_dynamic_sel"):
        repflow["smooth_edge_update"] = True
    if repflow.get("sequential_update"):
        repflow |= {"update_style": "res_residual", "update_angle": True}
    return repflow


def draw_fitting(draw: Draw) -> dict[str, Any]:
    """Return a section `model/fitting_net`."""
    flags = (True, False)
    section = draw.some(
        neuron=([6, 6], [5], [4, 8]),
        resnet_dt=flags,
        activation_function=ACTIVATIONS,
        trainable=(True, False),
        numb_fparam=(1, 2),
        numb_aparam=(1, 2),
        atom_ener=([-3.0, 1.0], [None, 0.5]),
        rcond=(1e-3, 0.9),
    )
    section |= {"seed": int(draw.random.integers(1000))}
    section.setdefault("neuron", [6, 6])
    return section


def draw_model(draw: Draw, kind: str, table: str) -> dict[str, Any]:
    """Return a section `model`; `table` is a file for `use_srtab`."""
    descriptor, fitting = draw_descriptor(draw, kind), draw_fitting(draw)
    if not descriptor.get("trainable", True):  # something has to be trained
        fitting["trainable"] = True
    model = {"type_map": TYPE_MAP, "descriptor": descriptor, "fitting_net": fitting}
    model |= draw.some(
        data_stat_protect=(1e-3, 0.3),
        pair_exclude_types=([[0, 0]], [[0, 1]]),
        atom_exclude_types=([0], [1]),
    )
    if kind != "se_e2_a" and draw.chance(0.3):
        model |= {"use_srtab": table, "sw_rmin": 0.5, "sw_rmax": 1.4}
        model |= {"smin_alpha": draw.one_of(0.1, 0.02, 0.4)}
        descriptor.pop("exclude_types", None)  # the table has no such exclusions
        for key in ("numb_fparam", "numb_aparam"):  # deepmd-kit's sum of models lacks them
            fitting.pop(key, None)
    return model


def draw_loss(draw: Draw) -> dict[str, Any]:
    """Return a section `loss`."""
    loss: dict[str, Any] = {"type": "ener"}
    starts = {"e": (0.02, 0.0, 1.0), "f": (100.0, 1.0), "v": (0.0, 0.1), "ae": (0.0, 0.3)}
    starts["pf"] = (0.0, 2.0)
    for term, values in starts.items():
        start = draw.one_of(*values)
        loss |= {f"start_pref_{term}": start, f"limit_pref_{term}": draw.one_of(start, 1.0)}
    loss |= draw.some(
        loss_func=("mse", "mae"),
        intensive_ener_virial=(True, False),
        enable_atom_ener_coeff=(True, False),
        relative_f=(0.5,),
    )
    if loss.get("loss_func") != "mae" and draw.chance(0.3):
        loss |= {"use_huber": True, "huber_delta": draw.one_of(0.02, [0.01, 0.5, 0.1])}
        loss |= {"start_pref_pf": 0.0}
        loss.pop("relative_f", None)
    if (loss.get("use_huber") or loss.get("loss_func") == "mae") and draw.chance():
        loss["f_use_norm"] = True
    return loss


def draw_optimizer(draw: Draw) -> dict[str, Any]:
    """Return a section `optimizer` of an optimizer with the same update in both packages."""
    return {"type": draw.one_of("Adam", "AdamW")} | draw.some(
        adam_beta1=(0.8, 0.95), adam_beta2=(0.9, 0.99), weight_decay=(0.0, 0.01)
    )


def draw_input(seed: int, kind: str, table: str) -> dict[str, Any]:
    """Return an input without its systems."""
    draw = Draw(seed)
    model = draw_model(draw, kind, table)
    return {
        "model": model,
        "learning_rate": draw.one_of(
            {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 1},
            {"type": "cosine", "start_lr": 1e-3, "stop_lr": 1e-4},
            {"type": "wsd", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_phase_ratio": 0.5},
        ),
        "loss": draw_loss(draw),
        "optimizer": draw_optimizer(draw),
        "training": {
            "seed": 1,
            "disp_freq": 1,
            **draw.some(gradient_max_norm=(1.0, 1e3), enable_ema=(True, False)),
        },
    }


def write_systems(folder: Path, seed: int, nframes: int = 2) -> list[str]:
    """Write two systems with all labels, of other compositions, distances above 0.8 Å; return their paths."""
    random, paths = np.random.default_rng(seed), []
    for name, types in (("first", [0, 0, 0, 1, 1, 1, 1]), ("second", [0, 0, 1, 1, 1, 0, 0, 1, 0])):
        natoms = len(types)
        boxes, coords = [], []
        while len(boxes) < nframes:
            box = np.diag(random.uniform(4.5, 6.0, 3)) + np.tril(random.uniform(-1, 1, (3, 3)), -1)
            coord = random.random((natoms, 3)) @ box
            if _shortest(coord, box) > 0.8:
                boxes.append(box.ravel())
                coords.append(coord.ravel())
        labels = {
            "energy": random.normal(-5.0 * natoms, 1.0, nframes),
            "force": random.normal(size=(nframes, 3 * natoms)),
            "virial": random.normal(size=(nframes, 9)),
            "atom_ener": random.normal(size=(nframes, natoms)),
            "atom_pref": random.uniform(0.2, 2.0, (nframes, natoms)),
            "atom_ener_coeff": random.uniform(0.5, 1.5, (nframes, natoms)),
        }
        arrays = {"coord": np.array(coords), "box": np.array(boxes), **labels}
        paths.append(write_npy(folder / name, types, [arrays], TYPE_MAP))
    return paths


def write_parameters(paths: list[str], fitting: dict[str, Any], seed: int) -> None:
    """Write the frame and atomic parameters that a fitting net reads."""
    random = np.random.default_rng(seed)
    for path in paths:
        nframes, width = np.load(Path(path, "set.000", "coord.npy")).shape
        if number := fitting.get("numb_fparam", 0):
            np.save(Path(path, "set.000", "fparam.npy"), random.normal(1.0, 2.0, (nframes, number)))
        if number := fitting.get("numb_aparam", 0):
            values = random.normal(size=(nframes, width // 3 * number))
            np.save(Path(path, "set.000", "aparam.npy"), values)


def _shortest(coord: np.ndarray, box: np.ndarray) -> float:
    """Return the shortest distance between atoms or images [Å]."""
    shifts = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), -1).reshape(-1, 3) @ box
    distance = np.linalg.norm(coord[:, None, None] - coord[None, :, None] + shifts, axis=-1)
    return float(distance[distance > 1e-9].min())
