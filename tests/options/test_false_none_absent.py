"""Options that may be False, None or absent: what each of the three means, and what is no value at all."""

import pytest
import torch

from backend_kwargs import BackendKwargsError, CompileConfig, make_backend
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.options.option import with_users
from backend_kwargs.rewrites.table import raced_rewrites
from backend_kwargs.sealing.declared import Declared

ABSENT = object()
REFUSED = "refused"


def given(name, value):
    return {} if value is ABSENT else {name: value}


def option(name, spec="tmpl-inductor"):
    """Return what a backend has of an option, "absent" if nothing."""

    def read(value):
        if spec == "tmpl-tvm":
            pytest.importorskip("tvm")
        return make_backend(spec, given(name, value)).options.get(name, "absent")

    return read


def argument(name):
    """Return the options of a backend that is made with an argument of torch.compile's."""
    return lambda value: dict(make_backend("tmpl-inductor", **given(name, value)).options)


def setting(name):
    """Return what a race reads of an option."""
    return lambda value: getattr(RaceSettings.of(make_backend("tmpl-inductor:auto", given(name, value)).options), name)


def field(name):
    return lambda value: CompileConfig(**given(name, value)).describe()


def permitted(value):
    """Return whether a candidate without freezing keeps it, and one with it."""
    users = make_backend("tmpl-inductor", given("freezing", value)).options
    return [with_users({"freezing": frozen}, users)["freezing"] for frozen in (False, True)]


def rewrites(value):
    named = make_backend("tmpl-inductor", given("rewrites", value)).options.get("rewrites")
    return bool(raced_rewrites(named))


def called_with(value):
    """Return what a backend of a function's gets."""
    seen = []

    def compiler(gm, example_inputs, *, level=None):
        seen.append(level)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=make_backend(compiler, given("level", value)))(torch.ones(1))
    return seen


def sizes(name):
    """Return what `seal` declares, of arguments of which one is the value."""
    base = {"dims": {"x": {0: "n"}}, "sizes": {"n": [1]}, "buckets": None, "fill": None}

    def declared(value):
        made = Declared.read(**({**base, name: None} if value is ABSENT else {**base, name: value}))
        return getattr(made, name)

    return declared


# By what is set: False, None, nothing.
THREE = {
    "freezing": (permitted, [False, False], REFUSED, [False, True]),
    "rewrites": (rewrites, REFUSED, True, True),
    "clone_outputs": (option("clone_outputs"), False, None, "absent"),
    "mode": (argument("mode"), REFUSED, {}, {}),
    "options": (argument("options"), REFUSED, {}, {}),
    "auto": (option("auto"), False, REFUSED, "absent"),
    "candidates": (setting("candidates"), REFUSED, None, None),
    "tolerance of a race": (setting("tolerance"), REFUSED, None, None),
    "store": (setting("store"), REFUSED, None, None),
    "precision": (setting("precision"), REFUSED, (), ()),
    "max_error": (setting("max_error"), REFUSED, None, None),
    "on_progress": (setting("on_progress"), REFUSED, None, None),
    "race_custom_ops": (setting("race_custom_ops"), False, REFUSED, True),
    "budget_s": (setting("budget_s"), REFUSED, REFUSED, 10.0),
    "TVM's verify": (option("verify", "tmpl-tvm"), False, REFUSED, "absent"),
    "TVM's aten_ops": (option("aten_ops", "tmpl-tvm"), REFUSED, None, "absent"),
    "TVM's opt_level": (option("opt_level", "tmpl-tvm"), REFUSED, None, "absent"),
    "TVM's work_dir": (option("work_dir", "tmpl-tvm"), REFUSED, None, "absent"),
    "dynamic": (field("dynamic"), "dynamic=False", "", ""),
    "fullgraph": (field("fullgraph"), "", REFUSED, ""),
    "a module's options": (field("options"), REFUSED, "", ""),
    "a module's mode": (field("mode"), REFUSED, "", ""),
    "autocast_dtype": (field("autocast_dtype"), REFUSED, "", ""),
    "output_dtype": (field("output_dtype"), REFUSED, "", ""),
    "tolerance of a module": (field("tolerance"), REFUSED, "", ""),
    "an option of a function": (called_with, [False], [None], [None]),
    "buckets": (sizes("buckets"), REFUSED, {}, {}),
    "fill": (sizes("fill"), REFUSED, {}, {}),
}


@pytest.mark.parametrize("at", range(3), ids=["False", "None", "absent"])
@pytest.mark.parametrize("name", THREE)
def test_false_none_and_absence(name, at):
    """Each means what the table says; a value of another type is refused, and never taken for one of the others."""
    read, wanted = THREE[name][0], THREE[name][1 + at]
    value = (False, None, ABSENT)[at]
    if wanted is REFUSED:
        with pytest.raises(BackendKwargsError, match=rf" must be .*, got {value} |Unknown mode False\. "):
            read(value)
    else:
        assert read(value) == wanted


EMPTY = {
    "no rewrites": (rewrites, (), False),
    "no candidates": (setting("candidates"), [], []),
    "no precision": (setting("precision"), "", ()),
    "no budget": (setting("budget_s"), 0, 0.0),
    "no ATen operators": (option("aten_ops", "tmpl-tvm"), [], ()),
    "the lowest level": (option("opt_level", "tmpl-tvm"), 0, 0),
    "nothing of a module's options": (field("options"), {}, "options={}"),
}


@pytest.mark.parametrize(("read", "value", "wanted"), EMPTY.values(), ids=EMPTY)
def test_an_empty_value_is_none_of_them(read, value, wanted):
    """An empty list, a text of nothing and 0 are values of their own, and not None."""
    assert read(value) == wanted
    assert read(value) != read(ABSENT) or wanted == ()
