"""deepmd-kit reads our files with a short-range table.

Its `DeepPot` evaluates a checkpoint and a frozen file. The checkpoint needs the file of the table there, because
deepmd-kit builds its model first.
"""

import shutil

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, python
from model_batches import HERE, read_fixture

from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, to_deepmd_kit

pytestmark = MARKS
FIXTURE = read_fixture(HERE / "short_range.pt.gz")
EVALUATE = """
import sys
import numpy as np
from deepmd.infer import DeepPot
given = np.load("given.npz")
for name in sys.argv[1:]:
    energy, force, virial = DeepPot(name).eval(given["coord"], given["box"], given["atype"])[:3]
    np.savez(name + ".npz", energy=energy, force=force, virial=virial)
"""


@pytest.mark.parametrize("name", ["dpa1", "dpa3"])
def test_deepmd_kit_computes_the_same_from_our_files(name, tmp_path):
    settings, state = from_deepmd_kit(FIXTURE[name]["state"])
    model = build_model(settings)
    model.load_state_dict(state)
    with torch.no_grad():  # other weights than deepmd-kit has started from
        for value in model.parameters():
            value.mul_(1.1)
    shutil.copy(HERE / "short_range.txt", tmp_path)
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 1})}, tmp_path / "model.pt")
    freeze(model, tmp_path / "model.pth")
    data = FIXTURE[name]["structures"]["periodic"]
    coord, box, atype = (data[key][:1].numpy() for key in ("coord", "box", "atype"))
    np.savez(
        tmp_path / "given.npz", coord=coord.reshape(1, -1), box=box.reshape(1, 9), atype=atype[0]
    )
    files = ["model.pt"] + ["model.pth"] * (name == "dpa1")  # DPA-3's needs deepmd-kit's operators
    python("-c", EVALUATE, *files, folder=tmp_path)
    own = Predictor(model, device="cpu").predict(coord[0], box[0], atype[0])
    for file in files:
        theirs = np.load(tmp_path / f"{file}.npz")
        scale = float(np.abs(own.force).max())
        np.testing.assert_allclose(
            theirs["energy"].item(), float(np.asarray(own.energy).item()), rtol=1e-10
        )
        np.testing.assert_allclose(
            theirs["force"].reshape(-1), own.force.reshape(-1), atol=1e-10 * scale
        )
        np.testing.assert_allclose(
            theirs["virial"].reshape(-1), own.virial.reshape(-1), atol=1e-9 * scale
        )
