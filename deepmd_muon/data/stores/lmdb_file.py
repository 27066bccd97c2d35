"""Read the file of an LMDB database (data format 1, LMDB 0.9) without liblmdb.

liblmdb maps the file and trusts it. A damaged copy, or a file that is cut while it is in use, can
end the process with SIGBUS or SIGSEGV. This reader maps nothing: it goes down the tree of pages for
each key, checks every page that it meets, and raises an error.

The format
----------
The file is a row of pages. Numbers are little-endian.

- Pages 0 and 1 are meta pages. The one with the higher transaction number names the root of the
  tree.
- A branch and a leaf begin with a header of 16 bytes, then the offsets of their nodes, two bytes
  each. The header has the flags at byte 10, and at byte 12 the end of these offsets.
- A node is a header of 8 bytes, a key, and in a leaf a value. In a branch the first three shorts of
  the header are the number of a page below. In a leaf the first two are the length of the value,
  and the third holds flags.
- A node of a branch leads to all keys from its key up to the key of the next node. The first node
  leads to all smaller keys, too.
- A value that is too long for a leaf starts on a page of its own, behind a header of 16 bytes. The
  leaf has the number of this page.
"""

from __future__ import annotations

import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.data.stores.storage import FileWatch, HandleCache, OpenFile

MAGIC = 0xBEEFC0DE

# Flags of pages.
_BRANCH = 0x01
_LEAF = 0x02
_OVERFLOW = 0x04  # the page begins a long value
# Flags of the nodes of a leaf.
_LONG_VALUE = 0x01
_SUB_DATABASE = 0x02 | 0x04

_PAGE_HEADER = 16  # [bytes]
_NODE_HEADER = 8  # [bytes]
_META_BYTES = 152  # of a meta page, as far as it is read
_NO_PAGE = (1 << 64) - 1  # root of an empty database
_MAX_DEPTH = 32

_unpack_u16 = struct.Struct("<H").unpack_from
_unpack_u64 = struct.Struct("<Q").unpack_from
_unpack_node_header = struct.Struct("<HHHH").unpack_from
_unpack_overflow_header = struct.Struct("<HI").unpack_from  # flags and number of pages

# Leaves in memory: 32 MiB, the leaves of a million frames whose values are long.
_MAX_LEAVES = 8192
# Parsed branches in memory, about as much; they lead to 300,000 leaves or more.
_MAX_BRANCHES = 2048


class _Meta(NamedTuple):
    """The content of a meta page."""

    page_size: int
    entries: int
    root: int
    transaction: int


class _Branch(NamedTuple):
    """A parsed branch."""

    keys: list[bytes]
    pages: list[int]


class _Leaf(NamedTuple):
    """A leaf as it is in the file."""

    number: int
    page: bytes
    n_nodes: int
    first_number: int  # the first key, if it is a number
    end: bytes  # first key of the next leaf; empty if there is none


class _Node(NamedTuple):
    """A node of a leaf."""

    key: bytes
    length: int  # of the value
    flags: int
    value_offset: int  # in the page


class LmdbFile:
    """A database, read-only.

    Parameters
    ----------
    system
        Name of the data in messages.
    path
        ``data.mdb``, or a database in one file.
    handles
        Keeps the file open.

    Attributes
    ----------
    entries
        Number of keys.

    Raises
    ------
    SystemFormatError
        When the file is not an LMDB database, is truncated, or its pages contradict each other.
    """

    def __init__(self, system: str, path: str, handles: HandleCache) -> None:
        self.system = system
        self.path = path
        self._handles = handles
        self._watch = FileWatch()
        self._leaves: dict[int, _Leaf] = {}
        self._branches: dict[int, _Branch] = {}
        self._watch.check(system, path)
        self._size = os.stat(path).st_size
        meta = self._read_meta()
        self._page_size = meta.page_size
        self._root = meta.root
        self.entries = meta.entries

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pages kept in memory out."""
        return {**self.__dict__, "_leaves": {}, "_branches": {}}

    def values(self, keys: Sequence[bytes]) -> list[bytes | memoryview | None]:
        """Return the value of each key, None if it is missing; fastest for rising keys.

        Raises
        ------
        SystemFormatError
            When a page is damaged, or the file has changed since it was opened.
        """
        self._watch.check(self.system, self.path)
        if self._root == _NO_PAGE:
            return [None] * len(keys)
        file = self._open_file()
        values: list[bytes | memoryview | None] = []
        leaf = None
        previous_key = b""
        for key in keys:
            # Keys between the previous one and the end of its leaf are in the same leaf.
            if leaf is None or not previous_key <= key < leaf.end:
                leaf = self._find_leaf(key, file)
                previous_key = key
            node = self._find_node(leaf, key)
            values.append(None if node is None else self._value(leaf, node, file))
        return values

    # ----- the tree ------------------------------------------------------------------------------

    def _find_leaf(self, key: bytes, file: OpenFile) -> _Leaf:
        """Return the leaf that has a key, if any leaf has it."""
        number = self._root
        end = b""
        for _ in range(_MAX_DEPTH):
            branch = self._branches.get(number)
            if branch is None:
                leaf = self._leaves.get(number)
                if leaf is not None:
                    return leaf
                page = self._read_page(number, file)
                n_nodes = self._node_count(number, page)
                flags = _unpack_u16(page, 10)[0]
                if flags & _LEAF:
                    leaf = _Leaf(number, page, n_nodes, _first_number(page, len(key)), end)
                    _remember(self._leaves, number, leaf, _MAX_LEAVES)
                    return leaf
                if not flags & _BRANCH:
                    raise self._damaged(
                        f"page {number} has flags {flags:#x}, expected a branch or a leaf"
                    )
                branch = self._parse_branch(number, page, n_nodes)
                _remember(self._branches, number, branch, _MAX_BRANCHES)
            # The key of the first node counts as smaller than all others.
            place = bisect_right(branch.keys, key, lo=1)
            number = branch.pages[place - 1]
            if place < len(branch.keys):
                end = branch.keys[place]
        raise self._damaged(f"the tree is deeper than {_MAX_DEPTH} pages")

    def _parse_branch(self, number: int, page: bytes, n_nodes: int) -> _Branch:
        if n_nodes == 0:
            raise self._damaged(f"branch {number} leads nowhere")
        offsets = np.frombuffer(page, "<u2", n_nodes, _PAGE_HEADER).astype(np.int64)
        if offsets.min() < _PAGE_HEADER or offsets.max() + _NODE_HEADER > len(page):
            raise self._damaged(
                f"page {number} has nodes at bytes {offsets.min()} to {offsets.max()}"
            )
        header_bytes = offsets[:, None] + np.arange(_NODE_HEADER)
        headers = np.frombuffer(page, np.uint8)[header_bytes].view("<u2").astype(np.int64)
        pages = headers[:, 0] | headers[:, 1] << 16 | headers[:, 2] << 32
        starts = offsets + _NODE_HEADER
        ends = starts + headers[:, 3]
        if ends.max() > len(page):
            raise self._damaged(f"page {number} has a key that ends at byte {ends.max()}")
        keys = [page[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        if any(key >= following for key, following in pairwise(keys[1:])):
            raise self._damaged(f"the keys of page {number} are not sorted")
        return _Branch(keys, pages.tolist())

    def _find_node(self, leaf: _Leaf, key: bytes) -> _Node | None:
        """Return the node of a key, None if the leaf lacks it."""
        low = 0
        high = leaf.n_nodes
        # The keys of frames are consecutive numbers: usually this is the place.
        place = int(key) - leaf.first_number if key.isdigit() else -1
        while low < high:
            if not low <= place < high:
                place = (low + high) // 2
            node = self._node(leaf, place)
            if node.key == key:
                return node
            if node.key < key:
                low = place + 1
            else:
                high = place
        return None

    def _node_count(self, number: int, page: bytes) -> int:
        end = _unpack_u16(page, 12)[0]
        if not _PAGE_HEADER <= end <= len(page) or end % 2:
            raise self._damaged(f"page {number} says that its nodes end at byte {end}")
        return (int(end) - _PAGE_HEADER) // 2

    def _node(self, leaf: _Leaf, place: int) -> _Node:
        page = leaf.page
        (offset,) = _unpack_u16(page, _PAGE_HEADER + 2 * place)
        if offset < _PAGE_HEADER or offset + _NODE_HEADER > len(page):
            raise self._damaged(f"page {leaf.number} has a node at byte {offset}")
        low, high, flags, key_size = _unpack_node_header(page, offset)
        key_start = offset + _NODE_HEADER
        key_end = key_start + key_size
        if key_end > len(page):
            raise self._damaged(
                f"page {leaf.number} has a key of {key_size} bytes at byte {offset}"
            )
        return _Node(page[key_start:key_end], low | high << 16, flags, key_end)

    def _value(self, leaf: _Leaf, node: _Node, file: OpenFile) -> bytes | memoryview:
        if node.flags & _SUB_DATABASE:
            raise self._problem(
                f"key {node.key!r} is a database of its own, which DeePMD's format does not have"
            )
        is_long = node.flags & _LONG_VALUE
        end = node.value_offset + (8 if is_long else node.length)
        if end > len(leaf.page):
            raise self._damaged(f"the value of {node.key!r} ends beyond page {leaf.number}")
        if not is_long:
            return leaf.page[node.value_offset : end]

        (number,) = _unpack_u64(leaf.page, node.value_offset)
        offset = number * self._page_size
        length = _PAGE_HEADER + node.length
        if number < 2 or offset + length > self._size:
            raise self._damaged(
                f"truncated: the value of {node.key!r} ends at byte {offset + length}"
            )
        content = self._read(file, offset, length)
        flags, n_pages = _unpack_overflow_header(content, 10)
        if not flags & _OVERFLOW or n_pages * self._page_size < length:
            raise self._damaged(f"the value of {node.key!r} does not start at page {number}")
        return memoryview(content)[_PAGE_HEADER:]

    # ----- the file ------------------------------------------------------------------------------

    def _read_meta(self) -> _Meta:
        """Return the newer of the two meta pages."""
        if sys.byteorder != "little":
            raise self._problem(
                "LMDB files are read on little-endian machines only; convert it to HDF5 on another"
            )
        meta_0 = self._meta_at(0)
        page_size = meta_0.page_size
        if not 256 <= page_size <= 1 << 16 or page_size & (page_size - 1):
            raise self._damaged(f"pages of {page_size} bytes")
        meta_1 = self._meta_at(page_size)
        newer = meta_1 if meta_1.transaction > meta_0.transaction else meta_0
        # The page size of the first page, which was checked.
        return newer._replace(page_size=page_size)

    def _meta_at(self, offset: int) -> _Meta:
        page = self._read(self._open_file(), offset, _META_BYTES)
        magic, version = struct.unpack_from("<II", page, 16)
        if magic != MAGIC:
            raise self._problem("is not an LMDB database")
        if version != 1:
            raise self._problem(
                f"has LMDB's data format {version}; this reader knows format 1 (LMDB 0.9)"
            )
        (page_size,) = struct.unpack_from("<I", page, 40)
        entries, root, _, transaction = struct.unpack_from("<QQQQ", page, 120)
        return _Meta(page_size, entries, root, transaction)

    def _read_page(self, number: int, file: OpenFile) -> bytes:
        if number < 2:
            raise self._damaged(f"a link to page {number}")
        return self._read(file, number * self._page_size, self._page_size)

    def _open_file(self) -> OpenFile:
        try:
            file: OpenFile = self._handles.get(self.path, lambda: OpenFile(self.path))
        except OSError as error:
            raise self._problem(f"cannot be read: {error.strerror or error}") from error
        return file

    def _read(self, file: OpenFile, offset: int, length: int) -> bytes:
        if offset + length > self._size:
            raise self._damaged(f"truncated: bytes {offset} to {offset + length} are missing")
        try:
            return file.read_bytes(length, offset)
        except OSError as error:
            raise self._problem(f"cannot be read: {error.strerror or error}") from error

    def _problem(self, problem: str) -> SystemFormatError:
        return SystemFormatError(self.system, Path(self.path).name, problem)

    def _damaged(self, problem: str) -> SystemFormatError:
        return self._problem(
            f"damaged ({problem}; the file has {self._size} bytes); copy or write it again"
        )


def _remember(cache: dict[int, Any], number: int, page: _Branch | _Leaf, limit: int) -> None:
    """Keep a page in a cache, which is emptied when it is full."""
    if len(cache) >= limit:
        cache.clear()
    cache[number] = page


def _first_number(page: bytes, key_size: int) -> int:
    """Return the first key of a leaf as a number, if it has this size; 0 if it is none."""
    start = _unpack_u16(page, _PAGE_HEADER)[0] + _NODE_HEADER
    key = page[start : start + key_size]
    return int(key) if key.isdigit() else 0
