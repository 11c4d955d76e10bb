"""What a job's flow costs and saves: memory, bytes per weight sync, FLOPs in FP8, and whether FP8 pays.

Memory and bytes are counted from the graph's shapes and formats. Times come from the measured rates of
`estimate_rates` and are estimates of the linear layers and of decoding, nothing else.
"""

from dataclasses import asdict, dataclass

from jetrl.precision import estimate_rates as rates
from jetrl.precision.formats import TensorFormat
from jetrl.precision.graph import Edge, PrecisionGraph
from jetrl.precision.job import Job

TILE = 128
SCALE_BYTES = 4
ELEMENT_BYTES = {"e4m3": 1, "bf16": 2, "fp32": 4}
# Below this gain, run-to-run noise and the risk of a second precision are not worth it.
WORTHWHILE = 1.05


@dataclass(frozen=True)
class Estimate:
    """Bytes and shares of one job; `gain` compares estimated BF16 time with the flow's (above 1: the flow is faster)."""

    parameters: int
    rollout_weight_bytes: int
    rollout_weight_bytes_bf16: int
    training_state_bytes: int
    kv_bytes_per_token: int
    saved_bytes_per_token: int
    saved_bytes_per_token_bf16: int
    checkpointed: bool
    checkpointed_bytes_per_token: int
    sync_bytes: int
    sync_bytes_fp8: int
    fp8_flop_share: float
    decode_gain: float
    update_gain: float
    step_gain: float
    recommendation: str

    def to_dict(self) -> dict:
        return asdict(self)


def estimate(infer: PrecisionGraph, train: PrecisionGraph, bf16_train: PrecisionGraph, job: Job) -> Estimate:
    """infer, train: the job's declared graphs; bf16_train: the same model's training graph without FP8."""
    parameters = {o.name: o.shape for o in infer.operators if o.kind == "parameter"}
    count = sum(_numel(shape) for shape in parameters.values())
    plain = ELEMENT_BYTES[job.rollout_carrier.dtype]
    fp8 = {_weight_parameter(infer, name): infer.operator_by_name[name].shape for name in infer.fp8_linear_names()}
    fp8_bytes = sum(_block_bytes(shape) for shape in fp8.values())
    rest = count - sum(_numel(shape) for shape in fp8.values())
    decode = [_decode_seconds(g, job) for g in (bf16_train, infer)]
    update = [_update_seconds(g, job) for g in (bf16_train, train)]
    rounds = max(1.0, job.samples / _engines(job) / job.max_sequences)
    totals = [d * job.response_tokens * rounds + u for d, u in zip(decode, update, strict=True)]
    gain = totals[0] / totals[1]
    return Estimate(
        parameters=count,
        rollout_weight_bytes=fp8_bytes + rest * plain,
        rollout_weight_bytes_bf16=count * plain,
        # Master and gradient in the master's dtype, two Adam moments in FP32 (jetrl.optimizer; torch's with FP32 masters).
        training_state_bytes=count * (2 * ELEMENT_BYTES[job.master.dtype] + 2 * ELEMENT_BYTES["fp32"]),
        kv_bytes_per_token=_kv_bytes(infer),
        saved_bytes_per_token=sum(saved_bytes(train).values()),
        saved_bytes_per_token_bf16=sum(saved_bytes(bf16_train).values()),
        checkpointed=job.checkpointing,
        checkpointed_bytes_per_token=_checkpointed_bytes(train, job),
        sync_bytes=count * plain,
        sync_bytes_fp8=fp8_bytes + rest * plain,
        fp8_flop_share=_fp8_share(train, job),
        decode_gain=decode[0] / decode[1],
        update_gain=update[0] / update[1],
        step_gain=gain,
        recommendation=_recommendation(infer, train, job, gain),
    )


def saved_bytes(train: PrecisionGraph) -> dict[str, int]:
    """Bytes per token kept from forward for backward, by operator kind, without recomputation.

    A tensor that several operators keep is stored once and counted at the first of them. Torch's own norms and
    attention may keep more than the graph declares; a fused kernel keeps this.
    """
    seen: set[tuple[str, str, str]] = set()
    result: dict[str, int] = {}
    for edge in train.edges:
        if edge.phase != "saved":
            continue
        producer = train.operator_by_name[edge.producer]
        # Operators with several outputs: rotary (q and k) and attention (its output, and lse).
        several = edge.tensor if producer.kind == "rotary" else ""
        tensor = edge.tensor if edge.tensor == "saved lse" else several
        # q, k and v (and gate and up) have a quantizer each, of one tensor: it is quantized and kept once.
        source = train.edge_by_key[producer.name, "x"].producer if producer.kind == "quantizer" else producer.name
        key = (source, tensor, edge.format.dtype)
        if key in seen:
            continue
        seen.add(key)
        kind = train.operator_by_name[_forward_name(train, edge.consumer)].kind
        result[kind] = result.get(kind, 0) + _tensor_bytes(_width(train, edge), edge.format)
    return result


def _checkpointed_bytes(train: PrecisionGraph, job: Job) -> int:
    """Gradient checkpointing by decoder layer: the stream into every layer, and one layer's tensors at a time."""
    layers = max(1, sum(1 for o in train.operators if o.kind == "attention"))
    stream = next(o.shape[1] for o in train.operators if o.kind == "embedding") * ELEMENT_BYTES[job.train_carrier.dtype]
    saved = saved_bytes(train)
    outside = sum(saved.pop(kind, 0) for kind in ("lm_head", "log_softmax"))
    return layers * stream + sum(saved.values()) // layers + outside


def _forward_name(graph: PrecisionGraph, name: str) -> str:
    while name not in graph.operator_by_name or graph.operator_by_name[name].phase != "forward":
        name = name.rpartition(".")[0]
    return name


def _width(graph: PrecisionGraph, edge: Edge) -> int:
    """Elements per token of a saved tensor."""
    operator = graph.operator_by_name[edge.producer]
    if operator.kind == "quantizer":
        return graph.operator_by_name[operator.name.rpartition(".")[0]].shape[1]
    if operator.kind == "rotary":
        return operator.shape[1 if edge.tensor.endswith(" k") else 0] * operator.shape[2]
    if operator.kind == "attention":
        return operator.shape[0] * (1 if edge.tensor.endswith("lse") else operator.shape[2])
    if (
        operator.kind == "linear"
        and graph.operator_by_name[edge.consumer].kind == "activation_backward"
        and _is_fp8(graph, operator.name)
    ):
        # Part of a merged GEMM's output, in which every part begins at a multiple of a tile.
        return -(-operator.shape[0] // TILE) * TILE
    if operator.kind in ("linear", "lm_head", "router", "activation"):
        return operator.shape[0]
    if operator.kind == "norm":
        # A norm over heads is as wide as what it reads.
        return _width(graph, graph.edge_by_key[operator.name, "x"])
    if operator.kind == "rotary_table":
        return 0  # one row per position, shared by all layers and sequences
    return next(o.shape[1] for o in graph.operators if o.kind == "embedding")


def _is_fp8(graph: PrecisionGraph, linear: str) -> bool:
    return graph.edge_by_key[linear, "x"].format.granularity != "none"


def _tensor_bytes(width: int, fmt: TensorFormat) -> int:
    if fmt.granularity == "none":
        return width * ELEMENT_BYTES[fmt.dtype]
    if fmt.granularity == "tile_128x1":
        # Padded along tokens, with one scale for 128 of them.
        return width + -(-width * SCALE_BYTES // TILE)
    tiles = -(-width // TILE)
    return tiles * TILE + tiles * SCALE_BYTES


def _block_bytes(shape: tuple[int, ...]) -> int:
    rows, columns = (-(-size // TILE) for size in shape)
    return rows * columns * (TILE * TILE + SCALE_BYTES)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _weight_parameter(graph: PrecisionGraph, linear: str) -> str:
    return graph.edge_by_key[graph.edge_by_key[linear, "weight"].producer, "weight"].producer


def _kv_bytes(graph: PrecisionGraph) -> int:
    total = 0
    for operator in graph.operators:
        if operator.kind == "attention":
            size = operator.shape[1] * operator.shape[2]
            total += sum(size * ELEMENT_BYTES[graph.edge_by_key[operator.name, t].format.dtype] for t in ("k", "v"))
    return total


def _linears(graph: PrecisionGraph) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, is FP8) of every linear, lm_head included."""
    fp8 = set(graph.fp8_linear_names())
    return [(graph.operator_by_name[name].shape, name in fp8) for name in graph.linear_names()]


def _fp8_share(train: PrecisionGraph, job: Job) -> float:
    """Share of a training step's matrix FLOPs that run in FP8; attention at half the longest sequence (causal)."""
    fp8 = total = 0.0
    for shape, is_fp8 in _linears(train):
        flops = 6.0 * shape[0] * shape[1]
        total += flops
        fp8 += flops if is_fp8 else 0.0
    for operator in train.operators:
        if operator.kind == "attention":
            total += 3 * 4.0 * operator.shape[0] * operator.shape[2] * job.sequence_tokens / 2
    return fp8 / total if total else 0.0


def _engines(job: Job) -> int:
    return max(1, job.gpus // job.tensor_parallel)


def _decode_seconds(graph: PrecisionGraph, job: Job) -> float:
    """One decode step of one engine. Merged projections are one GEMM, so q, k, v and gate, up share a fixed cost."""
    seconds = 0.0
    for name in graph.linear_names():
        shape, leaf = graph.operator_by_name[name].shape, name.rpartition(".")[2]
        is_fp8 = graph.linear_format(name).is_fp8
        fixed = rates.FP8_DECODE_FIXED if is_fp8 else rates.BF16_DECODE_FIXED
        bandwidth = rates.FP8_DECODE_BANDWIDTH if is_fp8 else rates.BF16_DECODE_BANDWIDTH
        seconds += 0.0 if leaf in ("k_proj", "v_proj", "up_proj") else fixed
        seconds += shape[0] * shape[1] * (1 if is_fp8 else 2) / job.tensor_parallel / bandwidth
    layers = sum(1 for o in graph.operators if o.kind == "attention")
    return seconds + layers * rates.DECODE_OTHER_PER_LAYER


def _update_seconds(graph: PrecisionGraph, job: Job) -> float:
    """Linear layers of one optimizer step on one GPU: old log-probs, reference, and forward and backward."""
    rows = min(job.micro_batch_tokens, job.tokens_per_gpu)
    batches = max(1.0, job.tokens_per_gpu / rows)
    seconds = 0.0
    for (n, k), is_fp8 in _linears(graph):
        forward = _gemm_seconds(rows, n, k, is_fp8, rates.FP8_FLOPS)
        backward = forward + _gemm_seconds(rows, n, k, is_fp8, rates.FP8_WGRAD_FLOPS)
        if is_fp8:
            # Bytes of the quantizers: x and the weight before fprop; dy twice, x again and the weight before dgrad, wgrad.
            forward += (3 * rows * k + 3 * n * k) / rates.COPY_BANDWIDTH
            backward += (6 * rows * n + 2 * rows * k + 3 * n * k) / rates.COPY_BANDWIDTH
        seconds += 3 * forward + backward
    return seconds * batches


def _gemm_seconds(m: int, n: int, k: int, is_fp8: bool, fp8_flops: float) -> float:
    """The slower of arithmetic and memory, never below the fixed cost of a small GEMM."""
    flops = 2.0 * m * n * k
    moved = (m * k + n * k) * (1 if is_fp8 else 2) + 2 * m * n
    if is_fp8:
        return max(flops / fp8_flops, rates.FP8_DECODE_FIXED + moved / rates.FP8_DECODE_BANDWIDTH)
    return max(flops / rates.BF16_FLOPS, rates.BF16_DECODE_FIXED + moved / rates.BF16_DECODE_BANDWIDTH)


def _recommendation(infer: PrecisionGraph, train: PrecisionGraph, job: Job, gain: float) -> str:
    if not infer.fp8_linear_names() and not train.fp8_linear_names():
        return "nothing runs in FP8"
    if job.device == "cpu":
        return "on a CPU FP8 is emulated and slower than BF16: right for testing a flow, else use precision=bf16"
    rows = min(job.micro_batch_tokens, job.tokens_per_gpu)
    at = f"{rows} tokens a micro-batch, {job.tokens_per_step} a step"
    if gain < WORTHWHILE:
        return f"FP8 does not pay here (estimated {gain:.2f}x of BF16's speed at {at}); use precision=bf16"
    return f"FP8 pays here (estimated {gain:.2f}x of BF16's speed at {at})"
