"""Find the checkpoint of a prefix from which ``--restart auto`` continues."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from deepmd_muon.checkpoint_file.directory import SUFFIX, is_directory, take_apart
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY, checkpoint_path, read_checkpoint

log = logging.getLogger(__name__)

# Values of --restart that stand for the newest checkpoint, if there is one.
AUTOMATIC = ("auto", "latest")


def newest_checkpoint(save_ckpt: str) -> str | None:
    """Return the newest checkpoint of a prefix, file or directory, or None.

    Links say which that is. A run that was killed between writing a checkpoint and its link has left a later one, which
    lists the linked one among those before it; a later one of a branch that was given up does not.
    """
    prefix = Path(save_ckpt)
    links = [path for suffix in (SUFFIX, ".pt") if (path := Path(f"{prefix}{suffix}")).exists()]
    linked = max(links, key=_step, default=None)  # of the same step, the directory
    own = re.compile(rf"{re.escape(prefix.name)}-[0-9]+(\.pt|{re.escape(SUFFIX)})")
    entries = prefix.parent.iterdir() if prefix.parent.is_dir() else ()
    found = [path for path in entries if own.fullmatch(path.name) and not path.is_symlink()]
    complete = [
        path for path in found if (is_directory(path) if path.suffix == SUFFIX else path.is_file())
    ]
    complete = [path for path in complete if linked is None or _step(path) > _step(linked)]
    complete.sort(key=lambda path: (_step(path), path.suffix == SUFFIX), reverse=True)
    for path in complete:
        if linked is None or linked.resolve().name in _names_before(path):
            return str(path)
    if linked is None:
        log.info("there is no %s%s or .pt: starting afresh", prefix, SUFFIX)
        return None
    return str(linked)


def continued_by(restart: str | None, save_ckpt: str) -> str | None:
    """Return the checkpoint that a run with ``--restart`` continues; None for one that starts afresh.

    A link of the prefix stands for the newest one: a run that was killed, or whose disk failed, may have written it but
    not linked it. All other paths stand for themselves.
    """
    if restart is None or restart in AUTOMATIC:
        return newest_checkpoint(save_ckpt) if restart else None
    given = checkpoint_path(restart)
    links = [Path(f"{save_ckpt}{suffix}") for suffix in (SUFFIX, ".pt")]
    if not given.is_symlink() or given.absolute() not in [link.absolute() for link in links]:
        return restart
    newest = newest_checkpoint(save_ckpt)
    return newest if newest is not None and _step(Path(newest)) > _step(given) else restart


def newest_finite(saved: Sequence[Path], source: Path | None) -> Path | None:
    """Return the last of a run's checkpoints, oldest first, whose numbers are finite; `source` where there is none.

    The newest may hold the weights that made a loss NaN, or moments that make weights NaN. `source`, which the run has
    continued, was examined when read.
    """
    for path in reversed(saved):
        try:
            _, tensors = take_apart(read_checkpoint(path))
        except CheckpointError as error:
            log.warning("%s", error)
            continue
        spoiled = [place for place, x in tensors.items() if not bool(torch.isfinite(x).all())]
        if not spoiled:
            return path
        log.warning("%s holds numbers that are not finite (%s)", path, ", ".join(spoiled[:3]))
    return source


def _step(path: Path) -> int:
    """Return the N of prefix-N.pt, for a link that of its target; 0 for other names."""
    name = re.search(r"-(\d+)$", path.resolve().stem)
    return int(name[1]) if name else 0


def _names_before(path: Path) -> set[str]:
    """Return the names of the checkpoints that were there when one was written."""
    try:
        own = read_checkpoint(path, leave=("model", "optimizer", "ema")).get(OWN_KEY, {})
    except CheckpointError as error:
        log.warning("%s", error)
        return set()
    return {*own.get("series", ()), *own.get("directories", ())}
