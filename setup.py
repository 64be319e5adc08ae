"""What pyproject.toml cannot say: which packages there are.

`m2po_megatron/kernels` is a symlink to the top-level `kernels/`, which has no `__init__.py`, so that no import name
`kernels` is taken (Hugging Face publishes a package of that name). It is found as a namespace package; wheel and sdist
hold its files themselves.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["m2po_megatron", "m2po_megatron.*"]),
    package_data={"m2po_megatron.kernels": ["*.md"]},
)
