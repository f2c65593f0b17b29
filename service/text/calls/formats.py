"""The formats of tool calls that there are, and which one a chat template speaks."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from service.text.calls import hermes, lfm2, llama3, mistral, qwen3_coder
from service.text.calls.call_parser import CallParser, Tools


@dataclass(frozen=True)
class CallFormat:
    """One format.

    name        as the setting `tool_parser` calls it
    is_shown    whether a chat template shows it to its model. Templates come with uploads of up to 1 MiB and are asked
                under Python's lock, so that it must take time in proportion to them
    marks       what marks calls; where one is a special token, it must be seen in the text
    parser      from the tools, and whether calls are given out in pieces, to a parser of one answer
    separators  characters that mean nothing between two calls or behind the last, besides blanks
    new_id      an id for a call, as templates of this format want it
    """

    name: str
    is_shown: Callable[[str], bool]
    marks: tuple[str, ...]
    parser: Callable[[Tools, bool], CallParser]
    separators: str = ""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


def _holds(*marks: str) -> Callable[[str], bool]:
    return lambda source: any(mark in source for mark in marks)


def _holds_parameters(source: str) -> bool:
    """`<parameter=` somewhere behind the first `<function=`."""
    at = source.find(qwen3_coder.FUNCTION)
    return at >= 0 and source.find(qwen3_coder.PARAMETER, at) >= 0


def _nine_alphanumerics() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_IPYTHON = re.compile(r"\bipython\b")
# In the order in which a template is asked: some of the later ones quote the marks of earlier ones as examples.
_FORMATS = (
    CallFormat("lfm2", _holds(lfm2.START, "<|tool_list_start|>"), (lfm2.START, lfm2.END), lfm2.Lfm2Parser),
    CallFormat(
        "mistral",
        _holds(mistral.START, "[AVAILABLE_TOOLS]"),
        (mistral.START, mistral.CALL_ID, mistral.ARGS),
        mistral.MistralParser,
        separators="]}",
        new_id=_nine_alphanumerics,
    ),
    CallFormat(
        "qwen3_coder",
        _holds_parameters,
        (qwen3_coder.START, qwen3_coder.END),
        qwen3_coder.Qwen3CoderParser,
    ),
    # Not what others write between the same marks, as GLM-4.5 does.
    CallFormat(
        "hermes",
        lambda source: hermes.START in source and not _holds(qwen3_coder.FUNCTION, "<arg_key>")(source),
        (hermes.START, hermes.END),
        hermes.HermesParser,
    ),
    CallFormat(
        "llama3_json",
        lambda source: llama3.TAG in source or _IPYTHON.search(source) is not None,
        (llama3.TAG,),
        llama3.Llama3Parser,
        separators=f"{llama3.SEPARATOR},]}}",
    ),
)
FORMATS = {one.name: one for one in _FORMATS}
# The format of the prompt for templates that show no tools (`service.text.generic_tools`).
GENERIC = FORMATS["hermes"]


def format_of_template(source: str) -> CallFormat | None:
    """The format that a chat template shows to its model, None if it shows none of those that there are."""
    return next((one for one in _FORMATS if one.is_shown(source)), None)
