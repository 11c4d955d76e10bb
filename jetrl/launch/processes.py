"""No process of a job outlives it. Ray's and vLLM's helpers start sessions of their own, so a process group is not enough."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# vLLM's engine processes notice that their parent is gone and leave by themselves within this time.
GRACE_SECONDS = 10.0


class Orphans:
    """Remembers this process's descendants at its making; `end()` ends those that came since.

    From here on, a descendant that loses its parent becomes a child of this process (Linux's subreaper) instead of
    init's, so it stays findable. Elsewhere than on Linux only what Ray cleans up itself is cleaned up.
    """

    def __init__(self) -> None:
        self._linux = sys.platform == "linux"
        if self._linux:
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._before = descendants(os.getpid()) if self._linux else set()

    def end(self) -> None:
        """Wait for new descendants to leave, then kill those that stay, and collect them all."""
        if not self._linux:
            return
        deadline = time.monotonic() + GRACE_SECONDS
        while left := self._living():
            if time.monotonic() >= deadline:
                for pid in left:
                    _signal(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _living(self) -> set[int]:
        new = descendants(os.getpid()) - self._before
        return {pid for pid in new if not _collect(pid)}


def descendants(pid: int) -> set[int]:
    """Every process below `pid`, itself not included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(entry)
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name in parentheses may itself hold blanks and parentheses.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended meanwhile


def _collect(pid: int) -> bool:
    """Reap a child of ours that has ended; True if it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False  # a grandchild: its parent reaps it, or it becomes ours


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
