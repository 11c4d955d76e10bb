"""jetrl.warm: which products a job meets, and that each of them runs."""

import json

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch

from jetrl import gemm_warmup, warm
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.gemm_shapes import Product, matrices, products

ROLLOUT = "actor_rollout_ref.rollout"
WORDS = ["model=qwen3-8b", "precision=unified_fp8", "hardware=1gpu"]
FP8, BF16 = PrecisionAssignment(linear="fp8"), PrecisionAssignment()
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip


def test_every_part_of_a_merged_matrix_is_padded_by_itself():
    # q 576 -> 640, k and v 192 -> 256 each; gate and up 1536 each; o 640 x 640.
    assert matrices(SMOLLM2) == [(1152, 640), (3072, 640), (640, 640), (640, 1536)]
    assert matrices(SMOLLM2, merged=False) == [(640, 640), (256, 640), (1536, 640), (640, 640), (640, 1536)]


def job(*words):
    return warm.plan([*WORDS, *words])[0]


def test_products_of_the_job_that_the_words_make():
    found = job()
    forward = {(6144, 4096), (24576, 4096), (4096, 4096), (4096, 12288)} | {(1024, 4096), (12288, 4096)}
    assert {(p.n, p.k) for p in found} == forward | {(k, n) for n, k in forward}
    assert {p.most_rows for p in found} == {16384}  # a micro-batch; a rollout's step has 8192


def test_the_most_rows_are_those_of_the_phase_that_has_most():
    assert {p.most_rows for p in job(f"{ROLLOUT}.log_prob_max_token_len_per_gpu=65536")} == {65536}
    own = {(p.n, p.k): p.most_rows for p in job(f"+{ROLLOUT}.engine_kwargs.vllm.max_num_batched_tokens=32768")}
    assert own[6144, 4096] == 32768 and own[4096, 6144] == 16384  # vLLM has no input gradients


def test_a_rollout_alone_has_its_shards_and_its_own_number_of_rows():
    config = {**SMOLLM2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    found = products(config, BF16, FP8, 16384, 8192, tensor_parallel=2)
    assert set(found) == {Product(n, k, 8192) for n, k in [(512, 512), (1536, 512), (512, 256), (512, 768)]}
    assert products(config, BF16, BF16, 16384, 8192, 1) == []


def test_rows_are_every_multiple_of_64_and_the_last():
    assert Product(128, 128, 256).rows() == [64, 128, 192, 256]
    assert Product(128, 128, 200).rows() == [64, 128, 192, 200]
    assert Product(128, 128, 40).rows() == [40]


def test_a_product_runs_through_jetrls_own_operators(monkeypatch):
    shapes = []
    whole = torch.ops.jetrl.gemm_nt

    def noted(a, a_scale, b, b_scale, dtype):
        shapes.append((a.shape[0], b.shape[0], a.shape[1]))
        return whole(a, a_scale, b, b_scale, dtype)

    monkeypatch.setattr(torch.ops.jetrl, "gemm_nt", noted, raising=False)
    assert gemm_warmup.run(Product(256, 128, 200), "cpu") == 4
    assert shapes == [(rows, 256, 128) for rows in (64, 128, 192, 200)]


def test_a_product_that_fails_is_named_with_its_reason(monkeypatch):
    with pytest.raises(warm.JobError, match=r'1 of 2 products did not compile \(\{"n": -128.*'):
        warm.compile_all([Product(128, 128, 64), Product(-128, 128, 64)], 2, "cpu")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["precision=bf16", "hardware=cpu"], ["precision=bf16", "unified_fp8"]),
        (["--processes", "0"], ["--processes=0"]),
        (["--nope"], ["--nope is unknown"]),
        (["precision=unified_fp8", "hardware=cpu"], ["no GPU is visible"]),
        ([*WORDS, f"{ROLLOUT}.tensor_model_parallel_size=3"], ["tensor_model_parallel_size=3 does not divide"]),
        ([*WORDS, f"{ROLLOUT}.max_num_batched_tokens=null"], ["max_num_batched_tokens=None must be a whole number"]),
    ],
)
def test_what_it_refuses_is_one_sentence(words, parts, capsys):
    if torch.cuda.is_available() and parts == ["no GPU is visible"]:
        pytest.skip("a GPU is visible")
    assert warm.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in parts)


def test_products_go_to_their_processes_as_json():
    product = Product(256, 128, 64)
    assert Product(**json.loads(json.dumps(warm.asdict(product)))) == product
