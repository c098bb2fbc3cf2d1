"""Pages that are carried out as a reader would: Python, configurations and commands, one after the other."""

import shlex

import pytest

from gregale.cli import main
from tests.docs.pages import WALKS, commands, fences, name

pytest.importorskip("transformers")


@pytest.mark.parametrize("page", WALKS, ids=name)
def test_a_page_is_carried_out(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = {}  # by the last block of each language
    for language, body in fences(page.read_text()):
        if language == "yaml":
            (tmp_path / body.partition("\n")[0].removeprefix("# ")).write_text(body)
        elif language == "python":
            exec(compile(body, name(page), "exec"), {})
        else:
            assert language == "bash"
            for line in commands(f"```bash\n{body}```"):
                program, *arguments = shlex.split(line)
                assert program == "gregale"
                assert main(arguments) == 0, line
        said[language] = capsys.readouterr().out
    if "temperature 0" in page.read_text():
        assert said["python"] == said["bash"] != "", "transformers and Gregale say the same"
