"""Installing units below a folder, and what needs no systemd of `units`."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paceline.common import unitfiles, units
from paceline.common.errors import ConfigError, PacelineError, UsageError
from paceline.common.fingerprint import Fingerprint
from paceline.common.ring import Ring
from paceline.common.runfile import load
from paceline.common.unitfiles import install, uninstall, unit_texts

FILES = {
    "etc/systemd/system/paceline-producer@.service",
    "etc/systemd/system/paceline-consumer@.service",
    "etc/systemd/system/paceline@.target",
    "etc/systemd/system/paceline.slice",
    "etc/sysusers.d/paceline.conf",
    "etc/tmpfiles.d/paceline.conf",
}


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def unit(root: Path, name: str) -> str:
    return (root / "etc/systemd/system" / name).read_text()


def test_install_below_a_folder_and_undo_it(tmp_path: Path):
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/other.service").write_text("[Service]\n")
    said: list[str] = []
    install(root=tmp_path, user="trainer", group="ml", writable=[Path("/data/runs")], say=said.append)
    assert files(tmp_path) == FILES | {"etc/paceline/.installed.json", "etc/systemd/system/other.service"}
    for name in ("paceline-producer@.service", "paceline-consumer@.service"):
        text = unit(tmp_path, name)
        assert "User=trainer\nGroup=ml\n" in text
        assert "ReadWritePaths=-/data/runs\n" in text
        assert re.search(rf"^ExecStart={re.escape(str(Path(sys.executable).parent))}/\S+ .*--instance %i$", text, re.M)
    assert "d /dev/shm/paceline 0770 trainer ml -" in (tmp_path / "etc/tmpfiles.d/paceline.conf").read_text()
    assert not any("@" in line for line in unit(tmp_path, "paceline.slice").splitlines() if not line.startswith("#"))
    uninstall(root=tmp_path, say=said.append)
    assert files(tmp_path) == {"etc/systemd/system/other.service"}
    assert {path.name for path in (tmp_path / "etc").iterdir()} == {"systemd"}, "folders that it made are gone too"


def test_install_again_changes_what_it_wrote(tmp_path: Path):
    install(root=tmp_path, say=lambda text: None)
    install(root=tmp_path, user="other", say=lambda text: None)
    assert "User=other\n" in unit(tmp_path, "paceline-consumer@.service")
    uninstall(root=tmp_path, say=lambda text: None)
    assert files(tmp_path) == set()


def test_files_changed_by_hand_are_neither_overwritten_nor_removed(tmp_path: Path):
    install(root=tmp_path, say=lambda text: None)
    changed = tmp_path / "etc/systemd/system/paceline.slice"
    changed.write_text("[Slice]\nMemoryMax=10G\n")
    with pytest.raises(PacelineError, match=r"paceline\.slice is not as"):
        install(root=tmp_path, say=lambda text: None)
    said: list[str] = []
    uninstall(root=tmp_path, say=said.append)
    assert files(tmp_path) == {"etc/systemd/system/paceline.slice"}
    assert f"kept {changed}: it was changed by hand" in said


def test_run_files_stay(tmp_path: Path):
    install(root=tmp_path, say=lambda text: None)
    (tmp_path / "etc/paceline/demo.toml").write_text("name = 'demo'\n")
    uninstall(root=tmp_path, say=lambda text: None)
    assert files(tmp_path) == {"etc/paceline/demo.toml"}
    with pytest.raises(PacelineError, match="nothing is installed"):
        uninstall(root=tmp_path)


def test_dry_run_writes_nothing(tmp_path: Path):
    said: list[str] = []
    install(root=tmp_path, dry_run=True, say=said.append)
    assert files(tmp_path) == set()
    assert any("ExecStart=" in text for text in said)
    install(root=tmp_path, say=lambda text: None)
    before = files(tmp_path)
    uninstall(root=tmp_path, dry_run=True, say=said.append)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"user": "a b"}, "no name"),
        ({"group": "0wheel"}, "no name"),
        ({"writable": [Path("runs")]}, "absolute"),
        ({"writable": [Path("/a b")]}, "without spaces"),
        ({"writable": [Path("/a%i")]}, "without spaces"),
        ({"python": Path("/nowhere/python3")}, "there is no /nowhere/python3"),
    ],
)
def test_what_no_unit_can_hold_is_refused(tmp_path: Path, options: dict, match: str):
    with pytest.raises(UsageError, match=match):
        install(root=tmp_path, **options)
    assert files(tmp_path) == set()


def test_environment_that_the_user_cannot_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unitfiles, "_HIDDEN", ())
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    python = closed / "bin/python3"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(unitfiles, "_may_enter", lambda path, user: path != closed)  # pytest's are closed as well
    with pytest.raises(ConfigError, match=f"user nosuchuser may not enter {closed}"):
        install(user="nosuchuser", python=python, dry_run=True)


def test_environment_in_tmp_is_refused():
    with pytest.raises(ConfigError, match="/tmp, which units do not see"):
        unitfiles._check_reachable(Path("/tmp/venv/bin/python3"), "nobody")


def test_who_may_enter(tmp_path: Path):
    tmp_path.chmod(0o710)
    assert not unitfiles._may_enter(tmp_path, "nosuchuser")
    tmp_path.chmod(0o711)
    assert unitfiles._may_enter(tmp_path, "nosuchuser")


def test_templates_are_filled_in():
    for path, text in unit_texts("u", "g", "/x/paceline").items():
        assert not re.search(r"@(user|group|paceline|writable)@", text), path


def test_services_keep_rings_and_let_the_sides_die_alone():
    texts = {path.name: text for path, text in unit_texts("u", "g", "/x/paceline").items()}
    for name in ("paceline-producer@.service", "paceline-consumer@.service"):
        lines = texts[name].splitlines()
        for wanted in (
            "RemoveIPC=no",
            "Type=notify",
            "KillMode=mixed",
            "Restart=on-failure",
            "RestartPreventExitStatus=78 2",
            "LimitMEMLOCK=infinity",
            "LimitCORE=0",
            "RuntimeDirectoryPreserve=yes",
        ):
            assert wanted in lines
        assert not any(re.match(r"(Requires|BindsTo|DynamicUser|MemoryMax|MemoryDenyWriteExecute)=", x) for x in lines)


# Instances


@pytest.mark.parametrize(("name", "found"), [("demo.0", ("demo", 0)), ("qwen3-8b_x.12", ("qwen3-8b_x", 12))])
def test_instance(name: str, found: tuple[str, int]):
    assert units.split_instance(name) == found


@pytest.mark.parametrize("name", ["demo", "demo.", ".1", "demo.01", "demo.-1", "demo.1.2", "Demo.1", "de mo.1"])
def test_no_instance(name: str):
    with pytest.raises(UsageError, match=r"RUN\.N"):
        units.split_instance(name)


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "paceline.common.cli", *arguments], capture_output=True, text=True)


def test_instance_must_be_named_like_its_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from paceline.common import cli

    monkeypatch.setattr(units, "CONFIG_DIR", tmp_path)
    (tmp_path / "demo.toml").write_text(
        'name = "other"\noutput = "/o"\n[target]\npath = "/t"\n[data]\nfiles = ["/d.jsonl"]\n'
    )
    with pytest.raises(ConfigError, match='its name is "other"'):
        cli._load_run_or_instance(None, "demo", ())


def test_either_a_run_file_or_an_instance():
    for arguments in ((), ("run.toml", "--instance", "demo.0")):
        done = command("producer", *arguments)
        assert done.returncode == 2
        assert "either a run file or --instance" in done.stderr


# Scaling, as far as it needs no systemd


@pytest.mark.parametrize(
    ("gpus", "new", "match"), [([6], [], "there would be none"), ([6, 8], [3, 4], "--gpu 8: this machine has 8 GPUs")]
)
def test_gpus_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, gpus: list[int], new: list[int], match: str):
    monkeypatch.setattr(units, "installed_gpus", lambda: 8)
    with pytest.raises(PacelineError, match=match):
        units._place(new, gpus)


def test_gpus_of_new_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "installed_gpus", lambda: 8)
    assert units._place([3, 4, 5], [6, 7]) == {3: 6, 4: 7, 5: 6}
    assert units._place([3, 4], []) == {}


def test_new_units_go_to_gpus_that_nobody_of_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "CONFIG_DIR", tmp_path)
    monkeypatch.setattr("paceline.common.devices.installed_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = 'name = "demo"\noutput = "out"\n[target]\npath = "t"\n[data]\nrows = "d"\n'
    (tmp_path / "demo.toml").write_text(text)
    run = load(tmp_path / "demo.toml")
    assert units._spare(run, 3, [1, 2], [0]) == {1: 2, 2: 3}, "the rank has GPU 1"
    (tmp_path / "demo.1.env").write_text("# by hand\nCUDA_VISIBLE_DEVICES='3'\n")
    assert units._spare(run, 4, [2, 3], [0, 1]) == {2: 2}
    said = []
    units._say_shared(run, 4, [2, 3], [0, 1], {2: 2}, said.append)
    assert said == ["w3 shares cuda:0 with w0"]
    (tmp_path / "demo.toml").write_text(text + "[workers]\ngpus_per_worker = 2\n")
    assert units._spare(load(tmp_path / "demo.toml"), 2, [1], [0]) == {}


def test_files_of_an_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "UNIT_DIR", tmp_path)
    monkeypatch.setattr(units, "CONFIG_DIR", tmp_path)
    units._add("demo", 3, 7)
    drop_in = tmp_path / "paceline-producer@demo.3.service.d/50-paceline.conf"
    assert "PartOf=paceline@demo.target" in drop_in.read_text()
    assert "\nCUDA_VISIBLE_DEVICES=7\n" in (tmp_path / "demo.3.env").read_text()
    units._add("demo", 3, 6)
    assert "\nCUDA_VISIBLE_DEVICES=6\n" in (tmp_path / "demo.3.env").read_text()
    units._forget("demo", 3)
    assert list(tmp_path.iterdir()) == []


def test_environment_written_by_hand_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "UNIT_DIR", tmp_path)
    monkeypatch.setattr(units, "CONFIG_DIR", tmp_path)
    (tmp_path / "demo.3.env").write_text("CUDA_VISIBLE_DEVICES=2\n")
    with pytest.raises(PacelineError, match="written by hand"):
        units._add("demo", 3, 7)
    units._forget("demo", 3)
    assert files(tmp_path) == {"demo.3.env"}


def test_rings_are_where_the_run_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "CONFIG_DIR", tmp_path)
    (tmp_path / "demo.toml").write_text('[stream]\nring_dir = "/mnt/rings"\n')
    assert units.ring_dir("demo") == Path("/mnt/rings/demo")
    (tmp_path / "demo.toml").write_text("[stream\n")
    assert units.ring_dir("demo") == Path("/dev/shm/paceline/demo")


def test_without_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "BOOTED", tmp_path / "none")
    assert not units.systemd_has("demo")
    with pytest.raises(PacelineError, match="systemd does not run"):
        units.need_systemd()


def test_changes_need_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for change in (
        lambda: units.scale_units("demo", 2),
        lambda: units.stop_units("demo"),
        lambda: units.restart_trainer("demo"),
    ):
        with pytest.raises(PacelineError, match=r"needs root: sudo paceline (scale|stop|restart)"):
            change()


# A group may look


def test_run_folder_below_a_shared_one_lets_the_group_look(tmp_path: Path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder, mode in ((shared, 0o770), (own, 0o755)):
        folder.mkdir()
        folder.chmod(mode)
        path = folder / "demo/w0.ring"
        Ring.open(path, worker="w0", fingerprint=Fingerprint({"a": 1}), slots=2, slot_bytes=4096).close()
    assert (shared / "demo").stat().st_mode & 0o777 == 0o750
    assert (own / "demo").stat().st_mode & 0o777 == 0o700


def test_wheel_has_the_units(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist() if name.startswith("paceline/systemd/")}
    assert {Path(name).name for name in FILES} - {"paceline.conf"} | {"sysusers.conf", "tmpfiles.conf"} <= names
