"""The units on a real systemd, with the real commands: a wheel in /opt/paceline of a box, a tiny target on its CPU.

Skipped where no box can boot, unless PACELINE_REQUIRE_SYSTEMD is set.
"""

import compileall
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

pytestmark = pytest.mark.slow  # a box boots for each; first in CI, none of them alone at the end

PATIENCE = 300.0  # seconds, on a loaded machine
HOME = Path("/opt/paceline")  # of the environment in the box
PACELINE = f"{HOME}/bin/paceline"
TRAINER, WORKER = "paceline-consumer@tiny.service", "paceline-producer@tiny.{}.service"


@pytest.fixture
def box(tmp_path: Path, wheel: Path) -> Iterator[Box]:
    """A booted box with paceline installed in /opt/paceline."""
    made: Box | None = None
    try:
        check()
        made = Box(tmp_path)
        _install(made, wheel)
        made.boot()
        yield made
    except NoBox as reason:
        if os.environ.get("PACELINE_REQUIRE_SYSTEMD"):
            pytest.fail(f"PACELINE_REQUIRE_SYSTEMD is set: {reason}")
        pytest.skip(str(reason))
    finally:
        if made is not None:
            made.down()


def _install(box: Box, wheel: Path) -> None:
    """An environment like a venv's: this one's Python and packages, and paceline from the wheel."""
    python = Path(sys.executable).resolve()
    place = box.root / HOME.relative_to("/")
    packages = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.mkdir(parents=True)
    (place / "bin").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    compileall.compile_dir(packages, quiet=1)  # as pip does: the units may not write there
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


def test_units_are_sound(box: Box):
    """Nothing for systemd to complain of, little that could be exposed, and both sides below one slice."""
    box.run(PACELINE, "install-units")
    names = (TRAINER, WORKER.format(0), "paceline@tiny.target", "paceline.slice")
    assert box.run("systemd-analyze", "verify", "--man=no", *names) == ""
    for name in names[:2]:
        report = box.run("systemd-analyze", "security", "--no-pager", name)
        exposure = re.search(r"exposure level for \S+ ([0-9.]+)", report)
        assert exposure is not None and float(exposure[1]) <= 2.5, report
        assert box.shown(name, "Slice") == "paceline.slice"
        assert box.shown(name, "RemoveIPC") == "no"
        assert "char-nvidia*" in box.shown(name, "DeviceAllow")
    assert box.shown("paceline.slice", "MemoryMax") != "infinity"
    assert box.run("stat", "-c", "%a %U %G", "/dev/shm/paceline").split() == ["770", "paceline", "paceline"]


def _everything(box: Box) -> set[str]:
    """Paths of what configuration and data there is in the box, and the lines of its accounts."""
    listing = box.run("find", "/etc", "/var/lib", "/var/cache", "/dev/shm", "/run/paceline", check=False)
    # Backups and locks of the account files, and what systemd keeps for itself.
    ours = [line for line in listing.splitlines() if not re.search(r"(-|\.lock)$|/var/lib/systemd/|No such", line)]
    return {*ours, *box.run("cat", "/etc/passwd", "/etc/group").splitlines()}


def test_installing_and_uninstalling_leave_nothing(box: Box):
    # Something else is enabled, as on every machine: systemctl disable removes a folder that it leaves empty.
    box.run("systemctl", "enable", "machines.target")
    before = _everything(box)
    box.run(PACELINE, "install-units")
    assert box.run("id", "-un", "paceline").strip() == "paceline"
    box.run("systemctl", "enable", "paceline@tiny.target")
    box.run(PACELINE, "uninstall-units")
    assert _everything(box) ^ before == set()
    assert box.run("systemctl", "list-units", "--all", "--no-legend", "paceline*") == ""
    assert "nothing is installed" in box.run(PACELINE, "uninstall-units", check=False)


def test_wrong_run_file_is_told_and_not_tried_again(box: Box, tiny: Callable[..., None]):
    box.run(PACELINE, "install-units")
    tiny(max_steps=4711)
    assert "is not up here" in scale(box, 1, check=False)
    box.run("systemctl", "enable", "paceline@tiny.target")
    run_file = _seen(box) / "etc/paceline/tiny.toml"
    right = run_file.read_text()
    run_file.write_text(right.replace("max_steps = 4711", "max_steps = 0"))
    assert re.search(r"/tiny\.toml:\d+: trainer\.max_steps = 0", scale(box, 1, check=False))
    assert box.shown(WORKER.format(0), "ActiveState") == "inactive", "nothing was started"
    run_file.write_text(re.sub(r"(?m)^path = .*", 'path = "/nowhere/target"', right))
    failure = scale(box, 1, check=False)
    for part in (WORKER.format(0), "target.path: there is no folder", "journalctl -u"):
        assert part in failure
    assert box.shown(WORKER.format(0), "ActiveState") == "failed"
    assert box.shown(WORKER.format(0), "ExecMainStatus") == "78"
    assert box.shown(WORKER.format(0), "NRestarts") == "0"
    run_file.write_text("of no use")
    scale(box, 0)
    assert box.run("systemctl", "list-units", "--all", "--no-legend", "paceline-producer*") == ""


# A run's life


def scale(box: Box, count: int, check: bool = True) -> str:
    return box.run(PACELINE, "scale", "tiny", str(count), check=check, timeout=PATIENCE)


def wait_until(box: Box, what: Callable[[], Any]) -> Any:
    """Waits until `what` is true; if it never is, shows the journal."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, box.journal()[-8000:]
        time.sleep(0.2)
    return found


def active(box: Box, *units: str) -> bool:
    return all(box.shown(unit, "ActiveState") == "active" for unit in units)


def step(box: Box) -> int:
    """Steps done, by the trainer's status line."""
    found = re.search(r"step (\d+) of", box.shown(TRAINER, "StatusText"))
    return int(found[1]) if found else 0


def rings(box: Box) -> set[str]:
    return set(box.run("ls", "/dev/shm/paceline/tiny", check=False).split())


def test_life_of_a_run(box: Box, tiny: Callable[..., None]):
    """Started, killed, hung, scaled to 3 workers and back, stopped with a checkpoint, resumed and finished."""
    box.run(PACELINE, "install-units")
    tiny()
    _start_with_one_worker(box)
    _survive_a_kill_and_a_hang(box)
    _scale_down(box)
    _restart_the_trainer(box)
    stopped_at = _stop(box)
    tiny(max_steps=stopped_at + 3)
    _finish(box)
    checkpoint = f"/var/lib/paceline/tiny/checkpoints/step-{stopped_at + 3:08d}"
    report = box.run(PACELINE, "audit", checkpoint)
    assert "clean" in report and f"{stopped_at + 3} trained + 0 listed" in report
    assert "kept user paceline and its files in /var/lib/paceline" in box.run(PACELINE, "uninstall-units")
    assert box.run("stat", "-c", "%U", checkpoint).strip() == "paceline"


def _start_with_one_worker(box: Box) -> None:
    box.run("systemctl", "enable", "paceline@tiny.target")
    box.run("systemctl", "start", "--no-block", "paceline@tiny.target")
    scale(box, 1)
    assert active(box, WORKER.format(0)), "scale waits for the worker's READY"
    box.run("systemctl", "start", "paceline@tiny.target", timeout=PATIENCE)
    assert active(box, TRAINER, "paceline@tiny.target"), "the target's start waits for the trainer's READY"
    wait_until(box, lambda: step(box) >= 2)
    assert "Ktok/s" in box.shown(WORKER.format(0), "StatusText")
    # Members of the group may look.
    box.run("useradd", "--groups", "paceline", "guest")
    assert "w0" in box.run("runuser", "-u", "guest", "--", PACELINE, "rings", "tiny")
    assert "of 7,000" in box.run("runuser", "-u", "guest", "--", PACELINE, "status", "tiny")


def _survive_a_kill_and_a_hang(box: Box) -> None:
    """Worker 0 is killed while worker 1 hangs; worker 2 goes on."""
    folder = Path(f"/proc/{box.leader}/root/run/systemd/system/{WORKER.format(1)}.d")
    folder.mkdir(parents=True)
    (folder / "short.conf").write_text("[Service]\nWatchdogSec=10\n")
    scale(box, 3)
    assert rings(box) == {"w0.ring", "w1.ring", "w2.ring"}
    inode = box.run("stat", "-c", "%i", "/dev/shm/paceline/tiny/w0.ring")
    before = step(box)
    box.run("systemctl", "kill", "--signal=STOP", "--kill-who=main", WORKER.format(1))
    box.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", WORKER.format(0))
    both = WORKER.format(0), WORKER.format(1)
    wait_until(box, lambda: all(int(box.shown(unit, "NRestarts")) > 0 for unit in both) and active(box, *both))
    assert f"{WORKER.format(1)}: Watchdog timeout" in box.journal()
    assert box.run("stat", "-c", "%i", "/dev/shm/paceline/tiny/w0.ring") == inode, "the ring is adopted"
    wait_until(box, lambda: step(box) > before + 1)
    assert box.shown(TRAINER, "NRestarts") == "0"


def _scale_down(box: Box) -> None:
    scale(box, 1)
    assert not active(box, WORKER.format(1)) and not active(box, WORKER.format(2))
    wait_until(box, lambda: rings(box) == {"w0.ring"})  # drained, then removed by the trainer
    found = box.run("find", "/etc/systemd/system", "-path", "*paceline-producer@tiny.*", "-name", "*.service")
    assert found.split() == [f"/etc/systemd/system/paceline@tiny.target.wants/{WORKER.format(0)}"]
    before = step(box)
    wait_until(box, lambda: step(box) > before)


def _restart_the_trainer(box: Box) -> None:
    """It goes on at the step where it was, and the worker has seen nothing but a pause."""
    worker, trainer = (box.shown(unit, "MainPID") for unit in (WORKER.format(0), TRAINER))
    before = step(box)
    said = box.run(PACELINE, "restart", "tiny", timeout=PATIENCE)
    assert f"{TRAINER} restarts" in said and active(box, TRAINER), said
    assert box.shown(WORKER.format(0), "MainPID") == worker and box.shown(TRAINER, "MainPID") != trainer
    (resumed,) = re.findall(r"resuming run \S+ at step (\d+)", box.journal())
    assert int(resumed) >= before
    wait_until(box, lambda: step(box) > int(resumed))


def _stop(box: Box) -> int:
    """Returns the step that it was stopped at."""
    box.run(PACELINE, "stop", "tiny", timeout=PATIENCE)
    for unit in (TRAINER, WORKER.format(0), "paceline@tiny.target"):
        assert box.shown(unit, "ActiveState") == "inactive"
        assert box.shown(unit, "Result") in ("success", "")
    said = box.shown(TRAINER, "StatusText")
    found = re.fullmatch(r"stopped at step (\d+) of 7000, checkpoint /var/lib/paceline/tiny/checkpoints/(\S+)", said)
    assert found is not None and found[2] == f"step-{int(found[1]):08d}", said
    assert box.run("systemctl", "is-enabled", "paceline@tiny.target", WORKER.format(0)).split() == 2 * ["enabled"]
    return int(found[1])


def _finish(box: Box) -> None:
    """The target alone brings both sides back; at the end they leave, and starting again is no failure."""
    units = TRAINER, WORKER.format(0)
    for _ in range(2):
        box.run("systemctl", "start", "paceline@tiny.target", timeout=PATIENCE)
        wait_until(box, lambda: all(box.shown(unit, "ActiveState") == "inactive" for unit in units))
        for unit in units:
            assert box.shown(unit, "Result") == "success"
        assert box.shown(TRAINER, "StatusText").startswith("run tiny is finished")
