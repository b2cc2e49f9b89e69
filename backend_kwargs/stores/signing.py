"""Ed25519 signatures of documents and bundles: each with a domain, so that one kind's is never valid for another."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from backend_kwargs.errors import BackendKwargsError, error_text, pip_install, wrong_value
from backend_kwargs.files.plain_data import read_bytes

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
    ed25519, _ = _cryptography()
    public = _key(key, "public")
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise wrong_value("A trusted key", "an Ed25519 public key, or the path of its PEM file", key)
    return public


def private_key(key: object) -> Any:
    """Return the Ed25519 private key that is given, or named by the path of its PEM file; raise if it is none."""
    ed25519, _ = _cryptography()
    private = _key(key, "private")
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise wrong_value("`signing_key`", "an Ed25519 private key, or the path of its PEM file", key)
    return private


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


def _key(key: object, which: Literal["private", "public"]) -> object:
    """Return a key as it is, or read from the PEM file that it names."""
    if not isinstance(key, str | Path):
        return key
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    content = read_bytes(key, f"a {which} key", LONGEST)
    try:
        if which == "private":
            return serialization.load_pem_private_key(content, password=None)
        return serialization.load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BackendKwargsError(f"Cannot read a {which} key from {str(key)!r}: {error_text(error)}.") from None
