"""doc/architecture.md is about the tree that is there."""

import ast
import re
from pathlib import Path

import pytest
from test_architecture import ARROWS

TOP = Path(__file__).parents[3]
PACKAGE = TOP / "deepmd_muon"
PAGE = (TOP / "doc" / "architecture.md").read_text()
LISTED = set(re.findall(r"^\| `([\w/.]+)` \|", PAGE, re.MULTILINE))
PICTURE = (TOP / "doc" / "images" / "step.svg").read_text()
DRAWN = re.findall(r"([\w/]+\.py)::([\w.]+)", PICTURE)
MENTIONED = sorted({*re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", PAGE), *DRAWN})


def test_every_room_has_its_line():
    folders = [*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("*/*/__init__.py")]
    rooms = {f"{path.parent.relative_to(PACKAGE)}/" for path in folders}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    missing = (rooms | modules) - LISTED
    assert not missing, f"add a line to doc/architecture.md for {sorted(missing)}"


@pytest.mark.parametrize("room", sorted(set(ARROWS) - {"cli"}))
def test_a_line_names_the_rooms_that_a_room_may_import(room):
    (cells,) = re.findall(rf"^\| `{room}/` \|.*\|(.*)\|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", cells)) == ARROWS[room]


def test_every_line_has_its_place():
    gone = [name for name in LISTED if not (PACKAGE / name).exists()]
    assert not gone, f"doc/architecture.md lists {gone}, which do not exist in deepmd_muon/"


@pytest.mark.parametrize(("file", "name"), MENTIONED)
def test_every_name_on_the_page_exists(file, name):
    node = ast.parse((PACKAGE / file).read_text())
    for part in filter(None, name.split(".")):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        assert found, f"doc/architecture.md names {file}::{name}, which does not exist"
        (node,) = found


def test_the_picture_of_a_step_has_the_order_of_the_code():
    tree = ast.parse((PACKAGE / "train/step/step.py").read_text())
    (step,) = [node for node in tree.body if getattr(node, "name", None) == "TrainingStep"]
    (call,) = [node for node in step.body if getattr(node, "name", None) == "__call__"]
    called = [
        node.func.attr
        for node in ast.walk(call)
        if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    ]
    where = {name: ast.unparse(call).index(f".{name}(") for name in called}
    drawn = [name.rpartition(".")[2] for _, name in DRAWN]
    drawn[drawn.index("differentiate")] = "_differentiate"
    order = [name for name in drawn if name in where]
    assert order == ["_differentiate", "reduce", "admits", "_clip", "step", "update"]
    assert order == sorted(order, key=where.get)
