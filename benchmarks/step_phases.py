"""Seconds of every phase of whole training steps in a real VeRL job, by flow, on a model of random weights.

    python benchmarks/step_phases.py [--shape qwen3-4b] [--flows bf16 unified_fp8] [--gpus 0 1] [--steps 4] [--prompts 64]
        [--samples 4] [--tokens 1024] [--warm] [--seconds N] [--out FOLDER] [-- WORDS OF jetrl.train ...]

Every flow is a `jetrl.train` of its own with the embedded tokenizer, on hardware=1gpu; all answers have --tokens tokens (an end
of sequence is ignored), so that flows do the same work. With several --gpus flows run beside each other, one a GPU; with
one, one after another. Medians over the steps after the first, which compiles; --warm runs jetrl.warm for all flows before
the first job starts; its seconds are printed and are not among --seconds. Without a GPU: hardware=cpu and `--shape tiny --prompts 16 --samples 4 --tokens 16 --steps 2`, a rehearsal.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import print_table, write_results
from rollout_engines import SHAPES

import jetrl.assets
from jetrl.launch.metrics_log import figures, read_run
from jetrl.precision.flow import load_flow

PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")
TOKENIZER = "tiny"  # of jetrl.assets; its special tokens stand for the shape's own
ON_GPU = torch.cuda.is_available()


def make_model(shape: str, folder: Path) -> Path:
    """A model folder of that shape with random BF16 weights and the embedded tokenizer."""
    embedded = Path(jetrl.assets.__file__).parent / TOKENIZER
    source = folder / "config"
    shutil.copytree(embedded, source, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    special = {
        key: value for key, value in json.loads((embedded / "config.json").read_text()).items() if "_token_id" in key
    }
    (source / "config.json").write_text(json.dumps(SHAPES[shape] | special))
    command = [sys.executable, "-m", "jetrl.verification.random_weights", str(folder / "failure.json")]
    subprocess.run([*command, str(source), str(folder / "model"), "0"], check=True)
    return folder / "model"


def words_of(arguments: argparse.Namespace, flow: str, model: Path, run: Path, temporary: str) -> list[str]:
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    words = [
        f"+precision={flow}", "model=tiny", "data=chain", f"actor_rollout_ref.model.path={model}",
        f"hardware={'1gpu' if ON_GPU else 'cpu'}", f"run.dir={run}", f"run.name={flow}", f"+ray_kwargs.ray_init._temp_dir={temporary}",
        f"data.train_batch_size={arguments.prompts}", f"{actor}.ppo_mini_batch_size={arguments.prompts}",
        f"{rollout}.n={arguments.samples}", f"{rollout}.ignore_eos=true", f"data.max_response_length={arguments.tokens}",
        f"{actor}.optim.lr=1e-6", f"trainer.total_training_steps={arguments.steps}", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.logger=[file]",
        # else the seconds of the rollout are a multiple of two
        "trainer.v1.sampler.custom_sampler.path=pkg://jetrl.integrations.verl.replay_buffer",
        "trainer.v1.sampler.custom_sampler.name=FrequentReplayBuffer",
    ]  # fmt: skip
    if ON_GPU:  # the model and its optimizer fit beside the engine: moving them is not what is measured
        words += [f"{part}.fsdp_config.param_offload=false" for part in (actor, "actor_rollout_ref.ref")]
        words += [f"{actor}.fsdp_config.optimizer_offload=false"]
    return words + arguments.words


def start(arguments: argparse.Namespace, flow: str, model: Path, folder: Path, gpu: str | None) -> subprocess.Popen:
    temporary = tempfile.mkdtemp(prefix="jx")  # a Unix socket's path has at most 107 characters
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    command = [sys.executable, "-m", "jetrl.train", *words_of(arguments, flow, model, folder / flow, temporary)]
    log = open(folder / f"{flow}.log", "w")  # noqa: SIM115  (the child's)
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def row_of(flow: str, run: Path) -> dict:
    """Medians over the steps after the first, seconds; tokens a step. Empty figures where fewer than two steps ended."""
    metrics = run / "metrics.jsonl"
    steps = (
        [m for _, m in sorted(read_run(metrics).items()) if figures(m).seconds is not None] if metrics.is_file() else []
    )
    row: dict = {"flow": flow, "steps": len(steps)}
    row["every_step"] = [{phase: m.get(f"timing_s/{phase}") for phase in PHASES} for m in steps]
    for phase in PHASES:
        found = [m[f"timing_s/{phase}"] for m in steps[1:] if m.get(f"timing_s/{phase}") is not None]
        if found:
            row[phase], row[f"{phase}_spread"] = (
                statistics.median(found),
                (max(found) - min(found)) / statistics.median(found),
            )
    if steps[1:]:
        row["tokens"] = statistics.median(m["perf/total_num_tokens"] for m in steps[1:])
    return row


def compare(rows: list[dict]) -> None:
    """The first row's seconds over each row's."""
    for row in rows:
        row |= {f"{phase}_x": rows[0][phase] / row[phase] for phase in PHASES if phase in rows[0] and row.get(phase)}


def warm(arguments: argparse.Namespace, model: Path, folder: Path) -> None:
    """jetrl.warm for every flow with FP8 products of jetrl's, one after another and before any job is timed."""
    for name in arguments.flows:
        flow = load_flow(name)
        if "fp8" not in (flow.train.linear, flow.rollout.linear):
            continue
        began = time.monotonic()
        words = words_of(arguments, name, model, folder / name, str(folder))
        if subprocess.run([sys.executable, "-m", "jetrl.warm", *words]).returncode:
            sys.exit(f"jetrl.warm failed for {name}, see above")
        print(f"{name}: jetrl.warm took {time.monotonic() - began:.0f} s", flush=True)


def run_all(arguments: argparse.Namespace, model: Path, folder: Path) -> list[dict]:
    until = time.monotonic() + arguments.seconds
    waiting, running, rows = list(arguments.flows), {}, {}
    gpus: list[str | None] = list(arguments.gpus) if ON_GPU else [None]
    while waiting or running:
        while waiting and gpus and time.monotonic() < until:
            flow, gpu = waiting.pop(0), gpus.pop(0)
            running[flow] = start(arguments, flow, model, folder, gpu), gpu
        for flow, (process, gpu) in list(running.items()):
            if time.monotonic() > until:
                process.terminate()
                process.wait()
            if process.poll() is not None:
                del running[flow]
                gpus.append(gpu)
                rows[flow] = row_of(flow, folder / flow)
                print(flow, f"ended with {process.returncode}", rows[flow], flush=True)
                if not rows[flow]["steps"]:
                    print((folder / f"{flow}.log").read_text(errors="replace")[-3000:], flush=True)
        waiting = waiting if time.monotonic() < until else []
        time.sleep(0.2)
    return [rows[flow] for flow in arguments.flows if flow in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--flows", nargs="+", default=["bf16", "unified_fp8"])
    parser.add_argument("--gpus", nargs="+", default=["0"], help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64, help="a step")
    parser.add_argument("--samples", type=int, default=4, help="answers a prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="of every answer")
    parser.add_argument("--warm", action="store_true", help="compile a job's GEMM kernels beforehand")
    parser.add_argument("--seconds", type=float, default=3600, help="for all flows together; what runs then is stopped")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("words", nargs="*", help="more words for jetrl.train, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phases-") as name:
        folder = Path(name)
        model = make_model(arguments.shape, folder)
        if arguments.warm:
            warm(arguments, model, folder)
        rows = run_all(arguments, model, folder)
    compare(rows)
    print_table([{k: v for k, v in row.items() if not k.endswith(("_spread", "every_step"))} for row in rows])
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    print(write_results(f"step-phases-{arguments.shape}", rows, arguments.out, settings=settings))


if __name__ == "__main__":
    main()
