"""Certificates and keys: the federation's own authority, the server's certificate, client keys."""

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
LOCAL_HOSTS = ("localhost", "127.0.0.1")  # every server certificate is valid for these
CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"


def make_authority(folder: Path, name: str) -> None:
    """Make an authority: every client gets its certificate, its key signs server certificates."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name[:40]} (glocal)")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(subject, subject, key, AUTHORITY_DAYS)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(identifier, critical=False)
    write_text(folder / CA, _certificate_pem(builder.sign(key, hashes.SHA384())))
    write_secret(folder / CA_KEY, _key_pem(key))


def make_server_certificate(folder: Path, hosts: list[str]) -> datetime:
    """Make a server certificate for these hosts, signed by the folder's authority; its end."""
    authority, signer = _read_authority(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:60])])
    all_hosts = dict.fromkeys([*hosts, *LOCAL_HOSTS])
    names = x509.SubjectAlternativeName([_general_name(host) for host in all_hosts])
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = _builder(subject, authority.subject, key, SERVER_DAYS)
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(usage, critical=False)
    builder = builder.add_extension(identifier, critical=False)
    certificate = builder.sign(signer, hashes.SHA384())
    write_secret(folder / SERVER_KEY, _key_pem(key))
    write_text(folder / SERVER, _certificate_pem(certificate))
    return certificate.not_valid_after_utc


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority's certificate and its key, which must belong together."""
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        signer = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"certificates: cannot read the authority in {folder} ({error}); "
            "`glocal deploy init` makes one"
        ) from error
    if (
        not isinstance(signer, ec.EllipticCurvePrivateKey)
        or signer.public_key() != authority.public_key()
    ):
        raise InputError(
            f"certificates: {CA_KEY} in {folder} is not the key of its {CA}; restore the right one"
        )
    return authority, signer


def days_left(path: Path) -> int:
    """Days until a certificate expires."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"certificates: cannot read {path} ({error}); make a new one with `glocal deploy renew`"
        ) from error
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def require_server_certificate(folder: Path, hosts: list[str]) -> None:
    """Refuse a missing authority, a key of another certificate, and one that no client trusts."""
    authority = require_authority(folder / CA)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / SERVER, folder / SERVER_KEY)
    except OSError as error:
        raise InputError(
            f"certificates: cannot use {SERVER} and {SERVER_KEY} in {folder} "
            f"({error.strerror or error}); make new ones with `glocal deploy renew`"
        ) from error
    certificate = x509.load_pem_x509_certificate((folder / SERVER).read_bytes())
    reason = _distrust_reason(certificate, authority, hosts)
    if reason:
        raise InputError(
            f"certificates: {folder / SERVER} {reason}; make a new one with `glocal deploy renew`"
        )


def _distrust_reason(
    certificate: x509.Certificate, authority: x509.Certificate, hosts: list[str]
) -> str:
    """Why a client that connects to one of these hosts would not trust the certificate."""
    if certificate.not_valid_after_utc < datetime.now(UTC):
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return f"is not signed by the authority in {CA}"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    missing = [host for host in hosts if _general_name(host) not in names]
    return f"is not for {', '.join(missing)}" if missing else ""


def read_client_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A client's secret key."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("client keys are of another kind")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"certificates: cannot read the key {path} ({describe_error(error)}); "
            "restore it, or get one with `glocal deploy add-client`"
        ) from error
    return key


def require_authority(path: Path) -> x509.Certificate:
    """The authority that must have signed the server's certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"certificates: cannot read the authority {path} ({describe_error(error)}); "
            "copy it from the server, or from another client"
        ) from error


def make_client_key(path: Path) -> str:
    """Make a client's secret key; its public key as one line in OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private_format = serialization.PrivateFormat.OpenSSH
    no_password = serialization.NoEncryption()
    write_secret(path, key.private_bytes(serialization.Encoding.PEM, private_format, no_password))
    public_format = serialization.PublicFormat.OpenSSH
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, public_format)
    return public.decode()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1))
    return builder.not_valid_after(now + timedelta(days=days))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
