"""The keys of a federation: its own authority, the server's certificate, and a key for each node.

Nothing here is ever printed, and only their owner can read private keys.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.core.errors import ConfigError, Fault
from fedloom.deploy.messages import MessageError

NODE_KEY, NODE_PUBLIC, SEAL_KEY, SEAL_CERTIFICATE, AUTHORITY = "node.key", "node.pub", "seal.key", "seal.crt", "ca.crt"
_DAYS = {"authority": 3650, "server": 365}


class Pair(NamedTuple):
    """A private key, and its public part."""

    private: bytes
    public: bytes


def new_authority(name: str) -> tuple[Pair, Any, Any]:
    """An authority that signs the server's certificate: its key and certificate as files, and as objects."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _certificate(name, name, key, _DAYS["authority"])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    return Pair(_private(key), certificate.public_bytes(serialization.Encoding.PEM)), key, certificate


def read_authority(private: bytes, certificate: bytes) -> tuple[Any, Any]:
    """The authority's key and certificate as objects; ValueError if they do not belong together."""
    key, found = serialization.load_pem_private_key(private, None), x509.load_pem_x509_certificate(certificate)
    if key.public_key() != found.public_key():
        raise ValueError("its certificate is of another key")
    return key, found


def new_server(hosts: list[str], authority: Any, certificate: Any, days: int = _DAYS["server"]) -> Pair:
    """The server's key and certificate, for the names and addresses under which nodes reach it."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    builder = _certificate("fedloom server", issuer, key, days).add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    signed = builder.add_extension(known, critical=False).sign(authority, hashes.SHA256())
    return Pair(_private(key), signed.public_bytes(serialization.Encoding.PEM))


def new_node() -> Pair:
    """A node's key, in the form that SuperNodes read."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Pair(private, public + b"\n")


def pem_of(public: bytes) -> str:
    """A node's public key in the form in which its SuperNode sends it."""
    key: Any = serialization.load_ssh_public_key(public)
    found: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found.decode()


def new_seal(name: str, authority: Any, certificate: Any) -> Pair:
    """A node's key for secure sums, and the authority's certificate for it."""
    key = X25519PrivateKey.generate()
    issuer = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    builder = _certificate(name, issuer, key, _DAYS["authority"])
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    signed = builder.sign(authority, hashes.SHA256())
    return Pair(_private(key), signed.public_bytes(serialization.Encoding.PEM))


def node_files(pair: Pair, seal: Pair) -> dict[str, bytes]:
    """The files of a node's keys, by name; its public key is there so that another node's key is noticed."""
    public = {NODE_PUBLIC: pair.public, SEAL_CERTIFICATE: seal.public}
    return {NODE_KEY: pair.private, SEAL_KEY: seal.private, **public}


def refuse_wrong_keys(folder: Path, name: str) -> None:
    """Refuse a node's folder with a key that is damaged, or that of another node.

    Bundles of earlier versions have no ``node.pub``: there, the server refuses the key of another node.
    """
    known, sealed = folder / NODE_PUBLIC, folder / SEAL_CERTIFICATE
    own: Any = _read(folder / NODE_KEY, name, "a node's private key", _node_key)
    _read(folder / AUTHORITY, name, "a certificate", x509.load_pem_x509_certificate)
    faults = []
    if known.is_file() and own.public_key() != _read(known, name, "a public key", serialization.load_ssh_public_key):
        faults.append(Fault(str(folder / NODE_KEY), f"is not the key that '{name}' was handed", _again(name)))
    if sealed.is_file():
        seal: Any = _read(folder / SEAL_KEY, name, "a private key", _seal_key)
        found: Any = _read(sealed, name, "a certificate", x509.load_pem_x509_certificate)
        owner = next((each.value for each in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)), "")
        if owner != name[:64]:
            faults.append(Fault(str(sealed), f"is that of '{owner}', not of '{name}'", _again(name)))
        elif seal.public_key() != found.public_key():
            faults.append(Fault(str(folder / SEAL_KEY), f"is not the key of {SEAL_CERTIFICATE}", _again(name)))
    if faults:
        raise ConfigError(faults)


def _read(path: Path, name: str, what: str, load: Callable[[bytes], Any]) -> Any:
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise ConfigError([Fault(str(path), f"cannot be read ({error.strerror})", _again(name))]) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError([Fault(str(path), f"is not {what}", _again(name))]) from error


def _again(name: str) -> str:
    return f'restore it from the bundle, or let the coordinator make new keys: fedloom deploy renew SITE "{name}"'


def _node_key(data: bytes) -> Any:
    key = serialization.load_ssh_private_key(data, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("of another kind")
    return key


def _seal_key(data: bytes) -> Any:
    key = serialization.load_pem_private_key(data, None)
    if not isinstance(key, X25519PrivateKey):
        raise TypeError("of another kind")
    return key


def certified_key(certificate: str, authority: bytes, name: str) -> Any:
    """The key in a node's certificate; refused unless the authority has issued it to this node."""
    try:
        found = x509.load_pem_x509_certificate(certificate.encode())
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        owner = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    except (ValueError, TypeError, IndexError, InvalidSignature) as error:
        raise MessageError(f"the certificate of '{name}' for secure sums is not the authority's") from error
    if owner != name[:64] or found.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise MessageError(f"the certificate of '{name}' for secure sums has ended, or is that of '{owner}'")
    return found.public_key()


def valid_until(certificate: bytes) -> datetime.datetime:
    """When a certificate ends."""
    found: datetime.datetime = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return found


def _certificate(name: str, issuer: str, key: Any, days: int) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word[:64])]) for word in (name, issuer))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _general_name(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: Any) -> bytes:
    found: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return found
