"""Processes that get ready side by side and are measured one at a time.

An engine needs a minute or more to start, most of it imports and compilation on the CPU. `start` starts all of them; each
calls `serve`, gets ready and then waits on a pipe, with nothing on the GPU. When all wait, the parent asks one after another,
so that no start-up runs beside a measurement, and may order its questions by importance across processes.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil


class Process:
    """One child. `arguments`: its script and command line; it finds its end of the pipe in --channel N."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name, self.log, self.started = name, log, time.perf_counter()
        self._family: list[psutil.Process] = []  # also those that outlive the child: they hold GPU memory
        self._ours, theirs = multiprocessing.Pipe()
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self._child = subprocess.Popen(
                [sys.executable, *arguments, "--channel", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
        theirs.close()

    def ask(self, question: object, seconds: float) -> dict | None:
        """The answer, or None (and the child is gone) where it died or took longer."""
        try:
            self._ours.send(question)
        except OSError:
            return self._lost("it had ended")
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict | None:
        try:
            if self._ours.poll(seconds):
                found = self._ours.recv()
                self._remember()
                return found
        except (EOFError, OSError):
            return self._lost("it ended")
        return self._lost(f"no answer within {seconds:.0f} s")

    def _lost(self, why: str) -> None:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        print(
            f"{self.name}: {why}; the end of {self.log}:", *(f"  {line[:300]}" for line in lines), sep="\n", flush=True
        )
        self.end()

    def end(self) -> None:
        """At once: the child and what it started. Nothing it holds is worth a tidy shutdown of several seconds."""
        self._remember()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        psutil.wait_procs(self._family, timeout=20)
        self._ours.close()

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self._child.pid)
            self._family = [p for p in {*self._family, *me.children(recursive=True), me} if p.is_running()]


def start(names: list[str], arguments: Callable[[str], list[str]], logs: Path, seconds: float) -> dict[str, tuple]:
    """name -> (process, what its preparation returned, seconds from its start to there), of those that got ready."""
    processes = [Process(name, arguments(name), logs / f"{name}.log") for name in names]
    until, waiting, ready = time.perf_counter() + seconds, list(processes), {}
    while waiting:
        channels = {process._ours: process for process in waiting}
        for channel in multiprocessing.connection.wait(channels, max(0.0, until - time.perf_counter())):
            process = channels[channel]
            waiting.remove(process)
            answer = process.answer(0)
            if answer is not None:
                took = time.perf_counter() - process.started
                print(f"{process.name}: ready after {took:.1f} s", flush=True)
                ready[process.name] = (process, answer, took)
        if time.perf_counter() >= until:
            for process in waiting:
                process._lost(f"not ready within {seconds:.0f} s")
            waiting = []
    return {name: ready[name] for name in names if name in ready}


def serve(channel: int, prepare: Callable[[], tuple[object, dict]], answer: Callable[[object, object], dict]) -> None:
    """In the child. prepare() -> (what is measured, a dict for the parent); answer(what, question) -> a dict.

    Only a question's failure is answered, as {"error": its last line}; the traceback goes to the log.
    """
    # Children of vLLM's own end with this process only if it exits in an orderly way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pipe = multiprocessing.connection.Connection(channel)
    os.set_inheritable(channel, False)
    subject, found = prepare()
    pipe.send(found)
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(answer(subject, question))
        except Exception as e:  # noqa: BLE001  (one cell that fails must not lose the others)
            traceback.print_exc()
            pipe.send({"error": f"{type(e).__name__}: {str(e).splitlines()[-1] if str(e) else ''}"})
