"""Runs in each of two ranks of tests/test_engine_two_ranks.py: the real engine under FSDP2 on gloo."""

from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints_for_tests import VOCAB
from engine_for_tests import batch, build_engine, mean_log_prob_loss


def whole_weights(engine) -> dict[str, torch.Tensor]:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    return {name: tensor.clone() for name, tensor in FSDPEngine.get_per_tensor_param(engine)[0]}


def update(engine, seed: int) -> float:
    with engine.train_mode():
        data = batch(VOCAB, seed=10 * seed + dist.get_rank())
        return engine.train_batch(data, mean_log_prob_loss)["metrics"]["grad_norm"]


def everything(rank: int, folder: str) -> dict:
    from jetrl.integrations.verl.wire import quantized_on_the_way
    from jetrl.linear import quantize_weight
    from jetrl.packed_weight import parts

    torch.manual_seed(rank)
    engine = build_engine(Path(folder))
    found = {"inv_freq": engine.module.model.rotary_emb.inv_freq.clone(), "start": whole_weights(engine)}
    found["grad_norm"] = update(engine, 0)
    found["grad_dtypes"] = {p.dtype for p in engine.module.parameters()}
    checkpoint = str(Path(folder) / "checkpoint")
    engine.save_checkpoint(checkpoint, global_step=1)
    saved = whole_weights(engine)
    update(engine, 1)
    found["straight"] = whole_weights(engine)

    formats = {
        n: "fp32" for n in engine.precision_graph.linear_names() if engine.precision_graph.linear_format(n).is_fp8
    }
    sent = dict(quantized_on_the_way(iter(found["straight"].items()), formats, "cpu"))
    found["wire"] = bool(formats)
    for name in formats:
        weight = found["straight"][f"{name}.weight"]
        want, (codes, scale) = quantize_weight(weight, "fp32"), parts(sent[f"{name}.weight"], weight.shape)
        found["wire"] &= torch.equal(codes.view(torch.uint8), want.codes.view(torch.uint8))
        found["wire"] &= torch.equal(scale, want.scale)
    torch.manual_seed(1234 + rank)
    resumed = build_engine(Path(folder))
    resumed.load_checkpoint(checkpoint, del_local_after_load=False)
    found["loaded"] = all(
        torch.equal(a, b) for a, b in zip(saved.values(), whole_weights(resumed).values(), strict=True)
    )
    update(resumed, 1)
    found["resumed"] = whole_weights(resumed)
    return found
