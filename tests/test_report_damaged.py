"""`python -m jetrl.report` on runs that left little or nonsense: the others are reported, and what it can say it says."""

import re
import shutil
from pathlib import Path

import pytest
from report_for_tests import metrics, write_metrics, write_run

from jetrl import assets
from jetrl.report import main
from jetrl.reporting import graph_verdict
from jetrl.reporting.runs import load_runs

DAMAGE = {
    "empty": {"metrics.jsonl": ""},
    "not_metrics": {"metrics.jsonl": "not json\n"},
    "not_yaml": {"config.yaml": "a: ["},
    "other": {"config.yaml": "lr: 1\n"},
    "number": {"config.yaml": "actor_rollout_ref: 3\n"},
    "a_part": {"config.yaml": "actor_rollout_ref: {actor: {}, rollout: {}}\n"},
}
SAID = {
    "empty": "metrics.jsonl has no metrics in it",
    "not_metrics": "metrics.jsonl has a line that is not a metrics record",
    "not_yaml": "config.yaml is not a readable configuration",
    "other": "config.yaml is not a job's configuration (no actor_rollout_ref in it)",
    "number": "config.yaml is not a job's configuration (actor_rollout_ref.actor is no group of keys)",
    "a_part": "config.yaml is not a job's configuration (actor_rollout_ref.model is no group of keys)",
}


def damaged(root, name):
    (root / name).mkdir(parents=True)
    for file, text in DAMAGE[name].items():
        (root / name / file).write_text(text)
    return root / name


@pytest.mark.parametrize("name", DAMAGE)
def test_one_damaged_run_in_a_folder_is_listed_and_the_others_are_reported(tmp_path, capsys, name):
    write_run(tmp_path, "bf16", name="good")
    damaged(tmp_path, name)
    assert main([str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()
    row = re.search(rf"<tr><td data-label='run'><span class=any>{name}</span>.*?</tr>", html)
    said = SAID[name].replace("'", "&#x27;")
    assert f"left out: {said}" in row[0] and str(tmp_path) not in re.search(r"left out: [^<]*", row[0])[0]
    assert "1 run<" in html and "finished, 12 steps" in html
    assert f"left out {name}: {SAID[name]}" in capsys.readouterr().out


@pytest.mark.parametrize("name", DAMAGE)
def test_alone_or_named_itself_it_is_an_error(tmp_path, capsys, name):
    good, folder = write_run(tmp_path, "bf16", name="good"), damaged(tmp_path / "alone", name)
    for words in ([folder], [tmp_path / "alone"], [good, folder]):
        assert main([*map(str, words), "--out", str(tmp_path / "r.html")]) == 2
        error = capsys.readouterr().err
        assert SAID[name] in error and error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_a_folder_of_nothing_but_damaged_runs_is_an_error(tmp_path, capsys):
    damaged(tmp_path, "empty"), damaged(tmp_path, "other")
    assert main([str(tmp_path)]) == 2
    assert SAID["empty"] in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"trainer__total_training_steps": "abc"},
        {"trainer__total_training_steps": None, "data__train_batch_size": "many", "task__train_size": 3.5},
    ],
)
def test_a_number_of_steps_that_is_no_number_is_not_recorded(tmp_path, change):
    folder = write_run(tmp_path, "bf16", **change)
    (run,) = load_runs([str(folder)])[0]
    assert run.total_steps is None and run.state == "12 steps; how many were planned is not recorded"
    assert main([str(folder)]) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"actor_rollout_ref__actor": {"strategy": "fsdp2"}},
        {"actor_rollout_ref__rollout": {}},
        {"data__train_batch_size": "many"},
        {"trainer": 3},
    ],
)
def test_a_configuration_with_parts_missing_has_no_verdict_and_says_why(tmp_path, change):
    folder = write_run(tmp_path, "unified_fp8", **change)
    (run,) = load_runs([str(folder)])[0]
    verdict = graph_verdict.verdict_of(run)
    assert verdict.state == graph_verdict.UNKNOWN and verdict.sentence
    assert main([str(folder)]) == 0


def test_a_run_kept_without_its_model_takes_no_verdict_from_one_kept_with_it(tmp_path):
    folders = [write_run(tmp_path, "unified_fp8", name=n, actor_rollout_ref__model__path="/gone/m") for n in "ab"]
    (folders[1] / graph_verdict.MODEL).mkdir()
    shutil.copy(Path(assets.__path__[0]) / "tiny" / "config.json", folders[1] / graph_verdict.MODEL)
    found = graph_verdict.verdicts(load_runs([str(tmp_path)])[0])
    assert (found["a"].state, found["b"].state) == (graph_verdict.UNKNOWN, graph_verdict.UNIFIED), found


MASTERS = {
    "FP32 (torch.optim.AdamW)": ("fp32", "torch.optim", "AdamW", {}),
    "BF16, rounded stochastically (jetrl.optimizer.StochasticAdamW)": (
        "bf16", "jetrl.optimizer", "StochasticAdamW", None
    ),
    "BF16, rounded to nearest: small updates are lost (jetrl.optimizer.StochasticAdamW)": (
        "bf16", "jetrl.optimizer", "StochasticAdamW", {"bf16_stochastic_round": False}
    ),
    "BF16, rounded stochastically (torchao.optim._AdamW)": (
        "bfloat16", "torchao.optim", "_AdamW", {"bf16_stochastic_round": True}
    ),
    "BF16, rounded to nearest: small updates are lost (torch.optim.AdamW)": ("bf16", "torch.optim", "AdamW", None),
}  # fmt: skip


def test_the_report_says_which_masters_each_flow_has(tmp_path):
    actor = "actor_rollout_ref__actor__"
    for number, (dtype, module, optimizer, options) in enumerate(MASTERS.values()):
        changes = {f"{actor}fsdp_config__model_dtype": dtype, f"{actor}optim__override_optimizer_config": options}
        changes |= {f"{actor}optim__optimizer_impl": module, f"{actor}optim__optimizer": optimizer}
        write_run(tmp_path, "bf16", name=f"r{number}", **changes)
    write_metrics(tmp_path / "plain.jsonl", metrics("bf16", 0))
    assert main([str(tmp_path)]) == 0
    cells = re.findall(r"data-label='master weights'><span>([^<]*)<", (tmp_path / "report.html").read_text())
    assert sorted(cells) == sorted([*MASTERS, "not recorded"])
