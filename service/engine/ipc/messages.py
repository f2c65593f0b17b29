"""Messages between the API process and the engine process: small, typed, msgpack by msgspec.

API to engine: Submit, Abort, Move, Load, Evict, Pin, ResetPrefixCache, Pause, Sleep, Resume, Ping, Drain. Engine to
API: Ready, Tokens, Finished, Stats, Fatal; a relay between them adds Cordon.
Text never crosses: the engine knows token ids only. Weights never cross: the engine reads adapters from the store.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kernels.sampling.parameters import Parameters, ScoredToken

# Bounds of a tenant's weight, in `Submit`.
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
# Bounds of the lists in `Sampling`, each of which is walked through in every step. 300 is OpenAI's figure.
MAX_LOGIT_BIASES = 300
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_TOKEN_IDS = 512
MAX_ENDINGS = MAX_STOP_TOKEN_IDS + 512  # the model's own among them


class Sampling(Parameters, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen; checked by the API before it is sent. Token counts in tokens.

    seed None = the engine draws one; logprobs None = none, n = the n most likely beside the chosen token;
    prompt_logprobs likewise for the prompt (`echo`); logprob_token_ids have theirs beside the chosen token's, with
    logprobs; logit_bias maps token id to an added logit; grammar is
    llguidance's, serialised, as `service.grammars.trial` gives it once it has been tried.
    allowed_tokens: bit t % 8 of byte t // 8 allows token t, and bytes that are missing allow none; empty = all.
    eos_token_ids: of the adapter, among the stop_token_ids; where a grammar lets the model's end the answer, these may.
    bad_words: token sequences that the output must not hold. With both, and with min_tokens, some token must be left.
    """

    max_tokens: int
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}  # noqa: RUF012
    allowed_tokens: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    grammar: str | None = None


# ---- API -> engine


Pooling = Literal["last", "mean", "classify"]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run one sequence. `adapter` is a digest in the store, None the base model; `adapter_rows` are the rows that it
    takes on the device, by projection group. max_tokens 0 is allowed with prompt_logprobs (`echo` alone), and with
    `pooling`.

    tenant   the tenant that is charged; "" where the server has no keys file, and all clients are one tenant
    adapter_start  tokens before this one are the base's alone, in the prompt and hence in no step the adapter's
    weight   the tenant's weight, MIN_WEIGHT to MAX_WEIGHT: shares of two tenants are in proportion to their weights.
             The weight of a tenant's last request holds for all its requests
    pooling  the answer is the hidden state of the last token, or the mean of all, after the final norm; or the logits
             of the adapter's score head for that of the last token
    cache_salt  the prefix cache shares keys and values between requests of one tenant and one salt
    keep_at  numbers of prompt tokens behind which later requests are likely to go on otherwise: a model with
             states keeps them there
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    adapter: str | None = None
    adapter_rows: dict[str, int] = {}
    tenant: str = ""
    weight: float = 1.0
    pooling: Pooling | None = None
    adapter_start: int = 0
    cache_salt: str = ""
    keep_at: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget the request and free all it holds before the next step. Unknown ids are ignored: it may just have ended.

    No Finished follows."""

    request_id: str


class Move(msgspec.Struct, frozen=True, tag=True):
    """Let a request that has an adapter go on with this one, as soon as it is on the device; the last Move counts.
    Tokens tell when; a version that cannot be loaded is never told. Unknown ids are ignored."""

    request_id: str
    adapter: str
    adapter_rows: dict[str, int]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Bring an adapter to the host tier, and to the device if rows are free without an eviction: a hint, followed when
    no request's adapter is being read."""

    adapter: str


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter's rows and host memory when no request runs with it: its files were deleted, or damaged ones were
    replaced. Requests that wait for it make the engine read it again."""

    adapter: str


class Pin(msgspec.Struct, frozen=True, tag=True):
    """The operator's pins: these adapters, and no others, are held on the device without requests. They evict others,
    but for those in use, and are not evicted themselves."""

    adapters: tuple[str, ...]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget what the prefix cache has; requests that run are not disturbed."""


# What a pause does to running requests: they keep all they hold; they end, and later ones wait; they end at once with
# the reason "abort"; they give back their KV blocks and are computed again.
PauseMode = Literal["keep", "wait", "abort", "retract"]


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Launch no step until Resume. Finished answers once no step runs, and with "wait" no request from before: reason
    "stop", or "error" if the engine was resumed before. From then on the pause lasts `limit_seconds` at most, and each
    further one renews it."""

    request_id: str
    mode: PauseMode
    limit_seconds: float


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give the device's memory back until Resume: for a paused engine without requests. Finished answers, with an error
    where that cannot be; the engine goes on then."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """End the pause and the sleep, if there is one. Finished answers."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the engine is alive. The answer is Stats, after the step that runs."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs, up to `limit_seconds`, then exit 0."""

    limit_seconds: float


ToEngine = Submit | Abort | Move | Load | Evict | Pin | ResetPrefixCache | Pause | Sleep | Resume | Ping | Drain


# ---- engine -> API


class OpInUse(msgspec.Struct, frozen=True, array_like=True):
    """The implementation that serves an op, and the one that was wished for; they differ where the probe at the start
    found that the wished-for one does not work."""

    op: str
    implementation: str
    wished: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warm; the sizes that admission needs.

    row_bytes, side_bytes, row_element_bytes,
    row_alignment      what `adapters.row_plan.plan_rows` needs; 0 where LoRA is off
    ops                one entry for each op
    keeps_prefixes     the prefix cache is on
    keeps_states       it keeps states, and follows `Submit.keep_at`
    """

    max_model_len_tokens: int
    kv_capacity_tokens: int
    vocab_size: int
    hidden_size: int
    dtype: str
    device: str
    pid: int
    row_bytes: int = 0
    side_bytes: int = 0
    row_element_bytes: int = 0
    row_alignment: int = 0
    ops: tuple[OpInUse, ...] = ()
    keeps_prefixes: bool = False
    keeps_states: bool = False


# The fastest tier that holds an adapter.
Tier = Literal["disk", "host", "device"]
# The loads of a request's adapter that ended while it waited: the tier reached, and the seconds from the request's
# arrival to the load's begin and end.
Loads = tuple[tuple[Tier, float, float], ...]


class Tokens(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of a request, in order. With the first message come `prompt_logprobs`, entry 0 being None, and with
    the first token `waited_seconds`, from the request's arrival to its first step, `num_cached`, the tokens of the
    prompt that the prefix cache had, and `loads`. `adapter`: the digest of the adapter that has made these tokens, if
    the request has moved since its last one."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ScoredToken, ...] = ()
    prompt_logprobs: tuple[ScoredToken | None, ...] | None = None
    waited_seconds: float | None = None
    num_cached: int = 0
    adapter: str | None = None
    loads: Loads = ()


class Finished(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The last message of a request. reason "stop": end-of-sequence or stop token (`stop_token_id` says which; the
    token itself is part of Tokens), or what the grammar wants is complete (`stop_token_id` is None); "length":
    max_tokens reached; "abort": an operator has ended it; "error": `error` is one sentence, `client_fault` whether the
    request itself was wrong. `pooled`, where asked for: float32 [hidden_size], or [labels], little-endian; with it come
    `waited_seconds` and `loads`, as in Tokens."""

    request_id: str
    reason: Literal["stop", "length", "abort", "error"]
    stop_token_id: int | None = None
    error: str | None = None
    client_fault: bool = False
    pooled: bytes | None = None
    waited_seconds: float | None = None
    loads: Loads = ()


class Stats(msgspec.Struct, frozen=True, tag=True):
    """State of the engine, sent at most every `stats_interval_seconds` and whenever it goes idle. Counters never fall
    within one life of the engine."""

    num_waiting: int
    num_running: int
    kv_blocks_used: int
    kv_blocks_total: int
    state_lines_used: int
    state_lines_total: int
    rows_used: int
    rows_total: int
    row_bytes_used: int
    row_bytes_total: int
    num_adapters_on_device: int
    num_adapters_on_host: int
    num_steps: int
    num_preemptions: int
    num_adapter_loads: int
    num_adapter_evictions: int
    num_lora_op_calls: int
    is_paused: bool = False
    # Tokens of prompts that were looked up in the prefix cache, those that it had, and those that it had when preempted
    # requests went on; its idle blocks, which count as free, blocks that it has lost to others, and states likewise.
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_host_hit_tokens: int = 0  # of these, from host memory
    prefix_cache_host_bytes_used: int = 0
    prefix_cache_host_bytes_total: int = 0
    prefix_cache_resumed_tokens: int = 0
    prefix_cache_idle_blocks: int = 0
    prefix_cache_evicted_blocks: int = 0
    prefix_cache_states: int = 0
    prefix_cache_stateless_tokens: int = 0  # whose blocks it had, and no state behind them
    prefix_cache_evicted_states: int = 0
    # How steps were run: replayed from a graph, or otherwise, by the reason.
    num_steps_replayed: int = 0
    num_steps_eager: dict[str, int] = {}
    # Variants of kernels that this process compiled or read from a cache; in all, and since it is ready.
    num_kernel_variants: int = 0
    num_kernel_variants_after_ready: int = 0
    # By tier. Requests for an adapter, by where it was when they came; adapters that made room for others; bytes that
    # were brought there.
    num_adapter_requests: dict[Tier, int] = {}
    num_tier_evictions: dict[Tier, int] = {}
    loaded_bytes: dict[Tier, int] = {}
    host_bytes_used: int = 0
    # Since the last Stats: each load's tier and seconds; for each first token with an adapter, the adapter's tier when
    # the request came, and the steps and seconds since then.
    adapter_load_seconds: tuple[tuple[Tier, float], ...] = ()
    first_tokens: tuple[tuple[Tier, int, float], ...] = ()
    # Tiers of adapters that changed since the last Stats, by digest; at first all are on disk.
    moved_adapters: dict[str, Tier] = {}
    # One entry per step since the last Stats: (tokens, sequences, distinct adapters, milliseconds).
    steps: tuple[tuple[int, int, int, float], ...] = ()


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; one sentence. It exits non-zero right after."""

    error: str


class Cordon(msgspec.Struct, frozen=True, tag=True):
    """The reason, one word, for which the engine gets no new requests while another one can have them; None ends that.
    Sent by `service.ray_serve.relay`, and not by the engine itself."""

    reason: str | None


FromEngine = Ready | Tokens | Finished | Stats | Fatal | Cordon


class EngineStatus(msgspec.Struct, frozen=True):
    """The status of one engine.

    state           as `EngineLink.state`, or "silent": ready, but it does not answer; "missing": expected, and unknown;
                    or the reason of a cordon
    error           one sentence about its last death
    queued_tokens   prompt and output tokens still to be computed
    num_open        requests that were sent to it and are not over
    num_sent        requests for adapters that were sent to it, by the adapter's tier at that time
    num_sent_again  requests that it lost and another engine got
    stats           its last Stats
    """

    state: str
    error: str | None
    queued_tokens: int
    num_open: int
    num_sent: dict[Tier, int]
    num_sent_again: int
    stats: Stats | None
