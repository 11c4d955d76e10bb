"""The trainer's log-probabilities by the operator that the rollout's sampler has, and proof of equality where it is claimed.

VeRL's own path divides by the temperature in BF16 and keeps the columns beyond the tokenizer that its rollout masks. Where
flash-attn's cross entropy is missing it also takes the log-softmax in BF16, up to 0.01 of difference in a log-probability,
and row by row in Python: seen on an H200, 131k tokens of a 22M model, 9 s a forward instead of 1 s. So there every flow takes
the operator; a flow whose rollout does not share it keeps VeRL's columns.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
from verl.workers.utils.padding import no_padding_2_padding

from jetrl.attention.logprobs import token_logprobs
from jetrl.errors import JobError
from jetrl.precision.flow import Flow

# VeRL divides by at least this.
SMALLEST_TEMPERATURE = 1e-8


def shares_log_probs(flow: Flow) -> bool:
    return flow.unified and flow.train.linear == "fp8"


def replaced_for_speed(flow: Flow) -> str | None:
    """Why a flow that need not share the operator takes it here, for the log; None where it keeps VeRL's path."""
    if shares_log_probs(flow) or FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        return None
    return "log-probabilities by jetrl.token_logprobs: flash-attn is not installed, and VeRL would take them row by row"


class SharedLogProbs:
    """In front of VeRL's FSDP engine with an LM head. Reads `self.flow`; a stock trainer with flash-attn keeps VeRL's path."""

    # Optimizer steps since the rollout last got weights: before the first, actor and rollout are one policy.
    updates_since_sync: int = 0

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        shared = shares_log_probs(self.flow)
        others = ("use_fused_kernels", "distillation_use_topk", "distillation_only")
        if not (shared or replaced_for_speed(self.flow)) or any(
            tu.get_non_tensor_data(data=micro_batch, key=key, default=False) for key in others
        ):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
        offsets = micro_batch["input_ids"].offsets()
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        if packed:
            logits, temperature = logits.squeeze(0), output_args["temperature_rmpad"]
        else:
            lengths = offsets.diff()
            logits = logits[torch.arange(logits.shape[1], device=logits.device) < lengths.unsqueeze(1)]
            temperature = output_args["temperature"].repeat_interleave(lengths)
        tokenizer = self.model_config.tokenizer if shared else None  # None with model.load_tokenizer=false
        log_probs = token_logprobs(
            logits,
            output_args["input_ids_rmpad_rolled"],
            temperature.to(torch.float32).clamp(min=SMALLEST_TEMPERATURE),
            logits.shape[-1] if tokenizer is None else min(len(tokenizer), logits.shape[-1]),
        )
        result = self._without_log_probs(output, output_args, micro_batch, logits_processor_func)
        if packed:
            log_probs = self._gather_and_unpad_packed(log_probs, output_args["pad_size"])
        result["log_probs"] = torch.nested.nested_tensor_from_jagged(log_probs, offsets)
        return result

    def _without_log_probs(self, output, output_args, micro_batch, logits_processor_func) -> dict:
        """Entropy and the like from VeRL's path. `distillation_only` is its name for "no log-probabilities"."""
        wanted = ("calculate_entropy", "calculate_sum_pi_squared")
        if not any(tu.get_non_tensor_data(data=micro_batch, key=key, default=False) for key in wanted):
            return {}
        tu.assign_non_tensor(micro_batch, distillation_only=True)
        try:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        finally:
            tu.assign_non_tensor(micro_batch, distillation_only=False)

    def get_per_tensor_param(self, *args, **kwargs):
        self.updates_since_sync = 0
        return super().get_per_tensor_param(*args, **kwargs)

    def optimizer_step(self):
        self.updates_since_sync += 1
        return super().optimizer_step()

    def train_batch(self, data, loss_function):
        """In an exact flow, holds the first update's own forward against the rollout: no forward is spent on it."""
        if not self.flow.train.exact or self.updates_since_sync or "old_log_probs" not in data.keys():
            return super().train_batch(data, loss_function)
        equality = Equality()
        outputs = super().train_batch(data, equality.around(loss_function))
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({key: [value] for key, value in equality.metrics().items()})
        equality.require()
        return outputs


class Equality:
    """Counts, over the micro-batches of one update, tokens whose log-probability is not the one it was sampled with.

    The batch's `old_log_probs` are the rollout's where `algorithm.rollout_correction.bypass_mode` is set, else the actor's
    from before the update; in an exact flow all three are the same bits.
    """

    def __init__(self) -> None:
        self.counts: list[torch.Tensor] = []

    def around(self, loss_function: Callable) -> Callable:
        """The loss function, which sees every micro-batch's output beside its batch."""

        def counted(*, model_output, data, **kwargs):
            self.counts.append(_count(model_output["log_probs"], data))
            # By keyword, as VeRL calls it: its losses are partials of functions whose first argument is their configuration.
            return loss_function(model_output=model_output, data=data, **kwargs)

        return counted

    def _totals(self) -> tuple[int, int, float, float]:
        if not self.counts:
            return 0, 0, 0.0, 0.0
        counts = torch.stack(self.counts).cpu()  # the only wait for the GPU
        tokens, differing, k3 = (counts[:, i].sum().item() for i in (0, 1, 3))
        return int(tokens), int(differing), counts[:, 2].max().item(), k3 / max(tokens, 1)

    def metrics(self) -> dict[str, float]:
        """`log_prob_k3_kl` as in jetrl.metrics, which has no old log-probabilities to go by where they are not recomputed."""
        tokens, differing, largest, k3 = self._totals()
        return {
            "log_prob_tokens_compared": float(tokens),
            "log_prob_tokens_differing": float(differing),
            "log_prob_max_difference": largest,
            "log_prob_k3_kl": k3,
        }

    def require(self) -> None:
        """Raises JobError where a token differs: what the flow claims, and skipped recomputation relies on, is broken."""
        tokens, differing, largest, _ = self._totals()
        if differing:
            raise JobError(
                f"precision=unified_exact claims equal log-probabilities in rollout and trainer, but {differing} of {tokens} "
                f"tokens differ, by up to {largest:.3g}; find the operator with python -m jetrl.verify, or use "
                f"precision=unified_fp8"
            )


def _count(log_probs: torch.Tensor, data) -> torch.Tensor:
    """(tokens, tokens that differ, largest difference, sum of k3), float64 on the device, over the response tokens."""
    new = no_padding_2_padding(log_probs.detach(), data)
    old, mask = data["old_log_probs"], data["response_mask"]
    old, mask = (t.to_padded_tensor(0) if t.is_nested else t for t in (old, mask))
    mask = mask.bool()
    d = (new.to(torch.float64) - old.to(torch.float64)) * mask
    totals = (mask.sum(), ((new != old) & mask).sum(), d.abs().max(), (torch.expm1(d) - d).sum())
    return torch.stack([t.to(torch.float64) for t in totals])
