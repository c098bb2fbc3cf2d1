"""`gregale islands revoke`: ends the keys of one island, by a signed entry in the list beside the fleet's token."""

from dataclasses import dataclass, field

from gregale.islands.transport.revocations import list_beside
from gregale.islands.transport.tls import certificates
from gregale.programs.command import Command
from gregale.programs.member_key import TOKEN_FILE, authority, check_name
from gregale.settings import Settings
from gregale.streams import say


@dataclass(frozen=True)
class RevocationOptions(Settings):
    name: str = field(metadata={"help": "islands.name of the island; all its keys so far end"})
    token_file: str = TOKEN_FILE

    def __post_init__(self):
        super().__post_init__()
        check_name(self.name)


def main(options: RevocationOptions) -> int:
    """Add one to the number of revocations of a name, and sign it."""
    path, token, revoked = authority(options.token_file)
    with revoked.rewriting():  # of two commands, the second reads what the first wrote
        count = revoked.count(options.name) + 1
        signature = certificates().signed_revocation(token, options.name, count)
        revoked.merge({options.name: [count, signature]})
    say(
        f"Revocation {count} of {options.name} is in {list_beside(path)}: it ends the keys of {options.name} that were "
        f"made with fewer than {count} revocations; the same command again ends later ones. A lighthouse with this "
        "token_file reads that within a second and tells the islands. For another one, copy it beside its token_file: "
        "TOKEN_FILE.revoked."
    )
    return 0


COMMAND = Command(main=main, options=RevocationOptions, positional=("name",))
