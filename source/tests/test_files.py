"""Files that are written: prepared links lead nowhere, devices and FIFOs are refused."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import stat
from pathlib import Path

import h5py
import numpy as np
import pytest
from matplotlib.figure import Figure

from deepmd_muon import files
from deepmd_muon.data import Frames, StatFile
from deepmd_muon.files import (
    WriteError,
    append_to,
    fresh_file,
    hidden_name,
    is_special,
    replace_link,
    whole_file,
    whole_folder,
)
from deepmd_muon.infer.details import DetailFiles
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show import picture
from deepmd_muon.train.report.lcurve import LearningCurveFile
from deepmd_muon.train.report.logs import set_up_logging


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("victim").write_text("precious")


def write_whole(path):
    with whole_file(Path(path)) as file:
        file.write(b"new")


def write_fresh(path):
    with fresh_file(Path(path), b"n") as file:
        file.write(b"ew")


def write_learning_curve(path):
    curve = LearningCurveFile(path, 1)
    curve.step(1, 1e-3, {"rmse": 1.0}, {})
    curve.close()


def write_log(path):
    set_up_logging("INFO", path)
    logging.getLogger("deepmd_muon.test").info("a line")
    set_up_logging("INFO")


def write_picture(path):
    picture.write(Figure(), Path(path))


WRITERS = [write_whole, write_fresh, write_learning_curve, write_log, write_picture]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_in_the_place_of_a_file_is_replaced(write):
    Path("out.png").symlink_to("victim")
    write("out.png")
    assert Path("victim").read_text() == "precious"
    assert stat.S_ISREG(Path("out.png").lstat().st_mode)
    assert Path("out.png").stat().st_size
    assert sorted(os.listdir()) == ["out.png", "victim"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("write", WRITERS)
def test_devices_and_fifos_are_refused_and_stay(write):
    os.mkfifo("fifo.png")
    Path("link.png").symlink_to("/dev/null")
    before = os.lstat("/dev/null")
    for path in ("fifo.png", "link.png", *(["/dev/null"] if write is not write_picture else [])):
        with pytest.raises(WriteError, match="device or FIFO"):
            write(path)
    assert os.lstat("/dev/null") == before
    assert stat.S_ISFIFO(Path("fifo.png").lstat().st_mode)
    assert sorted(os.listdir()) == ["fifo.png", "link.png", "victim"]


def test_devices_are_known_by_their_names():
    for path in ("/dev/null", "/dev/stdout", "/dev/fd/1"):
        assert is_special(Path(path))
    assert not is_special(Path("victim"))
    assert not is_special(Path("/dev/shm/anything"))


def test_a_file_that_fails_leaves_the_old_one():
    Path("out").write_text("old")

    def fail():
        with whole_file(Path("out")) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert Path("out").read_text() == "old"
    assert sorted(os.listdir()) == ["out", "victim"]


def test_a_file_whose_close_fails_leaves_nothing(monkeypatch):
    """NFS reports a full disk at close; no empty temporary file stays."""
    close = files._NamedFile.close

    def fail(file):
        if not file.closed:
            close(file)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(files._NamedFile, "close", fail)
        with pytest.raises(WriteError) as caught, whole_file(Path("out")):
            pass
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir() == ["victim"]


def in_killed_process(work):
    """Call a function in a forked process that ends with SIGKILL where the function calls its argument."""
    process = os.fork()
    if process == 0:
        try:
            work(lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL


def hidden():
    return [name for name in os.listdir() if name.startswith(".")]


def begin_file(end):
    with whole_file(Path("out.pth")) as file:
        file.write(b"half")
        end()


def begin_folder(end):
    with whole_folder(Path("out.pth")) as folder:
        (folder / "set.000").mkdir()
        (folder / "set.000" / "coord.npy").write_bytes(b"half")
        end()


@pytest.mark.parametrize("begin", [begin_file, begin_folder])
def test_a_killed_writer_leaves_a_hidden_file_and_the_next_one_completes(begin):
    in_killed_process(begin)
    (leftover,) = hidden()
    assert not Path("out.pth").exists()
    begin(lambda: None)
    assert hidden() == [leftover]
    assert Path("out.pth").exists()


def test_links_under_a_temporary_name_are_not_followed():
    name = hidden_name(Path("out.pth")).name
    Path("folder").mkdir()
    Path("folder", "kept").touch()
    Path(name).symlink_to("folder")
    write_whole("out.pth")
    assert Path("folder", "kept").exists()
    assert hidden() == [name]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_none_that_came_meanwhile(links, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with whole_file(Path("first"), new=True) as file:
        file.write(b"1")
    assert Path("first").read_bytes() == b"1"

    def write_late():
        with whole_file(Path("out"), new=True) as file:
            file.write(b"2")
            Path("out").write_bytes(b"theirs")

    with pytest.raises(WriteError) as caught:
        write_late()
    assert caught.value.errno == errno.EEXIST
    assert Path("out").read_bytes() == b"theirs"
    assert sorted(os.listdir()) == ["first", "out", "victim"]


def test_new_files_have_the_permissions_that_the_user_wants():
    before = os.umask(0o027)
    try:
        write_whole("out")
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("out").stat().st_mode) == 0o640


def test_names_of_temporary_files_cannot_be_guessed(monkeypatch):
    """If someone guesses them all the same, the writing fails, and nothing is overwritten."""
    assert len({hidden_name(Path("a/out.pt")) for _ in range(100)}) == 100
    assert hidden_name(Path("a/out.pt")).suffix == ".pt"
    monkeypatch.setattr("secrets.token_hex", lambda length: "guessed")
    Path(".out.guessed").symlink_to("victim")
    for write in (
        write_whole,
        write_fresh,
        write_learning_curve,
        lambda path: replace_link(Path(path), "victim"),
    ):
        with pytest.raises(WriteError) as error:
            write("out")
        assert (error.value.errno, error.value.filename) == (errno.EEXIST, "out")
    assert Path("victim").read_text() == "precious"


def test_a_link_put_in_the_place_of_an_open_file_is_not_followed():
    fresh_file(Path("out")).close()
    Path("out").unlink()
    Path("out").symlink_to("victim")
    with pytest.raises(OSError, match="out"):
        append_to(Path("out"))


@pytest.mark.parametrize("name", [".", "/", "a/.."])
def test_a_folder_cannot_be_written_as_a_file(name):
    with pytest.raises(WriteError), whole_file(Path(name)) as file:
        file.write(b"x")
    assert os.listdir() == ["victim"]


def test_links_are_replaced():
    replace_link(Path("newest"), "a")
    replace_link(Path("newest"), "b")
    assert os.readlink("newest") == "b"
    Path("folder").mkdir()
    with pytest.raises(WriteError) as error:
        replace_link(Path("folder"), "a")
    assert (error.value.errno, error.value.filename) == (errno.EISDIR, "folder")
    assert sorted(os.listdir()) == ["folder", "newest", "victim"]


def test_statistics_do_not_follow_a_prepared_link():
    Path(f".stat.hdf5.{os.getpid()}").symlink_to("victim")
    Path("stat.hdf5").symlink_to("other.hdf5")
    with h5py.File("other.hdf5", "w") as file:
        file["theirs"] = 1
    StatFile("stat.hdf5").save({"a": 1}, {"x": np.arange(3)})
    StatFile("stat.hdf5").save({"a": 2}, {"x": np.arange(4)})
    assert Path("victim").read_text() == "precious"
    with h5py.File("other.hdf5") as file:
        assert list(file) == ["theirs"]
    with h5py.File("stat.hdf5") as file:
        assert sorted(file) == ["deepmd_muon", "theirs"]
    assert np.array_equal(StatFile("stat.hdf5").load({"a": 1})["x"], np.arange(3))


def test_details_do_not_follow_links():
    Path("detail.e.out").symlink_to("victim")
    frames = Frames(np.zeros((2, 1), int), np.zeros((2, 1, 3)), None, energy=np.array([1.0, 2.0]))
    prediction = Prediction(
        np.array([1.5, 2.5]), np.zeros((2, 1, 3)), np.zeros((2, 9)), np.zeros((2, 1))
    )
    details = DetailFiles("detail")
    details.add("a", frames, prediction)
    details.add("b", frames, prediction)
    assert Path("victim").read_text() == "precious"
    assert np.loadtxt("detail.e.out").tolist() == [[1.0, 1.5], [2.0, 2.5]] * 2


def test_only_one_file_of_the_package_makes_files():
    """So that all of them appear whole, follow no link, and are named when a disk fails."""
    package = Path(files.__file__).parent
    makes = re.compile(
        r"""\bopen\([^)]*["'][wax]b?\+?["']|\.write_(?:text|bytes)\(|\.touch\(|O_CREAT|\.mkdir\("""
    )
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if makes.search(path.read_text())
    }
    # Locks, which are opened where they are; folders that are rounds; HDF5 in memory.
    others = {"train/checkpoint/ownership.py"}
    others |= {"explore/rounds.py", "explore/loop.py", "data/statistics.py"}
    tests = {
        name for name in found if name.startswith("testing/")
    }  # they write into pytest's folder
    assert found - others - tests == {"files.py"}
