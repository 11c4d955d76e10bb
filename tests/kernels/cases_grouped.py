"""The reordering in front of DeepGEMM's grouped weight gradient: each group becomes a matrix of its own."""

import pytest
import torch

gemm_grouped_triton = pytest.importorskip("jetrl_kernels.gemm_grouped_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", (1, 64, 70))
def test_groups_are_packed_one_behind_the_other(rows, generator):
    sizes = (128, 0, 384, 256)
    codes = torch.randint(0, 256, (rows, sum(sizes)), generator=generator, dtype=torch.uint8).to(DEVICE)
    first = torch.tensor([0, 1, 1, 1, 4, 4], dtype=torch.int32, device=DEVICE)
    count = torch.tensor([1, 3, 3, 3, 2, 2], dtype=torch.int32, device=DEVICE)
    expected = torch.cat([part.reshape(-1) for part in codes.split(sizes, dim=1)])
    assert torch.equal(gemm_grouped_triton.pack_groups(codes, first, count), expected)
