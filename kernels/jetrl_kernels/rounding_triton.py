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
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, axis: tl.constexpr, INTERPRETED: tl.constexpr):
    """Largest magnitude along `axis` of float32, NaN where one is. The plain max would drop a NaN."""
    if INTERPRETED:
        # Integers order like magnitudes, with NaN above Inf; the interpreter runs a custom reduction element by element.
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis)
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, _nan_max)


@triton.jit
def abs_max4(x0, x1, x2, x3):
    """Elementwise largest magnitude of four tensors, NaN where one is."""
    return _nan_max(_nan_max(tl.abs(x0), tl.abs(x1)), _nan_max(tl.abs(x2), tl.abs(x3)))


@triton.jit
def scale_of(amax, POW2: tl.constexpr, INTERPRETED: tl.constexpr):
    """Dequantization scale (float32) from the largest magnitude (float32); NaN where that is not finite.

    Compiled, amax / 448 is a product with 1/448 and one correction by the remainder. That is the IEEE quotient: 448 is
    7 * 2**6, so no quotient comes nearer than 1/14 ulp to the middle of two floats, and the corrected one is off by less.
    """
    floored = tl.maximum(amax, _FLOOR)
    if INTERPRETED:
        scale = tl.math.div_rn(floored, 448.0)
    else:
        scale = floored * _ONE_448TH
        scale = tl.fma(tl.fma(scale, -448.0, floored), _ONE_448TH, scale)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _approximate_reciprocal(x):
    """1 / x within one ulp, for normal x and normal 1 / x."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    """The IEEE quotient 1 / x, for normal x and normal 1 / x, except for a few significands that change no code.

    One correction of the approximation; it cannot reach 1 / x where the significand of x is all ones (it lands on a tie),
    so that one is written.
    """
    r = _approximate_reciprocal(x)
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
def quotient(x, scale, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """x / scale, near enough to the IEEE quotient that every E4M3 code is the same; `scale` broadcasts against `x`.

    An IEEE division per element costs several times the instructions, and the quantizers are bound by instructions.
    A code could differ only where the quotient lies next to half an ulp beside an E4M3 rounding boundary;
    tests/kernels/test_quotient.py walks all such pairs and finds none wrong.
    POW2: x times the reciprocal of the power of two is exact.
    General: x times the reciprocal, then one correction by the exact remainder (negated, which keeps the sign of a zero).
    BF16 (x and the tile's amax are bfloat16 values): 1 / scale as a 16-bit and a small part, both below it; x times the
    first is exact, so one fma rounds once. The parts are not negative, which keeps the sign of a zero.
    """
    if INTERPRETED:
        return tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
    elif POW2:
        r = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return x * tl.where(scale == scale, r, scale)
    elif BF16:
        r = _approximate_reciprocal(scale)
        high = ((r.to(tl.int32, bitcast=True) - 2) & -256).to(tl.float32, bitcast=True)
        low = tl.fma(-scale, high, 1.0) * r
        return tl.fma(x, low, x * high)
    else:
        lift = tl.where(scale < _SMALL_SCALE, _LIFT, 1.0)
        divisor = scale * lift
        reciprocal = _reciprocal(divisor)
        dividend = x * lift
        q = dividend * reciprocal
        return tl.fma(tl.fma(q, divisor, -dividend), -reciprocal, q)


@triton.jit
def encode(x, scale, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """E4M3 bytes (uint8) of RNE(clamp(x / scale)).

    The clamp needs no instruction: |x| <= amax bounds |x / scale| by 448 (1 + 2**-23), which rounds to 448.
    """
    q = quotient(x, scale, POW2, BF16, INTERPRETED)
    if INTERPRETED:
        return _code_by_integers(q)
    else:
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def encode4(x0, x1, x2, x3, scale, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """The codes of four equal-shaped tensors in the bytes of one int32 tensor, x0 lowest.

    A transpose through shared memory moves words four times faster than bytes, so the transposing kernels pack four
    rows before they transpose.
    """
    q0, q1 = quotient(x0, scale, POW2, BF16, INTERPRETED), quotient(x1, scale, POW2, BF16, INTERPRETED)
    q2, q3 = quotient(x2, scale, POW2, BF16, INTERPRETED), quotient(x3, scale, POW2, BF16, INTERPRETED)
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
