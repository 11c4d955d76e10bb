"""Checkpoints: what counts as whole, what VeRL is made to resume from, and that a real kill loses only what was unfinished."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from jetrl.errors import JobError
from jetrl.launch.checkpoints import (
    MARKER,
    TRACKER,
    is_whole,
    mark_whole,
    prune,
    repair_tracker,
    set_aside_newer,
    why_not_whole,
)


def save(root: Path, step: int, whole: bool = True) -> Path:
    folder = root / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    torch.save({"step": step, "weight": torch.full((256,), float(step))}, folder / "actor" / "model.pt")
    torch.save({"step": step}, folder / "data.pt")
    if whole:
        mark_whole(folder)
    (root / TRACKER).write_text(str(step))
    return folder


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def resumed_by_verl(root: Path) -> str | None:
    found = find_latest_ckpt_path(str(root))
    return None if found is None else Path(found).name


def silent(_: str) -> None:
    pass


# --- whole or not ---


def test_a_marked_folder_is_whole_and_an_unmarked_one_is_not(tmp_path):
    assert is_whole(save(tmp_path, 1))
    assert why_not_whole(save(tmp_path, 2, whole=False)) == "it was never finished"


def test_a_file_truncated_after_the_marker_is_found(tmp_path):
    folder = save(tmp_path, 1)
    file = folder / "actor" / "model.pt"
    size = file.stat().st_size
    with file.open("r+b") as f:
        f.truncate(size - 1)
    assert why_not_whole(folder) == f"actor/model.pt has {size - 1} bytes instead of {size}"


def test_a_file_that_is_gone_is_found(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "data.pt").unlink()
    assert why_not_whole(folder) == "data.pt is missing"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"step": 1, "files": 3}'])
def test_a_damaged_marker_does_not_vouch(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / MARKER).write_text(text)
    assert why_not_whole(folder) == f"its {MARKER} is damaged"


def test_a_folder_renamed_to_another_step_is_not_whole(tmp_path):
    assert not is_whole(save(tmp_path, 1).rename(tmp_path / "global_step_9"))


def test_marking_again_after_a_kill_between_marker_and_rename(tmp_path):
    folder = save(tmp_path, 1, whole=False)
    (folder / (MARKER + ".new")).write_text("{")
    mark_whole(folder)
    assert is_whole(folder)


def test_only_step_folders_are_marked(tmp_path):
    with pytest.raises(ValueError, match="global_step_N"):
        mark_whole(tmp_path)


# --- the tracker ---


@pytest.mark.parametrize("tracker", [b"", b"garbage", b"\xff\xfe", b"7", b"1", b"-3", None], ids=repr)
def test_any_tracker_is_put_right(tmp_path, tracker):
    # b"7" names a folder that is not there, b"1" an older whole one; VeRL's reader raises on the first three.
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / TRACKER).unlink()
    if tracker is not None:
        (tmp_path / TRACKER).write_bytes(tracker)
    assert repair_tracker(tmp_path, silent) == 2
    assert resumed_by_verl(tmp_path) == "global_step_2"


def test_an_unfinished_newer_folder_is_set_aside_with_a_sentence(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, whole=False)
    said = []
    assert repair_tracker(tmp_path, said.append) == 1
    assert said == ["Checkpoint global_step_2 is set aside as set_aside_global_step_2: it was never finished."]
    assert names(tmp_path) == {"global_step_1", "set_aside_global_step_2"}
    assert resumed_by_verl(tmp_path) == "global_step_1"


def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "data.pt").write_bytes(b"")
    assert repair_tracker(tmp_path, silent) == 1
    assert resumed_by_verl(tmp_path) == "global_step_1"


def test_without_a_whole_checkpoint_verl_starts_from_scratch(tmp_path):
    save(tmp_path, 1, whole=False)
    assert repair_tracker(tmp_path, silent) is None
    assert resumed_by_verl(tmp_path) is None
    assert names(tmp_path) == {"set_aside_global_step_1"}


def test_a_folder_that_is_missing_or_empty_starts_from_scratch(tmp_path):
    assert repair_tracker(tmp_path / "absent", silent) is None
    assert repair_tracker(tmp_path, silent) is None


def test_repairing_twice_changes_nothing_more(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, whole=False)
    repair_tracker(tmp_path, silent)
    said = []
    assert repair_tracker(tmp_path, said.append) == 1
    assert said == []


def test_the_same_step_can_fail_twice(tmp_path):
    save(tmp_path, 1)
    for _ in range(2):
        save(tmp_path, 2, whole=False)
        repair_tracker(tmp_path, silent)
    assert names(tmp_path) == {"global_step_1", "set_aside_global_step_2", "set_aside_global_step_2.1"}


def test_a_job_from_an_older_step_does_not_write_into_newer_whole_folders(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    set_aside_newer(tmp_path, 1, silent)
    assert names(tmp_path) == {"global_step_1", "set_aside_global_step_2"}


# --- pruning ---


def test_prune_keeps_the_two_newest_whole_ones(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert sorted(prune(tmp_path)) == ["global_step_1", "global_step_2"]
    assert names(tmp_path) == {"global_step_3", "global_step_10"}


def test_prune_never_deletes_the_only_whole_one_nor_one_in_writing(tmp_path):
    save(tmp_path, 1)
    for step in (2, 3, 4):
        save(tmp_path, step, whole=False)
    assert prune(tmp_path, keep=1) == []
    assert names(tmp_path) == {f"global_step_{step}" for step in (1, 2, 3, 4)}


def test_prune_clears_a_broken_folder_once_two_newer_ones_are_whole(tmp_path):
    save(tmp_path, 1, whole=False)
    save(tmp_path, 2)
    assert prune(tmp_path) == []
    save(tmp_path, 3)
    assert prune(tmp_path) == ["global_step_1"]


def test_prune_clears_what_was_set_aside_once_the_job_has_passed_it(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 3, whole=False)
    repair_tracker(tmp_path, silent)
    save(tmp_path, 2)
    assert prune(tmp_path) == []
    save(tmp_path, 3)
    assert sorted(prune(tmp_path)) == ["global_step_1", "set_aside_global_step_3"]


def test_prune_ends_a_deletion_that_was_killed(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "deleting_global_step_1")
    save(tmp_path, 2)
    prune(tmp_path)
    assert names(tmp_path) == {"global_step_2"}


def test_prune_refuses_to_keep_none(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        prune(tmp_path, keep=0)


# --- VeRL's hook ---


class Config:
    """The two levels that VeRL's builder reads: config.trainer.get(name, default)."""

    trainer = {"checkpoint_callback_class": "jetrl.launch.checkpoints.MarkWholeCallback"}


def test_verl_builds_the_callback_by_name_and_its_call_marks_and_prunes(tmp_path):
    callback = build_checkpoint_callback(Config)
    for step in (1, 2, 3):
        folder = save(tmp_path, step, whole=False)
        callback.on_save(trainer=None, global_step=step, checkpoint_dir=str(folder), async_save=False, added_later=1)
        assert is_whole(folder)
    assert names(tmp_path) == {"global_step_2", "global_step_3"}


def test_an_asynchronous_save_is_refused_and_not_marked(tmp_path):
    folder = save(tmp_path, 1, whole=False)
    with pytest.raises(JobError, match="async_save=true"):
        build_checkpoint_callback(Config).on_save(None, 1, str(folder), async_save=True)
    assert not is_whole(folder)


# --- a real kill ---

# A server that imports torch once and forks a job for each line "<stop_at> <folder>". The job saves as VeRL does: actor
# shards, data.pt, then the tracker opened for writing (which empties it) and written, then the callback. It says KILL
# where it is to be killed and sleeps there; in `mid_file` it does not sleep but goes on to torch.save 200 MB.
SERVER = """
import os, sys, time
from pathlib import Path
import torch
from jetrl.launch.checkpoints import MarkWholeCallback, TRACKER

def job(stop_at, root):
    def here(place):
        if step == 4 and place == stop_at:
            print("KILL", os.getpid(), flush=True)
            if place != "mid_file":
                time.sleep(60)

    for step in range(1, 5):
        folder = root / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        model = {"step": step, "weight": torch.full((1000,), float(step))}
        torch.save(model, folder / "actor" / "model_world_size_1_rank_0.pt")
        here("between_files")
        here("mid_file")
        state = [torch.zeros(2_500_000) for _ in range(20 if step == 4 else 1)]
        torch.save({"step": step, "state": state}, folder / "actor" / "optim_world_size_1_rank_0.pt")
        torch.save({"step": step}, folder / "data.pt")
        here("before_tracker")
        with open(root / TRACKER, "w") as f:
            here("tracker_empty")
            f.write(str(step))
        here("before_marker")
        MarkWholeCallback().on_save(None, step, str(folder))

for line in sys.stdin:
    stop_at, root = line.rstrip().split(" ", 1)
    pid = os.fork()
    if pid == 0:
        job(stop_at, Path(root))
        os._exit(0)
    print("ENDED", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def jobs():
    # One thread: a forked child has none of the pool that its parent may have started.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", SERVER], env=env, text=True, **pipes) as server:
        yield server
        server.stdin.close()


@pytest.mark.parametrize("stop_at", ["between_files", "mid_file", "before_tracker", "tracker_empty", "before_marker"])
def test_kill_amid_a_save_leaves_the_checkpoint_before_it_resumable(jobs, tmp_path, stop_at):
    jobs.stdin.write(f"{stop_at} {tmp_path}\n")
    jobs.stdin.flush()
    word, pid = jobs.stdout.readline().split()
    assert word == "KILL"
    half = tmp_path / "global_step_4" / "actor" / "optim_world_size_1_rank_0.pt"
    deadline = time.monotonic() + 30
    # Killed when the first megabyte is down: the other 199 take far longer than this loop's turn.
    while stop_at == "mid_file" and not (half.exists() and half.stat().st_size > 1e6):
        assert time.monotonic() < deadline
    os.kill(int(pid), signal.SIGKILL)
    assert jobs.stdout.readline() == f"ENDED {-signal.SIGKILL}\n"

    if stop_at == "mid_file":
        assert 0 < half.stat().st_size < 20 * 10_000_000
    assert repair_tracker(tmp_path, silent) == 3
    assert resumed_by_verl(tmp_path) == "global_step_3"
    assert names(tmp_path) == {"global_step_2", "global_step_3", "set_aside_global_step_4"}
    for file in (tmp_path / "global_step_3").rglob("*.pt"):
        assert torch.load(file, weights_only=True)["step"] == 3
