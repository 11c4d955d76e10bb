"""Cuts of the kernels that miss their bars, timed and compared bit for bit with what is shipped; the best of each is printed.

    python benchmarks/sweep_kernels.py [--kernels norm,decode] [--seconds 60] [--out FOLDER]
    python benchmarks/sweep_kernels.py --warm PART PARTS       (only compiles a share of the cuts, for Triton's cache)
    TRITON_INTERPRET=1 python benchmarks/sweep_kernels.py      (a rehearsal without a GPU: compares, does not time)

A cut is a set of launch constants of one kernel. One whose bytes differ from the shipped cut's at full size is listed as wrong
and never as best. Figures as in bench_quantize.py and bench_decode.py. Where the time ends early, the least likely cuts of
the norm, and the last shapes of decode, are the ones left out.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import copy_bandwidth, geometric_mean, input_sets, print_table, time_calls, write_results
from jetrl_kernels import backends, few_rows_gemm, norm_triton

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BF16 = torch.bfloat16
SHAPES = ((8192, 4096), (8192, 12288)) if ON_GPU else ((150, 200),)
DECODE_SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
DECODE_ROWS = (1, 8, 16, 32, 64)
# What a cut may fail with: registers, shared memory, Triton's or NVRTC's own errors.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError)

# The norm's constants that are swept.
NORM_NAMES = ("FORWARD_ROWS", "ELEMENTS_PER_THREAD", "LARGEST_CHUNK")
NORM_BAR, DECODE_BAR = 0.80, 0.70
NORM_CUTS = tuple(itertools.product((1, 2, 4, 8, 16), (16, 8, 32), (4096,)))
NORM_CUTS += tuple(itertools.product((1, 2), (16, 32), (2048, 8192)))


def _matrix(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, device=DEVICE, dtype=BF16)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> tuple:
    """What is timed."""
    return norm_triton.rms_norm_quantize(x, None, weight, 1e-6, "fp32")


def _norm_outputs(x: torch.Tensor, weight: torch.Tensor) -> tuple:
    """Everything that the constants change, from one set of inputs: what is compared."""
    with_residual = norm_triton.rms_norm_quantize(x, x, weight, 1e-6, "pow2")
    plain = norm_triton.rms_norm(x, None, weight, 1e-6), norm_triton.rms_norm(x, x, weight, 1e-6)
    return *_norm(x, weight), *with_residual, *plain[0], *plain[1]


def _shipped() -> tuple:
    return tuple(getattr(norm_triton, name) for name in NORM_NAMES)


@contextmanager
def _constants(cut: tuple) -> Iterator[None]:
    shipped = _shipped()
    for name, value in zip(NORM_NAMES, cut, strict=True):
        setattr(norm_triton, name, value)
    try:
        yield
    finally:
        for name, value in zip(NORM_NAMES, shipped, strict=True):
            setattr(norm_triton, name, value)


def _cuts() -> list[tuple]:
    """The shipped one first: it is what the others are compared with. A rehearsal takes a few: the interpreter is slow."""
    return list(dict.fromkeys((_shipped(), *NORM_CUTS[:: 1 if ON_GPU else 9])))


def _same(got: tuple, want: tuple) -> bool:
    """Bit for bit, NaN equal to NaN."""
    for a, b in zip(got, want, strict=True):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        nan = a.isnan() & b.isnan() if a.dtype == torch.float32 else torch.zeros_like(a, dtype=torch.bool)
        if a.shape != b.shape or not ((a.view(integer) == b.view(integer)) | nan).all():
            return False
    return True


def _failure(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[-1][:200]


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.deadline = time.perf_counter() + arguments.seconds
        self.out = arguments.out
        self.rows: list[dict] = []
        self.bandwidth = copy_bandwidth() if ON_GPU else 0.0

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def norm(self) -> None:
        for m, k in SHAPES:
            gain, want = torch.randn(k, device=DEVICE, dtype=BF16), None
            inputs = [_matrix(m, k) for _ in range(input_sets(2 * m * k) if ON_GPU else 1)]
            for cut in _cuts():
                if self.late():
                    break
                row = {
                    "kernel": "norm",
                    "shape": f"{m}x{k}",
                    "cut": str(cut),
                    "shipped": want is None,
                    "bar": NORM_BAR,
                }
                try:
                    with _constants(cut):
                        got = _norm_outputs(inputs[0], gain)
                        want = got if want is None else want
                        row["exact"] = _same(got, want)
                        if ON_GPU:
                            timing = time_calls([lambda x=x, w=gain: _norm(x, w) for x in inputs], repeats=2)
                            row |= {"us": timing.us, "spread": timing.spread}
                            row["of_copy"] = (3 * m * k + m * k / 32) / (timing.us * 1e-6) / self.bandwidth
                except FAILURES as e:
                    row |= {"exact": False, "failed": _failure(e)}
                self.rows.append(row)
            self.write()
            self.best("norm", f"{m}x{k}", ", ".join(NORM_NAMES))

    def decode(self) -> None:
        """Cuts of the GEMM of few rows and DeepGEMM; the geometric means over all cases of what is shipped and of the best."""
        if not ON_GPU:
            return
        for (n, k), m in itertools.product(DECODE_SHAPES, DECODE_ROWS):
            if self.late():
                break
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
                    "bar": DECODE_BAR,
                }
                try:
                    few_rows_gemm.gemm_nt(*a, *weights[0], out.fill_(float("nan")), cut)
                    want = out.clone() if want is None else want
                    row["exact"] = torch.equal(out.view(torch.int16), want.view(torch.int16))
                    timing = time_calls([self._few_rows(a, w, out, cut) for w in weights], repeats)
                    row |= {"us": timing.us, "spread": timing.spread, "of_copy": floor / timing.us}
                except FAILURES as e:
                    row |= {"exact": False, "failed": _failure(e)}
                self.rows.append(row)
            timing = time_calls([self._deep_gemm(a, w, out) for w in weights], repeats)
            self.rows.append({
                "kernel": "decode", "shape": f"{m}: {n}x{k}", "cut": "DeepGEMM", "shipped": False, "bar": DECODE_BAR,
                "exact": want is not None and torch.equal(out.view(torch.int16), self._again(a, weights[-1], out, plan)),
                "us": timing.us, "spread": timing.spread, "of_copy": floor / timing.us,
            })  # fmt: skip
            self.write()
            self.best("decode", f"{m}: {n}x{k}", "Shape")
            del weights
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


def warm(part: int, parts: int) -> None:
    for cut in _cuts()[part::parts]:
        for m, k in SHAPES:
            try:
                with _constants(cut):
                    _norm_outputs(_matrix(min(m, 512), k), torch.ones(k, device=DEVICE, dtype=BF16))
            except FAILURES as e:
                print(f"norm {cut}: {_failure(e)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--kernels", default="norm,decode")
    parser.add_argument("--seconds", type=float, default=60.0, help="start no cut after this")
    parser.add_argument("--warm", type=int, nargs=2, metavar=("PART", "PARTS"))
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    if unknown := set(kernels) - {"norm", "decode"}:
        parser.error(f"--kernels={','.join(sorted(unknown))} is unknown; allowed: norm, decode")
    if arguments.warm:
        if "norm" in kernels:
            warm(*arguments.warm)
        return
    run = Run(arguments)
    for name in kernels:
        {"norm": run.norm, "decode": run.decode}[name]()
    keys = ("kernel", "shape", "cut", "us", "spread", "of_copy", "bar", "exact", "shipped")
    timed = [{key: r[key] for key in keys} for r in run.rows if "us" in r]
    if timed:
        print_table(sorted(timed, key=lambda r: (r["kernel"], r["shape"], r["us"])))
    wrong = [r for r in run.rows if not r["exact"]]
    print(f"{len(run.rows)} cuts, {len(run.rows) - len(wrong)} exact")


if __name__ == "__main__":
    main()
