"""`python -m jetrl.train [group=name ...] [key=value ...]`: compose a job, check it, run it through VeRL."""

import sys

from jetrl import __version__
from jetrl.command import run_command
from jetrl.launch.args import GROUPS, CommandLine, options, parse

USAGE = """\
usage: python -m jetrl.train [-m] [--dry-run] [--cfg job] [group=name ...] [key=value ...]

RL of a language model with one precision flow for rollout and training. Without arguments: the embedded model on an
arithmetic task. group=name and +group=name mean the same; key=value overrides any key of VeRL's configuration
(+key=value adds one), and of jetrl's own:

  run.name=<name>       default <model>-<data>-<algorithm>-<precision>
  run.dir=<folder>      default runs/<run.name>; in a sweep, the folder of all its jobs
  resume=auto           or disable, or the path of a global_step_N folder
  masters=bf16          (stochastic rounding) or fp32: the weights that the optimizer owns
  wire=fp8              or bf16: what a weight sync sends to the rollout
  gemm=auto             or deepgemm, cublaslt, triton: who multiplies FP8 matrices on a GPU
  flow.train.<key>=..   a key of the chosen precision flow
  algorithm.rollout_correction.rollout_is=token
                        token-level truncated importance sampling of the rollout mismatch

groups:
{groups}

flags:
  -m, --multirun        one job for every combination of comma lists: -m precision=bf16,unified_fp8
  --dry-run             compose and check, start nothing
  --cfg job             print the composed configuration
  --version, --help
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 when a started job failed; 2 when it was refused before; 130 after Ctrl-C."""
    return run_command(lambda: _run(parse(sys.argv[1:] if argv is None else argv)))


def _run(line: CommandLine) -> int:
    if line.show_help:
        print(USAGE.format(groups=_group_lines()), end="")
        return 0
    if line.show_version:
        print(f"jetrl {__version__}")
        return 0
    from jetrl.versions import check_versions

    check_versions()
    from jetrl.launch import preflight
    from jetrl.launch.compose import compose_job
    from jetrl.launch.config import run_config
    from jetrl.launch.early_worker import EarlyWorker
    from jetrl.launch.errors_map import as_yaml
    from jetrl.launch.job import run_job
    from jetrl.launch.sweep import expand, run_sweep

    if line.multirun:
        if not (line.show_config or line.dry_run):
            return run_sweep(line)
        configs = [job.cfg for job in expand(line)]
    else:
        configs = [compose_job(line)]
    if line.show_config:
        print("---\n".join(as_yaml(cfg) for cfg in configs), end="")
        return 0
    if line.dry_run:
        for cfg in configs:
            preflight.check(cfg)
            print(f"{cfg.run.name} would run in {cfg.run.dir}")
        return 0
    with EarlyWorker() as early:
        preflight.check(configs[0])
        return run_job(configs[0], run_config(configs[0]).folder, early=early)


def _group_lines() -> str:
    shown = {group: options(group) for group in GROUPS}
    return "\n".join(f"  {group:<20}  {', '.join(names)}" for group, names in shown.items() if names)


if __name__ == "__main__":
    sys.exit(main())
