"""Mutations in vLLM, in eager mode and in this process: modules' forwards, the attention implementation, the sampler."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from vllm.platforms import current_platform

from jetrl.verification import perturb
from jetrl.verification.mutations import Mutation
from jetrl.verification.mutations_trainer import OperatorChange


@contextmanager
def applied(mutation: Mutation, runner) -> Iterator[str | None]:
    """The mutation in vLLM's model runner, of either version. Yields why it cannot be applied, None where it is."""
    modules = dict(runner.model.named_modules())
    with ExitStack() as stack:
        yield _APPLY[mutation.kind](mutation, modules, runner, stack)


def _replace(target: object, name: str, value: object, stack: ExitStack) -> None:
    """An attribute of this one object, until the end."""
    own = vars(target).get(name)
    setattr(target, name, value)
    stack.callback(lambda: delattr(target, name) if own is None else setattr(target, name, own))


def _module(change: Callable) -> Callable:
    """change(module, stock forward) -> forward."""

    def apply(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
        target = modules[mutation.operator]
        _replace(target, "forward", change(target, target.forward), stack)

    return apply


def _norm(compute: Callable) -> Callable:
    def change(module: nn.Module, stock: Callable) -> Callable:
        def forward(x: torch.Tensor, residual: torch.Tensor | None = None):
            hidden = x if residual is None else x + residual
            y = compute(hidden, module.weight, module.variance_epsilon)
            return y if residual is None else (y, hidden)

        return forward

    return change


def _residual(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
    norm = modules[f"{mutation.layer}.post_attention_layernorm"]
    stock = norm.forward

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None):
        hidden = perturb.one_place_off(x + residual)
        return stock(hidden.clone()), hidden

    _replace(norm, "forward", forward, stack)


def _silu(module: nn.Module, stock: Callable) -> Callable:
    return lambda x: perturb.silu_mul_in_one_rounding(*x.chunk(2, dim=-1))


def _operator_in(mutation: Mutation, modules: dict, name: str, change: Callable, stack: ExitStack) -> str | None:
    target = modules[mutation.operator]
    if getattr(target.quant_method, "format", None) is None:
        return "this engine's layer does not run jetrl's operators"
    stock = target.forward

    def forward(x: torch.Tensor):
        with OperatorChange(name, change):
            return stock(x)

    _replace(target, "forward", forward, stack)
    return None


def _table(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
    """In inference mode, in which a forward may have made the cache's copy in another dtype."""
    for module in modules.values():
        if hasattr(module, "cos_sin_cache"):
            cache = module.cos_sin_cache
            with torch.inference_mode():
                stock = cache[3, 0].clone()
                cache[3, 0] *= perturb.BF16_FAULT
            stack.callback(_restore, cache, stock)


@torch.inference_mode()
def _restore(cache: torch.Tensor, value: torch.Tensor) -> None:
    cache[3, 0] = value


def _rotary(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
    """One object serves all layers; only the mutated layer's call is changed."""
    attention = modules[mutation.operator.removesuffix(".rotary")]
    rotary, inside = attention.rotary_emb, []
    stock = rotary.forward

    def forward(positions, query, key=None):
        if not inside:
            return stock(positions, query, key)
        table = rotary._match_cos_sin_cache_dtype(query)[positions.flatten()]
        halves = [t.unsqueeze(1) for t in table.chunk(2, dim=-1)]
        heads = (x.reshape(len(table), -1, rotary.head_size) for x in (query, key))
        q, k = (perturb.rotary_in_one_rounding(x, *halves) for x in heads)
        return q.view(query.shape), k.view(key.shape)

    _replace(rotary, "forward", forward, stack)
    stack.callback(attention.register_forward_pre_hook(lambda m, a: inside.append(True)).remove)
    stack.callback(attention.register_forward_hook(lambda m, a, o: inside.clear()).remove)


def _attention(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> str | None:
    layer = modules[f"{mutation.operator}.attn"]
    impl = layer.impl
    keys_of = _keys_of(impl)
    if keys_of is None:
        return f"the cache of {type(impl).__name__} is not known here"
    stock = impl.forward

    def forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        result = stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if attn_metadata is None:
            return result
        bounds, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if end == start:
                continue
            keys, values = keys_of(kv_cache, attn_metadata.block_table[i], lengths[i])
            seen = torch.arange(lengths[i] - (end - start) + 1, lengths[i] + 1)
            rows = query[start:end].reshape(end - start, -1, impl.head_size)
            parts = perturb.attention_in_parts(rows, keys, values, seen, impl.scale)
            output[start:end] = parts.view(output[start:end].shape)
        return result

    _replace(impl, "forward", forward, stack)
    return None


def _keys_of(impl) -> Callable | None:
    """(cache, pages, tokens) -> keys and values (tokens, KV heads, D); None for a cache of unknown layout."""
    if current_platform.is_cpu():
        from jetrl.integrations.vllm.exact_cpu import RowsImpl

        return _keys_side_by_side if isinstance(impl, RowsImpl) else None
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    return _keys_of_flash if isinstance(impl, FlashAttentionImpl) else None


def _keys_side_by_side(cache: torch.Tensor, pages: torch.Tensor, tokens: int):
    """(blocks, KV heads, tokens of a block, 2 x D): exact_cpu.py."""
    used = pages[: -(-tokens // cache.shape[2])].long()
    both = cache[used].transpose(1, 2).reshape(-1, cache.shape[1], cache.shape[3])[:tokens]
    return both.chunk(2, dim=-1)


def _keys_of_flash(cache: torch.Tensor, pages: torch.Tensor, tokens: int):
    """(blocks, 2, tokens of a block, KV heads, D): vLLM 0.24, FlashAttentionImpl.forward."""
    used = pages[: -(-tokens // cache.shape[2])].long()
    return tuple(t[used].flatten(0, 1)[:tokens] for t in cache.unbind(1))


def _head(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
    processor = next(m for name, m in modules.items() if name.endswith("logits_processor"))

    def forward(lm_head: nn.Module, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = perturb.linear_in_parts(hidden, lm_head.weight, bias)
        return logits[..., : processor.org_vocab_size]

    _replace(processor, "forward", forward, stack)


def _mask(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
    stock = runner.model.compute_logits

    def compute_logits(*args, **kwargs):
        logits = stock(*args, **kwargs)
        logits[..., logits.shape[-1] // 2 :] = float("-inf")
        return logits

    _replace(runner.model, "compute_logits", compute_logits, stack)


def _temperature(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> None:
    target = getattr(runner.sampler, "sampling_states", runner.sampler)  # of the V2 runner, or the V1 sampler
    stock = target.apply_temperature

    def apply_temperature(logits: torch.Tensor, *args, **kwargs):
        result = stock(logits, *args, **kwargs)
        logits.div_(perturb.FAULT)  # both versions divide in place
        return result

    _replace(target, "apply_temperature", apply_temperature, stack)


def _log_softmax(mutation: Mutation, modules: dict, runner, stack: ExitStack) -> str | None:
    if not hasattr(runner.sampler, "sampling_states"):
        stock = runner.sampler.gather_logprobs

        def gather_logprobs(logprobs: torch.Tensor, *args, **kwargs):
            halves = [torch.logsumexp(part, -1, keepdim=True) for part in logprobs.chunk(2, dim=-1)]
            return stock(logprobs - torch.logaddexp(*halves), *args, **kwargs)

        _replace(runner.sampler, "gather_logprobs", gather_logprobs, stack)
        return None
    from jetrl.integrations.vllm import exact_sampler

    if not exact_sampler.shares_sampler(runner.model):
        return "this engine's sampler is vLLM's"

    def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
        columns = [perturb.log_probs_in_parts(logits, ids, ones, logits.shape[1]) for ids in token_ids.unbind(1)]
        return torch.stack(columns, dim=1)

    # The shared sampler looks its function up in its module.
    _replace(exact_sampler, "compute_token_logprobs", compute_token_logprobs, stack)
    return None


_APPLY = {
    "norm": _module(_norm(perturb.norm_in_one_rounding)),
    "norm_parts": _module(_norm(perturb.norm_in_parts)),
    "silu": _module(_silu),
    "linear": lambda m, modules, runner, stack: _operator_in(m, modules, "gemm_nt", perturb.one_scale_off, stack),
    "quantizer": lambda m, modules, runner, stack: _operator_in(
        m, modules, "quantize_tiles", perturb.other_scales, stack
    ),
    "residual": _residual,
    "table": _table,
    "rotary": _rotary,
    "attention": _attention,
    "head": _head,
    "mask": _mask,
    "temperature": _temperature,
    "log_softmax": _log_softmax,
}
