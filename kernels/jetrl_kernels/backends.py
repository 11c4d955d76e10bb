"""Which GEMM backend runs, decided once per process from the device, what is installed and the caller's wish.

    deepgemm   DeepGEMM; weight gradients by its 1D1D kernel (into float32) or cuBLASLt (bfloat16)
    cublaslt   torch's block-scaled scaled_mm; Triton for 65 to 127 rows, where cuBLASLt may split K and change bits
    triton     Triton kernels only
Few rows (32 beside DeepGEMM, 64 beside cuBLASLt) run few_rows_gemm.cu, which NVRTC (part of torch) compiles.
All give the same bits wherever a weight is in 128x128 blocks (tests/gpu). Within a backend a shape that its library
cannot take (a row count or width that its bulk copies cannot address) runs on the Triton kernel of the same bits.
"""

import functools
import importlib
import importlib.util
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

GEMM_BACKENDS = ("deepgemm", "cublaslt", "triton")
_HOPPER = (9, 0)
_FP8_TENSOR_CORES = (8, 9)

_log = logging.getLogger("jetrl_kernels")
_wish = "auto"


@dataclass(frozen=True)
class Backends:
    """What runs on this process's device; every field is a sentence fragment fit for a report."""

    device: str
    gemm: str
    few_rows_gemm: str
    wgrad: str
    quantizers: str
    why: str


def select_gemm_backend(name: str) -> None:
    """Ask for a backend ("auto" or one of GEMM_BACKENDS). Must come before the first GEMM. Raises ValueError."""
    global _wish
    resolve(name)
    if current.cache_info().currsize and current().gemm != name and name != "auto":
        raise ValueError(f"gemm backend {name!r} asked for after {current().gemm!r} already ran; select it at start")
    _wish = name


def _missing_for_deepgemm() -> str | None:
    """Why DeepGEMM cannot run here, or None. It compiles its kernels at run time and needs CUDA's nvcc for that."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    if not shutil.which("nvcc") and not any((Path(home) / "bin" / "nvcc").exists() for home in homes):
        return "nvcc, which DeepGEMM compiles its kernels with, is neither on PATH nor in CUDA_HOME"
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found:
            return None
    return "neither deep_gemm nor vllm.third_party.deep_gemm is installed"


@functools.cache
def deep_gemm() -> ModuleType:
    """An installed `deep_gemm`, else the copy inside vLLM. Raises ImportError when neither loads."""
    name = "deep_gemm" if importlib.util.find_spec("deep_gemm") else "vllm.third_party.deep_gemm"
    return importlib.import_module(name)


def _choose(capability: tuple[int, int], device: str, wish: str, missing: str | None) -> tuple[str, str]:
    """(backend, why). Raises ValueError with one sentence that names what would work."""
    if capability < _FP8_TENSOR_CORES:
        raise ValueError(
            f"{device} (compute capability {capability[0]}.{capability[1]}) has no FP8 tensor cores; "
            "run the bf16 flow there (precision=bf16), or use an H100 or H200"
        )
    if capability != _HOPPER:
        if wish in ("deepgemm", "cublaslt"):
            raise ValueError(f"gemm backend {wish!r} is for Hopper GPUs only; {device} can run gemm backend 'triton'")
        return "triton", f"{device} is not a Hopper GPU; bits and speed there are unverified"
    if wish == "deepgemm" and missing:
        raise ValueError(f"gemm backend 'deepgemm' cannot run: {missing}; gemm backend 'cublaslt' works here")
    if wish != "auto":
        return wish, "asked for"
    return ("cublaslt", missing) if missing else ("deepgemm", "fastest backend of a Hopper GPU")


def resolve(wish: str) -> Backends:
    """What "auto" or one of GEMM_BACKENDS would be on the current device; chooses nothing. Raises ValueError, one sentence."""
    if wish not in ("auto", *GEMM_BACKENDS):
        raise ValueError(f"gemm backend {wish!r} is unknown; allowed: auto, {', '.join(GEMM_BACKENDS)}")
    if not torch.cuda.is_available():
        if wish != "auto":
            raise ValueError(
                f"gemm backend {wish!r} needs a GPU, and none is visible; 'auto' takes the torch reference"
            )
        return Backends("cpu", "reference", "reference", "reference", "reference", "no CUDA device")
    device = torch.cuda.get_device_name()
    gemm, why = _choose(torch.cuda.get_device_capability(), device, wish, _missing_for_deepgemm())
    return Backends(
        device=device,
        gemm=gemm,
        few_rows_gemm="triton" if gemm == "triton" else "few_rows_gemm.cu",
        wgrad={"deepgemm": "deepgemm 1D1D (float32), cublaslt (bfloat16)"}.get(gemm, gemm),
        quantizers="triton",
        why=why,
    )


@functools.cache
def current() -> Backends:
    """The backends of the current CUDA device. The first call decides and logs; later calls repeat the answer."""
    chosen = resolve(_wish)
    if chosen.device != "cpu":
        _log.info(
            "FP8 backends on %s: gemm %s (%s), few rows %s, wgrad %s",
            chosen.device, chosen.gemm, chosen.why, chosen.few_rows_gemm, chosen.wgrad,
        )  # fmt: skip
    return chosen


def describe_backends(wish: str | None = None) -> dict[str, str]:
    """What runs in this process, or what `wish` would be, as a plain dict for reports. Raises ValueError where nothing can run."""
    return asdict(current() if wish is None else resolve(wish))
