"""`python -m jetrl.export`: what transformers and vLLM load, and the same FP8 values as the rollout's."""

import json
import shutil

import pytest
import torch
from checkpoints_for_tests import build_model
from jetrl_kernels.constants import TILE
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from jetrl import export as command
from jetrl.linear import quantize_weight


@pytest.fixture
def hf_folder(tmp_path):
    """A Qwen3-shaped model with FP32 weights, as VeRL's override_config leaves its config.json."""
    model = build_model("qwen3")
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(jetrl_flow="unified_fp8_pow2", jetrl_wire="fp8")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(*words) -> int:
    return command.main([str(word) for word in words])


def test_bf16_is_a_hugging_face_model_without_jetrls_keys(hf_folder, tmp_path, capsys):
    assert run(hf_folder, "--format", "bf16", "--output", tmp_path / "out") == 0
    original = AutoModelForCausalLM.from_pretrained(hf_folder)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for (name, ours), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name
    assert "jetrl" not in (tmp_path / "out" / "config.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".out-*"))


def test_fp8_holds_the_codes_and_scales_that_the_rollout_would_make(hf_folder, tmp_path):
    assert run(hf_folder, "--format", "fp8", "--output", tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == ["lm_head"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    source = AutoModelForCausalLM.from_pretrained(hf_folder)
    linears = {n: m for n, m in source.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    for name, module in linears.items():
        weight = module.weight.bfloat16()
        rows, columns = weight.shape
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
        assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape
        assert scale.dtype == torch.float32 and scale.shape == (-(-rows // TILE), -(-columns // TILE))
        # The flow the checkpoint names, unified_fp8_pow2.
        wanted = quantize_weight(weight, "pow2")
        assert torch.equal(dequantized(codes, scale), dequantized(wanted.codes, wanted.scale)[:rows, :columns])
    assert sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) == len(linears)


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    whole = scale.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return codes.float() * whole[: codes.shape[0], : codes.shape[1]]


def test_the_flow_can_be_named(hf_folder, tmp_path):
    assert run(hf_folder, "--format", "fp8", "--output", tmp_path / "a", "--precision", "unified_fp8") == 0
    scale = next(
        t for n, t in load_file(tmp_path / "a" / "model.safetensors").items() if n.endswith("weight_scale_inv")
    )
    assert not torch.equal(scale, torch.exp2(torch.log2(scale).round()))  # not powers of two


def verl_checkpoint(folder, hf_folder):
    """`global_step_1` as VeRL's FSDP2 checkpoint manager leaves it on two ranks, without a process group."""
    from torch.distributed._tensor import DeviceMesh, Shard

    actor = folder / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    shutil.copytree(hf_folder, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    state = AutoModelForCausalLM.from_pretrained(hf_folder).state_dict()
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",), _init_backend=False, _rank=0)
    for rank in range(2):
        shards = {
            name: DTensor.from_local(
                tensor.chunk(2)[rank].clone(),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            for name, tensor in state.items()
        }
        torch.save(shards, actor / f"model_world_size_2_rank_{rank}.pt")
    return folder / "global_step_1"


def test_a_verl_checkpoint_of_two_ranks_gives_the_same_folder(hf_folder, tmp_path):
    checkpoint = verl_checkpoint(tmp_path, hf_folder)
    for form in ("bf16", "fp8"):
        assert run(checkpoint, "--format", form, "--output", tmp_path / f"c-{form}") == 0
        assert run(hf_folder, "--format", form, "--output", tmp_path / f"h-{form}") == 0
        ours, theirs = (load_file(tmp_path / f"{x}-{form}" / "model.safetensors") for x in "ch")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k].view(torch.uint8), theirs[k].view(torch.uint8)) for k in ours)


def test_shards_and_their_index(hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("jetrl.exporting.write.SHARD_BYTES", 300_000)
    assert run(hf_folder, "--format", "bf16", "--output", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model, original = (AutoModelForCausalLM.from_pretrained(f) for f in (tmp_path / "out", hf_folder))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(model.parameters(), original.parameters(), strict=True))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["nowhere", "--format", "bf16", "--output", "o"], ["nowhere is not a folder", "global_step_N"]),
        (["{tmp}", "--format", "bf16", "--output", "o"], ["neither fsdp_config.json", "config.json"]),
        (["{hf}", "--format", "int4", "--output", "o"], ["int4", "bf16"]),
        (["{hf}", "--format", "bf16", "--output", "{hf}"], ["exists and is not an empty folder"]),
        (["{hf}", "--format", "fp8", "--output", "o", "--precision", "fp4"], ["precision=fp4", "allowed"]),
        (["{hf}", "--format", "fp8", "--output", "o", "--precision", "bf16"], ["bf16 rollout", "--format fp8"]),
        (["{hf}", "--format", "bf16"], ["--output"]),
    ],
)
def test_a_mistake_is_one_sentence(hf_folder, tmp_path, monkeypatch, capsys, words, parts):
    monkeypatch.chdir(tmp_path)
    assert run(*[w.format(tmp=tmp_path, hf=hf_folder) for w in words]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts) and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_model_whose_stacked_matrices_are_no_multiple_of_128_is_refused_for_fp8(hf_folder, tmp_path, capsys):
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1, "head_dim": 32}))
    assert run(hf_folder, "--format", "fp8", "--output", tmp_path / "o") == 2
    assert "no multiple of 128" in capsys.readouterr().err


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_refused(hf_folder, tmp_path, capsys):
    """Exporting what is there would be a model with some layers missing."""
    weights = load_file(hf_folder / "model.safetensors")
    index = {"weight_map": {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}}
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (hf_folder / "model.safetensors").rename(hf_folder / "part-0.safetensors")
    assert run(hf_folder, "--format", "bf16", "--output", tmp_path / "out") == 2
    assert "lacks part-1.safetensors (1 of 2 weight files missing)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_flow_without_effect_and_an_unknown_model_type_are_refused(hf_folder, tmp_path, capsys):
    assert run(hf_folder, "--format", "bf16", "--precision", "bf16", "--output", tmp_path / "out") == 2
    assert "leave it out with bf16" in capsys.readouterr().err
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {"model_type": "nosuch"}))
    assert run(hf_folder, "--format", "fp8", "--output", tmp_path / "out") == 2
    assert "model_type=nosuch" in capsys.readouterr().err
