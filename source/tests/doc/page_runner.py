"""Run a page of the documentation: its files, commands and Python, one after the other in an empty folder.

A comment on the line above a block says what happens to it::

    <!-- file: input.json -->       the block is the content of a file
    <!-- not run: installs -->      nothing, and why; the reasons are listed below
    <!-- tested: test_file.py -->   another test runs it
    <!-- slow -->                   it runs with `pytest -m slow` only

Without one, blocks of `python` and `sh` run, and blocks of `json` must be JSON. Other languages are not run.
Sybil would find the blocks, but commands in this process, shortened trainings and the comments would stay here.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from deepmd_muon.cli.main import main

# Why a block may be left out.
REASONS = {
    "installs": "it installs packages; .ci/run does so",
    "another machine": "it needs a second machine",
    "several GPUs": "it needs more GPUs than a test has",
    "Slurm": "it needs a cluster",
    "a form": "it shows what may stand there, not a command",
    "deepmd-kit": "it needs deepmd-kit; tests marked deepmd_kit do the same",
    "own files": "it names files of the reader",
    "long": "it takes minutes or hours; the page has its output",
}
STEPS = 4  # of every training on a page


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    code: str
    note: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page with the comment above each."""
    lines = page.read_text().split("\n")
    start = None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"```(\S*)(?: .*)?", line)  # a directive may have an argument
        if fence and start is None:
            start, language = number, fence[1]
        elif fence:
            note = re.fullmatch(r"<!-- (.*) -->", lines[start - 1])
            yield Block(
                start + 1, language, "\n".join(lines[start + 1 : number]), note[1] if note else ""
            )
            start = None


def commands_of(code: str) -> list[str]:
    """Return the commands of a block: without comments, and each on one line."""
    lines = code.replace("\\\n", " ").split("\n")
    return [line for line in lines if line.strip() and not line.startswith("#")]


def shorten(file: str) -> None:
    """Let a training take few steps, and validate with one batch."""
    content = json.loads(Path(file).read_text())
    content["training"] |= {"numb_steps": STEPS, "disp_freq": 1, "save_freq": STEPS}
    if content["training"].get("validation_data"):
        content["training"]["validation_data"]["numb_btch"] = 1
    content["model"]["data_stat_nbatch"] = 1
    Path(file).write_text(json.dumps(content))


def shortened_check(words: list[str]) -> list[str]:
    """Return the words of `dp check` or `dp report` for one copy and a few steps."""
    changes = [("--time", "0.003"), ("--copies", "1")]
    changes.append(("--probes", "1") if "check" in words else ("--frames", "4"))
    for option, value in changes:
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words = [*words, option, value]
    return words


def run_command(command: str) -> None:
    """Run a command as a shell would: ours and Python's in this process, so that torch is imported once."""
    command = command.strip()
    if command.startswith("(") and command.endswith(")"):
        with _back_again():
            run_command(command[1:-1])
        return
    for part in command.split(" && "):
        words = shlex.split(part, comments=True)
        variables = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        words = [
            name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])
        ]
        with mock.patch.dict(os.environ, variables):
            _run_words(words)


@contextlib.contextmanager
def _back_again() -> Iterator[None]:
    before = os.getcwd()
    yield
    os.chdir(before)


def _run_words(words: list[str]) -> None:
    if words[0] == "cd":
        os.chdir(words[1])
    elif words[0] in ("dp", "dpmuon"):
        if "train" in words:
            shorten(words[words.index("train") + 1])
        checks = "check" in words or "report" in words
        try:
            status = main(shortened_check(words[1:]) if checks else words[1:])
        except SystemExit as stop:  # of --version and --help
            status = stop.code or 0
        # A potential of few steps may fail the check (1), but it must have been done.
        assert status in ((0, 1) if checks else (0,)), words
    elif words[0] == "python":
        with mock.patch.object(sys, "argv", words[1:]):
            runpy.run_path(words[1], run_name="__main__")
    else:
        if "train" in words:
            shorten(words[words.index("train") + 1])
        folder = Path(sys.executable).parent
        subprocess.run(
            words, check=True, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        )


def run_page(page: Path, *, slow: bool) -> int:
    """Run the blocks of a page in the present folder; return how many ran."""
    names: dict[str, object] = {}
    top, count = os.getcwd(), 0
    for block in blocks_of(page):
        kind, _, what = block.note.partition(": ")
        if kind == "file":
            Path(what).write_text(block.code + "\n")
        elif kind in ("not run", "tested") or (kind == "slow") != slow:
            continue
        elif block.language == "python":
            exec(compile(block.code, f"{page.name}:{block.line}", "exec"), names)
        elif block.language == "sh":
            for command in commands_of(block.code):
                if command.startswith("cd ") and not Path(command[3:]).exists():
                    os.chdir(top)  # each block of a page may begin at the top
                run_command(command)
        else:
            continue
        count += 1
    return count
