"""Ray on one machine, started so that its worker processes have imported what they need before an actor asks for one.

VeRL makes its actors one after another, and each would import torch and VeRL for 5 to 20 s first. Ray starts as many
idle workers as it has CPUs when a job connects, but gives them only to actors without a runtime environment. So the
job's variables are put where every process of this Ray inherits them, in the environment of the one that starts it,
instead of into a runtime environment, and the idle workers are told to import.
"""

import os

from omegaconf import DictConfig, OmegaConf

# What the actors without a GPU import: TransferQueue's, the reward loop, the load balancer, the agent loop. Not
# verl.trainer.main_ppo: it makes a CUDA context, half a GiB of the GPU in every process.
PRELOADED = (
    "torch",
    "transfer_queue",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)
# Below, idle workers that import would only take the cores from the processes that the job waits for.
CORES = 8
# Each idle worker takes about 1 GB of memory once it has imported.
MOST_WORKERS = 12


def fits(cfg: DictConfig) -> bool:
    """Whether this job's Ray is started here: one GPU of this machine, and nothing in the runtime environment but variables.

    With several GPUs a worker must not have seen them all before Ray tells it which one is its own. Full determinism and the
    logger rl_insight are left to VeRL, which sets their variables between this and ray.init. ray_kwargs.ray_init.num_cpus
    says how many workers there will be: without it as many as the machine has cores, which may be hundreds.
    """
    ray_init = cfg.ray_kwargs.ray_init
    others = {key: value for key, value in (ray_init.get("runtime_env") or {}).items() if key != "env_vars" and value}
    elsewhere = ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    one = cfg.trainer.nnodes == 1 and cfg.trainer.n_gpus_per_node == 1
    few = 0 < (ray_init.get("num_cpus") or 0) <= MOST_WORKERS
    reward, loggers = cfg.reward.reward_model, cfg.trainer.logger or []
    late = cfg.actor_rollout_ref.rollout.full_determinism or (reward.enable and reward.rollout.full_determinism)
    late = late or "rl_insight" in ([loggers] if isinstance(loggers, str) else loggers)
    one = one and few and not late
    return one and not others and not elsewhere and (os.cpu_count() or 1) >= CORES


def start(cfg: DictConfig) -> None:
    """ray.init as VeRL would call it; VeRL finds Ray started. Leaves it to VeRL where `fits` is False."""
    if not fits(cfg):
        return
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    variables = get_ppo_ray_runtime_env(cfg)["env_vars"]
    if cfg.transfer_queue.enable:
        variables["TRANSFER_QUEUE_ENABLE"] = "1"
    arguments = OmegaConf.to_container(cfg.ray_kwargs.ray_init, resolve=True)
    variables |= (arguments.pop("runtime_env", None) or {}).get("env_vars") or {}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.setdefault("RAY_preload_python_modules", ",".join(PRELOADED))
    ray.init(**arguments)
