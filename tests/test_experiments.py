"""configs/experiment composes with every flow, and scripts/run_experiments.py plans, keeps and skips what it should."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_for_tests import composed, words
from omegaconf import OmegaConf

from jetrl.errors import UserError
from jetrl.launch import sweep
from jetrl.launch.args import options, parse
from jetrl.launch.compose import compose_job
from jetrl.reporting.graph_verdict import verdict_of
from jetrl.reporting.groups import is_seed
from jetrl.reporting.runs import load_runs

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_experiments.py"
spec = importlib.util.spec_from_file_location("run_experiments", SCRIPT)
script = importlib.util.module_from_spec(spec)
sys.modules["run_experiments"] = script  # dataclasses look their module up
spec.loader.exec_module(script)


# Composing takes a second: every flow once, every experiment once.
CASES = [*(("chain_short", flow) for flow in script.FLOWS), ("chain_long", "bf16"), ("smollm2_gsm", "unified_fp8_tis")]


def test_the_cases_leave_no_experiment_out():
    assert {experiment for experiment, _ in CASES} == set(options("experiment"))


@pytest.mark.parametrize(("experiment", "flow"), CASES)
def test_flows_and_experiments_compose(tmp_path, experiment, flow):
    cfg = composed(tmp_path, f"experiment={experiment}", *script.FLOWS[flow], "data.seed=5")
    assert cfg.flow.name == flow.removesuffix("_tis")
    assert cfg.algorithm.rollout_correction.rollout_is == ("token" if flow.endswith("_tis") else None)
    assert cfg.actor_rollout_ref.rollout.seed == cfg.actor_rollout_ref.actor.data_loader_seed == 5
    assert cfg.data.max_response_length == {"chain_short": 64, "chain_long": 512, "smollm2_gsm": 1024}[experiment]
    assert cfg.task.seed == 0  # the seeds of a comparison share their questions


def test_the_length_is_one_dial(tmp_path):
    cfg = composed(tmp_path, "experiment=chain_long", "task.length=4096")
    assert cfg.data.max_response_length == 4096
    assert cfg.actor_rollout_ref.rollout.max_model_len == 4096 + cfg.data.max_prompt_length


@pytest.mark.parametrize("experiment", ["chain_short", "chain_long"])
def test_a_step_on_chains_moves_the_policy_by_a_small_part_of_its_entropy(tmp_path, experiment):
    """benchmarks/results/chain-rate-2026-11-30.md: runs that learned moved it by up to 0.025 in their first step, one that
    got worse first by 0.053, the next by 0.15. The 20m model: 0.63 at a rate of 1e-4 with four updates a step, the mean of eight
    runs; the divergence grows with the square of the rate."""
    cfg = composed(tmp_path, f"experiment={experiment}")
    actor = cfg.actor_rollout_ref.actor
    assert cfg.data.train_batch_size / actor.ppo_mini_batch_size <= 4  # what the 0.63 was measured with
    assert 0.63 * (actor.optim.lr / 1e-4) ** 2 < 0.04


@pytest.mark.parametrize(
    ("experiment", "script_name"), [("chain_long", "warm_up_model.py"), ("smollm2_gsm", "convert_smollm2.py")]
)
def test_on_a_fresh_checkout_an_experiment_names_the_script_that_makes_its_model(
    tmp_path, monkeypatch, experiment, script_name
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"is not made yet; run `python scripts/{script_name} .*--out models/"):
        compose_job(parse([f"experiment={experiment}", "hardware=cpu"]))


def test_an_experiments_name_stands_for_what_it_chooses(tmp_path):
    line = words(tmp_path, "experiment=chain_long", "algorithm=grpo,grpo_tis", "precision=bf16", "data.seed=0,1")
    names = [job.cfg.run.name for job in sweep.expand(parse(["-m", *line]))]
    assert names[0] == "chain_long-grpo-bf16-seed=0" and names[3] == "chain_long-grpo_tis-bf16-seed=1"


def test_runs_are_planned_seed_by_seed_and_differ_in_flow_and_seed_only(tmp_path):
    runs = script.planned("chain_short", ["bf16", "unified_fp8_tis"], [0, 1], ["task.length=128"], tmp_path)
    assert [run.name.partition("-")[2] for run in runs] == [
        "bf16-seed0", "unified_fp8_tis-seed0", "bf16-seed1", "unified_fp8_tis-seed1",
    ]  # fmt: skip
    assert runs[1].words[1:4] == ("precision=unified_fp8", "algorithm=grpo_tis", "data.seed=0")
    assert is_seed("data.seed") and all("task.length=128" in run.words for run in runs)


def finished_run(tmp_path: Path, steps: int = 3) -> tuple[script.Run, Path]:
    """A run folder as jetrl.train leaves it, with a process that has ended."""
    root = tmp_path / "runs"
    folder = root / "demo"
    folder.mkdir(parents=True)
    rows = [
        {"step": s, "data": {"timing_s/step": 1.23456789, "mismatch/k3_kl": 1e-4, "critic/advantages/max": 3.0}}
        for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"actor_rollout_ref: {{actor: {{}}, rollout: {{}}, model: {{}}}}\ntrainer: {{total_training_steps: 3}}\nrun: {{dir: '{Path.cwd()}/runs/demo'}}\n"
    )
    (folder / "starts.jsonl").write_text('{"command": "python -m jetrl.train"}\n')
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return script.Run("demo", ("experiment=chain_short",), process, "/tmp/jxabc"), root


def test_what_is_kept_is_small_has_no_local_path_and_opens_in_the_report(tmp_path):
    run, root = finished_run(tmp_path)
    kept = tmp_path / "kept"
    record = script.keep(run, root, kept, side_by_side=4)
    assert (record["exit"], record["steps"], record["side_by_side"]) == (0, 3, 4)
    row = json.loads((kept / "demo" / "metrics.jsonl").read_text().splitlines()[0])
    assert row == {"step": 1, "data": {"timing_s/step": 1.23457, "mismatch/k3_kl": 1e-4}}
    assert str(Path.cwd()) not in (kept / "demo" / "config.yaml").read_text()
    assert script.is_finished(kept / "demo")
    assert load_runs([str(kept)])[0][0].last_step == 3
    assert record["k3_kl_by_step"] == {1: 1e-4, 2: 1e-4, 3: 1e-4}
    script.keep(run, root, kept, side_by_side=4)
    assert len((kept / "demo" / "records.jsonl").read_text().splitlines()) == 2  # a second start adds a line


def test_other_words_make_another_run_and_the_same_words_find_theirs(tmp_path):
    run, root = finished_run(tmp_path)
    kept = tmp_path / "kept"
    script.keep(run, root, kept, side_by_side=1)
    assert script.free_name("demo", run.words, kept) == "demo"
    assert script.is_finished(kept / "demo")  # so this one is skipped, and the next is not
    longer = (*run.words, "task.length=128")
    assert script.free_name("demo", longer, kept) == "demo-2"
    script.keep(script.Run("demo-2", longer, run.process, "/tmp/jxabc"), root, kept, side_by_side=1)
    assert script.free_name("demo", longer, kept) == "demo-2"
    assert script.free_name("demo", ("other",), kept) == "demo-3"


def test_a_kept_record_has_no_path_and_no_credential(tmp_path):
    run, root = finished_run(tmp_path)
    folder = root / "demo"
    (folder / "config.yaml").write_text(
        "trainer: {total_training_steps: 3, tracker_api_key: abc123}\n"
        "ray_kwargs: {env_vars: {HF_TOKEN: abc123, NCCL_DEBUG: WARN}}\n"
        "actor_rollout_ref: {actor: {ppo_max_token_len_per_gpu: 64}, model: {path: /somewhere/else/m}}\n"
    )
    (folder / "starts.jsonl").write_text(
        json.dumps({"command": f"python -m jetrl.train run.dir={root}/demo x.password=abc123 y=/somewhere/else/z"})
    )
    (folder / "failure.json").write_text('{"type": "OSError", "message": "no file in /somewhere/else/m."}')
    words = ("experiment=chain_short", f"model={Path.cwd()}/models/m", "+x.secret=abc123", "y=/somewhere/else/z")
    script.keep(script.Run("demo", words, run.process, "/tmp/jxabc"), root, tmp_path / "kept", side_by_side=1)
    texts = {file.name: file.read_text() for file in (tmp_path / "kept" / "demo").iterdir()}
    for name, text in texts.items():
        assert not any(bad in text for bad in ("abc123", "/somewhere", str(tmp_path), str(Path.cwd()))), name
    assert json.loads(texts["words.json"]) == ["experiment=chain_short", "model=models/m", "y=.../z"]
    assert "run.dir=runs/demo" in texts["starts.jsonl"] and "NCCL_DEBUG" in texts["config.yaml"]
    assert "ppo_max_token_len_per_gpu: 64" in texts["config.yaml"]


def test_a_kept_run_is_checked_where_its_model_is_not(tmp_path):
    """The record holds the model's config.json; the path in its configuration leads nowhere on this machine."""
    cfg = composed(tmp_path, "experiment=chain_short", "precision=unified_fp8", "trainer.total_training_steps=3")
    run, root = finished_run(tmp_path)
    (root / "demo" / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    script.keep(run, root, tmp_path / "kept", side_by_side=1)
    (tmp_path / "model" / "config.json").unlink()
    verdict = verdict_of(load_runs([str(tmp_path / "kept")])[0][0])
    assert verdict.state == "unified", verdict.sentence


def test_a_partial_run_is_not_skipped(tmp_path):
    run, root = finished_run(tmp_path, steps=2)
    script.keep(run, root, tmp_path / "kept", side_by_side=1)
    assert not script.is_finished(tmp_path / "kept" / "demo")
    assert not script.is_finished(tmp_path / "kept" / "never started")


def test_the_time_limit_stops_what_runs_and_keeps_it(tmp_path, monkeypatch):
    """Two runs that would sleep for a minute, one at a time, one second allowed: the first is stopped, neither hangs."""

    def start(run, root, log):
        run.temporary, run.began = str(tmp_path / "ray"), 0.0
        run.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(script, "start", start)
    monkeypatch.setattr(script, "STAGGER_SECONDS", 0.0)
    args = argparse.Namespace(side_by_side=1, seconds=0.5, out=tmp_path / "runs", keep=tmp_path / "kept")
    records = script.run_all(script.planned("chain_short", ["bf16"], [0, 1], [], args.keep), args)
    assert [record["exit"] for record in records] == [-15]
    assert records[0]["steps"] == 0


def test_an_unknown_flow_is_named_with_those_that_exist(capsys):
    with pytest.raises(SystemExit):
        script.parse(["chain_short", "--flows", "bf16,fp4"])
    assert "--flows fp4 is unknown; allowed: bf16, fp8_rollout" in capsys.readouterr().err


def test_an_unknown_experiment_starts_nothing_and_is_named_with_those_that_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "start", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(SystemExit) as ended:
        script.main(["chain_shrot", "--out", str(tmp_path / "runs")])
    said = "experiment chain_shrot is unknown (did you mean chain_short?); allowed: chain_long, chain_short"
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_words_after_the_dashes_go_to_every_run():
    args = script.parse(
        ["chain_long", "--flows", "all", "--seeds", "3,1", "--side-by-side", "2", "--", "task.length=64", "a=b"]
    )
    assert (args.experiment, args.flows, args.seeds) == ("chain_long", list(script.FLOWS), [3, 1])
    assert (args.side_by_side, args.overrides) == (2, ["task.length=64", "a=b"])
    assert args.keep == Path("runs/kept/chain_long")


def test_the_warm_up_does_not_delete_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("kept")
    command = [
        sys.executable,
        str(SCRIPT.with_name("warm_up_model.py")),
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "is no model folder" in ended.stderr and "Traceback" not in ended.stderr
    assert (tmp_path / "notes.txt").read_text() == "kept"
