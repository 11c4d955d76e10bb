"""Input that was once answered with a traceback, or silently taken for something else."""

import io
import json
import sys
from pathlib import Path

import pytest
from launch_for_tests import model_folder, words

from jetrl import check, train
from jetrl.command import run_command
from jetrl.data import check_columns
from jetrl.errors import UserError
from jetrl.launch.args import parse
from jetrl.launch.model_files import check_sizes, read_config
from jetrl.launch.sweep import expand
from jetrl.precision.flow import flow_from_dict, load_flow

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def one_sentence(capsys, *parts):
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jetrl: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("+precison=bf16", ["did you mean precision=bf16?"]),
        ("trainer.resume_mode=disable", ["give resume=auto"]),
        ("trainer.default_local_dir=/x", ["run.dir=<folder>"]),
        ("+actor_rollout_ref.model.override_config.jetrl_flow=bf16", ["precision=<name>"]),
    ],
)
def test_a_key_that_would_be_ignored_is_refused(capsys, word, parts):
    assert train.main([word]) == 2
    one_sentence(capsys, *parts)


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref=null",
        "run=5",
        "flow=null",
        "ray_kwargs.ray_init=null",
        f"{VLLM}=5",
        "reward=null",
        "run.dir=5",
        "run.dir=",
        "trainer.logger=5",
        "flow.train.exclude=nope",
        "flow.unified=maybe",
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence(tmp_path, capsys, word):
    given = words(tmp_path)
    assert (
        train.main(["--cfg", "job", *[w for w in given if not word.startswith("run.dir") or "run.dir" not in w], word])
        == 2
    )
    one_sentence(capsys, word.partition("=")[0])


@pytest.mark.parametrize("word", ["task.train_size=8", "trainer.n_gpus_per_node=2"])
def test_a_job_that_could_not_go_on_is_refused_at_once(tmp_path, capsys, word):
    assert train.main(["--dry-run", *words(tmp_path, word)]) == 2
    one_sentence(capsys)


def test_a_flow_broken_on_purpose_is_the_checks_verdict_with_its_exit_code(tmp_path, capsys):
    """One layer is excluded in training only, which takes two keys: the rollout follows the trainer by default."""
    broken = ["flow.train.exclude=[model.layers.1.mlp.gate_proj,model.layers.1.mlp.up_proj]", "flow.rollout.exclude=[]"]
    assert train.main(words(tmp_path, *broken)) == 1
    one_sentence(
        capsys, "flow unified_fp8 claims to be unified", "model.layers.1.mlp.up_proj", "flow.rollout.exclude: set it"
    )
    assert not (tmp_path / "run").exists()


def test_only_a_whole_checkpoint_may_be_resumed_by_path(tmp_path, capsys):
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    assert train.main(["--dry-run", *words(tmp_path, f"resume={folder}")]) == 2
    one_sentence(capsys, "it was never finished", "resume=auto")


def test_a_flow_names_the_side_of_a_bad_key():
    flow = load_flow("unified_fp8").to_dict()
    with pytest.raises(UserError, match=r"^flow\.rollout\.exclude=5 must be a list"):
        flow_from_dict({**flow, "rollout": {"exclude": 5}})
    with pytest.raises(UserError, match="flow.unified=None"):
        flow_from_dict({"name": "x"})


@pytest.mark.parametrize("text", ["[1, 2]", "[{}, 1]", "\xff"])
def test_a_data_file_of_anything_but_objects(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_bytes(text.encode("latin-1") if text == "\xff" else text.encode())
    with pytest.raises(UserError, match="a.json"):
        check_columns(file)


def test_a_config_json_that_is_a_list_or_has_no_sizes(tmp_path):
    folder = model_folder(tmp_path)
    good = json.loads((folder / "config.json").read_text())
    check_sizes(good)
    for wrong in ({"hidden_size": "a"}, {"num_hidden_layers": 0}, {"head_dim": True}, {"vocab_size": None}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            check_sizes({**good, **wrong})
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="no JSON object"):
        read_config(str(folder))


def test_a_sweep_takes_quoted_and_plus_spelled_names(tmp_path):
    jobs = expand(
        parse(["-m", *words(tmp_path, f"+run.dir='{tmp_path}/a b'", "++run.name=r", "trainer.test_freq=1,2")])
    )
    assert [job.folder for job in jobs] == [Path(f"{tmp_path}/a b/r-test_freq={n}") for n in (1, 2)]
    with pytest.raises(UserError, match="a sweep has one run.dir"):
        expand(parse(["-m", "run.dir=a,b"]))


@pytest.mark.parametrize(
    "argv", [["--svg"], ["verl", "data=null"], ["verl", "trainer=5"], ["verl", "model_engine=megatron"]]
)
def test_check_answers_in_one_sentence(capsys, argv):
    assert check.main(argv) == 2
    one_sentence(capsys)


def test_what_the_terminal_cannot_write_is_written_in_escapes(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run_command(lambda: print("ü") or 0) == 0
    assert raw.getvalue() == b"\\xfc\n"
