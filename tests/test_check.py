"""`python -m jetrl.check`: verdicts, exit codes, output forms, and the sentences for bad input."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from transformers import Qwen3Config

from jetrl.check import main
from jetrl.precision.architectures import bundled, load_config
from jetrl.precision.flow import flow_names

QWEN3_8B = "actor_rollout_ref.model.path=Qwen/Qwen3-8B"
HARDWARE = "hardware=8gpu"
VERL = ["verl", QWEN3_8B]
TRAINER = "actor_rollout_ref.model.external_lib=jetrl.integrations.verl"
ROLLOUT = "+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=jetrl"


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def result(capsys, *words):
    code, out, err = run(capsys, "--json", *words)
    assert err == ""
    return code, json.loads(out)


# Every flow once and every model once; tests/test_graph.py has all combinations.
@pytest.mark.parametrize(
    ("path", "flow"),
    [("Qwen/Qwen3-8B", flow) for flow in flow_names()]
    + [(entry["names"][0], "unified_fp8") for entry in bundled().values()],
)
def test_models_and_flows(capsys, path, flow):
    code, data = result(capsys, f"+precision={flow}", HARDWARE, f"actor_rollout_ref.model.path={path}")
    assert code == data["exit_code"] == 0 and data["flow"] == flow
    assert ("not unified" in data["verdict"]) == (flow in ("fp8_rollout", "fp8_vllm"))
    assert "bundled copy" in data["model"]["config"]
    linear = next(row for row in data["operators"] if row["kind"] == "linear")
    fp8 = "e4m3 1x128" if flow != "unified_fp8_pow2" else "e4m3 1x128 pow2"
    assert linear["fprop"].startswith(fp8 if flow.startswith("unified") else "bf16")
    assert linear["count"] == 7 * load_config(path)[0].num_hidden_layers
    names = {(v["operator"].rpartition(".")[2], v["tensor"]) for v in data["violations"]}
    if data["violations"]:
        projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        assert names == {(p, t) for p in projections for t in ("x", "weight")}
        assert len(data["violations"]) == 2 * linear["count"]


def test_the_table_is_for_people(capsys):
    code, out, _ = run(capsys, HARDWARE, QWEN3_8B)
    assert code == 0
    linear = next(line for line in out.splitlines() if line.startswith("linear "))
    assert linear.split()[1] == "252" and "e4m3 1x128 * 128x128" in linear and "e4m3 128x1" in linear
    assert "verdict: unified: all" in out and "bundled copy" in out and "recommendation" in out
    assert max(map(len, out.splitlines())) < 160


def test_a_unified_flow_that_is_violated_exits_with_1(capsys):
    code, data = result(capsys, HARDWARE, QWEN3_8B, "flow.rollout.bf16_first_layers=1")
    assert code == 1 and data["verdict"].startswith("VIOLATED")
    assert {v["key"] for v in data["violations"]} == {"flow.train.bf16_first_layers"}
    assert {v["operator"].split(".")[2] for v in data["violations"]} == {"0"}
    code, out, _ = run(capsys, HARDWARE, QWEN3_8B, "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8")
    assert code == 1 and "36 operators (model.layers.0.self_attn, " in out and "kv_cache_dtype: set it to auto" in out
    # 18944 / 8 = 2368 = 18.5 blocks.
    other = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"
    code, out, _ = run(capsys, HARDWARE, other, "actor_rollout_ref.rollout.tensor_model_parallel_size=8")
    assert code == 1 and "cut at tensor-parallel size 8 (2368 columns a rank)" in out and "use one of 1, 2, 4" in out


def test_exclusions_are_listed_with_what_they_matched(capsys):
    code, out, _ = run(capsys, HARDWARE, QWEN3_8B, "flow.train.exclude=[model.layers.3.mlp.*]")
    assert code == 0
    assert (
        "train and rollout: exclude=model.layers.3.mlp.* keeps 3 linear layers unquantized: model.layers.3.mlp." in out
    )


@pytest.mark.parametrize(
    ("overrides", "code", "flow", "verdict"),
    [
        ([], 0, "bf16", "unified"),
        ([TRAINER, ROLLOUT], 0, "unified_fp8", "unified"),
        ([TRAINER], 1, "unified_fp8", "VIOLATED"),
        ([ROLLOUT], 1, "unified_fp8", "VIOLATED"),
        (["actor_rollout_ref.rollout.quantization=fp8"], 0, "fp8_vllm", "not unified"),
        ([TRAINER, "actor_rollout_ref.rollout.quantization=fp8"], 1, "unified_fp8", "VIOLATED"),
        ([TRAINER, ROLLOUT, "+actor_rollout_ref.model.override_config.jetrl_flow=unified_fp8_pow2"], 1, "unified_fp8_pow2", "VIOLATED"),
    ],
)  # fmt: skip
def test_existing_verl_command_lines(capsys, overrides, code, flow, verdict):
    got, data = result(capsys, *VERL, "actor_rollout_ref.rollout.tensor_model_parallel_size=1", *overrides)
    assert (got, data["flow"]) == (code, flow) and data["verdict"].startswith(verdict)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["precision=nope"], ["precision=nope", "unified_fp8"]),
        (["--no-such-flag"], ["--no-such-flag", "--json"]),
        (["actor_rollout_ref.model.path=/no/such/model"], ["/no/such/model"]),
        ([HARDWARE, QWEN3_8B, "flow.train.exclude=[q_proj]"], ["flow.train.exclude", "'q_proj'", "nearest are model.layers."]),
        (["verl", "no.such.key=1", QWEN3_8B], ["no.such.key=1"]),
        (["verl", *VERL[1:], "actor_rollout_ref.rollout.quantization=torchao"], ["quantization=torchao", "fp8"]),
        ([HARDWARE, QWEN3_8B, "--svg", "/no/such/folder/x.svg"], ["/no/such/folder/x.svg"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, words, parts):
    code, out, err = run(capsys, *words)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert all(part in err for part in parts)


def test_the_bundled_architectures_need_no_network():
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "jetrl.check", "model=qwen3-8b", HARDWARE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "bundled copy" in done.stdout


def test_a_model_folder_is_read_and_says_so(capsys, tmp_path):
    sizes = dict(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    Qwen3Config(**sizes, head_dim=64, vocab_size=512, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    code, data = result(capsys, "hardware=cpu", f"actor_rollout_ref.model.path={tmp_path}")
    assert code == 0 and data["model"]["config"] == "config.json of the model folder"
    assert "emulated" in data["estimate"]["recommendation"]


def test_drawings_show_violated_edges_in_red(capsys, tmp_path):
    red = "#c62828"
    for flow, count in (("unified_fp8", 0), ("fp8_rollout", 7)):
        svg, html = tmp_path / f"{flow}.svg", tmp_path / f"{flow}.html"
        assert run(capsys, f"+precision={flow}", HARDWARE, QWEN3_8B, "--svg", str(svg), "--html", str(html))[0] == 0
        root = ElementTree.fromstring(svg.read_text())
        paths = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("marker-end")]
        # 7 linear inputs, q and k norms, 2 for rotary, 3 for attention, 2 for the activation, 2 norms, 2 residual adds.
        assert len(paths) == 7 + 2 + 2 + 3 + 2 + 2 + 2 * 2
        assert sum(e.get("stroke") == red for e in paths) == count
        assert svg.read_text().strip() in html.read_text() and "verdict" in html.read_text()


def test_estimates_of_memory_are_countable_by_hand(capsys):
    _, data = result(capsys, HARDWARE, QWEN3_8B)
    estimate = data["estimate"]
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    linears, embeddings = 36 * layer, 2 * 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert estimate["parameters"] == linears + embeddings + norms
    # One byte an element and one FP32 scale per 128x128 block; the rest in BF16.
    assert estimate["rollout_weight_bytes"] == linears + 4 * linears // 128**2 + 2 * (embeddings + norms)
    assert estimate["sync_bytes"] == 2 * estimate["parameters"]
    assert estimate["kv_bytes_per_token"] == 36 * 2 * 8 * 128 * 2
    # BF16 master and gradient, two FP32 moments.
    assert estimate["training_state_bytes"] == 12 * estimate["parameters"]
    # q, k and v keep 4096 codes and 32 scales together, so do gate and up; o its own; down 12288 and 96.
    per_layer = 3 * (4096 + 32 * 4) + 12288 + 96 * 4
    assert next(r for r in data["operators"] if r["kind"] == "linear")["saved"] == 36 * per_layer


def test_fp8_is_recommended_for_large_shapes_and_not_for_small_ones(capsys):
    _, large = result(capsys, HARDWARE, QWEN3_8B)
    small_model = "actor_rollout_ref.model.path=HuggingFaceTB/SmolLM2-135M"
    _, small = result(capsys, HARDWARE, small_model, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024")
    assert large["estimate"]["step_gain"] > 1.05 and "FP8 pays here" in large["estimate"]["recommendation"]
    assert small["estimate"]["step_gain"] < 1 and "use precision=bf16" in small["estimate"]["recommendation"]


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "jetrl.check", "--backends"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip() and done.stderr == ""
