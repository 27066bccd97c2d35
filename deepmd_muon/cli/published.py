"""Checkpoints that deepmd-kit publishes, by their names."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from deepmd_muon.checkpoint_file.file import checkpoint_path
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import choices
from deepmd_muon.train.report import set_up_logging

log = logging.getLogger(__name__)


def checkpoint_or_published(word: str, log_level: int | str) -> str:
    """Return the path of a checkpoint that is named by its path, or as deepmd-kit publishes it.

    The installed deepmd-kit knows names, addresses and SHA-256 sums. It keeps files that it has
    downloaded, and downloads only what is missing.

    Raises
    ------
    CommandError
        When a word that begins as the published names do, with DPA, is neither a file nor such a
        name, or the file cannot be downloaded.
    """
    if not word.upper().startswith("DPA") or checkpoint_path(word).exists():
        return word
    if importlib.util.find_spec("deepmd") is None:
        raise CommandError(
            f"there is no checkpoint {word}; if it is the name of a published one, install "
            "deepmd-kit, which knows where these are: pip install 'deepmd-kit[torch]'"
        )
    try:
        from deepmd.pretrained.download import DEFAULT_CACHE_DIR, resolve_model_path
        from deepmd.pretrained.registry import MODEL_REGISTRY
    except ImportError as error:
        raise CommandError(
            f"there is no checkpoint {word}, and the installed deepmd-kit knows no published "
            "ones: update it to 3.2"
        ) from error
    if word not in MODEL_REGISTRY:
        advice = choices(word, tuple(MODEL_REGISTRY))
        raise CommandError(f"there is no checkpoint {word}, and none is published so: {advice}")
    entry = MODEL_REGISTRY[word]
    place = Path(DEFAULT_CACHE_DIR) / str(entry["filename"])
    download = f"dp pretrained download {word}"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not place.exists():
        raise CommandError(
            f"{word} is not on this machine, and several processes would download it: run "
            f"`{download}` first"
        )
    set_up_logging(log_level)
    try:
        path = resolve_model_path(word, logger=log)
    except (RuntimeError, OSError) as error:
        raise CommandError(
            f"{word} cannot be downloaded ({error}): run `{download}` on a machine with a network, "
            f"and copy the file to {place}"
        ) from error
    log.info("%s: %s, SHA-256 %s", word, path, entry["sha256"])
    log.info("its licence is on %s", _page_of(entry))
    return str(path)


def _page_of(entry: dict[str, Any]) -> str:
    """Return the page of a published checkpoint, which is above its file."""
    return str(entry["urls"][0]).partition("/resolve/")[0]
