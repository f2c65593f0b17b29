"""Bodies and answers of the routes that control the engine, in vLLM's and SGLang's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from service.api.schema.answers import Response
from service.api.schema.base import Request


class PauseQuery(BaseModel):
    """The query of POST /pause."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["abort", "wait", "keep"] = Field(
        "abort",
        description="running requests end at once with the finish_reason `abort`, end as usual while later ones wait, "
        "or stand still with all that is computed",
    )
    wait_for_inflight_requests: bool = Field(False, description="vLLM's older word for mode `wait`")
    clear_cache: bool = Field(False, description="reset the prefix cache too")


class PauseGenerationRequest(Request):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="running requests end at once with the finish_reason `abort`, lose their keys and values and are "
        "computed again, or stand still with all that is computed",
    )


class PauseResponse(Response):
    """Answer of POST /pause and /resume."""

    status: Literal["paused", "resumed"]


class IsPausedResponse(Response):
    """Answer of GET /is_paused."""

    is_paused: bool


class GenerationStateResponse(Response):
    """Answer of POST /pause_generation and /continue_generation."""

    message: str
    status: Literal["ok"]
