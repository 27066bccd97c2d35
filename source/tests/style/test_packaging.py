"""What is distributed: the files of a source distribution, the package's metadata, the versions that are pinned."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepmd_muon import __version__

TOP = Path(__file__).parents[3]
WORK = shutil.ignore_patterns(
    *(
        ".git",
        ".venv",
        "dist",
        "build",
        "*.egg-info",
        "__pycache__",
        ".*_cache",
        ".hypothesis",
        "runs",
    ),
    *("*.ckpt*", "lcurve.out*", "lcurve.png", "out.json", "parity.png"),
    *("PKG-INFO", "setup.cfg"),  # the tests may run in an unpacked source distribution
)


def left_out(folder, names):
    """What shutil shall not copy: what runs write. A folder of the package has the name of one of these files."""
    ran = {"checkpoint"} if Path(folder).parent.name == "examples" else set()
    return WORK(folder, names) | (ran & {*names})


def files_below(folder):
    paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in paths if not path.parts[0].endswith(".egg-info")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build a source distribution from a copy of this tree and unpack it: (file names, folder)."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("needs setuptools 77, which pip install -c constraints.txt '.[test]' brings")
    place = tmp_path_factory.mktemp("sdist")
    shutil.copytree(TOP, place / "checkout", ignore=left_out)
    code = "from setuptools.build_meta import build_sdist; print(build_sdist('..'))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-W", "error::DeprecationWarning:setuptools", "-c", code]
    done = subprocess.run(
        command, cwd=place / "checkout", env=environment, capture_output=True, text=True, check=True
    )
    shutil.unpack_archive(place / done.stdout.split()[-1], place)
    (folder,) = place.glob("deepmd_muon-*/")
    return files_below(folder), folder


@pytest.mark.slow
def test_a_source_distribution_holds_what_a_checkout_holds(sdist):
    names, folder = sdist
    checkout = files_below(folder.parent / "checkout")
    assert checkout <= names, sorted(checkout - names)
    assert names - checkout == {"PKG-INFO", "setup.cfg"}
    assert (folder / "examples/water_xtb/input.json").read_bytes() == (
        TOP / "examples/water_xtb/input.json"
    ).read_bytes()


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_holds_every_module(sdist, tmp_path):
    code = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=sdist[1],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("deepmd_muon/")}
    here = {str(path.relative_to(TOP)) for path in (TOP / "deepmd_muon").rglob("*.py")} | {
        "deepmd_muon/py.typed"
    }
    assert packed == here


@pytest.mark.slow
def test_the_metadata_are_complete(sdist):
    metadata = (sdist[1] / "PKG-INFO").read_text()
    for line in (
        "Name: deepmd-muon",
        f"Version: {__version__}",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.10",
        "Provides-Extra: test",
    ):
        assert f"\n{line}\n" in metadata
    assert "License ::" not in metadata
    assert f"\nversion: {__version__}\n" in (TOP / "CITATION.cff").read_text()
    assert f"\n## [{__version__}] - " in (TOP / "CHANGELOG.md").read_text()


def test_every_pattern_of_a_tier_finds_tests(request):
    tests = TOP / "source" / "tests"
    (conftest,) = (p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "LONGEST"))
    assert [
        pattern for pattern in (*conftest.QUICK, *conftest.LONGEST) if not list(tests.glob(pattern))
    ] == []


def lower_bounds(*sections):
    """Return the lowest version of each dependency in these lists of pyproject.toml, by its name in lower case."""
    text = (TOP / "pyproject.toml").read_text()
    parts = re.findall(rf"^(?:{'|'.join(sections)}) = (\[.*?\]$)", text, re.DOTALL | re.MULTILINE)
    found = [pair for part in parts for pair in re.findall(r'"([\w-]+)>=([\d.]+)', part)]
    return {name.lower(): version for name, version in found}


def test_every_dependency_is_pinned():
    named = lower_bounds("dependencies", "gpu", "examples", "tensorboard", "docs", "test").keys()
    pinned = {
        name.lower()
        for name in re.findall(r"^([\w-]+)==", (TOP / "constraints.txt").read_text(), re.MULTILINE)
    }
    assert "torch" in named
    assert named <= pinned, sorted(named - pinned)


def test_the_lowest_versions_are_those_of_the_bounds():
    """A Python that a package's lowest version has no wheel for takes a later one, which a marker says."""
    text = (TOP / "constraints-lowest.txt").read_text()
    lowest = {}
    for name, version in re.findall(r"^([\w-]+)==([\d.]+)", text, re.MULTILINE):
        lowest.setdefault(
            name.lower(), version.rstrip(".")
        )  # the first line is that of Python 3.10
    bounds = lower_bounds("dependencies", "gpu", "ase", "lmdb", "tensorboard")
    assert bounds.keys() <= lowest.keys()
    for name, bound in bounds.items():
        digits = lowest[name].split(".")
        wanted = bound.split(".")
        assert digits[: len(wanted)] == wanted, name
        assert not any(map(int, digits[len(wanted) :])), name
