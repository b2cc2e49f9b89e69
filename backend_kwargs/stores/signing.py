"""Ed25519 signatures of documents and bundles: each with a domain, so that one kind's is never valid for another."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from backend_kwargs.errors import BackendKwargsError, error_text, pip_install, wrong_value
from backend_kwargs.files import read_bytes

LONGEST = 1 << 16  # bytes of a PEM file


def signed(domain: str, content: bytes, key: object) -> bytes:
    """Return the signature of `content` for `domain`, such as "backend-kwargs decision 1"."""
    return bytes(private_key(key).sign(_within(domain, content)))


def signer(domain: str, content: bytes, signature: bytes, keys: Sequence[object]) -> object:
    """Return the one of the public `keys` that signed `content` for `domain`, None if none did.

    With the domain "" the content alone was signed.
    """
    _, invalid_signature = _cryptography()
    for key, public in [(key, public_key(key)) for key in keys]:
        try:
            public.verify(signature, _within(domain, content))
        except invalid_signature:
            continue
        return key
    return None


def public_key(key: object) -> Any:
    """Return the Ed25519 public key that is given, or named by the path of its PEM file; raise if it is none."""
    return _key(key, "public", "A trusted key")


def private_key(key: object) -> Any:
    """Return the Ed25519 private key that is given, or named by the path of its PEM file; raise if it is none."""
    return _key(key, "private", "`signing_key`")


def several_keys(where: str, keys: object) -> list[object]:
    """Return `keys` as a list; raise if they are not several public keys, but one."""
    if keys is None:
        return []
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise wrong_value(f"{where} `trusted_keys`", "a list of public keys or of paths of their PEM files", keys)
    return [*keys]


def _within(domain: str, content: bytes) -> bytes:
    return f"{domain}\n".encode() + content if domain else content


def _cryptography() -> tuple[ModuleType, type[Exception]]:
    """Return the module of Ed25519 keys and the error of a wrong signature; raise if the package is missing."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BackendKwargsError(
            f"Signatures need the package cryptography: {pip_install('signing')} ({error_text(error)})."
        ) from None
    return ed25519, InvalidSignature


def _key(given: object, which: Literal["private", "public"], what: str) -> object:
    """Return a key as it is, or read from the PEM file that it names; raise for `what` if it is none of Ed25519."""
    ed25519, _ = _cryptography()
    key = given
    if isinstance(given, str | Path):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

        content = read_bytes(given, f"a {which} key", LONGEST)
        try:
            key = load_pem_private_key(content, None) if which == "private" else load_pem_public_key(content)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise BackendKwargsError(f"Cannot read a {which} key from {str(given)!r}: {error_text(error)}.") from None
    kind = ed25519.Ed25519PrivateKey if which == "private" else ed25519.Ed25519PublicKey
    if not isinstance(key, kind):
        raise wrong_value(what, f"an Ed25519 {which} key, or the path of its PEM file", given)
    return key
