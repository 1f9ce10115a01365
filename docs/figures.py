"""Draw the pictures of docs/ and the README from a finished sweep's pages, with Chromium.

    python docs/figures.py outputs/chinchilla [FOLDER]

The pictures in this folder are of `python sweep.py +grid=chinchilla`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = {"report": ("fit/report.html", 1280, 980), "evaluation": ("fit/evaluation.html", 1280, 1400)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def draw(page: Path, picture: Path, width: int, height: int) -> None:
    """Write the top of a page as a PNG with 256 colours, which is smaller than a screenshot."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed; install one to draw {picture}")
    with tempfile.TemporaryDirectory() as folder:
        screenshot = Path(folder) / "page.png"
        flags = [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={screenshot}"]
        # The budget of virtual time lets the figures finish their drawing.
        flags += ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
        subprocess.run([browser, "--headless", *flags, page.resolve().as_uri()], check=True, capture_output=True)
        with Image.open(screenshot) as image:
            image.convert("RGB").quantize(256).save(picture, optimize=True)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    sweep, folder = Path(arguments[0]), Path(arguments[1]) if len(arguments) > 1 else Path(__file__).resolve().parent
    for name, (page, width, height) in PICTURES.items():
        if not (sweep / page).exists():
            raise SystemExit(f"{sweep / page} does not exist; the sweep must be finished and its checkpoints scored")
        draw(sweep / page, folder / f"{name}.png", width, height)
        print(f"{folder / name}.png from {sweep / page}")


if __name__ == "__main__":
    main(sys.argv[1:])
