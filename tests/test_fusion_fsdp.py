"""Fused layers under FSDP1 (flat parameters) and FSDP2 on two processes: the gradients are those without FSDP."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoints_for_tests import VOCAB, build_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from jetrl.convert import convert
from jetrl.errors import UserError
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.formats import FP32
from jetrl.weight_cache import weights_changed

RANKS = 2


def make(cache):
    model = build_model("qwen3")
    graph = build_training_graph(model, PrecisionAssignment(linear="fp8"), carrier=FP32)
    report = convert(model, graph, weight_cache=cache)
    assert len(report.fusion.fused) == 2
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def loss_of(model, ids):
    logits = model(ids, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def wrap(kind, model):
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return FSDP(
        model, auto_wrap_policy=policy, use_orig_params=False, mixed_precision=precision, device_id=torch.device("cpu")
    )


def full_gradients(kind, model):
    """name -> whole gradient, on every rank; flat ones by the module that owns them."""
    if kind == "fsdp2":
        return {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True, writeback=False, offload_to_cpu=False):
        return {n.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for n, p in model.named_parameters()}


def run(rank, kind, cache, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{kind}-{cache}", rank=rank, world_size=RANKS)
    weights_changed()
    try:
        ids = [torch.randint(0, VOCAB, (1, 33), generator=torch.Generator().manual_seed(i)) for i in range(4)]
        sharded, whole = wrap(kind, make(cache)), make("micro_batch")
        steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, whole)]
        for _ in range(2):
            for micro in range(2):
                loss = loss_of(sharded, ids[2 * micro + rank])
                loss.backward()
                # Every rank sees the mean over ranks; one process computes both ranks' rows.
                reference = sum(loss_of(whole, ids[2 * micro + r]) for r in range(RANKS)) / RANKS
                reference.backward()
            if kind == "fsdp2":
                got, want = full_gradients(kind, sharded), {n: p.grad for n, p in whole.named_parameters()}
                for name in want:
                    torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-5)
            for s in steps:
                s.step()
                s.zero_grad()
            weights_changed()
        # After an update with its gradients, the same logits: a lost or stale gradient or weight would show.
        with torch.no_grad():
            torch.testing.assert_close(loss_of(sharded, ids[0]), loss_of(whole, ids[0]), rtol=1e-4, atol=1e-4)
            assert abs(loss_of(whole, ids[0]) - loss_of(make("micro_batch"), ids[0])) > 1e-2
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["micro_batch", "step"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_updates_under_fsdp_are_those_without(kind, cache, tmp_path):
    mp.start_processes(run, (kind, cache, str(tmp_path)), nprocs=RANKS, start_method="fork")


def wrapped_by_itself(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = make("micro_batch")
    fully_shard(model.model.layers[0].mlp, mesh=init_device_mesh("cpu", (1,)))
    try:
        with pytest.raises(UserError, match="wrap whole decoder layers"):
            loss_of(model, torch.zeros(1, 8, dtype=torch.int64))
    finally:
        dist.destroy_process_group()


def test_a_part_of_a_fused_layer_under_fsdp_by_itself_is_refused(tmp_path):
    mp.start_processes(wrapped_by_itself, (str(tmp_path),), nprocs=1, start_method="fork")
