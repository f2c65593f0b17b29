"""Multipart uploads straight into the store's staging files: never a whole part in memory, refused early.

The parser's callbacks write to disk, so that pieces are parsed in a thread, while more comes; one thread at a time,
hence no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from pydantic import BaseModel, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.files.name_versions import OnNewVersion, Visibility
from adapters.quota import NUM_SMALL
from adapters.store.store import Upload, UploadPart
from service.api.errors import BadRequest
from service.api.schema.control import NameSetting
from service.fairness.thread_pool import FairPool, in_turn
from service.tenants.keys_file import TENANT

VISIBILITIES: tuple[str, ...] = get_args(Visibility)
# Parts that are text, and how many characters each may have.
_MAX_CHARACTER_BYTES = 4  # in UTF-8
_TEXT_PARTS = {"name": 1024, "note": 4096, "visibility": 16, "shared_with": 4096}

# A thread for each upload that may be open (`--max-uploads`, up to 64, and one of each of NUM_SMALL clients beyond
# them): whatever one of them is checked for, no other waits for its thread.
MAX_THREADS = 64 + NUM_SMALL

_Result = TypeVar("_Result")
_THREADS = FairPool(MAX_THREADS, "upload")


class Sent(NamedTuple):
    """The words of an upload's body beside its files: the adapter's name, None if it is not there, a note on this
    version, who may use the name, None if that is not said, and what its requests do when it moves, None likewise."""

    name: str | None
    note: str
    visibility: Visibility | None
    shared_with: tuple[str, ...]
    on_new_version: OnNewVersion | None = None

    def name_for(self, addressed: str | None) -> str:
        """The name, where the request's address names one (`addressed`) or its body has to. BadRequest if neither does,
        or both do and differ."""
        name = self.name if addressed is None else addressed
        if name is None:
            raise BadRequest("The part `name` is missing; send the adapter's name.", param="name")
        if self.name not in (None, name):
            raise BadRequest("The part `name` is not the name in the address; leave the part out.", param="name")
        return name


def visible_to(visibility: str | None, shared_with: str | None) -> tuple[Visibility | None, tuple[str, ...]]:
    """Parse the tenants that may use a name from two texts: one of VISIBILITIES, and for "shared" the tenants separated
    by commas. BadRequest for an invalid combination."""
    if visibility is not None and visibility not in VISIBILITIES:
        raise BadRequest(f"`visibility` must be one of {', '.join(VISIBILITIES)}.", param="visibility")
    tenants = tuple(dict.fromkeys(one.strip() for one in (shared_with or "").split(",") if one.strip()))
    if (visibility == "shared") != bool(tenants):
        raise BadRequest(
            "`visibility` shared goes with `shared_with`, the tenants who may use the adapter; send both or neither.",
            param="shared_with",
        )
    if not all(TENANT.fullmatch(tenant) for tenant in tenants):
        raise BadRequest(
            "`shared_with` must hold names of tenants: lower-case letters, digits and '-'.", param="shared_with"
        )
    return cast("Visibility | None", visibility), tenants


class MultipartUpload:
    """Feeds one multipart body into an `Upload`; the parts that are text are kept apart.

    check_name  called with the part `name` as soon as it is there; what it raises refuses the upload

    feed, feed_all
            may write files: call them in a thread. Raise BadRequest and the errors of the store.
    finish  those parts. BadRequest if the body is incomplete.
    """

    def __init__(self, check_name: Callable[[str], object], upload: Upload, boundary: bytes) -> None:
        self._check_name = check_name
        self._upload = upload
        self._part: UploadPart | None = None
        self._text_part = ""
        self._texts: dict[str, bytearray] = {}
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise BadRequest(f"The multipart boundary cannot be used: {error}.") from error

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"The multipart body is broken: {error}.") from error

    def feed_all(self, pieces: Iterable[bytes | bytearray]) -> None:
        """Feed them one after the other."""
        for piece in pieces:
            self.feed(bytes(piece))

    def finish(self) -> Sent:
        if not self._complete:
            raise BadRequest("The multipart body ends in the middle; send it whole.")
        texts = {}
        for part, data in self._texts.items():
            try:
                texts[part] = data.decode()
            except UnicodeDecodeError:
                raise BadRequest(f"The part `{part}` is not UTF-8.", param=part) from None
        visibility, shared_with = visible_to(texts.get("visibility"), texts.get("shared_with"))
        return Sent(texts.get("name"), texts.get("note", ""), visibility, shared_with)

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._part is not None:
            self._part.close()
            self._part = None

    # ---- the parser's callbacks

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        part_name = options.get(b"name", b"").decode("utf-8", "replace")
        file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        if part_name in _TEXT_PARTS and not file_name:
            if part_name in self._texts:
                raise BadRequest(f"The part `{part_name}` is there twice; send it once.", param=part_name)
            self._text_part, self._texts[part_name] = part_name, bytearray()
            return
        self._part = self._upload.open_part(part_name, file_name or None)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if part := self._text_part:
            self._texts[part] += data[start:end]
            _refuse_long(part, -(-len(self._texts[part]) // _MAX_CHARACTER_BYTES))
            return
        assert self._part is not None, "opened when the part began"
        self._part.write(memoryview(data)[start:end])  # nobody copies it

    def _on_part_end(self) -> None:
        if part := self._text_part:
            self._text_part = ""
            text = self._texts[part].decode("utf-8", "replace")
            _refuse_long(part, len(text))
            if part == "name":  # better refused now than after gigabytes, if it comes before the files
                self._check_name(text)
            return
        assert self._part is not None, "opened when the part began"
        is_config = self._part.role == "config"
        self.close()
        if is_config:
            self._upload.check_config()  # likewise

    def _on_end(self) -> None:
        self._complete = True


def _refuse_long(part: str, num_characters: int) -> None:
    """BadRequest for a text of so many or more."""
    if num_characters > _TEXT_PARTS[part]:
        raise BadRequest(
            f"The part `{part}` is too long; it may have at most {_TEXT_PARTS[part]} characters.", param=part
        )


async def in_upload_thread(work: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
    """Run what checks or stores an adapter, which may take seconds, in threads of its own: listings, deletions and
    prompts have the default ones, and do not wait for uploads. Who pays is known there as it is here."""
    return await in_turn(work, *arguments, pool=_THREADS, **named)


class UploadQuery(BaseModel, extra="forbid"):
    """Query parameters of an upload."""

    probe: bool = Field(
        False,
        description="run a fixed prompt with the adapter before it gets its name, and refuse one that changes nothing "
        "or gives logits that are no numbers",
    )
    ephemeral: bool = Field(
        False,
        description="keep the weights in memory alone; the name goes with the server, and may have no durable version",
    )
    without_tokenizer: bool = Field(
        False,
        description="leave out tokenizer.json, tokenizer_config.json, added_tokens.json and special_tokens_map.json",
    )
    expert_b_order: Literal["rank_major", "grouped_by_expert"] | None = Field(
        None,
        description="order of lora_B's columns in parameters of experts, where adapter_config.json has no "
        "lora_B_layout: rank after rank as PEFT, or expert after expert as Unsloth before September 2026",
    )
    on_new_version: NameSetting = None
