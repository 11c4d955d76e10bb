"""Makes a Qwen3-shaped model of 1 to 150 million weights, warmed up on the task `chain` until it is right now and then.

    python scripts/warm_up_model.py --size 20m --length 512 --out models/chain
    python -m jetrl.train +model=chain +data=chain task.length=512

Supervised steps on written-out chains, seeded, with the embedded model's tokenizer. It stops when the accuracy of
*sampled* answers reaches --target: what reinforcement learning starts from is what the policy samples, not what it would
decode greedily. Both are known without decoding. A chain's greedy decoding is right exactly if under teacher forcing
every token of the right answer is the likeliest one, and it is sampled with the product of its tokens' probabilities
(a wrong result never leads back into the chain, so another path to the right number is a 1-in-100 coincidence).
The decoded accuracy is printed at the end for comparison. No validation question is ever shown.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from make_tiny_model import TINY_SIZE, make_model, refuse_other_folders, save
from supervised import adamw, autocast, cosine_rate, padded, supervised_step
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from jetrl.data import TaskConfig, load_task
from jetrl.data.chain import working
from jetrl.data.models import TINY, resolve_model_path
from jetrl.data.reward import compute_score
from jetrl.data.sources import Problem, generate, problem_stream
from jetrl.small_qwen3 import Size

SIZES = {
    "tiny": TINY_SIZE,  # 1.4 M: for tests and CPUs
    "20m": Size(512, 1536, 7, 8, 4),
    "60m": Size(768, 2304, 9, 12, 4),
    "150m": Size(1024, 3072, 12, 16, 8),
}
RAMP_STEPS = 50
CHECK_EVERY = 5
# The learning rate falls along a cosine to this share of its height: a long chain is right only when every step is, which
# takes a quiet end, and there the accuracy rises slowly enough to be stopped at the target.
LOWEST_RATE = 0.05
# Beyond this sampled accuracy the model is not written: RL is to start at 0.1 to 0.4.
HIGHEST_START = 0.4


def load_tokenizer(longest: int) -> PreTrainedTokenizerFast:
    """The embedded model's: 512 tokens, digits single, any text can be written. longest: positions of the new model."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    tokenizer.model_max_length = longest
    return tokenizer


class Encoder:
    """Problems to tensors, in about a tenth of a step's time on an H200.

    A tokenizer with single digits writes a chain's working with one token a character, which a table does fifty times
    faster than byte-pair merging. Raises ValueError at once for a tokenizer that does not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.table = {c: self._plain(c)[0] for c in "0123456789: "}
        sample = " ".join(f"{n}:{n % 100:02d}" for n in (1, 9, 10, 42, 99, 100, 599))
        if self._plain(sample) != self.characters(sample):
            raise ValueError("this tokenizer merges characters of a chain's working")

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def characters(self, text: str) -> list[int]:
        return [self.table[c] for c in text]

    def batch(self, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, labels), both [problems, longest] int64, padded on the right; labels are -100 outside the answer.

        Prompt and answer are encoded apart, as the rollout sees them: the answer's first token never merges with the prompt.
        """
        tokenizer = self.tokenizer
        chats = [[{"role": "user", "content": problem.question}] for problem in problems]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        answers = [[*self.characters(working(p.question)), tokenizer.eos_token_id] for p in problems]
        return padded(list(zip(prompts, answers, strict=True)), tokenizer.pad_token_id)


@torch.no_grad()
def accuracies(model: Qwen3ForCausalLM, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """(share of problems that greedy decoding would solve, mean probability of sampling the right answer), teacher-forced."""
    greedy, sampled = [], []
    for ids, labels in batches:
        logits = model(input_ids=ids).logits[:, :-1].float()
        target = labels[:, 1:]
        counts = target != -100
        right = (logits.argmax(-1) == target) | ~counts
        log_probs = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        greedy.append(right.all(1).float())
        sampled.append((log_probs * counts).sum(1).exp())
    return torch.cat(greedy).mean().item(), torch.cat(sampled).mean().item()


@torch.no_grad()
def decoded_accuracy(model: Qwen3ForCausalLM, tokenizer, problems: list[Problem], longest: int) -> float:
    """Share of problems whose greedily decoded answer gets the job's own reward. longest: new tokens."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").to(model.device)
    out = model.generate(**batch, max_new_tokens=longest, do_sample=False)
    answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = [compute_score("chain", text, p.answer)["score"] for text, p in zip(answers, problems, strict=True)]
    return sum(scores) / len(scores)


def warm_up(
    model, encoder: Encoder, problems: Iterator[Problem], probe: list[tuple[torch.Tensor, torch.Tensor]], args
) -> dict:
    """Supervised steps until the sampled accuracy on `probe` reaches args.target; prints a line every tenth check."""
    optimizer = adamw(model, args.lr)
    start = time.monotonic()
    for step in range(1, args.max_steps + 1):
        batch = encoder.batch(list(itertools.islice(problems, args.batch)))
        optimizer.param_groups[0]["lr"] = cosine_rate(step, args.lr, RAMP_STEPS, args.decay_steps, LOWEST_RATE)
        loss = supervised_step(model, optimizer, *batch)
        if step % CHECK_EVERY:
            continue
        with autocast(model):
            greedy, sampled = accuracies(model, probe)
        seconds = time.monotonic() - start
        ended = sampled >= args.target or (args.seconds is not None and seconds >= args.seconds)
        if ended or step % (10 * CHECK_EVERY) == 0:
            figures = f"loss {loss.item():.4f}  accuracy greedy {greedy:.3f} sampled {sampled:.3f}"
            print(f"step {step:5d}  {figures}  {seconds:6.1f} s", flush=True)
        if ended:
            return {"steps": step, "seconds": seconds, "reached": sampled >= args.target}
    raise SystemExit(
        f"after {args.max_steps} steps the sampled accuracy is still below --target {args.target}; raise --max-steps"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models/chain"), help="folder to write; replaced when it exists"
    )
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--length", type=int, default=512, help="task.length: the most tokens of a response")
    parser.add_argument("--digits", type=int, default=2, help="task.digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.2, help="stop at this accuracy of sampled answers")
    parser.add_argument("--batch", type=int, default=64, help="chains a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay-steps", type=int, default=700, help="steps over which the learning rate falls")
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, help="stop then, below the target too; reached says so")
    parser.add_argument("--decode", type=int, default=64, help="validation questions to decode at the end; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    for name in ("length", "digits", "batch", "max_steps", "decay_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    try:
        torch.device(args.device)
    except RuntimeError:
        parser.error(f"--device {args.device} is no device of torch; allowed: cuda, cpu")
    refuse_other_folders(args.out)
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    began = time.monotonic()
    shipped = load_task("chain")
    task: TaskConfig = replace(shipped, options={"length": args.length, "digits": args.digits})
    validation = generate(task)["val"]
    held_out = {problem.question for problem in validation}

    longest = args.length + 256  # the job's prompts have at most 192 tokens (configs/data/chain.yaml)
    tokenizer = load_tokenizer(longest)
    model = make_model(tokenizer, SIZES[args.size], longest, args.seed).to(args.device)
    parts = [validation[start : start + args.batch] for start in range(0, len(validation), args.batch)]
    encoder = Encoder(tokenizer)
    probe = [tuple(tensor.to(args.device) for tensor in encoder.batch(part)) for part in parts]
    stream = (p for p in problem_stream(task, f"warm-up/{args.seed}") if p.question not in held_out)
    reached = warm_up(model, encoder, stream, probe, args)

    model = model.to(torch.bfloat16)
    greedy, sampled = accuracies(model, probe)
    if sampled > HIGHEST_START:
        raise SystemExit(f"sampled accuracy {sampled:.3f} is above {HIGHEST_START}; lower --target or --lr")
    decoded = decoded_accuracy(model, tokenizer, validation[: args.decode], args.length) if args.decode else None
    save(model, tokenizer, args.out)
    reached |= {"seed": args.seed, "size": args.size, "parameters": model.num_parameters(), "length": args.length}
    reached |= {
        "greedy": greedy,
        "sampled": sampled,
        "greedy_decoded": decoded,
        "all_seconds": time.monotonic() - began,
    }
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in reached.items()}))
    return reached


if __name__ == "__main__":
    main()
