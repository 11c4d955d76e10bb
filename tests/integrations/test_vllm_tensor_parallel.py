"""Two tensor-parallel ranks of real vLLM (gloo): each stores its slice of what the trainer quantizes, by both wires."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jetrl_kernels.constants import TILE

from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.linear import quantize_weight
from jetrl.weight_bundle import bundled

pytestmark = pytest.mark.slow

# Ranks hold 256 rows of q, 128 of k and v, and 256 columns of o and down: cuts on the blocks' edges.
SIZES = dict(
    vocab_size=256, num_hidden_layers=1, max_position_embeddings=256, hidden_size=256, intermediate_size=512,
    num_attention_heads=4, num_key_value_heads=2, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
# kind of layer -> (members, which dimension is cut)
CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


def trainer_state() -> dict[str, torch.Tensor]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return {n: w.to(torch.bfloat16) for n, w in Qwen3ForCausalLM(Qwen3Config(**SIZES)).state_dict().items()}


def run_rank(rank: int, folder: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from jetrl.integrations.vllm.refit_plan import attach

    config = EngineArgs(
        folder, quantization="jetrl", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=64, dtype="bfloat16", tensor_parallel_size=2,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(2, rank, f"file://{folder}/rendezvous", rank, "gloo")
        ensure_model_parallel_initialized(2, 1)
        model = initialize_model(config)
    state = trainer_state()
    matrices = {n.removesuffix(".weight"): "fp32" for n in state if n.endswith("_proj.weight")}
    both = list(state.items()), list(quantized_on_the_way(iter(state.items()), matrices, "cpu"))
    # Bundles come after the handshake only.
    for known, items in [*itertools.product((False, True), both), (True, list(bundled(both[1])))]:
        if known:
            attach(model)
        model.load_weights(items)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        checked = 0
        for module in model.modules():
            receiver, start = getattr(module, "jetrl_receiver", None), 0
            for name, rows in zip(receiver.names, receiver.out_features, strict=True) if receiver else ():
                want = quantize_weight(state[f"{name}.weight"], "fp32")
                dim = CUT[name.rsplit(".", 1)[-1]]
                codes = want.codes.view(torch.uint8).chunk(2, dim)[rank]
                assert torch.equal(module.weight.data[start : start + rows].view(torch.uint8), codes), (rank, name)
                scale = module.weight_scale.data[start // TILE : (start + rows) // TILE]
                assert torch.equal(scale, want.scale.chunk(2, dim)[rank]), (rank, name)
                start, checked = start + rows, checked + 1
        assert checked == len(CUT)
        for module in model.modules():  # so that the next sync has to bring everything
            if hasattr(module, "jetrl_receiver"):
                module.weight.data.view(torch.uint8).fill_(0x7F)


def test_each_rank_stores_its_slice_of_the_trainers_codes(tmp_path):
    from transformers import Qwen3Config

    Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    environment = {**os.environ, "VLLM_DIST_IDENT": "jetrl-test"}  # what vLLM's own executor gives its ranks
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        output = rank.communicate(timeout=300)[0].decode()
        assert rank.returncode == 0, output[-3000:]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    run_rank(int(sys.argv[1]), sys.argv[2])
