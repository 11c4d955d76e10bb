"""jetrl.verify without an engine: its options, its figures, and that a mutated operator is the only one it names."""

import functools
import math
import threading

import pytest
import torch
from checkpoints_for_tests import VOCAB, build_model
from omegaconf import OmegaConf

from jetrl.convert import convert
from jetrl.errors import UserError
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment
from jetrl.verification import command, mutations, mutations_trainer
from jetrl.verification.compare import difference, quantized_difference
from jetrl.verification.mismatch import mismatch
from jetrl.verification.operators import first_difference, operator_report, own_differences
from jetrl.verification.points import ROTARY_TABLE, PointRows, PointStore
from jetrl.verification.report import failures
from jetrl.verification.trainer_points import TokenLayout, TrainerObserver
from jetrl.verification.workspace import Options, Workspace
from jetrl.verify import main, parse

LENGTHS = (19, 7)
NO_DECODE = torch.zeros(2, dtype=torch.bool)


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "0"], "0 is no whole number of at least 1"),
        (["--max-kl", "-1"], "-1 is no number of at least 0"),
        (["--sequences", "many"], "many is no whole number"),
        (["--lenghts", "3"], "--lenghts is unknown"),
        (["--mutations", "--layer-sequences", "0"], "--mutations needs operators"),
    ],
)
def test_a_bad_option_is_refused_by_value(words, message):
    with pytest.raises(UserError, match=message):
        parse(words)


def test_words_that_are_no_options_are_the_jobs():
    options, file, words = parse(["+model=tiny", "--lengths", "4,9", "precision=bf16", "--json", "x"])
    assert (options.lengths, file, words) == ((4, 9), "x", ["+model=tiny", "precision=bf16"])
    assert [options.output_length(i) for i in range(3)] == [4, 9, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["actor_rollout_ref.model.path=/no/such"], "actor_rollout_ref.model.path=/no/such does not exist"),
        (["precision=fp9"], "precision=fp9 is unknown; allowed: auto, bf16"),
        (["precision=unified_exakt"], "did you mean unified_exact?"),
        (["+foo.bar=1"], "+foo.bar=1: foo is not a key, and nothing would read it"),
        (["trainer.nosuch=1"], "trainer.nosuch is not a key"),
        pytest.param(
            ["+actor_rollout_ref.rollout.nosuch=1"], "actor_rollout_ref.rollout.nosuch", marks=pytest.mark.slow
        ),
        (["--lengths", "64,9000"], "the model has 2048; give shorter --lengths"),
        (["precision=fp8_vllm", "hardware=cpu"], "VeRL quantizes its weights with a GPU kernel"),
        (["-m"], "-m is unknown"),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file cannot be written"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(words, message, capsys, tmp_path):
    assert main([*words, f"run.dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said


@pytest.mark.parametrize(
    ("engine", "prompts", "together"),
    [
        ({"kv_cache_memory_bytes": 1 << 30}, (9,), True),
        ({"kv_cache_memory_bytes": 1 << 30}, (), False),
        ({}, (9,), False),
    ],
)
def test_the_observed_engine_runs_beside_the_jobs_where_neither_disturbs_the_other(engine, prompts, together, tmp_path):
    rollout = {"tensor_model_parallel_size": 1, "enforce_eager": False, "engine_kwargs": {"vllm": engine}}
    cfg = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    both, running, most = threading.Barrier(2), set(), []

    def start(space, step, module, arguments, env):
        running.add(step)
        if together:
            both.wait(timeout=20)  # each must have begun before either ends
        most.append(len(running))
        if together:
            both.wait(timeout=20)
        running.discard(step)
        return 1.0

    said = []
    command._run_rollout(cfg, Options(prompt_lengths=prompts), Workspace(tmp_path), said.append, start, {})
    assert most == ([2, 2] if together else [1, 1])
    assert said == ["rollout sampled, 1 s", "rollout observed in eager mode, 1 s"]


# Figures ------------------------------------------------------------------------------------------------------------


def test_mismatch_counts_bits_and_buckets_by_position_and_length():
    rollout = [torch.full((20,), -1.0), torch.full((5,), -2.0)]
    trainer = [t.clone() for t in rollout]
    trainer[0][17] += 0.5
    trainer[1][0] = torch.nextafter(trainer[1][0], torch.tensor(0.0))
    result = mismatch(rollout, trainer)
    assert result["all"]["tokens"] == 25 and result["all"]["differing_tokens"] == 2
    assert result["all"]["abs_logprob_diff_max"] == 0.5
    assert math.isclose(result["all"]["k3_kl"], (math.exp(0.5) - 1.5) / 25, rel_tol=1e-6)
    assert [(b["from"], b["to"], b["differing_tokens"]) for b in result["by_position"]] == [(0, 16, 1), (16, 20, 1)]
    assert [(f["sequence"], f["position"]) for f in result["first_differing"]] == [(1, 0), (0, 17)]
    assert [(b["length"], b["tokens"], b["differing_tokens"]) for b in result["by_length"]] == [(5, 5, 1), (20, 20, 1)]


def test_difference_is_in_bits_and_relative_to_the_row():
    rollout = torch.tensor([[100.0, 1e-3], [2.0, 1.0]], dtype=torch.bfloat16)
    trainer = rollout.clone()
    assert difference(rollout, trainer, NO_DECODE).equal
    trainer[0, 1] = 2e-3
    found = difference(rollout, trainer, torch.tensor([False, True]))
    assert (found.values, found.differing, found.prefill_rows, found.decode_rows) == (4, 1, 1, 0)
    assert found.max_relative == pytest.approx(1e-5, rel=0.02)  # 1e-3 beside a row's 100
    negative = -torch.zeros_like(rollout)
    assert difference(torch.zeros_like(rollout), negative, NO_DECODE).differing == 4


def test_a_scale_alone_is_a_difference_of_quantized_tensors():
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    codes, scale = torch.ops.jetrl.quantize_tiles(x, "fp32")
    other = scale.clone()
    other[1, 0] *= 1 + 2**-20
    found = quantized_difference((codes, scale), (codes, other), torch.tensor([False, True]))
    assert (found.differing, found.prefill_rows, found.decode_rows) == (1, 0, 1)


def test_an_exact_flow_fails_on_one_token_and_a_bound_on_its_kl():
    figures = {"tokens": 9, "differing_tokens": 1, "k3_kl": 0.25}
    flow = {"name": "mine", "train": {"exact": False}, "rollout": {"exact": False}}
    assert failures({"mismatch": {"all": figures}, "flow": flow}, Options()) == []
    assert (
        "0.25 is above --max-kl 0.1" in failures({"mismatch": {"all": figures}, "flow": flow}, Options(max_kl=0.1))[0]
    )
    nan = {**figures, "k3_kl": float("nan")}
    assert failures({"mismatch": {"all": nan}, "flow": flow}, Options(max_kl=0.1))
    exact = {"name": "mine", "train": {"exact": True}, "rollout": {"exact": True}}
    assert "1 tokens differ" in failures({"mismatch": {"all": figures}, "flow": exact}, Options())[0]


# Operators ----------------------------------------------------------------------------------------------------------


class _Recorder(TrainerObserver):
    """Keeps what it sees instead of comparing: the part of the rollout, in this file."""

    def __init__(self, module, layout) -> None:
        super().__init__(module, layout, {}, feed=False)
        self.store = PointStore()
        self.index = torch.tensor([(i, p) for i, n in enumerate(layout.lengths) for p in range(n)])

    def see_table(self, cos, sin) -> None:
        half = cos.shape[-1] // 2
        both = torch.cat([t[..., :half] for t in (cos, sin)], dim=-1)
        self.see(ROTARY_TABLE, both.expand(self.layout.shape[0], -1, -1))

    def see(self, point, out) -> None:
        if point not in self.store.parts:
            line, column = self.layout.places(self.index)
            lines, columns = self.layout.shape
            rows = out if tuple(out.shape[:2]) == (lines, columns) else out.view(lines, columns, *out.shape[1:])
            data = rows[line, column].reshape(len(self.index), -1)
            self.store.add(point, self.index, data, torch.zeros(len(self.index), dtype=torch.bool))


def trainer(architecture: str, linear: str, fused: bool) -> torch.nn.Module:
    model = build_model(architecture).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # with ones, a rounding that is left out would not be seen
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    graph = build_training_graph(model, PrecisionAssignment(linear=linear))
    convert(model, graph, fuse_layers=fused)
    return model


def forward(model: torch.nn.Module, observer: TrainerObserver) -> TrainerObserver:
    """A padded batch of two sequences, as the trainer without packing has it."""
    ids = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    with observer, torch.no_grad():
        model(ids, attention_mask=mask.long(), use_cache=False)
    return observer


@functools.cache
def unfused_rollout(architecture: str, linear: str) -> dict[str, PointRows]:
    """Stands for vLLM, which runs the same operators one by one."""
    return rollout_of(trainer(architecture, linear, fused=False))


def rollout_of(model: torch.nn.Module) -> dict[str, PointRows]:
    return forward(model, _Recorder(model, TokenLayout(LENGTHS, packed=False))).store.finish()


def observed(model: torch.nn.Module, rollout: dict[str, PointRows], feed: bool, mutation=None) -> TrainerObserver:
    return forward(model, TrainerObserver(model, TokenLayout(LENGTHS, packed=False), rollout, feed, mutation))


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",
        pytest.param("qwen2-bias", marks=pytest.mark.slow),
        pytest.param("llama-ragged-tied", marks=pytest.mark.slow),
    ],
)
def test_a_fused_layer_is_seen_at_every_point_and_equals_the_unfused_one(architecture):
    rollout = unfused_rollout(architecture, "fp8")
    model = trainer(architecture, "fp8", fused=True)
    plain, fed = observed(model, rollout, feed=False), observed(model, rollout, feed=True)
    report = operator_report(plain, fed, layers=2)
    assert first_difference(report) is None and own_differences(report) == []
    assert {entry["point"] for entry in report} == set(rollout)


@pytest.mark.parametrize(
    ("linear", "fused"), [("bf16", False), pytest.param("fp8", False, marks=pytest.mark.slow), ("fp8", True)]
)
def test_a_mutated_operator_is_named_and_no_other(linear, fused):
    rollout = unfused_rollout("qwen3", linear)
    model = trainer("qwen3", linear, fused)
    baseline = observed(model, rollout, feed=True)
    assert own_differences(operator_report(baseline, baseline, layers=2)) == []
    seen = []

    def observe(mutation):
        with mutations_trainer.applied(mutation, model, TokenLayout(LENGTHS, packed=False)) as now:
            fed = observed(model, rollout, feed=True, mutation=now)
        named = {entry["operator"] for entry in own_differences(operator_report(fed, fed, layers=2))}
        seen.append((named, {mutation.operator} if now.ran else set()))
        return fed if now.ran else None

    results = mutations.run_trainer(mutations.mutations_of_module(model), observe, baseline)
    assert all(named == expected for named, expected in seen), seen
    # Here nobody takes a log-softmax, and a BF16 layer quantizes nothing.
    untried = {"log_softmax", "temperature", "mask"} | ({"quantizer"} if linear == "bf16" else set())
    assert {r["kind"] for r in results if r["found"] is None} == untried
    assert all(r["found"] for r in results if r["kind"] not in untried), results


def test_without_feeding_a_mutation_spreads_and_is_first():
    rollout, model = unfused_rollout("qwen3", "bf16"), trainer("qwen3", "bf16", fused=False)
    mutation = next(m for m in mutations.mutations_of_module(model) if m.kind == "attention")
    with mutations_trainer.applied(mutation, model, TokenLayout(LENGTHS, packed=False)) as now:
        plain = observed(model, rollout, feed=False, mutation=now)
    report = operator_report(plain, plain, layers=2)
    assert first_difference(report)["operator"] == mutation.operator
    assert len([entry for entry in report if entry["seen"]["differing"]]) > 5


@pytest.mark.parametrize("which", ["self_attn.q_norm", "self_attn.residual_add", "post_attention_layernorm"])
def test_a_fused_kernel_says_which_of_its_halves_the_rollout_computes_otherwise(which):
    """q/k norm with rotary and residual sum with norm are one kernel each in the trainer; the rollout's are separate."""
    stock = trainer("qwen3", "fp8", fused=False)
    mutation = next(m for m in mutations.mutations_of_module(stock) if m.operator.endswith(f"layers.1.{which}"))
    with mutations_trainer.applied(mutation, stock, TokenLayout(LENGTHS, packed=False)):
        rollout = rollout_of(stock)
    model = trainer("qwen3", "fp8", fused=True)
    baseline = observed(model, unfused_rollout("qwen3", "fp8"), feed=True)
    result = mutations.judge_rollout(mutation, observed(model, rollout, feed=True), baseline)
    assert result["found"] and result["named"] == [mutation.operator], result


def test_an_operator_that_differs_anyway_and_one_that_nobody_sees_have_no_verdict():
    model = trainer("qwen3", "bf16", fused=False)
    rollout = dict(unfused_rollout("qwen3", "bf16"))
    mutation = next(m for m in mutations.mutations_of_module(model) if m.kind == "silu")
    off = rollout[mutation.operator]
    rollout[mutation.operator] = PointRows(off.index, off.data + 1, off.decode)
    fed = observed(model, rollout, feed=True)
    assert mutations.judge_rollout(mutation, fed, fed)["verdict"].startswith("not shared in this flow")
    del rollout[mutation.operator]
    fed = observed(model, rollout, feed=True)
    assert mutations.judge_rollout(mutation, fed, fed)["verdict"] == "not observed"
    assert mutations.run_trainer([mutation], None, fed)[0]["found"] is None


def test_a_packed_batch_is_read_by_its_sequences():
    layout = TokenLayout(LENGTHS, packed=True)
    index = torch.tensor([[0, 0], [0, 18], [1, 0], [1, 6]])
    assert layout.shape == (1, 26) and layout.places(index)[1].tolist() == [0, 18, 19, 25]
