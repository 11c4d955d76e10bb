"""Model shapes and vLLM engines that the rollout and refit benchmarks compare. Random weights, no files but a config.json."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

# torch.cuda.is_available() would initialize the driver otherwise, and vLLM's engine process is a fork where CUDA is untouched.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch  # noqa: E402

if TYPE_CHECKING:
    from vllm import LLM

_COMMON = {
    "dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 40960, "head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip
_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "rope_theta": 1e6,
    "attention_bias": False, "eos_token_id": 151645,
}  # fmt: skip
_QWEN2 = _QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 5e5,
}
_LLAMA31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _sizes(hidden: int, inner: int, layers: int, heads: int, **more) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads} | more


SHAPES = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "qwen2.5-7b": _QWEN2 | _sizes(3584, 18944, 28, 28, num_key_value_heads=4),
    "llama3.1-8b": _LLAMA | _sizes(4096, 14336, 32, 32, rope_scaling=_LLAMA31_ROPE),
    "engine-cases": _QWEN3 | _sizes(1024, 3072, 4, 8, vocab_size=2048, num_key_value_heads=4),  # of tests/gpu
    # For rehearsals on a CPU.
    "tiny": _QWEN3 | _sizes(256, 512, 4, 4, vocab_size=2048, num_key_value_heads=2, head_dim=64),
    # 576 wide, and heads of 64: neither is a multiple of 128.
    "smollm2-135m": _LLAMA
    | _sizes(576, 1536, 30, 9, vocab_size=49152, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True),
}
_BLOCK_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
ENGINES = {
    "bf16": {},
    # A checkpoint in 128x128 blocks, which is also what VeRL's rollout.quantization=fp8 makes vLLM believe it has.
    "vllm_fp8": {"hf_overrides": {"quantization_config": _BLOCK_FP8}},
    "jetrl": {"quantization": "jetrl"},
    "jetrl_splits": {
        "quantization": "jetrl",
        "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 16},
    },
    "jetrl_exact": {
        "quantization": "jetrl",
        "additional_config": {"jetrl_flow": "unified_exact"},
        "logprobs_mode": "processed_logprobs",
    },
    "jetrl_fp8_rollout": {"quantization": "jetrl", "additional_config": {"jetrl_flow": "fp8_rollout"}},
}
# For the two engines that do not know of them. The first is a matter of numerics, the others of what is installed.
_ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}


def config_of(shape: str, layers: int | None = None) -> dict:
    return SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})


def model_folder(shape: str, layers: int | None = None) -> Path:
    """A folder that vLLM takes for a checkpoint without weights (load_format=dummy).

    The same one every time: its path is part of the key of vLLM's compile cache.
    """
    folder = Path(tempfile.gettempdir()) / "jetrl-rollout" / f"{shape}-{layers or 'all'}"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"config.json.{os.getpid()}"  # several engines start at once
    part.write_text(json.dumps(config_of(shape, layers)))
    part.replace(folder / "config.json")
    return folder


def linear_weights(config: dict) -> int:
    """Elements of all weight matrices inside the decoder layers."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return config["num_hidden_layers"] * (hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * inner)


def step_bytes(config: dict, engine: str, sequences: int, context: int) -> int:
    """What one decode step must at least read: every weight once, and K and V of every token."""
    weight = linear_weights(config) * (2 if engine == "bf16" else 1) + 2 * config["vocab_size"] * config["hidden_size"]
    return weight + token_bytes(config) * sequences * context


def token_bytes(config: dict) -> int:
    """K and V of one token in every layer, BF16."""
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def weight_bytes(config: dict, engine: str) -> int:
    """All weights of the engine, the embedding table included."""
    tables = 1 if config["tie_word_embeddings"] else 2
    return (
        linear_weights(config) * (2 if engine == "bf16" else 1)
        + tables * 2 * config["vocab_size"] * config["hidden_size"]
    )


def working_bytes(config: dict) -> int:
    """A generous bound of what an engine takes beside weights, K and V: context, graphs, a step of 16384 tokens, logits."""
    return int(3.5e9) + 3 * 2 * 16384 * config["intermediate_size"]


def gpu_bytes() -> int | None:
    """Of this machine's first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def build(engine: str, model: Path, **arguments) -> "LLM":
    """An LLM of kind `engine` on dummy weights. FP8 weights of vLLM's own engine are filled with noise afterwards."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if not engine.startswith("jetrl"):
        os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    from vllm import LLM

    settings = {**ENGINES[engine], **arguments}
    if not torch.cuda.is_available():  # a rehearsal: there are no graphs to speak of
        settings.pop("compilation_config", None)
    llm = LLM(str(model), load_format="dummy", skip_tokenizer_init=True, **settings)
    if engine == "vllm_fp8":
        llm.apply_model(_fill_fp8)
    return llm


def _fill_fp8(model: torch.nn.Module) -> None:
    """vLLM's dummy FP8 codes are all but zero, which draws less power than real ones: draw them as ours are drawn."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            noise = torch.rand(parameter.shape, device=parameter.device, dtype=torch.bfloat16) * 896 - 448
            parameter.data.copy_(noise.to(torch.float8_e4m3fn))
        elif "weight_scale" in name:
            parameter.data.fill_(1e-3 / 448)


def worker_memory(llm: "LLM") -> list[dict]:
    """Per worker, in bytes: the model's parameters, torch's peak and what it reserves now, and the process's host memory."""
    return llm.collective_rpc(_memory)


def _memory(worker) -> dict:
    parameters, on_gpu = worker.get_model().parameters(), torch.cuda.is_available()
    return {
        "weights": sum(p.numel() * p.element_size() for p in parameters),
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.memory_reserved() if on_gpu else 0,
        "host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
