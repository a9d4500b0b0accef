"""What people and scripts may rely on at the command line: words, streams, exit codes, objects.

The command is run as it is; its objects are held against docs/schema/. Signals and files that
shrink are tried on runs that are long enough to be hit in the middle.
"""
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time

import jsonschema
import pytest

import runner
from runner import error_of

STORY = ("Once upon a time, there was a little girl named Lily. She loved to play outside in the "
         "park. One day, she saw a big, red ball. She wanted to play with it, but it was too high."
         "\nLily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to "
         "do")
LONG = ["-c", "120000", "-n", "110000"]  # minutes of work for the story model


def schema(name):
    return json.loads((runner.ROOT / f"docs/schema/{name}.json").read_text("utf-8"))


def valid(name, thing):
    jsonschema.validate(thing, schema(name), cls=jsonschema.Draft202012Validator)
    return thing


def start(*args, stdout=subprocess.PIPE):
    return subprocess.Popen([runner.BINARY, *map(str, args)], stdin=subprocess.DEVNULL,
                            stdout=stdout, stderr=subprocess.PIPE,
                            env=runner.clean_environment())


def wait_until_busy(child, seconds=0.4):
    """Waits until the child has used some processor time: it is past opening then."""
    ticks = os.sysconf("SC_CLK_TCK")
    deadline = time.monotonic() + 30 * runner.PATIENCE
    while time.monotonic() < deadline and child.poll() is None:
        with open(f"/proc/{child.pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        if (int(fields[11]) + int(fields[12])) / ticks >= seconds * runner.PATIENCE:
            return
        time.sleep(0.02)
    pytest.fail("the command ended, or never got to work")


# ---- words ---------------------------------------------------------------------------------------


def test_version_and_help_go_to_stdout(run):
    assert run("--version").text.startswith("ringfence ")
    overview = run("--help").text
    for command in ("plan", "run", "chat", "check", "bench", "ppl", "score", "tokenize", "inspect",
                    "kernels"):
        assert command in overview
        text = run("help", command).text
        assert text == run(command, "--help").text
        assert "RINGFENCE_" in text


def test_help_offers_nothing_that_is_not_built(run):
    text = "".join(run("help", command).text for command in ("run", "chat", "plan", "check", "ppl"))
    for option in ("--port", "--seal"):
        assert option not in text


@pytest.mark.parametrize("args, named", [
    ([], "COMMAND"),
    (["frobnicate"], "frobnicate"),
    (["--frob"], "--frob"),
    (["help", "frob"], "frob"),
    (["run", "--frob"], "--frob"),
    (["run", "-z"], "-z"),
    (["run", "-c"], "-c"),
    (["run", "-c", "abc"], "-c"),
    (["run", "-c", "12x"], "-c"),
    (["run", "-c", ""], "-c"),
    (["run", "-c", "-5"], "-c"),
    (["run", "-c", "0x10"], "-c"),
    (["run", "-c", "99999999999999999999999"], "-c"),
    (["run", "-n", "-2"], "-n"),
    (["run", "-n", "1.5"], "-n"),
    (["run", "--temp", "nan"], "--temp"),
    (["run", "--temp", "inf"], "--temp"),
    (["run", "--temp", "-1"], "--temp"),
    (["run", "--temp=1e400"], "--temp"),
    (["run", "--top-p", "1.5"], "--top-p"),
    (["run", "--min-p", "2"], "--min-p"),
    (["run", "--seed", "-1"], "--seed"),
    (["run", "--seed", "18446744073709551616"], "--seed"),
    (["run", "-t", "1000"], "-t"),
    (["run", "-b", "0"], "-b"),
    (["run", "-b", "4000", "-c", "64"], "-b"),
    (["run", "-p", "-n", "5"], "-p"),
    (["run", "-p", "x", "-f", "y"], "-f"),
    (["run", "-q=1"], "-q=1"),
    (["run", "--quiet=1"], "--quiet"),
    (["run", "a", "b"], "b"),
    (["run", "-m", "a", "b"], "b"),
    (["run", ""], "MODEL"),
    (["run", "-p", "", "--no-bos"], "-p"),
    (["plan", "-n", "5"], "-n"),
    (["plan", "--solve", "layers"], "--solve"),
    (["plan", "-ctk", "q9_9"], "-ctk"),
    (["plan", "-ctv", "q9_9"], "-ctv"),
    (["plan", "--cpu", "z80"], "--cpu"),
    (["plan", "--mem-limit", "many"], "--mem-limit"),
    (["plan", "--mem-limit", "0"], "--mem-limit"),
    (["plan", "--profile", "toaster"], "--profile"),
    (["plan", "--slots", "0"], "--slots"),
    (["run", "-np", "2"], "-np"),
    (["ppl", "--slots", "2"], "--slots"),
    (["tokenize"], "-f"),
    (["score"], "-f"),
    (["ppl"], "-f"),
    (["bench", "-p", "12,"], "-p"),
    (["bench", "-p", "1,x"], "-p"),
    (["bench", "-o", "xml"], "-o"),
    (["bench", "-c", "16", "-p", "64"], "-c"),
    (["kernels", "file.gguf"], "file.gguf"),
])
def test_wrong_words_end_with_2_and_name_the_option(run, args, named):
    done = run(*args, code=2)
    where, _ = error_of(done)
    assert where == named, done.show()
    assert done.out == b""


def test_every_long_option_has_a_variable_and_the_command_line_wins(run):
    ctx = valid("plan", run("plan", "--json", env={"RINGFENCE_CTX": "64"}).json)["options"]["ctx"]
    assert ctx == 64
    done = run("plan", "--json", "-c", "32", env={"RINGFENCE_CTX": "64"})
    assert done.json["options"]["ctx"] == 32
    where, _ = error_of(run("plan", env={"RINGFENCE_CTX": "6x"}, code=2))
    assert where == "RINGFENCE_CTX"
    assert run("plan", env={"RINGFENCE_JSON": "1"}).json["schema"] == 1
    done = run("tokenize", "-p", "a", env={"RINGFENCE_FILE": "/nonexistent"})
    assert done.code == 0


def test_help_has_no_variable(run):
    assert run("tokenize", "-p", "a", env={"RINGFENCE_HELP": "1"}).text.startswith("1 ")
    assert "RINGFENCE_HELP" not in run("help", "run").text


def test_no_table_has_blanks_at_its_end(run):
    for args in (["plan"], ["plan", "--list", "*"], ["check", "-n", "4"], ["check", "--list", "*"],
                 ["inspect"], ["kernels"], ["score", "-p", "Once upon"], ["tokenize", "-p", "a"]):
        for line in run(*args).text.splitlines():
            assert line == line.rstrip(" "), (args, line)


def test_long_and_short_and_joined_forms_are_the_same(run):
    plans = [run("plan", "--json", *form).json["totals"] for form in
             (["-c", "96"], ["--ctx", "96"], ["--ctx=96"], ["--ctx-size", "96"])]
    assert all(totals == plans[0] for totals in plans)


# ---- streams and failures ------------------------------------------------------------------------


@pytest.mark.parametrize("args, code, status", [
    (["plan", "/nonexistent/model.gguf"], 6, "io"),
    (["plan", "/"], 6, "io"),
    (["inspect", "/dev/null"], {3, 6}, None),
    (["run", "-f", "/nonexistent/text"], 6, "io"),
    (["run", "--frob"], 2, "usage"),
    (["run", "-p", "Once upon a time", "-c", "3"], 2, "usage"),
    (["run", "-p", "x", "--mem-limit", "1M"], 4, "no_fit"),
    (["ppl", "--kl-base", "/nonexistent/base.kld"], 6, "io"),
])
def test_a_failure_is_one_line_and_with_json_one_object(run, args, code, status):
    done = run(*args, "--json", "-q", code=code)
    where, what = error_of(done)
    error = valid("error", done.json)["error"]
    assert error["where"] == where and what.startswith(error["what"])
    if status:
        assert error["status"] == status


def test_an_unwritable_stdout_ends_with_6(run):
    for args in (["run", "-p", "Once", "-n", "5"], ["plan"], ["plan", "--json"], ["inspect"],
                 ["--help"], ["tokenize", "-p", "a"], ["kernels"]):
        with open("/dev/full", "wb") as full:
            done = run(*args, code=6, stdout=full)
        assert error_of(done)[0] == "stdout"


def test_a_closed_pipe_ends_with_6():
    reading, writing = os.pipe()
    child = start("run", "-p", "Once upon a time", "-n", "100", stdout=writing)
    os.close(writing)
    os.close(reading)
    _, err = child.communicate(timeout=60 * runner.PATIENCE)
    assert child.returncode == 6, err
    assert b"ringfence: error: stdout: " in err


def test_quiet_silences_all_but_errors(run):
    assert run("run", "-q", "-p", "Once upon a time", "-n", "5").err == b""
    assert run("run", "-p", "Once upon a time", "-n", "5").err != b""
    assert run("run", "-q", "--frob", code=2).err != b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("args", [["check", *LONG], ["run", "-f", "TEXT", "-c", "120000"]])
def test_an_interrupt_ends_with_130(args, number, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"Once upon a time there was a little girl. " * 9000)
    child = start(*[text if arg == "TEXT" else arg for arg in args], stdout=subprocess.DEVNULL)
    wait_until_busy(child)
    child.send_signal(number)
    asked = time.monotonic()
    _, err = child.communicate(timeout=60 * runner.PATIENCE)
    assert child.returncode == 130, err
    assert time.monotonic() - asked < 5 * runner.PATIENCE
    assert err.count(b"ringfence: error: ") == 1


def test_an_interrupt_ends_a_write_that_nobody_reads(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"Once upon a time there was a little girl. " * 9000)
    child = start("run", "-f", text, "-c", "120000")  # its stdout is a pipe, and soon full
    time.sleep(0.5 * runner.PATIENCE)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20 * runner.PATIENCE) == 130
    child.communicate()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_shrinks_is_reported_by_name(stories, tmp_path, threads):
    for attempt in range(4):
        model = tmp_path / f"shrinks-{attempt}.gguf"
        model.write_bytes(stories.read_bytes())
        child = start("check", model, "-t", threads, *LONG)
        wait_until_busy(child, 0.2)
        os.truncate(model, 16384)
        _, err = child.communicate(timeout=60 * runner.PATIENCE)
        assert child.returncode == 6, err
        assert f"ringfence: error: {model}: ".encode() in err


# ---- plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, expected", [("f16", 327680), ("f32", 655360)])
def test_the_kv_line_is_exact(run, stories, kind, expected):
    plan = valid("plan", run("plan", stories, "-c", "512", "-ctk", kind, "-ctv", kind,
                             "--json").json)
    rows = [row for row in plan["rows"] if row["id"].startswith("kv.layers")]
    assert plan["totals"]["kv_bytes"] == expected == sum(row["bytes"] for row in rows)
    assert sorted(row["id"] for row in rows) == [f"kv.layers[{i}].{side}" for i in range(5)
                                                 for side in "kv"]
    assert str(expected) in run("plan", stories, "-c", "512", "-ctk", kind, "-ctv", kind).text


def test_the_rows_of_the_model_scope_sum_to_the_total(run):
    plan = run("plan", "--json").json
    rows, totals = plan["rows"], plan["totals"]
    own = sum(row["bytes"] for row in rows if row["domain"] == "ANON" and row["scope"] != "FORWARD")
    file = sum(row["bytes"] for row in rows if row["domain"] == "FILE")
    assert own + totals["forward_bytes"] == totals["anon_bytes"]
    assert file == totals["file_bytes"]
    assert totals["anon_bytes"] + totals["file_bytes"] == totals["total_bytes"]


def test_a_plan_lists_regions_by_glob_with_literal_brackets(run):
    lines = run("plan", "--list", "kv.layers[*].k").text.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [f"kv.layers[{i}].k" for i in range(5)]
    lines = run("plan", "--list", "kv.layers[?].v").text.splitlines()[1:]
    assert len(lines) == 5
    assert len(run("plan", "--list", "nothing").text.splitlines()) == 1


def test_a_plan_that_does_not_fit_prints_all_the_same_and_ends_with_4(run):
    plan = valid("plan", run("plan", "--json", "--mem-limit", "1M", code=4).json)
    assert not plan["budget"]["fits"] and plan["budget"]["source"] == "mem_limit"
    assert len(plan["suggestions"]) >= 2
    text = run("plan", "--mem-limit", "1M", code=4).text
    assert "does not fit" in text and text.count("saves") >= 2


def test_a_plan_names_the_ops_between_which_regions_live(run):
    plan = run("plan", "--json").json
    ops = plan["ops"]
    assert ops[0] == "rope_table" and ops[-1] == "head.logits"
    rows = {row["id"]: row for row in plan["rows"]}
    assert ops[rows["forward.logits"]["first_op"]] == "head.logits"
    assert max(row["last_op"] for row in plan["rows"]) == len(ops) - 1
    picture = subprocess.run([sys.executable, runner.ROOT / "tools/draw-plan"], check=True,
                             input=json.dumps(plan).encode(), stdout=subprocess.PIPE).stdout
    assert b"mlp.gate_up" in picture and b"every one of 5 layers" in picture


def test_a_plan_assumes_the_text_that_an_ordinary_run_has(run, tmp_path):
    planned = run("plan", "--json").json["totals"]
    assert planned["tables_bytes"] < planned["weights_bytes"]
    checked = run("check", "--json", "-c", "128", "-n", "1").json
    assert {row["id"]: row["bytes"] for row in run("plan", "--json").json["rows"]} == {
        row["id"]: row["planned_bytes"] for row in checked["rows"]}
    text = tmp_path / "text"
    text.write_bytes(b"Once upon a time. " * 1000)
    assert run("run", "-f", text, "-c", "20000", "-n", "1").code == 0


def test_solve_finds_the_largest_context_that_fits(run):
    solved = run("plan", "--json", "--solve", "ctx", "--mem-limit", "8M").json
    ctx = solved["options"]["ctx"]
    assert solved["budget"]["fits"] and ctx > 128
    run("plan", "--mem-limit", "8M", "-c", ctx)
    run("plan", "--mem-limit", "8M", "-c", ctx + 1, code=4)


def test_a_plan_needs_the_header_only(run, stories, tmp_path):
    info = run("inspect", stories, "--json").json
    header = tmp_path / "header.gguf"
    header.write_bytes(stories.read_bytes()[:info["data_offset"]])
    plan = valid("plan", run("plan", header, "--json").json)
    assert plan["model"]["data_missing"]
    assert plan["totals"]["weights_bytes"] == run("plan", stories,
                                                  "--json").json["totals"]["weights_bytes"]
    assert plan["notes"] and plan["notes"][-1] in run("plan", header).text
    run("run", header, "-p", "a", code=3)


# ---- run -----------------------------------------------------------------------------------------


def test_the_story_comes_out_with_the_prompt_first_and_no_newline(run, stories):
    done = run("run", "-m", stories, "-p", "Once upon a time", "-n", "100", "--temp", "0")
    assert done.text == STORY
    assert run("run", "-p", "Once upon a time", "-n", "100", "--temp", "0").text == STORY


@pytest.mark.parametrize("options", [["-t", "1"], ["-t", "3"], ["-b", "1"], ["-b", "3"],
                                     ["-c", "105"]])
def test_threads_and_chunks_do_not_change_the_text(run, options):
    assert run("run", "-p", "Once upon a time", "-n", "100", "--temp", "0",
               *options).text == STORY


def test_a_prompt_is_echoed_to_its_last_byte(run, tmp_path):
    text = "  Zoë said\n\n \"hi\" ".encode() + b"\x00\xff end \n"
    path = tmp_path / "prompt"
    path.write_bytes(text)
    for args, stdin in ((["-f", path], None), (["-f", "-"], text)):
        done = run("run", *args, "-n", "0", stdin=stdin)
        assert done.out == text
    assert run("run", "-f", path, "-n", "4").out.startswith(text)


def test_an_empty_prompt_starts_at_bos(run):
    text = run("run", "-p", "", "-n", "20", "--temp", "0").text
    assert text == run("run", "-n", "20", "--temp", "0").text
    assert text and not text.startswith(" ")


def test_a_full_ring_stops_with_a_word_and_loses_nothing(run):
    done = run("run", "-p", "Once upon a time", "-n", "100", "--temp", "0", "-c", "32")
    assert STORY.startswith(done.text) and len(done.text) > 60
    assert b"context of 32 tokens is full" in done.err


def test_a_seed_fixes_the_text_and_a_drawn_one_is_printed(run):
    args = ["run", "-p", "Once upon a time", "-n", "30"]
    first = run(*args)
    seed = [line.split()[-1] for line in first.err.decode().splitlines() if " seed " in line]
    assert len(seed) == 1
    assert run(*args, "--seed", seed[0]).out == first.out
    texts = {run(*args, "--seed", str(number)).out for number in range(6)}
    assert len(texts) > 1


def test_run_gives_one_object_with_json(run):
    done = valid("run", run("run", "-p", "Once upon a time", "-n", "100", "--temp", "0",
                            "--json").json)
    assert done["prompt"] + done["text"] == STORY
    assert done["stop"] == "limit" and done["tokens"] == 100


@pytest.mark.parametrize("prompt, newline", [("Once", b"\n"), ("Once", b"")])
def test_the_summary_begins_a_line_where_both_streams_are_one(prompt, newline):
    one = subprocess.STDOUT if newline else subprocess.PIPE
    done = subprocess.run([runner.BINARY, "run", "-p", prompt, "-n", "5", "--temp", "0"],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=one,
                          env=runner.clean_environment(), check=True)
    text, summary = (done.stdout, b"") if newline else (done.stdout + done.stderr, done.stderr)
    assert b"\n\n" not in text
    assert newline + b"ringfence: prompt: " in text
    assert summary == b"" or summary.startswith(b"ringfence: ")


def test_a_short_time_is_no_rate(run):
    line = run("run", "-p", "Once upon a time", "-n", "5", "--temp", "0").err.splitlines()[0]
    assert b"prompt: 5 tokens, " in line and line.count(b" ms") == 2 and b"t/s" not in line


def test_a_file_that_is_cut_off_is_said_once(run, stories, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(stories.read_bytes()[:300000])
    for command in ("run", "check"):
        assert len(run(command, cut, "-p", "a", code=3).err.splitlines()) == 1


def test_chat_needs_a_format_and_says_so(run):
    where, _ = error_of(run("chat", "-p", "hello", code=3))
    assert where == "tokenizer.chat_template"


# ---- check ---------------------------------------------------------------------------------------


def test_check_finds_no_drift(run):
    check = valid("check", run("check", "--json").json)
    assert check["verdict"] == "ok" and not check["findings"]
    assert check["decode"]["tokens"] == 256
    assert check["decode"]["allocations"] == 0
    assert all(row["planned_bytes"] == row["taken_bytes"] for row in check["rows"])
    for scope in check["scopes"].values():
        assert scope["planned_bytes"] == scope["taken_bytes"] == scope["freed_bytes"]
    written = {row["id"]: row["written_bytes"] for row in check["rows"]}
    assert written["kv.layers[0].k"] > 0
    assert "verdict        ok" in run("check").text


def test_check_says_which_plan_it_checks(run):
    check = run("check", "--json", "-p", "Once upon a time", "-n", "300").json
    assert check["options"]["ctx"] == check["prompt"]["tokens"] + 300 == 305
    done = run("check", "-p", "Once upon a time", "-n", "300")
    assert done.text.startswith("options  ctx 305, 1 slot, ")
    assert done.err == b"" or b"built with a sanitizer" in done.err
    assert "5 + 300" in done.text.splitlines()[0]
    done = run("check", "-c", "305", "-n", "4")
    assert b"note: ctx 305 is above" in done.err  # asked for, so there is a word


def test_check_counts_the_decode_apart_from_the_prompt(run):
    args = ["check", "--json", "-c", "256", "-ctk", "f16", "-ctv", "f16"]
    one, ten = (run(*args, "-n", count).json for count in ("1", "10"))
    assert one["prompt"] == ten["prompt"]
    assert ten["decode"]["adapters"] == 10 * one["decode"]["adapters"]
    none = run(*args, "-n", "0").json["decode"]
    assert not any(none.values())


def test_check_measures_what_the_system_saw(run, sanitized):
    done = run("check", "--json", "-c", "2048", "-n", "256")
    check = done.json
    if sanitized:
        assert b"sanitizer" in done.err
        return
    assert check["decode"]["minor_faults"] == check["decode"]["major_faults"] == 0
    plan = run("plan", "--json", "-c", "2048").json["totals"]
    process = check["process"]
    grown = process["open_bytes"] - process["before_bytes"]
    assert abs(grown - plan["anon_bytes"]) <= max(plan["anon_bytes"] // 100, 262144)
    assert abs(process["closed_bytes"] - process["before_bytes"]) <= 262144


@pytest.mark.parametrize("threads", [2, 4])
def test_check_counts_in_every_thread(run, threads):
    check = run("check", "--json", "-t", threads).json
    assert check["verdict"] == "ok", check["findings"]


def test_a_planted_allocation_in_decode_is_caught(run, plant_malloc):
    done = run("check", "--json", "-q", code=5, binary=plant_malloc)
    check = valid("check", done.json)
    assert check["verdict"] == "drift" and check["decode"]["allocations"] >= 256
    assert any(finding["where"] == "decode" for finding in check["findings"])


def test_a_planted_byte_is_caught(run, plant_byte):
    check = valid("check", run("check", "--json", "-q", code=5, binary=plant_byte).json)
    assert check["verdict"] == "drift" and check["findings"]
    assert "DRIFT" in run("check", code=5, binary=plant_byte).text


# ---- ppl and score -------------------------------------------------------------------------------

EXACT = ["-c", "128", "-ctk", "f32", "-ctv", "f32"]


def test_perplexity_meets_the_reference(run, kjv, shared):
    base = shared / "reference/stories260k-kjv-c128x20.kld"
    done = valid("ppl", run("ppl", "-f", kjv, *EXACT, "--chunks", "20", "--kl-base", base,
                            "--json").json)
    assert abs(done["perplexity"] / 40.2901 - 1) < 2e-4
    assert done["chunks"] == 20 and done["ctx"] == 128 and done["tokens"] == 20 * 63
    assert done["kl"]["mean"] <= 1e-5 and done["kl"]["top1"] > 0.999
    assert abs(done["kl"]["ppl_ratio"] - 1) < 1e-4
    same = run("ppl", *EXACT, "--kl-base", base, "--json").json  # the base's own tokens
    assert same == done


@pytest.mark.parametrize("options", [["-b", "1"], ["-b", "7"], ["-t", "3"]])
def test_perplexity_does_not_depend_on_chunks_and_threads(run, kjv, options):
    args = ["ppl", "-f", kjv, "-c", "128", "--chunks", "3", "--json"]
    assert run(*args, *options).json == run(*args).json


def test_saved_logits_are_read_back(run, kjv, tmp_path):
    saved = tmp_path / "saved.kld"
    args = ["ppl", "-c", "64", "--chunks", "4", "--json"]
    run(*args, "-f", kjv, "--kl-save", saved)
    data = saved.read_bytes()
    assert data[:8] == b"_logits_"
    assert struct.unpack("<3i", data[8:20]) == (64, 512, 4)
    assert len(data) == 20 + 4 * 4 * 64 + 4 * 31 * (512 + 4) * 2
    kl = run(*args, "-f", kjv, "--kl-base", saved).json["kl"]
    assert abs(kl["mean"]) < 1e-5 and kl["top1"] == 1


def test_a_base_of_another_text_is_refused_with_the_position(run, kjv, shared, tmp_path):
    base = shared / "reference/stories260k-kjv-c128x20.kld"
    other = tmp_path / "other"
    other.write_bytes(b"Once upon a time. " * 2000)
    where, what = error_of(run("ppl", "-f", other, *EXACT, "--kl-base", base, code=2))
    assert where == str(base) and "position 1" in what
    error_of(run("ppl", "-f", kjv, "-c", "64", "--kl-base", base, code=2))
    broken = tmp_path / "broken.kld"
    for size in (0, 7, 8, 19, 20, 500, 1310579):
        broken.write_bytes(base.read_bytes()[:size])
        error_of(run("ppl", "-f", kjv, *EXACT, "--kl-base", broken, code=6))
    broken.write_bytes(b"_logits_" + struct.pack("<3i", 2**31 - 1, 2**31 - 1, 2**31 - 1))
    error_of(run("ppl", "-f", kjv, *EXACT, "--kl-base", broken, code=6))


def test_a_text_shorter_than_a_chunk_is_refused(run):
    error_of(run("ppl", "-p", "Once", code=2))


def test_scores_are_log_probabilities_of_each_token(run):
    args = ["score", "-p", "Once upon a time, there was a little girl", "--json", "--top", "3"]
    done = run(*args)
    lines = [valid("score", line) for line in done.lines]
    ids = run("tokenize", "-p", "Once upon a time, there was a little girl").text.split()
    assert [str(line["id"]) for line in lines] == ids[1:]
    assert [line["pos"] for line in lines] == list(range(1, len(ids)))
    for line in lines:
        tops = [top["logprob"] for top in line["top"]]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert line["logprob"] <= tops[0]
    assert sum(line["logprob"] for line in lines) > -15
    assert run(*args, "-b", "2").out == done.out
    full = run("score", "-p", "Once", "--json", "--top", "512").lines[0]["top"]
    assert math.isclose(sum(math.exp(top["logprob"]) for top in full), 1, rel_tol=1e-6)
    error_of(run(*args, "-c", "4", code=2))


# ---- the rest ------------------------------------------------------------------------------------


def test_tokenize_prints_ids_pieces_and_objects(run):
    ids = run("tokenize", "-p", "Once upon a time").text
    assert ids == "1 403 407 261 378\n"
    tokens = valid("tokenize", run("tokenize", "-p", "Once upon a time", "--json").json)["tokens"]
    assert [token["id"] for token in tokens] == [1, 403, 407, 261, 378]
    assert "".join(token["text"] for token in tokens[1:]).strip() == "Once upon a time"
    pieces = run("tokenize", "-p", "Once upon a time", "--pieces").text.splitlines()
    assert [line.split()[0] for line in pieces] == ["1", "403", "407", "261", "378"]
    assert run("tokenize", "-p", "Once", "--no-bos").text == "403\n"
    assert run("tokenize", "-p", "", "--no-bos").text == "\n"


def test_special_tokens_in_a_text_can_stay_text(run):
    parsed = run("tokenize", "-p", "a</s>b").text.split()
    plain = run("tokenize", "-p", "a</s>b", "--no-special").text.split()
    assert "2" in parsed and "2" not in plain


def test_tokenize_works_on_a_vocabulary_without_tensors(run, shared):
    text = run("tokenize", shared / "vocab/ggml-vocab-gpt-2.gguf", "-p", "Hello world").text
    assert text.split() == ["15496", "995"]


def test_inspect_shows_keys_and_tensors(run, stories):
    info = valid("inspect", run("inspect", stories, "--json").json)
    keys = {key["name"]: key for key in info["keys"]}
    assert keys["general.architecture"]["value"] == "llama"
    assert keys["tokenizer.ggml.tokens"]["count"] == 512
    tensor = {tensor["name"]: tensor for tensor in info["tensors"]}["blk.3.attn_q.weight"]
    assert tensor["id"] == "model.layers[3].attn.q_proj.weight"
    assert tensor["shape"] == [64, 64] and tensor["bytes"] == 64 * 64 * 4
    assert "blk.3.attn_q.weight" in run("inspect", stories).text


def test_kernels_are_listed_with_one_chosen_for_each_job(run):
    kernels = valid("kernels", run("kernels", "--json").json)["kernels"]
    chosen = [(kernel["job"], kernel["format"], kernel["act"]) for kernel in kernels
              if kernel["chosen"]]
    assert len(chosen) == len(set(chosen)) and ("matmul", "f32", "f32") in chosen
    scalar = run("kernels", "--json", "--cpu", "scalar").json["kernels"]
    assert {kernel["cpu"] for kernel in scalar if kernel["chosen"]} == {"scalar"}
    assert "chosen" in run("kernels").text


def test_bench_gives_one_object_a_line(run):
    lines = run("bench", "--json", "-p", "8,16", "-n", "4,0", "-d", "0,8", "-r", "2").lines
    for line in lines:
        valid("bench", line)
    assert [(line["test"], line["depth"]) for line in lines] == [
        ("pp8", 0), ("pp16", 0), ("tg4", 0), ("pp8", 8), ("pp16", 8), ("tg4", 8)]
    for line in lines:
        assert line["tokens_per_s_min"] <= line["tokens_per_s"] <= line["tokens_per_s_max"]
        assert (line["bandwidth_share"] is None) == line["test"].startswith("pp")
    table = run("bench", "-p", "8", "-n", "4", "-r", "1").text
    assert "| pp8 " in table and "| tg4 " in table
    csv = run("bench", "-p", "8", "-n", "4", "-r", "1", "-o", "csv").text.splitlines()
    assert len(csv) == 3 and {line.count(",") for line in csv} == {13}


def test_bench_states_the_price_of_speed(run, kjv, tmp_path):
    base = tmp_path / "base.kld"
    run("ppl", "-f", kjv, *EXACT, "--chunks", "2", "--kl-save", base)
    last = run("bench", "--json", "-p", "8", "-n", "0", "-r", "1", "--kl", base).lines[-1]
    assert valid("bench", last)["test"] == "kl" and last["kl_mean"] < 1e-4
    assert "KL against" in run("bench", "-p", "8", "-n", "0", "-r", "1", "--kl", base).text


@pytest.mark.slow
def test_chat_answers_and_ends(run, smollm2):
    done = run("chat", smollm2, "-p", "What is the capital of France?", "--temp", "0",
               timeout=300)
    assert "Paris" in done.text and "<|im_end|>" not in done.text
    done = run("chat", smollm2, "--temp", "0", "--sys", "You are a helpful assistant.",
               stdin=b"What is the capital of France?\n/clear\nSay hello.\n", timeout=300)
    assert "Paris" in done.text.splitlines()[0] and len(done.text.splitlines()) >= 2


@pytest.mark.slow
def test_a_file_that_shrinks_is_reported_from_every_thread(smollm2, tmp_path):
    model = tmp_path / "shrinks.gguf"
    for attempt in range(8):
        model.write_bytes(smollm2.read_bytes())
        child = start("bench", model, "-p", "0", "-n", "400", "-r", "50", "-c", "512", "-t", "4",
                      stdout=subprocess.DEVNULL)
        wait_until_busy(child, 0.3 + 0.03 * attempt)
        os.truncate(model, 60_000_000)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 6, f"exit {child.returncode}: {err!r}"
        assert f"ringfence: error: {model}: ".encode() in err
