"""States kept on disk: read again for any packing, by any worker, and never a wrong one."""

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paceline.common.errors import ConfigError
from paceline.common.rows import Rows, RowsWriter
from paceline.producer import recording as module
from paceline.producer.recording import (
    ENTRY_BYTES,
    Recording,
    RecordingSource,
    StateKind,
    recording_source,
    row_key,
)
from paceline.producer.source import Filled

KIND = StateKind("some target", (1, 4), last_hidden=True, dtype="float32", hidden_size=8)
LONG_ROWS = [np.arange(start, start + 10, dtype=np.int32) for start in (0, 11, 22, 33)]  # prepared rows are not short
ROWS = [np.arange(start, start + length, dtype=np.int32) for start, length in ((0, 5), (40, 9), (7, 1), (90, 12))]


def states_of(tokens: np.ndarray) -> np.ndarray:
    """[3, t, 8] that tell the token, its place in the row and the plane."""
    base = tokens[None, :, None] * 1000.0 + np.arange(len(tokens))[None, :, None]
    return (base + 0.25 * np.arange(3)[:, None, None] + np.zeros(8)).astype(np.float32)


class Target:
    """Computes `states_of` each row, and counts."""

    def __init__(self, finite: bool = True) -> None:
        self.info: Any = None
        self.batches = 0
        self.mapping: tuple[int, int] | None = None
        self.finite, self.closed = finite, False

    def register(self, address: int, length: int) -> None:
        self.mapping = address, length

    def begin(
        self,
        tokens: np.ndarray,
        cu_seqlens: np.ndarray,
        out: memoryview,
        progress: Callable[[], None],
        landed: Any = None,
    ) -> Filled:
        self.batches += 1
        whole = np.frombuffer(out, np.float32).reshape(3, len(tokens), 8)
        for start, stop in pairwise(cu_seqlens.tolist()):
            whole[:, start:stop] = states_of(tokens[start:stop])
        progress()
        return Filled(self.finite)

    def settle(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


def run_batch(source: RecordingSource, *rows: np.ndarray) -> np.ndarray:
    tokens = np.concatenate(rows)
    out = memoryview(bytearray(3 * len(tokens) * 8 * 4))
    beats: list[int] = []
    cu_seqlens = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    assert source.begin(tokens, cu_seqlens, out, lambda: beats.append(1)).finish()
    assert beats
    found = np.frombuffer(out, np.float32).reshape(3, len(tokens), 8)
    expected = np.concatenate([states_of(row) for row in rows], axis=1)
    np.testing.assert_array_equal(found, expected)
    return found


@pytest.fixture
def make(tmp_path: Path):
    """make(writer="w0", kind=KIND, limit=None, target=None) -> a source on tmp_path and its target."""
    made: list[RecordingSource] = []

    def one(writer: str = "w0", kind: StateKind = KIND, limit: int | None = None, target: Target | None = None):
        target = target or Target()
        source = RecordingSource(SimpleNamespace(), Recording(tmp_path, kind, writer, limit), lambda: target)  # pyright: ignore[reportArgumentType]
        made.append(source)
        return source, target

    yield one
    for source in made:
        source.close()


def test_rows_come_back_in_any_packing(make):
    source, target = make()
    run_batch(source, ROWS[0], ROWS[1], ROWS[2])
    run_batch(source, ROWS[3])
    assert target.batches == 2
    run_batch(source, ROWS[3], ROWS[0])
    run_batch(source, ROWS[2], ROWS[1], ROWS[0], ROWS[3])
    assert target.batches == 2
    assert (source.rows_computed, source.rows_read) == (4, 6)


def test_a_batch_with_one_new_row_goes_through_the_target(make):
    source, target = make()
    run_batch(source, ROWS[0])
    run_batch(source, ROWS[0], ROWS[1])
    assert target.batches == 2
    run_batch(source, ROWS[1])
    assert target.batches == 2


def test_another_worker_reads_what_one_has_recorded_meanwhile(make):
    first, _ = make("w0")
    second, other = make("w1")
    run_batch(first, ROWS[0], ROWS[1])
    run_batch(second, ROWS[1], ROWS[0])
    assert other.batches == 0
    run_batch(second, ROWS[2])
    run_batch(first, ROWS[2])
    assert (first.rows_read, second.rows_read) == (1, 2)


def test_states_of_another_kind_are_not_taken(make):
    source, _ = make()
    run_batch(source, ROWS[0])
    dtype = {"dtype": "bfloat16", "hidden_size": 16}
    for change in ({"target": "other"}, {"layer_ids": (1, 5)}, dtype, {"computed": "fp8"}):
        _, target = made = make(kind=StateKind(**{**vars(KIND), **change}))
        run_batch(made[0], ROWS[0])
        assert target.batches == 1, change


def test_how_the_target_computes_is_part_of_the_kind():
    """In the dtype that is recorded or another one, in fp8 or not."""
    from drafting import INFO, make_run

    def kind(dtype: str, payload: str = "full", fp8: bool = False) -> str:
        stream = {"token_budget": 512, "payload": payload}
        target = {"path": "nowhere", "dtype": dtype, "fp8": fp8}
        return StateKind.of(make_run(target=target, stream=stream), INFO, [1, 3]).name

    plain = kind("bfloat16")
    assert plain == kind("bfloat16") and plain != kind("float16")
    names = [kind("bfloat16", "fp8"), kind("float16", "fp8"), kind("bfloat16", fp8=True), kind("bfloat16", "fp8", True)]
    assert len({plain, *names}) == 5


def files(tmp_path: Path, suffix: str) -> list[Path]:
    return sorted(tmp_path.glob(f"*/*{suffix}"))


@pytest.mark.parametrize("cut", [1, ENTRY_BYTES // 2, ENTRY_BYTES - 1])
def test_an_entry_that_a_kill_cut_short_does_not_count(make, tmp_path, cut):
    source, _ = make()
    run_batch(source, ROWS[0])
    run_batch(source, ROWS[1])
    (index,) = files(tmp_path, ".index")
    with index.open("r+b") as file:
        file.truncate(2 * ENTRY_BYTES - cut)
    again, target = make()
    run_batch(again, ROWS[0])
    assert target.batches == 0
    run_batch(again, ROWS[1])
    assert target.batches == 1


def test_states_that_are_not_all_there_do_not_count(make, tmp_path):
    """After a crash of the machine the index may be there before the states."""
    source, _ = make()
    run_batch(source, ROWS[0])
    run_batch(source, ROWS[1])
    (states,) = files(tmp_path, ".states")
    with states.open("r+b") as file:
        file.truncate(states.stat().st_size - 8)
    again, target = make()
    run_batch(again, ROWS[0])
    assert target.batches == 0
    run_batch(again, ROWS[1])
    assert target.batches == 1


@pytest.mark.parametrize("where", [".states", ".index"])
def test_no_damaged_byte_gets_through(make, tmp_path, where):
    source, _ = make()
    run_batch(source, ROWS[0], ROWS[1], ROWS[3])
    source.close()
    (path,) = files(tmp_path, where)
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        again, _ = make()
        run_batch(again, ROWS[3], ROWS[1], ROWS[0])  # compares every state
        again.close()
        for made in set(tmp_path.glob("*/w0-*")) - {path, path.with_suffix(".states"), path.with_suffix(".index")}:
            made.unlink()
    path.write_bytes(whole)


def test_a_damaged_row_is_recorded_anew(make, tmp_path, caplog):
    source, _ = make()
    run_batch(source, ROWS[0])
    (states,) = files(tmp_path, ".states")
    data = bytearray(states.read_bytes())
    data[3] ^= 1
    states.write_bytes(data)
    again, target = make("w1")
    run_batch(again, ROWS[0])
    assert target.batches == 1 and "damaged: computing it again" in caplog.text
    run_batch(again, ROWS[0])
    assert target.batches == 1


def test_a_recording_that_is_removed_under_a_worker_is_made_again(make, tmp_path, caplog):
    """To make room, say: what is gone is computed, as what is damaged is."""
    source, _ = make()
    run_batch(source, *LONG_ROWS)
    reader, target = make("w1")
    for path in files(tmp_path, "states"):
        path.unlink()
    run_batch(reader, *LONG_ROWS)
    assert target.batches == 1 and caplog.text.count("computing its rows again") == 1
    run_batch(reader, *LONG_ROWS)
    assert target.batches == 1
    run_batch(source, *LONG_ROWS)  # its own, or what the reader has recorded since
    other, target = make("w2")
    run_batch(other, *LONG_ROWS)
    assert target.batches == 0


def test_a_row_that_one_call_does_not_move_is_read_and_written_whole(make, monkeypatch):
    """Linux moves 2 GiB a call at most."""
    for name in ("preadv", "pwritev"):
        call: Any = getattr(os, name)
        monkeypatch.setattr(module.os, name, lambda fd, parts, at, call=call: call(fd, [parts[0][:100]], at))
    source, _ = make()
    run_batch(source, *LONG_ROWS)
    reader, target = make("w1")
    run_batch(reader, *LONG_ROWS)
    assert target.batches == 0 and not source._recording.off


def test_an_entry_that_is_written_in_part_ends_recording(make, monkeypatch, caplog):
    """A quota reached within it: entries after it would stand where nobody finds them."""
    source, _ = make()
    run_batch(source, LONG_ROWS[0])
    write = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: write(fd, data[:20]))
    run_batch(source, LONG_ROWS[1])
    assert caplog.text.count("ends: the disk is full") == 1
    monkeypatch.undo()
    reader, target = make("w1")
    run_batch(reader, LONG_ROWS[0])
    assert target.batches == 0


def test_rows_are_kept_once_their_record_is_complete(make, monkeypatch):
    source, target = make()
    landed: list[bool] = []
    begin = target.begin

    class Landing(Filled):
        def done(self) -> bool:
            return bool(landed)

    monkeypatch.setattr(target, "begin", lambda *given: Landing(begin(*given).finite))
    out = memoryview(bytearray(3 * len(ROWS[0]) * 8 * 4))
    filling = source.begin(ROWS[0], np.array([0, len(ROWS[0])], np.int32), out, lambda: None)
    assert not filling.done()
    run_batch(source, ROWS[0])
    assert target.batches == 2, "the first record was not complete"
    landed.append(True)
    assert filling.done() and filling.finish()
    run_batch(source, ROWS[0])
    assert target.batches == 2


def test_states_that_are_not_finite_are_not_kept(make):
    source, target = make(target=Target(finite=False))
    tokens = ROWS[0]
    out = memoryview(bytearray(3 * len(tokens) * 8 * 4))
    assert not source.begin(tokens, np.array([0, len(tokens)], np.int32), out, lambda: None).finish()
    target.finite = True
    run_batch(source, tokens)
    assert target.batches == 2


def test_the_limit_ends_recording_but_not_the_run(make, tmp_path, caplog):
    each = 3 * 8 * 4
    source, target = make(limit=each * 15)
    run_batch(source, ROWS[0], ROWS[1])
    run_batch(source, ROWS[3])
    run_batch(source, ROWS[3])
    assert target.batches == 3
    assert sum(path.stat().st_size for path in files(tmp_path, ".states")) == each * 14
    assert caplog.text.count("stream.record_limit is reached") == 1
    run_batch(source, ROWS[1], ROWS[0])
    assert target.batches == 3


def test_a_full_disk_ends_recording_but_not_the_run(make, monkeypatch, caplog):
    source, target = make()
    run_batch(source, ROWS[0])

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "pwritev", full)
    run_batch(source, ROWS[1])
    monkeypatch.undo()
    run_batch(source, ROWS[1])
    run_batch(source, ROWS[0])
    assert target.batches == 3 and "No space left" in caplog.text


def test_little_room_on_the_disk_is_left_to_others(make, monkeypatch, caplog):
    monkeypatch.setattr(module, "free_bytes", lambda _: module.KEEP_FREE)
    source, _ = make()
    run_batch(source, ROWS[0])
    assert "would be left on the disk" in caplog.text and len(source._recording) == 0


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"stream\.record_to: .*Not a directory"):
        Recording(tmp_path / "file", KIND, "w0")


def test_the_ring_is_registered_with_a_target_that_comes_later(make):
    source, target = make()
    source.register(4096, 100)
    assert target.mapping is None
    run_batch(source, ROWS[0])
    assert target.mapping == (4096, 100)
    source.close()
    assert target.closed


@pytest.fixture
def run_and_rows(tmp_path):
    from drafting import INFO, make_run

    with RowsWriter(tmp_path / "rows") as writer:
        for row in LONG_ROWS:
            writer.add(row, np.ones(len(row), np.uint8))
        writer.finish({})
    run = make_run(
        target={"path": "nowhere", "dtype": "float32", "last_hidden": True},
        stream={"record_to": str(tmp_path / "kept"), "record_limit": 0.5},
    )
    return run, INFO, Rows.open(tmp_path / "rows")


def test_no_target_is_loaded_once_every_row_is_recorded(run_and_rows, caplog):
    caplog.set_level("INFO")
    run, info, rows = run_and_rows
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return Target()

    recording = Recording(Path(run.stream.record_to), StateKind.of(run, info, [1, 4]), "w9")
    source = recording_source(run, info, [1, 4], rows, "w0", load)
    assert loads == [1] and "0 of 4 rows are recorded" in caplog.text
    for row in LONG_ROWS:
        states = np.zeros((3, len(row), 48), np.float32)
        recording.write(row_key(row), [plane.data.cast("B") for plane in states])
    recording.close()
    source.close()
    source = recording_source(run, info, [1, 4], rows, "w0", load)
    assert loads == [1] and "4 of 4 rows are recorded" in caplog.text
    source.close()


def test_the_setting_is_a_path_beside_the_run_file(tmp_path):
    from paceline.common.runfile import load

    (tmp_path / "run.toml").write_text(
        'name = "r"\noutput = "out"\n[target]\npath = "some/model"\n[data]\nrows = "rows"\n'
        '[stream]\nrecord_to = "kept"\n'
    )
    assert load(tmp_path / "run.toml").stream.record_to == str(tmp_path / "kept")
    assert load(tmp_path / "run.toml", ["stream.record_to=none"]).stream.record_to is None
