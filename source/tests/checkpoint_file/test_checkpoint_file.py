"""Files that are not checkpoints raise an error with a reason in our words, never with advice to run their code."""

import errno
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import (
    FORMAT_VERSION,
    OWN_KEY,
    checkpoint_path,
    read_checkpoint,
)


def refused(path):
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    message = str(error.value)
    assert "weights_only" not in message
    assert "torch.load" not in message
    assert "\n" not in message
    return message.replace(str(path), "FILE")


def test_missing_files_and_folders(tmp_path):
    assert refused(tmp_path / "none.pt") == "there is no checkpoint FILE"
    assert (
        refused(tmp_path)
        == "there is no checkpoint FILE: it is a folder; give the checkpoint in it"
    )


def write_text(path):
    path.write_text("not a checkpoint")


def write_pickle(path):
    path.write_bytes(pickle.dumps({"model": {}}))


def write_empty(path):
    path.touch()


def write_object(path):
    torch.save({"model": {}, "spare": np.random.default_rng(0)}, path)


def write_script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def write_truncated(path):
    torch.save({"model": {"weight": torch.zeros(1000)}}, path)
    path.write_bytes(path.read_bytes()[:2000])


def flip_bits(path, places):
    content = bytearray(path.read_bytes())
    for place in places:
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return first == second


def changed_bits(tmp_path, name, tries, read):
    """Flip one bit at a time; return how many changes were found, the others having changed nothing that is read."""
    path = tmp_path / name
    original, expected = path.read_bytes(), read()
    random = np.random.default_rng(tries)
    found = 0
    for place in random.integers(8 * len(original), size=tries).tolist():
        flip_bits(path, [place])
        try:
            content = read()
        except CheckpointError:
            found += 1
        else:
            assert same(content, expected), place
        path.write_bytes(original)
    return found


CONTENT = {
    "model": {
        "a": torch.rand(20, 20),
        "b": torch.rand(300, dtype=torch.float64),
        "_extra_state": {"x": [1, "y"]},
    }
}


def test_changed_bits_of_a_file_are_found_or_harmless(tmp_path):
    torch.save(CONTENT, tmp_path / "a.pt")
    assert changed_bits(tmp_path, "a.pt", 300, lambda: read_checkpoint(tmp_path / "a.pt")) > 200


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
def test_a_disk_that_fails_is_reported_with_the_checkpoint(tmp_path, monkeypatch, error):
    torch.save(CONTENT, tmp_path / "a.pt")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(zipfile.ZipFile, "infolist", fail)
    found = refused(tmp_path / "a.pt")
    assert found.startswith("FILE cannot be read as a checkpoint: ")
    assert ("memory" if isinstance(error, MemoryError) else "input/output error") in found.lower()


def test_a_member_that_is_marked_as_a_folder_is_refused(tmp_path):
    """torch would leave the memory of its tensor as it was."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"a": torch.rand(300)}}, path)
    with zipfile.ZipFile(path) as archive:
        entry, members = archive.start_dir, archive.infolist()
    original = path.read_bytes()
    for member in members:
        assert original[entry : entry + 4] == b"PK\x01\x02"
        flip_bits(path, [8 * (entry + 38) + 4])  # in the member's external attributes
        assert "marked as a folder" in refused(path)
        path.write_bytes(original)
        lengths = struct.unpack_from("<3H", original, entry + 28)
        entry += 46 + sum(lengths)
        assert member.filename.encode() in original[:entry]


def test_a_member_that_is_there_twice_or_compressed_is_refused(tmp_path):
    torch.save({"model": {"a": torch.zeros(3)}}, tmp_path / "a.pt")
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "a.pt", "a") as archive,
    ):
        archive.writestr("a/data/0", bytes(12))
    assert "there twice" in refused(tmp_path / "a.pt")
    torch.save({"model": {"a": torch.zeros(3)}}, tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/more", bytes(1 << 20))
    assert "compressed" in refused(tmp_path / "b.pt")


OWN = (None, [], {"version": None}, {"version": "1"}, {"version": float("nan")}, {"version": True})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_text, "it is damaged, or torch.save did not write it"),
        (write_pickle, "it is damaged, or torch.save did not write it"),
        (write_empty, "it is damaged, or torch.save did not write it"),
        (write_truncated, "it is damaged, or torch.save did not write it"),
        (
            write_object,
            "it holds Python objects besides tensors and plain values, and loading those could run any code",
        ),
        (write_script, "it is a frozen model (TorchScript)"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, write, reason):
    write(tmp_path / "a.pt")
    assert refused(tmp_path / "a.pt") == f"FILE cannot be read as a checkpoint: {reason}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 2], "it holds a list"),
        ({"weights": 1}, "it has no state dict under 'model', only ['weights']"),
        ({"model": 3}, "it has no state dict under 'model', only ['model']"),
        *(
            ({"model": {}, OWN_KEY: own}, f"the content under {OWN_KEY!r} does not come from a run")
            for own in OWN
        ),
    ],
)
def test_other_files_of_torch(tmp_path, content, reason):
    torch.save(content, tmp_path / "a.pt")
    message = refused(tmp_path / "a.pt")
    assert "FILE is not a checkpoint" in message
    assert reason in message


def test_a_later_format_is_refused(tmp_path):
    torch.save({"model": {}, OWN_KEY: {"version": FORMAT_VERSION + 1}}, tmp_path / "a.pt")
    assert "update deepmd_muon" in refused(tmp_path / "a.pt")


def test_checkpoints_are_read_with_and_without_ending(tmp_path):
    content = {"model": {"weight": torch.arange(3.0), "_extra_state": {"train_infos": {"step": 2}}}}
    torch.save(content, tmp_path / "model.ckpt.pt")
    torch.save(content["model"], tmp_path / "bare.pt")
    for name in ("model.ckpt.pt", "model.ckpt", "bare"):
        read = read_checkpoint(tmp_path / name)
        assert read.keys() == {"model"}
        assert torch.equal(read["model"]["weight"], torch.arange(3.0))
        assert read["model"]["_extra_state"] == content["model"]["_extra_state"]


def test_the_ending_is_added_only_where_that_helps(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "a.pt").touch()
    (tmp_path / "b.pt").touch()
    (tmp_path / "b").mkdir()
    assert checkpoint_path(tmp_path / "a") == tmp_path / "a"
    assert checkpoint_path(tmp_path / "b") == tmp_path / "b.pt"
    assert checkpoint_path(tmp_path / "c") == tmp_path / "c"


@pytest.mark.parametrize(
    "name", ["model.ckpt-5.dcp", "model.ckpt-5", "model.ckpt.dcp", "model.ckpt"]
)
def test_directories_of_earlier_versions_are_refused_with_the_last_that_reads_them(tmp_path, name):
    (tmp_path / "model.ckpt-5.dcp").mkdir()
    (tmp_path / "model.ckpt-5.dcp/.metadata").touch()
    (tmp_path / "model.ckpt.dcp").symlink_to("model.ckpt-5.dcp")
    message = refused(tmp_path / name)
    assert "checkpoint directory" in message
    assert "3adbaabc" in message


@pytest.mark.parametrize("kind", [list, tuple, lambda pair: {"a": pair[0], "b": pair[1]}])
def test_values_of_exponential_size_are_refused(tmp_path, kind):
    value = kind([1, 2])
    for _ in range(60):
        value = kind([value, value])  # some hundred bytes stand for 2^60 values
    torch.save({"model": {"_extra_state": {"model_params": value}}}, tmp_path / "a.pt")
    assert "contain one another" in refused(tmp_path / "a.pt")


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("value", [Evil(), {"model": Evil()}])
def test_objects_in_a_file_are_not_executed(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    torch.save(value, "a.pt")
    assert "could run any code" in refused(tmp_path / "a.pt")
    assert not (tmp_path / "executed").exists()
