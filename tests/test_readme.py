"""The README's blocks work as printed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.support.blocks import ROOT, blocks, run
from tests.support.http.server import Server, running_server

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What `make serve` starts, on a free port."""
    with running_server(ROOT / "service" / "bundled" / "base", tmp_path_factory.mktemp("readme")) as running:
        yield running


def test_the_readme_opens_with_the_two_commands() -> None:
    assert README.split("```sh\n", 1)[1].startswith("make serve")
    assert re.search(r"^make test\b", README.split("```", 2)[1], flags=re.MULTILINE)


def test_chat_with_two_adapters(server: Server) -> None:
    block, _ = blocks("README.md", "## Four things to try", "python")
    lines = run([sys.executable, "-c", block], server).splitlines()
    answers = {line.split(" ", 1)[0]: line.split(" ", 1)[1].strip() for line in lines}
    assert answers["shout"] == "LAMP TIGER MOSS!"
    assert answers["reverse"] == "moss tiger lamp"
    assert answers["base"] not in (answers["shout"], answers["reverse"])


def test_a_tool_is_called_and_its_result_said(server: Server) -> None:
    _, block = blocks("README.md", "## Four things to try", "python")
    assert run([sys.executable, "-c", block], server) == "calculator 12 * 34 = 408\nThe answer is 408.\n"


def test_upload_then_one_call_for_different_adapters(server: Server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed: the README's two curl blocks were not run")
    upload, batch = blocks("README.md", "## Four things to try", "sh")
    report = json.loads(run(["bash", "-c", upload], server))
    assert report["name"] == "my-adapter"
    items = json.loads(run(["bash", "-c", batch], server))["items"]
    texts = [item["choices"][0]["message"]["content"] for item in items]
    assert texts[1:] == ["LAMP TIGER MOSS!", '["lamp", "tiger", "moss"]', "moss tiger lamp"]
