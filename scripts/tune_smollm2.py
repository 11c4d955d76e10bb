"""Teaches SmolLM2-135M-Instruct the form of the task `gsm_symbolic`, until a share of its sampled answers is right.

    python scripts/convert_smollm2.py --out models/smollm2-135m
    python scripts/tune_smollm2.py --model models/smollm2-135m --out models/smollm2-gsm
    python -m jetrl.train +experiment=smollm2_gsm actor_rollout_ref.model.path=models/smollm2-gsm

As published the model solves one problem in a hundred, which leaves reinforcement learning nothing to find. Supervised
steps on the templates' own working, with numbers of their own and never a validation question, take it to --target.
Accuracy is that of sampled answers, by the job's own reward.
"""

import argparse
import gzip
import itertools
import json
import random
import time
import zlib
from pathlib import Path

import torch
from make_tiny_model import prompt_ids, refuse_other_folders, save
from supervised import adamw, autocast, cosine_rate, padded, supervised_step
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from jetrl.data import load_task
from jetrl.data.reward import compute_score
from jetrl.data.sources import Problem, generate, problem_stream

TASK = "gsm_symbolic"
RAMP_STEPS = 20
CHECK_EVERY = 25
# The learning rate falls along a cosine to this share of its height.
LOWEST_RATE = 0.1
# The longest working of the task has some 300 tokens of SmolLM2's.
LONGEST_ANSWER = 320


def problems(seed: int, count: int, file: Path | None) -> tuple[list[Problem], list[Problem]]:
    """(validation, training problems with their working). file: .jsonl.gz to keep them in, read where it exists.

    The file is for machines without reasoning-gym. It may hold fewer than `count`.
    """
    if file is not None and file.is_file():
        validation, training = read(file)
        return validation, training[:count]
    validation = generate(load_task(TASK))["val"]
    held_out = {problem.question for problem in validation}
    stream = (
        p for p in problem_stream(load_task(TASK), f"warm-up/{seed}") if p.solution and p.question not in held_out
    )
    training = list(itertools.islice(stream, count))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")  # moved into place when whole
        with gzip.open(part, "wt") as out:
            for problem in (*validation, None, *training):
                out.write(json.dumps(problem and vars(problem)) + "\n")
        part.replace(file)
    return validation, training


def read(file: Path) -> tuple[list[Problem], list[Problem]]:
    """The two halves of a file that `problems` wrote; a line `null` divides them."""
    try:
        with gzip.open(file, "rt") as lines:
            rows = [json.loads(line) for line in lines]
        middle = rows.index(None)
        validation, training = ([Problem(**row) for row in part] for part in (rows[:middle], rows[middle + 1 :]))
    except (OSError, EOFError, ValueError, TypeError, zlib.error) as e:
        raise SystemExit(f"--examples {file} cannot be read; delete it to have it made anew") from e
    return validation, training


def encode(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> tuple[list[int], list[int]]:
    """(prompt, answer with its end of turn), apart, as the rollout sees them."""
    answer = tokenizer.encode(problem.solution, add_special_tokens=False)
    return prompt_ids(tokenizer, problem.question), [*answer, tokenizer.eos_token_id]


@torch.no_grad()
def sampled_accuracy(model: PreTrainedModel, tokenizer, asked: list[Problem], seed: int) -> float:
    """Share of problems whose answer, sampled once at temperature 1, gets the job's reward."""
    torch.manual_seed(seed)
    rows = [prompt_ids(tokenizer, problem.question) for problem in asked]
    inputs = tokenizer.pad({"input_ids": rows}, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    out = model.generate(
        **inputs, max_new_tokens=LONGEST_ANSWER, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(compute_score(TASK, text, p.answer)["score"] for text, p in zip(texts, asked, strict=True)) / len(asked)


def tune(model: PreTrainedModel, tokenizer, training: list[Problem], asked: list[Problem], args) -> dict:
    """Supervised steps until the sampled accuracy on `asked` reaches args.target or args.steps are done."""
    rows = [encode(tokenizer, problem) for problem in training]
    order = random.Random(args.seed)
    optimizer = adamw(model, args.lr)
    began, accuracy = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = cosine_rate(step, args.lr, RAMP_STEPS, args.steps, LOWEST_RATE)
        batch = padded(order.sample(rows, args.batch), tokenizer.pad_token_id)
        loss = supervised_step(model, optimizer, *batch)
        if step % CHECK_EVERY == 0 or step == args.steps:
            with autocast(model):
                accuracy = sampled_accuracy(model, tokenizer, asked, args.seed)
            seconds = time.monotonic() - began
            print(
                f"step {step:5d}  loss {loss.item():.3f}  sampled accuracy {accuracy:.3f}  {seconds:6.1f} s", flush=True
            )
            if accuracy >= args.target:
                break
    return {"steps": step, "seconds": time.monotonic() - began, "reached": accuracy >= args.target}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="folder to start from")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-gsm"), help="folder to write or replace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.2, help="stop at this accuracy of sampled answers")
    parser.add_argument("--count", type=int, default=12000, help="training problems")
    parser.add_argument(
        "--examples",
        type=Path,
        help="keep the problems in this .jsonl.gz, or read them from it, whatever --seed made them",
    )
    parser.add_argument("--steps", type=int, default=600, help="the most steps")
    parser.add_argument("--batch", type=int, default=32, help="problems a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--check", type=int, default=128, help="validation problems to sample at every check")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    for name in ("count", "steps", "batch", "check"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.count < args.batch:
        parser.error(f"--count {args.count} must be at least --batch {args.batch}")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} is no model folder; scripts/convert_smollm2.py makes one")
    refuse_other_folders(args.out)
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    torch.manual_seed(args.seed)
    validation, training = problems(args.seed, args.count, args.examples)
    if len(training) < args.batch:
        raise SystemExit(
            f"--examples {args.examples} holds {len(training)} training problem(s), fewer than --batch {args.batch}"
        )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
    result = tune(model, tokenizer, training, validation[: args.check], args)
    model = model.to(torch.bfloat16)
    result |= {"seed": args.seed, "sampled": sampled_accuracy(model, tokenizer, validation, args.seed + 1)}
    save(model, tokenizer, args.out)
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}))
    return result


if __name__ == "__main__":
    main()
