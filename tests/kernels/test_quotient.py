"""The compiled quotients (rounding_triton.quotient) give the E4M3 codes of the IEEE quotient.

General form: the reciprocal starts from the hardware's approximation, off by at most one ulp (PTX ISA, rcp.approx.ftz.f32),
here tried off by up to two each way. Corrected once, the quotient is RN(x / scale + d) with |d| below about 2**-22 ulp. A
code can then differ from that of RN(x / scale) only if x / scale lies that close to m +- half an ulp, m an E4M3 rounding
boundary. Boundaries have 5 significant bits; scaled to significands there are 16. For each boundary, each side and each
24-bit significand of x the critical scales are the integers next to the exact solution, and only those within 2**-14 (in
units of the scale's last place; far wider than needed) matter. All of them are tried.

BF16 form: x and amax have 8-bit significands, so all pairs of significands are tried, at every difference of exponents
that can give a nonzero code and at the ends of the exponent range, where parts of the reciprocal are denormal.
"""

import numpy as np
import torch


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 fma: exact product in float64, sum rounded to odd there, which makes the last rounding the only one."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    shadow = total - product
    error = (product - (total - shadow)) + (c - shadow)
    bits = total.view(np.int64)
    toward_odd = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where((error != 0) & (bits & 1 == 0), toward_odd, 0)).view(np.float64).astype(np.float32)


def _reciprocal(x: np.ndarray, ulps: int) -> np.ndarray:
    """rounding_triton._reciprocal, from an approximation that is `ulps` off."""
    r = ((np.float32(1) / x).view(np.int32) + ulps).view(np.float32)
    r = _fma(_fma(x, r, np.full_like(x, -1)), -r, r)
    bits = x.view(np.int32)
    all_ones = (0x7E800001 - (bits & 0x7F800000)).view(np.float32)
    return np.where(bits & 0x7FFFFF == 0x7FFFFF, all_ones, r)


def _critical_pairs():
    x = np.arange(1 << 23, 1 << 24, dtype=np.int64)
    for significand in range(16, 32):
        for side in (-1, 1):
            # The boundary m (1 <= m < 2) plus or minus half an ulp, times 2**shift; below 1 an ulp is half as large.
            shift = 25 if significand == 16 and side < 0 else 24
            boundary = (significand << (shift - 4)) + side
            numerator = x << shift
            numerator = np.where(numerator // boundary < 1 << 23, 2 * numerator, numerator)
            below = numerator // boundary
            remainder = numerator - below * boundary
            for scale, distance in ((below, remainder), (below + 1, boundary - remainder)):
                near = (distance < boundary >> 14) & (scale >= 1 << 23) & (scale < 1 << 24)
                yield x[near].astype(np.float32), scale[near].astype(np.float32)


def test_one_correction_is_enough_on_every_critical_pair():
    tried = 0
    for x, scale in _critical_pairs():
        for ulps in (-2, -1, 0, 1, 2):
            reciprocal = _reciprocal(scale, ulps)
            q = x * reciprocal
            q = _fma(_fma(q, scale, -x), -reciprocal, q)
            assert np.array_equal(q, x / scale)
        tried += len(x)
    assert tried > 10_000


def test_corrected_product_with_one_448th_is_the_ieee_quotient_for_every_significand():
    amax = np.arange(1 << 23, 1 << 24).astype(np.float32)
    one_448th = np.float32(1 / 448)
    scale = amax * one_448th
    scale = _fma(_fma(scale, np.full_like(amax, -448), amax), np.full_like(amax, one_448th), scale)
    assert np.array_equal(scale, amax / np.float32(448))


def _codes(q: np.ndarray) -> np.ndarray:
    return torch.from_numpy(q).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_bf16_quotient_gives_the_code_of_the_ieee_quotient_for_every_pair_of_significands():
    significands = np.arange(128, 256).astype(np.float32)
    for exponent in (-107, -60, -8, 0, 60, 100, 118, 120):
        amax = (significands * np.float32(2.0**exponent))[None, :]
        scales = (amax / np.float32(448), np.float32(2.0) ** np.ceil(np.log2(amax / np.float32(448))))
        for scale in scales:
            for ulps in (-1, 0, 1):
                r = ((np.float32(1) / scale).view(np.int32) + ulps).view(np.float32)
                high = ((r.view(np.int32) - 2) & -256).view(np.float32)
                low = _fma(-scale, high, np.ones_like(scale)) * r
                assert (low >= 0).all()
                for down in range(-1, 24):
                    with np.errstate(over="ignore", invalid="ignore"):
                        x = (significands * np.float32(2.0 ** (exponent - down)))[:, None]
                        q, ieee = _fma(*np.broadcast_arrays(x, low, x * high)), x / scale
                    same = _codes(q) == _codes(ieee)
                    assert same[np.broadcast_to(x <= amax, same.shape)].all()
