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
        # The pipe alone does not tell that the child is gone: an engine process that it forked holds the other end too.
        self._gone = os.pidfd_open(self._child.pid)

    def ask(self, question: object, seconds: float) -> dict | None:
        """The answer, or None (and the child is gone) where it died or took longer."""
        try:
            self._ours.send(question)
        except OSError:
            return self._lost("it had ended")
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict | None:
        happened = multiprocessing.connection.wait([self._ours, self._gone], seconds)
        if self._ours in happened:
            with contextlib.suppress(EOFError, OSError):
                found = self._ours.recv()
                self._remember()
                return found
        return self._lost("it ended" if happened else f"no answer within {seconds:.0f} s")

    def _lost(self, why: str) -> None:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        print(
            f"{self.name}: {why}; the end of {self.log}:", *(f"  {line[:300]}" for line in lines), sep="\n", flush=True
        )
        self.end()

    def end(self) -> None:
        """At once: the child and what it started. Nothing it holds is worth a tidy shutdown of several seconds."""
        if self._ours.closed:
            return
        self._remember()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        until = time.perf_counter() + 20
        while any(_lives(process) for process in self._family) and time.perf_counter() < until:
            time.sleep(0.02)
        self._ours.close()
        os.close(self._gone)

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self._child.pid)
            self._family = [p for p in {*self._family, *me.children(recursive=True), me} if p.is_running()]


def _lives(process: psutil.Process) -> bool:
    """Not so of a zombie, which holds no memory; in a container nobody may ever collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(names: list[str], arguments: Callable[[str], list[str]], logs: Path, seconds: float) -> dict[str, tuple]:
    """name -> (process, what its preparation returned, seconds from its start to there), of those that got ready."""
    processes = [Process(name, arguments(name), logs / f"{name}.log") for name in names]
    until, waiting, ready = time.perf_counter() + seconds, list(processes), {}
    while waiting:
        signs = {sign: process for process in waiting for sign in (process._ours, process._gone)}
        happened = multiprocessing.connection.wait(signs, max(0.0, until - time.perf_counter()))
        for process in {signs[sign] for sign in happened}:
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
