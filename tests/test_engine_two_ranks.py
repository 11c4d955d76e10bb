"""The engine VeRL's workers build, under FSDP2 over two gloo ranks."""

import pytest
import torch
from checkpoints_for_tests import build_model
from engine_rank_for_tests import everything
from fsdp_for_tests import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    build_model("qwen3").to(torch.bfloat16).save_pretrained(folder)
    return run_ranks(everything, 2, folder, str(folder))


def test_every_rank_has_the_models_weights_and_fp32_rotary_frequencies(ranks):
    model = build_model("qwen3")
    for found in ranks:
        assert torch.equal(found["inv_freq"], model.model.rotary_emb.inv_freq)
        for name, p in model.named_parameters():
            assert torch.equal(found["start"][name], p.bfloat16()), name


def test_ranks_agree_on_the_gradient_and_on_the_weights_after_an_update(ranks):
    first, second = ranks
    assert first["grad_norm"] == second["grad_norm"] > 0
    for name, tensor in first["straight"].items():
        assert torch.equal(tensor, second["straight"][name]), name
    assert any(not torch.equal(first["start"][name], t) for name, t in first["straight"].items())


def test_the_sync_sends_the_codes_of_the_gathered_weights(ranks):
    assert all(found["wire"] for found in ranks)


def test_a_resumed_job_makes_the_same_next_update_bit_by_bit(ranks):
    for found in ranks:
        assert found["loaded"]
        assert all(torch.equal(found["resumed"][name], t) for name, t in found["straight"].items())
