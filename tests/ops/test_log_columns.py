"""Request logs as found in practice: columns with any usual name, times in any format, lists, lines, compressed."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cli.main import main
from inferencegym.errors import DataFormatError, InvalidConfigError
from ops.log import reader
from ops.log.reader import Imported, import_log
from simulator.load.prefix import CAPACITY_TOKENS

START = datetime(2025, 6, 1, 12, 0, 0, 250_000, tzinfo=UTC)
AFTER_S = [0.0, 0.5, 2.25]
PROMPTS, OUTPUTS = [100, 200, 300], [10, 20, 30]


def moments(form: str) -> list[Any]:
    at = [START + timedelta(seconds=s) for s in AFTER_S]
    since = [round(m.timestamp() * 1e6) for m in at]
    forms = {
        "seconds": AFTER_S,
        "epoch s": [s / 1e6 for s in since],
        "epoch ms": [s // 1000 for s in since],
        "epoch us": since,
        "epoch ns": [1000 * s for s in since],
        "ISO 8601, Z": [m.isoformat().replace("+00:00", "Z") for m in at],
        "ISO 8601, offset": [(m.astimezone(tz=None)).isoformat() for m in at],
        "ISO 8601, seven digits": [m.strftime("%Y-%m-%d %H:%M:%S.%f") + "0" for m in at],
    }
    return forms[form]


ALL_FORMS = ["seconds", "epoch s", "epoch ms", "epoch us", "epoch ns"]
ALL_FORMS += ["ISO 8601, Z", "ISO 8601, offset", "ISO 8601, seven digits"]


def check(imported: Imported) -> None:
    np.testing.assert_allclose(imported.log.arrival_s, AFTER_S, atol=2e-6)
    assert imported.log.prompt_tokens.tolist() == PROMPTS
    assert imported.log.output_tokens.tolist() == OUTPUTS


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet", "csv.gz", "jsonl.gz"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_times_of_every_form_are_read_alike_from_every_kind_of_file(tmp_path: Path, form: str, kind: str) -> None:
    frame = pd.DataFrame({"created_at": moments(form), "tokens_in": PROMPTS, "tokens_out": OUTPUTS})
    path = tmp_path / f"log.{kind}"
    if kind.startswith("csv"):
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=kind.startswith("jsonl"))
    imported = import_log(path)
    check(imported)
    assert imported.format == "table"
    assert imported.columns["arrival"].startswith("created_at (")
    assert imported.columns["prompt"] == "tokens_in"


def test_a_column_of_dates_in_parquet_is_a_time(tmp_path: Path) -> None:
    at = pd.to_datetime([START + timedelta(seconds=s) for s in AFTER_S])
    pd.DataFrame({"ts": at, "isl": PROMPTS, "osl": OUTPUTS}).to_parquet(tmp_path / "log.parquet")
    check(import_log(tmp_path / "log.parquet"))


def litellm_row(i: int, status: str = "success") -> dict[str, Any]:
    """A row of LiteLLM's spend table, with the relevant columns and some that must not be confused with them."""
    return {
        "request_id": f"chatcmpl-{i}",
        "call_type": "acompletion",
        "spend": 0.001,
        "total_tokens": PROMPTS[i] + OUTPUTS[i],
        "prompt_tokens": PROMPTS[i],
        "completion_tokens": OUTPUTS[i],
        "startTime": moments("ISO 8601, Z")[i],
        "endTime": "2025-06-01T13:00:00Z",
        "completionStartTime": "2025-06-01T12:59:00Z",
        "model": "llama",
        "metadata": {"usage_object": {"prompt_tokens": 7, "completion_tokens": 7}, "status": "failure"},
        "messages": {},
        "status": status,
    }


def openai_row(i: int) -> dict[str, Any]:
    """An answer in OpenAI's form, as a proxy logs it."""
    usage = {
        "prompt_tokens": PROMPTS[i],
        "completion_tokens": OUTPUTS[i],
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    return {"id": f"c{i}", "object": "chat.completion", "created": moments("epoch s")[i], "usage": usage}


def span_row(i: int) -> dict[str, Any]:
    """An OpenTelemetry span of a request, attributes with dots in their names."""
    attributes = {"gen_ai.usage.input_tokens": PROMPTS[i], "gen_ai.usage.output_tokens": OUTPUTS[i]}
    return {"name": "llm_request", "start_time": moments("epoch ns")[i], "attributes": attributes}


def exported_span_row(i: int) -> dict[str, Any]:
    """A span with the field names of OpenTelemetry's protocol, attributes by name."""
    attributes = {"gen_ai.usage.input_tokens": PROMPTS[i], "gen_ai.usage.output_tokens": OUTPUTS[i]}
    return {"name": "chat", "startTimeUnixNano": str(moments("epoch ns")[i]), "attributes": attributes}


def ollama_row(i: int) -> dict[str, Any]:
    """An answer of Ollama."""
    counts = {"prompt_eval_count": PROMPTS[i], "eval_count": OUTPUTS[i]}
    return {"model": "llama3.1", "created_at": moments("ISO 8601, Z")[i], "done": True, **counts}


def helicone_row(i: int) -> dict[str, Any]:
    """A row of Helicone's export."""
    counts = {"Prompt Tokens": PROMPTS[i], "Completion Tokens": OUTPUTS[i]}
    return {"Request Created At": moments("ISO 8601, Z")[i], "Response Status": 200, **counts}


def gateway_row(i: int) -> dict[str, Any]:
    """A record of a gateway that writes token counts as text."""
    return {
        "createdAt": moments("ISO 8601, Z")[i],
        "promptTokens": str(PROMPTS[i]),
        "completionTokens": str(OUTPUTS[i]),
        "messages": [{"role": "user", "content": "hello"}],
    }


@pytest.mark.parametrize(
    "row", [litellm_row, openai_row, span_row, exported_span_row, ollama_row, helicone_row, gateway_row]
)
@pytest.mark.parametrize("form", ["lines", "list", "answer of an API"])
def test_logs_of_gateways_are_read_without_naming_their_columns(tmp_path: Path, row: Any, form: str) -> None:
    records = [row(i) for i in range(3)]
    texts = {
        "lines": lines(records),
        "list": json.dumps(records, indent=1),
        "answer of an API": json.dumps({"data": records}),
    }
    (tmp_path / "log.json").write_text(texts[form])
    check(import_log(tmp_path / "log.json"))


def otlp_span(name: str, parent: str, at_ns: int, code: int = 0, **attributes: str | int) -> dict[str, Any]:
    """A span in OpenTelemetry's JSON encoding; underscores in names of attributes are dots where two follow."""
    listed = [
        {"key": key.replace("__", "."), "value": {"stringValue" if isinstance(value, str) else "intValue": str(value)}}
        for key, value in attributes.items()
    ]
    times = {"startTimeUnixNano": str(at_ns), "endTimeUnixNano": str(at_ns + 10**9)}
    ids = {"traceId": "0a" * 16, "spanId": name, "parentSpanId": parent}
    return {**ids, "name": "span", **times, "attributes": listed, "status": {"code": code} if code else {}}


def otlp_export(i: int, code: int = 0) -> dict[str, Any]:
    """An export request: an agent's span, inside it one of a client, inside that one of the engine."""
    at = int(moments("epoch ns")[i])
    counts: dict[str, str | int] = {
        "gen_ai__usage__input_tokens": PROMPTS[i],
        "gen_ai__usage__output_tokens": OUTPUTS[i],
    }
    spans = [
        otlp_span(f"engine{i}", f"http{i}", at + 10**6, **counts),
        otlp_span(f"http{i}", f"client{i}", at),
        otlp_span(
            *(f"client{i}", f"agent{i}", at, code),
            **{**counts, "gen_ai__operation__name": "chat", "gen_ai__request__model": "llama"},
        ),
        otlp_span(f"agent{i}", "", at, **{**counts, "gen_ai__operation__name": "invoke_agent"}),
    ]
    about = {"attributes": [{"key": "service.name", "value": {"stringValue": "gateway"}}]}
    return {"resourceSpans": [{"resource": about, "scopeSpans": [{"scope": {"name": "sdk"}, "spans": spans}]}]}


@pytest.mark.parametrize("form", ["lines", "document"])
def test_an_export_of_opentelemetry_counts_each_request_once(tmp_path: Path, form: str) -> None:
    exports = [otlp_export(i) for i in range(3)]
    document = {"resourceSpans": [each["resourceSpans"][0] for each in exports]}
    # The collector exports again what was not acknowledged.
    text = lines([*exports, exports[1]]) if form == "lines" else json.dumps(document, indent=1)
    (tmp_path / "traces.json").write_text(text)
    for only in ([], ["service.name=gateway"]):
        imported = import_log(tmp_path / "traces.json", only=only)
        check(imported)
        assert imported.format == "opentelemetry"
        assert imported.columns["model"] == "gen_ai.request.model"
        assert imported.skipped == {"spans of no request": 6, "recorded twice": 3}
    (tmp_path / "traces.json").write_text(lines([{"resourceSpans": []}]))
    with pytest.raises(DataFormatError, match=r"none of its 0 spans is of a request with token counts"):
        import_log(tmp_path / "traces.json")


def test_a_failed_span_is_a_failed_request_and_a_cut_line_may_be_left_out(tmp_path: Path) -> None:
    text = lines([otlp_export(0), otlp_export(1, code=2), otlp_export(2)]) + '{"resourceSpans": [{"scopeSp'
    (tmp_path / "traces.jsonl").write_text(text)
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "traces.jsonl")
    assert refused.value.line == 4
    imported = import_log(tmp_path / "traces.jsonl", skip_failed=True, skip_bad=1)
    assert imported.log.prompt_tokens.tolist() == [PROMPTS[0], PROMPTS[2]]
    assert (imported.skipped["failed"], imported.skipped["cannot be read"]) == (1, 1)


def test_requests_that_a_gateway_marks_as_failed_are_told_from_the_others(tmp_path: Path) -> None:
    failed = {**litellm_row(1, "failure"), "prompt_tokens": None, "startTime": "2025-06-01T12:00:01Z"}
    (tmp_path / "log.jsonl").write_text(lines([litellm_row(0), failed, litellm_row(1), litellm_row(2)]))
    imported = import_log(tmp_path / "log.jsonl")
    check(imported)
    assert imported.skipped == {"failed": 1}
    rows = ("0,200,100,10", "0.1,429,9,0", "0.2,503,9,0", "0.5,200,200,20", "2.25,200,300,30")
    text = "\n".join(("time,status code,prompt tokens,completion tokens", *rows))
    (tmp_path / "proxy.csv").write_text(text)
    imported = import_log(tmp_path / "proxy.csv", skip_failed=True)
    check(imported)
    assert imported.skipped == {"failed": 2}
    imported = import_log(tmp_path / "proxy.csv")
    assert imported.log.prompt_tokens.tolist() == [100, 9, 9, 200, 300]
    assert imported.log.output_tokens.tolist() == [10, 20, 20, 20, 30]


def test_columns_of_other_names_are_named_with_a_unit(tmp_path: Path) -> None:
    rows = "".join(f"{int(1000 * a)};x;{p};{o}\n" for a, p, o in zip(AFTER_S, PROMPTS, OUTPUTS, strict=True))
    (tmp_path / "log.csv").write_text("wann;wer;rein;raus\n" + rows)
    with pytest.raises(DataFormatError, match="arrival and prompt and output"):
        import_log(tmp_path / "log.csv")
    check(import_log(tmp_path / "log.csv", columns="arrival=wann:ms, prompt=rein, output=raus"))
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "log.csv", columns="arrival=wann:ms,prompt=hinein,output=raus")
    assert refused.value.field == "hinein"
    for wrong in ("prompt", "tokens=rein", "prompt="):
        with pytest.raises(InvalidConfigError) as bad:
            import_log(tmp_path / "log.csv", columns=wrong)
        assert bad.value.field == "columns"


def test_dates_need_no_unit(tmp_path: Path) -> None:
    rows = "2025-11-01T10:00:00Z,5,5\n2025-11-01T10:00:01.5Z,5,5\n"
    for name, columns in (("started", "arrival=started:ms"), ("start_time_ms", None)):
        (tmp_path / "log.csv").write_text(f"{name},prompt,output\n{rows}")
        assert import_log(tmp_path / "log.csv", columns=columns).log.arrival_s.tolist() == [0.0, 1.5]


@pytest.mark.parametrize("name", ["model", "model_id", "x-model", "gen_ai.request.model"])
def test_a_log_names_its_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "log.csv").write_text(f"arrival_s,prompt,output,{name}\n0,5,5,llama\n1,5,5,llama\n")
    assert import_log(tmp_path / "log.csv").model == "llama"


def test_a_time_with_its_unit_in_brackets_is_found(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("Time (ms)\tPrompt Tokens\tGenerated Tokens\n0\t5\t5\n1500\t5\t5\n")
    assert import_log(tmp_path / "log.tsv").log.arrival_s[-1] == 1.5


def test_a_day_is_never_taken_for_a_month(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("time,prompt,output\n03.04.2025 10:00,5,5\n13.04.2025 10:00,5,5\n")
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "log.csv")
    assert (refused.value.line, refused.value.field) == (2, "time")


def test_times_of_a_web_servers_log_are_read(tmp_path: Path) -> None:
    rows = "[01/Jun/2025:12:00:0{s} +0200],{p},5\n"
    text = "time,prompt,output\n" + "".join(
        rows.format(s=s, p=p).replace("[", "").replace("]", "") for s, p in ((1, 7), (4, 9))
    )
    (tmp_path / "log.csv").write_text(text)
    assert import_log(tmp_path / "log.csv").log.arrival_s.tolist() == [0.0, 3.0]


def test_a_log_is_read_in_pieces_with_the_lines_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "ROWS_AT_ONCE", 2)
    text = "\n\ntime,prompt,output\n0,1,1\n\n1,2,1\n2,3,1\n3,4,1\n"
    (tmp_path / "log.csv").write_text(text)
    assert import_log(tmp_path / "log.csv").log.prompt_tokens.tolist() == [1, 2, 3, 4]
    (tmp_path / "log.csv").write_text(text + "4,many,1\n")
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "log.csv")
    assert refused.value.line == 9


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"time,prompt,output\n" + b"".join(b"%d,5,5\n" % i for i in range(9000)))
    (tmp_path / "log.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFormatError, match=r"log\.csv\.gz"):
        import_log(tmp_path / "log.csv.gz")


def conversation(name: str, scope: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": scope, "requests": requests}


def turn(t: float, blocks: list[int], kind: str = "n") -> dict[str, Any]:
    return {
        "t": t,
        "type": kind,
        "model": "m",
        "in": 64 * len(blocks),
        "out": 8,
        "hash_ids": blocks,
        "stop": "end_turn",
    }


TURNS = [
    turn(0.0, [1, 2]),
    turn(5.0, [1, 2, 3]),
    turn(5.5, [1, 2, 3], "s"),  # the same call, streamed
    {"t": 7.0, "type": "subagent", "agent_id": "a", "requests": [turn(0.0, [9]), turn(4.0, [9, 10])]},
]


def test_recorded_conversations_are_read_with_their_agents_and_each_call_once(tmp_path: Path) -> None:
    (tmp_path / "trace_0001.json").write_text(json.dumps(conversation("a", "local", TURNS)))
    imported = import_log(tmp_path / "trace_0001.json")
    assert (imported.format, imported.skipped) == ("kv-cache-tester", {"recorded twice": 1})
    assert imported.log.arrival_s.tolist() == [0.0, 5.0, 7.0, 11.0]
    assert imported.log.prompt_tokens.tolist() == [128, 192, 64, 128]
    # Blocks 1 and 2 come again in the second request, block 9 in the last: of 64 tokens each.
    assert imported.log.reused_tokens.tolist() == [0, 128, 0, 64]
    assert imported.log.reuse_hit[CAPACITY_TOKENS == 1024].tolist() == [1.0]


@pytest.mark.parametrize(("scope", "reused"), [("local", [0, 0, 128, 128]), ("global", [0, 128, 128, 192])])
def test_blocks_are_shared_between_conversations_where_they_are_said_to_be(
    tmp_path: Path, scope: str, reused: list[int]
) -> None:
    for name in ("trace_1.json", "trace_2.json"):
        (tmp_path / name).write_text(json.dumps(conversation(name, scope, TURNS[:2])))
    assert import_log(tmp_path).log.reused_tokens.tolist() == reused


def test_what_was_understood_is_printed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spend.jsonl").write_text(lines([litellm_row(i) for i in range(3)]))
    assert main(["shadow", "--trace", str(tmp_path / "spend.jsonl"), "--gpus", "1", "--agent", "naive"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "spend.jsonl: table; arrival from startTime (ISO 8601); prompt from prompt_tokens; "
        "output from completion_tokens; status from status; id from request_id; "
        "model from model"
    )


def test_a_folder_is_read_as_conversations_and_as_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"is a folder without \.json files"):
        import_log(tmp_path)
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(conversation(name, "local", [turn(1.0, [1])])))
    assert len(import_log(tmp_path).log.arrival_s) == 2
    with pytest.raises(DataFormatError, match="is a folder; azure is read from a file"):
        import_log(tmp_path, "azure")
    odd = conversation("c", "local", [turn(1.0, [1])]) | {"block_size": 32}
    (tmp_path / "c.json").write_text(json.dumps(odd))
    with pytest.raises(DataFormatError, match="has blocks of 64 and 32 tokens; there must be one size"):
        import_log(tmp_path)


def test_a_benchmark_that_the_report_does_not_hold_is_refused(tmp_path: Path) -> None:
    request = {"request_start_time": 100.0, "prompt_tokens": 256, "output_tokens": 128}
    one = {"requests": {"successful": [request, request], "errored": []}}
    (tmp_path / "g.json").write_text(json.dumps({"benchmarks": [one, one]}))
    assert len(import_log(tmp_path / "g.json", run=1).log.arrival_s) == 2
    for run in (-1, 2):
        with pytest.raises(DataFormatError, match=f"there is no benchmark {run}; choose 0 to 1"):
            import_log(tmp_path / "g.json", run=run)


def test_a_time_with_its_unit_in_its_name_is_the_arrival(tmp_path: Path) -> None:
    lines = [f"{1000 * s:g},{p},{o}" for s, p, o in zip(AFTER_S, PROMPTS, OUTPUTS, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["arrival_ms,input_tokens,output_tokens", *lines]))
    check(import_log(tmp_path / "a.csv"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0.00,139,37\n0.20,597,267\n", "begins with numbers, not with the columns' names"),
        ('INFO 03-01 09:00:00 logger.py:42] Received request cmpl-0: prompt: "hi"\n', "is the text that vLLM prints"),
        ("when,prompt_tokens,output_tokens\n", "name it with --columns arrival=COLUMN$"),
    ],
)
def test_a_table_without_names_is_refused_with_what_helps(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(DataFormatError, match=told):
        import_log(tmp_path / "log.csv")


def test_a_text_log_of_nginx_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    line = '10.0.0.1 - - [04/Mar/2025:09:00:00 +0000] "POST /v1/chat/completions HTTP/1.1" 200 5778 "-" "curl, 8" 2.8\n'
    (tmp_path / "access.log").write_text(line * 3)
    with pytest.raises(DataFormatError, match=r"is a web server's access log, .* without token counts; let it"):
        import_log(tmp_path / "access.log")


def test_columns_of_a_report_may_be_named_too(tmp_path: Path) -> None:
    requests = [
        {"sent": 100 + s, "prompt_tokens": p, "output_tokens": o}
        for s, p, o in zip(AFTER_S, PROMPTS, OUTPUTS, strict=True)
    ]
    (tmp_path / "g.json").write_text(json.dumps({"benchmarks": [{"requests": {"successful": requests}}]}))
    with pytest.raises(DataFormatError, match="no column with a usual name for arrival"):
        import_log(tmp_path / "g.json")
    check(import_log(tmp_path / "g.json", columns="arrival=sent:s"))


def test_text_that_utf8_cannot_hold_is_refused_like_other_text(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"time": 0, "prompt": "\\ud800", "output": 5}\n')
    with pytest.raises(DataFormatError) as refused:
        import_log(tmp_path / "log.jsonl")
    assert (refused.value.line, refused.value.field) == (1, "prompt")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_several_models_are_no_one_load_and_a_filter_chooses_among_them(tmp_path: Path, kind: str) -> None:
    models = ["a", "b", "a"]
    frame = pd.DataFrame({"time": AFTER_S, "input_tokens": PROMPTS, "output_tokens": OUTPUTS, "model": models})
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    told = r"requests of 2 models \(a: 2, b: 1\) are not one load: choose a model with --filter model=NAME"
    with pytest.raises(DataFormatError, match=told):
        import_log(path)
    one = import_log(path, only=["model=a"])
    assert (one.log.prompt_tokens.tolist(), one.notes) == ([100, 300], [])
    assert import_log(path, limit=1).log.prompt_tokens.tolist() == [100]
    check(import_log(path, only=["model=a,b"]))
    with pytest.raises(DataFormatError, match="holds no requests with model=c; values there: a: 2, b: 1"):
        import_log(path, only=["model=c"])
    with pytest.raises(DataFormatError, match="no column 'user' for filter; there are time, input_tokens"):
        import_log(path, only=["user=a"])
    with pytest.raises(InvalidConfigError, match="COLUMN=VALUE"):
        import_log(path, only=["a"])


def test_a_log_without_any_output_token_is_refused(tmp_path: Path) -> None:
    columns = {"time": AFTER_S, "input_tokens": PROMPTS, "output_tokens": 0, "generated": OUTPUTS}
    pd.DataFrame(columns).to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(DataFormatError, match=r"output_tokens is 0 in all rows.*--columns output=COLUMN"):
        import_log(tmp_path / "log.csv")
    check(import_log(tmp_path / "log.csv", columns="output=generated"))


def test_several_filters_hold_together(tmp_path: Path) -> None:
    models, paths = ["a", "b", "a"], ["/chat", "/chat", "/embed"]
    columns = {"time": AFTER_S, "input_tokens": PROMPTS, "output_tokens": OUTPUTS, "model": models, "path": paths}
    pd.DataFrame(columns).to_csv(tmp_path / "log.csv", index=False)
    both = import_log(tmp_path / "log.csv", only=["path=/chat", "model=a"])
    assert both.log.prompt_tokens.tolist() == PROMPTS[:1]
    nothing = "no requests with model=b and path=/embed; values of path there: /chat: 1"
    with pytest.raises(DataFormatError, match=nothing):
        import_log(tmp_path / "log.csv", only=["model=b", "path=/embed"])


def priorities(path: Path, cells: list[str], **asked: str) -> tuple[list[int], list[str]]:
    rows = zip(AFTER_S, PROMPTS, OUTPUTS, cells, strict=True)
    path.write_text("time,input,output,priority\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    imported = import_log(path, **asked)
    return imported.log.class_index.tolist(), list(imported.notes)


def test_a_priority_column_is_used_if_its_cells_are_classes_and_said_to_be_ignored_otherwise(tmp_path: Path) -> None:
    used = "priority gives the class of each request; 0 (interactive) is served first"
    assert priorities(tmp_path / "log.csv", ["2", "0", "1"]) == ([2, 0, 1], [used])
    assert priorities(tmp_path / "log.csv", ["batch", "interactive", "2"]) == ([1, 0, 2], [used])
    index, (note,) = priorities(tmp_path / "log.csv", ["high", "low", "low"])
    assert (index, note.split(":")[0]) == ([0, 0, 0], "priority is ignored, and all requests are of one class")
    with pytest.raises(DataFormatError, match="line 2: priority='high' is not allowed: it must be one of interactive"):
        priorities(tmp_path / "log.csv", ["high", "low", "low"], columns="class=priority")


def nginx_row(i: int, ended_s: float, took: float) -> dict[str, Any]:
    ended = START + timedelta(seconds=ended_s)
    return {
        "time_local": ended.strftime("%d/%b/%Y:%H:%M:%S +0000"),
        "time_iso8601": ended.isoformat(),
        "msec": f"{ended.timestamp():.3f}",
        "request_time": f"{took:.3f}",
        "status": "200",
        "prompt_tokens": 100 + i,
        "completion_tokens": 10,
    }


def finished(n: int = 40) -> list[dict[str, Any]]:
    """Rows as nginx writes them, in order of the end, of requests that arrive once a second."""
    took = np.random.default_rng(0).uniform(0.5, 9.0, n).round(3).tolist()
    rows = [nginx_row(i, i + s, s) for i, s in enumerate(took)]
    return sorted(rows, key=lambda row: row["msec"])


@pytest.mark.parametrize("column", ["msec", "time_iso8601", "time_local"])
def test_an_nginx_log_tells_arrivals_by_its_times_minus_the_time_taken(tmp_path: Path, column: str) -> None:
    others = {"msec", "time_iso8601", "time_local"} - {column}
    rows = [{k: v for k, v in row.items() if k not in others} for row in finished()]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    imported = import_log(tmp_path / "log.jsonl")
    assert imported.log.prompt_tokens.tolist() == pytest.approx(range(100, 140), abs=2)
    np.testing.assert_allclose(np.diff(imported.log.arrival_s), 1.0, atol=0.01 if column != "time_local" else 1.0)
    assert imported.columns["duration"] == "request_time"
    assert imported.notes == [f"{column} is logged when a request ends: arrivals are {column} minus request_time"]


def test_a_time_of_the_end_tells_arrivals_with_a_latency_in_its_unit(tmp_path: Path) -> None:
    rows = [
        {"end_time": 1.7e9 + i + 2.5, "latency": 2500.0, "prompt_len": 10 * i + 10, "gen_len": 5} for i in range(20)
    ]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    with pytest.raises(DataFormatError, match="latency has no unit, and its median is 2500"):
        import_log(tmp_path / "log.jsonl")
    imported = import_log(tmp_path / "log.jsonl", columns="arrival=end_time,duration=latency:ms")
    np.testing.assert_allclose(imported.log.arrival_s, np.arange(20.0), atol=1e-5)
    (tmp_path / "log.jsonl").write_text(lines([{"start_time": row["end_time"] - 2.5, **row} for row in rows]))
    assert import_log(tmp_path / "log.jsonl").columns["arrival"] == "start_time (epoch s)"


def test_a_duration_that_no_card_reaches_is_in_another_unit(tmp_path: Path) -> None:
    """Requests of 200 output tokens that took 1.5: seconds, whatever the name of the column says."""
    rows = [{"end_time": 1.7e9 + i, "latency_ms": 1.5, "prompt_tokens": 90, "output_tokens": 200} for i in range(20)]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    with pytest.raises(DataFormatError, match=r"is 1\.5 ms, less than any card takes .* probably in s\. Name the unit"):
        import_log(tmp_path / "log.jsonl")
    for unit, log in (
        ("s", import_log(tmp_path / "log.jsonl", columns="arrival=end_time,duration=latency_ms:s")),
        ("ms", import_log(tmp_path / "log.jsonl", columns="arrival=end_time,duration=latency_ms:ms")),
    ):
        assert log.columns["duration"] == "latency_ms", unit


def test_a_long_duration_is_believed_in_the_unit_that_the_user_names(tmp_path: Path) -> None:
    rows = [{"end_time": 1.7e9 + i, "latency": 300.0, "prompt_tokens": 90, "output_tokens": 5000} for i in range(20)]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    assert len(import_log(tmp_path / "log.jsonl", columns="arrival=end_time,duration=latency:s").log.arrival_s) == 20


def test_a_duration_that_the_user_names_is_never_ignored(tmp_path: Path) -> None:
    rows = [{"ts": 1.7e9 + i, "took_ms": 500.0, "prompt_tokens": 10, "output_tokens": 5} for i in range(20)]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    with pytest.raises(DataFormatError, match=r"duration=took_ms counts only .* such as arrival=ts, or leave"):
        import_log(tmp_path / "log.jsonl", columns="duration=took_ms:ms")
    late = import_log(tmp_path / "log.jsonl", columns="arrival=ts,duration=took_ms:ms")
    assert late.columns["duration"] == "took_ms"


def test_a_duration_that_the_user_names_goes_with_the_time_of_the_end_even_where_arrivals_are_logged_too(
    tmp_path: Path,
) -> None:
    request = {"arrival_s": 0.0, "took": 4.0, "prompt_tokens": 9, "output_tokens": 9}
    (tmp_path / "log.jsonl").write_text(lines([{**request, "end_time": end_s} for end_s in (10.0, 15.0)]))
    imported = import_log(tmp_path / "log.jsonl", columns="duration=took")
    assert imported.log.arrival_s.tolist() == [0.0, 5.0]
    assert imported.notes == ["end_time is logged when a request ends: arrivals are end_time minus took"]
    assert "duration" not in import_log(tmp_path / "log.jsonl").columns


def test_durations_are_never_taken_for_arrivals(tmp_path: Path) -> None:
    took = np.random.default_rng(0).uniform(0.5, 9.0, 40).round(3).tolist()
    with pytest.raises(DataFormatError, match=r"time holds numbers from .* in no order, which may be how long"):
        import_log(spaced(tmp_path / "log.csv", took, "time"))
    assert len(import_log(tmp_path / "log.csv", columns="arrival=time:s").log.arrival_s) == 40
    rows = [{"time": s, "received": 1.7e9 + i, "input": 100, "output": 10} for i, s in enumerate(took)]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    imported = import_log(tmp_path / "log.jsonl")
    assert imported.columns["arrival"] == "received (epoch s)"
    assert imported.log.arrival_s[-1] == 39.0


def test_one_time_for_all_and_empty_answers_are_noted(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("ts,input,output\n" + '1700000000,"2,329",7\n' * 18 + "1700000000,5,0\n" * 2)
    imported = import_log(tmp_path / "log.csv")
    assert imported.log.prompt_tokens[0] == 2329
    assert imported.notes[0].startswith("all 20 requests have the same ts: they arrive at once")
    assert imported.notes[1].startswith("2 of the requests have 0 output, and no column such as status")


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_column_in_use_that_is_there_twice_is_refused(tmp_path: Path, quote: str) -> None:
    header = ",".join(f"{quote}{name}{quote}" for name in ("note", "time", "input", "note", "output", "Input", "input"))
    (tmp_path / "log.csv").write_text(f",,\n{header}\n" + "x,1,100,y,10,100,7\n" * 30)
    with pytest.raises(DataFormatError, match="has the column 'input' twice: rename or remove one") as refused:
        import_log(tmp_path / "log.csv")
    assert refused.value.field == "input"
    columns = "prompt=Input"
    assert import_log(tmp_path / "log.csv", columns=columns).log.prompt_tokens[0] == 100


def spaced(path: Path, times: list[float], name: str = "t") -> Path:
    path.write_text(f"{name},input,output\n" + "".join(f"{t:g},100,10\n" for t in times))
    return path


def test_times_that_may_be_ms_or_seconds_ask_for_their_unit(tmp_path: Path) -> None:
    every_130 = [130.0 * i for i in range(20)]
    path = spaced(tmp_path / "log.csv", every_130)
    told = "t holds numbers from 0 to 2470 without a unit: requests are 130 s or 130 ms apart"
    with pytest.raises(DataFormatError, match=told):
        import_log(path)
    assert import_log(path, columns="arrival=t:ms").log.arrival_s[-1] == pytest.approx(2.47)
    assert import_log(path, columns="arrival=t:s").log.arrival_s[-1] == 2470
    assert import_log(spaced(path, every_130, "timestamp_ms")).log.arrival_s[-1] == pytest.approx(2.47)
    # Ten times a second, with fractions: nobody writes microseconds as ms. In whole numbers, several in each second.
    for times in ([0.1 * i for i in range(20)], [float(i // 3) for i in range(20)]):
        assert import_log(spaced(path, times)).columns["arrival"] == "t (in s)"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_that_cannot_be_read_are_left_out_listed_and_counted_up_to_the_number_allowed(
    tmp_path: Path, kind: str
) -> None:
    good = [f"{time},{prompt},{output}" for time, prompt, output in zip(AFTER_S, PROMPTS, OUTPUTS, strict=True)]
    if kind == "csv":
        text = "\n".join(["time,input,output", "soon,5,5", good[0], "0.2,-4,2", "0.3,many,5", *good[1:]])
        lines_of = ("line 2: time='soon' is not a", "line 4: input='-4' is not allowed", "line 5: input='many'")
    else:
        records = [
            json.dumps(dict(zip(("time", "input", "output"), map(float, row.split(",")), strict=True))) for row in good
        ]
        text = "\n".join([records[0], '{"time": 1, "input": -4, "output": 2}', "{cut", '{"time": 2}', *records[1:]])
        lines_of = ("line 2: input=-4 is not allowed", "line 3: is not JSON", "line 4: input is missing")
    path = tmp_path / f"log.{kind}"
    path.write_text(text)
    with pytest.raises(DataFormatError, match=f"{lines_of[0]}.*; 3 rows cannot be read"):
        import_log(path)
    with pytest.raises(DataFormatError, match="3 rows cannot be read, and --skip-bad allows 2"):
        import_log(path, skip_bad=2)
    imported = import_log(path, skip_bad=3)
    check(imported)
    assert imported.skipped == {"cannot be read": 3}
    (note,) = imported.notes
    assert note.startswith("rows that cannot be read are left out: ")
    assert all(line in note for line in lines_of)
    with pytest.raises(InvalidConfigError, match="--skip-bad=-1 is not allowed"):
        import_log(path, skip_bad=-1)


def test_a_whole_file_of_another_kind_is_refused_however_many_rows_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,input,output\n" + "a,b,c\n" * 40)
    for allowed in (0, 40):
        with pytest.raises(DataFormatError, match=r"line 2: time='a' is not a time.*; no row can be read$"):
            import_log(path, skip_bad=allowed)


def test_everything_that_is_wrong_with_the_first_bad_row_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,input,output\n0,1,2\n1,,many\nsoon,2,3\n4,5,6\n")
    with pytest.raises(DataFormatError) as refused:
        import_log(path)
    said = f"{path}, line 3: input is missing; output='many' is not a number; 2 rows cannot be read"
    assert str(refused.value) == said
    assert (refused.value.line, refused.value.field) == (3, "input")
    path.write_text("time,input,output\n0,1,2\n1,,3\n")
    with pytest.raises(DataFormatError, match=r"line 3: input is missing; 1 row cannot be read\n"):
        import_log(path)


def test_a_first_time_that_cannot_be_read_does_not_decide_the_format_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for times in (("7.5", "9"), ("2026-01-01T00:00:07.5Z", "2026-01-01T00:00:09Z")):
        path.write_text("time,input,output\n" + "".join(f"{time},1,2\n" for time in ("soon", *times)))
        assert import_log(path, skip_bad=1).log.arrival_s.tolist() == [0.0, 1.5]


def test_a_format_that_nobody_reads_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="one of auto, table, azure"):
        import_log(tmp_path, "excel")
