"""The packed backends as transformers' attention functions: a model calls one by `config._attn_implementation`."""

from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from jetrl.attention import sequence_parallel
from jetrl.attention.backends import BACKENDS, Attend
from jetrl.attention.packing import Packing, packing_of, rows_of


def register() -> None:
    """Add the backends to transformers. Idempotent; loads no kernel.

    Their mask is flash-attn's: none for packed sequences, the padding of a padded batch otherwise, which `attention_forward`
    refuses (a name without a mask function would drop it silently).
    """
    for name, attend in BACKENDS.items():
        AttentionInterface.register(name, partial(attention_forward, attend))
        AttentionMaskInterface.register(name, flash_attention_mask)


def attention_forward(
    attend: Attend,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """query (B, H, S, D), key and value (B, Hkv, S, D) -> (B, S, H, D).

    Sequences come from `cu_seq_lens_q` and `max_length_q`, else from `position_ids` (B or 1, S), as VeRL's padding-free
    path passes them; without either, each row is one. Raises ValueError for what no backend computes.
    """
    _refuse(module, query, key, attention_mask, dropout, is_causal, softcap, s_aux)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    exchange = sequence_parallel.active()
    gather = None
    if exchange is not None:
        q, k, v = exchange.heads_for_tokens(q, k, v)
        gather = exchange.gather_positions
    batch, tokens = q.shape[:2]
    if cu_seq_lens_q is not None and max_length_q is not None:
        packing = Packing(cu_seq_lens_q.to(torch.int32), int(max_length_q))
    elif position_ids is not None:
        packing = packing_of(position_ids, batch, gather)
    else:
        packing = rows_of(batch, tokens, q.device)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window - 1
    out = attend(*(t.reshape(-1, *t.shape[2:]) for t in (q, k, v)), packing, scale, window)
    out = out.view(batch, tokens, *out.shape[1:])
    return (out if exchange is None else exchange.tokens_for_heads(out)), None


def _refuse(module, query, key, attention_mask, dropout, is_causal, softcap, s_aux) -> None:
    name = module.config._attn_implementation
    if attention_mask is not None:
        raise ValueError(
            f"attn_implementation={name} takes packed sequences, and this batch is padded; set "
            f"actor_rollout_ref.model.use_remove_padding=true, or attn_implementation=sdpa"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"attn_implementation={name} attends over whole sequences, but got {query.shape[2]} queries for "
            f"{key.shape[2]} keys; call the model with use_cache=False"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    wanted = {"dropout": dropout, "softcap": softcap, "attention sinks": s_aux is not None, "no causality": not causal}
    for what, value in wanted.items():
        if value:
            raise ValueError(
                f"attn_implementation={name} computes no attention with {what}; use attn_implementation=sdpa"
            )
