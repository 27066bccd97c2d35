"""Handing a command line to deepmd-kit, where it is installed beside us."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class HandOver(Exception):  # noqa: N818 (a request, not an error)
    """A command line that deepmd-kit should answer; its text names the missing feature.

    Parameters
    ----------
    what
        The missing feature.
    advice
        Advice if deepmd-kit is not installed either.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what)
        self.advice = advice


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
        deepmd-kit's exit status, or 2 with one sentence when deepmd-kit is not installed.
    """
    if importlib.util.find_spec("deepmd") is None:
        rest = f"; {advice}" if advice else ""
        print(f"dp: deepmd-muon does not have {what}, and deepmd-kit is not installed{rest}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(f"dp: deepmd-muon does not have {what}: handing over to deepmd-kit", file=sys.stderr)
    from deepmd.main import main as deepmd_kit_main

    return int(deepmd_kit_main(words) or 0)
