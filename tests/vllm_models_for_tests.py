"""Real vLLM models, built in this process without an engine around them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from checkpoints_for_tests import save_checkpoint


@contextmanager
def vllm_models(root: Path) -> Iterator[Callable]:
    """A function (architecture, **engine arguments) -> (the model that a vLLM worker would hold, weights unset; its ModelConfig)."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    started = []

    def build(architecture: str, **arguments):
        settings = {"load_format": "dummy", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
        config = EngineArgs(
            str(save_checkpoint(architecture, root)), **settings, **{"dtype": "bfloat16", **arguments}
        ).create_engine_config()
        dtype = torch.get_default_dtype()
        try:
            with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                if not started:
                    init_distributed_environment(1, 0, f"file://{root}/rendezvous", 0, "gloo")
                    ensure_model_parallel_initialized(1, 1)
                    started.append(True)
                return initialize_model(config), config.model_config
        finally:
            torch.set_default_dtype(
                dtype
            )  # vLLM does not where a model is refused, and every later test would run in BF16

    yield build
    cleanup_dist_env_and_memory()
