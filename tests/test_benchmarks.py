"""Kernel benchmarks on a machine without a GPU: one sentence, no traceback. Those with a rehearsal on a CPU go on there."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
REHEARSED = {"engine", "refit", "rollout", "update"}
PROGRAMS = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}


def test_a_benchmark_is_rehearsed_on_a_cpu_or_asks_for_a_gpu():
    asking = {name for name, path in PROGRAMS.items() if re.search(r"^    require_gpu\(\)", path.read_text(), re.M)}
    assert asking == set(PROGRAMS) - REHEARSED


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - REHEARSED))
def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys, name):
    monkeypatch.setattr("sys.argv", [str(PROGRAMS[name])])
    monkeypatch.syspath_prepend(FOLDER)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err == f"bench_{name}.py: error: there is no GPU here; run it on a machine with one\n"


def test_gpu_time_counts_overlaps_once_and_only_short_pauses(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from gpu_time import GAP_US, busy_us

    kernels = [(100.0, 110.0), (101.0, 102.0), (0.0, 10.0), (8.0, 12.0), (12.0 + GAP_US, 20.0)]
    assert busy_us(kernels) == 20.0 + 10.0


def test_a_step_without_direction_moves_an_fp8_policy_further_than_a_bf16_one(monkeypatch, tmp_path):
    """benchmarks/update_noise.py on the embedded model; its page has 14 to 29 times."""
    monkeypatch.syspath_prepend(FOLDER)
    words = ["tiny", "--task", "arithmetic", "--texts", "4", "--rates", "1e-5", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["update_noise.py", *words])
    runpy.run_path(str(FOLDER / "update_noise.py"), run_name="__main__")
    (file,) = tmp_path.glob("update-noise-*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert 5 < row["fp8_over_bf16"] < 100 and row["bf16"] > 0
