"""Plans: their units, and the errors in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend_kwargs.cli import app
from backend_kwargs.cli.decisions import _show, page_of_plan
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.fleet.board import AUTO, WITHOUT_EFFECT, Unit, UnitDocument, read_plan
from backend_kwargs.fleet.racing import racing
from backend_kwargs.fleet.scheduling import Summary, UnitOutcome
from backend_kwargs.interval import Interval
from backend_kwargs.page.document import Verdict
from backend_kwargs.registry import make_backend

MODELS = "def build(batch=1): ...\n"
LEAST = 'devices = ["cpu"]\n[[models]]\nmodel = "models.py:build"\n'


@pytest.fixture
def plan(tmp_path):
    """Return a function that writes a plan beside its factories, and returns its path."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")

    def write(text):
        (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
        return tmp_path / "plan.toml"

    return write


def test_a_unit_for_each_combination(plan):
    """Sizes, dtypes, devices and threads are combined, and a model's own keys win; threads are of a CPU alone."""
    units = read_plan(
        plan(
            'devices = ["cpu", "H100"]\nthreads = [1, 2]\nbudget_s = 5\n[[models]]\nmodel = "models.py:build"\n'
            'shapes = { batch = [1, 8] }\n[[models]]\nmodel = "models.py:build"\ndevices = ["cuda"]\nbudget_s = 7\n'
            'dtypes = ["bfloat16"]\n'
        )
    )
    assert [(each.device, each.threads, each.sizes, each.dtype, each.budget_s) for each in units] == [
        ("cpu", 1, {"batch": 1}, "", 5.0),
        ("cpu", 2, {"batch": 1}, "", 5.0),
        ("cpu", 1, {"batch": 8}, "", 5.0),
        ("cpu", 2, {"batch": 8}, "", 5.0),
        ("H100", None, {"batch": 1}, "", 5.0),
        ("H100", None, {"batch": 8}, "", 5.0),
        ("cuda", None, {}, "bfloat16", 7.0),
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param('devices = ["cpu", "cpu"]\n', 1, id="a device twice"),
        pytest.param('devices = ["cpu", "CPU", " cpu"]\n', 1, id="a device in another case"),
        pytest.param('devices = ["cuda", "CUDA"]\nthreads = [1, 2]\n', 1, id="a GPU in another case"),
        pytest.param('devices = ["cpu"]\nthreads = [2, 2]\n', 1, id="threads twice"),
        pytest.param('devices = ["H100", "H100 PCIe"]\n', 2, id="a name within another"),
        pytest.param('devices = ["cpu"]\nthreads = [1, 4096]\n', 2, id="the most threads"),
        pytest.param('devices = ["cuda"]\nthreads = [1, 2]\n', 1, id="threads on a GPU"),
        pytest.param('devices = ["cpu"]\ngpus = 1.0\nbudget_s = 0\n', 1, id="a whole GPU and no budget"),
    ],
)
def test_what_is_one_unit(plan, text, count):
    """What is written twice is raced once."""
    assert len(read_plan(plan(text + LEAST.partition("\n")[2]))) == count


def test_changed_code_is_another_unit(plan):
    """A unit's key is the same for the same factory file, and another for a changed one."""
    path = plan(LEAST)
    first, again = read_plan(path)[0].key, read_plan(path)[0].key
    path.with_name("models.py").write_text(MODELS + "# changed\n", encoding="utf-8")
    assert first == again
    assert read_plan(path)[0].key != first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("budgets_s = 3\n" + LEAST, "Unknown key of {}: 'budgets_s'. Did you mean 'budget_s'?", id="a key"),
        pytest.param(
            LEAST + "shape = { batch = [1] }\n",
            "Unknown key of {}, models[0]: 'shape'. Did you mean 'shapes'?",
            id="a key of a model",
        ),
        pytest.param(
            LEAST + "zzz = 1\n",
            "Unknown key of {}, models[0]: 'zzz'. It may have budget_s, candidates, devices, dtypes, effort, gpus, "
            "limit_s, model, options, shapes, threads.",
            id="a key like none",
        ),
        pytest.param(
            LEAST + "shapes = { batch = [0] }\n",
            "{} is not a plan: Expected `int` >= 1 - at `models[0].shapes[...][0]`.",
            id="a size of 0",
        ),
        pytest.param(
            LEAST + 'dtypes = ["int8"]\n',
            "{} is not a plan: Invalid enum value 'int8' - at `models[0].dtypes[0]`.",
            id="a dtype",
        ),
        pytest.param(
            'devices = ["cpu"]\n',
            '{} has no [[models]] table: add one with model = "file.py:function".',
            id="no models",
        ),
        pytest.param(
            '[[models]]\nmodel = "models.py:build"\n',
            '{} names no devices for \'models.py:build\': add devices = ["cpu"] or ["cuda"].',
            id="no devices",
        ),
        pytest.param(
            "threads = [4097]\n" + LEAST,
            "{} is not a plan: Expected `int` <= 4096 - at `threads[0]`.",
            id="more threads",
        ),
        pytest.param(
            "Devices = ['cpu']\n" + LEAST, "Unknown key of {}: 'Devices'. Did you mean 'devices'?", id="another case"
        ),
        pytest.param(
            "gpus = 0.5\n" + LEAST,
            "gpus must be 1, got 0.5: a race on a part of a GPU would time its neighbours; leave it out.",
            id="half a GPU",
        ),
        pytest.param(
            LEAST.replace("models.py", "../models.py"),
            "A plan's factory must be a file beside the plan or below it, got '../models.py' (str).",
            id="outside",
        ),
        pytest.param(
            LEAST + "shapes = { batch = [] }\n",
            "{} is not a plan: Expected `array` of length >= 1 - at `models[0].shapes[...]`.",
            id="no sizes",
        ),
        pytest.param(
            "budget_s = inf\n" + LEAST,
            "{} is not a plan: Expected `float` <= 1000000000.0 - at `budget_s`.",
            id="an endless budget",
        ),
        pytest.param(
            LEAST.replace("build", "f" * 600),
            "{} is not a plan: Expected `str` of length <= 500 - at `models[0].model`.",
            id="a long name",
        ),
        pytest.param(
            "options = { tolerance = inf }\n" + LEAST,
            "Option 'tolerance' of {} must be what JSON can say, where numbers are finite, got inf (float).",
            id="an option that JSON cannot say",
        ),
        pytest.param(
            "options = { effort = 'full' }\n" + LEAST,
            "effort is a key of a plan, not one of its options: write effort = ... alone.",
            id="a key as an option",
        ),
        pytest.param(
            LEAST + f"shapes = {{ a = {list(range(1, 2000))}, b = {list(range(1, 2000))} }}\n",
            "{} has more than 100000 units: divide it into several plans.",
            id="millions of units",
        ),
    ],
)
def test_errors(plan, text, message):
    """What is wrong in a plan is said with its place, and the close name."""
    path = plan(text)
    with pytest.raises(BackendKwargsError) as error:
        read_plan(path)
    assert str(error.value) == message.format(repr(str(path)))


def test_options_of_a_plan_have_an_effect(plan):
    """What a race of a unit sets itself, or does not read, is refused as an option of a plan."""
    with racing(make_backend(AUTO), 1.0) as backend:
        own = set(backend.options) - {"auto", "budget_s", "store"}
    assert own <= set(WITHOUT_EFFECT) < set(make_backend(AUTO).known_options())
    for name in WITHOUT_EFFECT:
        with pytest.raises(BackendKwargsError) as error:
            read_plan(plan(f"options = {{ {name} = 1 }}\n{LEAST}"))
        why = f"Option {name!r} has no effect in a plan, whose units are all raced: remove it."
        assert str(error.value) == why


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"label": "a" * 201},
            f"Store's 'label' must be str of at most 200 characters, got '{'a' * 76}... (str).",
            id="a label",
        ),
        pytest.param(
            {"signing_key": "no.pem"},
            "Cannot read a private key from 'no.pem': FileNotFoundError: [Errno 2] No such file or directory: "
            "'no.pem'.",
            id="a key",
        ),
        pytest.param(
            {"url": "a"},
            "Option 'store' of a plan may have signing_key, label, min_generation, as store = { label = 'team' }: "
            "where it is, --store says.",
            id="a place",
        ),
    ],
)
def test_what_signs_and_labels_is_checked_first(plan, monkeypatch, options, message):
    """A key that cannot be read, or a label that is too long, ends the command before anything is raced."""
    listed = ", ".join(f"{name} = '{value}'" for name, value in options.items())
    monkeypatch.chdir(plan(f"options.store = {{ {listed} }}\n{LEAST}").parent)
    ran = CliRunner().invoke(app, ["tune-plan", "plan.toml", "--store", "kept"])
    assert isinstance(ran.exception, BackendKwargsError)
    assert str(ran.exception) == message
    assert not (plan("").parent / "kept").exists()


def test_a_factory_that_is_not_there(plan):
    """A factory's file is looked for beside the plan, before anything runs."""
    path = plan(LEAST.replace("models.py", "other.py"))
    with pytest.raises(BackendKwargsError) as error:
        read_plan(path)
    assert str(error.value) == f"No file {str(path.with_name('other.py'))!r}: a plan's factories are beside it."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["tune", "m:build"], "Name one file for the decisions: -o FILE.toml.", id="no output"),
        pytest.param(
            ["tune-plan", "plan.toml", "--shard", "3/2"],
            "Option '--shard' must be K/N, from 1/N to N/N, got '3/2' (str).",
            id="shard",
        ),
        pytest.param(
            ["tune-plan", "plan.toml", "--store", "kept", "--on", "slurm"],
            "Option '--on' must be local, local:N, ray:auto or ray:ADDRESS, got 'slurm' (str).",
            id="on",
        ),
        pytest.param(
            ["tune-plan", "plan.toml", "--on", "ray:http://127.0.0.1:8265"],
            "'--on ray:http://...' was removed: `ray job submit --working-dir . -- backend-kwargs tune-plan PLAN.toml "
            "--on ray:auto`.",
            id="a job",
        ),
        pytest.param(
            ["tune-plan", "plan.toml", "--store", "kept", "--on", "http://user:t0ken@host"],
            "Option '--on' must be local, local:N, ray:auto or ray:ADDRESS, got 'http://host' (str).",
            id="on with a login",
        ),
    ],
)
def test_options(plan, monkeypatch, arguments, message):
    """Options that do not fit each other end the command before anything runs."""
    monkeypatch.chdir(plan(LEAST).parent)
    ran = CliRunner().invoke(app, arguments)
    assert isinstance(ran.exception, BackendKwargsError)
    assert str(ran.exception) == message


def test_a_misspelled_factory(plan):
    """It is an error before any worker starts, with the nearest name; the file is not imported."""
    path = plan(LEAST.replace(":build", ":biuld"))
    (path.parent / "models.py").write_text("raise SystemExit\n" + MODELS)
    with pytest.raises(BackendKwargsError) as error:
        read_plan(path)
    file = str(path.with_name("models.py"))
    assert str(error.value) == f"{file!r} has no function 'biuld'. Did you mean 'build'?"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("from somewhere import *", id="a star"),
        pytest.param("def __getattr__(name): ...", id="made when it is asked for"),
        pytest.param("globals()['biuld'] = print", id="globals"),
        pytest.param("from somewhere import build as biuld", id="another's"),
        pytest.param("if True:\n    biuld = print", id="assigned"),
        pytest.param("class biuld: ...", id="a class"),
        pytest.param("for biuld in (print,): ...", id="a loop"),
        pytest.param("def broken(:", id="what Python cannot read"),
    ],
)
def test_a_factory_that_may_be_there(plan, source):
    """Only a name that a file surely lacks is an error."""
    path = plan(LEAST.replace(":build", ":biuld"))
    (path.parent / "models.py").write_text(source)
    assert [unit.model for unit in read_plan(path)] == ["models.py:biuld"]


def test_a_dry_run(plan, tmp_path):
    """It prints each unit with its minutes, and neither a worker starts nor a store is made."""
    path = plan(LEAST.replace("[[", "threads = [1, 2]\nbudget_s = 90\n[["))
    ran = CliRunner().invoke(app, ["tune-plan", str(path), "--store", str(tmp_path / "kept"), "--dry-run"])
    assert ran.exit_code == 0, ran.exception
    rows = [line.split() for line in ran.output.splitlines() if "models.py" in line]
    assert rows == [["models.py:build", "cpu", str(n), "threads", "left", "1.5", "min"] for n in (1, 2)]
    assert ran.output.splitlines()[-1] == (
        "2 of 2 units are left, 3.0 min of one worker: as such units took before, or one budget each."
    )
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("store", "message"),
    [
        pytest.param("redi://h", "Unknown scheme of store 'redi://h': 'redi'. Did you mean 'redis'?", id="scheme"),
        pytest.param(
            "env:NOT_SET", "Store 'env:NOT_SET' names a variable of the environment that is not set.", id="variable"
        ),
    ],
)
def test_a_dry_run_checks_the_store(plan, store, message):
    """It is opened and read."""
    ran = CliRunner().invoke(app, ["tune-plan", str(plan(LEAST)), "--store", store, "--dry-run"])
    assert str(ran.exception) == message


def ended(*gains):
    """Return the summary of a plan with a unit for each gain; None for one that failed."""
    units = [Unit("m.py:build", "cpu", sizes={"batch": at}) for at in range(len(gains))]
    same = Interval(1.0, 0.99, 1.01)
    documents = [
        UnitDocument(
            unit=unit,
            failed="" if gain else "no luck",
            device_name="cpu AVX2",
            releases={"torch": "2.13.0", "triton": f"3.{unit.sizes['batch']}"},
            gain=gain and Interval(gain, gain - 0.1, gain + 0.1),
            same=same,
        )
        for unit, gain in zip(units, gains, strict=True)
    ]
    return Summary([*map(UnitOutcome, units, documents)])


def test_the_page_of_a_plan():
    """It has a verdict, the noise, the devices and the releases of all units, and what became of each."""
    page = page_of_plan(Path("plan.toml"), ended(1.5, 2.5, 0.5, None))
    assert page.verdict == Verdict(
        text="2 of 4 units surely gain: 1.50\u00d7 to 2.50\u00d7 as fast as eager; 1 slower than eager; 1 failed."
    )
    assert (page.subtitle, page.environment) == (
        "3 of 4 units are done, for 0 of 1 devices, on cpu AVX2, torch 2.13.0",
        {"device_name": "cpu AVX2", "torch": "2.13.0", "triton": "3.0, 3.1, 3.2"},
    )
    assert [row.status for row in page.speedups[0].rows] == ["pass", "pass", "slower than eager", "failed"]
    assert page.speedups[0].noise == Interval(1.0, 0.99, 1.01)


def test_no_line_to_paste_where_nothing_is_done(capsys):
    """A plan whose units all failed has nothing to serve."""
    _show(ended(None), None)
    assert "torch.compile" not in capsys.readouterr().out
    _show(ended(1.5), None)
    assert "torch.compile" in capsys.readouterr().out
