"""The table of errors on the validation data that ends a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deepmd_muon.train.validation.full_validation import errors_of_sums

# The table takes a small part of the run's time: a frame costs less than a step.
_STEPS_A_FRAME = 10
# A row of the learning curve may compare a frame for every so many steps since the row before.
_STEPS_A_FRAME_OF_A_ROW = 3
_FEWEST_FRAMES = 10
_MOST_FRAMES = 1000
# More systems would bury the rest of the log.
_MOST_LINES = 20
_LONGEST_NAME = 40


class _Column(NamedTuple):
    """A column of the table; errors are shown in thousandths of the units of `full_errors`."""

    family: str
    title: str


_COLUMNS = (
    _Column("e", "energy [meV/atom]"),
    _Column("f", "force [meV/Å]"),
    _Column("v", "virial [meV/atom]"),
)


def frames_to_compare(frames: Sequence[int], num_steps: int) -> list[int]:
    """Return how many `frames` of each system the table compares; all of small data.

    Otherwise each system takes part in proportion to its frames, with one at least. If systems are
    too many for that, evenly spread ones do.
    """
    budget = max(_FEWEST_FRAMES, num_steps // _STEPS_A_FRAME)
    return spread_over(frames, min(_MOST_FRAMES, budget))


def frames_of_sample(frames: Sequence[int], disp_freq: int) -> list[int]:
    """Return how many `frames` of each system ``"numb_btch": "sample"`` compares for a row.

    A frame costs about a third of a step, so validation takes at most about a tenth of the time of
    the `disp_freq` steps between two rows. Divided among systems as in `frames_to_compare`.
    """
    return spread_over(frames, max(_FEWEST_FRAMES, disp_freq // _STEPS_A_FRAME_OF_A_ROW))


def spread_over(frames: Sequence[int], budget: int) -> list[int]:
    """Divide a budget of frames among systems as in `frames_to_compare`."""
    total = sum(frames)
    if total <= budget:
        return list(frames)
    every = math.ceil(len(frames) / budget)
    return [0 if k % every else max(1, count * budget // total) for k, count in enumerate(frames)]


def error_table(
    names: Sequence[str],
    frames: Sequence[int],
    compared: Sequence[int],
    sums: Sequence[Sequence[float]],
) -> Iterator[str]:
    """Yield the lines of the table: root-mean-square errors of every system and of all.

    `compared` of its `frames` were compared of each system, with a row of `error_sums`.
    """
    errors = {k: errors_of_sums(sums[k]) for k, count in enumerate(compared) if count}
    total = errors_of_sums([sum(column) for column in zip(*sums, strict=True)])

    def force_error(k: int) -> float:
        error = errors[k]["f:rmse"]
        return error if error > 0 else 0.0  # NaN without forces counts as good

    # Of many systems the worst are shown, in the order of the data.
    shown = sorted(sorted(errors, key=force_error, reverse=True)[:_MOST_LINES])
    short_names = {k: _shorten(names[k]) for k in shown}
    name_width = max(map(len, ["system", *short_names.values()]))
    columns = [column for column in _COLUMNS if not math.isnan(total[f"{column.family}:rmse"])]

    def line(name: str, count: int, errors: Mapping[str, float]) -> str:
        cells = [f"{name:{name_width}}", f"{count:6d}"]
        for column in columns:
            error = errors[f"{column.family}:rmse"]
            cell = "-" if math.isnan(error) else f"{1e3 * error:.3g}"
            cells.append(f"{cell:>{len(column.title)}}")
        return "  ".join(cells)

    sample = "all" if sum(compared) == sum(frames) else f"a sample of {sum(compared)} of"
    yield f"errors on the validation data (RMSE, {sample} {sum(frames)} frames):"
    titles = [column.title for column in columns]
    yield "  ".join([f"{'system':{name_width}}", "frames", *titles])
    for k in shown:
        yield line(short_names[k], compared[k], errors[k])
    if len(errors) > len(shown):
        yield f"and {len(errors) - len(shown)} systems with smaller force errors"
    if len(errors) > 1:
        yield line("all", sum(compared), total)


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def parity_command(source: str, checkpoint: Path) -> str | None:
    """Return the command that draws the parity picture; None if it would not find the data.

    `dp test` looks for data next to the input file, `dp train` in the present folder.
    """
    return _command(
        source, f"test -m {shlex.quote(str(checkpoint))} --valid-data", "--plot parity.png"
    )


def check_command(source: str, checkpoint: Path) -> str | None:
    """Return the command that checks dynamics; None as in `parity_command`."""
    return _command(source, f"check {shlex.quote(str(checkpoint))} --train-data", "-o check.png")


def _command(source: str, before: str, after: str) -> str | None:
    """Return a command of `dp` with the name of the input file if it is in this folder."""
    path = Path(source)
    if path.parent.resolve() != Path.cwd().resolve() or not path.is_file():
        return None
    return f"dp --pt {before} {shlex.quote(path.name)} {after}"
