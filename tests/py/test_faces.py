"""What scripts may rely on: the JSON of each command, and that its figures add up.

ctest: serial (resident memory and times are measured here)
"""
import json
import re
import subprocess
import sys
from itertools import combinations

import jsonschema
import pytest
import runner

WIDE_KV = ["-ctk", "f32", "-ctv", "f32"]
PLAN_KEYS = {"schema", "model", "options", "rows", "totals", "budget", "suggestions",
             "unknown_tensors", "notes"}
MODEL_KEYS = {"file", "file_bytes", "architecture", "name", "layers", "train_ctx"}
ROW_KEYS = {"id", "scope", "domain", "format", "bytes", "align", "offset", "first_op", "last_op",
            "source"}
SUMS = {"anon_bytes", "file_bytes", "total_bytes"}
TOTAL_KEYS = {"weights_bytes", "kv_bytes", "forward_bytes", "tables_bytes", "other_bytes", *SUMS}
BUDGET_KEYS = {"source", "available_bytes", "reserve_bytes", "fits"}
KV_ID = re.compile(r"^kv\.layers\[\d+\]\.[kv]$")
GIB = 1 << 30


def has(thing, keys):
    missing = keys - set(thing)
    assert not missing, f"missing: {sorted(missing)} in {sorted(thing)}"


def is_size(thing):
    return isinstance(thing, int) and not isinstance(thing, bool) and thing >= 0


def obeys_schema(name, thing):
    """Validates against docs/schema, where there is one for the command."""
    folder = runner.ROOT / "docs/schema"
    for path in sorted(folder.glob(f"{name}*.json")) if folder.is_dir() else []:
        jsonschema.validate(thing, json.loads(path.read_text()))


def plan(*args, code=0, **options):
    thing = runner.run("plan", "--json", *args, code=code, **options).json
    has(thing, PLAN_KEYS)
    obeys_schema("plan", thing)
    return thing


@pytest.fixture(scope="module")
def llama8b(shared, tmp_path_factory):
    """The header of Llama-3.1-8B in the usual four-bit mixture; no data."""
    path = tmp_path_factory.mktemp("8b") / "llama8b.gguf"
    subprocess.run([sys.executable, shared / "tools/make_model.py", "llama-3.1-8b", path,
                    "--type", "q4_k_m", "--header-only"], check=True, stdout=subprocess.DEVNULL)
    return path


# ---- plan -------------------------------------------------------------------------------------

def test_a_plan_has_its_fields(stories):
    thing = plan(stories, "-c", 512)
    has(thing["model"], MODEL_KEYS)
    has(thing["totals"], TOTAL_KEYS)
    has(thing["budget"], BUDGET_KEYS)
    assert thing["schema"] == 1
    assert thing["model"]["architecture"] == "llama"
    assert thing["model"]["layers"] == 5
    assert thing["model"]["train_ctx"] == 128
    assert thing["model"]["file_bytes"] == stories.stat().st_size
    assert thing["options"]["ctx"] == 512
    assert thing["budget"]["fits"] is True
    assert thing["unknown_tensors"] == []
    for row in thing["rows"]:
        has(row, ROW_KEYS)
        assert row["scope"] in ("MODEL", "FORWARD", "AMBIENT"), row
        assert row["domain"] in ("ANON", "FILE"), row
        assert is_size(row["bytes"]) and is_size(row["align"]), row
    assert all(map(is_size, thing["totals"].values()))
    ids = [row["id"] for row in thing["rows"] if row["id"] != "padding"]
    assert len(set(ids)) == len(ids), "an id twice"


def test_the_context_defaults_to_the_trained_one_and_above_it_is_a_note(stories):
    assert plan(stories)["options"]["ctx"] == 128
    assert plan(stories, "-c", 0)["options"]["ctx"] == 128
    above = " ".join(map(str, plan(stories, "-c", 512)["notes"]))
    assert "128" in above or "train" in above, above
    assert "train" not in " ".join(map(str, plan(stories, "-c", 128)["notes"]))


@pytest.mark.parametrize("options,bytes_", [([], 327_680), (WIDE_KV, 655_360)])
def test_the_kv_ring_of_the_story_model_is_known_to_the_byte(stories, options, bytes_):
    thing = plan(stories, "-c", 512, *options)
    rows = [row for row in thing["rows"] if KV_ID.match(row["id"])]
    assert {row["id"] for row in rows} == {f"kv.layers[{i}].{side}" for i in range(5)
                                           for side in "kv"}
    assert thing["totals"]["kv_bytes"] == sum(row["bytes"] for row in rows) == bytes_
    assert {row["bytes"] for row in rows} == {bytes_ // 10}
    assert {(row["scope"], row["domain"]) for row in rows} == {("MODEL", "ANON")}
    assert {row["format"] for row in rows} == {"f32" if options else "f16"}


def test_keys_and_values_may_differ_in_format(stories):
    thing = plan(stories, "-c", 512, "-ctk", "f32")
    assert thing["totals"]["kv_bytes"] == 655_360 // 2 + 327_680 // 2


def test_slots_multiply_the_ring(stories):
    one, three = (plan(stories, "-c", 256, "--slots", slots) for slots in (1, 3))
    assert three["totals"]["kv_bytes"] == 3 * one["totals"]["kv_bytes"] == 3 * 163_840
    assert three["options"]["slots"] == 3


@pytest.mark.parametrize("options", [[], ["-c", "1"], ["-c", "777", "-b", "13"], ["-c", "4096"],
                                     ["-c", "512", "--slots", "4", *WIDE_KV]])
def test_the_rows_add_up_to_the_totals(stories, options):
    thing = plan(stories, *options)
    totals, rows = thing["totals"], thing["rows"]

    def total(scope, domain):
        return sum(row["bytes"] for row in rows
                   if (row["scope"], row["domain"]) == (scope, domain))

    assert totals["total_bytes"] == totals["anon_bytes"] + totals["file_bytes"]
    assert totals["total_bytes"] == sum(totals[line] for line in totals if line not in SUMS)
    assert total("MODEL", "FILE") == totals["file_bytes"]
    slab = totals["anon_bytes"] - total("MODEL", "ANON") - total("AMBIENT", "ANON")
    assert slab == totals["forward_bytes"]
    assert any(row["id"].startswith("padding") and row["scope"] == "MODEL" for row in rows)


@pytest.mark.parametrize("options", [[], ["-c", "512", "-b", "64"], ["-b", "1"],
                                     ["-c", "300", "--slots", "2"]])
def test_regions_do_not_overlap_while_they_live(stories, options):
    thing = plan(stories, *options)
    slab = thing["totals"]["forward_bytes"]
    forward = [row for row in thing["rows"] if row["scope"] == "FORWARD" and row["bytes"]
               and not row["id"].startswith("padding")]
    assert len(forward) >= 4
    for row in forward:
        assert 0 <= row["first_op"] <= row["last_op"], row
        assert row["offset"] + row["bytes"] <= slab, row
        assert row["offset"] % row["align"] == 0, row
    for a, b in combinations(forward, 2):
        if a["first_op"] <= b["last_op"] and b["first_op"] <= a["last_op"]:
            assert (a["offset"] + a["bytes"] <= b["offset"]
                    or b["offset"] + b["bytes"] <= a["offset"]), (a, b)
    live = max(sum(row["bytes"] for row in forward if row["first_op"] <= op <= row["last_op"])
               for op in {row["first_op"] for row in forward})
    assert live <= slab <= 1.1 * live + 2 * 4096, "far from what lives at one time"
    held = sorted((row for row in thing["rows"] if row["scope"] == "MODEL" and row["bytes"]
                   and row["domain"] == "ANON" and not row["id"].startswith("padding")),
                  key=lambda row: row["offset"])
    for a, b in zip(held, held[1:]):
        assert a["offset"] + a["bytes"] + 64 <= b["offset"], ("no guard", a, b)
    assert all(row["offset"] % row["align"] == 0 for row in held)


def test_weights_are_rows_under_their_names_where_the_file_has_them(stories):
    import gguf
    rows = {row["source"]: row for row in plan(stories)["rows"] if row["source"]}
    reader = gguf.GGUFReader(stories)
    for tensor in reader.tensors:
        row = rows.pop(tensor.name)
        assert row["bytes"] == tensor.n_bytes and row["offset"] == tensor.data_offset, row
        assert (row["scope"], row["domain"]) == ("MODEL", "FILE")
        assert row["format"].lower() == tensor.tensor_type.name.lower()
    assert not rows
    ids = {row["source"]: row["id"] for row in plan(stories)["rows"]}
    assert ids["blk.3.attn_q.weight"] == "model.layers[3].attn.q_proj.weight"


def test_no_score_matrix_is_planned(stories):
    small, large = (plan(stories, "-c", ctx, "-b", 64)["totals"]["forward_bytes"]
                    for ctx in (64, 65536))
    assert large - small < 64 * 65536, "the slab grows with chunk times context"


def test_the_embedded_model_is_the_story_model(stories):
    embedded, file = plan("-c", 512), plan(stories, "-c", 512)
    assert embedded["totals"]["kv_bytes"] == 327_680
    for line in ("weights_bytes", "kv_bytes", "forward_bytes", "tables_bytes"):
        assert embedded["totals"][line] == file["totals"][line], line


def test_a_plan_of_8b_needs_the_header_only_and_milliseconds(llama8b):
    done = runner.run("plan", "--json", llama8b, "-c", 8192, code={0, 4})
    thing = done.json
    assert thing["totals"]["kv_bytes"] == 1_073_741_824
    assert len([row for row in thing["rows"] if KV_ID.match(row["id"])]) == 64
    assert re.search(r"missing|data|the file ends|cut", str(thing["notes"]), re.I), thing["notes"]
    assert done.code == (0 if thing["budget"]["fits"] else 4)
    assert done.seconds < 1 * runner.PATIENCE
    assert thing["totals"]["weights_bytes"] > 4.5 * GIB


def test_whether_8b_fits_is_the_exit_code(llama8b):
    large = plan(llama8b, "-c", 8192, "--mem-limit", 64 * GIB, code={0, 4})
    if large["budget"]["fits"]:  # a machine may have less than the limit allows
        assert large["suggestions"] == []
    small = plan(llama8b, "-c", 8192, "--mem-limit", 4 * GIB, code=4)
    assert small["budget"]["fits"] is False and small["budget"]["source"] == "mem_limit"
    assert len(small["suggestions"]) >= 2
    for suggestion in small["suggestions"]:
        has(suggestion, {"option", "saves_bytes", "cost"})
        assert suggestion["saves_bytes"] > 0 and suggestion["option"] and suggestion["cost"]


def test_a_plan_takes_milliseconds(stories):
    best = min(runner.run("plan", "--json", stories).seconds for _ in range(5))
    assert best < 0.1 * runner.PATIENCE, best


@pytest.mark.parametrize("size", ["8G", "8GiB", "8589934592", "8192M", "8192MiB"])
def test_sizes_are_binary_and_may_have_a_unit(llama8b, size):
    thing = plan(llama8b, "-c", 8192, "--mem-limit", size, code={0, 4})
    assert thing["budget"]["available_bytes"] == 8 * GIB


def solved(done):
    """The context that --solve found: a figure of its own, or the one of the plan's options."""
    thing = done.json
    for place in (thing, thing.get("solve", {}), thing.get("options", {})):
        if isinstance(place, dict) and is_size(place.get("ctx")):
            return place["ctx"]
    raise AssertionError(f"no ctx in {thing}")


@pytest.mark.parametrize("gib,extra", [(7, []), (6, []), (8, WIDE_KV), (7, ["--slots", "3"]),
                                       (6, ["-b", "32"])])
def test_the_solved_context_fits_and_one_more_does_not(llama8b, gib, extra):
    limit = ["--mem-limit", gib * GIB, *extra]
    done = runner.run("plan", llama8b, "--solve", "ctx", "--json", *limit, code={0, 4})
    if done.code == 4:
        pytest.skip(f"nothing fits into {gib} GiB")
    ctx = solved(done)
    assert ctx > 0
    assert plan(llama8b, "-c", ctx, *limit)["budget"]["fits"] is True
    assert plan(llama8b, "-c", ctx + 1, *limit, code=4)["budget"]["fits"] is False


def test_not_even_one_position_fits(llama8b):
    done = runner.run("plan", llama8b, "--solve", "ctx", "--mem-limit", GIB // 2, code=4)
    assert done.err


def test_a_suggestion_saves_what_it_says(llama8b):
    base = ["--mem-limit", 8 * GIB]
    thing = plan(llama8b, "-c", 131072, *base, code=4)
    total = thing["totals"]["total_bytes"]
    tried = 0
    for suggestion in thing["suggestions"]:
        words = suggestion["option"].split()
        if words[0] not in ("-c", "-b", "-ctk", "-ctv", "--slots", "-t"):
            continue
        tried += 1
        options = ["-c", 131072, *base, *words] if words[0] != "-c" else [*words, *base]
        after = plan(llama8b, *options, code={0, 4})["totals"]["total_bytes"]
        assert total - after == suggestion["saves_bytes"], suggestion
    assert tried >= 1


def test_the_table_names_the_totals_in_binary_units(stories):
    text = runner.run("plan", stories, "-c", 512).text
    assert "320.0 KiB" in text or "320 KiB" in text or "327680" in text, text
    assert re.search(r"\bkv\b", text, re.I) and re.search(r"total", text, re.I)


def test_list_takes_a_glob_of_ids(stories):
    text = runner.run("plan", stories, "-c", 512, "--list", "kv.layers*").text
    assert len(re.findall(r"kv\.layers\[\d\]\.[kv]\b", text)) == 10, text
    assert "model.layers" not in text


# ---- check ------------------------------------------------------------------------------------

def check_object(done):
    thing = done.json
    has(thing, {"schema", "verdict", "rows", "scopes", "process", "decode", "findings"})
    has(thing["process"], {"before_bytes", "open_bytes", "after_decode_bytes", "closed_bytes"})
    has(thing["decode"], {"tokens", "allocations", "minor_faults", "major_faults", "file_faults",
                          "adapters"})
    for scope in ("MODEL", "FORWARD"):
        has(thing["scopes"][scope], {"planned_bytes", "taken_bytes", "peak_bytes",
                                     "resident_bytes", "freed_bytes"})
    obeys_schema("check", thing)
    return thing


def ends_well(thing, tokens):
    assert thing["verdict"] == "ok" and thing["findings"] == []
    for row in thing["rows"]:
        has(row, {"id", "scope", "domain", "planned_bytes", "taken_bytes", "written_bytes",
                  "resident_bytes"})
        if not row["id"].startswith("padding"):
            assert row["taken_bytes"] == row["planned_bytes"], row
    assert thing["decode"]["tokens"] >= tokens
    scope = thing["scopes"]["MODEL"]
    assert scope["freed_bytes"] == scope["taken_bytes"]
    assert thing["scopes"]["FORWARD"]["freed_bytes"] == thing["scopes"]["FORWARD"]["taken_bytes"]


def the_system_agrees(thing, planned_anon):
    decode, process = thing["decode"], thing["process"]
    assert decode["allocations"] == 0, decode
    assert decode["minor_faults"] == decode["major_faults"] == 0, decode
    growth = process["open_bytes"] - process["before_bytes"]
    slack = max(planned_anon // 100, 256 * 1024)
    assert abs(growth - planned_anon) <= slack, (growth, planned_anon)
    assert abs(process["after_decode_bytes"] - process["open_bytes"]) <= 256 * 1024, process
    assert abs(process["closed_bytes"] - process["before_bytes"]) <= 256 * 1024, process


CHECKS = {
    "defaults": ([], []),
    "256 tokens": (["-c", "512"], ["-n", "256"]),
    "one core": (["-c", "512", "-t", "1"], ["-n", "300"]),
    "three cores": (["-c", "512", "-t", "3"], ["-n", "64"]),
    "f32": (["-c", "2048", *WIDE_KV], ["-n", "300"]),
    "three slots": (["-c", "512", "--slots", "3"], ["-n", "32"]),
    "a prompt": (["-c", "300"], ["-p", "One day", "-n", "32"]),
    "chunk of one": (["-c", "256", "-b", "1"], ["-n", "16"]),
    "scalar": (["-c", "256", "--cpu", "scalar"], ["-n", "16"]),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check_finds_what_was_planned(name, stories, sanitized):
    geometry, work = CHECKS[name]
    done = runner.run("check", "--json", stories, *geometry, *work, timeout=120)
    thing = check_object(done)
    ends_well(thing, int(work[-1]) if work else 1)
    planned = plan(stories, *geometry)
    assert {row["id"] for row in planned["rows"]} <= {row["id"] for row in thing["rows"]}
    # Without -c, check takes the context that its work needs.
    if geometry and not sanitized:
        the_system_agrees(thing, planned["totals"]["anon_bytes"])


def test_check_of_the_embedded_model_ends_well():
    ends_well(check_object(runner.run("check", "--json", timeout=120)), 1)
    text = runner.run("check", timeout=120).text
    assert re.search(r"\bok\b", text, re.I), text


def test_written_bytes_are_at_most_what_was_taken_and_the_ring_was_used(stories):
    thing = check_object(runner.run("check", "--json", stories, "-c", 512, "-n", 64))
    rows = {row["id"]: row for row in thing["rows"]}
    for row in thing["rows"]:
        if row["domain"] == "ANON" and row["written_bytes"] is not None:
            assert 0 <= row["written_bytes"] <= row["planned_bytes"], row
    for i in range(5):
        for side in "kv":
            assert rows[f"kv.layers[{i}].{side}"]["written_bytes"] > 0


@pytest.mark.slow
def test_check_of_a_real_model_ends_well(smollm2):
    done = runner.run("check", "--json", smollm2, "-c", 512, "-n", 256, timeout=600)
    thing = check_object(done)
    ends_well(thing, 256)
    the_system_agrees(thing, plan(smollm2, "-c", 512)["totals"]["anon_bytes"])


def test_a_planted_allocation_in_decode_is_caught(stories, plant_malloc):
    done = runner.run("check", "--json", stories, code=5, binary=plant_malloc, timeout=120)
    thing = check_object(done)
    assert thing["verdict"] == "drift" and thing["decode"]["allocations"] > 0
    assert any("alloc" in json.dumps(finding).lower() or "decode" in json.dumps(finding).lower()
               for finding in thing["findings"]), thing["findings"]
    assert runner.run("check", stories, code=5, binary=plant_malloc, timeout=120).out


def test_a_region_one_byte_too_large_is_caught(stories, plant_byte):
    done = runner.run("check", "--json", stories, code=5, binary=plant_byte, timeout=120)
    thing = done.json
    findings = thing.get("findings") or [thing["error"]]
    ids = {row["id"] for row in plan(stories)["rows"]}
    assert any(i in json.dumps(finding) for finding in findings for i in ids), findings
    assert any(str(finding.get("expected")) != str(finding.get("got")) for finding in findings)


# ---- the others -------------------------------------------------------------------------------

def test_tokenize_prints_ids_and_pieces(stories):
    done = runner.run("tokenize", "--json", stories, "-p", "Once upon a time")
    tokens = done.json["tokens"]
    assert [sorted(token) for token in tokens] == [["id", "text"]] * len(tokens)
    assert tokens[0]["id"] == 1
    obeys_schema("tokenize", done.json)
    plain = runner.run("tokenize", stories, "-p", "Once upon a time").text
    assert plain.strip().split() == [str(token["id"]) for token in tokens]
    assert plain.count("\n") <= 1
    assert "".join(token["text"] for token in tokens[1:]).strip() == "Once upon a time"
    bare = runner.run("tokenize", "--json", stories, "-p", "Once upon a time", "--no-bos")
    assert bare.json["tokens"] == tokens[1:]
    assert "upon" in runner.run("tokenize", stories, "-p", "Once upon a time", "--pieces").text


def test_tokenize_works_without_tensors(shared):
    for path in sorted((shared / "vocab").glob("*falcon.gguf")):
        assert runner.run("tokenize", "--json", path, "-p", "hi", code={0, 3})


def test_inspect_lists_keys_and_tensors(stories):
    import gguf
    thing = runner.run("inspect", "--json", stories).json
    obeys_schema("inspect", thing)
    tensors = {tensor["name"]: tensor for tensor in thing["tensors"]}
    reader = gguf.GGUFReader(stories)
    assert list(tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = tensors[tensor.name]
        has(mine, {"name", "id", "format", "shape", "offset", "bytes"})
        assert mine["shape"] == [int(dim) for dim in tensor.shape], mine
        assert mine["bytes"] == tensor.n_bytes
        assert mine["offset"] in (tensor.data_offset, tensor.data_offset - reader.data_offset)
        assert mine["format"].lower() == tensor.tensor_type.name.lower()
    text = json.dumps(thing)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            assert f'"{field.name}"' in text, field.name
    plain = runner.run("inspect", stories).text
    assert "llama.block_count" in plain and "blk.4.ffn_norm.weight" in plain


def test_perplexity_has_its_fields(stories, tmp_path):
    text = tmp_path / "t"
    text.write_text("One day, Tom went to the park. He saw a big dog and a small cat. " * 20)
    base = ["ppl", "--json", stories, "-f", text, "-c", 64, "--chunks", 3]
    thing = runner.run(*base).json
    has(thing, {"perplexity", "stderr", "chunks", "ctx", "tokens", "bytes_per_token"})
    assert (thing["chunks"], thing["ctx"]) == (3, 64)
    assert 1 < thing["perplexity"] < 512 and thing["bytes_per_token"] > 1
    saved = tmp_path / "kld"
    runner.run(*base, "--kl-save", saved)
    kl = runner.run(*base, "--kl-base", saved).json["kl"]
    has(kl, {"mean", "stderr", "p99", "p999", "max", "top1", "ppl_ratio"})
    obeys_schema("ppl", thing)


def test_a_text_too_short_for_one_chunk_is_refused(stories, tmp_path):
    text = tmp_path / "t"
    text.write_text("One day")
    runner.run("ppl", "--json", stories, "-f", text, "-c", 64, code=2)


def test_score_prints_a_line_for_each_position(stories, tmp_path):
    text = tmp_path / "t"
    text.write_text("One day, Tom went to the park.")
    done = runner.run("score", "--json", stories, "-f", text, "--top", 3)
    ids = [token["id"] for token in
           runner.run("tokenize", "--json", stories, "-f", text).json["tokens"]]
    lines = [line for line in done.lines if line["pos"] > 0]
    assert [line["id"] for line in lines] == ids[1:]
    for line in lines:
        has(line, {"pos", "id", "logprob", "top"})
        assert line["logprob"] <= 0 and len(line["top"]) == 3
        assert all(set(entry) >= {"id", "logprob"} for entry in line["top"])
        obeys_schema("score", line)
    long = tmp_path / "long"
    long.write_text("One day, Tom went to the park. " * 100)
    runner.run("score", "--json", stories, "-f", long, "-c", 64, code=2)


def test_bench_prints_a_line_for_each_test(stories):
    done = runner.run("bench", "--json", stories, "-p", 16, "-n", 8, "-r", 2, timeout=120)
    lines = done.lines
    assert {line["test"] for line in lines} == {"pp16", "tg8"}
    for line in lines:
        has(line, {"test", "depth", "kv_k", "kv_v", "cpu", "runs", "tokens_per_s",
                   "tokens_per_s_min", "tokens_per_s_max", "bytes_per_token",
                   "read_bytes_per_s", "bandwidth_share"})
        assert line["tokens_per_s_min"] <= line["tokens_per_s"] <= line["tokens_per_s_max"]
        assert line["tokens_per_s"] > 0 and line["runs"] == 2
        obeys_schema("bench", line)
    only = runner.run("bench", "--json", stories, "-p", 0, "-n", 4, "-r", 1, timeout=120).lines
    assert {line["test"] for line in only} == {"tg4"}


@pytest.mark.parametrize("command", ["plan", "check", "inspect"])
def test_json_is_one_object_and_nothing_else(command, stories):
    done = runner.run(command, "--json", stories)
    assert isinstance(json.loads(done.out), dict)


def test_quiet_silences_all_but_errors(stories):
    for command in (["run", "-p", "One day", "-n", "4", "-c", "512"], ["plan", "-c", "512"],
                    ["check", "-n", "4"]):
        done = runner.run(*command, stories, "-q")
        assert done.err == b"", done.show()
    done = runner.run("run", "/nowhere/x.gguf", "-p", "a", "-q", code=6)
    assert runner.error_of(done)
