"""jetrl inside VeRL, loaded by `actor_rollout_ref.model.external_lib=jetrl.integrations.verl`.

VeRL imports an external lib in every process that reads the model configuration: the workers that build training
engines, the trainer's own process, and also rollout servers and agent loops, which need nothing from here. So each part
is installed only where the VeRL module it extends is already loaded; that keeps the other processes' start-up unchanged.
"""

import sys


def install() -> None:
    """Idempotent."""
    if "verl.workers.engine_workers" in sys.modules:
        from jetrl.integrations.verl import calibrated_clip, engine

        engine.register()
        calibrated_clip.register()
    if "verl.trainer.ppo.v1.trainer_base" in sys.modules:
        from jetrl.integrations.verl import trainer_metrics

        trainer_metrics.install()


install()
