"""`gregale lighthouse`."""

import pytest

from gregale.errors import UserError
from gregale.programs.lighthouse import LighthouseOptions, main


def test_it_does_not_start_without_the_secret_of_its_fleet(tmp_path):
    with pytest.raises(UserError, match=r"token_file is not set: .*islands\.token_file"):
        main(LighthouseOptions(bind="127.0.0.1:0"))
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    with pytest.raises(UserError, match=r"token_file: .* can be read by others"):
        main(LighthouseOptions(bind="127.0.0.1:0", token_file=str(token)))
