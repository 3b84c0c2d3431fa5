"""Certificates and keys: an authority of the federation's own, the server's certificate under it, and a key per device."""

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from glocal.core.errors import InputError, describe_error
from glocal.core.files import write_secret, write_text

AUTHORITY_DAYS, SERVER_DAYS = 3650, 397
LOCAL_HOSTS = (
    "localhost",
    "127.0.0.1",
)  # hosts for which a server's certificate is good in any case
CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"


def make_authority(folder: Path, name: str) -> None:
    """A new authority: its certificate goes to every device, its key stays with whoever renews the server's."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name[:40]} (glocal)")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(subject, subject, key, AUTHORITY_DAYS).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    write_text(folder / CA, _text(builder.sign(key, hashes.SHA384())))
    write_secret(folder / CA_KEY, _pem(key))


def make_server_certificate(folder: Path, hosts: list[str]) -> datetime:
    """A new certificate for the server under the folder's authority, good for these hosts; until when."""
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        signer = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"certificates: the authority in {folder} cannot be read ({error}); it is made by `glocal deploy init`"
        ) from error
    if (
        not isinstance(signer, ec.EllipticCurvePrivateKey)
        or signer.public_key() != authority.public_key()
    ):
        raise InputError(
            f"certificates: {CA_KEY} in {folder} is not the key of its {CA}; put the right one there"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName(
        [_san(host) for host in dict.fromkeys([*hosts, *LOCAL_HOSTS])]
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:60])])
    builder = _builder(subject, authority.subject, key, SERVER_DAYS).add_extension(
        names, critical=False
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    certificate = builder.sign(signer, hashes.SHA384())
    write_secret(folder / SERVER_KEY, _pem(key))
    write_text(folder / SERVER, _text(certificate))
    return certificate.not_valid_after_utc


def days_left(path: Path) -> int:
    """For how many days a certificate is still good."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"certificates: {path} cannot be read ({error}); make a new one with `glocal deploy renew`"
        ) from error
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def require_server_certificate(folder: Path, hosts: list[str]) -> None:
    """Refuse to serve without an authority, with a certificate and a key that are no pair, or with one that nobody would trust."""
    authority = require_authority(folder / CA)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            folder / SERVER, folder / SERVER_KEY
        )
    except OSError as error:
        raise InputError(
            f"certificates: {SERVER} and {SERVER_KEY} in {folder} are of no use ({error.strerror or error}); "
            "make new ones with `glocal deploy renew`"
        ) from error
    wrong = _distrust_reason(
        x509.load_pem_x509_certificate((folder / SERVER).read_bytes()), authority, hosts
    )
    if wrong:
        raise InputError(
            f"certificates: {folder / SERVER} {wrong}; make a new one with `glocal deploy renew`"
        )


def _distrust_reason(
    certificate: x509.Certificate, authority: x509.Certificate, hosts: list[str]
) -> str:
    """Why a device that finds the server at one of these hosts would not trust its certificate."""
    if certificate.not_valid_after_utc < datetime.now(UTC):
        return f"ended on {certificate.not_valid_after_utc:%Y-%m-%d}"
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return f"is not signed by the authority in {CA}"
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    lacking = [host for host in hosts if _san(host) not in known]
    return f"is not for {', '.join(lacking)}" if lacking else ""


def read_client_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key that a device is known by."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("it is of another kind than devices' keys")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"certificates: the key {path} cannot be read ({describe_error(error)}); restore it, or get one with `glocal deploy add-device`"
        ) from error
    return key


def require_authority(path: Path) -> x509.Certificate:
    """The authority that a server's certificate must be signed by."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"certificates: the authority {path} cannot be read ({describe_error(error)}); copy it from the server, or from another device"
        ) from error


def make_client_key(path: Path) -> str:
    """A new key for a device; the public half as one line, as ssh writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    write_secret(path, key.private_bytes(encoding, form, serialization.NoEncryption()))
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        .decode()
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
    )
    dated = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(
        now + timedelta(days=days)
    )
    return dated.serial_number(x509.random_serial_number())


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
