"""A weight sync's socket gets a name of the run's own, so that no other job on the machine can answer on it.

Cause: VeRL 0.9.1 names the socket /tmp/rl-colocate-zmq-<Ray job>-replica-<n>-rank-<n>.sock to keep jobs apart, but the first job
of every Ray instance is 01000000. Two jobs that each start their own Ray on one machine therefore share the file, and a
rollout takes whichever sender's weights come first. With twelve jobs on two H200, three syncs of some 700 left a mismatch in the
next step that only another job's weights explain, and two jobs ended on a message that was not theirs.

Both ends add a run's token to the job's part of the name. The process that sends tells the rollout's workers just before it asks
them to receive, so that nobody waits on a name that the other end does not use, whoever in VeRL sends. Two methods of VeRL are
wrapped; this can go when VeRL's name is unique on a machine.
"""

import functools

import ray
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from jetrl.errors import JobError
from jetrl.integrations.protocol import SOCKET_METHOD, socket_job
from jetrl.integrations.verl.sync_watch import RECEIVE_METHOD

_token: str | None = None


def private_handle(handle: str, job: str, token: str) -> str:
    """VeRL's handle with `token` after the Ray job's id; what the rollout makes of its own by protocol.socket_job."""
    before, found, after = handle.partition(f"-{job}-")
    if not found:
        raise JobError(
            f"the weight sync's socket {handle} does not name the Ray job {job}: jetrl does not know this VeRL version"
        )
    return f"{before}-{socket_job(job, token)}-{after}"


def install(token: str) -> None:
    """From now on this process sends weights on the run's own socket. Idempotent; the last token holds."""
    global _token
    _token = token
    execute, stock = ServerAdapter._execute_method, BucketedWeightSender.__init__
    if hasattr(stock, "jetrl_stock"):
        return

    @functools.wraps(execute)
    async def _execute_method(self, method, *args, **kwargs):
        if method == RECEIVE_METHOD:
            await execute(self, SOCKET_METHOD, args=(_token,))
        return await execute(self, method, *args, **kwargs)

    @functools.wraps(stock)
    def __init__(self, *args, **kwargs) -> None:
        stock(self, *args, **kwargs)
        self.zmq_handle = private_handle(self.zmq_handle, ray.get_runtime_context().get_job_id(), _token)

    __init__.jetrl_stock = stock
    ServerAdapter._execute_method = _execute_method
    BucketedWeightSender.__init__ = __init__
