"""One actor update (forward, backward, optimizer) of a Qwen3-8B-shaped Hugging Face model, and its log-prob forward.

    python benchmarks/bench_update.py [--sections forward,update,checkpointed,accumulated,memory,profile] [--out FOLDER]
    torchrun --nproc-per-node 2 benchmarks/bench_update.py --sections checkpointed --variants bf16,unified   (FSDP2)

Random weights and tokens, one micro-batch of 16384 tokens in packed sequences of 2048 or 8192, the optimizer of
jetrl.optimizer (BF16 masters, stochastic rounding), one loss, one attention function for all (the first of
jetrl.attention.choose; flash-attn, which VeRL would run in BF16, is not assumed to be installed). Variants:

  bf16     Hugging Face's modules, as VeRL ships them
  liger    the same with Liger's kernels, as VeRL's use_liger applies them
  unified  unified_fp8: jetrl.convert
  blocks   unified with flow.train.wgrad=blocks
  torchao  torchao's blockwise FP8 linear in Hugging Face's modules (its torch._scaled_mm GEMMs)

Without a GPU it runs on tiny sizes, a rehearsal (`--layers 2 --plain-layers 2 --memory-layers 1 --lengths 32`, and
TORCHDYNAMO_DISABLE=1 to compile nothing). Log-probs and the lm_head are the same code for all. Bars: update 1.45 x bf16 and 1.3 x liger, forward 1.5 x bf16, peak memory
below bf16's, the graph's activation bytes within 5 % of what is measured.
"""

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import print_table, write_results
from kernel_families import family
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl import attention
from jetrl.convert import convert
from jetrl.optimizer import StochasticAdamW
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.estimate import saved_bytes
from jetrl.precision.flow import PrecisionAssignment
from jetrl.weight_cache import weights_changed

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS = 16384 if ON_GPU else 64
LAYERS = 36
SHAPE = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-6, max_position_embeddings=40960, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip
if not ON_GPU:
    SHAPE |= dict(vocab_size=256, hidden_size=256, intermediate_size=384, num_attention_heads=2, num_key_value_heads=1)
# What a variant or a section may fail with (memory, a library's own kernel) without losing the others' figures.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError)
VARIANTS = ("bf16", "liger", "unified", "blocks", "torchao")
ASSIGNMENTS = {
    "unified": PrecisionAssignment(linear="fp8"),
    "blocks": PrecisionAssignment(linear="fp8", wgrad="blocks"),
}


class Weights:
    """The parameters of all layers, made once on the GPU and shared by every variant."""

    def __init__(self, layers: int) -> None:
        attention.register()
        self.config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **SHAPE)
        self.choice = attention.choose(self.config, DEVICE, packed=True)
        self.config._attn_implementation = self.choice.name
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        # Liger replaces classes and functions in the model's own Python module, for every model built later.
        self.stock = dict(vars(sys.modules[type(model).__module__]))
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.parameters = {}
        for name, p in model.named_parameters():
            t = torch.empty(p.shape, dtype=torch.bfloat16, device=DEVICE)
            self.parameters[name] = t.fill_(1.0) if "norm" in name else t.normal_(std=0.02, generator=generator)

    def model(self, layers: int) -> nn.Module:
        config = type(self.config).from_dict(self.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
        config._attn_implementation = self.choice.name
        vars(sys.modules[self.stock["__name__"]]).update(self.stock)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        wanted = dict(model.named_parameters())
        model.load_state_dict({n: t for n, t in self.parameters.items() if n in wanted}, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(config, device=DEVICE)
        for p in model.parameters():
            p.requires_grad_()
        return model.train()


def apply(variant: str, model: nn.Module, cache: str) -> str:
    """Turn a stock model into the variant; returns what was done."""
    if variant == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
        return "liger"
    if variant in ASSIGNMENTS:
        return str(convert(model, build_training_graph(model, ASSIGNMENTS[variant]), weight_cache=cache))
    if variant == "torchao":
        from torchao_layer import blockwise, shorten_autotuning

        shorten_autotuning()
        for module in list(model.model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, blockwise(child))
    return variant


def batch(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS), device=DEVICE, generator=generator)
    positions = (torch.arange(TOKENS, device=DEVICE) % length).unsqueeze(0)
    return {"ids": ids, "positions": positions, "advantage": torch.randn(TOKENS, device=DEVICE, generator=generator)}


class LogProbs(nn.Module):
    """The model and what follows it, as one module: FSDP gathers the root's parameters (embedding, lm_head) when it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[0])
        temperature = torch.ones(TOKENS, device=DEVICE)
        return attention.token_logprobs(logits, ids[0].roll(-1), temperature, SHAPE["vocab_size"])


def sharded(module: LogProbs) -> LogProbs:
    """FSDP2 over all ranks: a group for every decoder layer, BF16 parameters, gradients reduced in FP32, as VeRL does it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in module.model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def loss_of(module: LogProbs, data: dict) -> torch.Tensor:
    new = module(data["ids"], data["positions"])
    return -(torch.exp(new - new.detach()) * data["advantage"]).mean()


def update(model: LogProbs, data: dict, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        (loss_of(model, data) / micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    weights_changed()


def timed(call: Callable[[], None], warm: int, repeats: int) -> dict:
    for _ in range(warm):
        call()
    synchronize()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {
        "ms": 1e3 * median,
        "spread": (max(seconds) - min(seconds)) / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0,
    }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        self.deadline = time.perf_counter() + arguments.seconds
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.weights = Weights(arguments.layers)
        self.rows: list[dict] = []
        self.notes: dict[str, str] = {"attention": str(self.weights.choice)}

    def build(self, variant: str, layers: int, checkpointing: bool = False, cache: str = "auto") -> LogProbs:
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        weights_changed()
        model = self.weights.model(layers)
        self.notes[variant] = apply(variant, model, cache)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return sharded(LogProbs(model)) if self.world > 1 else LogProbs(model)

    def late(self, what: str) -> bool:
        """Whether --seconds are over; on all ranks alike, which wait for each other in what they run."""
        late = torch.tensor(float(time.perf_counter() > self.deadline), device=DEVICE)
        if self.world > 1:
            dist.all_reduce(late, dist.ReduceOp.MAX)
        if late:
            print(f"-- no time for {what}", flush=True)
        return bool(late)

    def add(self, row: dict) -> None:
        """Print and write at once: a run that is cut short keeps its figures."""
        if self.world > 1:
            row["gpus"] = self.world
        self.rows.append(row)
        self._compare()
        if self.world > 1 and dist.get_rank() > 0:
            return
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        name = "update" if self.world == 1 else f"update-{self.world}gpus"
        write_results(name, self.rows, self.a.out, tokens=TOKENS, shape=SHAPE, notes=self.notes)

    def _compare(self) -> None:
        keys = ("what", "layers", "length")
        timed_rows = [row for row in self.rows if "ms" in row]
        for row in timed_rows:
            for other in timed_rows:
                if other["variant"] in ("bf16", "liger") and all(other[k] == row[k] for k in keys):
                    row[f"x_{other['variant']}"] = other["ms"] / row["ms"]

    def forward(self) -> None:
        for variant in self.a.variants:
            if variant == "blocks" or self.late(f"log-probs, {variant}"):
                continue
            try:
                model = self.build(variant, self.a.layers)
                for length in self.a.lengths:
                    data = batch(length)
                    with torch.no_grad():
                        row = timed(lambda m=model, d=data: m(d["ids"], d["positions"]), 2, self.a.repeats)
                    self.add(
                        {"what": "log-probs", "variant": variant, "layers": self.a.layers, "length": length, **row}
                    )
            except FAILURES:
                traceback.print_exc()
            model = None

    def update(self) -> None:
        self._updates(self.a.plain_layers, False, "update")

    def checkpointed(self) -> None:
        self._updates(self.a.layers, True, "update, checkpointed")

    def accumulated(self) -> None:
        """Several micro-batches per optimizer step, as in a VeRL update: weights are quantized once for all of them."""
        n = self.a.micro_batches
        self._updates(self.a.plain_layers, False, f"update, {n} micro-batches", n)

    def _updates(self, layers: int, checkpointing: bool, what: str, micro_batches: int = 1) -> None:
        for variant in self.a.variants:
            # Bound by the host, as the update without checkpointing shows: its time is better spent on the others.
            if variant == "torchao" and checkpointing or self.late(f"{what}, {variant}"):
                continue
            try:
                model = self.build(variant, layers, checkpointing)
                optimizer = StochasticAdamW(model.parameters(), lr=1e-6)
                for length in self.a.lengths:
                    if self.late(f"{what}, {variant}, {length}"):
                        continue
                    data, warm = batch(length), self.a.warm if length == self.a.lengths[0] else 1
                    row = timed(
                        lambda m=model, d=data, o=optimizer: update(m, d, o, micro_batches), warm, self.a.repeats
                    )
                    self.add({"what": what, "variant": variant, "layers": layers, "length": length, **row})
            except FAILURES:
                traceback.print_exc()
            model = optimizer = None

    def memory(self) -> None:
        """What lies between the start of a forward and its end, against the graph's saved bytes."""
        for variant in ("bf16", "liger", "unified", "blocks"):
            if variant not in self.a.variants or self.late(f"memory, {variant}"):
                continue
            layers = self.a.memory_layers
            model = self.build(variant, layers, cache="micro_batch")
            predicted = ""
            if variant in ("bf16", *ASSIGNMENTS):
                assignment = ASSIGNMENTS.get(variant, PrecisionAssignment())
                predicted = sum(saved_bytes(build_training_graph(model.model, assignment)).values())
            data = batch(self.a.lengths[0])
            loss_of(model, data).backward()
            model.zero_grad(set_to_none=True)
            synchronize()
            before = allocated()
            loss = loss_of(model, data)
            measured = (allocated() - before) / TOKENS
            row = {
                "what": "activations",
                "variant": variant,
                "layers": layers,
                "length": self.a.lengths[0],
                "bytes_per_token": measured,
            }
            if predicted and measured:
                row |= {"predicted": predicted, "predicted/measured": predicted / measured}
            self.add(row)
            del model, loss

    def profile(self) -> None:
        """Share of GPU time by kernel family, of one update without checkpointing."""
        for variant in ("unified", "bf16"):
            if variant not in self.a.variants or self.late(f"profile, {variant}"):
                continue
            model = self.build(variant, self.a.plain_layers)
            optimizer = StochasticAdamW(model.parameters(), lr=1e-6)
            data = batch(self.a.lengths[0])
            update(model, data, optimizer)
            with torch.profiler.profile(
                activities=[getattr(torch.profiler.ProfilerActivity, DEVICE.upper())]
            ) as profiler:
                update(model, data, optimizer)
                synchronize()
            self._shares(variant, profiler)
            model = optimizer = None

    def _shares(self, variant: str, profiler) -> None:
        events = [(e.key, e.self_device_time_total / 1e3, e.count) for e in profiler.key_averages()]
        events = [e for e in events if e[1]]
        events.sort(key=lambda e: -e[1])
        total = sum(ms for _, ms, _ in events)
        for name, ms, count in events[:40]:
            print(f"  {variant} {ms:9.2f} ms {count:6d}  {family(name):12s} {name[:110]}", flush=True)
        shares: dict[str, float] = {}
        for name, ms, _ in events:
            shares[family(name)] = shares.get(family(name), 0.0) + ms
        for name, ms in sorted(shares.items(), key=lambda item: -item[1]):
            self.add({
                "what": "profile", "variant": variant, "layers": self.a.plain_layers, "length": self.a.lengths[0], "family": name,
                "gpu_ms": ms, "share": ms / total,
            })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--sections", default="forward,update,memory,checkpointed,accumulated,profile")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the forward and of the checkpointed update")
    parser.add_argument("--plain-layers", type=int, default=12, help="of the update without checkpointing")
    parser.add_argument("--memory-layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4, help="of the section accumulated")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--warm", type=int, default=2, help="updates before the first one that is timed")
    parser.add_argument("--repeats", type=int, default=3, help="updates that are timed; the median counts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no variant or length after this")
    arguments = parser.parse_args()
    arguments.variants = arguments.variants.split(",")
    if "RANK" in os.environ:
        if ON_GPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    start = time.perf_counter()
    bench = Bench(arguments)
    for section in arguments.sections.split(","):
        try:
            getattr(bench, section)()
        except FAILURES:
            traceback.print_exc()
        print(f"-- {section}: {time.perf_counter() - start:.0f} s so far", flush=True)
    print_table(bench.rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
