"""`gregale islands key` makes the key of one island, and `gregale islands revoke` ends its keys so far.

The fleet's authority signs both; the token gives it.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gregale.atomic_files import remove
from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.islands.config import IslandsConfig
from gregale.islands.transport.revocations import Revocations, list_beside, new_entry
from gregale.islands.transport.tls import certificates, read_credentials, tls_contexts
from gregale.programs.command import Command
from gregale.settings import Range, Settings, setting
from gregale.streams import say

TOKEN_FILE = setting("islands.token", "file with the fleet's token, which signs")


@dataclass(frozen=True)
class KeyOptions(Settings):
    name: str = field(metadata={"help": "islands.name of the island; `lighthouse`: of a coordinator"})
    token_file: str = TOKEN_FILE
    out: str | None = setting(None, "file to write, which must not exist; null: NAME.key")
    days: float = setting(365.0, "days until the key expires", range=Range(0, 36_500, above=True))

    def __post_init__(self):
        super().__post_init__()
        check_name(self.name)


def make_key(options: KeyOptions) -> int:
    """Write a key file that only its owner may read; a file that exists is not overwritten."""
    path, token, revoked = authority(options.token_file)
    out = Path(expand(options.out or f"{options.name}.key", "out"))
    known = revoked.of(options.name)
    content = certificates().key_file(token, options.name, known, options.days)
    try:
        with open(out, "xb", opener=partial(os.open, mode=0o600)) as file:
            try:
                file.write(content)
                file.flush()
            except BaseException:
                remove(out)
                raise
    except FileExistsError:
        raise UserError(f"out: {out} exists, and a key is not overwritten. Give another path, or move it.") from None
    except OSError as error:
        raise UserError(
            f"out: {out} cannot be written ({error.strerror}). Give a path in a folder that exists, with space."
        ) from None
    say(
        f"{out}: the key of {options.name}, for {options.days:g} days, for its islands.token_file. It follows the "
        f"{sum(known.values())} revocations of {options.name} in {list_beside(path)}: a coordinator that knows another "
        f"refuses it. Keep {path} here."
    )
    return 0


def check_name(name: str) -> None:
    """Raise the error of a name that no island can have."""
    IslandsConfig(name=name)


def authority(token_file: str) -> tuple[Path, bytes, Revocations]:
    """Return the path of the fleet's token, the token and the revocations beside it. Raises UserError for a key."""
    path = Path(expand(token_file, "token_file"))
    token = read_credentials(path, "token_file", "the fleet, which signs", "Give the fleet's token.")
    return path, token, tls_contexts(token).revoked


KEY = Command(main=make_key, options=KeyOptions, positional=("name",))


@dataclass(frozen=True)
class RevocationOptions(Settings):
    name: str = field(metadata={"help": "islands.name of the island; all its keys so far end"})
    token_file: str = TOKEN_FILE

    def __post_init__(self):
        super().__post_init__()
        check_name(self.name)


def revoke(options: RevocationOptions) -> int:
    """Sign a revocation of a name that no key has followed yet."""
    path, token, revoked = authority(options.token_file)
    entry = new_entry(options.name)
    with revoked.rewriting():  # of two commands, the second reads what the first wrote
        revoked.merge({entry: [1, certificates().signed_revocation(token, entry, 1)]})
    say(
        f"{list_beside(path)} has a new revocation of {options.name}: it ends all keys of {options.name} made so far, "
        "also with other copies of the token; the same command again ends later ones. A lighthouse with this "
        "token_file reads that within a second and tells the islands. For another one, and to make keys with another "
        "copy, copy it beside that token_file: TOKEN_FILE.revoked."
    )
    return 0


REVOKE = Command(main=revoke, options=RevocationOptions, positional=("name",))
