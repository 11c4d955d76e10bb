"""amax -> scale and value -> code inside Triton kernels: the steps of `scale.py`, in its order, bit for bit.

Two things differ between compiled and interpreted Triton 3.6, so kernels pass `INTERPRETED` in as a constant: the
interpreter truncates when it casts to FP8 (the code here rounds by integer arithmetic instead) and its fma rounds twice
(so it divides).
"""

import triton
import triton.language as tl

from jetrl_kernels.constants import AMAX_FLOOR

INTERPRETED = bool(triton.knobs.runtime.interpret)

_INFINITY_BITS = tl.constexpr(0x7F800000)
_FLOOR = tl.constexpr(AMAX_FLOOR)
_ONE_448TH = tl.constexpr(1.0 / 448.0)
# Below this, a tile is lifted by _LIFT so that the remainder of the division stays a normal number.
_SMALL_SCALE = tl.constexpr(2.0**-40)
_LIFT = tl.constexpr(2.0**64)


@triton.jit
def magnitude_bits(x):
    """|x| of float32 as int32. Integers order like magnitudes with NaN above Inf, so an integer max propagates NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, POW2: tl.constexpr, INTERPRETED: tl.constexpr):
    """Dequantization scale (float32) from the largest magnitude (its bits); NaN where that magnitude is not finite.

    Compiled, amax / 448 is a product with 1/448 and one correction by the remainder. That is the IEEE quotient: 448 is
    7 * 2**6, so no quotient comes nearer than 1/14 ulp to the middle of two floats, and the corrected one is off by less.
    """
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), _FLOOR)
    if INTERPRETED:
        scale = tl.math.div_rn(amax, 448.0)
    else:
        scale = amax * _ONE_448TH
        scale = tl.fma(tl.fma(scale, -448.0, amax), _ONE_448TH, scale)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax_bits >= _INFINITY_BITS, float("nan"), scale)


@triton.jit
def _reciprocal(x):
    """1 / x, for normal x and normal 1 / x: the hardware's approximation (one ulp), corrected once.

    The correction cannot reach 1 / x where the significand of x is all ones (it lands on a tie), so that one is written.
    """
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    r = tl.fma(tl.fma(x, r, -1.0), -r, r)
    bits = x.to(tl.int32, bitcast=True)
    all_ones = (0x7E800001 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFF) == 0x7FFFFF, all_ones, r)


@triton.jit
def _code_by_integers(q):
    """float32 |q| <= 448 or NaN -> E4M3 byte, round to nearest even, without the hardware conversion."""
    bits = q.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2**14 leaves a multiple of the subnormal step 2**-9 in the low bits, rounded to nearest even.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal) | sign
    return tl.where(magnitude > _INFINITY_BITS, 0x7F, code).to(tl.uint8)


@triton.jit
def quotient(x, scale, INTERPRETED: tl.constexpr):
    """x / scale, near enough to the IEEE quotient that every E4M3 code is the same; `scale` broadcasts against `x`.

    Compiled, it is x times the reciprocal, then one correction by the exact remainder. A code could differ
    only where the quotient lies within 2**-22 ulp of half an ulp from an E4M3 rounding boundary;
    tests/kernels/test_quotient.py walks all such pairs and finds none wrong. An IEEE division per element costs about
    three times the instructions. The remainder is taken negated because that keeps the sign of a zero.
    """
    if INTERPRETED:
        return tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        lift = tl.where(scale < _SMALL_SCALE, _LIFT, 1.0)
        divisor = scale * lift
        reciprocal = _reciprocal(divisor)
        dividend = x * lift
        q = dividend * reciprocal
        return tl.fma(tl.fma(q, divisor, -dividend), -reciprocal, q)


@triton.jit
def encode(x, scale, INTERPRETED: tl.constexpr):
    """E4M3 bytes (uint8) of RNE(clamp(x / scale)).

    The clamp needs no instruction: |x| <= amax bounds |x / scale| by 448 (1 + 2**-23), which rounds to 448.
    """
    q = quotient(x, scale, INTERPRETED)
    if INTERPRETED:
        return _code_by_integers(q)
    else:
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def encode4(x0, x1, x2, x3, scale, INTERPRETED: tl.constexpr):
    """The codes of four equal-shaped tensors in the bytes of one int32 tensor, x0 lowest.

    A transpose through shared memory moves words four times faster than bytes, so the transposing kernels pack four
    rows before they transpose.
    """
    q0, q1 = quotient(x0, scale, INTERPRETED), quotient(x1, scale, INTERPRETED)
    q2, q3 = quotient(x2, scale, INTERPRETED), quotient(x3, scale, INTERPRETED)
    if INTERPRETED:
        low = _code_by_integers(q0).to(tl.int32) | (_code_by_integers(q1).to(tl.int32) << 8)
        return low | (_code_by_integers(q2).to(tl.int32) << 16) | (_code_by_integers(q3).to(tl.int32) << 24)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [q0, q1, q2, q3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def max_bits4(x0, x1, x2, x3):
    """Elementwise largest magnitude (bits) of four tensors."""
    return tl.maximum(
        tl.maximum(magnitude_bits(x0), magnitude_bits(x1)), tl.maximum(magnitude_bits(x2), magnitude_bits(x3))
    )
