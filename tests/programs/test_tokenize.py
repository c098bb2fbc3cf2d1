"""`gregale tokenize`: the token store, ahead of training."""

import os
import re
import shutil


def test_it_builds_what_training_then_finds(printed, inputs):
    out = printed("tokenize", "tiny.yaml").splitlines()
    sizes = [len((inputs / "text" / f"{number}.txt").read_text()) + 1 for number in range(8)]  # one for the end
    held_out = sum(sizes) - int(out[-1].split()[0].replace(",", ""))
    counts = f"words: {sum(sizes) - held_out:,} tokens to train on, {held_out:,} held out; "
    rows = (sum(sizes) - held_out - 1) // 32
    assert re.fullmatch(rf"{re.escape(counts)}{rows} rows of 32, 9\d\.\d% of their tokens have a target", out[-2])
    assert out[-1].endswith("training tokens, vocabulary 257")
    chosen = ([size for place, size in enumerate(sizes) if bits >> place & 1] for bits in range(1, 2**8 - 1))
    assert held_out in map(sum, chosen), "whole documents are held out"
    before = {path: path.stat().st_mtime_ns for path in (inputs / "cache").rglob("*") if path.suffix != ".lock"}
    assert printed("tokenize", "tiny.yaml").splitlines()[-2:] == out[-2:]
    after = {path: path.stat().st_mtime_ns for path in (inputs / "cache").rglob("*") if path.suffix != ".lock"}
    assert after == before, "nothing was built again"
    assert not (inputs / "runs").exists()


def test_it_checks_every_byte_and_says_what_was_skipped(gregale, printed, refused, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "%s"}\n' % ("words " * 60) + "{}\n" + '{"text": "more"}\n')
    arguments = ["tokenize", "tiny.yaml", "--data.cache", tmp_path / "cache", "--data.validation"]
    arguments.append(f"{{lines: {{type: jsonl, files: [{tmp_path}/a.jsonl], on_bad_document: skip}}}}")
    for _ in range(2):
        out = printed(*arguments)
        assert "checking sources.words" in out
        assert f"data.validation.lines:\n  1 bad document(s) skipped:\n  {tmp_path}/a.jsonl, line 2: no field" in out
        assert f"\nlines: {60 * 6 + 1 + 4 + 1} tokens to evaluate on\n" in out
    for path in (tmp_path / "cache").glob("*/part-*.bin"):
        times, data = path.stat(), bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it
        assert f"{path} is damaged or missing" in refused(*arguments)
        shutil.rmtree(path.parent)
        assert gregale(*arguments) == 0
