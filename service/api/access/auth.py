"""API keys: what each route asks for, in one table, checked before a body is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from fastapi import Request
from starlette.datastructures import Headers

from adapters.store.store import AdapterStore
from service.api.access.namespace import Namespace
from service.api.errors import Forbidden, Unauthorized
from service.api.http_rules import INFERENCE_PATHS, PROBE_PATHS
from service.api.page import PAGE_PATHS
from service.api.state import services_of
from service.tenants.keys_file import Scope
from service.tenants.tenants import Caller, Tenants

# "any" is any key.
Need = Scope | Literal["open", "any"]

_READING = ("GET", "OPTIONS")  # a HEAD comes as a GET here, see `service.api.entry.middleware.EntryMiddleware`


class Route(NamedTuple):
    """One row of the table: what key a request to `path` needs. A `path` with a / at the end stands for all paths below
    it that end in `end`; empty `methods` stand for all methods."""

    path: str
    need: Need
    methods: tuple[str, ...] = ()
    end: str = ""


# The first one that fits counts. What fits none is no route, and takes any key: who has none does not learn which
# routes there are.
ROUTES = (
    *(Route(path, "open") for path in PROBE_PATHS),
    *(Route(path, "open", _READING) for path in sorted(PAGE_PATHS)),
    # Any of these may be open by --open-paths.
    Route("/docs", "any"),
    Route("/openapi.json", "any"),
    Route("/version", "any"),
    Route("/metrics", "any"),
    Route("/load", "any"),
    *(Route(path, "infer") for path in INFERENCE_PATHS),
    Route("/v1/responses/", "infer"),
    Route("/v1/models", "any"),
    Route("/v1/models/", "any"),
    Route("/v1/adapters/", "download", _READING, end="/archive"),
    Route("/v1/adapters", "any", _READING),
    Route("/v1/adapters/", "any", _READING),
    Route("/v1/adapters/", "admin", end="/pin"),
    Route("/v1/adapters/", "delete", ("DELETE",)),
    Route("/v1/adapters", "upload"),
    Route("/v1/adapters/", "upload"),
    Route("/load_lora_adapter_from_tensors", "upload"),
    Route("/unload_lora_adapter", "delete"),
    Route("/v1/load_lora_adapter", "admin"),
    Route("/load_lora_adapter", "admin"),
    Route("/skyrl/v1/load_lora_adapter", "admin"),
    Route("/v1/unload_lora_adapter", "admin"),
    Route("/reset_prefix_cache", "control"),
    Route("/flush_cache", "control"),
    Route("/server_info", "control"),
    Route("/get_world_size", "control"),
    Route("/abort_requests", "control"),
    Route("/abort_request", "control"),
    Route("/pause", "control"),
    Route("/resume", "control"),
    Route("/is_paused", "control"),
    Route("/pause_generation", "control"),
    Route("/sleep", "control"),
    Route("/wake_up", "control"),
    Route("/is_sleeping", "control"),
    Route("/continue_generation", "control"),
)
# Where there is a keys file, and what is told is of all its tenants.
_OF_ALL_TENANTS: dict[str, Need] = {"/metrics": "admin", "/load": "control"}
_WHAT: dict[Scope, str] = {
    "infer": "run models",
    "upload": "upload adapters",
    "delete": "delete adapters",
    "download": "download adapters",
    "control": "pause and reset the engine",
    "admin": "do this",
}


def route_of(method: str, path: str) -> Route | None:
    """The entry of the table for a request, None if there is none."""
    for route in ROUTES:
        is_below = route.path[-1] == "/" != route.path and path.startswith(route.path)
        fits = path[len(route.path) :].endswith(route.end) if is_below else path == route.path
        if fits and (not route.methods or method in route.methods):
            return route
    return None


class Access:
    """Checks each request's key against the route's need.

    open_paths  of the settings
    """

    def __init__(self, tenants: Tenants, open_paths: Iterable[str]) -> None:
        self._tenants = tenants
        self._open_paths = frozenset(open_paths)

    @property
    def has_tenants(self) -> bool:
        """Whether there may be several."""
        return self._tenants.has_file

    def need(self, method: str, path: str) -> Need:
        """The key that a request needs where keys are set."""
        route = route_of(method, path)
        if route is None:
            return "any"
        if route.path in self._open_paths:
            return "open"
        return _OF_ALL_TENANTS.get(route.path, route.need) if self._tenants.has_file else route.need

    def client_name(self, caller: Caller | None) -> str:
        """Name of the client: the tenant where there may be several, else the key; "" where no key is needed."""
        if caller is None or not self._tenants.need_keys:
            return ""
        return caller.tenant.name if self.has_tenants else caller.key_id

    async def refresh(self, method: str, path: str) -> None:
        """Have `check` know the keys as they are now, if the request needs one: to read them may take long."""
        if self._tenants.has_file and self.need(method, path) != "open":
            await self._tenants.refresh()

    def check(self, method: str, path: str, headers: Headers) -> Caller | None:
        """The caller; None where the route needs no key. Unauthorized without a known key, Forbidden if the key lacks
        the scope."""
        if not self._tenants.need_keys:
            return self._tenants.anybody()
        need = self.need(method, path)
        if need == "open":
            return None
        caller = self._tenants.caller(_key_in(headers))
        if caller is None:
            raise Unauthorized("This API key is not known here; check it.", headers={"WWW-Authenticate": "Bearer"})
        if need != "any" and not caller.may(need):
            scopes = "`admin`" if need == "admin" else f"`{need}` or `admin`"
            raise Forbidden(f"This API key may not {_WHAT[need]}; use one with the scope {scopes}.")
        return caller


async def check_again(request: Request, scope: Scope) -> None:
    """Check the key once more before a long operation takes effect. Unauthorized if the request's key has meanwhile
    been revoked, moved to another tenant, or lost the scope."""
    tenants, before = services_of(request).tenants, caller_of(request)
    if not tenants.need_keys:
        return
    await tenants.refresh()
    caller = tenants.caller(_key_in(request.headers))
    if caller is None or caller.tenant is not before.tenant or not caller.may(scope):
        raise Unauthorized(
            "This API key was revoked while the request ran, of which nothing remains; send it with another one.",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _key_in(headers: Headers) -> str:
    for name in ("Authorization", "x-api-key"):
        if len(headers.getlist(name)) > 1:  # a proxy before this server may go by another one of them
            raise Unauthorized(
                f"The request has several {name} headers; send one.", headers={"WWW-Authenticate": "Bearer"}
            )
    if "authorization" not in headers and (key := headers.get("x-api-key", "").strip()):
        return key
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized(
            "Send your API key in the header 'Authorization: Bearer <key>', or as 'x-api-key: <key>'.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key.strip()


def caller_of(request: Request) -> Caller:
    """The request's sender. Not for routes that are open."""
    caller = request.scope["multilora.caller"]
    assert isinstance(caller, Caller), "an open route asks who calls"
    return caller


def namespace_of(request: Request, store: AdapterStore) -> Namespace:
    """The adapters as the request's sender sees them."""
    return Namespace(store, services_of(request).tenants, caller_of(request))
