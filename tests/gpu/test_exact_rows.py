"""Row-wise operators of the exact flow on the GPU: lm_head and log-probs of a row do not depend on the other rows."""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize("vocab,hidden", ((151936, 4096), (151936, 1024), (152064, 3584), (128256, 4096), (49152, 576)))
def test_lm_head_gives_a_row_the_same_bits_for_any_number_of_rows(vocab, hidden):
    """cuBLAS through F.linear, which both engines call: decode batches against the trainer's packs of thousands."""
    x = torch.randn(16384, hidden, device="cuda", dtype=BF16)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=BF16) * 0.02
    expected = torch.nn.functional.linear(x[:512], weight)
    differing = {}
    for m in (1, 2, 3, 8, 16, 31, 32, 64, 100, 128, 256, 384, 1000, 2048, 4096, 8192, 12345, 16384):
        out = torch.nn.functional.linear(x[:m], weight)[:512]
        n = int((out != expected[:m]).any(dim=1).sum())
        if n:
            differing[m] = n
        del out
    assert not differing, f"rows that differ by number of rows: {differing}"


def test_token_logprobs_of_a_row_do_not_depend_on_the_batch_the_dtype_or_the_mask():
    logits = (torch.randn(4096, 151936, device="cuda") * 3).to(BF16)
    ids = torch.randint(0, 151643, (4096,), device="cuda")
    t = torch.full((4096,), 0.7, device="cuda")
    expected, lse = torch.ops.jetrl.token_logprobs(logits, ids, t, 151643)
    for m in (1, 7, 256, 1024):
        masked = logits[:m].float()
        masked[:, 151643:] = float("-inf")
        got = torch.ops.jetrl.token_logprobs(masked / t[:m, None], ids[:m], torch.ones_like(t[:m]), 151936)
        assert torch.equal(got[0], expected[:m]) and torch.equal(got[1], lse[:m])
    z = logits[:64, :151643].double() / t[:64, None].double()
    exact = torch.log_softmax(z, -1).gather(1, ids[:64, None]).squeeze(1)
    # See tests/kernels/cases_exact.py: float32 roundings of values up to 40, and 1e-6 of the sum.
    torch.testing.assert_close(expected[:64].double(), exact, rtol=0, atol=4 * 40 * 2.0**-24 + 2e-6)
