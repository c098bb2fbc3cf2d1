"""`gregale tokenize`: the token store, ahead of training."""

from __future__ import annotations


def test_it_builds_what_training_then_finds(gregale, inputs, capsys):
    assert gregale("tokenize", "tiny.yaml") == 0
    out = capsys.readouterr().out.splitlines()
    sizes = [len((inputs / "text" / f"{number}.txt").read_text()) + 1 for number in range(8)]  # one for the end
    held_out = sum(sizes) - int(out[-1].split()[0].replace(",", ""))
    assert out[-2] == f"words: {sum(sizes) - held_out:,} tokens to train on, {held_out:,} held out"
    assert out[-1].endswith("training tokens, vocabulary 257")
    assert held_out in {sum(sizes[i] for i in chosen) for chosen in subsets(8)}, "whole documents are held out"
    before = {path: path.stat().st_mtime_ns for path in (inputs / "cache").rglob("*") if path.suffix != ".lock"}
    assert gregale("tokenize", "tiny.yaml") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == out[-2:]
    after = {path: path.stat().st_mtime_ns for path in (inputs / "cache").rglob("*") if path.suffix != ".lock"}
    assert after == before, "nothing was built again"
    assert not (inputs / "runs").exists()


def subsets(count: int):
    return ([i for i in range(count) if bits >> i & 1] for bits in range(1, 2**count - 1))


def test_mistakes(gregale, capsys):
    assert gregale("tokenize", "tiny.yaml", "--data.sources.words.files", "[none/*.txt]") == 2
    error = capsys.readouterr().err
    assert "data.sources.words" in error
    assert error.count("\n") == 1
