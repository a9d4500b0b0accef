"""How commands end: exit codes, streams, signals, files that vanish.

ctest: serial (signals are sent while a command is at work)
"""
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import runner

# What an independent float64 implementation says too (test_reference.py).
STORY = ("Once upon a time, there was a little girl named Lily. She loved to play outside in the "
         "park. One day, she saw a big, red ball. She wanted to play with it, but it was too "
         "high.\nLily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know "
         "what to do")
WORDS = "One day, Tom and his dog went to the big park. They saw a red ball and a cat. "


# ---- text -------------------------------------------------------------------------------------

@pytest.mark.parametrize("model", [["-m", runner.STORIES], [runner.STORIES], []])
def test_the_story_is_told_word_for_word(model):
    done = runner.run("run", *model, "-p", "Once upon a time", "-n", 100, "--temp", 0)
    assert done.text == STORY
    assert b"Lily" not in done.err


def test_n_counts_tokens_after_the_prompt(stories):
    texts = [runner.run("run", stories, "-p", "Once upon a time", "-n", n, "--temp", 0, "-q").text
             for n in (0, 1, 5, 20)]
    assert texts[0] == "Once upon a time"
    assert all(STORY.startswith(text) for text in texts)
    assert len(set(map(len, texts))) == 4


def test_a_prompt_comes_from_a_file_or_from_stdin_to_the_last_byte(stories, tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes(b"Once upon a time")
    by_file = runner.run("run", stories, "-f", path, "-n", 8, "--temp", 0, "-q").out
    by_stdin = runner.run("run", stories, "-f", "-", "-n", 8, "--temp", 0, "-q",
                          stdin=b"Once upon a time").out
    assert by_file == by_stdin == runner.run("run", stories, "-p", "Once upon a time", "-n", 8,
                                             "--temp", 0, "-q").out
    verbatim = b"  Tom\n\n"
    done = runner.run("run", stories, "-f", "-", "-n", 1, "--temp", 0, "-q", stdin=verbatim)
    assert done.out.startswith(verbatim)


@pytest.mark.parametrize("prompt", [b"\xff\xfe\x80", b"a\0b", b"\xe2\x96", b"\xf0\x9f\x98\x80",
                                    "\u2581\u2581".encode(), b"\n\n\n", b"\xed\xa0\x80"])
def test_strange_prompts_come_back_as_they_were(stories, prompt):
    done = runner.run("run", stories, "-f", "-", "-n", 3, "--temp", 0, "-q", stdin=prompt)
    assert done.out.startswith(prompt), done.show()


def test_the_text_stops_with_a_word_when_the_ring_is_full(stories):
    short = runner.run("run", stories, "-p", "Once upon a time", "-n", 1000, "--temp", 0, "-c",
                       32)
    assert STORY.startswith(short.text) and len(short.text) > len("Once upon a time") + 20
    assert re.search(rb"context|ctx|full|-c\b|ring", short.err, re.I), short.show()
    exact = runner.run("run", stories, "-p", "Once upon a time", "-n", 1000, "--temp", 0, "-c",
                       105, "-q").text
    assert exact.startswith(STORY[:-10])


def test_a_context_of_one_is_handled(stories):
    runner.run("plan", "--json", stories, "-c", 1)
    runner.run("run", stories, "-c", 1, "-p", "Once upon a time", code=2)
    runner.run("run", stories, "-c", 1, "-p", "", "-n", 5, "--temp", 0, code={0, 2})
    runner.run("check", stories, "-c", 1, code={0, 2})
    runner.run("check", "--json", stories, "-c", 2, code={0, 2})


def test_a_prompt_that_fills_the_ring_is_answered_with_at_most_one_token(stories):
    done = runner.run("tokenize", "--json", stories, "-p", "Once upon a time")
    count = len(done.json["tokens"])
    runner.run("run", stories, "-p", "Once upon a time", "-c", count, "-n", 5, "--temp", 0)
    runner.run("run", stories, "-p", "Once upon a time", "-c", count - 1, "-n", 5, code=2)


# ---- usage ------------------------------------------------------------------------------------

USAGE = {
    "unknown command": ["sing"], "unknown option": ["run", "--bogus"],
    "unknown short option": ["run", "-Z", "1"], "no value": ["run", "-p"],
    "no number": ["run", "-p", "a", "-n", "abc"], "half a number": ["run", "-p", "a", "-n", "5x"],
    "an empty number": ["run", "-p", "a", "-n", ""],
    "a number beyond 64 bits": ["plan", "-c", "99999999999999999999999"],
    "a negative context": ["plan", "-c", "-1"], "no context": ["plan", "-c", "big"],
    "no slots": ["plan", "--slots", "0"], "negative slots": ["plan", "--slots", "-2"],
    "a chunk above the ring": ["plan", "-c", "512", "-b", "4096"],
    "a chunk above the ring, run": ["run", "-p", "a", "-c", "64", "-b", "65"],
    "a negative chunk": ["plan", "-b", "-1"], "minus one core": ["plan", "-t", "-1"],
    "a million million cores": ["plan", "-t", "1000000000000"],
    "unknown K format": ["plan", "-ctk", "q9_9"], "unknown V format": ["plan", "-ctv", "f17"],
    "temperature NaN": ["run", "-p", "a", "--temp", "nan"],
    "negative temperature": ["run", "-p", "a", "--temp", "-1"],
    "temperature as a word": ["run", "-p", "a", "--temp", "hot"],
    "top-p above 1": ["run", "-p", "a", "--top-p", "1.5"],
    "negative top-p": ["run", "-p", "a", "--top-p", "-0.1"],
    "min-p above 1": ["run", "-p", "a", "--min-p", "2"],
    "negative top-k": ["run", "-p", "a", "--top-k", "-3"],
    "seed as a word": ["run", "-p", "a", "--seed", "abc"],
    "unknown instruction set": ["plan", "--cpu", "z80"],
    "unknown profile": ["plan", "--profile", "toaster"],
    "no size": ["plan", "--mem-limit", "much"], "size 0x": ["plan", "--mem-limit", "8Q"],
    "negative size": ["plan", "--mem-limit", "-5"], "solve what": ["plan", "--solve", "life"],
    "two models": ["plan", str(runner.STORIES), str(runner.STORIES)],
    "score top as a word": ["score", "-f", "/dev/null", "--top", "x"],
    "a long prompt": ["run", "-c", "64", "-p", WORDS * 10],
    "a long prompt for check": ["check", "-c", "64", "-p", WORDS * 10],
}


@pytest.mark.parametrize("name", USAGE)
def test_a_wrong_option_is_said_with_exit_2(name):
    done = runner.run(*USAGE[name], code=2, timeout=10)
    assert done.out == b"", done.show()
    assert done.err.strip(), "no word of what is wrong"
    if USAGE[name][-1] and len(USAGE[name]) > 2 and not name.startswith(("a long", "two")):
        option = [word for word in USAGE[name] if word.startswith("-")][-1]
        shown = done.err.decode("utf-8", "replace")
        assert USAGE[name][-1] in shown or option in shown or option.lstrip("-") in shown, shown


@pytest.mark.parametrize("name", ["no number", "a chunk above the ring", "unknown K format",
                                  "a long prompt"])
def test_a_wrong_option_is_an_object_with_json(name):
    done = runner.run(*USAGE[name], "--json", code=2, timeout=10)
    error = done.json["error"]
    assert error["status"] == "usage" and error["what"]


def test_errors_are_one_line_with_place_and_reason(stories):
    for args, code in ((["plan", "/nowhere.gguf"], 6), (["run", stories, "-p", WORDS * 10, "-c",
                                                         "64"], 2)):
        where, what = runner.error_of(runner.run(*args, code=code))
        assert where.strip() and what.strip()


def test_a_prompt_too_long_says_how_long(stories):
    where, what = runner.error_of(runner.run("run", stories, "-c", 64, "-p", WORDS * 10, code=2))
    assert "64" in where + what


def test_help_and_version_go_to_stdout():
    assert b"run" in runner.run("--help").out
    assert re.search(rb"\d+\.\d+\.\d+", runner.run("--version").out)
    for command in ("plan", "run", "check", "ppl", "score", "inspect", "tokenize", "bench"):
        assert b"--json" in runner.run(command, "--help").out


@pytest.mark.parametrize("ctx", [10**9, 10**10, 10**11, 10**12])
def test_a_context_larger_than_memory_does_not_fit(stories, ctx):
    thing = runner.run("plan", "--json", stories, "-c", ctx, code=4).json
    assert thing["budget"]["fits"] is False and len(thing["suggestions"]) >= 2
    done = runner.run("run", stories, "-c", ctx, "-p", "a", code=4)
    assert runner.error_of(done)
    assert runner.run("check", "--json", stories, "-c", ctx, code=4).out


@pytest.mark.parametrize("ctx", [2**40, 2**53, 2**62, 2**63, 2**64 - 2])
def test_a_context_beyond_arithmetic_is_refused(stories, ctx):
    runner.run("plan", "--json", stories, "-c", ctx, code={2, 4})
    runner.run("run", stories, "-c", ctx, "-p", "a", code={2, 4})


def test_slots_beyond_memory_do_not_fit(stories):
    runner.run("plan", "--json", stories, "--slots", 4000000, "-c", 65536, code={2, 4})
    runner.run("plan", "--json", stories, "--slots", 2**32 - 1, "-c", 2**32 - 1, code={2, 4})


def test_run_without_fit_takes_nothing(stories):
    done = runner.run("run", stories, "-c", 10**9, "-p", "a", code=4)
    assert done.seconds < 2 * runner.PATIENCE
    text = done.err.decode()
    assert len(re.findall(r"(?m)^.*(?:-c \d+|-ctk|-ctv|-b \d+|--slots|--kv|-t \d+)", text)) >= 2, \
        f"fewer than two suggestions:\n{text}"


# ---- streams ----------------------------------------------------------------------------------

WRITERS = {
    "plan": ["plan"], "plan json": ["plan", "--json"], "inspect": ["inspect"],
    "inspect json": ["inspect", "--json"], "tokenize": ["tokenize", "-p", "Once upon a time"],
    "tokenize json": ["tokenize", "--json", "-p", "Once upon a time"],
    "run": ["run", "-p", "Once upon a time", "-n", "10"], "check": ["check", "-n", "4"],
    "check json": ["check", "--json", "-n", "4"], "score": ["score", "-p", WORDS],
    "help": ["--help"], "version": ["--version"], "help of run": ["run", "--help"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error(name, tmp_path):
    args = WRITERS[name]
    if name == "score":
        path = tmp_path / "t"
        path.write_text(WORDS)
        args = ["score", "--json", "-f", path]
    with open("/dev/full", "wb") as full:
        done = runner.execute(args, stdout=full)
    assert not done.faults and done.code == 6, done.show()
    assert done.err.strip()


@pytest.mark.parametrize("name", ["plan json", "run", "inspect", "check json", "help"])
def test_a_closed_pipe_is_an_error_and_no_signal(name):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = runner.execute(WRITERS[name], stdout=out)
    assert not done.faults and done.code == 6, done.show()


def test_a_closed_stdout_is_an_error():
    done = subprocess.run(["sh", "-c", 'exec "$0" plan >&-', str(runner.BINARY)],
                          stderr=subprocess.PIPE, env=runner.clean_environment(), check=False)
    assert done.returncode == 6, done


def test_a_reader_that_leaves_ends_the_run(stories):
    child = start("run", stories, "-p", "Once upon a time", "-n", 90000, "-c", 100000)
    child.stdout.read(30)
    child.stdout.close()
    code, err = finish(child, 60)
    assert code == 6, (code, err)


def test_tokens_are_flushed_as_they_come(stories):
    child = start("run", stories, "-p", "Once upon a time", "-n", 20000, "-c", 20100, "--temp", 0)
    first = child.stdout.read(1)
    try:
        assert first == b"O" and child.poll() is None
    finally:
        child.kill()
        child.communicate()


# ---- signals and files that vanish ------------------------------------------------------------

def start(*args):
    return subprocess.Popen([str(runner.BINARY), *map(str, args)], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=runner.clean_environment())


def finish(child, seconds):
    """(exit code, stderr); kills and fails when it does not end in time."""
    try:
        if child.stdout.closed:
            err = child.stderr.read()
            child.wait(seconds * runner.PATIENCE)
        else:
            _, err = child.communicate(timeout=seconds * runner.PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise AssertionError("it does not end") from None
    for word in runner.REPORTS:
        assert word not in err, err.decode("utf-8", "replace")
    return child.returncode, err


def at_work(child, seconds):
    """Lets the command work for a while; it must not be done by then."""
    time.sleep(seconds * (3 if runner.SANITIZED else 1))
    if child.poll() is not None:
        out, err = child.communicate()
        raise AssertionError(f"done too early with {child.returncode}: {out[-200:]} {err[-300:]}")


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text(WORDS * 2500)
    return path


LONG = {
    "a long prefill": ["run", "-c", "100000", "-n", "5"],
    "perplexity": ["ppl", "-c", "60000"],
    "scores": ["score", "--json", "-c", "100000"],
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interrupt_ends_the_work_with_130(name, number, long_text):
    child = start(*LONG[name], "-f", long_text)
    at_work(child, 0.8)
    sent = time.monotonic()
    child.send_signal(number)
    code, err = finish(child, 10)
    assert code == 130, (code, err)
    assert time.monotonic() - sent < 2 * runner.PATIENCE


def test_an_interrupt_in_decode_keeps_what_was_said(stories):
    child = start("run", stories, "-p", "Once upon a time", "-n", 90000, "-c", 100000, "--temp",
                  0)
    first = child.stdout.read(len(STORY))
    child.send_signal(signal.SIGINT)
    code, err = finish(child, 10)
    assert code == 130, (code, err)
    assert STORY.startswith(first.decode()[:60])


def test_an_interrupt_ends_check_and_bench(stories):
    for args in (["check", "-n", "90000", "-c", "100000"],
                 ["bench", "-n", "90000", "-p", "0", "-r", "5"]):
        child = start(*args, stories)
        at_work(child, 0.8)
        child.send_signal(signal.SIGINT)
        code, err = finish(child, 20)
        assert code == 130, (args, code, err)


def test_a_second_interrupt_does_no_harm(long_text):
    child = start(*LONG["a long prefill"], "-f", long_text)
    at_work(child, 0.5)
    for _ in range(5):
        child.send_signal(signal.SIGINT)
        time.sleep(0.01)
    code, err = finish(child, 10)
    assert code in (130, -signal.SIGINT), (code, err)


@pytest.mark.parametrize("length", [0, 100, 4096, 300_000])
@pytest.mark.parametrize("command", ["run", "check", "ppl"])
def test_a_model_file_that_shrinks_is_named(command, length, tmp_path, stories, long_text):
    model = tmp_path / "shrinking.gguf"
    shutil.copy(stories, model)
    args = {"run": ["run", model, "-f", long_text, "-n", "5", "-c", "100000"],
            "check": ["check", model, "-n", "90000", "-c", "100000"],
            "ppl": ["ppl", model, "-f", long_text, "-c", "60000"]}[command]
    child = start(*args)
    at_work(child, 0.7)
    os.truncate(model, length)
    code, err = finish(child, 30)
    assert code == 6, (code, err)
    lines = runner.ERROR_LINE.findall(err)
    assert len(lines) == 1 and b"shrinking.gguf" in b": ".join(lines[0]), err


def test_a_model_file_that_is_replaced_does_no_harm(tmp_path, stories):
    model = tmp_path / "m.gguf"
    shutil.copy(stories, model)
    child = start("run", model, "-p", "Once upon a time", "-n", 3000, "-c", 4000, "--temp", 0)
    child.stdout.read(20)
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    os.replace(other, model)
    code, err = finish(child, 60)
    assert code == 0, (code, err)
