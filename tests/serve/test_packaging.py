"""The unit and the Dockerfile, as far as that can be known without systemd and Docker."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from strata.core.settings import SETTINGS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
INSTRUCTIONS = {
    "FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "CMD",
    "STOPSIGNAL", "ENTRYPOINT",
}  # fmt: skip


def dockerfile() -> list[str]:
    """Its instructions, continued lines joined."""
    text = (SCRIPTS / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_dockerfile() -> None:
    lines = dockerfile()
    words = [line.split()[0] for line in lines]
    assert set(words) <= INSTRUCTIONS
    assert words.count("FROM") == 2 and words[-1] == "ENTRYPOINT"
    assert "USER" in words[words.index("FROM", 1) :], "the server must not run as root"
    for line in lines:
        if "apt-get install" in line:
            assert "--no-install-recommends" in line and "rm -rf /var/lib/apt/lists" in line
        if "pip install" in line:
            assert line.count("--no-cache-dir") == line.count("pip install")
        assert not re.search(r"\b(ADD|sudo|latest)\b", line)
    names = re.findall(r"STRATA_([A-Z_]+)=", " ".join(lines))
    assert names and all(name.lower() in SETTINGS for name in names)


def test_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(SCRIPTS / "strata.service", encoding="utf-8")
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    flags = re.findall(r"--([a-z-]+)", unit["Service"]["ExecStart"])
    assert flags and all(flag.replace("-", "_") in SETTINGS for flag in flags)
    assert int(unit["Service"]["TimeoutStopSec"]) > SETTINGS["drain_s"].default


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(SCRIPTS / "strata.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [x for x in done.stderr.splitlines() if "not executable" not in x and "User" not in x]
    assert not [x for x in errors if "strata.service" in x], done.stderr
