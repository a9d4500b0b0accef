"""Fixtures that the tests of the command share.

RINGFENCE_BIN       the command (build/ringfence)
RINGFENCE_SHARED    the folder with reference values and vocabularies (../shared)
RINGFENCE_SANITIZED 1 for a sanitizer's build: slower, and memory figures mean nothing there
RINGFENCE_PLANT_MALLOC, RINGFENCE_PLANT_BYTE   builds with a planted fault
"""
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import runner

TEXT_SHA256 = "ddefe56ad58f0a53105e4fbe5e9d282e08820ff72c5567d12501de9f5c00faf6"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes of work; left out of sanitizer builds")


def pytest_collection_modifyitems(items):
    if not runner.SANITIZED:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow, and this is a sanitizer's build"))


@pytest.fixture(scope="session", autouse=True)
def binary():
    """The command under test."""
    if not runner.BINARY.exists():
        pytest.skip(f"{runner.BINARY} is not built (make build)")
    return runner.BINARY


@pytest.fixture(scope="session")
def run():
    """run(*args, code=0, timeout=60, stdin=None, env=None, binary=None): see runner.run."""
    return runner.run


@pytest.fixture(scope="session")
def sanitized():
    return runner.SANITIZED


@pytest.fixture(scope="session")
def stories():
    """The story model that the command embeds, as a file."""
    return runner.STORIES


@pytest.fixture(scope="session")
def shared():
    """The folder with reference values and vocabularies that are not part of the project."""
    if not runner.SHARED.is_dir():
        pytest.skip(f"{runner.SHARED} is not here (RINGFENCE_SHARED names it)")
    return runner.SHARED


def planted(name):
    path = os.environ.get(name)
    if not path or not Path(path).exists():
        pytest.skip(f"{name} names no planted build")
    return path


@pytest.fixture(scope="session")
def plant_malloc():
    return planted("RINGFENCE_PLANT_MALLOC")


@pytest.fixture(scope="session")
def plant_byte():
    return planted("RINGFENCE_PLANT_BYTE")


@pytest.fixture(scope="session")
def smollm2():
    """The path of SmolLM2-135M-Instruct Q4_1."""
    done = subprocess.run([sys.executable, runner.ROOT / "tools/fetch-model", "smollm2-135m"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        pytest.skip(f"tools/fetch-model smollm2-135m failed: {' '.join(last)}")
    return Path(done.stdout.decode().strip())


@pytest.fixture(scope="session")
def smollm2_f32(smollm2):
    """The same model with every tensor decoded to F32, made once and kept in the cache."""
    target = runner.cache_folder() / "SmolLM2-135M-Instruct.F32.gguf"
    tool = runner.ROOT / "tools/dequantise.py"
    if not target.exists() or target.stat().st_mtime < tool.stat().st_mtime:
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, tool, smollm2, target], check=True,
                       stdout=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="session")
def kjv(tmp_path_factory):
    """A file with the text of the reference values."""
    text = runner.bible_text()
    if text is None:
        pytest.skip("the command bible is not here (Debian: bible-kjv, bible-kjv-text)")
    digest = hashlib.sha256(text).hexdigest()
    if digest != TEXT_SHA256:
        pytest.skip(f"the command bible prints another text (SHA-256 {digest})")
    path = tmp_path_factory.mktemp("text") / "kjv.txt"
    path.write_bytes(text)
    return path
