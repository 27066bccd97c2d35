"""Handing a command line to deepmd-kit, if it is installed."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

# Part of deepmd-kit's message about a library of its wheel that does not fit the installed torch.
_LIBRARY_MESSAGE = "error is raised when loading"


class HandOver(Exception):  # noqa: N818 (a request, not an error)
    """A command line that deepmd-kit should answer; its text names the missing feature.

    Attributes
    ----------
    advice
        For users without deepmd-kit.
    words
        The command line for deepmd-kit; empty for that of this process.
    """

    def __init__(self, what: str, advice: str = "", words: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.advice = advice
        self.words = list(words)


def choices(word: str, known: Sequence[str]) -> str:
    """Return advice on an unknown word: the known word that it may mean, and all known words."""
    near = difflib.get_close_matches(word, known, n=1)
    start = f"did you mean {near[0]!r}? There" if near else "there"
    return f"{start} are: {', '.join(known)}"


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
    """Run deepmd-kit's own main on `words`, because `what` is missing here, and say so.

    Return deepmd-kit's exit status, or 2 with a message when deepmd-kit is not installed or lacks a
    package.
    """
    if importlib.util.find_spec("deepmd") is None:
        message = f"dp: deepmd-muon does not have {what}, and deepmd-kit is not installed"
        print(f"{message}; {advice}" if advice else message, file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(f"dp: deepmd-muon does not have {what}: handing over to deepmd-kit", file=sys.stderr)
    try:
        from deepmd.main import main as deepmd_kit_main

        return int(deepmd_kit_main([word for word in words if word != "--trust"]) or 0)
    except (ImportError, RuntimeError) as error:
        # It loads a backend's libraries late. Without MPI, or with another torch than its wheel
        # needs, they fail only here.
        if not isinstance(error, ImportError) and _LIBRARY_MESSAGE not in str(error):
            raise
        sys.stderr.write(
            f"dp: deepmd-kit is installed but cannot load what it needs ({type(error).__name__}: "
            f"{error})\nFor its PyTorch backend, which needs MPI and the torch that it was "
            "compiled with: pip install 'deepmd-kit[torch]'. `python -m deepmd "
            f"{shlex.join(words)}` shows the traceback.\n"
        )
        return 2
