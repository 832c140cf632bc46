"""Removes from the environment whose Python runs it what no role imports, and compiles what roles do: for `roles`.

Files are unlinked and never written, save symbols, which `strip` takes out of libraries that still have them. That what
is left can be imported shows here, and not when a role first needs it.
"""

import importlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

UNUSED = (
    "**/tests", "**/*.pyx", "**/*.pxd", "**/*.pxi", "**/*.a",
    "numpy/_core/include", "pyarrow/include", "pyarrow/src", "matplotlib/mpl-data/sample_data",
    "pyarrow/*flight*", "pyarrow/*s3*",  # stores are read by s3fs
    "pyarrow/libarrow_*.so", "pyarrow/libarrow_*.so.*.*",  # the same library under its other names
    "transformers/models/**/mod[eu]l*_*.py",  # they need PyTorch
)  # fmt: skip
"""Below site-packages."""
KEPT = "transformers/models/auto"
"""Has the tables of all models."""
STORES = {"s3", "s3control", "sts", "sso", "sso-oidc", "signin"}
"""Of botocore's descriptions of all services: of the object store, and of who may use it."""
IMPORTED = (
    "aiobotocore.session", "datasets", "jinja2", "jsonschema", "kafka", "llguidance", "math_verify", "msgspec",
    "opentelemetry.sdk.trace", "pandas", "pyarrow.dataset", "pyarrow.parquet", "reasoning_gym", "rensa", "rich.console",
    "s3fs", "starlette.applications", "tokenizers", "transformers.models.auto.configuration_auto",
    "transformers.models.auto.tokenization_auto", "uvicorn", "zstandard",
)  # fmt: skip


def trim(packages: Path) -> bool:
    """Return whether the packages are here. Where they are links into a cache, nothing is added to them."""
    found = [path for pattern in UNUSED for path in packages.glob(pattern)]
    found += [path for path in packages.glob("botocore/data/*") if path.is_dir() and path.name not in STORES]
    for path in found:
        if KEPT in str(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    # Libraries that a wheel brings in a folder of their own were laid out by a tool whose work strip would undo.
    own = [path for path in packages.rglob("*.so*") if not path.is_symlink() and ".libs" not in str(path)]
    if own:
        subprocess.run(["strip", "--strip-unneeded", *own], check=True)
    return bool(own)


if __name__ == "__main__" and trim(Path(sysconfig.get_path("purelib"))):
    for module in IMPORTED:
        importlib.import_module(module)
