"""Make the pictures of the README: `python scripts/pictures.py [--only page|processes]`.

`docs/figures/page.png` is the page of `multilora serve` with the bundled model, in headless Chromium; it needs the
project's dev extra and Debian's packages chromium and chromium-driver. `docs/figures/processes.svg` is drawn below.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from html import escape
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

_FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
_LIMIT_SECONDS = 120
_MODELS = ("base", "shout", "reverse", "pig-latin")


def _browse(url: str, picture: Path) -> None:
    """Send the page's prompt to four models, and save what the browser shows once all have answered."""
    options = webdriver.ChromeOptions()
    # Root may not use the sandbox, and containers have a small /dev/shm.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1180,1000"):
        options.add_argument(flag)
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        driver.get(url)
        wait = WebDriverWait(driver, _LIMIT_SECONDS, poll_frequency=0.1)
        Select(driver.find_element(By.ID, "num-columns")).select_by_visible_text(str(len(_MODELS)))
        wait.until(lambda _: len(driver.find_elements(By.CSS_SELECTOR, "#adapters tr")) >= len(_MODELS))
        for column, model in zip(driver.find_elements(By.CSS_SELECTOR, ".model"), _MODELS, strict=True):
            Select(column).select_by_value(model)
        for _ in range(2):  # the figures of the second time, without what a first request of a server costs
            driver.find_element(By.ID, "send").click()
            wait.until(lambda _: driver.find_element(By.ID, "send").is_enabled())
        lines = driver.find_elements(By.CSS_SELECTOR, "#plots .line")
        wait.until(lambda _: all(line.get_attribute("d") for line in lines))
        driver.save_screenshot(str(picture))
    finally:
        driver.quit()


def _draw_page(picture: Path) -> None:
    """Start a server of the bundled model on a free port, with a store of its own, and end it after the picture."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with tempfile.TemporaryDirectory() as store:
        command = [str(Path(sys.executable).with_name("multilora")), "serve", "--device", "cpu"]
        server = subprocess.Popen([*command, "--port", str(port), "--store-dir", store])
        try:
            _wait_until_ready(f"{url}ready", server)
            _browse(url, picture)
        finally:
            server.terminate()
            server.wait()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _LIMIT_SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:  # refused, or 503 while it starts
            time.sleep(0.2)
    raise SystemExit("The server did not start; its output says why.")


_API_STEPS = (
    ("http, entry, access", "connection, key, body"),
    ("admission", "adapter, chat template, tokens"),
    ("adapters: upload, peft, store", "check, bind, publish"),
    ("generation", "text, stop strings, events"),
)
_ENGINE_STEPS = (
    ("scheduling, sequences", "tokens, KV blocks, fairness"),
    ("loras", "disk → host memory → device rows"),
    ("models, kernels", "one forward pass, sampling"),
    ("step", "index maps, launch, collect"),
)
_BOX_WIDTH, _BOX_HEIGHT, _BOX_GAP = 250, 50, 16
_TOP, _API_LEFT, _ENGINE_LEFT = 20, 200, 640


def _box(left: int, top: int, title: str, detail: str) -> str:
    middle = left + _BOX_WIDTH // 2
    return (
        f'<rect class="step" x="{left}" y="{top}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="6"/>'
        f'<text class="name" x="{middle}" y="{top + 21}">{escape(title)}</text>'
        f'<text x="{middle}" y="{top + 39}">{escape(detail)}</text>\n'
    )


def _process(left: int, title: str, steps: tuple[tuple[str, str], ...]) -> str:
    height = len(steps) * (_BOX_HEIGHT + _BOX_GAP) + 36
    tops = [_TOP + 38 + index * (_BOX_HEIGHT + _BOX_GAP) for index in range(len(steps))]
    return (
        f'<rect class="process" x="{left - 20}" y="{_TOP}" width="{_BOX_WIDTH + 40}" height="{height}" rx="10"/>'
        f'<text class="title" x="{left + _BOX_WIDTH // 2}" y="{_TOP + 24}">{escape(title)}</text>\n'
        + "".join(_box(left, top, *step) for top, step in zip(tops, steps, strict=True))
    )


def _arrow(start: tuple[int, int], end: tuple[int, int], label: str) -> str:
    middle, above = (start[0] + end[0]) // 2, (start[1] + end[1]) // 2 - (10 if start[1] == end[1] else 20)
    return (
        f'<path class="arrow" d="M{start[0]} {start[1]} L{end[0]} {end[1]}"/>'
        f'<text x="{middle}" y="{above}">{escape(label)}</text>\n'
    )


def _draw_processes(picture: Path) -> None:
    """The two processes, their steps in the folders' words, and the messages between them."""
    rows = [_TOP + 38 + index * (_BOX_HEIGHT + _BOX_GAP) + _BOX_HEIGHT // 2 for index in range(4)]
    api, engine = _API_LEFT + _BOX_WIDTH, _ENGINE_LEFT
    arrows = [
        _arrow((100, rows[0]), (_API_LEFT - 4, rows[0]), "HTTP"),
        _arrow((_API_LEFT, rows[3]), (104, rows[3]), "answer"),
        _arrow((api, rows[1]), (engine - 4, rows[0]), "Submit"),
        _arrow((api, rows[2]), (engine - 4, rows[1]), "Load"),
        _arrow((engine, rows[3]), (api + 4, rows[3]), "Tokens, Finished"),
    ]
    picture.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 930 345" role="img"'
        ' aria-label="A client, the API process and the engine process">\n'
        "<style>text{font:13px sans-serif;text-anchor:middle;fill:#333}.title{font-weight:bold;font-size:15px}"
        ".name{font-weight:bold}.process{fill:#eef3fa;stroke:#7b93b5}.step{fill:#fff;stroke:#7b93b5}"
        ".arrow{stroke:#345;stroke-width:1.5;marker-end:url(#head)}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#345"/></marker></defs>\n'
        '<rect width="930" height="345" fill="#fff"/>\n'
        f'<rect class="step" x="14" y="{rows[0] - 25}" width="86" height="{rows[3] - rows[0] + 50}" rx="6"/>'
        f'<text class="name" x="57" y="{(rows[0] + rows[3]) // 2 + 4}">client</text>\n'
        + _process(_API_LEFT, "API process: HTTP, text, adapter store", _API_STEPS)
        + _process(_ENGINE_LEFT, "Engine process: owns the device", _ENGINE_STEPS)
        + "".join(arrows)
        + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("page", "processes"))
    only = parser.parse_args().only
    _FIGURES.mkdir(parents=True, exist_ok=True)
    if only != "page":
        _draw_processes(_FIGURES / "processes.svg")
    if only != "processes":
        _draw_page(_FIGURES / "page.png")


if __name__ == "__main__":
    main()
