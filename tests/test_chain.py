"""The task `chain`: answers against arithmetic done another way, the length dial, the reward, and the warm-up script."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jetrl.data import load_task, prepare
from jetrl.data.chain import SHORTEST_SHARE, chain_problems, most_steps, results, working
from jetrl.data.models import TINY, resolve_model_path
from jetrl.data.reward import compute_score
from jetrl.errors import UserError

EXAMPLE = (
    "Start with 37. 4 times: times 7, plus the number of the step, keep the last 2 digits. "
    "Write each result with its number."
)
LENGTHS = (64, 65, 512, 4096)


def first(count: int, length: int, digits: int = 2, seed: str = "0") -> list[tuple[str, str]]:
    return list(itertools.islice(chain_problems(length, digits, seed), count))


def test_a_chain_worked_by_hand():
    # 37*7+1=260, 60*7+2=422, 22*7+3=157, 57*7+4=403: the last two digits of each.
    assert results(EXAMPLE) == [60, 22, 57, 3]
    assert working(EXAMPLE) == "1:60 2:22 3:57 4:03"


@given(st.sampled_from(LENGTHS), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_written_out_answer_fits_the_dial_nearly_fills_it_and_gets_the_reward(length, digits, seed):
    question, answer = first(1, length, digits, str(seed))[0]
    text = working(question)
    assert len(text) + 1 <= length  # one more for the end of the turn
    # A step of a longer chain is at least as long as one of a shorter, and one step more than `most` does not fit: the
    # shortest chain has that share of the steps, less one for rounding, and its steps are at worst one digit shorter.
    steps = len(results(question))
    assert most_steps(length, digits) >= steps >= SHORTEST_SHARE * most_steps(length, digits) - 1
    assert compute_score("chain", text, answer) == {"score": 1.0, "acc": 1.0}
    wrong = str((int(answer) + 1) % 10**digits)
    assert compute_score("chain", text, wrong)["score"] == 0.0


def test_the_longest_chain_is_longer_than_what_one_step_less_would_allow():
    for length in LENGTHS:
        most = most_steps(length, 2)
        question = EXAMPLE.replace(" 4 times", f" {most} times")
        one_more = EXAMPLE.replace(" 4 times", f" {most + 1} times")
        assert len(working(question)) + 1 <= length < len(working(one_more)) + 1


@pytest.mark.parametrize("length", LENGTHS)
def test_no_tokenizer_makes_more_tokens_than_the_dial_says(length):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    for question, _ in first(20, length):
        assert len(tokenizer.encode(working(question), add_special_tokens=False)) + 1 <= length
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert len(prompt) <= 192  # data.max_prompt_length of configs/data/chain.yaml


def test_a_seed_gives_the_same_questions_and_another_seed_others():
    assert first(50, 512, seed="a") == first(50, 512, seed="a") != first(50, 512, seed="b")


def test_a_step_is_one_to_one_so_that_a_wrong_result_stays_wrong():
    for times in (3, 7, 9):
        ends = set()
        for start in range(100):
            ends.add(results(EXAMPLE.replace("with 37.", f"with {start}.").replace("times 7", f"times {times}"))[-1])
        assert len(ends) == 100


def test_rows_and_splits(tmp_path):
    task = load_task("chain").to_dict() | {"train_size": 300, "val_size": 100, "length": 256}
    train, val = (pyarrow.parquet.read_table(path).to_pylist() for path in prepare(task, tmp_path))
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, val)]
    assert not asked[0] & asked[1] and len(asked[1]) == 100
    assert all(row["data_source"] == "chain" for row in train)
    assert all(row["reward_model"]["ground_truth"] == str(results(row["prompt"][0]["content"])[-1]) for row in train)


@pytest.mark.parametrize(("key", "value"), [("length", 63), ("length", 4097), ("digits", 0), ("digits", 5)])
def test_a_dial_out_of_range_is_refused(tmp_path, key, value):
    with pytest.raises(UserError, match=f"task.{key}={value} must be a whole number from"):
        prepare(load_task("chain").to_dict() | {key: value}, tmp_path)


def test_a_task_with_too_few_different_questions_is_refused(tmp_path):
    with pytest.raises(UserError, match="more than the different questions"):
        prepare(load_task("chain").to_dict() | {"digits": 1}, tmp_path)


@pytest.mark.slow
def test_the_warm_up_script_writes_a_model_that_opens_and_is_as_good_as_it_says(tmp_path):
    """Ten steps, target 0: nothing is learned, but every part runs, twice with the same end."""
    script = Path(__file__).parents[1] / "scripts" / "warm_up_model.py"
    words = ["--size", "tiny", "--length", "64", "--batch", "8", "--target", "0", "--decode", "4", "--device", "cpu"]
    ends = []
    for name in ("a", "b"):
        done = subprocess.run(
            [sys.executable, str(script), *words, "--out", str(tmp_path / name)],
            capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        ends.append(json.loads(done.stdout.splitlines()[-1]))
        assert {"greedy", "sampled", "greedy_decoded", "parameters"} <= set(ends[-1])
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["max_position_embeddings"] == 64 + 256
