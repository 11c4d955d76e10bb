"""The trainer's process: `python -m jetrl.verification.trainer <failure file> <folder>`.

Builds the actor as a job builds it, through VeRL's engine registry with jetrl's engine in it, on one rank, and computes
the log-probs of the sampled tokens with the engine's own inference step. Then the operators, twice: as they are, and fed
with the rollout's values.
"""

import json
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig, open_dict

from jetrl.errors import UserError
from jetrl.verification import mutations, mutations_trainer
from jetrl.verification.child import run_child
from jetrl.verification.mismatch import mismatch
from jetrl.verification.operators import operator_report
from jetrl.verification.points import LOG_SOFTMAX
from jetrl.verification.trainer_points import TokenLayout, TrainerObserver
from jetrl.verification.workspace import Workspace


def main(folder: str) -> None:
    space = Workspace(Path(folder))
    cfg, options = space.config, space.options
    sampled = torch.load(space.rollout, weights_only=False)
    engine = build_actor(cfg, space)
    tokens = [p + o for p, o in zip(sampled["prompts"], sampled["outputs"], strict=True)]
    log_probs = infer(engine, cfg, tokens)
    mine = [row[len(p) - 1 : -1] for row, p in zip(log_probs, sampled["prompts"], strict=True)]
    result = {
        "flow": engine.flow.to_dict(),
        "attention": engine.model_config.hf_config._attn_implementation,
        "device": device_name(),
        "engine": sampled["facts"],
        "sequences": len(tokens),
        "prompt_lengths": [len(p) for p in sampled["prompts"]],
        "output_lengths": [len(o) for o in sampled["outputs"]],
        "mismatch": mismatch(sampled["log_probs"], mine),
    }
    space.result.write_text(json.dumps(result, indent=1))  # what follows may fail, or be killed
    observed = torch.load(space.layers, weights_only=False) if space.layers.is_file() else {}
    if observed:
        forward = FedForward(engine, cfg, observed)
        plain, fed = forward.observe(feed=False), forward.observe(feed=True)
        result["operators"] = operator_report(plain, fed, engine.module.config.num_hidden_layers)
        result["followed_tokens"] = options.layer_tokens
        space.result.write_text(json.dumps(result, indent=1))
        if options.mutations:
            result["mutations"] = _trainer_mutations(forward, fed)
            space.result.write_text(json.dumps(result, indent=1))
            if space.mutated.is_file():
                records = torch.load(space.mutated, weights_only=False)
                result["mutations"] += _rollout_mutations(engine, cfg, records)
    space.result.write_text(json.dumps(result, indent=1))


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def build_actor(cfg: DictConfig, space: Workspace):
    """The initialized actor engine of the job, on this process alone (VeRL 0.9.1: engine_workers.py, init_model)."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.device import get_device_name, get_nccl_backend
    from verl.workers.config import ActorConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    import jetrl.integrations.verl  # noqa: F401  (installs what its hosts have loaded)

    device = get_device_name()
    backend = "cpu:gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}"
    rendezvous = space.folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    torch.distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=0, world_size=1)
    from jetrl.integrations.verl import engine as jetrl_engine

    jetrl_engine.register()
    model_config: HFModelConfig = omega_conf_to_dataclass(cfg.actor_rollout_ref.model)
    actor_cfg = cfg.actor_rollout_ref.actor
    with open_dict(actor_cfg):
        actor_cfg.fsdp_config.fsdp_size = -1
    actor: ActorConfig = omega_conf_to_dataclass(actor_cfg)
    actor.model_config = model_config
    actor.engine.use_remove_padding = model_config.use_remove_padding
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=actor.engine.strategy,
        model_config=model_config,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine


def infer(engine, cfg: DictConfig, tokens: list[list[int]], together: bool = False) -> list[torch.Tensor]:
    """Log-probs of each next token, float32 on the CPU, one tensor of len(tokens[i]) a sequence (its last entry is no
    token's). Micro-batches as the job forms them when it recomputes old log-probs; together: one micro-batch."""
    from verl.utils import tensordict_utils as tu

    rollout, actor = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor
    data = tu.get_tensordict(
        {
            "input_ids": _nested([torch.tensor(row) for row in tokens]),
            "position_ids": _nested([torch.arange(len(row)) for row in tokens]),
            "loss_mask": torch.ones(len(tokens), 1, dtype=torch.long),
        },
        non_tensor_dict={
            "temperature": rollout.temperature,
            "calculate_entropy": True,
            "compute_loss": False,
            "pad_mode": "no_padding",
            "use_remove_padding": engine.model_config.use_remove_padding,
            "use_fused_kernels": engine.model_config.use_fused_kernels,
            **_batching(rollout, actor, tokens, together),
        },
    )
    with engine.eval_mode():
        output = engine.infer_batch(data, loss_function=None)
    return [row.float().cpu() for row in output["model_output"]["log_probs"].unbind()]


def _batching(rollout: DictConfig, actor: DictConfig, tokens: list[list[int]], together: bool) -> dict:
    if together:
        return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(tokens)}
    if actor.use_dynamic_bsz:
        most, longest = rollout.log_prob_max_token_len_per_gpu, max(map(len, tokens))
        if longest > most:
            raise UserError(
                f"a sequence of {longest} tokens is longer than a micro-batch of the trainer; raise "
                f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={most}"
            )
        return {"use_dynamic_bsz": True, "max_token_len_per_gpu": most}
    count = len(tokens)
    size = next(n for n in range(min(count, rollout.log_prob_micro_batch_size_per_gpu), 0, -1) if count % n == 0)
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": size}


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class FedForward:
    """The trainer's forward over the sequences that were observed in the rollout. observed: tokens and points."""

    def __init__(self, engine, cfg: DictConfig, observed: dict) -> None:
        self.engine, self.cfg, self.points = engine, cfg, observed["points"]
        rows = self.points["model.embed_tokens"].index
        lengths = [int(rows[rows[:, 0] == i, 1].max()) + 1 for i in range(len(observed["tokens"]))]
        # One more token each, which is only the label of the last observed row.
        self.tokens = [row[: n + 1] for row, n in zip(observed["tokens"], lengths, strict=True)]
        self.layout = TokenLayout(tuple(map(len, self.tokens)), bool(engine.model_config.use_remove_padding))

    def observe(self, feed: bool, mutation=None) -> TrainerObserver:
        """mutation: what `mutations_trainer.applied` yields."""
        with TrainerObserver(self.engine.module, self.layout, self.points, feed, mutation) as observer:
            log_probs = infer(self.engine, self.cfg, self.tokens, together=True)
        index = self.points[LOG_SOFTMAX].index
        observer.see_result(LOG_SOFTMAX, torch.stack([log_probs[s][p] for s, p in index.tolist()])[:, None])
        return observer


def _trainer_mutations(forward: FedForward, fed: TrainerObserver) -> list[dict]:
    module = forward.engine.module

    def observe(mutation: mutations.Mutation) -> TrainerObserver | None:
        with mutations_trainer.applied(mutation, module, forward.layout) as now:
            observer = forward.observe(True, now)
        return observer if now.ran else None

    return mutations.run_trainer(mutations.mutations_of_module(module), observe, fed)


def _rollout_mutations(engine, cfg: DictConfig, records: list[dict]) -> list[dict]:
    """records: as rollout._mutated gives them."""
    baseline = FedForward(engine, cfg, records[0]).observe(feed=True)
    results = []
    for record in records[1:]:
        if record["refused"]:
            results.append(mutations.not_applied("rollout", record["mutation"], record["refused"]))
            continue
        observer = FedForward(engine, cfg, record).observe(feed=True)
        results.append(mutations.judge_rollout(record["mutation"], observer, baseline))
    return results


if __name__ == "__main__":
    run_child(lambda: main(*sys.argv[2:3]), sys.argv[1])
