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
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
_unpack_page_header = struct.Struct("<HH").unpack_from  # flags and the end of the offsets
_unpack_u64 = struct.Struct("<Q").unpack_from
_unpack_node_header = struct.Struct("<HHHH").unpack_from
_unpack_overflow_header = struct.Struct("<HI").unpack_from  # flags and number of pages

# Parsed pages in memory: 100 MiB, the leaves of a million frames whose values are long.
_MAX_PAGES = 8192


class _Meta(NamedTuple):
    """The content of a meta page."""

    page_size: int
    entries: int
    root: int
    transaction: int


class _Page(NamedTuple):
    """A branch or a leaf."""

    number: int
    content: bytes
    is_leaf: bool
    keys: list[bytes]

    def node(self, place: int) -> tuple[int, int, int, int]:
        """Return three shorts of a node's header, and where its value begins."""
        (offset,) = _unpack_u16(self.content, _PAGE_HEADER + 2 * place)
        low, middle, high, key_size = _unpack_node_header(self.content, offset)
        return low, middle, high, offset + _NODE_HEADER + key_size


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
        self._pages: dict[int, _Page] = {}
        self._watch.check(system, path)
        self._size = os.stat(path).st_size
        meta = self._read_meta()
        self._page_size = meta.page_size
        self._root = meta.root
        self.entries = meta.entries

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pages kept in memory out."""
        return {**self.__dict__, "_pages": {}}

    def values(self, keys: Sequence[bytes]) -> list[bytes | memoryview | None]:
        """Return the value of each key, None if it is missing.

        Raises
        ------
        SystemFormatError
            When a page is damaged, or the file has changed since it was opened.
        """
        self._watch.check(self.system, self.path)
        if self._root == _NO_PAGE:
            return [None] * len(keys)
        file = self._open_file()
        return [self._value(key, file) for key in keys]

    # ----- the tree ------------------------------------------------------------------------------

    def _value(self, key: bytes, file: OpenFile) -> bytes | memoryview | None:
        """Go down the tree for a key, and read its value."""
        number = self._root
        for _ in range(_MAX_DEPTH):
            page = self._pages.get(number) or self._parse(number, file)
            if page.is_leaf:
                place = bisect_left(page.keys, key)
                if page.keys[place : place + 1] == [key]:
                    return self._value_at(page, place, file)
                return None
            # The key of the first node counts as smaller than all others.
            place = bisect_right(page.keys, key, lo=1) - 1
            low, middle, high, _ = page.node(place)
            number = low | middle << 16 | high << 32
        raise self._damaged(f"the tree is deeper than {_MAX_DEPTH} pages")

    def _parse(self, number: int, file: OpenFile) -> _Page:
        """Read a branch or a leaf, and keep it in memory."""
        if number < 2:
            raise self._damaged(f"a link to page {number}")
        content = self._read(file, number * self._page_size, self._page_size)
        flags, end = _unpack_page_header(content, 10)
        if not flags & (_BRANCH | _LEAF):
            raise self._damaged(f"page {number} has flags {flags:#x}, expected a branch or a leaf")
        n_nodes = (end - _PAGE_HEADER) // 2
        if not 0 < n_nodes <= (len(content) - _PAGE_HEADER) // 2 or end % 2:
            raise self._damaged(f"page {number} says that its nodes end at byte {end}")
        offsets = struct.unpack_from(f"<{n_nodes}H", content, _PAGE_HEADER)
        keys = []
        for offset in offsets:
            start = offset + _NODE_HEADER
            if not _PAGE_HEADER + _NODE_HEADER <= start <= len(content):
                raise self._damaged(f"page {number} has a node at byte {offset}")
            key_end = start + _unpack_u16(content, start - 2)[0]
            if key_end > len(content):
                raise self._damaged(f"page {number} has a key that ends at byte {key_end}")
            keys.append(content[start:key_end])
        is_leaf = bool(flags & _LEAF)
        if any(key >= following for key, following in pairwise(keys[not is_leaf :])):
            raise self._damaged(f"the keys of page {number} are not sorted")
        if len(self._pages) >= _MAX_PAGES:
            self._pages.clear()
        page = _Page(number, content, is_leaf, keys)
        self._pages[number] = page
        return page

    def _value_at(self, leaf: _Page, place: int, file: OpenFile) -> bytes | memoryview:
        key = leaf.keys[place]
        low, high, flags, start = leaf.node(place)
        length = low | high << 16
        if flags & _SUB_DATABASE:
            raise self._problem(
                f"key {key!r} is a database of its own, which DeePMD's format does not have"
            )
        is_long = flags & _LONG_VALUE
        end = start + (8 if is_long else length)
        if end > len(leaf.content):
            raise self._damaged(f"the value of {key!r} ends beyond page {leaf.number}")
        if not is_long:
            return leaf.content[start:end]

        (number,) = _unpack_u64(leaf.content, start)
        offset = number * self._page_size
        length += _PAGE_HEADER
        if number < 2 or offset + length > self._size:
            raise self._damaged(f"truncated: the value of {key!r} ends at byte {offset + length}")
        content = self._read(file, offset, length)
        flags, n_pages = _unpack_overflow_header(content, 10)
        if not flags & _OVERFLOW or n_pages * self._page_size < length:
            raise self._damaged(f"the value of {key!r} does not start at page {number}")
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
