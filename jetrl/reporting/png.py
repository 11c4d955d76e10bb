"""PNGs from the report's own SVGs, by a rasteriser that is already installed."""

import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from jetrl.errors import JobError, UserError
from jetrl.reporting.style import picture_css

SCALE = 2  # pixels per SVG unit


def standalone(svg: str) -> str:
    """The picture as a file of its own: the light style sheet inside it, on white."""
    head, _, body = svg.partition(">")
    return (
        f'{head}><style>{picture_css()}</style><rect width="100%" height="100%" style="fill:#fff;stroke:none"/>{body}'
    )


def rasteriser() -> Callable[[str, Path], None]:
    """Raises UserError where there is none."""
    program = shutil.which("rsvg-convert")
    if program is not None:
        return lambda svg, file: _rsvg(program, svg, file)
    if find_spec("cairosvg") is not None:
        return _cairosvg
    raise UserError(
        "--png needs a rasteriser, and neither rsvg-convert nor cairosvg is installed; apt-get install librsvg2-bin, or "
        "pip install cairosvg"
    )


def _rsvg(program: str, svg: str, file: Path) -> None:
    done = subprocess.run(
        [program, "--zoom", str(SCALE), "--output", str(file)], input=svg.encode(), capture_output=True, check=False
    )
    if done.returncode != 0:
        raise JobError(f"rsvg-convert could not write {file}: {done.stderr.decode(errors='replace').strip()}")


def _cairosvg(svg: str, file: Path) -> None:
    import cairosvg

    cairosvg.svg2png(bytestring=svg.encode(), write_to=str(file), scale=SCALE)
