import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import run_dp

import deepmd_muon
from deepmd_muon.cli import handover
from deepmd_muon.cli.main import COMMANDS, main, split_backend

BACKENDS = (
    "are: pt, pytorch, tf, tensorflow, tf2, tensorflow2, jax, pd, paddle, dp, dpmodel, np, numpy, pt-expt, "
    "pytorch-exportable, pretrained (all but pt and pytorch are deepmd-kit's)"
)


WORDS = f"are: {', '.join(COMMANDS)}"


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    monkeypatch.delenv("DP_BACKEND", raising=False)


@pytest.fixture
def deepmd_kit(tmp_path, monkeypatch):
    """A stand-in for an installed deepmd-kit that records the words its main gets."""
    package = tmp_path / "site" / "deepmd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text("calls = []\ndef main(args=None):\n    calls.append(args)\n")
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.split(".")[0] == "deepmd"]:
        monkeypatch.delitem(sys.modules, name)
    import deepmd.main as stand_in

    yield stand_in.calls
    for name in ("deepmd", "deepmd.main"):
        sys.modules.pop(name, None)


@pytest.fixture
def no_deepmd_kit(monkeypatch):
    monkeypatch.setattr(handover.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("words", "backend", "rest"),
    [
        (["train", "in.json"], None, ["train", "in.json"]),
        (["--pt", "train", "in.json"], "pt", ["train", "in.json"]),
        (["-b", "PyTorch", "train"], "pytorch", ["train"]),
        (["--backend=jax", "train"], "jax", ["train"]),
        (["-btf", "freeze"], "tf", ["freeze"]),
        # Behind the command it is the command's affair.
        (["--pd", "train", "--tf"], "pd", ["train", "--tf"]),
        (["--version"], None, ["--version"]),
    ],
)
def test_backend_is_read_before_the_command(words, backend, rest):
    assert split_backend(words) == (backend, rest)


def test_backend_of_the_environment_is_read_when_main_runs(monkeypatch, deepmd_kit):
    monkeypatch.setenv("DP_BACKEND", "TensorFlow")
    assert split_backend(["train"]) == ("tensorflow", ["train"])
    assert split_backend(["--pt", "train"]) == ("pt", ["train"])
    assert main(["train", "in.json"]) == 0
    assert deepmd_kit == [["train", "in.json"]]


@pytest.mark.parametrize(
    ("words", "handed_over"),
    [
        ("--tf train in.json", "--tf train in.json"),
        ("-b jax test -m x", "-b jax test -m x"),
        ("--pt freeze -c m.pt -o x.pt2", "convert-backend m.pt x.pt2"),
        ("freeze -o x.pb", "--pt freeze -o x.pb"),
        ("freeze -n A", "--pt freeze -n A"),
        ("--pt compress -i x.pb", "--pt compress -i x.pb"),
        ("model-devi -m a.pb b.pb", "--pt model-devi -m a.pb b.pb"),
        ("convert-from -i x.pb", "convert-from -i x.pb"),
        ("train in.json -f base.pb", "--pt train in.json -f base.pb"),
        ("--pt test -m frozen.pb", "--pt test -m frozen.pb"),
        ("--pt change-bias frozen.pth", "--pt change-bias frozen.pth"),
        ("--pt show m.pt serialization-tree", "--pt show m.pt serialization-tree"),
    ],
)
def test_what_we_do_not_have_goes_to_deepmd_kit(
    words, handed_over, deepmd_kit, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("m.pt", "x.pb", "a.pb", "b.pb", "frozen.pb", "frozen.pth"):
        Path(name).touch()
    assert run_dp(words) == 0
    assert deepmd_kit == [handed_over.split()]
    assert "handing over to deepmd-kit" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--ema"], ["--head", "a"], ["--interpolate"]])
def test_no_option_is_lost_on_the_way_to_a_compiled_file(option, deepmd_kit, capsys):
    assert main(["freeze", "-c", "m.pt", "-o", "x.pt2", *option]) == 2
    assert not deepmd_kit
    assert "--head" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--jax train in.json", "the backend 'jax'"),
        ("train in.json -f base.pb", "the frozen form of base.pb"),
        ("test -m frozen.pb", "the model format .pb"),
    ],
)
def test_without_deepmd_kit_one_sentence_says_so(
    words, what, no_deepmd_kit, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("frozen.pb").touch()
    assert run_dp(words) == 2
    expected = f"dp: deepmd-muon does not have {what}, and deepmd-kit is not installed\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "words",
    [
        ["test", "-m", "m.pt", "-s", ""],
        ["freeze", "-c", "m.pt", "-o", ""],
        ["train", ""],
        ["test", "-m", "m.pt", "--head="],
        ["change-bias", "m.pt", "-l", " "],
    ],
)
def test_an_empty_argument_is_a_variable_that_is_not_set(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["", ".pt", ".pth", ".pb", ".pt2", ".dp", ".dcp", ".yaml"])
@pytest.mark.parametrize(
    "words",
    [
        "change-bias NAME -b 1",
        "test -m NAME",
        "compress -i NAME",
        "model-devi -m NAME NAME",
        "show NAME size",
        "check NAME -s .",
        "freeze -c NAME",
        "freeze -c NAME -o x.pb",
        "freeze -c NAME -o x.pt2",
    ],
)
def test_a_missing_model_is_said_to_be_missing(
    words, suffix, no_deepmd_kit, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name = f"missing{suffix}"
    assert run_dp(words.replace("NAME", name)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no" in line
    assert name in line
    assert "deepmd-kit" not in line


@pytest.fixture
def dpa4(tmp_path):
    """An input of a model that deepmd-kit alone has."""
    path = tmp_path / "dpa4.json"
    model = {"type": "dpa4", "descriptor": {}}
    path.write_text(json.dumps({"model": model, "training": {"numb_steps": 1}}))
    return path


@pytest.fixture
def dipole(tmp_path):
    """An input of a fit that deepmd-kit's trainer alone has."""
    path = tmp_path / "dipole.json"
    model = {"descriptor": {"type": "se_e2_a"}, "fitting_net": {"type": "dipole"}}
    path.write_text(json.dumps({"model": model, "training": {"numb_steps": 1}}))
    return path


def test_an_input_that_deepmd_kit_alone_can_train_goes_to_it(dipole, deepmd_kit, capsys):
    assert main(["train", str(dipole)]) == 0
    assert deepmd_kit == [["--pt", "train", str(dipole)]]
    assert "the fitting net 'dipole': handing over to deepmd-kit" in capsys.readouterr().err


def test_a_model_of_a_deepmd_kit_that_cannot_be_imported_is_one_line(dpa4, deepmd_kit, capsys):
    """The fixture's package is empty."""
    assert main(["train", str(dpa4)]) == 2
    shown = capsys.readouterr().err
    assert "model: needs deepmd-kit, which cannot be imported" in shown
    assert "pip install 'deepmd-kit[torch]'" in shown


def test_without_deepmd_kit_such_an_input_is_refused_in_one_line(dpa4, no_deepmd_kit, capsys):
    assert main(["train", str(dpa4)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model/type: deepmd-kit has the model 'dpa4', this package does not" in line


@pytest.mark.parametrize(
    ("words", "what", "advice"),
    [
        ("trian in.json", "command 'trian'", f"did you mean 'train'? There {WORDS}"),
        ("gui", "command 'gui'", f"there {WORDS}"),
        ("-b Pytroch train", "backend 'pytroch'", f"did you mean 'pytorch'? There {BACKENDS}"),
        ("--backend=nonsense train", "backend 'nonsense'", f"there {BACKENDS}"),
    ],
)
def test_unknown_words_are_answered_with_the_known_ones(words, what, advice, no_deepmd_kit, capsys):
    assert run_dp(words) == 2
    sentence = f"dp: deepmd-muon does not have the {what}, and deepmd-kit is not installed"
    assert capsys.readouterr().err == f"{sentence}; {advice}\n"


def test_unknown_topics_and_attributes_are_answered_with_the_known_ones(tmp_path, capsys):
    assert main(["show", "rooting", "in.json"]) == 2
    expected = "did you mean 'routing'? There are: routing, plan, lcurve, weights, kernels\n"
    assert capsys.readouterr().err == f"dp show: there is no topic 'rooting'; {expected}"
    (tmp_path / "m.pt").touch()
    assert main(["show", str(tmp_path / "m.pt"), "size", "typ-map"]) == 2
    expected = "no attribute 'typ-map'; did you mean 'type-map'? There are: model-branch"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        importlib.metadata.PackageNotFoundError("mpich"),
        ImportError("libmpi.so.12: cannot open shared object file"),
        RuntimeError("Incompatible: thus an error is raised when loading deepmd_op_pt."),
    ],
    ids=["no MPI", "no library", "other torch"],
)
def test_a_deepmd_kit_that_lacks_libraries_is_one_message(
    error, dipole, deepmd_kit, monkeypatch, capsys
):
    """deepmd-kit imports its backend only in main: without mpich such an input ended in a traceback there."""

    def fail(args):
        raise error

    monkeypatch.setattr(sys.modules["deepmd.main"], "main", fail)
    assert main(["train", str(dipole)]) == 2
    shown = capsys.readouterr().err
    assert str(error) in shown
    assert "pip install 'deepmd-kit[torch]'" in shown
    assert f"python -m deepmd --pt train {dipole}" in shown


def test_errors_of_deepmd_kit_itself_keep_their_traceback(deepmd_kit, monkeypatch):
    def fail(args):
        raise RuntimeError("of a model")

    monkeypatch.setattr(sys.modules["deepmd.main"], "main", fail)
    with pytest.raises(RuntimeError, match="of a model"):
        main(["gui"])


def test_only_deepmd_kits_frozen_files_are_handed_over(tmp_path, monkeypatch, deepmd_kit, capsys):
    """deepmd-kit's compress and change-bias would end in a traceback on ours."""
    monkeypatch.chdir(tmp_path)
    ours, theirs = "deepmd_muon/deploy/program", "deepmd/pt/model/model"
    for name, member in (("frozen_model.pth", ours), ("theirs.pth", theirs)):
        with zipfile.ZipFile(name, "w") as file:
            file.writestr(f"archive/code/__torch__/{member}.py", "")
    for words in (["compress"], ["--pt", "compress", "-i", "frozen_model", "-o", "c.pth"]):
        assert main(words) == 2
        assert "frozen_model.pth cannot be read" in capsys.readouterr().err
    assert main(["change-bias", "frozen_model.pth", "-b", "1"]) == 2
    assert "frozen model" in capsys.readouterr().err
    assert deepmd_kit == []
    assert main(["compress", "--input=theirs.pth", "-t", "in.json"]) == 0
    assert deepmd_kit == [["--pt", "compress", "--input=theirs.pth", "-t", "in.json"]]


def test_status_of_deepmd_kit_is_returned(deepmd_kit, monkeypatch):
    monkeypatch.setattr(sys.modules["deepmd.main"], "main", lambda args: 3)
    assert main(["gui"]) == 3


def test_all_problems_of_an_input_and_no_traceback(tmp_path, capsys):
    path = tmp_path / "in.json"
    model = {"type_map": ["O"], "descriptor": {"type": "se_e2_a", "rcut": -1}}
    path.write_text(json.dumps({"model": model}))
    assert main(["--pt", "train", str(path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("dp train: ")
    assert "model/descriptor/rcut" in shown
    assert "training" in shown
    assert "Traceback" not in shown


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def fail(options):
        raise ZeroDivisionError

    monkeypatch.setattr(COMMANDS["show"], "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["show", "routing", "in.json"])


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["show"], "run", interrupt)
    assert main(["show", "routing", "in.json"]) == 130
    assert capsys.readouterr().err == "dp: interrupted\n"


@pytest.mark.parametrize(
    "words", [["train"], ["train", "a", "-i", "b", "-r", "c"], ["-b", "pt"], ["test"]]
)
def test_help_or_usage_for_incomplete_lines(words, capsys):
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == (0 if words == ["-b", "pt"] else 2)
    assert "usage: dp" in captured.out + captured.err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"deepmd-muon {deepmd_muon.__version__} (torch 2.")


def test_help_imports_nothing_heavy_and_the_module_runs():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['dp', '--help']\n"
        "try:\n"
        "    runpy.run_module('deepmd_muon', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert stop.code in (0, None), stop.code\n"
        "heavy = {'torch', 'numpy', 'h5py', 'vesin', 'matplotlib', 'rich', 'dargs'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "neighbor-stat" in done.stdout
