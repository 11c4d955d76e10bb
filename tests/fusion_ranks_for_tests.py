"""What one process of tests/test_fusion_fsdp.py does; spawned, so in a module that a child can import."""

import functools

import pytest
import torch
from checkpoints_for_tests import VOCAB, build_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from jetrl import weight_cache
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


def flat_gradients(sharded):
    """FSDP1's gradients by the model's own names: every unit's flat gradient, put together from all ranks and cut up."""
    found = {}
    for prefix, unit in sharded.named_modules():
        if not isinstance(unit, FSDP):
            continue
        flat = unit._handle.flat_param
        shards = [torch.empty_like(flat.grad) for _ in range(RANKS)]
        torch.distributed.all_gather(shards, flat.grad)
        parts = torch.cat(shards).split(
            [*flat._numels_with_padding, RANKS * len(flat) - sum(flat._numels_with_padding)]
        )
        real = [part for part, padding in zip(parts, flat._is_padding_mask, strict=False) if not padding]
        for name, shape, part in zip(flat._fqns, flat._shapes, real, strict=True):
            found[f"{prefix}.{name}".replace("_fsdp_wrapped_module.", "").lstrip(".")] = part.view(shape)
    return found


def gradients_of(kind, sharded):
    if kind == "fsdp2":
        return {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
    return flat_gradients(sharded)


def compare_updates(rank, kind, cache):
    """Two steps of two micro-batches: sharded, and the same on one process with the rows of all ranks.

    Nobody announces the steps: the sharded model has to see them.
    """
    quantized, stock = [0], weight_cache._quantize

    def counting(use, weights, scale_format):
        quantized[0] += len(weights)
        return stock(use, weights, scale_format)

    weights_changed()
    ids = [torch.randint(0, VOCAB, (1, 33), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    sharded, whole = wrap(kind, make(cache)), make("micro_batch")
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, whole)]
    for _ in range(2):
        for micro in range(2):
            weight_cache._quantize = counting
            loss = loss_of(sharded, ids[2 * micro + rank])
            loss.backward()
            weight_cache._quantize = stock
            # Every rank sees the mean over ranks; one process computes both ranks' rows.
            reference = sum(loss_of(whole, ids[2 * micro + r]) for r in range(RANKS)) / RANKS
            reference.backward()
        want, got = {name: p.grad for name, p in whole.named_parameters()}, gradients_of(kind, sharded)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-5)
        # 14 weights, for fprop and for dgrad, once a step or in both micro-batches (and again where one is recomputed).
        assert quantized[0] == 28 if cache == "step" else quantized[0] >= 56
        quantized[0] = 0
        for s in steps:
            s.step()
            s.zero_grad()
    # After an update with its gradients, the same logits: a lost or stale gradient or weight would show.
    with torch.no_grad():
        torch.testing.assert_close(loss_of(sharded, ids[0]), loss_of(whole, ids[0]), rtol=1e-4, atol=1e-4)
        assert abs(loss_of(whole, ids[0]) - loss_of(make("micro_batch"), ids[0])) > 1e-2


def wrap_a_part(rank):
    model = make("micro_batch")
    fully_shard(model.model.layers[0].mlp, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UserError, match="wrap whole decoder layers"):
        loss_of(model, torch.zeros(1, 8, dtype=torch.int64))
