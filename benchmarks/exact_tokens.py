"""Are a token's log-probabilities the same bits in vLLM and in the trainer? One GPU, one process, random weights.

    python benchmarks/exact_tokens.py [--cases SHAPE:LAYERS:MODE:LENGTHS:SEQUENCES ...]
        [--precision unified_exact] [--temperature T] [--out FOLDER]

SHAPE: `small` or a hub id that jetrl bundles; MODE: eager, graphs (CUDA graphs without torch.compile) or compile (vLLM's
default); LENGTHS: output tokens, as 16,64,256. vLLM samples prompts of mixed lengths with too few KV blocks for all of
them, so sequences are preempted and recomputed; then the converted Hugging Face model computes the same sequences alone,
in packs of 4096 and 16384 tokens, and with autograd and gradient checkpointing. Counted: tokens whose log-probability is
not the one it was sampled with. A last row has another attention kernel in the trainer, to show that the count sees it.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from harness import print_table, write_results
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl import attention
from jetrl.convert import convert
from jetrl.precision.architectures import load_config
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import load_flow
from jetrl.precision.trainer_kernels import exact_graph

SMALL = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
PACK_TOKENS = 4096
BLOCK = 16
GRAPHS = [1, 2, 4, 8, 16, 32, 48, 64]
DEFAULT_CASES = (
    "small:4:compile:16,64,256:64",
    "small:4:eager:16,64:24",
    "HuggingFaceTB/SmolLM2-135M:4:graphs:16,64,256:64",
    "Qwen/Qwen2.5-7B:2:graphs:16,256:32",
    "meta-llama/Llama-3.1-8B:2:graphs:16,256:32",
    "Qwen/Qwen3-8B:2:graphs:16,256:32",
    "small:2:graphs:256,2048,8192:24",
)


@dataclass(frozen=True)
class Case:
    shape: str
    layers: int
    mode: str
    lengths: tuple[int, ...]
    sequences: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        shape, layers, mode, lengths, sequences = text.split(":")
        return cls(shape, int(layers), mode, tuple(int(n) for n in lengths.split(",")), int(sequences))


def save_model(shape: str, layers: int, folder: Path) -> None:
    config, _ = load_config("Qwen/Qwen3-8B" if shape == "small" else shape)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    for key, value in (SMALL if shape == "small" else {}).items():
        setattr(config, key, value)
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for name, p in model.named_parameters():
            if p.dim() == 1:
                # Gains away from 1 and biases away from 0, so that a forgotten one would show.
                p.data = (torch.randn_like(p) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)).to(p.dtype)
        model.get_output_embeddings().weight.data.normal_(std=0.08)  # far from uniform probabilities
    model.save_pretrained(folder)


def sample(folder: Path, args, case: "Case", rng: random.Random):
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from jetrl.integrations.vllm import register

    register()
    vocab = AutoConfig.from_pretrained(folder).vocab_size
    lengths = [rng.choice(case.lengths) for _ in range(case.sequences)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(3, 300))] for _ in lengths]
    tokens = sum(map(len, prompts)) + sum(lengths)
    longest = max(case.lengths) + 320
    # Two fifths of what all sequences need at their end, and at least two of the longest.
    blocks = max(int(tokens / BLOCK * 0.4), 2 * longest // BLOCK)
    mode = {
        "eager": {"enforce_eager": True},
        "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": GRAPHS}},
        "compile": {"compilation_config": {"cudagraph_capture_sizes": GRAPHS}},
    }[case.mode]
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, quantization="jetrl", dtype="bfloat16", seed=1,
        additional_config={"jetrl_flow": args.precision}, max_model_len=longest, max_num_seqs=256,
        max_num_batched_tokens=2048, logprobs_mode="processed_logprobs", gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=8 << 30, num_gpu_blocks_override=blocks, enable_prefix_caching=True, disable_log_stats=False, **mode,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in lengths
    ]
    inputs = [{"prompt_token_ids": p} for p in prompts]
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    found = []
    for output in outputs:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logprobs = [step[i].logprob for step, i in zip(completion.logprobs, ids, strict=True)]
        found.append((list(output.prompt_token_ids), ids, torch.tensor(logprobs, dtype=torch.float32)))
    del llm
    cleanup_dist_env_and_memory()
    return found, preempted, seconds


def trainer(folder: Path, precision: str) -> torch.nn.Module:
    attention.register()
    config = AutoConfig.from_pretrained(folder)
    choice = attention.choose(config, "cuda", True)
    print(choice)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation=choice.name
    )
    model = model.to("cuda")
    flow = load_flow(precision)
    graph = build_training_graph(model, flow.train)
    print(convert(model, graph))
    if flow.train.exact:
        exact_graph(model, graph)
    return model


def logprobs_of(model, pack, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of the response tokens of the packed sequences."""
    ids = torch.tensor([t for prompt, answer, _ in pack for t in prompt + answer], device="cuda")
    positions = torch.cat([torch.arange(len(p) + len(a), device="cuda") for p, a, _ in pack])
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    t = torch.full((len(ids),), temperature, device="cuda")
    found = attention.token_logprobs(logits, ids.roll(-1), t, logits.shape[-1])
    result, start = [], 0
    for prompt, answer, _ in pack:
        end = start + len(prompt) + len(answer)
        result.append(found[start + len(prompt) - 1 : end - 1])
        start = end
    return result


def packs_of(sequences, tokens: int):
    pack, size = [], 0
    for s in sequences:
        n = len(s[0]) + len(s[1])
        if pack and size + n > tokens:
            yield pack
            pack, size = [], 0
        pack.append(s)
        size += n
    yield pack


def compare(label: str, sequences, found: list[torch.Tensor]) -> dict:
    old = torch.cat([s[2] for s in sequences])
    new = torch.cat([f.detach().cpu() for f in found])
    difference = (new.double() - old.double()).abs()
    k3 = (torch.exp(new.double() - old.double()) - 1 - (new.double() - old.double())).mean()
    return {
        "trainer": label,
        "tokens": len(old),
        "differing": int((new != old).sum()),
        "max_difference": difference.max().item(),
        "k3": k3.item(),
    }


def run_case(case: Case, args) -> list[dict]:
    rng = random.Random(7)
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="exact-", dir=args.scratch))
    save_model(case.shape, case.layers, folder)
    print(f"{case}: saved, {time.perf_counter() - start:.0f} s", flush=True)
    sequences, preempted, seconds = sample(folder, args, case, rng)
    print(f"sampled in {seconds:.1f} s, preemptions: {preempted}; {time.perf_counter() - start:.0f} s", flush=True)
    model = trainer(folder, args.precision)
    shutil.rmtree(folder)
    rows = []

    def add(label: str, pack, found, **more) -> None:
        row = {"shape": case.shape, "mode": case.mode, "preemptions": preempted, **compare(label, pack, found), **more}
        rows.append(row)
        print(row, flush=True)

    def in_packs(tokens: int) -> list[torch.Tensor]:
        return [f for pack in packs_of(sequences, tokens) for f in logprobs_of(model, pack, args.temperature)]

    with torch.no_grad():
        for label, tokens in (("packs of 4096", PACK_TOKENS), ("packs of 16384", 4 * PACK_TOKENS), ("alone", 1)):
            add(label, sequences, in_packs(tokens))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    pack = next(packs_of(sequences, PACK_TOKENS))
    found = logprobs_of(model, pack, args.temperature)
    torch.cat(found).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = all(g.isfinite().all().item() for g in gradients)
    add("autograd, checkpointing", pack, found, finite_gradients=finite)
    model.config._attn_implementation = "jetrl_varlen"
    with torch.no_grad():
        add("another attention kernel", sequences, in_packs(PACK_TOKENS))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case.parse(c) for c in DEFAULT_CASES])
    parser.add_argument("--precision", default="unified_exact")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--scratch", help="folder for the models; default the system's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows, failed = [], []
    for case in args.cases:
        try:
            rows += run_case(case, args)
        except Exception as e:  # noqa: BLE001  a case that fails must not cost the others their GPU time
            traceback.print_exc()
            failed.append(f"{case}: {e}")
        torch.cuda.empty_cache()
    print_table(rows)
    settings = {"precision": args.precision, "temperature": args.temperature}
    write_results(f"exact-tokens-{args.precision}", rows, args.out, settings=settings, failed=failed)


if __name__ == "__main__":
    main()
