"""Write pictures with matplotlib's object interface, without a display and without global state.

A picture has its final size: three panels fill the two columns of a journal page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from deepmd_muon.files import make_folder_of, whole_file
from deepmd_muon.show.errors import PictureError

#: Width of one column of a page [inch].
COLUMN = 3.4
#: Width of a panel [inch].
PANEL = 2.35
#: One font size for all text. Give it to `matplotlib.rc_context` around drawing and writing: texts
#: of ticks take the size that holds when they are written.
STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "figure.titlesize": 8.0,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.0,
    "pdf.fonttype": 42,  # text that journals and editors can read
}
_DPI = 300


def check_ending(path: Path) -> None:
    """Raise PictureError if no picture can be written in the format of the file's ending."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise PictureError(
            f"no picture can be written to {path}; use one of the endings "
            f".{', .'.join(sorted(formats))}"
        )


def write(figure: Figure, path: Path) -> None:
    """Write a figure; make missing folders."""
    make_folder_of(path)
    with whole_file(path) as file:
        figure.savefig(file, dpi=_DPI, format=path.suffix.removeprefix(".").lower())
