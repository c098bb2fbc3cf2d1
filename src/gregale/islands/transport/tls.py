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

from gregale.distributed.agreement import read_token
from gregale.errors import UserError, install_hint
from gregale.islands.transport.revocations import Revocations, list_beside

NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the module ssl does not name
MISSING = "Islands and their lighthouse need the extra `islands`. " + install_hint("islands")
ANY = ...
NEW_KEY = "`gregale islands key NAME` makes a key."
SKEW = timedelta(days=1)  # between the clocks of two hosts


class PeerRefused(Exception):
    """The peer of a connection may not speak for the name that it claims, or no longer."""


class PeerRevoked(PeerRefused):
    """The peer's key was revoked."""


class WrongClock(PeerRefused):
    """The clock of this host is before the making of the key."""


class WrongName(PeerRefused):
    """The peer has the key of another name."""


class TlsContexts(NamedTuple):
    """Of a process, for the connections that it accepts, and for those that it opens.

    - `authority`: the certificate of the fleet's authority (DER)
    - `member`: the certificate of this process's key (DER); None: it has the token, and may speak for every name
    - `revoked`: the revocations that this process knows
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    authority: bytes
    member: bytes | None
    revoked: Revocations


def certificates():
    """Return the module that needs `cryptography`. Raises UserError if the extra `islands` is missing."""
    try:
        from gregale.islands.transport import certificates
    except ImportError:
        raise UserError(MISSING) from None
    return certificates


@lru_cache
def tls_contexts(token: bytes) -> TlsContexts:
    """Return the contexts of a process with this token or key. Raises UserError without the extra, else ValueError."""
    module, member = certificates(), None
    if token.startswith(b"-----BEGIN "):
        shown, (member, authority) = token, module.certificates_of(token)
    else:
        key, certificate = module.key_and_certificate(token)
        shown, authority = key + certificate, ssl.PEM_cert_to_DER_cert(certificate.decode())
    revoked = Revocations(partial(module.is_revocation, authority))
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # A file in memory: the standard library reads a private key only from a file.
    file = os.memfd_create("gregale-tls")
    try:
        os.write(file, shown)
        for context in (server, client):
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.verify_flags |= NO_CHECK_TIME  # `check_peer` checks the times of keys, with clear lines
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(f"/proc/self/fd/{file}")
            context.load_verify_locations(cadata=authority)
    finally:
        os.close(file)
    server.num_tickets = 0  # so that a side that only writes has nothing to read
    return TlsContexts(server, client, authority, member, revoked)


def read_credentials(path: Path, key: str, name: str, wrong_name: str = NEW_KEY) -> bytes:
    """Return the content of a token file: the fleet's token, or the key of `name`; read the revocations beside it.

    - `key`: the configuration key that names the file
    - `wrong_name`: what to do if it is another one's key

    Raises UserError as `read_token`, and for a key that is damaged, revoked, expired, or another one's.
    """
    token = read_token(path, key)
    try:
        contexts = tls_contexts(token)
    except UserError:  # a ValueError too
        raise
    except (ValueError, ssl.SSLError):
        raise UserError(
            f"{key}: {path} begins as a key of a member, but is damaged. Copy it again from where "
            "`gregale islands key` has written it."
        ) from None
    contexts.revoked.follow(list_beside(path))
    try:
        check(contexts, contexts.member or contexts.authority, name)
    except PeerRefused as error:
        advice = {WrongClock: "Set the clock.", WrongName: wrong_name}.get(type(error), NEW_KEY)
        raise UserError(f"{key}: {path} cannot be used: {error}. {advice}") from None
    return token


def check_peer(token: bytes, connection: Any, name: object = ANY) -> None:
    """Raise PeerRefused unless the peer of a connection may speak for `name`, or for any one."""
    check(tls_contexts(token), connection.getpeercert(binary_form=True), name)


def is_revoked(token: bytes, shown: bytes) -> bool:
    """Return whether the key of a peer's certificate (DER) was revoked, or Gregale has not written it."""
    try:
        check(tls_contexts(token), shown, ANY)
    except PeerRefused as error:
        return isinstance(error, PeerRevoked)
    except (ValueError, LookupError):
        return True
    return False


def check(contexts: TlsContexts, shown: bytes, name: object) -> None:
    """Raise PeerRefused unless a certificate that the authority has signed is valid now, for `name`.

    A host whose clock is before the making of a key cannot know whether the key has expired, so it refuses the key.
    """
    if shown == contexts.authority:
        return
    found, now = certificates().member_certificate(shown), datetime.now(UTC)
    known = contexts.revoked.of(found.name)
    if any(count > found.revocations.get(each, 0) for each, count in known.items()):
        raise PeerRevoked(f"the key of {found.name} was revoked")
    if now < found.begins - SKEW:
        raise WrongClock(
            f"the clock of the host that checks the key of {found.name} is at {now:%Y-%m-%d}, before the key was made "
            f"({found.begins:%Y-%m-%d})"
        )
    if now > found.ends:
        raise PeerRefused(f"the key of {found.name} expired on {found.ends:%Y-%m-%d}")
    if name not in (ANY, found.name):
        raise WrongName(f"it has the key of {found.name}, not of {name}")


def shut(connection: socket.socket) -> None:
    """End a connection from any thread; the thread that uses it notices."""
    with suppress(OSError):  # the peer closed it first
        # Not `SSLSocket.shutdown`: after it the thread would go on without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
