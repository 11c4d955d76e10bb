"""Run folders as jetrl.train leaves them, with invented but plausible metrics: real configurations, VeRL's file format."""

import json
import math
import random
import re
from dataclasses import asdict
from functools import cache, reduce
from pathlib import Path
from xml.etree import ElementTree

import yaml
from omegaconf import DictConfig, OmegaConf

from jetrl.launch.args import parse
from jetrl.launch.compose import compose_job
from jetrl.launch.wiring import apply_flow
from jetrl.precision.flow import load_flow
from jetrl.report import main
from jetrl.reporting import compare, graph_verdict
from jetrl.reporting.groups import group_runs
from jetrl.reporting.runs import load_runs

STEPS = 12
# Final accuracy and the mean k3 that the invented curves tend to.
SHAPES = {"bf16": (0.60, 2e-6), "fp8_rollout": (0.52, 6e-4), "unified_fp8": (0.59, 5e-6)}


@cache
def _composed() -> DictConfig:
    return compose_job(parse(["+precision=bf16", "hardware=cpu"]))


@cache
def _with_flow(name: str) -> str:
    """The job's real configuration under a flow, as JSON. Composed once, because composing takes seconds."""
    cfg = _composed().copy()
    flow = load_flow(name)
    cfg.flow, cfg.choices.precision = asdict(flow), name
    apply_flow(cfg, flow)
    return json.dumps(OmegaConf.to_container(cfg, resolve=True))


def config(flow: str, folder: Path, seed: int, steps: int = STEPS, **changes) -> dict:
    """The flow's configuration in `folder`. changes: dotted keys with __ for a dot."""
    cfg = json.loads(_with_flow(flow))
    changes = {"run__dir": str(folder), "run__name": folder.name, "task__seed": seed, **changes}
    for key, value in {"trainer__total_training_steps": steps, **changes}.items():
        *path, last = key.split("__")
        reduce(dict.__getitem__, path, cfg)[last] = value
    return cfg


def metrics(flow: str, seed: int, steps: int = STEPS, every: int = 4) -> dict[int, dict[str, float]]:
    """Steps 0..steps, validation every `every` and at step 0; names as VeRL 0.9.1 and jetrl log them."""
    final, k3 = SHAPES.get(flow, (0.5, 1e-4))
    noise = random.Random(f"{flow}-{seed}")
    result = {0: {"val-core/arithmetic/acc/mean@1": 0.3}}
    for step in range(1, steps + 1):
        progress = 1 - math.exp(-4 * step / steps)
        size = k3 * math.exp(noise.gauss(0, 0.3))
        timing = {"gen": 4.0, "old_log_prob": 1.5, "ref": 1.4, "adv": 0.1, "update_actor": 5.0, "update_weights": 0.2}
        timing = {f"timing_s/{name}": value * noise.uniform(0.9, 1.1) for name, value in timing.items()}
        seconds = sum(timing.values()) + 0.3
        row = {
            "critic/rewards/mean": 0.25 + (final - 0.25) * progress + noise.gauss(0, 0.02),
            "mismatch/k3_kl": size,
            "mismatch/abs_logprob_diff_p50": size**0.5 / 10,
            "mismatch/abs_logprob_diff_p99": size**0.5 * 3,
            "mismatch/abs_logprob_diff_max": size**0.5 * 12,
            "actor/pg_clipfrac": abs(noise.gauss(0, 0.002)),
            "actor/entropy": 0.4 * math.exp(-progress) + noise.gauss(0, 0.01),
            "response_length/mean": 12 + 9 * progress + noise.gauss(0, 0.4),
            "actor/perf/max_memory_allocated_gb": 41.5 if flow == "bf16" else 36.25,
            "actor/perf/cpu_memory_used_gb": 10 + noise.random(),
            "perf/total_num_tokens": 4800,
            "perf/time_per_step": seconds,
            "timing_s/step": seconds,
            **timing,
        }
        if step % every == 0:
            row["val-core/arithmetic/acc/mean@1"] = 0.3 + (final - 0.3) * progress + noise.gauss(0, 0.01)
            row["timing_s/testing"] = 2.5
        result[step] = row
    return result


def write_metrics(file: Path, steps: dict[int, dict[str, float]]) -> Path:
    """VeRL's file logger's lines; NaN as null, as orjson writes it."""
    lines = []
    for step, row in steps.items():
        row = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
        lines.append(json.dumps({"step": step, "data": row}) + "\n")
    file.write_text("".join(lines))
    return file


def write_run(root: Path, flow: str, seed: int = 0, done: int = STEPS, name: str | None = None, **changes) -> Path:
    """A run's folder after `done` of STEPS steps."""
    folder = root / (name or f"{flow}-seed={seed}")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.dump(config(flow, folder, seed, **changes), Dumper=yaml.CSafeDumper))
    steps = {step: row for step, row in metrics(flow, seed).items() if step <= done}
    write_metrics(folder / "metrics.jsonl", steps)
    return folder


def write_sweep(root: Path, seeds: int = 3) -> Path:
    for flow in SHAPES:
        for seed in range(seeds):
            write_run(root, flow, seed)
    return root


def groups_of(*paths):
    return group_runs(load_runs([str(path) for path in paths])[0])


def table_of(*paths, state=graph_verdict.UNKNOWN):
    groups = groups_of(*paths)
    verdicts = {run.name: graph_verdict.Verdict(state, "") for group in groups for run in group.runs}
    return compare.rows(groups, verdicts)


def report(*arguments, out):
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def pictures(html):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]
