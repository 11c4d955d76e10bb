"""The plug-in inside real vLLM (CPU engine): what is stored, what a weight sync does, and what a faulty one says."""

import os

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, VOCAB, build_model, save_checkpoint
from jetrl_kernels.constants import pad_to_tile

from jetrl.convert import convert
from jetrl.errors import JobError
from jetrl.linear import quantize_weight
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import load_flow

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 17, 33, 2], [7, 7, 1], list(range(40, 90))]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def engine(request, tmp_path_factory):
    """(architecture, LLM) with the worker in this process, so that tests can look at its layers."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from vllm import LLM

    folder = save_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    llm = LLM(
        str(folder),
        quantization="jetrl",
        skip_tokenizer_init=True,
        enforce_eager=True,
        # FP32 carriers: the arithmetic around the layer then adds next to nothing, so a mismatch is the layer's.
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
    )
    yield request.param, llm
    del llm
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def sync(llm, state: dict[str, torch.Tensor], buckets: int = 3) -> None:
    """What VeRL's worker extension does: load_weights per bucket, then post-processing once."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, items = model_of(llm), list(state.items())
    for i in range(buckets):
        model.load_weights(items[i * len(items) // buckets : (i + 1) * len(items) // buckets])
    process_weights_after_loading(model, llm.llm_engine.model_config, torch.device("cpu"))


def stored(llm) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of each logical matrix, by canonical name, cut out of vLLM's merged layers."""
    found = {}
    for module in model_of(llm).modules():
        receiver = getattr(module, "jetrl_receiver", None)
        if receiver is None:
            continue
        start = 0
        for name, n in zip(receiver.names, receiver.out_features, strict=True):
            rows = pad_to_tile(n)
            scale = module.weight_scale[start // 128 : (start + rows) // 128]
            found[name] = (module.weight[start : start + rows].view(torch.uint8).clone(), scale.clone())
            start += rows
    return found


def test_every_logical_matrix_is_stored_as_the_trainer_quantizes_it(engine):
    architecture, llm = engine
    state = build_model(architecture).state_dict()
    codes_and_scales = stored(llm)
    assert len(codes_and_scales) == 7 * 2
    for name, (codes, scale) in codes_and_scales.items():
        want = quantize_weight(state[f"{name}.weight"], "fp32")
        assert torch.equal(codes, want.codes.view(torch.uint8)), name
        assert torch.equal(scale, want.scale), name


def test_no_unquantized_copy_of_a_weight_is_kept(engine):
    _, llm = engine
    projections = {n: p for n, p in model_of(llm).named_parameters() if n.endswith("_proj.weight")}
    assert len(projections) == 4 * 2 and {p.dtype for p in projections.values()} == {torch.float8_e4m3fn}


def test_rollout_log_probs_follow_the_trainer_with_the_layer_and_not_without(engine):
    """Same tokens, trainer's forward with and without jetrl's layer, FP32 around it on both sides. What is left with the
    layer are activations that FP32 rounding differences push over an FP8 rounding boundary."""
    from vllm import SamplingParams

    architecture, llm = engine
    sync(llm, build_model(architecture).state_dict())
    params = SamplingParams(temperature=1.0, max_tokens=48, logprobs=0, seed=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
    fp8 = build_model(architecture)
    convert(fp8, build_training_graph(fp8, load_flow("unified_fp8").train))
    difference = {}
    for label, trainer in (("fp8", fp8), ("unquantized", build_model(architecture))):
        gaps = []
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            with torch.no_grad():
                logits = trainer(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
            mine = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
            theirs = torch.tensor([step[t].logprob for step, t in zip(output.outputs[0].logprobs, tokens, strict=True)])
            gaps.append((mine - theirs).abs())
        difference[label] = torch.cat(gaps).mean().item()
    assert logits.shape[-1] == VOCAB
    assert difference["fp8"] < difference["unquantized"] / 50, difference


def test_sync_is_in_place_and_independent_of_the_bucket_size(engine):
    architecture, llm = engine
    pointers = {n: p.data_ptr() for n, p in model_of(llm).named_parameters()}
    new = build_model(architecture, seed=1).state_dict()
    sync(llm, new, buckets=3)
    first = stored(llm)
    sync(llm, {n: w.to(torch.bfloat16) for n, w in new.items()}, buckets=1)  # whatever dtype the trainer ships
    second = stored(llm)
    assert pointers == {n: p.data_ptr() for n, p in model_of(llm).named_parameters()}
    for name in first:
        assert torch.equal(first[name][0], second[name][0]) and torch.equal(first[name][1], second[name][1]), name
        assert torch.equal(first[name][0], quantize_weight(new[f"{name}.weight"], "fp32").codes.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "model.layers.1.self_attn.k_proj was not received"),
        ("shape", "model.layers.1.self_attn.k_proj arrived as a weight of shape"),
        ("dtype", "model.layers.1.self_attn.k_proj arrived as torch.int8"),
        ("nan", "model.layers.1.self_attn.k_proj holds NaN or Inf"),
    ],
)
def test_a_faulty_sync_names_the_weight_after_the_last_bucket(engine, fault, message):
    architecture, llm = engine
    name = "model.layers.1.self_attn.k_proj.weight"
    state = build_model(architecture).state_dict()
    good = dict(state)
    if fault == "missing":
        del state[name]
    elif fault == "shape":
        state[name] = state[name][:, :-1]
    elif fault == "dtype":
        state[name] = state[name].to(torch.int8)
    else:
        state[name] = state[name].clone().fill_(float("nan"))
    with pytest.raises(JobError, match=message):
        sync(llm, state)
    sync(llm, good)  # and the next whole one works
