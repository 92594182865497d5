"""Whose a new file in a store is: the user who owns the store must still be able to write it.

A broker and programs of ours may run as different users. A file that another user creates, or replaces by a rename,
would belong to that user, with that user's mode: the broker could not write its own checkpoint any more. So:

| who writes | a new file or folder | owner, group and mode of a file that is replaced |
| --- | --- | --- |
| the owner of the folder | as the system creates it, for the group too if that may write there | keeps them |
| root | gets owner and group of its folder | keeps them |
| a member of the folder's group, which may write there | gets that group, which may write it | the same |
| anybody else | is refused | is refused |

A default ACL on the folder is its administrator's own rule: new files there are left as the system creates them.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat

_ROOT = 0
_GROUP_WRITES = stat.S_IWGRP
_ANY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_PERMISSIONS = 0o777
_DEFAULT_ACL = "system.posix_acl_default"


class ForeignOwnerError(PermissionError):
    """A file of another user's store could not be written so that this user can still write it."""

    def __init__(self, owner: int, path: str) -> None:
        super().__init__(errno.EPERM, os.strerror(errno.EPERM))
        self.owner, self.path = owner, path

    def __str__(self) -> str:
        owner, us = user_name(self.owner), user_name(os.geteuid())
        return (
            f"{self.path} belongs to user {owner}, and this process runs as user {us}; expected the same user, or a "
            f"group of both that may write there. What {us} wrote, {owner} (a broker, say) could not write again. "
            f"Run as {owner}, or give every folder of the store such a group (chgrp -R, chmod -R g+w). Nothing was "
            "written."
        )


def user_name(user: int) -> str:
    """Return a user's name and number."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    return str(user)


def hand_over(descriptor: int, folder: str, like: os.stat_result | None = None, *, only_writers: bool = False) -> None:
    """Give a new file or folder in `folder` the owner and the mode that it needs, before others see it.

    `like` is the file that it replaces. With `only_writers` nobody may read it who may not write it. Raises
    ForeignOwnerError.
    """
    above = os.stat(folder)
    is_ours, is_shared = above.st_uid == os.geteuid(), above.st_mode & _GROUP_WRITES
    if is_ours and like is None and not is_shared and not only_writers:
        return
    made = os.fstat(descriptor)
    mode = (made if like is None else like).st_mode & _PERMISSIONS
    model = above if like is None else like
    if model.st_uid != made.st_uid or (like is not None and like.st_gid != made.st_gid):
        try:
            os.fchown(descriptor, model.st_uid, model.st_gid)
        except PermissionError:
            mode |= _shared(descriptor, made, model, above, folder)
    if is_ours and like is None and is_shared and not _has_default_acl(folder):
        # Members of the group may have made this folder in a store of somebody else.
        mode |= _with_group(descriptor, made, above)
    if only_writers:
        mode = _of_writers(mode)
    if mode != made.st_mode & _PERMISSIONS:
        # A folder keeps the bit by which what is made in it gets its group.
        os.fchmod(descriptor, mode | (made.st_mode & stat.S_ISGID))


def close_to_readers(descriptor: int, found: os.stat_result) -> None:
    """Take the right to read a file from users who may not write it, where this process may do that."""
    mode = found.st_mode & _PERMISSIONS
    if mode & ~_of_writers(mode) and os.geteuid() in (found.st_uid, _ROOT):
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, _of_writers(mode))


def _of_writers(mode: int) -> int:
    """Return the permissions to read and to write of all who may write."""
    writers = mode & _ANY_WRITES
    return writers | writers << 1


def refuse_foreign(folder: str) -> None:
    """Raise ForeignOwnerError if a new file in `folder` could not be handed over. A folder that is missing is fine."""
    try:
        above = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if above.st_uid not in (os.geteuid(), _ROOT) and os.geteuid() != _ROOT and not _has_default_acl(folder):
        _check_group(above, above.st_uid, folder)


def _shared(descriptor: int, made: os.stat_result, model: os.stat_result, above: os.stat_result, folder: str) -> int:
    """Let the group of the folder write the file; return the permissions that this takes."""
    if model.st_uid == _ROOT or _has_default_acl(folder):
        return 0
    if above.st_uid == made.st_uid and not above.st_mode & _GROUP_WRITES:
        return 0  # the other one may not write in this folder anyway
    _check_group(above, model.st_uid, folder)
    return _with_group(descriptor, made, above)


def _with_group(descriptor: int, made: os.stat_result, above: os.stat_result) -> int:
    """Give a new file the group of its folder, where this process may; return the permissions that the group needs."""
    if made.st_gid != above.st_gid:
        try:
            os.fchown(descriptor, -1, above.st_gid)
        except PermissionError:
            return 0
    is_folder = stat.S_ISDIR(made.st_mode)
    return stat.S_IRGRP | stat.S_IWGRP | (stat.S_IXGRP if is_folder else 0)


def _check_group(above: os.stat_result, owner: int, folder: str) -> None:
    """Raise ForeignOwnerError unless this process and the owner have the folder's group, and it may write there."""
    groups = {os.getegid(), *os.getgroups()}
    if not above.st_mode & _GROUP_WRITES or above.st_gid not in groups or not _is_member(owner, above.st_gid):
        raise ForeignOwnerError(owner, folder)


def _is_member(user: int, group: int) -> bool:
    """Say whether a user has a group. One whom this system does not know (in a container, say) counts as having it."""
    try:
        known = pwd.getpwuid(user)
    except KeyError:
        return True
    with contextlib.suppress(KeyError):
        if known.pw_name in grp.getgrgid(group).gr_mem:
            return True
    return group in os.getgrouplist(known.pw_name, known.pw_gid)


def _has_default_acl(folder: str) -> bool:
    try:
        return bool(os.getxattr(folder, _DEFAULT_ACL))
    except (OSError, AttributeError):  # none, a file system without ACLs, another system
        return False
