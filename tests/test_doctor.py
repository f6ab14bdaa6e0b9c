"""`paceline doctor`: each check says OK, WARN or FAIL, and what to do; nothing stops it."""

import gzip
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from paceline.common import devices, doctor, doctor_run, paths
from paceline.common.cli import main
from paceline.common.doctor import Check
from paceline.common.fingerprint import Fingerprint
from paceline.common.footprint import ring_bytes
from paceline.common.locks import FileLock
from paceline.common.record import max_rows, slot_bytes
from paceline.common.ring import Ring
from paceline.common.runfile import load

NO_GPU = {"version": "2.13.0", "cuda": None, "available": False, "gpus": []}
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without runs and GPUs, whose torch answers at once."""
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", tmp_path / "no-system-runs")
    monkeypatch.setattr(paths, "DEFAULT_RING_DIR", tmp_path / "rings")
    monkeypatch.setattr(doctor, "torch_facts", lambda: NO_GPU)
    monkeypatch.setattr(doctor, "_nvidia_smi", list)
    monkeypatch.setattr(devices, "installed_gpus", lambda: 0)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({"model_type": "gpt_oss", "text_config": {"hidden_size": 64, "vocab_size": 512}})
    )
    (target / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "chat.jsonl").write_text("{}\n")
    path = tmp_path / "run.toml"
    path.write_text(
        f'name = "t"\noutput = "out"\n[target]\npath = "{target}"\n[data]\nfiles = ["chat.jsonl"]\nmax_length = 256\n'
        f'[stream]\ntoken_budget = 1024\nring_dir = "{tmp_path}/shm"\n[workers]\ncount = 2\n'
        "[drafter]\nmask_token_id = 3\nlayers = 2\n"
    )
    return path


def named(found: list[Check], name: str) -> list[Check]:
    return [check for check in found if check.name == name]


def levels(found: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in found}


def of_run(run_path: Path, *overrides: str, torch=NO_GPU) -> list[Check]:
    return list(doctor_run.run_checks(run_path, overrides, torch))


def test_the_command(run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(run_path)]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "packages", "torch", "gpu", "/dev/shm", "memlock", "open files", "clock", "target", "rings"):
        assert re.search(rf"^(OK|WARN) +{name} ", shown, re.MULTILINE), shown
    assert "\x1b" not in shown and re.search(r"^\d+ OK", shown.splitlines()[-1])
    assert main(["doctor", str(run_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(check.keys() == {"name", "level", "text", "todo"} for check in found)
    assert not (tmp_path / "rt").exists() and not (tmp_path / "out").exists() and not (tmp_path / "shm").exists()


def test_it_fails_if_a_check_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("name = \n")
    assert main(["doctor", str(broken)]) == 1
    shown = capsys.readouterr().out
    assert f"FAIL  run file         {broken}:1: not TOML" in shown and "OK    python" in shown, "the others went on"
    assert main(["doctor", str(tmp_path / "absent.toml"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in found if check["level"] == "FAIL"] == ["run file"]
    assert main(["doctor", "--set", "a=b"]) == 2


def test_what_fails_or_warns_says_what_to_do(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_path.parent / "chat.jsonl").unlink()
    found = doctor.checks(run_path, ["target.path=/nowhere", f"output={run_path}/x"])
    bad = [check for check in found if check.level != "OK"]
    assert {"target", "data", "output"} <= {check.name for check in bad}
    assert all(check.todo for check in bad)


def test_tested_versions_are_those_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name, tested in doctor.TESTED.items():
        assert pinned[name].split("+")[0].split(".")[:2] == tested.split("."), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={doctor.TESTED_PYTHON[0][0]}.{doctor.TESTED_PYTHON[0][1]}"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":
            raise doctor.importlib.metadata.PackageNotFoundError
        return {"numpy": "1.20.0", "transformers": "9.1.0", "rich": "15.0.7"}[name]

    wanted = ["torch>=2.11", "numpy>=1.26", "transformers>=5.10", "rich>=13", 'wandb>=0.17; extra == "wandb"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: wanted)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = list(doctor.packages())
    assert levels(found) == {"torch": "FAIL", "numpy": "FAIL", "transformers": "WARN", "packages": "OK"}
    assert named(found, "torch")[0].todo == "pip install 'torch>=2.11'"
    assert "tested up to 5.24" in named(found, "transformers")[0].text


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for version in ((3, 10), (3, 12), (3, 99)):
        monkeypatch.setattr(doctor.sys, "version_info", (*version, 0))
        seen[version] = next(iter(doctor.python())).level
    assert list(seen.values()) == ["FAIL", "OK", "WARN"]


# torch and GPUs


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('No module named torch')", "ImportError: No module named torch"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended the process"),
        ("import sys; print('libcudart is missing', file=sys.stderr); sys.exit(3)", "libcudart is missing"),
    ],
)
def test_a_torch_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: str
) -> None:
    monkeypatch.undo()
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = doctor.torch_facts()
    assert error in facts["error"] if "SystemExit" not in facts["error"] else code.endswith("sys.exit(3)")
    (check,) = named(list(doctor.torch_and_gpus(facts)), "torch")
    assert check.level == "FAIL" and check.todo


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "installed_gpus", lambda: 2)
    (check,) = named(list(doctor.torch_and_gpus(NO_GPU)), "cuda")
    assert check.level == "FAIL" and check.todo == "install a CUDA build of torch"
    old = NO_GPU | {"cuda": "13.0", "why": "The NVIDIA driver on your system is too old"}
    (check,) = named(list(doctor.torch_and_gpus(old)), "cuda")
    assert check.level == "FAIL" and "too old" in check.text and "driver" in check.todo
    assert not named(list(doctor.torch_and_gpus({"error": "no torch"})), "cuda")


def test_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["0", "NVIDIA H200", "570.1", "143771", "143000"], ["1", "NVIDIA H200", "570.1", "143771", "20000"]]
    rows.append(["2", "GB10", "580", "[N/A]", "[N/A]"])
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: rows)
    facts = NO_GPU | {"cuda": "13.0", "available": True, "gpus": [{}, {}, {}]}
    found = list(doctor.torch_and_gpus(facts))
    assert levels(found) == {"torch": "OK", "cuda": "OK", "gpu 0": "OK", "gpu 1": "WARN", "gpu 2": "OK"}
    assert named(found, "gpu 0")[0].text == "NVIDIA H200, driver 570.1, 140 GiB of 140 GiB free"


# The machine


def test_shared_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(megabytes: int, free: int) -> Check:
        system = SimpleNamespace(f_blocks=megabytes, f_frsize=1 << 20, f_bavail=free)
        monkeypatch.setattr(doctor.os, "statvfs", lambda _: system)
        monkeypatch.setattr(doctor, "free_bytes", lambda _: free << 20)
        return next(iter(doctor.shared_memory()))

    small = sized(64, 64)
    assert small.level == "FAIL" and "--shm-size" in small.todo and "64 MiB" in small.text
    assert sized(1000, 50).level == "WARN" and sized(1000, 900).level == "OK"
    monkeypatch.undo()
    assert next(iter(doctor.shared_memory(tmp_path / "absent"))).level == "FAIL"


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(files: int, lock: int) -> dict[str, str]:
        values = {resource.RLIMIT_NOFILE: (files, 4096), resource.RLIMIT_MEMLOCK: (lock, lock)}
        monkeypatch.setattr(doctor.resource, "getrlimit", values.__getitem__)
        return levels(list(doctor.limits()))

    assert found(64, 8 << 20) == {"memlock": "OK", "open files": "FAIL"}
    assert found(256, resource.RLIM_INFINITY) == {"memlock": "OK", "open files": "WARN"}
    assert found(1024, 0) == {"memlock": "OK", "open files": "OK"}


def test_a_clock_that_was_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(iter(doctor.clock())).level == "OK"
    monkeypatch.setattr(doctor.time, "time", lambda: 1000.0)
    assert next(iter(doctor.clock())).level == "WARN"


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(levels(list(doctor.folders())).values()) <= {"OK", "WARN"}
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(shared))
    assert levels(list(doctor.folders()))["run directories"] == "FAIL"
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", "/" + "x" * 60)
    assert levels(list(doctor.folders()))["socket paths"] == "WARN"
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", "/" + "x" * 100)
    assert levels(list(doctor.folders()))["socket paths"] == "FAIL"


def test_what_dead_runs_left(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    assert levels(list(doctor.leftovers(folder))) == {"rings": "OK"}
    path = folder / "old/w0.ring"
    ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"seed": 0}), slots=2, slot_bytes=4096)
    assert levels(list(doctor.leftovers(folder))) == {"rings": "OK"}, "its owner lives"
    ring.close()
    (check,) = doctor.leftovers(folder)
    assert check.level == "WARN" and "run old" in check.text and "paceline clean old" in check.todo
    run = paths.run_dir("old")
    with FileLock(run / "consumer.lock", "trainer of run old") as lock:
        assert lock.acquire()
        assert levels(list(doctor.leftovers(folder))) == {"rings": "OK"}, "its trainer is up"
    with FileLock(run / "rank-0.lock", "rank 0 of run old") as lock:
        assert lock.acquire()
        (check,) = named(list(doctor.leftovers(folder)), "locks")
        assert check.level == "WARN" and f"rank 0 of run old (pid {os.getpid()})" in check.text
    path.write_bytes(bytes(100))
    assert any("half-made ring" in check.text for check in doctor.leftovers(folder))


@pytest.mark.parametrize(
    ("texts", "removes"),
    [
        ([], True),
        (["[Login]\n#RemoveIPC=no\n"], True),
        (["[Login]\nRemoveIPC=no\n"], False),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n"], True),
        (["[Login]\nRemoveIPC = yes\n", "[Login]\nRemoveIPC = False\n"], False),
    ],
)
def test_remove_ipc(tmp_path: Path, texts: list[str], removes: bool) -> None:
    (tmp_path / "logind.conf.d").mkdir()
    places = [tmp_path / "logind.conf", tmp_path / "logind.conf.d"]
    for file, text in zip([places[0], places[1] / "50.conf"], texts, strict=False):
        file.write_text(text)
    assert doctor.remove_ipc([str(place) for place in places]) is removes


def test_ports() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert next(iter(doctor.ports(port))).level == "WARN"
    assert next(iter(doctor.ports(port))).level == "OK"


# A run file


def test_a_run_that_fits(run_path: Path) -> None:
    found = of_run(run_path)
    assert set(levels(found).values()) == {"OK"}
    assert levels(found).keys() == {"run file", "target", "data", "output", "devices", "rings"}


def test_the_rings_it_needs_are_those_that_are_made(run_path: Path, tmp_path: Path) -> None:
    size = slot_bytes(1024, max_rows(1024), 2, 64, "bfloat16")
    path = tmp_path / "shm/t/w0.ring"
    with_ring = Ring.open(path, worker="w0", fingerprint=Fingerprint({"seed": 0}), slots=4, slot_bytes=size)
    from paceline.common.runfile import load

    assert ring_bytes(load(run_path), 2, 64) == path.stat().st_size
    (check,) = named(of_run(run_path), "rings")
    assert check.level == "OK" and "are there" in check.text
    with_ring.close()
    (check,) = [check for check in of_run(run_path) if check.level == "WARN"]
    assert "nobody works on run t" in check.text


def test_rings_that_do_not_fit(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_run, "free_bytes", lambda _: 1000)
    (check,) = named(of_run(run_path), "rings")
    assert check.level == "FAIL" and "1000 B are free" in check.text and "--shm-size" in check.todo


@pytest.mark.parametrize(
    ("overrides", "name", "text"),
    [
        (["target.path=/nowhere"], "target", "there is no folder /nowhere"),
        (["data.files=['absent.jsonl']"], "data", "there is no"),
        (["data.files=['run.toml']"], "data", "no chat file by its name"),
        (["drafter.mask_token_id='none'"], "mask token", "is not set"),
        (["drafter.mask_token_id=99999999"], "mask token", "is outside the target's"),
        (["drafter.init_from=target"], "first weights", "layers of a gpt_oss target are of another kind"),
        (["drafter.init_from=/nowhere/drafter"], "first weights", "there is no folder /nowhere/drafter"),
        (["drafter.init_from=/nowhere/run/best"], "first weights", "there is no folder /nowhere/run"),
        (["workers.devices=['cuda:3']"], "devices", "torch sees 0 GPUs"),
        (["output=run.toml/x"], "output", "no folder that can be written"),
        (["stream.nonsense=1"], "run file", "stream.nonsense"),
    ],
)
def test_a_run_that_does_not_fit(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], name: str, text: str
) -> None:
    monkeypatch.chdir(run_path.parent)
    checks = [check for check in of_run(run_path, *overrides) if check.level == "FAIL"]
    assert [check.name for check in checks] == [name] and text in checks[0].text


def test_two_ranks_on_a_gpu(run_path: Path) -> None:
    run = load(run_path, ["trainer.ranks=2", "trainer.devices=['cuda:1']"])
    (check,) = doctor_run._devices(run, {"gpus": ["a", "b"]})
    assert check.level == "FAIL" and "cuda:1 would have 2 of them" in check.text


def test_a_target_without_weights(run_path: Path) -> None:
    (run_path.parent / "target/model.safetensors").unlink()
    assert "has no weights" in named(of_run(run_path), "target")[0].text
    (run_path.parent / "target/config.json").unlink()
    found = of_run(run_path)
    assert "no config.json" in named(found, "target")[0].text
    assert named(found, "rings")[0].level == "WARN", "its size is not known"


def test_a_hub_target_is_not_fetched(run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (check,) = named(of_run(run_path, "target.path=org/no-such-model"), "target")
    assert check.level == "WARN" and "from the hub" in check.text


def test_broken_config_and_gguf_are_no_traceback(run_path: Path, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"hidden_size": "many"}', '{"text_config": 3}'):
        (tmp_path / "target/config.json").write_text(text)
        assert doctor_run.hidden_size_of(str(tmp_path / "target")) is None
    (tmp_path / "m.gguf").write_bytes(gzip.compress(b"no model"))
    assert doctor_run.hidden_size_of(str(tmp_path / "m.gguf")) is None
    assert named(of_run(run_path, f"target.path={tmp_path / 'm.gguf'}"), "rings")[0].level == "WARN"


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch", "numpy", "pydantic", "rich", "transformers", "gguf", "packaging"])
def test_it_works_without(run_path: Path, tmp_path: Path, missing: str) -> None:
    """A package that cannot be imported is a line of the report, and never its end."""
    (tmp_path / "broken").mkdir()
    (tmp_path / f"broken/{missing}.py").write_text(f"raise ModuleNotFoundError('no {missing}', name='{missing}')")
    (tmp_path / "broken/torch.py").write_text("raise ImportError('no torch')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "broken")}
    done = subprocess.run(
        [sys.executable, "-m", "paceline.common.cli", "doctor", str(run_path), "--json"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stderr == "" and done.returncode == 1
    failed = [check for check in json.loads(done.stdout) if check["level"] == "FAIL"]
    assert "torch" in {check["name"] for check in failed}
    if missing in ("numpy", "pydantic", "packaging"):
        assert any(missing in check["text"] for check in failed)
