import json
import shutil
from pathlib import Path

import pytest
from quick_input import QUICK

from deepmd_muon.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with data of copper, an input and the checkpoint of a short training."""
    folder = tmp_path_factory.mktemp("copper")
    shutil.copytree(EXAMPLE / "data", folder / "data")
    content = json.loads((EXAMPLE / "input.json").read_text())
    content["model"]["descriptor"] |= {"sel": [40], "neuron": [4, 8]}
    content["model"]["fitting_net"]["neuron"] = [12, 12]
    content["training"] |= {"numb_steps": 40, "disp_freq": 20, "save_freq": 20}
    content["training"]["validation_data"]["numb_btch"] = 1
    (folder / "input.json").write_text(json.dumps(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["--pt", "train", "input.json"]) == 0
    return folder


@pytest.fixture
def copper(trained, tmp_path, monkeypatch, no_search_for_faults):
    """A copy of the folder, which is the working directory."""
    folder = tmp_path / "copper"
    shutil.copytree(trained, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return folder


@pytest.fixture
def explore(copper):
    """Run `dp explore` with changed keys; return its status."""

    def run(**changes):
        content = json.loads(json.dumps(QUICK))
        for name, value in changes.items():
            content[name] = (
                {**content[name], **value} if isinstance(value, dict) and name in content else value
            )
        (copper / "explore.json").write_text(json.dumps(content))
        return main(["explore", "explore.json"])

    return run
