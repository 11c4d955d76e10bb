"""The rollout's precision graph, read off the live model inside vLLM.

vLLM merges projections (`qkv_proj`, `gate_up_proj`); the model's own `packed_modules_mapping` says of what, and the graph
names the logical matrices by their Hugging Face paths, so that it can be compared with the trainer's.
"""

from dataclasses import asdict

from torch import nn

from jetrl.precision.formats import LinearFormat, TensorFormat, format_of_dtype
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.layout import Decoder, Experts, GatedMlp, Layer, Linear, Norm
from jetrl.precision.vllm_linear import MergedStorage, describe_linear
from jetrl.precision.wiring import ForwardWiring

LAYER_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_CHILDREN = {"qkv_proj", "o_proj", "rotary_emb", "attn", "q_norm", "k_norm"}
REQUIRED_ATTENTION = {"qkv_proj", "o_proj", "rotary_emb", "attn"}
MLP_CHILDREN = {"gate_up_proj", "down_proj", "act_fn"}


def build_rollout_graph(vllm_model: nn.Module, *, carrier: TensorFormat | None = None) -> PrecisionGraph:
    """The forward graph of a loaded vLLM model (the nn.Module that a worker's model runner holds).

    carrier: format of unquantized tensors; default the dtype of the model's norms. Layers that cannot be described are
    listed in meta["unclassified"] and get no operator.
    """
    return VllmParts(vllm_model, carrier).graph()


class VllmParts:
    """Collects the parts of one vLLM model. Works on what the modules are, not on the architecture's name."""

    def __init__(self, model: nn.Module, carrier: TensorFormat | None) -> None:
        self.model = model
        self.packed = dict(getattr(model, "packed_modules_mapping", None) or {})
        self.claimed: set[str] = set()
        self.linears: dict[str, Linear] = {}
        self.merged: list[MergedStorage] = []
        norm = next((m for m in model.modules() if is_norm(m)), None)
        self.carrier = carrier or format_of_dtype(
            norm.weight.dtype if norm is not None else next(model.parameters()).dtype
        )
        self.cos_sin = self.carrier
        self.tp_size = 1

    def graph(self) -> PrecisionGraph:
        for name, module in self.model.named_modules():
            if is_linear(module):
                self._describe(name, module)
        layers = [
            self._layer(name, module)
            for name, module in self.model.named_modules()
            if "self_attn" in dict(module.named_children())
        ]
        understood = tuple(layer for layer in layers if layer is not None)
        base = self.model.model
        embedding = base.embed_tokens
        self._claim("model.embed_tokens")
        final_norm = self._norm("model.norm", getattr(base, "norm", None))
        lm_head = self._lm_head(embedding)
        loose: tuple[Linear | Norm, ...] = ()
        if len(understood) != len(layers) or not layers:
            understood, loose = (), self._loose()
        meta: dict = {
            "engine": "vllm",
            "side": "rollout",
            "num_layers": len(layers),
            "tensor_parallel": self.tp_size,
            "merged": [asdict(m) for m in self.merged],
            "methods": sorted({m.method for m in self.merged}),
        }
        shape = (embedding.org_vocab_size, embedding.embedding_dim)
        decoder = Decoder(
            "model.embed_tokens",
            shape,
            "model.rotary_emb",
            understood,
            final_norm,
            lm_head,
            loose=loose,
            unclassified=self._unclassified(),
            carrier=self.carrier,
            cos_sin=self.cos_sin,
            meta=meta,
        )
        meta["unclassified"] = list(decoder.unclassified)
        return ForwardWiring(decoder).graph()

    def _describe(self, name: str, module: nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        members = [f"{parent}.{member}" for member in self.packed.get(leaf, [leaf])]
        self.tp_size = max(self.tp_size, module.tp_size)
        described = describe_linear(name, module, members, self.carrier)
        if described is None:
            return
        linears, storage = described
        self.linears.update({linear.name: linear for linear in linears})
        self.merged.append(storage)
        self._claim(name)

    def _layer(self, name: str, module: nn.Module) -> Layer | None:
        children = dict(module.named_children())
        attention = children["self_attn"]
        parts = dict(attention.named_children())
        if set(children) != LAYER_CHILDREN or not REQUIRED_ATTENTION <= set(parts) <= ATTENTION_CHILDREN:
            return None
        prefix = f"{name}.self_attn"
        q, k, v, o = (self.linears.get(f"{prefix}.{n}_proj") for n in "qkvo")
        mlp = self._mlp(f"{name}.mlp", children["mlp"])
        kv = self._kv_format(parts["attn"])
        input_norm = self._norm(f"{name}.input_layernorm", children["input_layernorm"])
        post_norm = self._norm(f"{name}.post_attention_layernorm", children["post_attention_layernorm"])
        q_norm, k_norm = (self._norm(f"{prefix}.{n}", parts.get(n)) for n in ("q_norm", "k_norm"))
        lacks_norm = ("q_norm" in parts and q_norm is None) or ("k_norm" in parts and k_norm is None)
        if None in (q, k, v, o, mlp, kv, input_norm, post_norm) or lacks_norm:
            return None
        for claimed in ("rotary_emb", "attn"):
            for n, _ in parts[claimed].named_modules(prefix=f"{prefix}.{claimed}"):
                self._claim(n)
        head_size = parts["attn"].head_size
        return Layer(
            name=name,
            attention=prefix,
            heads=(q.shape[0] // head_size, k.shape[0] // head_size, head_size),
            input_norm=input_norm,
            post_norm=post_norm,
            q=q,
            k=k,
            v=v,
            o=o,
            mlp=mlp,
            mlp_name=f"{name}.mlp",
            q_norm=q_norm,
            k_norm=k_norm,
            kv=kv,
        )

    def _mlp(self, name: str, module: nn.Module) -> GatedMlp | Experts | None:
        """Gated MLPs only: the experts' storage in vLLM is not described yet, so a layer with them is not understood."""
        if set(dict(module.named_children())) != MLP_CHILDREN:
            return None
        linears = [self.linears.get(f"{name}.{n}") for n in ("gate_proj", "up_proj", "down_proj")]
        if None in linears:
            return None
        return GatedMlp(*linears, activation=self._claim(f"{name}.act_fn"))

    def _kv_format(self, attention: nn.Module) -> TensorFormat | None:
        """What attention reads K and V as. vLLM's FP8 caches hold one FP32 scale per layer."""
        dtype = attention.kv_cache_dtype
        if dtype in ("auto", "bfloat16", "float32"):
            return format_of_dtype(attention.kv_cache_torch_dtype)
        if dtype in ("fp8", "fp8_e4m3"):
            return TensorFormat("e4m3", "tensor", "fp32")
        return None

    def _lm_head(self, embedding: nn.Module) -> Linear | None:
        head = getattr(self.model, "lm_head", None)
        if head is None or not hasattr(head, "org_vocab_size"):
            return None
        self._claim("lm_head")
        method = type(head.quant_method).__name__
        if method not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
            self.claimed.discard("lm_head")
            return None
        plain = LinearFormat.unquantized(self.carrier)
        tied = head is embedding or head.weight is embedding.weight
        bias = getattr(head, "bias", None) is not None
        parameter = "model.embed_tokens.weight" if tied else ""
        shape = (head.org_vocab_size, head.embedding_dim)
        return Linear("lm_head", shape, plain, bias, source=self.carrier, parameter=parameter)

    def _norm(self, name: str, module: nn.Module | None) -> Norm | None:
        if module is None or not is_norm(module):
            return None
        self._claim(name)
        return Norm(name, module.weight.shape[0])

    def _loose(self) -> tuple[Linear | Norm, ...]:
        norms = [self._norm(n, m) for n, m in self.model.named_modules() if is_norm(m) and n != "model.norm"]
        return (*self.linears.values(), *norms)

    def _unclassified(self) -> tuple[str, ...]:
        result = []
        for name, module in self.model.named_modules():
            owns = next(module.parameters(recurse=False), None) is not None
            leaf = next(module.children(), None) is None
            inside = any(name.startswith(f"{claimed}.") for claimed in self.claimed)
            if (owns or leaf) and name not in self.claimed and not inside and name != "logits_processor":
                method = getattr(module, "quant_method", None)
                how = f" with {type(method).__name__}" if method is not None else ""
                result.append(f"{name} ({type(module).__name__}{how})")
        return tuple(result)

    def _claim(self, name: str) -> str:
        self.claimed.add(name)
        return name


def is_linear(module: nn.Module) -> bool:
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(module, LinearBase)


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None
