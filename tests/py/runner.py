"""Starts the command and brings back everything that came of it.

Helpers of the tests, not a test: where the binary, the model and the shared folder are, and one
way to run a command that never lets a crash or a sanitizer's report pass unseen.
"""
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("RINGFENCE_BIN", ROOT / "build/ringfence"))
SHARED = Path(os.environ.get("RINGFENCE_SHARED", ROOT.parent / "shared"))
SANITIZED = os.environ.get("RINGFENCE_SANITIZED", "") not in ("", "0")
STORIES = ROOT / "models/stories260k.gguf"
PATIENCE = 10 if SANITIZED else 1
REPORTS = (b"AddressSanitizer", b"LeakSanitizer", b"ThreadSanitizer", b"UndefinedBehavior",
           b"runtime error:")
EXIT_CODES = {"ok": 0, "runtime": 1, "usage": 2, "bad_model": 3, "unsupported": 3, "no_fit": 4,
              "drift": 5, "io": 6, "interrupted": 130}
ERROR_LINE = re.compile(rb"^ringfence: error: (?P<where>.*?): (?P<what>.+)$", re.M)


@dataclass
class Done:
    """What a command left behind. code is negative after a signal, None after a timeout."""
    args: list
    code: int | None
    out: bytes
    err: bytes
    seconds: float
    resident: int
    faults: list = field(default_factory=list)

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return [json.loads(line) for line in self.out.splitlines() if line.strip()]

    @property
    def text(self):
        return self.out.decode("utf-8")

    def show(self):
        return (f"{' '.join(map(str, self.args))}\n  exit {self.code} after {self.seconds:.2f} s"
                f"\n  stdout: {self.out[-600:]!r}\n  stderr: {self.err[-1200:]!r}")


def clean_environment(extra=None):
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("RINGFENCE_") and name not in ("LD_PRELOAD",)}
    environment.update({"LC_ALL": "C.UTF-8", "NO_COLOR": "1"})
    environment.update(extra or {})
    return environment


def execute(args, timeout=60, stdin=None, env=None, binary=None, stdout=None, cwd=None):
    """Runs the command and returns Done with its faults listed (a signal, a sanitizer's report, a
    timeout); asserts nothing. stdin: bytes; stdout: a file to write to instead of a capture."""
    command = [str(binary or BINARY), *map(str, args)]
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, \
            tempfile.TemporaryFile() as given:
        if stdin:
            given.write(stdin)
            given.seek(0)
        child = subprocess.Popen(command, stdin=given, stdout=stdout or out, stderr=err,
                                 env=clean_environment(env), cwd=cwd)
        code, usage = reap(child, timeout * PATIENCE)
        seconds = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        done = Done(command, code, out.read(), err.read(), seconds,
                    usage.ru_maxrss * 1024 if usage else 0)
    if code is None:
        done.faults.append(f"still running after {timeout * PATIENCE} s")
    elif code < 0:
        done.faults.append(f"ended by signal {-code}")
    done.faults += [f"sanitizer: {word.decode()}" for word in REPORTS if word in done.err]
    return done


def reap(child, seconds):
    """Waits for the child; returns its exit code and usage, or (None, None) after killing it."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode, usage
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            return None, None
        time.sleep(pause)
        pause = min(pause * 1.3, 0.02)


def run(*args, code=0, **options):
    """Runs the command and asserts that it ended well, with one of the codes (None: with any)."""
    done = execute(args, **options)
    assert not done.faults, f"{done.faults}\n{done.show()}"
    if code is not None:
        codes = code if isinstance(code, (set, tuple, list)) else {code}
        assert done.code in codes, f"exit {done.code}, expected {sorted(codes)}\n{done.show()}"
    return done


def error_of(done):
    """(where, what) of the one error line on stderr; asserts that there is exactly one."""
    found = ERROR_LINE.findall(done.err)
    assert len(found) == 1, f"expected one error line\n{done.show()}"
    where, what = (part.decode("utf-8", "replace") for part in found[0])
    return where, what


def limit_memory(bytes_):
    """Sets the soft limit on address space, which children inherit; returns the old limits."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, old[1]))
    return old


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ringfence"


def bible_text(count=60_000):
    """The first bytes of the text that the reference values were made with; None without it."""
    if not shutil.which("bible"):
        return None
    with subprocess.Popen(["bible", "-f", "gen1:1-rev22:21"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as child:
        text = child.stdout.read(count)
        child.stdout.close()
        child.wait()
    return text
