"""Run one composed job: its folder, its child process, its console, and its end, whichever way it comes."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from omegaconf import DictConfig, OmegaConf

from jetrl.data import check_columns, prepare
from jetrl.errors import JobError, UserError
from jetrl.launch import checkpoints, metrics_log
from jetrl.launch.config import RunConfig, run_config, steps_per_epoch
from jetrl.launch.console import Console
from jetrl.launch.early_worker import EarlyWorker
from jetrl.launch.processes import Orphans
from jetrl.launch.provenance import record_start
from jetrl.launch.wiring import METRICS
from jetrl.launch.worker_entry import FAILURE

LOG = "log.txt"
CONFIG = "config.yaml"
POLL_SECONDS = 0.5
# Ray needs a few seconds to stop its processes after a SIGINT to its driver.
INTERRUPT_SECONDS = 20.0
INTERRUPTED = 130
# What Ray, vLLM and VeRL print when they get somewhere -> what the console says from then on.
MILESTONES = (
    ("Started a local Ray instance", "loading the model into the trainer and vLLM"),
    ("Training from scratch", "first validation"),
    ("Resuming from", "first validation"),
)
LAST_EXCEPTION = re.compile(r"^(?:\([^)]*pid=[^)]*\)\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.*)$", re.M)


def worker_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "jetrl.launch.worker_entry", str(config)]


def run_job(
    cfg: DictConfig,
    run_dir: Path,
    stream: TextIO | None = None,
    command: Callable[[Path], list[str]] = worker_command,
    early: EarlyWorker | None = None,
) -> int:
    """Run a job that has passed preflight.check, in a child process, until it ends.

    command: from the written configuration to the child's command line. early: a child that has started already.
    Returns 0, or 130 after Ctrl-C or SIGTERM. Raises JobError, with the job's own last error, when it failed, and
    UserError where another job is using the folder.
    """
    run, began = run_config(cfg), time.monotonic()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"run.dir={run_dir} cannot be made ({e.strerror}); choose another run.dir") from e
    with _locked(run_dir) as lock:
        start_step = _prepare_resume(cfg, run_dir)
        rows = _prepare_data(cfg, run_dir)
        total = _total_steps(cfg, rows)
        console = Console(total, stream)
        console.start(_title(cfg, run, start_step))
        if start_step >= total:
            console.start(
                [f"all {total} steps are done: raise trainer.total_training_steps, or start over: resume=disable"]
            )
            return 0
        (run_dir / CONFIG).write_text(OmegaConf.to_yaml(cfg, resolve=True))
        record_start(cfg, run_dir)
        code = _supervise(command(run_dir / CONFIG), run_dir, console, lock, total, early)
        if code == 0:
            figures = metrics_log.summarize(metrics_log.read_run(run_dir / METRICS))
            console.finish(figures, time.monotonic() - began, _written(run_dir))
        elif code == INTERRUPTED:
            console.start([f"interrupted; the same command goes on from the last whole checkpoint in {run_dir}"])
        return code


@contextmanager
def _locked(run_dir: Path) -> Iterator[int]:
    """One job a folder. The child holds the lock too, so it outlives a parent that is killed."""
    handle = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UserError(
                f"another job is using run.dir={run_dir}; wait for its end or choose another run.name"
            ) from e
        yield handle
    finally:
        os.close(handle)


def _prepare_resume(cfg: DictConfig, run_dir: Path) -> int:
    """Put the folder in order for the job's start; returns the step it starts from."""
    folder = Path(cfg.trainer.default_local_dir)
    mode = cfg.trainer.resume_mode
    (run_dir / FAILURE).unlink(missing_ok=True)
    if mode == "auto":
        step = checkpoints.repair_tracker(folder) or 0
    else:
        step = int(Path(cfg.trainer.resume_from_path).name.removeprefix("global_step_")) if mode != "disable" else 0
        if folder.is_dir():
            checkpoints.set_aside_newer(folder, step)
    if step == 0:
        _set_earlier_run_aside(run_dir)
    metrics_log.keep_history(run_dir / METRICS)
    return step


def _set_earlier_run_aside(run_dir: Path) -> None:
    """The curves of a run that starts over must not be mixed with those of the run before it."""
    metrics = [path for path in run_dir.glob("metrics*.jsonl") if path.stat().st_size]
    if not metrics:
        return
    numbers = [path.name.removeprefix("earlier-") for path in run_dir.glob("earlier-*")]
    number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
    target = run_dir / f"earlier-{number}"
    target.mkdir()
    for path in [*metrics, run_dir / LOG, run_dir / "tensorboard"]:
        if path.exists():
            path.rename(target / path.name)


def _prepare_data(cfg: DictConfig, run_dir: Path) -> int:
    """Make the task's files where the job has a task; returns the number of training rows."""
    if cfg.prepare_data:
        train, _ = prepare(OmegaConf.to_container(cfg.task, resolve=True), run_dir / "data")
        return check_columns(train)
    files = cfg.data.train_files
    names = [files] if isinstance(files, str) else list(files)
    return sum(check_columns(name, cfg.data.prompt_key) for name in names)


def _total_steps(cfg: DictConfig, rows: int) -> int:
    """The explicit number, else the whole batches of all epochs; makes the epochs enough for the explicit number."""
    per_epoch = steps_per_epoch(cfg, rows)
    explicit = cfg.trainer.total_training_steps
    if explicit is None:
        return per_epoch * cfg.trainer.total_epochs
    # VeRL's loop also ends with the last epoch; a number of steps that someone asked for is what counts here.
    cfg.trainer.total_epochs = max(cfg.trainer.total_epochs, -(-explicit // per_epoch))
    return explicit


def _title(cfg: DictConfig, run: RunConfig, start_step: int) -> list[str]:
    flow, chosen = cfg.flow, cfg.choices
    start = f"resuming from step {start_step}" if start_step else "from the start"
    return [
        f"jetrl {run.name}",
        f"flow {flow.name}: linears {flow.train.linear} in training, {flow.rollout.linear} in rollout",
        f"model {chosen.model}, data {chosen.data}, {chosen.algorithm}, {chosen.hardware}: "
        f"{cfg.data.train_batch_size} prompts x {cfg.actor_rollout_ref.rollout.n} samples a step, {start}",
        f"everything goes to {run.dir} (raw output: {LOG})",
    ]


def _written(run_dir: Path) -> dict[str, str]:
    names = {"metrics": METRICS, "tensorboard": "tensorboard", "checkpoints": "checkpoints", "log": LOG}
    return {label: str(run_dir / name) for label, name in names.items() if (run_dir / name).exists()}


def _supervise(
    command: list[str], run_dir: Path, console: Console, lock: int, total: int, early: EarlyWorker | None
) -> int:
    """Start the child, show what it does, and leave no process of it behind."""
    log_file = run_dir / LOG
    orphans = Orphans()
    before = log_file.stat().st_size if log_file.exists() else 0
    previous = signal.signal(signal.SIGTERM, _as_interrupt)
    child = None
    try:
        with log_file.open("ab") as log:
            child = early.hand_over(run_dir / CONFIG, log.fileno(), lock) if early is not None else None
            child = child or subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # Ctrl-C of the terminal must reach the child once, from here.
                start_new_session=True,
                pass_fds=(lock,),
            )
        _follow(child, run_dir, before, console, total)
    except KeyboardInterrupt:
        console.phase("stopping")
        _interrupt(child)
        return INTERRUPTED
    finally:
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
        orphans.end()
        signal.signal(signal.SIGTERM, previous)
    if child.returncode != 0:
        raise JobError(f"{failure_sentence(run_dir, child.returncode, before)}; the job's output is in {log_file}")
    return 0


def _follow(child: subprocess.Popen, run_dir: Path, offset: int, console: Console, total: int) -> None:
    """Show what the child does until it ends: milestones of its log first, then every new line of its metrics."""
    metrics = metrics_log.MetricsTail(run_dir / METRICS)
    phase, milestones = "starting Ray", list(MILESTONES)
    while True:
        ended = child.poll() is not None  # before the poll below, so that the last lines are seen
        if milestones:
            text, offset = _new_text(run_dir / LOG, offset)
            while milestones and milestones[0][0] in text:
                phase = milestones.pop(0)[1]
        for step, figures in metrics.poll():
            console.step(figures, step)
            phase, milestones = f"step {step + 1}" if step < total else "shutting down", []
        if ended:
            return
        console.phase(phase)
        time.sleep(POLL_SECONDS)


def _new_text(file: Path, offset: int) -> tuple[str, int]:
    with file.open("rb") as log:
        log.seek(offset)
        data = log.read()
    return data.decode(errors="replace"), offset + len(data)


def _as_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _interrupt(child: subprocess.Popen | None) -> None:
    """SIGINT, so that Ray stops its own processes; a second Ctrl-C does not wait."""
    if child is None or child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(INTERRUPT_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def failure_sentence(run_dir: Path, returncode: int, log_offset: int = 0) -> str:
    """What ended a job: its own report, else the signal that killed it, else the log's last exception."""
    report = run_dir / FAILURE
    if report.is_file():
        record = json.loads(report.read_text())
        text = " ".join(record["message"].split()) or "no message"
        return text if record["type"] in ("JobError", "UserError") else f"{record['type']}: {text[:500]}"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the job was killed by {name}{hint}"
    found = LAST_EXCEPTION.findall(_new_text(run_dir / LOG, log_offset)[0])
    return f"{found[-1][0]}: {found[-1][1][:500]}" if found else f"the job ended with exit code {returncode}"
