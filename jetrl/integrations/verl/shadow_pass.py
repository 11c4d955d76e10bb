"""The engine's part of calibrated clipping: log-probs of a few sequences, in the flow and in its BF16 shadow, before and
after a step's updates. It hooks where VeRL's actor has the weights at hand anyway:

    infer_batch          the old log-probs' pass, before the step's first update: take the sample, log pi_old of both
    lr_scheduler_step    once after the step's last update: log pi_theta of both, fit the bounds
"""

from dataclasses import asdict

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from jetrl.calibration import WIRE_KEY, CalibratedClip
from jetrl.convert import stock_forward
from jetrl.integrations.protocol import announce
from jetrl.integrations.verl.calibrated_clip import CALIBRATION, HIGH_GRID, LOW_GRID, fit, tail_counts
from jetrl.precision.build_hf import build_training_graph


class ShadowPass:
    """A mixin in front of VeRL's FSDP engine. Does nothing unless the job has the node `calibrated_clip`."""

    _passes = 0
    _sample: TensorDict | None = None
    _old: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def calibration(self) -> CalibratedClip | None:
        wire = getattr(self.model_config.hf_config, WIRE_KEY, None)
        return None if wire is None or self.engine_config.forward_only else CalibratedClip.from_wire(wire)

    def list_shadow(self, module: torch.nn.Module) -> None:
        """Enter the shadow pass into the graph's facts, with the digest of what it computes. Before conversion."""
        settings, shadow = self.calibration, self.flow.shadow
        if settings is None or shadow is None:
            return
        graph = build_training_graph(module, shadow, carrier=self._carrier()).forward()
        self.precision_graph.meta["shadow"] = {
            "assignment": asdict(shadow),
            "digest": graph.digest(),
            **asdict(settings),
        }
        if self.rank == 0:
            announce(
                f"flow {self.flow.name}: a shadow pass in {shadow.linear} (graph {graph.digest()[:12]}) over "
                f"{settings.sequences} sequences every {settings.every} steps"
            )

    def infer_batch(self, data: TensorDict, loss_function=None):
        settings = self.calibration
        if settings is not None:
            if self._passes % settings.every == 0:
                self._sample = _some_rows(data, settings.sequences, seed=self._passes)
                self._old = self._log_probs(self._sample)
            self._passes += 1
        return super().infer_batch(data, loss_function)

    def lr_scheduler_step(self):
        if self._sample is not None:
            self._calibrate()
            self._sample = self._old = None
        return super().lr_scheduler_step()

    def _calibrate(self) -> None:
        """Collective over the data-parallel ranks: all of them get the bounds that fit all their tokens."""
        flow, shadow = (new - old for new, old in zip(self._log_probs(self._sample), self._old, strict=True))
        base = CALIBRATION.base
        counts = torch.cat([tail_counts(flow, LOW_GRID, HIGH_GRID), tail_counts(shadow, (base.low,), (base.high,))])
        torch.distributed.all_reduce(counts, group=self.get_data_parallel_group())
        size = len(LOW_GRID) + len(HIGH_GRID) + 1
        CALIBRATION.fitted = fitted = fit(counts[:size], counts[size:], base)
        if self.rank == 0:
            announce(
                f"calibrated clipping: ratios are clipped to [{fitted.low:.2f}, {fitted.high:.2f}]; "
                f"in BF16 [{base.low:.2f}, {base.high:.2f}] clips {int(counts[size])} below and {int(counts[size + 1])} "
                f"above of {int(counts[-1])} tokens"
            )

    def _log_probs(self, sample: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """(in the flow, in its shadow) of the sample's response tokens, 1-D float32."""
        flow = self._response_log_probs(sample)
        with torch.no_grad(), stock_forward(self.module):
            return flow, self._response_log_probs(sample)

    def _response_log_probs(self, sample: TensorDict) -> torch.Tensor:
        with torch.no_grad():
            output = self.forward_backward_batch(sample, None, forward_only=True)
        padded = no_padding_2_padding(output["model_output"]["log_probs"], sample).float()
        mask = sample["response_mask"]
        mask = (mask.to_padded_tensor(0) if mask.is_nested else mask).to(padded.device, torch.bool)
        return padded[:, : mask.shape[1]][mask]


def _some_rows(data: TensorDict, count: int, seed: int) -> TensorDict:
    """`count` of the rows (all where there are fewer), chosen by the seed, as one micro-batch."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    sample = tu.index_select_tensor_dict(data, order[:count].sort().values)
    # Without dynamic batches VeRL wants whole micro-batches, whose size was made for all rows.
    tu.assign_non_tensor(sample, micro_batch_size_per_gpu=len(sample))
    return sample
