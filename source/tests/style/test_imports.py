"""Imports run down only, file by file: in functions, under TYPE_CHECKING, as strings."""

import re
from pathlib import Path

import pytest
from import_graph import PACKAGE, circle_of, imports_of, layer_of, modules_of, upward

# From the ground up: a file imports files of its own layer and of those above this line of the list.
LAYERS = (
    *("deepmd_muon.setting", "deepmd_muon.section", "deepmd_muon.files", "deepmd_muon.failures"),
    *(
        "deepmd_muon.label_keys",
        "deepmd_muon.collector",
        "deepmd_muon.progress",
        "deepmd_muon.coverage",
        "deepmd_muon.registry",
    ),
    "deepmd_muon.optim.errors",
    *("deepmd_muon.optim.buildable", "deepmd_muon.optim.words"),
    *(
        "deepmd_muon.optim.config",
        "deepmd_muon.optim.other_configs",
        "deepmd_muon.optim.omitted_scales",
    ),
    *(
        "deepmd_muon.optim.cuda",
        "deepmd_muon.optim.torch_hooks",
        "deepmd_muon.optim.dtensors",
    ),
    *(
        "deepmd_muon.optim.routing.views",
        "deepmd_muon.optim.update.gradients",
        "deepmd_muon.optim.rules",
    ),
    *("deepmd_muon.optim.polar", "deepmd_muon.optim.routing", "deepmd_muon.optim.update"),
    "deepmd_muon.optim.groups",
    *("deepmd_muon.optim.state", "deepmd_muon.optim.waves"),
    *("deepmd_muon.optim.sharded", "deepmd_muon.optim.qk_clip", "deepmd_muon.optim.arguments"),
    *("deepmd_muon.optim.step", "deepmd_muon.optim.hybrid_muon"),
    *("deepmd_muon.optim.build", "deepmd_muon.optim"),
    *("deepmd_muon.data", "deepmd_muon.checkpoint_file", "deepmd_muon.model", "deepmd_muon.loss"),
    *("deepmd_muon.argcheck", "deepmd_muon.plugins", "deepmd_muon.infer"),
    "deepmd_muon.dynamics",
    *("deepmd_muon.stability", "deepmd_muon.replay"),
    *(
        "deepmd_muon.train",
        "deepmd_muon.explore",
        "deepmd_muon.show",
        "deepmd_muon.deploy",
        "deepmd_muon.deepmd_kit",
    ),
    *("deepmd_muon.cli", "deepmd_muon.testing"),
    *("deepmd_muon.__main__", "deepmd_muon"),
)


@pytest.fixture(scope="module")
def edges():
    return imports_of(PACKAGE)


def test_no_file_imports_one_above_it(edges):
    assert upward(edges, LAYERS) == []


def test_no_circle_of_imports(edges):
    assert circle_of(edges) == []


def test_every_layer_has_files():
    modules = modules_of(PACKAGE)
    used = {layer_of(module, LAYERS) for module in modules}
    assert [layer for i, layer in enumerate(LAYERS) if i not in used] == []


@pytest.mark.parametrize(
    ("importing", "found"),
    [
        ("import thing.high", 1),
        ("def f():\n    from thing import high", 1),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thing.high import name", 1),
        ("from importlib import import_module\ndef f():\n    import_module('thing.high')", 1),
        ("from thing import name", 1),  # which the package re-exports from the higher file
        ("import os", 0),
    ],
)
def test_the_graph_sees_every_kind_of_import(tmp_path, importing, found):
    package = Path(tmp_path) / "thing"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def __getattr__(key):\n    from thing.high import name\n    return name\n"
    )
    (package / "high.py").write_text("import thing.low\nname = 1\n")
    (package / "low.py").write_text(importing + "\n")
    edges = imports_of(package)
    assert len(upward(edges, ("thing.low", "thing.high", "thing"))) == found
    assert set(circle_of(edges)) == ({"thing.high", "thing.low"} if found else set())


def test_no_test_imports_from_a_conftest():
    """Two folders of tests would each have a module `conftest`, and pytest could not collect both in one run."""
    tests = Path(__file__).parents[1]
    imports = re.compile(r"^\s*(?:from|import) conftest\b", re.MULTILINE)
    assert [path.name for path in tests.rglob("*.py") if imports.search(path.read_text())] == []
