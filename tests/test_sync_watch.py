"""A sender of weights does not wait for a receiver that is gone."""

import threading
import time

import pytest
import zmq

from jetrl.errors import JobError
from jetrl.integrations.verl import sync_watch
from jetrl.integrations.verl.sync_watch import WatchedSocket


@pytest.fixture
def pair(tmp_path):
    """(sender's REQ socket, receiver's REP socket), as VeRL's are."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.REQ), context.socket(zmq.REP)
    address = f"ipc://{tmp_path}/s"
    sender.bind(address)
    receiver.connect(address)
    yield sender, receiver
    context.destroy(linger=0)


def test_an_answer_passes_however_late_it_comes(pair, monkeypatch):
    monkeypatch.setattr(sync_watch, "POLL_MILLISECONDS", 20)
    sender, receiver = pair
    looked = []
    watched = WatchedSocket(sender, lambda: looked.append(1))
    watched.send_pyobj({"bucket_meta": {}})

    def answer():
        assert receiver.recv_pyobj() == {"bucket_meta": {}}
        time.sleep(0.2)
        receiver.send(b"done")

    thread = threading.Thread(target=answer)
    thread.start()
    assert watched.recv() == b"done"
    thread.join()
    assert looked  # it asked in the meantime, and nothing was wrong


def test_a_receiver_that_failed_ends_the_wait_with_its_own_words(pair, monkeypatch):
    monkeypatch.setattr(sync_watch, "POLL_MILLISECONDS", 20)
    sender, _ = pair
    reasons = iter([None, None, "EngineDeadError: killed"])
    watched = WatchedSocket(sender, lambda: next(reasons))
    watched.send(b"weights")
    with pytest.raises(JobError, match=r"weight sync failed: .*\(EngineDeadError: killed\)"):
        watched.recv()
    watched.close()


def test_a_receiver_that_never_comes_ends_the_first_message_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_watch, "POLL_MILLISECONDS", 20)
    context = zmq.Context()
    sender = context.socket(zmq.REQ)
    sender.bind(f"ipc://{tmp_path}/s")
    reasons = iter([None, None, "EngineDeadError: killed"])
    with pytest.raises(JobError, match=r"weight sync failed: .*\(EngineDeadError: killed\)"):
        WatchedSocket(sender, lambda: next(reasons)).send_pyobj("handle")
    monkeypatch.setattr(sync_watch, "CONNECT_SECONDS", 0.1)
    with pytest.raises(JobError, match=f"no rollout worker came to ipc://{tmp_path}/s within 0 s"):
        WatchedSocket(sender, lambda: None).send_pyobj("handle")
    context.destroy(linger=0)


def test_the_two_methods_of_verl_are_there_and_wrapped_once(monkeypatch):
    # Another test's engine may have given this process a run's socket name.
    made = sync_watch.BucketedWeightSender.__init__
    monkeypatch.setattr(sync_watch.BucketedWeightSender, "__init__", getattr(made, "jetrl_stock", made))
    sync_watch.install()
    first = sync_watch.ServerAdapter._execute_method, sync_watch.BucketedWeightSender._init_socket
    sync_watch.install()
    assert first == (sync_watch.ServerAdapter._execute_method, sync_watch.BucketedWeightSender._init_socket)
    sender = sync_watch.BucketedWeightSender("ipc:///tmp/jetrl-test-sync-watch.sock", use_shm=True)
    sender._init_socket()
    assert isinstance(sender.socket, WatchedSocket)
    sender.socket.close()
