"""A weight sync that the rollout does not survive ends the job with the rollout's own error, instead of hanging it.

Cause: VeRL 0.9.1 starts the receivers by one RPC, sends the weights, and only then looks at what the RPC said. A vLLM worker
that raises or dies meanwhile leaves the sender waiting for ever: for an answer, or with its first message for a receiver to
come. So while the sender waits, it looks at the RPC once a second. Two methods of VeRL are wrapped; this can go when VeRL
waits for both.
"""

import functools
import time
from collections.abc import Callable

import ray
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from jetrl.errors import JobError
from jetrl.integrations.verl.handshake import last_line

POLL_MILLISECONDS = 1000
# Receivers connect as soon as their RPC reaches them; one that has not by then waits elsewhere.
CONNECT_SECONDS = 300.0
RECEIVE_METHOD = "update_weights_from_ipc"

# The RPC of the sync in progress. Only one rank of a replica makes it; the others wait for their own worker, and are ended
# with the job when that rank raises.
_receivers: ray.ObjectRef | None = None


class WatchedSocket:
    """A bound ZMQ socket whose waits raise JobError once `failure` names a reason. Everything else is the socket's own."""

    def __init__(self, socket, failure: Callable[[], str | None]) -> None:
        self._socket, self._failure = socket, failure

    def send_pyobj(self, message: object) -> None:
        """Waits for a receiver to connect, which a REQ socket needs before it sends."""
        until = time.monotonic() + CONNECT_SECONDS
        while not self._socket.poll(POLL_MILLISECONDS, zmq.POLLOUT):
            self._raise_failure()
            if time.monotonic() > until:
                where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
                raise JobError(f"weight sync failed: no rollout worker came to {where} within {CONNECT_SECONDS:.0f} s")
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        while not self._socket.poll(POLL_MILLISECONDS):
            self._raise_failure()
        return self._socket.recv()

    def _raise_failure(self) -> None:
        reason = self._failure()
        if reason is not None:
            raise JobError(f"weight sync failed: the rollout did not take the weights ({reason})")

    def __getattr__(self, name: str):
        return getattr(self._socket, name)


def receivers_failure() -> str | None:
    """What the receivers' RPC raised; None while it runs, and where it ended well."""
    if _receivers is None or not ray.wait([_receivers], timeout=0)[0]:
        return None
    try:
        ray.get(_receivers)
    except ray.exceptions.RayError as e:
        return last_line(e)
    return None


def install() -> None:
    """Idempotent."""
    if hasattr(ServerAdapter._execute_method, "jetrl_stock"):
        return
    execute, init_socket = ServerAdapter._execute_method, BucketedWeightSender._init_socket

    @functools.wraps(execute)
    async def _execute_method(self, method, *args, **kwargs):
        global _receivers
        result = await execute(self, method, *args, **kwargs)
        if method == RECEIVE_METHOD:
            _receivers = result
        return result

    @functools.wraps(init_socket)
    def _init_socket(self):
        init_socket(self)
        self.socket = WatchedSocket(self.socket, receivers_failure)

    _execute_method.jetrl_stock = execute
    ServerAdapter._execute_method = _execute_method
    BucketedWeightSender._init_socket = _init_socket
