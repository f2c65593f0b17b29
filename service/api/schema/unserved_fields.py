"""Fields of requests that clients of OpenAI, vLLM, SGLang and LoRAX send and that this server does not act on.

With the fields of the schemas (`service.api.schema.requests`), which are served, this is the one table of what a
request may hold. A value that asks for nothing is accepted, whatever the field; one that asks for something is refused
with the row's sentence. `Request` looks the rows up; OpenAPI and docs/clients.md are made from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnservedField:
    """One row.

    neutral   values that ask for nothing, as their own clients' defaults do; null is one for every field, and where
              an empty object is one, so is one of which no member asks for anything
    is_inert  whether no value of the field could change an answer here: all are accepted
    advice    what to do instead of asking for it, the end of the sentence that refuses it
    """

    name: str
    neutral: tuple[Any, ...] = ()
    is_inert: bool = False
    advice: str = "leave it out"

    def asks(self, value: Any) -> bool:
        """Whether a value asks for what is not served."""
        if isinstance(value, dict) and {} in self.neutral:
            return any(one is not None and one is not False for one in value.values()) and not self.is_inert
        return not (self.is_inert or value is None or any(_is_same(value, one) for one in self.neutral))

    @property
    def refusal(self) -> str:
        """The sentence for a client that asks for it."""
        return f"`{self.name}` is not supported by this server; {self.advice}."

    @property
    def json_schema(self) -> dict[str, Any]:
        """The field in OpenAPI."""
        if self.is_inert:
            return {"description": "Accepted and ignored: it has no meaning for this server."}
        return {"enum": [None, *self.neutral], "description": f"Not supported: {self.advice}."}


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _inert(*names: str) -> list[UnservedField]:
    return [UnservedField(name, is_inert=True) for name in names]


def _refused(*names: str, neutral: tuple[Any, ...] = (), advice: str = "leave it out") -> list[UnservedField]:
    return [UnservedField(name, neutral, advice=advice) for name in names]


def _table(*groups: Iterable[UnservedField]) -> dict[str, UnservedField]:
    rows = [row for group in groups for row in group]
    assert len({row.name for row in rows}) == len(rows), "a field has two rows"
    return {row.name: row for row in rows}


_CHAT = "send it to /v1/chat/completions"
_TEMPLATE = "send what the chat template takes in `chat_template_kwargs`"

# Fields of completions and chat completions. A field that only one of them serves is in that one's schema.
GENERATION_FIELDS = _table(
    # Caller and purpose.
    _inert("user", "metadata", "store", "service_tier", "safety_identifier"),
    # Hints for caches: prompts are found by their tokens, and `cache_salt` alone divides them.
    _inert("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    _inert("request_id", "rid", "session_id", "extra_key", "custom_labels"),
    _refused("priority", neutral=(0,)),
    # Another way to name the adapter.
    _refused("lora_path", "adapter_source", advice="name the adapter in `model`"),
    # Tools, which have nothing to choose from where there are none, and what they were called at first.
    _refused("tools", neutral=([],), advice=_CHAT),
    _refused("tool_choice", neutral=("none", "auto"), advice=_CHAT),
    _refused("parallel_tool_calls", neutral=(True, False), advice=_CHAT),
    _refused("functions", neutral=([],), advice="send them as `tools`"),
    _refused("function_call", neutral=("none", "auto"), advice="send `tool_choice`"),
    # Structured output: there is one way to do it here.
    _refused("guided_decoding_backend", neutral=("auto", "guidance")),
    _refused("structural_tag", advice="send it as `response_format`"),
    # Reasoning.
    _refused("reasoning", neutral=({},), advice=_TEMPLATE),
    _refused("thinking", "task", advice=_TEMPLATE),
    _refused("thinking_token_budget", neutral=(-1,), advice="leave it out, or send `max_tokens`"),
    _refused("include_reasoning", "separate_reasoning", neutral=(True,), advice=_CHAT),
    _refused("enable_thinking", neutral=(False,), advice=_CHAT),
    _refused("stream_reasoning", neutral=(True,)),
    # Modalities beside text, and OpenAI's services around the model.
    _refused("modalities", neutral=([], ["text"])),
    _refused("verbosity", neutral=("medium",), advice="ask for the length in the prompt"),
    _refused("audio", "prediction", "web_search_options", "moderation", "access_programs"),
    _refused("mm_processor_kwargs", "media_io_kwargs", "images_config", "video_config", neutral=({},)),
    _refused("mm_payload", neutral=("tensors",)),
    _refused("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"),
    _refused("use_audio_in_video", neutral=(False,)),
    _refused("documents", neutral=([],), advice="put them into a message"),
    _refused("chat_template", advice="upload it with an adapter, whose chats then use it"),
    # How tokens are chosen.
    _refused("best_of", neutral=(1,), advice="send `n`, and choose among the answers"),
    _refused("use_beam_search", neutral=(False,), advice="send `n` for several answers, or `temperature` 0"),
    _refused("length_penalty", neutral=(1,)),
    _refused("early_stopping", neutral=(False,)),
    _refused("stop_regex", neutral=([],), advice="send `stop`"),
    _refused("repetition_detection", advice="send `repetition_penalty`"),
    _refused("watermarking", "watermark", neutral=(False,)),
    _refused("custom_logit_processor", "custom_params", "vllm_xargs", neutral=({},)),
    _refused("logits_processors", neutral=([],)),
    _refused("ngram_corpus_id"),
    _refused("batch_invariant", neutral=(False,), advice="set --batch-invariant"),
    # The prompt.
    _refused("suffix", neutral=("",), advice="put what is to come after the answer into the prompt"),
    _refused("prompt_embeds", "input_ids", neutral=([],), advice="send token ids as `prompt` to /v1/completions"),
    _refused("session_params", neutral=({},), advice="send the whole conversation"),
    # Names that only chats use.
    _refused("max_completion_tokens", advice="send `max_tokens`"),
    _refused("top_logprobs", neutral=(0,), advice="send `logprobs`, which is their number in completions"),
    # How the answer is written.
    _refused("spaces_between_special_tokens", neutral=(True,)),
    _refused("stream_interval", neutral=(1,)),
    _refused("sampling_logprobs_mode"),
    _refused("return_prompt_token_ids", neutral=(False,), advice="send `return_token_ids`"),
    _refused("return_prompt_text", "return_token_offsets", "return_weight_versions", neutral=(False,)),
    _refused("return_hidden_states", "return_routed_experts", "return_cached_tokens_details", neutral=(False,)),
    _refused("return_meta_info", "return_entropy", "return_sampling_mask", "return_indexer_topk", neutral=(False,)),
    _refused("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", neutral=(False,)),
    # How the two above are written, and what is sent of images.
    _refused("return_flat_raw_top_logprobs_b64", "return_mm_kwargs", neutral=(True, False)),
    # Servers of several parts.
    _refused("kv_transfer_params", "ec_transfer_params", neutral=({},)),
    _refused("routed_experts_prompt_start", "routed_experts_start_len", neutral=(0,)),
    _refused("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    _refused("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
)

# Fields of /tokenize, to which vLLM's clients send a chat's fields.
TOKENIZE_FIELDS = {
    name: GENERATION_FIELDS[name] for name in ("chat_template", "mm_processor_kwargs", "media_io_kwargs", "documents")
}
# Fields of `structured_outputs`.
STRUCTURED_OUTPUT_FIELDS = _table(
    _refused("disable_fallback", neutral=(True, False)),
)
# Fields that chats serve and its other shapes do not.
_OF_CHATS_ALONE = (
    _refused("n", neutral=(1,), advice="send the request several times"),
    _refused("add_generation_prompt", neutral=(True,), advice=_CHAT),
    _refused("continue_final_message", "echo", neutral=(False,), advice=_CHAT),
    _refused("return_token_ids", "return_tokens_as_token_ids", neutral=(False,), advice=_CHAT),
    _refused("prompt_logprobs", "truncate_prompt_tokens", advice=_CHAT),
    _refused("truncation_side", neutral=("left",), advice=_CHAT),
)
# Fields of /load_lora_adapter_from_tensors.
LOAD_TENSORS_FIELDS = _table(
    _inert("lora_id", "rid", "http_worker_ipc"),
    _refused("pinned", neutral=(False,), advice="send PUT /v1/adapters/{name}/pin"),
    _refused("serialized_named_tensors", advice="send `serialized_tensors`, safetensors in base64"),
    _refused("added_tokens_config", neutral=({},), advice="send the tokenizer's files to PUT /v1/adapters/{name}"),
)
# Fields of /inference/v1/generate, and of its `sampling_params`: vLLM's own that a completion has not.
GENERATE_FIELDS = _table(
    _refused("features", "kv_transfer_params", advice="leave it out: prompts are text alone, and computed here"),
    _refused("priority", neutral=(0,)),
)
GENERATE_SAMPLING_FIELDS = GENERATION_FIELDS | _table(
    # Parts of vLLM's own path from tokens to text, which an answer in tokens does not take.
    _inert("detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "skip_reading_prefix_cache"),
    _refused("logits_processors", "extra_args", neutral=([], {})),
    _refused("flat_logprobs", neutral=(False,)),
)
# Fields of responses: a chat's, and those of OpenAI's services around the model.
RESPONSE_FIELDS = GENERATION_FIELDS | _table(
    _refused("conversation", advice="send `previous_response_id`, or the whole conversation as `input`"),
    _refused("prompt", advice="send `input`"),
    _refused("truncation", neutral=("disabled",), advice="send `truncate_prompt_tokens` to /v1/chat/completions"),
    _refused("context_management", neutral=([],)),
    _refused("max_tool_calls", advice="end the loop that calls the tools"),
    _refused("image"),
    _refused("enable_response_messages", neutral=(False,)),
    _refused("previous_input_messages", neutral=([],), advice="send the whole conversation as `input`"),
    # Fields that chats name otherwise, or serve and responses do not.
    _refused("messages", advice="send `input`"),
    _refused("max_tokens", "max_completion_tokens", advice="send `max_output_tokens`"),
    _refused("response_format", advice="send `text.format`"),
    _refused("reasoning_effort", "enable_thinking", advice="send `reasoning.effort`"),
    _refused("logprobs", neutral=(False,), advice='send `include`: ["message.output_text.logprobs"]'),
    *_OF_CHATS_ALONE,
)
# Fields of messages: a chat's, and those of Anthropic's services around the model.
MESSAGE_FIELDS = GENERATION_FIELDS | _table(
    _inert("cache_control", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"),
    _inert("anthropic_version", "anthropic_beta"),
    _refused("mcp_servers", "fallbacks", neutral=([],)),
    _refused("speed", neutral=("standard",)),
    _refused("container", "compaction", "billing_policy", "fallback_credit_token"),
    _refused("thread", advice="send the whole conversation as `messages`"),
    _refused("output_format", advice="send `output_config.format`"),
    # Fields that chats name otherwise, or serve and messages do not.
    _refused("response_format", advice="send `output_config.format`"),
    _refused("reasoning_effort", "enable_thinking", advice="send `thinking` and `output_config.effort`"),
    _refused("include_reasoning", "separate_reasoning", neutral=(True,), advice="send `thinking.display`"),
    _refused("parallel_tool_calls", neutral=(True,), advice="send `tool_choice.disable_parallel_tool_use`"),
    _refused("stream_options", neutral=({},), advice="leave it out: token counts always come"),
    _refused("logprobs", "top_logprobs", neutral=(False, 0), advice=_CHAT),
    *_OF_CHATS_ALONE,
)
# Fields of embeddings.
EMBEDDING_FIELDS = _table(
    _inert("user", "request_id", "rid"),
    _refused("priority", neutral=(0,)),
    _refused("lora_path", "adapter_source", advice="name the adapter in `model`"),
    _refused("embed_dtype", neutral=("float32",)),
    _refused("endianness", neutral=("native", "little")),
    _refused("mm_processor_kwargs", neutral=({},)),
)
# Of classes and scores; an activation has had three names.
POOLED_FIELDS = EMBEDDING_FIELDS | _table(
    _refused("softmax", "activation", neutral=(True,), advice="send `use_activation`"),
    _refused("normalize", neutral=(True,), advice="send `use_activation`"),
    _refused("dimensions", advice="leave it out"),
    _refused("max_chunks_per_doc", advice="send `max_tokens_per_doc`"),
    _refused("data_1", "data_2", "items", advice="send `queries` and `documents`"),
    _refused("messages", advice="send the text as `input`"),
)
RESPONSE_REASONING_FIELDS = _table(
    _refused("context", neutral=("auto",)),
    _refused("mode", neutral=("standard",)),
)
# Fields of `stream_options`. Obfuscation pads chunks against those who watch their sizes; the field turns it off or on.
STREAM_FIELDS = _table(_inert("include_obfuscation"))
# Fields of a tool's definition.
TOOL_FIELDS = _table(
    # Where a prompt may be cut for a cache of the client's own.
    _inert("cache_control"),
    _refused("async", "defer_loading", neutral=(False,)),
    _refused("allowed_callers", neutral=(["direct"],)),
    _refused("output_schema", advice="say in the `description` what it gives back"),
)
# Of a message's tool: calls are streamed as they are written, whoever makes them.
MESSAGE_TOOL_FIELDS = TOOL_FIELDS | _table(
    _inert("eager_input_streaming"),
    _refused("parameters", "function", advice="send `input_schema`"),
)
