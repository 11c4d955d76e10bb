"""The command line: flags, group choices in every spelling, overrides; one sentence for the rest."""

import pytest

from jetrl import train
from jetrl.errors import UserError
from jetrl.launch.args import GROUPS, check_choices, options, parse
from jetrl.precision.flow import flow_names


@pytest.mark.parametrize("word", ["precision=bf16", "+precision=bf16", "precision@_global_=bf16", "++precision=bf16"])
def test_a_group_is_chosen_in_every_spelling(word):
    assert parse([word]).hydra_overrides() == ["precision@_global_=bf16"]


def test_the_last_choice_of_a_group_counts():
    assert parse(["precision=bf16", "+precision=fp8_rollout"]).choices == {"precision": "fp8_rollout"}


def test_verl_overrides_pass_through_in_order():
    given = ["actor_rollout_ref.rollout.n=4", "+a.b=c", "++d=1", "~e", "data.train_batch_size=2", "model_engine=dp"]
    line = parse(given)
    assert list(line.overrides) == given and line.choices == {}


def test_a_flow_key_that_the_yaml_leaves_out_needs_no_plus():
    assert parse(["flow.rollout.exclude=[a]"]).overrides == ("++flow.rollout.exclude=[a]",)


def test_flags():
    line = parse(["-m", "--dry-run", "--cfg", "job"])
    assert (line.multirun, line.dry_run, line.show_config) == (True, True, True)
    assert parse(["--cfg=job"]).show_config


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--config-name=x"], "--config-name=x is not a flag"),
        (["--cfg", "hydra"], "allowed: --cfg job"),
        (["-x"], "-x is not a flag"),
        (["unified_fp8"], "write key=value"),
        (["hydra.run.dir=x"], "run.dir=<folder>"),
        (["~precision"], "allowed: auto, bf16"),
        (["precision="], "allowed: auto, bf16"),
    ],
)
def test_what_is_no_argument_is_refused_in_one_sentence(argv, part, capsys):
    assert train.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err and err.startswith("jetrl: ") and err.count("\n") == 1


def test_only_jetrls_options_are_listed():
    # VeRL has files hf_model and legacy_data under the same group names.
    with pytest.raises(UserError, match="model=hf_model is unknown") as e:
        check_choices({"model": "hf_model"})
    assert "tiny" in str(e.value) and "hf_model," not in str(e.value)
    with pytest.raises(UserError, match=r"did you mean unified_fp8\?"):
        check_choices({"precision": "unifed_fp8"})
    assert options("precision") == flow_names()


def test_help_lists_every_shipped_option(capsys):
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    for group in GROUPS:
        assert all(name in text for name in options(group))
