"""The sequences of requests whose answers are pooled: embeddings, classes, and scores of pairs of texts.

An adapter with a score head scores a pair as its trainer's tokenizer joins two texts. Another model is a yes/no
reranker where `classifier_from_token` (of the adapter's configuration, else of the settings) names two tokens: its chat
template shows the pair as Qwen3-Reranker's does, and the score is the probability of the second token among the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from service.api.admission.model_resolution import ResolvedModel
from service.api.admission.plans import PlannedSequence
from service.api.admission.prompts import (
    Prompt,
    check_fits,
    check_truncation,
    context_limit,
    encoded,
    refuse_hopeless,
    tokenized,
)
from service.api.admission.rendering import RenderedPrompt, rendered_chat
from service.api.errors import BadRequest, quoted
from service.api.schema.pooled import ClassifyRequest, EmbeddingRequest, InputRequest, PairRequest, PoolingRequest
from service.api.schema.requests import ChatRequest, PooledRequest
from service.api.state import Services
from service.engine.ipc.messages import Pooling, Ready, Sampling
from service.fairness.thread_pool import run_in_thread
from service.text.stop_strings import StopAutomaton

# Of all prompts of a request: a long query is repeated for each document.
MAX_PAIR_TOKENS = 1 << 22
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "{yes}" or "{no}".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Stands for the pair when the chat template is rendered.
_PAIR = "PAIR-5f0c9e4b7a"


async def pooled_plans(
    services: Services, ready: Ready, target: ResolvedModel, request: PooledRequest
) -> list[PlannedSequence]:
    """A sequence for each of the request's prompts, in order. BadRequest if one could never be served."""
    _check_task(services, target, request)
    if isinstance(request, PairRequest):
        prompts = await _pair_prompts(services, target, request, ready)
    else:
        assert isinstance(request, InputRequest)
        prompts = await tokenized(services, request, _inputs(request), ready)
    plan = partial(PlannedSequence, stop=StopAutomaton(()), skip_special_tokens=True, include_stop=False)
    pooling, salt = _pooling_of(target, request), request.cache_salt or ""
    sampling = _sampling_of(services, target, pooling)
    return [plan(uuid4().hex, prompt, sampling, pooling=pooling, cache_salt=salt) for prompt in prompts]


def _inputs(request: InputRequest) -> list[RenderedPrompt]:
    is_one = isinstance(request.input, str) or (bool(request.input) and isinstance(request.input[0], int))
    return [RenderedPrompt(text, "input" if is_one else f"input[{index}]") for index, text in enumerate(request.inputs)]


def _check_task(services: Services, target: ResolvedModel, request: PooledRequest) -> None:
    """BadRequest for what the model cannot do."""
    name, labels = quoted(target.shown_name), target.labels
    wants_head = isinstance(request, ClassifyRequest) or (
        isinstance(request, PoolingRequest) and request.task in ("classify", "score")
    )
    if wants_head and not labels:
        raise BadRequest(f"{_named(target)} has no score head; name an adapter that has one (SEQ_CLS).", param="model")
    wants_one = isinstance(request, PairRequest) or (isinstance(request, PoolingRequest) and request.task == "score")
    if wants_one and len(labels) > 1:
        raise BadRequest(
            f"The score head of {name!r} has {len(labels)} labels, and scores need a head of one; send the texts to "
            "/classify.",
            param="model",
        )
    if not isinstance(request, PairRequest):
        return
    if labels and request.instruction is not None:
        raise BadRequest(f"{name!r} has a score head, which takes no `instruction`; leave it out.", param="instruction")
    if not labels and not _classifier_tokens(services, target):
        raise BadRequest(
            f"{_named(target)} scores no pairs: it has no score head, and no `classifier_from_token` makes it a yes/no "
            "reranker; name an adapter that has one of these.",
            param="model",
        )


def _pooling_of(target: ResolvedModel, request: PooledRequest) -> Pooling | None:
    """The engine's answer; None: the logits of two tokens."""
    if isinstance(request, EmbeddingRequest):
        return request.pooling or "last"
    if isinstance(request, PoolingRequest) and request.task == "embed":
        return "last"
    if target.labels:
        return "classify"
    return None if isinstance(request, PairRequest) else "last"


def _sampling_of(services: Services, target: ResolvedModel, pooling: Pooling | None) -> Sampling:
    """No token, or one with the log probabilities of both tokens. BadRequest if they are none."""
    if pooling is not None:
        return Sampling(max_tokens=0)
    ids = []
    for text in _classifier_tokens(services, target):
        found = encoded(services, text, special=False)
        if len(found) != 1:
            raise BadRequest(
                f"`classifier_from_token` of {quoted(target.shown_name)!r} names {quoted(text)!r}, which is "
                f"{len(found)} tokens of this model; it must be one.",
                param="model",
            )
        ids.append(found[0])
    return Sampling(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=tuple(ids))


# Tokens before a document, its own, and behind it; the text of the document is not part of the first or last.
Parts = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class _Frame:
    """The texts around a pair of a yes/no reranker; the query's part ends with a line, so tokens end there too."""

    before: str
    after: str
    instruction: str

    def query(self, text: str) -> str:
        """The part before the document's line."""
        return f"<Instruct>: {self.instruction}\n<Query>: {text}\n"


async def _pair_prompts(services: Services, target: ResolvedModel, request: PairRequest, ready: Ready) -> list[Prompt]:
    """The request's pairs in order, as tokens that the engine can run. BadRequest names the field of one that cannot
    fit."""
    pairs = request.pairs
    for index, texts in enumerate(pairs):
        for text in texts:
            refuse_hopeless(services, request, text, request.field_of(index))
    frame = None if target.labels else await _frame(services, target, request)
    room = context_limit(ready) - (frame is not None)  # one token is sampled

    def work() -> list[Prompt]:
        if frame is not None:
            parts = _framed_parts(services, frame)
        else:
            parts = services.tokenizer.pair_encoder(add_special_tokens=request.add_special_tokens is not False)
        return _prompts(request, ready, pairs, parts, room)

    return await run_in_thread(work, size_chars=sum(len(text) for pair in pairs for text in pair))


async def _frame(services: Services, target: ResolvedModel, request: PairRequest) -> _Frame:
    no, yes = _classifier_tokens(services, target)
    messages = [
        {"role": "system", "content": _SYSTEM.format(yes=yes, no=no)},
        {"role": "user", "content": _PAIR},
    ]
    chat = ChatRequest.model_validate({"messages": messages, "enable_thinking": False})
    rendered = await rendered_chat(services, target, chat)
    assert isinstance(rendered.text, str)
    before, found, after = rendered.text.partition(_PAIR)
    if not found or _PAIR in after:
        raise BadRequest("The chat template does not show a message once, as a yes/no reranker needs.", param="model")
    return _Frame(before, after, request.instruction or _INSTRUCTION)


def _framed_parts(services: Services, frame: _Frame) -> Callable[[str, str], Parts]:
    def encode(text: str) -> list[int]:
        return services.tokenizer.encode(text, add_special_tokens=False)

    start, end, mark = encode(frame.before), encode(frame.after), len(encode("<Document>: "))
    known: dict[str, list[int]] = {}

    def parts(query: str, document: str) -> Parts:
        if query not in known:
            known[query] = [*start, *encode(frame.query(query))]
        tokens = encode(f"<Document>: {document}")
        at = min(mark, len(tokens)) - bool(document)  # the space goes with the first word
        return [*known[query], *tokens[:at]], tokens[at:], end

    return parts


def _prompts(
    request: PairRequest,
    ready: Ready,
    pairs: list[tuple[str, str]],
    parts: Callable[[str, str], Parts],
    room: int,
) -> list[Prompt]:
    """room: most tokens of a prompt"""
    asked = request.truncate_prompt_tokens
    if asked is not None:
        check_truncation(asked, room)
    prompts, num_tokens = [], 0
    for index, (query, document) in enumerate(pairs):
        before, tokens, after = parts(query, document)
        kept, field = tokens[: request.document_tokens], request.field_of(index)
        if asked is not None:
            left = (room if asked == -1 else asked) - len(before) - len(after)
            if left < 0:
                raise BadRequest(
                    f"The query has {len(before) + len(after)} tokens with what stands around it, which leaves no room "
                    f"for `{field}`; shorten it, or raise `truncate_prompt_tokens`.",
                    param="truncate_prompt_tokens",
                )
            kept = kept[:left]
        token_ids = (*before, *kept, *after)
        num_tokens += len(token_ids)
        if num_tokens > MAX_PAIR_TOKENS:
            raise BadRequest(
                f"The pairs have more than {MAX_PAIR_TOKENS} tokens together, the query counted for each document; "
                "send fewer documents at a time.",
                param=field,
            )
        check_fits(ready, request, token_ids, field, room)
        prompts.append(Prompt(token_ids, "", keep_at=(len(before),)))
    return prompts


def _classifier_tokens(services: Services, target: ResolvedModel) -> tuple[str, ...]:
    """The tokens that say no and yes; none where the model is no yes/no reranker."""
    own = target.parts[0].manifest.classifier_from_token if len(target.parts) == 1 else ()
    return own or services.settings.classifier_from_token


def _named(target: ResolvedModel) -> str:
    return "The base" if not target.parts else f"The adapter {quoted(target.shown_name)!r}"
