"""The embedded tiny model and its tokenizer, and how a model path is resolved."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import jetrl.configs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl.data import load_task
from jetrl.data.models import TINY, resolve_model_path
from jetrl.data.sources import generate
from jetrl.errors import UserError

ROOT = Path(__file__).parents[1]
CONFIGS = Path(jetrl.configs.__path__[0])
FOLDER = Path(resolve_model_path(TINY))


@pytest.fixture(scope="module")
def maker() -> dict:
    """The functions of scripts/make_tiny_model.py, which imports from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return runpy.run_path(str(ROOT / "scripts" / "make_tiny_model.py"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def splits() -> dict:
    return generate(load_task("arithmetic"))


def test_the_folder_is_under_4_mb_and_in_bf16():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) < 4_000_000
    assert {tensor.dtype for tensor in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_the_architecture_is_qwen3_with_whole_blocks(model):
    config = model.config
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.head_dim == 64
    assert not config.tie_word_embeddings
    shapes = [layer.weight.shape for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(rows % 128 == 0 and columns % 128 == 0 for rows, columns in shapes)


def test_model_and_tokenizer_have_the_same_number_of_tokens(model, tokenizer):
    """VeRL masks logits beyond the tokenizer in the rollout only: a surplus row would show as a precision mismatch."""
    assert model.config.vocab_size == len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    assert model.get_input_embeddings().weight.shape[0] == model.lm_head.weight.shape[0] == len(tokenizer)


def test_special_tokens_agree_between_model_and_tokenizer(model, tokenizer):
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


@settings(deadline=None)
@given(text=st.text())
def test_the_tokenizer_writes_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_and_words_of_the_task_are_single_tokens(tokenizer):
    tokens = tokenizer.tokenize("State the final answer: 305 - 41 =")
    assert [token for token in tokens if token.isdigit()] == ["3", "0", "5", "4", "1"]
    assert tokens[:3] == ["State", "\u0120the", "\u0120final"]


def test_the_chat_prompt_is_the_familiar_one_and_fits(tokenizer, splits, maker):
    messages = [{"role": "user", "content": "2 + 3 ="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n"
    data = OmegaConf.load(CONFIGS / "data" / "arithmetic.yaml").data
    for problem in splits["val"]:
        assert len(maker["prompt_ids"](tokenizer, problem.question)) <= data.max_prompt_length
        worked = tokenizer.encode(maker["worked_answer"](problem.question), add_special_tokens=False)
        assert len(worked) + 1 <= data.max_response_length


def test_worked_answers_end_in_the_right_one(splits, maker):
    for problem in splits["val"]:
        assert maker["worked_answer"](problem.question).rpartition("=")[2] == problem.answer


def test_the_script_makes_the_shipped_tokenizer(tokenizer, splits, maker):
    assert (
        maker["make_tokenizer"](maker["tokenizer_texts"](splits["train"], seed=0)).get_vocab() == tokenizer.get_vocab()
    )


@pytest.fixture
def one_thread():
    """Small products on a machine that runs other jobs: two threads waiting for each other take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_model_starts_where_reinforcement_learning_has_something_to_do(model, tokenizer, splits, maker, one_thread):
    """The script measured 0.46 greedy, 0.31 sampled and 0.81 best of 8 on all 256 validation problems.

    Here are fewer, for speed: the standard error is 0.044 on 128 greedy ones and at most 0.058 on 64 problems sampled
    8 times, so the limits 0.2 and 0.6 are met with room.
    """
    greedy, _ = maker["accuracy"](model, tokenizer, splits["val"][:128])
    torch.manual_seed(0)
    sampled, best_of_8 = maker["accuracy"](model, tokenizer, splits["val"][:64], samples=8)
    assert 0.2 <= greedy <= 0.6
    assert 0.2 <= sampled <= 0.6
    assert best_of_8 >= sampled + 0.3


def test_the_script_refuses_a_missing_folder_argument(maker, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py"])
    with pytest.raises(SystemExit) as caught:
        maker["main"]()
    assert caught.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_the_package_ships_the_model(tmp_path):
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path / "b", "--build-lib", tmp_path / "lib"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    shipped = {file.name for file in (tmp_path / "lib" / "jetrl" / "assets" / "tiny").iterdir()}
    assert shipped == {file.name for file in FOLDER.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= shipped


# --- model paths


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "qwen3-8b", "qwen2.5-7b", "llama3.1-8b"])
def test_each_model_configuration_has_a_path_that_resolves(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    path = CONFIGS / "model" / f"{name}.yaml"
    assert path.read_text().startswith("# @package _global_\n")
    config = OmegaConf.load(path)
    assert set(config) == {"actor_rollout_ref"}
    assert resolve_model_path(config.actor_rollout_ref.model.path)
    assert isinstance(config.actor_rollout_ref.actor.optim.lr, float)


def test_a_local_folder_becomes_absolute_and_a_remote_path_stays(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({}))
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("m") == str(tmp_path / "m")
    assert resolve_model_path("hdfs://cluster/m") == "hdfs://cluster/m"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nowhere/model", "does not exist"),
        ("./model", "does not exist"),
        ("a/b/c", "does not exist"),
        ("qwen", "does not exist"),
        ("pkg://jetrl.assets.huge", "is no model folder"),
        ("pkg://no_such_package.model", "names no installed package"),
        ("pkg://tiny", "names no installed package"),
        (".", "no config.json"),
    ],
)
def test_a_missing_model_is_one_sentence(path, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve_model_path(path)
    message = str(caught.value)
    assert f"actor_rollout_ref.model.path={path}" in message and says in message and "\n" not in message


def test_a_hub_model_that_is_not_cached_is_refused_while_the_hub_is_off(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        resolve_model_path("nobody/no-such-model")
