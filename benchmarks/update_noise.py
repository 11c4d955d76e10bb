"""How far one optimizer step moves a policy whose weights are read in BF16, and one whose weights are read in FP8 blocks.

    python benchmarks/update_noise.py MODEL [--task gsm_symbolic] [--texts 4] [--rates 1e-6 1e-5 1e-4] [--out FOLDER]

A step of Adam moves every weight by about the learning rate, so here every weight of the layers that a flow quantizes moves
by the rate, up or down at random: a step without a direction, what is left of a policy's movement is noise. The BF16 masters
are rounded stochastically, as jetrl.optimizer does. The FP8 policy reads the same masters through the quantizer's 128x128
blocks; activations are float32 in both, so that weights alone make the difference. KL(before || after) per token, nats.
"""

import argparse
import itertools
from pathlib import Path

import torch
from harness import print_table, write_results
from jetrl_kernels.quantize_reference import dequantize_blocks, quantize_blocks
from torchao.optim.quant_utils import _fp32_to_bf16_sr as round_stochastically
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl.data import load_task
from jetrl.data.chain import working
from jetrl.data.models import TINY, resolve_model_path
from jetrl.data.sources import problem_stream


def texts(task: str, count: int, tokenizer) -> list[torch.Tensor]:
    """Questions with their written-out answers where the task has one, [1, tokens] each."""
    rows = []
    for problem in itertools.islice(problem_stream(load_task(task), "update-noise"), count):
        chat = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        answer = problem.solution or (working(problem.question) if task == "chain" else problem.answer)
        rows.append(torch.tensor(tokenizer.encode(prompt + answer, add_special_tokens=False))[None])
    return rows


def through_fp8(weight: torch.Tensor) -> torch.Tensor:
    """(N, K) -> the values that a unified flow multiplies with, float32."""
    return dequantize_blocks(*quantize_blocks(weight))[: weight.shape[0], : weight.shape[1]]


class Policy:
    def __init__(self, folder: Path, rows: list[torch.Tensor]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.rows = rows
        modules = self.model.named_modules()
        self.linears = [m for name, m in modules if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
        self.masters = [m.weight.detach().to(torch.bfloat16).float() for m in self.linears]

    @torch.no_grad()
    def log_probs(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """(tokens, vocabulary) over all rows."""
        for module, weight in zip(self.linears, weights, strict=True):
            module.weight.copy_(weight)
        return torch.cat([self.model(row).logits[0].log_softmax(-1) for row in self.rows])


def kl(before: torch.Tensor, after: torch.Tensor) -> float:
    return (before.exp() * (before - after)).sum(-1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's folder, or tiny (the embedded one)")
    parser.add_argument("--task", choices=("arithmetic", "chain", "gsm_symbolic"), default="gsm_symbolic")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    folder = Path(resolve_model_path(TINY if args.model == "tiny" else args.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = Policy(folder, texts(args.task, args.texts, tokenizer))
    bf16 = policy.log_probs(policy.masters)
    fp8 = policy.log_probs([through_fp8(w) for w in policy.masters])
    rows = []
    for rate in args.rates:
        moved = [w + rate * torch.randn_like(w).sign() for w in policy.masters]
        masters = [round_stochastically(w).float() for w in moved]
        row = {"rate": rate, "bf16": kl(bf16, policy.log_probs(masters))}
        row["fp8"] = kl(fp8, policy.log_probs([through_fp8(w) for w in masters]))
        rows.append(row | {"fp8_over_bf16": row["fp8"] / row["bf16"]})
        print(rows[-1], flush=True)
    print_table(rows)
    notes = {"model": folder.name, "task": args.task, "tokens": len(bf16), "bf16_to_fp8": kl(bf16, fp8)}
    print(write_results(f"update-noise-{folder.name}", rows, args.out, **notes))


if __name__ == "__main__":
    main()
