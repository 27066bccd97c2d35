"""Reading a pickle as data: calls and classes become records, nothing is imported, called or set.

`pickle.Unpickler` runs code that a pickle names; even with a restricted `find_class` it calls the objects it finds and
sets attributes on them (BUILD). Here the opcodes are interpreted one by one, and those that would run code only record
the request. The caller decides the meaning of a record.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import pickletools
from collections.abc import Callable, Collection, Iterable
from typing import Any

# The pickler nests a mark per container. torch's descriptions need about ten.
_MAX_MARKS = 100
#: Values that a checkpoint may stand for besides those of tensors: a few for every parameter.
MOST_VALUES = 10_000_000
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_WITHOUT_EFFECT = ("PROTO", "FRAME")
_TAKE_ARGUMENT = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)


@dataclasses.dataclass(frozen=True)
class Name:
    """A global: ``module.name``, which is not looked up."""

    module: str
    name: str


@dataclasses.dataclass
class Record:
    """An object that the pickle describes.

    Attributes
    ----------
    kind
        The class or function that would make it.
    arguments
        The arguments of the call.
    state
        What would be set on it; None where the pickle sets nothing.
    """

    kind: Name
    arguments: tuple[Any, ...]
    state: Any = None


@dataclasses.dataclass
class Pairs:
    """A dict as its keys and values in order: keys that are records have no hash."""

    items: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


def read_pickle(data: bytes, allowed: Collection[Name]) -> Any:
    """Return the content of a pickle: plain values, lists, tuples, `Pairs` and `Record`.

    Parameters
    ----------
    data
        The pickle, of protocol 2 or later.
    allowed
        The globals that it may mention.

    Raises
    ------
    pickle.UnpicklingError
        When it is damaged, mentions another global, or asks for anything but the above.
    """
    machine = _Machine(frozenset(allowed))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                result = machine.result()
                if count_values(result) > MOST_VALUES:
                    raise pickle.UnpicklingError("its lists contain one another, and stand for too many values")
                return result
            machine.do(opcode.name, argument)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeError, RecursionError) as error:
        raise pickle.UnpicklingError(f"the pickle is damaged ({type(error).__name__}: {error})") from error
    raise pickle.UnpicklingError("the pickle has no end")


def count_values(value: Any, known: dict[int, float] | None = None) -> float:
    """Count the values in containers, shared ones at each use; infinite in a circle."""
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


class _Machine:
    """The stack and memo of a pickle."""

    def __init__(self, allowed: frozenset[Name]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """Return the object on the stack at the end."""
        if self._marks or len(self._stack) != 1:
            raise pickle.UnpicklingError("the pickle ends in the middle of a value")
        return self._stack[0]

    def do(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        stack = self._stack
        if name in _WITHOUT_EFFECT:
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TAKE_ARGUMENT:
            stack.append(argument)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "EMPTY_DICT":
            stack.append(Pairs())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple(self._pop() for _ in range(count))[::-1])
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"):
            self._describe(name, argument)
        else:
            self._fill(name)

    def _pop(self) -> Any:
        return self._stack.pop()

    def _fill(self, name: str) -> None:
        """Carry out an opcode that opens or fills a container."""
        if name == "MARK":
            if len(self._marks) == _MAX_MARKS:
                raise pickle.UnpicklingError(f"values are nested deeper than {_MAX_MARKS}")
            self._marks.append(self._stack)
            self._stack = []
            return
        if name in ("TUPLE", "APPENDS", "SETITEMS"):
            found, self._stack = self._stack, self._marks.pop()
        elif name in ("APPEND", "SETITEM"):
            found = [self._pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
        else:
            raise pickle.UnpicklingError(f"opcode {name} does not belong into a checkpoint's description")
        if name == "TUPLE":
            self._stack.append(tuple(found))
            return
        target = self._stack[-1]
        if name.startswith("APPEND") and isinstance(target, list):
            target.extend(found)
        elif name.startswith("SETITEM") and isinstance(target, Pairs) and len(found) % 2 == 0:
            target.items.extend(zip(found[::2], found[1::2], strict=True))
        else:
            raise pickle.UnpicklingError(f"opcode {name} meets a {type(target).__name__}")

    def _describe(self, name: str, argument: Any) -> None:
        """Note a global, an object made from one, or the state of such an object."""
        if name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            self._stack.append(self._name(module, attribute))
            return
        second, first = self._pop(), self._pop()
        if name == "STACK_GLOBAL":
            self._stack.append(self._name(first, second))
        elif name == "BUILD":
            if not isinstance(first, Record) or first.state is not None or second is None:
                raise pickle.UnpicklingError("state is set on an object that the pickle has not created")
            first.state = second
            self._stack.append(first)
        elif isinstance(first, Name) and isinstance(second, tuple):
            self._stack.append(Record(first, second))
        else:
            raise pickle.UnpicklingError(f"opcode {name} calls an object that is not a global")

    def _name(self, module: Any, name: Any) -> Name:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise pickle.UnpicklingError("a global is named by other than text")
        if Name(module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module[:80]}.{name[:80]} does not belong into a checkpoint's description")
        return Name(module, name)
