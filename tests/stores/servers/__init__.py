"""Servers for tests: started on loopback, on free ports, in temporary folders, as a user who is not root.

A server that is not installed skips its tests. With BACKEND_KWARGS_SERVERS=required, as in CI where Debian's packages
were installed, that is a failure, and so is always a server that does not start.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.stores.servers.certificates import certify

PACKAGES = {
    "postgres": "postgresql",
    "initdb": "postgresql",
    "pgbouncer": "pgbouncer",
    "redis-server": "redis-server",
    "setpriv": "util-linux",
}
STARTS_S = 60.0  # a slow machine is no failure
UNPRIVILEGED = ("nobody", "nogroup")  # initdb and PgBouncer refuse root
DOCS = Path(__file__).parents[3] / "docs"
PASSWORD = "pw-Zebra%/@:?#7"  # each character that a URL must escape
QUOTED = "pw-Zebra%25%2F%40%3A%3F%237"


def program(name: str) -> str:
    """Return the path of a server's program; skip the test where it is not installed, or fail it."""
    places = os.pathsep.join(
        [os.environ.get("PATH", ""), "/usr/sbin", *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin")))]
    )
    if found := shutil.which(name, path=places):
        return found
    why = f"{name} is not installed: apt-get install {PACKAGES[name]}"
    if os.environ.get("BACKEND_KWARGS_SERVERS") == "required":
        pytest.fail(why)
    pytest.skip(why)


def free_port() -> int:
    """Return a port where nothing listens, below those that outgoing connections take."""
    while True:
        with socket.socket() as tried:
            port = random.randint(15000, 30000)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def owned_folder() -> Path:
    """Return a new folder of the user as whom servers run."""
    folder = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, *UNPRIVILEGED)
    return folder


def as_user(ends_by: str = "TERM") -> list[str]:
    """Return the command before a server's: it changes the user, and ends the server if the tests are killed."""
    command = [program("setpriv"), "--pdeathsig", ends_by]
    if os.geteuid() == 0:
        command += ["--reuid", UNPRIVILEGED[0], "--regid", UNPRIVILEGED[1], "--clear-groups"]
    return command


class Server:
    """A server that is started, killed and started again at one port, with one folder."""

    def __init__(self, command: Callable[[int, Path], Sequence[str]], answers: Callable[[int], object]) -> None:
        self._command, self._answers = command, answers
        self.folder = owned_folder()
        self.port = 0
        for _ in range(5):  # another process may take the port first
            self.port = free_port()
            if self._begins():
                return
        self._fail()

    def _begins(self) -> bool:
        """Start the process; return whether it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port, self.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        end = time.monotonic() + STARTS_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self._answers(self.port)
            except Exception:  # noqa: BLE001 - it is not there yet
                time.sleep(0.05)
            else:
                return True
        self.stop()
        return False

    def start(self) -> None:
        """Start it again. What a killed one left may hold its place for a moment."""
        if not any(self._begins() or time.sleep(0.2) for _ in range(50)):
            self._fail()

    def _fail(self) -> None:
        text = (self.folder / "log").read_text(errors="replace")
        pytest.fail(f"a server did not start: {self._command(self.port, self.folder)}\n{text[-2000:]}")

    def kill(self) -> None:
        """`kill -9`: it writes nothing more. Its children see that it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it, and wait for that."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def close(self) -> None:
        """End it, and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Postgres(Server):
    """PostgreSQL with the users `owner`, who may create tables, and `reader`, who may read them.

    With `tls`, cert.pem in its folder is its certificate.
    """

    def __init__(self, *, tls: bool = False) -> None:
        initdb, postgres = program("initdb"), program("postgres")

        def command(port: int, folder: Path) -> Sequence[str]:
            data = folder / "data"
            if not data.exists():
                secret = folder / "password"
                secret.write_text(PASSWORD)
                secret.chmod(0o644)
                subprocess.run(
                    [
                        *[*as_user(), initdb, "-D", data, "-U", "owner", "--pwfile", secret],
                        *["--auth=scram-sha-256", "--no-sync", "--encoding=UTF8", "--no-locale"],
                    ],
                    check=True,
                    capture_output=True,
                    cwd=folder,
                )
            settings = {
                "listen_addresses": "127.0.0.1",
                "port": port,
                "unix_socket_directories": "",
                "max_connections": 40,  # fewer than there are processes in a test
                "shared_buffers": "16MB",
            }
            if tls:
                certificate = certify(folder, UNPRIVILEGED)
                settings |= {"ssl": "on", "ssl_cert_file": certificate, "ssl_key_file": folder / "key.pem"}
            options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            return [*as_user("INT"), postgres, "-D", str(data), *options]

        super().__init__(command, lambda port: self.run("SELECT 1", port=port))

    def url(self, user: str = "owner", database: str = "postgres") -> str:
        """Return the URL for a user."""
        return f"postgresql://{user}:{QUOTED}@127.0.0.1:{self.port}/{database}"

    def run(self, *statements: str, port: int = 0, database: str = "postgres") -> list[tuple]:
        """Run statements as the owner; return the rows of the last."""
        import psycopg

        at = {"host": "127.0.0.1", "port": port or self.port, "user": "owner", "password": PASSWORD}
        with psycopg.connect(**at, dbname=database, autocommit=True, connect_timeout=5) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


class PgBouncer(Server):
    """PgBouncer before a PostgreSQL, which gives each transaction any of its connections."""

    def __init__(self, behind: Postgres) -> None:
        pgbouncer = program("pgbouncer")

        def command(port: int, folder: Path) -> Sequence[str]:
            (folder / "users").write_text(f'"owner" "{PASSWORD}"\n')
            (folder / "ini").write_text(
                f"[databases]\npostgres = host=127.0.0.1 port={behind.port} dbname=postgres\n"
                f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
                f"auth_type = scram-sha-256\nauth_file = {folder / 'users'}\n"
                "pool_mode = transaction\ndefault_pool_size = 4\nmax_client_conn = 50\nserver_login_retry = 1\n"
            )
            return [*as_user(), pgbouncer, str(folder / "ini")]

        super().__init__(command, lambda port: behind.run("SELECT 1", port=port))

    def url(self) -> str:
        """Return the URL of the owner."""
        return f"postgresql://owner:{QUOTED}@127.0.0.1:{self.port}/postgres"


class Redis(Server):
    """Redis whose answers mean that a write is on the disk, with the users of docs/stores.md.

    With `tls` it answers only under TLS, and cert.pem in its folder is its certificate.
    """

    def __init__(self, *, tls: bool = False) -> None:
        redis_server = program("redis-server")
        self.tls = tls

        def command(port: int, folder: Path) -> Sequence[str]:
            settings = {
                "bind": "127.0.0.1",
                "port": str(port),
                "dir": str(folder),
                "appendonly": "yes",
                "appendfsync": "always",
                "save": "",
                "maxclients": "80",
                "requirepass": PASSWORD,
            }
            if tls:
                certificate = str(certify(folder, UNPRIVILEGED))
                settings |= {"port": "0", "tls-port": str(port), "tls-auth-clients": "no"}
                settings |= {f"tls-{name}-file": certificate for name in ("cert", "ca-cert")}
                settings["tls-key-file"] = str(folder / "key.pem")
            lines = "".join(f'{name} "{value}"\n' for name, value in settings.items())
            users = re.findall(r"^user \w+ on .*$", (DOCS / "stores.md").read_text(), re.MULTILINE)
            assert len(users) == 2
            (folder / "conf").write_text(lines + "\n".join(users).replace("PASSWORD", QUOTED) + "\n")
            return [*as_user(), redis_server, str(folder / "conf")]

        super().__init__(command, self._pings)

    def _pings(self, port: int) -> None:
        with self.client(port) as client:
            client.ping()

    def url(self, user: str = "tuner") -> str:
        """Return the URL for a user."""
        return f"redis{'s' * self.tls}://{user}:{QUOTED.replace('%', '%25')}@127.0.0.1:{self.port}/0"

    def client(self, port: int = 0):
        """Return a client of the default user."""
        import redis

        own = {"ssl": True, "ssl_ca_certs": str(self.folder / "cert.pem"), "host": "127.0.0.1"} if self.tls else {}
        return redis.Redis(port=port or self.port, password=PASSWORD, **own)


class S3(Server):
    """moto's S3, which keeps its objects in memory."""

    def __init__(self) -> None:
        pytest.importorskip("moto.server", reason="moto's server is not installed: pip install 'moto[server]'")
        super().__init__(
            lambda port, folder: [
                *[program("setpriv"), "--pdeathsig", "TERM"],
                *[sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            ],
            lambda port: socket.create_connection(("127.0.0.1", port), timeout=1).close(),
        )

    def variables(self) -> dict[str, str]:
        """Return what the environment must have for a client to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
