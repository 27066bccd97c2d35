"""Models of a command line: their options, and which files are read here."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver
from deepmd_muon.files import open_regular

if TYPE_CHECKING:
    from deepmd_muon.infer.predictor import Predictor

# The member of a TorchScript archive that holds the code of `deepmd_muon.deploy.program`.
_PROGRAM = "/code/__torch__/deepmd_muon/deploy/program.py"


def add_model_options(parser: argparse.ArgumentParser, *options: str) -> None:
    """Declare some of ``--head``, ``--ema`` and ``--trust``.

    They choose weights of a model file, and whether it is checked.
    """
    if "head" in options:
        parser.add_argument(
            "--head", "--model-branch", metavar="NAME", help="branch of a multi-task checkpoint"
        )
    if "ema" in options:
        parser.add_argument(
            "--ema", action="store_true", help="use the averaged weights of a checkpoint"
        )
    if "trust" in options:
        trust = (
            "run a frozen file with any operators, or a compiled one (.pt2), of whose maker you "
            "are sure"
        )
        parser.add_argument("--trust", action="store_true", help=trust)


def check_compiled(path: str, *, trust: bool) -> None:
    """Refuse a compiled package unless its maker is trusted.

    Loading it runs machine code that nothing can check.

    Raises
    ------
    CommandError
        When `path` ends in ".pt2" and `trust` is false, or there is no such package.
    """
    if Path(path).suffix == ".pt2":
        require_file(path)
    if Path(path).suffix == ".pt2" and not trust:
        raise CommandError(
            f"{path} holds compiled code, which runs when it is loaded; if you trust its maker, "
            "use --trust"
        )


def require_file(path: str | os.PathLike[str]) -> None:
    """Refuse a model that does not exist, instead of asking for deepmd-kit to read it."""
    if not Path(path).exists():
        raise CommandError(f"there is no file {path}")


def require_readable(path: str, *, trust: bool) -> None:
    """Hand over for a model file of deepmd-kit's other backends; see also `check_compiled`."""
    check_compiled(path, trust=trust)
    if Path(path).suffix in (".pb", ".pt2", ".dp", ".yaml", ".savedmodel", ".hlo"):
        require_file(path)
        raise HandOver(f"the model format {Path(path).suffix}")


def load_predictors(names: Sequence[str], options: argparse.Namespace) -> list[Predictor]:
    """Load models of the same types with the options ``--head``, ``--ema`` and ``--trust``.

    A model that deepmd-kit alone has is handed over.
    """
    from deepmd_muon.infer.frozen import is_frozen
    from deepmd_muon.infer.predictor import Predictor
    from deepmd_muon.model.errors import ForeignModelError

    # With an input of several models, --head also chooses the data.
    input_file = getattr(options, "train_data", None) or getattr(options, "valid_data", None)
    if options.head and not input_file and all(map(is_frozen, names)):
        raise CommandError(
            f"{names[0]} holds one model: choose the branch when you freeze (--head {options.head})"
        )
    ema = getattr(options, "ema", False)
    try:
        predictors = [
            Predictor(name, ema=ema, head=options.head, trust=options.trust) for name in names
        ]
    except ForeignModelError as error:
        raise HandOver(f"this model ({error})") from error
    type_map = predictors[0].type_map
    for name, predictor in zip(names, predictors, strict=True):
        if predictor.type_map != type_map:
            raise CommandError(f"{name} has types {predictor.type_map}, {names[0]} has {type_map}")
    return predictors


def frozen_here(path: str | os.PathLike[str]) -> bool:
    """Return whether a frozen file comes from this package.

    The names of its members say so; torch is not imported.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith(_PROGRAM) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
