"""Flow unified_exact on the CPU engines: a token's log-probability has the bits that vLLM sampled it with."""

import os
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl import assets, attention
from jetrl.convert import convert
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import load_flow
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.subgraph import check
from jetrl.precision.trainer_kernels import exact_graph

pytestmark = pytest.mark.slow
TINY = os.path.join(os.path.dirname(assets.__file__), "tiny")
TEMPERATURE = 0.7
LENGTHS = (3, 40, 17, 64, 8, 33, 60, 5, 20, 48)
# A prefill of more tokens than CHUNK is computed in several steps. Every other prompt starts alike, for the prefix cache.
CHUNK, BLOCK, SHARED = 64, 16, 48
LONGEST = 256
# What the longest sequence that vLLM would take needs, and the null block: too few for eight sequences of 150 tokens.
BLOCKS = LONGEST // BLOCK + 1


def _kernels(model) -> dict:
    from jetrl.integrations.vllm.exact import rollout_kernels
    from jetrl.precision.build_vllm import build_rollout_graph
    from jetrl.precision.kernels import with_kernels

    return with_kernels(build_rollout_graph(model), rollout_kernels(model)).to_dict()


@pytest.fixture(scope="module")
def rollout():
    """(sequences as prompt, answer, log-probabilities; the live engine's graph; how often vLLM did what is hard).

    Hard: a preempted sequence is computed again, in chunks and in other batches; its cached blocks and those of a prompt
    that starts alike are not.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        TINY, quantization="jetrl", additional_config={"jetrl_flow": "unified_exact"}, skip_tokenizer_init=True,
        enforce_eager=True, dtype="bfloat16", max_model_len=LONGEST, max_num_seqs=8, max_num_batched_tokens=CHUNK,
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.1, block_size=BLOCK, num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True, disable_log_stats=False,
    )  # fmt: skip
    rng = random.Random(3)
    start = [rng.randrange(5, 500) for _ in range(SHARED)]
    prompts = [[rng.randrange(5, 500) for _ in range(rng.randrange(2, 90))] for _ in LENGTHS]
    prompts = [start + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in LENGTHS
    ]
    sequences, cached = [], 0
    for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        logprobs = torch.tensor([step[i].logprob for step, i in zip(answer.logprobs, ids, strict=True)])
        sequences.append((list(output.prompt_token_ids), ids, logprobs))
        cached += output.num_cached_tokens
    hard = {
        "preemptions": sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"),
        "cached tokens": cached,
        "prompts in chunks": sum(len(prompt) > CHUNK for prompt in prompts),
    }
    graph = PrecisionGraph.from_dict(llm.apply_model(_kernels)[0])
    del llm
    cleanup_dist_env_and_memory()
    return sequences, graph, hard


@pytest.fixture(scope="module")
def trainer():
    attention.register()
    flow, config = load_flow("unified_exact"), AutoConfig.from_pretrained(TINY)
    choice = attention.require_exact(config, "cpu", True)
    model = AutoModelForCausalLM.from_pretrained(
        TINY, config=config, dtype=torch.bfloat16, attn_implementation=choice.name
    )
    graph = build_training_graph(model, flow.train)
    convert(model, graph)
    return model, exact_graph(model, graph)


def _log_probs(model, pack) -> torch.Tensor:
    ids = torch.tensor([t for prompt, answer, _ in pack for t in prompt + answer])
    positions = torch.cat([torch.arange(len(p) + len(a)) for p, a, _ in pack])
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    found = attention.token_logprobs(logits, ids.roll(-1), torch.full((len(ids),), TEMPERATURE), logits.shape[-1])
    pieces, start = [], 0
    for prompt, answer, _ in pack:
        end = start + len(prompt) + len(answer)
        pieces.append(found[start + len(prompt) - 1 : end - 1])
        start = end
    return torch.cat(pieces)


def test_the_rollout_preempted_and_read_its_prefix_cache_and_prefilled_in_chunks(rollout):
    assert all(count > 0 for count in rollout[2].values()), rollout[2]


@pytest.mark.parametrize("size", (1, 5, len(LENGTHS)))
@pytest.mark.parametrize("autograd", (False, True))
def test_a_token_has_its_rollout_bits_in_any_pack(rollout, trainer, size, autograd):
    sequences, (model, _) = rollout[0], trainer
    packs = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    with torch.set_grad_enabled(autograd):
        new = torch.cat([_log_probs(model, pack) for pack in packs])
    old = torch.cat([s[2] for s in sequences])
    assert len(old) == sum(LENGTHS) and torch.equal(new.detach(), old)
    if autograd:
        new.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_another_attention_kernel_in_the_trainer_would_be_seen(rollout, trainer):
    sequences, (model, _) = rollout[0], trainer
    model.config._attn_implementation = "sdpa"
    try:
        with torch.no_grad():
            new = _log_probs(model, sequences)
    finally:
        model.config._attn_implementation = "jetrl_rows"
    assert not torch.equal(new, torch.cat([s[2] for s in sequences]))


def test_the_live_engine_runs_the_kernels_that_the_trainer_runs(rollout, trainer):
    assert check(rollout[1], trainer[1]) == []
