"""Checks of frozen files before anything in them runs.

Frozen files are programs. Their checksums are verified, and their operators compared with those of
potentials.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepmd_muon.checkpoint_file.archive import ArchiveError, check_members

#: Name of the list of members with their SHA-256 that `dp freeze` adds.
MANIFEST = "deepmd_muon_manifest.json"
#: Name of the checkpoint's model entry that `dp freeze` adds: GPUs compute with it, not with the
#: program.
WEIGHTS = "deepmd_muon_weights.pt"
# Operators of frozen potentials of this package and of deepmd-kit 3.2, and similar mathematical
# ones. None accesses files, processes or memory by address.
_ATEN = """
    abs acos add add_ addcmul addcmul_ addmm all amax amin __and__ any append arange argmax argmin
    argsort asin atan atan2 baddbmm bincount bitwise_and bitwise_not bitwise_or bmm Bool
    broadcast_to bucketize cartesian_prod cat ceil chunk clamp clamp_ clamp_max clamp_min clone
    __contains__ contiguous copy copy_ cos cosh cpu cross cumsum __derive_index detach detach_ diag
    diag_embed diagonal dim div div_ dot einsum elu embedding empty empty_like eq erf erfc exp
    expand expand_as expm1 extend eye fill_ flatten flip Float floor floor_divide floordiv fmod
    format full full_like gather ge gelu __getitem__ grad gt index index_add index_add_ index_copy
    index_copy_ index_put index_put_ index_select insert Int IntImplicit __is__ is_floating_point
    isfinite isinf isnan __isnot__ item items keys layer_norm le leaky_relu len lerp linalg_cross
    linalg_det linalg_inv linalg_inv_ex linalg_norm linalg_solve linalg_vector_norm linear list log
    log10 log1p log2 logical_and logical_not logical_or logical_xor logsumexp lower lt masked_fill
    masked_fill_ masked_select matmul max maximum mean meshgrid min minimum mm mul mul_ mv narrow ne
    neg new_empty new_full new_ones new_zeros nonzero norm __not__ numel ones ones_like __or__ outer
    pad permute pop pow prod __range_length ravel reciprocal relu relu6 remainder repeat
    repeat_interleave requires_grad_ reshape roll round rsqrt rsub ScalarImplicit scatter scatter_
    scatter_add scatter_add_ scatter_reduce searchsorted select selu _set_item sigmoid sigmoid_ sign
    silu sin sinh size slice softmax softplus sort split split_with_sizes sqrt sqrt_ square square_
    squeeze stack startswith std str strip sub sub_ sum t take_along_dim tan tanh tanh_ tensor
    tensor_split tile to topk trace transpose tril triu type_as unbind unflatten unfold unsqueeze
    unsqueeze_ update upper values var var_mean view view_as warn where zero_ zeros zeros_like
"""
_DEEPMD = """
    border_op tabulate_fusion_se_a tabulate_fusion_se_r tabulate_fusion_se_t
    tabulate_fusion_se_t_tebd tabulate_fusion_se_atten
"""
_PRIM = """
    Constant CreateObject DictConstruct Enter EnumValue Exit GetAttr If ListConstruct ListUnpack
    Loop NumToTensor RaiseException SetAttr TupleConstruct TupleIndex TupleSlice TupleUnpack
    Uninitialized abs device dtype is_cuda isinstance max min requires_grad shape tolist
    unchecked_cast unchecked_unwrap_optional
"""
_ALLOWED = frozenset(
    [f"aten::{name}" for name in _ATEN.split()]
    + [f"deepmd::{name}" for name in _DEEPMD.split()]
    + [f"prim::{name}" for name in _PRIM.split()]
)
# torch evaluates default arguments and class attributes when it loads a program; these nodes call
# nothing.
_PASSIVE_NODES = (
    ast.Constant,
    ast.UnaryOp,
    ast.USub,
    ast.Tuple,
    ast.List,
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Load,
    ast.Dict,
)


def manifest_of(content: bytes) -> str:
    """Return the SHA-256 of every member of an archive as JSON.

    torch's descriptions of the archive are omitted.
    """
    return _manifest(_members(content))


def _members(content: bytes) -> dict[str, bytes]:
    """Read all members with torch's reader.

    In a crafted archive, another reader could find other members.
    """
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    return {name: reader.get_record(name) for name in reader.get_all_records()}


def _manifest(members: Mapping[str, bytes]) -> str:
    sums = {
        name: hashlib.sha256(data).hexdigest() for name, data in members.items() if _is_listed(name)
    }
    return json.dumps({"version": 1, "sha256": sums}, sort_keys=True)


def _is_listed(name: str) -> bool:
    if name.startswith(".") or name.endswith(".debug_pkl"):
        return False
    return name != f"extra/{MANIFEST}"


def weights_of(content: bytes) -> Any:
    """Return the checkpoint's model entry in a frozen file; None in files without one.

    Raises
    ------
    ArchiveError
        When the file is damaged.
    """
    members = _checked(content)
    weights = members.get(f"extra/{WEIGHTS}")
    if weights is None:
        return None
    try:
        return torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes may be anything
        raise ArchiveError(f"its part {WEIGHTS} cannot be read") from error


def _checked(content: bytes) -> dict[str, bytes]:
    """Return all members of an archive after verifying that it is complete and undamaged."""
    # torch also loads other formats, which have no checksums.
    if not content.startswith(b"PK\x03\x04"):
        raise ArchiveError("it is not a TorchScript archive")
    check_members(io.BytesIO(content), program=True)
    members = _members(content)
    # Only dp freeze adds a list; other files have checksums of members only.
    manifest = members.get(f"extra/{MANIFEST}")
    if manifest is not None and manifest != _manifest(members).encode():
        raise ArchiveError(
            "it is damaged or was changed: its parts do not fit the list that dp freeze added"
        )
    return members


def load_program(content: bytes, device: torch.device, *, trust: bool) -> torch.jit.ScriptModule:
    """Load a TorchScript program.

    Parameters
    ----------
    content
        The bytes of the file.
    device
        Device of the program's tensors.
    trust
        Accept any operator.

    Raises
    ------
    ArchiveError
        When the file is damaged, or may do more than compute.
    """
    members = _checked(content)
    if not trust:
        _check_before_load(members)
    with warnings.catch_warnings():
        # TorchScript is deprecated, but LAMMPS's plugin needs it.
        warnings.simplefilter("ignore", DeprecationWarning)
        program: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(content), map_location=device)
    if not trust:
        unknown = sorted(set(_operators_of(program)) - _ALLOWED)
        if unknown:
            raise ArchiveError(
                f"it calls {', '.join(unknown[:5])}, which no frozen potential needs; if you trust "
                "who made the file, use --trust (in Python trust=True)"
            )
    return program


def _check_before_load(members: Mapping[str, bytes]) -> None:
    """Refuse code that runs while torch loads a program.

    These are __setstate__, computed defaults and objects of C++ libraries.
    """
    code = {
        name: data
        for name, data in members.items()
        if name.startswith("code/") and name.endswith(".py")
    }
    pickles = [data for name, data in members.items() if name.endswith(".pkl")]
    if any(b"torch.classes" in data for data in (*code.values(), *pickles)):
        raise ArchiveError(
            "it holds objects of C++ libraries; if you trust who made the file, use --trust"
        )
    for name, source in code.items():
        try:
            tree = ast.parse(source.decode())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ArchiveError(f"its part {name} is not TorchScript source") from error
        if any(_runs_early(node) for node in ast.walk(tree)):
            raise ArchiveError(
                f"its part {name} runs while it is loaded; if you trust who made the file, use "
                "--trust"
            )


def _runs_early(node: ast.AST) -> bool:
    """Return whether a definition does more than define while it is loaded."""
    values: list[ast.expr | None]
    if isinstance(node, ast.ClassDef):
        values = [
            member.value for member in node.body if isinstance(member, (ast.Assign, ast.AnnAssign))
        ]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.name in ("__setstate__", "__getstate__"):
            return True
        values = [*node.args.defaults, *node.args.kw_defaults]
    else:
        return False
    for value in values:
        if value is not None:
            for inner_node in ast.walk(value):
                if not isinstance(inner_node, _PASSIVE_NODES):
                    return True
    return False


def _operators_of(program: torch.jit.ScriptModule) -> Iterator[str]:
    """Yield the operators of all methods of a program and of the functions they call."""
    script = program._c
    for name in script._method_names():
        graph = script._get_method(name).inlined_graph  # its nodes live as long as it does
        blocks: list[Any] = [graph]
        while blocks:
            for node in blocks.pop().nodes():
                yield node.kind()
                blocks += node.blocks()
