"""The linear layers of four models, as the engines run them: merged projections, every matrix padded to 128."""

# (N, K) of qkv, o, gate_up, down.
MODEL_SHAPES = {
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "SmolLM2-135M": ((1152, 640), (640, 640), (3072, 640), (640, 1536)),
}
ALL_SHAPES = sorted({shape for shapes in MODEL_SHAPES.values() for shape in shapes})
