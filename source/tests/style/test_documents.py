"""README and pages are true: code runs, links lead somewhere, commands are the ones CI runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_script

TOP = Path(__file__).parents[3]
PAGES = [
    *sorted(TOP.glob("*.md")),
    *sorted((TOP / "doc").rglob("*.md")),
    *sorted((TOP / "examples").rglob("*.md")),
]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_readme_has_the_two_commands():
    commands = blocks(TOP / "README.md", "sh")
    assert len(commands) == 2
    assert all(command.count("\n") == 1 for command in commands), (
        "each is one line: .ci/run runs them as they stand"
    )
    assert "dp --pt train input.json" in commands[0]
    assert "pytest" in commands[1]


def test_code_of_the_extension_page_runs(tmp_path):
    # In a process of its own: what it registers would stay.
    (tmp_path / "page.py").write_text(
        "\n".join(blocks(TOP / "doc" / "change-a-descriptor.md", "python"))
    )
    done = run_script("page.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_parts_of_the_extension_page_pass_their_conformance_tests(tmp_path):
    (tmp_path / "test_page.py").write_text(
        "\n".join(blocks(TOP / "doc" / "extending.md", "python"))
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-q",
        "test_page.py",
    ]
    environment = {**os.environ, "DEVICE": "cpu", "PYTHONPATH": str(TOP)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "27 passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def words(text):
    """Count the words of a page: not its code, its comments and the marks of its tables."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(1 for word in text.split() if re.search(r"\w", word))


def test_no_page_is_long():
    # Looked up, not read.
    references = {"CHANGELOG.md", "doc/input-reference.md", "doc/architecture.md", "doc/api.md"}
    counted = {str(page.relative_to(TOP)): words(page.read_text()) for page in PAGES}
    assert references <= counted.keys()
    assert words("one two-three\n| 4 | – |\n```sh\nno no\n```\n<!-- no\nno -->\n") == 3
    assert {
        name: count for name, count in counted.items() if count > 1500 and name not in references
    } == {}


def test_the_api_page_has_an_example_of_every_public_name():
    from deepmd_muon import infer, optim
    from deepmd_muon.optim import sharded

    code = "\n".join(blocks(TOP / "doc" / "api.md", "python"))
    names = [name for module in (optim, sharded, infer) for name in module.__all__]
    # One error stands for those that are caught alike.
    names = [name for name in names if not name.endswith("Error") or name == "InvalidSettingError"]
    assert len(names) > 20
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


def test_published_scripts_exist():
    for page in PAGES:
        for script in re.findall(r"source/benchmarks/[\w/]+\.py", page.read_text()):
            assert (TOP / script).exists(), f"{page.name} names {script}"


@pytest.mark.parametrize(
    "page", sorted((TOP / "examples").glob("*/README.md")), ids=lambda page: page.parent.name
)
def test_examples_name_the_extra_that_their_scripts_need(page):
    (extra,) = re.findall(
        r"^examples = \[(.*)\]", (TOP / "pyproject.toml").read_text(), re.MULTILINE
    )
    packages = "|".join(re.findall(r'"(\w+)', extra))
    scripts = "\n".join(path.read_text() for path in page.parent.glob("*.py"))
    needed = re.search(rf"^\s*(?:from|import) (?:{packages})\b", scripts, re.MULTILINE) is not None
    assert ('pip install -c constraints.txt ".[examples]"' in page.read_text()) == needed


def test_json_blocks_are_accepted_optimizer_settings():
    import json

    from deepmd_muon.argcheck import normalize

    base = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {"type": "se_e2_a", "sel": [4, 8], "rcut": 5.0},
            "fitting_net": {},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3},
        "loss": {"type": "ener"},
        "training": {"training_data": {"systems": ["water"]}, "numb_steps": 10},
    }
    found = [*blocks(TOP / "README.md", "json"), *blocks(TOP / "doc" / "learning-rate.md", "json")]
    assert len(found) == 3
    for text in found:
        normalize(
            {**base, **json.loads(text if text.lstrip().startswith("{") else "{" + text + "}")}
        )


def test_the_marker_names_what_tests_against_deepmd_kit_read():
    tests = "\n".join(path.read_text() for path in (TOP / "source" / "tests").rglob("*.py"))
    (marker,) = re.findall(
        r'^  "deepmd_kit: .*', (TOP / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert set(re.findall(r"DEEPMD_KIT_[A-Z]+", marker)) == set(
        re.findall(r"DEEPMD_KIT_[A-Z]+", tests)
    )


def test_ci_script_is_sound_shell():
    subprocess.run(["bash", "-n", str(TOP / ".ci" / "run")], check=True)
