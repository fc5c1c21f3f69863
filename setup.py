"""Builds `sparse_attn._C`: CPU kernels always, CUDA kernels where this machine can compile them.

Environment:
  BISHOP_CPU_ARCH  the -march of the CPU kernels (default: native; "x86-64-v3" for AVX2).
  BISHOP_CUDA      0 leaves the CUDA kernels out, 1 fails if they cannot be built (default: auto).
  MAX_JOBS         parallel compilations.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

try:
    from torch.utils import cpp_extension
    from torch.version import cuda as TORCH_CUDA
except ImportError as error:
    raise SystemExit(
        f"building sparse_attn._C needs torch in this environment ({error}): "
        "pip install -c constraints.txt torch setuptools wheel ninja, then "
        "pip install --no-build-isolation -c constraints.txt -e ."
    ) from error

ROOT = Path(__file__).parent
CSRC = Path("csrc")
CPU_SOURCES = [
    CSRC / "bishop.cpp",
    *sorted(p.relative_to(ROOT) for p in ROOT.glob("csrc/cpu/*.cpp")),
]
CUDA_SOURCES = sorted(p.relative_to(ROOT) for p in ROOT.glob("csrc/cuda/*.cu"))
HEADERS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.*h"))


def cuda_refusal() -> str | None:
    """Why the CUDA kernels are not built; None if they are."""
    if os.environ.get("BISHOP_CUDA", "auto") == "0":
        return "BISHOP_CUDA=0 was set when it was built"
    if not CUDA_SOURCES:
        return "this version has no CUDA kernels (csrc/cuda is empty)"
    if TORCH_CUDA is None:
        return "torch is a CPU build; install a CUDA build of torch and build again"
    if cpp_extension.CUDA_HOME is None:
        return "nvcc was not found; install the CUDA toolkit or set CUDA_HOME and build again"
    return None


def cpu_flags() -> list[str]:
    arch = os.environ.get("BISHOP_CPU_ARCH", "native")
    # No contraction: the kernels say where an FMA is, so that results do not hang on inlining.
    speed = ["-O3", "-fopenmp", f"-march={arch}", "-ffp-contract=off"]
    # The headers of torch and GCC's own AVX-512 intrinsics trip the warnings that are off.
    quiet = ["-Wno-unused-parameter", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    return [*speed, "-g0", "-Wall", "-Wextra", *quiet]


def extension() -> cpp_extension.CppExtension:
    refusal = cuda_refusal()
    if refusal and os.environ.get("BISHOP_CUDA") == "1":
        raise SystemExit(f"BISHOP_CUDA=1, but the CUDA kernels cannot be built: {refusal}")
    print("sparse_attn._C: CPU kernels are built", file=sys.stderr)
    print(
        f"sparse_attn._C: CUDA kernels are {'left out: ' + refusal if refusal else 'built'}",
        file=sys.stderr,
    )
    status = f'-DBISHOP_CUDA_STATUS="{refusal or "built"}"'
    flags = {"cxx": [*cpu_flags(), status]}
    if refusal is None:
        flags["cxx"].append("-DBISHOP_WITH_CUDA")
        flags["nvcc"] = ["-O3", "-lineinfo", status, "-DBISHOP_WITH_CUDA"]
    kind = cpp_extension.CppExtension if refusal else cpp_extension.CUDAExtension
    sources = CPU_SOURCES if refusal else CPU_SOURCES + CUDA_SOURCES
    return kind(
        "sparse_attn._C",
        [str(s) for s in sources],
        depends=HEADERS,
        extra_compile_args=flags,
        extra_link_args=["-fopenmp"],
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
)
