"""VeRL's replay buffer, looking for finished answers several times a second.

VeRL's trainer asks its store every two seconds whether a step's answers are there, so `timing_s/gen` is a multiple of two
seconds and a step of a small model waits one of them on average. Its class has the interval as an argument and its
configuration no key for it; a sampler of one's own is VeRL's hook:

    trainer.v1.sampler.custom_sampler.path=pkg://jetrl.integrations.verl.replay_buffer
    trainer.v1.sampler.custom_sampler.name=FrequentReplayBuffer

VeRL gives such a sampler neither the settings of `algorithm.filter_groups` nor `sync_refill_failed_groups`, and jetrl.train
refuses those beside it. For the synchronous trainer alone: an asynchronous one has another policy of sampling, which this
class would silently replace. VeRL 0.9.1; it can go when VeRL makes the interval a key.
"""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from jetrl.errors import UserError

# One question takes milliseconds; a step of the smallest jobs takes seconds.
POLL_SECONDS = 0.1


class FrequentReplayBuffer(ReplayBuffer):
    """ReplayBuffer with a poll interval of POLL_SECONDS; everything else is VeRL's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, poll_interval=POLL_SECONDS, **kwargs)
        if self.trainer_mode != "sync":
            raise UserError(
                f"trainer.v1.trainer_mode={self.trainer_mode} is not supported by jetrl (async trainer); set it to sync"
            )
