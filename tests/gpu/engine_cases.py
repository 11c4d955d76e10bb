"""The real engine on one and two GPUs, without Ray: strategies, offloading, checkpointing, Ulysses, resume, weight sync.

    python tests/gpu/engine_cases.py OUT.json GPUS [fsdp fsdp2]

Each case runs in every rank of one process group and returns plain figures; `check` says what must hold of them.
Without a GPU it runs on gloo with padded batches of a narrower model: a rehearsal. On a fresh GPU machine
`benchmarks/warm_gemms.py engine-cases --train --rows 128 256 384 512 640 768 896` first saves nvcc's minutes.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

UPDATES = 3
VOCABULARY = 2048
ON_GPU = torch.cuda.is_available()
LONGEST = 400 if ON_GPU else 40  # tokens of a sequence


def save_model(folder: Path) -> None:
    """Random weights, four layers of a small Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    hidden, inner, heads = (1024, 3072, 8) if ON_GPU else (256, 384, 2)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=4 if ON_GPU else 2,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=128, max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def run(
    folder: str, updates: int = UPDATES, deterministic: bool = False, sequence_parallel: int = 1, **options
) -> dict:
    """Losses, gradient norms and a digest of the weights after `updates` updates of four micro-batches each."""
    from engine_for_tests import batch, build_engine, mean_log_prob_loss

    set_deterministic(deterministic)
    torch.manual_seed(7)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    engine = build_engine(Path(folder), packed=ON_GPU, sequence_parallel=sequence_parallel, **options)
    built = time.perf_counter() - began
    losses, norms, seconds = [], [], []
    share = dist.get_rank() // sequence_parallel  # the ranks of one sequence-parallel group see the same data
    for step in range(updates):
        synchronize()
        began = time.perf_counter()
        with engine.train_mode():
            data = batch(VOCABULARY, 100 * share + step, sequences=8, micro_batch=2, longest=LONGEST, packed=ON_GPU)
            out = engine.train_batch(data, mean_log_prob_loss)
        synchronize()
        seconds.append(round(time.perf_counter() - began, 3))
        if engine.is_mp_src_rank_with_outputs():  # one rank of a sequence-parallel group: the others have no metrics
            losses.append(sum(out["loss"]))
            norms.append(out["metrics"]["grad_norm"])
    return {
        "losses": losses,
        "grad_norms": norms,
        "build_seconds": round(built, 1),
        "update_seconds": seconds,
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if ON_GPU else None,
        "attention": engine.model_config.hf_config._attn_implementation,
        "weights": digest(engine),
    }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def set_deterministic(on: bool) -> None:
    """Attention's backward among others. Without torch's filling of new memory, which costs time and tests something else."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def digest(engine) -> list[float]:
    """Sum and sum of squares of every whole weight, in FP64: equal for equal bits, and almost surely only for those."""
    from torch.distributed.tensor import DTensor

    values = []
    for _, tensor in whole_weights(engine):
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        t = tensor.double()
        values += [t.sum().item(), (t * t).sum().item()]
    return values


def whole_weights(engine):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    return FSDPEngine.get_per_tensor_param(engine)[0]


def resume(folder: str, **options) -> dict:
    """Update, save, update; another engine loads and makes the same second update. Deterministic attention backward."""
    from engine_for_tests import batch, build_engine, mean_log_prob_loss

    set_deterministic(True)

    def update(engine, seed):
        with engine.train_mode():
            data = batch(
                VOCABULARY, 100 * dist.get_rank() + seed, sequences=8, micro_batch=2, longest=LONGEST, packed=ON_GPU
            )
            engine.train_batch(data, mean_log_prob_loss)

    where = Path(folder) / "checkpoint" / "-".join(map(str, options.values()))
    straight = build_engine(Path(folder), packed=ON_GPU, **options)
    update(straight, 0)
    straight.save_checkpoint(str(where), global_step=1)
    update(straight, 1)
    expected = digest(straight)
    del straight
    torch.manual_seed(4321)
    resumed = build_engine(Path(folder), packed=ON_GPU, **options)
    resumed.load_checkpoint(str(where), del_local_after_load=False)
    synchronize()
    update(resumed, 1)
    got = digest(resumed)
    return {"bit_identical": got == expected}


def sync(folder: str, **options) -> dict:
    """The FP8 wire from sharded weights: codes and scales of every linear layer, and the bytes of both wires."""
    from engine_for_tests import build_engine

    from jetrl.integrations.verl.wire import quantized_on_the_way
    from jetrl.linear import quantize_weight
    from jetrl.packed_weight import parts

    engine = build_engine(Path(folder), packed=ON_GPU, **options)
    formats = {
        n: "fp32" for n in engine.precision_graph.linear_names() if engine.precision_graph.linear_format(n).is_fp8
    }
    device = torch.cuda.current_device() if ON_GPU else "cpu"
    plain = {name: tensor.to(device) for name, tensor in whole_weights(engine)}
    synchronize()
    began = time.perf_counter()
    sent = dict(quantized_on_the_way(whole_weights(engine), formats, device))
    synchronize()
    seconds = time.perf_counter() - began
    equal = True
    for name in formats:
        wanted = quantize_weight(plain[f"{name}.weight"].bfloat16(), "fp32")
        codes, scale = parts(sent[f"{name}.weight"], plain[f"{name}.weight"].shape)
        equal &= torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        equal &= torch.equal(scale, wanted.scale)
    return {
        "bytes_equal": bool(equal),
        "linears": len(formats),
        "bf16_bytes": sum(2 * t.numel() for t in plain.values()),
        "fp8_bytes": sum(t.nbytes for t in sent.values()),
        "seconds": round(seconds, 4),
    }


def cases(world: int, strategies: list[str]) -> list[tuple]:
    """(name, function, options), the most telling first: a run that is cut short keeps what it has."""
    found = []
    for kind, function, options in (
        ("deterministic", run, dict(deterministic=True)),
        ("resume", resume, {}),
        # The same once more: a process that has already built engines starts a run from the same state as a fresh one.
        ("again", run, dict(deterministic=True)),
        ("sync", sync, {}),
        ("offload", run, dict(param_offload=True, optimizer_offload=True, deterministic=True)),
        ("checkpointing", run, dict(gradient_checkpointing=True, deterministic=True)),
        ("ulysses", run, dict(sequence_parallel=world)),
        ("fp32 masters", run, dict(masters="fp32")),
        ("bf16", run, dict(jetrl_flow="bf16")),
    ):
        for strategy in strategies:
            if kind != "ulysses" or (world > 1 and ON_GPU):  # it needs packed batches
                found.append((f"{strategy} {world} GPU {kind}", function, dict(strategy=strategy, **options)))
    return found


def check(name: str, result: dict, plain: dict | None) -> str | None:
    """What is wrong with a case's figures; None if nothing. plain: the deterministic case of the same strategy."""
    if "error" in result:
        return result["error"].strip().splitlines()[-1]
    if result.get("bit_identical") is False:
        return "the resumed update differs"
    if result.get("bytes_equal") is False:
        return "the wire's bytes differ"
    if "losses" in result:
        if not all(abs(x) < 100 for x in result["losses"] + result["grad_norms"]):
            return "not finite"
        same = name.endswith(("again", "offload", "checkpointing"))
        if plain is not None and same and result["weights"] != plain["weights"]:
            return "other weights than the deterministic case's"
    return None


def rank_main(rank: int, world: int, port: int, folder: str, out: str, strategies: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), CUBLAS_WORKSPACE_CONFIG=":4096:8")
    if ON_GPU:
        torch.cuda.set_device(rank)
    # One rank of a pair may compile for long while the other waits.
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=120))
    if rank == 0:
        save_model(Path(folder))
    dist.barrier()
    results = {}
    for name, function, options in cases(world, strategies):
        began = time.perf_counter()
        try:
            results[name] = function(folder, **options)
        except Exception:  # noqa: BLE001  (one case that fails must not lose the others)
            results[name] = {"error": traceback.format_exc()}
            # Of every rank: where one fails alone, the others only wait for it.
            print(f"rank {rank}, {name}: {results[name]['error']}", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
        plain = results.get(" ".join(name.split()[:3]) + " deterministic")
        wrong = check(name, results[name], plain)
        if rank == 0:
            shown = {k: v for k, v in results[name].items() if k not in ("weights", "error")}
            print(
                f"{'FAIL ' + wrong if wrong else 'ok'}: {name} {time.perf_counter() - began:.1f} s {shown}", flush=True
            )
            Path(out).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def main(out: str, world: int, strategies: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        arguments = (world, 29650 + world, name, out, strategies)
        mp.start_processes(rank_main, arguments, nprocs=world, start_method="spawn")


if __name__ == "__main__":
    # FSDP1 takes no weights on a CPU.
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] or (["fsdp", "fsdp2"] if ON_GPU else ["fsdp2"]))
