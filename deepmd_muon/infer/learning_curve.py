"""Reading `lcurve.out` and drawing it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from deepmd_muon.infer.errors import PictureError
from deepmd_muon.infer.picture import check_ending, write

_UNITS = {"e": "eV/atom", "f": "eV/Å", "v": "eV/atom"}
_TITLES = {"e": "Energy", "f": "Force", "v": "Virial"}
# Columns without "_trn" or "_val"; a loss of absolute errors writes mae_ columns.
_ERRORS = tuple(f"{kind}_{quantity}" for quantity in _TITLES for kind in ("rmse", "mae"))


def read_learning_curve(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read a learning curve, of this package or of deepmd-kit.

    Parameters
    ----------
    path
        The file; where its columns change at a restart, a column that a row does not have is nan there.

    Returns
    -------
    dict
        Columns by name ("step", "rmse_e_trn", …, "lr"), each (nrows,) float64.

    Raises
    ------
    PictureError
        When the file does not exist, has no header or no complete row.
    """
    if not Path(path).exists():
        raise PictureError(f"there is no learning curve {path}")
    names: list[str] = []
    rows: list[dict[str, float]] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith("# step"):
            names = line[1:].split()
        elif names and not line.startswith("#") and len(fields := line.split()) == len(names):
            rows.append(dict(zip(names, map(float, fields), strict=True)))
    if not rows:
        raise PictureError(
            f"{path} holds no row below a header '# step …': it is no learning curve, or the run just began"
        )
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in columns}


def plot_learning_curve(path: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draw a learning curve: one panel a quantity, training and validation error over the step.

    Parameters
    ----------
    path
        The file `lcurve.out`.
    picture
        Where the picture goes; its format follows from the file's ending.
    """
    picture = Path(picture)
    check_ending(picture)
    columns = read_learning_curve(path)
    drawn = [error for error in _ERRORS if np.isfinite(columns.get(f"{error}_trn", np.array([np.nan]))).any()]
    figure = Figure(figsize=(4.2 * (len(drawn) + 1), 3.4), layout="constrained")
    panels = figure.subplots(1, len(drawn) + 1, squeeze=False)[0]
    for axes, error in zip(panels[:-1], drawn, strict=True):
        kind, _, quantity = error.partition("_")
        for data, label in (("trn", "training"), ("val", "validation")):
            values = columns.get(f"{error}_{data}")
            if values is not None:
                axes.plot(columns["step"], values, label=label, linewidth=1.2)
        axes.set_ylabel(f"{kind.upper()} [{_UNITS[quantity]}]")
        axes.set_title(_TITLES[quantity], fontsize="medium")
        axes.legend(frameon=False)
    panels[-1].plot(columns["step"], columns["lr"], color="0.3", linewidth=1.2)
    panels[-1].set_title("Learning rate", fontsize="medium")
    for axes in panels:
        axes.set_yscale("log")
        axes.set_xlabel("step")
    write(figure, picture)
