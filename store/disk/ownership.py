"""Owner, group and mode of new files in a store, chosen so that the store's owner can still write these files.

A broker and our programs may run as different users. If our program creates a file, or replaces one by a rename, the
file would belong to our user. Then the broker could not write it any more, for example its own checkpoint. So owner,
group and mode of the file depend on who writes it:

| the writing user | a new file or folder | a file that replaces another one |
| --- | --- | --- |
| owns the folder | as the system creates it; the group may write it if it may write the folder | as the old file |
| is root | gets the owner and the group of its folder | as the old file |
| is in the folder's group, which may write there | gets the folder's group, which may write it | the same |
| is any other user | is refused | is refused |

"As the old file" means with the owner, group and mode of the file that is replaced. If the folder has a default ACL,
its administrator has decided the permissions there, so new files stay as the system creates them.
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
    """The error for a new file in another user's store that this user could not write."""

    def __init__(self, owner: int, path: str) -> None:
        super().__init__(errno.EPERM, os.strerror(errno.EPERM))
        self.owner, self.path = owner, path

    def __str__(self) -> str:
        owner, us = user_name(self.owner), user_name(os.geteuid())
        return (
            f"{self.path} belongs to user {owner}, and this process runs as user {us}; expected the same user, or a "
            f"group of both users that may write there. {owner} (for example a broker) could not change files of {us}. "
            f"Run as {owner}, or give every folder of the store such a group (chgrp -R, chmod -R g+w). Nothing was "
            "written."
        )


def user_name(user: int) -> str:
    """Return the name and the id of the user with the id `user`, or only the id if the name is unknown."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    return str(user)


def hand_over(descriptor: int, folder: str, like: os.stat_result | None = None, *, only_writers: bool = False) -> None:
    """Set owner, group and mode of the new file or folder `descriptor` in `folder`, by the rules of this module.

    Call this before others can see the new file. `like` is the status of the file that the new one will replace, or
    None. With `only_writers`, users who may not write the file may not read it either. Raises ForeignOwnerError if the
    rules refuse this user.
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
        # A member of the group may have created this folder in another user's store.
        mode |= _with_group(descriptor, made, above)
    if only_writers:
        mode = _of_writers(mode)
    if mode != made.st_mode & _PERMISSIONS:
        # A folder keeps its setgid bit, because that bit gives new files in the folder the group of the folder.
        os.fchmod(descriptor, mode | (made.st_mode & stat.S_ISGID))


def close_to_readers(descriptor: int, found: os.stat_result) -> None:
    """Remove the permission to read a file from users who may not write it.

    `found` is the status of the file. Does nothing if this process may not change the mode of the file.
    """
    mode = found.st_mode & _PERMISSIONS
    if mode & ~_of_writers(mode) and os.geteuid() in (found.st_uid, _ROOT):
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, _of_writers(mode))


def _of_writers(mode: int) -> int:
    """Return the mode that lets exactly those classes of users read and write that may write by `mode`."""
    writers = mode & _ANY_WRITES
    return writers | writers << 1


def refuse_foreign(folder: str) -> None:
    """Raise ForeignOwnerError if `hand_over` would refuse a new file in `folder`.

    Does nothing if the folder does not exist.
    """
    try:
        above = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if above.st_uid not in (os.geteuid(), _ROOT) and os.geteuid() != _ROOT and not _has_default_acl(folder):
        _check_group(above, above.st_uid, folder)


def _shared(descriptor: int, made: os.stat_result, model: os.stat_result, above: os.stat_result, folder: str) -> int:
    """Give the new file the group of its folder, for a process that cannot give it the owner of `model`.

    Returns the permissions that the group needs, or 0 if the group needs none. Raises ForeignOwnerError if that
    group would not let both users write (`_check_group`).
    """
    if model.st_uid == _ROOT or _has_default_acl(folder):
        return 0
    if above.st_uid == made.st_uid and not above.st_mode & _GROUP_WRITES:
        return 0  # the other user may not write in this folder anyway
    _check_group(above, model.st_uid, folder)
    return _with_group(descriptor, made, above)


def _with_group(descriptor: int, made: os.stat_result, above: os.stat_result) -> int:
    """Give a new file the group of its folder. Return the permissions that the group needs.

    Returns 0 if this process may not set that group.
    """
    if made.st_gid != above.st_gid:
        try:
            os.fchown(descriptor, -1, above.st_gid)
        except PermissionError:
            return 0
    is_folder = stat.S_ISDIR(made.st_mode)
    return stat.S_IRGRP | stat.S_IWGRP | (stat.S_IXGRP if is_folder else 0)


def _check_group(above: os.stat_result, owner: int, folder: str) -> None:
    """Raise ForeignOwnerError unless the folder's group may write there, with this process and `owner` as members."""
    groups = {os.getegid(), *os.getgroups()}
    if not above.st_mode & _GROUP_WRITES or above.st_gid not in groups or not _is_member(owner, above.st_gid):
        raise ForeignOwnerError(owner, folder)


def _is_member(user: int, group: int) -> bool:
    """Say whether a user is in a group.

    Returns True for a user whom this system does not know, as may happen in a container.
    """
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
    except (OSError, AttributeError):  # no ACL here, no ACLs on this file system, or not Linux
        return False
