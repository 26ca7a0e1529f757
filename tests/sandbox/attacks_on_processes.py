"""Attacks on processes that are not the program's, on the kernel, and on the program's own limits."""

from __future__ import annotations

from attack import Attack, Kind

from roll.sandbox.isolation import Guard
from roll.sandbox.seccomp_filter import Machine


def _probe(
    name: str, kind: Kind, source: str, *guards: Guard, machines: tuple[Machine, ...] = ("x86_64", "aarch64")
) -> Attack:
    return Attack(name, kind, source, frozenset(guards), machines)


PROBES = (
    _probe(
        "writing into ancestor processes through /proc",
        "processes",
        """
for pid in ABOVE:
 for name in ('mem', 'task/1/mem'): tried(pid, opened, f'/proc/{pid}/{name}', os.O_RDWR)
""",
    ),
    _probe(
        "reading the memory, maps and environment of ancestor processes",
        "processes",
        """
for pid in ABOVE:
 for name in ('environ', 'maps', 'mem', 'fd/0', 'auxv'):
  tried((pid, name), lambda: len(open(f'/proc/{pid}/{name}', 'rb').read(1)) > 0)
""",
    ),
    _probe(
        "writing into the run through /proc",
        "processes",
        """
for pid in (RUN, PARENT, VICTIM): tried(pid, opened, f'/proc/{pid}/mem', os.O_RDWR)
""",
        "files",
        "user",
    ),
    _probe(
        "tracing ancestor processes",
        "processes",
        """
for pid in ABOVE:
 for how in (16, 0x4206): tried(pid, call, 'ptrace', how, pid, 0, 0)
""",
        "calls",
    ),
    _probe(
        "tracing the run",
        "processes",
        """
for pid in (RUN, VICTIM): tried(pid, call, 'ptrace', 0x4206, pid, 0, 0)
""",
        "calls",
        "user",
    ),
    _probe(
        "process_vm_writev and process_vm_readv",
        "processes",
        """
buffer = ctypes.create_string_buffer(8)
vector = struct.pack('PN', ctypes.addressof(buffer), 8)
for pid in OTHERS:
 for name in ('process_vm_readv', 'process_vm_writev'):
  tried((name, pid), call, name, pid, vector, 1, vector, 1, 0)
""",
        "calls",
        "user",
    ),
    _probe(
        "taking file descriptors of other processes (pidfd_getfd)",
        "processes",
        """
for pid in OTHERS:
 opened_pid = libc.syscall(434, pid, 0)
 if opened_pid >= 0: tried(pid, call, 'pidfd_getfd', opened_pid, 0, 0)
""",
        "calls",
        "user",
    ),
    _probe(
        "advising and releasing memory of other processes",
        "processes",
        """
for pid in OTHERS:
 opened_pid = libc.syscall(434, pid, 0)
 if opened_pid >= 0:
  tried(pid, call, 'process_madvise', opened_pid, struct.pack('PN', 4096, 4096), 1, 21, 0)
  tried(pid, call, 'process_mrelease', opened_pid, 0)
""",
        "calls",
        "user",
    ),
    _probe(
        "comparing and moving memory of other processes",
        "processes",
        """
for pid in OTHERS:
 tried(pid, call, 'kcmp', os.getpid(), pid, 0, 0, 0)
 tried(pid, call, 'move_pages', pid, 0, 0, 0, 0, 0)
 tried(pid, call, 'migrate_pages', pid, 0, 0, 0)
""",
        "calls",
        "user",
    ),
    _probe(
        "having the run killed first when memory runs out (oom_score_adj)",
        "processes",
        """
for pid in OTHERS:
 for name in ('oom_score_adj', 'oom_adj'):
  tried((pid, name), opened, f'/proc/{pid}/{name}', os.O_WRONLY)
""",
        "files",
        "user",
    ),
    _probe(
        "further settings of other processes in /proc",
        "processes",
        """
for pid in OTHERS:
 for name in ('coredump_filter', 'timerslack_ns', 'autogroup', 'clear_refs', 'sched',
              'attr/current', 'uid_map', 'setgroups', 'timens_offsets', 'projid_map'):
  tried((pid, name), lambda: os.write(os.open(f'/proc/{pid}/{name}', os.O_WRONLY), b'1') > 0)
""",
        "files",
        "user",
    ),
    _probe(
        "limits of other processes (prlimit)",
        "processes",
        """
for pid in OTHERS:
 for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS):
  tried(pid, lambda: resource.prlimit(pid, kind, resource.prlimit(pid, kind)))
""",
        "calls",
        "user",
    ),
    _probe(
        "CPU affinity of other processes (sched_setaffinity)",
        "processes",
        """
for pid in OTHERS: tried(pid, lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)))
""",
        "calls",
        "user",
    ),
    _probe(
        "priority of other processes (setpriority)",
        "processes",
        """
for pid in OTHERS: tried(pid, lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)))
""",
        "calls",
        "user",
    ),
    _probe(
        "priority of a user's and a group's processes",
        "processes",
        """
shared = os.path.exists(f'/proc/{RUN}') and os.stat(f'/proc/{RUN}').st_uid == os.getuid()
for which, who in ((os.PRIO_USER, 0), (os.PRIO_USER, os.getuid()), (os.PRIO_PGRP, RUN)):
 if shared or who == RUN: tried((which, who), lambda: os.setpriority(which, who, os.getpriority(which, who)))
""",
        "calls",
        "user",
    ),
    _probe(
        "disk priority of other processes (ioprio_set)",
        "processes",
        """
for pid in OTHERS: tried(pid, call, 'ioprio_set', 1, pid, 3 << 13 | 7)
if not {os.getuid()} & {0}: tried('user', call, 'ioprio_set', 3, os.getuid(), 2 << 13 | 4)
""",
        "calls",
    ),
    _probe(
        "scheduling of other processes",
        "processes",
        """
for pid in OTHERS:
 tried(pid, call, 'sched_setscheduler', pid, 0, struct.pack('i', 0))
 tried(pid, call, 'sched_setparam', pid, struct.pack('i', 0))
 tried(pid, call, 'sched_setattr', pid, struct.pack('IIQiIQQQ', 48, 0, 0, 0, 0, 0, 0, 0), 0)
""",
        "calls",
        "user",
    ),
    _probe(
        "signals to the run",
        "processes",
        """
for pid in (RUN, PARENT, VICTIM):
 for number in (0, signal.SIGURG): tried(pid, os.kill, pid, number)
""",
        "signals",
    ),
    _probe(
        "signals to threads, queued ones, and by descriptor",
        "processes",
        """
info = struct.pack('iii', signal.SIGURG, 0, -1).ljust(128, b'\\0')
for pid in (RUN, VICTIM):
 tried(pid, call, 'tkill', pid, signal.SIGURG)
 tried(pid, call, 'tgkill', pid, pid, signal.SIGURG)
 tried(pid, call, 'rt_sigqueueinfo', pid, signal.SIGURG, info)
 tried(pid, call, 'rt_tgsigqueueinfo', pid, pid, signal.SIGURG, info)
 opened_pid = libc.syscall(434, pid, 0)
 if opened_pid >= 0: tried(pid, call, 'pidfd_send_signal', opened_pid, signal.SIGURG, 0, 0)
""",
        "signals",
    ),
    _probe(
        "signals to everyone",
        "processes",
        """
signal.signal(signal.SIGURG, signal.SIG_IGN)
for pid in (-1, -RUN, -VICTIM):
 try: os.kill(pid, signal.SIGURG)
 except OSError: pass
""",
        "signals",
    ),
    _probe(
        "signals that the kernel sends for a file (F_SETOWN)",
        "processes",
        """
for pid in (VICTIM, RUN):
 read, write = os.pipe()
 tried(pid, fcntl.fcntl, read, 8, pid)
 tried(pid, fcntl.fcntl, read, 10, signal.SIGURG)
 tried(pid, fcntl.fcntl, read, 15, struct.pack('ii', 1, pid))
 try: fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(write, b'x')
 except OSError: pass
""",
        "calls",
    ),
    _probe(
        "signals that the kernel sends for a socket",
        "processes",
        """
one, other = socket.socketpair()
for how in (0x8901, 0x8902):
 tried(how, fcntl.ioctl, one, how, struct.pack('i', VICTIM))
""",
        "calls",
    ),
    _probe(
        "signals to the first process",
        "processes",
        """
for number in (2, 9, 15, 19, 23):
 for pid in ABOVE:
  try: os.kill(pid, number)
  except OSError: pass
time.sleep(0.1)
""",
        "signals",
    ),
    _probe(
        "namespaces of its own",
        "kernel",
        """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x400): tried(flag, call, 'unshare', flag)
for name in ('mnt', 'user', 'net', 'pid'):
 for pid in ABOVE:
  try: tried(name, call, 'setns', os.open(f'/proc/{pid}/ns/{name}', 0), 0)
  except OSError: pass
""",
        "calls",
    ),
    _probe(
        "processes in namespaces of their own (clone, clone3)",
        "kernel",
        """
for flag in (0x10000000, 0x20000, 0x40000000):
 made = call('clone', flag | 17, 0, 0, 0, 0)
 if made == 0: os._exit(0)
 if made > 0: escaped(flag)
made = call('clone3', struct.pack('QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
if made == 0: os._exit(0)
if made > 0: escaped('clone3')
""",
        "calls",
    ),
    _probe(
        "mounts",
        "kernel",
        """
tried('mount', call, 'mount', b'none', b'/tmp', b'tmpfs', 0, 0)
tried('bind', call, 'mount', b'/', b'/tmp', 0, 4096, 0)
for path in (b'/proc/1', b'/proc', b'/scratch', b'/'): tried(path, call, 'umount2', path, 2)
tried('pivot', call, 'pivot_root', b'.', b'.')
tried('chroot', call, 'chroot', b'.')
tried('open_tree', call, 'open_tree', -100, b'/', 1)
tried('fsopen', call, 'fsopen', b'tmpfs', 0)
tried('fspick', call, 'fspick', -100, b'/', 0)
""",
    ),
    _probe(
        "programs in the kernel (bpf)",
        "kernel",
        """
tried('map', call, 'bpf', 0, struct.pack('IIIII', 2, 4, 4, 1, 0).ljust(128, b'\\0'), 128)
""",
        "calls",
    ),
    _probe(
        "counters of the kernel (perf_event_open)",
        "kernel",
        """
tried('perf', call, 'perf_event_open', struct.pack('IIQ', 1, 112, 0).ljust(112, b'\\0'), 0, -1, -1, 0)
""",
        "calls",
    ),
    _probe(
        "io_uring and asynchronous files",
        "kernel",
        """
tried('io_uring', call, 'io_uring_setup', 4, bytes(120))
tried('aio', call, 'io_setup', 1, bytes(8))
""",
        "calls",
    ),
    _probe(
        "user-space page faults (userfaultfd)",
        "kernel",
        """
for how in (0, 1): tried(how, call, 'userfaultfd', how)
""",
        "calls",
    ),
    _probe(
        "kernel keyrings",
        "kernel",
        """
tried('add', call, 'add_key', b'user', b'name', b'value', 5, -3)
tried('ring', call, 'keyctl', 1, 0)
tried('ask', call, 'request_key', b'user', b'name', 0, -3)
""",
        "calls",
    ),
    _probe(
        "the kernel's log",
        "kernel",
        """
tried('syslog', call, 'syslog', 3, bytes(4096), 4096)
for path in ('/dev/kmsg', '/proc/kmsg'): tried(path, opened, path, os.O_RDONLY | os.O_NONBLOCK)
""",
        "calls",
    ),
    _probe(
        "opening files by handle",
        "kernel",
        """
tried('handle', call, 'open_by_handle_at', -100, bytes(136), 0)
""",
        "calls",
    ),
    _probe(
        "System V shared memory, messages and semaphores",
        "kernel",
        """
tried('shm', call, 'shmget', 0, 4096, 0o1600)
tried('msg', call, 'msgget', 0, 0o1600)
tried('sem', call, 'semget', 0, 1, 0o1600)
tried('mq', call, 'mq_open', b'x', 0o102, 0o600, 0)
tried('shmctl', call, 'shmctl', 0, 13, bytes(256))
""",
        "calls",
    ),
    _probe(
        "in-memory files (memfd)",
        "kernel",
        """
tried('memfd', call, 'memfd_create', b'x', 0)
tried('secret', call, 'memfd_secret', 0)
""",
        "calls",
    ),
    _probe(
        "file watches, which are limited per user (inotify, fanotify)",
        "kernel",
        """
tried('inotify', call, 'inotify_init1', 0)
tried('fanotify', call, 'fanotify_init', 0, 0)
""",
        "calls",
    ),
    _probe(
        "system calls of another numbering: i386",
        "kernel",
        """
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
if ctypes.CFUNCTYPE(ctypes.c_int)(start)() > 0: escaped('getpid')
""",
        "calls",
        machines=("x86_64",),
    ),
    _probe(
        "system calls of another numbering: x32",
        "kernel",
        """
for number in (39, 521, 540): tried(number, libc.syscall, ctypes.c_long(0x40000000 | number))
""",
        "calls",
        machines=("x86_64",),
    ),
    _probe(
        "unknown system call numbers",
        "kernel",
        """
for number in (471, 500, 512, 521, 547): tried(number, libc.syscall, ctypes.c_long(number))
""",
        "calls",
    ),
    _probe(
        "raising its own limits",
        "limits",
        """
for name in ('AS', 'NPROC', 'FSIZE', 'CPU', 'NOFILE'):
 kind = getattr(resource, 'RLIMIT_' + name)
 tried(kind, resource.setrlimit, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
 tried(kind, resource.prlimit, 0, kind, (1 << 40, 1 << 40))
""",
    ),
    _probe(
        "becoming another user",
        "limits",
        """
for act in (os.setuid, os.setgid, os.seteuid, os.setegid): tried(act, act, 0)
tried('groups', os.setgroups, [0])
header, all_of_them = struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24
tried('capset', libc.capset, header, all_of_them)
""",
    ),
    _probe(
        "privileges of programs that it starts",
        "limits",
        """
if libc.prctl(39, 0, 0, 0, 0) != 1: escaped('setuid programs have their privileges')
""",
    ),
    _probe(
        "real-time priority",
        "limits",
        """
for policy in (1, 2): tried(policy, call, 'sched_setscheduler', 0, policy, struct.pack('i', 1))
tried('nice', os.nice, -5)
""",
    ),
    _probe(
        "typing into the terminal of the run",
        "limits",
        """
tried('tty', opened, '/dev/tty', os.O_RDWR)
for fd in (0, 1, 2): tried(fd, fcntl.ioctl, fd, 0x5412, b'x')
""",
    ),
)
