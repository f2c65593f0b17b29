"""The server as an application of Ray Serve: `service.ray_serve.app:build`. Needs the extra `ray`.

Two deployments. `Ingress` is the FastAPI application as it is, without a device. Each replica of `EngineReplica` owns
one engine process and one device, and gives the engine to ingresses by `service.ray_serve.relay`. Requests do not go by
Ray's handles, which take several milliseconds for each and for each chunk of a stream: Ray starts, places, watches,
replaces and scales the replicas, and tells ingresses which there are, through its request router's interface; which one
a request goes to is decided in the ingress, as with engines of its own (`service.cluster.engines`).
"""

# Annotations are not postponed here: Ray makes RayArgs of a config file's `args` only where it finds the class itself
# as the annotation of what `build` takes, and not its name.
import os
from typing import Any, Self

import ray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from service.models.layouts import layout_of
from service.models.spec.config_json import read_config
from service.ray_serve.replicas import DeploymentsRouter, EngineReplica, Ingress, ray_settings
from service.ray_serve.scaling import DEFAULT_TOKENS_PER_ENGINE, ByQueuedTokens

# Ray ends replicas after 20 s if it is told nothing. Of what they get, this is for the end itself.
_END_SECONDS = 10.0
# Ray sees that a replica has died when it asks for its health the next time.
_HEALTH = {"health_check_period_s": 1, "health_check_timeout_s": 10}
# Ray starts its workers with niceness 15: beside other work one that takes a lost one's place would wait for its turn,
# and so would an engine, which has its parent's. It is raised at a worker's start, so that nobody can lower it later.
# Where all of Ray's processes have this in their environment, workers Ray holds ready can be used, a second sooner.
_NICENESS = {"RAY_worker_niceness": "0"}
# Ours are what bounds requests: Ray's would answer otherwise, and in another shape.
_NO_LIMIT = 100_000
_OF_SCALING = {"tokens_per_engine", "upscale_delay_seconds", "downscale_delay_seconds"}


class RayArgs(BaseModel):
    """`args` of the application in Ray Serve's config file."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="of multilora serve, by name; what is not here is taken from the environment. They show in Ray's "
        "dashboard, so keep keys in keys_file or in the environment",
    )
    engines: int = Field(default=1, ge=1, description="replicas with a device each; the least where max_engines is set")
    max_engines: int | None = Field(
        default=None, ge=1, description="most replicas; default: as many as engines, always"
    )
    tokens_per_engine: float = Field(
        default=DEFAULT_TOKENS_PER_ENGINE, gt=0, description="queued tokens by which the number of engines is chosen"
    )
    upscale_delay_seconds: float = Field(
        default=30.0, ge=0, description="how long more must be wanted before one starts"
    )
    downscale_delay_seconds: float = Field(
        default=600.0, ge=0, description="how long fewer must be wanted before one goes"
    )
    num_cpus: float = Field(default=1, ge=0, description="of an engine's replica, which are also its threads on a CPU")
    num_gpus: float = Field(default=0, ge=0, description="of an engine's replica: 1 on NVIDIA GPUs")
    resources: dict[str, float] = Field(
        default_factory=dict, description='of an engine\'s replica: {"NPU": 1} on Ascend'
    )
    ingresses: int = Field(default=1, ge=1, description="replicas of the HTTP side")
    ingress_cpus: float = Field(
        default=0.5,
        ge=0,
        description="of an ingress's replica; at an upgrade there is one more, which must find as much free",
    )
    drain_seconds: float = Field(
        default=600.0, gt=0, description="how long requests may go on when an engine or an ingress is replaced"
    )

    @model_validator(mode="after")
    def _has_room_to_scale(self) -> Self:
        if self.max_engines is not None and self.max_engines < self.engines:
            raise ValueError(f"max_engines is {self.max_engines} and engines, the least, {self.engines}; raise it")
        needless = sorted(self.model_fields_set & _OF_SCALING)
        if self.max_engines is None and needless:
            raise ValueError(
                f"{', '.join(needless)}: the number of engines is fixed; set max_engines, or take this out"
            )
        return self


def build(args: RayArgs) -> serve.Application:
    """The application. Raises SettingsError if the settings are wrong, and on a cluster ModelError if the model is.

    At an upgrade Ray stops engines before it starts those that would find out."""
    settings = ray_settings(args.settings)
    if ray.is_initialized():  # `serve build` may have no model where it runs
        layout_of(read_config(settings.model_dir))
    last_seconds = args.drain_seconds + _END_SECONDS
    engine = (
        serve.deployment(EngineReplica)
        .options(
            **_HEALTH,
            **_number_of(args),
            request_router_config=RequestRouterConfig(request_router_class=DeploymentsRouter),
            ray_actor_options={
                **_unhindered(),
                "num_cpus": args.num_cpus,
                "num_gpus": args.num_gpus,
                "resources": args.resources,
            },
            graceful_shutdown_timeout_s=last_seconds,
        )
        .bind(args.settings, args.drain_seconds)
    )
    # At an upgrade one ingress more is started before one goes: where the next one cannot start, those of before serve.
    # Ray's access log is off: ours has a line for each request, and a bounded number for refused ones of a client.
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        **_HEALTH,
        num_replicas=args.ingresses,
        logging_config=LoggingConfig(enable_access_log=False),
        max_ongoing_requests=_NO_LIMIT,
        max_surge_percent=1,
        ray_actor_options={**_unhindered(), "num_cpus": args.ingress_cpus},
        graceful_shutdown_timeout_s=last_seconds,
    )
    return ingress.bind(args.settings, args.engines, engine)


def _unhindered() -> dict[str, Any]:
    """Options of workers whose niceness is 0."""
    return {} if _NICENESS.items() <= os.environ.items() else {"runtime_env": {"env_vars": _NICENESS}}


def _number_of(args: RayArgs) -> dict[str, Any]:
    if args.max_engines is None:
        return {"num_replicas": args.engines}
    policy = AutoscalingPolicy(
        policy_function=ByQueuedTokens, policy_kwargs={"tokens_per_engine": args.tokens_per_engine}
    )
    config = AutoscalingConfig(
        min_replicas=args.engines,
        max_replicas=args.max_engines,
        upscale_delay_s=args.upscale_delay_seconds,
        downscale_delay_s=args.downscale_delay_seconds,
        policy=policy,
    )
    return {"num_replicas": None, "autoscaling_config": config}
