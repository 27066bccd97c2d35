"""A plugin of pytest (`-p interpreted`) for processes in which Triton's interpreter runs the kernels.

Triton 3.6's interpreter keeps scalars as arrays of one element and takes `int` of them for the bounds of loops, which
NumPy 2.4 no longer does; here they are read by `item`.

The rest saves half of the interpreter's time and changes no bit of a result. Its check of overflow calculates every
integer operation a second time, in 64 bits, and drops the comparison unless `debug` is on. It replaces the functions of
`triton.language` at every launch and at every call of a device function; once is enough where nothing is compiled. It
looks dtypes up in a table that it makes for every look-up.
"""

from __future__ import annotations

import dataclasses
import functools

from triton import language as tl
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
