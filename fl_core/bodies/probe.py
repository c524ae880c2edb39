"""Pass one image through a graph in a separate process with limits of memory and time; its failures end there.

A graph that passed `graph_check` needs the same memory and time for every image, so one image is enough. The process
inherits the worker's cage, and imports no torch.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_core.bodies.graph_check import GraphError
from fl_core.errors import extras

EXTRA = "body"
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SECONDS = 300.0
"""Time limit for reading a graph and two passes of one image."""
_MIB = 1 << 20
Rows = NDArray[np.float32]


class Probe(NamedTuple):
    """The result of a probe. shape: of the output   memory: bytes, without the library's own memory."""

    shape: tuple[int, ...]
    memory: int


def runtime() -> Any:  # noqa: ANN401
    """Import onnxruntime; raises ConfigError (E-CFG-08) with the command that installs it."""
    return extras.require("onnxruntime", EXTRA, "a frozen body in an ONNX file")


def open_session(graph: bytes, provider: str = CPU, memory: int = 0) -> Any:  # noqa: ANN401
    """Load a graph for single-threaded passes, in which equal images give equal bits.

    memory: limit of GPU memory in bytes; 0: none. Raises the errors of onnxruntime.
    """
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 4
    options.add_session_config_entry("session.load_model_format", "ONNX")
    settings = {"cudnn_conv_algo_search": "DEFAULT", "use_tf32": "0"}
    if memory:
        settings["gpu_mem_limit"] = str(memory)
    providers = [CPU] if provider == CPU else [(CUDA, settings), CPU]
    return ort.InferenceSession(graph, options, providers=providers)


def probe(graph: bytes, dims: Sequence[int], memory: int, seconds: float = SECONDS) -> Probe:
    """Pass an image of these dimensions through a graph, twice, in a process of its own.

    memory: limit in bytes, without the library's own memory. Raises GraphError if the graph needs more memory or time,
    fails, or gives two different results; ConfigError (E-CFG-08) without onnxruntime.
    """
    runtime()
    terms = json.dumps({"dims": list(dims), "memory": memory, "seconds": seconds}).encode()
    words = [sys.executable, "-P", "-m", __name__]
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter, this module
            words, input=terms + b"\n" + graph, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise GraphError(f"a graph that takes more than {seconds:.0f} s for one image") from error
    try:
        answer = json.loads(ended.stdout)
    except ValueError as error:
        last = ascii(ended.stderr.decode(errors="replace").strip().rpartition("\n")[2])[1:200]
        raise GraphError(f"a graph that crashes its process ({ended.returncode}: {last})") from error
    if "wrong" in answer:
        raise GraphError(answer["wrong"])
    return Probe(tuple(answer["shape"]), answer["memory"])


def main() -> None:
    """Probe the graph on the standard input and write the result to the standard output."""
    terms = json.loads(sys.stdin.buffer.readline())
    graph = sys.stdin.buffer.read()
    runtime()
    x = np.random.default_rng(0).standard_normal(terms["dims"]).astype(np.float32)
    before = _status("VmHWM")
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + terms["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(terms["seconds"]) + 1,) * 2)  # where nobody waits for it any more
    print(json.dumps(_answer(graph, x, terms["memory"], before)))


def _answer(graph: bytes, x: Rows, memory: int, before: int) -> dict[str, object]:
    try:
        session = open_session(graph)
        (place,) = session.get_inputs()
        first, second = (session.run(None, {place.name: x}) for _ in range(2))
    except MemoryError:
        return {"wrong": _too_large(memory)}
    except Exception as error:  # onnxruntime has an exception of its own for each of its codes
        text = " ".join(str(error).split())
        if any(word in text for word in ("allocate memory", "bad_alloc", "bad allocation")):
            return {"wrong": _too_large(memory)}
        return {"wrong": f"a graph that onnxruntime refuses: {ascii(text)[1:300]}"}
    if len(first) != 1 or not isinstance(first[0], np.ndarray) or first[0].tobytes() != second[0].tobytes():
        return {"wrong": "a graph whose output differs for the same image"}
    return {"shape": list(first[0].shape), "memory": _status("VmHWM") - before}


def _status(name: str) -> int:
    """Read a number of bytes that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _too_large(memory: int) -> str:
    return f"a graph that needs more than {memory // _MIB} MiB of memory for one image"


if __name__ == "__main__":
    main()
