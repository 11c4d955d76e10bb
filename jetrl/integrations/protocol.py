"""What the two plug-ins must agree on to talk to each other. Imports neither host."""

import importlib.metadata

# The methods of a vLLM worker that the trainer calls by name.
REPORT_METHOD = "jetrl_report"
SOCKET_METHOD = "jetrl_name_socket"


def socket_job(job: str, token: str) -> str:
    """The Ray job's part of the name of a weight sync's socket, of one run alone (integrations/verl/sync_socket.py)."""
    return f"{job}-{token}"


def versions() -> dict[str, str]:
    """Versions that must be the same on both sides of a job."""
    return {name: importlib.metadata.version(name) for name in ("jetrl", "torch", "vllm")}


def announce(text: str) -> None:
    """One line for the job's log. Printed, not logged: VeRL, vLLM and TransferQueue each reconfigure logging in the worker,
    and a message at level INFO was seen to vanish after the second of them."""
    print(f"jetrl: {text}", flush=True)
