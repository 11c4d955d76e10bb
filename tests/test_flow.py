"""Flows as they travel: shipped files, the wire form that reaches the workers, and what is refused."""

import json
from dataclasses import replace

import pytest

from jetrl.errors import UserError
from jetrl.precision.flow import DEFAULT_FLOW, flow_from_dict, flow_names, load_flow
from jetrl.precision.formats import LinearFormat, TensorFormat


@pytest.mark.parametrize("name", flow_names())
def test_every_shipped_flow_loads_under_its_own_name_and_travels_by_name(name):
    flow = load_flow(name)
    assert flow.name == name and flow.to_wire() == name


@pytest.mark.parametrize("name", ["unified_fp8", "unified_fp8_pow2"])
def test_unified_flows_assign_both_sides_alike(name):
    flow = load_flow(name)
    assert flow.unified and flow.train == flow.rollout and flow.train.linear == "fp8"


def test_no_flow_means_the_default():
    assert load_flow(None) == load_flow(DEFAULT_FLOW)


def test_a_changed_flow_travels_as_json_and_comes_back_equal():
    flow = load_flow("unified_fp8")
    changed = replace(flow, train=replace(flow.train, exclude=("model.layers.0.*",), bf16_last_layers=2))
    assert json.loads(changed.to_wire())["train"]["bf16_last_layers"] == 2
    assert load_flow(changed.to_wire()) == changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"linear": "int4"}}, "linear=int4 is unknown; allowed: bf16, fp8, vllm_fp8"),
        ({"train": {"liner": "fp8"}}, "flow.train.liner is not a key of a flow; allowed: linear, scale_format"),
        ({"colour": 1}, "flow.colour is not a key"),
        ({"rollout": {"bf16_first_layers": -1}}, "bf16_first_layers=-1 must be a whole number >= 0"),
        ({"rollout": {"kv_cache": "fp8"}}, "kv_cache=fp8 is unknown; allowed: bf16"),
        ({"train": {"linear": "vllm_fp8"}}, "only defined for the rollout"),
        ({"train": {"wgrad": "int8"}}, "flow.train.wgrad=int8 is unknown; allowed: requantize, copy, blocks, bf16"),
        ({"train": {"exact": "maybe"}}, "exact=maybe is unknown; allowed: True, False"),
        ({"rollout": {"wgrad": "copy"}}, "flow.rollout.wgrad=copy is only defined for training: set flow.train.wgrad"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_with_what_is_allowed(change, message):
    with pytest.raises(UserError, match=message) as e:
        flow_from_dict({"name": "x", "unified": True, **change})
    assert "\n" not in str(e.value)


def test_unknown_name_and_broken_json():
    with pytest.raises(UserError, match="precision=nope is unknown; allowed: bf16, fp8_rollout"):
        load_flow("nope")
    with pytest.raises(UserError, match="does not parse"):
        load_flow('{"name": ')


def test_formats_refuse_half_a_scale():
    with pytest.raises(ValueError, match="needs a granularity"):
        TensorFormat("e4m3", "none", "fp32")
    with pytest.raises(ValueError, match="granularity='1x64' is unknown"):
        TensorFormat("e4m3", "1x64", "fp32")
    assert LinearFormat.fp8_blockwise("pow2").is_fp8 and not LinearFormat.bf16().is_fp8
