"""A parameter seen as matrices: which elements form a row, a column and a batch."""

from __future__ import annotations

import dataclasses
import math
import re

from deepmd_muon.optim.config import MuonMode


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A tensor read as `batch` matrices of shape (rows, columns), in storage order.

    Its text form is ``batch x rows x columns``, e.g. ``1x240x1600``; it is what state dicts store.
    """

    batch: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, rows, columns)."""
        return self.batch, self.rows, self.columns

    @property
    def min_dim(self) -> int:
        """The smaller of rows and columns."""
        return min(self.rows, self.columns)

    def __str__(self) -> str:
        return f"{self.batch}x{self.rows}x{self.columns}"

    @classmethod
    def parse(cls, text: str) -> MatrixView | None:
        """Read the text form; an empty string stands for no view.

        Raises
        ------
        ValueError
            When the text is neither empty nor of the form above.
        """
        if not text:
            return None
        if not re.fullmatch(r"\d+x\d+x\d+", text):
            raise ValueError(f"a matrix view looks like '1x240x1600'; found {text!r}")
        batch, rows, columns = map(int, text.split("x"))
        return cls(batch, rows, columns)


def effective_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop the dimensions of size 1, which carry no matrix structure."""
    return tuple(size for size in shape if size != 1)


def matrix_view(shape: tuple[int, ...], mode: MuonMode) -> MatrixView | None:
    """Return how a parameter of this shape is seen as matrices, or None when the mode has no view of it.

    Parameters
    ----------
    shape
        The parameter's shape.
    mode
        '2d' sees only effective rank 2; 'flat' folds all leading dimensions into rows; 'slice' takes the last
        two dimensions as the matrix and the leading ones as a batch.
    """
    effective = effective_shape(shape)
    if len(effective) < 2 or (mode == "2d" and len(effective) > 2):
        return None
    if mode == "flat":
        return MatrixView(1, math.prod(effective[:-1]), effective[-1])
    return MatrixView(math.prod(effective[:-2]), effective[-2], effective[-1])
