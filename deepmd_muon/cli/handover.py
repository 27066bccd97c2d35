"""Handing a command line to deepmd-kit, where it is installed beside us."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shlex
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deepmd_muon.cli.errors import CommandError
from deepmd_muon.files import open_regular

if TYPE_CHECKING:
    from deepmd_muon.infer.predictor import Predictor

# In deepmd-kit's message about a library of its wheel that does not fit the installed torch.
_OF_LIBRARIES = "error is raised when loading"
# The member of a TorchScript archive that holds the code of `deepmd_muon.deploy.program`.
_PROGRAM = "/code/__torch__/deepmd_muon/deploy/program.py"


#: Help on the option `--trust`.
TRUST = "run a frozen file with any operators, or a compiled one (.pt2), of whose maker you are sure"


class HandOver(Exception):  # noqa: N818 (a request, not an error)
    """A command line that deepmd-kit should answer; its text names the missing feature.

    Parameters
    ----------
    what
        The missing feature.
    advice
        Advice if deepmd-kit is not installed either.
    words
        deepmd-kit's command for it, where that is another one.
    """

    def __init__(self, what: str, advice: str = "", words: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.advice, self.words = advice, list(words)


def choices(word: str, known: Sequence[str]) -> str:
    """Return advice on a word that is none of those known: which one may be meant, and all of them."""
    meant = difflib.get_close_matches(word, known, n=1)
    suggestion = f"did you mean {meant[0]!r}? " if meant else ""
    return f"{suggestion}There are: {', '.join(known)}"


class DeepmdKitOption(argparse.Action):
    """An option that deepmd-kit has and we do not: seeing it hands the whole command line over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["help"] = f"{kwargs['help']} (by deepmd-kit, where it is installed)"
        super().__init__(*args, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        """Ask for the handover."""
        raise HandOver(f"the option {option_string}")


def hand_over(what: str, words: list[str], advice: str = "") -> int:
    """Run deepmd-kit's own main on `words`, and say so.

    Parameters
    ----------
    what
        The missing feature.
    words
        The command line for deepmd-kit.
    advice
        As in `HandOver`.

    Returns
    -------
    int
        deepmd-kit's exit status, or 2 with a message when deepmd-kit is not installed or lacks a package.
    """
    if importlib.util.find_spec("deepmd") is None:
        rest = f"; {advice}" if advice else ""
        print(f"dp: deepmd-muon does not have {what}, and deepmd-kit is not installed{rest}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(f"dp: deepmd-muon does not have {what}: handing over to deepmd-kit", file=sys.stderr)
    try:
        from deepmd.main import main as deepmd_kit_main

        return int(deepmd_kit_main([word for word in words if word != "--trust"]) or 0)
    except (ImportError, RuntimeError) as error:
        # It loads a backend's libraries late: without MPI, or with another torch than its wheel's, only then.
        if not isinstance(error, ImportError) and _OF_LIBRARIES not in str(error):
            raise
        sys.stderr.write(
            f"dp: deepmd-kit is installed but cannot load what it needs ({type(error).__name__}: {error})\n"
            "For its PyTorch backend, which needs MPI and the torch that it was compiled with: "
            f"pip install 'deepmd-kit[torch]'. `python -m deepmd {shlex.join(words)}` shows the traceback.\n"
        )
        return 2


def check_compiled(path: str, *, trust: bool) -> None:
    """Refuse a compiled package unless its maker is trusted: loading it runs machine code that nothing can check.

    Raises
    ------
    CommandError
        When `path` ends in ".pt2" and `trust` is false.
    """
    if Path(path).suffix == ".pt2" and not trust:
        raise CommandError(
            f"{path} holds compiled code, which runs when it is loaded; if you trust its maker, use --trust"
        )


def require_readable(path: str, *, trust: bool) -> None:
    """Hand over for a model file of deepmd-kit's other backends; see `check_compiled` for compiled ones."""
    check_compiled(path, trust=trust)
    if Path(path).suffix in (".pb", ".pt2", ".dp", ".yaml", ".savedmodel", ".hlo"):
        raise HandOver(f"the model format {Path(path).suffix}")


def load_predictors(names: Sequence[str], options: argparse.Namespace) -> list[Predictor]:
    """Load models of the same types with the command's options ``--head``, ``--ema`` and ``--trust``.

    Raises
    ------
    HandOver
        For a model that deepmd-kit alone has.
    CommandError
        When the types of two models differ.
    """
    from deepmd_muon.infer.predictor import Predictor
    from deepmd_muon.model.errors import ForeignModelError

    ema = getattr(options, "ema", False)
    try:
        predictors = [Predictor(name, ema=ema, head=options.head, trust=options.trust) for name in names]
    except ForeignModelError as error:
        raise HandOver(f"this model ({error})") from error
    type_map = predictors[0].type_map
    for name, predictor in zip(names, predictors, strict=True):
        if predictor.type_map != type_map:
            raise CommandError(f"{name} has types {predictor.type_map}, {names[0]} has {type_map}")
    return predictors


def frozen_here(path: str | os.PathLike[str]) -> bool:
    """Tell by the names of its members, without torch, whether a frozen file comes from this package."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith(_PROGRAM) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
