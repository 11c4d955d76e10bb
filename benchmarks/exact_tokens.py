"""Are a token's log-probabilities the same bits in vLLM and in the trainer? One GPU, random weights.

    python benchmarks/exact_tokens.py [--cases SHAPE:LAYERS:MODE:LENGTHS:SEQUENCES ...] [--seconds N] [--at-once N]
        [--precision unified_exact] [--temperature T] [--out FOLDER]

SHAPE: `small`, `tiny` (for a rehearsal on a CPU) or a hub id that jetrl bundles; MODE: eager, graphs (CUDA graphs without
torch.compile) or compile (vLLM's default); LENGTHS: output tokens, as 16,64,256. vLLM samples prompts of mixed lengths with
too few KV blocks for all of them, so sequences are preempted and recomputed; then the converted Hugging Face model computes
the same sequences in packs, alone, and with autograd and gradient checkpointing. Counted: tokens whose log-probability is
not the one it was sampled with. One row has another attention kernel in the trainer, to show that the count sees it.

A case is a process; --at-once of them share the GPU, in the order given. Every row is written at once; what is not done
after --seconds is killed and listed. Compile DeepGEMM's kernels first (warm_gemms.py): an engine compiles one by one.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# vLLM 0.24 chooses the older runner for Qwen2, whose sampler an exact flow cannot share.
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1" if shutil.which("nvidia-smi") else "0")

SIZES = {
    "small": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 512,
    },
}  # fmt: skip
PACK_TOKENS = 4096
BLOCK = 16
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KV_BYTES = 8 << 30
DEFAULT_CASES = (
    "Qwen/Qwen3-8B:4:compile:256,2048:32",
    "Qwen/Qwen3-8B:2:compile:256,2048,8192:256",
    "meta-llama/Llama-3.1-8B:2:compile:16,256:32",
    "Qwen/Qwen2.5-7B:2:compile:16,256:32",
    "HuggingFaceTB/SmolLM2-135M:4:compile:16,64,256:64",
    "Qwen/Qwen3-8B:2:eager:16,256:24",
    "Qwen/Qwen3-8B:2:graphs:16,256:32",
)
# Of the alone row, which runs a forward for each.
ALONE = 24


@dataclass(frozen=True)
class Case:
    shape: str
    layers: int
    mode: str
    lengths: tuple[int, ...]
    sequences: int

    def __str__(self) -> str:
        return f"{self.shape}:{self.layers}:{self.mode}:{','.join(map(str, self.lengths))}:{self.sequences}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        shape, layers, mode, lengths, sequences = text.split(":")
        return cls(shape, int(layers), mode, tuple(int(n) for n in lengths.split(",")), int(sequences))


def save_model(shape: str, layers: int, folder: Path, device: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from jetrl.precision.architectures import load_config

    config, _ = load_config("Qwen/Qwen3-8B" if shape in SIZES else shape)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    for key, value in SIZES.get(shape, {}).items():
        setattr(config, key, value)
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for name, p in model.named_parameters():
            if p.dim() == 1:
                # Gains away from 1 and biases away from 0, so that a forgotten one would show.
                p.data = (torch.randn_like(p) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)).to(p.dtype)
        model.get_output_embeddings().weight.data.normal_(std=0.08)  # far from uniform probabilities
    model.save_pretrained(folder)


def sample(folder: Path, args, case: Case, rng: random.Random, device: str):
    """[(prompt, answer, log-probabilities)], preemptions, seconds of the sampling."""
    import torch
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from jetrl.integrations.vllm import register

    register()
    vocab = AutoConfig.from_pretrained(folder).vocab_size
    lengths = [rng.choice(case.lengths) for _ in range(case.sequences)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(3, 300))] for _ in lengths]
    tokens = sum(map(len, prompts)) + sum(lengths)
    longest = max(case.lengths) + 320
    sizes = [n for n in GRAPHS if n < 2 * case.sequences]
    mode = {
        "eager": {"enforce_eager": True},
        "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}},
        "compile": {"compilation_config": {"cudagraph_capture_sizes": sizes}},
    }[case.mode]
    if device == "cuda":
        # Two fifths of what all sequences need at their end, and at least two of the longest. The size in bytes spares vLLM
        # its profiling, which other processes on the GPU disturb.
        blocks = max(int(tokens / BLOCK * 0.4), 2 * longest // BLOCK)
        mode |= {"kv_cache_memory_bytes": KV_BYTES, "num_gpu_blocks_override": blocks, "gpu_memory_utilization": 0.1}
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, quantization="jetrl", dtype="bfloat16", seed=1,
        additional_config={"jetrl_flow": args.precision}, max_model_len=longest, max_num_seqs=256,
        max_num_batched_tokens=2048, logprobs_mode="processed_logprobs", enable_prefix_caching=True,
        disable_log_stats=False, **mode,
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


def trainer(folder: Path, precision: str, device: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jetrl import attention
    from jetrl.convert import convert
    from jetrl.precision.build_hf import build_training_graph
    from jetrl.precision.flow import load_flow
    from jetrl.precision.trainer_kernels import exact_graph

    attention.register()
    config, flow = AutoConfig.from_pretrained(folder), load_flow(precision)
    choose = attention.require_exact if flow.train.exact else attention.choose
    choice = choose(config, device, True)
    print(choice)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation=choice.name
    )
    model = model.to(device)
    graph = build_training_graph(model, flow.train)
    print(convert(model, graph))
    if flow.train.exact:
        exact_graph(model, graph)
    return model


def logprobs_of(model, pack, temperature: float) -> list:
    """Log-probabilities of the response tokens of the packed sequences."""
    import torch

    from jetrl import attention

    device = model.device
    ids = torch.tensor([t for prompt, answer, _ in pack for t in prompt + answer], device=device)
    positions = torch.cat([torch.arange(len(p) + len(a), device=device) for p, a, _ in pack])
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    t = torch.full((len(ids),), temperature, device=device)
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


def compare(label: str, sequences, found: list) -> dict:
    import torch

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


def run_case(case: Case, args) -> None:
    """One case in this process; its rows go to args.rows as they come."""
    import torch

    from jetrl.launch.worker_entry import die_with_parent

    die_with_parent()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng, rows, start = random.Random(7), [], time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="exact-", dir=args.scratch))
    save_model(case.shape, case.layers, folder, device)
    print(f"{case}: saved, {time.perf_counter() - start:.0f} s", flush=True)
    sequences, preempted, seconds = sample(folder, args, case, rng, device)
    print(f"sampled in {seconds:.1f} s, preemptions: {preempted}; {time.perf_counter() - start:.0f} s", flush=True)
    model = trainer(folder, args.precision, device)
    shutil.rmtree(folder)

    def add(label: str, some, found, **more) -> None:
        facts = {"case": str(case), "preemptions": preempted, "sampling_s": seconds}
        rows.append({**facts, **compare(label, some, found), **more})
        args.rows.write_text(json.dumps(rows))
        print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)

    def in_packs(some, tokens: int) -> list:
        return [f for pack in packs_of(some, tokens) for f in logprobs_of(model, pack, args.temperature)]

    first = next(packs_of(sequences, PACK_TOKENS))
    with torch.no_grad():
        add("packs of 16384", sequences, in_packs(sequences, 4 * PACK_TOKENS))
        attention, model.config._attn_implementation = model.config._attn_implementation, OTHER[device]
        add("another attention kernel", first, in_packs(first, PACK_TOKENS))
        model.config._attn_implementation = attention
        add("packs of 4096", sequences, in_packs(sequences, PACK_TOKENS))
        add("alone", sequences[:ALONE], in_packs(sequences[:ALONE], 1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    found = logprobs_of(model, first, args.temperature)
    add("with autograd and checkpointing", first, found)
    torch.cat(found).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(gradients) and all(g.isfinite().all().item() for g in gradients)
    add("the same, its backward run", first, found, finite_gradients=finite)


# Kernels that are not the rollout's.
OTHER = {"cuda": "jetrl_varlen", "cpu": "sdpa"}


def run_all(args) -> None:
    """Every case in a process of its own; tables and results are written whenever one has ended."""
    from harness import print_table, write_results

    args.rows.mkdir(parents=True, exist_ok=True)
    began, waiting, running, ended = time.monotonic(), list(args.cases), {}, {}
    while waiting or running:
        while waiting and len(running) < args.at_once:
            case, place = waiting.pop(0), len(ended) + len(running)
            command = [sys.executable, __file__, "--one", str(case), "--rows", str(args.rows / f"{place}.json")]
            command += ["--precision", args.precision, "--temperature", str(args.temperature)]
            command += ["--scratch", args.scratch]
            with (args.rows / f"{place}.log").open("w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            running[place] = (case, process)
        late = time.monotonic() - began > args.seconds
        for place, (case, process) in list(running.items()):
            if late and process.poll() is None:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            del running[place]
            ended[place] = f"{case}: {'no time' if late and process.returncode else f'exit code {process.returncode}'}"
            end = (
                (args.rows / f"{place}.log")
                .read_text(errors="replace")
                .splitlines()[-12 if process.returncode else -2 :]
            )
            print(
                f"{ended[place]}, {time.monotonic() - began:.0f} s",
                *(line[:300] for line in end),
                sep="\n  ",
                flush=True,
            )
        if late:
            ended |= {len(ended) + i: f"{case}: no time" for i, case in enumerate(waiting)}
            waiting = []
        time.sleep(0.5)
    rows = [row for place in sorted(ended) for row in _rows(args.rows / f"{place}.json")]
    print_table(rows)
    failed = [text for _, text in sorted(ended.items()) if not text.endswith("exit code 0")]
    print(*failed, sep="\n", flush=True)
    settings = {"precision": args.precision, "temperature": args.temperature}
    write_results(f"exact-tokens-{args.precision}", rows, args.out, settings=settings, failed=failed)


def _rows(path: Path) -> list[dict]:
    return json.loads(path.read_text()) if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case.parse(c) for c in DEFAULT_CASES])
    parser.add_argument("--precision", default="unified_exact")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all cases together")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--scratch", help="folder for the models; default the system's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, help="folder of the cases' rows and logs; default OUT/exact-tokens")
    parser.add_argument("--one", type=Case.parse, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_case(args.one, args)
        sys.stdout.flush()
        os._exit(0)  # vLLM's and NCCL's own shutdown can hang; everything is written
    args.rows = args.rows or (args.out or Path(tempfile.mkdtemp())) / "exact-tokens"
    # A case that is killed or fails leaves its model there: gigabytes.
    with tempfile.TemporaryDirectory(prefix="exact-", dir=args.scratch, ignore_cleanup_errors=True) as args.scratch:
        run_all(args)


if __name__ == "__main__":
    main()
