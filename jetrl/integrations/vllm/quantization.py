"""`quantization=jetrl`: vLLM's linear layers on the shared FP8 functions, formats read from the precision graph."""

import torch
from torch.nn import Parameter
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs

from jetrl.errors import UserError
from jetrl.gemm_backend import choose_gemm
from jetrl.integrations.vllm import engine, operators
from jetrl.integrations.vllm.refit import WeightReceiver
from jetrl.integrations.vllm.shards import shards_of
from jetrl.linear import QuantizedWeight, fprop, quantize_input
from jetrl.precision.build_hf import declare_from_config
from jetrl.precision.flow import Flow, load_flow
from jetrl.precision.formats import LinearFormat
from jetrl.precision.graph import PrecisionGraph
from jetrl.settings import rollout_gemm

QUANTIZATION_NAME = "jetrl"


@register_quantization_config(QUANTIZATION_NAME)
class JetConfig(QuantizationConfig):
    """Which layer gets which format. The flow arrives in vLLM's `additional_config` under `jetrl_flow`; none means the default."""

    def __init__(self) -> None:
        super().__init__()
        self._graph: PrecisionGraph | None = None
        self._flow: Flow | None = None
        engine.prepare_environment()

    @property
    def graph(self) -> PrecisionGraph:
        """The rollout graph this worker was told to build, from the model's own Hugging Face configuration.

        Asked for first while the model is built, which is when the engine's settings can still be adapted.
        """
        if self._graph is None:
            config = get_current_vllm_config()
            if self.flow(config).rollout.linear == "fp8":
                choose_gemm(rollout_gemm(config.additional_config or {}))
            engine.prepare(config, self.is_unified(config))
            # Last: a graph that is there says that the engine is prepared.
            self._graph = declare_from_config(config.model_config.hf_config, self.flow(config).rollout)
        return self._graph

    def flow(self, config: VllmConfig) -> Flow:
        if self._flow is None:
            self._flow = load_flow((config.additional_config or {}).get("jetrl_flow"))
        return self._flow

    def is_unified(self, config: VllmConfig) -> bool:
        """Whether the trainer runs the same norm, activation and rotary operators."""
        flow = self.flow(config)
        return flow.unified and flow.rollout.linear == "fp8"

    def get_name(self) -> str:
        return QUANTIZATION_NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89  # the first GPUs with FP8 tensor cores; vLLM does not ask on a CPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # vLLM then constructs this class without arguments for a plain BF16 checkpoint

    @classmethod
    def from_config(cls, config: dict) -> "JetConfig":
        raise UserError(
            f"the checkpoint is already quantized ({config.get('quant_method')}); jetrl quantizes BF16 checkpoints itself"
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None  # embeddings, lm_head and attention stay as vLLM makes them
        names = self.logical_names(prefix)
        formats = {name: self.graph.linear_format(name) for name in names}
        distinct = set(formats.values())
        if len(distinct) > 1:
            described = ", ".join(f"{name}: {fmt.x if fmt else 'not in the graph'}" for name, fmt in formats.items())
            raise UserError(
                f"{prefix} merges matrices of different formats ({described}); give them one format in the flow"
            )
        fmt = distinct.pop()
        if fmt is None or not fmt.is_fp8:
            return UnquantizedLinearMethod()
        return JetLinearMethod(formats)

    def logical_names(self, prefix: str) -> list[str]:
        """Canonical (Hugging Face) names of the matrices inside a vLLM layer, in the order of its rows."""
        parent, _, leaf = prefix.rpartition(".")
        return [f"{parent}.{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]


class JetLinearMethod(LinearMethodBase):
    """Holds FP8 codes and scales only; see refit.py for how they get there."""

    def __init__(self, formats: dict[str, LinearFormat]) -> None:
        self.formats = formats
        self.format = next(iter(formats.values()))

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        self._check_block_edges(layer, input_size_per_partition, output_partition_sizes, input_size)
        shards = shards_of(layer, list(self.formats), output_partition_sizes, input_size_per_partition)
        receiver = WeightReceiver(layer, shards, self.format.weight.scale_format)
        codes, scale = receiver.empty_storage()
        layer.register_parameter("weight", Parameter(codes, requires_grad=False))
        layer.register_parameter("weight_scale", Parameter(scale, requires_grad=False))
        set_weight_attrs(layer.weight, {"weight_loader": receiver.load_weight})
        set_weight_attrs(layer.weight_scale, {"weight_loader": receiver.load_scale})
        layer.jetrl_receiver = receiver
        layer.jetrl_out_features = receiver.out_features

    @staticmethod
    def _check_block_edges(
        layer: LinearBase, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int
    ) -> None:
        """A tensor-parallel edge inside a 128-block would give the shard other scales than the trainer's whole matrix."""
        tp = 1 if isinstance(layer, ReplicatedLinear) else layer.tp_size
        cuts = []
        if input_size_per_partition != input_size and input_size_per_partition % 128:
            cuts.append(f"its input of {input_size} into shards of {input_size_per_partition}")
        elif tp > 1 and input_size_per_partition == input_size:
            cuts += [f"{n * tp} rows into shards of {n}" for n in output_partition_sizes if n % 128]
        if cuts:
            raise UserError(
                f"tensor_model_parallel_size={tp} cuts {layer.prefix}, {' and '.join(cuts)}, which is no multiple of the "
                f"128-wide FP8 block; use a smaller tensor_model_parallel_size"
            )

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        operators.forget_cached_rotary()
        layer.jetrl_receiver.finish()

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # Traced by torch.compile: two custom operators and what drops padded columns, no reshape where none is needed.
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        codes, scale = quantize_input(rows, self.format.x.scale_format)
        weight = QuantizedWeight(layer.weight, layer.weight_scale, layer.jetrl_out_features)
        y = fprop(codes, scale, weight, bias, x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
