"""Reading a pickle as data: calls and classes become records, nothing is imported, called or set.

`pickle.Unpickler` runs code that a pickle names; even with a restricted `find_class` it calls the objects it finds and
sets attributes on them (BUILD). torch's restricted unpickler reads protocol 2 only, and torch writes later ones. Here
Python's own interpreter of opcodes keeps those that build plain values, and those that would run code only record
the request. The caller decides the meaning of a record.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, NamedTuple

#: Most values of a checkpoint besides the elements of tensors; a run writes a few for every parameter.
MOST_VALUES = 10_000_000
_PLAIN = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL"),
)


class Name(NamedTuple):
    """A global: ``module.name``, which is not looked up."""

    module: str
    name: str


@dataclasses.dataclass
class Record:
    """An object that the pickle describes."""

    kind: Name  # the class or function that would make it
    arguments: tuple[Any, ...]  # the arguments of the call
    state: Any = None  # what BUILD would set on the object; None without BUILD


@dataclasses.dataclass
class Pairs:
    """A dict as its keys and values in order: hashing a key could take forever, and records have no hash."""

    items: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


def read_pickle(data: bytes, allowed: Collection[Name]) -> Any:
    """Return the content of a pickle of protocol 2 or later: plain values, lists, tuples, `Pairs`, `Name` and `Record`.

    A few bytes can describe nested tuples of exponential size, which must not be compared, hashed or printed whole.
    `allowed` are the globals that the pickle may mention.

    Raises
    ------
    pickle.UnpicklingError
        When it is damaged, mentions another global, or asks for anything but the above.
    """
    try:
        found = _Reader(data, frozenset(allowed)).load()
        if count_values(found) > MOST_VALUES:
            raise pickle.UnpicklingError(
                "its lists contain one another, and stand for too many values"
            )
        return found
    except (pickle.UnpicklingError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise pickle.UnpicklingError(
            f"the pickle is damaged ({type(error).__name__}: {str(error)[:100]})"
        ) from error


def count_values(value: Any, known: dict[int, float] | None = None) -> float:
    """Count the values in nested containers, shared ones at each use; infinite for a cycle."""
    known = {} if known is None else known
    if not isinstance(value, (dict, list, tuple, set, frozenset, Record, Pairs)):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        if isinstance(value, Record):
            inner: Iterable[Any] = (*value.arguments, value.state)
        elif isinstance(value, Pairs):
            inner = (one for pair in value.items for one in pair)
        else:
            inner = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(count_values(one, known) for one in inner)
    return known[id(value)]


class _Reader(pickle._Unpickler):  # in Python: the memo of the one in C grows to the largest index
    """Interprets the opcodes in `dispatch`, and no other."""

    # Set by the base class in `load`.
    stack: list[Any]
    append: Callable[[Any], None]

    def __init__(self, data: bytes, allowed: frozenset[Name]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Name:
        """Return the name of a global, which is not imported."""
        if Name(module, name) not in self._allowed:
            raise pickle.UnpicklingError(
                f"{module[:80]}.{name[:80]} does not belong in a checkpoint's description"
            )
        return Name(module, name)

    def _record(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Name) or type(arguments) is not tuple:
            raise pickle.UnpicklingError("the pickle calls an object that is not a global")
        self.append(Record(kind, arguments))

    def _set_state(self) -> None:
        state, described = self.stack.pop(), self.stack[-1]
        if not isinstance(described, Record) or described.state is not None or state is None:
            raise pickle.UnpicklingError(
                "state is set on an object that the pickle has not created"
            )
        described.state = state

    def _start_pairs(self) -> None:
        self.append(Pairs())

    dispatch: ClassVar[dict[int, Any]] = {
        **{
            code: pickle._Unpickler.dispatch[code]
            for code in (getattr(pickle, name)[0] for name in _PLAIN)
        },
        pickle.NEWOBJ[0]: _record,
        pickle.REDUCE[0]: _record,
        pickle.BUILD[0]: _set_state,
        pickle.EMPTY_DICT[0]: _start_pairs,
    }
