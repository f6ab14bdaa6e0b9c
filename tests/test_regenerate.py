"""`paceline regenerate` with an endpoint: every row once, whatever fails and whenever it is killed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from paceline.common.cli import main
from paceline.common.errors import ConfigError, PacelineError, UsageError
from paceline.common.rows import Rows
from paceline.producer import regenerate as module
from paceline.producer.answers import SYNC_ROWS, Answers, RowId
from paceline.producer.endpoint import LONGEST_RETRY_AFTER, EndpointOptions, base_url, retry_after, server_words
from paceline.producer.prepare import prepare
from paceline.producer.regenerate import Listener, RegenerateReport, regenerate
from paceline.producer.replies import Sampling
from waiting import until

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl", 30)


def write_chats(path: Path, count: int) -> Path:
    rows = [{"id": i, "messages": [user(f"question {i}"), assistant(f"old {i}")]} for i in range(count)]
    return write_rows(path, rows)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def ask(server: ChatServer, tmp_path: Path) -> Callable[..., RegenerateReport]:
    """ask(file, out=..., concurrency=..., turns=...) -> report, with quick pauses; what is said goes to ask.said."""
    said: list[str] = []

    def run(file: Path, out: Path | None = None, **options: Any) -> RegenerateReport:
        names = {"urls", "model", "api_key", "concurrency", "tries", "timeout", "patience", "body", "pause"}
        given = {"urls": (server.url,), "pause": 0.001, "concurrency": 4}
        given |= {name: options.pop(name) for name in names & set(options)}
        options.setdefault("listener", Listener(said.append))
        return regenerate([file], out or tmp_path / "out.jsonl", endpoint=EndpointOptions(**given), **options)

    run.said = said  # pyright: ignore[reportFunctionMemberAccess]
    return run


def test_answers_every_row(server: ChatServer, ask: Any, chats: Path, tmp_path: Path) -> None:
    server.delay = 0.02
    report = ask(chats)
    assert (report.rows, report.answered, report.refused, report.failed, report.unfinished) == (30, 30, 0, 0, 0)
    assert report.tokens == 150
    rows = read(report.path)
    assert sorted(row["id"] for row in rows) == list(range(30))
    for row in rows:
        question = f"question {row['id']}"
        assert row["messages"] == [user(question), assistant(f"Answer to {question}.")]
        assert row["finished"] is True
        assert row["regenerated"] == {"file": 0, "line": row["id"] + 1, "tokens": 5}
    assert set(server.asked.values()) == {1}
    assert 1 < server.most_at_once <= 4
    assert all(set(body) == {"model", "messages", "max_tokens"} for body in server.bodies), "the rest is the server's"


def test_what_is_written_can_be_prepared(
    ask: Any, chats: Path, tiny_tokenizer_dir: Path, server: ChatServer, tmp_path: Path
) -> None:
    server.replies["question 3"] = {"finish_reason": "length"}
    out = ask(chats).path
    made = prepare([out], target=str(tiny_tokenizer_dir), out=tmp_path / "rows", cache=tmp_path)
    assert made.kept == 30 and not made.dropped
    ended = [Rows.open(made.folder).row(i).tokens[-1] == 2 for i in range(30)]
    assert ended.count(False) == 1, "no end token follows the answer that was cut"


def test_system_prompts_tools_and_modes_are_kept(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    result = {"role": "tool", "content": "seen", "tool_call_id": "a1"}
    rows = [
        {"messages": [system, user("one"), assistant("old")], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [user("two"), assistant("", tool_calls=[call]), result, assistant("old")], "tools": TOOLS, "k": 1},
        {"prompt": "three", "source": "mine"},
    ]
    sampling = Sampling(max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=0, seed=7)
    kwargs = {"enable_thinking": True, "style": "dry"}
    ask(write_rows(tmp_path / "a.jsonl", rows), sampling=sampling, template_kwargs=kwargs, body={"min_p": 0.1})
    one, two, three = sorted(read(tmp_path / "out.jsonl"), key=lambda row: row["regenerated"]["line"])
    assert one["messages"][:2] == [system, user("one")]
    assert one["chat_template_kwargs"] == {"enable_thinking": False, "style": "dry"}, "a row's own win"
    assert two["tools"] == TOOLS and two["k"] == 1 and len(two["messages"]) == 4
    assert two["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"at": "it"}
    assert three["messages"][0] == user("three") and three["source"] == "mine"
    by_text = {body["messages"][-1]["content"]: body for body in server.bodies}
    body = by_text["one"]
    assert body["messages"][0] == system and body["chat_template_kwargs"] == one["chat_template_kwargs"]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["top_k"]) == (9, 0.5, 0.9, -1)
    assert body["min_p"] == 0.1 and "tools" not in body
    assert by_text["seen"]["tools"] == TOOLS
    assert by_text["seen"]["messages"][1]["tool_calls"] == [call], "arguments go over the wire as text"
    seeds = {body["seed"] for body in server.bodies}
    assert len(seeds) == 3 and all(0 <= seed < 1 << 31 for seed in seeds)


@pytest.mark.parametrize("fault", ["429", "500", "503", "408", "drop", "garbage", "empty", "abort"])
def test_passing_faults_are_tried_again(fault: str, server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {"question 4": [fault] * 3, "question 9": [fault]}
    report = ask(chats)
    assert (report.answered, report.failed, report.refused) == (30, 0, 0)
    assert server.asked["question 4"] == 4 and server.asked["question 9"] == 2 and server.asked["question 5"] == 1


def test_busy_servers_use_up_no_tries(server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {"question 4": ["429"] * 12}
    assert ask(chats, tries=2).answered == 30


def test_a_slow_answer_is_asked_again(server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {"question 2": ["slow"]}
    assert ask(chats, timeout=1.0).answered == 30
    assert server.asked["question 2"] == 2


def test_a_row_that_fails_keeps_its_place(server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {"question 7": ["500"] * 3}
    report = ask(chats, tries=3)
    assert (report.answered, report.failed, report.refused) == (29, 1, 0)
    assert f"{chats}:8: no answer: HTTP 500: told to say 500 (3 tries)" in ask.said
    report = ask(chats)
    assert (report.answered, report.failed) == (30, 0)
    assert server.asked["question 6"] == 1 and server.asked["question 7"] == 4


def test_refused_rows_are_named_once_and_not_asked_again(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": [user(f"question {i}")]} for i in range(6)]
    rows[1] = {"messages": [assistant("first")]}
    rows[2] = "{"
    rows[4] = {"messages": []}
    file = write_rows(tmp_path / "mixed.jsonl", rows)
    server.faults = {"question 3": ["400"]}
    server.replies["question 5"] = {"message": {"role": "assistant", "content": "  "}}
    report = ask(file)
    assert (report.answered, report.refused, report.failed) == (1, 5, 0)
    told = "\n".join(ask.said)
    assert f"{file}:2: refused: the first message is the assistant's" in told
    assert f"{file}:3: refused: not JSON" in told
    assert f"{file}:4: refused: the endpoint refuses it (HTTP 400: told to say 400)" in told
    assert f"{file}:6: refused: the answer is empty" in told
    assert {row["where"] for row in read(tmp_path / "out.refused")} == {f"{file}:{line}" for line in (2, 3, 4, 5, 6)}
    ask.said.clear()
    report = ask(file)
    assert (report.answered, report.refused) == (1, 5) and not any("refused:" in line for line in ask.said)
    assert server.asked["question 3"] == 1


def test_text_that_is_no_unicode_ends_no_job(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    """Half a surrogate pair in a field that is only kept stays as it is; in an answer it could not be trained on."""
    rows: list[dict[str, Any]] = [{"id": i, "messages": [user(f"question {i}")]} for i in range(4)]
    rows[1]["source"] = "half \ud83d"
    chats = write_rows(tmp_path / "chats.jsonl", rows)
    server.replies["question 2"] = {"message": {"content": "cut \ud83d"}, "finish_reason": "length"}
    report = ask(chats, concurrency=1)
    assert (report.answered, report.refused) == (3, 1)
    written = {row["id"]: row for row in read(report.path)}
    assert written.keys() == {0, 1, 3} and written[1]["source"] == "half \ud83d"
    (refused,) = read(tmp_path / "out.refused")
    assert refused["where"].endswith("chats.jsonl:3") and "a lone surrogate" in refused["reason"]
    assert ask(chats).answered == 3, "what was written can be read again"


def test_refusals_from_the_start_end_the_job(server: ChatServer, ask: Any, chats: Path, tmp_path: Path) -> None:
    server.faults = {f"question {i}": ["400"] * 2 for i in range(30)}
    with pytest.raises(ConfigError, match="first 20 answers are of no use; the last: the endpoint refuses it"):
        ask(chats)
    assert not (tmp_path / "out.refused").exists(), "no row is to blame"
    server.faults = {}
    assert ask(chats).answered == 30


def test_failures_without_end_end_the_job(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    file = write_chats(tmp_path / "many.jsonl", 60)
    server.faults = {f"question {i}": ["500"] * 9 for i in range(10, 60)}
    with pytest.raises(PacelineError, match="20 rows in a row have no answer") as error:
        ask(file, tries=2)
    assert error.value.exit_code == 1
    server.faults = {}
    assert ask(file).answered == 60


@pytest.mark.parametrize(("status", "hint"), [("401", "--api-key-env"), ("404", "OpenAI-compatible"), ("302", "302")])
def test_a_wrong_endpoint_ends_the_job(status: str, hint: str, server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {f"question {i}": [status] for i in range(30)}
    with pytest.raises(ConfigError, match=hint) as error:
        ask(chats)
    assert error.value.exit_code == 78


def test_an_endpoint_that_stays_away_ends_the_job(server: ChatServer, ask: Any, chats: Path) -> None:
    server.close()
    with pytest.raises(PacelineError, match="so the job ends here") as error:
        ask(chats, patience=0.2, timeout=0.2, pause=0.01)
    assert error.value.exit_code == 1
    assert sum("trying again" in line for line in ask.said) == 1


@pytest.mark.parametrize("model", [None, "tiny"])
def test_an_endpoint_without_connection_is_given_up_after_patience(
    model: str | None, server: ChatServer, ask: Any, chats: Path
) -> None:
    server.close()
    began = time.monotonic()
    with pytest.raises(PacelineError, match="no answer for 1 s, so the job ends here"):
        ask(chats, model=model, patience=1.0, timeout=600.0, pause=30.0)
    assert time.monotonic() - began < 10, "neither the time for an answer nor a long pause counts"


def test_a_busy_endpoint_is_waited_for_while_an_answer_may_be_under_way(
    server: ChatServer, ask: Any, chats: Path
) -> None:
    server.faults = {"question 0": ["slow"], "question 1": ["503"] * 200}
    timer = threading.Timer(1.0, server.released.set)
    timer.start()
    assert ask(chats, concurrency=2, patience=0.01).answered == 30
    timer.join()


def test_an_endpoint_that_comes_back_is_waited_for(server: ChatServer, ask: Any, chats: Path) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    server.close()
    revived: list[ChatServer] = []

    def say(text: str) -> None:
        ask.said.append(text)
        if "trying again" in text:
            revived.append(ChatServer(port))

    report = ask(chats, listener=Listener(say), pause=0.01)
    revived[0].close()
    assert report.answered == 30 and any(line.endswith(": back") for line in ask.said)


def test_several_servers_are_asked_in_turn(server: ChatServer, ask: Any, chats: Path) -> None:
    other = ChatServer()
    assert ask(chats, urls=(server.url, other.url)).answered == 30
    other.close()
    assert sum(server.asked.values()) == sum(other.asked.values()) == 15


def test_a_server_that_is_away_is_passed_over(server: ChatServer, ask: Any, chats: Path) -> None:
    gone = ChatServer()
    gone.close()
    report = ask(chats, urls=(gone.url, server.url), model="tiny", patience=60.0)
    assert report.answered == 30
    assert sum(gone.url in line for line in ask.said) <= 2, "it is not named again and again"


def test_one_closed_connection_is_no_news(server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {"question 4": ["drop"]}
    assert ask(chats, concurrency=1).answered == 30
    assert not any("trying again" in line or "back" in line for line in ask.said)


def test_the_model_is_asked_for(server: ChatServer, ask: Any, chats: Path, tmp_path: Path) -> None:
    server.models = ["a", "b"]
    with pytest.raises(UsageError, match=r"serves 2 models \(a, b\): choose one with --model"):
        ask(chats)
    assert ask(chats, model="b", limit=3).answered == 3
    assert {body["model"] for body in server.bodies} == {"b"}
    server.models = ["other"]
    with pytest.raises(ConfigError, match="has answers of b, and other is asked now"):
        ask(chats)


def test_every_form_and_file_is_read(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "old"}]
    array = tmp_path / "a.json"
    array.write_text(json.dumps([{"conversations": turns, "system": "Be brief.", "k": 1}, {"conversations": []}]))
    table = tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": [user("two")]}, {"messages": [user("three")]}]), table)
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(b"\n" + json.dumps({"prompt": "four"}).encode() + b"\n"))
    out = tmp_path / "out.jsonl"
    endpoint = EndpointOptions((server.url,))
    said: list[str] = []
    files = [array, table, packed]
    report = regenerate(files, out, endpoint=endpoint, listener=Listener(said.append))
    assert (report.rows, report.answered, report.refused) == (5, 4, 1)
    assert f"{array}[1]: refused: no messages" in said
    rows = sorted(read(out), key=lambda row: (row["regenerated"]["file"], row["regenerated"]["line"]))
    assert [(row["regenerated"]["file"], row["regenerated"]["line"]) for row in rows] == [
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 2),
    ]
    assert rows[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        user("one"),
        assistant("Answer to one."),
    ]
    assert set(rows[0]) == {"k", "messages", "finished", "regenerated"}
    assert [row["messages"][0]["content"] for row in rows[1:]] == ["two", "three", "four"]
    assert regenerate(files, out, endpoint=endpoint).answered == 4
    assert sum(server.asked.values()) == 4


# Turns


def dialogue() -> list[dict[str, Any]]:
    return [user("a"), assistant("old a"), user("b"), assistant("old b"), user("c"), assistant("old c")]


def test_every_turn_sees_the_new_answers_before_it(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    ask(write_rows(tmp_path / "a.jsonl", [{"messages": dialogue()}]), turns="all")
    [row] = read(tmp_path / "out.jsonl")
    assert [m["content"] for m in row["messages"][1::2]] == ["Answer to a.", "Answer to b.", "Answer to c."]
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]
    assert server.bodies[2]["messages"] == row["messages"][:5]
    assert row["regenerated"]["tokens"] == 15


def test_the_last_turn_keeps_the_old_answers(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    ask(write_rows(tmp_path / "a.jsonl", [{"messages": dialogue()}, {"messages": dialogue()[:3]}]))
    rows = sorted(read(tmp_path / "out.jsonl"), key=lambda row: row["regenerated"]["line"])
    assert [m["content"] for m in rows[0]["messages"]] == ["a", "old a", "b", "old b", "c", "Answer to c."]
    assert [m["content"] for m in rows[1]["messages"]] == ["a", "old a", "b", "Answer to b."], "an open question"


def test_a_cut_answer_ends_the_conversation(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    server.replies["b"] = {"finish_reason": "length"}
    report = ask(write_rows(tmp_path / "a.jsonl", [{"messages": dialogue()}]), turns="all")
    [row] = read(tmp_path / "out.jsonl")
    assert len(row["messages"]) == 4 and row["finished"] is False and report.unfinished == 1


def test_tool_calls_end_it_and_results_keep_theirs(server: ChatServer, ask: Any, tmp_path: Path) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    old = [user("a"), assistant("", tool_calls=[call]), {"role": "tool", "content": "seen"}, assistant("old")]
    new = [user("b"), assistant("old"), user("c"), assistant("old")]
    server.replies["b"] = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    ask(write_rows(tmp_path / "a.jsonl", [{"messages": old}, {"messages": new}]), turns="all")
    kept, called = sorted(read(tmp_path / "out.jsonl"), key=lambda row: row["regenerated"]["line"])
    assert kept["messages"][3]["content"] == "Answer to seen." and kept["messages"][1]["tool_calls"]
    assert called["messages"][1:] == [assistant("", tool_calls=[call])] and called["finished"] is True


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_kept_apart(name: str, server: ChatServer, ask: Any, tmp_path: Path) -> None:
    server.replies["a"] = {"message": {"content": "Yes.", name: "Well, yes."}}
    server.replies["b"] = {"message": {"content": None, name: "Well"}, "finish_reason": "length"}
    server.replies["c"] = {"message": {"content": None, name: "Well."}}
    report = ask(write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]))
    assert report.answered == 2 and report.refused == 1, "thinking and no answer"
    one, two = sorted(read(tmp_path / "out.jsonl"), key=lambda row: row["regenerated"]["line"])
    assert one["messages"][1] == assistant("Yes.", reasoning_content="Well, yes.") and one["finished"]
    assert two["messages"][1] == assistant("", reasoning_content="Well") and not two["finished"]


# Killed and gone on with


def test_killed_in_the_middle_it_goes_on(server: ChatServer, tmp_path: Path) -> None:
    file, out = write_chats(tmp_path / "chats.jsonl", 60), tmp_path / "out.jsonl"
    server.delay = 0.05
    command = [sys.executable, "-m", "paceline.common.cli", "regenerate", str(file), "--out", str(out)]
    command += ["--endpoint", server.url, "--concurrency", "4"]
    killed = subprocess.Popen(command, stderr=subprocess.PIPE)
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 15)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = read(out)
    with out.open("ab") as stream:  # what a crash may leave of a line
        stream.write(b'{"id": 59, "messages": [{"role": "us')
    server.delay = 0.0
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = read(out)
    assert rows[: len(before)] == before, "what stood stands"
    assert sorted(row["id"] for row in rows) == list(range(60)), "no row is lost or doubled"
    assert f"60 of 60 rows answered in {out}" in done.stdout
    asked_twice = sum(count - 1 for count in server.asked.values())
    assert asked_twice <= 4, "only what was under way is asked again"


def test_ctrl_c_says_how_to_go_on(server: ChatServer, tmp_path: Path) -> None:
    file, out = write_chats(tmp_path / "chats.jsonl", 20), tmp_path / "out.jsonl"
    server.faults = {"question 19": ["slow"]}
    command = [sys.executable, "-m", "paceline.common.cli", "regenerate", str(file), "--out", str(out)]
    process = subprocess.Popen([*command, "--endpoint", server.url], stderr=subprocess.PIPE, text=True)
    until(lambda: out.exists() and out.read_bytes().count(b"\n") == 19)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert (
        error.splitlines()[-1] == f"paceline: stopped; the rows in {out} stand, and the same command goes on from them"
    )
    assert len(read(out)) == 19


def test_other_settings_or_input_are_refused(server: ChatServer, ask: Any, chats: Path) -> None:
    ask(chats, sampling=Sampling(temperature=0.5))
    with pytest.raises(ConfigError, match=r"was begun with temperature 0\.5, now it is 1\.0: give another file"):
        ask(chats, sampling=Sampling(temperature=1.0))
    with pytest.raises(ConfigError, match="was begun with template_kwargs"):
        ask(chats, sampling=Sampling(temperature=0.5), template_kwargs={"enable_thinking": False})
    write_chats(chats, 31)
    with pytest.raises(ConfigError, match="was begun with other input"):
        ask(chats, sampling=Sampling(temperature=0.5))


def test_a_finished_job_asks_nobody(server: ChatServer, ask: Any, chats: Path) -> None:
    ask(chats)
    server.close()
    assert ask(chats).answered == 30


def test_a_foreign_file_is_left_alone(ask: Any, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("my thesis\n")
    with pytest.raises(ConfigError, match="does not say how it was made"):
        ask(chats)
    assert (tmp_path / "out.jsonl").read_text() == "my thesis\n"
    with pytest.raises(ConfigError, match=r"must end in \.jsonl"):
        ask(chats, tmp_path / "out.parquet")
    with pytest.raises(ConfigError, match="there is no folder"):
        ask(chats, tmp_path / "nowhere" / "out.jsonl")


def test_two_jobs_do_not_write_one_file(server: ChatServer, ask: Any, chats: Path) -> None:
    server.faults = {"question 0": ["slow"]}
    first = threading.Thread(target=ask, args=(chats,))
    first.start()
    until(lambda: server.asked["question 0"] == 1)
    with pytest.raises(PacelineError, match="another process is writing it"):
        ask(chats)
    server.released.set()
    first.join()


def test_a_full_disk_keeps_what_stands(
    server: ChatServer, ask: Any, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, writes = os.pwrite, []

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        writes.append(data)
        if len(writes) <= 5:
            return whole(fd, data, offset)
        if len(writes) == 6:
            return whole(fd, data[:7], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(PacelineError, match="No space left on device; its whole rows stand"):
        ask(chats, concurrency=1)
    monkeypatch.undo()
    assert ask(chats).answered == 30
    assert server.asked["question 0"] == 1 and server.asked["question 5"] == 2


# The file


ABOUT = {"files": [{"name": "a", "sha256": "0"}], "settings": {}}


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(path, ABOUT) as answers:
        answers.add(RowId(0, 1), {"messages": []}, 3)
        answers.add(RowId(0, 2), {"messages": [], "finished": False}, None)
    whole = path.read_bytes()
    for torn in (b"{", b'{"regenerated": {"file": 0, "line": 3}}', b"\0" * 4096, b"\0\0\n" + b"\0" * 9, b"[]\n"):
        path.write_bytes(whole + torn)
        with Answers(path, ABOUT) as answers:
            assert (answers.answered, answers.unfinished, answers.tokens) == (2, 1, 3)
            assert answers.has(RowId(0, 2)) and not answers.has(RowId(0, 3))
            answers.add(RowId(0, 3), {"messages": []}, 1)
        assert len(read(path)) == 3
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "row",
    [
        {"file": 0, "line": 1},
        {"file": 1, "line": 2},
        {"file": 0, "line": 1 << 40},
        {"file": 0, "line": 0},
        {"line": "2"},
        {},
    ],
)
def test_rows_of_other_jobs_are_refused(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(path, ABOUT) as answers:
        answers.add(RowId(0, 1), {}, 3)
    with path.open("a") as stream:
        stream.write(json.dumps({"regenerated": row}) + "\n")
    with pytest.raises(ConfigError, match="names no row of the input, or one twice"):
        Answers(path, ABOUT)


def test_damage_in_the_middle_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(path, ABOUT) as answers:
        for line in range(1, SYNC_ROWS + 3):
            answers.add(RowId(0, line), {}, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"oops\n", *lines[2:]]))
    with pytest.raises(ConfigError, match=r"out.jsonl:2: not a row that this command wrote"):
        Answers(path, ABOUT)
    assert len(path.read_bytes().splitlines()) == len(lines)


# The command


def test_command(
    server: ChatServer, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setenv("TEST_KEY", "sesame-123")
    out = tmp_path / "out.jsonl"
    server.replies["question 1"] = {"finish_reason": "length"}
    command = ["regenerate", str(chats), "--out", str(out), "--endpoint", server.url.removesuffix("/v1")]
    command += ["--api-key-env", "TEST_KEY", "--limit", "10", "--no-thinking", "--template-kwargs", '{"style": "dry"}']
    assert main(command) == 0
    shown = capsys.readouterr()
    assert f"10 of 10 rows answered in {out}, 50 tokens; 1 (10%) stopped at the length limit" in shown.out
    assert f"next: paceline prepare {out} --target TARGET" in shown.out
    assert "10 rows to answer by tiny" in shown.err
    assert server.keys == {"Bearer sesame-123"}
    assert server.bodies[0]["chat_template_kwargs"] == {"style": "dry", "enable_thinking": False, "thinking": False}
    written = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    assert not any("sesame" in text for text in [*written, shown.out, shown.err])
    server.faults = {"question 12": ["500"] * 9}
    assert main([*command, "--limit", "20", "--tries", "1"]) == 1
    assert "1 without an answer: the same command asks them again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "give either --target, to answer here, or --endpoint"),
        (["--target", "x", "--endpoint", "http://a"], 2, "give either --target"),
        (["--target", "x", "--concurrency", "3"], 2, "--concurrency does not go with --target"),
        (["--endpoint", "http://a", "--batch-size", "3"], 2, "--batch-size does not go with --endpoint"),
        (["--endpoint", "localhost:8000"], 2, "give a URL such as"),
        (["--endpoint", "http://a", "--extra-body", "{"], 2, "--extra-body: not JSON"),
        (["--endpoint", "http://a", "--template-kwargs", "[1]"], 2, "a JSON object was expected"),
        (["--endpoint", "http://a", "--api-key-env", "PACELINE_NO_SUCH"], 78, "PACELINE_NO_SUCH is not set"),
    ],
)
def test_usage(
    arguments: list[str], code: int, text: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["regenerate", str(chats), "--out", str(tmp_path / "out.jsonl"), *arguments]) == code
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_base_urls() -> None:
    assert base_url("http://a:8000") == base_url("http://a:8000/v1/") == "http://a:8000/v1"
    assert base_url("https://a/proxy/v1/chat/completions") == "https://a/proxy/v1"


def test_nothing_usable_is_a_failure(ask: Any, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="none of 2 rows could be"):
        ask(write_rows(tmp_path / "a.jsonl", ["{", "[]"]))


def test_the_rate_and_the_time_left() -> None:
    progress = module.Progress(rows=100, left=50, answered=40, refused=10, new=25, tokens=500)
    progress.started -= 10
    assert progress.tokens_per_s == pytest.approx(50, rel=0.1)
    assert progress.eta == pytest.approx(20, rel=0.1)
    assert module.Progress(rows=3, left=3).eta is None


def test_pauses_that_servers_ask_for() -> None:
    assert retry_after(None) is None and retry_after("soon") is None and retry_after("nan") is None
    assert retry_after("2.5") == 2.5 and retry_after("-3") == 0
    assert retry_after("1e9") == LONGEST_RETRY_AFTER
    assert 50 < (retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=60))) or 0) <= 60


def test_what_servers_say_is_one_short_line() -> None:
    assert server_words(b'{"error": {"message": "too\\nlong"}}') == "too long"
    assert server_words(b'{"error": "plain"}') == "plain"
    assert server_words(b'{"message": "flat"}') == "flat"
    assert server_words(b"<html>\x1b[31m" + b"x" * 999) == "<html> [31m" + "x" * 188 + "…"
