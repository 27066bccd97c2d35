"""The rooms of the package and the arrows between them, read from the import statements."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "deepmd_muon"
ROOMS = (
    *(
        "argcheck",
        "checkpoint_file",
        "cli",
        "data",
        "deepmd_kit",
        "deploy",
        "dynamics",
        "explore",
        "infer",
        "loss",
        "model",
        "optim",
        "replay",
        "show",
        "stability",
        "testing",
    ),
    "train",
)
# Which rooms a room may import from, beside itself.
ARROWS = {
    "argcheck": {"checkpoint_file", "loss", "model", "optim"},
    "checkpoint_file": set(),
    "cli": {
        *(
            "argcheck",
            "checkpoint_file",
            "data",
            "deploy",
            "explore",
            "infer",
            "model",
            "optim",
            "show",
            "stability",
        ),
        *("replay", "train"),
    },
    "data": set(),
    "deepmd_kit": {"argcheck", "optim"},
    "deploy": {"checkpoint_file", "data", "infer", "model"},
    "dynamics": {"checkpoint_file", "data", "infer", "model"},
    "explore": {"argcheck", "checkpoint_file", "data", "dynamics", "infer", "stability", "train"},
    "infer": {"checkpoint_file", "data", "model"},
    "loss": {"model"},
    "model": {"checkpoint_file"},
    "optim": set(),
    "replay": {"argcheck", "checkpoint_file", "data", "dynamics", "infer", "model"},
    "show": {
        "argcheck",
        "checkpoint_file",
        "data",
        "infer",
        "model",
        "optim",
        "stability",
        "train",
    },
    "stability": {"data", "dynamics", "infer"},
    "testing": {"argcheck", "checkpoint_file", "data", "deploy", "infer", "loss", "model", "train"},
    "train": {"argcheck", "checkpoint_file", "data", "loss", "model", "optim"},
}
# Of other rooms, the input check may read only settings and errors, which do not import torch.
TORCH_FREE = {
    *(
        "deepmd_muon.optim.config",
        "deepmd_muon.optim.other_configs",
        "deepmd_muon.optim.omitted_scales",
    ),
    *("deepmd_muon.optim.buildable", "deepmd_muon.optim.words"),
    *("deepmd_muon.loss.settings", "deepmd_muon.loss.registry", "deepmd_muon.loss.ener.settings"),
    *(
        "deepmd_muon.model.branch_settings",
        "deepmd_muon.model.settings",
        "deepmd_muon.checkpoint_file.errors",
    ),
}
# Every room may import these, in this order; they import nothing else of the package.
GROUND = ("setting", "section", "coverage", "registry")
THIRD_PARTY = {
    "argcheck": {"dargs", "deepmd", "yaml"},  # deepmd: for hosted models only
    "data": {
        "numpy",
        "h5py",
        "vesin",
        "ase",
        "lmdb",
        "msgpack",
    },  # ase, lmdb, msgpack for the files that need them
    "deepmd_kit": {"dargs", "deepmd", "torch"},
    "loss": {"torch", "triton"},
    "model": {"torch", "numpy", "triton", "deepmd"},  # deepmd: in `hosted` only
    "optim": {"torch", "triton"},
}
LAZY = [
    ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if "def __getattr__" in path.read_text(encoding="utf-8")
]
STANDARD = set(sys.stdlib_module_names) | {"deepmd_muon"}


def imports(path):
    """Yield (module, line) of every import of a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module, node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_run_one_way(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for module, line in imports(path):
            parts = module.split(".")
            where = f"{path.relative_to(PACKAGE.parent)}:{line} imports {module}"
            if (
                parts[0] == "deepmd_muon"
                and len(parts) > 1
                and parts[1] in ROOMS
                and parts[1] != room
            ):
                assert parts[1] in ARROWS[room], where
                if room == "argcheck":
                    assert module in TORCH_FREE, where
            if parts[0] not in STANDARD and room in THIRD_PARTY:
                assert parts[0] in THIRD_PARTY[room], where


def test_no_line_of_a_docstring_continues_another():
    """The site's reader of docstrings takes one line of parameter names; several entries say the same."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                assert "\\\n" not in (ast.get_docstring(node) or ""), (
                    f"{path}: {getattr(node, 'name', 'the file')}"
                )


@pytest.mark.parametrize("number", range(len(GROUND)))
def test_the_ground_imports_only_the_standard_library_and_what_lies_below(number):
    below = {f"deepmd_muon.{name}" for name in GROUND[:number]}
    found = {name for name, _ in imports(PACKAGE / f"{GROUND[number]}.py")}
    assert {name for name in found if name.split(".")[0] not in sys.stdlib_module_names} <= below


def test_every_room_is_known():
    folders = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")
    }
    assert folders == set(ROOMS)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import deepmd_muon", ("torch", "triton", "numpy")),
        ("import deepmd_muon.argcheck", ("torch", "triton")),
        ("import deepmd_muon.deepmd_kit.entry", ("torch", "triton", "numpy", "dargs")),
        ("import deepmd_muon.data", ("torch", "triton")),
        ("import deepmd_muon.cli.main", ("torch", "triton", "h5py", "matplotlib")),
    ],
)
def test_imports_load_no_more_than_they_must(statement, unwanted):
    """What the optimizer loads is tested in `optim/test_optim_build.py`."""
    code = f"import sys\n{statement}\nprint([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", LAZY)
def test_packages_that_import_on_demand_list_their_names(name):
    package = importlib.import_module(name)
    assert package.__all__
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_importing_the_package_changes_no_global_setting_of_torch():
    code = """
import torch
def settings():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark, torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().sum().item())
before = settings()
import deepmd_muon.train.trainer, deepmd_muon.infer.predictor, deepmd_muon.optim.hybrid_muon, deepmd_muon.cli.main
assert settings() == before, (before, settings())
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
