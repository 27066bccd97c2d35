"""Disks that are full, read-only or faulty: each file that is written is named, and no good one is lost.

Errors are injected where files are made, `deepmd_muon.files`; a few come from the system itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from deepmd_muon import files
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.cli.main import main
from deepmd_muon.data import Frames, StatFile
from deepmd_muon.data.writing import write_extxyz, write_hdf5, write_npy
from deepmd_muon.files import WriteError, fresh_file, replace_link, whole_file
from deepmd_muon.infer.details import DetailFiles
from deepmd_muon.infer.predictor import Prediction
from deepmd_muon.show import picture
from deepmd_muon.train.checkpoint import ownership
from deepmd_muon.train.report.trackers import TensorBoardReport

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
ERRORS = ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS")
OPERATIONS = ("open", "write", "fsync", "replace")


class FaultyDisk:
    """`os` as `deepmd_muon.files` sees it, one of whose functions fails for names that match."""

    def __init__(self, operation, number, name):
        self.operation, self.number, self.name = operation, number, re.compile(name)
        self.failed = False

    def __getattr__(self, key):
        if key == self.operation:
            return self.faulty
        if key == "link" and self.operation == "replace":  # puts a new file in its place
            return self.faulty_link
        return getattr(os, key)

    def fail_for(self, path):
        if self.name.search(os.fspath(path)) and not os.fspath(path).startswith(str(EXAMPLE)):
            self.failed = True
            raise OSError(self.number, os.strerror(self.number), os.fspath(path))

    def faulty(self, first, *args, **kwargs):
        path = args[0] if self.operation == "replace" else first
        self.fail_for(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path)
        return getattr(os, self.operation)(first, *args, **kwargs)

    def faulty_link(self, temporary, path):
        self.fail_for(path)
        os.link(temporary, path)


@pytest.fixture
def break_disk(monkeypatch):
    """A function that lets an operation fail for files whose names match; temporary names begin with a dot."""

    def start(operation, error, name):
        disk = FaultyDisk(operation, getattr(errno, error), name)
        for module in (files, ownership):
            monkeypatch.setattr(module, "os", disk)
        if operation == "write":

            class Broken(files._NamedFile):
                def write(self, data):
                    with files.writing(self._path):
                        disk.fail_for(self._path)
                    return super().write(data)

            monkeypatch.setattr(files, "_NamedFile", Broken)
        return disk

    return start


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_file_is_whole_or_the_old_one(break_disk, operation, error):
    Path("a.txt").write_text("old")
    disk = break_disk(operation, error, r"\.?a\b.*\.txt")
    for write in (whole_file, fresh_file):
        with pytest.raises(WriteError) as caught, write(Path("a.txt")) as file:
            file.write(b"new")
        if write is whole_file or operation != "write":
            assert Path("a.txt").read_text() == "old"
        assert caught.value.errno == disk.number
        assert str(caught.value) == f"cannot write a.txt: {os.strerror(disk.number)}"
        assert os.listdir() == ["a.txt"]
    if operation == "replace":
        with pytest.raises(WriteError, match=r"a\.txt"):
            replace_link(Path("a.txt"), "b.txt")
        assert os.listdir() == ["a.txt"]


def details(path):
    frames = Frames(np.zeros((2, 1), int), np.zeros((2, 1, 3)), None, energy=np.array([1.0, 2.0]))
    prediction = Prediction(
        np.array([1.5, 2.5]), np.zeros((2, 1, 3)), np.zeros((2, 9)), np.zeros((2, 1))
    )
    DetailFiles(str(path).removesuffix(".e.out")).add("a", frames, prediction)


def systems():
    from deepmd_muon.data import open_systems

    return open_systems([str(EXAMPLE / "valid")], None)[:1]


# Name of the file that is named, and what writes it.
WRITERS = {
    "d.e.out": details,
    "p.png": lambda path: picture.write(Figure(), path),
    "p.pdf": lambda path: picture.write(Figure(), path),
    "s.hdf5": lambda path: StatFile(path).save({"a": 1}, {"x": np.arange(5000)}),
    "npy/type.raw": lambda path: write_npy(systems(), path.parent),
    "npy/set.000/coord.npy": lambda path: write_npy(systems(), path.parents[1]),
    "c.h5": lambda path: write_hdf5(systems(), path),
    "c.xyz": lambda path: write_extxyz(systems(), path),
}


# Of a folder, the files are written and the whole is put in its place.
CASES = [
    (o, n)
    for o in ("open", "write", "replace")
    for n in WRITERS
    if (n[:4] == "npy/") <= (o != "replace")
]
WRITERS["npy"] = lambda path: write_npy(systems(), path)


@pytest.mark.parametrize(("operation", "name"), [*CASES, ("replace", "npy")])
def test_commands_name_what_they_cannot_write(break_disk, name, operation):
    suffix = "".join(Path(name).suffixes)
    disk = break_disk(
        operation, "ENOSPC", rf"(^|/)\.?{Path(name).name.removesuffix(suffix)}\b[^/]*$"
    )
    with pytest.raises(WriteError) as caught:
        WRITERS[name](Path(name))
    assert caught.value.filename == name
    assert disk.failed
    assert not [path for path in Path().rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize("output", ["c.h5", "c.xyz", "npy", "c.lmdb"])
def test_conversion_under_a_limit_of_file_sizes(output, capfd):
    if output == "c.lmdb":
        pytest.importorskip("lmdb")
    import deepmd_muon.data.writing  # noqa: F401 (Python would write a part of its bytecode below)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        status = main(["convert-data", str(EXAMPLE / "valid"), output])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capfd.readouterr().err
    assert status == 1
    assert f"cannot write {output}" in said
    assert not Path(output).exists()
    assert not [path for path in Path().rglob("*") if path.name.startswith(".")]


# What is named, the operation and its error, and the last good checkpoint.
FAULTS = [
    ("model.ckpt-4.pt", "write", "ENOSPC", r"model\.ckpt-4", "model.ckpt-2.pt"),
    ("model.ckpt-4.pt", "open", "EROFS", r"model\.ckpt-4", "model.ckpt-2.pt"),
    ("model.ckpt-4.pt", "fsync", "EIO", r"model\.ckpt-4", "model.ckpt-2.pt"),
    ("model.ckpt-4.pt", "replace", "EDQUOT", r"model\.ckpt-4", "model.ckpt-2.pt"),
    ("model.ckpt.pt", "replace", "ENOSPC", r"model\.ckpt\.pt$", "model.ckpt-2.pt"),
    ("checkpoint", "write", "ENOSPC", r"^checkpoint$", "model.ckpt-2.pt"),
]


def trained(content, said, *options):
    """Train, and return the message that the run ends with."""
    Path("input.json").write_text(json.dumps(content))
    assert main(["train", "input.json", "-v", "WARNING", *options]) == 1
    lines = said.readouterr().err
    assert "Traceback" not in lines
    (message,) = [line for line in lines.splitlines() if line.startswith("dp train: ")]
    return message


@pytest.fixture
def short_input(small_input):
    """A function that gives an input which saves at steps 2 and 4, without validation."""

    def make(**training):
        content = small_input(
            training={"numb_steps": 4, "save_freq": 2, "disp_freq": 1, **training}
        )
        content["training"].pop("validation_data")
        return content

    return make


@pytest.mark.parametrize(("name", "operation", "error", "matching", "good"), FAULTS)
def test_a_save_that_fails_names_itself_and_the_one_before(
    short_input, break_disk, capfd, name, operation, error, matching, good
):
    break_disk(operation, error, matching)
    message = trained(short_input(), capfd)
    assert f"cannot write {name}: {os.strerror(getattr(errno, error))}" in message
    assert message.endswith(f"the last good checkpoint is {good}")
    assert read_checkpoint(good)["deepmd_muon"]["step"] == 2
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("name", "operation"), [("best.ckpt-2.t-1.pt", "write"), ("val.log", "write")]
)
def test_full_validation_names_what_it_cannot_write(
    short_input, break_disk, capfd, name, operation
):
    content = short_input()
    content["training"]["validation_data"] = {
        "systems": [str(EXAMPLE / "valid")],
        "batch_size": 2,
        "numb_btch": 2,
    }
    content["validating"] = {"full_validation": True, "full_val_start": 0, "validation_freq": 2}
    break_disk(operation, "EDQUOT", f"^{re.escape(name)}$")
    message = trained(content, capfd)
    assert f"cannot write {name}: Disk quota exceeded" in message
    assert "last good checkpoint" in message or "no checkpoint has been" in message


@pytest.mark.parametrize("operation", ["write", "replace"])
def test_freezing_names_what_it_cannot_write(small_input, train, break_disk, capfd, operation):
    assert train(small_input(training={"numb_steps": 1})) == 0
    break_disk(operation, "ENOSPC", r"frozen.*\.pth$")
    assert main(["freeze", "-c", "model.ckpt.pt", "-o", "frozen.pth"]) == 1
    said = capfd.readouterr().err
    assert "dp freeze: cannot write frozen.pth: No space left on device; free space there" in said
    assert not list(Path().glob("*frozen*"))


@pytest.mark.parametrize(
    ("name", "operation", "matching"),
    [
        ("out.json", "write", "^out.json$"),
        ("stat.hdf5", "write", "^stat.hdf5$"),
        ("lcurve.out", "write", "^lcurve.out$"),
        ("log.jsonl", "write", "^log.jsonl$"),
        ("train.log", "open", r"\.train"),
        ("lcurve.out", "open", r"\.lcurve\.\w+\.out"),
        (".model.ckpt.lock", "open", "lock"),
        (".lcurve.out.lock", "pwrite", r"lcurve\.out\.lock"),
    ],
)
def test_what_cannot_be_begun_names_the_checkpoint_to_continue(
    short_input, train, break_disk, capfd, name, operation, matching
):
    content = short_input(stat_file="stat.hdf5", jsonl_file="log.jsonl", numb_steps=2)
    assert train(content) == 0
    Path("stat.hdf5").unlink()
    break_disk(operation, "ENOSPC", matching)
    options = ["--force-load"] if name == "stat.hdf5" else []
    message = trained(content, capfd, "--restart", "model.ckpt-2.pt", "-l", "train.log", *options)
    assert f"cannot write {name}: No space left on device" in message
    assert message.endswith("the last good checkpoint is model.ckpt-2.pt")


@pytest.fixture
def fail_rows(monkeypatch):
    """A function that lets every write to a file of this name fail that is open for appending."""

    def start(name):
        original = files._NamedFile.write

        def write(self, data):
            if self._path == Path(name) and not Path(
                f"/proc/self/fd/{self.fileno()}"
            ).readlink().name.startswith("."):
                raise files.WriteError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            return original(self, data)

        monkeypatch.setattr(files._NamedFile, "write", write)

    return start


@pytest.mark.parametrize(
    ("setting", "name"), [("disp_file", "lcurve.out"), ("jsonl_file", "log.jsonl")]
)
def test_a_report_on_a_full_disk_names_the_last_checkpoint(
    short_input, fail_rows, capfd, setting, name
):
    """The row of step 1 is the first."""
    fail_rows(name)
    message = trained(short_input(**{setting: name}), capfd)
    assert "step 1" in message
    assert f"cannot write {name}: No space left on device" in message
    assert message.endswith("the last good checkpoint is model.ckpt-1.pt")


def test_reports_a_full_disk_twice_for_reports_and_checkpoints(
    short_input, break_disk, fail_rows, capfd
):
    Path("input.json").write_text(json.dumps(short_input()))
    break_disk("write", "EDQUOT", r"^model\.ckpt-1\.pt$")
    fail_rows("lcurve.out")
    assert main(["train", "input.json", "-v", "WARNING"]) == 1
    said = capfd.readouterr().err
    assert (
        "step 1 could not be saved either: cannot write model.ckpt-1.pt: Disk quota exceeded"
        in said
    )
    assert (
        "cannot write lcurve.out: No space left on device; free space there; no checkpoint has been"
        in said
    )


def test_a_full_log_file_ends_nothing(short_input, fail_rows, capfd):
    Path("input.json").write_text(json.dumps(short_input(numb_steps=1)))
    fail_rows("train.log")
    assert main(["train", "input.json", "-l", "train.log"]) == 0
    said = capfd.readouterr().err
    assert said.count("cannot write train.log") == 1
    assert "training done" in said
    assert "Traceback" not in said


def test_a_full_disk_behind_stderr_ends_nothing(short_input, monkeypatch):
    Path("input.json").write_text(json.dumps(short_input(numb_steps=1)))
    with monkeypatch.context() as patched:
        patched.setattr(
            sys, "stderr", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)
        )
        assert main(["train", "input.json"]) == 0
        with contextlib.suppress(OSError):
            sys.stderr.close()
    assert Path("model.ckpt-1.pt").exists()


def test_tensorboard_names_its_folder(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    report = TensorBoardReport(str(tmp_path / "log"), 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report._writer, "add_scalar", full)
    with pytest.raises(WriteError, match="log: No space"):
        report.step(1, 0.1, {}, {})


def test_a_trace_that_is_cut_off_names_itself_after_the_last_save(short_input, capfd):
    content = short_input(profiling=True, profiling_file="trace.json")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        message = trained(content, capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write trace.json" in message
    assert message.endswith("the last good checkpoint is model.ckpt-4.pt")
    assert not list(Path().glob("*trace*"))


def test_checkpoints_under_a_limit_of_file_sizes(short_input, capfd):
    content = short_input()
    content["model"]["fitting_net"]["neuron"] = [60, 60]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        message = trained(content, capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write model.ckpt-2.pt: File too large; raise the limit" in message
    assert message.endswith("no checkpoint has been written yet")
    assert not [path for path in Path().iterdir() if "ckpt" in path.name]
