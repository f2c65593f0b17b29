"""The base of all request bodies, with the bounds on what is wrong with one; and the refusal of unknown query
parameters, so that none is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import fastapi
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from service.api.errors import BadRequest, quoted
from service.api.schema.unserved_fields import UnservedField

MAX_FIELDS = 256  # of any object of a request
_MAX_WHOLE = 2.0**53  # beyond it floats leave integers out

# For every list that may be long: the first wrong item tells all that a client needs.
FIRST = Field(fail_fast=True)


def value_fault(words: str) -> PydanticCustomError:
    """For validators: what is wrong with the value that they look at.

    Not a ValueError: pydantic's error would hold it where Python's collector does not look, and its traceback leads to
    the body, and back to that error wherever it is on its way through a thread. Nothing of that was ever freed.
    """
    return PydanticCustomError("value_error", "{words}", {"words": words})


def bounded(value: Any, most: int) -> Any:
    """The value; a fault for an object of more than `most` items."""
    if isinstance(value, dict) and len(value) > most:
        raise value_fault(f"The object may have at most {most} items, and has {len(value)}")
    return value


def field_error(field: str, sentence: str) -> PydanticCustomError:
    """For validators of a whole object: what is wrong is this field of it, and the client is told this sentence."""
    return PydanticCustomError("field", "{sentence}", {"field": field, "sentence": sentence})


def _whole(value: Any) -> Any:
    """1.0 as 1: to JSON both are the integer, and some clients' languages know floats alone."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_WHOLE
    return int(value) if is_whole else value


class Request(BaseModel):
    """Base of all request bodies: unknown fields, wrong types, NaN and infinity are refused. A null asks for nothing,
    whatever its field.

    What is wrong with a body is found in bounded time and memory, for pydantic keeps an error of every field and every
    item: lists stop at the first (`FIRST`), and objects with too many fields are not looked at.

    unserved  fields that are accepted while they ask for nothing, by name
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, UnservedField]] = {}

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        bounded(value, MAX_FIELDS)
        if not isinstance(value, dict):
            return value
        value = {name: _whole(sent) for name, sent in value.items()}
        rows = {name: row for name in value if (row := cls._unserved_field(name)) is not None}
        for name, row in rows.items():
            if row.asks(value[name]):
                raise field_error(name, row.refusal)
        known = value.keys() & cls.model_fields.keys()
        return {name: sent for name, sent in value.items() if name in known or not (name in rows or sent is None)}

    @classmethod
    def _unserved_field(cls, name: str) -> UnservedField | None:
        return None if name in cls.model_fields else cls.unserved.get(name)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        rows = {name: row.json_schema for name, row in cls.unserved.items() if cls._unserved_field(name)}
        schema["properties"] = schema.get("properties", {}) | rows
        return schema


# Whoever moves a program from Azure's OpenAI to another server leaves the one in its client's settings, which send it
# with every request; Anthropic's clients send the other with requests that name a beta in a header.
_INERT = (b"api-version", b"beta")


def without_inert(query: bytes) -> bytes:
    """The query without what means nothing here."""
    if not any(name in query for name in _INERT):
        return query
    return b"&".join(part for part in query.split(b"&") if part.partition(b"=")[0] not in _INERT)


def refuse_query(request: fastapi.Request) -> None:
    """BadRequest for any parameter of the query."""
    for name in request.query_params:
        raise BadRequest(f"`{quoted(name)}` is not a parameter of this request; leave it out.", param=quoted(name))


# For routes that look at no query parameter.
no_query = fastapi.Depends(refuse_query)


# Lists, the second as OpenAI's clients write the first.
_LISTS = ("include", "include[]")


def _refuse_repeats(request: fastapi.Request) -> None:
    for name in request.query_params:
        if name not in _LISTS and len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"`{quoted(name)}` is there twice; send it once.", param=quoted(name))


# For routes whose parameters have one value each, but for lists: of two, one would be dropped.
each_once = fastapi.Depends(_refuse_repeats)
