"""Cuts of the kernels that miss their bars, timed and compared bit for bit with what is shipped; the best of each is printed.

    python benchmarks/sweep_kernels.py [--kernels requantize,norm,both,decode] [--seconds 100] [--out FOLDER]
    python benchmarks/sweep_kernels.py --warm PART PARTS       (only compiles a share of the cuts, for Triton's cache)
    TRITON_INTERPRET=1 python benchmarks/sweep_kernels.py      (a rehearsal without a GPU: compares, does not time)

A cut is a set of launch constants of one kernel module. One whose bytes differ from the torch references on hostile data, or
from the shipped cut's at full size, is listed as wrong and never as best. Figures as in bench_quantize.py and bench_decode.py.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import copy_bandwidth, geometric_mean, input_sets, print_table, time_calls, write_results
from jetrl_kernels import backends, few_rows_gemm, norm_triton, quantize_reference, quantize_triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))
from hostile_data import KINDS, matrix  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BF16 = torch.bfloat16
SHAPES = ((8192, 4096), (8192, 12288)) if ON_GPU else ((150, 200),)
DECODE_SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
DECODE_ROWS = (1, 8, 16, 32, 64)
# What a cut may fail with: registers, shared memory, Triton's or NVRTC's own errors.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError)


@dataclass(frozen=True)
class Sweep:
    """One kernel: the constants of `module` that are swept, the call that is timed, and what must keep its bits."""

    module: object
    names: tuple[str, ...]
    cuts: tuple[tuple, ...]
    bar: float
    bytes: Callable[[int, int], float]
    make: Callable[[int, int], tuple]
    call: Callable[..., tuple]
    # Everything that the constants change, from one set of inputs: what is compared.
    outputs: Callable[..., tuple]


def _matrix(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, device=DEVICE, dtype=BF16)


def _product(*lists) -> tuple[tuple, ...]:
    return tuple(itertools.product(*lists))


def _requantize() -> Sweep:
    def call(codes, scale, k):
        return quantize_triton.requantize_tiles_transposed(codes, scale, k, "fp32")

    def outputs(codes, scale, k):
        return *call(codes, scale, k), *quantize_triton.requantize_tiles_transposed(codes, scale, k, "pow2")

    # (columns, warps, vector), the four fastest of an earlier sweep, in programs that walk row tiles with loads ahead.
    names = ("COLUMNS", "WARPS", "VECTOR", "TILES", "STAGES")
    fast = ((64, 4, 8), (32, 2, 8), (64, 4, 4), (64, 2, 8))
    cuts = tuple((*c, *w) for c in fast for w in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (8, 2), (8, 3)))
    cuts += tuple(
        (*c, 1, 1) for c in ((128, 8, 4), (128, 8, 8), (32, 1, 4), (32, 2, 4), (64, 8, 4), (16, 1, 8), (128, 4, 8))
    )
    return Sweep(
        quantize_triton, tuple(f"REQUANTIZE_{n}" for n in names), cuts, 0.65, lambda m, k: 2 * m * k + m * k / 16,
        lambda m, k: (*quantize_triton.quantize_tiles(_matrix(m, k), "fp32"), k), call, outputs,
    )  # fmt: skip


def _norm() -> Sweep:
    gain: dict[int, torch.Tensor] = {}

    def weight(k):
        return gain.setdefault(k, torch.randn(k, device=DEVICE, dtype=BF16))

    def call(x):
        return norm_triton.rms_norm_quantize(x, None, weight(x.shape[1]), 1e-6, "fp32")

    def outputs(x):
        w = weight(x.shape[1])
        with_residual = norm_triton.rms_norm_quantize(x, x, w, 1e-6, "pow2")
        return *call(x), *with_residual, *norm_triton.rms_norm(x, None, w, 1e-6), *norm_triton.rms_norm(x, x, w, 1e-6)

    names = ("FORWARD_ROWS", "ELEMENTS_PER_THREAD", "LARGEST_CHUNK")
    cuts = _product((1, 2, 4, 8, 16), (16, 8, 32), (4096,)) + _product((1, 2), (16, 32), (2048, 8192))
    return Sweep(
        norm_triton,
        names,
        cuts,
        0.80,
        lambda m, k: 3 * m * k + m * k / 32,
        lambda m, k: (_matrix(m, k),),
        call,
        outputs,
    )


def _both() -> Sweep:
    def call(x):
        return quantize_triton.quantize_tiles_both(x, "fp32")

    def outputs(x):
        floats = x.float()
        return (
            *call(x),
            *quantize_triton.quantize_tiles_both(x, "pow2"),
            *quantize_triton.quantize_tiles_both(floats, "fp32"),
        )

    names = ("BOTH_ROWS", "BOTH_COLUMNS", "BOTH_WARPS")
    cuts = _product((16, 32, 64, 8), (32, 64, 128), (1, 2, 4, 8))
    return Sweep(
        quantize_triton,
        names,
        cuts,
        0.65,
        lambda m, k: 4 * m * k + m * k / 16,
        lambda m, k: (_matrix(m, k),),
        call,
        outputs,
    )


SWEEPS = {"requantize": _requantize, "norm": _norm, "both": _both}


@contextmanager
def _constants(sweep: Sweep, cut: tuple) -> Iterator[None]:
    shipped = _shipped(sweep)
    for name, value in zip(sweep.names, cut, strict=True):
        setattr(sweep.module, name, value)
    try:
        yield
    finally:
        for name, value in zip(sweep.names, shipped, strict=True):
            setattr(sweep.module, name, value)


def _shipped(sweep: Sweep) -> tuple:
    return tuple(getattr(sweep.module, name) for name in sweep.names)


def _cuts(sweep: Sweep) -> list[tuple]:
    """The shipped one first: it is what the others are compared with. A rehearsal takes a few: the interpreter is slow."""
    return list(dict.fromkeys((_shipped(sweep), *sweep.cuts[:: 1 if ON_GPU else 9])))


def _same(got: tuple, want: tuple) -> bool:
    """Bit for bit, NaN equal to NaN."""
    for a, b in zip(got, want, strict=True):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        bits = [t.cpu().view(integer) if t.device != got[0].device else t.view(integer) for t in (a, b)]
        nan = a.isnan() & b.isnan() if a.dtype == torch.float32 else torch.zeros_like(a, dtype=torch.bool)
        if a.shape != b.shape or not ((bits[0] == bits[1]) | nan).all():
            return False
    return True


def _hostile(name: str) -> list[tuple]:
    """Inputs and the torch reference's outputs, on a ragged shape of two or three tiles."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for kind in KINDS if ON_GPU else KINDS[::4]:
        x = matrix(kind, 300, 140, BF16, generator)
        rows = quantize_reference.quantize_tiles(x, "fp32")
        if name == "requantize":
            want = quantize_reference.requantize_tiles_transposed(*rows, 140, "fp32")
            found.append((tuple(t.to(DEVICE) for t in rows) + (140,), want))
        elif name == "both":
            found.append(((x.to(DEVICE),), (*rows, *quantize_reference.quantize_tiles_transposed(x, "fp32"))))
    return found


def _exact(sweep: Sweep, hostile: list[tuple]) -> bool:
    return all(_same(tuple(t.cpu() for t in sweep.call(*given)), want) for given, want in hostile)


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.deadline = time.perf_counter() + arguments.seconds
        self.out = arguments.out
        self.rows: list[dict] = []
        self.bandwidth = copy_bandwidth() if ON_GPU else 0.0

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def kernel(self, name: str) -> None:
        sweep, hostile = SWEEPS[name](), _hostile(name)
        right: dict[tuple, bool] = {}
        for m, k in SHAPES:
            sets = [sweep.make(m, k) for _ in range(input_sets(2 * m * k) if ON_GPU else 1)]
            want = None
            for cut in _cuts(sweep):
                if self.late():
                    break
                row = {"kernel": name, "shape": f"{m}x{k}", "cut": str(cut), "shipped": want is None, "bar": sweep.bar}
                try:
                    with _constants(sweep, cut):
                        got = sweep.outputs(*sets[0])
                        want = got if want is None else want
                        if cut not in right:
                            right[cut] = _exact(sweep, hostile)
                        row["exact"] = right[cut] and _same(got, want)
                        if ON_GPU:
                            timing = time_calls([lambda s=s: sweep.call(*s) for s in sets], repeats=2)
                            row |= {"us": timing.us, "spread": timing.spread}
                            row["of_copy"] = sweep.bytes(m, k) / (timing.us * 1e-6) / self.bandwidth
                except FAILURES as e:
                    row |= {"exact": False, "failed": (str(e).strip().splitlines() or [type(e).__name__])[-1][:200]}
                self.rows.append(row)
            self.write()
            self.best(name, f"{m}x{k}", ", ".join(sweep.names))

    def decode(self) -> None:
        """Cuts of the GEMM of few rows and DeepGEMM; the geometric means over all cases of what is shipped and of the best."""
        if not ON_GPU:
            return
        for (n, k), m in itertools.product(DECODE_SHAPES, DECODE_ROWS):
            floor = n * k / self.bandwidth * 1e6
            weights = [torch.ops.jetrl.quantize_blocks(_matrix(n, k), "fp32") for _ in range(input_sets(n * k))]
            a = torch.ops.jetrl.quantize_tiles(_matrix(m, k), "fp32")
            out, repeats, want = torch.empty(m, n, device="cuda", dtype=BF16), max(1, 24 // len(weights)), None
            plan = few_rows_gemm.plan(m, n, k)
            cuts = [plan] + [
                few_rows_gemm.plan(m, n, k, rows, depth, kib << 10)
                for rows, depth, kib in itertools.product((32, 64), (4, 8), (75, 110, 150, 210))
            ]
            for cut in dict.fromkeys(cuts):
                if self.late():
                    break
                if few_rows_gemm.shared_bytes(few_rows_gemm.row_class(m), cut) > 227 << 10:
                    continue
                row = {
                    "kernel": "decode",
                    "shape": f"{m}: {n}x{k}",
                    "cut": str(cut),
                    "shipped": cut == plan,
                    "bar": 0.70,
                }
                try:
                    few_rows_gemm.gemm_nt(*a, *weights[0], out.fill_(float("nan")), cut)
                    want = out.clone() if want is None else want
                    row["exact"] = torch.equal(out.view(torch.int16), want.view(torch.int16))
                    timing = time_calls([self._few_rows(a, w, out, cut) for w in weights], repeats)
                    row |= {"us": timing.us, "spread": timing.spread, "of_copy": floor / timing.us}
                except FAILURES as e:
                    row |= {"exact": False, "failed": (str(e).strip().splitlines() or [type(e).__name__])[-1][:200]}
                self.rows.append(row)
            timing = time_calls([self._deep_gemm(a, w, out) for w in weights], repeats)
            self.rows.append({
                "kernel": "decode", "shape": f"{m}: {n}x{k}", "cut": "DeepGEMM", "shipped": False, "bar": 0.70,
                "exact": want is not None and torch.equal(out.view(torch.int16), self._again(a, weights[-1], out, plan)),
                "us": timing.us, "spread": timing.spread, "of_copy": floor / timing.us,
            })  # fmt: skip
            self.write()
            self.best("decode", f"{m}: {n}x{k}", "Shape")
            del weights
            if self.late():
                break
        self._decode_means()

    def _decode_means(self) -> None:
        """Over the cases that were timed: the shipped cut, and the best of exact bits, as shares of the floor."""
        cases: dict[str, list[dict]] = {}
        for r in self.rows:
            if r["kernel"] == "decode" and r["exact"] and "us" in r:
                cases.setdefault(r["shape"], []).append(r)
        cases = {shape: rows for shape, rows in cases.items() if any(r["shipped"] for r in rows)}
        if cases:
            shipped = geometric_mean([next(r["of_copy"] for r in rows if r["shipped"]) for rows in cases.values()])
            best = geometric_mean([max(r["of_copy"] for r in rows) for rows in cases.values()])
            print(f"decode, {len(cases)} cases: shipped {shipped:.4f} of the floor, best cuts {best:.4f}", flush=True)

    @staticmethod
    def _few_rows(a: tuple, weight: tuple, out: torch.Tensor, cut) -> Callable[[], object]:
        return lambda: few_rows_gemm.gemm_nt(*a, *weight, out, cut)

    @staticmethod
    def _deep_gemm(a: tuple, weight: tuple, out: torch.Tensor) -> Callable[[], object]:
        return lambda: backends.deep_gemm().fp8_gemm_nt(a, weight, out, disable_ue8m0_cast=True)

    @staticmethod
    def _again(a: tuple, weight: tuple, like: torch.Tensor, plan) -> torch.Tensor:
        """The last weight's product by our kernel: that of DeepGEMM is still in the buffer that was timed."""
        out = torch.empty_like(like)
        few_rows_gemm.gemm_nt(*a, *weight, out, plan)
        return out.view(torch.int16)

    def best(self, kernel: str, shape: str, names: str) -> None:
        rows = [r for r in self.rows if (r["kernel"], r["shape"]) == (kernel, shape)]
        exact = sorted((r for r in rows if r["exact"] and "us" in r), key=lambda r: r["us"])
        wrong = [r["cut"] for r in rows if not r["exact"] and "failed" not in r]
        print(f"{kernel} {shape}: {len(rows)} cuts, {len(exact)} timed, bits differ: {wrong or 'none'}", flush=True)
        for r in exact[:4] + [r for r in exact[4:] if r["shipped"]]:
            mark = " (shipped)" if r["shipped"] else ""
            print(f"  {names} = {r['cut']}: {r['us']:.2f} us, {r['of_copy']:.3f} (bar {r['bar']}){mark}", flush=True)
        for r in [r for r in rows if "failed" in r][:3]:
            print(f"  {r['cut']} failed: {r['failed']}", flush=True)

    def write(self) -> None:
        if ON_GPU:
            write_results("kernel-cuts", self.rows, self.out, copy_bytes_per_second=self.bandwidth)


def warm(part: int, parts: int, kernels: list[str]) -> None:
    todo = [(name, cut) for name in kernels if name in SWEEPS for cut in _cuts(SWEEPS[name]())]
    for name, cut in todo[part::parts]:
        sweep = SWEEPS[name]()
        for m, k in SHAPES:
            try:
                with _constants(sweep, cut):
                    sweep.outputs(*sweep.make(min(m, 512), k))
            except FAILURES as e:
                print(f"{name} {cut}: {(str(e).strip().splitlines() or [type(e).__name__])[-1][:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--kernels", default="requantize,norm,both,decode")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no cut after this")
    parser.add_argument("--warm", type=int, nargs=2, metavar=("PART", "PARTS"))
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    if arguments.warm:
        warm(*arguments.warm, kernels)
        return
    run = Run(arguments)
    for name in kernels:
        run.decode() if name == "decode" else run.kernel(name)
    keys = ("kernel", "shape", "cut", "us", "spread", "of_copy", "bar", "exact", "shipped")
    timed = [{key: r[key] for key in keys} for r in run.rows if "us" in r]
    if timed:
        print_table(sorted(timed, key=lambda r: (r["kernel"], r["shape"], r["us"])))
    wrong = [r for r in run.rows if not r["exact"]]
    print(f"{len(run.rows)} cuts, {len(run.rows) - len(wrong)} exact")


if __name__ == "__main__":
    main()
