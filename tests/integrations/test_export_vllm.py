"""The BF16 export in stock vLLM on a CPU, against transformers. Stock FP8 needs a GPU: tests/gpu/export_serves.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jetrl.assets
from jetrl.export import export

pytestmark = pytest.mark.slow

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=128, skip_tokenizer_init=True)
parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
result = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], parameters)[0]
print("LOGPROBS", json.dumps([row[t].logprob for t, row in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:])]))
"""


def test_stock_vllm_serves_the_bf16_export(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "exported"
    export(Path(jetrl.assets.__path__[0]) / "tiny", "bf16", folder)
    tokens = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    env = dict(
        os.environ,
        VLLM_PLUGINS="none",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
    )
    command = [sys.executable, "-c", SERVE, str(folder), json.dumps(tokens)]
    output = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    line = next((row for row in output.stdout.splitlines() if row.startswith("LOGPROBS ")), None)
    assert line, output.stderr[-3000:]
    served = torch.tensor(json.loads(line.removeprefix("LOGPROBS ")))

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    with torch.no_grad():
        log_probs = model(torch.tensor([tokens])).logits.log_softmax(-1)[0, :-1]
    expected = log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    # BF16 logits between 16 and 32 are 1/8 apart, and half of that is the rounding; a wrong weight moves them by units.
    assert (served - expected).abs().mean() < 1 / 16
    assert (served - expected).abs().max() < 1
