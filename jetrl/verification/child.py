"""Child processes of a verification: everything they print goes to a log, how they failed to a file for the command."""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jetrl.errors import JobError, UserError
from jetrl.launch.worker_entry import die_with_parent, root_cause
from jetrl.verification.workspace import Workspace

SHOWN_CHARACTERS = 400


def start(space: Workspace, step: str, module: str, arguments: list[str], env: dict[str, str]) -> float:
    """Run `python -m module failure_file *arguments` to its end; returns seconds. Raises what the child raised."""
    failure = space.folder / f"{step}.failure.json"
    failure.unlink(missing_ok=True)
    began = time.monotonic()
    with open(space.log(step), "w") as log:
        command = [sys.executable, "-m", module, str(failure), *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env})
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    _raise_failure(space, step, failure, code)
    return time.monotonic() - began


def _raise_failure(space: Workspace, step: str, failure: Path, code: int) -> None:
    if failure.is_file():
        record = json.loads(failure.read_text())
        message = record["message"][:SHOWN_CHARACTERS]
        if record["type"] == "UserError":
            raise UserError(message)
        raise JobError(f"the {step} failed ({record['type']}: {message}); its log is {space.log(step)}")
    if code:
        raise JobError(f"the {step} ended with exit code {code}; its log is {space.log(step)}")


def start_forked(space: Workspace, step: str, module: str, arguments: list[str], env: dict[str, str]) -> float:
    """`start` in a fork of this process, which has imported the engines already; no CUDA context may exist in it."""
    failure = space.folder / f"{step}.failure.json"
    failure.unlink(missing_ok=True)
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        _become_child(space.log(step), module, arguments, env, str(failure))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    _raise_failure(space, step, failure, code)
    return time.monotonic() - began


def _become_child(log: Path, module: str, arguments: list[str], env: dict[str, str], failure: str) -> NoReturn:
    try:
        os.environ.update(env)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        run_child(lambda: importlib.import_module(module).main(*arguments), failure)
    finally:  # a fork must never return into its parent's code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run_child(body: Callable[[], None], failure: str) -> None:
    """The body of a child's main: leaves how it failed in the file `failure`, and re-raises for the log."""
    die_with_parent()
    try:
        body()
    except Exception as e:
        cause = root_cause(e)
        kind = "UserError" if isinstance(cause, UserError) else type(cause).__name__
        Path(failure).write_text(json.dumps({"type": kind, "message": " ".join(str(cause).split())}))
        raise
    # vLLM's and NCCL's own shutdown can hang; everything is written by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
