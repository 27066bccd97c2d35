"""Names of published checkpoints, with a deepmd-kit that publishes one file."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deepmd_muon.cli import published
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.published import checkpoint_or_published

ENTRY = {
    "urls": ["https://host.example/community/DPA-9-1M/resolve/main/DPA-9-1M.pt"],
    "filename": "DPA-9-1M.pt",
    "sha256": "36fe",
}


@pytest.fixture
def deepmd_kit(monkeypatch, tmp_path):
    """A module of deepmd-kit whose downloads are noted; it is offline if `offline` is set."""
    monkeypatch.chdir(tmp_path)
    download = ModuleType("deepmd.pretrained.download")
    download.DEFAULT_CACHE_DIR = tmp_path / "cache"
    download.offline = False
    download.asked = []

    def resolve(name, logger):
        if download.offline:
            raise RuntimeError("no source answers")
        download.asked.append(name)
        return tmp_path / "cache" / ENTRY["filename"]

    download.resolve_model_path = resolve
    registry = ModuleType("deepmd.pretrained.registry")
    registry.MODEL_REGISTRY = {"DPA-9-1M": ENTRY}
    for module in (ModuleType("deepmd"), ModuleType("deepmd.pretrained"), download, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(published, "set_up_logging", lambda level: None)
    return download


def test_a_published_name_becomes_its_file(deepmd_kit, caplog):
    caplog.set_level("INFO")
    path = checkpoint_or_published("DPA-9-1M", "INFO")
    assert Path(path).name == "DPA-9-1M.pt"
    assert deepmd_kit.asked == ["DPA-9-1M"]
    assert "36fe" in caplog.text
    assert "https://host.example/community/DPA-9-1M" in caplog.text


def test_files_come_before_names(deepmd_kit):
    Path("DPA-9-1M.pt").touch()
    assert checkpoint_or_published("DPA-9-1M", "INFO") == "DPA-9-1M"
    assert checkpoint_or_published("model.ckpt", "INFO") == "model.ckpt"
    assert deepmd_kit.asked == []


def test_one_clear_error(deepmd_kit, monkeypatch):
    with pytest.raises(CommandError, match="did you mean 'DPA-9-1M'"):
        checkpoint_or_published("DPA-9-2M", "INFO")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(CommandError, match="dp pretrained download DPA-9-1M"):
            checkpoint_or_published("DPA-9-1M", "INFO")
    deepmd_kit.offline = True
    with pytest.raises(CommandError, match=r"copy the file to .*cache/DPA-9-1M\.pt"):
        checkpoint_or_published("DPA-9-1M", "INFO")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="install deepmd-kit"):
        checkpoint_or_published("DPA-9-1M", "INFO")
