"""`paceline bench pipeline`: what it predicts, where it puts processes, and a whole small run of it."""

import json

import pytest
from paceline.common.bench import Options, bench_pipeline, parse_topology, place, predict
from paceline.common.errors import UsageError


def test_topologies():
    assert parse_topology("6-2") == (6, 2)
    for text in ("6", "0-1", "1-0", "a-b", "-1", "1-2-3"):
        with pytest.raises(UsageError, match="--topology"):
            parse_topology(text)


def test_each_process_has_a_gpu_of_its_own_where_there_are_enough():
    assert place(2, 1, 4) == (["cuda:0", "cuda:1"], ["cuda:2"], False)
    assert place(1, 1, 1) == (["cuda:0"], ["cuda:0"], True)
    assert place(3, 2, 0) == (["cpu"], ["cpu"], True)
    with pytest.raises(UsageError, match="needs 3 GPUs, this machine has 2"):
        place(2, 1, 2)


def test_prediction():
    """Of two sides apart the slower counts; two that share a device share its time."""
    assert predict(10, 30, 2, 1, shared=False) == 20
    assert predict(20, 30, 2, 1, shared=False) == 30
    assert predict(10, 30, 1, 1, shared=True) == pytest.approx(7.5)


def test_an_unknown_shape_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no such config \(qwen3-0.6b, qwen3-8b"):
        bench_pipeline(tmp_path / "out", "qwen9", ["1-1"], Options())


@pytest.mark.slow
def test_a_small_pipeline_on_a_cpu(tmp_path, make_tiny_target, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr("paceline.common.bench.gpu_count", lambda: 0)
    options = Options(seconds=3, warm_up=1, token_budget=512, max_length=256, layers=1, block_size=4, slots=2)
    (result,) = bench_pipeline(tmp_path / "out", str(make_tiny_target("qwen3")), ["1-1"], options)
    assert result.target_alone > 0 and result.trainer_alone > 0 and result.pipeline > 0
    assert result.predicted == pytest.approx(predict(result.target_alone, result.trainer_alone, 1, 1, shared=True))
    assert 0 <= result.data_wait <= 1 and 0 <= result.rings_full <= 1
    (written,) = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert written["pipeline"] == result.pipeline and len(written["timeline"]) > 1
