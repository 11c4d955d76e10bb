"""The sampler that hardware=side_by_side names, as VeRL's trainer makes it."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from jetrl.errors import UserError
from jetrl.integrations.verl.replay_buffer import POLL_SECONDS, FrequentReplayBuffer
from jetrl.launch.args import parse
from jetrl.launch.compose import compose_job


def test_verl_makes_the_sampler_of_side_by_side_jobs_with_the_short_interval():
    cfg = compose_job(parse(["precision=bf16", "hardware=side_by_side"]))
    sampler = cfg.trainer.v1.sampler
    assert OmegaConf.to_container(sampler.custom_sampler) == {
        "path": "pkg://jetrl.integrations.verl.replay_buffer", "name": "FrequentReplayBuffer",
    }  # fmt: skip
    trainer = SimpleNamespace(config=cfg, trainer_mode="sync", _add_prompts_to_generate=lambda *_: None)
    buffer = PPOTrainer._build_replay_buffer(trainer)
    assert type(buffer).__name__ == FrequentReplayBuffer.__name__
    assert buffer.poll_interval == POLL_SECONDS < 1
    assert buffer.max_off_policy_threshold == sampler.max_off_policy_threshold


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_an_asynchronous_trainer_is_refused_where_verl_makes_the_sampler(mode):
    """VeRL tells a sampler its trainer's mode, so a job that jetrl.train did not compose ends here too."""
    cfg = compose_job(parse(["precision=bf16", "hardware=side_by_side"]))
    trainer = SimpleNamespace(config=cfg, trainer_mode=mode, _add_prompts_to_generate=lambda *_: None)
    with pytest.raises(UserError, match=f"^trainer.v1.trainer_mode={mode} is not supported by jetrl .*set it to sync"):
        PPOTrainer._build_replay_buffer(trainer)
