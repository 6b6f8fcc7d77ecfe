"""Two processes on this machine give the numbers of one."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest


SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "two_processes.py"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def outputs(count, timeout=90):
    """What each of the processes prints."""
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), address, str(count), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    try:
        found = [each.communicate(timeout=timeout) for each in started]
    except subprocess.TimeoutExpired:
        for each in started:
            each.kill()
        pytest.fail("\n".join(each.communicate()[1][-3000:] for each in started))
    finally:
        for each in started:
            each.kill()
            each.wait()
    ended = zip(started, found, strict=True)
    failed = [errors[-3000:] for each, (_, errors) in ended if each.returncode]
    assert not failed, "\n".join(failed)
    return [out for out, _ in found]


@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="it has another name in this JAX")
def test_two_processes_give_the_numbers_of_one(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import two_processes as alone

    expected = {
        "jit": jax.jit(alone.train)(alone.WEIGHT, alone.BATCH),
        "shard_map": jax.jit(alone.train)(alone.WEIGHT, alone.BATCH),
        "rollout": jax.jit(alone.rollout)(alone.WEIGHT, alone.BATCH),
    }
    assert not np.allclose(expected["jit"], alone.WEIGHT, atol=1e-3)
    for out in outputs(2):
        lines = [line.split() for line in out.splitlines()]
        found = {name: np.array(values, float) for name, *values in lines if name in expected}
        assert set(found) == set(expected)
        for name, values in found.items():
            np.testing.assert_allclose(values, np.ravel(expected[name]), rtol=1e-5, atol=1e-6)
