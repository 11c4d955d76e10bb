"""Makes the embedded tiny model: a Qwen3 of 1.4 million weights with its tokenizer, warmed up on the arithmetic task.

    python scripts/make_tiny_model.py --out jetrl/assets/tiny --seed 0

The warm-up is supervised and shows two ways to answer "3 + 9 - 5 =": mostly the bare result ("7"), which a model of
this size often gets wrong, and now and then the worked steps ("3+9=12;12-5=7"), which it gets right much more often.
The model comes out using both, so reinforcement learning has something to find: responses grow longer as it learns that
working pays. No default validation question is ever shown. The warm-up stops as soon as most problems have a right
answer among 8 samples (STOP_AT); every figure is measured on the default validation set.
"""

import argparse
import itertools
import json
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

import torch
from supervised import adamw, padded, supervised_step
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from jetrl.data.reward import compute_score
from jetrl.data.sources import Problem, generate, problem_stream
from jetrl.data.task import load_task
from jetrl.small_qwen3 import Size, qwen3_config

# Stop once this share of PROBE validation problems has a right answer among 8 samples, looked at every CHECK_EVERY steps.
# By then single samples are right about a third of the time, and the two ways of answering differ enough to learn from.
STOP_AT = 0.85
PROBE = 128
CHECK_EVERY = 50
# What a start for reinforcement learning must have, greedy and sampled; a model outside is not written.
ALLOWED_START = (0.2, 0.6)
MAX_STEPS = 3000
BATCH = 64
LEARNING_RATE = 2e-3
RAMP_STEPS = 50
WORKED_SHARE = 0.3
MAX_RESPONSE = 32

# A multiple of 128, so that lm_head has whole blocks. VeRL masks logits beyond the tokenizer in the rollout only: the
# model has exactly as many rows as the tokenizer has tokens.
VOCAB_SIZE = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def tokenizer_texts(train: list[Problem], seed: int) -> list[str]:
    """What the tokenizer learns its words from: the task's questions, some word problems, and the chat roles."""
    words = itertools.islice(problem_stream(load_task("gsm_symbolic"), seed), 500)
    return [f"{p.question}\nuser\nassistant\nsystem\n{p.answer}" for p in (*train, *words)]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with VOCAB_SIZE tokens: any text can be written, digits stay single, the task's words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) == VOCAB_SIZE, f"the training texts give only {len(fast)} tokens"
    return fast


TINY_SIZE = Size(256, 512, 2, 4, 2)


def make_model(tokenizer: PreTrainedTokenizerFast, size: Size, longest: int, seed: int) -> Qwen3ForCausalLM:
    """An untrained model with room for `longest` tokens."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen3ForCausalLM(qwen3_config(size, len(tokenizer), longest, **ids))


def worked_answer(question: str) -> str:
    """The sum carried out from left to right, one step at a time: "3+9=12;12-5=7"."""
    terms = re.search(r": (.*) =$", question).group(1).split()
    total, steps = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total}{sign}{term}={result}")
        total = result
    return ";".join(steps)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of the chat prompt, as VeRL's agent loop makes them."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def training_batch(tokenizer, problems: list[Problem], styles: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both [batch, longest] int64, padded on the right; labels are -100 outside the answer.

    styles: decides per problem whether the answer is worked out or bare.
    """
    rows = []
    for problem in problems:
        prompt = prompt_ids(tokenizer, problem.question)
        text = worked_answer(problem.question) if styles.random() < WORKED_SHARE else problem.answer
        answer = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append((prompt, answer))
    return padded(rows, tokenizer.pad_token_id)


@torch.no_grad()
def respond(model, tokenizer, problems: list[Problem], samples: int | None = None) -> list[list[str]]:
    """Responses of each problem: one greedy one, or that many sampled at temperature 1."""
    model.eval()
    rows = [prompt_ids(tokenizer, problem.question) for problem in problems]
    batch = tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": samples} if samples else {}
    out = model.generate(**batch, max_new_tokens=MAX_RESPONSE, **({"do_sample": False} | sampling))
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train()
    size = samples or 1
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def accuracy(model, tokenizer, problems: list[Problem], samples: int | None = None) -> tuple[float, float]:
    """(mean accuracy, share of problems with at least one right response)."""
    groups = respond(model, tokenizer, problems, samples)
    right = [
        [compute_score("arithmetic", text, problem.answer)["score"] for text in group]
        for problem, group in zip(problems, groups, strict=True)
    ]
    mean = sum(map(sum, right)) / sum(map(len, right))
    return mean, sum(max(group) for group in right) / len(right)


def warm_up(model, tokenizer, validation: list[Problem], seed: int) -> dict:
    """Supervised training until STOP_AT; prints one line a check and returns what was reached."""
    held_out = {problem.question for problem in validation}
    stream = (p for p in problem_stream(load_task("arithmetic"), f"warm-up/{seed}") if p.question not in held_out)
    probe = random.Random(seed).sample(validation, PROBE)
    styles = random.Random(seed)
    optimizer = adamw(model, LEARNING_RATE)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RAMP_STEPS))
    start = time.monotonic()
    for step in range(1, MAX_STEPS + 1):
        batch = training_batch(tokenizer, list(itertools.islice(stream, BATCH)), styles)
        loss = supervised_step(model, optimizer, *batch)
        ramp.step()
        if step % CHECK_EVERY == 0:
            sampled, best = accuracy(model, tokenizer, probe, samples=8)
            seconds = time.monotonic() - start
            figures = f"loss {loss.item():.3f}  sampled accuracy {sampled:.3f}  best of 8 {best:.3f}"
            print(f"step {step:5d}  {figures}  {seconds:6.0f} s", flush=True)
            if best >= STOP_AT:
                return {"steps": step, "seconds": seconds}
    raise SystemExit(f"after {MAX_STEPS} steps best of 8 is still below {STOP_AT}; try another --seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; replaced when it exists")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    refuse_other_folders(args.out)
    # The same sums in the same order on any machine; on a busy one two threads are slower than one.
    torch.set_num_threads(1)

    splits = generate(load_task("arithmetic"))
    tokenizer = make_tokenizer(tokenizer_texts(splits["train"], args.seed))
    model = make_model(tokenizer, TINY_SIZE, 2048, args.seed)
    reached = warm_up(model, tokenizer, splits["val"], args.seed)

    model = model.to(torch.bfloat16)
    greedy, _ = accuracy(model, tokenizer, splits["val"])
    torch.manual_seed(args.seed)
    sampled, best_of_8 = accuracy(model, tokenizer, splits["val"], samples=8)
    if not all(ALLOWED_START[0] <= value <= ALLOWED_START[1] for value in (greedy, sampled)):
        raise SystemExit(f"greedy {greedy:.3f}, sampled {sampled:.3f}: outside {ALLOWED_START}; try another --seed")
    reached |= {"seed": args.seed, "greedy": greedy, "sampled": sampled, "best_of_8": best_of_8}
    save(model, tokenizer, args.out)
    print(json.dumps({key: round(value, 3) for key, value in reached.items()}))


def refuse_other_folders(out: Path) -> None:
    """`out` will be replaced: it must be a model folder, empty or not there. Call it before training, not after."""
    if out.exists() and not (out.is_dir() and ((out / "config.json").is_file() or not any(out.iterdir()))):
        raise SystemExit(f"--out {out} exists and is no model folder; it would be deleted, so choose another")


def save(model, tokenizer, out: Path) -> None:
    """Write to a temporary folder beside `out` and move it into place, so `out` is never half a model."""
    refuse_other_folders(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which a package installed for all users must not have
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)


if __name__ == "__main__":
    main()
