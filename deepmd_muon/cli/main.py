"""The program behind `dp`, `dpmuon` and `python -m deepmd_muon`.

Backend, command and options are deepmd-kit's. Those that this package lacks (other backends, other
commands, some options) go to deepmd-kit's own main if deepmd-kit is installed. It is imported,
never called as `dp`, because that name may be ours.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
    report,
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
    "report": report,
    "explore": explore,
    "neighbor-stat": neighbor_stat,
    "convert-data": convert_data,
    "zbl": zbl,
    "doc-train-input": doc_train_input,
    "show": show,
}
_OWN_BACKENDS = ("pt", "pytorch")
# Every other backend name of deepmd-kit 3.2.0, as `--name` and as a value of `-b`.
_OTHER_BACKENDS = (
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
    "pt-expt",
    "pytorch-exportable",
    "pretrained",
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
    """Run a command line and return its exit status.

    Parameters
    ----------
    arguments
        The words after the program's name; by default those of this process.

    Returns
    -------
    int
        0 on success, 2 when the command line or a file it names is wrong, 1 when the work cannot
        go on (a full disk, no memory, a loss that is not finite), 130 after Ctrl-C; otherwise the
        status of the command or of deepmd-kit.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("dp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has left. Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    """Run a command here or in deepmd-kit."""
    backend, other_words = split_backend(words)
    command = next((word for word in other_words if not word.startswith("-")), None)
    try:
        if backend not in (None, *_OWN_BACKENDS):
            advice = ""
            if backend not in _OTHER_BACKENDS:
                backends = choices(backend, (*_OWN_BACKENDS, *_OTHER_BACKENDS))
                advice = f"{backends} (all but {' and '.join(_OWN_BACKENDS)} are deepmd-kit's)"
            raise HandOver(f"the backend {backend!r}", advice)
        if command is not None and command not in COMMANDS:
            raise HandOver(f"the command {command!r}", choices(command, tuple(COMMANDS)))
        parser = build_parser()
        _check_no_empty_word(parser, words)
        options = parser.parse_args(words)
        if options.command is None:
            parser.print_help()
            return 0
        return _guarded(options)
    except HandOver as request:
        # Without a backend, our commands are PyTorch's and deepmd-kit's are TensorFlow's.
        prefix = ["--pt"] if backend is None and command not in _TENSORFLOW_ONLY else []
        return hand_over(str(request), request.words or [*prefix, *words], request.advice)


def _check_no_empty_word(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse empty words, such as "$DATA" of a variable that is not set.

    As a path they would mean the present folder.
    """
    for previous, word in itertools.pairwise(["", *words]):
        if not word.strip() or (word.startswith("--") and word.endswith("=")):
            name = word or previous
            parser.error(f"an argument is empty ({name!r}); is a variable of the shell unset?")


def _guarded(options: argparse.Namespace) -> int:
    """Run a command.

    A mistake of its user ends in a message, a mistake of this package in a traceback.
    """
    options.log_level = _LOG_LEVELS[options.log_level]
    try:
        _check_threads()
        load_plugins()
        return int(COMMANDS[options.command].run(options))
    except (HandOver, BrokenPipeError):
        raise
    except Exception as error:
        # Expected are exceptions of this package, files that cannot be opened, and failures of the
        # machine.
        own_error = type(error).__module__.startswith("deepmd_muon")
        failure = failure_of(error)
        expected = own_error or isinstance(error, OSError) or failure
        if not expected or options.log_level <= logging.DEBUG:
            raise
        with _printing(options.command, error) as prints:
            if prints:
                # In one piece, because several ranks write to one terminal.
                sys.stderr.write(f"dp {options.command}: {failure or error}\n")
        return 1 if failure else getattr(error, "exit_status", 2)


def _check_threads() -> None:
    """Refuse a number of threads that OpenMP ignores.

    OpenMP would take all processors of the host, and steps would crawl.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return
    for number in text.split(","):  # one for each level of nested threads
        if not (number.strip().isdecimal() and int(number) > 0):
            raise CommandError(
                f"OMP_NUM_THREADS must be a whole number above 0; found {text!r}: set another, or "
                "unset it"
            )


def _printing(command: str, error: Exception) -> contextlib.AbstractContextManager[bool]:
    """Return a context that says whether to print an error.

    One of several ranks prints an error that all of them find in their input.
    """
    from deepmd_muon.argcheck import InputError

    if command != "train" or not isinstance(error, InputError):
        return contextlib.nullcontext(True)
    from deepmd_muon.train.ranks.ranks import prints_error

    return prints_error(str(error))


def split_backend(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the backend's name, and the words without it.

    The name comes from the words or else from DP_BACKEND; it is None if neither has one.
    """
    backend = os.environ.get("DP_BACKEND") or None
    options: list[str] = []
    remaining = list(words)
    while remaining and remaining[0].startswith("-"):
        word = remaining.pop(0)
        name, _, value = word.partition("=")
        if name in ("-b", "--backend"):
            backend = value or (remaining.pop(0) if remaining else None)
        elif word[:2] == "-b" or word[2:] in (*_OWN_BACKENDS, *_OTHER_BACKENDS):
            backend = word[2:]
        else:
            options.append(word)
    if backend is not None:
        backend = backend.lower()
    return backend, options + remaining


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
        command_parser = commands.add_parser(
            name,
            parents=[logging_options],
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
        )
        module.add_options(command_parser)
    return parser
