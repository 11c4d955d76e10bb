"""The child process of one job: `python -m jetrl.launch.worker_entry <config.yaml>`.

A process of its own because VeRL never shuts Ray down, and because everything Ray, vLLM and VeRL print belongs in the
run's log. How it failed is left for the parent in `failure.json`. With `--wait <socket>` it imports first and gets the
configuration's path, its log and the run's lock afterwards (early_worker.py).
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType

from omegaconf import OmegaConf

FAILURE = "failure.json"
WAIT = "--wait"
PR_SET_PDEATHSIG = 1
LONGEST_PATH = 4096


def main(argv: list[str]) -> None:
    die_with_parent()
    if argv[0] == WAIT:
        try:
            import verl.trainer.main_ppo  # noqa: F401
        finally:  # an import that fails waits too: its traceback belongs in the job's log, and there is none before
            config_file = _wait(int(argv[1]))
    else:
        config_file = Path(argv[0])
    sys.excepthook = _Report(config_file.parent / FAILURE)
    cfg = OmegaConf.load(config_file)

    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from jetrl.launch import local_ray

    auto_set_device(cfg)
    validate_config(cfg, use_reference_policy=need_reference_policy(cfg), use_critic=need_critic(cfg))
    local_ray.start(cfg)
    run_ppo(cfg, task_runner_class=TaskRunnerV1)


def _wait(fileno: int) -> Path:
    """Until the parent sends the job; ends the process when the parent has none."""
    with socket.socket(fileno=fileno) as parent:
        text, handles, _, _ = socket.recv_fds(parent, LONGEST_PATH, 2)
    if not text:
        sys.exit(0)
    log, _lock = handles  # the lock stays open, and is held as long as this process lives
    os.dup2(log, 1)
    os.dup2(log, 2)
    return Path(text.decode())


class _Report:
    """An excepthook: the root cause as JSON for the parent, then Python's own traceback into the log.

    An interruption of this process is no failure: a run that was stopped is shown as broken off, not as crashed.
    """

    def __init__(self, file: Path):
        self._file = file

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            cause = root_cause(error)
            record = {"type": type(cause).__name__, "message": str(cause)}
            self._file.write_text(json.dumps(record))
        sys.__excepthook__(kind, error, trace)


def root_cause(error: BaseException) -> BaseException:
    """What was raised inside a Ray task, below the wrappers that Ray puts around it."""
    while isinstance(getattr(error, "cause", None), BaseException):
        error = error.cause
    return error


def die_with_parent() -> None:
    """A jetrl.train that is killed takes its job along: Ray's own processes follow this one in the same way."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
