#!/usr/bin/env bash
# A real SGLang server on a CPU, in an environment of its own (about 3.4 GB): the other half of the contract tests.
#   tests/integration/sglang_cpu/install.sh VENV [pip arguments]
# SGLang's own CPU installation builds its kernels from source for machines with AMX. The tests need its server, scheduler
# and protocol, not its speed, so those kernels are left out: attention and sampling run on torch's.
set -euo pipefail
venv=$(realpath -m "$1")
shift
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install "$@" -r "$here/requirements.txt"
# Its declared dependencies ask for CUDA builds of everything; requirements.txt names those a CPU server imports.
"$venv/bin/python" -m pip install "$@" --no-deps sglang==0.5.23
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# A CUDA build of torchvision cannot load its operators beside a CPU build of torch. Nothing here calls them, but it
# declares shapes for two of them on import, so they must exist.
"$venv/bin/python" - "$site/torchvision/_meta_registrations.py" <<'PYTHON'
import sys
from pathlib import Path

path = Path(sys.argv[1])
declaration = '''from torch import library

for _name in ("nms", "qnms"):  # declared for a CPU build
    library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
'''
text = path.read_text()
if "declared for a CPU build" not in text:
    path.write_text(declaration + text)
PYTHON
# SGLang imports these kernels by name where there is no CUDA. One that is called says which it is.
mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" <<'PYTHON'
def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} is not part of this installation")

    return missing
PYTHON
touch "$venv/installed"
