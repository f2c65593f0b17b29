"""Answers of the routes for adapters and their versions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from service.api.schema.answers import Response


class ModuleReport(Response):
    """One adapted module: rank, scaling and size of its tensors. `rank` is 0 where it has no LoRA weights, and `parts`
    are what it has beside them: `lora_magnitude_vector`, `lora_B.bias`, `bias`, `weight`,
    `token_adapter.trainable_tokens_delta`."""

    module: str
    rank: int
    scaling: float
    bytes: int
    parts: list[str]


class AdapterSummary(Response):
    """An adapter, as it is listed: the current `version` of its name. `state` is where its weights are now; `last_used`
    when a request for it last began to run, in Unix seconds, null if none has since the server started. `pinned`:
    whether it is to be on the device, asked for or not. `replicas`: of several engines, those that hold it."""

    name: str
    object: Literal["adapter"]
    version: int
    digest: str
    base: str
    owner: str
    visibility: Literal["private", "shared", "public"]
    created: int
    rank: int
    bytes: int
    rows: dict[str, int]
    pinned: bool
    state: Literal["disk", "host", "device"]
    has_chat_template: bool
    last_used: int | None
    replicas: dict[str, Literal["disk", "host", "device"]] = Field({})


class AdapterResponse(AdapterSummary):
    """An adapter: what was bound where. `eos_token_ids` end its answers beside the base's."""

    modules: list[ModuleReport]
    eos_token_ids: list[int]
    notes: list[str]


class AdapterVersion(Response):
    """A content that a name has stood for: since when, by whom, and what they said of it. `same_as` is the version that
    has the same weights, value by value, in another float type."""

    number: int
    digest: str
    created: int
    by: str
    note: str
    same_as: int | None


class AdapterHistory(Response):
    """The versions of a name, newest first. `shared_with`, and `by` of each version, are told to its owner alone."""

    object: Literal["list"]
    name: str
    owner: str
    visibility: Literal["private", "shared", "public"]
    shared_with: list[str]
    data: list[AdapterVersion]


class AdapterList(Response):
    """A page of adapters, without their load reports; `last_id` is what `after` takes where more follow."""

    object: Literal["list"]
    data: list[AdapterSummary]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AdapterDeleted(Response):
    """The name is gone; what runs finishes."""

    name: str
    object: Literal["adapter.deleted"]
    digest: str
    deleted: bool
