"""Weights for a model folder that has only a config.json: seeded, rounded to BF16 once, read by both engines."""

import shutil
import sys
from pathlib import Path

from jetrl.verification.child import run_child

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json")
# Transformers' default of 0.02 gives almost equal logits; this gives log-probs with a spread like a trained model's.
HEAD_SCALE = 4.0


def needed(path: str) -> bool:
    folder = Path(path)
    return folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def main(source: str, folder: str, seed: str) -> None:
    """Write a copy of the folder `source` with weights to `folder`; kept where it is already there for the same seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    target, stamp = Path(folder), f"seed {seed} {(Path(source) / 'config.json').read_text()}"
    if (target / "stamp").is_file() and (target / "stamp").read_text() == stamp:
        return
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(int(seed))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.normal_(mean=1.0, std=0.2)  # a norm's: with ones, a lost rounding would not be seen
        model.get_output_embeddings().weight.mul_(HEAD_SCALE)
    model.save_pretrained(target)
    (target / "stamp").write_text(stamp)


if __name__ == "__main__":
    run_child(lambda: main(*sys.argv[2:5]), sys.argv[1])
