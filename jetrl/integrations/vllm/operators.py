"""vLLM's RMSNorm, SiLU-mul and rotary layers, run by the trainer's operators where the engine's flow is unified.

vLLM puts a class registered as out-of-tree in the place of its own whenever a model builds one. These turn back into
vLLM's own class in every other engine: without quantization=jetrl, and in a flow whose trainer is a stock one
(fp8_rollout), because that trainer does not call these operators either.

In eager mode, under torch.compile and inside CUDA graphs the same custom operators run, so a token has the same bits.
"""

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, Llama3RotaryEmbedding, RotaryEmbedding

from jetrl.errors import UserError
from jetrl.integrations.vllm.rotary_cache import follow_trainer


def _engine_is_unified() -> bool:
    from jetrl.integrations.vllm.quantization import JetConfig

    config = get_current_vllm_config_or_none()
    return config is not None and isinstance(config.quant_config, JetConfig) and config.quant_config.is_unified(config)


class _Shared:
    """First base of a replacement: what is built in an engine without a unified flow turns into vLLM's own class."""

    stock: type

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if not _engine_is_unified():
            self.__class__ = self.stock


class JetRMSNorm(_Shared, RMSNorm):
    """y = weight * T(h * rsqrt(mean(h^2) + eps)) with h = T(x + residual): the sum is rounded before it is normed."""

    stock = RMSNorm

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if type(self) is JetRMSNorm and (self.variance_size_override is not None or not self.has_weight):
            raise UserError(
                "this model has an RMSNorm over part of its input or without weight, which a unified flow cannot share "
                "with the trainer; run it with precision=bf16 or precision=fp8_rollout"
            )

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        rows = _as_rows(x)
        other = None if residual is None else _as_rows(residual)
        y, hidden, _ = torch.ops.jetrl.rms_norm(rows, other, self.weight, self.variance_epsilon)
        if x.dim() != 2:
            y, hidden = y.view(x.shape), hidden if residual is None else hidden.view(x.shape)
        return y if residual is None else (y, hidden)


class JetSiluAndMul(_Shared, SiluAndMul):
    """T(T(silu(gate)) * up) of an input that holds gate and up side by side."""

    stock = SiluAndMul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, half = _as_rows(x), x.shape[-1] // 2
        y = torch.ops.jetrl.silu_mul(rows[:, :half], rows[:, half:])
        return y if x.dim() == 2 else y.view(*x.shape[:-1], half)


class _Rotary(_Shared):
    """Hugging Face's rotary: every product and the sum rounded to the carrier's dtype."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self, _Rotary):
            config = get_current_vllm_config_or_none()
            if config.quant_config.flow(config).rollout.exact:
                from jetrl.integrations.vllm.exact import fill_rotary_cache

                fill_rotary_cache(self, config.model_config.hf_config)
            else:
                follow_trainer(self, config.model_config.hf_config)

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
        if key is None or not self.is_neox_style:
            raise UserError(
                "this model turns interleaved pairs, or queries alone, which a unified flow cannot share with the trainer; "
                "run it with precision=bf16 or precision=fp8_rollout"
            )
        table, half = self._match_cos_sin_cache_dtype(query), self.rotary_dim // 2
        q, k = torch.ops.jetrl.rotary(
            query.view(-1, query.shape[-1] // self.head_size, self.head_size),
            key.view(-1, key.shape[-1] // self.head_size, self.head_size),
            table[:, :half],
            table[:, half:],
            positions.flatten(),
            False,
        )
        return q.view(query.shape), k.view(key.shape)


class JetRotaryEmbedding(_Rotary, RotaryEmbedding):
    stock = RotaryEmbedding


class JetLlama3RotaryEmbedding(_Rotary, Llama3RotaryEmbedding):
    stock = Llama3RotaryEmbedding


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    # No reshape to the same shape: it would stand in the compiled graph between two operators that fuse.
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


_REPLACED = {
    "RMSNorm": JetRMSNorm,
    "SiluAndMul": JetSiluAndMul,
    "RotaryEmbedding": JetRotaryEmbedding,
    "Llama3RotaryEmbedding": JetLlama3RotaryEmbedding,
}


def register() -> None:
    """Idempotent. A class that another plug-in registered before stays: `check_registered` then stops a unified engine."""
    for name, replacement in _REPLACED.items():
        if name not in op_registry_oot:
            switch = replacement.name  # vLLM's name in `custom_ops`, which registering would overwrite
            CustomOp.register_oot(name=name)(replacement)
            replacement.name = switch


def check_registered() -> None:
    """Raises UserError where a layer that a unified flow shares with the trainer is not jetrl's in this process."""
    for name, replacement in _REPLACED.items():
        found = op_registry_oot.get(name)
        if found is None:
            raise UserError(
                f"jetrl's vLLM plug-in was not loaded in this worker (nothing replaces {name}); install jetrl on every node "
                f"and leave VLLM_PLUGINS unset, or add jetrl to it"
            )
        if found is not replacement:
            raise UserError(
                f"vLLM's {name} is replaced by {found.__module__}.{found.__qualname__}, not by jetrl; remove that plug-in, "
                f"or set VLLM_PLUGINS=jetrl"
            )


def forget_cached_rotary() -> None:
    """vLLM keeps rotary layers by their arguments for the whole process, also from an engine of another flow."""
    _ROPE_DICT.clear()
