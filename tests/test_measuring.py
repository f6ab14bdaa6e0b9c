"""Processes that measure: their figures, their warnings, what they are doing, and their errors in one line."""

import io
import logging
import os

import pytest
from paceline.common import measuring, paths
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.measuring import Said, doing, error_line, measured, run_side


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(lines of sh) stands in for the process that is started."""

    def write(text):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(path))

    return write


TALKS = """\
echo '@doing loading' >&2
echo '@warning the target runs uncompiled: why' >&2
echo 'something else' >&2
echo '@warning the target runs uncompiled: why' >&2
echo '@doing full' >&2
"""


def test_figures_and_warnings_arrive(script):
    script(TALKS + "echo noise\necho '{\"x\": 1}'\n")
    said = Said()
    assert run_side("consumer.bench_step", "a", said=said) == {"x": 1}
    assert said.warnings == ["the target runs uncompiled: why"] and said.doing == "full"


def test_a_failure_says_what_was_being_done(script, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script(TALKS + "echo 'RuntimeError: no more' >&2\necho '@warning late' >&2\nexit 3\n")
    with pytest.raises(PacelineError, match=r"^consumer\.bench failed \(full\): RuntimeError: no more \(all it said: "):
        run_side("consumer.bench")
    text = (tmp_path / "paceline-consumer.bench.log").read_text()
    assert "something else" in text and "@warning late" in text


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("kill -9 $$", "was killed by SIGKILL"),
        (
            "echo 'slow kernels' >&2; kill -11 $$",
            "was killed by SIGSEGV; its last line: slow kernels",
        ),
        ("exit 3", "ended with exit code 3"),
        ("exit 0", "ended with exit code 0"),  # without figures
    ],
)
def test_a_process_that_dies_without_a_word_has_its_end_named(script, monkeypatch, tmp_path, ending, words):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script(f"echo '@doing full' >&2\n{ending}\n")
    with pytest.raises(PacelineError, match=rf"failed \(full\): {words} \(all it said"):
        run_side("consumer.bench")


def test_what_a_process_logs_becomes_one_line(capsys):
    loggers = [logging.getLogger(name) for name in measuring.WATCHED]
    before = [list(logger.handlers) for logger in loggers]

    def measure():
        doing("full")
        logging.getLogger("paceline.common.target").warning("the target runs %s:\nnot compiled", "plain")
        logging.getLogger("paceline.common.target").info("rows run packed")
        logging.getLogger("torch._dynamo.convert_frame").warning("limit hit\nfunction: f")
        logging.getLogger("transformers").warning("token out of range")
        return {"x": 1.5}

    try:
        measured(measure)
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
    out, err = capsys.readouterr()
    assert out == '{"x": 1.5}\n'
    marked = [line for line in err.splitlines() if line.startswith("@")]
    assert marked == ["@doing full", "@warning the target runs plain:", "@warning limit hit"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_what_is_being_done_is_shown_on_a_terminal_alone(script, monkeypatch, stderr):
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    script(TALKS.replace("full", "full, eager: " + 30 * "x") + "echo '{}'\n")
    said = Said()
    with said.on_terminal():
        run_side("consumer.bench", said=said)
    said.line("@doing nothing any more")
    lines = ["starting consumer.bench", "loading", "full, eager: " + 16 * "x", ""]
    assert stderr.getvalue() == ("".join(f"\r\x1b[K{line}" for line in lines) if stderr.isatty() else "")


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [("ConfigError", ConfigError, 78), ("PacelineError", PacelineError, 1)],
)
def test_an_error_of_a_measuring_process_is_one_line(name, kind, code, script):
    """Its kind, and so the exit code, stays what it was."""
    script(f"echo Traceback >&2\necho 'paceline.common.errors.{name}: too few: 4' >&2\nexit 1\n")
    with pytest.raises(kind, match=r"^too few: 4$") as error:
        run_side("consumer.bench_step")
    assert error.value.exit_code == code


def test_the_line_of_a_traceback_that_names_the_error():
    """CUDA's and dynamo's errors go on after it, and the last line is advice for torch's developers."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "x.py", line 3, in <module>\n'
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    )
    assert error_line(text) == "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert error_line("killed\n") == "killed" and error_line("") == ""


def test_what_is_measured_has_the_environment_of_a_run(tmp_path, monkeypatch, script):
    """Else each side of a pipeline would be compiled a second time, minutes into the measurement."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for variable in paths.COMPILE_CACHES:
        monkeypatch.setenv(variable, "")  # as good as none, and taken back afterwards
    for variable in paths.ALLOCATOR:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    script('echo "[\\"$TORCHINDUCTOR_CACHE_DIR\\", \\"$PYTORCH_ALLOC_CONF\\"]"\n')
    found = run_side("consumer.bench")
    assert not os.environ["TORCHINDUCTOR_CACHE_DIR"]  # only for the child
    paths.prepare_torch()
    assert found == [os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["PYTORCH_ALLOC_CONF"]]
