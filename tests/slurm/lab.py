"""A small world for real SkyPilot on one computer: loopback Slurm clusters, each of which SkyPilot
takes for a priced region.

    python tests/slurm/lab.py provide                     installs the Debian packages that it needs (as root), and says so
    python tests/slurm/lab.py fit                         may this computer have a lab? If not, says why and ends with 1
    python tests/slurm/lab.py play DIR                    everything: install, up, scenario.py, jobs.py, bills.py, down
    python tests/slurm/lab.py short DIR                   install, up, scenario.py --short, bills.py, down (tests/slurm/test_lab.py)
    python tests/slurm/lab.py up|down|status DIR          (root, on Debian with the packages below; ends exactly what it started)
    python tests/slurm/lab.py power-off|take|node-up DIR NODE  dies without a word / is taken, and the cloud knows / comes back
    python tests/slurm/lab.py drain|resume DIR CLUSTER    there is no more capacity in a region / there is again

Every node is a `slurmd` in its own mount and UTS namespace (own host name, own address in 127/8,
own local disk), with one GPU that is no GPU: /dev/null under another name. Everything listens on
loopback. DIR holds all state; the user `skylab` owns the nodes' home.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

USER = "skylab"
GPU = "H100"
SKYPILOT = "0.14.1"
# Debian 12's; one that the nodes' user may run, and that SkyPilot's runtime works with
PYTHON = "/usr/bin/python3.11"
NEEDS = {  # a program -> the Debian package that has it
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "nc": "netcat-openbsd",
    "curl": "curl",
    "unshare": "util-linux",
    PYTHON: "python3.11",
    "/usr/lib/python3.11/ensurepip": "python3.11-venv",
}
INSTALL_WITHIN_S = 300.0
UP_WITHIN_S = 60.0
SERVER_PORT, QUEUES_PORT = 46580, 50011  # SkyPilot's own choice, both in the range of clients' ports
PORTS_WITHIN_S = 90.0  # a client's port is kept for a minute after its connection has ended


@dataclass(frozen=True)
class Cluster:
    """One Slurm cluster: to SkyPilot a region with one zone."""

    name: str
    zone: str
    nodes: tuple[str, ...]
    usd_per_gpu_h: float
    number: int  # makes its ports and addresses its own

    @property
    def ctld_port(self) -> int:
        return 16810 + self.number

    @property
    def ssh_port(self) -> int:
        return 12210 + self.number

    def address(self, node: str) -> str:
        return f"127.0.{10 + self.number}.{self.nodes.index(node) + 1}"

    def port(self, node: str) -> int:
        return 16900 + 20 * self.number + self.nodes.index(node)


CLUSTERS = (
    Cluster("east", "east-1a", ("east1", "east2", "east3"), 1.5, 1),
    Cluster("west", "west-1a", ("west1", "west2", "west3"), 2.2, 2),
)


def unfit() -> str:
    """Why this computer cannot have a lab; empty if it can."""
    if not sys.platform.startswith("linux") or not Path("/etc/debian_version").exists():
        return "the lab needs Debian (its Slurm packages)"
    if os.geteuid() != 0:
        return "the lab needs root (namespaces, munge, a user of its own)"
    if missing := lacking():
        packages = " ".join(sorted({NEEDS[name] for name in missing}))
        return (
            f"the lab needs {', '.join(missing)}: apt-get install -y --no-install-recommends "
            f"{packages}"
        )
    tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True)
    return (
        f"the lab needs namespaces, and may not make them here: {tried.stderr.strip()}"
        if tried.returncode
        else ""
    )


def lacking(needs: Mapping[str, str] = NEEDS) -> list[str]:
    """The programs that the lab needs and this computer has not."""
    return [
        name for name in needs if not (Path(name).exists() if "/" in name else shutil.which(name))
    ]


def provide(needs: Mapping[str, str] = NEEDS, root: Path = Path("/")) -> str:
    """Install the packages that the lab needs, where this is root's Debian; why that was not done,
    or empty.

    Their services are not started (the lab starts its own, on loopback): for as long as it takes, a
    policy-rc.d forbids it.
    """
    packages = sorted({needs[name] for name in lacking(needs)})
    if not packages:
        return ""
    if (
        os.geteuid() != 0
        or not (root / "etc/debian_version").exists()
        or shutil.which("apt-get") is None
    ):
        return "only root on Debian can install packages"
    print(f"installing for the lab: {' '.join(packages)}", flush=True)
    policy = root / "usr/sbin/policy-rc.d"
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    options = ("DPkg::Lock::Timeout=60", "Acquire::Retries=3", "Dpkg::Use-Pty=0")
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    give_up_s = time.monotonic() + INSTALL_WITHIN_S
    try:
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            left_s = give_up_s - time.monotonic()
            done = subprocess.run(
                [*apt, *words],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=left_s,
            )
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()
                return (
                    f"apt-get {words[0]} failed: "
                    f"{said[-1] if said else f'status {done.returncode}'}"
                )
    except subprocess.TimeoutExpired:
        return f"apt-get took more than {INSTALL_WITHIN_S:.0f} s"
    finally:
        if ours:
            policy.unlink()
    return ""


class Lab:
    """State lies in `root`; python of `venv` runs SkyPilot's server, the controller and the
    nodes' programs."""

    def __init__(self, root: str | Path):
        self.root = Path(root).resolve()
        self.venv = self.root / "venv"
        self.home = self.root / "home"  # of the nodes: their shared file system
        self.controller_home = self.root / "controller"
        self.bucket = self.root / "bucket"
        # of SkyPilot's runtime on nodes
        self.image = self.root / "image" / "lib" / Path(PYTHON).name / "site-packages"
        # what runs: a copy, so that the tree may be worked on meanwhile
        self.code = self.root / "code"

    def install(self) -> None:
        """Packages of the controller, the API server and the nodes, of Debian's Python, which
        the nodes' user may read. What was installed before is brought up to what our package asks
        for now."""
        tree = Path(__file__).resolve().parent.parent.parent
        wanted, done = (tree / "pyproject.toml").read_text(), self.root / "installed-for.toml"
        whole = (self.image / "sky").is_dir()
        if whole and done.exists() and done.read_text() == wanted:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        if not whole:
            subprocess.run([PYTHON, "-m", "venv", self.venv], check=True)
        pip = [
            self.venv / "bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        # wandb wants a click that SkyPilot cannot have (requirements-apart.txt); nobody tracks here
        ours = [one for one in _needs(wanted) if not one.startswith(("torch", "wandb"))]
        # SkyPilot's server builds a wheel of itself, so it needs these.
        tools = ["setuptools", "wheel", "uv"]
        subprocess.run([*pip, f"skypilot[slurm]=={SKYPILOT}", *ours, *tools], check=True)
        subprocess.run([*pip, "--no-deps", tree], check=True)  # the command; code is the tree's
        if not whole:
            self._install_runtime()
        done.write_text(wanted)

    def _install_runtime(self) -> None:
        # The runtime that SkyPilot installs on every node, as a machine image may bring it: a
        # minute of two cores less for each launch.
        uv, image = self.venv / "bin" / "uv", self.root / "image"
        # whom pip trusts, uv shall trust
        there = {**os.environ, "VIRTUAL_ENV": str(image), "UV_SYSTEM_CERTS": "1"}
        subprocess.run(
            [uv, "venv", "--quiet", "--seed", "--python", PYTHON, image], env=there, check=True
        )
        runtime = [f"skypilot[slurm,remote]=={SKYPILOT}", "click<8.3.0"]
        # Without a cache: root would own it, and the nodes' user could not write there.
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--no-cache", "--compile-bytecode", *runtime],
            env=there,
            check=True,
        )

    # -- up and down --
    def up(self) -> None:
        if why := unfit():
            raise SystemExit(why)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", SERVER_PORT)) == 0:
                raise SystemExit(
                    f"SkyPilot's API server runs here already (port {SERVER_PORT}); the lab needs "
                    "its own: `sky api stop`"
                )
        self._ports_free()
        for name in ("pids", "log", "bin", "etc", "munge", "dev", "local", "uvcache"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "began").touch()
        self.bucket.mkdir(exist_ok=True)
        for name in ("local", "uvcache", "bucket"):
            (self.root / name).chmod(0o1777)
        self._user()
        self._programs()
        self._munge()
        for cluster in CLUSTERS:
            self._cluster(cluster)
        self._controller()
        self.refresh_code()
        self._wait()

    @staticmethod
    def _ports_free() -> None:
        """Wait until SkyPilot's API server can have its ports: it gives up at once where one of
        them was a client's a minute ago, as after a test suite."""
        until = time.monotonic() + PORTS_WITHIN_S
        for port in (SERVER_PORT, QUEUES_PORT):
            while not _can_listen(port):
                if time.monotonic() > until:
                    raise SystemExit(
                        f"SkyPilot's API server needs port {port}, which another program has had "
                        f"for {PORTS_WITHIN_S:.0f} s: `ss -tanp | grep {port}` shows which"
                    )
                time.sleep(1)

    def jobs_here(self, here: bool) -> None:
        """Managed jobs run in the API server's own processes (a dozen of them, which start with
        it), or cannot be launched."""
        path = self.controller_home / ".sky" / "config.yaml"
        config = json.loads(path.read_text())
        path.write_text(
            json.dumps({**config, "jobs": {"controller": {"consolidation_mode": here}}})
        )

    def refresh_code(self) -> None:
        """Copy this tree's programs to where the lab runs them from."""
        tree = Path(__file__).resolve().parent.parent.parent
        for name in ("harness", "storage", "examples", "sky_tasks"):
            shutil.rmtree(self.code / name, ignore_errors=True)
            shutil.copytree(
                tree / name, self.code / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(tree / name, self.code / name)
        # once, and not on each node
        subprocess.run([self.venv / "bin/python", "-m", "compileall", "-q", self.code], check=True)

    def down(self) -> None:
        """End everything that `up` and the nodes started: SkyPilot's server, then nodes, then
        daemons."""
        if (self.controller_home / ".sky").is_dir() and (self.venv / "bin" / "sky").exists():
            subprocess.run(
                [self.venv / "bin/sky", "api", "stop"],
                env=self.env(),
                timeout=60,
                check=False,
                capture_output=True,
            )
        for cluster in CLUSTERS:
            for node in cluster.nodes:
                self.power_off(node)
        pids = [int(p.read_text()) for p in (self.root / "pids").glob("*")]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(2.0 if number == signal.SIGTERM else 0.0)
        shutil.rmtree(self.root / "pids", ignore_errors=True)
        self._end_strays()
        self._sweep_semaphores()

    def _end_strays(self) -> None:
        """What outlives who started it: what SkyPilot runs over ssh as the nodes' user, and
        watchdogs of the API server."""
        uid, ours = pwd.getpwnam(USER).pw_uid, f"{self.venv}/bin/".encode()
        keep, pid = set(), os.getpid()
        while pid > 1:
            keep.add(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or int(entry.name) in keep:
                    continue
                if entry.stat().st_uid == uid or (entry / "cmdline").read_bytes().startswith(ours):
                    os.kill(int(entry.name), signal.SIGKILL)

    def _sweep_semaphores(self) -> None:
        """Those that SkyPilot's server leaves in shared memory: made since the lab came up, and
        open nowhere."""
        began_s = (self.root / "began").stat().st_mtime
        used = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                used |= {
                    line.split()[-1]
                    for line in maps.read_text().splitlines()
                    if "/dev/shm/sem.mp-" in line
                }
        for path in Path("/dev/shm").glob("sem.mp-*"):
            with contextlib.suppress(FileNotFoundError):
                if str(path) not in used and path.stat().st_mtime >= began_s:
                    path.unlink()

    def env(self) -> dict[str, str]:
        """The environment of a person at the controller: a HOME of its own, this tree's code,
        nothing reported."""
        keep = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SKYPILOT_", "HARNESS_", "SLURM_", "PYTEST_", "PYTHON"))
        }
        return {
            **keep,
            "HOME": str(self.controller_home),
            "PATH": f"{self.venv}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(self.code),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "LAB": str(self.root),
        }

    # -- what happens to clouds --
    def power_off(self, node: str) -> int:
        """SIGKILL every process in the node's namespace, as a power cut does. Returns how many
        there were."""
        try:
            pid = int((self.root / "pids" / f"slurmd-{node}").read_text())
            namespace = os.readlink(f"/proc/{pid}/ns/uts")
        except FileNotFoundError:
            return 0  # it is off
        victims = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/uts") == namespace:
                    victims.append(int(entry.name))
        if os.getpid() in victims:
            raise RuntimeError(f"{node} runs in our own namespace; nothing was killed")
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        (self.root / "pids" / f"slurmd-{node}").unlink()  # its number may be another's soon
        return len(victims)

    def take(self, node: str) -> None:
        """The cloud takes a machine: as a power cut, but it knows. (Slurm 22.05 may start a job on
        a node whose death it has not seen; it then starts that job again elsewhere by itself, when
        SkyPilot has given it up and forgotten it.)"""
        self.power_off(node)
        cluster = next(c.name for c in CLUSTERS if node in c.nodes)
        self.scontrol(cluster, "update", f"nodename={node}", "state=down", "reason=taken")

    def drain(self, cluster: str, nodes: tuple[str, ...] = ()) -> None:
        """No more capacity (on these nodes; default: all): running nodes stay, nothing new is
        placed."""
        found = next(c for c in CLUSTERS if c.name == cluster)
        self.scontrol(
            cluster,
            "update",
            f"nodename={','.join(nodes or found.nodes)}",
            "state=drain",
            "reason=lab",
        )

    def resume(self, cluster: str) -> None:
        """There is again, on all nodes that are on."""
        found = next(c for c in CLUSTERS if c.name == cluster)
        give_up_s = time.monotonic() + UP_WITHIN_S
        while not all(
            s in ("idle", "mixed", "allocated")
            for s in self.slurm(cluster, "sinfo", "-h", "-N", "-o", "%T").split()
        ):
            if time.monotonic() > give_up_s:
                raise SystemExit(
                    f"nodes of {cluster} are not ready after {UP_WITHIN_S:g} s; is one off? look "
                    f"at {self.root}/log"
                )
            # a node that has not said yet that it is there
            with contextlib.suppress(subprocess.CalledProcessError):
                self.scontrol(
                    cluster, "update", f"nodename={','.join(found.nodes)}", "state=resume"
                )
            time.sleep(1.0)

    def busy(self, cluster: str) -> list[str]:
        """Nodes that hold somebody's job."""
        out = self.slurm(cluster, "squeue", "-h", "-t", "R", "-o", "%N")
        return sorted(out.split())

    def scontrol(self, cluster: str, *words: str) -> str:
        return self.slurm(cluster, "scontrol", *words)

    def slurm(self, cluster: str, *words: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.root / "clusters" / cluster / "slurm.conf")}
        return subprocess.run(
            words, env=env, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def node_up(self, node: str) -> None:
        cluster = next(c for c in CLUSTERS if node in c.nodes)
        folder = self.root / "clusters" / cluster.name
        local = folder / "nodes" / node
        local.mkdir(parents=True, exist_ok=True)
        local.chmod(0o1777)
        inside = (
            f"hostname {node} && mount --bind {folder}/hosts /etc/hosts && mount --bind {local} "
            f"{self.root}/local && export SLURM_CONF={folder}/slurm.conf && exec slurmd -D -N "
            f"{node} -f {folder}/slurm.conf"
        )
        self._start(
            f"slurmd-{node}",
            ["unshare", "--mount", "--uts", "--propagation", "private", "bash", "-c", inside],
        )

    # -- parts --
    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        with open(self.root / "log" / f"{name}.log", "ab") as log:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        (self.root / "pids" / name).write_text(str(started.pid))

    def _user(self) -> None:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            subprocess.run(
                ["useradd", "-M", "-d", str(self.home), "-s", "/bin/bash", USER], check=True
            )
        # '*' rather than '!': sshd refuses locked accounts, and there is still no password that
        # fits.
        subprocess.run(
            ["usermod", "-p", "*", "-d", str(self.home), USER], check=True, capture_output=True
        )
        uid, gid = pwd.getpwnam(USER)[2:4]
        for name in ("id", "hostkey"):
            if not (self.root / "etc" / name).exists():
                subprocess.run(
                    [
                        "ssh-keygen",
                        "-q",
                        "-t",
                        "ed25519",
                        "-N",
                        "",
                        "-f",
                        str(self.root / "etc" / name),
                    ],
                    check=True,
                )
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True, exist_ok=True)
        (ssh / "authorized_keys").write_bytes((self.root / "etc/id.pub").read_bytes())
        (self.home / ".profile").write_text(
            f"export PATH={self.root}/bin:$PATH\n[ -f ~/.bashrc ] && . ~/.bashrc\n"
        )
        (self.home / ".bashrc").touch()
        ssh.chmod(0o700)
        (ssh / "authorized_keys").chmod(0o600)
        for path in (
            self.home,
            ssh,
            ssh / "authorized_keys",
            self.home / ".profile",
            self.home / ".bashrc",
        ):
            os.chown(path, uid, gid)

    def _programs(self) -> None:
        """What a machine image would bring: uv, SkyPilot's runtime, and an answer to uv's
        installer's URL."""
        shutil.copy(self.venv / "bin" / "uv", self.root / "bin" / "uv")
        self._script(
            "uv-on-node",  # SkyPilot asks for a Python that would be downloaded; Debian's will do
            f'a=(); p=; for x in "$@"; do [ "$p" = --python ] && [ "$x" = 3.10 ] && x={PYTHON}; '
            'a+=("$x"); p=$x; done\n'
            "export UV_SYSTEM_CERTS=1 SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "
            "UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=symlink\n"
            f"export UV_CACHE_DIR={self.root}/uvcache\n"
            # The runtime is in the image: all of its environments share one folder of packages,
            # compiled once.
            f"under=lib/{Path(PYTHON).name}/site-packages\n"
            'case "$1 $2" in "pip install" | "pip uninstall") [ -L "$VIRTUAL_ENV/$under" ] && exit '
            "0;; esac\n"
            f'{self.root}/bin/uv "${{a[@]}}" || exit $?\n'
            'for x in "$@"; do case "$1 $x" in "venv "*/skypilot-runtime)\n'
            f'  rm -rf "$x/$under" && ln -s {self.image} "$x/$under";; esac; done\n',
        )
        self._script(
            "curl",
            'for x in "$@"; do case "$x" in https://astral.sh/uv/install.sh)\n'
            f"""  echo 'mkdir -p "$UV_INSTALL_DIR" && cp {self.root}/bin/uv-on-node "$UV_INSTALL_DIR/uv"'; exit 0;; esac; done\n"""
            'exec /usr/bin/curl "$@"\n',
        )
        if not (self.root / "dev" / "nvidia0").exists():
            os.mknod(self.root / "dev" / "nvidia0", 0o20666, os.makedev(1, 3))

    def _script(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(0o755)

    def _munge(self) -> None:
        folder = self.root / "munge"
        if not (folder / "munge.key").exists():
            (folder / "munge.key").write_bytes(os.urandom(1024))
        uid, gid = pwd.getpwnam("munge")[2:4]
        for path in (folder, *folder.iterdir()):
            os.chown(path, uid, gid)
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        self._start(
            "munged",
            [
                "setpriv",
                "--reuid=munge",
                "--regid=munge",
                "--clear-groups",
                "munged",
                "-F",
                f"--key-file={folder}/munge.key",
                f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munged.seed",
                "--num-threads=2",
            ],
        )

    def _cluster(self, cluster: Cluster) -> None:
        folder = self.root / "clusters" / cluster.name
        # what an earlier controller remembered (drained nodes) is forgotten
        for name in ("state", "spool"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("state", "spool", "log", "nodes"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        names = "".join(f"{cluster.address(node)} {node}\n" for node in cluster.nodes)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        (folder / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu Type={GPU} File={self.root}/dev/nvidia0\n"
        )
        (folder / "slurm.conf").write_text(self._slurm_conf(cluster, folder))
        (folder / "sshd_config").write_text(
            f"Port {cluster.ssh_port}\nListenAddress 127.0.0.1\nHostKey "
            f"{self.root}/etc/hostkey\nPidFile {folder}/sshd.pid\nUsePAM no\n"
            f"StrictModes no\nPasswordAuthentication no\nAllowUsers {USER}\nPrintMotd "
            "no\nMaxSessions 200\nMaxStartups 200\n"
            f"SetEnv SLURM_CONF={folder}/slurm.conf\nSubsystem sftp internal-sftp\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self._start(
            f"ctld-{cluster.name}",
            ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"],
            {"SLURM_CONF": f"{folder}/slurm.conf"},
        )
        self._start(
            f"sshd-{cluster.name}", ["/usr/sbin/sshd", "-D", "-e", "-f", f"{folder}/sshd_config"]
        )
        for node in cluster.nodes:
            self.node_up(node)

    def _slurm_conf(self, cluster: Cluster, folder: Path) -> str:
        nodes = "".join(
            f"NodeName={n} NodeAddr={cluster.address(n)} Port={cluster.port(n)} CPUs=8 "
            f"RealMemory=65536 Gres=gpu:{GPU}:1 State=UNKNOWN\n"
            for n in cluster.nodes
        )
        return (
            f"ClusterName={cluster.name}\nSlurmctldHost={socket.gethostname().split('.')[0]}(127.0.0.1)\nSlurmctldPort={cluster.ctld_port}\n"
            f"AuthType=auth/munge\nAuthInfo=socket={self.root}/munge/munge.socket\nCredType=cred/munge\nSlurmUser=root\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\nSlurmctldPidFile={folder}/slurmctld.pid\n"
            f"SlurmdPidFile={folder}/spool/%n.pid\nSlurmctldLogFile={folder}/log/slurmctld.log\nSlurmdLogFile={folder}/log/slurmd.%n.log\n"
            # config_overrides: a small host may claim to be six large ones. ReturnToService=2: a
            # node that comes back is used again.
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\nReturnToService=2\n"
            "SlurmdParameters=config_overrides\nSelectType=select/cons_tres\nSelectTypeParameters=CR_CPU_Memory\nKillWait=5\nMinJobAge=120\n"
            "SlurmdTimeout=10\nSlurmctldTimeout=30\nBatchStartTimeout=20\nMessageTimeout=20\nInactiveLimit=0\nWaittime=0\n"
            "SchedulerParameters=sched_min_interval=500000,bf_interval=5,sched_interval=5\nJobAcctGatherType=jobacct_gather/none\n"
            f"AccountingStorageType=accounting_storage/none\nGresTypes=gpu\n{nodes}"
            f"PartitionName={cluster.zone} Nodes={','.join(cluster.nodes)} Default=YES "
            "MaxTime=7-00:00:00 OverSubscribe=NO\n"
        )

    def _controller(self) -> None:
        """A laptop's home: SkyPilot's configuration with the prices, the ways to the clusters,
        and the list of accelerators."""
        sky = self.controller_home / ".sky"
        (self.controller_home / ".slurm").mkdir(parents=True, exist_ok=True)
        (sky / "catalogs" / "v8" / "common").mkdir(parents=True, exist_ok=True)
        (self.controller_home / ".slurm" / "config").write_text("".join(
            f"Host {c.name}\n  HostName 127.0.0.1\n  Port {c.ssh_port}\n  User {USER}\n"
            f"  IdentityFile {self.root}/etc/id\n  IdentitiesOnly yes\n"
            for c in CLUSTERS
        ))  # fmt: skip
        configs = {
            c.name: {
                "tmpdir": str(self.root / "local"),
                "pricing": {"cpu": 0.0, "memory": 0.0, "accelerators": {GPU: c.usd_per_gpu_h}},
            }
            for c in CLUSTERS
        }
        config = {"slurm": {"provision_timeout": 20, "cluster_configs": configs}}
        (sky / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        # A file that is not the downloaded one is never replaced from the network. Any task that
        # names an accelerator needs it.
        source = Path(__file__).parent.parent / "fixtures" / "catalog" / "common" / "accelerators.csv"
        shutil.copy(source, sky / "catalogs" / "v8" / "common" / "accelerators.csv")

    def _wait(self) -> None:
        give_up_s = time.monotonic() + UP_WITHIN_S
        for cluster in CLUSTERS:
            while True:
                with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                    states = self.slurm(cluster.name, "sinfo", "-h", "-N", "-o", "%T").split()
                    if len(states) == len(cluster.nodes) and set(states) == {"idle"}:
                        break
                if time.monotonic() > give_up_s:
                    raise SystemExit(
                        f"cluster {cluster.name} did not come up in {UP_WITHIN_S:g} s; look at "
                        f"{self.root}/log"
                    )
                time.sleep(0.5)


def _can_listen(port: int) -> bool:
    """Asked as SkyPilot asks."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _needs(pyproject: str) -> list[str]:
    """What a GPU node needs of other packages."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["worker"]]


def play(lab: Lab, *scripts: str) -> None:
    """From nothing to a verdict. What was installed stays for the next time."""
    if why := unfit():
        raise SystemExit(why)
    lab.install()
    lab.up()
    try:
        for script in scripts:
            name, *words = script.split()
            subprocess.run(
                [lab.venv / "bin/python", Path(__file__).parent / name, lab.root, *words],
                env=lab.env(),
                check=True,
            )
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"{Path(e.cmd[1]).name} did not hold; look at {lab.root}/log") from e
    finally:
        lab.down()


def main() -> None:
    if sys.argv[1:] == ["fit"]:
        raise SystemExit(unfit() or 0)
    if sys.argv[1:] == ["provide"]:
        raise SystemExit(provide() or 0)
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    what, lab = sys.argv[1], Lab(sys.argv[2])
    match what:
        case "play":
            play(lab, "scenario.py", "jobs.py", "bills.py")
        case "short":
            play(lab, "scenario.py --short", "bills.py")
        case "up" | "down":
            getattr(lab, what)()
        case "status":
            for cluster in CLUSTERS:
                print(
                    lab.slurm(cluster.name, "sinfo", "-N", "-o", "%N %T %P"),
                    lab.slurm(cluster.name, "squeue"),
                    sep="\n",
                )
        case "power-off" | "take" | "node-up" | "drain" | "resume":
            getattr(lab, what.replace("-", "_"))(sys.argv[3])
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
