"""Reading the file of an LMDB database (data format 1, LMDB 0.9) without liblmdb.

liblmdb maps the file and trusts it: a truncated or damaged copy ends the process with SIGBUS or SIGSEGV, and no process
may open a file twice or use it after a fork. This reader goes down the tree for each key, checks every page against
the size of the file, and reads values without mapping them.

`LmdbFile.values` reads many values. For a key on a damaged page it calls `LmdbFile.get`, which raises the error.
"""

from __future__ import annotations

import operator
import os
import struct
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.data.stores.storage import FileWatch, HandleCache, OpenFile

MAGIC = 0xBEEFC0DE
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_BIG_DATA, _OTHER_DATA = 0x01, 0x02 | 0x04
_HEADER = 16  # bytes of a page's header
_NODE = 8  # bytes of a node's header
_MAX_DEPTH = 32
_NO_PAGE = (1 << 64) - 1
_SHORT = struct.Struct("<H").unpack_from
_HEADER_OF_NODE = struct.Struct(
    "<HHHH"
).unpack_from  # length of the value or page, flags, length of the key
_NUMBER = struct.Struct("<Q").unpack_from
_FLAGS_AND_PAGES = struct.Struct("<HI").unpack_from  # from byte 10 of a page of values on
# Pages of keys that stay in memory, 32 MiB: those of a million frames that have pages of their own.
_KEPT_PAGES = 8192
# Branches whose keys stay in memory, about as much: they lead to 300,000 pages of keys or more.
_KEPT_BRANCHES = 2048


class _Branch(NamedTuple):
    """The keys of a branch and the pages behind them; the first page has all smaller keys, too."""

    keys: list[bytes]
    pages: list[int]


class _Node(NamedTuple):
    """An entry of a page: three numbers whose meaning depends on the page, a key, and the byte behind it."""

    low: int
    high: int
    flags: int
    key: bytes
    start: int

    @property
    def page(self) -> int:
        """The page behind a node of a branch."""
        return self.low | self.high << 16 | self.flags << 32


@dataclass(frozen=True)
class Value:
    """The place of a value in the file [bytes]."""

    offset: int
    length: int


class LmdbFile:
    """A database, read-only: ``data.mdb`` or a database in one file. `system` names the data in messages.

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
        self._pages: dict[int, bytes] = {}
        self._branches: dict[int, _Branch] = {}
        self._met: set[int] = set()  # branches that were searched once
        self._watch.check(system, path)
        self._size = os.stat(path).st_size
        self._page_size, self._root, self.entries = self._read_meta()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pages kept in memory out."""
        return {**self.__dict__, "_pages": {}, "_branches": {}, "_met": set()}

    def get(self, key: bytes) -> Value | None:
        """Return the place of a key's value, None where there is no such key."""
        number = self._root
        if number == _NO_PAGE:
            return None
        for _ in range(_MAX_DEPTH):
            page = self._page(number)
            flags = _SHORT(page, 10)[0]
            if not flags & (_BRANCH | _LEAF):
                raise self._damaged(
                    f"page {number} has flags {flags:#x}, expected a branch or a leaf"
                )
            place, count = self._search(number, page, key, first=0 if flags & _BRANCH else -1)
            if place < 0 or count == 0:
                return None
            node = self._node(number, page, place)
            if flags & _LEAF:
                return self._value(number, page, node) if node.key == key else None
            number = node.page
        raise self._damaged(f"the tree is deeper than {_MAX_DEPTH} pages")

    def _search(self, number: int, page: bytes, key: bytes, *, first: int) -> tuple[int, int]:
        """Return the last node of a page whose key is not above `key`, `first` if all are, and the number of nodes.

        The first node of a branch stands for all smaller keys, so `first` is 0 there.
        """
        count = _count(page)
        if count < 0:
            raise self._damaged(
                f"page {number} says that its nodes end at byte {_SHORT(page, 12)[0]}"
            )
        low, high = first, count
        while high - low > 1:
            middle = (low + high) // 2
            if self._key(number, page, middle) <= key:
                low = middle
            else:
                high = middle
        return low, count

    def read(self, value: Value) -> bytes:
        """Return a value; SystemFormatError when the file has changed since it was opened."""
        self._watch.check(self.system, self.path)
        return self._bytes(value.offset, value.length)

    def values(self, keys: Sequence[bytes]) -> list[bytes | memoryview | None]:
        """Return the values of keys, None where there is no such key; fastest for rising keys. Errors as in `read`."""
        self._watch.check(self.system, self.path)
        file = self._opened()
        found: list[bytes | memoryview | None] = []
        page, least, bound = None, b"", b""
        for key in keys:
            if not least <= key < bound:
                page, bound = self._leaf_of(key, file)
                least = key
            value = None if page is None else self._value_in(page, key, file)
            if value is None:
                place = self.get(key)
                value = None if place is None else self._bytes(place.offset, place.length)
            found.append(value)
        return found

    def _leaf_of(self, key: bytes, file: OpenFile) -> tuple[bytes | None, bytes]:
        """Return the leaf that would have a key, None where a page is damaged, and the first key of the next leaf.

        That key is empty behind the last leaf.
        """
        number, bound = self._root, b""
        try:
            for _ in range(_MAX_DEPTH):
                branch = self._branches.get(number)
                if branch is None:
                    page = self._page(number, file)
                    kind = _SHORT(page, 10)[0] & (_BRANCH | _LEAF)
                    if kind != _BRANCH:
                        return (page if kind == _LEAF else None), bound
                    if number not in self._met:  # parsing takes as long as many searches
                        self._met.add(number)
                        place, count = self._search(number, page, key, first=0)
                        if not count:
                            break
                        bound = self._key(number, page, place + 1) if place + 1 < count else bound
                        number = self._node(number, page, place).page
                        continue
                    branch = self._branch(number, page)
                # The key of the first page counts as smaller than all others.
                place = bisect_right(branch.keys, key, 1)
                number = branch.pages[place - 1]
                bound = branch.keys[place] if place < len(branch.keys) else bound
        except SystemFormatError:
            pass
        return None, b""

    def _branch(self, number: int, page: bytes) -> _Branch:
        """Parse a branch, and keep it."""
        count = _count(page)
        if count < 1:
            raise self._damaged(f"branch {number} leads nowhere")
        offsets = struct.unpack_from(f"<{count}H", page, _HEADER)
        if min(offsets) < _HEADER or max(offsets) + _NODE > len(page):
            raise self._damaged(
                f"page {number} has nodes at bytes {min(offsets)} to {max(offsets)}"
            )
        headers = [_HEADER_OF_NODE(page, offset) for offset in offsets]
        ends = [offset + _NODE + header[3] for offset, header in zip(offsets, headers, strict=True)]
        if max(ends) > len(page):
            raise self._damaged(f"page {number} has a key that ends at byte {max(ends)}")
        branch = _Branch(
            [page[offset + _NODE : end] for offset, end in zip(offsets, ends, strict=True)],
            [low | high << 16 | flags << 32 for low, high, flags, _ in headers],
        )
        if not all(map(operator.lt, branch.keys[1:], branch.keys[2:])):
            raise self._damaged(f"the keys of page {number} are not sorted")
        if len(self._branches) >= _KEPT_BRANCHES:
            self._branches.clear()
            self._met.clear()
        self._branches[number] = branch
        self._pages.pop(number, None)
        return branch

    def _value_in(self, page: bytes, key: bytes, file: OpenFile) -> bytes | memoryview | None:
        """Return the value of a key of a leaf; None where it has no such key, or the leaf or the value is damaged."""
        low, high, most = 0, _count(page), len(page) - _NODE
        middle = _distance(
            page, key
        )  # the keys of frames are consecutive numbers: usually this is the place
        while low < high:
            if not low <= middle < high:
                middle = (low + high) // 2
            (offset,) = _SHORT(page, _HEADER + 2 * middle)
            if offset < _HEADER or offset > most:
                return None
            short, long, flags, size = _HEADER_OF_NODE(page, offset)
            value = offset + _NODE + size
            found = page[offset + _NODE : value]
            if found == key:
                break
            low, high = (middle + 1, high) if found < key else (low, middle)
        else:
            return None
        length = short | long << 16
        if not flags:
            return page[value : value + length] if value + length <= len(page) else None
        if flags != _BIG_DATA or value + 8 > len(page):
            return None
        offset = _NUMBER(page, value)[0] * self._page_size
        if offset < 2 * self._page_size or offset + _HEADER + length > self._size:
            return None
        whole = self._read(file, offset, _HEADER + length)
        flags, pages = _FLAGS_AND_PAGES(whole, 10)
        if not flags & _OVERFLOW or pages * self._page_size < _HEADER + length:
            return None
        return memoryview(whole)[_HEADER:]

    def _read_meta(self) -> tuple[int, int, int]:
        """Return page size, root page and number of keys from the newer of the two meta pages."""
        if sys.byteorder != "little":
            raise self._problem(
                "LMDB files are read on little-endian machines only; convert it to HDF5 on another"
            )
        first = self._meta(0)
        page_size = first[0]
        if page_size < 256 or page_size > 1 << 16 or page_size & (page_size - 1):
            raise self._damaged(f"pages of {page_size} bytes")
        newer = max(first, self._meta(page_size), key=lambda meta: meta[3])
        return page_size, newer[1], newer[2]

    def _meta(self, offset: int) -> tuple[int, int, int, int]:
        """Return page size, root, number of keys and transaction of a meta page."""
        page = self._bytes(offset, 152)
        magic, version = struct.unpack_from("<II", page, 16)
        if magic != MAGIC:
            raise self._problem("is not an LMDB database")
        if version != 1:
            raise self._problem(
                f"has LMDB's data format {version}; this reader knows format 1 (LMDB 0.9)"
            )
        (page_size,) = struct.unpack_from("<I", page, 40)
        entries, root, _, transaction = struct.unpack_from("<QQQQ", page, 120)
        return page_size, root, entries, transaction

    def _page(self, number: int, file: OpenFile | None = None) -> bytes:
        page = self._pages.get(number)
        if page is None:
            if number < 2:
                raise self._damaged(f"a link to page {number}")
            if len(self._pages) >= _KEPT_PAGES:
                self._pages.clear()
            page = self._pages[number] = self._bytes(
                number * self._page_size, self._page_size, file
            )
        return page

    def _key(self, number: int, page: bytes, index: int) -> bytes:
        """Return the key of a node of a page."""
        (offset,) = _SHORT(page, _HEADER + 2 * index)
        if offset < _HEADER or offset + _NODE > len(page):
            raise self._damaged(f"page {number} has a node at byte {offset}")
        (size,) = _SHORT(page, offset + 6)
        key = page[offset + _NODE : offset + _NODE + size]
        if len(key) < size:
            raise self._damaged(f"page {number} has a key of {size} bytes at byte {offset}")
        return key

    def _node(self, number: int, page: bytes, index: int) -> _Node:
        """Return a node of a page."""
        key = self._key(number, page, index)
        (offset,) = _SHORT(page, _HEADER + 2 * index)
        low, high, flags = struct.unpack_from("<HHH", page, offset)
        return _Node(low, high, flags, key, offset + _NODE + len(key))

    def _value(self, number: int, page: bytes, node: _Node) -> Value:
        """Return the place of the value of a node of a leaf."""
        length = node.low | node.high << 16
        if node.flags & _OTHER_DATA:
            raise self._problem(
                f"key {node.key!r} is a database of its own, which DeePMD's format does not have"
            )
        if node.start + (8 if node.flags & _BIG_DATA else length) > len(page):
            raise self._damaged(f"the value of {node.key!r} ends beyond page {number}")
        if not node.flags & _BIG_DATA:
            return Value(number * self._page_size + node.start, length)
        # The value has pages of its own.
        (number,) = struct.unpack_from("<Q", page, node.start)
        offset = number * self._page_size
        if number < 2 or offset + _HEADER + length > self._size:
            raise self._damaged(
                f"truncated: the value of {node.key!r} ends at byte {offset + _HEADER + length}"
            )
        flags, pages = struct.unpack_from("<HI", self._bytes(offset, _HEADER), 10)
        if not flags & _OVERFLOW or pages * self._page_size < _HEADER + length:
            raise self._damaged(f"the value of {node.key!r} does not start at page {number}")
        return Value(offset + _HEADER, length)

    def _bytes(self, offset: int, length: int, file: OpenFile | None = None) -> bytes:
        if offset + length > self._size:
            raise self._damaged(f"truncated: bytes {offset} to {offset + length} are missing")
        return self._read(file or self._opened(), offset, length)

    def _opened(self) -> OpenFile:
        try:
            file: OpenFile = self._handles.get(self.path, lambda: OpenFile(self.path))
        except OSError as error:
            raise self._problem(f"cannot be read: {error.strerror or error}") from error
        return file

    def _read(self, file: OpenFile, offset: int, length: int) -> bytes:
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


def _count(page: bytes) -> int:
    """Return the number of nodes of a page, −1 where its header is damaged."""
    (lower,) = _SHORT(page, 12)
    return -1 if lower < _HEADER or lower > len(page) or lower % 2 else int(lower - _HEADER) // 2


def _distance(page: bytes, key: bytes) -> int:
    """Return how much larger a key is than the first one of a leaf, as numbers; −1 where they are none."""
    offset = _SHORT(page, _HEADER)[0] + _NODE
    try:
        return int(key) - int(page[offset : offset + len(key)])
    except ValueError:
        return -1
