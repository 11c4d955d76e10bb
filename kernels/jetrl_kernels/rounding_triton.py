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
# Below this, a tile is lifted by _LIFT so that the remainder of the division stays a normal number.
_SMALL_SCALE = tl.constexpr(2.0**-40)
_LIFT = tl.constexpr(2.0**64)


@triton.jit
def magnitude_bits(x):
    """|x| of float32 as int32. Integers order like magnitudes with NaN above Inf, so an integer max propagates NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, POW2: tl.constexpr):
    """Dequantization scale (float32) from the largest magnitude (its bits); NaN where that magnitude is not finite."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), _FLOOR)
    scale = tl.math.div_rn(amax, 448.0)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax_bits >= _INFINITY_BITS, float("nan"), scale)


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
def encode(x, scale, INTERPRETED: tl.constexpr):
    """E4M3 bytes (uint8) of RNE(clamp(x / scale)); `scale` broadcasts against `x`.

    The clamp needs no instruction: |x| <= amax bounds |x / scale| by 448 (1 + 2**-23), which rounds to 448.
    Compiled, the quotient comes from one reciprocal per tile and two Newton corrections, each an exact remainder
    folded back by fma; after the second the quotient is the IEEE one (Markstein 1990). An IEEE division per element
    costs about three times the instructions.
    """
    if INTERPRETED:
        q = tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
        return _code_by_integers(q)
    else:
        lift = tl.where(scale < _SMALL_SCALE, _LIFT, 1.0)
        divisor = scale * lift
        reciprocal = tl.math.div_rn(1.0, divisor)
        dividend = x * lift
        q = dividend * reciprocal
        q = tl.fma(tl.fma(-q, divisor, dividend), reciprocal, q)
        q = tl.fma(tl.fma(-q, divisor, dividend), reciprocal, q)
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
