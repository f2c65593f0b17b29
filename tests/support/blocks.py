"""The blocks of a document, run as printed against a server."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.http.scripted_server import ScriptedServer
from tests.support.http.server import Server
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def blocks(document: str, heading: str, language: str) -> list[str]:
    """The blocks of this language below a heading such as "## Docker", up to the next of its level or above."""
    level = heading.split(" ")[0]
    body = (ROOT / document).read_text().split(f"\n{heading}\n", 1)[1]
    body = re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", body, flags=re.DOTALL)


def run(
    command: Sequence[str],
    server: Server | ScriptedServer,
    *,
    cwd: Path = ROOT,
    limit_seconds: float = LIMIT_SECONDS,
    **environment: str,
) -> str:
    """Run a command; return what it prints. The environment has the server's URL in MULTILORA_URL, and what else is
    given; in the command, the URL stands in for the documents' own."""
    done = subprocess.run(
        [part.replace("http://127.0.0.1:8000", server.url) for part in command],
        env=os.environ | {"MULTILORA_URL": server.url} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
