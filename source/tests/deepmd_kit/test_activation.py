"""How this package enters deepmd-kit, without deepmd-kit: a package of the same name has a trainer to extend."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path
from types import ModuleType

import pytest
from forked import run_script

from deepmd_muon.argcheck import InputError, Problem
from deepmd_muon.deepmd_kit.activation import ActivationError, activate, is_requested
from deepmd_muon.deepmd_kit.trainer import UnsupportedDeepmdKitError, extend

ROOT = Path(__file__).parents[3]

# What of deepmd-kit the plugin touches while it is imported: the place of the two files, and the names in them.
PACKAGE = {
    "deepmd/__init__.py": "",
    "deepmd/utils/__init__.py": "",
    "deepmd/utils/argcheck.py": """
from dargs import Argument
class Registry:
    functions = {}
    def get_argument(self, name):
        return Argument(name, dict, [Argument("momentum", float, optional=True)], doc="text")
    def register(self, name, alias=None, doc=""):
        return lambda function: self.functions.setdefault((name, alias, doc), function)
opt_args_plugin = Registry()
""",
    "deepmd/pt/__init__.py": "import deepmd_muon.deepmd_kit.entry",
    "deepmd/pt/train/__init__.py": "",
    "deepmd/pt/train/training.py": """
class Trainer:
    def _create_optimizer(self, optimizer_class, **kwargs): ...
    def _load_optimizer_state(self, optimizer_state_dict): ...
OWN = Trainer
""",
}
LOOK = """
from deepmd.pt.train import training
from deepmd.utils.argcheck import opt_args_plugin
print(training.Trainer is training.OWN, [c.__name__ for c in training.Trainer.__mro__])
print([a.name for f in opt_args_plugin.functions.values() for a in f()])
"""


@pytest.fixture
def look(tmp_path):
    """A function that imports the trainer in a fresh process and returns what is printed."""

    def start(value):
        for name, text in PACKAGE.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "look.py").write_text(LOOK)
        return run_script("look.py", folder=tmp_path, DEEPMD_MUON=value)

    return start


@pytest.mark.parametrize(
    ("value", "meaning"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_the_variable_decides(value, meaning):
    assert is_requested({} if value is None else {"DEEPMD_MUON": value}) is meaning


def test_another_value_is_refused():
    with pytest.raises(ActivationError, match="'yes'"):
        is_requested({"DEEPMD_MUON": "yes"})


def test_nothing_changes_unless_asked_for(look):
    done = look("")
    assert done.stdout.splitlines() == ["True ['Trainer', 'object']", "[]"]


def test_the_trainer_and_the_input_check_are_extended(look):
    classes, keys = look("1").stdout.splitlines()
    assert classes == "False ['Trainer', 'HybridMuonTrainer', 'Trainer', 'object']"
    assert all(
        repr(key) in keys
        for key in ("magma_muon", "normuon_beta", "cautious_decay", "rules", "nesterov")
    )
    assert keys.count("'momentum'") == 1


@pytest.mark.parametrize("enabled_first", [True, False])
def test_the_keys_are_in_the_input_check_as_soon_as_it_is_enabled(look, tmp_path, enabled_first):
    """Without a trainer: for `dp doc-train-input`, and for programs that show the form of an input."""
    look("")  # writes the package
    enable, check = "import deepmd_muon.deepmd_kit.entry", "from deepmd.utils import argcheck"
    lines = [enable, check] if enabled_first else [check, enable]
    show = "print([a.name for f in argcheck.opt_args_plugin.functions.values() for a in f()])"
    (tmp_path / "keys.py").write_text("\n".join([*lines, show]))
    keys = run_script("keys.py", folder=tmp_path, DEEPMD_MUON="1").stdout
    assert "'normuon_beta'" in keys
    assert keys.count("'momentum'") == 1
    assert run_script("keys.py", folder=tmp_path, DEEPMD_MUON="").stdout == "[]\n"


def test_a_wrong_input_ends_in_its_message_alone(monkeypatch, capsys):
    others = []
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "excepthook", lambda *error: others.append(error[1]))
    activate()
    for error in (InputError([Problem("optimizer/schedule", "must be a schedule")]), KeyError("x")):
        sys.excepthook(type(error), error, None)
    assert "dp: " in (said := capsys.readouterr().err)
    assert "optimizer/schedule" in said
    assert [str(error) for error in others] == ["'x'"]


def test_an_unknown_trainer_ends_in_a_clear_error():
    module = ModuleType("deepmd.pt.train.training")
    module.Trainer = type("Trainer", (), {"_create_optimizer": None})
    with pytest.raises(UnsupportedDeepmdKitError, match="_load_optimizer_state"):
        extend(module)


def test_the_metadata_names_the_entry_in_all_groups_of_deepmd_kit():
    project = configparser.ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    groups = [
        line
        for line in lines
        if line.startswith("[project.entry-points") or "deepmd_kit.entry" in line
    ]
    project.read_string("\n".join(groups))
    for group in ("deepmd.backend", "deepmd.pt", "deepmd.pt_expt"):
        assert (
            project[f'project.entry-points."{group}"']["deepmd_muon"]
            == '"deepmd_muon.deepmd_kit.entry"'
        )
