"""Draw docs/img/report.png: the top of a report as Chromium shows it, by default that of `make demo`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 1200, 1520
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--virtual-time-budget=8000")


def main(page: Path = ROOT / "runs" / "demo" / "report.html") -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("this needs Chromium.")
    out = ROOT / "docs" / "img" / "report.png"
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        place = (f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={raw}")
        subprocess.run([browser, *FLAGS, *place, page.resolve().as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL)
        Image.open(raw).convert("RGB").quantize(160).save(out, optimize=True)  # few colours: a third of the size
    print(f"wrote {out} ({out.stat().st_size // 1000} kB)")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
