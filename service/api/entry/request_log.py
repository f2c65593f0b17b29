"""Fields that routers add to their request's one log line; `service.api.entry.middleware` writes it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from fastapi import Request

from service.api.errors import error_body
from service.api.generation.job import GenerationJob
from service.api.metrics.traces import Answered, Phase

_MAX_ERROR_CHARS = 500
_MAX_LEFT_OUT_CHARS = 1000


class RequestNotes:
    """Fields of a request's log line; jobs are read when the line is written, after the answer."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.jobs: list[GenerationJob] = []
        self._left_out: list[str] = []
        # For the request's trace: `type` of the error, parts of what it did, attributes.
        self.error_type: str | None = None
        self.phases: list[Phase] = []
        self.span: dict[str, Any] = {}

    def failed(self, error: Exception) -> None:
        """Why the request, or a stream that had begun, was answered with an error: what the client was told."""
        answered = error_body(error)["error"]
        self.fields |= {"error": answered["message"][:_MAX_ERROR_CHARS], "param": answered["param"]}
        self.error_type = answered["code"]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the request, for its trace."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases.append(Phase(name, began, time.perf_counter()))

    def answers(self, operation: str) -> list[Answered]:
        """The answers of models, for the trace. The parts of one request are one."""
        found: list[Answered] = []
        for job in self.jobs:
            part = job.answered(operation)
            if not (job.is_part and found):
                found.append(part)
                continue
            found[0].timers += part.timers
            for name in part.attributes.keys() & {"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}:
                found[0].attributes[name] += part.attributes[name]
        return found

    @property
    def adapter(self) -> str | None:
        """Which version of an adapter answers, for a header: `name@3 sha256:<digest>`, None for the base. The items of
        a batch may have several; then each item's fingerprint tells."""
        adapters = {job.adapter for job in self.jobs} - {None}
        return "several" if len(adapters) > 1 else next(iter(adapters), None)

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompts that the prefix cache had, for a header and the log; None before all answers are
        whole, hence in the header of a stream, and for embeddings."""
        if not self.jobs or not all(job.num_completion_tokens and job.is_over for job in self.jobs):
            return None
        return sum(job.num_cached_tokens for job in self.jobs)

    @property
    def left_out(self) -> str | None:
        """The header's list of request fields that had no effect; None if there are none."""
        names = ", ".join(self._left_out)
        return (names if len(names) <= _MAX_LEFT_OUT_CHARS else f"{names[:_MAX_LEFT_OUT_CHARS]} ...") or None

    def leave_out(self, names: Iterable[str]) -> None:
        """Name fields that are accepted and do nothing, in the answer's header and in the log."""
        self._left_out += [name for name in names if name not in self._left_out]
        if self._left_out:
            self.fields["left_out"] = self.left_out

    def lines(self) -> dict[str, Any]:
        """The fields, with the jobs' token counts added up."""
        if not self.jobs:
            return self.fields
        first = [job.first_token_seconds for job in self.jobs if job.first_token_seconds is not None]
        return self.fields | {
            "prompt_tokens": sum(run.num_prompt_tokens for job in self.jobs for run in job.runs),
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": sum(job.num_completion_tokens for job in self.jobs),
            "ended": ",".join(sorted({outcome for job in self.jobs for outcome in job.outcomes})) or None,
            "first_token_ms": round(min(first) * 1e3, 1) if first else None,
        }


def notes_of(request: Request) -> RequestNotes:
    """The notes of this request."""
    notes = request.scope["multilora.notes"]
    assert isinstance(notes, RequestNotes)
    return notes


def note(request: Request, **fields: Any) -> None:
    """Add fields to the log line. Never anything secret."""
    notes_of(request).fields.update(fields)


def note_job(request: Request, job: GenerationJob, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Add a generating job to the log line: who answers, whichever field named it, and what is left out, of
    which the client calls some by other `names`."""
    notes = notes_of(request)
    notes.fields["model"] = f"{notes.fields['model']},{job.full_name}" if "model" in notes.fields else job.full_name
    if (version := job.logged_version) is not None:
        notes.fields["version"] = f"{notes.fields['version']},{version}" if "version" in notes.fields else version
    notes.jobs.append(job)
    job.request_id = request.scope["multilora.request_id"]
    for plan in job.plans[:1]:
        notes.leave_out(names.get(name, name) for name in plan.prompt.left_out)
