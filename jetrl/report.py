"""`python -m jetrl.report RUN [RUN ...]`: runs side by side, as one HTML file that opens without a network."""

import argparse
import sys
from pathlib import Path

from jetrl.command import write_file
from jetrl.errors import JobError, UserError

USAGE = "python -m jetrl.report [--out FILE] [--png] RUN [RUN ...]"
DESCRIPTION = """\
RUN: a folder that jetrl.train wrote (finished, partial or crashed), a folder of such folders (a sweep), or the
.jsonl file of a plain VeRL job with trainer.logger=[file]. Runs that differ only in a seed share one curve.
A file marked.json in a run's folder ({"17": "why"}) keeps those steps out of mismatch comparisons; the report names them.
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 when a picture could not be made; 2 on bad input."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        print(f"jetrl: {e}", file=sys.stderr)
        return 2
    except JobError as e:
        print(f"jetrl: {e}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """argparse's own error prints the usage first; a bad command line gets one sentence here as everywhere."""

    def error(self, message: str):
        raise UserError(f"{message}; usage: {USAGE}")


def _run(argv: list[str]) -> int:
    parser = _Parser(prog="python -m jetrl.report", usage=USAGE, description=DESCRIPTION, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", metavar="RUN", nargs="+", help="what to show")
    parser.add_argument(
        "--out", metavar="FILE", help="the HTML file (default: report.html beside the first RUN's files)"
    )
    parser.add_argument(
        "--png", action="store_true", help="also write each picture to FILE's folder as <FILE>_png/*.png"
    )
    options = parser.parse_args(argv)

    from jetrl.reporting import png
    from jetrl.reporting.compare import rows
    from jetrl.reporting.graph_verdict import verdicts
    from jetrl.reporting.groups import group_runs
    from jetrl.reporting.page import html_page
    from jetrl.reporting.pictures import sections
    from jetrl.reporting.runs import load_runs

    # Before the work, so that a missing rasteriser costs no time.
    convert = png.rasteriser() if options.png else None
    found, home = load_runs(options.runs)
    runs, unreadable = [r for r in found if not r.unreadable], [r for r in found if r.unreadable]
    out = Path(options.out).expanduser() if options.out else home / "report.html"
    checked = verdicts(runs)
    table = rows(group_runs(runs), checked)
    pictures = sections(table)
    write_file(out, html_page(runs, table, pictures, unreadable), option=" with --out")
    for run in unreadable:
        print(f"left out {run.name}: {run.unreadable}")
    print(f"report   {out}")
    if convert is not None:
        folder = out.with_name(f"{out.stem}_png")
        _make_folder(folder)
        drawn = [p for row in pictures.values() for p in row if p.svg is not None]
        for picture in drawn:
            convert(png.standalone(picture.svg), folder / f"{picture.key}.png")
        print(f"PNGs     {folder} ({len(drawn)})")
    return 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as e:
        raise UserError(f"{folder} cannot be made ({e.strerror}); give another file with --out") from e


if __name__ == "__main__":
    sys.exit(main())
