"""The directory of control sockets: whom it lets in, and what it is mistrusted for."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from control_world import needs_root
from robust_train.control import place

NAME = "4242-00ff00.sock"


def in_folder(folder: Path) -> dict[str, str]:
    return {place.VARIABLE: str(folder)}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_directory_and_socket_are_private_whatever_the_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        listener, path = place.listen(in_folder(tmp_path / "runtime"), NAME)
    finally:
        os.umask(before)
    with listener:
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700


def test_a_path_longer_than_a_sockets_address_works_from_both_ends(tmp_path: Path):
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    listener, path = place.listen(in_folder(folder), NAME)
    with listener, place.opened(folder, make=False) as there:
        assert len(str(path)) > 108
        assert there.names() == [NAME]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(there.address(NAME))


def test_a_directory_that_was_opened_to_others_is_closed_again(tmp_path: Path):
    folder = tmp_path / "runtime"
    folder.mkdir()
    folder.chmod(0o777)
    with place.opened(folder, make=True):
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700


def test_a_link_is_refused_and_the_message_names_a_way_out(tmp_path: Path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    with pytest.raises(place.PlaceProblem, match="symbolic link") as refusal:
        place.listen(in_folder(link), NAME)
    assert place.VARIABLE in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert list(real.iterdir()) == []


@needs_root
def test_another_users_directory_is_refused(tmp_path: Path):
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(place.PlaceProblem, match="belongs to user 65534"):
        place.listen(in_folder(folder), NAME)


@needs_root
def test_a_login_directory_of_another_user_is_passed_over(tmp_path: Path):
    """As sudo leaves it."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    os.chown(theirs, 65534, 65534)
    assert theirs / "robust-train" not in place.candidates({"XDG_RUNTIME_DIR": str(theirs)})
    assert place.candidates({"XDG_RUNTIME_DIR": str(mine)})[0] == mine / "robust-train"


def test_without_a_login_there_is_a_directory_of_the_users_own():
    assert place.candidates({})[-1] == Path(f"/tmp/robust-train-{os.geteuid()}")


def test_looking_makes_no_directory(tmp_path: Path):
    with pytest.raises(FileNotFoundError), place.opened(tmp_path / "runtime", make=False):
        pass
    assert list(tmp_path.iterdir()) == []
