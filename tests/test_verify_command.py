"""The whole command on the embedded model: real vLLM, the real trainer engine, each in its process."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def verify(folder, *words: str) -> tuple[int, dict, str]:
    out = folder / "result.json"
    command = [sys.executable, "-m", "jetrl.verify", f"run.dir={folder}", "--json", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert out.is_file(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_unified_fp8_shares_every_operator_but_attention_and_each_mutation_is_named(tmp_path):
    """VeRL-CPU attends with SDPA and vLLM-CPU with its own kernel."""
    code, result, said = verify(
        tmp_path, "precision=unified_fp8", "--sequences", "6", "--lengths", "60,9,60", "--prompt-lengths", "100,7",
        "--kv-cache-tokens", "512", "actor_rollout_ref.rollout.max_num_seqs=3", "--mutations",
    )  # fmt: skip
    assert code == 0, said
    assert result["mismatch"]["all"]["tokens"] == 2 * (60 + 9 + 60)
    # Three blocks of 128 tokens: two long prompts fit, and not what they become.
    assert result["engine"]["largest_batch"] >= 2 and result["engine"]["preemptions"] >= 1
    own = {e["operator"] for e in result["operators"] if e["own"]["differing"]}
    assert own <= {"model.layers.0.self_attn", "model.layers.1.self_attn", "log_softmax", "model.rotary_emb"}
    seen = [e for e in result["operators"] if e["seen"]["rows"]]
    assert len(seen) >= 30
    assert any(e["seen"]["rows"] > 2 and e["point"] == "lm_head" for e in seen)
    assert "up to 160 tokens were followed over the first 96: see further with --layer-tokens" in said
    assert {m["found"] for m in result["mutations"] if m["side"] == "trainer"} == {True}, result["mutations"]
    # In the rollout nothing that is shared is perturbed there: the two attentions and tables differ to begin with.
    verdicts = {(m["operator"], m["kind"]): m["found"] for m in result["mutations"] if m["side"] == "rollout"}
    apart = {key for key, found in verdicts.items() if found is None}
    assert apart <= {("model.layers.1.self_attn", "attention"), ("model.rotary_emb", "table")}
    assert all(found for key, found in verdicts.items() if key not in apart), result["mutations"]


def test_a_bound_that_fp8_rollout_exceeds_is_exit_code_1(tmp_path):
    """A stock BF16 trainer under an FP8 rollout: 3 % a product is no 1e-6. The linear layers are named."""
    words = ("precision=fp8_rollout", "--sequences", "2", "--lengths", "24", "--max-kl", "1e-6")
    code, result, said = verify(tmp_path, *words)
    assert code == 1 and "is above --max-kl 1e-06" in said
    own = {e["operator"] for e in result["operators"] if e["own"]["differing"]}
    assert {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)} <= own


def test_the_exact_flow_has_no_differing_token_and_a_mutation_is_all_that_is_named(tmp_path):
    """Chunked prefill and a decode batch that grows; attention is jetrl's row-wise one on both sides."""
    code, result, said = verify(
        tmp_path, "precision=unified_exact", "--sequences", "4", "--lengths", "12,24", "--layer-tokens", "48",
        "--mutations", "actor_rollout_ref.rollout.max_num_batched_tokens=16", "actor_rollout_ref.rollout.max_num_seqs=4",
    )  # fmt: skip
    assert code == 0 and "see further" not in said, said
    assert result["mismatch"]["all"]["differing_tokens"] == 0 and result["mismatch"]["all"]["k3_kl"] == 0.0
    assert not any(e["seen"]["differing"] or e["own"]["differing"] for e in result["operators"])
    assert {m["side"] for m in result["mutations"]} == {"trainer", "rollout"} and len(result["mutations"]) == 30
    assert all(m["found"] and m["named"] == [m["operator"]] for m in result["mutations"]), result["mutations"]
