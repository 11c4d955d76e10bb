"""Checkpoints that survive a kill: a folder counts only once it is marked whole, and VeRL's tracker follows the marks.

VeRL 0.9.1 writes a checkpoint file by file into `global_step_N` and then its tracker in place, so a kill leaves a half
folder, or a tracker that is empty or names a folder that is gone. Here a marker is written last, after everything it
vouches for is on disk: `MarkWholeCallback` does so from VeRL's own hook (trainer.checkpoint_callback_class), and
`repair_tracker` puts things right before the next start. VeRL must delete nothing itself
(trainer.max_actor_ckpt_to_keep and max_critic_ckpt_to_keep null): it would do so before the new folder is whole.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jetrl.errors import JobError

MARKER = "jetrl_whole.json"
TRACKER = "latest_checkpointed_iteration.txt"
KEEP = 2
# VeRL looks for global_step_N by its exact name, so a folder under either of these is out of its reach.
SET_ASIDE = "set_aside_global_step_"
DELETING = "deleting_"
STEP_FOLDER = re.compile(r"global_step_(\d+)")
SET_ASIDE_FOLDER = re.compile(SET_ASIDE + r"(\d+)(?:\.\d+)?")


def mark_whole(folder: Path) -> None:
    """Vouches for a finished `global_step_N`: syncs its files to disk, then writes the marker in one atomic step.

    Raises ValueError if the folder's name holds no step, OSError if the disk fails (the folder stays unmarked).
    """
    folder = Path(folder)
    step = _step_of(folder)
    if step is None:
        raise ValueError(f"{folder} is not a checkpoint folder: its name must be global_step_N.")
    for stale in (folder / MARKER, _temporary(folder / MARKER)):
        stale.unlink(missing_ok=True)
    files = list(_files(folder))
    for path in files:
        _sync(path)
    for directory in {parent for path in files for parent in path.parents if parent.is_relative_to(folder)}:
        _sync(directory)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    _write_atomically(folder / MARKER, json.dumps({"step": step, "files": sizes}, indent=1))
    _sync(folder.parent)


def is_whole(folder: Path) -> bool:
    """Whether the folder is marked and every file has the size that it had when it was marked."""
    return why_not_whole(folder) is None


def why_not_whole(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if it is whole."""
    folder = Path(folder)
    try:
        marker = json.loads((folder / MARKER).read_text())
        step, sizes = marker["step"], dict(marker["files"])
    except FileNotFoundError:
        return "it was never finished"
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} is damaged"
    if step != _step_of(folder):
        return f"its {MARKER} is of step {step}"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def repair_tracker(checkpoint_dir: Path, say: Callable[[str], None] = print) -> int | None:
    """Makes VeRL's `resume_mode=auto` find the newest whole checkpoint. Call it before a job starts, never during one.

    Folders that are newer than it are not whole: they are renamed to `set_aside_global_step_N` (nothing is deleted
    here) and `say` gets a sentence for each. The tracker is written anew from the marks, or removed if none is whole.
    Returns the step that VeRL will resume from; None means from the start.
    """
    checkpoint_dir = Path(checkpoint_dir)
    if not checkpoint_dir.is_dir():
        return None
    latest = max((step for step, folder in _steps(checkpoint_dir).items() if is_whole(folder)), default=None)
    set_aside_newer(checkpoint_dir, 0 if latest is None else latest, say)
    tracker = checkpoint_dir / TRACKER
    if latest is None:
        tracker.unlink(missing_ok=True)
        _sync(checkpoint_dir)
    elif not tracker.is_file() or tracker.read_bytes() != str(latest).encode():
        _write_atomically(tracker, str(latest))
    return latest


def set_aside_newer(checkpoint_dir: Path, step: int, say: Callable[[str], None] = print) -> None:
    """Renames every `global_step_N` with N > step, whole or not, to `set_aside_global_step_N`.

    A job that starts from `step` (0: from the start, or a folder named by the user) would write into those again, and
    a kill amid that would leave old and new files under a marker that still holds.
    """
    for newer, folder in _steps(checkpoint_dir).items():
        if newer <= step:
            continue
        reason = why_not_whole(folder) or f"the job starts from step {step}"
        target, number = folder.with_name(f"{SET_ASIDE}{newer}"), 0
        while target.exists():
            number += 1
            target = folder.with_name(f"{SET_ASIDE}{newer}.{number}")
        folder.rename(target)
        say(f"Checkpoint {folder.name} is set aside as {target.name}: {reason}.")
    _sync(Path(checkpoint_dir))


def prune(checkpoint_dir: Path, keep: int = KEEP) -> list[str]:
    """Deletes all but the `keep` newest whole checkpoints; returns the deleted folders' names.

    Never deletes a whole checkpoint unless `keep` newer whole ones exist, nor a folder newer than the newest whole one
    (it may be in writing). What was set aside goes once the job has passed its step.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would delete the only checkpoint; at least 1 is kept.")
    checkpoint_dir = Path(checkpoint_dir)
    for half_deleted in checkpoint_dir.glob(DELETING + "*"):
        shutil.rmtree(half_deleted)
    steps = _steps(checkpoint_dir)
    whole = sorted(step for step, folder in steps.items() if is_whole(folder))
    doomed = []
    if len(whole) >= keep:
        doomed += [folder for step, folder in steps.items() if step < whole[-keep]]
    for path in checkpoint_dir.iterdir():
        match = SET_ASIDE_FOLDER.fullmatch(path.name)
        if match and whole and int(match.group(1)) <= whole[-1]:
            doomed.append(path)
    for folder in doomed:
        # Out of VeRL's sight in one step: a kill amid the deletion must not leave a checkpoint with files missing.
        shutil.rmtree(folder.rename(folder.with_name(DELETING + folder.name)))
    return [folder.name for folder in doomed]


class MarkWholeCallback:
    """VeRL's checkpoint hook (`trainer.checkpoint_callback_class`): marks what was saved, then prunes.

    VeRL calls `on_save` in the trainer's process after all workers have written and the tracker is updated. Not derived
    from VeRL's base class, which does nothing: the command line reads this module before VeRL is imported.
    """

    def __init__(self, config=None):
        self.config = config

    def on_save(self, trainer, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs) -> None:
        """Raises JobError for an asynchronous save: its files are still being written when VeRL calls this."""
        if async_save:
            raise JobError(
                "actor_rollout_ref.actor.checkpoint.async_save=true is not supported: a checkpoint cannot be marked "
                "whole while it is being written; set it to false."
            )
        mark_whole(Path(checkpoint_dir))
        prune(Path(checkpoint_dir).parent)


def _steps(checkpoint_dir: Path) -> dict[int, Path]:
    """The `global_step_N` folders by step, ascending."""
    found = ((_step_of(path), path) for path in Path(checkpoint_dir).iterdir() if path.is_dir())
    return dict(sorted((step, path) for step, path in found if step is not None))


def _step_of(folder: Path) -> int | None:
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _write_atomically(path: Path, text: str) -> None:
    temporary = _temporary(path)
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
