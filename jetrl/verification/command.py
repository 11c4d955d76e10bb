"""The steps of one verification, in the command's own process, which imports neither vLLM nor VeRL's workers."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from jetrl.errors import UserError
from jetrl.launch import model_files, preflight
from jetrl.launch.args import parse
from jetrl.launch.compose import compose_job
from jetrl.verification import child, random_weights
from jetrl.verification.workspace import FOLDER, Options, Workspace

Say = Callable[[str], None]
Start = Callable[[Workspace, str, str, list[str], dict[str, str]], float]


def prepare(words: list[str], options: Options) -> tuple[DictConfig, Workspace]:
    """The composed job with room for the lengths asked for, and the folder of this verification. Raises UserError."""
    if find_spec("vllm") is None:
        raise UserError(
            "vllm is not installed, and jetrl.verify samples with it; scripts/train.sh installs the whole stack"
        )
    line = parse(words)
    if line.multirun or line.dry_run or line.show_config:
        raise UserError("jetrl.verify takes --help, its own options, and group=name and key=value as jetrl.train")
    cfg = compose_job(line)
    preflight.check_verl_config(cfg)
    if cfg.flow.rollout.linear == "vllm_fp8" and cfg.trainer.device == "cpu":
        raise UserError(
            f"precision={cfg.flow.name}: VeRL quantizes its weights with a GPU kernel; verify it on a GPU, or precision=fp8_rollout"
        )
    space = Workspace(Path(cfg.run.dir) / FOLDER)
    _make_room(cfg, options)
    _check_model_files(cfg)
    return cfg, space


def _make_room(cfg: DictConfig, options: Options) -> None:
    """max_model_len for the longest sequence; the trainer's micro-batches too."""
    rollout = cfg.actor_rollout_ref.rollout
    prompt = max(options.prompt_lengths, default=cfg.data.max_prompt_length)
    longest = prompt + max(options.lengths)
    most = model_files.read_config(str(cfg.actor_rollout_ref.model.path)).get("max_position_embeddings")
    if isinstance(most, int) and longest > most:
        raise UserError(
            f"--lengths up to {max(options.lengths)} after prompts of up to {prompt} tokens need {longest} positions, and the "
            f"model has {most}; give shorter --lengths, or --prompt-lengths"
        )
    with open_dict(cfg):
        rollout.max_model_len = max(longest, rollout.max_model_len)
        rollout.seed = options.seed
        if cfg.actor_rollout_ref.actor.use_dynamic_bsz:
            tokens = rollout.log_prob_max_token_len_per_gpu
            rollout.log_prob_max_token_len_per_gpu = max(longest, tokens or 0)
    if options.kv_cache_tokens and options.kv_cache_tokens < longest:
        raise UserError(
            f"--kv-cache-tokens={options.kv_cache_tokens} cannot hold one sequence of {longest} tokens; give at least {longest}"
        )


def _check_model_files(cfg: DictConfig) -> None:
    """A model folder without a tokenizer is fine here: prompts are token ids."""
    model = cfg.actor_rollout_ref.model
    folder = Path(str(model.path))
    if folder.is_dir() and not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        with open_dict(cfg):
            model.load_tokenizer = False


def verify(cfg: DictConfig, options: Options, space: Workspace, say: Say, start: Start = child.start) -> dict:
    """Run both engines and compare. say: gets a line for every step; start: runs one step in a process of its own.
    Returns the result as plain containers."""
    model = cfg.actor_rollout_ref.model
    name = Path(str(model.path)).name
    lengths = ", ".join(map(str, options.lengths))
    say(f"precision={cfg.choices.precision}, {model.path}: {options.sequences} sequences of {lengths} tokens")
    env = {k: str(v) for k, v in (OmegaConf.select(cfg, "ray_kwargs.ray_init.runtime_env.env_vars") or {}).items()}
    # The worker lives in the engine's process, where its operators can be observed.
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    random = random_weights.needed(str(model.path))
    if random:
        folder = space.folder.parent / "random-weights"
        space.folder.mkdir(parents=True, exist_ok=True)
        start(
            space,
            "weights",
            "jetrl.verification.random_weights",
            [str(model.path), str(folder), str(options.seed)],
            env,
        )
        say(f"the model folder has no weights: random ones (seed {options.seed}) in {folder}")
        model.path = str(folder)
    space.write(cfg, options)
    _run_rollout(cfg, options, space, say, start, env)
    seconds = start(space, "trainer", "jetrl.verification.trainer", [str(space.folder)], env)
    say(f"trainer recomputed, {seconds:.0f} s")
    result = json.loads(space.result.read_text())
    return {"model": name, "random_weights": random, **result}


def _run_rollout(
    cfg: DictConfig, options: Options, space: Workspace, say: Say, start: Start, env: dict[str, str]
) -> None:
    """Sampling with the job's engine, and the observed one where that engine runs CUDA graphs; side by side if they may."""
    rollout = cfg.actor_rollout_ref.rollout
    parallel = int(rollout.tensor_model_parallel_size)
    layers = bool(options.layer_sequences) and parallel == 1
    # vLLM's memory profiling fails beside another engine, and with a given size it takes none; a task's prompts are files.
    apart = not OmegaConf.select(rollout, "engine_kwargs.vllm.kv_cache_memory_bytes") or not options.prompt_lengths
    together = layers and not rollout.enforce_eager and not apart

    def run(step: str, argument: str) -> float:
        return start(space, step, "jetrl.verification.rollout", [str(space.folder), argument], env)

    with ThreadPoolExecutor(1) as pool:
        observed = pool.submit(run, "layers", "layers") if together else None
        say(f"rollout sampled, {run('rollout', 'generate'):.0f} s")
        if observed or (layers and not space.layers.is_file()):
            seconds = observed.result() if observed else run("layers", "layers")
            say(f"rollout observed in eager mode, {seconds:.0f} s")
    if options.layer_sequences and parallel > 1:
        say(f"operators are not compared with actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}")
