"""The trainer's verdict on what rollout workers report. The channel itself is tested on real jobs (integrations/)."""

from dataclasses import replace

import pytest
from checkpoints_for_tests import build_model

from jetrl.errors import JobError
from jetrl.integrations.protocol import versions
from jetrl.integrations.verl.handshake import RolloutHandshake, WorkerReport
from jetrl.precision.build_hf import build_training_graph, declare_from_config
from jetrl.precision.flow import load_flow


@pytest.fixture(scope="module")
def model():
    return build_model("qwen3")


def handshake(model, flow_name: str) -> RolloutHandshake:
    flow = load_flow(flow_name)
    return RolloutHandshake(flow, build_training_graph(model, flow.train))


def reports(model, flow_name: str, processes=("a", "b")) -> list[WorkerReport]:
    graph = declare_from_config(model.config, load_flow(flow_name).rollout)
    return [
        WorkerReport("vllm_server_0_0", rank, process, graph.digest(), graph.to_dict(), versions(), ("bf16", "fp8"))
        for rank, process in enumerate(processes)
    ]


def test_a_rollout_of_the_same_flow_agrees_and_then_need_not_send_its_graph_again(model, capsys):
    shake = handshake(model, "unified_fp8")
    first = reports(model, "unified_fp8")
    shake._compare(first)
    assert "is a subgraph of the trainer's (2 rollout workers)" in capsys.readouterr().out
    shake._compare([replace(r, graph=None) for r in first])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rollout", ["bf16", "unified_fp8_pow2"])
def test_a_rollout_of_another_flow_ends_the_job_with_the_operator_s_name(model, rollout):
    with pytest.raises(JobError, match=r"flow unified_fp8 claims to be unified, .*model\.layers\.0\.") as e:
        handshake(model, "unified_fp8")._compare(reports(model, rollout))
    assert "\n" not in str(e.value)


def test_a_flow_that_claims_nothing_starts_with_every_violated_edge_listed(model, capsys):
    handshake(model, "fp8_rollout")._compare(reports(model, "fp8_rollout"))
    printed = capsys.readouterr().out
    assert "flow fp8_rollout is not unified: 28 edges" in printed  # x and weight of 2 x 7 linear layers
    assert len(printed.strip().splitlines()) == 1 + 28


def test_a_restarted_worker_is_compared_again(model):
    shake = handshake(model, "unified_fp8")
    first = reports(model, "unified_fp8")
    shake._compare(first)
    restarted = reports(model, "bf16", processes=("c", "d"))
    with pytest.raises(JobError, match="claims to be unified"):
        shake._compare(restarted)


def test_workers_that_differ_from_each_other_end_the_job(model):
    mixed = [reports(model, "unified_fp8")[0], reports(model, "bf16")[1]]
    with pytest.raises(JobError, match="rollout workers run different precision graphs"):
        handshake(model, "unified_fp8")._compare(mixed)


@pytest.mark.parametrize("name", ["jetrl", "torch", "vllm"])
def test_another_version_in_a_worker_ends_the_job(model, name):
    first, second = reports(model, "unified_fp8")
    second = replace(second, versions={**versions(), name: "0.0.1"})
    with pytest.raises(JobError, match=f"rank 1 runs {name} 0.0.1 but the trainer runs"):
        handshake(model, "unified_fp8")._compare([first, second])


def test_weights_travel_as_fp8_where_both_sides_quantize_them_alike_and_every_worker_takes_it(model):
    shake = handshake(model, "unified_fp8_pow2")
    shake._compare(reports(model, "unified_fp8_pow2"))
    assert len(shake.fp8_weights) == 14 and set(shake.fp8_weights.values()) == {"pow2"}
    assert "lm_head" not in shake.fp8_weights
    first, second = reports(model, "unified_fp8_pow2", processes=("c", "d"))
    shake._compare([first, replace(second, wires=("bf16",))])
    assert shake.fp8_weights == {}
    other = handshake(model, "fp8_rollout")  # a BF16 trainer
    other._compare(reports(model, "fp8_rollout"))
    assert other.fp8_weights == {}
