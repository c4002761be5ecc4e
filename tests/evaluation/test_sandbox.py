"""Programs that attack: each is tried with every backend that works here, and must leave no process and no file behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import shoal
from sandboxes import sandbox_of
from shoal.errors import InternalError, RequestError
from shoal.evaluation import isolation, processes, sandbox, sandbox_exec, supervisor
from shoal.evaluation.language import MIB, Bounds, Step, StepResult
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.sandbox import Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are executed on Linux only")

BOUNDS = Bounds(cpu_seconds=20, wall_seconds=60.0, memory_bytes=192 * MIB, processes=24, output_bytes=50_000)


@pytest.fixture(scope="module", params=isolation.BACKENDS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox of each backend."""
    with sandbox_of(request.param) as made:
        yield made


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where rooms are made during this test; it must be empty in the end."""
    path = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    path.chmod(0o755)  # for the user ids of programs
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    left = [str(found) for found in path.rglob("*")]
    shutil.rmtree(path)
    assert not left


@pytest.fixture
def token() -> Iterator[str]:
    """A word on the command line of all that a test starts; no process with it may live in the end."""
    word = uuid.uuid4().hex
    yield word
    assert not running(word)


def running(word: str) -> list[str]:
    """The processes of this machine with a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text(errors="replace"):
                found.append(path.parent.name)
        except OSError:  # ended meanwhile
            continue
    return found


@pytest.fixture
def attack(box: Sandbox, folder: Path, token: str) -> Callable[..., StepResult]:
    """Runs the source of a Python program."""

    def run(source: str, **bounds: float) -> StepResult:
        step = sandbox.find_toolchain("python", box).steps(LANGUAGES["python"])[-1]
        step = replace(step, command=[step.command[0], "main.py", token], bounds=replace(BOUNDS, **bounds))  # type: ignore[arg-type]
        return box.run({"main.py": textwrap.dedent(source)}, step)

    return run


def kept_from(box: Sandbox, what: str) -> None:
    """Skips a test whose attack this backend lets pass on this machine, and says so."""
    if not isolation.protections(box.backend)[what]:
        pytest.skip(f"{box.backend}: programs are not kept from {what} here, and the description says so")


# ---------------------------------------------------------------------------------------------------------------------
# What an honest program sees


def test_a_program_runs_in_its_own_room_with_an_environment_of_ours(attack: Callable[..., StepResult], folder: Path) -> None:
    ended = attack(
        """
        import os, sys
        print(os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"], sorted(os.environ), os.listdir("."))
        print("warning", file=sys.stderr)
        open("written", "w").write("here")
        sys.exit(3)
        """
    )
    assert (ended.step, ended.reason, ended.returncode, ended.stderr) == (0, "exit", 3, "warning\n")
    names = ["HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR"]
    assert ended.stdout.replace("'LC_CTYPE', ", "") == f"True {names} ['main.py']\n"
    assert not ended.succeeded


def test_steps_follow_each_other_while_they_end_well(box: Sandbox, folder: Path) -> None:
    def sh(line: str) -> Step:
        return Step(["/bin/sh", "-c", line])

    ended = box.run({"a": "first\n"}, sh("cat a > b"), sh("cat a b"), sh("echo lost; exit 7"), sh("echo never"))
    assert (ended.step, ended.returncode, ended.stdout) == (2, 7, "lost\n")
    assert box.run({"a": "first\n"}, sh("cat a > b"), sh("cat a b")).stdout == "first\nfirst\n"


def test_a_signal_is_told(attack: Callable[..., StepResult]) -> None:
    ended = attack("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (ended.reason, ended.returncode) == ("exit", -11)


def test_a_command_that_does_not_exist_is_no_program_that_failed(box: Sandbox, folder: Path) -> None:
    ended = box.run({}, Step(["/nowhere/at/all"]))
    assert (ended.reason, ended.succeeded) == ("setup", False)
    assert "/nowhere/at/all" in ended.stderr


def test_output_by_a_name_is_read(box: Sandbox, folder: Path) -> None:
    line = "echo one > /dev/stdout; echo two > /proc/self/fd/1; echo three > /dev/stderr; cat /dev/stdin"
    ended = box.run({}, Step(["/bin/sh", "-c", line]))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "one\ntwo\n", "three\n")


ASKED_BY_RUNTIMES = (
    *("/etc/ssl/openssl.cnf", "/etc/localtime", "/etc/timezone", "/etc/locale.alias"),
    *("/etc/nsswitch.conf", "/usr/share/zoneinfo/UTC", "/proc/self/cgroup", "/proc/meminfo"),
    *("/sys/devices/system/cpu/online", "/sys/kernel/mm/transparent_hugepage/enabled"),
    *("/sys/fs/cgroup/*.controllers", "/sys/fs/cgroup/memory*/memory.limit_in_bytes"),
)
"""Files that Node.js, Java, Go, PHP, g++ and the C library opened at their start, by strace."""


def test_files_that_runtimes_ask_for_are_readable_or_not_there(box: Sandbox, folder: Path) -> None:
    line = f"""for path in {" ".join(ASKED_BY_RUNTIMES)}; do [ ! -e "$path" ] || head -c 1 "$path" > /dev/null; done"""
    assert box.run({}, Step(["/bin/sh", "-c", line])).stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# Too much of something


@pytest.mark.slow(but=["bubblewrap", "namespaces"])
def test_a_fork_bomb_is_killed(attack: Callable[..., StepResult]) -> None:
    ended = attack(
        """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
        wall_seconds=1.0,
    )
    assert ended.reason in ("time", "processes")


def test_processes_are_counted(attack: Callable[..., StepResult]) -> None:
    ended = attack(
        """
        import os, time
        started = 0
        try:
            while True:
                if os.fork() == 0: time.sleep(1000)
                started += 1
        except OSError:
            print(started)
        """
    )
    if ended.reason != "processes":  # stopped by the kernel, before the supervisor looked
        assert 0 < int(ended.stdout) < BOUNDS.processes


def test_endless_output_is_cut(attack: Callable[..., StepResult]) -> None:
    ended = attack("while True: print('x' * 1000)")
    assert (ended.reason, ended.returncode) == ("output", None)
    assert ended.stdout[:25_000] == ("x" * 1000 + "\n") * 24 + "x" * 976
    assert (len(ended.stdout), {*ended.stdout[25_000:]}) == (50_000, {"x", "\n"})


def test_of_much_output_the_beginning_and_the_end_are_kept(attack: Callable[..., StepResult]) -> None:
    """A program that prints much is none that fails: what it says last counts."""
    ended = attack("print('first', 'x' * 10**6, 'last')")
    assert (ended.reason, ended.returncode) == ("exit", 0)
    assert (ended.stdout[:8], ended.stdout[-7:], len(ended.stdout)) == ("first xx", "x last\n", 50_000)


def test_ten_gigabytes_are_refused(attack: Callable[..., StepResult]) -> None:
    ended = attack("bytearray(10 * 2**30)")
    assert ended.reason == "exit"
    assert ended.stderr.endswith("MemoryError\n")


IN_A_CONTAINER = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all")
"""Before a command of root: without the right to look into other users' processes."""


@pytest.fixture(params=["with all rights", "in a container"])
def rights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors start with the rights of this process, then with those that root has in most containers."""
    if request.param == "with all rights":
        return
    if os.getuid() != 0 or not shutil.which(IN_A_CONTAINER[0]):
        pytest.skip("only root has rights to lose, by setpriv")
    start = subprocess.Popen
    monkeypatch.setattr(sandbox.subprocess, "Popen", lambda command, **how: start([*IN_A_CONTAINER, *command], **how))


@pytest.mark.slow(
    but=["bubblewrap-in a container-private", "namespaces-with all rights-shared", "limits-in a container-shared"]
)
@pytest.mark.usefixtures("rights")
@pytest.mark.parametrize("kind", ["private", "shared"])
def test_memory_is_summed_over_processes(attack: Callable[..., StepResult], kind: str) -> None:
    ended = attack(
        f"""
        import mmap, os, time
        for _ in range(4):
            if os.fork() == 0:
                taken = bytearray(100 * 2**20) if {kind!r} == "private" else mmap.mmap(-1, 100 * 2**20)
                for page in range(0, len(taken), 4096): taken[page] = 1
                time.sleep(1000)
        time.sleep(1000)
        """
    )
    assert ended.reason == "memory"


@pytest.mark.slow(but=["bubblewrap-with all rights", "namespaces-in a container"])
@pytest.mark.usefixtures("rights")
def test_memory_that_forks_share_is_counted_once(attack: Callable[..., StepResult]) -> None:
    ended = attack(
        """
        import os, time
        taken = b"x" * (100 * 2**20)
        for _ in range(4):
            if os.fork() == 0:
                time.sleep(0.5)
                os._exit(0)
        for _ in range(4): os.wait()
        """
    )
    assert ended.succeeded


def test_a_program_that_sleeps_forever_is_killed(attack: Callable[..., StepResult]) -> None:
    ended = attack("import time; time.sleep(1000)", wall_seconds=1.0)
    assert (ended.reason, ended.returncode) == ("time", None)
    assert ended.seconds >= 1


@pytest.mark.slow(but=["bubblewrap", "namespaces"])
def test_a_program_that_computes_forever_is_killed(attack: Callable[..., StepResult]) -> None:
    ended = attack("while True: pass", cpu_seconds=1)
    assert (ended.reason, ended.returncode) == ("time", -24)


def test_a_large_file_is_refused(attack: Callable[..., StepResult]) -> None:
    ended = attack("open('large', 'wb').write(bytes(4 * 2**20))", file_bytes=MIB)
    assert "File too large" in ended.stderr or ended.reason == "files"
    assert not ended.succeeded


@pytest.mark.parametrize("kind", ["large", "many"])
def test_a_full_room_is_cleared(attack: Callable[..., StepResult], kind: str) -> None:
    ended = attack(
        f"""
        import os
        content = bytes(2**20 if {kind!r} == "large" else 0)
        for number in range(100 if content else 1000):
            with open(str(number), "wb") as file: file.write(content)
        import time; time.sleep(1000)
        """,
        workdir_bytes=16 * MIB,
        workdir_files=500,
    )
    assert ended.reason == "files"


@pytest.mark.usefixtures("rights")
@pytest.mark.parametrize("kind", ["removed", "in memory"])
def test_files_without_a_name_are_counted(attack: Callable[..., StepResult], kind: str) -> None:
    ended = attack(
        f"""
        import os, time
        def nameless(number):
            if {kind!r} == "in memory": return os.memfd_create("x")
            name = str(number)
            made = os.open(name, os.O_RDWR | os.O_CREAT)
            os.unlink(name)
            return made
        held = [nameless(number) for number in range(10)]
        for descriptor in held: os.write(descriptor, bytes(2 * 2**20))
        time.sleep(1000)
        """,
        workdir_bytes=16 * MIB,
    )
    assert ended.reason == "files"


# ---------------------------------------------------------------------------------------------------------------------
# Where it has no business


def test_nothing_is_written_outside(attack: Callable[..., StepResult], box: Sandbox, folder: Path, token: str) -> None:
    kept_from(box, "writing outside its directory")
    places = [folder, "/tmp", "/var/tmp", "/dev/shm", "/", "/run", "/etc", "/usr/local", Path.home(), Path(__file__).parent]
    ended = attack(
        f"""
        import os
        for place in {list(map(str, places))}:
            for name in (place + "/{token}", os.path.relpath(place) + "/{token}"):
                try: os.mkdir(name)
                except OSError: pass
                try: open(name, "w").close()
                except OSError: pass
        os.mkdir("inside")
        """
    )
    assert ended.succeeded
    assert not [place for place in places if (Path(place) / token).exists()]


def test_other_peoples_files_are_not_read(attack: Callable[..., StepResult], box: Sandbox, folder: Path) -> None:
    kept_from(box, "reading files but the system's and its language's")
    secret = folder / "secret"
    secret.write_text("told")
    secret.chmod(0o644)
    ended = attack(f"print(open({str(secret)!r}).read())")
    secret.unlink()
    assert "told" not in ended.stdout
    assert ended.stderr.splitlines()[-1].startswith(("FileNotFoundError", "PermissionError"))


def test_a_link_out_of_the_room_is_removed_and_not_followed(attack: Callable[..., StepResult], folder: Path) -> None:
    (folder / "kept").mkdir(mode=0o777)
    (folder / "kept" / "file").touch()
    assert attack(f"import os; os.symlink({str(folder / 'kept')!r}, 'link')").succeeded
    (folder / "kept" / "file").unlink()
    (folder / "kept").rmdir()


def test_a_link_in_place_of_the_room_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o500)
    (tmp_path / "workdir").symlink_to(tmp_path / "kept")
    supervisor._remove_workdir(str(tmp_path / "workdir"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o500


def test_no_file_systems_are_mounted(attack: Callable[..., StepResult]) -> None:
    """Not even by root of a user namespace, as which programs may still declare themselves."""
    if not sandbox_exec.landlock_version():
        pytest.skip("the kernel has no Landlock, which refuses mounts")
    ended = attack(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        user_and_mounts = 0x10000000 | 0x20000
        print(libc.unshare(user_and_mounts), libc.mount(b"none", b".", b"tmpfs", 0, None), ctypes.get_errno())
        """
    )
    assert ended.stdout in ("0 -1 1\n", "-1 -1 1\n")  # EPERM


@pytest.mark.slow(but=["bubblewrap", "limits"])
def test_a_room_is_removed_however_deep_and_closed_it_is(attack: Callable[..., StepResult]) -> None:
    ended = attack(
        """
        import os
        os.mkdir("closed")
        open("closed/file", "w").close()
        os.chmod("closed", 0)
        for _ in range(1100):
            os.mkdir("d")
            os.chdir("d")
        """
    )
    assert ended.succeeded


def test_nobody_else_is_killed(attack: Callable[..., StepResult], box: Sandbox) -> None:
    kept_from(box, "signals to other processes")
    ended = attack(
        """
        import os, signal
        def parent(pid):
            try: return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
            except OSError: return 0
        pid = os.getppid()
        while pid > 1:
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
            pid = parent(pid)
        try: os.kill(-1, signal.SIGKILL)
        except OSError: pass
        print("alive")
        """
    )
    assert ended.succeeded
    assert ended.stdout == "alive\n"


def test_the_environment_is_not_told(
    attack: Callable[..., StepResult], box: Sandbox, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    kept_from(box, "the environment of other processes")
    monkeypatch.setenv("SHOAL_SECRET", "told")
    # A process of ours with the secret in its environment for others to see: ours shows that of its start.
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = attack(
        """
        import os
        print(dict(os.environ))
        for name in filter(str.isdigit, os.listdir("/proc")):
            try: print(open(f"/proc/{name}/environ").read())
            except OSError: pass
        """
    )
    assert "told" in Path(f"/proc/{other.pid}/environ").read_text(encoding="utf-8")
    other.communicate(b"\n")
    assert ended.succeeded
    assert "told" not in ended.stdout


def test_system_v_memory_is_not_left_behind(attack: Callable[..., StepResult], box: Sandbox, token: str) -> None:
    kept_from(box, "System V memory, which outlives its processes")
    key = int(token[:7], 16)
    ended = attack(f"import ctypes; print(ctypes.CDLL(None).shmget({key}, 2**20, 0o1600) >= 0)")
    assert ended.stdout == "True\n"
    assert str(key) not in Path("/proc/sysvipc/shm").read_text(encoding="utf-8").split()


def test_only_the_system_and_the_language_are_readable(
    attack: Callable[..., StepResult], box: Sandbox, folder: Path
) -> None:
    """Not the file of problems, wherever it lies, nor this repository, nor settings of the machine."""
    kept_from(box, "reading files but the system's and its language's")
    with tempfile.NamedTemporaryFile(dir="/var/tmp", suffix=".jsonl") as data:
        os.chmod(data.name, 0o644)
        data.write(b"canonical_solution")
        data.flush()
        places = [
            data.name,
            "/var/tmp",
            __file__,
            Path(__file__).parent,
            Path.home(),
            "/etc/passwd",
            "/etc",
            "/var",
            "/opt",
            "/",
        ]
        ended = attack(
            f"""
            import os
            for place in {list(map(str, places))}:
                for read in (lambda: open(place).read(), lambda: os.listdir(place)):
                    try: print(place, read())
                    except OSError: pass
            """
        )
    assert (ended.succeeded, ended.stdout) == (True, "")


def test_python_in_a_home_can_be_run(box: Sandbox, folder: Path) -> None:
    """The interpreter of these tests, wherever it is installed, a virtual environment included."""
    if box.backend != "bubblewrap":
        pytest.skip("only mounts reach into a directory that is closed to the program's user")
    ended = box.run({"main.py": "import json, sys; print(sys.prefix)"}, Step([sys.executable, "main.py"]))
    assert (ended.stderr, ended.stdout) == ("", sys.prefix + "\n")


@pytest.mark.skipif(not isolation.refused_calls(), reason="no seccomp here, or its numbers are not known")
def test_system_calls_are_refused(attack: Callable[..., StepResult], box: Sandbox) -> None:
    names = "ptrace unshare keyctl personality io_uring_setup bpf userfaultfd perf_event_open mount".split()
    numbers = {name: isolation._of(os.uname().machine, isolation.NUMBERS[name]) for name in names}
    clone = isolation._of(os.uname().machine, isolation.CLONE)
    ended = attack(
        f"""
        import ctypes, errno, threading
        call = ctypes.CDLL(None, use_errno=True).syscall
        def told(*words):
            return errno.errorcode[ctypes.get_errno()] if call(*words) == -1 else "done"
        print([name for name, number in {numbers}.items() if told(number, 0, 0, 0, 0, 0) != "EPERM"])
        print(told({clone}, 0x10000000 | 17, 0, 0, 0, 0), told(435, 0, 0))
        threading.Thread(target=lambda: print("threads")).start()
        """
    )
    assert (ended.stdout, ended.stderr) == ("[]\nEPERM ENOSYS\nthreads\n", "")


def test_programs_are_the_first_to_end_when_memory_does(attack: Callable[..., StepResult]) -> None:
    assert attack("print(open('/proc/self/oom_score_adj').read())").stdout.strip() == "1000"


def test_the_network_is_one_of_its_own(attack: Callable[..., StepResult], box: Sandbox) -> None:
    kept_from(box, "the network by other protocols")
    ended = attack("import os, socket; print(os.readlink('/proc/self/ns/net'), [name for _, name in socket.if_nameindex()])")
    assert ended.succeeded
    assert os.readlink("/proc/self/ns/net") not in ended.stdout
    assert ended.stdout.rpartition("] ")[2].strip() == "['lo']"


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_the_network_is_not_reached(attack: Callable[..., StepResult], box: Sandbox, protocol: str) -> None:
    kept_from(box, "the network by TCP" if protocol == "TCP" else "the network by other protocols")
    kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
    with socket.socket(type=kind) as server, socket.socket(type=kind) as client:
        server.bind(("127.0.0.1", 0))
        server.settimeout(200)
        if protocol == "TCP":
            server.listen()
        source = f"""
        import socket
        client = socket.socket(type={int(kind)})
        client.connect({server.getsockname()})
        client.send(b"stranger")
        """
        ended = attack(source)
        client.connect(server.getsockname())
        client.send(b"friend")
        connection = server.accept()[0] if protocol == "TCP" else server
        first = connection.recv(100)
        connection.close()
    assert first == b"friend"
    assert (not ended.succeeded) if protocol == "TCP" else True


# ---------------------------------------------------------------------------------------------------------------------
# Outliving

DAEMON = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        while True:
            with open("here", "w") as file: file.write("still")
            time.sleep(0.01)
    os._exit(0)
os.wait()
"""


def test_a_daemon_ends_with_its_program(attack: Callable[..., StepResult], token: str) -> None:
    ended = attack(DAEMON + "print('left')")
    assert (ended.succeeded, ended.stdout, running(token)) == (True, "left\n", [])


def test_a_daemon_is_killed_with_its_program(attack: Callable[..., StepResult], token: str) -> None:
    ended = attack(DAEMON + "time.sleep(1000)", wall_seconds=1.0)
    assert (ended.reason, running(token)) == ("time", [])


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def test_closing_the_sandbox_stops_what_runs(box: Sandbox, folder: Path, token: str) -> None:
    with Sandbox(box.backend) as other:
        ended: list[StepResult] = []
        step = Step(["/bin/sh", "-c", "sleep 1000; : " + token])
        threads = [threading.Thread(target=lambda: ended.append(other.run({}, step))) for _ in range(3)]
        for thread in threads:
            thread.start()
        _wait_for(lambda: len(list(folder.iterdir())) == 6)  # a directory and a /dev/shm each
        other.close()
        for thread in threads:
            thread.join()
        assert [found.reason for found in ended] == ["stopped"] * 3
        assert other.run({}, step).reason == "stopped"


def test_a_killed_evaluation_leaves_nothing_behind(box: Sandbox, folder: Path, token: str) -> None:
    code = f"""
import sys, tempfile, types
sys.modules["shoal"] = package = types.ModuleType("shoal")  # what follows does without torch: much sooner there
package.__path__ = [{str(Path(shoal.__file__).parent)!r}]
tempfile.tempdir = {str(folder)!r}
from shoal.evaluation.sandbox import Sandbox
from shoal.evaluation.language import Step
Sandbox({box.backend!r}).run({{}}, Step(["/bin/sh", "-c", "sleep 1000; : {token}"]))
"""
    evaluation = subprocess.Popen([sys.executable, "-c", code])
    # Not before the program itself runs: the first program, which tries the walls, has a file of its own for a moment.
    _wait_for(lambda: bool(running(f"-c\0sleep 1000; : {token}")))
    evaluation.kill()
    evaluation.wait()
    _wait_for(lambda: not running(token) and not list(folder.iterdir()))


def test_a_killed_supervisor_is_reported(box: Sandbox, folder: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed_at_once() -> subprocess.Popen[bytes]:
        made = start_supervisor()
        made.kill()
        return made

    start_supervisor = sandbox._start_supervisor
    monkeypatch.setattr(sandbox, "_start_supervisor", killed_at_once)
    with pytest.raises(InternalError, match="supervisor"):
        box.run({}, Step(["/bin/sh", "-c", ": " + token]))


# ---------------------------------------------------------------------------------------------------------------------
# What is said of it


def test_a_weak_way_is_taken_by_its_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "TOOLS", {"bubblewrap": "no-such-tool", "namespaces": "false"})
    with pytest.raises(
        RequestError, match=r"programs reach .*the network\): install bubblewrap .*by its name: --sandbox limits"
    ):
        Sandbox()
    with Sandbox("limits") as made:
        assert made.backend == "limits"
        assert made.isolation.startswith("limits")
        assert "NOT kept from: " in made.isolation
    with pytest.raises(RequestError, match="'bubblewrap' does not work here: there is no no-such-tool on PATH"):
        Sandbox("bubblewrap")
    with pytest.raises(RequestError, match="unknown way to isolate programs 'chroot'"):
        Sandbox("chroot")


def test_the_description_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_exec, "landlock_version", lambda: 3)
    monkeypatch.setattr(supervisor, "spare_uid", lambda: None)
    monkeypatch.setattr(isolation, "refused_calls", lambda: b"")
    assert isolation.describe("limits", cgroup=False).endswith(
        "kept from: writing outside its directory, reading files but the system's and its language's, "
        "the environment of other processes; "
        "NOT kept from: the network by TCP, the network by other protocols, signals to other processes, "
        "sockets in the file system, System V memory, which outlives its processes, "
        "system calls that programs have no use for"
    )
    monkeypatch.setattr(sandbox_exec, "landlock_version", lambda: 0)
    assert "kept from: nothing; NOT kept from" in isolation.describe("limits", cgroup=False)
    first, open_ = isolation.essentials("limits", cgroup=False)
    assert first == "limits; no cgroup, none is delegated here"
    assert open_.startswith("NOT kept from: the network by TCP, ")
    monkeypatch.setattr(isolation, "refused_calls", lambda: b"a filter")
    assert "NOT" not in isolation.describe("bubblewrap", cgroup=False)
    assert isolation.essentials("bubblewrap", cgroup=True) == ["bubblewrap; a cgroup for each program"]


def test_a_user_id_is_spare_and_differs_between_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    ids = set()
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        ids.add(supervisor.spare_uid())
    assert ids == {None} or len(ids) == 2  # None: this machine maps no others
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert supervisor.spare_uid() is None


def test_the_two_programs_need_the_standard_library_only() -> None:
    for module in (supervisor, sandbox_exec, processes):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", Path(module.__file__ or "").read_text(encoding="utf-8")], capture_output=True
        )
        assert b"ImportError" not in done.stderr
        assert b"ModuleNotFoundError" not in done.stderr
