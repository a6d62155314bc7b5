"""What fits in memory: limits follow what is free, planned bytes are real ones, and only memory errors are memory errors."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import encode_address as ea
from encode_address.errors import RunError, StoreError
from encode_address.interventions import read_cache
from encode_address.run import memory
from encode_address.run.cells import FINAL, FULL, READ
from encode_address.run.engine import Engine

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> ea.HybridModel:
    return ea.load("tiny-gdn")


def limits_with(monkeypatch, model, free: int, batch_tokens: int | None = None):
    """Limits for `model` with this many free bytes, and caches of 1,000 bytes per token."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(model, "cache_bytes", lambda length: 1000 * length)
    return memory.limits(model, batch_tokens)


# -- limits -------------------------------------------------------------------------------------
def test_limits_shrink_with_less_free_memory(monkeypatch, model):
    made = [limits_with(monkeypatch, model, free) for free in (1 << 40, 512 * MIB, 64 * MIB, 8 * MIB, 0)]
    tokens, kept = [one.tokens for one in made], [one.kept for one in made]
    assert tokens == sorted(tokens, reverse=True)
    assert kept == sorted(kept, reverse=True)
    assert tokens[-1] > 0
    assert len(set(tokens)) == len(set(kept)) == 5
    for path in (FINAL, FULL):
        for count in (lambda one, path=path: one.rows(path, 50), lambda one, path=path: one.prompts(path, 50)):
            assert count(made[0]) > count(made[2]) >= count(made[-1]) >= 1


def test_a_small_model_on_a_large_machine_gets_fixed_limits(monkeypatch, model):
    """So that its batches, and its table, do not depend on what else runs."""
    large, larger = (limits_with(monkeypatch, model, free) for free in (8 << 30, 1 << 40))
    assert (large.tokens, large.kept) == (larger.tokens, larger.kept)
    assert large.tokens == memory.MOST_TOKENS["cpu"]


def test_batch_tokens_override_what_memory_gives(monkeypatch, model):
    for free in (8 * MIB, 1 << 40):
        own, given = limits_with(monkeypatch, model, free), limits_with(monkeypatch, model, free, batch_tokens=17)
        assert given.tokens == 17
        assert given.kept == own.kept
        assert Engine(model, batch_tokens=17).limits.tokens == 17
    assert limits_with(monkeypatch, model, 0, batch_tokens=1 << 20).tokens == 1 << 20


@pytest.mark.parametrize("path", [FINAL, FULL])
def test_a_longer_prompt_takes_more_and_so_fewer_fit(monkeypatch, model, path):
    made = limits_with(monkeypatch, model, 64 * MIB)
    sizes = [made.per_prompt(path, length) for length in (1, 10, 100, 1000)]
    assert sizes == sorted(set(sizes))
    fit = [made.prompts(path, length) for length in (10, 100, 1000)]
    assert fit == sorted(set(fit), reverse=True)


def test_the_planned_bytes_of_a_cache_are_those_of_a_real_one(model):
    """The fixed states of the linear layers, and what each token adds to the softmax layers."""
    made = Engine(model).limits
    for rows, length in ((1, 1), (2, 7), (3, 65)):
        ids = torch.arange(rows * length).reshape(rows, length)
        with torch.no_grad(), model.trace(ids, use_cache=True, logits_to_keep=1) as tracer:
            cache = tracer.result.cache.save()
        real = sum(tensor.nbytes for layer in read_cache(cache) for tensor in layer.values())
        assert rows * made.per_prompt(FINAL, length) == real


def test_a_token_whose_logits_are_needed_costs_more_with_a_larger_vocabulary(monkeypatch, model):
    usual = limits_with(monkeypatch, model, 64 * MIB)
    monkeypatch.setattr(model.config, "vocab_size", 250_000)
    large = limits_with(monkeypatch, model, 64 * MIB)
    assert large.text_rows > usual.text_rows >= 1
    assert large.rows(FULL, 10, text=True) < usual.rows(FULL, 10, text=True)
    assert large.rows(FULL, 10) == usual.rows(FULL, 10)


def test_halving_goes_down_to_one_prompt_at_a_time(monkeypatch, model):
    made = limits_with(monkeypatch, model, 64 * MIB)
    half = made.halved()
    assert (half.tokens, half.kept) == (made.tokens // 2, made.kept // 2)
    for _ in range(64):
        made = made.halved()
    assert (made.tokens, made.kept, made.step_rows) == (1, 1, 1)
    assert [made.rows(path, 50) for path in (FINAL, FULL, READ)] == [1, 1, 1]
    assert [made.prompts(path, 50) for path in (FINAL, FULL, READ)] == [2, 2, 1]  # a host and its donor


# -- free and used memory -----------------------------------------------------------------------
def test_this_machine_has_free_memory_and_says_how_much():
    assert 16 * MIB < memory.free_bytes(CPU) < 1 << 48


FILES = {"/proc/meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n"}
GROUP = "/sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, memory.UNKNOWN),
        ({"/proc/meminfo": "MemTotal: 9 kB\n"}, memory.UNKNOWN),
        ({"/proc/meminfo": "MemAvailable: lots kB\n"}, memory.UNKNOWN),
        (FILES, 3000 << 10),
        ({**FILES, f"{GROUP}max": "max\n", f"{GROUP}current": "5\n"}, 3000 << 10),
        ({**FILES, f"{GROUP}max": "2000\n", f"{GROUP}current": "500\n"}, 1500),
        ({**FILES, f"{GROUP}max": "2000\n", f"{GROUP}current": "2500\n"}, 0),
        ({**FILES, f"{GROUP}max": "999999999\n", f"{GROUP}current": "0\n"}, 3000 << 10),
    ],
    ids=["unreadable", "no such line", "no number", "no group", "no limit", "limit", "over the limit", "ample limit"],
)
def test_free_memory_is_what_the_system_says_or_a_guess(monkeypatch, files, free):
    def read(path, *args, **kwargs):
        if str(path) in files:
            return files[str(path)]
        raise OSError(errno.EACCES, "not to be read", str(path))

    monkeypatch.setattr(Path, "read_text", read)
    assert memory.free_bytes(CPU) == free


SLACK = 16 * MIB  # the kernel counts pages in batches per core, so what it says wavers


def test_the_peak_grows_with_what_is_held_and_does_not_fall():
    """More than was ever held, plus 50 MB, must show; how much of the peak is free by now is not known."""
    before, held = memory.peak_bytes(), []
    while memory.peak_bytes() < before + 50 * MIB:
        assert len(held) * 50 * MIB < before + 100 * MIB
        held.append(b"\1" * (50 * MIB))
    peak = memory.peak_bytes()
    held.clear()
    assert memory.peak_bytes() >= peak - SLACK >= before + 50 * MIB - SLACK


def test_the_peak_is_in_bytes_and_that_of_this_process():
    """Between what is there now and all that the machine has."""
    held = b"\1" * (50 * MIB)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert len(held) < resident <= memory.peak_bytes() + SLACK
    assert memory.peak_bytes() < int(Path("/proc/meminfo").read_text().split()[1]) << 10


def test_the_peak_of_a_child_is_its_own():
    """A child of a process that once held much, as benchmarks start them: getrusage would give it that peak."""
    held = b"\1" * (700 * MIB)
    code = "from encode_address.run import memory; import resource as r; print(memory.peak_bytes(), r.getrusage(0)[2] << 10)"
    own, inherited = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert len(held) < inherited
    assert 50 * MIB < own < len(held)


def test_the_peak_where_the_system_has_no_such_file(monkeypatch):
    def missing(path, *args, **kwargs):
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))

    known = memory.peak_bytes()
    monkeypatch.setattr(Path, "read_text", missing)
    assert memory.peak_bytes() >= known - SLACK
    told = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert abs(memory.peak_bytes() - (told << 10)) < SLACK
    monkeypatch.setattr(sys, "platform", "darwin")  # counts in bytes
    assert abs(memory.peak_bytes() - told) < SLACK >> 10


# -- out of memory ------------------------------------------------------------------------------
def raised(function) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def beyond_cpu() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)  # more than can be addressed


def after(first, then: BaseException, cause: bool) -> BaseException:
    """`then`, raised because of, or merely while handling, what `first` raises."""
    error = raised(first)

    def both() -> None:
        if cause:
            raise then from error
        try:
            raise error
        except Exception:
            raise then  # noqa: B904

    return raised(both)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_memory_errors_are_recognised():
    cpu = raised(beyond_cpu)
    assert type(cpu) is RuntimeError
    assert "DefaultCPUAllocator: can't allocate memory" in str(cpu)
    assert memory.out_of_memory(cpu)
    assert memory.out_of_memory(raised(lambda: bytearray(1 << 60)))
    assert memory.out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert memory.out_of_memory(torch.OutOfMemoryError())
    assert memory.out_of_memory(RuntimeError("MPS backend out of memory"))


@pytest.mark.parametrize("cause", [True, False])
def test_memory_errors_are_recognised_behind_others(cause):
    one = after(beyond_cpu, RunError("a trace failed"), cause)
    assert memory.out_of_memory(one)

    def again() -> None:
        raise one

    assert memory.out_of_memory(after(again, ValueError("and so did its caller"), cause))


@pytest.mark.parametrize(
    "error",
    [
        None,
        raised(full_disk),
        after(full_disk, StoreError("cannot write to results: no space left on device"), True),
        after(full_disk, StoreError("cannot write to results: no space left on device"), False),
        RunError("NaN or infinite logits: remove zero at layers 0; try --dtype float32"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ValueError("these words only look like it: out of memory"),
        KeyError("memory"),
    ],
    ids=repr,
)
def test_other_errors_are_not(error):
    """Taken for memory, they would be tried again and again with smaller batches, and never shown."""
    assert not memory.out_of_memory(error)


def test_a_memory_error_inside_a_trace_is_recognised(model):
    """As nnsight hands it on: with its own text around the message."""
    hook = model.module.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: beyond_cpu())
    try:
        with pytest.raises(RuntimeError) as caught, torch.no_grad(), model.trace([[1, 2, 3]]) as tracer:
            tracer.result.logits.save()
    finally:
        hook.remove()
    assert memory.out_of_memory(caught.value)
