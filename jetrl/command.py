"""What every jetrl command does with an error: one sentence on stderr and an exit code, never a traceback."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jetrl.errors import JobError, UserError


class SentenceParser(argparse.ArgumentParser):
    """Raises UserError for a bad command line, where argparse would print its usage before the sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows what is allowed")


def run_command(body: Callable[[], int]) -> int:
    """body's exit code; 2 where the user's input was refused, 1 where a job or the system failed, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may hold what the terminal's encoding does not know; printing it must not be what fails.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = body()
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk or a closed pipe is to be met here, not in Python's own exit
        return code
    except UserError as e:
        return _say(str(e), 2)
    except JobError as e:
        return _say(str(e), 1)
    except BrokenPipeError:  # `| head` has left: nobody reads on, and Python's own flush at exit would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:  # a disk that fills up, a folder that vanishes
        return _say(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)


def write_file(file: str | Path, text: str, option: str = "") -> None:
    """Write what the user asked to have in `file` (~ is their home). Raises UserError; option: what names another file."""
    try:
        Path(file).expanduser().write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{file} cannot be written ({e.strerror}); give another file{option}") from e


def _say(text: str, code: int) -> int:
    print(f"jetrl: {text}", file=sys.stderr)
    return code
