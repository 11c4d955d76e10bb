"""What made a run: one line in its folder for every start, so that results of different days and machines stay apart."""

import datetime
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jetrl import __version__
from jetrl.versions import REQUIRED, installed

STARTS = "starts.jsonl"


def record_start(cfg: DictConfig, run_dir: Path) -> None:
    """Append to `starts.jsonl`: time (UTC), command, seeds, versions, GPU, commit of a source checkout."""
    flat = {key: OmegaConf.select(cfg, key) for key in ("data.seed", "task.seed", "actor_rollout_ref.rollout.seed")}
    line = {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "seeds": {key: value for key, value in flat.items() if value is not None},
        "versions": {
            "jetrl": __version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            **installed(tuple(name for names in REQUIRED for name in names)),
        },
        "gpu": _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "commit": _first_line("git", "-C", str(Path(__file__).parents[2]), "rev-parse", "HEAD"),
    }
    with (run_dir / STARTS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _first_line(*command: str) -> str | None:
    """None where the program is not installed or has no answer: a run without a GPU, or one from an installed wheel."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
