"""The sandboxed process: confines itself, then runs the program that stdin tells.

Run by path in isolated mode; only the standard library is here. Answers on the pipe whose number is
its argument: a line with what confines it, and one with a word that only it was told, and an error.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys

_NEWUSER, _NEWNET, _NEWPID, _NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_TCP = 0b11

libc = ctypes.CDLL(None, use_errno=True)


def namespaces() -> bool:
    """A user, network, process and IPC namespace of its own, if the kernel lets a user have them.

    The processes are those that are forked from now on.
    """
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWIPC) != 0:
        return False
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass  # then it is nobody, who may do even less
    return True


def landlock() -> bool:
    """No file outside this folder is made, written or removed, if the kernel has Landlock."""
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    access = _WRITE_FILE | _MAKE_AND_REMOVE
    access |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", access) + (struct.pack("=Q", _TCP) if version >= 4 else b"")
    rules = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    files = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    for path, allowed in ((".", access), ("/dev/null", files)):
        at = os.open(path, os.O_PATH)
        if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, at), 0) != 0:
            return False
        os.close(at)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    confined = libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return bool(confined)


def limit(name: int, most: int) -> None:
    """Sets a limit, or keeps a lower one."""
    _, hard = resource.getrlimit(name)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(name, (most, most))


def main() -> None:
    """Confines this process, and runs the program in a fork of it."""
    pipe, told = int(sys.argv[1]), json.loads(sys.stdin.buffer.read())
    confined = []
    if namespaces():
        confined.append("namespaces")
        limit(resource.RLIMIT_NPROC, told["processes"])
    if landlock():
        confined.append("landlock")
    limit(resource.RLIMIT_AS, told["memory"])
    limit(resource.RLIMIT_FSIZE, told["file"])
    limit(resource.RLIMIT_CPU, told["cpu"])
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_CORE, 0)
    os.write(pipe, json.dumps({"confined": confined}).encode() + b"\n")
    child = os.fork()
    if child:  # the first process of a namespace is its child: all of it ends with this one
        os.close(pipe)
        os.waitpid(child, 0)
        return
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    run(told["program"], told["word"], pipe)


def run(program: str, word: str, pipe: int) -> None:
    """Runs the program's text and tells how it went."""
    error = ""
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "solution"})
    except BaseException as raised:  # SystemExit as well: the program did not get to its end
        error = f"{type(raised).__name__}: {raised}"[:200]
    os.write(pipe, json.dumps({"word": word, "error": error}).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
