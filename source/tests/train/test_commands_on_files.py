"""Every command on every kind of file that `dp train` and `dp freeze` write, as a table."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import run_dp
from matplotlib.axes import Axes
from small_models import COPPER_DESCRIPTORS

from deepmd_muon.cli.main import main
from deepmd_muon.infer.frozen import is_frozen

VALID = str(Path(__file__).parents[3] / "examples" / "cu_emt" / "data" / "valid")
FILES = ("model.ckpt", "best.ckpt-2.t-1.pt", "frozen.pth", ".", "input.json")
NO_CHECKPOINT = {
    "frozen.pth": "frozen model",
    ".": "folder",
    "input.json": "cannot be read as a checkpoint",
}
NO_MODEL = {**NO_CHECKPOINT, "frozen.pth": None}
AN_INPUT = {**NO_CHECKPOINT, ".": "not a regular file", "input.json": None}
NO_DATA = dict.fromkeys(FILES, "system")
# The words of a command, and for each file that it refuses, a word of the message.
COMMANDS = {
    "show routing": ("show routing FILE", AN_INPUT),
    "show plan": ("show plan FILE --world-size 2", AN_INPUT),
    "show weights": ("show weights FILE", NO_CHECKPOINT),
    "show lcurve": ("show lcurve FILE", dict.fromkeys(FILES, "learning curve")),
    "show attributes": ("show FILE type-map descriptor fitting-net size observed-type", NO_MODEL),
    "show model-branch": (
        "show FILE model-branch",
        {**dict.fromkeys(FILES, "single model"), ".": "folder"},
    ),
    "test": (f"test -m FILE -s {VALID} -n 1", NO_MODEL),
    "test --ema": (f"test -m FILE -s {VALID} -n 1 --ema", {**NO_CHECKPOINT, "frozen.pth": "--ema"}),
    "model-devi": (f"model-devi -m FILE frozen.pth -s {VALID}", NO_MODEL),
    "check": (f"check FILE -s {VALID} --time 0.001 --copies 1 --probes 1", NO_MODEL),
    "freeze": ("freeze -c FILE -o other.pth", {**NO_CHECKPOINT, ".": None}),
    "change-bias": ("change-bias FILE -b 0.5 -o changed.pt", NO_CHECKPOINT),
    "neighbor-stat": ("neighbor-stat -s FILE -r 3", NO_DATA),
    "convert-data": ("convert-data FILE converted.hdf5", NO_DATA),
    "init-model": ("train again.json -v WARNING -i FILE", NO_MODEL),
    "restart": (
        "train again.json -v WARNING -r FILE",
        {**NO_CHECKPOINT, "frozen.pth": "frozen file"},
    ),
    "finetune": ("train again.json -v WARNING -t FILE", NO_MODEL),
}
COMMANDS["show model-branch"][1]["input.json"] = NO_CHECKPOINT["input.json"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(descriptor, runs, small_input, train):
    """Fill the folder with the files of a run of this descriptor."""
    kept = runs / descriptor
    if not kept.exists():
        content = small_input(training={"numb_steps": 2, "save_freq": 1, "enable_ema": True})
        content["model"]["descriptor"] = COPPER_DESCRIPTORS[descriptor]
        content["validating"] = {"full_validation": True, "validation_freq": 2, "full_val_start": 0}
        assert train(content) == 0
        # Restarts then have nothing left to do, and no run moves these files.
        content["training"] |= {"numb_steps": 2, "save_ckpt": "again", "disp_file": "again.out"}
        del content["validating"]
        Path("again.json").write_text(json.dumps(content))
        assert main(["freeze", "-c", "model.ckpt.pt", "-o", "frozen.pth"]) == 0
        shutil.copytree(Path(), kept, symlinks=True)
    else:
        shutil.copytree(kept, Path(), symlinks=True, dirs_exist_ok=True)


@pytest.fixture(autouse=True)
def _alone_and_without_pictures(monkeypatch):
    """deepmd-kit is not installed; drawing, which has its own tests, would take half the time."""
    monkeypatch.delenv("DP_BACKEND", raising=False)
    monkeypatch.setattr(
        "deepmd_muon.show.spectra.plot_spectra", lambda parameters, path, title="": None
    )
    monkeypatch.setattr("deepmd_muon.cli.handover.importlib.util.find_spec", lambda name: None)


def shown(text):
    """What a command says, without times and the names of files."""
    return re.sub(
        r"\[[^]]*\] DEEPMD ", "", re.sub(r"(model|best)\.ckpt\S*|frozen\.pth", "FILE", text)
    )


@pytest.mark.parametrize(
    ("descriptor", "file"),
    [
        ("se_e2_a", "model.ckpt"),
        pytest.param("se_e2_a", "best.ckpt-2.t-1.pt", marks=pytest.mark.slow),
        ("se_e2_a", "frozen.pth"),
        ("se_e2_a", "."),
        ("se_e2_a", "input.json"),
        # Commands do not ask for the descriptor; freezing others takes seconds.
        pytest.param("dpa1", "model.ckpt", marks=pytest.mark.slow),
        pytest.param("dpa1", "frozen.pth", marks=pytest.mark.slow),
        pytest.param("dpa3", "model.ckpt", marks=pytest.mark.slow),
        pytest.param("dpa3", "frozen.pth", marks=pytest.mark.slow),
    ],
)
def test_every_command_takes_or_refuses_every_file(run, file, capsys):
    capsys.readouterr()
    for command, (words, refused) in COMMANDS.items():
        status = main([file if word == "FILE" else word for word in words.split()])
        said = capsys.readouterr()
        if command == "check" and status == 1:
            status = 0  # the model of ten steps was checked, and failed
        expected = refused.get(file)
        assert (command, status) == (command, 2 if expected else 0), said.err
        if expected:
            assert expected in said.err, command
            assert file in said.err or file == ".", command
        else:
            assert said.out or said.err or command in ("init-model", "restart", "finetune"), command


@pytest.mark.parametrize(
    "descriptor",
    ["se_e2_a", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpa1", "dpa3"))],
)
def test_what_is_shown_does_not_hang_on_the_kind_of_file(run, capsys):
    """The newest file and the frozen file hold one model."""
    for command in ("show routing", "show weights", "show attributes", "test"):
        texts = set()
        for file in ("model.ckpt.pt", "frozen.pth"):
            words, refused = COMMANDS[command]
            if refused.get(file) is None:
                capsys.readouterr()
                assert main([file if word == "FILE" else word for word in words.split()]) == 0
                said = capsys.readouterr()
                texts.add(
                    shown(said.out if command in ("show routing", "show weights") else said.err)
                )
        assert len(texts) == 1, command
    parameters = int(re.search(r"Parameters in total: (\d+)", _attributes(capsys)).group(1))
    assert main(["show", "routing", "model.ckpt.pt"]) == 0
    assert sum(map(int, re.findall(r"\((\d+) weights", capsys.readouterr().out))) == parameters


def _attributes(capsys):
    capsys.readouterr()
    assert main(["show", "model.ckpt", "size"]) == 0
    return capsys.readouterr().err


def test_attributes_are_deepmd_kits_lines(finished, capsys):
    """The words are those that deepmd-kit 3.2.0 printed for this run's checkpoint."""
    capsys.readouterr()
    assert run_dp("--pt show model.ckpt.pt size type-map observed-type fitting-net") == 0
    fitting_net = (
        "{'type': 'ener', 'neuron': [6, 6], 'resnet_dt': True, 'activation_function': 'tanh', "
        "'precision': 'default', 'trainable': True, 'seed': 2, 'atom_ener': [], 'rcond': None, "
        "'numb_fparam': 0, 'numb_aparam': 0, 'use_aparam_as_mask': False, "
        "'default_fparam': None, 'dim_case_embd': 0}"
    )
    lines = shown(capsys.readouterr().err).splitlines()
    assert [line.removeprefix("INFO    ") for line in lines] == [
        "This is a singletask model",
        "The type_map is ['Cu']",
        f"The fitting_net parameter is {fitting_net}",
        "Parameter counts:",
        "Parameters in descriptor: 48",
        "Parameters in fitting-net: 205",
        "Parameters in total: 253",
        "The observed types for this model: ",
        "Number of observed types: 1 ",
        "Observed types: ['Cu'] ",
    ]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_energy_bias_that_is_not_finite_is_refused(finished, capfd, value):
    assert main(["change-bias", "model.ckpt.pt", "-b", value, "-o", "new.pt"]) == 2
    assert "-b must be finite" in capfd.readouterr().err
    assert not Path("new.pt").exists()


def test_freezing_keeps_a_name_with_a_dot(finished):
    Path("model.pth").write_text("another model")
    assert main(["freeze", "-c", "model.ckpt.pt", "-o", "model.v1"]) == 0
    assert Path("model.pth").read_text() == "another model"
    assert is_frozen("model.v1.pth")


# Of several models: the words of a command, and a word of the message where it refuses. Without --head it names them.
NAMELESS = "hot, cold"
SEVERAL = {
    "show routing FILE": None,
    "show plan FILE --world-size 2": None,
    "show weights FILE": None,
    "show lcurve lcurve.out -o curve.png": None,
    "show FILE model-branch type-map descriptor fitting-net size observed-type": None,
    f"test -m FILE -s {VALID} -n 1": NAMELESS,
    f"test -m FILE -s {VALID} -n 1 --head hot --ema": None,
    f"test -m FILE -s {VALID} -n 1 --head warm": NAMELESS,
    f"check FILE -s {VALID} --time 0.001 --copies 1 --probes 1": NAMELESS,
    f"check FILE -s {VALID} --time 0.001 --copies 1 --probes 1 --head hot": None,
    "check FILE --train-data again.json --time 0.001 --copies 1 --probes 1 --head hot": None,
    "freeze -c FILE -o other.pth": NAMELESS,
    "freeze -c FILE -o other.pth --head hot": None,
    f"model-devi -m FILE other.pth -s {VALID}": NAMELESS,
    "change-bias FILE -b 0.5 -o changed.pt": NAMELESS,
    "change-bias FILE -b 0.5 -o changed.pt --model-branch hot": None,
    "train again.json -v WARNING -i FILE": None,
    "train again.json -v WARNING -r FILE": None,
    "train again.json -v WARNING -t FILE": None,
}


@pytest.fixture
def several(two_branches, train):
    """The files of a run with two branches."""
    content = two_branches(numb_steps=2, save_freq=1, enable_ema=True)
    data = content["training"]["data_dict"]
    data["cold"]["validation_data"] = data["hot"]["validation_data"]
    content["validating"] = {"full_validation": True, "validation_freq": 2, "full_val_start": 0}
    assert train(content) == 0
    content["training"] |= {"save_ckpt": "again", "disp_file": "again.out"}
    del content["validating"]
    Path("again.json").write_text(json.dumps(content))


def test_every_command_takes_files_of_several_models(several, capsys):
    for file in ("model.ckpt", "best.cold.ckpt-2.t-1.pt"):
        for words, expected in SEVERAL.items():
            if file != "model.ckpt" and words.startswith(("check", "train", "show lcurve")):
                continue
            capsys.readouterr()
            status = main([file if word == "FILE" else word for word in words.split()])
            said = capsys.readouterr()
            if words.startswith("check") and status == 1:
                status = 0  # the model of two steps was checked, and failed
            assert (words, status) == (words, 2 if expected else 0), said.err
            assert expected is None or expected in said.err, words
            assert "deepmd-kit" not in said.err or status == 0, words


def test_a_picture_and_a_table_show_every_branch(several, capsys, monkeypatch):
    names = []
    original = Axes.plot

    def plot(self, *points, **style):
        names.append(style.get("label"))
        return original(self, *points, **style)

    monkeypatch.setattr(Axes, "plot", plot)
    assert main(["show", "lcurve", "lcurve.out", "-o", "curve.png"]) == 0
    assert {"hot, validation", "cold, validation"} <= set(names)
    capsys.readouterr()
    assert main(["show", "weights", "model.ckpt.pt"]) == 0
    table = capsys.readouterr().out
    for part in (
        "hot.atomic_model.descriptor",
        "hot.atomic_model.fitting_net",
        "cold.atomic_model.fitting_net",
    ):
        assert f"{part}.filter_layers" in table or f"{part}.sea.filter_layers" in table
    assert "cold.atomic_model.descriptor" not in table  # the shared one stands there once
