"""The user's frames of a stack."""

import contextlib

from scalax._core.util.user_frames import innermost_user_frame


def test_pythons_own_library_is_not_the_users():
    assert innermost_user_frame([contextlib.__file__, '/home/me/train.py'], str) == '/home/me/train.py'
