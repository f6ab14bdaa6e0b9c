"""Compiled layers give the states of plain ones, share a graph, serve every size with it, and stand back otherwise."""

import os
import stat

import numpy as np
import pytest
import torch
from paceline.common import paths
from paceline.common.locks import FileLock
from paceline.common.runfile import RunFile
from paceline.common.target import Target
from paceline.common.target_info import target_info
from paceline.producer import capture
from paceline.producer import compiled as module
from paceline.producer.capture import TargetSource
from paceline.producer.compiled import PAD, CompiledLayers
from torch._dynamo.utils import counters

LAYER_IDS = [0, 2, 3]
LENGTHS = [9, 40, 23, 38, 21]


pytestmark = pytest.mark.usefixtures("compiler")


class Backend:
    """Runs the graphs as they are, and keeps them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


def batch(lengths=LENGTHS, vocab=512):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (sum(lengths),), generator=generator), [0, *np.cumsum(lengths).tolist()]


def states_of(target, tokens, cu_seqlens):
    states = torch.full((len(LAYER_IDS) + 1, len(tokens), target.info.hidden_size), torch.nan)

    def sink(plane, part, first):
        states[plane, first : first + len(part)] = part

    target.forward_states(tokens, cu_seqlens, LAYER_IDS, sink, last_hidden=True)
    return states


def load(folder, **options):
    return Target.load(str(folder), dtype="float32", **options)


@pytest.mark.parametrize(
    ("kind", "graphs"), [("llama", 1), ("qwen3", 1), ("gemma3", 2), ("qwen3_moe", 1), ("gpt_oss", 2)]
)  # gemma3 and gpt_oss have layers that slide
def test_layers_share_a_graph_that_gives_the_plain_states(make_tiny_target, kind, graphs):
    target, backend = load(make_tiny_target(kind)), Backend()
    target.self_check()
    batches = [batch(), batch([7] * 30), batch([PAD]), batch([300, 2 * PAD + 1])]
    plain = [states_of(target, *each) for each in batches]
    layers = CompiledLayers(0, 64, backend)
    target.self_check(faster=layers)
    assert layers.installed and len(backend.graphs) == graphs
    for each, wanted in zip(batches, plain, strict=True):
        torch.testing.assert_close(states_of(target, *each), wanted, rtol=1e-4, atol=1e-4)
    assert len(backend.graphs) == graphs, "one graph serves every number of tokens"
    called = {str(node.target) for graph in backend.graphs for node in graph.graph.nodes}
    assert any("packed_attention" in name for name in called) and not any("scaled_dot" in name for name in called)
    layers.remove(target)
    assert torch.equal(states_of(target, *batches[0]), plain[0])


@pytest.mark.slow
def test_the_real_compiler_gives_the_plain_states_and_fills_the_shared_cache(make_tiny_target, tmp_path, monkeypatch):
    for variable in paths.COMPILE_CACHES:
        monkeypatch.delenv(variable)
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    counters.clear()
    target, layers = load(make_tiny_target("qwen3")), CompiledLayers(0, 64)
    target.self_check()
    tokens, cu_seqlens = batch()
    plain = states_of(target, tokens, cu_seqlens)
    target.self_check(faster=layers)
    assert layers.installed
    torch.testing.assert_close(states_of(target, tokens, cu_seqlens), plain, rtol=1e-4, atol=1e-4)
    assert counters["inductor"]["fxgraph_cache_miss"] == counters["aot_autograd"]["autograd_cache_saved"] == 1
    assert list((tmp_path / "cache" / "compile" / "inductor").iterdir())
    for variable in paths.COMPILE_CACHES:
        monkeypatch.setenv(variable, "")  # put there by the code under test: monkeypatch is to know of it


def test_hooks_run_as_each_compiled_layer_finishes(tiny_target_dir):
    target, layers = load(tiny_target_dir), CompiledLayers(0, 64, Backend())
    target.self_check(faster=layers)
    assert layers.installed
    events = []
    for index, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(f"layer {index}"))
    tokens, cu_seqlens = batch()
    target.forward_states(tokens, cu_seqlens, [0, 2], lambda plane, *_: events.append(f"plane {plane}"))
    assert events == ["layer 0", "plane 0", "layer 1", "layer 2", "plane 1"]


def broken(graph, inputs):
    raise RuntimeError("\nno compiler here\nat all")


def wrong(graph, inputs):
    return lambda *args: [2 * output for output in graph.forward(*args)]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(broken, "it does not compile: no compiler here"), (wrong, "adds differs from a row's alone by")],
)
def test_what_fails_or_is_wrong_is_said_in_one_line_and_runs_plain(tiny_target_dir, caplog, backend, reason):
    target = load(tiny_target_dir)
    target.self_check()
    plain = states_of(target, *batch())
    layers = CompiledLayers(0, 64, backend)
    target.self_check(faster=layers)
    assert not layers.installed and target.mode == "packed"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and warnings[0].startswith("the target runs uncompiled: ")
    assert reason in warnings[0] and "\n" not in warnings[0]
    assert torch.equal(states_of(target, *batch()), plain)


def test_graphs_for_each_size_or_for_each_layer_are_of_no_use(tiny_target_dir, caplog, monkeypatch):
    target, layers = load(tiny_target_dir), CompiledLayers(0, 64, Backend())
    with monkeypatch.context() as patch, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        patch.setattr(module, "_mark", lambda *_: None)
        target.self_check(faster=layers)
    assert not layers.installed and "compile anew for each number of tokens" in caplog.text
    torch._dynamo.reset()
    monkeypatch.setattr(module, "MAX_GRAPHS", 1)
    target.self_check(faster=layers)
    assert not layers.installed and "4 layers compile into 1 graphs" in caplog.text


def test_rows_that_do_not_run_packed_are_not_compiled(make_tiny_target):
    target, backend = load(make_tiny_target("gemma2")), Backend()
    layers = CompiledLayers(0, 64, backend)
    target.self_check(faster=layers)
    assert target.mode == "padded" and not layers.installed and not backend.graphs


# In a worker


def run_file(target, **settings):
    return RunFile.model_validate(
        {
            "name": "toy",
            "output": "out",
            "target": {"path": str(target), "dtype": "float32", **settings},
            "data": {"rows": "rows", "max_length": 32},
            "stream": {"token_budget": 128},
        }
    )


def record(source, lengths=LENGTHS):
    tokens, cu_seqlens = batch(lengths)
    out = memoryview(bytearray(len(LAYER_IDS) * len(tokens) * 64 * 4))
    assert source.begin(tokens.numpy().astype(np.int32), np.asarray(cu_seqlens), out, lambda: None).finish()
    return torch.frombuffer(out, dtype=torch.float32)


@pytest.fixture
def plain_backend(monkeypatch):
    monkeypatch.setattr(
        capture, "CompiledLayers", lambda tokens, max_length: CompiledLayers(tokens, max_length, Backend())
    )


def test_the_run_file_decides_and_a_late_compilation_is_named(tiny_target_dir, plain_backend, caplog):
    info = target_info(str(tiny_target_dir))
    plain = TargetSource.load(run_file(tiny_target_dir), info, LAYER_IDS, "cpu")
    assert not plain.compiled, "auto is for GPUs"
    source = TargetSource.load(run_file(tiny_target_dir, compile=True), info, LAYER_IDS, "cpu")
    assert source.compiled
    torch.testing.assert_close(record(source), record(plain), rtol=1e-4, atol=1e-4)
    record(source, [17, 200])
    assert "compiled anew" not in caplog.text
    torch._dynamo.reset()
    record(source)
    record(source)
    late = [record.getMessage() for record in caplog.records if "compiled anew" in record.getMessage()]
    assert len(late) == 1 and "for a batch of 131 tokens" in late[0]


def test_workers_that_start_together_compile_in_turn(tiny_target_dir, monkeypatch, caplog):
    """The second waits while the first holds the lock, and asks systemd for time."""
    caplog.set_level("INFO")
    waits = []
    lock = FileLock(paths.compile_lock(), "another worker")
    assert lock.acquire()

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            lock.release()

    monkeypatch.setattr(module.time, "sleep", sleep)
    target, layers = load(tiny_target_dir), CompiledLayers(0, 64, Backend())
    target.self_check(faster=layers)
    assert layers.installed and len(waits) == 3
    assert sum("waiting for another worker" in record.getMessage() for record in caplog.records) == 1
    assert lock.acquire(), "it is released once all is compiled"
    lock.release()


def test_compile_caches_are_private_and_the_users_own_choice_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    folder = tmp_path / "cache" / "compile"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    paths.prepare_torch()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_compiled_states_on_a_gpu(make_tiny_target, kind, caplog):
    folder = make_tiny_target(kind)
    info = target_info(str(folder))
    states = {}
    for compile_ in (False, True):
        source = TargetSource.load(run_file(folder, dtype="bfloat16", compile=compile_), info, LAYER_IDS, "cuda:0")
        assert source.mode == "packed" and source.compiled == compile_, caplog.text
        target = source._target
        states[compile_] = [
            states_of(target, *batch(lengths)) for lengths in (LENGTHS, [9, 400, 23, 38, 700, 8], [PAD])
        ]
        assert "compiled anew" not in caplog.text
    for plain, compiled in zip(states[False], states[True], strict=True):
        assert float((compiled - plain).norm() / plain.norm()) < 0.02
