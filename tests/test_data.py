"""Task configuration, prepared files, and the reward."""

import json
import re
from pathlib import Path

import jetrl.configs
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from jetrl.data import TaskConfig, check_columns, load_task, prepare, task_names
from jetrl.data.reward import compute_score, final_integer
from jetrl.errors import UserError

ARITHMETIC = load_task("arithmetic").to_dict() | {"train_size": 60, "val_size": 20}
GSM8K = {"name": "gsm8k", "seed": 0, "train_size": None, "val_size": None, "path": None}


def rows(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()


def questions(path: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(path)]


def user_error(call, *args, **kwargs) -> str:
    """The message of the UserError that the call must raise, checked to be one line."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- configuration


@pytest.mark.parametrize("name", task_names())
def test_each_shipped_task_is_valid_and_names_its_reward(name):
    assert load_task(name).name == name
    path = Path(jetrl.configs.__path__[0]) / "data" / f"{name}.yaml"
    assert path.read_text().startswith("# @package _global_\n")
    config = OmegaConf.load(path)
    assert set(config) == {"task", "data", "reward"}
    assert config.reward.custom_reward_function == {"path": "pkg://jetrl.data.reward", "name": "compute_score"}


def test_task_survives_a_round_trip_through_its_flat_form():
    task = TaskConfig.from_dict(ARITHMETIC)
    assert TaskConfig.from_dict(task.to_dict()) == task


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"name": "sudoku"}, "task.name=sudoku", "arithmetic, chain, gsm_symbolic, gsm8k, math"),
        ({"seed": -1}, "task.seed=-1", "from 0 to"),
        ({"seed": "7"}, "task.seed='7'", "whole number"),
        ({"train_size": 0}, "task.train_size=0", "from 1 to"),
        ({"val_size": None}, "task.val_size=None", "from 1 to"),
        ({"val_size": True}, "task.val_size=True", "whole number"),
        ({"max_terms": 13}, "task.max_terms=13", "from 2 to 12"),
        ({"min_terms": 4, "max_terms": 3}, "task.min_terms=4", "task.max_terms=3"),
        ({"terms": 3}, "task.terms", "min_terms, max_terms, min_digits, max_digits"),
    ],
)
def test_bad_task_values_are_refused_by_key_value_and_what_is_allowed(change, key, says):
    message = user_error(TaskConfig.from_dict, ARITHMETIC | change)
    assert key in message and says in message


@pytest.mark.parametrize("key", ["name", "seed", "val_size", "max_digits"])
def test_a_missing_task_key_is_named(key):
    assert f"task.{key} is missing" in user_error(
        TaskConfig.from_dict, {k: v for k, v in ARITHMETIC.items() if k != key}
    )


# --- prepared files


def test_arithmetic_rows_have_verls_columns_and_the_right_answers(tmp_path):
    for split, path in zip(("train", "val"), prepare(ARITHMETIC, tmp_path), strict=True):
        table = rows(path)
        assert len(table) == ARITHMETIC[f"{split}_size"] == check_columns(path)
        for index, row in enumerate(table):
            assert row["data_source"] == "arithmetic"
            assert row["reward_model"]["style"] == "rule"
            assert row["extra_info"] == {"split": split, "index": index}
            assert [message["role"] for message in row["prompt"]] == ["user"]
            expression = re.search(r": ([0-9+\- ]+) =$", row["prompt"][0]["content"]).group(1)
            assert row["reward_model"]["ground_truth"] == str(eval(expression))


@pytest.mark.parametrize("name", ["arithmetic", "chain", "gsm_symbolic"])
def test_no_question_is_in_both_splits_and_validation_has_no_duplicates(tmp_path, name):
    task = load_task(name).to_dict() | {"train_size": 300, "val_size": 100}
    train, val = map(questions, prepare(task, tmp_path))
    assert not set(train) & set(val)
    assert len(set(val)) == len(val) == 100


def test_gsm_symbolic_answers_are_whole_numbers(tmp_path):
    task = load_task("gsm_symbolic").to_dict() | {"train_size": 300, "val_size": 10}
    answers = [row["reward_model"]["ground_truth"] for row in rows(prepare(task, tmp_path)[0])]
    assert all(answer == str(int(answer)) for answer in answers)


def test_same_configuration_gives_the_same_bytes_and_another_seed_gives_other_questions(tmp_path):
    first, again = prepare(ARITHMETIC, tmp_path / "a"), prepare(ARITHMETIC, tmp_path / "b")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    other = prepare(ARITHMETIC | {"seed": 1}, tmp_path / "c")
    assert questions(other[0]) != questions(first[0])


def test_neighbouring_seeds_share_no_questions(tmp_path):
    """reasoning-gym seeds item i with seed + i: passed on as it is, seed 1 would be seed 0 shifted by one row.

    4 terms of 4 digits make 9000^4 * 8 = 5e16 questions: one of 80 * 80 pairs meets by chance with p < 1e-12.
    """
    wide = ARITHMETIC | {"min_terms": 4, "max_terms": 4, "min_digits": 4, "max_digits": 4}
    a, b = (prepare(wide | {"seed": seed}, tmp_path / str(seed)) for seed in (0, 1))
    assert not {q for p in a for q in questions(p)} & {q for p in b for q in questions(p)}


def test_files_are_reused_only_for_the_same_configuration(tmp_path):
    paths = prepare(ARITHMETIC, tmp_path)
    before = [path.stat().st_ino for path in paths]  # os.replace gives a new inode
    prepare(ARITHMETIC, tmp_path)
    assert [path.stat().st_ino for path in paths] == before
    prepare(ARITHMETIC | {"seed": 3}, tmp_path)
    assert all(path.stat().st_ino != inode for path, inode in zip(paths, before, strict=True))


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_or_foreign_file_is_replaced(tmp_path, damage):
    paths = prepare(ARITHMETIC, tmp_path)
    good = paths[1].read_bytes()
    if damage == "missing":
        paths[1].unlink()
    elif damage == "truncated":
        paths[1].write_bytes(good[:100])
    else:
        pandas.DataFrame({"x": [1]}).to_parquet(paths[1])
    prepare(ARITHMETIC, tmp_path)
    assert paths[1].read_bytes() == good


def test_a_full_disk_leaves_the_old_files_and_no_partial_one(tmp_path, monkeypatch):
    paths = prepare(ARITHMETIC, tmp_path)
    before = [path.read_bytes() for path in paths]

    def full(table, file):
        file.write(b"PAR1 half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    message = user_error(prepare, ARITHMETIC | {"seed": 9}, tmp_path)
    assert str(tmp_path) in message and "No space left" in message
    assert [path.read_bytes() for path in paths] == before
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in user_error(prepare, ARITHMETIC, tmp_path / "file")


@pytest.mark.parametrize("val_size", [500, 200])
def test_more_validation_rows_than_there_are_questions_is_refused(tmp_path, val_size):
    """Sums of two one-digit numbers: 200 questions, so 200 leave nothing to train on and 500 do not exist."""
    small = ARITHMETIC | {"min_terms": 2, "max_terms": 2, "val_size": val_size}
    assert f"task.val_size={val_size}" in user_error(prepare, small, tmp_path)
    assert not list(tmp_path.iterdir())


# --- data sets


@pytest.fixture
def gsm8k_folder(tmp_path) -> Path:
    folder = tmp_path / "gsm8k"
    (folder / "main").mkdir(parents=True)
    train = [{"question": f"How many is {i}?", "answer": f"It is {i}.\n#### {i:,}"} for i in (1, 2, 3000)]
    test = [{"question": "How many is 3000?", "answer": "#### 3,000"}, {"question": "Minus one?", "answer": "#### -1"}]
    pandas.DataFrame(train).to_parquet(folder / "main" / "train-00000-of-00001.parquet")
    pandas.DataFrame(test).to_parquet(folder / "main" / "test-00000-of-00001.parquet")
    return folder


def test_gsm8k_reads_a_local_clone_and_drops_training_questions_that_are_in_the_test_split(tmp_path, gsm8k_folder):
    train, val = map(rows, prepare(GSM8K | {"path": str(gsm8k_folder)}, tmp_path / "out"))
    assert [row["reward_model"]["ground_truth"] for row in train] == ["1", "2"]
    assert [row["reward_model"]["ground_truth"] for row in val] == ["3000", "-1"]
    assert {row["data_source"] for row in train + val} == {"openai/gsm8k"}


def test_a_changed_local_file_is_prepared_anew(tmp_path, gsm8k_folder):
    task = GSM8K | {"path": str(gsm8k_folder)}
    prepare(task, tmp_path / "out")
    more = pandas.DataFrame([{"question": "Ten?", "answer": "#### 10"}])
    more.to_parquet(gsm8k_folder / "main" / "train-00000-of-00001.parquet")
    assert len(rows(prepare(task, tmp_path / "out")[0])) == 1


def test_math_reads_local_jsonl_and_takes_the_last_box_as_the_answer(tmp_path):
    for split in ("train", "test"):
        row = {"problem": f"Half in {split}?", "solution": "First \\boxed{2}, so \\boxed{\\frac{1}{2}}."}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = {"name": "math", "seed": 0, "train_size": 1, "val_size": 1, "path": str(tmp_path)}
    train, _ = map(rows, prepare(task, tmp_path / "out"))
    assert train[0]["reward_model"]["ground_truth"] == "\\frac{1}{2}"


def test_bad_local_data_sets_are_refused_by_file_column_and_size(tmp_path, gsm8k_folder):
    assert "has no train*.parquet" in user_error(prepare, GSM8K | {"path": str(tmp_path / "nowhere")}, tmp_path / "out")
    message = user_error(prepare, GSM8K | {"path": str(gsm8k_folder), "val_size": 3}, tmp_path / "out")
    assert "task.val_size=3 is more than the 2 rows" in message
    bad = gsm8k_folder / "main" / "test-00000-of-00001.parquet"
    pandas.DataFrame({"question": ["?"]}).to_parquet(bad)
    message = user_error(prepare, GSM8K | {"path": str(gsm8k_folder)}, tmp_path / "out")
    assert str(bad) in message and "column(s) answer" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_a_failing_download_is_one_sentence(tmp_path, monkeypatch, name):
    """The hub switched off is the same failure as no network (an OSError from the library), without its retries."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    message = user_error(prepare, GSM8K | {"name": name}, tmp_path / "out")
    assert f"data={name}" in message and "task.path" in message
    assert not (tmp_path / "out").exists()


# --- check_columns

ROW = {"data_source": "a", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("missing", [None, "data_source", "prompt", "reward_model", "reward_model.ground_truth"])
def test_a_data_file_is_checked_for_the_columns_verl_reads(tmp_path, suffix, missing):
    row = {key: value for key, value in ROW.items() if key != missing}
    if missing == "reward_model.ground_truth":
        row["reward_model"] = {"style": "rule"}
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row] if suffix == ".json" else row))
    if missing is None:
        assert check_columns(path) == 1
    else:
        message = user_error(check_columns, path)
        assert str(path) in message and f"column(s) {missing};" in message


def test_check_columns_follows_verls_prompt_key(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    assert "column(s) text;" in user_error(check_columns, path, prompt_key="text")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gone.parquet", None, "does not exist"),
        ("rows.csv", b"a,b", "must end in"),
        ("rows.parquet", b"no parquet", "could not be read"),
        ("rows.json", b"[{", "could not be read"),
    ],
)
def test_an_unreadable_data_file_is_refused(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = user_error(check_columns, tmp_path / name)
    assert name in message and says in message


def test_an_empty_data_file_is_refused(tmp_path):
    table = pyarrow.Table.from_pylist([ROW])
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "rows.parquet")
    assert "has no rows" in user_error(check_columns, tmp_path / "rows.parquet")


# --- reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3+9=12;12-5=7", "7"),
        ("12-95=-83", "-83"),
        ("12 - 5", "5"),
        ("12-5", "5"),
        ("(3)-5", "5"),
        ("so it is -5.", "-5"),
        ("so it is \u22125.", "-5"),
        ("1,234", "1234"),
        ("7, 8", "8"),
        ("007", "7"),
        ("-0", "0"),
        ("41.00", "41"),
        ("3.5", None),
        ("$-42 altogether", "-42"),
        ("\\boxed{-7}, not 8", "-7"),
        ("#### 12", "12"),
        ("5 then ####", None),
        ("no number, not even x5", None),
        ("", None),
        ("9" * 5000, "9" * 1000),
    ],
)
def test_final_integer(text, number):
    assert final_integer(text) == number


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(), st.text(max_size=50))
def test_any_integer_after_an_equals_sign_is_found(number, before):
    assert final_integer(f"{before.replace('#', '')}={number}") == str(number) or "\\boxed" in before


@settings(deadline=None)
@given(st.text())
def test_any_text_gets_a_score(text):
    assert compute_score("arithmetic", text, "7")["score"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("arithmetic", "3+9=12;12-5=7", "7", 1.0),
        ("arithmetic", "3+9=12;12-5=8", "7", 0.0),
        ("gsm_symbolic", "He earns 28,080.", "28080", 1.0),
        ("openai/gsm8k", "so\n#### 3,000", "3000", 1.0),
        ("openai/gsm8k", "3000", "3000", 0.0),
        ("DigitalLearningGmbH/MATH-lighteval", "it is \\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "it is \\boxed{2}", "\\frac{1}{2}", 0.0),
    ],
)
def test_verl_loads_the_reward_and_gets_score_and_accuracy(source, text, truth, score):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    node = OmegaConf.create({"path": "pkg://jetrl.data.reward", "name": "compute_score", "reward_kwargs": {}})
    reward = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": node}}))
    result = reward(data_source=source, solution_str=text, ground_truth=truth, extra_info={"index": 0})
    assert result == {"score": score, "acc": score}


def test_verl_reports_the_accuracy_under_a_stable_name():
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    results = [compute_score("arithmetic", text, "7") for text in ("7", "8", "0", "1+6=7")]
    infos = {key: [result[key] for result in results] for key in results[0]}
    metrics = process_validation_metrics(["arithmetic"] * 4, list("abcd"), infos)
    assert metrics["arithmetic"]["acc"] == {"mean@1": 0.5}


def test_an_unknown_data_source_is_verls_error():
    with pytest.raises(NotImplementedError, match="nonsense"):
        compute_score("nonsense", "7", "7")
