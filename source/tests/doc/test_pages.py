"""Every block of code on every page runs, or says why it does not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from page_runner import REASONS, blocks_of, run_page

from deepmd_muon.optim.other_configs import OPTIMIZERS

TOP = Path(__file__).parents[3]
PAGES = {
    str(page.relative_to(TOP)): page
    for page in (*TOP.glob("*.md"), *(TOP / "doc").rglob("*.md"), *TOP.glob("examples/*/README.md"))
}
# Pages whose blocks run one after the other. Benchmarks show commands of scripts, which take hours.
WALKS = {name: page for name, page in PAGES.items() if not name.startswith("doc/benchmarks/")}
NEED_ASE = (
    *("doc/start.md", "doc/tutorials/water.md", "doc/tutorials/own-data.md", "doc/api.md"),
    *("doc/uncertainty.md", "doc/coming-from.md"),
)


def is_first(name):
    """Whether a reader begins with a page; the blocks of the others run with the slow tests."""
    return name in ("README.md", "doc/start.md") or name.startswith("doc/tutorials/")


def runs(block, *, slow):
    """Whether a block runs in a tier."""
    return (
        block.language in ("python", "sh")
        and (block.note in ("", "slow"))
        and (block.note == "slow") == slow
    )


@pytest.fixture
def checkout(tmp_path, monkeypatch, as_alone):
    """A folder with the examples, few frames of each system; training stays on the CPU with one thread."""
    shutil.copytree(TOP / "examples", tmp_path / "examples")
    for array in tmp_path.glob("examples/*/data/*/*/set.*/*.npy"):
        np.save(
            array, np.load(array)[: 10 if "cu_emt" in array.parts else 3]
        )  # dp init splits ten in time
    optimizers = {*OPTIMIZERS}
    monkeypatch.delenv("DP_BACKEND", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for registered in {*OPTIMIZERS} - optimizers:  # by a page
        del OPTIMIZERS[registered]


@pytest.fixture
def empty_pictures(monkeypatch):
    """Write pictures without what is drawn: that takes half of the time, and has tests of its own."""
    write = Figure.savefig

    def write_empty(figure, *words, **options):
        figure.clear()
        figure.set_layout_engine("none")
        write(figure, *words, **options)

    monkeypatch.setattr(Figure, "savefig", write_empty)


@pytest.mark.parametrize(
    "name",
    [
        name if is_first(name) else pytest.param(name, marks=pytest.mark.slow)
        for name, page in WALKS.items()
        if any(runs(b, slow=False) for b in blocks_of(page))
    ],
)
def test_the_blocks_of_a_page_run(name, checkout, request):
    if name != "doc/start.md":
        request.getfixturevalue("empty_pictures")
    if name in NEED_ASE:
        pytest.importorskip("ase")
    assert run_page(PAGES[name], slow=False) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name, page in WALKS.items() if any(runs(b, slow=True) for b in blocks_of(page))],
)
def test_the_slow_blocks_of_a_page_run(name, checkout):
    assert run_page(PAGES[name], slow=True) > 0


@pytest.mark.parametrize("name", sorted(WALKS))
def test_every_block_has_a_language_and_a_reason_if_it_does_not_run(name):
    for block in blocks_of(PAGES[name]):
        where = f"{name}:{block.line}"
        assert block.language in (
            "sh",
            "python",
            "json",
            "toml",
            "text",
            "{toctree}",
            "{image}",
            "{eval-rst}",
        ), where
        kind, _, what = block.note.partition(": ")
        if kind == "not run":
            assert what in REASONS, f"{where}: give one of the reasons {sorted(REASONS)}"
        elif kind == "tested":
            named = (
                TOP / what
                if "/" in what
                else next(iter((TOP / "source" / "tests").rglob(what)), None)
            )
            assert named is not None, f"{where} names {what}, which does not exist"
            assert named.exists(), f"{where} names {what}, which does not exist"
        elif kind not in ("file", "slow"):
            assert not block.note, f"{where}: {block.note!r} is no note that the tests know"
        if block.language == "json":
            text = block.code
            json.loads(text if text.startswith(("{", "[")) else f"{{{text}}}")


def test_what_tests_of_pages_need_is_in_an_extra_or_a_tier_of_its_own():
    """A page whose block says "tested" would otherwise be skipped by everyone."""
    notes = {block.note for page in WALKS.values() for block in blocks_of(page)}
    names = {note.partition(": ")[2] for note in notes if note.startswith("tested: ")}
    files = [
        file
        for name in names
        if name.endswith(".py") and "/" not in name
        for file in (TOP / "source" / "tests").rglob(name)
    ]
    assert len(files) > 10
    extras = (TOP / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    offered = {name.lower() for name in re.findall(r'"([\w-]+)[\[>=]', extras)}
    for file in files:
        text = file.read_text()
        needed = set(re.findall(r'importorskip\(\s*"(\w+)', text))
        if not re.search(r"mark\.(frameworks|lammps|metatomic)", text):
            assert {module.replace("_", "-") for module in needed} <= offered, file


@pytest.mark.parametrize(
    "name", ["README.md", *(name for name in sorted(WALKS) if name.startswith("doc/tutorials/"))]
)
def test_a_first_page_recommends_no_rate_of_the_optimizer(name):
    """An explicit lr_adjust_coeff switches off the default of adam_lr_ratio."""
    assert not [block.line for block in blocks_of(PAGES[name]) if "lr_adjust_coeff" in block.code]
