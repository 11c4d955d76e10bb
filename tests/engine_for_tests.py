"""The real VeRL engine of jetrl in this process: FSDP2 over one gloo rank, a tiny random model, a batch made from a seed."""

from pathlib import Path

import torch
import torch.distributed as dist


def start_process_group() -> None:
    """One gloo rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def build_engine(
    model_folder: Path,
    strategy: str = "fsdp2",
    masters: str = "bf16",
    packed: bool = False,
    gradient_checkpointing: bool = False,
    sequence_parallel: int = 1,
    param_offload: bool = False,
    optimizer_offload: bool = False,
    forward_only: bool = False,
    use_liger: bool = False,
    **override,
):
    """An initialized JetFSDPEngine. override: keys of model.override_config."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from jetrl.integrations.verl.engine import JetFSDPEngine

    model = HFModelConfig(
        path=str(model_folder),
        load_tokenizer=False,
        override_config=override,
        enable_gradient_checkpointing=gradient_checkpointing,
        use_remove_padding=packed,
        use_liger=use_liger,
    )
    engine = FSDPEngineConfig(
        strategy=strategy,
        model_dtype=masters,
        use_torch_compile=False,
        ulysses_sequence_parallel_size=sequence_parallel,
        param_offload=param_offload,
        optimizer_offload=optimizer_offload,
        forward_only=forward_only,
    )
    stochastic = dict(optimizer_impl="jetrl.optimizer", optimizer="StochasticAdamW") if masters == "bf16" else {}
    optimizer = FSDPOptimizerConfig(lr=1e-4, total_training_steps=10, **stochastic)
    contents = ["model", "optimizer", "extra"]
    checkpoint = CheckpointConfig(save_contents=contents, load_contents=contents)
    made = JetFSDPEngine(model, engine, optimizer, checkpoint)
    made.initialize()
    return made


def batch(
    vocabulary: int,
    seed: int = 0,
    sequences: int = 8,
    micro_batch: int = 2,
    shortest: int = 5,
    longest: int = 20,
    packed: bool = False,
):
    """A batch as VeRL's trainer hands it to an engine: nested token ids, positions, and a mask of what counts."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest, (sequences,), generator=generator).tolist()
    rows = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]

    def nested(values):
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(n) for n in lengths]),
            # The last token has no next one: VeRL pairs it with the first of the micro-batch's next sequence.
            "loss_mask": nested([torch.arange(1, n + 1).lt(n).float() for n in lengths]),
        }
    )
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro_batch,
        temperature=1.0,
        use_remove_padding=packed,
        calculate_entropy=False,
    )
    return data


def mean_log_prob_loss(model_output, data, dp_group=None):
    """Minus the mean log-probability of the batch's own tokens."""
    values = model_output["log_probs"].values() * data["loss_mask"].values()
    return -values.sum() / data["batch_num_tokens"], {}
