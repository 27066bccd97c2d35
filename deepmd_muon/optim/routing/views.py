"""Matrix views: how a parameter's elements form rows, columns, blocks and a batch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from deepmd_muon.optim.config import SPLIT_PATTERN, SPLIT_SYNTAX, MuonMode
from deepmd_muon.optim.errors import InvalidShapeError

Axis = Literal["rows", "columns"]
Shape = tuple[int, ...]

_REST = -1  # the size of the part 'rest' of a split
_VIEW_FORM = re.compile(
    r"(?P<batch>\d+)x(?P<rows>\d+)x(?P<columns>\d+)"
    r"(?: (?P<axis>rows|columns) (?P<sizes>\d+(?:\+\d+)*)(?: in (?P<groups>[1-9]\d*) groups)?)?"
)


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A tensor read as `batch` matrices (rows, columns) in storage order, possibly split.

    A split cuts each matrix of a fused weight into blocks. The text form is ``batch x rows x
    columns``, e.g. ``1x240x1600``, and for fused weights ``1x64x160 columns 64+64+32``. State dicts
    store this text.

    Blocks may be interleaved: ``1x768x512 rows 512+128+128 in 4 groups`` has four groups of rows,
    each with 128 rows of the first block, then 32 of the second and 32 of the third.

    Attributes
    ----------
    axis
        Axis along which each matrix is split; None without a split.
    sizes
        Sizes of the blocks along this axis.
    groups
        Number of groups that interleave the blocks; each has an equal share of every block.
    """

    batch: int
    rows: int
    columns: int
    axis: Axis | None = None
    sizes: tuple[int, ...] = ()
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, rows, columns)."""
        return self.batch, self.rows, self.columns

    @property
    def blocks(self) -> int:
        """Number of blocks: matrices orthogonalized separately, each with its own Magma score."""
        return self.batch * max(1, len(self.sizes))

    @property
    def block_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each block of one matrix."""
        if self.axis == "rows":
            return tuple((size, self.columns) for size in self.sizes)
        if self.axis == "columns":
            return tuple((self.rows, size) for size in self.sizes)
        return ((self.rows, self.columns),)

    @property
    def storage_sizes(self) -> tuple[int, ...]:
        """Sizes of adjacent parts along the axis; a block has one in every group."""
        return tuple(size // self.groups for size in self.sizes) * self.groups

    @property
    def min_dim(self) -> int:
        """The smallest dimension of any block."""
        return min(map(min, self.block_shapes))

    def simplified(self) -> MatrixView:
        """Return the view; a split into a single block is left out."""
        return MatrixView(*self.shape) if len(self.sizes) == 1 else self

    def cut(self, x: Tensor) -> list[Tensor]:
        """Return the blocks of a tensor of the parameter's shape, each (batch, rows, columns)."""
        x = x.reshape(self.shape)
        if self.axis is None:
            return [x]
        dim = self._split_dim
        if self.groups == 1:
            return list(x.split(self.sizes, dim))
        in_groups = x.unflatten(dim, (self.groups, -1))
        sizes = [size // self.groups for size in self.sizes]
        return [part.flatten(dim, dim + 1) for part in in_groups.split(sizes, dim + 1)]

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """Undo `cut`, up to the parameter's shape: return (batch, rows, columns)."""
        if self.axis is None:
            return blocks[0]
        dim = self._split_dim
        if self.groups == 1:
            return torch.cat(list(blocks), dim)
        in_groups = [block.unflatten(dim, (self.groups, -1)) for block in blocks]
        return torch.cat(in_groups, dim + 1).flatten(dim, dim + 1)

    @property
    def _split_dim(self) -> int:
        """The dimension of (batch, rows, columns) along which matrices are split."""
        return 1 if self.axis == "rows" else 2

    def numbers(self, of: Literal["blocks", "rows", "columns"]) -> Tensor:
        """Return where each element finds the state of its block, row or column.

        The result is int64 (batch·rows·columns,), in storage order: indices into a flat state
        tensor with an entry for each block, or for each row or column of each block. A row that
        crosses several blocks has adjacent entries: with ``1x2x3 columns 2+1``, the elements of
        both rows find the state of their row at 0 0 1 and 2 2 3. Rows of interleaved blocks are
        sorted by block.
        """
        blocks_per_matrix = max(1, len(self.sizes))
        numbered_blocks = [
            torch.full((1, *shape), i, device="cpu") for i, shape in enumerate(self.block_shapes)
        ]
        block = self.join(numbered_blocks)  # of each element of a matrix, (1, rows, columns)
        batch = torch.arange(self.batch, device="cpu").view(-1, 1, 1)
        if of == "blocks":
            return (batch * blocks_per_matrix + block).expand(self.shape).reshape(-1)
        n_lines = self.rows if of == "rows" else self.columns
        lines = torch.arange(n_lines, device="cpu").view((1, -1, 1) if of == "rows" else (1, 1, -1))
        if self.axis == of:  # sorted by block → storage order
            lines = self.join(lines.split(self.sizes, self._split_dim))
        repeats = self.repeats(of)
        number = (batch * n_lines + lines) * repeats
        if repeats > 1:
            number = number + block
        return number.expand(self.shape).reshape(-1)

    def repeats(self, of: Axis) -> int:
        """Return the number of blocks that a row, or a column, of a matrix crosses."""
        return len(self.sizes) if self.axis and self.axis != of else 1

    def axes(self, shape: Shape) -> tuple[int, int]:
        """Return (i, j): dimensions before i are the batch, i … j the rows, from j on the columns.

        Raises ValueError when the dimensions of this shape cannot be folded to the view.
        """
        for i in range(len(shape) + 1):
            for j in range(i, len(shape) + 1):
                batch = math.prod(shape[:i])
                rows = math.prod(shape[i:j])
                columns = math.prod(shape[j:])
                if (batch, rows, columns) == self.shape:
                    return i, j
        raise ValueError(f"view {self} does not fold whole dimensions of shape {shape}")

    def dims_of(self, shape: Shape, of: Axis) -> tuple[int, ...]:
        """Return the dimensions of the parameter that form the batch and the rows (or columns)."""
        i, j = self.axes(shape)
        return tuple(range(j)) if of == "rows" else (*range(i), *range(j, len(shape)))

    def __str__(self) -> str:
        text = f"{self.batch}x{self.rows}x{self.columns}"
        if self.axis is None:
            return text
        split = f"{text} {self.axis} {'+'.join(map(str, self.sizes))}"
        return split if self.groups == 1 else f"{split} in {self.groups} groups"

    @classmethod
    def parse(cls, text: str) -> MatrixView | None:
        """Read the text form, or raise ValueError; an empty string stands for no view."""
        if not text:
            return None
        match = _VIEW_FORM.fullmatch(text)
        if not match:
            raise ValueError(f"a matrix view looks like '1x240x1600'; found {text!r}")
        sizes = match["sizes"].split("+") if match["axis"] else []
        return cls(
            batch=int(match["batch"]),
            rows=int(match["rows"]),
            columns=int(match["columns"]),
            axis=cast("Axis | None", match["axis"]),
            sizes=tuple(map(int, sizes)),
            groups=int(match["groups"] or 1),
        )


@dataclasses.dataclass(frozen=True)
class FusedSplit:
    """How a fused weight is split."""

    pattern: str  # shell pattern on full names
    axis: Axis
    sizes: tuple[int, ...]  # of the parts, or _REST; empty for equal parts
    count: int  # number of parts
    words: str  # the sizes as written in the setting
    groups: int  # `MatrixView.groups`

    @classmethod
    def parse(cls, text: str) -> FusedSplit:
        """Read the form of the setting `splits`, e.g. ``*.q_b: rows (128+64)*16+rest``.

        Raises InvalidShapeError when the text has another form or contains 'rest' twice.
        """
        match = re.fullmatch(SPLIT_PATTERN, text)
        if not match or match["sizes"].count("rest") > 1:
            once = " with one 'rest'" if match else ""
            raise InvalidShapeError(f"a split must be {SPLIT_SYNTAX}{once}; found {text!r}")
        pattern = match["pattern"]
        words = match["sizes"]
        axis = cast("Axis", match["axis"])
        groups = int(match["groups"] or 1)
        if words.isdigit():
            return cls(
                pattern=pattern,
                axis=axis,
                sizes=(),
                count=int(words),
                words=f"{words} equal parts",
                groups=groups,
            )
        sizes: list[int] = []
        # Terms are numbers, 'rest', or sums in parentheses, each with or without '*count'.
        for term in re.findall(r"\([^)]*\)(?:\*\d+)?|[^+()]+", words):
            summands, _, times = term.partition("*")
            numbers = summands.strip("()").split("+")
            term_sizes = [_REST if number == "rest" else int(number) for number in numbers]
            sizes += term_sizes * int(times or 1)
        return cls(
            pattern=pattern,
            axis=axis,
            sizes=tuple(sizes),
            count=len(sizes),
            words=words,
            groups=groups,
        )

    def apply(self, view: MatrixView, name: str) -> MatrixView:
        """Return the view divided into blocks.

        Raises InvalidShapeError when the sizes do not add up to the dimension, leave nothing for
        'rest', the number of parts does not divide the dimension, or the number of groups not each
        part.
        """
        length = view.rows if self.axis == "rows" else view.columns
        remainder = length - sum(size for size in self.sizes if size != _REST)
        sizes = tuple(remainder if size == _REST else size for size in self.sizes)
        if not sizes:  # equal parts
            sizes = (length // max(1, self.count),) * self.count
        if sum(sizes) != length or min(sizes, default=0) < 1:
            raise InvalidShapeError(
                f"{name}: {length} {self.axis} of view {view} cannot be split into {self.words}"
            )
        if any(size % self.groups for size in sizes):
            raise InvalidShapeError(
                f"{name}: parts of {'+'.join(map(str, sizes))} {self.axis} cannot be spread over "
                f"{self.groups} groups evenly"
            )
        return dataclasses.replace(view, axis=self.axis, sizes=sizes, groups=self.groups)


def effective_shape(shape: Shape) -> Shape:
    """Drop the dimensions of size 1."""
    return tuple(size for size in shape if size != 1)


def matrix_view(shape: Shape, mode: MuonMode) -> MatrixView | None:
    """Return the matrix view of a shape, or None when the mode defines none.

    '2d' accepts only effective rank 2; 'flat' folds all leading dimensions into rows; 'slice' takes
    the last two dimensions as the matrix and the leading ones as a batch.
    """
    effective = effective_shape(shape)
    if len(effective) < 2 or (mode == "2d" and len(effective) > 2):
        return None
    if mode == "flat":
        return MatrixView(1, math.prod(effective[:-1]), effective[-1])
    return MatrixView(math.prod(effective[:-2]), effective[-2], effective[-1])
