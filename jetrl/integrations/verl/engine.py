"""VeRL's FSDP engine with jetrl's linear layers: the actor and the reference, before FSDP wraps them."""

import os
import time
from collections.abc import Iterator

import torch
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from jetrl import attention
from jetrl.attention import sequence_parallel
from jetrl.convert import convert
from jetrl.errors import UserError
from jetrl.gemm_backend import choose_gemm
from jetrl.integrations.protocol import announce
from jetrl.integrations.verl import masters
from jetrl.integrations.verl.accumulation import Accumulation, accumulation_for
from jetrl.integrations.verl.handshake import RolloutHandshake
from jetrl.integrations.verl.log_probs import SharedLogProbs, replaced_for_speed
from jetrl.integrations.verl.rotary import restore_frequencies
from jetrl.integrations.verl.shadow_pass import ShadowPass
from jetrl.integrations.verl.ulysses import UlyssesExchange
from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import Flow, load_flow
from jetrl.precision.formats import TensorFormat, format_of_dtype
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.trainer_kernels import exact_graph
from jetrl.settings import engine_settings
from jetrl.weight_bundle import bundled
from jetrl.weight_cache import weights_changed


class JetFSDPEngine(ShadowPass, SharedLogProbs, FSDPEngineWithLMHead):
    """FSDP1 and FSDP2. The flow comes from `model.override_config.jetrl_flow`; without it, the default flow.

    The critic is built by another engine class (VeRL's value model) and stays as it is.
    """

    flow: Flow
    precision_graph: PrecisionGraph
    accumulation: Accumulation | None = None

    def initialize(self):
        super().initialize()
        weights_changed()
        if self.optimizer is None:
            return
        if masters.are_bf16(self.module):
            self.accumulation = accumulation_for(self.module)
        if self.rank == 0:
            announce(masters.describe(self.optimizer))
            remark = masters.describe_no_sync(self.engine_config, self.accumulation is not None)
            if remark:
                announce(remark)

    def _build_module(self):
        self.flow = load_flow(getattr(self.model_config.hf_config, "jetrl_flow", None))
        self._settings = engine_settings(self.model_config.override_config)
        self._refuse_unsupported()
        if self.flow.train.linear == "fp8":
            choose_gemm(self._settings.gemm)
        self._choose_attention()
        module = super()._build_module()
        restore_frequencies(module)
        if self.flow.train.linear != "bf16":
            _refuse_packed_experts(module)
        self.precision_graph = build_training_graph(module, self.flow.train, carrier=self._carrier())
        self.list_shadow(module)
        report = convert(module, self.precision_graph, weight_cache=self._settings.weight_cache)
        if self.rank == 0:
            role = "reference" if self.engine_config.forward_only else "actor"
            announce(f"flow {self.flow.name}, {role}: {report}")
            if reason := replaced_for_speed(self.flow):
                announce(reason)
        if self.flow.train.exact:
            self.precision_graph = exact_graph(module, self.precision_graph)
        self._handshake = RolloutHandshake(self.flow, self.precision_graph)
        self._last_sync: dict[str, float] = {}
        return module

    def _choose_attention(self) -> None:
        """The job's own choice, or the fastest that runs here: VeRL's default needs flash-attn, which may be missing."""
        attention.register()
        sequence_parallel.use(UlyssesExchange())
        if "attn_implementation" in self.model_config.override_config:
            return
        config = self.model_config.hf_config
        choose = attention.require_exact if self.flow.train.exact else attention.choose
        choice = choose(config, get_device_name(), self.use_remove_padding, self._carrier_dtype())
        config._attn_implementation = choice.name
        if self.rank == 0:
            announce(str(choice))

    def _refuse_unsupported(self) -> None:
        if self.flow.train.linear == "bf16":
            return
        if self._is_lora:
            raise UserError("LoRA is not supported with an FP8 trainer; remove actor_rollout_ref.model.lora_rank")
        if self._qat_enabled:
            raise UserError("QAT is not supported with an FP8 trainer; remove actor.fsdp_config.qat.enable")

    def _carrier_dtype(self) -> torch.dtype:
        """What FSDP's mixed precision gives everything around the linear layers (VeRL's default: bf16)."""
        policy = self.engine_config.mixed_precision or {}
        return PrecisionType.to_dtype(policy.get("param_dtype", "bf16"))

    def _carrier(self) -> TensorFormat:
        try:
            return format_of_dtype(self._carrier_dtype())
        except ValueError as e:
            raise UserError(
                f"fsdp_config.mixed_precision.param_dtype={self._carrier_dtype()} is not supported; allowed: bf16, fp32"
            ) from e

    def get_per_tensor_param(self, *args, **kwargs):
        """VeRL calls this once per weight sync, before any weight moves: the place to ask what the rollout runs."""
        self._handshake.check()
        # Here and not above: VeRL has loaded its rollout by now, which takes vLLM's import, and nothing has been sent yet.
        from jetrl.integrations.verl import sync_socket, sync_watch

        sync_watch.install()
        sync_socket.install(self._handshake.sync_token)
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        # No FP8 weights: the rollout may be a stock model, whose load_weights knows nothing of bundles.
        if self._settings.wire == "fp8" and self._handshake.fp8_weights:
            weights = quantized_on_the_way(weights, self._handshake.fp8_weights, get_device_id())
            return bundled(self._measure(weights)), peft_config
        return self._measure(weights), peft_config

    def _measure(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        start, size = time.perf_counter(), 0
        for name, tensor in weights:
            size += tensor.nbytes
            yield name, tensor
        self._last_sync = {"sync_bytes": float(size), "sync_seconds": time.perf_counter() - start}

    def _gradient_sync_context(self, *, is_last_micro_batch: bool):
        """Around each micro-batch's forward and backward: VeRL's, or the FP32 sum that BF16 masters need."""
        if self.accumulation is None:
            return super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch)
        return self.accumulation.micro_batch(is_last_micro_batch)

    def optimizer_step(self):
        grad_norm = super().optimizer_step()
        weights_changed()
        return grad_norm

    def load_checkpoint(self, *args, **kwargs):
        super().load_checkpoint(*args, **kwargs)
        weights_changed()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True):
        super().to(device, model, optimizer, grad)
        if model:
            weights_changed(moved=True)  # FP8 copies would hold GPU memory that offloading is to free

    def lr_scheduler_step(self):
        # torchao's optimizers hold the learning rate as a tensor, which VeRL's JSON and TensorBoard loggers cannot write.
        return float(super().lr_scheduler_step())

    def train_batch(self, data, loss_function):
        """Adds the bytes and seconds of the sync that preceded this update to the actor's metrics."""
        outputs = super().train_batch(data, loss_function)
        if self.is_mp_src_rank_with_outputs():
            # Lists, because VeRL chains what each data-parallel rank reports.
            outputs["metrics"].update({key: [value] for key, value in self._last_sync.items()})
        return outputs


def _refuse_packed_experts(module: torch.nn.Module) -> None:
    """Transformers 5 packs a layer's experts into 3-D parameters that are no nn.Linear, so a swap would miss them silently."""
    packed = [name for name, p in module.named_parameters() if p.dim() == 3]
    if packed:
        raise UserError(
            f"MoE experts are not supported with an FP8 trainer yet ({packed[0]} and {len(packed) - 1} more); "
            f"use precision=bf16 or a dense model"
        )


def register() -> None:
    """Put the engine in front of VeRL's own for this device. The (device, vendor) key is free in VeRL 0.9.1. Idempotent."""
    device = os.environ.get("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or get_vendor()
    for strategy in ("fsdp", "fsdp2"):
        if EngineRegistry.get_engine_cls("language_model", strategy) is not JetFSDPEngine:
            EngineRegistry.register("language_model", strategy, device=device, vendor=vendor)(JetFSDPEngine)
