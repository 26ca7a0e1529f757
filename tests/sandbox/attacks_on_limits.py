"""Attacks on what a program may use: time, output, processes, memory and its scratch folder."""

from __future__ import annotations

from attack import PATIENT, SCRATCH, Attack, Kind

from roll.sandbox import Limits
from roll.sandbox.isolation import Guard

QUICK = Limits(wall_s=1.5, cpu_s=1)


def _bomb(
    name: str,
    kind: Kind,
    source: str,
    *ends: str,
    limits: Limits = PATIENT,
    slow: bool = False,
    held_by: tuple[Guard, ...] = (),
) -> Attack:
    return Attack(name, kind, source, frozenset(held_by), ends=frozenset(ends), limits=limits, slow=slow)


_FILL = """
def fill(file, size):
    "As much as goes in, in bytes."
    done = 0
    try:
        while done < size: done += os.write(file, bytes(min(1 << 19, size - done)))
    except OSError: pass
    return done
LIMIT = 4 << 20
def held(size):
    time.sleep(1)
    if size > 3 * LIMIT: print("escaped: holds", size, flush=True)
"""


def _filling(name: str, source: str, *ends: str, slow: bool = True, held_by: tuple[Guard, ...] = ()) -> Attack:
    return _bomb(
        name,
        "scratch",
        _FILL + source,
        *(ends or ("disk", "failed", "ok", "memory")),
        limits=SCRATCH,
        slow=slow,
        held_by=held_by,
    )


TIME = (
    _bomb(
        "an endless loop",
        "time and output",
        """
while True: pass
""",
        "timeout",
        limits=QUICK,
    ),
    _bomb(
        "a sleep",
        "time and output",
        """
time.sleep(3600)
""",
        "timeout",
        limits=QUICK,
        slow=True,
    ),
    _bomb(
        "all signals ignored, output closed",
        "time and output",
        """
for n in range(1, 65):
 try: signal.signal(n, signal.SIG_IGN)
 except (OSError, ValueError): pass
os.close(1); os.close(2); time.sleep(3600)
""",
        "timeout",
        limits=QUICK,
        slow=True,
    ),
    _bomb(
        "the signal of the CPU limit ignored",
        "time and output",
        """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
""",
        "killed",
        limits=Limits(wall_s=60, cpu_s=1),
        slow=True,
    ),
    _bomb(
        "a program that stops itself",
        "time and output",
        """
os.kill(os.getpid(), signal.SIGSTOP)
""",
        "timeout",
        limits=QUICK,
        slow=True,
    ),
    _bomb(
        "stopping and killing ancestor processes",
        "time and output",
        """
for pid in ABOVE:
 for n in (19, 9):
  try: os.kill(pid, n)
  except OSError: pass
print('done')
""",
        "killed",
        "ok",
        held_by=("signals",),
    ),
    _bomb(
        "a hundred megabytes of output",
        "time and output",
        """
for _ in range(100): os.write(1, bytes(1_000_000))
""",
        "output",
    ),
    _bomb(
        "a hundred megabytes of errors",
        "time and output",
        """
for _ in range(100): os.write(2, bytes(1_000_000))
""",
        "output",
        slow=True,
    ),
    _bomb(
        "output by many processes",
        "time and output",
        """
for _ in range(3): os.fork()
while True: os.write(1, bytes(65536))
""",
        "output",
        slow=True,
    ),
    _bomb(
        "a fork bomb",
        "time and output",
        """
while True:
 try: os.fork()
 except OSError: time.sleep(0.01)
""",
        "killed",
        "memory",
        "timeout",
        limits=Limits(wall_s=2, cpu_s=2, processes=12),
        slow=True,
    ),
    _bomb(
        "a bomb of threads",
        "time and output",
        """
n = 0
try:
 while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1
except RuntimeError: pass
if n > 64: print('escaped:', n)
os._exit(0)
""",
        "memory",
        "ok",
        slow=True,
    ),
    _bomb(
        "processes that leave the program (daemons)",
        "time and output",
        """
for _ in range(4):
 if os.fork() == 0:
  os.setsid()
  if os.fork(): os._exit(0)
  time.sleep(3600)
time.sleep(0.2)
""",
        "ok",
        slow=True,
    ),
    _bomb(
        "short-lived processes",
        "time and output",
        """
while True:
 if os.fork() == 0: os.fork(); os._exit(0)
 try: os.waitpid(-1, os.WNOHANG)
 except OSError: pass
""",
        "failed",
        "killed",
        "timeout",
        limits=QUICK,
        slow=True,
    ),
)

MEMORY = (
    _bomb(
        "a memory bomb",
        "memory",
        """
kept = []
while True: kept.append(bytearray(10_000_000))
""",
        "killed",
        "memory",
    ),
    _bomb(
        "a memory bomb of many processes",
        "memory",
        """
for _ in range(8):
 if os.fork() == 0: break
kept = bytearray(150_000_000)
for n in range(0, len(kept), 4096): kept[n] = 1
time.sleep(60)
""",
        "killed",
        "memory",
        slow=True,
    ),
)

SCRATCH_FOLDER = (
    _filling(
        "one large file",
        """
held(fill(os.open('large', os.O_CREAT | os.O_WRONLY), 1 << 26))
""",
    ),
    _filling(
        "many files",
        """
held(sum(fill(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY), 1 << 20) for n in range(64)))
""",
    ),
    _filling(
        "unnamed open files",
        """
size = 0
for n in range(64):
 file = os.open('x', os.O_CREAT | os.O_WRONLY); os.unlink('x')
 size += fill(file, 1 << 20)
held(size)
""",
        slow=False,
    ),
    _filling(
        "files that never had a name (O_TMPFILE)",
        """
size = 0
try:
 for n in range(64): size += fill(os.open('.', os.O_TMPFILE | os.O_RDWR), 1 << 20)
except OSError: pass
held(size)
""",
    ),
    _filling(
        "unnamed files, mapped",
        """
size, kept = 0, []
for n in range(64):
 file = os.open('x', os.O_CREAT | os.O_RDWR); os.unlink('x')
 size += fill(file, 1 << 20)
 libc.mmap.restype = ctypes.c_void_p
 try: libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file, ctypes.c_long(0)); os.close(file)
 except OSError: pass
held(size)
""",
    ),
    _filling(
        "unnamed files, in a thread with its own descriptors",
        """
def more():
  size = 0
  for n in range(64):
   file = os.open('y', os.O_CREAT | os.O_WRONLY); os.unlink('y')
   size += fill(file, 1 << 20)
  held(size)
worker = threading.Thread(target=more); worker.start(); worker.join()
""",
    ),
    _filling(
        "unnamed files, in many processes",
        """
def more(n):
 size = 0
 for _ in range(16):
  file = os.open(f'y{n}', os.O_CREAT | os.O_WRONLY); os.unlink(f'y{n}')
  size += fill(file, 1 << 20)
 return size
for n in range(6):
 if os.fork() == 0: size = more(n); time.sleep(1.5); os._exit(size > LIMIT)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]
if codes.count(1) > 3: print('escaped: holds', codes)
""",
    ),
    _filling(
        "unnamed files in flight through a socket",
        """
one, other = socket.socketpair()
size = 0
for n in range(64):
 file = os.open('x', os.O_CREAT | os.O_WRONLY); os.unlink('x')
 size += fill(file, 1 << 20)
 try: socket.send_fds(one, [b'x'], [file]); os.close(file)
 except OSError: pass
held(size)
""",
        held_by=(
            "calls",
            "user",
        ),
    ),
    _filling(
        "a process that hides its descriptors",
        """
call('prctl', 4, 0, 0, 0, 0)
size = 0
for n in range(64):
 file = os.open('x', os.O_CREAT | os.O_WRONLY); os.unlink('x')
 size += fill(file, 1 << 20)
held(size)
""",
    ),
    _filling(
        "unreadable folders",
        """
size = 0
for mode in (0o300, 0o100, 0):
 os.mkdir(f'd{mode}'); inside = os.open(f'd{mode}', os.O_RDONLY | os.O_DIRECTORY)
 files = [os.open(f'f{n}', os.O_CREAT | os.O_WRONLY, dir_fd=inside) for n in range(20)]
 os.fchmod(inside, mode)
 size += sum(fill(file, 1 << 20) for file in files)
 for file in files: os.close(file)
held(size)
""",
        slow=False,
    ),
    _filling(
        "files beyond the longest path",
        """
size = 0
for n in range(40): os.mkdir('d' * 200); os.chdir('d' * 200)
for n in range(40): size += fill(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY), 1 << 20)
held(size)
""",
    ),
    _filling(
        "51,444 nested folders",
        """
n = 0
try:
 while n < 51_444: os.mkdir('d'); os.chdir('d'); n += 1
except OSError: pass
if n == 51_444: print('escaped: made them')
""",
    ),
    _filling(
        "a million empty files",
        """
n = 0
try:
 while n < 1_000_000: os.close(os.open(f'f{n}', os.O_CREAT)); n += 1
except OSError: pass
if n == 1_000_000: print('escaped: made them')
""",
    ),
    _filling(
        "a hundred thousand names of one file",
        """
open('f', 'w').close()
n = 0
try:
 while n < 100_000: os.link('f', f'{n}' + 'x' * 200); n += 1
except OSError: pass
if n == 100_000: print('escaped: made them')
""",
    ),
    _filling(
        "space that is reserved (fallocate)",
        """
size = 0
for n in range(64):
 file = os.open(f'f{n}', os.O_CREAT | os.O_WRONLY)
 try: os.posix_fallocate(file, 0, 4 << 20); size += 4 << 20
 except OSError: pass
held(size)
""",
    ),
    _filling(
        "a sparse file",
        """
file = os.open('f', os.O_CREAT | os.O_WRONLY)
try: os.truncate(file, 1 << 40); print('escaped: a terabyte')
except OSError: pass
""",
    ),
    _filling(
        "attributes of files",
        """
size = 0
for n in range(400):
 open(f'f{n}', 'w').close()
 for k in range(8):
  try: os.setxattr(f'f{n}', f'user.a{k}', bytes(60_000)); size += 60_000
  except OSError: pass
held(size)
""",
        held_by=("calls",),
    ),
    _filling(
        "names that are not text, pipes, sockets and closed folders, left behind",
        """
os.mkdir(b'\\xff\\xfe'); open(b'\\xff\\xfe/\\n\\x01', 'w').close(); os.mkfifo('pipe')
os.mkdir('closed'); os.mkdir('closed/inner'); open('closed/inner/f', 'w').close()
os.mkdir('closed/none', 0); os.mkdir('sticky', 0o1111)
for name in ('closed/inner', 'closed'): os.fchmod(os.open(name, os.O_RDONLY), 0)
print('made')
""",
        "ok",
        slow=False,
    ),
    _filling(
        "links to outside, left behind",
        """
for n, path in enumerate((PUBLIC, PUBLIC + '/checkpoint', '/', '..', 'loop4')): os.symlink(path, f'loop{n}')
os.mkdir('d'); os.symlink(PUBLIC, 'd/link'); os.fchmod(os.open('d', os.O_RDONLY), 0o300)
for n in range(70): os.mkdir('deep'); os.chdir('deep')
os.symlink(PUBLIC, 'link')
""",
        "ok",
        slow=False,
    ),
    _filling(
        "folders that appear and vanish while they are counted",
        """
size = 0
os.mkdir('z'); files = [os.open(f'z/f{n}', os.O_CREAT | os.O_WRONLY) for n in range(40)]
if os.fork() == 0:
 while True:
  for n in range(9): os.makedirs(f'a{n}/b/c', exist_ok=True)
  for n in range(9): os.removedirs(f'a{n}/b/c')
size = sum(fill(file, 1 << 20) for file in files)
held(size)
os._exit(0)
""",
    ),
)

BOMBS: tuple[Attack, ...] = (*TIME, *MEMORY, *SCRATCH_FOLDER)
