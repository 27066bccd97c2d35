"""A plugin of pytest (`-p interpreted`) for processes in which Triton's interpreter runs the kernels.

Triton 3.6's interpreter keeps scalars as arrays of one element and takes `int` of them for the bounds of loops, which
NumPy 2.4 no longer does; here they are read by `item`.
"""

from __future__ import annotations

from triton.runtime import interpreter

_patched = interpreter._patch_lang_tensor


def _with_readable_bounds(tensor, scope):
    _patched(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_readable_bounds
