"""`python -m jetrl.export`: a trained model as a folder that transformers and vLLM load without jetrl."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jetrl.command import SentenceParser, run_command
from jetrl.errors import UserError

USAGE = """\
python -m jetrl.export CHECKPOINT --format bf16|fp8 --output DIR [--precision FLOW]

CHECKPOINT: a global_step_N folder of a job, or a Hugging Face model folder. bf16: a Hugging Face model. fp8: the same in
vLLM's block-FP8 format, quantized as the flow's rollout quantizes it; `vllm serve DIR` then runs it without jetrl. On
Hopper set VLLM_USE_DEEP_GEMM_E8M0=0 there, or vLLM rounds the scales up to powers of two.
"""
FORMATS = ("bf16", "fp8")


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, or 2 on bad input."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    parser = SentenceParser(prog="python -m jetrl.export", usage=USAGE, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--precision", metavar="FLOW", help="default: the flow of the checkpoint, else unified_fp8")
    options = parser.parse_args(argv)
    if options.format == "bf16" and options.precision is not None:
        raise UserError(f"--precision {options.precision} says what --format fp8 quantizes; leave it out with bf16")
    size = export(options.checkpoint, options.format, options.output, options.precision)
    print(f"{options.output}: {options.format}, {size / 1e9:.3f} GB of weights")
    return 0


def export(checkpoint: Path, form: str, output: Path, precision: str | None = None) -> int:
    """Write the folder `output`, which must not exist or be empty. Returns the bytes of all weights. Raises UserError.

    A fault or Ctrl-C leaves nothing at `output`: the folder gets its name when it is complete.
    """
    from jetrl.exporting.source import open_source
    from jetrl.exporting.write import write_weights
    from jetrl.precision.flow import load_flow

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} exists and is not an empty folder; choose another")
    source = open_source(checkpoint)
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    config["dtype"] = "bfloat16"
    fp8: dict[str, str] = {}
    if form == "fp8":
        from jetrl.exporting.layout import fp8_weights, quantization_config

        fp8, kept = fp8_weights(source.config, load_flow(precision or source.flow))
        config["quantization_config"] = quantization_config(kept)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as name:
        folder = Path(name) / "model"
        folder.mkdir()
        size = write_weights(folder, _exported(source.weights(), fp8, bool(config.get("tie_word_embeddings"))))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in source.files:
            shutil.copy2(file, folder / file.name)
        if output.exists():
            output.rmdir()
        folder.rename(output)
    return size


def _exported(weights: Iterator, fp8: dict[str, str], tied: bool) -> Iterator:
    """(name, tensor): BF16, or codes and scales of the layers in `fp8`. Raises UserError where one of those is missing."""
    import torch

    from jetrl.linear import quantize_weight

    missing = set(fp8)
    for name, tensor in weights:
        layer = name.removesuffix(".weight")
        if tied and layer == "lm_head":
            continue
        if not tensor.is_floating_point():
            raise UserError(f"{name} is {tensor.dtype}, which jetrl cannot export; allowed: floating-point weights")
        value = tensor.to(torch.bfloat16)
        if layer not in fp8 or layer == name:
            yield name, value
            continue
        missing.discard(layer)
        rows, columns = value.shape
        quantized = quantize_weight(value, fp8[layer])
        yield name, quantized.codes[:rows, :columns]
        yield f"{layer}.weight_scale_inv", quantized.scale
    if missing:
        raise UserError(
            f"the checkpoint has no weight of {', '.join(sorted(missing)[:3])}; it does not fit its config.json"
        )


if __name__ == "__main__":
    sys.exit(main())
