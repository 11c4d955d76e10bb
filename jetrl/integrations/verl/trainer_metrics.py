"""The mismatch figures in VeRL's own metrics.

Cause of the patch: VeRL's default trainer has no hook for metrics. The trainer module's name `calculate_debug_metrics` is
replaced by a function that adds jetrl's figures to what the stock one returns; it is called once a step, where rollout and
actor log-probs of the same tokens are at hand. VeRL 0.9.1; it can go when VeRL offers a metrics hook.
"""

import functools

from verl.trainer.ppo.v1 import trainer_base

from jetrl.metrics import mismatch_metrics


def install() -> None:
    """Idempotent."""
    stock = trainer_base.calculate_debug_metrics
    if hasattr(stock, "jetrl_stock"):
        return

    @functools.wraps(stock)
    def calculate_debug_metrics(data) -> dict:
        batch = data.batch
        mismatch = mismatch_metrics(batch["rollout_log_probs"], batch["old_log_probs"], batch["response_mask"])
        return {**stock(data), **mismatch}

    calculate_debug_metrics.jetrl_stock = stock
    trainer_base.calculate_debug_metrics = calculate_debug_metrics
