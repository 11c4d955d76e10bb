"""The engine arguments that a VeRL job gives vLLM, from VeRL's own code.

VeRL builds them inside `vLLMHttpServer.launch_server`, a Ray actor's method that ends by starting a web server. Here a
subclass leaves out what needs Ray and keeps the arguments instead of starting anything (VeRL 0.9.1).
"""

import argparse
import asyncio

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


class _ArgumentsOnly(vLLMHttpServer):
    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, gpus_per_node: int) -> None:
        self.config, self.model_config = self._init_config(config), self._init_model_config(model_config)
        self._validate_configs()
        self.replica_rank = self.node_rank = 0
        self.nnodes, self.gpus_per_node, self.workers = 1, gpus_per_node, []
        self._disaggregation_role, self._disaggregation_kv_transfer_config = "null", None
        self.arguments: argparse.Namespace | None = None

    def _should_profile(self) -> bool:
        return False

    async def run_server(self, args: argparse.Namespace) -> None:
        self.arguments = args


def vllm_arguments(cfg: DictConfig) -> tuple[argparse.Namespace, HFModelConfig]:
    """What `vllm serve` would get for the job `cfg`, parsed and validated, and VeRL's model configuration."""
    model_config: HFModelConfig = omega_conf_to_dataclass(cfg.actor_rollout_ref.model)
    rollout: RolloutConfig = omega_conf_to_dataclass(cfg.actor_rollout_ref.rollout)
    server = _ArgumentsOnly(rollout, model_config, cfg.trainer.n_gpus_per_node)
    asyncio.run(server.launch_server())
    return server.arguments, model_config
