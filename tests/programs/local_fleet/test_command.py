"""What `gregale islands`, `gregale lighthouse` and `gregale train` refuse before anything is started."""

from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.islands.lighthouse import LighthouseOptions
from gregale.islands.lighthouse import main as lighthouse
from gregale.islands.local_fleet import folder_of
from gregale.runs.config import TrainConfig


def test_what_a_fleet_says_and_its_secret_stay_on_this_machine():
    assert folder_of(TrainConfig("tiny", 4, runs="/data/runs")) == Path("/data/runs/tiny.islands")
    assert folder_of(TrainConfig("tiny", 4, runs="s3://bucket/runs")) == Path("runs/tiny.islands")


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("islands", [], "sync.type is 'psdp'"),
        ("train", ["--islands.lighthouse", "10.0.0.2:29510"], "`gregale island` trains"),
        ("island", [], "islands.lighthouse is not set"),
        ("island", ["--islands.lighthouse", "10.0.0.2:29510"], "islands.token_file is not set"),
    ],
)
def test_a_mistake_is_one_line(command, arguments, says, inputs, refusal):
    model = "{type: llama, layers: 1, hidden: 48, heads: 2, kv_heads: 2}"
    (inputs / "small.yaml").write_text(f"name: small\nsteps: 4\nmodel: {model}\n")
    assert says in refusal(command, "small.yaml", *arguments)
    assert not (inputs / "runs" / "small").exists()


def test_a_lighthouse_does_not_start_without_the_secret_of_its_fleet(tmp_path):
    with pytest.raises(UserError, match=r"token_file is not set: .*islands\.token_file"):
        lighthouse(LighthouseOptions(bind="127.0.0.1:0"))
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    with pytest.raises(UserError, match=r"token_file: .* can be read by others"):
        lighthouse(LighthouseOptions(bind="127.0.0.1:0", token_file=str(token)))
