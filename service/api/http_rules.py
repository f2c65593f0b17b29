"""Facts that the server and a proxy before it have to know alike. No imports here: HAProxy's start waits for them."""

# A client that sends less than this, or reads less of what waits for it, counts as stalled after a time.
MIN_BYTES_PER_SECOND = 1024
# A client's name for a request is used and logged up to this length.
MAX_REQUEST_ID_CHARS = 200
# Whether the server lives, and whether it can serve, by all their names: anybody may ask.
PROBE_PATHS = ("/health", "/ping", "/liveness", "/ready", "/health_generate")
# POST to these changes nothing that anybody else can see, so that a proxy may send one again; a key needs the scope
# `infer`.
INFERENCE_PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/completions/batch",
    "/inference/v1/generate",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/classify",
    "/pooling",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
)
