"""Programs that take memory which no process is seen to hold: buffers, pages that nobody maps, page tables, inodes.

Each tries to hold `GOAL_MB`, prints `held` when it has for a second, and waits. What it may take is `LIMIT_MB`; where
that is watched and not counted, a program may hold more until somebody looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LIMIT_MB = 128
GOAL_MB = 400

_BEGIN = f"""
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys, time
GOAL = {GOAL_MB} << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
kept = []

def share(count, act):
    "Splits the work over processes, each of which keeps what it takes, and waits until all have."
    told, tell = os.pipe()
    for part in range(count):
        if os.fork() == 0:
            try:
                act()
                os.write(tell, b"x")
                time.sleep(600)
            except BaseException as error: os.write(2, repr(error).encode())
            finally:
                os.write(tell, b"-")
                os._exit(1)
    while count:
        said = os.read(told, count)
        if b"-" in said: sys.exit(1)
        count -= len(said)

def held():
    time.sleep(1)
    print("held", flush=True)
    time.sleep(600)
"""

_FILL = """
def fill(fd):
    os.set_blocking(fd, False)
    taken = 0
    for piece in (bytes(32768), bytes(4096), bytes(256), b"x"):
        try:
            while True: taken += os.write(fd, piece)
        except (BlockingIOError, OSError): pass
    return taken
"""

_SOURCES = {
    "shared mappings that shrink": """
for _ in range(GOAL >> 24):
    kept.append(mmap.mmap(-1, 1 << 24))
    for at in range(0, 1 << 24, 4096): kept[-1][at] = 1
    kept[-1].resize(4096)
""",
    "shared mappings of /dev/zero that shrink": """
zero = os.open("/dev/zero", os.O_RDWR)
for _ in range(GOAL >> 24):
    at = libc.mmap(None, 1 << 24, 3, 1, zero, 0)
    if at == 2**64 - 1: raise OSError
    ctypes.memset(at, 1, 1 << 24)
    libc.munmap(at + 4096, (1 << 24) - 4096)
""",
    "shared mappings whose pages a child takes": """
for _ in range(GOAL >> 24):
    kept.append(mmap.mmap(-1, 1 << 24))
    if os.fork() == 0:
        for at in range(0, 1 << 24, 4096): kept[-1][at] = 1
        os._exit(0)
    os.wait()
    kept[-1].resize(4096)
""",
    "pairs of sockets": _FILL
    + """
def pairs():
    taken = 0
    while taken < GOAL // 12:
        kept.append(socket.socketpair())
        taken += fill(kept[-1][0].fileno()) + fill(kept[-1][1].fileno())
share(12, pairs)
""",
    "pairs of sockets for datagrams": _FILL
    + """
def pairs():
    taken = 0
    while taken < GOAL // 12:
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while True: taken += end.send(bytes(100_000))
            except OSError: pass
share(12, pairs)
""",
    "sockets of processes that cannot be inspected": _FILL
    + """
import shutil, subprocess
shutil.copyfile(os.path.realpath(sys.executable), "python")
file = os.open("python", os.O_RDONLY)
os.fchmod(file, 0o111)  # who may run it, but not read it, is hidden from others of the same user
os.close(file)
source = open("main.py").read().partition("def fill")[2].partition("import shutil")[0]
source = f"import os, socket, time\\ndef fill{source}kept = []\\ntaken = 0\\nwhile taken < {GOAL // 8}:\\n"
source += " kept.append(socket.socketpair())\\n taken += fill(kept[-1][0].fileno()) + fill(kept[-1][1].fileno())\\n"
source += "print('full', flush=True)\\ntime.sleep(600)"
hidden = [subprocess.Popen(["./python", "-c", source], stdout=subprocess.PIPE) for _ in range(8)]
if any(each.stdout.readline() != b"full\\n" for each in hidden): sys.exit(1)
""",
    "sockets with larger buffers": _FILL
    + """
taken = 0
while taken < GOAL:
    kept.append(socket.socketpair())
    for end in kept[-1]:
        for option in (socket.SO_SNDBUF, 32):
            try: end.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
            except OSError: pass
        taken += fill(end.fileno())
""",
    "sockets in flight within sockets": _FILL
    + """
def nest():
    taken = 0
    while taken < GOAL // 12:
        carrier = socket.socketpair()
        for _ in range(64):
            pair = socket.socketpair()
            taken += fill(pair[0].fileno()) + fill(pair[1].fileno())
            socket.send_fds(carrier[0], [b"x"], [pair[0].fileno(), pair[1].fileno()])
        kept.append(carrier)
share(12, nest)
""",
    "pipes": _FILL
    + """
def pipes():
    taken = 0
    while taken < GOAL // 12:
        kept.append(os.pipe())
        try: fcntl.fcntl(kept[-1][1], 1031, 1 << 20)
        except OSError: pass
        taken += fill(kept[-1][1])
share(12, pipes)
""",
    "links": """
for n in range(GOAL // 1100): os.symlink("x" * 100, f"l{n}")
""",
    "links with long targets": """
for n in range(GOAL // 5000): os.symlink("x" * 4000, f"l{n}")
""",
    "empty files": """
for n in range(GOAL // 1000): os.close(os.open(f"f{n}", os.O_CREAT))
""",
    "one file with many names": """
os.close(os.open("first", os.O_CREAT))
for n in range(GOAL // 250): os.link("first", f"{n}" + "x" * 200)
""",
    "extended attributes": """
taken = 0
for n in range(1 << 20):
    os.close(os.open(f"f{n}", os.O_CREAT))
    for k in range(8):
        os.setxattr(f"f{n}", f"user.a{k}", bytes(60_000))
        taken += 60_000
    if taken > GOAL: break
""",
    "page tables": """
def tables():
    for n in range(GOAL // 6 // 8192):
        at = libc.mmap((1 << 33) + (n << 30), 4096, 1, 0x100000 | 0x22, -1, 0)
        if at != (1 << 33) + (n << 30): raise MemoryError
        ctypes.string_at(at, 1)
share(6, tables)
""",
    "unmapped pages in pipes": """
libc.vmsplice.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
def gift():
    taken, huge = 0, 2 << 20
    while taken < GOAL // 4:
        kept.append(os.pipe())
        for _ in range(16):
            at = libc.mmap(None, 2 * huge, 3, 0x22, -1, 0)
            start = (at + huge - 1) // huge * huge
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(huge), 14)
            ctypes.memset(start, 1, huge)
            if libc.vmsplice(kept[-1][1], struct.pack("QQ", start, 1), 1, 0) != 1: raise OSError
            libc.munmap(at, 2 * huge)
            taken += huge
share(4, gift)
""",
    "locks of files": """
def locks():
    files = [os.open(f"{os.getpid()}-{n}", os.O_CREAT | os.O_RDWR) for n in range(200)]
    for n in range(GOAL // 12 // 200 // 200):
        for file in files: fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)
share(12, locks)
""",
    "queued signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, [34])
def queue():
    for _ in range(GOAL // 12 // 100):
        if libc.sigqueue(os.getpid(), 34, ctypes.c_void_p(0)): raise OSError
share(12, queue)
""",
    "rules of Landlock": """
def rules():
    for _ in range(GOAL // 12 // (65000 * 64) + 1):
        made = libc.syscall(444, struct.pack("QQ", 1, 3), 16, 0)
        if made < 0: raise OSError
        for port in range(65000): libc.syscall(445, made, 2, struct.pack("QQ", 1, port), 0)
share(12, rules)
""",
    "terminals": """
def terminals():
    taken = 0
    while taken < GOAL // 12:
        kept.append(os.openpty())
        os.set_blocking(kept[-1][0], False)
        try:
            while True: taken += os.write(kept[-1][0], bytes(4096))
        except OSError: pass
share(12, terminals)
""",
    "many processes": """
def take():
    held = bytearray(GOAL // 8)
    for at in range(0, len(held), 4096): held[at] = 1
    kept.append(held)
share(8, take)
""",
}

ATTACKS: Mapping[str, str] = MappingProxyType({name: f"{_BEGIN}{text}\nheld()\n" for name, text in _SOURCES.items()})
