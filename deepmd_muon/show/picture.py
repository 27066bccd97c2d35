"""Write pictures with matplotlib's object interface, without a display and without global state."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from deepmd_muon.files import make_folder_of, whole_file
from deepmd_muon.show.errors import PictureError


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
        figure.savefig(file, dpi=150, format=path.suffix.removeprefix(".").lower())
