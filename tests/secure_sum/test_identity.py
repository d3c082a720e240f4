"""Who signed, of those who might say so: others with their kits, other authorities, kits that are over."""

import pytest

from authority import make_authority, make_signer, write_startup
from fedmutual.errors import RunError
from fedmutual.sites.secure_sum.identity import Forged, read_authority, read_signer

CONTENT = b"keys of round 1"


def check(signer, site="north", content=CONTENT, signed=CONTENT) -> None:
    make_authority().check(site, signer.certificate, signer.sign(signed), content)


def test_a_site_is_known_by_its_kit() -> None:
    check(make_signer("north"))


@pytest.mark.parametrize(
    ("signer", "reason"),
    [
        (lambda: make_signer("south"), "another participant's"),
        (lambda: make_signer("south", "north", issuer="elsewhere"), "kits' authority"),
        (lambda: make_signer("north", issuer="elsewhere"), "kits' authority"),
        (lambda: make_signer("north", days=(-3, -1)), "not valid now"),
        (lambda: make_signer("north", days=(1, 3)), "not valid now"),
    ],
)
def test_a_stranger_is_refused(signer, reason) -> None:
    with pytest.raises(Forged, match=reason):
        check(signer())


def test_another_content_and_another_key_are_refused() -> None:
    with pytest.raises(Forged, match="signature"):
        check(make_signer("north"), content=b"keys of round 2")
    north, south = make_signer("north"), make_signer("south")
    with pytest.raises(Forged, match="signature"):
        make_authority().check("north", north.certificate, south.sign(CONTENT), CONTENT)


@pytest.mark.parametrize("certificate", [b"", b"no certificate", bytes(2**13 + 1)])
def test_invalid_certificates_are_refused(certificate) -> None:
    with pytest.raises(Forged, match="certificate"):
        make_authority().check("north", certificate, b"", CONTENT)


def test_a_kit_is_read_and_a_damaged_one_named(tmp_path) -> None:
    write_startup(tmp_path, "north")
    signer = read_signer(tmp_path)
    read_authority(tmp_path).check("north", signer.certificate, signer.sign(CONTENT), CONTENT)
    for name, read in (("client.key", read_signer), ("client.crt", read_signer), ("rootCA.pem", read_authority)):
        (tmp_path / name).write_bytes(b"damaged")
        with pytest.raises(RunError, match=name):
            read(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(RunError, match=name):
            read(tmp_path)
        write_startup(tmp_path, "north")
