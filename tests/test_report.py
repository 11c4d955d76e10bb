"""`python -m jetrl.report`: which runs it finds, what it says of them, what it draws. Configurations are real, curves invented."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_for_tests import (
    STEPS,
    groups_of,
    metrics,
    pictures,
    report,
    write_metrics,
    write_run,
    write_sweep,
)

from jetrl.report import main
from jetrl.reporting import graph_verdict, svg
from jetrl.reporting.groups import baseline_of
from jetrl.reporting.png import standalone
from jetrl.reporting.runs import load_runs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep"), seeds=2)


@pytest.fixture(scope="module")
def page(sweep, tmp_path_factory):
    return report(sweep, out=tmp_path_factory.mktemp("page") / "r.html")


# --- finding and grouping runs ---


def test_runs_that_differ_only_in_seed_names_and_paths_share_a_group(sweep):
    groups = groups_of(sweep)
    assert [(g.label, g.seeds) for g in groups] == [(f, ("0", "1")) for f in ("bf16", "fp8_rollout", "unified_fp8")]


def test_another_learning_rate_or_flow_option_is_another_group_and_its_label_says_so(tmp_path):
    write_run(tmp_path, "unified_fp8", 0)
    write_run(tmp_path, "unified_fp8", 1, name="b", actor_rollout_ref__actor__optim__lr=1e-6)
    write_run(tmp_path, "unified_fp8", 0, name="c", flow__train__scale_format="pow2")
    labels = [g.label for g in groups_of(tmp_path)]
    assert len(labels) == 3
    assert any("lr=1e-06" in label for label in labels) and any("scale_format=pow2" in label for label in labels)


def test_how_often_a_job_saves_and_validates_does_not_separate_runs(tmp_path):
    write_run(tmp_path, "bf16", 0)
    write_run(tmp_path, "bf16", 1, trainer__save_freq=77, trainer__test_freq=3)
    assert len(groups_of(tmp_path)) == 1
    assert "trainer.save_freq" in report(tmp_path, out=tmp_path / "r.html")


def test_labels_are_short_enough_for_a_legend_and_never_the_same(tmp_path):
    for number in range(3):
        model = f"/a/long/way/to/the/weights/of/attempt-{number}/model-with-a-name"
        write_run(tmp_path, "unified_fp8", name=f"r{number}", actor_rollout_ref__model__path=model)
        write_metrics(tmp_path / f"{'plain-' * 9}{number}.jsonl", metrics("bf16", number))
    labels = [g.label for g in groups_of(tmp_path)]
    assert len(set(labels)) == 6
    assert all(svg.fit(f"{label} (3 seeds)", svg.LEGEND_ROOM) == f"{label} (3 seeds)" for label in labels)


def test_a_flow_keeps_its_colour_whichever_flows_stand_beside_it(sweep):
    assert groups_of(sweep / "unified_fp8-seed=0")[0].style == groups_of(sweep)[2].style


def test_the_baseline_must_be_the_same_task_and_lengths(tmp_path):
    write_run(tmp_path, "bf16")
    write_run(tmp_path, "unified_fp8", name="same")
    write_run(tmp_path, "unified_fp8", name="longer", data__max_response_length=4096)
    groups = groups_of(tmp_path)
    found = {g.runs[0].name: baseline_of(g, groups) for g in groups}
    assert found["same"] is groups[0] and found["longer"] is None


def test_a_resumed_run_is_read_over_all_its_starts_and_is_one_run(tmp_path):
    folder = write_run(tmp_path, "bf16")
    steps = metrics("bf16", 0)
    write_metrics(folder / "metrics.1.jsonl", {s: r for s, r in steps.items() if s <= 8})
    write_metrics(folder / "metrics.jsonl", {s: r for s, r in steps.items() if s > 8})
    (run,) = load_runs([str(tmp_path)])[0]
    assert sorted(run.steps) == list(range(STEPS + 1)) and run.finished


def test_runs_of_one_name_in_two_folders_keep_apart(tmp_path):
    for folder in ("monday", "tuesday"):
        write_run(tmp_path / folder, "bf16", name="run")
    runs = load_runs([str(tmp_path / "monday"), str(tmp_path / "tuesday")])[0]
    assert [run.name for run in runs] == ["monday/run", "tuesday/run"]


# --- how a run ended ---


def test_partial_and_crashed_runs_say_where_they_stopped_and_why(tmp_path):
    crashed = write_run(tmp_path, "bf16", 0, done=7)
    (crashed / "failure.json").write_text(json.dumps({"type": "OutOfMemoryError", "message": "out of\nmemory"}))
    write_run(tmp_path, "bf16", 1, done=9)
    never = write_run(tmp_path, "bf16", 2)
    (never / "metrics.jsonl").unlink()
    states = {run.name: (run.state, run.failure) for run in load_runs([str(tmp_path)])[0]}
    assert states == {
        "bf16-seed=0": (f"ended at step 7 of {STEPS}: OutOfMemoryError", "OutOfMemoryError: out of memory"),
        "bf16-seed=1": (f"partial, at step 9 of {STEPS}", None),
        "bf16-seed=2": (f"partial, before the first step (0 of {STEPS})", None),
    }


def test_a_run_that_logged_nothing_gets_a_report_that_says_so(tmp_path):
    folder = write_run(tmp_path, "bf16")
    (folder / "metrics.jsonl").unlink()
    html = report(folder, out=tmp_path / "r.html")
    assert "before the first step" in html and not pictures(html)
    assert html.count("Missing: logged by none of these runs") == 13


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = write_run(tmp_path, "bf16")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text()[:-40])
    assert max(load_runs([str(folder)])[0][0].steps) == STEPS - 1


# --- the precision graph ---


@pytest.mark.parametrize(
    ("flow", "state"), [("unified_fp8", graph_verdict.UNIFIED), ("fp8_rollout", graph_verdict.DECLARED)]
)
def test_the_graph_verdict_is_the_checks_own_on_the_runs_configuration(sweep, flow, state):
    verdict = graph_verdict.verdict_of(load_runs([str(sweep / f"{flow}-seed=0")])[0][0])
    assert verdict.state == state and "edges" in verdict.sentence


def test_a_model_that_is_gone_leaves_the_graph_unchecked_without_asking_the_hub(tmp_path):
    folder = write_run(tmp_path, "unified_fp8", actor_rollout_ref__model__path="/gone/model")
    verdict = graph_verdict.verdict_of(load_runs([str(folder)])[0][0])
    assert verdict.state == graph_verdict.UNKNOWN and "/gone/model" in verdict.sentence


# --- the page ---


def test_the_page_is_one_file_without_scripts_or_anything_from_elsewhere(page):
    assert not any(word in page for word in ("<script", "<link", "<img", "url(", "@import"))
    assert set(re.findall(r"https?://[^'\"<\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert len(pictures(page)) == 13


def test_every_picture_names_its_axes_and_every_curve(page):
    for picture in pictures(page):
        texts = [e.text for e in picture.iter(f"{SVG}text")]
        names = [e.text for e in picture.iter(f"{SVG}text") if e.get("class") == "name"]
        bars = "phase" in picture.get("aria-label")
        assert names == ["seconds per step →"] if bars else names[1:] == ["training step →"] and names[0][0] == "↑"
        assert all(any(t.startswith(flow) for t in texts) for flow in ("bf16", "fp8_rollout", "unified_fp8"))


def test_plain_verl_metrics_get_a_report_that_says_what_is_missing(tmp_path):
    steps = {s: {k: v for k, v in row.items() if "mismatch" not in k} for s, row in metrics("bf16", 0).items()}
    file = write_metrics(tmp_path / "qwen3_gsm8k.jsonl", steps)
    assert main([str(file)]) == 0
    html = (tmp_path / "report.html").read_text()
    assert "qwen3_gsm8k" in html and "flow not recorded" in html and "model, task and flow are not recorded" in html
    assert html.count("Missing: logged by none") == 4  # the four mismatch pictures
    assert "not checked" in html


def test_a_metric_that_one_flow_lacks_is_named_under_the_picture(tmp_path):
    write_run(tmp_path, "bf16")
    folder = write_run(tmp_path, "fp8_rollout")
    steps = metrics("fp8_rollout", 0)
    for row in steps.values():
        row.pop("actor/entropy", None)
    write_metrics(folder / "metrics.jsonl", steps)
    assert "Missing: fp8_rollout did not log it (actor/entropy" in report(tmp_path, out=tmp_path / "r.html")


def test_a_metric_of_some_algorithms_only_is_drawn_where_logged_and_else_not_missed(tmp_path):
    write_run(tmp_path, "bf16")
    folder = write_run(tmp_path, "unified_fp8")
    assert "Lower clip bound" not in report(tmp_path, out=tmp_path / "r.html")
    steps = metrics("unified_fp8", 0)
    for row in steps.values():
        row["actor/clip_low"] = 0.74
    write_metrics(folder / "metrics.jsonl", steps)
    html = report(tmp_path, out=tmp_path / "r.html")
    assert "Lower clip bound" in html and "Missing: bf16 did not log it (actor/clip_low)" in html
    assert "Upper clip bound" not in html


def test_configuration_differences_leave_out_names_and_paths(tmp_path):
    write_run(tmp_path, "bf16", 0)
    write_run(tmp_path, "bf16", 1, name="b", actor_rollout_ref__actor__optim__lr=5e-5)
    html = report(tmp_path, out=tmp_path / "r.html").partition("Configuration differences")[2]
    keys = re.findall(r"data-label='key'><span class=any>([^<]+)", html)
    assert sorted(keys) == ["actor_rollout_ref.actor.optim.lr", "task.seed"]
    assert "5e-05" in html


def test_names_from_outside_are_escaped(tmp_path):
    folder = write_run(tmp_path, "bf16", name="a<b>&'c")
    html = report(folder, out=tmp_path / "r.html")
    assert "a&lt;b&gt;&amp;" in html and "a<b>" not in html


# --- bad input ---


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jsonl").write_text("not json\n")
    (tmp_path / "none.jsonl").write_text("")
    for name, text in {"yaml": "a: [", "other": "lr: 1\n", "number": "actor_rollout_ref: 3\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    write_metrics(tmp_path / "good.jsonl", metrics("bf16", 0))
    cases = {
        (): "required",
        ("nowhere",): "does not exist",
        ("empty",): "neither a run nor a folder of runs",
        ("text.jsonl",): "not a metrics record",
        ("none.jsonl",): "has no metrics in it",
        ("yaml",): "not a readable configuration",
        ("other",): "no actor_rollout_ref",
        ("number",): "actor_rollout_ref.actor is no group of keys",
        ("good.jsonl", "--out", "gone/r.html"): "cannot be written",
        ("good.jsonl", "--pdf"): "--pdf",
    }
    for words, part in cases.items():
        assert main([w if w.startswith("--") else str(tmp_path / w) for w in words]) == 2
        error = capsys.readouterr().err
        assert part in error and error.count("\n") == 1 and error.startswith("jetrl: ")


def test_png_without_a_rasteriser_says_what_to_install(tmp_path, capsys, monkeypatch):
    from importlib.util import find_spec

    if find_spec("cairosvg") is not None:
        pytest.skip("cairosvg is installed here, so there is a rasteriser")
    monkeypatch.setenv("PATH", str(tmp_path))
    file = write_metrics(tmp_path / "run.jsonl", metrics("bf16", 0))
    assert main([str(file), "--png"]) == 2
    assert "apt-get install librsvg2-bin" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(shutil.which("rsvg-convert") is None, reason="needs rsvg-convert (apt-get install librsvg2-bin)")
def test_png_writes_every_picture(tmp_path):
    file = write_metrics(tmp_path / "run.jsonl", metrics("bf16", 0))
    assert main([str(file), "--png"]) == 0
    files = sorted((tmp_path / "report_png").iterdir())
    assert len(files) == 13 and all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_a_picture_alone_is_whole_xml_with_its_colours():
    chart = standalone(svg.line_chart("t", "x", "y", [svg.Curve("<a>", 0, [1, 2], [1.0, 2.0])]))
    assert ElementTree.fromstring(chart).find(f"{SVG}style").text.count("#0b57d0") >= 2


# --- drawing: properties over arbitrary numbers ---

NUMBERS = st.one_of(st.floats(-1e6, 1e6), st.floats(0, 1), st.floats(1e-12, 1e-3), st.sampled_from([0.0, 1.0, 1e-300]))
CURVES = st.lists(st.lists(NUMBERS, min_size=1, max_size=12), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=CURVES, log=st.booleans(), first=st.integers(0, 2000), stride=st.integers(1, 70))
def test_everything_drawn_lies_inside_the_picture_and_labels_do_not_overlap(rows, log, first, stride):
    curves = [
        svg.Curve(f"flow {i} {'x' * 9 * i}", i, [first + stride * k for k in range(len(row))], row)
        for i, row in enumerate(rows)
    ]
    picture = ElementTree.fromstring(svg.line_chart("Title", "training step", "nats", curves, log))
    width, height = map(float, picture.get("viewBox").split()[2:])
    boxes = []
    for text in picture.iter(f"{SVG}text"):
        size = svg.FONT + 2 if text.get("class") == "title" else svg.FONT
        length = svg.text_width(text.text, size)
        x = float(text.get("x")) - length * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        y = float(text.get("y"))
        boxes.append((x, y - 0.75 * size, x + length, y + 0.2 * size, text.text))
        assert -0.5 <= x and x + length <= width + 0.5 and 0 <= y <= height
    for i, (x0, y0, x1, y1, name) in enumerate(boxes):
        for a0, b0, a1, b1, other in boxes[i + 1 :]:
            assert x1 <= a0 or a1 <= x0 or y1 <= b0 or b1 <= y0, f"{name!r} meets {other!r}"
    for dot in picture.iter(f"{SVG}circle"):
        assert 0 <= float(dot.get("cx")) <= width and 0 <= float(dot.get("cy")) <= height
