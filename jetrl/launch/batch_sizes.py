"""Micro-batches that must divide a batch: VeRL asserts it in a worker, minutes into the job, without saying which key."""

from omegaconf import DictConfig

from jetrl.errors import UserError


def check(cfg: DictConfig) -> None:
    """Raises UserError for a fixed micro-batch size that does not divide its share of a batch. Dynamic ones need not."""
    actor, ref, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.rollout
    whole, mini = (
        ("data.train_batch_size", cfg.data.train_batch_size),
        ("actor.ppo_mini_batch_size", actor.ppo_mini_batch_size),
    )
    uses = [
        ("actor.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, mini),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_micro_batch_size_per_gpu,
         rollout.log_prob_use_dynamic_bsz, whole),
    ]  # fmt: skip
    if actor.use_kl_loss or cfg.algorithm.use_kl_in_reward:
        uses.append(
            (
                "ref.log_prob_micro_batch_size_per_gpu",
                ref.log_prob_micro_batch_size_per_gpu,
                ref.log_prob_use_dynamic_bsz,
                whole,
            )
        )
    gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node // (actor.get("ulysses_sequence_parallel_size") or 1)
    for key, micro, dynamic, (batch_key, prompts) in uses:
        answers = prompts * rollout.n // max(gpus, 1)
        if not dynamic and micro and answers % micro:
            raise UserError(
                f"actor_rollout_ref.{key}={micro} does not divide the {answers} answers that a GPU gets of "
                f"{batch_key}={prompts} x rollout.n={rollout.n}; give a divisor of {answers}"
            )
