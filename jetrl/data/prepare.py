"""Writes a task's two Parquet files in the columns that VeRL reads, and checks such files.

A file carries the configuration that made it in its own metadata, so it is reused exactly when that is the same one;
it appears under its name only when it is complete.
"""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from jetrl.data.sources import HUB, REASONING_GYM, Problem, generate, local_files, read_dataset
from jetrl.data.task import TaskConfig
from jetrl.errors import UserError

# Part of the stored key: raise it when the rows change for the same configuration.
ROW_FORMAT = 1
KEY = b"jetrl_task"
# What VeRL's dataset and reward manager read; `ability` and `extra_info` are written but not needed.
NEEDED_COLUMNS = ("data_source", "prompt", "reward_model")


def prepare(task: dict | TaskConfig, folder: str | Path) -> tuple[Path, Path]:
    """Write, or reuse, `train.parquet` and `val.parquet` of a task (the `task` node of the configuration) in a folder.

    Same configuration, same rows; no question is in both files. Raises UserError for a bad configuration, a failing
    download and a folder that cannot be written.
    """
    task = task if isinstance(task, TaskConfig) else TaskConfig.from_dict(task)
    folder = Path(folder)
    key = _key(task)
    paths = {split: folder / f"{split}.parquet" for split in ("train", "val")}
    if not all(_stored_key(path) == key for path in paths.values()):
        splits = generate(task) if task.generated else read_dataset(task)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for split, path in paths.items():
                _write(path, _rows(task, split, splits[split]), key)
        except OSError as e:
            raise UserError(
                f"the data of task {task.name} cannot be written to {folder} ({e.strerror or e}); free it or set run.dir"
            ) from e
    return paths["train"], paths["val"]


def check_columns(path: str | Path, prompt_key: str = "prompt") -> int:
    """Number of rows of a data file (.parquet, .json, .jsonl) for VeRL.

    prompt_key: VeRL's data.prompt_key. Raises UserError naming the file and what it lacks, or what is wrong with it.
    """
    if not isinstance(prompt_key, str) or not prompt_key:
        raise UserError(f"data.prompt_key={prompt_key} must be the name of a column")
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"the data file {path} does not exist; correct data.train_files or data.val_files")
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise UserError(f"the data file {path} must end in .parquet, .json or .jsonl")
    count, fields = _fields(path)
    needed = [prompt_key if column == "prompt" else column for column in NEEDED_COLUMNS]
    missing = [column for column in needed if column not in fields]
    if "reward_model" in fields and "ground_truth" not in fields["reward_model"]:
        missing.append("reward_model.ground_truth")
    if missing:
        raise UserError(
            f"the data file {path} lacks the column(s) {', '.join(missing)}; it needs {', '.join(needed)} "
            "(reward_model with ground_truth in it)"
        )
    if count == 0:
        raise UserError(f"the data file {path} has no rows; give data.train_files and data.val_files with at least one")
    return count


def _fields(path: Path) -> tuple[int, dict[str, set[str]]]:
    """Rows of a file, and its columns with the names inside each (empty for a column that is not a struct)."""
    import pyarrow
    import pyarrow.json
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            parquet = pyarrow.parquet.ParquetFile(path)
            count, schema = parquet.metadata.num_rows, parquet.schema_arrow
        elif path.read_bytes()[:1] == b"[":  # one JSON list: VeRL's reader takes it, Arrow's does not
            rows = json.loads(path.read_text())
            if not all(isinstance(row, dict) for row in rows):
                raise UserError(f"the data file {path} must be a list of objects, one for each row")
            table = pyarrow.Table.from_pylist(rows)
            count, schema = table.num_rows, table.schema
        else:
            table = pyarrow.json.read_json(path)
            count, schema = table.num_rows, table.schema
    except (pyarrow.ArrowException, OSError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"the data file {path} could not be read: {str(e).splitlines()[0]}") from e
    return count, {f.name: {g.name for g in f.type} if pyarrow.types.is_struct(f.type) else set() for f in schema}


def _rows(task: TaskConfig, split: str, problems: list[Problem]) -> list[dict]:
    """VeRL's columns. The data source of a hub data set is its id, which is how VeRL picks its own grader."""
    source = task.name if task.generated else HUB[task.name].hub_id
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]


def _key(task: TaskConfig) -> bytes:
    """Everything that decides the rows, as JSON: configuration, generator version, and the local files' state."""
    files = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in local_files(task)]
    made_by = version("reasoning-gym") if task.name in REASONING_GYM else None
    key = {"format": ROW_FORMAT, "task": task.to_dict(), "files": files, "reasoning_gym": made_by}
    return json.dumps(key, sort_keys=True).encode()


def _stored_key(path: Path) -> bytes | None:
    """The key inside a file that prepare() wrote; None where there is no file or it is another program's or broken."""
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        return None
    try:
        return (pyarrow.parquet.read_schema(path).metadata or {}).get(KEY)
    except pyarrow.ArrowInvalid:  # not Parquet: it will be replaced
        return None


def _write(path: Path, rows: list[dict], key: bytes) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({KEY: key})
    # A name of its own in the same folder: two jobs of a sweep may prepare at once, and os.replace needs one file system.
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            pyarrow.parquet.write_table(table, file)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from workers of another user
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
