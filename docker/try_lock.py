"""Install the lock of an image into a fresh environment, as its Dockerfile does, and run verify.py there.

    python3.12 docker/try_lock.py neuron /tmp/try-neuron

Use the Python version of the image. What the base image brings is installed into a second environment, which ours only
sees. AWS's torch-neuronx and neuronx-cc are on no public index: what verify.py asks of them is left out and printed.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

DOCKER = Path(__file__).parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# What stands in for the base image. PyPI's build of PyTorch, where PyTorch's own index cannot be reached.
BASE = {
    "cpu": (),
    "cuda": (),
    "neuron": ("torch==2.9.1", "torch-xla==2.9.0", "numpy<2", "scipy", "setuptools"),
    "neuron-native": ("torch==2.14.*", "numpy", "scipy", "setuptools"),
}
SOURCE = ("pyproject.toml", "README.md", "LICENSE", "pipeline", "jobs", "trnpipe")
AWS_ONLY = ("torch-neuronx", "neuronx-cc")


def main(image: str, folder: Path) -> int:
    """Return the exit code of verify.py. Raises CalledProcessError if a package cannot be installed."""
    base, ours = folder / "base", folder / "image"
    for environment in (base, ours):
        run(sys.executable, "-m", "venv", str(environment))
    install(base, *BASE[image])
    site = next((base / "lib").glob("python*/site-packages"))
    (ours / site.relative_to(base) / "base-image.pth").write_text(f"{site}\n")
    if image == "cpu" and install_locked(ours, "torch-cpu", "--index-url", TORCH_INDEX, "--retries", "0"):
        print(f"try_lock: {TORCH_INDEX} cannot be reached: torch is PyPI's build", flush=True)
        install(ours, "torch==2.9.1")
    if install_locked(ours, image):
        return 1
    wheel_tools = folder / "build"
    run(sys.executable, "-m", "venv", str(wheel_tools))
    if install_locked(wheel_tools, "build"):
        return 1
    source, wheels = folder / "source", folder / "wheels"
    for left in (source, wheels):  # by an earlier run
        shutil.rmtree(left, ignore_errors=True)
    source.mkdir()
    run("cp", "-r", *(str(DOCKER.parent / name) for name in SOURCE), str(source))  # a build leaves files beside them
    run(pip(wheel_tools), "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    install(ours, "--no-deps", "--no-index", *map(str, wheels.glob("*.whl")))
    words, left_out = verify_words(image, AWS_ONLY)
    if left_out:
        print(f"try_lock: not asked, being AWS's alone: {shlex.join(left_out)}", flush=True)
    command = [str(ours / "bin" / "python"), "-P", str(DOCKER / "verify.py"), *words]
    return subprocess.run(command, env={"PATH": f"{ours / 'bin'}:/usr/bin:/bin"}, cwd="/", check=False).returncode  # noqa: S603


def verify_words(image: str, without: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Return the words of verify.py in the image's Dockerfile, and those left out for the packages of `without`."""
    text = (DOCKER / f"{image}.Dockerfile").read_text().replace("\\\n", " ")
    found = re.search(r"^RUN .*docker/verify\.py (.*)$", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"docker/{image}.Dockerfile does not run docker/verify.py")
    words = shlex.split(found[1])
    pairs = list(zip(words[::2], words[1::2], strict=True))
    dropped = [pair for pair in pairs if pair[1].partition("=")[0] in without]
    return [word for pair in pairs if pair not in dropped for word in pair], [word for pair in dropped for word in pair]


def pip(environment: Path) -> str:
    return str(environment / "bin" / "pip")


def install(environment: Path, *words: str) -> None:
    if words:
        run(pip(environment), "install", "--quiet", "--disable-pip-version-check", *words)


def install_locked(environment: Path, lock: str, *words: str) -> int:
    """Return the exit code of pip, without raising."""
    words = ("--quiet", "--no-deps", "--require-hashes", *words, "--requirement", str(DOCKER / f"{lock}.lock"))
    return subprocess.run([pip(environment), "install", *words], check=False).returncode  # noqa: S603


def run(*words: str) -> None:
    subprocess.run(words, check=True)  # noqa: S603


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]).absolute()))
