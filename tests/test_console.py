"""The console's lines and the metrics file behind them, the file being written by VeRL's own logger."""

import io
import math

import pytest
from verl.utils.tracking import FileLogger

from jetrl.launch.console import HEADER_EVERY, WIDTH, Console
from jetrl.launch.metrics_log import MetricsTail, RunFigures, figures, keep_history, read_run, summarize

STEP = {
    "critic/rewards/mean": 0.4375,
    "critic/score/mean": 0.5,
    "val-core/arithmetic/acc/mean@1": 0.625,
    "response_length/mean": 7.25,
    "mismatch/k3_kl": 3.25e-7,
    "mismatch/abs_logprob_diff_p99": 1.5e-3,
    "perf/total_num_tokens": 2048,
    "perf/time_per_step": 4.0,
    "perf/throughput": 999.0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def printed(*steps, total=40, stream=None):
    stream = stream or io.StringIO()
    console = Console(total, stream)
    for number, metrics in enumerate(steps, 1):
        console.step(metrics, number)
    return stream.getvalue().splitlines()


# --- step lines ---


def test_a_step_line_has_every_figure_under_its_header():
    header, line = printed(STEP)
    assert header.split() == ["step", "reward", "val", "acc", "length", "k3", "KL", "p99", "|Δlogp|", "tokens/s", "s"]
    assert line.split() == ["1/40", "0.438", "0.625", "7.2", "3.25e-07", "1.50e-03", "512", "4.0"]
    for title, value in {"reward": "0.438", "val acc": "0.625", "k3 KL": "3.25e-07", "tokens/s": "512"}.items():
        assert header.index(title) + len(title) == line.index(value) + len(value)


EXTREME = {
    "critic/rewards/mean": -123456789.0,
    "response_length/mean": 1e30,
    "mismatch/k3_kl": -1.5e-300,
    "mismatch/abs_logprob_diff_p99": float("inf"),
    "perf/throughput": 1e12,
    "perf/time_per_step": 123456.7,
}


@pytest.mark.parametrize("metrics", [STEP, EXTREME, {}, dict.fromkeys(STEP, float("nan"))], ids=repr)
def test_lines_are_aligned_and_within_120_columns_whatever_the_values(metrics):
    lines = printed(metrics, total=999999)
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= WIDTH
    assert all(len(line.split()) == 8 for line in lines[1:])  # no two columns run together


def test_missing_metrics_are_dashes():
    assert printed({})[1].split() == ["1/40"] + ["-"] * 7


def test_nan_is_shown_and_so_is_the_null_that_verl_writes_for_it():
    metrics = {"critic/rewards/mean": float("nan"), "mismatch/k3_kl": None, "response_length/mean": float("inf")}
    assert printed(metrics)[1].split() == ["1/40", "nan", "-", "inf", "nan", "-", "-", "-"]


def test_the_header_comes_again():
    lines = printed(*[STEP] * (HEADER_EVERY + 1))
    assert [i for i, line in enumerate(lines) if "reward" in line] == [0, HEADER_EVERY + 1]


def test_without_a_total_the_step_stands_alone():
    assert printed(STEP, total=None)[1].split()[0] == "1"


def test_a_stream_that_cannot_write_delta_gets_a_letter():
    raw = io.BytesIO()
    console = Console(3, io.TextIOWrapper(raw, encoding="ascii"))
    console.step(STEP, 1)
    assert "p99 |dlogp|" in raw.getvalue().decode("ascii")


# --- phases ---


def test_on_a_terminal_a_phase_is_rewritten_and_leaves_no_trace_before_the_next_line():
    stream, clock = Terminal(), Clock()
    console = Console(1, stream, clock)
    console.phase("starting Ray and vLLM")
    clock.now += 35.4
    console.phase("starting Ray and vLLM")
    assert stream.getvalue().endswith("\r\033[Kstarting Ray and vLLM ... 35 s")
    assert "\n" not in stream.getvalue()
    console.step(STEP, 1)
    assert "35 s\r\033[K       step" in stream.getvalue()


def test_in_a_file_a_phase_is_a_line_at_its_start_and_every_30_seconds():
    stream, clock = io.StringIO(), Clock()
    console = Console(1, stream, clock)
    for _ in range(65):
        console.phase("starting")
        clock.now += 1
    console.phase("training")
    assert stream.getvalue().splitlines() == ["starting ...", "starting ... 30 s", "starting ... 60 s", "training ..."]


def test_title_and_phase_lines_are_cut_at_120_columns():
    stream = io.StringIO()
    console = Console(1, stream)
    console.start(["x" * 300])
    console.phase("y" * 300)
    assert [len(line) for line in stream.getvalue().splitlines()] == [WIDTH, WIDTH]


# --- the summary ---


def test_the_summary_shows_gain_mismatch_time_and_uncut_paths():
    stream = io.StringIO()
    path = "/" + "long/" * 40
    run = RunFigures(steps=30, accuracy_before=0.4, accuracy_after=0.65, k3_kl=2e-6, p99=0.003, seconds=240.0)
    Console(30, stream).finish(run, 251.0, {"checkpoints": path})
    text = stream.getvalue()
    assert "0.400 -> 0.650  (+0.250)" in text
    assert "2.00e-06" in text
    assert "3.00e-03" in text
    assert "4 min 11 s, 30 steps" in text
    assert path in text


def test_the_summary_of_a_job_that_logged_nothing_has_dashes():
    stream = io.StringIO()
    Console(30, stream).finish(summarize({}), 3.0, {})
    assert "- -> -" in stream.getvalue()
    assert "3 s, 0 steps" in stream.getvalue()


# --- which metric is which ---


def test_figures_prefer_jetrls_mismatch_and_fall_back_to_verls():
    assert figures({"mismatch/k3_kl": 1.0, "rollout_corr/k3_kl": 2.0}).k3_kl == 1.0
    assert figures({"rollout_corr/k3_kl": 2.0}).k3_kl == 2.0
    assert figures({"critic/score/mean": 0.5}).reward == 0.5
    assert figures({"perf/throughput": 7.0}).tokens_per_second == 7.0


@pytest.mark.parametrize(
    ("metrics", "accuracy"),
    [
        ({"val-core/openai/gsm8k/acc/mean@8": 0.5, "val-core/openai/gsm8k/acc/best@8/mean": 0.9}, 0.5),
        ({"val-core/arithmetic/reward/mean@1": 0.25}, 0.25),
        ({"val-core/a/acc/mean@1": 0.2, "val-core/b/acc/mean@1": 0.4}, pytest.approx(0.3)),
        ({"val-aux/arithmetic/acc/mean@1": 0.9, "val-core/arithmetic/acc/maj@4/mean": 0.9}, None),
    ],
)
def test_validation_accuracy_is_the_mean_over_answers_of_the_core_metric(metrics, accuracy):
    assert figures(metrics).accuracy == accuracy


# --- the metrics file ---


@pytest.fixture
def verl_log(tmp_path, monkeypatch):
    """Opens VeRL's file logger on one path, as each start of a job does."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    return path, lambda: FileLogger("project", "run")


def test_the_tail_yields_each_line_of_verls_logger_once(verl_log):
    path, start = verl_log
    tail = MetricsTail(path)
    assert list(tail.poll()) == []  # not there yet
    log = start()
    log.log({"a": 1.5}, 0)
    assert list(tail.poll()) == [(0, {"a": 1.5})]
    assert list(tail.poll()) == []
    log.log({"a": float("nan")}, 1)
    log.log({"a": 3}, 2)
    assert list(tail.poll()) == [(1, {"a": None}), (2, {"a": 3})]


def test_a_partial_last_line_waits_for_its_end(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    path.write_bytes(b'{"step":1,"data":{}}\n{"step":2,"da')
    assert list(tail.poll()) == [(1, {})]
    assert list(tail.poll()) == []
    with path.open("ab") as f:
        f.write(b'ta":{"a":1}}\n')
    assert list(tail.poll()) == [(2, {"a": 1})]


def test_a_file_that_started_anew_is_read_from_its_start(verl_log):
    path, start = verl_log
    log = start()
    for step in range(3):
        log.log({"a": step}, step)
    tail = MetricsTail(path)
    assert len(list(tail.poll())) == 3
    start().log({"a": 9}, 3)
    assert list(tail.poll()) == [(3, {"a": 9})]


def test_lines_appended_by_a_resumed_job_are_read_on(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    for step in (1, 2, 2, 3):
        with path.open("a") as f:
            f.write(f'{{"step":{step},"data":{{}}}}\n')
        assert list(tail.poll()) == [(step, {})]


@pytest.mark.parametrize(
    "line", [b"garbage\n", b'{"step": 1}\n', b"[1]\n", b'{"step": "x", "data": {}}\n', b'{"step": 1e999, "data": {}}\n']
)
def test_a_complete_line_of_another_kind_is_an_error_with_its_text(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_bytes(line)
    with pytest.raises(ValueError, match="m.jsonl has a line that is not a metrics record"):
        list(MetricsTail(path).poll())


def test_a_value_that_is_no_number_is_no_figure(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"step": 1, "data": {"critic/rewards/mean": "good", "perf/time_per_step": 2, "a": null, "b": [1]}}\n'
    )
    assert list(MetricsTail(path).poll()) == [(1, {"perf/time_per_step": 2, "a": None})]


def test_history_survives_resumes_and_a_step_done_again_counts_as_the_last_time(verl_log):
    path, start = verl_log
    assert keep_history(path) is None
    for first in (0, 2, 3):  # three starts, each from the last checkpoint, each doing three steps
        log = start()
        for step in range(first, first + 3):
            log.log({"start": first, "perf/time_per_step": 1.0}, step)
        log.finish()
        if first < 3:
            keep_history(path)
    assert {step: m["start"] for step, m in read_run(path).items()} == {0: 0, 1: 0, 2: 2, 3: 3, 4: 3, 5: 3}
    assert sorted(p.name for p in path.parent.iterdir()) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


def test_the_validation_that_opens_a_resumed_job_does_not_hide_the_steps_own_metrics(verl_log):
    path, start = verl_log
    start().log({"mismatch/k3_kl": 1.0}, 5)
    keep_history(path)
    start().log({"val-core/t/acc/mean@1": 0.5}, 5)
    assert read_run(path) == {5: {"mismatch/k3_kl": 1.0, "val-core/t/acc/mean@1": 0.5}}


def test_summarize_takes_first_and_last_validation_and_means_over_steps():
    steps = {
        0: {"val-core/t/acc/mean@1": 0.4},
        1: {"mismatch/k3_kl": 1e-6, "mismatch/abs_logprob_diff_p99": 0.01, "perf/time_per_step": 2.0},
        2: {"mismatch/k3_kl": 3e-6, "perf/time_per_step": 3.0, "val-core/t/acc/mean@1": 0.6},
    }
    run = summarize(steps)
    assert (run.steps, run.accuracy_before, run.accuracy_after, run.p99, run.seconds) == (2, 0.4, 0.6, 0.01, 5.0)
    assert run.k3_kl == pytest.approx(2e-6)


def test_one_bad_step_is_not_averaged_away():
    assert math.isnan(summarize({1: {"mismatch/k3_kl": 1.0}, 2: {"mismatch/k3_kl": None}}).k3_kl)


def test_one_validation_alone_is_before_training_or_after_it():
    run = summarize({0: {"val-core/t/acc/mean@1": 0.4}})
    assert (run.accuracy_before, run.accuracy_after) == (0.4, None)
    run = summarize({1: {"perf/time_per_step": 2.0}, 2: {"perf/time_per_step": 2.0, "val-core/t/acc/mean@1": 0.4}})
    assert (run.accuracy_before, run.accuracy_after) == (None, 0.4)
