"""Make a folder that carries SGLang 0.5.17 and this project to a GPU machine without network.

    python benchmarks/sglang_gpu/bundle.py .sglang-gpu        about 60 MiB; the folder is git-ignored

For Python 3.12 and CUDA 13 builds of torch 2.11 on Hopper. The engine's wheel is trimmed of what a language model on
one host does not need, the kernels' wheel to the sm90 library (so: attention backend triton, sampling pytorch).
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("sglang==0.5.17", "sglang-kernel==0.4.5")
NEEDED = (
    *("annotated-types==0.8.0", "apache-tvm-ffi==0.1.15.post2", "compressed-tensors==0.20.1", "dill==0.4.1"),
    *("distro==1.9.0", "fastapi==0.165.0", "flashinfer-python==0.6.15.post1", "gguf==0.19.0"),
    *("huggingface-hub==1.33.0", "interegular==0.3.3", "jiter==0.19.0", "loguru==0.7.3", "msgspec==0.23.0"),
    *("openai==2.6.1", "opentelemetry-api==1.45.2", "orjson==3.13.0", "partial-json-parser==0.2.1.1.post7"),
    *("pluggy", "pybase64==1.5.1", "pydantic==2.14.4", "pydantic-core==2.50.5", "python-multipart==0.0.34"),
    *("pyzmq==27.3.0", "setproctitle==1.3.8", "sniffio==1.3.1", "starlette==1.10.0", "tokenizers==0.22.2"),
    *("tomli", "transformers==5.12.1", "typing-inspection==0.4.5", "uvicorn==0.54.0"),
)
GLIBCS = ("2_34", "2_28", "2_27", "2_26", "2_24", "2_17", "2_5")
PLATFORMS = (*(f"manylinux_{glibc}_x86_64" for glibc in GLIBCS), "manylinux2014_x86_64", "manylinux1_x86_64")


def main() -> None:
    folder = Path(sys.argv[1])
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for requirement in ENGINE:
            download(Path(scratch), requirement)
        for wheel in Path(scratch).glob("*.whl"):
            trim(wheel, folder / f"{wheel.name.split('-')[0]}.tar.xz")
    download(wheels, *NEEDED)
    pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.0f} MiB")


def download(target: Path, *requirements: str) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    abi = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    pip("download", "--no-deps", "--dest", str(target), *abi, *platforms, *requirements)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def trim(wheel: Path, target: Path) -> None:
    """Repack a wheel without the parts that are not needed."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        kept = [name for name in archive.namelist() if is_needed(name)]
        archive.extractall(folder, kept)
        with tarfile.open(target, "w:xz") as packed:
            packed.add(folder, arcname=".")


def is_needed(name: str) -> bool:
    if name.startswith("sglang/multimodal_gen/"):
        return False
    if ".so" not in Path(name).name:
        return True
    return name.startswith("sgl_kernel/") and ("sm90/common_ops" in name or "spatial_ops" in name)


if __name__ == "__main__":
    main()
