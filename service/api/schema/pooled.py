"""The JSON shapes of embeddings, classes and scores: vLLM's and OpenAI's, and for rerankers Cohere's and Jina's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from service.api.errors import BadRequest, quoted
from service.api.schema.answers import EmbeddingUsage, Response
from service.api.schema.base import FIRST, Request, field_error
from service.api.schema.requests import PooledRequest, TokenIds
from service.api.schema.unserved_fields import POOLED_FIELDS

MAX_INPUTS = 2048  # OpenAI's figure

_EncodingFormat = Annotated[
    Literal["float", "base64"] | None,
    Field(description="`float`: numbers, the default; `base64`: float32 numbers, little-endian, in base64"),
]


def texts_of(raw: str | list[str] | list[int] | list[list[int]], field: str) -> list[str | list[int]]:
    """A text, texts, token ids or lists of these as one list. BadRequest for an empty one."""
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise BadRequest(f"`{field}` is an empty list; send at least one token or text.", param=field)
    return [raw] if isinstance(raw[0], int) else list(raw)


class InputRequest(PooledRequest):
    """Base of requests about texts that have nothing to do with each other."""

    input: (
        str
        | Annotated[list[str], Field(max_length=MAX_INPUTS), FIRST]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS), FIRST]
    ) = Field(description=f"a text, texts, token ids, or lists of token ids; up to {MAX_INPUTS} of them")

    @property
    def num_prompts(self) -> int:
        return len(self.inputs)

    @property
    def inputs(self) -> list[str | list[int]]:
        """The four forms of `input` as one. BadRequest for an empty list."""
        return texts_of(self.input, "input")


class EmbeddingRequest(InputRequest):
    """Body of POST /v1/embeddings."""

    encoding_format: _EncodingFormat = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="only the model's own number of dimensions"
    )
    pooling: Literal["last", "mean"] | None = Field(
        None, description="the hidden state of the last token, the default, or the mean of all tokens'"
    )
    normalize: bool | None = Field(None, description="vectors of length 1; true by default")
    use_activation: bool | None = Field(None, description="the same as `normalize`; vLLM's name for it")

    @property
    def is_normalized(self) -> bool:
        """Whether vectors get the length 1."""
        return self.normalize is not False and self.use_activation is not False

    @model_validator(mode="after")
    def _check_values(self) -> EmbeddingRequest:
        if {self.normalize, self.use_activation} == {True, False}:
            raise field_error("use_activation", "`normalize` and `use_activation` differ; send one of them.")
        return self


class _Activated(PooledRequest):
    unserved = POOLED_FIELDS

    use_activation: bool | None = Field(
        None, description="false: the head's logits as they are; true by default: probabilities"
    )


class ClassifyRequest(InputRequest, _Activated):
    """Body of POST /classify."""


class PoolingRequest(InputRequest, _Activated):
    """Body of POST /pooling."""

    task: Literal["embed", "classify", "score"] | None = Field(
        None,
        description="`embed`: the hidden state of the last token, of length 1; `classify`: probabilities of all "
        "labels; `score`: that of the only label; default: `classify` for an adapter with a score head, else `embed`",
    )
    encoding_format: _EncodingFormat = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tasks(cls, value: Any) -> Any:
        task = value.get("task") if isinstance(value, dict) else None
        if isinstance(task, str) and task.startswith(("token_", "plugin")):
            raise field_error("task", f"`task` {task[:40]!r} is not served; send `embed`, `classify` or `score`.")
        return value


class PairRequest(_Activated):
    """Base of requests that score pairs of a query and a document."""

    instruction: str | None = Field(
        None, description="the task, for a yes/no reranker; default: to retrieve passages that answer a web search"
    )

    truncation_side: Literal["right"] | None = Field(None, description="`right`: documents are cut at their ends")

    @property
    def num_prompts(self) -> int:
        return len(self.pairs)

    @property
    def document_tokens(self) -> int | None:
        """Tokens of each document that are used; None for all."""
        return None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each query with its document. BadRequest if they do not go together."""
        raise NotImplementedError

    def field_of(self, index: int) -> str:
        """The request's field of a pair, for errors."""
        raise NotImplementedError


_Texts = str | Annotated[list[str], Field(max_length=MAX_INPUTS), FIRST]


class ScoreRequest(PairRequest):
    """Body of POST /v1/score and /score."""

    text_1: _Texts | None = Field(None, description=f"a query, or up to {MAX_INPUTS}")
    text_2: _Texts | None = Field(
        None, description="a document or several: as many as there are queries, or any number for one query"
    )
    queries: _Texts | None = Field(None, description="the same as `text_1`")
    documents: _Texts | None = Field(None, description="the same as `text_2`")

    @model_validator(mode="after")
    def _check_forms(self) -> ScoreRequest:
        for one, other in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise field_error(one, f"Send either `{one}` or `{other}`.")
        return self

    @property
    def _fields(self) -> tuple[str, str]:
        return "queries" if self.text_1 is None else "text_1", "documents" if self.text_2 is None else "text_2"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        sides = []
        for name in self._fields:
            raw = getattr(self, name)
            side = [raw] if isinstance(raw, str) else raw
            if not side:
                raise BadRequest(f"`{name}` is an empty list; send at least one text.", param=name)
            sides.append(side)
        queries, documents = sides
        queries = queries * len(documents) if len(queries) == 1 else queries
        if len(queries) != len(documents):
            first, second = self._fields
            raise BadRequest(
                f"`{first}` has {len(queries)} texts and `{second}` {len(documents)}; send as many of both, or one "
                f"`{first}`.",
                param=second,
            )
        return list(zip(queries, documents, strict=True))

    def field_of(self, index: int) -> str:
        name = self._fields[1]
        return name if isinstance(getattr(self, name), str) else f"{name}[{index}]"


class Document(Request):
    """A document of a reranker, as Cohere's and Jina's clients write one. Fields that are not ranked are the client's
    own, and ignored."""

    model_config = ConfigDict(extra="allow")

    text: str | None = Field(None, description="what is ranked, unless `rank_fields` names others")

    def fields(self) -> dict[str, Any]:
        """All of them."""
        return {"text": self.text, **(self.model_extra or {})}


class RerankRequest(PairRequest):
    """Body of POST /v1/rerank, /rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(max_length=MAX_INPUTS), FIRST] = Field(
        description=f"texts, or objects with a `text`; up to {MAX_INPUTS}"
    )
    rank_fields: Annotated[list[str], Field(min_length=1), FIRST] | None = Field(
        None, description="fields of objects that are ranked, in this order, a line each; default: `text`"
    )
    top_n: Annotated[int, Field(ge=0)] | None = Field(
        None, description="number of results, the best ones; default, and 0: all"
    )
    return_documents: bool | None = Field(
        None, description="answer with the documents' ranked texts; by default all but `/v2/rerank` do"
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(
        None, description="number of tokens of each document that are used, the first ones"
    )

    @property
    def document_tokens(self) -> int | None:
        return self.max_tokens_per_doc

    @model_validator(mode="after")
    def _check_fields(self) -> RerankRequest:
        if len(set(self.rank_fields or ())) < len(self.rank_fields or ()):
            raise field_error("rank_fields", "`rank_fields` names a field twice; name each once.")
        return self

    def ranked(self, index: int) -> dict[str, str]:
        """The texts of a document that are ranked, by field. BadRequest for one without them."""
        document = self.documents[index]
        given = {"text": document} if isinstance(document, str) else document.fields()
        names = ["text"] if isinstance(document, str) else self.rank_fields or ["text"]
        for name in names:
            if not isinstance(given.get(name), str):
                field = f"documents[{index}].{quoted(name)}"
                raise BadRequest(f"`{field}` must be a text; send it, or name others in `rank_fields`.", param=field)
        return {name: given[name] for name in names}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        if not self.documents:
            raise BadRequest("`documents` is an empty list; send at least one document.", param="documents")
        return [(self.query, "\n".join(self.ranked(index).values())) for index in range(len(self.documents))]

    def field_of(self, index: int) -> str:
        return f"documents[{index}]"


class Classification(Response):
    """One input: the label with the highest probability, and those of all, in the order of the head."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class _List(Response):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: EmbeddingUsage


class ClassificationList(_List):
    """Answer of POST /classify: one for each input, in order."""

    data: list[Classification]


class Score(Response):
    """One pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(_List):
    """Answer of POST /v1/score: one for each pair, in order."""

    data: list[Score]


class Pooled(Response):
    """One input: numbers, or float32 bytes in base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PooledList(_List):
    """Answer of POST /pooling: one for each input, in order."""

    data: list[Pooled]


class RankedDocument(Response):
    """The document of a result: the texts that were ranked."""

    model_config = ConfigDict(extra="allow")

    text: str | None = None


class Ranked(Response):
    """One document by its place in the request, most relevant first."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class ApiVersion(Response):
    """Cohere's."""

    version: str


class BilledTokens(Response):
    """Cohere's."""

    input_tokens: int
    output_tokens: int


class RankingMeta(Response):
    """Cohere's."""

    api_version: ApiVersion
    tokens: BilledTokens


class Ranking(Response):
    """Answer of POST /v1/rerank, /rerank and /v2/rerank."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Ranked]
    meta: RankingMeta
