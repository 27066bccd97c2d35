"""The largest attention logit of each head, computed in blocks and recorded by forward hooks."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepmd_muon.optim.errors import QKClipError
from deepmd_muon.optim.qk_clip.layers import QKClip, normalizations
from deepmd_muon.optim.routing.routes import canonical_name

BLOCK = 2**22  # bound on the logits in memory at a time
_UNSEEN = (
    "calls no scaled_dot_product_attention, or is compiled; give its maxima to step(qk_logits=...)"
)
_MHA = inspect.signature(nn.MultiheadAttention.forward)


@torch.no_grad()
def max_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    block: int = BLOCK,
) -> Tensor:
    """Return the largest logit ``scale · q · k`` of each head over all attending pairs.

    Parameters
    ----------
    query, key
        (..., heads, L, head_dim) and (..., key heads, S, head_dim), as in
        ``torch.nn.functional.scaled_dot_product_attention``.
    attn_mask
        Boolean, True where a pair attends; or additive, of which only −inf counts. It broadcasts to
        (..., heads, L, S).
    is_causal
        Query i attends to keys 0 … i only.
    scale
        Factor of the logits; None means 1/sqrt(head_dim).
    enable_gqa
        Key head g serves heads/key heads query heads.
    block
        Bound on the logits that are in memory at a time.

    Returns
    -------
    Tensor
        (heads,), float32 or wider; −inf where no pair attends.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    heads = query.shape[-3]
    length = query.shape[-2]
    wide = torch.promote_types(query.dtype, torch.float32)
    largest = torch.full((heads,), -math.inf, dtype=wide, device=query.device)
    logits_per_query = max(1, key.shape[-2] * math.prod(query.shape[:-2]))
    n_queries = max(1, block // logits_per_query)
    for start in range(0, length, n_queries):
        stop = min(length, start + n_queries)
        seen_keys = key[..., :stop, :] if is_causal else key  # later keys are masked
        # (..., heads, stop − start, seen keys)
        logits = (query[..., start:stop, :] @ seen_keys.mT).to(wide) * scale
        if is_causal:
            attends = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device)
            logits.masked_fill_(~attends.tril_(start), -math.inf)
        if attn_mask is not None:
            mask = attn_mask
            if mask.shape[-2] != 1:
                mask = mask[..., start:stop, :]
            if mask.shape[-1] != 1:
                mask = mask[..., : seen_keys.shape[-2]]
            is_masked = ~mask if mask.dtype == torch.bool else mask == -math.inf
            logits.masked_fill_(is_masked, -math.inf)
        if logits.numel():
            by_head = logits.movedim(-3, 0).flatten(1)
            torch.maximum(largest, by_head.amax(1), out=largest)
    return largest


class LogitRecorder:
    """Record the largest attention logit of each head in training forward passes of a model.

    It supports torch.nn.MultiheadAttention and modules that call ``scaled_dot_product_attention``.
    Neither returns its logits, so the recorder computes them again, in blocks. If a module computes
    attention otherwise, pass its maxima to ``step(qk_logits=...)``. ::

        recorder = LogitRecorder(model, clip, every=8)
        ...
        optimizer.step(qk_logits=recorder.take())

    Parameters
    ----------
    model
        A model with submodules of the names of `clip`'s layers.
    clip
        The layers.
    every
        Record only in one of so many steps, beginning with the first; `take` ends a step.
    block
        Bound on the logits that are in memory at a time.

    Raises
    ------
    QKClipError
        When the model has no such submodule or normalizes queries or keys; in a forward pass, when
        a module does not call ``scaled_dot_product_attention`` or has another number of heads.
    """

    def __init__(
        self, model: nn.Module, clip: QKClip, *, every: int = 1, block: int = BLOCK
    ) -> None:
        modules = {canonical_name(name): module for name, module in model.named_modules()}
        layers = clip.layers
        problems = [
            f"layers: the model has no module {layer.name!r}"
            for layer in layers
            if layer.name not in modules
        ]
        problems += [problem for layer in layers for problem in normalizations(layer.name, modules)]
        if every < 1:
            problems.append(f"every: must be >= 1; found {every}")
        if problems:
            raise QKClipError(problems)
        self._every = every
        self._block = block
        self._steps = 0
        self._largest: dict[str, Tensor] = {}
        self._heads = {layer.name: layer.heads for layer in layers}
        self._open: list[_SeenAttention] = []
        self._hooks: list[Any] = []
        for layer in layers:
            self._add_hooks(layer.name, modules[layer.name])

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        # `prepend`: before FSDP's hook, which frees the whole weights.
        if isinstance(module, nn.MultiheadAttention):
            after_mha = functools.partial(self._after_mha, name)
            self._hooks.append(
                module.register_forward_hook(after_mha, prepend=True, with_kwargs=True)
            )
            return
        before = functools.partial(self._before, name)
        after = functools.partial(self._after, name)
        self._hooks.append(module.register_forward_pre_hook(before))
        # `always_call`: a forward pass that raises must not leave its mode open.
        self._hooks.append(
            module.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=True)
        )

    def take(self) -> dict[str, Tensor] | None:
        """Return the maxima recorded since the last call, and begin the next step.

        They are (heads,) by layer; None if none were recorded.
        """
        largest = self._largest
        self._largest = {}
        self._steps += 1
        return largest or None

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _recording(self, module: nn.Module) -> bool:
        return module.training and self._steps % self._every == 0

    def _record(
        self, name: str, query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> None:
        """Include one call of attention in the maxima; the arguments are those of `max_logits`."""
        largest = max_logits(query, key, attn_mask, block=self._block, **options)
        if len(largest) != self._heads[name]:
            problem = f"its attention has {len(largest)} heads, declared are {self._heads[name]}"
            raise QKClipError([f"{name}: {problem}"])
        if name in self._largest:
            largest = torch.maximum(self._largest[name], largest)
        self._largest[name] = largest

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        if self._recording(module):
            self._open.append(_SeenAttention(functools.partial(self._record, name)))
            self._open[-1].__enter__()

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._open and self._recording(module):
            seen = self._open.pop()
            seen.__exit__(None, None, None)
            if not seen.calls and output is not None:  # None: the forward pass has raised
                raise QKClipError([f"{name}: {type(module).__name__} {_UNSEEN}"])

    @torch.no_grad()
    def _after_mha(
        self, name: str, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any
    ) -> None:
        if not self._recording(module):
            return
        if module.bias_k is not None:
            raise QKClipError(
                [f"{name}: add_bias_kv adds a key that no row makes; leave this layer out"]
            )
        arguments = _MHA.bind(module, *args, **kwargs).arguments
        weights: Sequence[Tensor] = (module.q_proj_weight, module.k_proj_weight)
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)[:2]
        biases: Sequence[Tensor | None] = (None, None)
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)[:2]
        heads = []  # of queries and keys, (batch, heads, length, head_dim)
        for kind, weight, bias in zip(("query", "key"), weights, biases, strict=True):
            x = F.linear(_batch_first(module, arguments[kind]), weight, bias)
            heads.append(x.unflatten(-1, (module.num_heads, -1)).transpose(-2, -3))
        query, key = heads
        self._record(name, query, key, _mask(module, arguments, len(query)))


class _SeenAttention(TorchFunctionMode):
    """Pass the arguments of each call of ``scaled_dot_product_attention`` to a function."""

    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self._record = record
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            self._record(**_attention_arguments(*args, **kwargs))
        return func(*args, **kwargs)


def _attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Return the arguments of ``scaled_dot_product_attention`` that determine the logits."""
    return {
        "query": query,
        "key": key,
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Return queries or keys as (batch, length, features)."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _mask(module: nn.MultiheadAttention, arguments: Mapping[str, Any], batch: int) -> Tensor | None:
    """Return the caller's masks as one, True where a pair attends.

    It broadcasts to (batch, heads, L, S). In this module True means masked, and is_causal needs
    attn_mask, too.
    """
    attends = None
    mask = arguments.get("attn_mask")
    if mask is not None:
        attends = ~mask if mask.dtype == torch.bool else mask != -torch.inf
        if mask.ndim == 3:
            attends = attends.view(batch, module.num_heads, *mask.shape[1:])
    padding = arguments.get("key_padding_mask")
    if padding is not None:
        keys = ~padding if padding.dtype == torch.bool else padding != -torch.inf
        keys = keys.view(-1, 1, 1, keys.shape[-1])
        attends = keys if attends is None else attends & keys
    return attends
