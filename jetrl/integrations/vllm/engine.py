"""What jetrl changes in the settings of a vLLM engine that asked for it, so that the user need not know of them.

Nothing needs to be done about vLLM's UE8M0 scales (VLLM_USE_DEEP_GEMM_E8M0, on by default), its switch of GEMM kernels at
32 rows or its DeepGEMM warm-up: they live in vLLM's own FP8 layers, none of which is in such an engine, and jetrl's GEMM
tells DeepGEMM at every call to take the scales as they are.
"""

import importlib.util
import os

import torch
from vllm.config import AttentionConfig, VllmConfig
from vllm.platforms import current_platform

from jetrl.errors import UserError
from jetrl.integrations.protocol import announce
from jetrl.integrations.vllm import operators

_PASS_KEY = "post_grad_custom_post_pass"

_UNSPLIT = 1  # of attention_config.flash_attn_max_num_splits_for_cuda_graph


def prepare_environment() -> None:
    """Before workers start, which inherit it: vLLM's sampler takes flashinfer for granted and fails without it."""
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def prepare(config: VllmConfig, unified: bool) -> None:
    """In a worker, while the model is built and nothing has been compiled. Idempotent.

    The pass is part of the configuration's hash, by its uuid, so compiled graphs of other versions are not taken.
    """
    transfer = config.weight_transfer_config
    if transfer is not None and transfer.backend == "verl_delta_ipc":
        raise UserError(
            "checkpoint_engine.backend=delta_sharded is not supported by jetrl: it patches weights that the rollout keeps "
            "as FP8 only; set actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
        )
    passes = config.compilation_config.pass_config
    # vLLM's fusions into its own quantizers round elsewhere; none of those quantizers should be left, and none is looked for.
    passes.fuse_norm_quant = passes.fuse_act_quant = False
    if not unified:
        return
    operators.check_registered()
    operators.forget_cached_rotary()
    from jetrl.integrations.vllm.fusion import SharedOperatorFusion

    inductor = config.compilation_config.inductor_compile_config
    found = inductor.setdefault(_PASS_KEY, SharedOperatorFusion())
    if not isinstance(found, SharedOperatorFusion):
        raise UserError(
            f"compilation_config sets {_PASS_KEY}, which jetrl needs for its own fusions; remove that key, or set mode=0"
        )
    if config.quant_config.flow(config).rollout.exact:
        from jetrl.integrations.vllm import exact

        exact.prepare(config)
    else:
        keep_keys_whole(config)


def keep_keys_whole(config: VllmConfig) -> None:
    """Decode with the keys in one piece, as the trainer's attention has them, where the user has not chosen a number of splits.

    vLLM lets FA3 divide the keys of a decode when few sequences run (into up to 32 splits under CUDA graphs), and with heads
    of 64 FA3 steps over them in another way than in a prefill: both add in another order, and attention was the one operator
    of the layers with other bits than in the trainer. Figures: benchmarks/ROLLOUT.md.
    """
    if config.model_config.dtype is torch.float32 and not current_platform.is_cpu():
        multiply_in_fp32()
    attention = config.attention_config
    if attention.flash_attn_max_num_splits_for_cuda_graph not in (
        _UNSPLIT,
        AttentionConfig().flash_attn_max_num_splits_for_cuda_graph,
    ):
        announce(
            "attention: a decode's keys are split as attention_config says, so tokens get other bits than in the trainer"
        )
        return
    # What vLLM's own backend goes by, under CUDA graphs, where the other cannot be taken.
    attention.flash_attn_max_num_splits_for_cuda_graph = _UNSPLIT
    if current_platform.is_cpu():
        return
    from jetrl.integrations.vllm import unsplit_attention

    obstacle = unsplit_attention.obstacle(config)
    if obstacle:
        announce(f"attention: some tokens will get other bits than in the trainer, because of: {obstacle}")
        return
    unsplit_attention.install(config)
    announce(
        "attention: FA3 with the keys in one piece, so that tokens get the trainer's bits; splitting is faster while few long "
        "sequences run: attention_config.flash_attn_max_num_splits_for_cuda_graph=16"
    )


def multiply_in_fp32() -> None:
    """FP32 activations: vLLM's Triton attention multiplies as FP32, not as TF32, which is Triton's default for its dots.

    The trainer's attention (torch's SDPA) keeps FP32. TF32's step is 2e-3 relative on attention's output, more than BF16's
    FA3 differs by when both engines run it. Only vLLM's own kernels are touched: jetrl's multiply FP8.
    """
    from triton import knobs

    knobs.language.fp32_default = "ieee"
