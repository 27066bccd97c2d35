"""Prepared checkpoint directories: none of them runs code, reads another file or asks for memory without end."""

from __future__ import annotations

import os
import pickle
import struct
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save

from deepmd_muon.checkpoint_file import directory as directory_module
from deepmd_muon.checkpoint_file.directory import CONTENT, take_apart
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.checkpoint_file.metadata import METADATA, read_metadata
from deepmd_muon.cli.main import main

CLASSES = "torch.distributed.checkpoint.metadata"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Write a small checkpoint directory; code that a test smuggles in would make the folder "executed"."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.dcp"
    path.mkdir()
    parts, tensors = take_apart(
        {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2.0)}}
    )
    torch.save(parts, path / CONTENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tensors, storage_writer=FileSystemWriter(path), no_dist=True)
    yield path
    assert not Path("executed").exists()


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


class Call:
    """Pickled as a call of anything."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def refused(path):
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module, attribute):
    return text(module) + text(attribute) + b"\x93"


EMPTY = name(CLASSES, "Metadata") + b")\x81"  # NEWOBJ
MKDIR = name("os", "mkdir") + text("executed") + b"\x85R"  # REDUCE


@pytest.mark.parametrize(
    "body",
    [
        MKDIR,
        b"cos\nmkdir\n" + text("executed") + b"\x85R",  # GLOBAL
        b"(" + text("executed") + b"ios\nmkdir\n",  # INST
        b"(" + name("os", "mkdir") + text("executed") + b"o",  # OBJ
        # What an allowed module has imported, by a dotted name.
        name("torch.distributed.checkpoint.filesystem", "os.mkdir") + text("executed") + b"\x85R",
        name("torch.serialization", "os.mkdir") + text("executed") + b"\x85R",
        name("builtins", "eval") + text("__import__('os').mkdir('executed')") + b"\x85R",
        # Another attribute in the way that Python 3.11.0 writes enumerations.
        name("builtins", "getattr")
        + name("os", "mkdir")
        + text("__call__")
        + b"\x86R"
        + text("executed")
        + b"\x85R",
        name("builtins", "getattr") + name(CLASSES, "Metadata") + text("__init__") + b"\x86R)R",
        # BUILD on a class and on functions: a method of torch's would be another from then on.
        name(CLASSES, "TensorProperties")
        + b"N}"
        + text("__setstate__")
        + name("torch", "Size")
        + b"s\x86b",
        name(CLASSES, "Metadata") + b"}" + text("state_dict_metadata") + b"}sb",
        name("torch.serialization", "_get_layout") + b"}" + text("x") + b"}sb",
        # BUILD twice, with state for slots, and of attributes that are no fields.
        EMPTY + b"}b}b",
        EMPTY + b"N}" + text("__class__") + name("torch", "Size") + b"s\x86b",
        EMPTY + b"}" + text("__class__") + name("torch", "Size") + b"sb",
        # NEWOBJ and REDUCE of what is no class.
        name("builtins", "getattr") + b")\x81",
        text("os") + b")R",
        # Persistent ids and extension codes, which a subclass or the registry would resolve.
        b"\x8c\x01xQ",
        b"Pexecuted\n.",
        b"\x82\x01",
        b"\x84\xff\xff\xff\x7f",
        # A memo that would be made as long as its largest index.
        b"}r\xff\xff\xff\xff",
        b"h\x05",
        b"j\xff\xff\xff\xff",
        # Out-of-band buffers, lengths beyond the file, a stack that is too short, no end.
        b"\x97",
        b"\x8d" + struct.pack("<Q", 1 << 60),
        b"\x8e" + struct.pack("<Q", 1 << 60),
        b"\x8b" + struct.pack("<I", 1 << 30),
        b"R",
        b"u",
        b"s",
        b"(" * 100_000,
        b"]" + b"\x94h\x00a" * 3,  # a list that holds itself
        b"I" + b"9" * 100_000 + b"\n",
    ],
)
def test_opcodes_run_nothing(directory, body):
    (directory / METADATA).write_bytes(b"\x80\x04" + body + b".")
    refused(directory)
    (directory / METADATA).write_bytes(b"\x80\x04" + body)
    refused(directory)


# One tuple of 180 bytes whose comparing, hashing or printing takes 2 ** 60 steps.
NESTED = b"))\x86\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))


def fields(tensors=b"}", places=b"}"):
    return (
        EMPTY
        + b"}("
        + text("state_dict_metadata")
        + tensors
        + text("storage_data")
        + places
        + b"ub"
    )


@pytest.mark.parametrize(
    "body",
    [
        NESTED,
        NESTED + b")R",
        EMPTY + NESTED + b"b",
        EMPTY + b"}" + NESTED + b"Nsb",
        name(CLASSES, "Metadata") + NESTED + b"\x81}b",
        fields(NESTED),
        fields(places=NESTED),
        fields(b"}" + NESTED + b"Ns"),
        fields(places=b"}" + NESTED + b"Ns"),
        fields(
            places=b"}"
            + name(CLASSES, "MetadataIndex")
            + b")\x81}"
            + text("fqn")
            + NESTED
            + b"sbNs"
        ),
        fields(b"}" + text("a") + NESTED + b"s"),
        fields(b"}" + text("a") + name("torch", "Size") + NESTED + b"Rs"),
    ],
)
def test_values_of_exponential_size_are_refused_at_once(directory, body):
    (directory / METADATA).write_bytes(b"\x80\x04" + body + b".")
    refused(directory)


@pytest.mark.parametrize("file", [METADATA, CONTENT])
def test_pickled_objects_run_nothing(directory, file):
    for value in (Evil(), {"model": Evil()}, [Call(eval, "__import__('os').mkdir('executed')")]):
        (directory / file).write_bytes(pickle.dumps(value))
        refused(directory)
        with (directory / file).open("wb") as stream:
            torch.save(value, stream)
        refused(directory)


def described(directory):
    """Return torch's own object for the description, which tests change."""
    with (directory / METADATA).open("rb") as file:
        return pickle.load(file)


def write(directory, changed):
    (directory / METADATA).write_bytes(pickle.dumps(changed))


def entry_of(found, name="model/a"):
    (index,) = (index for index in found.storage_data if index.fqn == name)
    return index, found.storage_data[index]


def test_bytes_are_refused_before_they_are_read(directory):
    """Torch's planner would unpickle them with all that they hold."""
    found = described(directory)
    with (directory / "__0_1.distcp").open("wb") as file:
        torch.save(Evil(), file)
        length = file.tell()
    index, _ = entry_of(found)
    found.state_dict_metadata["model/a"] = dcp.BytesStorageMetadata()
    found.storage_data[index] = _StorageInfo("__0_1.distcp", 0, length)
    write(directory, found)
    assert "TensorStorageMetadata" in refused(directory)
    found.storage_data[dcp.MetadataIndex("model/a")] = found.storage_data.pop(index)
    write(directory, found)
    refused(directory)


@pytest.mark.parametrize(
    "value",
    [
        *(Evil(), {"a": 1}, torch.nn.Linear(2, 3), torch.zeros(2, 3).to_sparse()),
        *(
            torch.zeros(2, 3, dtype=torch.float64),
            torch.zeros(3, 2),
            torch.zeros(6),
            torch.zeros(0),
        ),
    ],
)
def test_a_part_that_is_no_tensor_or_another_one_is_refused(directory, value):
    found = described(directory)
    index, _ = entry_of(found)
    with (directory / "__0_1.distcp").open("wb") as file:
        torch.save(value, file)
        found.storage_data[index] = _StorageInfo("__0_1.distcp", 0, file.tell())
    write(directory, found)
    refused(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"relative_path": "../secret"},
        {"relative_path": "/etc/passwd"},
        {"relative_path": "content.pt"},
        {"relative_path": "__0_0.distcp\n"},
        {"relative_path": "__7_7.distcp"},
        {"relative_path": None},
        {"relative_path": "__0_2.distcp"},
        {"relative_path": "__0_3.distcp"},
        {"offset": -1},
        {"offset": 1 << 70},
        {"offset": 1.0},
        {"offset": True},
        {"length": 1 << 40},
        {"length": 8},
        {"offset": 1},
        {"transform_descriptors": ["stream.zstd/1"]},
    ],
)
def test_places_outside_of_the_folder_and_its_files_are_refused(directory, change):
    os.mkfifo(directory / "__0_2.distcp")
    (directory / "__0_3.distcp").mkdir()
    found = described(directory)
    _, place = entry_of(found)
    vars(place).update(change)
    write(directory, found)
    refused(directory)


def shapes(found, size, sizes=None, offsets=(0, 0)):
    entry = found.state_dict_metadata["model/a"]
    entry.size = torch.Size(size)
    entry.chunks[0].sizes, entry.chunks[0].offsets = torch.Size(sizes or size), torch.Size(offsets)


def remove_place(found):
    del found.storage_data[entry_of(found)[0]]


def share_chunks(found):
    """Many tensors with one list of many parts: small in the file, endless to walk through."""
    entry = found.state_dict_metadata["model/a"]
    entry.chunks *= 10_000
    for number in range(10_000):
        found.state_dict_metadata[f"model/{number}"] = entry


def replace(**fields):
    return lambda found: vars(found).update(fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: shapes(found, (1 << 40, 1 << 40)),
        lambda found: shapes(found, (1 << 62, 3), (2, 3)),
        lambda found: shapes(found, (2, 3), (2, 3), (1, 0)),
        lambda found: shapes(found, (4, 3), (2, 3)),
        lambda found: shapes(found, (6,), (6,)),
        lambda found: shapes(found, (2, 3), (6,), (0,)),
        remove_place,
        share_chunks,
        replace(storage_data=None),
        replace(storage_data=[]),
        replace(state_dict_metadata={1: 2}),
        replace(state_dict_metadata={"model/a": None}),
        replace(state_dict_metadata={"model/a": "text"}),
        lambda found: vars(found.state_dict_metadata["model/a"]).update(properties=None),
        lambda found: vars(found.state_dict_metadata["model/a"]).update(chunks=None),
        lambda found: vars(found.state_dict_metadata["model/a"].properties).update(
            dtype=torch.strided
        ),
        lambda found: vars(found.state_dict_metadata["model/a"].properties).update(
            layout=torch.sparse_coo
        ),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(directory, change):
    found = described(directory)
    change(found)
    write(directory, found)
    refused(directory)


def test_a_description_that_changes_after_the_check_is_not_looked_at(directory, monkeypatch):
    expected = read_checkpoint(directory)["model"]["a"]
    original = directory_module._read

    def swapped(path, metadata, tensors):
        write(path, Evil())
        original(path, metadata, tensors)

    monkeypatch.setattr(directory_module, "_read", swapped)
    assert torch.equal(read_checkpoint(directory)["model"]["a"], expected)


def test_a_fifo_is_no_description(directory):
    for file in (METADATA, CONTENT):
        kept = (directory / file).read_bytes()
        (directory / file).unlink()
        os.mkfifo(directory / file)
        refused(directory)
        (directory / file).unlink()
        (directory / file).write_bytes(kept)


class Attribute(Call):
    """A member of an enumeration as Python 3.11.0 to 3.11.3 write it."""

    def __init__(self, owner, attribute):
        super().__init__(getattr, owner, attribute)


def test_enumerations_are_read_in_both_spellings(directory):
    """torch.preserve_format is no format of ours, so both spellings of it are refused."""
    found = described(directory)
    encoding = dcp._MEM_FORMAT_ENCODING
    old = Attribute(encoding, "TORCH_CONTIGUOUS_FORMAT")
    others = (
        Attribute(encoding, "__init__"),
        Attribute(encoding, "TORCH_PRESERVE_FORMAT"),
        encoding(2),
        0,
        None,
    )
    properties = found.state_dict_metadata["model/a"].properties
    for written in (encoding.TORCH_CONTIGUOUS_FORMAT, old, *others):
        with pytest.MonkeyPatch.context() as patch:
            state = (properties.dtype, properties.layout, False, written, False)
            patch.setattr(dcp.TensorProperties, "__getstate__", lambda self, state=state: state)
            write(directory, found)
        if written in others:
            assert "not dense and contiguous" in refused(directory)
        else:
            assert torch.equal(
                read_checkpoint(directory)["model"]["a"], torch.arange(6.0).reshape(2, 3)
            )


@pytest.mark.parametrize("strides", [(), ((3, 1),), (None,)])
def test_properties_with_and_without_strides_are_read(directory, strides):
    """torch 2.15 adds strides to the properties of a tensor."""
    found = described(directory)
    contiguous = dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    state = (torch.float32, torch.strided, False, contiguous, False, *strides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.TensorProperties, "__getstate__", lambda self: state)
        write(directory, found)
    assert torch.equal(read_checkpoint(directory)["model"]["a"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read_as_torch_reads_it(directory, protocol):
    expected = described(directory)
    (directory / METADATA).write_bytes(pickle.dumps(expected, protocol))
    found = read_metadata(directory)
    for tensor in expected.state_dict_metadata.values():
        if hasattr(tensor.properties, "strides"):
            tensor.properties.strides = None  # not needed to read parts into tensors that exist
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


@pytest.mark.parametrize(
    "door",
    [
        "test -s none -m",
        "train input.json --restart",
        "train input.json --init-model",
        "show routing",
    ],
)
def test_every_command_refuses_a_prepared_directory(directory, door, capfd):
    Path("input.json").write_text(INPUT)
    for value in (Evil(), {"model": Evil()}):
        write(directory, value)
        assert main([*door.split(), str(directory)]) in (1, 2)
        assert "model.dcp cannot be read as a checkpoint" in capfd.readouterr().err


INPUT = """{
  "model": {"type_map": ["H"], "descriptor": {"type": "se_e2_a", "sel": [4]}, "fitting_net": {}},
  "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5},
  "loss": {},
  "optimizer": {"type": "HybridMuon"},
  "training": {"training_data": {"systems": ["none"]}, "numb_steps": 1}
}"""


@pytest.mark.parametrize("kind", [list, tuple, lambda pair: {"a": pair[0], "b": pair[1]}])
def test_values_of_exponential_size_are_refused(tmp_path, kind):
    value = kind([1, 2])
    for _ in range(60):
        value = kind([value, value])  # some hundred bytes stand for 2^60 values
    torch.save(
        {"model": {"_extra_state": {"model_params": {"descriptor": value}}}}, tmp_path / "model.pt"
    )
    with pytest.raises(CheckpointError, match=r"model\.pt.*contain one another"):
        read_checkpoint(tmp_path / "model.pt")
    (tmp_path / METADATA).write_bytes(pickle.dumps(value, protocol=4))
    with pytest.raises(pickle.UnpicklingError, match="contain one another"):
        read_metadata(tmp_path)
