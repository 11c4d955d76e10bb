"""A pass over vLLM's compiled graph: norm, SiLU-mul and rotary take in what surrounds them. Bits do not change.

    rms_norm            -> quantize_tiles    becomes rms_norm_quantize
    silu_mul            -> quantize_tiles    becomes silu_mul_quantize
    rms_norm of q and k -> rotary            becomes qk_norm_rotary, which also reads q and k where the GEMM left them

Each fused operator is bit-equal to what it stands for (tests/gpu), so eager mode, which runs them apart, agrees. All
readers of one quantized tensor share it. A tensor that is also read unquantized stays as it is.

vLLM runs it as Inductor's last custom pass; see `engine.prepare`.
"""

import hashlib
from operator import getitem
from pathlib import Path

import jetrl_kernels.ops
import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

ops = torch.ops.jetrl
_aten = torch.ops.aten
# Operators that only say how the same elements are laid out.
_RESHAPES = {
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.clone.default,
    _aten.contiguous.default,
}


class SharedOperatorFusion(InductorPass):
    """Stateless, so that vLLM may copy and pickle it with its configuration."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is ops.rms_norm.default:
                _fuse_norm(graph, node)
            elif node.target is ops.silu_mul.default:
                _fuse_silu(graph, node)
            elif node.target is ops.rotary.default:
                _fuse_rotary(graph, node)
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """Part of the key of vLLM's compile cache: this file, and the layouts that the operators declare."""
        sources = [Path(__file__), Path(jetrl_kernels.ops.__file__)]
        return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> None:
    outputs = _outputs(node)
    quantizers, scale_format = _only_quantized(outputs.get(0))
    if not quantizers:
        return
    fused = _call(graph, node, ops.rms_norm_quantize.default, (*node.args, scale_format))
    _share(graph, fused, quantizers)
    for old, new in ((1, 2), (2, 3)):
        if old in outputs:
            outputs[old].replace_all_uses_with(_output(graph, fused, new))


def _fuse_silu(graph: fx.Graph, node: fx.Node) -> None:
    quantizers, scale_format = _only_quantized(node)
    if quantizers:
        fused = _call(graph, node, ops.silu_mul_quantize.default, (*node.args, scale_format))
        _share(graph, fused, quantizers)


def _fuse_rotary(graph: fx.Graph, node: fx.Node) -> None:
    q, k, cos, sin, positions, inverse = node.args
    norms = [_norm_of_heads(x) for x in (q, k)]
    if None in norms or inverse or norms[0].args[3] != norms[1].args[3]:
        return
    heads = [_heads(graph, node, x, norm.args[0]) for x, norm in zip((q, k), norms, strict=True)]
    weights = [norm.args[2] for norm in norms]
    args = (*heads, *weights, norms[0].args[3], cos, sin, positions)
    fused = _call(graph, node, ops.qk_norm_rotary.default, args)
    for index, output in _outputs(node).items():
        output.replace_all_uses_with(_output(graph, fused, index))


def _norm_of_heads(x: fx.Node) -> fx.Node | None:
    """The rms_norm (without residual) of which x is a reshaped result that nothing else reads."""
    found = _behind_reshapes(x)
    if found.target is not getitem or found.args[1] != 0:
        return None
    norm = found.args[0]
    if norm.target is not ops.rms_norm.default or norm.args[1] is not None or len(found.users) != 1:
        return None
    return norm if set(_outputs(norm)) == {0} and norm.args[2].meta["val"].shape[0] == _val(x).shape[-1] else None


def _heads(graph: fx.Graph, before: fx.Node, like: fx.Node, rows: fx.Node) -> fx.Node:
    """`rows`, before it was copied to be contiguous, as (tokens, heads, head size) like `like`."""
    source = _behind_reshapes(rows)
    _, heads, size = _val(like).shape
    with graph.inserting_before(before):
        view = graph.call_function(_aten.reshape.default, (source, [-1, heads, size]))
    view.meta["val"] = _val(source).reshape(-1, heads, size)
    return view


def _behind_reshapes(node: fx.Node) -> fx.Node:
    while node.target in _RESHAPES:
        node = node.args[0]
    return node


def _only_quantized(tensor: fx.Node | None) -> tuple[list[fx.Node], str | None]:
    """(its quantizers, their scale format) where every reader of `tensor` quantizes it in one format, else ([], None)."""
    readers = list(tensor.users) if tensor is not None else []
    formats = {reader.args[1] for reader in readers if reader.target is ops.quantize_tiles.default}
    if len(formats) != 1 or any(reader.target is not ops.quantize_tiles.default for reader in readers):
        return [], None
    return readers, formats.pop()


def _share(graph: fx.Graph, fused: fx.Node, quantizers: list[fx.Node]) -> None:
    """Codes and scale of `fused` (its outputs 0 and 1) in the place of every quantizer's."""
    shared = {index: _output(graph, fused, index) for index in (0, 1)}
    for quantizer in quantizers:
        for index, output in _outputs(quantizer).items():
            output.replace_all_uses_with(shared[index])


def _outputs(node: fx.Node) -> dict[int, fx.Node]:
    return {user.args[1]: user for user in node.users if user.target is getitem}


def _output(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    with graph.inserting_after(node):
        output = graph.call_function(getitem, (node, index))
    output.meta["val"] = node.meta["val"][index]
    return output


def _call(graph: fx.Graph, before: fx.Node, op: torch._ops.OpOverload, args: tuple) -> fx.Node:
    """A call with the fake result and the argument layouts that Inductor looks up."""
    with graph.inserting_before(before):
        node = graph.call_function(op, args)
    values = tuple(_val(a) if isinstance(a, fx.Node) else a for a in args)
    node.meta["eager_input_vals"] = (values, {})
    mode = next(v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor))
    with mode:
        node.meta["val"] = op(*values)
    return node


def _val(node: fx.Node):
    return node.meta["val"]
