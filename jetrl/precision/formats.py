"""How one tensor is represented: dtype, granularity of its scales, and the format of those scales."""

from dataclasses import asdict, dataclass

DTYPES = ("e4m3", "bf16", "fp32")
GRANULARITIES = ("none", "tile_1x128", "tile_128x1", "block_128x128", "tensor", "token", "channel")
SCALE_FORMATS = ("none", "fp32", "pow2")
# How wgrad gets its operands, dy^T and x, contracted over tokens:
#   requantize  x's 1x128 FP8 copy (what fprop read) is kept and re-quantized along tokens in the backward
#   copy        a second FP8 copy of x, quantized along tokens from the original in the forward, is kept instead
#   blocks      as requantize, but x goes into 128x128 blocks: a faster GEMM, one scale for 128 channels
#   bf16        nothing is quantized: x is kept in the carrier (twice the memory), the product is the carrier's
WGRAD_KINDS = ("requantize", "copy", "blocks", "bf16")


@dataclass(frozen=True)
class TensorFormat:
    """dtype + granularity + scale format of one tensor.

    `tile_1x128`: one scale per 128 consecutive elements of a row; `tile_128x1`: per 128 rows of one column (wgrad's
    tiles along tokens); `block_128x128`: one scale per square block. Unquantized tensors have granularity and scale
    format "none". `tensor`, `token` (one scale per row of an activation) and `channel` (one per output row of a
    weight) exist only to describe foreign set-ups truthfully.
    """

    dtype: str
    granularity: str = "none"
    scale_format: str = "none"

    def __post_init__(self) -> None:
        for key, allowed in (("dtype", DTYPES), ("granularity", GRANULARITIES), ("scale_format", SCALE_FORMATS)):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"{key}={value!r} is unknown; allowed: {', '.join(allowed)}")
        if (self.granularity == "none") != (self.scale_format == "none"):
            raise ValueError(f"a scale format needs a granularity and the reverse, got {asdict(self)}")

    def __str__(self) -> str:
        return (
            self.dtype if self.granularity == "none" else f"{self.dtype} {self.granularity} {self.scale_format}-scale"
        )


BF16 = TensorFormat("bf16")
FP32 = TensorFormat("fp32")


def fp8_tile(scale_format: str) -> TensorFormat:
    return TensorFormat("e4m3", "tile_1x128", scale_format)


def fp8_token_tile(scale_format: str) -> TensorFormat:
    return TensorFormat("e4m3", "tile_128x1", scale_format)


def fp8_block(scale_format: str) -> TensorFormat:
    return TensorFormat("e4m3", "block_128x128", scale_format)


def format_of_dtype(dtype: object) -> TensorFormat:
    """The unquantized format of a torch dtype. ValueError for one that the graph has no name for (float16)."""
    known = {"torch.bfloat16": BF16, "torch.float32": FP32}
    if str(dtype) not in known:
        raise ValueError(f"dtype {dtype} has no place in a precision graph; allowed: {', '.join(known)}")
    return known[str(dtype)]


@dataclass(frozen=True)
class LinearFormat:
    """Formats of the three GEMMs of one linear layer, as the layer itself consumes them.

    fprop is `x @ weight^T`; dgrad is `dy @ weight`; wgrad is `wgrad_dy^T @ wgrad_x`. `weight` holds for fprop and dgrad:
    a square block has the same scales transposed.
    """

    x: TensorFormat
    weight: TensorFormat
    dy: TensorFormat
    wgrad_x: TensorFormat
    wgrad_dy: TensorFormat
    wgrad: str = "requantize"

    @property
    def is_fp8(self) -> bool:
        return self.x.dtype == "e4m3"

    @classmethod
    def bf16(cls) -> "LinearFormat":
        return cls(BF16, BF16, BF16, BF16, BF16)

    @classmethod
    def unquantized(cls, carrier: TensorFormat) -> "LinearFormat":
        """All operands in `carrier`: BF16, or FP32 where a job computes in it."""
        return cls(carrier, carrier, carrier, carrier, carrier)

    @classmethod
    def fp8_blockwise(
        cls, scale_format: str, wgrad: str = "requantize", carrier: TensorFormat = BF16
    ) -> "LinearFormat":
        """The Jet-RL linear: 1x128 activations and gradients, 128x128 weights, wgrad along tokens (see WGRAD_KINDS)."""
        if wgrad not in WGRAD_KINDS:
            raise ValueError(f"wgrad={wgrad!r} is unknown; allowed: {', '.join(WGRAD_KINDS)}")
        tile, block, token_tile = fp8_tile(scale_format), fp8_block(scale_format), fp8_token_tile(scale_format)
        wgrad_x = {"bf16": carrier, "blocks": block}.get(wgrad, token_tile)
        return cls(tile, block, tile, wgrad_x, carrier if wgrad == "bf16" else token_tile, wgrad)
