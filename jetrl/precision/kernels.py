"""Which kernel computes each operator of a forward graph, for flows in which both engines must run the same ones.

In such a flow (`exact: true`) every operator's `definition` names its kernel, so an edge carries the kernel that produced
it and `subgraph.check` finds the operator whose kernel differs. All of them give a token the same bits whatever else is in
the batch; the measurements behind that are tests/gpu/test_*_bits.py and test_exact_rows.py.
"""

from collections.abc import Callable
from dataclasses import replace

from jetrl.precision.graph import Operator, PrecisionGraph

# Head sizes for which FA3's packed forward was seen to have the bits of its paged decode (not so with 96, whose steps over
# the keys differ between paged and unpaged).
EXACT_HEADS = (64, 128, 256)

RMS_NORM = "jetrl.rms_norm"
ROTARY_TABLE = "jetrl rotary table"
ROTARY = "jetrl.rotary"
# vLLM's FA3 with num_splits=1; on a CPU jetrl_kernels.attention_reference.
ATTENTION = "attention with undivided keys"
SILU_MUL = "jetrl.silu_mul"
GEMM = "jetrl.gemm_nt"
LM_HEAD = "torch linear"
EMBEDDING = "torch embedding"
ADD = "carrier add"
TOKEN_LOGPROBS = "jetrl.token_logprobs"

# By kind of operator. Quantizers have their own definition already; parameters and outputs compute nothing.
EXACT = {
    "embedding": EMBEDDING,
    "norm": RMS_NORM,
    "linear": GEMM,
    "rotary_table": ROTARY_TABLE,
    "rotary": ROTARY,
    "attention": ATTENTION,
    "residual_add": ADD,
    "activation": SILU_MUL,
    "lm_head": LM_HEAD,
    "log_softmax": TOKEN_LOGPROBS,
}


def with_kernels(graph: PrecisionGraph, kernel_of: Callable[[Operator], str | None] | None = None) -> PrecisionGraph:
    """The graph with every operator's kernel in its definition.

    kernel_of: what runs for an operator of the live engine, None for what an exact flow prescribes; without it, all are as
    prescribed (a declared graph). Operators outside EXACT are left alone.
    """

    def named(o: Operator) -> Operator:
        if o.phase != "forward" or o.kind not in EXACT:
            return o
        found = kernel_of(o) if kernel_of is not None else None
        return replace(o, definition=EXACT[o.kind] if found is None else found)

    return PrecisionGraph(tuple(named(o) for o in graph.operators), graph.edges, graph.meta)
