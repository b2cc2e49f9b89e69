"""A certificate that signs itself, for one address: who trusts it needs no other."""

import datetime as dt
import ipaddress
import os
import shutil
from pathlib import Path

ADDRESS = "127.0.0.1"


def certify(folder: Path, owner: tuple[str, str] | None = None) -> Path:
    """Write cert.pem and key.pem, the key for its owner alone; return the path of the certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's server")])
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)  # signs data and certificates
    public = key.public_key()
    certificate = (
        x509.CertificateBuilder(name, name, public, x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ADDRESS))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for file, content, mode in (
        (folder / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644),
        (folder / "key.pem", private, 0o600),
    ):
        file.write_bytes(content)
        file.chmod(mode)
        if owner and os.geteuid() == 0:
            shutil.chown(file, *owner)
    return folder / "cert.pem"
