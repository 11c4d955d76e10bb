"""The script that teaches SmolLM2 the form of gsm_symbolic, and the written-out solutions that it learns from."""

import gzip
import itertools
import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl.data import load_task
from jetrl.data.models import TINY, resolve_model_path
from jetrl.data.reward import compute_score
from jetrl.data.sources import Problem, problem_stream, right_solution

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY_FOLDER = resolve_model_path(TINY)
TASK = "gsm_symbolic"


@pytest.fixture(scope="module")
def script() -> dict:
    """The functions of scripts/tune_smollm2.py, which imports from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return runpy.run_path(str(SCRIPTS / "tune_smollm2.py"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_FOLDER)


@pytest.fixture(scope="module")
def stream() -> list[Problem]:
    return list(itertools.islice(problem_stream(load_task(TASK), "tests"), 200))


# --- solutions


@pytest.mark.parametrize(
    ("written", "answer", "solution"),
    [
        ("So 11 * 3 = 33.0\n#### 33.0", "33", "So 11 * 3 = 33.0\n#### 33"),
        ("So 4 * 7,020 is it.\n\n####28,080 ", "28080", "So 4 * 7,020 is it.\n#### 28080"),
        ("Down by 7.\n#### -7", "-7", "Down by 7.\n#### -7"),
        ("#### is a mark.\n#### 5", "5", "#### is a mark.\n#### 5"),
    ],
)
def test_a_working_that_ends_in_the_answer_ends_as_the_task_writes_it(written, answer, solution):
    assert right_solution(written, answer) == solution


@pytest.mark.parametrize(
    "written",
    [
        "So 11 * 3 = 34\n#### 34",
        "So 67 / 2 = 33.5\n#### 33.5",
        "So 11 * 3 = 33\n#### 33 apples",
        "So 11 * 3 = 33\n#### $33",
        "So 11 * 3 = 33\n#### ",
        "So 11 * 3 = 33\n#### nan",
        "So 11 * 3 = 33",
        "33",
    ],
)
def test_a_working_that_ends_otherwise_is_no_solution(written):
    assert right_solution(written, "33") is None


def test_every_solution_gets_the_reward_of_the_job(stream):
    solved = [problem for problem in stream if problem.solution]
    assert len(solved) > 0.9 * len(stream)  # seen: 1 in 100 ends elsewhere
    for problem in solved:
        assert compute_score(TASK, problem.solution, problem.answer)["score"] == 1.0
        assert problem.solution.endswith(f"\n#### {problem.answer}")


def test_the_other_generated_tasks_have_no_solutions():
    for task in ("arithmetic", "chain"):
        assert next(problem_stream(load_task(task), 0)).solution is None


# --- examples


def test_problems_are_kept_and_read_again_and_no_training_question_is_a_validation_question(script, tmp_path):
    file = tmp_path / "new" / "problems.jsonl.gz"
    validation, training = made = script["problems"](0, 500, file)
    assert script["problems"](0, 500, file) == made == script["problems"](0, 500, None)
    assert script["problems"](0, 20, file) == (validation, training[:20])
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert len(validation) == load_task(TASK).val_size and len(training) == 500
    assert not {problem.question for problem in validation} & {problem.question for problem in training}
    assert all(problem.solution for problem in training)


def test_another_seed_has_other_training_problems_and_the_same_validation(script):
    (validation, training), (same, other) = (script["problems"](seed, 20, None) for seed in (0, 1))
    assert validation == same and training != other


def test_labels_are_the_answer_and_the_end_of_its_turn_and_nothing_else(script, tokenizer, stream):
    asked = [problem for problem in stream if problem.solution][:8]
    rows = [script["encode"](tokenizer, problem) for problem in asked]
    ids, labels = script["padded"](rows, tokenizer.pad_token_id)
    assert ids.shape == labels.shape == (8, max(len(prompt) + len(answer) for prompt, answer in rows))
    assert ids.dtype == labels.dtype == torch.int64
    for problem, (prompt, _), got, label in zip(asked, rows, ids.tolist(), labels.tolist(), strict=True):
        messages = [{"role": "user", "content": problem.question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(prompt) == text
        counted = [place for place, value in enumerate(label) if value != -100]
        assert counted == list(range(len(prompt), counted[-1] + 1))
        assert [got[place] for place in counted] == [label[place] for place in counted]
        assert tokenizer.decode(got[: counted[-1] + 1]) == text + problem.solution + tokenizer.eos_token
        assert set(got[counted[-1] + 1 :]) <= {tokenizer.pad_token_id}


def test_accuracy_is_the_share_that_gets_the_reward(script, tokenizer, stream):
    """A stand-in that answers every other problem right, in rows padded on the left."""
    asked = [problem for problem in stream if problem.solution][:4]

    class EveryOther:
        device = torch.device("cpu")

        def generate(self, input_ids, **_):
            texts = [problem.solution if place % 2 else "#### 0.5" for place, problem in enumerate(asked)]
            answers = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
            return torch.cat([input_ids, answers], dim=1)

    assert script["sampled_accuracy"](EveryOther(), tokenizer, asked, seed=0) == 0.5


# --- the command line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--model", "no/such/folder"],
            "--model no/such/folder is no model folder; scripts/convert_smollm2.py makes one",
        ),
        (["--count", "4", "--batch", "8"], "--count 4 must be at least --batch 8"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--out", "."], "--out . exists and is no model folder; it would be deleted, so choose another"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(script, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(SystemExit) as caught:
        script["main"](["--model", TINY_FOLDER, *words])
    assert says in (capsys.readouterr().err.splitlines() or [caught.value.code])[-1]


def test_a_file_that_holds_no_problems_or_too_few_is_one_sentence(script, tmp_path):
    file = tmp_path / "problems.jsonl.gz"
    words = ["--model", TINY_FOLDER, "--out", str(tmp_path / "out"), "--examples", str(file), "--batch", "4"]
    row = json.dumps({"question": "2 + 3 =", "answer": "5", "solution": "5\n#### 5"}) + "\n"
    whole = gzip.compress((row + "null\n" + row).encode())
    broken = "cannot be read; delete it to have it made anew"
    cases = (
        (b"", broken),
        (b"no gzip", broken),
        (whole[:-12], broken),
        (gzip.compress(row.encode()), broken),
        (gzip.compress(b'null\n{"q": 1}\n'), broken),
        (gzip.compress(b"null\n[1]\n"), broken),
        (whole, "holds 1 training problem(s), fewer than --batch 4"),
    )
    for content, says in cases:
        file.write_bytes(content)
        with pytest.raises(SystemExit) as caught:
            script["main"](words)
        assert caught.value.code == f"--examples {file} {says}"


@pytest.mark.slow
def test_the_script_writes_a_model_that_opens(script, stream, tmp_path, capsys):
    """Two steps, target 0: nothing is learned, but every part runs, on fewer validation problems than the task has."""
    solved = [problem for problem in stream if problem.solution]
    rows = [*map(vars, solved[:8]), None, *map(vars, solved[8:24])]
    file = tmp_path / "problems.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    words = ["--model", TINY_FOLDER, "--steps", "2", "--batch", "4", "--check", "4", "--target", "0", "--device", "cpu"]
    result = script["main"]([*words, "--examples", str(file), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step     2  loss ") and set(json.loads(said[-1])) == set(result)
    assert result["steps"] == 2 and result["reached"] and 0 <= result["sampled"] <= 1
    model, before = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out", TINY_FOLDER))
    assert model.dtype is torch.bfloat16 and AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert any(changed)
