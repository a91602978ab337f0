"""Assumptions about model_signing, which signs attestations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.assumed import rests_on_it

pytestmark = pytest.mark.extras


def key_pair(folder: Path, name: str) -> tuple[str, str]:
    """Create a key pair on the curve P-256 and return the paths of private and public key, in PEM format."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.TraditionalOpenSSL, form.NoEncryption())
    )
    public.write_bytes(key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
    return str(private), str(public)


@rests_on_it("src/lockstep/proof/attest.py")
def test_a_signature_covers_names_and_bytes_of_a_folder(tmp_path: Path) -> None:
    """signing.Config().use_elliptic_key_signer(private_key=FILE).sign(FOLDER, FILE) signs without a network. verify
    raises for a changed, an added, a renamed or a missing file, for another key, and for a damaged signature. The
    signature is stored outside the folder and not covered; signing again overwrites it."""
    pytest.importorskip("model_signing", reason="needs the extra signing")
    from model_signing import signing, verifying

    private, public = key_pair(tmp_path, "own")
    _, other = key_pair(tmp_path, "other")
    folder, signature = tmp_path / "attestation", tmp_path / "attestation.sig"
    folder.mkdir()
    file = folder / "attestation.json"
    file.write_text("{}\n")

    def verify(key: str = public) -> Any:
        return verifying.Config().use_elliptic_key_verifier(public_key=key).verify(str(folder), str(signature))

    for _ in range(2):
        signing.Config().use_elliptic_key_signer(private_key=private).sign(str(folder), str(signature))
        verify()
    with pytest.raises(Exception):  # noqa: B017
        verify(other)
    file.write_text("{ }\n")
    with pytest.raises(Exception):  # noqa: B017
        verify()
    file.write_text("{}\n")
    verify()
    (folder / "more").write_text("")
    with pytest.raises(Exception):  # noqa: B017
        verify()
    (folder / "more").unlink()
    file.rename(folder / "renamed.json")
    with pytest.raises(Exception):  # noqa: B017
        verify()
    (folder / "renamed.json").unlink()
    with pytest.raises(Exception):  # noqa: B017
        verify()
    file.write_text("{}\n")
    signature.write_text(signature.read_text()[:-40])
    with pytest.raises(Exception):  # noqa: B017
        verify()
