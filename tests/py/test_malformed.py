"""Bad model files cost an error that names the place: never a crash, never memory on trust."""
import json
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor

import malformed_cases as cases_of
import malformed_tensors as more_of
import pytest
import runner

MIB = 1 << 20
SECONDS = 5
GROUPS = {
    "preamble": cases_of.preamble_cases,
    "keys of the container": cases_of.container_key_cases,
    "missing and mistyped keys": cases_of.missing_and_mistyped_cases,
    "values out of range": cases_of.range_cases,
    "tensors": more_of.tensor_cases,
    "sizes and types": more_of.size_cases,
    "offsets and alignment": more_of.place_cases,
    "vocabularies": more_of.vocabulary_cases,
    "data": more_of.data_cases,
    "random damage": lambda: more_of.damaged(200, 1),
    "splices": lambda: more_of.spliced(200, 2),
}
PLACE = re.compile(r"\d|\w\.\w|magic|version|header|file|byte|end|key|tensor|truncat", re.I)


def arguments(command, path):
    return {"plan": ["plan", path], "inspect": ["inspect", path],
            "tokenize": ["tokenize", path, "-p", "x"],
            "run": ["run", path, "-n", "2", "-p", "hi", "--temp", "0"]}[command]


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """Children inherit a limit on address space: what is allocated on trust fails."""
    if runner.SANITIZED:
        yield
        return
    old = runner.limit_memory(2048 * MIB)
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


def complaints(done, wanted, names=(), as_json=False):
    """What is wrong with how the command ended: a list of words, empty when nothing is."""
    found = list(done.faults)
    if done.code is None or done.code < 0:
        return found
    if done.code not in wanted:
        found.append(f"exit {done.code}, expected {sorted(wanted)}")
    if done.seconds > SECONDS * runner.PATIENCE:
        found.append(f"took {done.seconds:.1f} s")
    # The figure of a child starts at that of the process that forked it.
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not runner.SANITIZED and done.resident > mine + 64 * MIB:
        found.append(f"{done.resident // MIB} MiB were resident")
    if done.code == 4 and done.args[1] == "plan":
        return found  # a plan that does not fit is an answer, not an error
    if done.code:
        found += complaints_of_error(done, names, as_json)
    elif as_json and done.args[1] != "run":
        try:
            json.loads(done.out)
        except ValueError as error:
            found.append(f"stdout is not JSON: {error}")
    return found


def complaints_of_error(done, names, as_json):
    if as_json:
        try:
            error = done.json["error"]
            where, what = error["where"], " ".join(
                str(error.get(part, "")) for part in ("what", "expected", "got"))
        except (ValueError, KeyError, TypeError):
            return [f"no error object on stdout: {done.out[:200]!r}"]
        if runner.EXIT_CODES.get(error.get("status")) != done.code:
            return [f"exit {done.code} with status {error.get('status')}"]
    else:
        lines = runner.ERROR_LINE.findall(done.err)
        if len(lines) != 1:
            return [f"expected one error line on stderr: {done.err[-300:]!r}"]
        where, what = (part.decode("utf-8", "replace") for part in lines[0])
        if done.out and done.args[1] != "run":
            return [f"output besides the error: {done.out[:100]!r}"]
        if any(ord(c) < 32 or c == "\x7f" for c in where + what):
            return [f"the error line carries control characters: {where + what!r}"]
    # The path says nothing: what counts is the place inside the file.
    line = f"{where}: {what}".replace(str(done.args[2]), "")
    if not where.strip():
        return ["the error names no place"]
    if names and done.code == 3 and not any(name.lower() in line.lower() for name in names):
        return [f"the error names none of {names[:4]}: {line!r}"]
    if not names and done.code == 3 and not PLACE.search(line):
        return [f"the error names no place: {line!r}"]
    return []


def judge(case, folder, number):
    """Runs every command on the case; returns complaints with the case's name."""
    path = os.path.join(folder, f"{number}.bin")
    with open(path, "wb") as file:
        file.write(case.bytes())
    found = []
    for command in cases_of.COMMANDS:
        # A sanitizer's build is slow: there, each case is run one way or the other.
        for as_json in (False, True) if not runner.SANITIZED else (number % 2 == 1,):
            extra = ["--json"] if as_json else []
            done = runner.execute([*arguments(command, path), *extra], timeout=SECONDS * 2)
            found += [f"{case.name} [{' '.join([command, *extra])}]: {words}" for words in
                      complaints(done, case.codes[command], case.names, as_json)]
    os.unlink(path)
    return found


def report(found):
    assert not found, f"{len(found)} complaints:\n" + "\n".join(found[:60])


@pytest.mark.parametrize("group", GROUPS)
def test_each_bad_file_costs_an_error_that_names_the_place(group, tmp_path):
    cases = GROUPS[group]()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases of one name"
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        parts = pool.map(lambda item: judge(item[1], tmp_path, item[0]), enumerate(cases))
        report([words for part in parts for words in part])


def test_there_are_enough_cases():
    count = sum(len(make()) for name, make in GROUPS.items()
                if name not in ("random damage", "splices"))
    assert count >= 450, count


def cuts(data, places, header, data_start):
    """(length, codes by command) for files that end too early."""
    for length in sorted(places):
        if length < header:
            yield length, cases_of.codes(3)
        elif length < data_start:
            yield length, cases_of.codes({0, 3}, {0, 3}, {0, 3}, 3)
        elif length < len(data):
            yield length, cases_of.codes(0, 0, 0, 3)


def story_cuts():
    file = cases_of.story()
    data, head = file.encode(), len(file.header())
    places = set(range(1025)) | {edge + delta for edge in file.boundaries()
                                 for delta in (-1, 0, 1) if 0 <= edge + delta}
    places |= set(range(head - 80, head + 60))
    return data, list(cuts(data, places, head, head + -head % 32))


def tiny_cuts():
    """Every byte of the keys and tensor infos of a file from scratch, big arrays left out."""
    file = cases_of.tiny("gpt2")
    data, head = file.encode(), len(file.header())
    edges = file.boundaries()
    places = set()
    for start, end in zip(edges, edges[1:]):
        if end - start < 300:
            places |= set(range(start, end))
        else:
            places |= set(range(start, end, 37))
    places |= set(range(head, len(data), 997))
    return data, list(cuts(data, places, head, head + -head % 32))


@pytest.mark.parametrize("make", [story_cuts, tiny_cuts])
def test_a_file_cut_at_any_byte_is_refused(make, tmp_path):
    data, lengths = make()

    def judge_cut(item):
        length, wanted = item
        path = os.path.join(tmp_path, f"{length}.bin")
        with open(path, "wb") as file:
            file.write(data[:length])
        found = []
        others = [command for command in cases_of.COMMANDS if command != "plan"]
        for command in ("plan", others[length % 3]):
            as_json = length % 2 == 0
            done = runner.execute([*arguments(command, path), *(["--json"] if as_json else [])],
                                  timeout=SECONDS * 2)
            found += [f"cut at {length} [{command}]: {words}"
                      for words in complaints(done, wanted[command], (), as_json)]
        os.unlink(path)
        return found

    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        report([words for part in pool.map(judge_cut, lengths) for words in part])


def test_what_cannot_be_opened_is_an_error_of_input(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / "fifo")
    places = {"a missing file": (tmp_path / "missing.gguf", {6}), "a directory": (tmp_path, {6}),
              "a loop of links": (loop, {6}), "a fifo": (tmp_path / "fifo", {3, 6}),
              "a name too long": (tmp_path / ("x" * 300), {6}), "no name": ("", {2, 6}),
              "a file as a folder": (runner.STORIES / "x", {6}), "/dev/null": ("/dev/null", {3, 6}),
              "/dev/zero": ("/dev/zero", {3, 6})}
    found = []
    for name, (path, wanted) in places.items():
        for command in cases_of.COMMANDS:
            for extra in ([], ["--json"]):
                done = runner.execute([*arguments(command, path), *extra], timeout=SECONDS)
                words = complaints(done, wanted, (), bool(extra))
                if not words and not extra and str(path) and len(str(path)) < 150 and str(
                        path).encode() not in done.err:
                    words = [f"the path is not named: {done.err[-200:]!r}"]
                found += [f"{name} [{' '.join([command, *extra])}]: {word}" for word in words]
    report(found)


def test_a_file_nobody_may_read_is_an_error_of_input(tmp_path):
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert runner.run("plan", path, code=6)


def test_a_huge_sparse_file_costs_nothing(tmp_path):
    path = tmp_path / "sparse.gguf"
    with open(path, "wb") as file:
        file.write(cases_of.tiny().but(tensor_count=2**40).encode())
        file.truncate(1 << 40)
    found = []
    for command in cases_of.COMMANDS:
        done = runner.execute(arguments(command, path), timeout=SECONDS)
        found += [f"{command}: {words}" for words in complaints(done, {3, 4, 6})]
    report(found)


def test_layers_that_the_file_has_and_the_header_does_not_count_are_listed(tmp_path):
    path = tmp_path / "four.gguf"
    path.write_bytes(cases_of.story().with_key("llama.block_count", 4, 4).encode())
    done = runner.run("plan", "--json", path, code={0, 3})
    if done.code == 0:
        listed = json.dumps(done.json["unknown_tensors"])
        assert all(f"blk.4.{part}.weight" in listed for part in more_of.LAYER), listed


def test_a_model_without_its_data_is_planned_with_a_note_and_not_run(tmp_path):
    path = tmp_path / "header.gguf"
    file = cases_of.story()
    path.write_bytes(file.header())
    plan = runner.run("plan", "--json", path).json
    assert re.search("missing|data|the file ends|cut", json.dumps(plan["notes"])), plan["notes"]
    whole = runner.run("plan", "--json", runner.STORIES).json
    for line in ("weights_bytes", "kv_bytes", "forward_bytes", "tables_bytes"):
        assert plan["totals"][line] == whole["totals"][line], line
    where, what = runner.error_of(runner.run("run", path, "-p", "hi", code=3))
    assert PLACE.search(where + what)


def test_the_planner_stays_fast_on_many_keys_and_tensors(tmp_path):
    path = tmp_path / "many.gguf"
    file = cases_of.tiny()
    file = file.adding(*[cases_of.Key(b"a.%d" % i, 4, i) for i in range(50000)])
    file = file.adding(*[cases_of.Tensor(b"b.%d" % i, [0], 0, b"") for i in range(50000)])
    path.write_bytes(file.encode())
    done = runner.execute(["plan", path], timeout=20)
    report(complaints(done, {0, 3}))
