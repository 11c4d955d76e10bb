"""`python -m jetrl.verify`: are a token's log-probs the same in the rollout and in the trainer, and if not, why not."""

import argparse
import json
import os
import sys
from pathlib import Path

from jetrl.command import SentenceParser, run_command, write_file
from jetrl.errors import UserError

USAGE = """\
python -m jetrl.verify [options] [group=name ...] [key=value ...]

Samples sequences with vLLM as the job would, recomputes their log-probs with the trainer's forward on the same weights,
and prints the mismatch and, operator by operator, where the two first differ. Groups and keys are those of jetrl.train.
Exit code: 0; 1 when --max-kl is exceeded or a token of an exact flow differs; 2 on bad input.
"""


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    options, json_file, words = parse(argv)
    if json_file:
        _check_place(Path(json_file).expanduser())
    from jetrl.verification.command import prepare, verify
    from jetrl.verification.report import failures, report_lines

    cfg, space = prepare(words, options)
    result = verify(cfg, options, space, lambda line: print(line, flush=True))
    failed = failures(result, options)
    result["failures"] = failed
    print("\n".join(report_lines(result)))
    if json_file:
        write_file(json_file, json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


def parse(argv: list[str]):
    """(Options, file for JSON or None, Hydra words)."""
    from jetrl.verification.workspace import Options

    default = Options()
    parser = SentenceParser(prog="python -m jetrl.verify", usage=USAGE, allow_abbrev=False)
    add = parser.add_argument
    add("--sequences", type=_whole(1), default=default.sequences, metavar="N", help="how many; default %(default)s")
    add("--lengths", type=_list(1), default=default.lengths, metavar="A,B,..",
        help="output tokens, taken by the sequences in turn; default 64")  # fmt: skip
    add("--prompt-lengths", type=_list(1), default=default.prompt_lengths, metavar="A,B,..",
        help="prompts of random tokens of these lengths; default: the task's own prompts")  # fmt: skip
    add("--kv-cache-tokens", type=_whole(0), default=default.kv_cache_tokens, metavar="N",
        help="size of vLLM's KV cache; a small one forces preemption; default: vLLM's choice")  # fmt: skip
    add("--layer-sequences", type=_whole(0), default=default.layer_sequences, metavar="N",
        help="sequences that are followed operator by operator; default %(default)s, 0 for none")  # fmt: skip
    add("--layer-tokens", type=_whole(2), default=default.layer_tokens, metavar="N",
        help="how far, in tokens with the prompt; default %(default)s")  # fmt: skip
    add("--max-kl", type=_bound, default=None, metavar="X", help="exit code 1 when the k3 KL is above X")
    add("--mutations", action="store_true",
        help="self-test: perturb operators of either engine one at a time and see that each is found")  # fmt: skip
    add(
        "--seed", type=_whole(0), default=default.seed, metavar="N", help="of prompts and sampling; default %(default)s"
    )
    add("--json", metavar="FILE", help="write the whole result")
    given, words = parser.parse_known_args(argv)
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise UserError(f"{unknown} is unknown; --help shows the options; others are group=name and key=value")
    values = vars(given)
    json_file = values.pop("json")
    if given.mutations and not given.layer_sequences:
        raise UserError("--mutations needs operators to look at; leave --layer-sequences above 0")
    return Options(**values), json_file, words


def _whole(smallest: int):
    def whole(text: str) -> int:
        if not text.isdigit() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {smallest}")
        return int(text)

    return whole


def _list(smallest: int):
    return lambda text: tuple(_whole(smallest)(part) for part in text.split(","))


def _bound(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return value


def _check_place(path: Path) -> None:
    """Before minutes of work whose result could then not be written."""
    if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--json {path} cannot be written; give a file in a folder that exists")


if __name__ == "__main__":
    sys.exit(main())
