"""One training run of the learning comparison: loss curve, held-out loss, gradient directions at its start and end.

    python -m benchmarks.learning.train "unified_fp8" --seed 0 --out FOLDER

AdamW on float32 masters for every variant; the model holds bf16(master), as FP8 weights are quantized from. On a GPU the
whole step (forward, backward, clipping, optimizer) is one CUDA graph: eagerly, Python would take several times the GPU's
time at this size.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from . import gradients, stream
from .model import NUDGED, SIZES, VARIANTS, build, initial_weights, loss, nudged

PEAK_LR, RAMP = 8e-4, 50
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
HELD_OUT_BATCHES = 32
# Steps run before capture (and undone): kernels compile, libraries make their handles.
WARM_UP = 2


def learning_rate(step: int, steps: int) -> float:
    """Linear ramp, then a cosine from PEAK_LR to 0: runs that differ by rounding alone then end close to each other."""
    if step < RAMP:
        return PEAK_LR * (step + 1) / RAMP
    along = (step - RAMP) / max(1, steps - RAMP)
    return 0.5 * PEAK_LR * (1 + math.cos(math.pi * along))


class Trainer:
    """Owns the model, its float32 masters and, on a GPU, the graph of one step."""

    def __init__(self, model: torch.nn.Module, weights: dict[str, torch.Tensor], rows: int, length: int) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        device = self.parameters[0].device
        self.masters = [weights[name].to(device, copy=True) for name, _ in model.named_parameters()]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.cuda = device.type == "cuda"
        self.lr = torch.tensor(0.0, device=device)
        matrices = [m for m in self.masters if m.dim() > 1]
        vectors = [m for m in self.masters if m.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        options = {"fused": True, "capturable": True} if self.cuda else {"foreach": False}
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=BETAS, **options)
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.int64, device=device)
        self.graph = self._capture() if self.cuda else None

    def _step(self) -> torch.Tensor:
        value = loss(self.model, self.tokens)
        grads = torch.autograd.grad(value, self.parameters)
        own = [master.grad for master in self.masters]
        torch._foreach_copy_(own, grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
        torch._foreach_mul_(own, torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return value.detach()

    def _capture(self) -> torch.cuda.CUDAGraph:
        before = [master.clone() for master in self.masters]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.value = self._step()
        # What the warm-up changed. (At a learning rate of 0 only the moments and step counts moved.)
        torch._foreach_copy_(self.masters, before)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return graph

    def step(self, tokens: torch.Tensor, lr: float) -> torch.Tensor:
        """One update on tokens (rows, length + 1); the loss before it, a new tensor on the device."""
        self.tokens.copy_(tokens, non_blocking=True)
        self.lr.fill_(lr)
        if not self.cuda:
            return self._step()
        self.graph.replay()
        return self.value.clone()

    def weights(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: master.clone() for name, master in zip(names, self.masters, strict=True)}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, text: torch.Tensor, rows: int, length: int) -> float:
    device = next(model.parameters()).device
    batches = min(HELD_OUT_BATCHES, (len(text) - 1) // (rows * length))
    values = [loss(model, stream.batch(text, i, rows, length, 0).to(device)) for i in range(batches)]
    return torch.stack(values).mean().item()


def run(
    variant: str, seed: int, steps: int, rows: int, length: int, size_name: str, device: str, direction: bool
) -> dict:
    """Train one variant; a dict fit for JSON. direction: also compare gradients with float32's, at both ends."""
    began = time.perf_counter()
    size = SIZES[size_name]
    train, held_out, digest = stream.load()
    weights = initial_weights(size, length, seed)
    weights = nudged(weights) if variant == NUDGED else weights
    probe = stream.batch(held_out, 0, rows, length, 0).to(device)
    found = {"start": gradients.compare(size, length, weights, probe)} if direction else {}
    model = build(size, length, variant, weights, device)
    trainer = Trainer(model, weights, rows, length)
    ready = time.perf_counter()
    losses = [
        trainer.step(stream.batch(train, step, rows, length, seed), learning_rate(step, steps)) for step in range(steps)
    ]
    losses = torch.stack(losses).tolist()
    seconds = time.perf_counter() - ready
    result = {
        "variant": variant,
        "seed": seed,
        "steps": steps,
        "tokens_per_step": rows * length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stream_sha256": digest,
        "seconds_to_first_step": ready - began,
        "seconds_in_steps": seconds,
        "held_out_loss": held_out_loss(model, held_out, rows, length),
        "loss": losses,
    }
    if direction:
        found["end"] = gradients.compare(size, length, trainer.weights(), probe)
        result["gradients"] = found
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--direction", action="store_true", help="compare gradients with float32's at both ends")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON")
    a = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = run(a.variant, a.seed, a.steps, a.rows, a.length, a.size, device, a.direction)
    a.out.mkdir(parents=True, exist_ok=True)
    name = f"{a.variant.replace(' ', '_').replace('=', '_')}-{a.seed}.json"
    (a.out / name).write_text(json.dumps(result))
    print(
        f"{a.variant} seed {a.seed}: last loss {result['loss'][-1]:.4f}, held out {result['held_out_loss']:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
