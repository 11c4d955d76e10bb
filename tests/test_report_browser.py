"""The report in Debian's Chromium: no sideways scrolling at 390 pixels, the verdict in the first screen."""

import re
import shutil
import subprocess

import pytest
from report_for_tests import write_run, write_sweep

from jetrl.report import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
# A frame is exactly as wide as it is told; a window has a smallest width. Reading a frame needs the file access flag.
FRAME = """<!doctype html><iframe id=f src="report.html" style="width:{width}px;height:844px;border:0"></iframe>
<pre id=o></pre><script>f.onload = () => {{
  const d = f.contentDocument, root = d.documentElement, say = [];
  say.push('scroll=' + root.scrollWidth, 'client=' + root.clientWidth);
  say.push('verdict=' + Math.round(d.querySelector('ul li').getBoundingClientRect().bottom));
  for (const svg of d.querySelectorAll('svg')) {{
    const edge = svg.getBoundingClientRect(), boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
    boxes.forEach(([t, b], i) => {{
      if (b.right > edge.right + 1 || b.left < edge.left - 1) say.push('outside=' + t.textContent);
      // Glyph boxes have room above and below the letters: 3 px of shared height is not an overlap of ink.
      for (const [u, c] of boxes.slice(i + 1))
        if (b.left < c.right && c.left < b.right && b.top + 3 < c.bottom && c.top + 3 < b.bottom)
          say.push('overlap=' + t.textContent + '|' + u.textContent);
    }});
  }}
  o.textContent = say.join('\\n');
}}</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_fits_its_labels_do_not_overlap_and_the_verdict_comes_first(tmp_path, width):
    write_sweep(tmp_path / "runs", seeds=2)
    write_run(tmp_path / "runs", "unified_fp8", name="a-run-with-a-name-too-long-for-a-narrow-screen" * 3, done=5)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")]) == 0
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    command = [CHROMIUM, *FLAGS, "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r"<pre id=\"o\">(.*?)</pre>", dom, re.S).group(1)
    assert f"scroll={width}\nclient={width}\n" in said
    assert int(re.search(r"verdict=(\d+)", said).group(1)) < 844
    assert "overlap=" not in said and "outside=" not in said, said
