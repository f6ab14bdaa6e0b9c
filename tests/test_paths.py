"""Run directories: where they are, and that they are this user's alone."""

import os
from pathlib import Path

import pytest
from paceline.common import paths
from paceline.common.cli import main
from paceline.common.errors import ConfigError
from paceline.common.runfile import RunFile

VARIABLES = ("PACELINE_RUNTIME_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", "PACELINE_CACHE", "CACHE_DIRECTORY")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert paths.run_dir("a") == tmp_path / "xdg/paceline/a"
    assert (tmp_path / "xdg/paceline").stat().st_mode & 0o777 == 0o700
    (tmp_path / "sys").mkdir()
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path / 'sys'}:{tmp_path / 'other'}")
    assert paths.run_dir("a") == tmp_path / "sys/a"
    assert (tmp_path / "sys/a").stat().st_mode & 0o777 == 0o750, "the unit's group may read the status"
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "own"))
    assert paths.run_dir("a") == tmp_path / "own/a"
    assert paths.run_dir("a").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in paths.find_run_dirs()] == ["a"] and not paths.find_run_dirs("b")


def test_a_run_directory_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path))
    folder = paths.run_dir("a")
    for mode in (0o770, 0o755, 0o702):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match="is open to others"):
            paths.run_dir("a")
    folder.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a folder"):
        paths.run_dir("a")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        paths.run_dir("b")


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path))
    folder = paths.run_dir("a")
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"belongs to uid|can be written by others"):
        paths.private_folder(folder)


def test_long_socket_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFile.model_validate({"name": "r", "output": "/o", "target": {"path": "t"}, "data": {"files": ["d"]}})
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path))
    assert paths.feed_address(run) == f"ipc://{tmp_path}/r/feed.sock"
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / ("x" * 90)))
    with pytest.raises(ConfigError, match=r"at most 107 fit: set PACELINE_RUNTIME_DIR"):
        paths.ranks_address(run)


def test_a_run_directory_in_use_does_not_look_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /tmp is swept: up.lock and consumer.lock would go after some days."""

    def aged() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir() if path.lstat().st_mtime < 1e6)

    (tmp_path / "up.lock").write_text("7\n")
    (tmp_path / "link").symlink_to("nowhere")
    fresh = paths.Freshness(tmp_path)
    for hour in range(3):
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0), follow_symlinks=False)
        assert aged() == ["link", "up.lock"]
        fresh.keep()
        assert aged() == ([] if hour == 0 else ["link", "up.lock"])
    monkeypatch.setattr(fresh, "_due", 0.0)
    fresh.keep()
    assert aged() == [] and (tmp_path / "up.lock").read_text() == "7\n"
    paths.Freshness(tmp_path / "gone").keep()


@pytest.mark.parametrize("command", ["up", "producer", "consumer"])
def test_long_socket_paths_are_refused_first(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read, prepared, loaded or made."""
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "r"\noutput = "out"\n[target]\npath = "none"\n[data]\nfiles = ["none"]\n[drafter]\nmask_token_id = 1\n'
    )
    longest = 107 - len("/r/ranks.sock") - len(str(tmp_path)) - 1
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / ("x" * (longest + 1))))
    assert main([command, str(path)]) == 78
    assert "has 108 bytes, at most 107 fit: set PACELINE_RUNTIME_DIR" in capsys.readouterr().err
    assert not (tmp_path / ("x" * (longest + 1))).exists() and not (tmp_path / "out/trainer.lock").exists()
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / ("x" * longest)))
    assert main([command, str(path)]) == 78
    assert "107" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "consumer"])
def test_a_lock_that_cannot_be_made_is_told_by_its_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_RUNTIME_DIR", str(tmp_path / "rt"))
    path, locks = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(
        'name = "r"\noutput = "out"\n[target]\npath = "none"\n[data]\nfiles = ["none"]\n[drafter]\nmask_token_id = 1\n'
    )
    locks.mkdir()
    name = "up.lock" if command == "up" else "trainer.lock"
    (locks / name).symlink_to("elsewhere")
    assert main([command, str(path)]) == 78
    assert capsys.readouterr().err == f"paceline: cannot lock {locks / name}: it is a link\n"


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg/paceline"
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "unit"))
    assert paths.cache_dir() == tmp_path / "unit"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "own"))
    assert paths.cache_dir() == tmp_path / "own"
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file/below"))
    with pytest.raises(ConfigError, match="set PACELINE_CACHE"):
        paths.cache_dir()


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {}),
    ],
)
def test_the_allocators_settings_are_the_users_if_there_are_any(
    own: dict[str, str], added: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for variable in (*paths.COMPILE_CACHES, *paths.ALLOCATOR):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    assert {name: value for name, value in paths.torch_environment().items() if name in paths.ALLOCATOR} == added
