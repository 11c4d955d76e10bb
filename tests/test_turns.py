"""Processes that benchmarks start side by side and question in turn (benchmarks/turns.py)."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
turns = pytest.importorskip("turns")

CHILD = """
import os, sys, time
from turns import serve

def prepare():
    if "broken" in sys.argv:
        raise SystemExit("no such engine")
    if "slow" in sys.argv:
        time.sleep(60)
    sleeper = os.fork()  # as vLLM forks its engine: with the pipe's end
    if sleeper == 0:
        time.sleep(60)
        os._exit(0)
    return sleeper, {"pid": os.getpid()}

def answer(sleeper, question):
    if question == "fail":
        raise ValueError("first line\\nlast line")
    if question == "end":
        os._exit(3)
    if question == "hang":
        time.sleep(60)
    return {"asked": question, "sleeper": sleeper}

serve(int(sys.argv[sys.argv.index("--channel") + 1]), prepare, answer)
"""


@pytest.fixture
def begin(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    started = []

    def begin(*names, seconds=60.0):
        found = turns.start(list(names), lambda name: [str(script), name], tmp_path / "logs", seconds)
        started.extend(process for process, *_ in found.values())
        return found

    yield begin
    for process in started:
        process.end()


def _ended(pid: int) -> bool:
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_children_answer_and_a_failed_question_loses_no_other(begin):
    found = begin("a", "b")
    assert list(found) == ["a", "b"]
    process, said, _ = found["a"]
    assert said["pid"] != os.getpid()
    assert process.ask("fail", 10) == {"error": "ValueError: last line"}
    assert process.ask(1, 10)["asked"] == 1
    assert found["b"][0].ask(2, 10)["asked"] == 2


def test_who_does_not_get_ready_is_left_out_and_its_last_words_are_shown(begin, capfd):
    assert list(begin("broken", "fine", "slow", seconds=20.0)) == ["fine"]
    shown = capfd.readouterr().out
    assert "no such engine" in shown and "slow: not ready within 20 s" in shown


@pytest.mark.parametrize("question", ["end", "hang"])
def test_a_child_that_ends_or_hangs_is_gone_with_what_it_started(begin, question):
    process, _, _ = begin("fine")["fine"]
    sleeper = process.ask("where", 10)["sleeper"]
    began = time.perf_counter()
    assert process.ask(question, 20.0 if question == "end" else 1.0) is None
    assert time.perf_counter() - began < 20  # what it waits for at most, and not for the sleeper's 60 s
    assert _ended(sleeper)
