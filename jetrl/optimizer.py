"""AdamW over BF16 master weights: torchao's, whose updates are rounded stochastically, with moments wide enough for it.

VeRL builds it from `optim.optimizer_impl=jetrl.optimizer`, `optim.optimizer=StochasticAdamW`.

Why not torchao's class as it is: it keeps both moments in the parameter's dtype and rounds them to nearest. In BF16 the
second moment then stands still: an update v += (1 - beta2)(g^2 - v) with beta2 = 0.999 is about a thousandth of v, and
half the spacing of BF16 numbers is between 0.2 % and 0.4 %. It grows only in its first few hundred steps and never decays
(tests/test_optimizer.py). Only the master weights are rounded stochastically, so only they may be narrow.
"""

from itertools import chain

import torch
from torchao.optim import _AdamW

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class StochasticAdamW(_AdamW):
    """Parameters of any float dtype; BF16 ones are rounded stochastically, others as torch.optim.AdamW does.

    Adam's moments are FP32: 10 bytes a parameter with a BF16 master, against 12 with an FP32 master. The random bits come
    from the parameter's device's default generator, which VeRL saves and restores with a checkpoint.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, *, bf16_stochastic_round=True):
        super().__init__(params, lr, betas, eps, weight_decay, bf16_stochastic_round=bf16_stochastic_round)

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure=None):
        """torchao compiles the update of one parameter. On a CPU it runs as it is: a compiler may be missing there."""
        self._counts_to_cpu()
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        if all(p.device.type == "cpu" for p in parameters):
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)
        return super().step(closure)

    def _counts_to_cpu(self) -> None:
        """Where torchao makes the counts of steps. VeRL's offloading brings them back on the GPU with the rest of the state.

        A bias correction made there, and a division by it, round otherwise (CUDA multiplies by a CPU number's reciprocal):
        a job that offloads its optimizer would make other weights than one that does not, and compile each update twice.
        """
        moved = [s for s in self.state.values() if "step" in s and s["step"].device.type != "cpu"]
        if moved:
            # One wait for the GPU, not one for each parameter.
            for state, count in zip(moved, torch.stack([s["step"] for s in moved]).cpu().unbind(), strict=True):
                state["step"] = count.clone()

    def load_state_dict(self, state_dict: dict) -> None:
        """torch.optim casts loaded moments to the parameter's dtype: a resumed job would go on with rounded ones."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key in MOMENTS and value is not None:
                    self.state[p][key] = value.to(device=p.device, dtype=torch.float32)
