"""The base of all request bodies, with the bounds on what is wrong with one; and the refusal of unknown query
parameters, so that none is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import fastapi
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from adapters.sums import MAX_PARTS, MAX_WEIGHT
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


class HistoryPart(Request):
    """Part of a conversation so far, which is the client's own: keys that are not listed are ignored."""

    model_config = ConfigDict(extra="ignore")


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


async def _refuse_fields(request: fastapi.Request) -> None:
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise BadRequest("This request has no body: send its parameters in the query, as in /pause?mode=keep.")


# For routes with parameters in the query alone, whose names a body would have too.
no_body = fastapi.Depends(_refuse_fields)


Weight = Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]


class WeightedAdapter(Request):
    """An adapter in a sum."""

    name: Annotated[str, Field(min_length=1)]
    weight: Weight = Field(1.0, description=f"what it is multiplied by, -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")


class LlamaAdapter(Request):
    """The same as llama.cpp's clients have it."""

    id: Annotated[str, Field(min_length=1, description="an adapter's name; numbers are refused")]
    scale: Weight

    @model_validator(mode="before")
    @classmethod
    def _refuse_numbers(cls, value: Any) -> Any:
        number = value.get("id") if isinstance(value, dict) else None
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            raise field_error("id", "`id` is a number; adapters have names here, listed by GET /v1/models: send one.")
        return value


_ModelName = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[list[WeightedAdapter], Field(min_length=1, max_length=MAX_PARTS), FIRST, Tag("sum")],
    Discriminator(lambda value: "sum" if isinstance(value, list) else "name"),
]


class Answering(Request):
    """The fields that name the model that answers."""

    model: _ModelName | None = Field(
        None, description="the base's name (the default), an adapter's name, `base:adapter`, or as `adapters`"
    )
    adapter_id: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="an adapter's name; if `model` names one too it must be the same"
    )
    adapters: Annotated[list[WeightedAdapter], Field(max_length=MAX_PARTS), FIRST] | None = Field(
        None, description=f"`name` and `weight` of up to {MAX_PARTS} adapters, added up; `model` names none then"
    )
    lora: Annotated[list[LlamaAdapter], Field(max_length=MAX_PARTS), FIRST] | None = Field(
        None, description="as `adapters`: llama.cpp's `id`, here a name, and `scale`"
    )

    @model_validator(mode="after")
    def _check_sum(self) -> Answering:
        named = [name for name in ("adapters", "lora") if getattr(self, name)]
        named = ["model", *named] if isinstance(self.model, list) else named
        if named and self.adapter_id:
            named.append("adapter_id")
        if len(named) > 1:
            raise field_error(named[1], f"`{named[0]}` and `{named[1]}` both name adapters; send one of them.")
        return self

    @property
    def summed(self) -> tuple[str, list[tuple[str, float]]] | None:
        """The field with the adapters of a sum, their names and weights; None where one model is named, or none."""
        if isinstance(self.model, list):
            return "model", [(one.name, one.weight) for one in self.model]
        if self.adapters:
            return "adapters", [(one.name, one.weight) for one in self.adapters]
        return ("lora", [(one.id, one.scale) for one in self.lora]) if self.lora else None
