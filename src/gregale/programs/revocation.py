"""`gregale islands revoke`: ends the keys of one island, by a signed entry in the list beside the fleet's token."""

from dataclasses import dataclass, field

from gregale.islands.transport.revocations import list_beside
from gregale.islands.transport.tls import certificates
from gregale.programs.command import Command
from gregale.programs.member_key import TOKEN_FILE, authority
from gregale.settings import Settings
from gregale.streams import say


@dataclass(frozen=True)
class RevocationOptions(Settings):
    name: str = field(metadata={"help": "islands.name of the island; all its keys so far end"})
    token_file: str = TOKEN_FILE


def main(options: RevocationOptions) -> int:
    """Add one to the number of revocations of a name, and sign it."""
    path, token, revoked = authority(options.token_file)
    with revoked.rewriting():  # of two commands, the second reads what the first wrote
        count = revoked.count(options.name) + 1
        signature = certificates().signed_revocation(token, options.name, count)
        revoked.merge({options.name: [count, signature]})
    say(
        f"The keys of {options.name} that were made so far are revoked, in {list_beside(path)}. A lighthouse with this "
        "token_file reads that within a second and tells the islands. For another one, copy it beside its token_file: "
        "TOKEN_FILE.revoked."
    )
    return 0


COMMAND = Command(main=main, options=RevocationOptions, positional=("name",))
