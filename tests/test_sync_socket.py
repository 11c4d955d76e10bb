"""Weight syncs of two jobs on one machine, whose Ray jobs have one id, do not meet."""

import asyncio
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from jetrl.errors import JobError
from jetrl.integrations.protocol import SOCKET_METHOD
from jetrl.integrations.verl import sync_socket
from jetrl.integrations.verl.sync_watch import RECEIVE_METHOD
from jetrl.integrations.vllm import handshake

# As long as Ray's, whose first is 01000000 in every instance; not that one, for a real job may run beside the tests.
JOB = uuid.uuid4().hex[:8]


@pytest.fixture
def stock_sender():
    """VeRL's class as it is after this module's installs are taken back."""
    before = transfer.BucketedWeightSender.__init__, sync_socket.ServerAdapter._execute_method
    yield transfer.BucketedWeightSender
    transfer.BucketedWeightSender.__init__, sync_socket.ServerAdapter._execute_method = before


@pytest.fixture(autouse=True)
def job(monkeypatch):
    monkeypatch.setenv("VERL_RAY_JOB_ID", JOB)
    monkeypatch.setattr(handshake, "_stock_job", JOB)
    handshake.install()
    monkeypatch.setattr(
        sync_socket.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: JOB), raising=True
    )


def rollout_handle(rank: int = 0) -> str:
    """Where a rollout worker of VeRL's waits."""
    return vLLMColocateWorkerExtension._get_zmq_handle(SimpleNamespace(local_rank=rank, model_runner=None))


def receive_asked_for(token: str) -> list[str]:
    """VeRL's sender asks its rollout to receive; the worker's own method answers. Returns the methods that were called."""
    called = []

    class Server:
        class collective_rpc:  # noqa: N801  (a Ray actor's method)
            @staticmethod
            def remote(method, timeout, args, kwargs):
                called.append(method)
                if method == SOCKET_METHOD:
                    getattr(handshake.WorkerBase, method)(None, *args)
                future = asyncio.get_running_loop().create_future()
                future.set_result(None)
                return future

    adapter = SimpleNamespace(_ensure_server_handle=lambda: True, server_handle=Server)
    sync_socket.install(token)
    asyncio.run(sync_socket.ServerAdapter._execute_method(adapter, RECEIVE_METHOD, non_block=True))
    return called


def another_sender(handle: str, taken: list) -> None:
    """Another job's, which waits on VeRL's own name until a rollout comes."""
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.SNDTIMEO, 2000)
    socket.bind(handle)
    try:
        socket.send_pyobj("another job's weights")
        taken.append(True)
    except zmq.Again:  # nobody came
        assert not taken
    finally:
        socket.close(linger=0)
        Path(handle.removeprefix("ipc://")).unlink(missing_ok=True)


def test_trainer_and_rollout_of_a_run_agree_on_a_name_of_their_own(stock_sender):
    stock = rollout_handle(rank=3)
    assert f"-{JOB}-" in stock
    names = {stock}
    for token in ("a1", "b2"):
        assert receive_asked_for(token) == [SOCKET_METHOD, RECEIVE_METHOD]
        assert stock_sender(stock).zmq_handle == rollout_handle(rank=3)
        names.add(rollout_handle(rank=3))
        assert len(rollout_handle(rank=3).removeprefix("ipc://")) < 108  # a Unix socket's name
    assert len(names) == 3
    receive_asked_for("b2")
    assert rollout_handle(rank=3) in names  # told again at every sync, the name does not grow


def test_a_rollout_takes_its_own_trainers_weights_while_another_job_sends(stock_sender, monkeypatch):
    monkeypatch.setattr(transfer, "is_support_ipc", lambda: False)
    monkeypatch.setattr(
        transfer, "get_torch_device", lambda: SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    )
    stock = rollout_handle()
    another = threading.Thread(target=another_sender, args=(stock, taken := []))
    another.start()
    receive_asked_for("mine")
    received = {}
    receiver = transfer.BucketedWeightReceiver(rollout_handle(), torch.device("cpu"), use_shm=True)
    thread = threading.Thread(
        target=lambda: receiver.receive_weights(
            lambda weights, last: received.update((n, t.clone()) for n, t in weights)
        )
    )
    thread.start()
    weights = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    asyncio.run(stock_sender(stock, bucket_size_mb=1, use_shm=True).async_send_weights(iter(weights.items())))
    thread.join(timeout=30)
    another.join()
    assert not taken
    assert received.keys() == weights.keys() and all(torch.equal(received[n], t) for n, t in weights.items())


def test_a_name_without_the_job_is_refused():
    with pytest.raises(JobError, match=f"/tmp/other.sock does not name the Ray job {JOB}"):
        sync_socket.private_handle("ipc:///tmp/other.sock", JOB, "a1")
