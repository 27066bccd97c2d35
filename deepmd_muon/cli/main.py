"""The program behind `dp`, `dpmuon` and `python -m deepmd_muon`.

Backend, command and options are deepmd-kit's. Those that this package lacks (other backends, other
commands, some options) go to deepmd-kit's own main where deepmd-kit is installed beside us; it is
imported, never called as `dp`, because that name may be ours.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from deepmd_muon import __version__
from deepmd_muon.cli import (
    change_bias,
    check,
    compress,
    convert_data,
    doc_train_input,
    explore,
    freeze,
    init,
    model_devi,
    neighbor_stat,
    show,
    test,
    train,
    zbl,
)
from deepmd_muon.cli.errors import CommandError
from deepmd_muon.cli.handover import HandOver, choices, hand_over
from deepmd_muon.failures import failure_of
from deepmd_muon.plugins import load_plugins

COMMANDS = {
    "init": init,
    "train": train,
    "test": test,
    "freeze": freeze,
    "compress": compress,
    "change-bias": change_bias,
    "model-devi": model_devi,
    "check": check,
    "explore": explore,
    "neighbor-stat": neighbor_stat,
    "convert-data": convert_data,
    "zbl": zbl,
    "doc-train-input": doc_train_input,
    "show": show,
}
_OURS = ("pt", "pytorch")
# Every backend name of deepmd-kit 3.2.0, as `--name` and as a value of `-b`.
_OTHERS = (
    *(
        "tf",
        "tensorflow",
        "tf2",
        "tensorflow2",
        "jax",
        "pd",
        "paddle",
        "dp",
        "dpmodel",
        "np",
        "numpy",
    ),
    *("pt-expt", "pytorch-exportable", "pretrained"),
)
# Commands that deepmd-kit has for TensorFlow alone.
_TENSORFLOW_ONLY = frozenset({"transfer", "convert-from", "train-nvnmd"})
_LOG_LEVELS = {
    "DEBUG": 10,
    "3": 10,
    "INFO": 20,
    "2": 20,
    "WARNING": 30,
    "1": 30,
    "ERROR": 40,
    "0": 40,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words after the program's name, those of this process by default, and return the exit status.

    It is 0 on success, 2 when the command line or a file it names is wrong, 1 when the work cannot
    go on (a full disk, no memory, a loss that is not finite), 130 after Ctrl-C; otherwise the
    status of the command or of deepmd-kit.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    backend, rest = split_backend(words)
    try:
        return _run(words, backend, rest)
    except KeyboardInterrupt:
        print("dp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) left; Python's own flush at exit must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str], backend: str | None, rest: list[str]) -> int:
    """Run a command here or in deepmd-kit."""
    command = next((word for word in rest if not word.startswith("-")), None)
    try:
        if backend not in (None, *_OURS):
            known = (
                f"{choices(backend, (*_OURS, *_OTHERS))} (all but {' and '.join(_OURS)} are "
                "deepmd-kit's)"
            )
            raise HandOver(f"the backend {backend!r}", "" if backend in _OTHERS else known)
        if command is not None and command not in COMMANDS:
            raise HandOver(f"the command {command!r}", choices(command, tuple(COMMANDS)))
        parser = build_parser()
        _refuse_empty(parser, words)
        options = parser.parse_args(words)
        if options.command is None:
            parser.print_help()
            return 0
        return _guarded(options)
    except HandOver as request:
        # Without a backend, our commands are PyTorch's and deepmd-kit's are TensorFlow's.
        prefix = ["--pt"] if backend is None and command not in _TENSORFLOW_ONLY else []
        return hand_over(str(request), request.words or [*prefix, *words], request.advice)


def _refuse_empty(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse empty words, such as "$DATA" of a variable that is not set: as a path they mean the present folder."""
    for before, word in zip(["", *words], words, strict=False):
        if not word.strip() or (word.startswith("--") and word.endswith("=")):
            name = word or before
            parser.error(f"an argument is empty ({name!r}); is a variable of the shell unset?")


def _guarded(options: argparse.Namespace) -> int:
    """Run a command; a mistake of its user ends in a message, a mistake of ours in a traceback."""
    options.log_level = _LOG_LEVELS[options.log_level]
    try:
        _check_threads()
        load_plugins()
        return int(COMMANDS[options.command].run(options))
    except (HandOver, BrokenPipeError):
        raise
    except Exception as error:
        # Our own exception classes, files that cannot be opened and the machine's failures: nothing
        # else is expected.
        ours = type(error).__module__.startswith("deepmd_muon") or isinstance(error, OSError)
        failure = failure_of(error)
        if not (ours or failure) or options.log_level <= logging.DEBUG:
            raise
        with _printing(options.command, error) as mine:
            if mine:
                # In one piece: several ranks write to one terminal.
                sys.stderr.write(f"dp {options.command}: {failure or error}\n")
        return 1 if failure else getattr(error, "exit_status", 2)


def _check_threads() -> None:
    """Refuse a number of threads that OpenMP ignores: it then takes all processors of the host, and steps crawl."""
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if given and not all(
        number.strip().isdecimal() and int(number) > 0 for number in given.split(",")
    ):
        raise CommandError(
            f"OMP_NUM_THREADS must be a whole number above 0; found {given!r}: set another, or "
            "unset it"
        )


def _printing(command: str, error: Exception) -> contextlib.AbstractContextManager[bool]:
    """Return a context that says whether to print an error: one that all ranks find in their input is printed once."""
    from deepmd_muon.argcheck import InputError

    if command != "train" or not isinstance(error, InputError):
        return contextlib.nullcontext(True)
    from deepmd_muon.train.ranks.ranks import prints_error

    return prints_error(str(error))


def split_backend(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the backend's name, from the words or else from DP_BACKEND, or None.

    And the words without it.
    """
    backend = os.environ.get("DP_BACKEND") or None
    rest: list[str] = []
    remaining = list(words)
    while remaining and remaining[0].startswith("-"):
        word = remaining.pop(0)
        name, _, value = word.partition("=")
        if name in ("-b", "--backend"):
            backend = value or (remaining.pop(0) if remaining else None)
        elif word[:2] == "-b" or word[2:] in (*_OURS, *_OTHERS):
            backend = word[2:]
        else:
            rest.append(word)
    return (backend.lower() if backend else None), rest + remaining


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from importlib.metadata import version  # reads torch's version without importing torch

    parser = argparse.ArgumentParser(
        prog="dp",
        description="Train and test DeePMD potentials with the HybridMuon optimizer.",
        epilog="Other backends and commands (gui, …) go to deepmd-kit.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"deepmd-muon {__version__} (torch {version('torch')})",
    )
    backend = parser.add_mutually_exclusive_group()
    backend.add_argument(
        "-b",
        "--backend",
        metavar="NAME",
        help=(
            "backend; ours is pytorch (or pt), others go to deepmd-kit; default: $DP_BACKEND or "
            "pytorch"
        ),
    )
    backend.add_argument(
        "--pt", "--pytorch", action="store_true", help="the same as --backend pytorch"
    )
    logging_options = argparse.ArgumentParser(add_help=False)
    logging_options.add_argument(
        "-v",
        "--log-level",
        choices=tuple(_LOG_LEVELS),
        default="INFO",
        help="least severe messages shown",
    )
    logging_options.add_argument(
        "-l", "--log-path", metavar="FILE", help="write the log to this file as well"
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_options(
            commands.add_parser(
                name,
                parents=[logging_options],
                help=module.HELP,
                description=module.HELP[0].upper() + module.HELP[1:] + ".",
            )
        )
    return parser
