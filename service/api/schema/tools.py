"""The tools that a chat or a message may call, as requests define them, and what of them a chat template sees."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    model_validator,
)

from service.api.errors import quoted
from service.api.schema.base import FIRST, Request, field_error, value_fault
from service.api.schema.unserved_fields import MESSAGE_TOOL_FIELDS, TOOL_FIELDS
from service.grammars.json_schemas import least_chars

# OpenAI's figure.
MAX_TOOLS = 128
# Characters of all definitions together, as JSON: the template writes them into the prompt, and grammars are made of
# them.
MAX_TOOLS_CHARS = 1 << 18
# Depth of a tool's parameters.
MAX_SCHEMA_DEPTH = 64

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
_NO_SUCH_TOOL = "`tool_choice` names a function that is not among the `tools`."
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
# The choices of the Messages API, in a chat's words.
_MESSAGE_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MESSAGE_CHOICE = (
    '`tool_choice` must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}, which '
    "names one of the `tools`; each may have `disable_parallel_tool_use`, true or false, and nothing else."
)


def _checked_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    if "required" in parameters and parameters["required"] is None:  # as Go writes a list that holds nothing
        parameters = {name: value for name, value in parameters.items() if name != "required"}
    if parameters.get("type", "object") != "object":
        raise value_fault('must be the JSON schema of an object, with `type`: "object"')
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise value_fault("must be a JSON schema whose `properties` is an object of schemas")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise value_fault("must be a JSON schema whose `required` is a list of names")
    return _bounded_depth(parameters)


def _bounded_depth(schema: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [inner for value in level for inner in _inner(value)]
        if not level:
            return schema
    raise value_fault(f"may be nested up to {MAX_SCHEMA_DEPTH} levels deep")


# JSON schema of the object that a function is called with.
Parameters = Annotated[dict[str, Any], AfterValidator(_checked_parameters)]


class FunctionDefinition(Request):
    """Definition of a function: its name, description and parameters."""

    unserved = TOOL_FIELDS

    name: Name = Field(description="letters, digits, `_`, `-` and `.`, up to 128 of them")
    description: str | None = Field(None, description="what it does, for the model")
    parameters: Parameters | None = Field(None, description="JSON schema of an object; default: no parameters")
    strict: bool | None = Field(None, description="hold the model to the schema wherever it calls this tool")
    return_: Annotated[dict[str, Any], AfterValidator(_bounded_depth)] | None = Field(
        None, alias="return", description="what it gives back, for the model, as transformers describes it"
    )


class Tool(Request):
    """A function that the client runs when the model calls it."""

    unserved = TOOL_FIELDS

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the object that it is called with."""
        return self.function.parameters if self.function.parameters else _NO_PARAMETERS

    def for_template(self) -> dict[str, Any]:
        """Plain data as templates know it, its keys in the order in which transformers writes them."""
        described = {} if self.function.description is None else {"description": self.function.description}
        returned = {} if self.function.return_ is None else {"return": self.function.return_}
        function = {"name": self.function.name, **described, "parameters": self.schema_of_arguments, **returned}
        return {"type": "function", "function": function}


class OtherTool(Request):
    """A tool of a type that this server does not run, such as `web_search`, `custom` or `namespace`: the model is not
    told of it, and a header of the answer names it."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="anything but `function`")


class NamedFunction(Request):
    """The name of a tool."""

    name: str


class NamedTool(Request):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Request):
    """The tools that the model may call, of those that it is told of."""

    mode: Literal["auto", "required"] = Field(description="whether it may answer without a call, or must call one")
    tools: Annotated[list[NamedTool], FIRST, Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Request):
    """A choice among some of the tools, which leaves the prompt as all of them make it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> set[str]:
        """Names of the tools that may be called."""
        return {tool.function.name for tool in self.allowed_tools.tools}


# In pydantic's paths, which do not tell it to clients: what is no choice among some of the tools.
PLAIN_CHOICE = "none|auto|required|function"


def _kind_of_choice(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "allowed_tools" if kind == "allowed_tools" else PLAIN_CHOICE


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"] | NamedTool, Tag(PLAIN_CHOICE)]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]
# In pydantic's paths, as above.
TOOL_TAGS = ("function tool", "other tool")
TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
# Keys that only a function has: a tool with one of these sets is a function, whatever type it names. Searches for tools
# have parameters and no name.
_OF_FUNCTIONS = ({"function"}, {"name", "parameters"})


def _kind_of_tool(tool: Any) -> str:
    if isinstance(tool, OtherTool):
        return TOOL_TAGS[1]
    kind = tool.get("type") if isinstance(tool, dict) else None
    is_other = isinstance(kind, str) and kind != "function" and TYPE.fullmatch(kind) is not None
    return TOOL_TAGS[is_other and not any(keys <= tool.keys() for keys in _OF_FUNCTIONS)]


AnyTool = Annotated[
    Annotated[Tool, Tag(TOOL_TAGS[0])] | Annotated[OtherTool, Tag(TOOL_TAGS[1])], Discriminator(_kind_of_tool)
]
ToolList = Annotated[list[AnyTool], FIRST]


def functions_of(tools: Sequence[Tool | OtherTool] | None) -> list[Tool]:
    """Those that the model can be told of."""
    return [tool for tool in tools or () if isinstance(tool, Tool)]


def check_tools(given: Sequence[Tool | OtherTool]) -> None:
    """A fault of the field `tools` for too many, too long ones, or two of one name."""
    if len(given) > MAX_TOOLS:
        raise field_error("tools", f"`tools` has {len(given)} tools; this server takes {MAX_TOOLS}.")
    tools = functions_of(given)
    least = least_chars([tool.for_template() for tool in tools], MAX_TOOLS_CHARS)
    if least > MAX_TOOLS_CHARS:
        raise field_error("tools", f"`tools` has at least {least} characters; this server takes {MAX_TOOLS_CHARS}.")
    try:
        num_chars = tools_chars(tools)
    except ValueError:
        raise field_error("tools", "`tools` holds NaN or infinity, which are none of JSON's numbers.") from None
    if num_chars > MAX_TOOLS_CHARS:
        raise field_error("tools", f"`tools` has {num_chars} characters; this server takes {MAX_TOOLS_CHARS}.")
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise field_error("tools", f"`tools` has two tools of the name '{twice}'; give each a name of its own.")


def tools_chars(tools: list[Tool]) -> int:
    """The characters of all definitions, as JSON."""
    return sum(len(json.dumps(tool.for_template(), ensure_ascii=False, allow_nan=False)) for tool in tools)


def check_tool_choice(choice: ToolChoice | None, given: Sequence[Tool | OtherTool] | None) -> None:
    """A fault of the field `tool_choice` if it asks for a call where there is nothing to call."""
    if choice is None or choice in ("none", "auto"):
        return
    tools = functions_of(given)
    if not tools:
        which = "`tools` of type `function`" if given else "`tools`"
        raise field_error("tool_choice", f"`tool_choice` asks for a call, but there are no {which}; send some.")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise field_error("tool_choice", _NO_SUCH_TOOL)
    if isinstance(choice, AllowedToolsChoice) and choice.names - {tool.function.name for tool in tools}:
        raise field_error("tool_choice", _NO_SUCH_TOOL)


def may_skip_calls(choice: ToolChoice | None) -> bool:
    """Whether the model chooses to call or to answer in words."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "auto"
    return choice in (None, "auto")


def callable_tools(tools: list[Tool], choice: ToolChoice | None) -> list[Tool]:
    """Those that the choice leaves."""
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    if isinstance(choice, AllowedToolsChoice):
        return [tool for tool in tools if tool.function.name in choice.names]
    return tools


class MessageTool(Request):
    """A tool of the Messages API, which the client runs when the model calls it."""

    unserved = MESSAGE_TOOL_FIELDS

    type: Literal["custom"] | None = None
    name: Annotated[Name, Field(description="letters, digits, `_`, `-` and `.`, up to 128 of them")]
    description: str | None = Field(None, description="what it does, for the model")
    input_schema: Parameters = Field(description="JSON schema of an object")
    strict: bool | None = Field(None, description="hold the model to the schema wherever it calls this tool")
    defer_loading: bool | None = Field(None, description="true: the model sees it once a message names it")
    input_examples: Annotated[list[Any], FIRST] | None = Field(None, description="left out")

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            sentence = (
                f"A tool of type {quoted(kind)!r} is not supported by this server, which runs no tools; leave it out, "
                "or define it by `name` and `input_schema` and run it yourself."
            )
            raise field_error("type", sentence)
        return value

    @property
    def as_function(self) -> dict[str, Any]:
        """The tool as chats have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class MessageToolChoice(Request):
    """Whether a message calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of type `tool`: the one that must be called")
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most")

    @model_validator(mode="wrap")
    @classmethod
    def _check_form(cls, value: Any, read: ModelWrapValidatorHandler[MessageToolChoice]) -> MessageToolChoice:
        try:
            return read(value)
        except ValidationError:  # which would be told as of a chat's `tool_choice`
            raise field_error("type", _MESSAGE_CHOICE) from None

    @model_validator(mode="after")
    def _check_name(self) -> MessageToolChoice:
        if self.type == "tool" and self.name is None:
            raise field_error("name", _MESSAGE_CHOICE)
        if self.type != "tool" and self.name is not None:
            raise field_error("name", "`tool_choice.name` is only allowed with `tool_choice.type`: 'tool'.")
        return self

    @property
    def for_chat(self) -> Any:
        """The choice as chats have it."""
        return {"type": "function", "function": {"name": self.name}} if self.name else _MESSAGE_CHOICES[self.type]


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
