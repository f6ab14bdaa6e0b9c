"""The command line: exit codes, one-line errors, lazy start, status, rings and clean."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click
import pytest
from paceline.common import __version__, cli, devices, paths, telemetry
from paceline.common.cli import main
from paceline.common.cli_shared import Device, Number
from paceline.common.errors import ConfigError, PacelineError
from paceline.common.locks import FileLock
from paceline.common.telemetry import write_status


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", tmp_path / "no-system-runs")
    monkeypatch.setattr(paths, "DEFAULT_RING_DIR", tmp_path / "no-rings")
    monkeypatch.delenv("PACELINE_DEBUG", raising=False)
    return tmp_path / "rt"


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f'name = "t"\noutput = "out"\n[target]\npath = "org/m"\n[data]\nfiles = ["d.jsonl"]\n'
        f'[stream]\nring_dir = "{tmp_path / "rings"}"\n'
    )
    return path


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the one line on stderr of a command that must fail."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code and out == "" and err.startswith("paceline: ") and err.count("\n") == 1
    return code, err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["up", "--help"], ["prepare", "-h"], ["rings", "nope"], ["status"]]
)
def test_starts_without_heavy_imports(arguments: list[str]) -> None:
    heavy = ["torch", "transformers", "pyarrow", "pydantic", "numpy", "zmq"]
    script = (
        "import sys; from paceline.common.cli import main; main(sys.argv[1:]); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in (
        "regenerate",
        "prepare",
        "up",
        "producer",
        "consumer",
        "rings",
        "status",
        "metrics",
        "doctor",
        "audit",
        "clean",
    ):
        assert f"\n  {command}" in shown
    assert "..." not in shown.partition("Commands:")[2], "every command's help fits its line"


def test_a_shell_can_complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_PACELINE_COMPLETE", "bash_complete"), ("COMP_WORDS", "paceline inst"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out == "plain,install-units\n"


def test_usage_errors(capsys: pytest.CaptureFixture[str], run_path: Path) -> None:
    assert fail(capsys, "nope") == (2, "paceline: No such command 'nope'. (see paceline --help)\n")
    assert fail(capsys, "up")[0] == 2
    assert fail(capsys, "producer", str(run_path), "--worker", "-1")[0] == 2
    code, error = fail(capsys, "producer", str(run_path), "--device", "gpu7")
    assert code == 2 and "cpu, cuda or cuda:N" in error
    code, error = fail(capsys, "up", str(run_path), "--set", "trainer.epochs")
    assert code == 2 and "key=value" in error
    assert fail(capsys, "prepare", "a.jsonl")[0] == 2
    assert fail(capsys, "rings", "--json", "--watch", "t")[0] == 2


def options(group: click.Group = cli.cli) -> Iterator[tuple[str, click.Parameter]]:
    """Every option and argument of every command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", option) for below, option in options(command))
        else:
            yield from ((name, option) for option in command.params)


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Usage: paceline") and "\nCommands:\n  " in err


def test_an_empty_checkpoint_is_not_the_newest(capsys: pytest.CaptureFixture[str], run_path: Path) -> None:
    """As from a shell variable that is not set."""
    for command in ("up", "consumer"):
        assert main([command, str(run_path), "--resume", ""]) == 2
        assert "'--resume': it is empty" in capsys.readouterr().err


def test_every_number_is_finite(capsys: pytest.CaptureFixture[str]) -> None:
    floats = [
        (name, option) for name, option in options() if isinstance(option.type, (click.FloatRange, type(click.FLOAT)))
    ]
    assert len(floats) > 10 and [name for name, option in floats if not isinstance(option.type, Number)] == []
    for _name, option in floats:
        for value in ("nan", "inf", "-inf", "1e999"):
            with pytest.raises(click.BadParameter):
                option.type.convert(value, option, None)
    code, error = fail(capsys, "eval", "C", "--temperature", "nan")
    assert code == 2 and "'--temperature': nan is not a finite number" in error
    code, error = fail(capsys, "plan", "r.toml", "--gpu-memory", "inf")
    assert code == 2 and "'--gpu-memory': inf is not a finite number" in error


def test_every_device_is_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: option.type for name, option in options() if option.name == "device"}
    assert {"eval", "regenerate", "export", "bench step", "bench target", "bench stream", "producer"} <= set(found)
    assert all(isinstance(kind, Device) for kind in found.values())
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    for command in (["eval", "C"], ["bench", "step"], ["bench", "stream"], ["export", "C", "--check"]):
        code, error = fail(capsys, *command, "--device", "foo")
        assert code == 2 and "'--device': foo: cpu, cuda or cuda:N was expected" in error
        code, error = fail(capsys, *command, "--device", "cuda:0")
        assert code == 78 and "--device cuda:0: this machine has no GPU; give cpu" in error
    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    code, error = fail(capsys, "eval", "C", "--device", "cuda:2")
    assert code == 78 and "this machine has 2 GPUs, cuda:0 to cuda:1" in error


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [Device().convert(name, None, None) for name in ("cpu", "cuda", "cuda:00")] == ["cpu", "cuda", "cuda:0"]
    with pytest.raises(ConfigError, match=r"--device cuda:1: torch .* cannot use it"):
        Device().convert("cuda:1", None, None)


def test_files_are_tried_before_the_work(tmp_path: Path) -> None:
    paths.check_writable(tmp_path / "new" / "x.json", "--out: ")
    assert list((tmp_path / "new").iterdir()) == [], "trying leaves nothing behind"
    (tmp_path / "old").write_text("kept")
    paths.check_writable(tmp_path / "old", "--out: ")
    assert (tmp_path / "old").read_text() == "kept"
    for path in (
        Path("/proc/x.json"),
        Path("/proc/x/y.json"),
        tmp_path,
        tmp_path / "old" / "x",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(ConfigError, match=r"^--out: cannot (write|make folder) "):
            paths.check_writable(path, "--out: ")
    for path in (Path("/proc"), Path("/proc/x"), tmp_path / "old"):
        with pytest.raises(ConfigError, match=r"^OUT: cannot (write in|make folder) "):
            paths.make_folder(path, "OUT: ", writable=True)
    with pytest.raises(PacelineError, match=r"^cannot write /proc/x: "), paths.writing(Path("/proc/x")):
        Path("/proc/x").write_text("")


def test_configuration_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path, run_path: Path) -> None:
    for command in ("up", "producer", "consumer", "prepare"):
        code, error = fail(capsys, command, str(tmp_path / "nope.toml"))
        assert code == 78 and "no such run file" in error
        code, error = fail(capsys, command, str(run_path), "--set", "stream.slot=3")
        assert code == 78 and "did you mean stream.slots?" in error


def test_children_get_the_run_and_return_their_code(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def worker(run, index, device):
        calls.append(("worker", run.trainer.epochs, index, device))
        return 3

    def trainer(run, resume):
        calls.append(("trainer", run.name, resume))
        return 4

    stand_in(monkeypatch, "paceline.producer.worker", main=worker)
    stand_in(monkeypatch, "paceline.consumer.trainer", main=trainer)
    assert main(["producer", str(run_path), "--worker", "2", "--set", "trainer.epochs=9"]) == 3
    assert main(["producer", str(run_path), "--device", "cuda:5"]) == 3
    assert main(["consumer", str(run_path), "--resume", "ck"]) == 4
    assert calls == [("worker", 9, 2, None), ("worker", 6, 0, "cuda:5"), ("trainer", "t", "ck")]


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad\nlayer"), 78), (PacelineError("lost"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_of_commands(
    run_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def trainer(run, resume):
        raise error

    stand_in(monkeypatch, "paceline.consumer.trainer", main=trainer)
    assert main(["consumer", str(run_path)]) == code
    shown = capsys.readouterr().err.strip()
    assert shown == ("" if code == 130 else f"paceline: {' '.join(str(error).split())}")
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    assert main(["consumer", str(run_path)]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code != 130)


def test_faults_of_paceline_keep_their_traceback(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "paceline.consumer.trainer", main=lambda run, resume: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["consumer", str(run_path)])


def test_a_closed_pipe_is_silent() -> None:
    command = f"{sys.executable} -m paceline.common.cli --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stderr == ""


@pytest.mark.parametrize(
    ("redirected", "words"),
    [
        (">/dev/full", "paceline: cannot write standard output: No space left on device\n"),
        (">&-", ""),
        ("<&- >&- 2>&-", ""),
    ],
)
@pytest.mark.parametrize("command", ["--help", "status"])
def test_an_output_that_cannot_be_written(command: str, redirected: str, words: str) -> None:
    script = f"{sys.executable} -m paceline.common.cli {command} {redirected}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1 if words else 0, words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(30, "Read-only file system", "/some/where"), "/some/where: Read-only file system"),
        (OSError(24, "Too many open files"), "Too many open files: raise `ulimit -n` (PACELINE_DEBUG=1 shows where)"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    run_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
    words: str,
) -> None:
    def trainer(run, resume):
        raise error

    stand_in(monkeypatch, "paceline.consumer.trainer", main=trainer)
    assert fail(capsys, "consumer", str(run_path)) == (1, f"paceline: {words}\n")


@pytest.mark.parametrize("command", [["rings"], ["status"], ["clean"], ["stop"], ["scale"]])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "t"\nstream.ring_dir = 3', "not a run file (name and stream.ring_dir are texts)"),
        ("name = 3", "not a run file (name and stream.ring_dir are texts)"),
        ('[stream]\nring_dir = "x"', "not a run file (it has no name)"),
        ('name = "t"\nstream = 3', "not a run file"),
        (None, "a run's name or its file (.toml) was expected"),
        ("", "RUN is empty: give a run's name or its file"),
    ],
)
def test_what_is_no_run(
    command: list[str], text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.toml"
    if text:
        path.write_text(text)
    run = str(path) if text else str(tmp_path) if text is None else ""
    code, error = fail(capsys, *command, run, *(["1"] if command == ["scale"] else []))
    assert code in (2, 78) and words in error


@pytest.mark.parametrize("clean", [True, False])
def test_audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clean: bool) -> None:
    report = SimpleNamespace(clean=clean, text=lambda: "12 trained", json=lambda: '{"trained": 12}')
    stand_in(monkeypatch, "paceline.consumer.audit", audit=lambda path: report)
    assert main(["audit", "ck"]) == (0 if clean else 1)
    assert main(["audit", "ck", "--json"]) == (0 if clean else 1)
    assert capsys.readouterr().out == '12 trained\n{"trained": 12}\n'


def test_init(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my.toml", "--target", "Qwen/Qwen3-8B", "--gpus", "4"]) == 0
    said = "next: paceline doctor my.toml, which looks whether all is there; then paceline up my.toml"
    assert capsys.readouterr().out == f"wrote my.toml\n{said}\n"
    assert "3-1 (3 target workers, 1 trainer rank), 4 GPUs" in Path("my.toml").read_text()
    code, error = fail(capsys, "init", "my.toml", "--target", "t")
    assert code == 78 and "--force replaces it" in error
    assert main(["init", "my.toml", "--target", "t", "--gpus", "0", "--force"]) == 0
    assert "set drafter.mask_token_id" in capsys.readouterr().out
    code, error = fail(capsys, "init", "bad.toml", "--target", "t", "--name", "No Good")
    assert code == 2 and not Path("bad.toml").exists()


def test_init_elsewhere_keeps_paths_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.common.runfile import load

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "chat.jsonl").touch()
    assert main(["init", "runs/a.toml", "--target", "model", "--data", "chat.jsonl", "--gpus", "1"]) == 0
    run = load("runs/a.toml")
    assert Path(run.target.path).samefile("model") and Path(run.data.files[0].path).samefile("chat.jsonl")


# Status


def test_status(runtime: Path, run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paths.run_dir("t")
    checkpoint = tmp_path / "step-00000004"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").touch()
    then = time.time() - 200
    os.utime(checkpoint / "manifest.json", (then, then))
    values = {"state": "training", "step": 5, "total_steps": 10, "loss": 1.5, "updated": time.time(), "wait_data": 0.5}
    values |= {"workers": 2, "ranks": 1, "slots": 3, "tokens_per_s": 1500.0, "epoch": 0.5, "epochs": 6, "eta_s": 60.0}
    values |= {"checkpoint": str(checkpoint), "listed": 1, "refused": 2, "target_bps": 0.5, "tau": 2.5}
    write_status(folder / "status.json", values)
    ring = open_ring(tmp_path)
    with FileLock(folder / "consumer.lock", "trainer of run t") as lock:
        assert lock.acquire()
        assert main(["status", str(run_path)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "t  training",
            "  progress    step 5 of 10 (50%), epoch 0.50 of 6, ETA 1m",
            "  bottleneck  " + telemetry.bottleneck(values),
            "  targets     1 worker up, 0.50 batches/s",
            "  drafters    1 rank, 1.5 Ktok/s, 50% waiting for data",
            "  learning    loss 1.500  tau 2.50",
            "  rings       0 of 2 slots hold a record (w0 0/2)",
            f"  checkpoint  {checkpoint}, 3m ago",
            "  records     1 batch listed (`paceline audit` names them), 2 refused by ranks since the trainer's start",
        ]
        write_status(folder / "status.json", values | {"updated": time.time() - 60})
        assert main(["status", "t"]) == 0
        assert "t  training, but silent for 1m" in capsys.readouterr().out
    assert main(["status", "t"]) == 0
    shown = capsys.readouterr().out
    assert "t  no trainer is up (last training, 1m ago)" in shown and "ETA" not in shown and "bottleneck" not in shown
    ring.close()


def test_status_of_workers_that_wait_for_their_first_trainer(
    runtime: Path, run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = open_ring(tmp_path)
    assert main(["status", str(run_path)]) == 0
    assert capsys.readouterr().out.startswith("t  no trainer has been up; 1 worker up\n")
    assert not runtime.exists(), "looking creates nothing"
    ring.close()


def test_status_json(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(paths.run_dir("t") / "status.json", {"run": "t", "step": 5, "updated": time.time() - 60})
    assert main(["status", "t", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["step"], found["alive"], found["up"]) == ("t", 5, False, False)
    assert 59 < found["age_s"] < 120 and found["workers_alive"] == 0 and found["rings"] == []
    assert main(["status", "--json"]) == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)] == ["t"]


def test_status_of_nothing(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no run has a status on this machine\n"
    code, error = fail(capsys, "status", "nope")
    assert code == 1 and "run nope has no status" in error
    assert not runtime.exists(), "looking creates nothing"


# Rings


@pytest.fixture
def ring_file(run_path: Path, tmp_path: Path) -> Path:
    """A stale ring: made, then left by its owner."""
    open_ring(tmp_path).close()
    return tmp_path / "rings/t/w0.ring"


def open_ring(tmp_path: Path):
    from paceline.common.fingerprint import Fingerprint
    from paceline.common.ring import Ring

    path = tmp_path / "rings/t/w0.ring"
    return Ring.open(path, worker="w0", fingerprint=Fingerprint({"seed": 0}), slots=2, slot_bytes=8192)


def test_rings(ring_file: Path, run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rings", str(run_path)]) == 0
    assert "w0" in capsys.readouterr().out
    assert main(["rings", str(run_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == "t"
    assert [(ring["worker"], ring["alive"], ring["free"]) for ring in found["rings"]] == [("w0", False, 2)]


def test_rings_beside_the_run_file(ring_file: Path, run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_path.write_text(run_path.read_text().replace(str(run_path.parent / "rings"), "rings"))
    monkeypatch.chdir("/")
    assert main(["rings", str(run_path)]) == 0
    assert main(["clean", str(run_path)]) == 0
    assert not ring_file.exists()


def test_rings_without_any(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = fail(capsys, "rings", str(run_path))
    assert code == 1 and "no rings in" in error
    assert main(["rings", str(run_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "t", "rings": []}


def test_rings_of_every_run_are_a_list(
    ring_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "DEFAULT_RING_DIR", tmp_path / "rings")
    (tmp_path / "rings/empty").mkdir()
    assert main(["rings", "t", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert main(["rings", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [one]
    shutil.copytree(tmp_path / "rings/t", tmp_path / "rings/u")
    assert main(["rings", "--json"]) == 0
    assert [found["run"] for found in json.loads(capsys.readouterr().out)] == ["t", "u"]
    monkeypatch.setattr(paths, "DEFAULT_RING_DIR", tmp_path / "none")
    assert main(["rings", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_options_of_rings_that_watch_alone_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, value in (("--interval", "3"), ("--svg", "x.svg")):
        code, error = fail(capsys, "rings", option, value)
        assert code == 2 and f"{option} goes with --watch" in error
    stand_in(monkeypatch, "paceline.common.rings_screen", QuietConsole=None, watch=lambda *_: pytest.fail("it watched"))
    assert fail(capsys, "rings", "--watch", "--interval", "nan")[0] == 2
    code, error = fail(capsys, "rings", "--watch", "--svg", "/proc/x.svg")
    assert code == 78 and "--svg: cannot write /proc/x.svg" in error


def test_clean(ring_file: Path, run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(run_path), "--dry-run"]) == 0
    assert "would free" in capsys.readouterr().out and ring_file.exists()
    half_made = ring_file.with_name("w1.ring.tmp")
    half_made.write_bytes(b"\0" * 4096)
    assert main(["clean", str(run_path)]) == 0
    assert "freed" in capsys.readouterr().out
    assert not ring_file.parent.exists()
    code, error = fail(capsys, "clean", str(run_path))
    assert code == 1 and "run t has no rings" in error


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_clean_keeps_a_living_owners_ring(
    ring_file: Path, run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    ring = open_ring(tmp_path)
    assert main(["clean", str(run_path), *arguments]) == 0
    shown = capsys.readouterr().out
    assert f"kept {ring_file}" in shown and "no stale rings" in shown and ring_file.exists()
    ring.close()


def test_clean_keeps_the_rings_of_a_trainer(
    ring_file: Path, run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileLock(paths.run_dir("t") / "consumer.lock", "trainer of run t") as lock:
        assert lock.acquire()
        assert main(["clean", str(run_path)]) == 0
    assert "its trainer is up: trainer of run t" in capsys.readouterr().out and ring_file.exists()


def test_commands_are_documented() -> None:
    assert all(command.help for command in cli.cli.commands.values())


@pytest.mark.parametrize("where", [">/dev/full 2>&1", "> >(true) 2>&1; sleep 0.1"])
@pytest.mark.parametrize("side", ["producer.worker", "consumer.trainer"])
def test_a_side_whose_log_cannot_be_written_goes_on(run_path: Path, tmp_path: Path, where: str, side: str) -> None:
    """Its log lies on the disk of the checkpoints, which may be full."""
    saved = tmp_path / "saved"
    script = tmp_path / "side.py"
    script.write_text(
        f"""
import logging, pathlib, sys, types
from paceline.common.cli import main
def side(*_, **__):
    for number in range(3000):
        print("step", number, flush=True)
        print("to stderr", number, file=sys.stderr)
        logging.info("logged %d", number)
    pathlib.Path({str(saved)!r}).touch()
    return 0
sys.modules["paceline.{side}"] = types.SimpleNamespace(main=side)
sys.exit(main([{side.split(".")[0]!r}, {str(run_path)!r}]))
"""
    )
    subprocess.run(["bash", "-c", f"{sys.executable} {script} {where}"], check="sleep" not in where)
    assert saved.exists()


@pytest.mark.parametrize("command", ["producer", "consumer"])
def test_idle_threads_of_both_sides_sleep(command: str, run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for side in ("producer.worker", "consumer.trainer"):
        monkeypatch.setattr(f"paceline.{side}.main", lambda *_, **__: seen.append(os.environ["OMP_WAIT_POLICY"]) or 0)
    assert main([command, str(run_path)]) == 0
    assert seen == ["PASSIVE"]
