"""`python -m jetrl.check`: what a job's precision flow is, whether it is what it claims, and what it saves."""

import argparse
import json
import sys
from html import escape

from jetrl.command import SentenceParser, run_command, write_file
from jetrl.errors import UserError

USAGE = """\
python -m jetrl.check [options] [group=name ...] [key=value ...]
       python -m jetrl.check [options] verl [overrides of an existing VeRL job ...]

Checks that the rollout's precision graph is a subgraph of training's forward graph, before anything runs.
Exit code: 0 when the flow is what it claims, 1 when a unified flow is violated, 2 on bad input.
"""
SHOWN_VIOLATIONS = 8
SHOWN_NAMES = 4


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    options, words = _parse(argv)
    if options.backends:
        print("\n".join(backend_lines(compose_jetrl(words).gemm if words else "auto")))
        return 0
    from jetrl.launch import exact
    from jetrl.precision.architectures import load_config
    from jetrl.precision.check_job import check_job
    from jetrl.precision.job import read_job

    verl = bool(words) and words[0] == "verl"
    cfg = compose_verl(words[1:]) if verl else compose_jetrl(words)
    job = read_job(cfg)
    if job.train.exact or job.rollout.exact:
        exact.check(cfg, job.flow)
        exact.check_heads(cfg, job.flow, load_config(job.model_path)[0].to_dict())
    result = check_job(job)
    title = f"{result.job.model_path}: {result.job.flow}"
    if options.svg or options.html:
        from jetrl.precision.render_svg import draw_layer

        picture = draw_layer(result.infer, result.train, result.violations, title)
        if options.svg:
            write_file(options.svg, picture)
        if options.html:
            write_file(options.html, html_page(title, picture, report_lines(result)))
    print(json.dumps(result.to_dict(), indent=2) if options.json else "\n".join(report_lines(result)))
    return result.exit_code


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = SentenceParser(prog="python -m jetrl.check", usage=USAGE, add_help=True, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--svg", metavar="FILE", help="draw one decoder layer, both graphs overlaid")
    parser.add_argument("--html", metavar="FILE", help="the same with the table, as one page")
    parser.add_argument("--backends", action="store_true", help="list GEMM and quantizer backends and end")
    options, rest = parser.parse_known_args(argv)
    unknown = next((word for word in rest if word.startswith("-")), None)
    if unknown is not None:
        raise UserError(
            f"{unknown} is unknown; allowed: --json, --svg FILE, --html FILE, --backends and key=value overrides"
        )
    return options, rest


def compose_jetrl(words: list[str]):
    """The configuration that jetrl.train would run with these words."""
    from jetrl.data.models import resolve_model_path
    from jetrl.launch.args import parse
    from jetrl.launch.compose import compose_job
    from jetrl.precision.architectures import bundled_name

    cfg = compose_job(parse(words), resolve_model=False)
    model = cfg.actor_rollout_ref.model
    if bundled_name(str(model.path)) is None:
        model.path = resolve_model_path(model.path)
    return cfg


def compose_verl(overrides: list[str]):
    """The configuration of `python -m verl.trainer.main_ppo` with these overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from jetrl.launch.compose import verl_config_folder
    from jetrl.launch.config import check_nodes, check_numbers
    from jetrl.launch.errors_map import explain

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(verl_config_folder()), version_base="1.3"):
            cfg = compose("ppo_trainer", overrides=overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as e:  # ValueError: Hydra's, for `data=null`
        raise explain(e, overrides=tuple(overrides)) from e
    finally:
        GlobalHydra.instance().clear()
    check_nodes(cfg)
    check_numbers(cfg)
    return cfg


def report_lines(result) -> list[str]:
    """The check's answer for people."""
    from jetrl.precision.check_job import excluded
    from jetrl.precision.render_table import estimate_lines, table

    job = result.job
    lines = [
        f"flow {job.flow}; model {job.model_path} ({result.config_source}); "
        f"tensor-parallel {job.tensor_parallel}; master weights {job.master}",
        *(f"note: {note}" for note in job.notes),
        "",
        table(result.rows),
        "",
        *_excluded_lines(excluded(result.train, result.infer)),
        f"verdict: {result.verdict}",
        *violation_lines(result.violations),
    ]
    lines += [f"  unclassified: {name}" for name in result.unclassified[:SHOWN_VIOLATIONS]]
    return [*lines, "", *estimate_lines(result.estimate)]


def violation_lines(violations: list) -> list[str]:
    """One line for all operators that have the same violation in the same words."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for v in violations:
        groups.setdefault((v.tensor, v.rollout, v.training, v.key, v.advice), []).append(v.operator)
    lines = []
    for (tensor, rollout, training, key, advice), names in groups.items():
        where = names[0] if len(names) == 1 else f"{len(names)} operators ({_listing(names)})"
        lines.append(f"  {where}: {tensor} is {rollout} in the rollout and {training} in training; {key}: {advice}")
    if len(lines) > SHOWN_VIOLATIONS:
        return [*lines[:SHOWN_VIOLATIONS], f"  and {len(lines) - SHOWN_VIOLATIONS} more kinds (--json lists all)"]
    return lines


def _listing(names: list[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f", and {more} more" if more > 0 else "")


def _excluded_lines(kept: dict[str, dict[str, list[str]]]) -> list[str]:
    """What exclusions, first and last layers matched, once where both sides agree.

    A side that is BF16 altogether needs no list.
    """
    sides: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for side, reasons in kept.items():
        for reason, names in reasons.items():
            key = reason.removeprefix(f"flow.{side}.")
            if key != reason and key != "linear=bf16":
                sides.setdefault((key, tuple(names)), []).append(side)
    return [
        f"{' and '.join(where)}: {key} keeps {len(names)} linear layers unquantized: {_listing(list(names))}"
        for (key, names), where in sides.items()
    ]


def html_page(title: str, picture: str, lines: list[str]) -> str:
    """One self-contained page: the picture and the report."""
    text = escape("\n".join(lines))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>"
        "<body style='margin:2em;font-family:sans-serif'>"
        f"{picture}<pre style='overflow:auto'>{text}</pre></body></html>\n"
    )


def backend_lines(gemm: str) -> list[str]:
    """GEMM and quantizer backends of jetrl_kernels under the key `gemm`, a line each."""
    from jetrl.gemm_backend import check_gemm

    return [f"{what}: {value}" for what, value in check_gemm(gemm).items()]


if __name__ == "__main__":
    sys.exit(main())
