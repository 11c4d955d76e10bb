"""Fused layers under FSDP1 (flat parameters) and FSDP2 on two processes: the gradients are those without FSDP."""

import pytest
from fsdp_for_tests import run_ranks
from fusion_ranks_for_tests import RANKS, compare_updates, wrap_a_part


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["micro_batch", "step"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_updates_under_fsdp_are_those_without(kind, cache, tmp_path):
    run_ranks(compare_updates, RANKS, tmp_path, kind, cache)


def test_a_part_of_a_fused_layer_under_fsdp_by_itself_is_refused(tmp_path):
    run_ranks(wrap_a_part, 1, tmp_path)
