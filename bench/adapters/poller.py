"""Asks a server for listings and metrics again and again, in a process of its own: in that of a client which notes when
tokens come, a long page that is read would make them late, whatever the server did.

    python -m bench.adapters.poller URL SECONDS PATH...

Says "polling" once all paths have been answered, and polls until its standard input ends.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from tests.support.limits import LIMIT_SECONDS


@contextmanager
def polling(url: str, every_seconds: float, paths: Sequence[str]) -> Iterator[None]:
    """All paths are asked for so often meanwhile. CalledProcessError if one of them was not answered with success."""
    command = [sys.executable, "-m", "bench.adapters.poller", url, str(every_seconds), *paths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as poller:
        assert poller.stdin is not None and poller.stdout is not None
        try:
            poller.stdout.readline()
            yield
        finally:
            poller.stdin.close()
            code = poller.wait(LIMIT_SECONDS)
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def _poll(url: str, every_seconds: float, paths: Sequence[str]) -> None:
    with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as client:
        has_said = False
        while True:
            for path in paths:
                client.get(path).raise_for_status()
            if not has_said:
                print("polling", flush=True)
                has_said = True
            if select.select([sys.stdin], [], [], every_seconds)[0]:
                return


if __name__ == "__main__":
    _poll(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
