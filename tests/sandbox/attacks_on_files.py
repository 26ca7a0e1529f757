"""Attacks on files and connections of the run."""

from __future__ import annotations

from attack import Attack, Kind

from roll.sandbox.isolation import Guard


def _probe(name: str, kind: Kind, source: str, *guards: Guard) -> Attack:
    return Attack(name, kind, source, frozenset(guards))


PROBES = (
    _probe(
        "changing a file of the run",
        "files",
        """
path = PUBLIC + '/checkpoint'
for how in ('w', 'a', 'r+'): tried(how, lambda: open(path, how).close())
tried('truncate', os.truncate, path, 0)
tried('unlink', os.unlink, path)
tried('rename', os.rename, path, path + '2')
""",
        "files",
    ),
    _probe(
        "permissions, owner and times of a file of the run",
        "files",
        """
path = PUBLIC + '/checkpoint'
tried('chmod', os.chmod, path, 0o600)
tried('chown', os.chown, path, os.getuid(), os.getgid())
tried('utime', os.utime, path, (1, 1))
tried('descriptor', lambda: os.fchmod(os.open(path, os.O_PATH), 0))
tried('folder', os.chmod, PUBLIC, 0o700)
""",
        "calls",
        "user",
    ),
    _probe(
        "making files elsewhere",
        "files",
        """
for folder in (PUBLIC, '/tmp', '/var/tmp', '/dev/shm', '/run', '/usr', '/etc', '/', '/home', '/root'):
 path = f'{folder}/new-{os.getpid()}'
 made = lambda path: opened(path, os.O_CREAT | os.O_WRONLY)
 for act in (os.mkdir, os.mkfifo, made, lambda path: os.symlink('x', path)):
  tried(folder, act, path)
 tried(folder, opened, folder, os.O_TMPFILE | os.O_RDWR)
""",
        "files",
    ),
    _probe(
        "reading files of the run",
        "files",
        """
for path in (PUBLIC + '/secret', f'/proc/{RUN}/environ',
             f'/proc/{RUN}/cmdline', f'/proc/{RUN}/maps', f'/proc/{RUN}/cwd/README.md'):
 tried(path, lambda: len(open(path, 'rb').read(20)) > 0)
for path in (PUBLIC, '/home', '/root', f'/proc/{RUN}/fd', f'/proc/{RUN}/root', f'/proc/{RUN}/cwd'):
 tried(path, lambda: [os.listdir(path)])
""",
        "files",
    ),
    _probe(
        "links to files of the run from its own folder",
        "files",
        """
for path in (PUBLIC + '/checkpoint', '/usr/bin/env'): tried(path, os.link, path, 'mine')
tried('rename', os.rename, PUBLIC + '/checkpoint', 'mine')
os.symlink(PUBLIC + '/checkpoint', 'link'); tried('link', lambda: open('link', 'w').close())
tried('up', lambda: open('../' * 40 + PUBLIC + '/checkpoint', 'w').close())
""",
        "files",
    ),
    _probe(
        "leaving its own folder",
        "files",
        """
for path in ('/proc/self/root', '/proc/self/cwd/..', '/proc/1/root', '/proc/self/fd/0', '..'):
 tried(path, lambda: open(path + PUBLIC + '/checkpoint', 'w').close())
tried('rename', os.rename, os.getcwd(), os.getcwd() + '-moved')
""",
        "files",
    ),
    _probe(
        "devices",
        "files",
        """
for kind in (stat.S_IFBLK, stat.S_IFCHR): tried(kind, os.mknod, f'device{kind}', kind | 0o600, os.makedev(1, 1))
for path in ('/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/dev/fuse',
             '/dev/kvm', '/dev/net/tun', '/dev/nvidia0', '/dev/ptmx', '/dev/userfaultfd'):
 tried(path, opened, path, os.O_RDWR | os.O_NONBLOCK)
""",
        "files",
    ),
    _probe(
        "settings of the machine",
        "files",
        """
for path in ('/proc/sys/kernel/core_pattern', '/proc/sys/vm/overcommit_memory',
             '/proc/sysrq-trigger', '/sys/power/state', '/sys/kernel/uevent_helper',
             '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/memory/tasks', '/proc/sys/fs/binfmt_misc/register'):
 tried(path, opened, path, os.O_WRONLY)
""",
        "files",
        "user",
    ),
    _probe(
        "environment of the run",
        "files",
        """
if set(os.environ) - {'PATH', 'LANG', 'PYTHONHASHSEED', 'PYTHONDONTWRITEBYTECODE', 'LC_CTYPE', 'PWD'}:
 escaped(sorted(os.environ))
""",
    ),
    _probe(
        "descriptors of the run",
        "files",
        """
own = []
for fd in range(3, 256):
 try: own.append((fd, os.readlink(f'/proc/self/fd/{fd}')))
 except OSError: pass
for fd, path in own:
 if not path.startswith('pipe:') and not path.startswith(os.getcwd()): escaped(path)
""",
    ),
    _probe(
        "blocking processes that open a file (leases)",
        "files",
        """
open('mine', 'w').close()
tried('lease', fcntl.fcntl, os.open('mine', os.O_RDONLY), 1024, 0)
tried('notify', fcntl.fcntl, os.open('.', os.O_RDONLY), 1026, 1)
""",
        "calls",
    ),
    _probe(
        "connections to the run: TCP",
        "network",
        """
tried('tcp', lambda: [socket.create_connection(('127.0.0.1', PORT), 5)])
""",
        "network",
    ),
    _probe(
        "connections to the run: Unix sockets",
        "network",
        """
for path in (UNIX, '\\0' + ABSTRACT):
 tried(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
""",
        "network",
    ),
    _probe(
        "datagrams from a pair of sockets to others",
        "network",
        """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for path in (DATAGRAM, UNIX, '\\0' + ABSTRACT, '/dev/log', '/run/systemd/notify'):
 tried(path, lambda: [one.sendto(b'x', path)])
 tried(path, one.connect, path)
""",
        "network",
    ),
    _probe(
        "datagrams",
        "network",
        """
for kind in (socket.AF_INET, socket.AF_INET6): tried(kind, lambda: [socket.socket(kind, socket.SOCK_DGRAM)])
""",
        "network",
    ),
    _probe(
        "raw, packet, netlink, vsock and cryptography sockets",
        "network",
        """
for family, kind in ((2, 3), (17, 3), (16, 3), (40, 1), (38, 5), (1, 5), (44, 2)):
 tried(family, lambda: [socket.socket(family, kind)])
""",
        "calls",
        "network",
    ),
    _probe(
        "listening for connections",
        "network",
        """
one, other = socket.socketpair()
for act in (lambda: one.bind('\\0mine'), lambda: one.listen(), lambda: [socket.create_server(('', 0))]): tried(act, act)
""",
        "network",
    ),
    _probe(
        "file descriptors sent through sockets",
        "network",
        """
one, other = socket.socketpair()
tried('fds', lambda: [socket.send_fds(one, [b'x'], [0])])
""",
        "calls",
    ),
)
