"""The engine VeRL's workers build, on a CPU: masters, rotary frequencies, weight caches, checkpoint and resume."""

import pytest
import torch
import torch.distributed as dist
from checkpoints_for_tests import VOCAB, build_model
from engine_for_tests import batch, build_engine, mean_log_prob_loss, start_process_group

from jetrl.errors import UserError
from jetrl.integrations.protocol import versions
from jetrl.integrations.verl.handshake import WorkerReport
from jetrl.precision.build_hf import declare_from_config
from jetrl.precision.flow import load_flow
from jetrl.weight_bundle import unbundled


@pytest.fixture(scope="module", autouse=True)
def process_group():
    start_process_group()
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_model("qwen3").to(torch.bfloat16).save_pretrained(path)
    return path


def update(engine, seed: int) -> dict:
    with engine.train_mode():
        return engine.train_batch(batch(VOCAB, seed), mean_log_prob_loss)


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}


def log_probs(engine) -> torch.Tensor:
    with engine.eval_mode():
        out = engine.forward_backward_batch(batch(VOCAB, 99), mean_log_prob_loss, forward_only=True)
    return out["model_output"]["log_probs"].values()


def test_bf16_masters_have_fp32_moments_sums_and_rotary_frequencies(folder, capsys):
    engine = build_engine(folder)
    assert "jetrl: BF16 masters with stochastic rounding (jetrl's StochasticAdamW)" in capsys.readouterr().out
    assert engine.accumulation is not None
    rotary = engine.module.model.rotary_emb
    assert rotary.inv_freq.dtype is torch.float32
    assert torch.equal(rotary.inv_freq, build_model("qwen3").model.rotary_emb.inv_freq)
    before = weights(engine)
    update(engine, 0)
    assert all(p.dtype is torch.bfloat16 and p.grad is None for p in engine.module.parameters())
    states = [s for s in engine.optimizer.state.values()]
    assert {s["exp_avg_sq"].dtype for s in states} == {torch.float32}
    assert any(not torch.equal(before[name], w) for name, w in weights(engine).items())


def test_fp32_masters_are_as_verl_ships_them(folder, capsys):
    engine = build_engine(folder, masters="fp32")
    assert "jetrl: FP32 masters (torch's AdamW)" in capsys.readouterr().out
    assert engine.accumulation is None
    assert engine.module.model.rotary_emb.inv_freq.dtype is torch.float32


def test_plain_bf16_masters_are_warned_about(folder, capsys):
    from verl.workers.config import FSDPOptimizerConfig

    engine = build_engine(folder)
    engine.optimizer_config = FSDPOptimizerConfig(lr=1e-4)
    from jetrl.integrations.verl import masters

    assert "warning: plain BF16 masters (torch's AdamW)" in masters.describe(engine._build_optimizer(engine.module))


@pytest.mark.parametrize(
    ("strategy", "sums_itself", "words"),
    [
        ("fsdp", False, "warning: "),
        ("fsdp2", False, None),
        ("fsdp", True, "is not used"),
        ("fsdp2", True, "is not used"),
    ],
)
def test_verls_deferred_reduction_is_commented_on_where_it_rounds_or_is_not_used(strategy, sums_itself, words):
    from verl.workers.config import FSDPEngineConfig

    from jetrl.integrations.verl.masters import describe_no_sync

    config = FSDPEngineConfig(strategy=strategy, use_no_sync_for_gradient_accumulation=True)
    said = describe_no_sync(config, sums_itself)
    assert (said is None) == (words is None) and (words or "") in (said or "")
    assert (
        describe_no_sync(FSDPEngineConfig(strategy=strategy, use_no_sync_for_gradient_accumulation=False), True) is None
    )


def test_the_gradient_of_a_batch_is_the_same_in_one_micro_batch_and_in_eight(folder):
    """But for how BF16 rounds inside a micro-batch: 2^-8 an operation, a few percent of an element over two layers."""
    grads = {}
    for size in (8, 1):
        engine = build_engine(folder, jetrl_flow="bf16")
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(batch(VOCAB, 0, micro_batch=size), mean_log_prob_loss)
            grads[size] = {n: p.grad.full_tensor().double() for n, p in engine.module.named_parameters()}
    for name, whole in grads[8].items():
        cosine = torch.nn.functional.cosine_similarity(whole.flatten(), grads[1][name].flatten(), dim=0)
        assert cosine > 0.999, name


def test_kept_weight_codes_are_never_stale(folder):
    """After an update the engine computes what a fresh engine with those weights computes, bit by bit."""
    kept = build_engine(folder, jetrl_weight_cache="step")
    log_probs(kept)  # fills the cache
    update(kept, 0)
    after = log_probs(kept)
    fresh = build_engine(folder, jetrl_weight_cache="micro_batch")
    before = log_probs(fresh)
    with torch.no_grad():
        for p, q in zip(fresh.module.parameters(), kept.module.parameters(), strict=True):
            p.to_local().copy_(q.to_local())
    assert torch.equal(log_probs(fresh), after)
    assert not torch.equal(before, after)


def test_a_resumed_job_makes_the_same_next_update_bit_by_bit(folder, tmp_path):
    """Weights, moments, learning rate and the random bits of the rounding; attention on a CPU is deterministic."""
    straight = build_engine(folder)
    update(straight, 0)
    straight.save_checkpoint(str(tmp_path / "checkpoint"), global_step=1)
    update(straight, 1)

    torch.manual_seed(1234)  # another process would be in another random state
    resumed = build_engine(folder)
    torch.rand(7)
    resumed.load_checkpoint(str(tmp_path / "checkpoint"), del_local_after_load=False)
    update(resumed, 1)
    expected, got = weights(straight), weights(resumed)
    assert all(torch.equal(expected[name], got[name]) for name in expected)

    # The rounding is part of it: from another random state the same update ends elsewhere.
    other = build_engine(folder)
    other.load_checkpoint(str(tmp_path / "checkpoint"), del_local_after_load=False)
    torch.manual_seed(1234)
    update(other, 1)
    assert any(not torch.equal(expected[name], w) for name, w in weights(other).items())


def test_a_resumed_job_computes_from_the_loaded_weights(folder, tmp_path):
    engine = build_engine(folder, jetrl_weight_cache="step")
    update(engine, 0)
    trained = log_probs(engine)
    engine.save_checkpoint(str(tmp_path / "checkpoint"), global_step=1)
    other = build_engine(folder, jetrl_weight_cache="step")
    log_probs(other)  # fills the cache with the codes of the initial weights
    other.load_checkpoint(str(tmp_path / "checkpoint"), del_local_after_load=False)
    assert torch.equal(log_probs(other), trained)


def test_an_unknown_key_of_jetrl_is_one_sentence(folder):
    with pytest.raises(UserError, match="jetrl_weightcache is not a key of jetrl"):
        build_engine(folder, jetrl_weightcache="step")


@pytest.mark.slow  # a sync imports VeRL's rollout, which imports vLLM
@pytest.mark.parametrize("flow", ["bf16", "fp8_rollout", "unified_fp8"])
def test_only_a_rollout_that_takes_fp8_weights_is_sent_bundles(folder, monkeypatch, flow):
    """A bf16 or fp8_vllm flow's rollout is a stock model: its load_weights ends the job at a name that it does not know."""
    engine = build_engine(folder, jetrl_flow=flow)
    graph = declare_from_config(build_model("qwen3").config, load_flow(flow).rollout)
    answer = WorkerReport("vllm_server_0_0", 0, "a", graph.digest(), graph.to_dict(), versions(), ("bf16", "fp8"))
    monkeypatch.setattr("jetrl.integrations.verl.handshake.ask_rollout", lambda known: [answer])
    sent = dict(engine.get_per_tensor_param()[0])
    state = dict(build_model("qwen3").state_dict())
    if flow == "unified_fp8":
        assert len(sent) < len(state) and dict(unbundled(sent.items())).keys() == state.keys()
    else:
        assert sent.keys() == state.keys() and {t.dtype for t in sent.values()} == {torch.bfloat16}
