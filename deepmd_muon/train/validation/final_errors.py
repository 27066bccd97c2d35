"""The table of errors on the validation data that ends a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deepmd_muon.train.validation.full_validation import errors_of_sums

# The table takes a small part of the run's time: a frame costs less than a step.
_STEPS_A_FRAME = 10
# A row of the learning curve may compare a frame for every so many steps since the row before.
_STEPS_A_FRAME_OF_A_ROW = 3
_FEWEST_FRAMES, _MOST_FRAMES = 10, 1000
# More systems would bury the rest of the log.
_MOST_LINES = 20
_LONGEST_NAME = 40
# Quantity, title of its column; errors are shown in thousandths of the units of `full_errors`.
_COLUMNS = (("e", "energy [meV/atom]"), ("f", "force [meV/Å]"), ("v", "virial [meV/atom]"))


def frames_to_compare(frames: Sequence[int], num_steps: int) -> list[int]:
    """Return how many `frames` of each system the table compares: all if they are few beside the steps of the run.

    Otherwise each system takes part in proportion to its frames, with one at least; where systems are too many for
    that, evenly spread ones do.
    """
    return _spread_over(frames, min(_MOST_FRAMES, max(_FEWEST_FRAMES, num_steps // _STEPS_A_FRAME)))


def frames_of_sample(frames: Sequence[int], disp_freq: int) -> list[int]:
    """Return how many `frames` of each system ``"numb_btch": "sample"`` compares for a row of the learning curve.

    A frame costs about a third of a step, so validation takes at most about a tenth of the time of the `disp_freq`
    steps between two rows. Divided among systems as in `frames_to_compare`.
    """
    return _spread_over(frames, max(_FEWEST_FRAMES, disp_freq // _STEPS_A_FRAME_OF_A_ROW))


def _spread_over(frames: Sequence[int], budget: int) -> list[int]:
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
    rows = {k: errors_of_sums(sums[k]) for k, count in enumerate(compared) if count}
    total = errors_of_sums([sum(column) for column in zip(*sums, strict=True)])
    # Of many systems the worst are shown, in the order of the data; one without forces counts as good.
    by_error = sorted(rows, key=lambda k: -rows[k]["f:rmse"] if rows[k]["f:rmse"] > 0 else 0.0)
    shown = sorted(by_error[:_MOST_LINES])
    short = {
        k: names[k] if len(names[k]) <= _LONGEST_NAME else f"…{names[k][1 - _LONGEST_NAME :]}"
        for k in shown
    }
    width = max(map(len, ["system", *short.values()]))
    columns = [
        (family, title) for family, title in _COLUMNS if not math.isnan(total[f"{family}:rmse"])
    ]

    def line(name: str, count: int, errors: Mapping[str, float]) -> str:
        found = [(errors[f"{family}:rmse"], len(title)) for family, title in columns]
        cells = [
            f"{'-' if math.isnan(error) else format(1e3 * error, '.3g'):>{size}}"
            for error, size in found
        ]
        return "  ".join([f"{name:{width}}", f"{count:6d}", *cells])

    sample = "all" if sum(compared) == sum(frames) else f"a sample of {sum(compared)} of"
    yield f"errors on the validation data (RMSE, {sample} {sum(frames)} frames):"
    yield "  ".join([f"{'system':{width}}", "frames", *(title for _, title in columns)])
    for k in shown:
        yield line(short[k], compared[k], rows[k])
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} systems with smaller force errors"
    if len(rows) > 1:
        yield line("all", sum(compared), total)


def parity_command(source: str, checkpoint: Path) -> str | None:
    """Return the command that draws the parity picture; None where `dp test` would not find the input's data.

    `dp test` looks for data beside the input file, `dp train` in the present folder.
    """
    if Path(source).parent.resolve() != Path.cwd().resolve() or not Path(source).is_file():
        return None
    words = [
        "dp",
        "--pt",
        "test",
        "-m",
        str(checkpoint),
        "--valid-data",
        Path(source).name,
        "--plot",
        "parity.png",
    ]
    return shlex.join(words)


def check_command(source: str, checkpoint: Path) -> str | None:
    """Return the command that checks dynamics near the training data; None as in `parity_command`."""
    if parity_command(source, checkpoint) is None:
        return None
    words = [
        "dp",
        "--pt",
        "check",
        str(checkpoint),
        "--train-data",
        Path(source).name,
        "-o",
        "check.png",
    ]
    return shlex.join(words)
