"""What the two plug-ins must agree on to talk to each other. Imports neither host."""

import importlib.metadata

# The method of a vLLM worker that the trainer calls by name.
REPORT_METHOD = "jetrl_report"


def versions() -> dict[str, str]:
    """Versions that must be the same on both sides of a job."""
    return {name: importlib.metadata.version(name) for name in ("jetrl", "torch", "vllm")}
