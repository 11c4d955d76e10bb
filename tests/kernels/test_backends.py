"""Which GEMM backend is chosen, and the sentence a user gets where none can be."""

import pytest
import torch
from jetrl_kernels import backends

HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)


def test_hopper_takes_deepgemm_when_it_can_run():
    assert backends._choose(HOPPER, "H200", "auto", None)[0] == "deepgemm"


def test_hopper_without_deepgemm_takes_cublaslt_and_says_why():
    assert backends._choose(HOPPER, "H200", "auto", "nvcc is missing") == ("cublaslt", "nvcc is missing")


def test_a_wish_is_kept_or_refused_with_the_backend_that_works():
    assert backends._choose(HOPPER, "H200", "triton", None)[0] == "triton"
    with pytest.raises(ValueError, match="'cublaslt' works here"):
        backends._choose(HOPPER, "H200", "deepgemm", "nvcc is missing")
    with pytest.raises(ValueError, match="can run gemm backend 'triton'"):
        backends._choose(ADA, "L40", "deepgemm", None)


def test_a_gpu_without_fp8_tensor_cores_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"A100 \(compute capability 8.0\) has no FP8 tensor cores; run the bf16 flow"):
        backends._choose(AMPERE, "A100", "auto", None)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'cutlass' is unknown; allowed: auto, deepgemm, cublaslt, triton"):
        backends.select_gemm_backend("cutlass")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reference runs only without a GPU")
def test_without_a_gpu_only_the_reference_can_be_chosen():
    backends.select_gemm_backend("auto")
    assert backends.describe_backends("auto")["gemm"] == "reference"
    with pytest.raises(ValueError, match="'triton' needs a GPU, and none is visible; 'auto' takes the torch reference"):
        backends.select_gemm_backend("triton")


def test_a_gpus_backend_is_chosen_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(backends, "_missing_for_deepgemm", lambda: None)
    monkeypatch.setattr(backends, "_wish", "auto")
    backends.current.cache_clear()
    try:
        assert backends.describe_backends("cublaslt")["wgrad"] == "cublaslt"  # asking chooses nothing
        backends.select_gemm_backend("triton")
        assert backends.describe_backends()["few_rows_gemm"] == "triton"
        backends.select_gemm_backend("auto")
        with pytest.raises(ValueError, match="'deepgemm' asked for after 'triton' already ran"):
            backends.select_gemm_backend("deepgemm")
    finally:
        backends.current.cache_clear()
