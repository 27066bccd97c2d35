"""A plugin of pytest (`-p interpreted`) for processes in which Triton's interpreter runs the kernels.

Triton 3.6's interpreter keeps scalars as arrays of one element and takes `int` of them for the bounds of loops, which
NumPy 2.4 no longer does; here they are read by `item`.

The rest saves about two thirds of the interpreter's time and changes no bit of a result. Its check of overflow
calculates every integer operation a second time, in 64 bits, and drops the comparison unless `debug` is on. It replaces
the functions of `triton.language` at every launch and at every call of a device function; once is enough where nothing
is compiled. It looks dtypes up in a table that it makes for every look-up. Every value gets a type of its own, with its
shape and number of elements as constants and a name in words, though few types differ; here equal types are one object,
and values copy what follows from it. It derives a common type and shape for the operands of every operation, and writes
every number out in that shape; here operands of one type stay as they are, and a number is written once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patched = interpreter._patch_lang_tensor


def _with_readable_bounds(tensor, scope):
    _patched(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_readable_bounds
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

_patch_lang, _patched_for = interpreter._patch_lang, set()


def _patch_lang_once(fn):
    """Replace the functions of those of `triton.language`'s modules that a kernel names, and keep them so."""
    named = tuple(any(value is lang for value in fn.__globals__.values()) for lang in (tl, tl.core))
    if named not in _patched_for:
        _patched_for.add(named)
        _patch_lang(fn)
    return interpreter._LangPatchScope()  # has nothing to restore


interpreter._patch_lang = _patch_lang_once

_look_up = interpreter._get_np_dtype
_look_up_once = functools.cache(_look_up)


def _np_dtype(dtype):
    scalar = dtype.scalar
    return _look_up(scalar) if isinstance(scalar, tl.pointer_type) else _look_up_once(scalar)


interpreter._get_np_dtype = _np_dtype


class _SharedBlockType(tl.block_type):
    """A block type, the same object for the same element type and shape."""

    _made: ClassVar[dict] = {}

    def __new__(cls, element_ty, shape):
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        key = (
            id(element_ty),
            sizes,
        )  # its block types keep the element type, so that no other gets its id
        found = cls._made.get(key)
        if found is None:
            found = cls._made[key] = super().__new__(cls)
        return found

    def __init__(self, element_ty, shape):
        if "name" not in self.__dict__:
            super().__init__(element_ty, shape)

    def __eq__(self, other):
        return self is other or super().__eq__(other)


tl.block_type = tl.core.block_type = _SharedBlockType
_first_init = tl.tensor.__init__


def _init(self, handle, type):
    """Copy what follows from the type from the first value of this type."""
    known = type.__dict__.get("_of_values")
    if known is None:
        _first_init(self, handle, type)
        type._of_values = {key: value for key, value in self.__dict__.items() if key != "handle"}
    else:
        self.__dict__.update(known, handle=handle)


tl.tensor.__init__ = _init
_equal_tuples = tl.tuple.__eq__


def _equal(self, other):
    """Compare without making a second tuple, with types of its elements."""
    if isinstance(other, list | tl.tuple):
        return tl.constexpr(
            self.values == [x.value if isinstance(x, tl.constexpr) else x for x in other]
        )
    return _equal_tuples(self, other)


tl.tuple.__eq__ = _equal


def _patch_attr(obj, name, member, builder, scope):
    """Call a function of the language with the interpreter's semantic, without the check that there is one."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


interpreter._patch_attr = _patch_attr

_check_operands = TritonSemantic.binary_op_type_checking_impl
_written: dict = {}


def _operands(self, lhs, rhs, *checks, **named):
    """Return operands of one type as they are; keep a number as it is written beside a value that stays as it is."""
    division = len(checks) == 4 and checks[3]  # makes float32 of halves
    if not isinstance(lhs, tl.tensor):
        return _check_operands(self, lhs, rhs, *checks, **named)
    if isinstance(rhs, tl.tensor):
        if lhs.type is rhs.type and not division and not lhs.type.scalar.is_ptr():
            return lhs, rhs
        return _check_operands(self, lhs, rhs, *checks, **named)
    key = id(lhs.type), type(rhs), rhs, checks
    found = _written.get(key)
    if found is None:
        own, number = _check_operands(self, lhs, rhs, *checks, **named)
        if own is not lhs:
            return own, number
        number.handle.data.flags.writeable = False
        found = _written[key] = number, lhs.type  # keeps the type, so that no other gets its id
    return lhs, found[0]


TritonSemantic.binary_op_type_checking_impl = _operands
