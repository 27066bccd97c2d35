"""What make_finetune_fixture.py wrote, as files."""

import gzip
import io
import json
from pathlib import Path

import torch
from write_systems import write_npy

FIXTURE = torch.load(
    io.BytesIO(gzip.decompress(Path(__file__).with_name("finetune.pt.gz").read_bytes())),
    weights_only=True,
)
PREFIX = "model.Default.atomic_model."
TABLE = f"{PREFIX}descriptor.type_embedding.embedding.embedding_net.layers.0.matrix"


def write_files(folder):
    """Write the target systems, the checkpoint of two branches and the one that deepmd-kit has fine-tuned."""
    for name, content in FIXTURE["target"].items():
        arrays = {key: content[key].numpy() for key in ("coord", "box", "energy", "force")}
        write_npy(folder / "target" / name, content["type"].tolist(), [arrays], content["type_map"])
    torch.save({"model": FIXTURE["branches"], "optimizer": {}}, folder / "branches.pt")
    torch.save({"model": FIXTURE["finetuned"]["named"], "optimizer": {}}, folder / "named.pt")


def an_input(type_map, *, lr=1e-14, optimizer="Adam", **training):
    """Return an input of a fine-tuning; the checkpoint says which model it is."""
    repflow = FIXTURE["branches"]["_extra_state"]["model_params"]["model_dict"]["water"][
        "descriptor"
    ]["repflow"]
    cuts = {
        key: repflow[key]
        for key in ("e_rcut", "e_rcut_smth", "e_sel", "a_rcut", "a_rcut_smth", "a_sel")
    }
    return {
        "model": {
            "type_map": type_map,
            "descriptor": {"type": "dpa3", "repflow": cuts, "seed": 7},
            "fitting_net": {},
        },
        "learning_rate": {"type": "exp", "start_lr": lr, "stop_lr": lr / 10, "decay_steps": 10},
        "optimizer": {"type": optimizer},
        "loss": {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 1},
        "training": {
            "training_data": {"systems": ["target"], "batch_size": 4},
            "numb_steps": 1,
            "save_freq": 1,
            "disp_freq": 1,
            "seed": 1,
            **training,
        },
    }


def write_input(content, name="input.json"):
    Path(name).write_text(json.dumps(content))
    return name
