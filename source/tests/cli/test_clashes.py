"""No command overwrites a file that it reads, nor one of its outputs with another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.data.writing import write_hdf5
from deepmd_muon.files import refuse_clashes

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
DATA = "data/valid/cluster13"
TEST = f"test -m model.pt -s {DATA}"
CLASHES = [
    f"{TEST} -l model.pt",
    f"{TEST} -l {DATA}/set.000/energy.npy",
    f"{TEST} -d d -l d.f.out",
    f"{TEST} --plot p.png -l p.png",
    f"{TEST} --plot model.pt",
    "test -m model.pt -f list.txt -l list.txt",
    "test -m model.pt --valid-data input.json -l input.json",
    f"test -m model.pt --valid-data input.json -l {DATA}/type.raw",
    "freeze -c model -o frozen -l frozen.pth",
    "freeze -c model -l model.pt",
    "freeze -c . -l checkpoint",
    "convert-data data.hdf5 data.hdf5",
    "convert-data data.hdf5#/ new.hdf5 -l data.hdf5",
    f"convert-data {DATA} {DATA}",
    f"convert-data {DATA} {DATA}/type.raw",
    f"convert-data {DATA} out.xyz -l out.xyz",
    "change-bias model.pt -b 1 -o model.pt",
    "change-bias model.pt -b 1 -o new.pt -l new.pt",
    f"change-bias model.pt -s {DATA} -l {DATA}/set.000/coord.npy",
    f"model-devi -m model.pt model.pt -s {DATA} -o model.pt",
    f"model-devi -m model.pt model.pt -s {DATA} -l model_devi.out",
    f"model-devi -m model.pt model.pt -s {DATA} -o {DATA}/type.raw",
    f"check model.pt -s {DATA} -o model.pt",
    f"check model.pt -s {DATA} --json c.png -o c.png",
    f"check model.pt -s {DATA} --json {DATA}/type.raw",
    f"neighbor-stat -s {DATA} -r 3 -l {DATA}/type.raw",
    "init data.hdf5 -l data.hdf5",
    "init data.hdf5 -l input2.json -o input2.json",
    "show lcurve lcurve.out -o lcurve.out",
    "show weights model.pt -o model.pt",
    "show model.pt type-map -l model.pt",
]


@pytest.mark.parametrize("words", CLASHES)
def test_an_output_that_is_read_or_written_otherwise_is_refused(
    tmp_path, monkeypatch, capfd, words
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLE, "data")
    write_hdf5(open_systems("data/valid"), Path("data.hdf5"))
    section = {"systems": [DATA], "batch_size": 1}
    training = {"training_data": section, "validation_data": section, "numb_steps": 1}
    model = {
        "type_map": ["Cu"],
        "descriptor": {"type": "se_e2_a", "sel": [20], "rcut": 3.0, "rcut_smth": 1.0},
    }
    content = {
        "model": {**model, "fitting_net": {}},
        "learning_rate": {"start_lr": 1e-3},
        "loss": {},
        "training": training,
    }
    Path("input.json").write_text(json.dumps(content))
    for name in ("model.pt", "lcurve.out"):  # refused before they are read
        Path(name).write_text("precious")
    Path("list.txt").write_text(DATA)
    Path("checkpoint").write_text("model.pt")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main(words.split()) == 2
    assert "another name" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_patterns_cross_circles_of_links_once(tmp_path):
    inner = tmp_path / "data" / "a"
    inner.mkdir(parents=True)
    for number in range(4):
        (inner / f"up{number}").symlink_to("..")
    (inner / "s.xyz").touch()
    (inner / "type.raw").touch()
    other = tmp_path / "out.json"
    other.touch()
    for pattern, output in (
        ("data/**", "type.raw"),
        ("data/**/s.xyz", "s.xyz"),
        ("**/*.xyz", "s.xyz"),
    ):
        systems = {"the data": [str(tmp_path / pattern)]}
        with pytest.raises(ValueError, match="data"):
            refuse_clashes(ValueError, {"-o": inner / output}, {}, systems)
    refuse_clashes(ValueError, {"-o": other}, {}, {"the data": [str(tmp_path / "data/**")]})
