"""The largest attention logit of each head, computed in blocks of queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Logits that are in memory at a time.
BLOCK = 2**22


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
    """Return the largest logit ``scale · q · k`` of each head over all pairs that attend to each other.

    Parameters
    ----------
    query, key
        (..., heads, L, head_dim) and (..., key heads, S, head_dim), as in
        ``torch.nn.functional.scaled_dot_product_attention``.
    attn_mask
        Boolean, True where a pair attends, or added to the logits, where only −inf counts; broadcast to
        (..., heads, L, S).
    is_causal
        Query i attends to keys 0 … i only.
    scale
        None takes 1/sqrt(head_dim).
    enable_gqa
        Key head g serves heads/key heads query heads.
    block
        Bound on the logits that are in memory at a time.

    Returns
    -------
    Tensor
        (heads,), float32 or wider; −inf where no pair attends.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    heads, length = query.shape[-3], query.shape[-2]
    wide = torch.promote_types(query.dtype, torch.float32)
    largest = torch.full((heads,), -math.inf, dtype=wide, device=query.device)
    columns = max(1, key.shape[-2] * math.prod(query.shape[:-2]))
    rows = max(1, block // columns)
    for start in range(0, length, rows):
        stop = min(length, start + rows)
        seen = key[..., :stop, :] if is_causal else key  # later keys are masked
        logits = (query[..., start:stop, :] @ seen.mT).to(wide) * scale
        if is_causal:
            allowed = torch.ones(stop - start, seen.shape[-2], dtype=torch.bool, device=query.device).tril_(start)
            logits.masked_fill_(~allowed, -math.inf)
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., start:stop, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., : seen.shape[-2]]
            logits.masked_fill_(~mask if mask.dtype == torch.bool else mask == -math.inf, -math.inf)
        if logits.numel():
            by_head = logits.movedim(-3, 0).flatten(1)
            torch.maximum(largest, by_head.amax(1), out=largest)
    return largest
