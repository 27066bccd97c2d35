"""Find the checkpoint of a prefix from which ``--restart auto`` continues."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from deepmd_muon.model.checkpoint_directory import SUFFIX, is_directory
from deepmd_muon.model.checkpoint_file import OWN_KEY, read_checkpoint
from deepmd_muon.model.errors import CheckpointError

log = logging.getLogger(__name__)


def newest_checkpoint(save_ckpt: str) -> str | None:
    """Return the newest checkpoint of a prefix, file or directory, or None.

    Links say which that is. A run that was killed between writing a checkpoint and its link has left a later one, which
    lists the linked one among those before it; a later one of a branch that was given up does not.
    """
    prefix = Path(save_ckpt)
    links = [path for suffix in (SUFFIX, ".pt") if (path := Path(f"{prefix}{suffix}")).exists()]
    linked = max(links, key=_step, default=None)  # of the same step, the directory
    complete = [path for path in _checkpoints(prefix) if linked is None or _step(path) > _step(linked)]
    complete.sort(key=lambda path: (_step(path), path.suffix == SUFFIX), reverse=True)
    for path in complete:
        if linked is None or linked.resolve().name in _names_before(path):
            return str(path)
    if linked is None:
        log.info("there is no %s%s or .pt: starting afresh", prefix, SUFFIX)
        return None
    return str(linked)


def _step(path: Path) -> int:
    """Return the N of prefix-N.pt, for a link that of its target; 0 for other names."""
    name = re.search(r"-(\d+)$", path.resolve().stem)
    return int(name[1]) if name else 0


def _checkpoints(prefix: Path) -> list[Path]:
    """Return the complete checkpoints of a prefix."""
    own = re.compile(rf"{re.escape(prefix.name)}-[0-9]+(\.pt|{re.escape(SUFFIX)})")
    entries = prefix.parent.iterdir() if prefix.parent.is_dir() else ()
    found = [path for path in entries if own.fullmatch(path.name) and not path.is_symlink()]
    return [path for path in found if (is_directory(path) if path.suffix == SUFFIX else path.is_file())]


def _names_before(path: Path) -> set[str]:
    """Return the names of the checkpoints that were there when one was written."""
    try:
        own = read_checkpoint(path, leave=("model", "optimizer", "ema")).get(OWN_KEY, {})
    except CheckpointError as error:
        log.warning("%s", error)
        return set()
    return {*own.get("series", ()), *own.get("directories", ())}
