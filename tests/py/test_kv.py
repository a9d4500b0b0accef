"""The KV store as the command shows it: formats, presets, single layers, calibration, divergence.

ctest: serial (resident memory is measured here)
"""
import json
import os
import re
import signal
import subprocess

import jsonschema
import pytest
import runner

FORMATS = ["f32", "f16", "bf16", "r8", "r6", "r5", "r4", "r3"]
ROTATED = FORMATS[3:]
PRESETS = {"safe-lowbit": ("r8", "r4"), "balanced": ("r4", "r4"), "experimental-max": ("r3", "r3")}
KV_ROW = re.compile(r"^kv\.layers\[(\d+)\]\.([kv])$")
LAYERS = 5
TEXT = ("The dog ran to the tree and sat down under it. It was a warm day, and the sun was high. "
        "A little girl came by with a red ball, and they played until the evening. ") * 12


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """An environment whose cache has nothing in it."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def calibration(tmp_path_factory, stories):
    path = tmp_path_factory.mktemp("calibration") / "stories.rfcal"
    runner.run("calibrate", stories, "--quick", "--kv-calibration", path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(TEXT)
    return path


def formats_of(*args, **options):
    """{layer: (k, v)} as a plan has them."""
    thing = runner.run("plan", "--json", *args, **options).json
    found = {}
    for row in thing["rows"]:
        named = KV_ROW.match(row["id"])
        if named:
            found.setdefault(int(named[1]), {})[named[2]] = row["format"]
    return {layer: (sides["k"], sides["v"]) for layer, sides in found.items()}


def refused(*args, code=2, **options):
    return runner.error_of(runner.run(*args, code=code, **options))


def divergence(*args, **options):
    thing = runner.run("ppl", "--kl", "--json", *args, timeout=120, **options).json
    jsonschema.validate(thing, json.loads((runner.ROOT / "docs/schema/ppl.json").read_text()))
    return thing


# ---- formats ----------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_name_says(preset):
    assert formats_of("--kv", preset) == dict.fromkeys(range(LAYERS), PRESETS[preset])


def test_a_format_that_is_given_wins_over_the_preset():
    assert formats_of("--kv", "balanced", "-ctk", "f32")[0] == ("f32", "r4")
    assert formats_of("-ctv", "r6", "--kv", "balanced")[0] == ("r4", "r6")
    environment = {"RINGFENCE_KV_K": "r6"}
    assert formats_of("--kv", "balanced", env=environment)[0] == ("r4", "r4")
    environment["RINGFENCE_KV"] = "balanced"
    assert formats_of(env=environment)[0] == ("r6", "r4")


@pytest.mark.parametrize("options,where", [(["-ctk", "q9"], "-ctk"), (["-ctv", "r16"], "-ctv"),
                                           (["--kv-layers", "0:r7"], "--kv-layers"),
                                           (["--kv-layers", "0:r8/x"], "--kv-layers")])
def test_an_unknown_format_is_refused_with_the_known_ones(options, where):
    found, what = refused("plan", *options)
    assert found == where
    for name in [*FORMATS, "q8_0", "q4_0"]:
        assert f" {name}" in what, what


def test_an_unknown_preset_is_refused_with_the_known_ones():
    where, what = refused("plan", "--kv", "best")
    assert where == "--kv" and all(name in what for name in PRESETS), what


def test_layers_have_formats_of_their_own_and_later_rows_win():
    found = formats_of("--kv", "balanced", "--kv-layers", "0:f16,1-3:r8/r6,3:f32")
    assert found == {0: ("f16", "f16"), 1: ("r8", "r6"), 2: ("r8", "r6"), 3: ("f32", "f32"),
                     4: ("r4", "r4")}


@pytest.mark.parametrize("rows", ["5:r8", "3-1:r8", "0-9:r8", "r8", "0", "0:", ":r8", "0-:r8",
                                  "0:r8/", "0:r8;1:r4", "-1:r8", "0:r8 ", "99999999999999999999:r8",
                                  "0:" + "r" * 5000])
def test_rows_of_layers_that_cannot_be_read_or_do_not_exist_are_refused(rows):
    assert refused("plan", f"--kv-layers={rows}")[0] == "--kv-layers"


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_a_format_whose_blocks_do_not_fit_the_head_is_refused(name):
    for options in (["-ctk", name], ["-ctv", name], ["--kv-layers", f"2:{name}"]):
        where, what = refused("plan", *options)
        assert where.startswith("kv.layers[") and "multiple of 32" in what and name in what
        refused("run", "-n", 1, *options)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_planned_for_a_format_is_what_is_taken(name, calibration, sanitized):
    options = ["-ctk", name, "-ctv", name, "-c", 127, "--kv-calibration", calibration]
    planned = runner.run("plan", "--json", *options).json
    checked = runner.run("check", "--json", "-n", 90, *options).json
    assert checked["verdict"] == "ok", checked["findings"]
    bytes_of = {row["id"]: row["bytes"] for row in planned["rows"] if row["scope"] != "AMBIENT"}
    for row in checked["rows"]:
        if row["id"].startswith("kv."):
            assert row["planned_bytes"] == row["taken_bytes"] == bytes_of.pop(row["id"]), row
    assert not [id_ for id_ in bytes_of if id_.startswith("kv.")]
    if not sanitized:
        assert checked["decode"]["allocations"] == 0


def test_fewer_bits_take_fewer_bytes():
    sizes = []
    for name in FORMATS:
        rows = runner.run("plan", "--json", "-c", 4096, "-ctk", name, "-ctv", name).json["rows"]
        sizes.append(sum(row["bytes"] for row in rows if KV_ROW.match(row["id"])))
    assert sizes[0] == 2 * sizes[1] == 2 * sizes[2]
    assert all(a > b for a, b in zip(sizes[2:], sizes[3:])), sizes


# ---- divergence -------------------------------------------------------------------------------

def test_f32_does_not_differ_from_itself(text):
    thing = divergence("-f", text, "-ctk", "f32", "-ctv", "f32", "-c", 64)
    assert thing["kl"] == {"against": "f32 kv", "mean": 0, "stderr": 0, "p99": 0, "p999": 0,
                           "max": 0, "top1": 1, "ppl_ratio": 1, "ppl_ratio_stderr": 0}
    assert thing["kv_bits"] == 32 and thing["by_depth"] == []


def test_a_format_costs_what_its_bits_let_expect(text, calibration):
    found = [divergence("-f", text, "-ctk", name, "-ctv", name, "-c", 128, "--kv-calibration",
                        calibration) for name in FORMATS]
    costs = [thing["kl"]["mean"] for thing in found]
    bits = [thing["kv_bits"] for thing in found]
    assert bits == sorted(bits, reverse=True) and bits[1] == 16 and bits[-1] < 5
    assert 0 < costs[1] < 1e-4 and costs[1] < costs[3] < costs[5] < costs[7] < 0.1, costs
    for thing in found:
        kl = thing["kl"]
        assert kl["mean"] <= kl["p99"] <= kl["p999"] <= kl["max"]
        assert 0.9 < kl["top1"] <= 1 and abs(kl["ppl_ratio"] - 1) < 0.1


def test_the_step_does_not_change_the_divergence(text, calibration):
    args = ["-f", text, "--kv", "balanced", "-c", 64, "--kv-calibration", calibration]
    whole, single = divergence(*args)["kl"], divergence(*args, "-b", 1)["kl"]
    threads = divergence(*args, "-b", 7, "-t", 3)["kl"]
    assert whole == single == threads


def test_without_kl_there_is_none_and_the_perplexity_is_the_same(text, calibration):
    args = ["-f", text, "--kv", "balanced", "-c", 64, "--kv-calibration", calibration]
    plain = runner.run("ppl", "--json", *args).json
    assert plain["kl"] is None and plain["kv_bits"] is None
    assert plain["perplexity"] == divergence(*args)["perplexity"]


def test_depth_is_shown_for_long_chunks(text, calibration):
    long = text.with_name("long")
    long.write_text(TEXT * 3)
    thing = divergence("-f", long, "-ctk", "r6", "-ctv", "r6", "-c", 1100, "--chunks", 1,
                       "--kv-calibration", calibration)
    rows = thing["by_depth"]
    assert [(row["from"], row["to"]) for row in rows] == [(275, 550), (550, 825), (825, 1099)]
    assert thing["tokens"] == sum(row["tokens"] for row in rows[1:])
    mean = sum(row["kl_mean"] * row["tokens"] for row in rows[1:]) / thing["tokens"]
    assert mean == pytest.approx(thing["kl"]["mean"], rel=1e-6)


def test_two_models_that_do_not_fit_together_are_refused(text):
    needed = runner.run("plan", "--json", "-c", 128).json["totals"]["total_bytes"]
    options = ["-f", text, "-c", 128, "-b", 64, "--mem-limit", needed + (64 << 10)]
    runner.run("ppl", *options)
    where, what = refused("ppl", "--kl", *options, code=4)
    assert where == "--kl" and "expected at most" in what


@pytest.mark.parametrize("options", [["--kl-base", "x"], ["--endless", "--chunks", "2"],
                                     ["--endless", "--kl-save", "x"]])
def test_what_makes_no_sense_together_is_refused(options, text):
    refused("ppl", "-f", text, "--kl", *options, code={2, 6})


# ---- calibration ------------------------------------------------------------------------------

def test_a_calibration_is_made_once_and_kept(cache, stories):
    args = ["run", stories, "-p", "Once", "-n", 40, "--temp", 0, "-ctk", "r4", "-ctv", "r4"]
    first = runner.run(*args, env=cache)
    second = runner.run(*args, env=cache)
    assert b"calibrated in" in first.err and b"calibrated" not in second.err
    assert first.out == second.out
    where = runner.run("calibrate", stories, env=cache).text.strip()
    assert where.startswith(cache["XDG_CACHE_HOME"]) and where.endswith(".rfcal")


def test_a_calibration_is_made_with_the_same_bytes_each_time(tmp_path, stories):
    for name, threads in (("a", 1), ("b", 3)):
        runner.run("calibrate", stories, "--kv-calibration", tmp_path / name, "-t", threads)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_wrong_options_are_refused_before_a_calibration_is_made(tmp_path, stories):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    refused("run", stories, "-ctk", "r4", "--kv-layers", "9:r8", env=environment)
    assert not list(tmp_path.rglob("*.rfcal"))


def test_a_plan_makes_no_calibration_and_has_room_for_it(tmp_path, stories):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    rows = runner.run("plan", stories, "--json", "-ctk", "r4", env=environment).json["rows"]
    assert any(row["id"] == "kv.layers[0].calibration" for row in rows)
    assert not list(tmp_path.rglob("*.rfcal"))


def test_off_does_without(tmp_path, stories, text):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    options = ["-ctk", "r6", "-ctv", "r6", "--kv-calibration", "off"]
    rows = runner.run("plan", stories, "--json", *options, env=environment).json["rows"]
    assert not [row for row in rows if "calibration" in row["id"]]
    thing = divergence(stories, "-f", text, "-c", 64, *options, env=environment)
    assert 0 < thing["kl"]["mean"] < 0.2
    assert not list(tmp_path.rglob("*.rfcal"))


def test_a_calibration_of_another_model_is_refused(tmp_path, stories):
    other = tmp_path / "other.gguf"
    bytes_ = bytearray(stories.read_bytes())
    bytes_[-1] ^= 1
    other.write_bytes(bytes_)
    path = tmp_path / "other.rfcal"
    runner.run("calibrate", other, "--quick", "--kv-calibration", path)
    for keys in ("r4", "f16"):
        where, what = refused("run", stories, "-n", 1, "-ctk", keys, "-ctv", "r4",
                              "--kv-calibration", path, code=3)
        assert where == str(path) and "another model" in what


def test_a_damaged_calibration_is_refused_whole(tmp_path, stories, calibration):
    good = calibration.read_bytes()
    path = tmp_path / "bad.rfcal"
    args = ["run", stories, "-n", 1, "-q", "-ctk", "r4", "--kv-calibration", path]
    path.write_bytes(good)
    runner.run(*args)
    for size in (0, 1, 8, 50, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert refused(*args, code=3)[0] == str(path), size
    path.write_bytes(good + b"\0")
    refused(*args, code=3)
    for at in (0, 9, 20, 70, 100, len(good) // 2, len(good) - 1):
        altered = bytearray(good)
        altered[at] ^= 0x10
        path.write_bytes(altered)
        assert refused(*args, code=3)[0] == str(path), at
    path.unlink()
    assert refused(*args, code=6)[0] == str(path)


# ---- rings that wrap --------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["f16", "r8", "r4"])
def test_an_endless_run_goes_on_in_constant_memory(name, calibration, sanitized):
    options = ["-c", 128, "--sinks", 4, "--endless", "-ctk", name, "-ctv", name,
               "--kv-calibration", calibration]
    done = runner.run("run", "-p", "Once upon a time", "-n", 700, "--temp", 0, "--json", *options)
    assert done.json["tokens"] == 700 and done.json["stop"] == "limit"
    checked = runner.run("check", "--json", "-n", 700, *options).json
    assert checked["verdict"] == "ok" and checked["decode"]["tokens"] == 700
    if not sanitized:
        assert checked["decode"]["allocations"] == 0


@pytest.mark.parametrize("sinks", [1, 4])
@pytest.mark.parametrize("name", ["f16", "r8", "r4"])
def test_a_ring_that_has_wrapped_costs_no_more_than_one_that_has_not(name, sinks, text,
                                                                     calibration):
    """Sinks are keys of long ago: they must be read with the mean that they were written with."""
    long = text.with_name("endless")
    long.write_text(TEXT * 3)
    thing = divergence("-f", long, "-c", 128, "--endless", "--sinks", sinks, "-ctk", name, "-ctv",
                       name, "--kv-calibration", calibration)
    costs = [row["kl_mean"] for row in thing["by_depth"]]
    assert len(costs) > 3 and max(costs[1:]) < max(10 * costs[0], 5e-3), costs
    assert thing["ctx"] == 128


def test_an_endless_ring_without_room_is_refused():
    assert refused("run", "--endless", "--sinks", 128, "-c", 128)[0] in ("--sinks", "-b")
    refused("check", "--endless", "-n", -1)


def test_ctrl_c_ends_an_endless_run():
    command = [str(runner.BINARY), "run", "--endless", "-c", "64", "--sinks", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=runner.clean_environment()) as child:
        assert len(child.stdout.read(4000)) == 4000
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        assert child.wait(20 * runner.PATIENCE) == 130


# ---- save and restore -------------------------------------------------------------------------

SAVED = [["-ctk", "f32", "-ctv", "f32"], [], ["-ctk", "r8", "-ctv", "r8"], ["--kv", "balanced"]]
SAMPLED = ["--temp", 0.9, "--seed", 7, "--repeat-penalty", 1.1]


@pytest.mark.parametrize("formats", SAVED)
@pytest.mark.parametrize("ring", [["-c", 256], ["-c", 64, "--endless", "--sinks", 3]])
def test_a_run_in_pieces_is_the_run_in_one(formats, ring, tmp_path, calibration):
    options = [*formats, *ring, "--kv-calibration", calibration, "-q"]
    prompt = ["-p", "Once upon a time, ünder"]
    whole = runner.run("run", *prompt, "-n", 150, *SAMPLED, *options).out
    kept = tmp_path / "slot"
    pieces = runner.run("run", *prompt, "-n", 1, "--save", kept, *SAMPLED, *options).out
    for count in (0, 49, 1, 70, 29):
        pieces += runner.run("run", "--restore", kept, "--save", kept, "-n", count, *options).out
    assert pieces == whole


def test_a_prompt_may_be_read_now_and_continued_later(tmp_path):
    kept = tmp_path / "slot"
    prompt = ["-p", "Lily and Tom went to the park"]
    whole = runner.run("run", *prompt, "-n", 40, *SAMPLED, "-q").out
    first = runner.run("run", *prompt, "-n", 0, "--save", kept, *SAMPLED, "-q").out
    assert first + runner.run("run", "--restore", kept, "-n", 40, "-q").out == whole


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    kept = tmp_path / "slot"
    args = ["run", "-p", "Once", "--endless", "-c", "64", "--sinks", "2", "--temp", "0.8",
            "--seed", "3"]
    command = [str(runner.BINARY), *args, "--save", str(kept)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=runner.clean_environment()) as child:
        out = child.stdout.read(3000)
        child.send_signal(signal.SIGINT)
        out += child.stdout.read()
        assert child.wait(20 * runner.PATIENCE) == 130
    more = runner.run("run", "--restore", kept, "-n", 300, "--endless", "-c", 64, "--sinks", 2,
                      "-q")
    whole = runner.run(*args, "-n", 300 + len(out), "-q", timeout=120).out
    assert whole.startswith(out + more.out)


def test_an_ended_text_stays_ended(tmp_path):
    kept = tmp_path / "slot"
    first = runner.run("run", "-p", "Once", "--temp", 0, "-n", 60, "-c", 32, "--save", kept,
                       "--json")
    assert first.json["stop"] == "ring"
    again = runner.run("run", "--restore", kept, "-c", 32, "--json").json
    assert again["stop"] == "ring" and again["text"] == "" and again["seed"] is None
    more = runner.run("run", "--restore", kept, "-c", 64, "-n", 5, "--json").json
    whole = runner.run("run", "-p", "Once", "--temp", 0, "-n", first.json["tokens"] + 5, "-c", 64,
                       "--json").json
    assert first.json["text"] + more["text"] == whole["text"]


def test_a_prompt_is_added_to_what_was_restored(tmp_path):
    kept = tmp_path / "slot"
    runner.run("run", "-p", "Once upon a time", "-n", 0, "--save", kept, "--temp", 0)
    added = runner.run("run", "--restore", kept, "-p", " there was a dog", "-n", 10, "-q").text
    assert added.startswith(" there was a dog") and len(added) > 25


def test_a_damaged_file_restores_nothing(tmp_path):
    kept = tmp_path / "slot"
    runner.run("run", "-p", "Once", "-n", 20, "--save", kept, "--temp", 0)
    good = kept.read_bytes()
    args = ["run", "--restore", kept, "-n", 1, "-q"]
    for size in (0, 7, 64, len(good) // 2, len(good) - 1):
        kept.write_bytes(good[:size])
        assert refused(*args, code=3)[0] == str(kept), size
    for at in (0, 9, len(good) // 3, len(good) - 1):
        altered = bytearray(good)
        altered[at] ^= 4
        kept.write_bytes(altered)
        refused(*args, code={2, 3})
    kept.write_bytes(good)
    refused(*args, "-ctk", "f32")
    kept.unlink()
    refused(*args, code=6)


def test_the_old_file_survives_a_failed_save(tmp_path):
    folder = tmp_path / "none"
    refused("run", "-p", "Once", "-n", 2, "-q", "--save", folder / "slot", code=6)
    kept = tmp_path / "slot"
    runner.run("run", "-p", "Once", "-n", 3, "-q", "--save", kept)
    before = kept.read_bytes()
    refused("run", "-p", "x" * 3000, "-n", 3, "-q", "--save", kept)
    assert kept.read_bytes() == before and os.listdir(tmp_path) == ["slot"]


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=256k none "$DISK" || exit 77
"$COMMAND" run -p Once -n 30 -q --save "$DISK/slot" && cp "$DISK/slot" "$BESIDE/before" || exit 78
"$COMMAND" run -p Once -n 400 -c 512 --endless -ctk f32 -ctv f32 -q --save "$DISK/slot"
code=$?
ls -A "$DISK" >"$BESIDE/names"
cp "$DISK/slot" "$BESIDE/after"
exit $code
"""


def test_the_old_file_survives_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ["-m"] if os.geteuid() == 0 else ["-r", "-m"]
    try:
        subprocess.run(["unshare", *alone, "mount", "-t", "tmpfs", "none", disk], check=True,
                       capture_output=True)
    except (OSError, subprocess.CalledProcessError) as reason:
        pytest.skip(f"no disk may be mounted here: {reason}")
    done = runner.execute([*alone, "sh", "-c", ON_A_SMALL_DISK], binary="unshare",
                          env={"COMMAND": str(runner.BINARY), "DISK": str(disk),
                               "BESIDE": str(tmp_path)})
    assert not done.faults and done.code == 6, done.show()
    where, what = runner.error_of(done)
    assert where == str(disk / "slot") and "no space is left" in what
    before = (tmp_path / "before").read_bytes()
    assert before and (tmp_path / "after").read_bytes() == before
    assert (tmp_path / "names").read_text() == "slot\n"
