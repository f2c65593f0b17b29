"""The server on Ray Serve over three hosts, one of which is lost: namespaces of this machine (`bench.hosts.network`),
so that all share its processors. Root on Linux, where Ray is installed:

    python -m bench.hosts [--lose cut|power|head] [--seconds 60]

Two engines and two ingresses; each host has its HAProxy. Clients ask, read streams, and upload and delete adapters by
the two hosts that stay; after each change both must know of it at once. Then a host with an engine, or Ray's head, is
cut off (`cut`, `head`) or loses power (`power`), and nobody is told. Prints a line of JSON: seconds until it had left
the rotation, until all served again, of the longest request and silence of a stream, and how all of them ended.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.hosts.cluster import Cluster
from bench.hosts.network import hosts
from bench.hosts.traffic import Traffic
from tests.support.http.server_process import wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.on_ray.checkpoints import make_checkpoints

_BEFORE_SECONDS = 5.0


def measure(cluster: Cluster, lose: str, seconds: float) -> dict[str, Any]:
    for one in cluster.hosts:
        cluster.start_ray(one)
    cluster.deploy(engines=2, ingresses=2)
    wait_for(lambda: all(cluster.is_whole(one) for one in cluster.hosts), "all to serve")
    head, *workers = cluster.hosts
    with_engine = [one for one in workers if cluster.has_engine(one)]
    lost = head if lose == "head" else with_engine[-1]
    stay = [one for one in cluster.hosts if one is not lost]
    traffic = Traffic([cluster.url(one) for one in stay], cluster.shared / "uploaded")
    time.sleep(_BEFORE_SECONDS)
    began = time.monotonic()
    if lose == "power":
        lost.power_off()
    else:
        lost.cut()
    figures: dict[str, Any] = {"lost": lose}
    if lose != "head":
        wait_for(lambda: not cluster.is_whole(stay[0]), "the loss to be noticed")
        figures["noticed_seconds"] = round(time.monotonic() - began, 1)
        wait_for(lambda: all(cluster.is_whole(one) for one in stay), "all to serve again")
        figures["whole_seconds"] = round(time.monotonic() - began, 1)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return figures | traffic.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lose", choices=("cut", "power", "head"), default="cut")
    parser.add_argument("--seconds", type=float, default=60, help="of traffic after the loss, at least")
    given = parser.parse_args()
    assert given.seconds < LIMIT_SECONDS
    with tempfile.TemporaryDirectory(prefix="hosts") as root:
        make_checkpoints(Path(root))
        with hosts(3, Path(root)) as made:
            print(json.dumps(measure(Cluster(made, Path(root)), given.lose, given.seconds)))


if __name__ == "__main__":
    main()
