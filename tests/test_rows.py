import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from paceline.common.errors import ConfigError
from paceline.common.rows import ROWS_PER_BATCH, Rows, RowsWriter


def make_rows(count, seed=0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(8, 20, count)
    return [
        (draw.integers(0, 500, n).astype(np.int32), draw.integers(0, 2, n).astype(np.uint8)) for n in lengths.tolist()
    ]


def write(folder, rows, **meta):
    with RowsWriter(folder) as writer:
        for tokens, mask in rows:
            writer.add(tokens, mask)
        writer.finish(meta)
    return folder


@pytest.mark.parametrize("count", [1, ROWS_PER_BATCH - 1, ROWS_PER_BATCH, 2 * ROWS_PER_BATCH + 3])
def test_rows_come_back_as_written(tmp_path, count):
    made = make_rows(count)
    rows = Rows.open(write(tmp_path / "rows", made, note="kept"))
    assert len(rows) == count
    assert rows.lengths.dtype == np.int32 and rows.lengths.tolist() == [len(tokens) for tokens, _ in made]
    for index, (tokens, mask) in enumerate(made):
        row = rows.row(index)
        assert row.tokens.dtype == np.int32 and row.mask.dtype == np.uint8
        assert np.array_equal(row.tokens, tokens) and np.array_equal(row.mask, mask)
    assert rows.meta["note"] == "kept"
    assert rows.total_tokens == rows.lengths.sum()
    assert rows.meta["supervised"] == sum(int(mask.sum()) for _, mask in made)
    assert np.array_equal(rows.row(count).tokens, made[0][0]), "another use of the first row"
    assert np.array_equal(rows.row(rows.ids - 1).tokens, made[-1][0])
    for outside in (-1, rows.ids):
        with pytest.raises(IndexError):
            rows.row(outside)


def test_copies_are_counted(tmp_path):
    """Of the tokens, whatever is supervised, and across the writer's batches."""
    made = make_rows(ROWS_PER_BATCH + 20)
    assert Rows.open(write(tmp_path / "rows", made)).meta["copies"] == 0
    again = [made[0], (made[1][0], 1 - made[1][1]), made[0]]
    assert Rows.open(write(tmp_path / "more", [*made, *again])).meta["copies"] == 3


def test_used_tokens(tmp_path):
    rows = Rows.open(write(tmp_path / "rows", [(np.array([5, 3] * 4, np.int32), np.ones(8, np.uint8))]))
    assert rows.used_tokens.tolist() == [3, 5]
    assert [token for token in range(8) if rows.used_token(token)] == [3, 5]
    assert rows.vocab_bound == 6


def test_token_ids_of_a_large_vocabulary(tmp_path):
    rows = Rows.open(write(tmp_path / "rows", [(np.array([2**20, 3] * 4, np.int32), np.ones(8, np.uint8))]))
    assert rows.used_tokens.tolist() == [3, 2**20] and rows.vocab_bound == 2**20 + 1


def test_the_digest_is_of_the_contents(tmp_path):
    made = make_rows(30)
    one = Rows.open(write(tmp_path / "one", made, key="a"))
    same = Rows.open(write(tmp_path / "same", made, key="b"))
    assert one.digest == same.digest
    made[7][1][3] ^= 1
    assert Rows.open(write(tmp_path / "other", made)).digest != one.digest


def test_rows_pickle_as_their_path(tmp_path):
    rows = Rows.open(write(tmp_path / "rows", make_rows(2000)))
    data = pickle.dumps(rows)
    assert len(data) < 500
    assert np.array_equal(pickle.loads(data).row(1999).tokens, rows.row(1999).tokens)


def test_pandas_is_not_imported(tmp_path):
    """pyarrow's conversions do, where it is installed: most of a second for each worker, rank and command."""
    (tmp_path / "pandas.py").write_text("raise SystemExit('pandas was imported')")
    script = """
import numpy as np
from paceline.common.rows import Rows, RowsWriter
with RowsWriter(Path("rows")) as writer:
    writer.add(np.arange(9, dtype=np.int32), np.ones(9, np.uint8))
    writer.finish({})
print(Rows.open("rows").row(0).tokens.tolist())
"""
    command = [sys.executable, "-c", "from pathlib import Path" + script]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{list(range(9))}\n", done.stderr


def test_an_unfinished_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), RowsWriter(tmp_path / "rows") as writer:
        for tokens, mask in make_rows(ROWS_PER_BATCH + 1):
            writer.add(tokens, mask)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_writing_again_replaces_and_leaves_open_rows_alone(tmp_path):
    folder = write(tmp_path / "rows", make_rows(5, seed=1))
    old = Rows.open(folder)
    before = old.row(4).tokens.copy()
    write(folder, make_rows(9, seed=2))
    assert len(Rows.open(folder)) == 9
    assert np.array_equal(old.row(4).tokens, before)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_a_folder_with_files_of_others_is_not_replaced(tmp_path):
    folder = write(tmp_path / "rows", make_rows(5))
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"notes.txt\): move them elsewhere"):
        write(folder, make_rows(9))
    assert len(Rows.open(folder)) == 5 and (folder / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def damage_meta(folder, **change):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "meta.json").unlink(), "no prepared rows here"),
        (lambda f: (f / "rows.arrow").unlink(), "no prepared rows here"),
        (lambda f: (f / "meta.json").write_text("{"), "meta.json cannot be read"),
        (lambda f: damage_meta(f, version=0), "another version"),
        (lambda f: damage_meta(f, rows=4), "does not match"),
        (lambda f: (f / "rows.arrow").write_bytes((f / "rows.arrow").read_bytes()[:300]), "cannot be read"),
        (lambda f: (f / "rows.arrow").write_bytes(b""), "cannot be read"),
    ],
)
def test_damaged_rows_are_refused(tmp_path, damage, message):
    folder = write(tmp_path / "rows", make_rows(5))
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        Rows.open(folder)


def test_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="no prepared rows here"):
        Rows.open(tmp_path / "absent")
