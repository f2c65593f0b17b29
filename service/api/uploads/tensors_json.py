"""SGLang's body of an adapter's tensors: JSON, of which one field may be gigabytes. That field is decoded while it
comes, and never held whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from pybase64 import b64decode
from pydantic import ValidationError

from adapters.store.store import Upload, UploadPart
from service.api.errors import BadRequest, BodyTooLarge
from service.api.http.json_body import check_counts, parsed
from service.api.schema.control import LoadTensorsRequest
from service.api.schema.error_messages import bad_request
from service.api.uploads.multipart import Sent

# The most that may stand beside the tensors.
MAX_BESIDE_BYTES = 1 << 20
_FIELD = b'"serialized_tensors"'
# The first byte of a pickle of protocol 2 to 5; in safetensors the ninth is the header's `{`.
_PICKLE, _PADDING = 0x80, 0x3D
_NOT_BASE64 = "`serialized_tensors` must be safetensors in base64, without line breaks, and all of it"
_PADDED = f"{_NOT_BASE64}: padding stands at the end alone."
_FORMS = (
    "send `lora_name`, `config_dict` and `serialized_tensors`, safetensors in base64, or the files and `name` as "
    "multipart/form-data"
)
_NO_PICKLE = (
    "`serialized_tensors` is a pickle, which this server never opens; send safetensors in base64 instead: "
    "base64.b64encode(safetensors.torch.save(tensors)).decode(). PUT /v1/adapters/{name}?ephemeral=true takes the file "
    "as it is."
)


class TensorsJson:
    """Feeds one JSON body into an `Upload`, as `MultipartUpload` does another one. `feed_all` raises BadRequest,
    BodyTooLarge for too much beside the tensors, and the errors of the store."""

    def __init__(self, check_name: Callable[[str], object], upload: Upload) -> None:
        self._check_name = check_name
        self._upload = upload
        self._beside = bytearray()  # the body with an empty text in the tensors' place
        self._scanned = 0  # bytes of it
        self._depth, self._in_text, self._is_escaped, self._text_start = 0, False, False, 0
        self._last_text, self._awaits_tensors = b"", False
        self._config: dict[str, Any] | None = None  # once the upload has it
        self._part: UploadPart | None = None  # while the tensors come
        self._undecoded, self._start, self._has_tensors = b"", b"", False

    def feed_all(self, pieces: Iterable[bytes | bytearray]) -> None:
        """Feed them one after the other."""
        for piece in pieces:
            rest = bytes(piece)
            while rest:
                rest = self._feed_beside(rest) if self._part is None else self._feed_tensors(rest)

    def finish(self) -> Sent:
        """Check what stands beside the tensors, and give the configuration to the upload. BadRequest."""
        if self._part is not None:
            raise BadRequest("The body ends within `serialized_tensors`; send it whole.", param="serialized_tensors")
        refusal = None
        try:
            check_counts(bytes(self._beside))
            body = LoadTensorsRequest.model_validate(parsed(bytes(self._beside)))
        except json.JSONDecodeError as error:
            raise BadRequest(f"The body is not JSON: {error.msg}; {_FORMS}.") from error
        except ValidationError as error:
            refusal = bad_request(error.errors())
        if refusal is not None:
            raise refusal
        if not self._has_tensors:
            raise BadRequest(f"{_NOT_BASE64}.", param="serialized_tensors")
        self._check_name(body.lora_name)
        self._take_config(body.config_dict)
        return Sent(body.lora_name, "", None, (), body.on_new_version)

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._part is not None:
            self._part.close()
            self._part = None

    def _feed_beside(self, data: bytes) -> bytes:
        """Keep what comes up to the tensors' text; the rest, which is of that."""
        first = len(self._beside)
        self._beside += data[: MAX_BESIDE_BYTES + 1]
        while self._scanned < len(self._beside):
            char = self._beside[self._scanned]
            self._scanned += 1
            if self._in_text:
                self._take_text(char)
            elif self._begins_tensors(char):
                rest = data[self._scanned - first :]
                del self._beside[self._scanned :]
                self._beside += b'"'
                self._scanned += 1
                self._begin_tensors()
                return rest
        if len(self._beside) > MAX_BESIDE_BYTES:
            raise BodyTooLarge(
                f"The body has more than {MAX_BESIDE_BYTES} bytes beside `serialized_tensors`, which takes the "
                "tensors: safetensors in base64."
            )
        return b""

    def _begin_tensors(self) -> None:
        """Give the configuration to the upload if it stands before the tensors, to bind them while they come."""
        before = None
        with suppress(json.JSONDecodeError):
            before = parsed(bytes(self._beside) + b"}")
        if isinstance(before, dict) and isinstance(before.get("config_dict"), dict):
            self._take_config(before["config_dict"])
        self._part = self._upload.open_part("adapter_model", "adapter_model.safetensors")

    def _take_config(self, config: dict[str, Any]) -> None:
        if self._config not in (None, config):
            raise BadRequest("`config_dict` is there twice; send it once.", param="config_dict")
        if self._config is None:
            try:
                text = json.dumps(config)
            except RecursionError as error:
                raise BadRequest("`config_dict` is nested too deeply; send PEFT's.", param="config_dict") from error
            self._config = config
            with self._upload.open_part("adapter_config", "adapter_config.json") as part:
                part.write(text.encode())
            self._upload.check_config()

    def _take_text(self, char: int) -> None:
        """A character inside of a text."""
        if self._is_escaped:
            self._is_escaped = False
        elif char == 0x5C:  # a backslash
            self._is_escaped = True
        elif char == 0x22:
            self._in_text = False
            self._last_text = bytes(self._beside[self._text_start : self._scanned])

    def _begins_tensors(self, char: int) -> bool:
        """Whether a character outside of texts is the quote before the tensors."""
        awaited, self._awaits_tensors = self._awaits_tensors, self._awaits_tensors and char in b" \t\r\n"
        if char == 0x22:
            if awaited:
                if self._has_tensors:
                    raise BadRequest("`serialized_tensors` is there twice; send it once.", param="serialized_tensors")
                return True
            self._in_text, self._text_start = True, self._scanned - 1
        elif char in b"{[":
            self._depth += 1
        elif char in b"}]":
            self._depth -= 1
        elif char == 0x3A:  # a colon
            self._awaits_tensors = self._depth == 1 and self._last_text == _FIELD
        return False

    def _feed_tensors(self, data: bytes) -> bytes:
        """Decode what comes up to the end of the tensors' text; the rest, which is beside it."""
        end = data.find(b'"')
        text, begun = self._undecoded + (data if end < 0 else data[:end]), b""
        if b"\\" in text:
            text, begun = _unescaped(text, is_whole=end >= 0)
        # Of what goes on, the last four may be padding.
        num_ready = len(text) if end >= 0 else max(0, len(text) - 4) // 4 * 4
        if end < 0 and num_ready and text[num_ready - 1] == _PADDING:
            raise BadRequest(_PADDED, param="serialized_tensors")
        self._write(memoryview(text)[:num_ready])
        self._undecoded = text[num_ready:] + begun
        if end < 0:
            return b""
        self._has_tensors = True
        self._refuse_pickle(b"\0" * 9)
        self.close()
        return data[end + 1 :]

    def _write(self, text: memoryview) -> None:
        assert self._part is not None
        try:
            decoded = b64decode(text, validate=True)
        except ValueError as error:
            raise BadRequest(f"{_NOT_BASE64}.", param="serialized_tensors") from error
        self._refuse_pickle(decoded)
        if decoded:
            self._part.write(decoded)

    def _refuse_pickle(self, decoded: bytes) -> None:
        """BadRequest if the tensors' first nine bytes, to which more are added, are no safetensors but a pickle."""
        if len(self._start) < 9:
            self._start += decoded[: 9 - len(self._start)]
            if len(self._start) == 9 and self._start[0] == _PICKLE and self._start[8:] != b"{":
                raise BadRequest(_NO_PICKLE, param="serialized_tensors")


def _unescaped(text: bytes, *, is_whole: bool) -> tuple[bytes, bytes]:
    """Base64 without JSON's escapes, of which some writers use one for each `/` or `+`; and, where more comes, the
    beginning of one. BadRequest for what is no base64 then."""
    last = text.rfind(b"\\")
    cut = len(text) if is_whole or last <= len(text) - len(rb"\u002b") else last
    try:
        plain = json.loads(f'"{text[:cut].decode("ascii")}"').encode("ascii")
    except ValueError as error:
        raise BadRequest(f"{_NOT_BASE64}.", param="serialized_tensors") from error
    if b"\\" in plain or b'"' in plain:  # to be read as those of JSON, together with what comes
        raise BadRequest(f"{_NOT_BASE64}.", param="serialized_tensors")
    return plain, text[cut:]
