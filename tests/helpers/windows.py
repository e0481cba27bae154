"""Takes from the standard library what it lacks on Windows.

This shows only what the package itself uses: the libraries, which have other ways on Windows, are there before.
"""

import importlib
import os
import select
import signal
import socket
import sys
import warnings

from helpers.scripts import ROOT

MODULES = "fcntl grp pty pwd resource syslog termios tty"
NAMES = {
    os: "O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOFOLLOW O_NONBLOCK O_SYNC chown fchdir fchmod fchown fdatasync "
    "fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid getuid killpg lchown "
    "lockf mkfifo mknod nice openpty pipe2 posix_fallocate posix_spawn pread preadv pwrite pwritev readv "
    "register_at_fork sched_getaffinity setpgid setsid setuid sync sysconf uname wait3 wait4 waitid writev",
    signal: "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGXFSZ "
    "SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm pause pthread_kill pthread_sigmask setitimer sigwait",
    socket: "AF_UNIX",
    select: "epoll poll",
}
PACKAGE = "fedbc_lightning"


def import_all() -> None:
    """Import every module of the package, its models and data modules."""
    for folder, package in ((PACKAGE, ""), ("models", f"{PACKAGE}."), ("datamodules", f"{PACKAGE}.")):
        for file in sorted((ROOT / folder).rglob("[!_]*.py")):
            importlib.import_module(package + ".".join(file.relative_to(ROOT).with_suffix("").parts))


def take_away() -> None:
    """Remove the names, and import the package anew: what it imports of others stays as it is."""
    import_all()
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):  # macOS has fewer
                delattr(module, name)
    sys.modules |= dict.fromkeys(MODULES.split())
    os.supports_dir_fd.clear()
    # Without an encoding a text file would have that of the machine, which is not UTF-8 there.
    warnings.filterwarnings("error", category=EncodingWarning, module=PACKAGE)
    import_all()
