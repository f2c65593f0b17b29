"""How a request says what its answer must be: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from service.api.schema.base import FIRST, Request, value_fault
from service.api.schema.unserved_fields import STRUCTURED_OUTPUT_FIELDS

JsonSchema = dict[str, Any] | bool | str
_MAX_TYPE_CHARS = 100


class TextFormat(Request):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Request):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Request):
    """A JSON schema with its name. It is always followed strictly."""

    name: str | None = Field(None, description="accepted and ignored")
    description: str | None = Field(None, description="accepted and ignored: say in the prompt what is wanted")
    schema_: JsonSchema = Field(alias="schema", description="JSON schema of the answer")
    strict: bool | None = Field(None, description="accepted; the schema is always followed strictly")


class JsonSchemaFormat(Request):
    """JSON that is valid for a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class TaggedStructure(Request):
    """A schema for the text between two tags."""

    begin: str = Field(description="begins with one of the triggers")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="any JSON by default")
    end: str


class StructuralTagFormat(Request):
    """Any text, parts of which follow a schema: `structures` and `triggers`, or `format`, as xgrammar has them."""

    type: Literal["structural_tag"]
    structures: Annotated[list[TaggedStructure], FIRST] | None = None
    triggers: Annotated[list[str], FIRST] | None = Field(None, description="the text is free until one of these comes")
    format: dict[str, Any] | None = Field(None, description="instead of both; see docs/structured-output.md")


def _check_type(given: Any) -> Any:
    """pydantic would write what is no known type into its error, however long that is."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind is not None and not (isinstance(kind, str) and len(kind) <= _MAX_TYPE_CHARS):
        raise value_fault("has a `type` that is not known")
    return given


ResponseFormat = Annotated[
    Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")],
    BeforeValidator(_check_type),
]


class StructuredOutputs(Request):
    """vLLM's constraint on the answer: one of these."""

    unserved = STRUCTURED_OUTPUT_FIELDS

    json_: JsonSchema | None = Field(default=None, alias="json", description="valid for this JSON schema")
    json_object: bool | None = Field(default=None, description="any JSON object")
    regex: str | None = Field(default=None, description="the whole answer matches this regular expression")
    choice: Annotated[list[str], FIRST] | None = Field(default=None, description="one of these texts")
    grammar: str | None = Field(default=None, description="a grammar of GBNF (llama.cpp's) or of Lark (llguidance's)")
    structural_tag: str | None = Field(default=None, description="a `response_format` of this type, as JSON in a text")
    whitespace_pattern: str | None = Field(
        default=None, description="regular expression of the white space between the tokens of JSON"
    )
    disable_any_whitespace: bool | None = Field(default=None, description="no white space between the tokens of JSON")
    disable_additional_properties: bool | None = Field(
        default=None, description="the request's field of this name, for what stands here"
    )
