"""The fleet's authority, which is derived from its token, and the keys and revocations that it signs.

A key file has a member's private key, its certificate and the authority's certificate, as PEM. The certificate names
one island, and the revocations of this name that its maker knew (`revocations`): each ID is an organizational unit, and
the serial number begins with the number of the entry without an ID. Import this module only where it is used: it needs
`cryptography`.
"""

import hashlib
import re
import secrets
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gregale.distributed.agreement import canonical

# Against guesses of a weak token; the certificate is the same for all versions of Gregale that have these values.
SCRYPT = {"salt": b"gregale fleet", "n": 1 << 14, "r": 8, "p": 1, "dklen": 32}
VALID = datetime(2000, 1, 1), datetime(9999, 1, 1)  # of the authority; no member compares them with its clock
PLAIN = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gregale fleet")])
RANDOM_BITS = 64  # of a member's serial number, after a number of revocations
PURPOSES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class MemberCertificate(NamedTuple):
    """What the authority has signed for a member; `revocations`: of the name, as `Revocations.of` when it was made."""

    name: str
    revocations: dict[str, int]
    begins: datetime
    ends: datetime


@lru_cache
def key_and_certificate(token: bytes) -> tuple[bytes, bytes]:
    """Return the authority's key and its self-signed certificate as PEM: the same bytes for the same token."""
    key = signing_key(token)
    builder = x509.CertificateBuilder(AUTHORITY, AUTHORITY, key.public_key(), 1, *VALID)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return key.private_bytes(*PLAIN), builder.sign(key, None).public_bytes(Encoding.PEM)


def signing_key(token: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.scrypt(token, **SCRYPT))


def key_file(token: bytes, name: str, revocations: dict[str, int], days: float, now: datetime | None = None) -> bytes:
    """Return the content of a new key file for a name, which is valid for `days` from now on."""
    key, begins = Ed25519PrivateKey.generate(), now or datetime.now(UTC)
    units = (x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, each) for each in revocations if each)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), *units])
    serial = (revocations.get("", 0) << RANDOM_BITS) + 1 + secrets.randbits(RANDOM_BITS - 1)
    ends = begins + timedelta(days=days)
    builder = x509.CertificateBuilder(AUTHORITY, subject, key.public_key(), serial, begins, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    certificate = builder.add_extension(PURPOSES, critical=True).sign(signing_key(token), None)
    return key.private_bytes(*PLAIN) + certificate.public_bytes(Encoding.PEM) + key_and_certificate(token)[1]


def certificates_of(key: bytes) -> tuple[bytes, bytes]:
    """Return the member's and the authority's certificate (DER) of a key file. Raises ValueError if it is damaged."""
    member, authority = map(x509.load_pem_x509_certificate, _CERTIFICATE.findall(key))
    return member.public_bytes(Encoding.DER), authority.public_bytes(Encoding.DER)


@lru_cache(maxsize=4096)
def member_certificate(der: bytes) -> MemberCertificate:
    """Return what a certificate says; `ssl` has checked that the authority has signed it."""
    found = x509.load_der_x509_certificate(der)
    name = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    units = found.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    revocations = {"": found.serial_number >> RANDOM_BITS, **{str(each.value): 1 for each in units}}
    return MemberCertificate(str(name), revocations, found.not_valid_before_utc, found.not_valid_after_utc)


def signed_revocation(token: bytes, entry: str, count: int) -> str:
    return signing_key(token).sign(revocation_text(entry, count)).hex()


def is_revocation(authority: bytes, entry: str, count: int, signature: str) -> bool:
    """Return whether the authority with this certificate (DER) has signed an entry with this number."""
    key = x509.load_der_x509_certificate(authority).public_key()
    assert isinstance(key, Ed25519PublicKey)
    try:
        key.verify(bytes.fromhex(signature), revocation_text(entry, count))
    except (InvalidSignature, ValueError):
        return False
    return True


def revocation_text(entry: str, count: int) -> bytes:
    return canonical(["gregale revocations", entry, count])
