"""What does not hold of a server when HAProxy and Ray are in front of it, each with its reason; all else must hold.

With TEST_SERVED_BY=ray (see `tests/support/http/server.py`) the tests whose names begin so must fail, but those whose
reason begins with NOT_RUN: they would wait for what never comes. `pytest -rx` shows each with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

# HAProxy's answer to what it cannot read as a head.
UNREADABLE = b"<html><body><h1>400 Bad request</h1>\nYour browser sent an invalid request.\n</body></html>\n"
NOT_RUN = "not run: "

_PAGE = "HAProxy refuses what it cannot read with 400 and a page of its own, which no configuration changes"
_PAGE_408 = "HAProxy answers a head that does not come with 408 and a page of its own, likewise"
_BUFFERED = (
    "HAProxy reads chunks and passes their contents on in chunks of its own, so that ours never see their framing"
)
_UNFOLDED = "HAProxy joins a folded line to the one before it, and ours get one line, as RFC 9112 allows"
_SHARES = (
    "HAProxy holds the connections of clients: it refuses those of an address that are too many at their first "
    "request, knows no tenants, and writes no line of ours"
)
_DRIVER = "the process that the test has started is no server but has started Ray, "
_LOADING = "Ray gives HAProxy an ingress when it can serve, so that nobody sees it load"
_STAGING = "a store that servers share has a directory for each in staging, where the test looks for uploads"

CANNOT_HOLD = {
    "test_bad_requests.py::test_broken_http_does_not_hurt_the_server": _PAGE,
    "test_bad_requests.py::test_a_wrong_method_is_told_all_that_the_path_takes[BREW": (
        "uvicorn, as Ray starts it, refuses methods that it does not know with 400 before the application has them"
    ),
    "test_connections.py::TestFraming::test_two_lengths": (
        "HAProxy goes by Transfer-Encoding, takes Content-Length away and closes the connection, as RFC 9112 allows"
    ),
    "test_connections.py::TestFraming::test_folded_lines_are_refused_and_the_connection_closed[header]": _UNFOLDED,
    "test_connections.py::TestFraming::test_folded_lines_are_refused_and_the_connection_closed[length]": _UNFOLDED,
    "test_connections.py::TestFraming::test_a_folded_line_is_refused": _UNFOLDED,
    "test_connections.py::TestFraming::test_http_1_0_has_no_chunks": (
        "HAProxy reads the chunks of HTTP/1.0 too, and passes the body on as one of HTTP/1.1"
    ),
    "test_connections.py::TestFraming::test_chunks_that_are_mostly_framing": NOT_RUN + _BUFFERED,
    "test_connections.py::TestHeads::test_absurd_ones_are_refused[HTTP/2]": (
        NOT_RUN + "HAProxy speaks HTTP/2 to who begins with it"
    ),
    "test_connections.py::TestHeads::test_absurd_ones_are_refused": _PAGE,
    "test_connections.py::TestHeads::test_what_is_refused_is_quoted_in_brief[method]": (
        "uvicorn, as Ray starts it, refuses methods that it does not know, and logs no line of ours"
    ),
    "test_connections.py::TestTime::test_what_does_not_come_is_not_waited_for[GET": _PAGE_408,
    "test_connections.py::test_connections_are_counted": NOT_RUN + _SHARES,
    "test_connections.py::test_a_tenant_has_half_of_the_connections": NOT_RUN + _SHARES,
    "test_logs.py::test_malformed_and_refused_requests": (
        "HAProxy refuses what is no HTTP, so that we do not count it"
    ),
    "test_tenants.py::TestKeysFile::test_a_broken_file_keeps_the_keys_and_hangup_says_so": (
        NOT_RUN + _DRIVER + "and no signal makes it look at the keys file"
    ),
    "test_connections.py::TestTime::test_a_reader_that_stalls": NOT_RUN + _SHARES,
    "test_operation.py::test_every_line_of_both_processes_is_json": "Ray's processes have lines of their own",
    "test_process.py::TestKilledEngine::test_requests_end_with_an_error_and_the_server_is_ready_again": (
        NOT_RUN + _DRIVER + "whose processes are all that it kills"
    ),
    "test_process.py::TestAdaptersThatDoNotFit::test_none_is_taken_before_the_rows_are_known": NOT_RUN + _LOADING,
    "test_process.py::TestSigterm": NOT_RUN + _DRIVER + "which SIGTERM ends; replicas go by Ray's word",
    "test_implementations.py::test_an_op_without_any_that_works_ends_the_start": (
        NOT_RUN + "Ray starts a replica that fails thrice, and ends nothing"
    ),
    "test_health.py::test_healthy_once_the_model_is_loaded": NOT_RUN + _LOADING,
    "test_jobs_served.py::test_the_batch_mixed_all_adapters": (
        NOT_RUN + "two engines divide the adapters between them, so that a step has fewer"
    ),
    "test_limits.py::TestLimits::test_key_and_size_are_checked_before": (
        "Ray begins to receive a body before it calls the application, with which uvicorn says 100 Continue"
    ),
    "test_uploads.py::test_a_client_that_uploads_leaves_room": NOT_RUN + _STAGING,
    "test_uploads.py::test_a_configuration_that_is_refused_ends": NOT_RUN + _STAGING,
    **{
        f"test_versions.py::{name}": "a store that servers share takes no ephemeral versions"
        for name in (
            "test_ephemeral_versions_answer",
            "test_tensors_load_as_an_ephemeral",
            "TestClient",
        )
    },
    "test_adapters.py::TestRefusals::test_nothing_of_a_refused_upload_stays": _STAGING,
}


def is_on_ray() -> bool:
    """Whether servers are to be applications on Ray Serve."""
    served_by = os.environ.get("TEST_SERVED_BY", "")
    assert served_by in ("", "ray"), f"TEST_SERVED_BY={served_by} is not known; there is ray"
    return bool(served_by)


def mark(items: Sequence[pytest.Item]) -> None:
    """The tests of the table; the first line that fits counts."""
    for item in items:
        name = item.nodeid[item.nodeid.partition("::")[0].rfind("/") + 1 :]
        reason = next((why for begin, why in CANNOT_HOLD.items() if name.startswith(begin)), "")
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=not reason.startswith(NOT_RUN)))
