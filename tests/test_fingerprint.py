from types import SimpleNamespace
from typing import Any

import pytest
from paceline.common.fingerprint import MAX_JSON_BYTES, Fingerprint, run_fingerprint
from paceline.common.runfile import RunFile


def fingerprint(rows="r", identity="t", layer_ids=(1, 8), **settings) -> Fingerprint:
    values: dict[str, Any] = {
        "name": "run",
        "output": "out",
        "target": {"path": "target"},
        "data": {"files": ["chats.jsonl"]},
    }
    for key, value in settings.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    dataset: Any = SimpleNamespace(digest=rows, meta={"files": [{"rows": 5}] * len(values["data"]["files"])})
    info: Any = SimpleNamespace(identity=identity)
    return run_fingerprint(RunFile.model_validate(values), dataset, info, list(layer_ids))


def test_equal_inputs_give_equal_fingerprints():
    one, other = fingerprint(), fingerprint()
    assert one == other and one.digest == other.digest and one.differences(other, "the ring") == ""
    assert 0 < one.digest < 2**63
    assert one.hex == f"{one.digest:016x}"


@pytest.mark.parametrize(
    "change",
    [
        {"rows": "s"},
        {"identity": "u"},
        {"layer_ids": (1, 9)},
        {"target__dtype": "float32"},
        {"target__last_hidden": True},
        {"target__fp8": True},
        {"stream__token_budget": 8192},
        {"data__max_length": 1024},
        {"trainer__seed": 1},
        {"stream__packer": "sequential"},
        {"stream__payload": "fp8"},
        {"data__held_out": 8},
        {"trainer__batches_per_step": 2},
        {"data__files": [{"path": "chats.jsonl", "weight": 0.5}]},
    ],
)
def test_what_records_and_plan_depend_on_is_told_apart(change):
    one, other = fingerprint(), fingerprint(**change)
    assert one.digest != other.digest
    name = next(name for name in other.fields if one.fields.get(name) != other.fields[name])
    mine = one.fields.get(name, "absent")
    assert one.differences(other, "the ring") == (
        f"{name} is {mine} in the run file and {other.fields[name]} in the ring"
    )


def test_digests_are_shown_by_their_first_characters():
    one, other = Fingerprint({"dataset": "ab" * 32}), Fingerprint({"dataset": "cd" * 32})
    assert one.differences(other, "the ring") == (
        "dataset is abababababab in the run file and cdcdcdcdcdcd in the ring"
    )


@pytest.mark.parametrize(
    "change", [{"trainer__epochs": 2}, {"trainer__ranks": 3}, {"workers__count": 5}, {"optimizer__lr": 1e-3}]
)
def test_what_may_change_under_a_run_is_not_in_it(change):
    assert fingerprint(**change).digest == fingerprint().digest


def test_many_weighted_files_fit():
    files = [{"path": f"{n}.jsonl", "weight": 0.1 + n / 7} for n in range(200)]
    one, other = fingerprint(data__files=files), fingerprint(data__files=[*files[:-1], files[0]])
    assert one.digest != other.digest and len(one.to_json()) < MAX_JSON_BYTES


def test_json_round_trip():
    one = fingerprint(trainer__seed=2**40)
    assert Fingerprint.from_json(one.to_json()) == one
    assert len(one.to_json()) < MAX_JSON_BYTES


@pytest.mark.parametrize("text", ["[]", '{"a": 1.5}', '{"a": true}', '{"a": null}', "{"])
def test_other_json_is_no_fingerprint(text):
    with pytest.raises(ValueError):
        Fingerprint.from_json(text)


def test_a_fingerprint_must_fit_the_ring_header():
    with pytest.raises(ValueError, match="at most 3000"):
        Fingerprint({"name": "x" * MAX_JSON_BYTES}).to_json()
