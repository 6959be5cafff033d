"""Formats of request logs that are known by name: how each is recognised, and what its fields mean.

To add a format, add a row to :data:`FORMATS` and, if its document is not a list of records, a function that makes one
of it. Any other table is read by the usual names of its columns (:mod:`ops.log.names`), or by names that the user
gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ops.log.source import Source, Value

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of request logs.

    ``columns`` is written like the option ``--columns`` (:func:`ops.log.names.parse_columns`), with dots in JSON
    paths and ``|`` between alternative names, of which the first that is present counts. A table has the format if it
    has these columns. A JSON document has it if it has one of the fields ``told_by``; then ``records`` lists its
    requests. A record without the field ``needs``, or without output tokens if ``needs_output``, is a failed request.
    """

    name: str
    columns: str = ""
    told_by: tuple[str, ...] = ()
    records: Callable[[Source], list[Record]] | None = None
    needs: str = ""
    needs_output: bool = False


def _benchmark(source: Source) -> list[Record]:
    """Requests of the chosen benchmark in a GuideLLM report."""
    benchmarks = list(source.document().at("benchmarks").items())
    if not benchmarks:
        raise source.wrong("holds no benchmarks")
    if source.run is None and len(benchmarks) > 1:
        raise source.wrong(f"holds {len(benchmarks)} benchmarks; choose one with --run 0 to {len(benchmarks) - 1}")
    chosen = source.run or 0
    if not 0 <= chosen < len(benchmarks):
        raise source.wrong(f"there is no benchmark {chosen}; choose 0 to {len(benchmarks) - 1}")
    requests = benchmarks[chosen].at("requests").at("successful")
    source.within = requests.name
    return requests.elements()


def _detailed_result(source: Source) -> list[Record]:
    """Requests of a detailed result of vLLM's benchmark, which has one list per field."""
    result = source.document()
    if result.find("input_lens") is None:
        raise source.wrong("holds totals, not requests: run `vllm bench serve` with --save-result and --save-detailed")
    if result.find("start_times") is None:
        raise source.wrong(
            "has no start_times, so when the requests arrived is unknown: `vllm bench serve --save-detailed` writes "
            "them since January 2026 (https://github.com/vllm-project/vllm/pull/32667)"
        )
    lists = {name: result.at(name).elements() for name in ("start_times", "input_lens", "output_lens")}
    errors = result.find("errors")
    # If the list of errors is missing or empty, no request failed.
    lists["errors"] = (errors.elements() if errors is not None else []) or [""] * len(lists["start_times"])
    if len({len(values) for values in lists.values()}) != 1:
        raise source.wrong("start_times, input_lens, output_lens and errors must be lists of equal length")
    model = result.find("model_id")
    about = {} if model is None else {"model_id": model.value}
    return [{**about, **dict(zip(lists, values, strict=True))} for values in zip(*lists.values(), strict=True)]


def _conversations(source: Source) -> list[Record]:
    """Turns of kv-cache-tester's conversations: one document, several in a file, or the files of a folder."""
    files = sorted(source.path.glob("*.json*")) if source.is_folder() else [source.path]
    if not files:
        raise source.wrong("is a folder without .json files")
    found: list[Record] = []
    sizes: Counter[int] = Counter()
    for path in files:
        here = replace(source, path=path)
        for conversation in here.objects(here.text()):
            size = conversation.find("block_size")
            sizes[64 if size is None else int(size.number(1, 1e6))] += 1
            scope = conversation.find("hash_id_scope")
            # Block ids of one conversation mean nothing in another one, unless the file says that they do.
            mark = 0 if scope is not None and scope.value == "global" else sizes.total()
            _add_turns(source, conversation, 0.0, mark, found)
    if len(sizes) > 1:
        raise source.wrong(
            f"has blocks of {' and '.join(map(str, sizes))} tokens; there must be one size", "block_size"
        )
    source.block_tokens = next(iter(sizes), source.block_tokens)
    return found


def _add_turns(source: Source, conversation: Value, since_s: float, mark: int, found: list[Record]) -> None:
    """Requests of a conversation and of the agents that it starts; an agent's times count from its own start."""
    before = None
    for request in conversation.at("requests").items():
        began = since_s + request.at("t").number()
        if request.find("requests") is not None:
            _add_turns(source, request, began, mark, found)
            continue
        blocks = request.at("hash_ids").integers()
        turn = (request.at("in").tokens(), blocks)
        if turn == before:  # the same call recorded twice, streamed and not
            source.skipped["recorded twice"] += 1
            continue
        before = turn
        ids = tuple((mark, block) for block in blocks)
        found.append({"t": began, "in": turn[0], "out": request.at("out").tokens(), "hash_ids": ids})


_SPAN_PROMPT: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_SPAN_OUTPUT: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
"""Attributes of a span with token counts: OpenTelemetry's conventions, those until version 1.26, and OpenInference's.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/"""
_NO_INFERENCE: Final = frozenset({"embeddings", "create_agent", "invoke_agent", "invoke_workflow", "execute_tool"})
"""Operations (``gen_ai.operation.name``) whose token counts are no request's, or those of several."""
_SPAN_ERROR: Final = frozenset({2, "2", "STATUS_CODE_ERROR"})
_MAX_ATTRIBUTE: Final = 200
"""Longest attribute (characters) that may be a model, an id or a value of ``--filter``; longer ones are messages."""


def _spans(source: Source) -> list[Record]:
    """Spans of requests in OpenTelemetry's JSON exports, one export a line or a single document.

    A span inside another one that counts, as an engine's span inside its gateway's, is the same request; so is a span
    that was exported again.
    """
    found: dict[str, Record] = {}
    parents: dict[str, Any] = {}
    for export in source.documents():
        for resource in export.at("resourceSpans").items():
            about = _attributes(resource.find("resource.attributes"))
            for scope in resource.at("scopeSpans").items():
                for span in scope.at("spans").items():
                    name = span.at("spanId").text()
                    parents[name] = span.value.get("parentSpanId")
                    fields = {**about, **_attributes(span.find("attributes"))}
                    if fields.get("gen_ai.operation.name") in _NO_INFERENCE or not set(_SPAN_PROMPT) & set(fields):
                        continue
                    status = span.find("status.code")
                    failed = "error.type" in fields or (status is not None and status.value in _SPAN_ERROR)
                    started = span.at("startTimeUnixNano").value
                    found[name] = {**fields, "startTimeUnixNano": started, "status": "error" if failed else "ok"}
    if not found:
        raise source.wrong(f"none of its {len(parents):,} spans is of a request with token counts ({_SPAN_PROMPT[0]})")
    source.within = "spans"
    outer = [fields for name, fields in found.items() if not _is_within(name, parents, found)]
    for why, n in (("spans of no request", len(parents) - len(found)), ("recorded twice", len(found) - len(outer))):
        if n:
            source.skipped[why] += n
    return outer


def _attributes(listed: Value | None) -> Record:
    """Attributes of a span or a resource by key, without lists, objects and long texts."""
    found: Record = {}
    for attribute in () if listed is None else listed.items():
        value = attribute.at("value").find("stringValue", "intValue", "doubleValue", "boolValue")
        if value is not None and len(str(value.value)) <= _MAX_ATTRIBUTE:
            found[attribute.at("key").text()] = value.value
    return found


def _is_within(name: str, parents: dict[str, Any], found: dict[str, Record]) -> bool:
    """Whether a span lies, at any depth, inside another one of those found."""
    passed, outer = {name}, parents.get(name)
    while outer is not None and outer not in passed:
        if outer in found:
            return True
        passed.add(outer)
        outer = parents.get(outer)
    return False


TABLE: Final = Format("table")
FORMATS: Final = (
    Format("azure", "arrival=TIMESTAMP, prompt=ContextTokens, output=GeneratedTokens"),
    Format("burstgpt", "arrival=Timestamp:s, prompt=Request tokens, output=Response tokens", needs_output=True),
    Format("mooncake", "arrival=timestamp:ms, prompt=input_length, output=output_length, blocks=hash_ids"),
    Format(
        "kv-cache-tester",
        "arrival=t:s, prompt=in, output=out, blocks=hash_ids",
        told_by=("block_size", "hash_id_scope"),
        records=_conversations,
    ),
    Format(
        "aiperf",
        "arrival=metadata.request_start_ns:ns, prompt=metrics.input_sequence_length.value, "
        "output=metrics.output_sequence_length.value",
        needs="metrics",
    ),
    Format(
        "guidellm",
        "arrival=request_start_time|start_time|info.timings.request_start|scheduler_info.timings.request_start|"
        "scheduler_info.request_timings.request_start:s, prompt=prompt_tokens, output=output_tokens",
        told_by=("benchmarks",),
        records=_benchmark,
    ),
    Format(
        "vllm",
        "arrival=start_times:s, prompt=input_lens, output=output_lens, status=errors, model=model_id",
        told_by=("start_times", "input_lens", "request_throughput"),
        records=_detailed_result,
    ),
    Format(
        "opentelemetry",
        f"arrival=startTimeUnixNano:ns, prompt={'|'.join(_SPAN_PROMPT)}, output={'|'.join(_SPAN_OUTPUT)}, "
        "model=gen_ai.request.model|gen_ai.response.model|llm.model_name, "
        "session=gen_ai.conversation.id|session.id, status=status",
        told_by=("resourceSpans",),
        records=_spans,
    ),
)

NAMES: Final = (TABLE.name, *(each.name for each in FORMATS))


def format_of(name: str) -> Format:
    """The format of this name."""
    return next(each for each in (TABLE, *FORMATS) if each.name == name)
