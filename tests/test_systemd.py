"""The units on a real systemd, with the real commands: a wheel in /opt/paceline of a box, a tiny target on its CPU.

Skipped where no box can boot, unless PACELINE_REQUIRE_SYSTEMD is set.
"""

import json
import os
import re
import shutil
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paceline.common.runfile import RunFile, to_toml
from systemd_box import Box, NoBox, check

PATIENCE = 120.0  # seconds, on a loaded machine
HOME = Path("/opt/paceline")  # of the environment in the box
PACELINE = f"{HOME}/bin/paceline"
TRAINER, WORKER = "paceline-consumer@tiny.service", "paceline-producer@tiny.{}.service"


@pytest.fixture
def box(tmp_path: Path, wheel: Path) -> Iterator[Box]:
    """A booted box with paceline installed in /opt/paceline."""
    try:
        check()
        made = Box(tmp_path)
    except NoBox as reason:
        _no_box(reason)
    try:
        _install(made, wheel)
        made.boot()
        yield made
    except NoBox as reason:
        _no_box(reason)
    finally:
        made.down()


def _no_box(reason: NoBox) -> Any:
    if os.environ.get("PACELINE_REQUIRE_SYSTEMD"):
        pytest.fail(f"PACELINE_REQUIRE_SYSTEMD is set: {reason}")
    pytest.skip(str(reason))


def _install(box: Box, wheel: Path) -> None:
    """An environment like a venv's: this one's Python and packages, and paceline from the wheel."""
    python = Path(sys.executable).resolve()
    place = box.root / HOME.relative_to("/")
    packages = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.mkdir(parents=True)
    (place / "bin").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    known = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in known))
    (place / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    (place / "bin/python3").symlink_to(python)
    script = place / "bin/paceline"
    script.write_text(f"#!{HOME}/bin/python3\nimport sys\nfrom paceline.common.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    for path in (python, Path(sys.base_prefix).resolve() / "lib", *known):
        box.open_to_all(path)


@pytest.fixture
def tiny(box: Box, tiny_target_dir: Path, chat_file: Path) -> Callable[..., None]:
    """tiny(**trainer): writes /etc/paceline/tiny.toml, a run on the box's CPU."""
    data = box.root / "srv/tiny"
    data.mkdir(parents=True)
    shutil.copytree(tiny_target_dir, data / "target")
    shutil.copy(chat_file, data / "chats.jsonl")
    box.run("chmod", "-R", "a+rX", "/srv/tiny")

    def write(**trainer: Any) -> None:
        run = RunFile.model_validate(
            {
                "name": "tiny",
                "output": "/var/lib/paceline/tiny",
                "target": {"path": "/srv/tiny/target", "dtype": "float32"},
                "data": {"files": ["/srv/tiny/chats.jsonl"], "max_length": 256, "held_out": 8},
                "stream": {"token_budget": 1024, "slots": 2},
                "workers": {"devices": ["cpu"], "threads": 1},
                "trainer": {"dtype": "float32", "devices": ["cpu"], "threads": 1, "epochs": 500} | trainer,
                "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 3},
                "checkpoint": {"every_steps": 100, "keep_last": 3},
                "evaluation": {"every_steps": 0, "at_end": False},
            }
        )
        (_seen(box) / "etc/paceline").mkdir(exist_ok=True)
        (_seen(box) / "etc/paceline/tiny.toml").write_text(to_toml(run))

    return write


def _seen(box: Box) -> Path:
    """The box's root with its own mounts, from outside."""
    return Path(f"/proc/{box.leader}/root")
