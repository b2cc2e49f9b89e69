"""Which store a text names, and that no password is ever shown."""

import importlib.util
import pickle
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from backend_kwargs import BackendKwargsError, make_backend
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backend import Backend
from backend_kwargs.cli.console import backend_from_text
from backend_kwargs.stores import opening, redis
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.opening import (
    check_store,
    default_place,
    opened,
    place_in_variable,
    place_of,
)
from backend_kwargs.stores.urls import unclear

SECRET = "s3cr3t%21"
URL = f"postgresql://me:{SECRET}@db.example/decisions"


@pytest.fixture
def clients(monkeypatch):
    """Let every client library be there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("given", "module"),
    [
        pytest.param("postgresql://host/db", "backend_kwargs.stores.postgres", id="postgresql"),
        pytest.param("postgres://host/db", "backend_kwargs.stores.postgres", id="postgres"),
        pytest.param("redis://host", "backend_kwargs.stores.redis", id="redis"),
        pytest.param("REDISS://host", "backend_kwargs.stores.redis", id="rediss"),
        pytest.param("s3://bucket/prefix", "backend_kwargs.stores.objects", id="s3"),
        pytest.param("gs://bucket", "backend_kwargs.stores.objects", id="another of fsspec's"),
    ],
)
def test_a_url_has_its_driver(clients, given, module):
    """A table has the module of each scheme."""
    assert place_of(given).driver.module == module


@pytest.mark.parametrize(
    "given",
    [
        *("decisions", "decisions/", "./a", "/tmp/a", "c:/d", "c:/d@e", "./a:b@c", "/tmp/a:b@c", "a@b"),
        *("/tmp/key=1", "./key=1", "a/api-key=1/date=2", "date=2/token=3"),
    ],
)
def test_a_path_is_a_folder(given):
    """Whatever is no URL names a folder."""
    assert place_of(given).driver is None


@pytest.mark.parametrize(
    ("given", "package", "install"),
    [
        pytest.param("postgresql://host/db", "psycopg", 'pip install "psycopg[binary]>=3.1"', id="postgres"),
        pytest.param("redis://host", "redis", 'pip install "redis>=5"', id="redis"),
        pytest.param("s3://bucket", "fsspec", 'pip install "fsspec>=2024.2" "s3fs>=2024.2"', id="fsspec"),
    ],
)
def test_a_missing_client_library_is_an_error_at_once(monkeypatch, given, package, install):
    """When the backend is made, with the command that installs it, which names no package that is on no index."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor:auto", store=["decisions", given])
    assert str(e.value) == (f"Store {given!r} needs the package {package}: {install} ({package} is not importable).")


NOT_A_FOLDER = "is a file, and decisions are kept in a folder: name one"
MISSING = "does not exist, and is named as the files of earlier releases: decisions are kept in a folder now, such as"


@pytest.mark.parametrize(
    ("name", "is_there", "message"),
    [
        pytest.param("x.db", True, f"{NOT_A_FOLDER}.", id="a file"),
        pytest.param("x.db/", True, f"{NOT_A_FOLDER}.", id="a file with a slash"),
        pytest.param(
            "x.sqlite",
            True,
            f"{NOT_A_FOLDER}.",
            id="of an earlier release",
        ),
        pytest.param("x.sqlite", False, f"{MISSING} 'x'.", id="missing"),
        pytest.param("x.sqlite/", False, f"{MISSING} 'x'.", id="missing with a slash"),
        pytest.param("no/such", False, "cannot be made: there is no folder 'no'.", id="no folder above"),
    ],
)
def test_a_file_is_never_made_a_folder(tmp_path, monkeypatch, name, is_there, message):
    """Nor is the name of one; the message says what is there, and which command reads it."""
    monkeypatch.chdir(tmp_path)
    if is_there:
        (tmp_path / name.rstrip("/")).touch()
    with pytest.raises(BackendKwargsError) as e:
        opened(name)
    assert str(e.value) == f"Store {name.rstrip('/')!r} {message}"


def test_a_folder_may_have_any_name(tmp_path):
    """Also one that files of earlier releases had."""
    (tmp_path / "x.sqlite").mkdir()
    assert isinstance(opened(str(tmp_path / "x.sqlite")).store, Folder)


def test_a_path_is_a_store():
    """It is kept as text, which a config can hold."""
    assert make_backend("tmpl-inductor:auto", store=Path("a")).options["store"] == "a"
    assert make_backend("tmpl-inductor:auto", store=[Path("a"), "b"]).options["store"] == ["a", "b"]


def test_the_default_is_the_users_own(monkeypatch, tmp_path):
    """BACKEND_KWARGS_STORE precedes the user's data folder, which nobody else can read."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "a"))
    assert (default_place().text, default_place().private) == (str(tmp_path / "a"), False)
    monkeypatch.delenv("BACKEND_KWARGS_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert (default_place().text, default_place().private) == (str(tmp_path / "backend_kwargs"), True)


# ---- passwords


PASSWORDS = [
    pytest.param(URL, "postgresql://db.example/decisions", id="password"),
    pytest.param("redis://:pw@host/0", "redis://host/0", id="password alone"),
    pytest.param("postgresql://host/db?password=pw", "postgresql://host/db", id="query"),
    pytest.param("s3://key:pw@bucket/a", "s3://bucket/a", id="object storage"),
    pytest.param("abfs://a/b?sig=pw", "abfs://a/b", id="signature"),
    pytest.param("simplecache::https://u:pw@h/x", "simplecache::https://h/x", id="chain"),
    pytest.param(" redis://:pw@host/0\n", "redis://host/0", id="blanks"),
]


@pytest.mark.parametrize(("given", "shown"), PASSWORDS)
def test_a_password_is_refused_in_a_value(clients, given, shown):
    """A value is printed, pickled and written to reports: the message says where to put the password."""
    message = (
        f"Store {shown!r} must not contain a password: put the URL into a variable of the environment, and write "
        "store='env:NAME'."
    )
    for make in (
        lambda: make_backend("tmpl-inductor:auto", store=given),
        lambda: make_backend("tmpl-inductor:auto", store=["a", given]),
        lambda: opened(given),
        lambda: Backend.from_config({"template": "auto", "store": given}, trust=True),
    ):
        with pytest.raises(BackendKwargsError) as e:
            make()
        assert str(e.value) == message


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(f'"{URL}"', id="quotes that a container kept"),
        pytest.param(f"jdbc:{URL}", id="of another library"),
        pytest.param("host=h user=u Password = pw dbname=d", id="libpq's"),
        pytest.param("postgresql:/u:pw@h/d", id="one slash"),
        pytest.param("u:pw@h/d", id="no scheme"),
        pytest.param("//u:pw@h/d", id="slashes alone"),
        pytest.param("https:/h/d?x=pw", id="one slash and a parameter"),
        pytest.param("h.example/d?x=pw", id="no scheme, and a parameter"),
        pytest.param("host=h user=pw", id="libpq's, of unknown names"),
        pytest.param("AccountName=a;AccountKey=pw", id="Azure's"),
        pytest.param("h/d;x=pw", id="a parameter of a path"),
        pytest.param("my.api-key=pw", id="a name and a value"),
        pytest.param("h/d password=pw", id="a path and a password"),
    ],
)
def test_what_may_be_a_password_is_no_folder(monkeypatch, given):
    """A text that is neither a URL nor the plain name of a folder is refused wherever it stands, and not shown."""
    monkeypatch.setenv("MINE", given)
    for make in (
        lambda: make_backend("tmpl-inductor:auto", store=given),
        lambda: opened(given),
        lambda: opened("env:MINE"),
    ):
        with pytest.raises(BackendKwargsError) as e:
            make()
        assert str(e.value) == str(unclear())


@pytest.mark.parametrize(("given", "shown"), PASSWORDS)
def test_a_password_in_a_variable_is_never_shown(clients, monkeypatch, given, shown):
    """Neither by the place's repr and label nor in an error of the client library."""
    monkeypatch.setenv("MINE", given)
    place = place_in_variable("MINE")
    assert (place.text, place.label) == (given.strip(), shown)
    assert shown in repr(place)
    secret = "pw" if "pw" in given else SECRET
    assert secret not in repr(place)
    for text in (given, secret, secret.replace("%21", "!")):
        assert secret not in place.without_secrets(RuntimeError(f"cannot connect to {text}"))
        assert "s3cr3t!" not in place.without_secrets(RuntimeError(f"cannot connect to {text}"))


def test_a_backend_carries_the_name_of_a_variable(monkeypatch, clients):
    """It is a value: printed, pickled and written, it names the variable, whose value is read when it is used."""
    monkeypatch.setenv("MINE", URL)
    backend = make_backend("tmpl-inductor:auto", store="env:MINE")
    copy = pickle.loads(pickle.dumps(backend))
    assert copy == backend == Backend.from_config(backend.to_config(), trust=True)
    for text in (
        repr(backend),
        str(backend.to_config()),
        repr(backend.options),
        pickle.dumps(backend).decode("latin1"),
    ):
        assert SECRET not in text
        assert "env:MINE" in text


MAKE = [
    pytest.param(opened, id="opened"),
    pytest.param(lambda given: make_backend("tmpl-inductor:auto", store=given), id="a backend"),
    pytest.param(lambda given: make_backend("tmpl-inductor:auto", store=["a", given]), id="a list"),
    pytest.param(lambda given: Backend.from_config({"template": "auto", "store": given}, trust=True), id="a config"),
    pytest.param(lambda given: make_backend("inductor", auto=True).called_with(options={"store": given}), id="a call"),
    pytest.param(Catalogue, id="a command"),
]


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            "env:NOT_SET_HERE",
            "Store 'env:NOT_SET_HERE' names a variable of the environment that is not set.",
            id="not set",
        ),
        pytest.param(
            f"env:{URL}",
            "After 'env:' a store has the name of a variable of the environment, such as env:TUNED. What was given is "
            "not shown: it may contain a password.",
            id="a URL",
        ),
    ],
)
def test_no_variable_of_the_environment(make, given, message):
    """The error names what is not set wherever it is given, at once; a URL, as of "env:$TUNED", is not shown."""
    with pytest.raises(BackendKwargsError) as e:
        make(given)
    assert str(e.value) == message


def test_a_variable_of_another_machine():
    """Where the store is used elsewhere, as by a job of a cluster, it need not be set here."""
    check_store("env:NOT_SET_HERE", elsewhere=True)
    with pytest.raises(BackendKwargsError, match="After 'env:' a store has the name of a variable"):
        check_store(f"env:{URL}", elsewhere=True)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("postgress://h/db", "postgres"),
        ("postgresq://h/db", "postgresql"),
        ("redi://h", "redis"),
        ("REDI://h", "redis"),
    ],
)
def test_a_scheme_that_is_misspelled(monkeypatch, make, given, nearest):
    """The nearest one is named at once, with fsspec and without."""
    message = f"Unknown scheme of store {given!r}: {given.partition(':')[0].lower()!r}. Did you mean {nearest!r}?"
    for find_spec in (importlib.util.find_spec, lambda name: None):
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        with pytest.raises(BackendKwargsError) as e:
            make(given)
        assert str(e.value) == message


def test_no_stores_are_no_store():
    """An empty list is not taken for the default store."""
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor:auto", store=[])
    assert str(e.value) == "Option 'store' must be a store, or a list of at least one, got [] (list)."


@pytest.mark.parametrize("url", [False, True], ids=["a folder", "a URL of one"])
def test_a_folder_that_must_exist(tmp_path, url):
    """One that is named and missing is an error where a store is only read, and none where it is written."""
    named = f"file://{tmp_path}/none" if url else str(tmp_path / "none")
    with pytest.raises(BackendKwargsError) as e:
        opened(named, must_exist=True)
    assert str(e.value) == (
        f"Store {named!r} does not exist: compile with tmpl-inductor:auto and store={named!r}, or name another one."
    )
    opened(named)
    (tmp_path / "none").mkdir()
    opened(named, must_exist=True)


def test_the_users_own_folder_need_not_exist(monkeypatch, tmp_path):
    """Before the first race there are no decisions, and that is no mistake."""
    monkeypatch.delenv("BACKEND_KWARGS_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    assert [*opened(must_exist=True).store.list("")] == []


def test_a_variable_that_names_another(monkeypatch):
    """It is no folder of that name."""
    monkeypatch.setenv("MINE", "env:OTHER")
    with pytest.raises(BackendKwargsError) as e:
        opened("env:MINE")
    assert str(e.value) == "Variable MINE must be a folder or a URL, and names a variable itself."


@pytest.mark.parametrize(
    "given",
    [
        {"url": URL},
        [{"url": URL}],
        [[URL]],
        {URL},
        URL.encode(),
        bytearray(URL.encode()),
        urlsplit("s3://b/?pwd=pw"),
        3,
    ],
    ids=lambda given: f"{type(given).__name__}",
)
def test_what_is_no_store_is_not_shown(given):
    """It may have a password, wherever in it."""
    with pytest.raises(BackendKwargsError, match="must ") as e:
        make_backend("tmpl-inductor:auto", store=given)
    for secret in (SECRET, "pw"):
        assert secret not in str(e.value)


def test_a_list_of_a_command_line(clients):
    """It is read as JSON, and each of its stores is checked."""
    read = backend_from_text("tmpl-inductor:auto", {"store": '["decisions/", "redis://host"]'})
    assert read.options["store"] == ["decisions/", "redis://host"]
    with pytest.raises(BackendKwargsError, match="must not contain a password"):
        backend_from_text("tmpl-inductor:auto", {"store": f'["decisions/", "{URL}"]'})


@pytest.mark.parametrize("path", ["team-a", "0/1"])
def test_a_path_of_redis_is_a_number(path):
    """Its client would take database 0 for any other, whoever's that is."""
    with pytest.raises(BackendKwargsError) as e:
        redis.open(f"redis://host/{path}")
    assert str(e.value) == f"The path of store 'redis://host/{path}' must be the number of a database, such as 0."


def test_an_error_of_a_client_library_has_no_password(monkeypatch, clients):
    """For people too, who have it raised."""
    monkeypatch.setenv("MINE", URL)

    class Failing:
        label = "db"

        def list(self, prefix):
            raise RuntimeError(f"connection to {URL} refused")

    monkeypatch.setattr(opening.StoreURL, "open", lambda place: Failing())
    found = opened("env:MINE")
    with pytest.raises(BackendKwargsError) as e, found.doing("read") as store:
        store.list("")
    assert (
        str(e.value)
        == "Cannot read store 'db': RuntimeError: connection to postgresql://me:***@db.example/decisions refused."
    )
    assert e.value.__suppress_context__
