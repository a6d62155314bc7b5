"""What runs inside our traces runs in a process that has never seen this package (see `outofprocess`).

Every case is run locally (backend None) and out of process, with the same result. The functions it covers must be
among those that travelled, so a case cannot pass by running here.
"""

import ast
import builtins
import importlib
import inspect
import os
import pickle
import symtable

import nnsight
import pytest
import torch
from cloudpickle import cloudpickle
from nnsight.ndif import pull_env

import encode_address
from encode_address import interventions, measure
from encode_address.models.loading import BUNDLED_DIR, GROUND_TRUTH
from encode_address.run import edits
from tests.out_of_process_cases import CASES, IDS, removes_to_zero
from tests.outofprocess import OutOfProcess, Server, ServerError

# Read at collection, before any request can have registered local modules on its own.
REGISTERED_BY_IMPORT = set(cloudpickle._PICKLE_BY_VALUE_MODULES)


@pytest.fixture(scope="module", params=GROUND_TRUTH)
def pair(request):
    """A bundled model and a server of the same folder. Like NDIF, the server knows none of our renames."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in both processes: sums over more threads differ in the last bits
    folder = BUNDLED_DIR / request.param
    with Server(folder, rename={}, hidden=["encode_address", "tests"]) as server:
        model = encode_address.load(request.param)
        model.module.requires_grad_(False)  # as on the server: torch multiplies by other kernels for a parameter
        server.wait()
        yield model, server
    torch.set_num_threads(threads)


@pytest.fixture
def model(pair):
    return pair[0]


@pytest.fixture
def server(pair):
    return pair[1]


@pytest.fixture
def backend(pair):
    return OutOfProcess(pair[0].lm, pair[1])


def differences(here, there, at="result"):
    """Where two results differ: in structure at all, or in a tensor by more than 1e-6 of its largest value."""
    if isinstance(here, torch.Tensor):
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            return [f"{at}: {here.dtype} {tuple(here.shape)} against {there.dtype} {tuple(there.shape)}"]
        if torch.equal(here, there):
            return []
        gap, scale = float((here.double() - there.double()).abs().max()), max(1.0, float(here.abs().max()))
        return [] if gap <= 1e-6 * scale else [f"{at}: {gap} at values up to {scale}"]
    if isinstance(here, dict):
        if list(here) != list(there):
            return [f"{at}: {list(here)} against {list(there)}"]
        return [d for key in here for d in differences(here[key], there[key], f"{at}[{key!r}]")]
    if isinstance(here, (list, tuple)):
        if len(here) != len(there):
            return [f"{at}: {len(here)} against {len(there)} values"]
        return [d for i, pair in enumerate(zip(here, there)) for d in differences(*pair, f"{at}[{i}]")]
    return [] if here == there else [f"{at}: {here!r} against {there!r}"]


def origin(function):
    return function.__name__, function.__code__.co_filename


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_same_result_out_of_process(model, backend, case):
    here, there = case.run(model, None), case.run(model, backend)
    assert here
    assert differences(here, there) == []
    assert {origin(function) for function in case.covers} <= backend.shipped
    if case.writes:
        with torch.no_grad(), model.trace(IDS) as tracer:
            plain = tracer.result.logits[:, -1].save()
        assert float((there["logits"] - plain).abs().max()) > 1e-3


def functions_of(module):
    return {f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}


def in_trace_functions():
    """Whatever may be called inside a trace: the interventions, the measures, and the engine's edits."""
    wanted = {getattr(interventions, name) for name in interventions.__all__}
    wanted |= {f for f in functions_of(measure) if not f.__name__.startswith("_")}
    return wanted | functions_of(edits)


def test_every_in_trace_function_has_a_case():
    wanted = in_trace_functions()
    assert {edits.apply_edits, edits.put_query, edits.enter, measure.answer, interventions.write_cache} <= wanted
    assert {f.__name__ for f in wanted - {f for case in CASES for f in case.covers}} == set()


# -- what travels ------------------------------------------------------------------------
def test_model_travels_as_names_without_tokenizer_or_weights(model, backend):
    with torch.no_grad(), model.trace(IDS, backend=backend):
        seen = nnsight.save({})
        seen["type"] = type(model).__name__
        seen["names"] = sorted(vars(model))
        seen["first"] = type(model.layers[0].mixer).__module__
    assert seen["type"] == "SimpleNamespace"
    assert {"layers", "embed", "final_norm", "lm_head", "mixers"} <= set(seen["names"])
    assert not {"tokenizer", "layout", "family", "folder"} & set(seen["names"])
    assert seen["first"].startswith("nnsight.")
    (payload,) = backend.payloads
    assert len(payload) < 200_000
    words = [word.encode() for word in model.tokenizer.get_vocab() if len(word) > 5]
    assert all(word in pickle.dumps(model.tokenizer) for word in words)
    assert [word for word in words if word in payload] == []


def test_importing_the_package_is_what_makes_it_travel(model, backend, monkeypatch):
    assert "encode_address" in REGISTERED_BY_IMPORT
    pull_env()
    others = cloudpickle._PICKLE_BY_VALUE_MODULES - {"encode_address"}
    monkeypatch.setattr(cloudpickle, "_PICKLE_BY_VALUE_MODULES", others)
    with pytest.raises(ServerError, match="No module named 'encode_address"):
        removes_to_zero(model, backend)


# -- the stand-in is a faithful one --------------------------------------------------------
@pytest.mark.parametrize("name", ["encode_address", "encode_address.measure", "tests.outofprocess"])
def test_server_cannot_import_the_package_or_the_tests(model, backend, name):
    missing = f"ModuleNotFoundError: No module named '{name.split('.')[0]}"
    with pytest.raises(ServerError, match=missing):  # noqa: PT012, SIM117 (the trace keeps a line of its own)
        with torch.no_grad(), model.trace(IDS, backend=backend):
            seen = nnsight.save({})
            seen["module"] = importlib.import_module(name).__name__
    assert differences(removes_to_zero(model, None), removes_to_zero(model, backend)) == []


def test_only_saved_values_come_back(model, server, backend):
    outside = {}
    with torch.no_grad(), model.trace(IDS, backend=backend) as tracer:
        seen = nnsight.save({})
        seen["process"] = os.getpid()
        outside["logits"] = tracer.result.logits.clone()
    assert seen["process"] == server.process.pid != os.getpid()
    assert outside == {}


def test_only_plain_values_come_back(model, backend):
    with pytest.raises(pickle.UnpicklingError):  # noqa: SIM117
        with torch.no_grad(), model.trace(IDS, backend=backend, use_cache=True) as tracer:
            cache = tracer.result.cache.save()
    assert "cache" not in locals()


def test_server_that_does_not_answer_is_killed():
    with Server(BUNDLED_DIR / GROUND_TRUTH[0], {}, [], timeout=0.2) as server:
        with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
            server.wait()
        assert server.process.poll() is not None


def test_server_that_cannot_start_says_why(tmp_path):
    with Server(tmp_path, {}, []) as server, pytest.raises(ServerError, match=r"(?s)exit code 1.*config\.json"):
        server.wait()


# -- source lint ---------------------------------------------------------------------------
FORBIDDEN = {"open", "exec", "eval", "compile", "super", "input", "globals", "locals", "vars", "breakpoint"}
BUILTINS = {name for name in dir(builtins) if not name.startswith("_")} - FORBIDDEN


def complaints(source, known):
    """Why a function (its source) could not run where only torch is known; `known` are further names."""
    (node,) = ast.parse(source).body
    if not isinstance(node, ast.FunctionDef):
        return ["it is not a plain function"]
    found = ["it has a decorator"] if node.decorator_list else []
    defaults = [*node.args.defaults, *node.args.kw_defaults]
    found += ["a default is not a constant" for d in defaults if d is not None and not is_constant(d)]
    found += ["it imports" for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return found + [f"it uses {name}" for name in sorted(outer_names(source) - known - BUILTINS - {"torch"})]


def is_constant(node):
    """A literal that cannot change: `None`, `1.0`, and `-1`, which is a sign before a constant."""
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def outer_names(source):
    def of(table):
        names = {s.get_name() for s in table.get_symbols() if s.is_global()}
        return names.union(*map(of, table.get_children()))

    return set().union(*map(of, symtable.symtable(source, "<lint>", "exec").get_children()))


def test_in_trace_functions_use_torch_and_each_other_only():
    wanted = in_trace_functions()
    for module in {inspect.getmodule(function) for function in wanted}:
        wanted |= functions_of(module)
    found = {}
    for function in wanted:
        known = {name for name in function.__code__.co_names if function.__globals__.get(name) in wanted}
        found[function.__name__] = complaints(inspect.getsource(function), known)
    assert {name: why for name, why in found.items() if why} == {}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(x):\n    import math\n    return math.sqrt(x)\n", "it imports"),
        ("def f(x):\n    from .outputs import remove\n    remove(x)\n", "it imports"),
        ("def f(x):\n    return [np.sum(y) for y in x]\n", "it uses np"),
        ("def f(x):\n    return super().f(x)\n", "it uses super"),
        ("def f(x):\n    return open(x)\n", "it uses open"),
        ("@cache\ndef f(x):\n    return x\n", "it has a decorator"),
        ("def f(x=len([])):\n    return x\n", "a default is not a constant"),
        ("def f(x=-y):\n    return x\n", "a default is not a constant"),
        ("class F:\n    pass\n", "it is not a plain function"),
    ],
)
def test_lint_notices(source, why):
    assert why in complaints(source, known=set())


def test_lint_lets_pass_what_runs_anywhere():
    assert complaints("def f(x, n=-1, y=None):\n    return g(x[n], torch.ones(len(x)))\n", known={"g"}) == []
