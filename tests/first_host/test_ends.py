"""`multilora first-host` that is killed or interrupted: nothing of it stays behind, and `--resume` goes on."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.first_host.conftest import ROOT, Meeting
from tests.support.limits import LIMIT_SECONDS


def test_a_killed_command_is_resumed(meeting: Meeting) -> None:
    """What had its answer is not asked again; the step at work, whose process went too, is begun anew."""
    with meeting.start("works,waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        command.kill()
        assert gate.read() == ""  # the step's process is gone
        command.communicate(timeout=LIMIT_SECONDS)
    assert [step["status"] for step in meeting.report["steps"]] == ["ok", "running"]
    code, _, err = meeting.run("works,waits")
    assert (code, "--resume goes on with it" in err) == (2, True)
    code, out, _ = meeting.run("works,waits", "--resume")
    assert code == 0
    (limit,) = re.findall(r"waits: .* \(at most (\d+) s\)", out)
    assert 300 < int(limit) <= 600, "what the first step had left of its time is the other one's too"
    assert [step["status"] for step in meeting.report["steps"]] == ["ok", "ok"]
    assert (meeting.directory / "begun").read_text().split() == ["works", "waits", "waits"]
    assert meeting.step("waits")["facts"] == {"answer": 43}


# In the place of torch: waits for ever where the module NAME is what the process runs, and is torch itself elsewhere.
_PLANTED_TORCH = """
import os, sys
if NAME in sys.orig_argv:
    gate = open(GATE, "w")
    print("here", file=gate, flush=True)
    os.read(os.pipe()[0], 1)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["torch"]
import torch
"""


@pytest.mark.parametrize(("step", "name"), [("launches", "first_launch"), ("adds", "one_add")])
def test_a_killed_command_leaves_no_process_of_a_step_behind(meeting: Meeting, step: str, name: str) -> None:
    """However early: torch, which brings the device's own package, is still being imported."""
    planted, gate_path = meeting.directory / "planted", meeting.directory / "gate"
    planted.mkdir()
    code = _PLANTED_TORCH.replace("NAME", repr(f"service.first_host.{name}")).replace("GATE", repr(str(gate_path)))
    (planted / "torch.py").write_text(code)
    paths = os.pathsep.join([str(planted), str(ROOT)])
    with meeting.start(step, PYTHONPATH=paths) as command, gate_path.open() as gate:
        assert gate.readline() == "here\n"
        command.kill()
        assert gate.read() == ""  # it is gone
        command.communicate(timeout=LIMIT_SECONDS)


def test_a_step_that_always_kills_the_command_is_passed_over(meeting: Meeting) -> None:
    for flags in ((), ("--resume",)):
        with meeting.start("always_waits,works", *flags) as command, (meeting.directory / "gate").open() as gate:
            assert gate.readline() == "here\n"
            command.kill()
            assert gate.read() == ""  # the step's process is gone
            command.communicate(timeout=LIMIT_SECONDS)
    assert meeting.run("always_waits,works", "--resume")[0] == 1
    assert meeting.step("always_waits")["reason"].startswith("the command was killed each of the 2 times")
    assert meeting.step("works")["status"] == "ok"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_keeps_what_was_found(meeting: Meeting, sent: signal.Signals) -> None:
    """By hand, by a container's end, and by that of a terminal whose connection is gone."""
    with meeting.start("works,waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        command.send_signal(sent)
        assert gate.read() == ""
        _, err = command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 130
    assert err == "multilora: interrupted; what was found is in first-host/report.html, and --resume goes on.\n"
    assert [(step["status"], step["num_begun"]) for step in meeting.report["steps"]] == [("ok", 1), ("not run", 0)]


def test_a_terminal_that_is_lost_interrupts(meeting: Meeting) -> None:
    """There is nobody to tell it to, and the report is there."""
    ours, its = os.openpty()
    with meeting.start("works,waits", terminal=its) as command, (meeting.directory / "gate").open() as gate:
        os.close(its)
        assert gate.readline() == "here\n"
        os.close(ours)
        assert gate.read() == ""
        assert command.wait(LIMIT_SECONDS) == 130
    assert [(step["status"], step["num_begun"]) for step in meeting.report["steps"]] == [("ok", 1), ("not run", 0)]


def test_an_interruption_is_not_interrupted(meeting: Meeting) -> None:
    """By somebody who does not let go of Ctrl-C."""
    with meeting.start("works,waits") as command, (meeting.directory / "gate").open() as gate:
        assert gate.readline() == "here\n"
        while command.poll() is None:
            command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 130
    assert err == "multilora: interrupted; what was found is in first-host/report.html, and --resume goes on.\n"
    assert [(step["status"], step["num_begun"]) for step in meeting.report["steps"]] == [("ok", 1), ("not run", 0)]


def test_a_command_that_is_to_outlive_its_terminal_does(meeting: Meeting) -> None:
    """As under nohup."""
    with meeting.start("meets", ignored=(signal.SIGHUP,)) as command:
        assert (meeting.directory / "gate").read_text() == "here\n"
        command.send_signal(signal.SIGHUP)
        (meeting.directory / "gate").write_text("go on\n")
        command.communicate(timeout=LIMIT_SECONDS)
    assert (command.returncode, meeting.step("meets")["status"]) == (0, "ok")
