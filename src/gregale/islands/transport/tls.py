"""TLS 1.3 between the members of a fleet: what each side shows, and whom it accepts.

The fleet's token gives an authority. A process shows the authority's own certificate, which it makes from the token, or
that of its key, which the authority has signed for one name. Both sides of a connection show one of these and accept no
other. Whoever has the token may speak for every name. Names of hosts do not matter. Clocks matter only for keys, which
expire. The keys of a connection are new for each, so a token that leaks later does not decrypt recorded traffic.
"""

import os
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from gregale.distributed.signing import read_token
from gregale.errors import UserError, install_hint
from gregale.islands.transport.revocations import Revocations, list_beside

NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the module ssl does not name
MISSING = "Islands and their lighthouse need the extra `islands`. " + install_hint("islands")
ANY = ...
SKEW = timedelta(days=1)  # between the clocks of two hosts


class PeerRefused(Exception):
    """The peer of a connection may not speak for the name that it claims, or no longer."""


class PeerRevoked(PeerRefused):
    """The peer's key was revoked."""


class TlsContexts(NamedTuple):
    """Of a process, for the connections that it accepts, and for those that it opens.

    - `authority`: the certificate of the fleet's authority (DER)
    - `name`: the one for which this process may speak; empty: every name
    - `revoked`: the revocations that this process knows
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    authority: bytes
    name: str
    revoked: Revocations


def certificates():
    """Return the module that needs `cryptography`. Raises UserError if the extra `islands` is missing."""
    try:
        from gregale.islands.transport import certificates
    except ImportError:
        raise UserError(MISSING) from None
    return certificates


def is_key(token: bytes) -> bool:
    """Return whether the content of a token file is a member's key."""
    return token.startswith(b"-----BEGIN ")


@lru_cache
def tls_contexts(token: bytes) -> TlsContexts:
    """Return the contexts of a process with this token, or with this key. Raises UserError if the extra is missing."""
    module, name = certificates(), ""
    if is_key(token):
        member, authority = module.certificates_of(token)
        shown, name = token, module.member_certificate(ssl.PEM_cert_to_DER_cert(member.decode())).name
    else:
        key, authority = module.key_and_certificate(token)
        shown = key + authority
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # A file in memory: the standard library reads a private key only from a file.
    file = os.memfd_create("gregale-tls")
    try:
        os.write(file, shown)
        for context in (server, client):
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.verify_flags |= NO_CHECK_TIME  # the times of keys are checked by `check_peer`, with clear lines
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(f"/proc/self/fd/{file}")
            context.load_verify_locations(cadata=authority.decode())
    finally:
        os.close(file)
    server.num_tickets = 0  # so that a side that only writes has nothing to read
    revoked = Revocations(partial(module.is_revocation, authority))
    return TlsContexts(server, client, ssl.PEM_cert_to_DER_cert(authority.decode()), name, revoked)


def read_credentials(path: Path, key: str) -> bytes:
    """Return the content of a token file: the fleet's token or a member's key; read the list of revocations beside it.

    Raises UserError if it cannot be used: as `read_token`, or a key that is damaged, revoked or expired.
    """
    token = read_token(path, key)
    if is_key(token):
        try:
            member, _ = certificates().certificates_of(token)
            contexts = tls_contexts(token)
        except (ValueError, ssl.SSLError):
            raise UserError(
                f"{key}: {path} begins as a key of a member, but is damaged. Copy it again from where "
                "`gregale islands key` has written it."
            ) from None
    else:
        member, contexts = None, tls_contexts(token)
    contexts.revoked.follow(list_beside(path))
    try:
        if member is not None:
            check_member(ssl.PEM_cert_to_DER_cert(member.decode()), contexts.revoked)
    except PeerRefused as error:
        advice = "Set the clock." if "clock" in str(error) else "`gregale islands key` makes another."
        raise UserError(f"{key}: {path} cannot be used: {error}. {advice}") from None
    return token


def check_peer(token: bytes, connection: Any, name: object = ANY) -> None:
    """Raise PeerRefused unless the peer of a connection may speak for `name`, or for any one."""
    contexts = tls_contexts(token)
    if (shown := connection.getpeercert(binary_form=True)) != contexts.authority:
        found = check_member(shown, contexts.revoked)
        if name not in (ANY, found):
            raise PeerRefused(f"it has the key of {found}, not of {name}")


def is_revoked(token: bytes, connection: Any) -> bool:
    """Return whether the key of a connection's peer was revoked."""
    try:
        check_peer(token, connection)
    except PeerRefused as error:
        return isinstance(error, PeerRevoked)
    return False


def check_member(shown: bytes, revoked: Revocations) -> str:
    """Return the name of a member's certificate (DER). Raises PeerRefused if it is revoked, or not valid now.

    A host whose clock is before the making of a key cannot know whether the key has expired, so it refuses the key.
    """
    found, now = certificates().member_certificate(shown), datetime.now(UTC)
    if found.revocations < revoked.count(found.name):
        raise PeerRevoked(f"the key of {found.name} was revoked")
    if now < found.begins - SKEW:
        raise PeerRefused(
            f"the clock of the host that checks the key of {found.name} is at {now:%Y-%m-%d}, before the key was made "
            f"({found.begins:%Y-%m-%d})"
        )
    if now > found.ends:
        raise PeerRefused(f"the key of {found.name} expired on {found.ends:%Y-%m-%d}")
    return found.name


def shut(connection: socket.socket) -> None:
    """End a connection from any thread; the thread that uses it notices."""
    with suppress(OSError):  # the peer closed it first
        # Not `SSLSocket.shutdown`: after it the thread would go on without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
