"""Where questions come from: reasoning-gym generators, or a data set from the Hugging Face hub or a local folder.

Each source yields (question, ground truth) for the splits "train" and "val"; jetrl.data.prepare makes VeRL rows of them.
"""

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jetrl.data.chain import chain_problems
from jetrl.data.task import MAX_ROWS, TaskConfig
from jetrl.errors import UserError

# How many questions may be drawn for one row of a validation set of distinct questions before giving up: ten times
# rejection is far more than 2- and 3-term sums need, and ends in milliseconds where a task has too few questions.
DRAWS_PER_ROW = 10
# Tasks that this package generates; it need not be installed for the others.
REASONING_GYM = ("arithmetic", "gsm_symbolic")


@dataclass(frozen=True)
class Problem:
    """One question with its answer as text. The answer of a generated problem is a whole number in decimal.

    solution: written-out working that ends with "#### answer", where the generator has one that is right.
    """

    question: str
    answer: str
    solution: str | None = None


def generate(task: TaskConfig) -> dict[str, list[Problem]]:
    """Both splits of a generated task: distinct validation questions first, then training questions that avoid them.

    Training questions may repeat (there are only 200 sums of two one-digit numbers): the split keeps the task's own
    distribution. Raises UserError where the task has too few different questions.
    """
    stream = problem_stream(task, task.seed)
    val: dict[str, Problem] = {}
    for _ in range(DRAWS_PER_ROW * task.val_size + 100):
        problem = next(stream)
        val.setdefault(problem.question, problem)
        if len(val) == task.val_size:
            break
    train: list[Problem] = []
    for _ in range(DRAWS_PER_ROW * task.train_size + 100):
        problem = next(stream)
        if problem.question not in val:
            train.append(problem)
        if len(train) == task.train_size:
            break
    if len(val) < task.val_size or len(train) < task.train_size:
        raise UserError(
            f"task.val_size={task.val_size} is more than the different questions that the task {task.name} has with "
            f"these options, leaving some for training; lower task.val_size or widen the task's ranges"
        )
    return {"train": train, "val": list(val.values())}


def problem_stream(task: TaskConfig, stream: int | str) -> Iterator[Problem]:
    """Problems of a generated task without end; the same task and stream give the same ones.

    stream: a task's seed, or any text for a stream that is no task's.
    """
    if task.name == "chain":
        chains = chain_problems(task.options["length"], task.options["digits"], str(stream))
        yield from (Problem(question, answer) for question, answer in chains)
        return
    with warnings.catch_warnings():
        # One of its dependencies compares strings with `is`; the warning would greet every user on the first run.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym

    # reasoning-gym seeds item i with `seed + i`: given neighbouring seeds as they are, two tasks would share all
    # questions but one. Spread over 62 bits, no two streams meet.
    seeds = random.Random(f"jetrl/{stream}")
    if task.name == "arithmetic":
        data = reasoning_gym.create_dataset("chain_sum", seed=seeds.getrandbits(62), size=MAX_ROWS, **task.options)
        items = (data[index] for index in itertools.count())  # its size is only a length
    else:
        # gsm_symbolic draws its whole list of templates for `size` at once: ask for one item at a time instead.
        items = (
            reasoning_gym.create_dataset(task.name, seed=seeds.getrandbits(48), size=1)[0] for _ in itertools.count()
        )
    for item in items:
        if item["answer"].removeprefix("-").isdigit():  # 1 in 500 of gsm_symbolic is a fraction: not an exact match
            written = item["metadata"].get("answer_cot")
            yield Problem(
                item["question"], item["answer"], right_solution(written, item["answer"]) if written else None
            )


def right_solution(written: str, answer: str) -> str | None:
    """A template's working with the answer as the task writes it ("33.0" is 33), or None where it ends elsewhere.

    gsm_symbolic rounds in some templates' working and not in their answer.
    """
    steps, mark, end = written.rpartition("####")
    try:
        right = mark and float(end.replace(",", "")) == int(answer)
    except ValueError:  # a unit or a currency behind the number
        right = False
    return f"{steps.rstrip()}\n#### {answer}" if right else None


@dataclass(frozen=True)
class HubDataset:
    """A data set that needs a network, or a local copy of its files.

    splits: jetrl's split -> the data set's own.
    instruction: appended to the question; it asks for the form that VeRL's grader for this data set looks for.
    """

    hub_id: str
    config: str | None
    question: str
    answer: str
    splits: dict[str, str]
    instruction: str


HUB = {
    "gsm8k": HubDataset(
        hub_id="openai/gsm8k",
        config="main",
        question="question",
        answer="answer",
        splits={"train": "train", "val": "test"},
        instruction='Reason step by step, then give the final number on a last line that starts with "#### ".',
    ),
    "math": HubDataset(
        hub_id="DigitalLearningGmbH/MATH-lighteval",
        config=None,
        question="problem",
        answer="solution",
        splits={"train": "train", "val": "test"},
        instruction="Reason step by step, then give the final answer inside \\boxed{}.",
    ),
}


def read_dataset(task: TaskConfig) -> dict[str, list[Problem]]:
    """Both splits of gsm8k or math. A given size takes that many rows, chosen by the seed and kept in order.

    Raises UserError when the download fails, a local file is missing or lacks a column, or there are too few rows.
    """
    hub, path = HUB[task.name], task.options["path"]
    result = {}
    for split, size in (("train", task.train_size), ("val", task.val_size)):
        rows = _local_rows(hub, Path(path).expanduser(), split) if path else _hub_rows(hub, task.name, split)
        if size is not None:
            if size > len(rows):
                raise UserError(f"task.{split}_size={size} is more than the {len(rows)} rows of {path or hub.hub_id}")
            chosen = sorted(random.Random(f"{task.seed}/{split}").sample(range(len(rows)), size))
            rows = [rows[i] for i in chosen]
        result[split] = [
            Problem(f"{row[hub.question].strip()} {hub.instruction}", _final_answer(task.name, row[hub.answer]))
            for row in rows
        ]
    # A local copy may have any content: a question in both splits would make the validation accuracy a lie.
    val = {problem.question for problem in result["val"]}
    result["train"] = [problem for problem in result["train"] if problem.question not in val]
    return result


def local_files(task: TaskConfig) -> list[Path]:
    """The files behind task.path, both splits; empty when the data set comes from the hub."""
    path = task.options.get("path")
    if not path:
        return []
    hub = HUB[task.name]
    return [file for split in hub.splits for file in _split_files(hub, Path(path).expanduser(), split)]


def _hub_rows(hub: HubDataset, name: str, split: str) -> list[dict]:
    import datasets
    import httpx

    try:
        return list(datasets.load_dataset(hub.hub_id, hub.config, split=hub.splits[split]))
    # OSError holds the hub's offline, not-found and connection errors; httpx's own are not among them.
    except (OSError, httpx.HTTPError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")
        raise UserError(
            f"data={name} could not get {hub.hub_id} from the Hugging Face hub ({reason}); connect to a network, or set "
            f"task.path to a folder with its {' and '.join(hub.splits.values())} files"
        ) from e


def _split_files(hub: HubDataset, folder: Path, split: str) -> list[Path]:
    """`<split>*.parquet` or .jsonl in the folder itself or where a clone of the hub's repository has them."""
    for place in (folder, folder / "data", folder / (hub.config or "data")):
        for pattern in ("*.parquet", "*.jsonl"):
            files = sorted(place.glob(hub.splits[split] + pattern))
            if files:
                return files
    raise UserError(
        f"task.path={folder} has no {hub.splits[split]}*.parquet or {hub.splits[split]}*.jsonl file; "
        f"give a folder that has one for each of {', '.join(hub.splits.values())}"
    )


def _local_rows(hub: HubDataset, folder: Path, split: str) -> list[dict]:
    import pandas

    rows = []
    for file in _split_files(hub, folder, split):
        try:
            frame = pandas.read_parquet(file) if file.suffix == ".parquet" else pandas.read_json(file, lines=True)
        except (OSError, ValueError) as e:  # pyarrow's ArrowInvalid is a ValueError
            raise UserError(f"{file} (from task.path) could not be read: {str(e).splitlines()[0]}") from e
        missing = [column for column in (hub.question, hub.answer) if column not in frame.columns]
        if missing:
            raise UserError(f"{file} (from task.path) lacks the column(s) {', '.join(missing)}")
        rows += frame[[hub.question, hub.answer]].to_dict("records")
    return rows


def _final_answer(name: str, solution: str) -> str:
    """The ground truth inside a worked solution: after "####" for gsm8k, in the last box for math."""
    if name == "gsm8k":
        return solution.rpartition("####")[2].strip().replace(",", "")
    from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(solution)
    if boxed is None:
        raise UserError(f"a solution of the data set math has no \\boxed{{}} answer: {solution[:80]!r}")
    return remove_boxed(boxed)
