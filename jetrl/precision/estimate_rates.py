"""Measured rates behind the estimates: the only place where they stand.

All on one H200 (141 GB), torch 2.11.0+cu130, Triton 3.6.0, DeepGEMM 2.5.0, vLLM 0.24.0, random data; research of this
project, November 2026. They are what other Hopper GPUs are scaled to only by eye: an estimate from them is an estimate.
"""

# GEMMs at 8192 tokens, FLOP/s: means over 6144x4096, 4096x4096, 24576x4096 and 4096x12288. FP8: DeepGEMM with FP32
# scales (1411, 1387, 1458, 1476 TFLOP/s), BF16: torch.mm (806, 805, 736, 748).
BF16_FLOPS = 774e12
FP8_FLOPS = 1433e12
# wgrad (both operands in tiles along tokens) ran 1.12 to 1.25 times as fast as BF16 in the same call: the middle.
FP8_WGRAD_FLOPS = 1.18 * BF16_FLOPS

# Decode GEMMs under CUDA graphs (M = 1 to 128, weights rotated past L2), fitted as fixed + weight bytes / bandwidth over
# 6144x4096 and 24576x4096; 4096x12288 takes 14 to 20 % longer than the fit.
BF16_DECODE_FIXED = 4.3e-6
BF16_DECODE_BANDWIDTH = 4.3e12
FP8_DECODE_FIXED = 6.0e-6
FP8_DECODE_BANDWIDTH = 4.0e12

# vLLM decode of a Qwen3-8B shape at 128 sequences took 8.67 ms a step in BF16; less its GEMMs by the fit above, over 36
# layers. It contains attention over about 400 tokens, norms, rotary and sampling.
DECODE_OTHER_PER_LAYER = 114e-6

# A device-to-device copy, bytes read and written: what a quantizer can reach at best.
COPY_BANDWIDTH = 4.3e12
