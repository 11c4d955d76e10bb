"""The job's child process, started while the job is still being checked.

Its imports of Ray, torch and VeRL take 10 to 20 s, as long as those of the checks: side by side they cost once.
"""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from jetrl.launch.worker_entry import WAIT


class EarlyWorker:
    """`with EarlyWorker() as early:` starts it; `hand_over` gives it its job; without a job it ends with the block."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jetrl.launch.worker_entry", WAIT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._given = False

    def hand_over(self, config: Path, log: int, lock: int) -> subprocess.Popen | None:
        """Send the configuration's path, the log that its output goes to, and the lock that it holds with its parent.

        None when the process has been killed before: a fresh one takes its place.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._ours, [str(config).encode()], [log, lock])
            self._given = True
            return self.process
        return None

    def __enter__(self) -> "EarlyWorker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ours.close()
        if not self._given:
            self.process.kill()
            self.process.wait()
