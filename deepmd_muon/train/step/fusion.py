"""A function of tensors as a program of fused kernels, by torch's compiler.

It is imported only if a step is compiled: torch's compiler takes seconds to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Batches of at least so many products of matrices with at most so long sides are no products of a
# library. Sums of at most so many terms are unrolled.
_MANY = 512
_LONGEST_SIDE = 32
_MOST_TERMS = 16
_SETTINGS: dict[str, Any] = {
    # Draw by torch's generator, as steps that are not compiled do.
    "fallback_random": True,
    # Try one shape of blocks: timing several takes a minute.
    "triton.autotune_pointwise": False,
}
# In the keys of programs on disk; to be counted up if the lowering below changes.
_VERSION = "deepmd_muon 1"
_INDEX_ADD = torch.ops.aten.index_add.default
_BMM = torch.ops.aten.bmm.default
_SUM = torch.ops.aten.sum.dim_IntList
_LIBRARY_PRODUCT = lowerings[_BMM]


def fused(
    function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return a function of tensors as a program for arguments of these shapes.

    It may differentiate inside, and draw random numbers, but not branch on numbers. The program
    empties its list of arguments.
    """
    # The compiler keeps programs on disk only of graphs with an environment for shapes.
    without_numbers = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    examples = [without_numbers.from_tensor(x, static_shapes=True) for x in arguments]
    with config.patch(_SETTINGS), without_numbers, torch.no_grad():
        trace = make_fx(
            dispatch_functionalize(function),
            decomposition_table={**select_decomp_table(), _INDEX_ADD: _index_add},
            _allow_non_fake_inputs=True,
        )
        traced = trace(*examples)
        traced.graph.eliminate_dead_code()
        graph = fx_graph_cse(traced.graph)
        (output,) = graph.find_nodes(op="output")
        # Results have the strides that the function gives them.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        with (
            tracing(TracingContext(without_numbers)),
            mock.patch.dict(lowerings, {_BMM: _product}),
            torch.compiler.config.patch(cache_key_tag=_VERSION),  # type: ignore[attr-defined]
        ):
            program: Callable[[list[Tensor]], Sequence[Tensor]] = compile_fx.compile_fx_inner(
                GraphModule(traced, graph), examples, is_inference=True
            )
    return program


def _index_add(
    base: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """Add rows in float32 where the compiler would leave bfloat16 to a kernel of its own."""
    wide = torch.promote_types(base.dtype, torch.float32)
    indices = [None] * (dim % base.dim()) + [index]
    rows = source.to(wide) if alpha == 1 else source.to(wide) * alpha
    total: Tensor = torch.ops.aten.index_put(base.to(wide), indices, rows, True)
    return total.to(base.dtype)


def _product(a: TensorBox, b: TensorBox, **options: Any) -> TensorBox:
    """Lower a @ b of batches of matrices: small ones to sums, others to the library's product.

    Rotations of edges are 10^4 products of 9 x 9 with 9 x 32 numbers. A library's kernels are made
    for large matrices; sums fuse with the operations that use them.
    """
    batch, rows, inner = map(int, a.get_size())
    columns = int(b.get_size()[2])
    if inner > 1 and (batch < _MANY or max(rows, inner, columns) > _LONGEST_SIDE):
        return _LIBRARY_PRODUCT(a, b, **options)
    # Otherwise each term would compute its factors anew.
    a.realize()
    b.realize()
    load_a, load_b = a.make_loader(), b.make_loader()

    def term(matrix: Any, row: Any, k: Any, column: Any) -> Any:
        return ops.mul(load_a([matrix, row, k]), load_b([matrix, k, column]))

    def entry(index: Sequence[Any]) -> Any:
        matrix, row, column = index
        terms = [term(matrix, row, k, column) for k in range(inner)]
        return functools.reduce(ops.add, terms)

    kind = {"device": a.get_device(), "dtype": a.get_dtype()}
    if inner <= _MOST_TERMS:
        return Pointwise.create(inner_fn=entry, ranges=[batch, rows, columns], **kind)
    terms = Pointwise.create(
        inner_fn=lambda index: term(*index), ranges=[batch, rows, inner, columns], **kind
    )
    return lowerings[_SUM](terms, [2])
